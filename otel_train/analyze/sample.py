"""Durations of many occurrences, with how sure their mean and their quantiles are."""

from __future__ import annotations

import math
from statistics import NormalDist
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import ArrayLike, NDArray

    Floats = NDArray[np.float64]

CONFIDENCE = 0.95
ENOUGH = 4
"""Occurrences from which an interval is given: with fewer, their own spread is not known."""

_Z = NormalDist().inv_cdf(0.5 + CONFIDENCE / 2)


class Estimate(NamedTuple):
    """A figure, and the interval that holds the true one in 95 of 100 cases; NaN where it is not known."""

    value: float
    low: float
    high: float


class Sample(NamedTuple):
    """Durations in rising buckets; a bucket may hold a single value.

    Attributes:
        low: float64[bucket], seconds.
        high: float64[bucket], seconds; the same where the value is known exactly.
        number: int64[bucket], occurrences.
        total: seconds, exact.
    """

    low: Floats
    high: Floats
    number: NDArray[np.int64]
    total: float

    @property
    def size(self) -> int:
        """Occurrences."""
        return int(self.number.sum())

    @property
    def mean(self) -> float:
        """Seconds; NaN of nothing."""
        return self.total / self.size if self.size else math.nan

    @property
    def variance_of_mean(self) -> float:
        """Of independent occurrences, seconds squared; NaN where there are not enough."""
        if self.size < ENOUGH or not np.isfinite(self.high).all():
            return math.nan
        middle = (self.low + self.high) / 2
        spread = float((self.number * (middle - float((self.number * middle).sum()) / self.size) ** 2).sum())
        return spread / (self.size - 1) / self.size

    def quantile(self, q: float) -> Estimate:
        """A quantile, with the interval between the occurrences that bound it.

        Source: the distribution-free interval by order statistics; the rank of the quantile is binomial.
        """
        size = self.size
        if not size:
            return Estimate(math.nan, math.nan, math.nan)
        reached = np.cumsum(self.number)
        rank = q * (size - 1)
        spread = _Z * math.sqrt(size * q * (1 - q)) + 1
        place, first, last = (
            min(int(np.searchsorted(reached, min(max(at, 0.0), size - 1), side="right")), reached.size - 1)
            for at in (rank, rank - spread, rank + spread)
        )
        middle = float(self.low[place] + self.high[place]) / 2
        if size < ENOUGH:
            return Estimate(middle, math.nan, math.nan)
        return Estimate(middle, float(self.low[first]), float(self.high[last]))


def of_values(seconds: ArrayLike) -> Sample:
    """Occurrences that are known one by one."""
    values = np.sort(np.asarray(seconds, np.float64))
    return Sample(values, values, np.ones(values.size, np.int64), float(values.sum()))


def together(samples: Iterable[Sample]) -> Sample:
    """The occurrences of all."""
    parts = list(samples)
    low, high, number = (np.concatenate([part[column] for part in parts]) for column in range(3))
    order = np.lexsort((high, low))
    return Sample(low[order], high[order], number[order], sum(part.total for part in parts))


def ratio(before: Sample, after: Sample) -> Estimate:
    """How many times as long the mean occurrence has become.

    Source: the delta method for a ratio of means, with Student's quantile at Welch's degrees of freedom. It takes
    occurrences for independent; steps that follow each other are alike, so the true interval is somewhat wider.
    """
    if not before.size or not after.size or not before.mean > 0:
        return Estimate(math.nan, math.nan, math.nan)
    value = after.mean / before.mean
    parts = [
        sample.variance_of_mean / sample.mean**2 if sample.mean else math.nan for sample in (before, after)
    ]
    variance = sum(parts)
    if not math.isfinite(variance):
        return Estimate(value, math.nan, math.nan)
    freedom = (
        variance**2
        / sum(part**2 / (sample.size - 1) for part, sample in zip(parts, (before, after), strict=True))
        if variance
        else math.inf
    )
    reach = value * _student(freedom) * math.sqrt(variance)
    return Estimate(value, max(0.0, value - reach), value + reach)


def _student(freedom: float) -> float:
    """The two-sided 95 % quantile of Student's distribution.

    Source: the Cornish-Fisher expansion, Abramowitz and Stegun 26.7.5; within 1 % from 3 degrees of freedom up.
    """
    if math.isinf(freedom):
        return _Z
    z = _Z
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
    )
    return z + sum(term / freedom ** (power + 1) for power, term in enumerate(terms))
