"""Breakdown of step time: stages, idle devices, overlap, memory, critical path."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from otel_train.datamodel import NS_PER_S
from otel_train.trace_analysis import intervals
from otel_train.trace_analysis.events import EventKind
from otel_train.trace_analysis.hot_spots import by_name
from otel_train.trace_analysis.intervals import Intervals

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from otel_train.trace_analysis.timeline import TraceTimeline

    Ints = NDArray[np.int64]
    Flags = NDArray[np.bool_]


MOST_POINTS = 500
"""Points of a memory timeline at most. Each is the maximum of its interval, so that no peak is lost."""

_DEVICE_TYPES = (
    "cpu", "cuda", "mkldnn", "opengl", "opencl", "ideep", "hip", "fpga", "maia", "xla", "vulkan", "metal", "xpu", "mps", "meta",
    "hpu", "ve", "lazy", "ipu", "mtia", "privateuseone",
)  # fmt: skip
"""Names of the device types of torch, by number. Source: ``c10/core/DeviceType.h``."""

PEAKS = 5  # peaks listed for a device
MOST_LISTED = 10  # longest gaps of a device, and kernels of the critical path, that are listed


def allocations(timeline: TraceTimeline) -> list[dict[str, Any]]:
    """Returns peaks and timeline of the allocated memory of each device; empty if the trace has no memory events.

    A peak is the maximum within one step; the highest come first. A trace without steps has one peak.
    """
    memory = timeline.trace.memory
    known = memory.allocated >= 0
    found = []
    devices = zip(memory.device_type[known].tolist(), memory.device_id[known].tolist(), strict=True)
    for device_type, device_id in sorted(set(devices)):
        rows = np.flatnonzero(known & (memory.device_type == device_type) & (memory.device_id == device_id))
        rows = rows[np.argsort(memory.at_ns[rows], kind="stable")]
        at, allocated, reserved = memory.at_ns[rows], memory.allocated[rows], memory.reserved[rows]
        found.append(
            {
                "device": _device_name(device_type, device_id),
                "peaks": _peaks(timeline, at, allocated, reserved),
                "timeline": _timeline(at, allocated),
                "allocations": int((memory.change[rows] > 0).sum()),
                "step_end_bytes": _step_ends(timeline, at, allocated),
            }
        )
    return found


def _device_name(device_type: int, device_id: int) -> str:
    """Returns the name of a device as in torch; with the number of its type if that is unknown."""
    if device_type == 0:
        return "cpu"
    known = device_type < len(_DEVICE_TYPES)
    return f"{_DEVICE_TYPES[device_type] if known else f'device type {device_type}'}:{device_id}"


def _peaks(timeline: TraceTimeline, at: Ints, allocated: Ints, reserved: Ints) -> list[dict[str, Any]]:
    step = timeline.step_of(at) if timeline.steps.counted else np.full(at.shape, -1)
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


def _step_ends(timeline: TraceTimeline, at: Ints, allocated: Ints) -> list[int]:
    """Returns the allocated bytes at the end of each step that has a memory event."""
    if not timeline.steps.counted:
        return []
    place = np.searchsorted(at, timeline.steps.end_ns, side="right")
    first = np.searchsorted(at, timeline.steps.start_ns, side="left")
    return [int(size) for size in allocated[place[place > first] - 1]]


def _timeline(at: Ints, allocated: Ints) -> list[list[float]]:
    """Returns at most ``MOST_POINTS`` pairs of [seconds, bytes]."""
    starts = np.unique(np.linspace(0, at.size, min(at.size, MOST_POINTS), endpoint=False).astype(np.int64))
    highest = np.maximum.reduceat(allocated, starts)
    return [[float(second), int(size)] for second, size in zip(at[starts] / NS_PER_S, highest, strict=True)]


OTHER = "other"
MOST_STEPS = 1000
"""Steps listed one by one at most; sums are over all steps."""


def breakdown(timeline: TraceTimeline) -> dict[str, Any]:
    """Returns host and device seconds of every stage, over all steps and step by step.

    Host seconds are those in which the stage was the innermost one; with ``other``, the time in no stage, they
    add up to ``seconds``, the length of the steps. Device seconds are the durations of what the stage launched, whenever it
    ran. Kernels of several streams run at once, so device seconds may add up to more than ``seconds``.
    """
    steps, stages = timeline.steps, timeline.stages
    window = steps.start_ns, steps.end_ns
    length = steps.end_ns - steps.start_ns
    host = {name: intervals.covered(parts, *window) for name, parts in stages.own.items()}
    host[OTHER] = length - sum(host.values(), np.zeros(length.size, np.int64))
    device = _device_by_stage(timeline)
    whole = int(length.sum())
    data_ns = intervals.covered(stages.data, *window)
    return {
        "steps": int(steps.number.size) if steps.counted else None,
        "seconds": whole / NS_PER_S,
        "step_seconds": _spread(length) if steps.counted else None,
        "guessed": stages.guessed,
        "optimizer": _optimizer(timeline),
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
        "by_step": _by_step(timeline, host) if steps.counted else [],
    }


def temporal(timeline: TraceTimeline) -> dict[str, float] | None:
    """Splits the time from the first to the last device event into compute, other work and idle, in seconds and shares.

    Source: "temporal breakdown" of HolisticTraceAnalysis; the three add up to ``seconds``.
    """
    busy = timeline.busy
    if not busy.start_ns.size:
        return None
    whole = int(busy.end_ns[-1] - busy.start_ns[0])
    compute = timeline.compute.total_ns
    parts = {"compute": compute, "other": busy.total_ns - compute, "idle": whole - busy.total_ns}
    return {
        "seconds": whole / NS_PER_S,
        **{f"{name}_seconds": part / NS_PER_S for name, part in parts.items()},
        **{f"{name}_share": part / whole for name, part in parts.items()},
    }


def _device_by_stage(timeline: TraceTimeline) -> Mapping[str, float]:
    """Returns the seconds of device work of the steps by the stage that was open when it was launched."""
    launched = timeline.launches
    known = (launched.row >= 0) & timeline.in_steps
    if not known.any():
        return {}
    at, dur = launched.start_ns[known], timeline.trace.spans.dur_ns[timeline.device[known]]
    own = timeline.stages.own.items()
    return {name: int(dur[intervals.contains(parts, at)].sum()) / NS_PER_S for name, parts in own}


_UPDATES = (
    ("fused", re.compile(r"aten::_fused_(?:ada|sgd)")),
    ("foreach", re.compile("aten::_foreach_")),
    ("single", re.compile(r"aten::(?:add|sub|mul|div|lerp|addcmul|addcdiv)_\Z")),
)


def _optimizer(timeline: TraceTimeline) -> str | None:
    """Returns how the optimizer updates: ``fused``, ``foreach`` (many tensors at once) or ``single``; None if unknown.

    A compiled update, or one of another library's kernels, has no such operator.
    """
    trace, stage = timeline.trace, timeline.stages.own.get("optimizer", intervals.NOTHING)
    rows = trace.rows(EventKind.OP)
    codes = np.unique(trace.spans.name[rows[intervals.contains(stage, trace.spans.start_ns[rows])]])
    names = [trace.names[code] for code in codes.tolist()]
    return next((how for how, operator in _UPDATES if any(map(operator.match, names))), None)


def _by_step(timeline: TraceTimeline, host: Mapping[str, Ints]) -> list[dict[str, Any]]:
    steps = timeline.steps
    busy = intervals.covered(timeline.busy, steps.start_ns, steps.end_ns)
    has_device = bool(timeline.device.size)
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
    low, middle, high = (np.quantile(length, (0.0, 0.5, 1.0)) / NS_PER_S).tolist()
    return {"min": low, "median": middle, "max": high, "mean": float(length.mean()) / NS_PER_S}


SLACK_NS = 20_000
"""Longest time from the end of the last kernel to the return of a call that waited for it. The call takes some 10 us to return."""


def idle(timeline: TraceTimeline) -> dict[str, Any] | None:
    """Returns the idle time of the device within the steps, by cause; None if nothing ran on a device, or the steps have no length.

    A gap is an interval within the steps in which no kernel or copy ran. Each instant of a gap has one cause:

    - ``data``: the next kernel was not launched yet, and the training thread was waiting for a batch;
    - ``sync``: the next kernel was not launched yet, because the host was waiting for the device when the gap began: the
      device's queue was empty, and the host had to fill it again;
    - ``host``: the next kernel was not launched yet, and the host was busy with something else;
    - ``kernel_gap``: the next kernel was launched, and the device had not begun it: other streams, dependencies, latency.

    The four add up to ``seconds``.
    """
    within, data = timeline.within, timeline.stages.data
    if not (timeline.device.size and within.total_ns):
        return None
    gaps = intervals.gaps(timeline.busy, int(within.start_ns[0]), int(within.end_ns[-1]))
    length = intervals.covered(within, gaps.start_ns, gaps.end_ns)
    gaps, length = Intervals(gaps.start_ns[length > 0], gaps.end_ns[length > 0]), length[length > 0]
    # In each gap, when the launch of the next kernel returned.
    launched = np.clip(_next_launch(timeline, gaps), gaps.start_ns, gaps.end_ns)
    data_ns = intervals.covered(intervals.intersect(data, within), gaps.start_ns, launched)
    rest_ns = intervals.covered(within, gaps.start_ns, launched) - data_ns
    drained = _drained(timeline, gaps)
    by_cause = {
        "data": data_ns,
        "sync": np.where(drained, rest_ns, 0),
        "host": np.where(drained, 0, rest_ns),
        "kernel_gap": intervals.covered(within, launched, gaps.end_ns),
    }
    idle_ns, whole = int(length.sum()), within.total_ns
    return {
        "seconds": idle_ns / NS_PER_S,
        "share": idle_ns / whole,
        "causes": {
            name: {
                "seconds": int(part.sum()) / NS_PER_S,
                "share": int(part.sum()) / whole,
                "gaps": int((part > 0).sum()),
            }
            for name, part in by_cause.items()
        },
        "longest": _longest(timeline, gaps, length, by_cause),
    }


def _next_launch(timeline: TraceTimeline, found: Intervals) -> Ints:
    """Returns when the launch of the kernel after each gap returned.

    A kernel without a known launch counts as launched before the gap. In a gap after the last kernel, none was launched.
    """
    spans, rows = timeline.trace.spans, timeline.device
    place = np.searchsorted(spans.start_ns[rows], found.end_ns)
    has_next = place < rows.size
    launch_end_ns = timeline.launches.end_ns[np.minimum(place, rows.size - 1)]
    return np.where(has_next, np.where(launch_end_ns >= 0, launch_end_ns, found.start_ns), found.end_ns)


def _drained(timeline: TraceTimeline, found: Intervals) -> Flags:
    """Returns whether the host was waiting for the device when each gap began."""
    rows, spans = timeline.synchronizing, timeline.trace.spans
    if not rows.size:
        return np.zeros(found.start_ns.size, np.bool_)
    place = np.searchsorted(spans.start_ns[rows], found.start_ns, side="right") - 1
    row = rows[np.maximum(place, 0)]
    end = spans.end_ns[row]
    waited: Flags = (place >= 0) & (end >= found.start_ns) & (end <= found.start_ns + SLACK_NS)
    return waited


def _longest(
    timeline: TraceTimeline, found: Intervals, length: Ints, by_cause: dict[str, Ints]
) -> list[dict[str, Any]]:
    order = np.argsort(-length, kind="stable")[:MOST_LISTED]
    step = timeline.step_of(found.start_ns[order])
    return [
        {
            "start_seconds": int(found.start_ns[place]) / NS_PER_S,
            "seconds": int(length[place]) / NS_PER_S,
            "cause": max(by_cause, key=lambda name: int(by_cause[name][place])),
            "step": int(step[number]) if timeline.steps.counted and step[number] >= 0 else None,
        }
        for number, place in enumerate(order.tolist())
    ]


def overlap(timeline: TraceTimeline) -> dict[str, Any] | None:
    """Returns the time in collectives, and how much of it no compute kernel overlaps; None if no collective ran.

    ``overlap_share`` is the share of the communication time in which a compute kernel runs. The rest is exposed: the
    device does nothing else, except copies.

    Source: "communication computation overlap" of HolisticTraceAnalysis.
    """
    communication = timeline.communication
    total = communication.total_ns
    if not total:
        return None
    hidden = intervals.intersect(communication, timeline.compute).total_ns
    within = timeline.within
    exposed = intervals.intersect(intervals.subtract(communication, timeline.compute), within).total_ns
    rows = timeline.device[timeline.communicates]
    spans = timeline.trace.spans
    kinds = by_name(spans.collective[rows], spans.dur_ns[rows])
    return {
        "seconds": total / NS_PER_S,
        "hidden_seconds": hidden / NS_PER_S,
        "exposed_seconds": (total - hidden) / NS_PER_S,
        "overlap_share": hidden / total,
        "exposed_share_of_steps": exposed / within.total_ns if exposed else 0.0,
        "collectives": [{**row, "name": timeline.trace.names[row["name"]] or "unnamed"} for row in kinds],
    }


HOST = "host"
LAUNCH = "launch"  # from the end of a launch to the start of its kernel
SYNC = "sync"  # from the end of the last kernel to the return of the call that waits for it
GAP = "kernel_gap"  # from one kernel to the next, both launched
COMPUTE, COMMUNICATION, COPY = "compute", "communication", "copy"


class PathSegment(NamedTuple):
    """A segment of the critical path."""

    what: str
    start_ns: int
    end_ns: int
    row: int = -1  # of the kernel or copy in ``Trace.spans``; -1 for other segments


def critical_path(timeline: TraceTimeline) -> dict[str, Any] | None:
    """Returns the critical path of the median step.

    It is searched backwards from the end of the step: along the host to the last call that waited for the device, then
    along the device, from each kernel to the one that ended last before it, or to its launch if that returned later. From a
    launch the search goes on along the host. Dependencies between streams are inferred from times, since traces do not
    contain them. The segments add up to the step.
    """
    steps = timeline.steps
    if not timeline.trace.spans.name.size:
        return None
    length = steps.end_ns - steps.start_ns
    place = int(np.argsort(length, kind="stable")[(length.size - 1) // 2])
    start, end = int(steps.start_ns[place]), int(steps.end_ns[place])
    segments = list(_PathSearch(timeline, start).back_from(end))
    sums = Counter[str]()
    for segment in segments:
        sums[segment.what] += segment.end_ns - segment.start_ns
    return {
        "step": int(steps.number[place]) if steps.counted else None,
        "seconds": (end - start) / NS_PER_S,
        "parts": {what: ns / NS_PER_S for what, ns in sums.most_common() if ns},
        "kernels": _kernels(timeline, segments),
        "host_stages": _host_stages(timeline, segments),
    }


class _PathSearch:
    """Follows the critical path backwards within one step."""

    def __init__(self, timeline: TraceTimeline, start: int) -> None:
        spans, device = timeline.trace.spans, timeline.device
        self._start = start
        ends = spans.end_ns[device]
        order = np.argsort(ends, kind="stable")
        self._rows, self._ends = device[order], ends[order]
        self._begins = spans.start_ns[self._rows]
        self._launched = timeline.launches.end_ns[order]
        what = np.where(timeline.communicates, 1, np.where(timeline.copies, 2, 0))
        self._what = what[order]
        self._sync_start = spans.start_ns[timeline.synchronizing]
        self._sync_end = np.maximum.accumulate(spans.end_ns[timeline.synchronizing])

    def back_from(self, end: int) -> Iterator[PathSegment]:
        """Yields the segments from ``end`` to the start of the step, the last one first."""
        at, sync, kernel = end, self._sync_end.size, self._rows.size
        while at > self._start:
            sync = min(sync, int(np.searchsorted(self._sync_end, at, side="right"))) - 1
            if sync < 0 or self._sync_end[sync] <= self._start:
                yield PathSegment(HOST, self._start, at)
                return
            called, returned = int(self._sync_start[sync]), int(self._sync_end[sync])
            last = min(kernel, int(np.searchsorted(self._ends, returned, side="right"))) - 1
            if last < 0 or self._ends[last] <= max(called, self._start):
                began = max(called, self._start)
                yield PathSegment(HOST, began, at)
                at = began
                continue
            yield PathSegment(HOST, returned, at)
            yield PathSegment(SYNC, int(self._ends[last]), returned)
            for segment in self._on_device(last):
                yield segment
                at = segment.start_ns
            kernel = last

    def _on_device(self, place: int) -> Iterator[PathSegment]:
        """Yields the segments on the device, back to a launch or to the start of the step."""
        while True:
            begun, ended = int(self._begins[place]), int(self._ends[place])
            what = (COMPUTE, COMMUNICATION, COPY)[self._what[place]]
            yield PathSegment(what, max(begun, self._start), ended, int(self._rows[place]))
            if begun <= self._start:
                return
            before = min(place, int(np.searchsorted(self._ends, begun, side="right"))) - 1
            free = int(self._ends[before]) if before >= 0 else -1
            launched = min(int(self._launched[place]), begun)
            if max(free, launched) <= self._start:
                yield PathSegment(GAP, self._start, begun)
                return
            if launched > free:
                yield PathSegment(LAUNCH, launched, begun)
                return
            yield PathSegment(GAP, free, begun)
            place = before


def _kernels(timeline: TraceTimeline, links: list[PathSegment]) -> list[dict[str, Any]]:
    sums = defaultdict[str, list[int]](list)
    for segment in links:
        if segment.row >= 0:
            sums[timeline.name(segment.row)].append(segment.end_ns - segment.start_ns)
    ranked = sorted(sums.items(), key=lambda item: -sum(item[1]))[:MOST_LISTED]
    return [{"name": name, "count": len(spent), "seconds": sum(spent) / NS_PER_S} for name, spent in ranked]


def _host_stages(timeline: TraceTimeline, links: list[PathSegment]) -> dict[str, float]:
    """Returns the seconds of the host segments by the stage that was open."""
    spent = [(segment.start_ns, segment.end_ns) for segment in links if segment.what == HOST]
    host = intervals.union(*zip(*spent, strict=True)) if spent else intervals.NOTHING
    found = {name: intervals.intersect(host, parts).total_ns for name, parts in timeline.stages.own.items()}
    found[OTHER] = host.total_ns - sum(found.values())
    return {name: ns / NS_PER_S for name, ns in found.items() if ns}
