"""Why the device does nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from otel_train.analyze import intervals
from otel_train.clock import NS_PER_S

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from otel_train.analyze.intervals import Intervals
    from otel_train.analyze.scene import Scene

    Ints = NDArray[np.int64]
    Flags = NDArray[np.bool_]

CAUSES = ("data", "sync", "host", "kernel_gap")
"""In the order in which they are told apart; what a gap means is in ``idle``."""

SLACK_NS = 20_000
"""A wait for the device that ends no later than this after it fell idle has drained it: the call takes some 10 us to return."""

_LONGEST = 10


def idle(scene: Scene) -> dict[str, Any] | None:
    """Idle time of the device within the steps, by its cause; None where nothing ran on a device.

    A gap is an interval in which nothing ran. Each instant of it has one cause:

    - ``data``: the training thread was waiting for a batch, and the kernel that ends the gap was not launched yet;
    - ``sync``: likewise not launched, because the host had waited until the device was done, and then had to begin
      filling its queue anew;
    - ``host``: likewise not launched, the host being busy with something else;
    - ``kernel_gap``: it was launched, and the device took that long to begin it: other streams, dependencies, latency.

    The four add up to ``seconds``.
    """
    if not scene.device.size:
        return None
    start, end = scene.window
    found = intervals.gaps(scene.busy, start, end)
    launched = _next_launch(scene, found)
    late = np.clip(
        launched, found.start_ns, found.end_ns
    )  # until here the next kernel had not been asked for
    data_ns = intervals.covered(scene.stages.data, found.start_ns, late)
    rest_ns = late - found.start_ns - data_ns
    drained = _drained(scene, found)
    by_cause = {
        "data": data_ns,
        "sync": np.where(drained, rest_ns, 0),
        "host": np.where(drained, 0, rest_ns),
        "kernel_gap": found.end_ns - late,
    }
    total = found.total_ns
    return {
        "seconds": total / NS_PER_S,
        "share": total / (end - start) if end > start else 0.0,
        "causes": {
            name: {
                "seconds": int(part.sum()) / NS_PER_S,
                "share": int(part.sum()) / (end - start) if end > start else 0.0,
                "gaps": int((part > 0).sum()),
            }
            for name, part in by_cause.items()
        },
        "longest": _longest(scene, found, by_cause),
    }


def _next_launch(scene: Scene, found: Intervals) -> Ints:
    """When the launch of the kernel that ends each gap returned.

    Where the trace does not say, the gap is taken for one in the device's queue; a gap that no kernel ends is the host's.
    """
    spans, rows = scene.trace.spans, scene.device
    place = np.searchsorted(spans.start_ns[rows], found.end_ns)
    ends = place < rows.size
    known = scene.launches.end_ns[np.minimum(place, rows.size - 1)]
    return np.where(ends, np.where(known >= 0, known, found.start_ns), found.end_ns)


def _drained(scene: Scene, found: Intervals) -> Flags:
    """Whether the host was waiting for the device when each gap began."""
    rows, spans = scene.synchronizing, scene.trace.spans
    if not rows.size:
        return np.zeros(found.start_ns.size, np.bool_)
    place = np.searchsorted(spans.start_ns[rows], found.start_ns, side="right") - 1
    row = rows[np.maximum(place, 0)]
    end = spans.end_ns[row]
    waited: Flags = (place >= 0) & (end >= found.start_ns) & (end <= found.start_ns + SLACK_NS)
    return waited


def _longest(scene: Scene, found: Intervals, by_cause: dict[str, Ints]) -> list[dict[str, Any]]:
    length = found.end_ns - found.start_ns
    order = np.argsort(-length, kind="stable")[:_LONGEST]
    step = scene.step_of(found.start_ns[order])
    return [
        {
            "start_seconds": int(found.start_ns[place]) / NS_PER_S,
            "seconds": int(length[place]) / NS_PER_S,
            "cause": max(CAUSES, key=lambda name: int(by_cause[name][place])),
            "step": int(step[number]) if scene.steps.counted and step[number] >= 0 else None,
        }
        for number, place in enumerate(order.tolist())
    ]
