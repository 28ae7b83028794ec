"""Which operators the host spends its time in."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from otel_train.analyze.tables import by_name
from otel_train.analyze.trace import Kind

if TYPE_CHECKING:
    from otel_train.analyze.scene import Scene


def top_ops(scene: Scene, *, most: int = 10) -> list[dict[str, Any]]:
    """Operators of the host, by the time spent in them and in no operator below.

    Calls of the CUDA runtime count to the operator that makes them, unless they wait for the device.
    ``seconds`` is self time, ``total_seconds`` the time from begin to end; an operator that calls itself
    directly counts once. ``share`` is of the self time of all operators.
    """
    calls, spans = scene.calls, scene.trace.spans
    kind = scene.trace.kind[calls.row]
    self_ns = calls.self_ns.copy()
    launching = (kind == Kind.RUNTIME) & (calls.parent >= 0) & ~np.isin(calls.row, scene.synchronizing)
    np.add.at(self_ns, calls.parent[launching], calls.self_ns[launching])
    ops = np.flatnonzero(kind == Kind.OP)
    name = spans.name[calls.row]
    outer = calls.parent[ops]
    again = (outer >= 0) & (name[np.maximum(outer, 0)] == name[ops])
    total_ns = np.where(again, 0, (calls.end_ns - spans.start_ns[calls.row])[ops])
    rows = by_name(name[ops], self_ns[ops], most=most, more={"total_seconds": total_ns})
    return [{**row, "name": scene.trace.names[row["name"]]} for row in rows]
