"""Steps, stages and launches of a trace."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from otel_train.datamodel import RANGE_PREFIX
from otel_train.trace_analysis import intervals
from otel_train.trace_analysis.events import EventKind, Trace
from otel_train.trace_analysis.intervals import NOTHING, Intervals

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Ints = NDArray[np.int64]
    Rows = NDArray[np.intp]
    Flags = NDArray[np.bool_]


class Calls(NamedTuple):
    """Events of the host as calls, thread by thread, in order of their start."""

    row: Rows  # in ``Trace.spans``
    parent: Rows  # index of the call around it; -1 for an outermost call
    end_ns: Ints  # never after the end of its parent
    self_ns: Ints  # without the calls inside it


def _calls(trace: Trace) -> Calls:
    """Returns the calls of all threads of the host, without Python functions."""
    spans = trace.spans
    rows = trace.rows(EventKind.OP, EventKind.ANNOTATION, EventKind.RUNTIME)
    rows = rows[spans.stream[rows] < 0]
    # Of two calls that begin at the same instant, the longer one is the parent.
    rows = rows[np.lexsort((-spans.dur_ns[rows], spans.start_ns[rows], spans.lane[rows]))]
    start, end, lane = spans.start_ns[rows], spans.end_ns[rows], spans.lane[rows]
    parent = np.full(rows.size, -1, np.intp)
    cuts = np.append(np.flatnonzero(np.append(True, lane[1:] != lane[:-1])), rows.size) if rows.size else [0]
    for first, last in pairwise(cuts):
        inner, clamped = _nested(start[first:last], end[first:last])
        parent[first:last] = np.where(inner < 0, -1, inner + first)
        end[first:last] = clamped
    within = parent >= 0
    inside_ns = np.zeros(rows.size, np.int64)
    np.add.at(inside_ns, parent[within], (end - start)[within])
    return Calls(rows, parent, end, end - start - inside_ns)


def _nested(start: Ints, end: Ints) -> tuple[Rows, Ints]:
    """Returns the parents of the calls of one thread, and their ends, at most those of the parents: timestamps are rounded."""
    parents, ends = [], end.tolist()
    open_: list[int] = []
    for number, begun in enumerate(start.tolist()):
        while open_ and ends[open_[-1]] <= begun:
            open_.pop()
        outer = open_[-1] if open_ else -1
        if outer >= 0:
            ends[number] = min(ends[number], ends[outer])
        parents.append(outer)
        open_.append(number)
    return np.array(parents, np.intp), np.array(ends, np.int64)


_STEP = re.compile(r"ProfilerStep#(\d{1,18})\Z")  # fits in int64
_FETCH = re.compile(r"enumerate\(DataLoader\)#")
_GUESSED: tuple[tuple[str, EventKind, re.Pattern[str]], ...] = (
    ("data", EventKind.ANNOTATION, _FETCH),
    ("optimizer", EventKind.ANNOTATION, re.compile(r"Optimizer\.step#")),
    ("backward", EventKind.OP, re.compile(r"autograd::engine::evaluate_function: ")),
)
"""Stages by the names of PyTorch's own ranges. Forward has none."""

COMMUNICATION = re.compile(r"(?:nccl|rccl).*Kernel|ncclDevKernel")
GLOO = "gloo:"
"""Prefix of the ranges of collectives on the host, which last from the call on this rank until all ranks have joined."""

COPY = re.compile(r"Memcpy|Memset|dma")
"""Collectives and copies by the beginning of their names. Source: ``hta/utils/utils.py`` of HolisticTraceAnalysis 0.5."""

SYNCHRONIZE = re.compile(
    r"(?:(?:cuda|hip)(?:\w*Synchronize|Memcpy)|hipMemcpyWithStream|cu(?:Stream|Ctx|Event)Synchronize"
    r"|ur(?:QueueFinish|EventWait)|ze\w+HostSynchronize)\Z"
)
"""Calls of runtime and driver that block until the device has finished."""


class Launches(NamedTuple):
    """The launch of each device row; -1 if the trace does not have it."""

    row: Rows
    start_ns: Ints  # when the launch was called
    end_ns: Ints  # when that call returned


class ScheduleSteps(NamedTuple):
    """Steps of the profiler's schedule, in order."""

    number: Ints  # as the profiler counts them
    start_ns: Ints
    end_ns: Ints
    counted: bool  # whether the trace has steps; if not, the whole trace is one


