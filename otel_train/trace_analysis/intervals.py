"""Sets of instants as sorted, disjoint intervals."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

    Ints = NDArray[np.int64]


class Intervals(NamedTuple):
    """Half-open intervals [start, end) in ascending order that neither overlap nor touch."""

    start_ns: Ints
    end_ns: Ints

    @property
    def total_ns(self) -> int:
        """Sum of their durations."""
        return int((self.end_ns - self.start_ns).sum())


NOTHING = Intervals(np.zeros(0, np.int64), np.zeros(0, np.int64))


def union(start_ns: ArrayLike, end_ns: ArrayLike) -> Intervals:
    """Returns the union of ranges, which may overlap and be unordered."""
    start, end = np.asarray(start_ns, np.int64), np.asarray(end_ns, np.int64)
    nonempty = end > start
    start, end = start[nonempty], end[nonempty]
    if not start.size:
        return NOTHING
    order = np.argsort(start, kind="stable")
    start, end = start[order], np.maximum.accumulate(end[order])
    first = np.append(True, start[1:] > end[:-1])
    last = np.append(first[1:], True)
    return Intervals(start[first], end[last])


def clip(these: Intervals, start_ns: int, end_ns: int) -> Intervals:
    """Returns the part from ``start_ns`` to ``end_ns``."""
    start, end = np.clip(these.start_ns, start_ns, end_ns), np.clip(these.end_ns, start_ns, end_ns)
    nonempty = end > start
    return Intervals(start[nonempty], end[nonempty])


def intersect(these: Intervals, others: Intervals) -> Intervals:
    """Returns the intersection of both sets."""
    if not these.start_ns.size or not others.start_ns.size:
        return NOTHING
    edges = np.concatenate([these.start_ns, these.end_ns, others.start_ns, others.end_ns])
    change = np.repeat(np.array([1, -1, 1, -1]), [these.start_ns.size] * 2 + [others.start_ns.size] * 2)
    # At one instant ends come before starts, so that intervals that only touch share nothing.
    order = np.lexsort((change, edges))
    both = np.flatnonzero(np.cumsum(change[order]) > 1)
    return Intervals(edges[order][both], edges[order][both + 1])


def subtract(these: Intervals, others: Intervals) -> Intervals:
    """Returns the difference: the instants of ``these`` that are not in ``others``."""
    if not these.start_ns.size:
        return NOTHING
    return intersect(these, gaps(others, int(these.start_ns[0]), int(these.end_ns[-1])))


def gaps(these: Intervals, start_ns: int, end_ns: int) -> Intervals:
    """Returns the parts of [``start_ns``, ``end_ns``) that are in no interval."""
    inside = clip(these, start_ns, end_ns)
    start, end = np.append(start_ns, inside.end_ns), np.append(inside.start_ns, end_ns)
    nonempty = end > start
    return Intervals(start[nonempty], end[nonempty])


def covered(these: Intervals, start_ns: ArrayLike, end_ns: ArrayLike) -> Ints:
    """Returns how much of each range [start, end) is in the set: int64[range], nanoseconds."""
    part: Ints = before(these, end_ns) - before(these, start_ns)
    return part


def before(these: Intervals, at_ns: ArrayLike) -> Ints:
    """Returns the nanoseconds of the set before each instant: int64[instant]."""
    at = np.asarray(at_ns, np.int64)
    if not these.start_ns.size:
        return np.zeros(at.shape, np.int64)
    reached = np.append(0, np.cumsum(these.end_ns - these.start_ns))
    index = np.searchsorted(these.start_ns, at, side="right")
    beyond = np.maximum(these.end_ns[np.maximum(index - 1, 0)] - at, 0)
    amount: Ints = reached[index] - np.where(index > 0, beyond, 0)
    return amount


def contains(these: Intervals, at_ns: ArrayLike) -> NDArray[np.bool_]:
    """Returns whether each instant is in the set."""
    at = np.asarray(at_ns, np.int64)
    if not these.start_ns.size:
        return np.zeros(at.shape, np.bool_)
    index = np.searchsorted(these.start_ns, at, side="right") - 1
    inside: NDArray[np.bool_] = (index >= 0) & (at < these.end_ns[np.maximum(index, 0)])
    return inside
