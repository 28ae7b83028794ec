"""Statistics of repeated measurements: quartiles, differences, trends."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence


class Spread(NamedTuple):
    """The middle half of repeated measurements.

    Attributes:
        q1: a quarter of the values lie below.
        median: half of them do.
        q3: three quarters do.
        repeats: how many there are.
    """

    q1: float
    median: float
    q3: float
    repeats: int

    @property
    def width(self) -> float:
        """Distance of the quartiles."""
        return self.q3 - self.q1


def spread_of(values: Sequence[float]) -> Spread:
    """Returns the quartiles of ``values``, interpolated linearly.

    Raises:
        ValueError: there are none.
    """
    if not values:
        raise ValueError("spread of no values: measure at least once")
    q1, median, q3 = (float(q) for q in np.percentile(values, (25, 50, 75)))
    return Spread(q1, median, q3, len(values))


def fastest_mean(durations: np.ndarray, share: float = 0.05) -> float:
    """Returns the mean of the fastest ``share`` of ``durations``, at least one: what the work costs undisturbed."""
    count = max(1, int(len(durations) * share))
    return float(np.partition(durations, count - 1)[:count].mean())


def differences(more: Sequence[float], less: Sequence[float]) -> list[float]:
    """Returns ``more`` minus ``less``, pair by pair."""
    return [a - b for a, b in zip(more, less, strict=True)]


def percent_more(more: Sequence[float], less: Sequence[float]) -> list[float]:
    """Returns, pair by pair, by how many percent of ``less`` ``more`` is larger."""
    return [100 * (a / b - 1) for a, b in zip(more, less, strict=True)]


def slope(values: Sequence[float]) -> float:
    """Returns the rise per value of the straight line through ``values`` (least squares); 0 for fewer than two."""
    if len(values) < 2:
        return 0.0
    return float(np.polyfit(np.arange(len(values)), values, 1)[0])
