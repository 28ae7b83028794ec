"""How much memory was allocated, when."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from otel_train.clock import NS_PER_S

if TYPE_CHECKING:
    from otel_train.analyze.scene import Scene

MOST_POINTS = 500
"""Points of a timeline; each stands for the highest of its neighbourhood, so that a peak is never lost."""

PEAKS = 5


def allocations(scene: Scene) -> list[dict[str, Any]]:
    """Per device, the peaks and the timeline of allocated memory; empty where the trace does not say.

    A peak is the highest point of one step, the highest first. Without steps there is one.
    """
    told = scene.trace.memory
    said = told.allocated >= 0
    found = []
    for device_type, device_id in sorted(
        {*zip(told.device_type[said].tolist(), told.device_id[said].tolist(), strict=True)}
    ):
        here = np.flatnonzero(said & (told.device_type == device_type) & (told.device_id == device_id))
        here = here[np.argsort(told.at_ns[here], kind="stable")]
        at, allocated, reserved = told.at_ns[here], told.allocated[here], told.reserved[here]
        found.append(
            {
                "device": "cpu" if device_type == 0 else f"cuda:{device_id}",
                "peaks": _peaks(scene, at, allocated, reserved),
                "timeline": _timeline(at, allocated),
                "allocations": int((told.change[here] > 0).sum()),
                "step_end_bytes": _step_ends(scene, at, allocated),
            }
        )
    return found


def _peaks(scene: Scene, at: Any, allocated: Any, reserved: Any) -> list[dict[str, Any]]:  # Any: int64[event]
    step = scene.step_of(at) if scene.steps.counted else np.full(at.shape, -1)
    order = np.argsort(-allocated, kind="stable")
    _, first = np.unique(step[order], return_index=True)
    return [
        {
            "time_seconds": int(at[place]) / NS_PER_S,
            "bytes": int(allocated[place]),
            "reserved_bytes": int(reserved[place]) if reserved[place] > 0 else None,
            "step": int(step[place]) if step[place] >= 0 else None,
        }
        for place in order[np.sort(first)][:PEAKS].tolist()
    ]


def _step_ends(scene: Scene, at: Any, allocated: Any) -> list[int]:  # Any: int64[event]
    """Bytes allocated at the end of every step in which something was allocated."""
    if not scene.steps.counted:
        return []
    place = np.searchsorted(at, scene.steps.end_ns, side="right")
    first = np.searchsorted(at, scene.steps.start_ns, side="left")
    return [int(size) for size in allocated[place[place > first] - 1]]


def _timeline(at: Any, allocated: Any) -> list[list[float]]:  # Any: int64[event]
    """[seconds, bytes] pairs."""
    starts = np.unique(np.linspace(0, at.size, min(at.size, MOST_POINTS), endpoint=False).astype(np.int64))
    highest = np.maximum.reduceat(allocated, starts)
    return [[float(second), int(size)] for second, size in zip(at[starts] / NS_PER_S, highest, strict=True)]
