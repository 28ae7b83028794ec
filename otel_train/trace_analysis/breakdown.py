"""Where the time of steps goes: stages, idle devices, overlap, memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from otel_train.datamodel import NS_PER_S
from otel_train.trace_analysis import intervals
from otel_train.trace_analysis.hot_spots import by_name

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from otel_train.trace_analysis.intervals import Intervals
    from otel_train.trace_analysis.timeline import Scene

    Ints = NDArray[np.int64]
    Flags = NDArray[np.bool_]


MOST_POINTS = 500
"""Points of a timeline; each stands for the highest of its neighbourhood, so that a peak is never lost."""

PEAKS = 5


def allocations(scene: Scene) -> list[dict[str, Any]]:
    """Per device, the peaks and the timeline of allocated memory; empty where the trace does not say.

    A peak is the highest point of one step, the highest first. Without steps there is one.
    """
    memory = scene.trace.memory
    said = memory.allocated >= 0
    found = []
    for device_type, device_id in sorted(
        {*zip(memory.device_type[said].tolist(), memory.device_id[said].tolist(), strict=True)}
    ):
        here = np.flatnonzero(said & (memory.device_type == device_type) & (memory.device_id == device_id))
        here = here[np.argsort(memory.at_ns[here], kind="stable")]
        at, allocated, reserved = memory.at_ns[here], memory.allocated[here], memory.reserved[here]
        found.append(
            {
                "device": "cpu" if device_type == 0 else f"cuda:{device_id}",
                "peaks": _peaks(scene, at, allocated, reserved),
                "timeline": _timeline(at, allocated),
                "allocations": int((memory.change[here] > 0).sum()),
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


CAUSES = ("data", "sync", "host", "kernel_gap")
"""Checked in this order; what a gap means is in ``idle``."""

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
