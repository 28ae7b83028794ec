"""How much of the communication hides behind computation."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from otel_train.analyze import intervals
from otel_train.analyze.tables import by_name
from otel_train.clock import NS_PER_S

if TYPE_CHECKING:
    from otel_train.analyze.scene import Scene


def overlap(scene: Scene) -> dict[str, Any] | None:
    """Communication, and what of it nothing hides; None where no collective ran.

    ``overlap_share`` is the share of the time of communication in which a kernel computes. The rest is exposed:
    the device does nothing else but, at most, copy.

    Source: "communication computation overlap" of HolisticTraceAnalysis.
    """
    communication = scene.communication
    total = communication.total_ns
    if not total:
        return None
    hidden = intervals.intersect(communication, scene.compute).total_ns
    start, end = scene.window
    exposed = intervals.clip(intervals.subtract(communication, scene.compute), start, end).total_ns
    rows = scene.device[scene.communicates]
    spans = scene.trace.spans
    kinds = by_name(spans.collective[rows], spans.dur_ns[rows], most=10, more={})
    return {
        "seconds": total / NS_PER_S,
        "hidden_seconds": hidden / NS_PER_S,
        "exposed_seconds": (total - hidden) / NS_PER_S,
        "overlap_share": hidden / total,
        "exposed_share_of_steps": exposed / (end - start) if end > start else 0.0,
        "collectives": [{**row, "name": scene.trace.names[row["name"]] or "unnamed"} for row in kinds],
    }