class Stages(NamedTuple):
    """Stages of the training thread."""

    own: Mapping[str, Intervals]  # by stage, the instants at which it was the innermost one
    runs: Mapping[str, int]  # by stage, how often it ran in the steps
    guessed: bool  # whether PyTorch's ranges were used, where there are no otel_train ranges
    data: Intervals  # waits for a batch, by ranges of otel_train and of PyTorch


@dataclass(frozen=True)
class TraceTimeline:
    """Steps, stages, launches and kernels of one trace, computed on first use."""

    trace: Trace

    @cached_property
    def steps(self) -> ScheduleSteps:
        """The steps; the whole trace as one step if it has none."""
        spans = self.trace.spans
        rows = self.host_rows(EventKind.ANNOTATION, _STEP.match)
        rows = rows[spans.dur_ns[rows] > 0]  # a share of a step without a length is undefined
        if not rows.size:
            end = spans.end_ns.max(initial=0)
            return ScheduleSteps(np.zeros(1, np.int64), np.zeros(1, np.int64), np.array([end]), counted=False)
        number = np.array([int(self.name(row).partition("#")[2]) for row in rows.tolist()], np.int64)
        number, first = np.unique(number, return_index=True)  # some versions write a step once per thread
        return ScheduleSteps(number, spans.start_ns[rows[first]], spans.end_ns[rows[first]], counted=True)

    @cached_property
    def stages(self) -> Stages:
        """Stages of the training thread, by the ranges of otel_train, else by PyTorch's."""
        rows = self.host_rows(EventKind.ANNOTATION, re.compile(RANGE_PREFIX).match)
        rows = rows[self.trace.spans.dur_ns[rows] > 0]
        fetches = self.intervals_of(self.host_rows(EventKind.ANNOTATION, _FETCH.match))
        return self._recorded_stages(rows, fetches) if rows.size else self._guessed_stages(fetches)

    def _recorded_stages(self, rows: Rows, fetches: Intervals) -> Stages:
        spans = self.trace.spans
        lanes, often = np.unique(spans.lane[rows], return_counts=True)
        rows = rows[spans.lane[rows] == lanes[often.argmax()]]  # the training thread
        code = spans.name[rows]
        own = _innermost(spans.start_ns[rows], spans.end_ns[rows], code)
        names = {
            number: self.trace.names[number].removeprefix(RANGE_PREFIX) for number in np.unique(code).tolist()
        }
        found = {names[number]: parts for number, parts in own.items()}
        within = code[intervals.contains(self.within, spans.start_ns[rows])]
        count = {name: int((within == number).sum()) for number, name in names.items()}
        waits = [parts for name, parts in found.items() if name.partition(":")[0] == "data"]
        data = intervals.union(*map(np.concatenate, zip(fetches, *waits, strict=True)))
        if not waits and fetches.start_ns.size:
            found["data"] = intervals.subtract(fetches, self.intervals_of(rows))
            count["data"] = int(fetches.start_ns.size)
        return Stages(found, count, guessed=False, data=data)

    def _guessed_stages(self, fetches: Intervals) -> Stages:
        found, count, taken = {}, {}, NOTHING
        for stage, kind, pattern in _GUESSED:
            rows = self.host_rows(kind, pattern.match)
            parts = intervals.subtract(self.intervals_of(rows), taken)
            if parts.start_ns.size:
                found[stage], count[stage] = parts, int(rows.size)
                taken = intervals.union(*map(np.concatenate, zip(taken, parts, strict=True)))
        return Stages(found, count, guessed=True, data=fetches)

    @cached_property
    def within(self) -> Intervals:
        """Intervals of the steps. The trace may also have an evaluation between two steps."""
        return intervals.union(self.steps.start_ns, self.steps.end_ns)

    @cached_property
    def calls(self) -> Calls:
        """The call tree of the host."""
        return _calls(self.trace)

    @cached_property
    def device(self) -> Rows:
        """Rows of kernels, copies and fills, in order of their start."""
        return self.trace.rows(EventKind.KERNEL, EventKind.COPY)

    @cached_property
    def communicates(self) -> Flags:
        """bool[device row]: whether it is a collective."""
        return self.trace.named(self.device, COMMUNICATION.match)

    @cached_property
    def collectives(self) -> Rows:
        """Rows of collectives, in order of their start: those on the device; without any, those of Gloo on the host."""
        rows = self.device[self.communicates]
        return rows if rows.size else self.host_rows(EventKind.ANNOTATION, re.compile(GLOO).match)

    @cached_property
    def copies(self) -> Flags:
        """bool[device row]: whether it is a copy or a fill."""
        named, kind = self.trace.named(self.device, COPY.match), self.trace.kind[self.device]
        either: Flags = named | (kind == EventKind.COPY)
        return either

    @cached_property
    def computes(self) -> Flags:
        """bool[device row]: whether it is a kernel, and neither a collective nor a copy."""
        return ~(self.communicates | self.copies)

    @cached_property
    def busy(self) -> Intervals:
        """Intervals in which anything ran on the device."""
        return self.intervals_of(self.device)

    @cached_property
    def compute(self) -> Intervals:
        """Intervals in which a compute kernel ran."""
        return self.intervals_of(self.device[self.computes])

    @cached_property
    def communication(self) -> Intervals:
        """Intervals in which a collective ran on the device."""
        return self.intervals_of(self.device[self.communicates])

    @cached_property
    def in_steps(self) -> Flags:
        """bool[device row]: whether it was launched in a step; without a known launch, whether it began in one."""
        launched = self.launches
        at_ns = np.where(launched.row >= 0, launched.start_ns, self.trace.spans.start_ns[self.device])
        return intervals.contains(self.within, at_ns)

    @cached_property
    def launches(self) -> Launches:
        """The launch of each device row."""
        spans, calls = self.trace.spans, self.trace.rows(EventKind.RUNTIME)
        device_ids = spans.correlation[self.device]
        calls = calls[spans.correlation[calls] >= 0]
        if not calls.size:
            return Launches(*np.full((3, device_ids.size), -1))
        calls = calls[np.argsort(spans.correlation[calls], kind="stable")]
        launch_ids = spans.correlation[calls]
        place = np.minimum(np.searchsorted(launch_ids, device_ids), launch_ids.size - 1)
        known = (launch_ids[place] == device_ids) & (device_ids >= 0)
        row = calls[place]
        columns = (row, spans.start_ns[row], spans.end_ns[row])
        return Launches(*(np.where(known, column, -1) for column in columns))

    @cached_property
    def synchronizing(self) -> Rows:
        """Rows of calls that wait for the device, in order of their start."""
        rows = self.trace.rows(EventKind.RUNTIME)
        return rows[self.trace.named(rows, SYNCHRONIZE.match)]

    def host_rows(self, kind: EventKind, matches: Callable[[str], object]) -> Rows:
        """Returns the rows of one kind on the host whose name matches, in order of their start."""
        rows = self.trace.rows(kind)
        return rows[self.trace.named(rows, matches) & (self.trace.spans.stream[rows] < 0)]

    def intervals_of(self, rows: Rows) -> Intervals:
        """Returns the union of the intervals of some rows."""
        return intervals.union(self.trace.spans.start_ns[rows], self.trace.spans.end_ns[rows])

    def name(self, row: int) -> str:
        """Returns the name of an event."""
        return self.trace.names[int(self.trace.spans.name[row])]

    def step_of(self, at_ns: Ints) -> Ints:
        """Returns the number of the step at each instant; -1 between steps."""
        place = np.searchsorted(self.steps.start_ns, at_ns, side="right") - 1
        inside = (place >= 0) & (at_ns <= self.steps.end_ns[np.maximum(place, 0)])
        return np.where(inside, self.steps.number[np.maximum(place, 0)], -1)


def _innermost(start: Ints, end: Ints, code: NDArray[np.int32]) -> dict[int, Intervals]:
    """Returns by name the intervals in which its range is the innermost one. Ranges of one thread are nested."""
    edges = np.concatenate([start, end])
    # At one instant ends come before starts, and of starts the longer range comes first.
    length = end - start
    order = np.lexsort((np.concatenate([-length, -length]), np.repeat([1, 0], start.size), edges))
    open_: list[int] = []
    parts: dict[int, list[tuple[int, int]]] = {}
    since = 0
    for edge in order.tolist():
        at, row = int(edges[edge]), edge % start.size
        if open_ and at > since:
            parts.setdefault(int(code[open_[-1]]), []).append((since, at))
        if edge < start.size:
            open_.append(row)
        elif row in open_:
            open_.remove(row)
        since = at
    return {name: intervals.union(*zip(*ranges, strict=True)) for name, ranges in parts.items()}
