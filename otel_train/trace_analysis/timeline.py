"""Steps, stages and launches of a trace."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from otel_train.trace_analysis import intervals
from otel_train.trace_analysis.events import EventKind
from otel_train.trace_analysis.intervals import NOTHING, Intervals

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from numpy.typing import NDArray

    from otel_train.trace_analysis.events import Trace
    from otel_train.trace_analysis.intervals import Intervals

    Ints = NDArray[np.int64]
    Rows = NDArray[np.intp]


HOST_KINDS = (EventKind.OP, EventKind.ANNOTATION, EventKind.RUNTIME, EventKind.PYTHON)


class Calls(NamedTuple):
    """Events of the host as calls, thread by thread, in order of their start.

    Attributes:
        row: intp[call], where it is in ``Trace.spans``.
        parent: intp[call], the call it runs in; -1 for the outermost.
        end_ns: int64[call]; never after the end of its parent.
        self_ns: int64[call], without the calls in it. All of a thread add up to the time it spent in calls.
    """

    row: Rows
    parent: Rows
    end_ns: Ints
    self_ns: Ints


def calls(trace: Trace, *, python: bool = False) -> Calls:
    """The calls of all threads of the host.

    Args:
        trace: where they were seen.
        python: also Python's own functions, if they were recorded.
    """
    kinds = HOST_KINDS if python else HOST_KINDS[:-1]
    spans = trace.spans
    rows = trace.rows(*kinds)
    rows = rows[spans.stream[rows] < 0]
    # Of two that begin together the longer one is around the other.
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
    self_ns = end - start - inside_ns
    return Calls(rows, parent, end, self_ns)


def _nested(start: Ints, end: Ints) -> tuple[Rows, Ints]:
    """Parents within one thread, and the ends, cut to those of the parents."""
    lasting = end > start  # what takes no time has nothing in it
    begun: Ints = np.cumsum(lasting) - lasting
    depth = begun - np.searchsorted(np.sort(end[lasting]), start, side="right")
    parent = np.full(start.size, -1, np.intp)
    for level in range(1, int(depth.max(initial=0)) + 1):
        above, here = np.flatnonzero((depth == level - 1) & lasting), np.flatnonzero(depth == level)
        place = np.searchsorted(above, here) - 1
        parent[here] = np.where(place < 0, -1, above[np.maximum(place, 0)]) if above.size else -1
    within = parent >= 0
    outer = parent[within]
    if (within == (depth > 0)).all() and (depth >= 0).all() and (end[within] <= end[outer]).all():
        return parent, end
    return _nested_slowly(start, end)


def _nested_slowly(start: Ints, end: Ints) -> tuple[Rows, Ints]:
    """The same where instants are rounded, so that a call seems to outlast the one around it."""
    parent, clamped = [], end.tolist()
    open_: list[int] = []
    for number, begun in enumerate(start.tolist()):
        while open_ and clamped[open_[-1]] <= begun:
            open_.pop()
        outer = open_[-1] if open_ else -1
        if outer >= 0:
            clamped[number] = min(clamped[number], clamped[outer])
        parent.append(outer)
        open_.append(number)
    return np.array(parent, np.intp), np.array(clamped, np.int64)


COMMUNICATION = re.compile(r"(?:nccl|rccl).*Kernel|ncclDevKernel")
GLOO = "gloo:"
"""Ranges of this prefix are collectives on the host, from the start on one rank until all have come."""

COPY = re.compile(r"Memcpy|Memset|dma")
"""What a kernel is by the beginning of its name. Source: ``hta/utils/utils.py`` of HolisticTraceAnalysis 0.5."""

SYNCHRONIZE = re.compile(r"(?:cuda|hip)(?:\w*Synchronize|Memcpy)\Z|cuStreamSynchronize\Z|cuCtxSynchronize\Z")
"""Calls of the runtime that return when the device is done."""


class Launches(NamedTuple):
    """The launch of each device row. All columns are int64[device row] or intp[device row].

    Attributes:
        row: the row of the launch; -1 where the trace does not have it.
        start_ns: when the launch was called; -1 where not known.
        end_ns: when that call returned; -1 where not known.
    """

    row: Rows
    start_ns: Ints
    end_ns: Ints


@dataclass(frozen=True)
class Scene:
    """One trace, looked at once.

    Attributes:
        trace: what was read.
    """

    trace: Trace

    @cached_property
    def steps(self) -> ScheduleSteps:
        """The steps, or the whole as one."""
        return steps(self.trace)

    @cached_property
    def stages(self) -> Stages:
        """What the training thread was doing."""
        return stages(self.trace)

    @cached_property
    def window(self) -> tuple[int, int]:
        """First and last instant of the analysed steps."""
        return self.steps.window

    @cached_property
    def calls(self) -> Calls:
        """The call tree of the host."""
        return calls(self.trace)

    @cached_property
    def device(self) -> Rows:
        """Rows of what ran on the device, in order of their start."""
        return self.trace.device_rows

    @cached_property
    def communicates(self) -> NDArray[np.bool_]:
        """bool[device row]: a collective."""
        return self._is(COMMUNICATION)

    @cached_property
    def collectives(self) -> Rows:
        """Rows of collectives, in order of their start: a device's; where it has none, those of gloo's threads."""
        rows = self.device[self.communicates]
        if rows.size:
            return rows
        gloo = np.array([name.startswith(GLOO) for name in self.trace.names], np.bool_)
        annotations = self.trace.rows(EventKind.ANNOTATION)
        annotations = annotations[gloo[self.trace.spans.name[annotations]]]
        return annotations[np.argsort(self.trace.spans.start_ns[annotations], kind="stable")]

    @cached_property
    def copies(self) -> NDArray[np.bool_]:
        """bool[device row]: a copy or a fill."""
        either: NDArray[np.bool_] = self._is(COPY) | (self.trace.kind[self.device] == EventKind.COPY)
        return either

    @cached_property
    def busy(self) -> Intervals:
        """When anything ran on the device."""
        return self._union(np.ones(self.device.size, np.bool_))

    @cached_property
    def compute(self) -> Intervals:
        """When a kernel ran that is neither a collective nor a copy."""
        return self._union(~(self.communicates | self.copies))

    @cached_property
    def communication(self) -> Intervals:
        """When a collective ran."""
        return self._union(self.communicates)

    @cached_property
    def launches(self) -> Launches:
        """The launch of each device row."""
        spans, calls_ = self.trace.spans, self.trace.rows(EventKind.RUNTIME)
        calls_ = calls_[spans.correlation[calls_] >= 0]
        order = np.argsort(spans.correlation[calls_], kind="stable")
        ids = spans.correlation[calls_][order]
        asked = spans.correlation[self.device]
        place = np.minimum(np.searchsorted(ids, asked), max(ids.size - 1, 0))
        known = (ids[place] == asked) & (asked >= 0) if ids.size else np.zeros(asked.shape, np.bool_)
        row = np.where(known, calls_[order][place], -1) if ids.size else np.full(asked.shape, -1, np.intp)
        start, end = spans.start_ns[np.maximum(row, 0)], spans.end_ns[np.maximum(row, 0)]
        return Launches(row, np.where(known, start, -1), np.where(known, end, -1))

    @cached_property
    def synchronizing(self) -> Rows:
        """Rows of calls that wait for the device, in order of their start."""
        waits = np.array([SYNCHRONIZE.match(name) is not None for name in self.trace.names], np.bool_)
        rows = self.trace.rows(EventKind.RUNTIME)
        return rows[waits[self.trace.spans.name[rows]]]

    def intervals_of(self, rows: Rows) -> Intervals:
        """When any of some rows was going on."""
        return intervals.union(self.trace.spans.start_ns[rows], self.trace.spans.end_ns[rows])

    def name(self, row: int) -> str:
        """The name of an event."""
        return self.trace.names[int(self.trace.spans.name[row])]

    def step_of(self, at_ns: Ints) -> Ints:
        """The number of the step at each instant; -1 between steps."""
        place = np.searchsorted(self.steps.start_ns, at_ns, side="right") - 1
        inside = (place >= 0) & (at_ns <= self.steps.end_ns[np.maximum(place, 0)])
        return np.where(inside, self.steps.number[np.maximum(place, 0)], -1)

    def _is(self, pattern: re.Pattern[str]) -> NDArray[np.bool_]:
        named = np.array([pattern.match(name) is not None for name in self.trace.names], np.bool_)
        return named[self.trace.spans.name[self.device]] if named.size else np.zeros(0, np.bool_)

    def _union(self, chosen: NDArray[np.bool_]) -> Intervals:
        return self.intervals_of(self.device[chosen])


STAGE = "otel_train:"
"""Ranges of our own stages begin with it; that of a loader goes on with its name, ``otel_train:data:train``."""

_STEP = re.compile(r"ProfilerStep#(\d+)\Z")
_GUESSED: tuple[tuple[str, EventKind, re.Pattern[str]], ...] = (
    ("data", EventKind.ANNOTATION, re.compile(r"enumerate\(DataLoader\)#")),
    ("optimizer", EventKind.ANNOTATION, re.compile(r"Optimizer\.step#")),
    ("backward", EventKind.OP, re.compile(r"autograd::engine::evaluate_function: ")),
)
"""What PyTorch itself says about stages, by the names of its ranges. Forward has none."""


class ScheduleSteps(NamedTuple):
    """Steps of the profiler's schedule, in order.

    Attributes:
        number: int64[step], as the profiler counts them.
        start_ns: int64[step].
        end_ns: int64[step].
        counted: whether the trace says where steps are; if not, the whole trace is one.
    """

    number: Ints
    start_ns: Ints
    end_ns: Ints
    counted: bool

    @property
    def window(self) -> tuple[int, int]:
        """From the beginning of the first to the end of the last."""
        return int(self.start_ns.min()), int(self.end_ns.max())


class Stages(NamedTuple):
    """What the training thread was doing.

    Attributes:
        own: by stage, the instants at which it was the innermost one.
        runs: by stage, how often it ran.
        guessed: whether PyTorch's ranges were used, where there are no otel_train ranges.
        data: instants spent waiting for a batch, by our ranges and by PyTorch's.
    """

    own: Mapping[str, Intervals]
    runs: Mapping[str, int]
    guessed: bool
    data: Intervals


def steps(trace: Trace) -> ScheduleSteps:
    """The steps of a trace; the whole of it where it has none."""
    spans = trace.spans
    numbers = {code: int(found[1]) for code, name in enumerate(trace.names) if (found := _STEP.match(name))}
    rows = _named(trace, EventKind.ANNOTATION, numbers.__contains__)
    if not rows.size:
        start, end = trace.span_ns
        return ScheduleSteps(np.zeros(1, np.int64), np.array([start]), np.array([end]), counted=False)
    number = np.array([numbers[int(code)] for code in spans.name[rows]], np.int64)
    _, first = np.unique(number, return_index=True)  # some versions write a step once per thread
    return ScheduleSteps(number[first], spans.start_ns[rows[first]], spans.end_ns[rows[first]], counted=True)


def stages(trace: Trace) -> Stages:
    """The stages of a trace."""
    spans = trace.spans
    ours = {code: name.removeprefix(STAGE) for code, name in enumerate(trace.names) if name.startswith(STAGE)}
    fetches = _ranges(trace, _guessed_rows(trace, *_GUESSED[0][1:]))
    rows = _named(trace, EventKind.ANNOTATION, ours.__contains__)
    rows = rows[spans.dur_ns[rows] > 0]
    if rows.size:
        lanes, often = np.unique(spans.lane[rows], return_counts=True)
        rows = rows[spans.lane[rows] == lanes[often.argmax()]]  # the thread that trains
        code = spans.name[rows]
        own = _innermost(spans.start_ns[rows], spans.end_ns[rows], code)
        found = {ours[number]: parts for number, parts in own.items()}
        count = {ours[int(number)]: int((code == number).sum()) for number in np.unique(code)}
        waits = [parts for name, parts in found.items() if name.partition(":")[0] == "data"]
        data = intervals.union(*map(np.concatenate, zip(fetches, *waits, strict=True)))
        if not waits and fetches.start_ns.size:
            ours_ns = intervals.union(spans.start_ns[rows], spans.end_ns[rows])
            found["data"], count["data"] = intervals.subtract(fetches, ours_ns), int(fetches.start_ns.size)
        return Stages(found, count, guessed=False, data=data)
    found, count, taken = {}, {}, NOTHING
    for stage, kind, pattern in _GUESSED:
        rows = _guessed_rows(trace, kind, pattern)
        parts = intervals.subtract(_ranges(trace, rows), taken)
        if parts.start_ns.size:
            found[stage], count[stage] = parts, int(rows.size)
            taken = intervals.union(*map(np.concatenate, zip(taken, parts, strict=True)))
    return Stages(found, count, guessed=True, data=fetches)


def _guessed_rows(trace: Trace, kind: EventKind, pattern: re.Pattern[str]) -> Rows:
    codes = {code for code, name in enumerate(trace.names) if pattern.match(name)}
    return _named(trace, kind, codes.__contains__)


def _named(trace: Trace, kind: EventKind, wanted: Callable[[int], bool]) -> Rows:
    """Rows of one kind on the host whose name, by number, is wanted."""
    names = np.array([wanted(code) for code in range(len(trace.names))], np.bool_)
    rows = trace.rows(kind)
    return rows[names[trace.spans.name[rows]] & (trace.spans.stream[rows] < 0)]


def _ranges(trace: Trace, rows: Rows) -> Intervals:
    return intervals.union(trace.spans.start_ns[rows], trace.spans.end_ns[rows])


def _innermost(start: Ints, end: Ints, code: NDArray[np.int32]) -> dict[int, Intervals]:
    """By name, the instants at which no other range lies within its own. Ranges of one thread are nested."""
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
