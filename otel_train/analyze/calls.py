"""Which event of a thread runs inside which."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from otel_train.analyze.events import Kind

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from otel_train.analyze.events import Trace

    Ints = NDArray[np.int64]
    Rows = NDArray[np.intp]

HOST_KINDS = (Kind.OP, Kind.NOTE, Kind.RUNTIME, Kind.PYTHON)


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
