"""Histograms with exponential and explicit buckets."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import numpy as np

from otel_train.catalog import DURATION_BOUNDS
from otel_train.datamodel import NS_PER_S, Attributes, Exemplar, HistogramPoint

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

    Ints = NDArray[np.int64]
    Floats = NDArray[np.float64]

Label = TypeVar("Label", bound="Hashable")


MAX_SCALE = 4
"""Finest exponential scale: buckets 4.4 % wide. Source: the histogram section of the telemetry schema."""

MAX_SIZE = 100
"""Most exponential buckets per published point; wider data is published at a coarser scale."""

LOWEST_EXPONENT = -34
"""2**-34 s is 58 ps: below a nanosecond only zero is left."""

HIGHEST_EXPONENT = 20
"""2**20 s is 12 days: longer durations count into the last bucket."""

_MANTISSA_BITS = 52


class Grid(NamedTuple):
    """Slot boundaries, and the lookup of a value's slot.

    Attributes:
        edges_s: float64[slot]. Slot i holds values in (edges_s[i-1], edges_s[i]]; slot 0 holds zero.
        edges_ns: int64[slot]. The longest whole number of nanoseconds that slot i holds.
        first_slots: int16[cell]. The lowest slot that a value of the cell can be in.
        shift: bits of a float64 below the cell number.
        first_cell: number of the cell of the lowest edge.
        exponential: first slot of each exponential bucket.
        explicit: first slot of each explicit bucket.
    """

    edges_s: Floats
    edges_ns: Ints
    first_slots: NDArray[np.int16]
    shift: int
    first_cell: int
    exponential: NDArray[np.intp]
    explicit: NDArray[np.intp]

    def slots(self, seconds: Floats) -> NDArray[np.intp]:
        """Returns the slot of each value; upper edges are inclusive. Clips ``seconds`` in place."""
        np.clip(seconds, self.edges_s[0], self.edges_s[-1], out=seconds)
        # The leading bits of a positive float64 rise with its value. They name a cell that holds at
        # most one edge, so one comparison finds the slot: exact, and no logarithm is taken.
        cells = (seconds.view(np.int64) >> self.shift) - self.first_cell
        found = self.first_slots.take(cells).astype(np.intp)
        found += seconds > self.edges_s.take(found)
        return found


@lru_cache(maxsize=8)
def grid_of(bounds: tuple[float, ...]) -> Grid:
    """Returns slots cut at every exponential and every explicit boundary."""
    octaves = range(LOWEST_EXPONENT, HIGHEST_EXPONENT)
    per_octave = 2.0 ** (np.arange(2**MAX_SCALE) / 2**MAX_SCALE)
    powers = np.append(np.concatenate([np.ldexp(per_octave, e) for e in octaves]), 2.0**HIGHEST_EXPONENT)
    # Not np.unique: its first call imports numpy.ma, 40 ms.
    edges_s = np.array(sorted({*powers.tolist(), *bounds}))
    shift = _cell_shift(edges_s)
    numbers = edges_s.view(np.int64) >> shift
    starts = (np.arange(numbers[0], numbers[-1] + 1) << shift).view(np.float64)
    return Grid(
        edges_s=edges_s,
        edges_ns=whole_ns(edges_s),
        first_slots=np.searchsorted(edges_s, starts).astype(np.int16),
        shift=shift,
        first_cell=int(numbers[0]),
        exponential=np.searchsorted(edges_s, powers[:-1]) + 1,
        explicit=np.append(0, np.searchsorted(edges_s, bounds) + 1),
    )


def _cell_shift(edges_s: Floats) -> int:
    for bits in range(8, 15):
        shift = _MANTISSA_BITS - bits
        if np.diff(edges_s.view(np.int64) >> shift).all():
            return shift
    raise ValueError(f"bounds={edges_s}: two edges closer than 1 in 10,000")


def whole_ns(edges_s: Floats) -> Ints:
    """Returns for each edge the largest whole number of nanoseconds that is at or below it."""
    below = np.floor(edges_s * NS_PER_S).astype(np.int64)
    below += (below + 1) / NS_PER_S <= edges_s
    below -= below / NS_PER_S > edges_s
    return below


def downscale(counts: Ints, offset: int) -> tuple[int, int, tuple[int, ...]]:
    """Halves the resolution until the filled buckets fit into ``MAX_SIZE``.

    Returns:
        Scale, index of the first bucket, counts without empty ends.

    Source:
        OpenTelemetry data model, exponential scale: bucket i of one scale is part of bucket i >> 1
        of the next coarser one.
    """
    filled = np.flatnonzero(counts)
    if not filled.size:
        return MAX_SCALE, 0, ()
    first, last = int(filled[0]), int(filled[-1])
    indices = np.arange(first, last + 1) + offset
    steps = 0
    while (int(indices[-1]) >> steps) - (int(indices[0]) >> steps) >= MAX_SIZE:
        steps += 1
    coarse = (indices >> steps) - (indices[0] >> steps)
    merged = np.zeros(int(coarse[-1]) + 1, np.int64)
    np.add.at(merged, coarse, counts[first : last + 1])
    return MAX_SCALE - steps, int(indices[0]) >> steps, tuple(merged.tolist())


_NO_MIN = np.iinfo(np.int64).max
_NO_MAX = -1


class Histograms:
    """All series of one duration metric. Not thread-safe.

    Args:
        bounds: explicit bucket edges in seconds, rising, above 2**-34 and at most 2**20; upper edges are inclusive.
        size: initial number of series, numbered from 0.
    """

    def __init__(self, bounds: tuple[float, ...] = DURATION_BOUNDS, *, size: int = 0) -> None:
        self.bounds = bounds
        self._grid = grid_of(bounds)
        self._slots: Ints = np.zeros((0, self._grid.edges_s.size), np.int64)
        self._sum_ns: Ints = np.zeros(0, np.int64)
        self._min_ns: Ints = np.zeros(0, np.int64)
        self._max_ns: Ints = np.zeros(0, np.int64)
        self.grow(size)

    def __len__(self) -> int:
        return self._sum_ns.size

    def grow(self, size: int) -> None:
        """Adds empty series up to number ``size`` - 1. Never shrinks."""
        more = size - len(self)
        if more <= 0:
            return
        empty = np.zeros((more, self._slots.shape[1]), np.int64)
        self._slots = np.concatenate([self._slots, empty])
        self._sum_ns = np.append(self._sum_ns, np.zeros(more, np.int64))
        self._min_ns = np.append(self._min_ns, np.full(more, _NO_MIN))
        self._max_ns = np.append(self._max_ns, np.full(more, _NO_MAX))

    def add(self, series: ArrayLike, value_ns: ArrayLike) -> None:
        """Counts durations in nanoseconds, each in a series; below zero counts as zero."""
        rows = np.asarray(series, np.intp)
        values = np.maximum(np.asarray(value_ns, np.int64), 0)
        slots = self._grid.slots(values / NS_PER_S)
        slots += rows * self._slots.shape[1]
        np.add.at(self._slots.reshape(-1), slots, 1)
        np.add.at(self._sum_ns, rows, values)
        np.minimum.at(self._min_ns, rows, values)
        np.maximum.at(self._max_ns, rows, values)

    def count(self, series: int) -> int:
        """Returns the number of durations in a series."""
        return int(self._slots[series].sum())

    def sum_s(self, series: int) -> float:
        """Returns the sum of the durations in a series, in seconds."""
        return int(self._sum_ns[series]) / NS_PER_S

    def point(
        self, series: int, attributes: Attributes = (), exemplars: tuple[Exemplar, ...] = ()
    ) -> HistogramPoint:
        """Returns a series in both published forms, in seconds."""
        row = self._slots[series]
        count = int(row.sum())
        exponential = np.add.reduceat(row, self._grid.exponential)
        scale, offset, counts = downscale(exponential, LOWEST_EXPONENT << MAX_SCALE)
        return HistogramPoint(
            attributes=attributes,
            count=count,
            sum=self.sum_s(series),
            min=int(self._min_ns[series]) / NS_PER_S if count else math.nan,
            max=int(self._max_ns[series]) / NS_PER_S if count else math.nan,
            zero_count=int(row[0]),
            scale=scale,
            offset=offset,
            exponential_counts=counts,
            explicit_counts=tuple(np.add.reduceat(row, self._grid.explicit).tolist()),
            exemplars=exemplars,
        )

    def quantile(self, series: int, q: float) -> float:
        """Estimates a quantile; 0 and 1 are exactly minimum and maximum.

        Returns:
            Seconds; NaN for an empty series. Monotonic in ``q``, and within one bucket of ``numpy.quantile`` of the same
            values.
        """
        reached = np.cumsum(self._slots[series])
        count = int(reached[-1])
        if not count:
            return math.nan
        # Like numpy's default: a weighted mean of two neighbours in sorted order. A mean of two
        # estimates that are each within a bucket is within a bucket too.
        place = q * (count - 1)
        rank = min(int(place), count - 1)
        low = self._ranked(series, rank, reached)
        high = self._ranked(series, min(rank + 1, count - 1), reached)
        return min(low + (place - rank) * (high - low), high)

    def _ranked(self, series: int, rank: int, reached: Ints) -> float:
        """Estimates the value at ``rank`` in sorted order, in seconds."""
        least, most = int(self._min_ns[series]) / NS_PER_S, int(self._max_ns[series]) / NS_PER_S
        if rank in (0, int(reached[-1]) - 1):
            return least if rank == 0 else most
        slot = int(np.searchsorted(reached, rank, side="right"))
        if slot == 0:
            return 0.0
        before = int(reached[slot - 1])
        lower, upper = self._grid.edges_s[slot - 1 : slot + 1].tolist()
        inside = (rank - before + 0.5) / (int(reached[slot]) - before)
        return float(min(max(lower + (upper - lower) * inside, least), most))

    def merge(self, other: Histograms) -> None:
        """Adds the counts of ``other``, series by series."""
        self.grow(len(other))
        shared = slice(len(other))
        self._slots[shared] += other._slots
        self._sum_ns[shared] += other._sum_ns
        np.minimum(self._min_ns[shared], other._min_ns, out=self._min_ns[shared])
        np.maximum(self._max_ns[shared], other._max_ns, out=self._max_ns[shared])

    def __deepcopy__(self, _: object) -> Histograms:
        return self.copy()

    def copy(self) -> Histograms:
        """Returns an independent copy."""
        twin = Histograms(self.bounds)
        twin.merge(self)
        return twin

    def folded(self, labels: Iterable[Label | None]) -> tuple[dict[Label, int], Histograms]:
        """Returns a copy in which series with equal labels are merged, and the series number of each label in it.

        Args:
            labels: label of each series, in order; None leaves the series out.
        """
        numbers: dict[Label, int] = {}
        into = [-1 if label is None else numbers.setdefault(label, len(numbers)) for label in labels]
        result = Histograms(self.bounds, size=len(numbers))
        new = np.array(into[: len(self)], dtype=np.int64)
        taken = np.flatnonzero(new >= 0)
        rows = new[taken]
        np.add.at(result._slots, rows, self._slots[taken])
        np.add.at(result._sum_ns, rows, self._sum_ns[taken])
        np.minimum.at(result._min_ns, rows, self._min_ns[taken])
        np.maximum.at(result._max_ns, rows, self._max_ns[taken])
        return numbers, result

    def minus(self, earlier: Histograms) -> Histograms:
        """Returns the difference to an earlier copy.

        Counts and sums are exact. Minimum and maximum are exact if they were set since then; else they are the edges of the
        outermost buckets, limited to the minimum and maximum of all time.
        """
        before = Histograms(self.bounds, size=len(self))
        before.merge(earlier)
        window = Histograms(self.bounds, size=len(self))
        np.subtract(self._slots, before._slots, out=window._slots)
        np.subtract(self._sum_ns, before._sum_ns, out=window._sum_ns)
        window._bracket(self)
        return window

    def _bracket(self, now: Histograms) -> None:
        """Sets minimum and maximum of a window to the edges of its outermost slots, limited by those of all time, in ``now``.

        A minimum or maximum of all time that was set in the window lies in that slot, so the limit makes it exact.
        """
        used = self._slots > 0
        filled = used.any(axis=1)
        last = used.shape[1] - 1
        lowest, highest = used.argmax(axis=1), last - used[:, ::-1].argmax(axis=1)
        edges = self._grid.edges_ns
        least = np.where(lowest > 0, edges[lowest - 1] + 1, 0)
        most = np.where(highest < last, edges[highest], now._max_ns)  # the last slot is open upward
        self._min_ns = np.where(filled, np.maximum(least, now._min_ns), _NO_MIN)
        self._max_ns = np.where(filled, np.minimum(most, now._max_ns), _NO_MAX)
