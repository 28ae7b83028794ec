"""Steps and stages, as the ranges in a trace tell them."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from otel_train.analyze import intervals
from otel_train.analyze.intervals import NOTHING, Intervals
from otel_train.analyze.trace import Kind

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from numpy.typing import NDArray

    from otel_train.analyze.trace import Trace

    Ints = NDArray[np.int64]
    Rows = NDArray[np.intp]

STAGE = "otel_train:"
"""Ranges of our own stages begin with it; that of a loader goes on with its name, ``otel_train:data:train``."""

_STEP = re.compile(r"ProfilerStep#(\d+)\Z")
_GUESSED: tuple[tuple[str, Kind, re.Pattern[str]], ...] = (
    ("data", Kind.NOTE, re.compile(r"enumerate\(DataLoader\)#")),
    ("optimizer", Kind.NOTE, re.compile(r"Optimizer\.step#")),
    ("backward", Kind.OP, re.compile(r"autograd::engine::evaluate_function: ")),
)
"""What PyTorch itself says about stages, by the names of its ranges. Forward has none."""


class Steps(NamedTuple):
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
        guessed: whether PyTorch's ranges were used, for want of ours.
        data: instants spent waiting for a batch, by our ranges and by PyTorch's.
    """

    own: Mapping[str, Intervals]
    runs: Mapping[str, int]
    guessed: bool
    data: Intervals


def steps(trace: Trace) -> Steps:
    """The steps of a trace; the whole of it where it has none."""
    spans = trace.spans
    numbers = {code: int(found[1]) for code, name in enumerate(trace.names) if (found := _STEP.match(name))}
    rows = _named(trace, Kind.NOTE, numbers.__contains__)
    if not rows.size:
        start, end = trace.span_ns
        return Steps(np.zeros(1, np.int64), np.array([start]), np.array([end]), counted=False)
    number = np.array([numbers[int(code)] for code in spans.name[rows]], np.int64)
    _, first = np.unique(number, return_index=True)  # some versions write a step once per thread
    return Steps(number[first], spans.start_ns[rows[first]], spans.end_ns[rows[first]], counted=True)


def stages(trace: Trace) -> Stages:
    """The stages of a trace."""
    spans = trace.spans
    ours = {code: name.removeprefix(STAGE) for code, name in enumerate(trace.names) if name.startswith(STAGE)}
    fetches = _ranges(trace, _guessed_rows(trace, *_GUESSED[0][1:]))
    rows = _named(trace, Kind.NOTE, ours.__contains__)
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


def _guessed_rows(trace: Trace, kind: Kind, pattern: re.Pattern[str]) -> Rows:
    codes = {code for code, name in enumerate(trace.names) if pattern.match(name)}
    return _named(trace, kind, codes.__contains__)


def _named(trace: Trace, kind: Kind, wanted: Callable[[int], bool]) -> Rows:
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
    order = np.lexsort((np.tile(-(end - start), 2), np.repeat([1, 0], start.size), edges))
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
