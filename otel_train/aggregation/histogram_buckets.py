"""Where the buckets of a histogram begin and end."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from otel_train.clock import NS_PER_S

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Ints = NDArray[np.int64]
    Floats = NDArray[np.float64]


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
    """Where slots begin and end, and how to find the slot of a value.

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
        """The slot of each value; upper edges are inclusive. ``seconds`` is clipped in place."""
        np.clip(seconds, self.edges_s[0], self.edges_s[-1], out=seconds)
        # The leading bits of a positive float64 rise with its value. They name a cell that holds at
        # most one edge, so one comparison settles the slot: exact, and no logarithm is taken.
        cells = (seconds.view(np.int64) >> self.shift) - self.first_cell
        found = self.first_slots.take(cells).astype(np.intp)
        found += seconds > self.edges_s.take(found)
        return found


@lru_cache(maxsize=8)
def grid_of(bounds: tuple[float, ...]) -> Grid:
    """Slots cut at every exponential boundary and at every explicit one."""
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
    """The longest whole nanoseconds whose value in seconds is at or below each edge."""
    below = np.floor(edges_s * NS_PER_S).astype(np.int64)
    below += (below + 1) / NS_PER_S <= edges_s
    below -= below / NS_PER_S > edges_s
    return below


def downscale(counts: Ints, offset: int) -> tuple[int, int, tuple[int, ...]]:
    """Halve the resolution until the filled buckets fit into ``MAX_SIZE``.

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
