"""Where the time of the steps goes, stage by stage, on the host and on the device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from otel_train.analyze import intervals
from otel_train.clock import NS_PER_S

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from otel_train.analyze.intervals import Intervals
    from otel_train.analyze.scene import Scene

    Ints = NDArray[np.int64]

OTHER = "other"
MOST_STEPS = 1000
"""Steps listed one by one; all are in the sums."""


def breakdown(scene: Scene) -> dict[str, Any]:
    """Host and device seconds of every stage, over all steps and step by step.

    Host seconds are those in which the stage was the innermost one; with ``other``, the time in no stage, they
    add up to ``seconds``, the length of the steps. Device seconds are those of the work that the stage launched,
    whenever that ran; they may overlap and do not add up to anything.
    """
    steps, stages = scene.steps, scene.stages
    length = steps.end_ns - steps.start_ns
    host = {
        name: intervals.covered(parts, steps.start_ns, steps.end_ns) for name, parts in stages.own.items()
    }
    host[OTHER] = length - sum(host.values(), np.zeros(length.size, np.int64))
    device = _device_by_stage(scene)
    whole = int(length.sum())
    data_ns = intervals.covered(stages.data, steps.start_ns, steps.end_ns)
    return {
        "steps": int(steps.number.size) if steps.counted else None,
        "seconds": whole / NS_PER_S,
        "step_seconds": _spread(length) if steps.counted else None,
        "guessed": stages.guessed,
        "optimizer": _optimizer(scene),
        "data_share": int(data_ns.sum()) / whole if whole and (stages.own or stages.data.total_ns) else None,
        "stages": [
            {
                "stage": name,
                "count": stages.runs.get(name),
                "seconds": int(part.sum()) / NS_PER_S,
                "share": int(part.sum()) / whole if whole else 0.0,
                "device_seconds": device.get(name),
            }
            for name, part in host.items()
        ],
        "by_step": _by_step(scene, host) if steps.counted else [],
    }


def temporal(scene: Scene) -> dict[str, float] | None:
    """From the first to the last thing on the device: computing, busy with something else, idle. Seconds and shares.

    Source: "temporal breakdown" of HolisticTraceAnalysis; the three add up to ``seconds``.
    """
    busy = scene.busy
    if not busy.start_ns.size:
        return None
    whole = int(busy.end_ns[-1] - busy.start_ns[0])
    compute = scene.compute.total_ns
    parts = {"compute": compute, "other": busy.total_ns - compute, "idle": whole - busy.total_ns}
    return {
        "seconds": whole / NS_PER_S,
        **{f"{name}_seconds": part / NS_PER_S for name, part in parts.items()},
        **{f"{name}_share": part / whole for name, part in parts.items()},
    }


def _device_by_stage(scene: Scene) -> Mapping[str, float]:
    """Seconds of device work by the stage that was open when it was launched."""
    launched = scene.launches
    known = launched.row >= 0
    if not known.any():
        return {}
    at, dur = launched.start_ns[known], scene.trace.spans.dur_ns[scene.device[known]]
    return {
        name: int(dur[intervals.contains(parts, at)].sum()) / NS_PER_S
        for name, parts in scene.stages.own.items()
    }


def _optimizer(scene: Scene) -> str | None:
    """How the optimizer updates: ``fused``, ``foreach`` (many tensors at once) or ``single``; None if none was seen."""
    names = [
        name
        for name in scene.trace.names
        if name.startswith(("aten::_foreach_", "aten::_fused_adam", "aten::_fused_sgd"))
    ]
    if "optimizer" not in scene.stages.own:
        return None
    if any("_fused_" in name for name in names):
        return "fused"
    return "foreach" if names else "single"


def _by_step(scene: Scene, host: Mapping[str, Ints]) -> list[dict[str, Any]]:
    steps = scene.steps
    busy = intervals.covered(scene.busy, steps.start_ns, steps.end_ns)
    has_device = bool(scene.device.size)
    return [
        {
            "step": int(steps.number[place]),
            "start_seconds": int(steps.start_ns[place]) / NS_PER_S,
            "seconds": int(steps.end_ns[place] - steps.start_ns[place]) / NS_PER_S,
            "device_busy_seconds": int(busy[place]) / NS_PER_S if has_device else None,
            "stages": {name: int(part[place]) / NS_PER_S for name, part in host.items()},
        }
        for place in range(min(steps.number.size, MOST_STEPS))
    ]


def _spread(length: Ints) -> dict[str, float]:
    low, middle, high = np.quantile(length, (0.0, 0.5, 1.0)) / NS_PER_S
    return {
        "min": float(low),
        "median": float(middle),
        "max": float(high),
        "mean": float(length.mean()) / NS_PER_S,
    }


def within(these: Intervals, scene: Scene) -> float:
    """Seconds of a set of instants that lie within the steps."""
    return intervals.clip(these, *scene.window).total_ns / NS_PER_S
