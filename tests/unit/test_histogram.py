"""Histograms count durations as the specification and Prometheus would."""

from __future__ import annotations

import math

import numpy as np
import pytest
from opentelemetry.sdk.metrics._internal.exponential_histogram.mapping.exponent_mapping import (
    ExponentMapping,
)
from opentelemetry.sdk.metrics._internal.exponential_histogram.mapping.logarithm_mapping import (
    LogarithmMapping,
)

from otel_train.aggregation.histogram import MAX_SCALE, MAX_SIZE, Histograms
from otel_train.catalog import DURATION_BOUNDS

MS = 1_000_000
SECOND = 1000 * MS
DAY = 86_400 * SECOND


def one(*values_ns: int) -> Histograms:
    """A single series that holds ``values_ns``."""
    histograms = Histograms(size=1)
    histograms.add([0] * len(values_ns), list(values_ns))
    return histograms


def test_an_empty_series_has_no_minimum_no_quantile_and_no_buckets() -> None:
    """Missing is not zero: a minimum of 0 s would be a value that was not measured."""
    histograms = Histograms(size=1)
    point = histograms.point(0)

    assert point.count == 0
    assert all(map(math.isnan, (point.min, point.max, histograms.quantile(0, 0.5))))
    assert point.exponential_counts == ()
    assert point.explicit_counts == (0,) * (len(DURATION_BOUNDS) + 1)


@pytest.mark.parametrize("exponent", range(-9, 20))
def test_a_power_of_two_is_the_inclusive_top_of_its_bucket(exponent: int) -> None:
    """The specification's buckets are (lower, upper]; 2**-9 s is 1953125 ns exactly."""
    value_ns = (SECOND << exponent) if exponent >= 0 else SECOND >> -exponent

    at, above = one(value_ns).point(0), one(value_ns + 1).point(0)

    assert at.offset == (exponent << MAX_SCALE) - 1
    assert above.offset == exponent << MAX_SCALE


def test_every_duration_is_in_the_bucket_that_the_sdk_puts_it_in() -> None:
    """Ours replaces the SDK's aggregation; a shifted bucket would bend every quantile."""
    mapping = LogarithmMapping(MAX_SCALE)
    values = np.random.default_rng(3).lognormal(15, 5, 2000).astype(np.int64).clip(1, 2**19 * SECOND)
    histograms = Histograms(size=values.size)
    histograms.add(np.arange(values.size), values)

    ours = [histograms.point(i).offset for i in range(values.size)]

    assert ours == [mapping.map_to_index(int(value) / SECOND) for value in values]


def test_at_a_coarse_scale_buckets_are_still_those_of_the_sdk() -> None:
    """1 ns to 12 days is 50 octaves: more than 100 buckets of any finer scale."""
    values = [10**k for k in range(15)]

    point = one(*values).point(0)

    mapping = LogarithmMapping(point.scale) if point.scale > 0 else ExponentMapping(point.scale)
    expected = [mapping.map_to_index(value / SECOND) - point.offset for value in values]
    assert point.scale < MAX_SCALE
    assert len(point.exponential_counts) <= MAX_SIZE
    assert np.flatnonzero(point.exponential_counts).tolist() == expected


def test_a_hundred_buckets_stay_and_one_more_halves_the_scale() -> None:
    """The largest size is allowed, not forbidden."""
    centres = 2.0 ** ((np.arange(101) + 0.5) / 16)
    histograms = Histograms(size=2)
    nanoseconds = np.rint(centres * SECOND).astype(np.int64)
    histograms.add([0] * 100, nanoseconds[:100])
    histograms.add([1] * 101, nanoseconds)

    assert len(histograms.point(0).exponential_counts) == 100
    assert histograms.point(0).scale == MAX_SCALE
    assert len(histograms.point(1).exponential_counts) == 51
    assert histograms.point(1).scale == MAX_SCALE - 1


def test_zero_and_clock_steps_back_count_as_zero() -> None:
    """Zero has no logarithm; a negative duration must not poison the sum."""
    point = one(0, -5, 1 * MS).point(0)

    assert (point.count, point.zero_count, point.sum, point.min) == (3, 2, 0.001, 0.0)
    assert sum(point.exponential_counts) == 1
    assert point.explicit_counts[0] == 2
    assert point.explicit_counts[1] == 1


def test_longer_than_the_range_counts_into_the_last_bucket() -> None:
    """Twenty days is beyond 2**20 s; nothing may be lost, and the maximum stays true."""
    point = one(20 * DAY).point(0)

    assert point.exponential_counts == (1,)
    assert point.offset == (20 << MAX_SCALE) - 1
    assert point.explicit_counts[-1] == 1
    assert point.max == 20 * 86_400


def test_the_sum_is_exact_where_floats_are_not() -> None:
    """A year of nanoseconds does not fit into a float64."""
    year = 365 * 86_400 * SECOND
    histograms = one(year, year, 1, 1, 1)

    assert histograms.point(0).sum == (2 * year + 3) / SECOND
    assert histograms.minus(one(year, year)).point(0).sum == 3e-9


def test_growing_keeps_what_was_counted_and_never_shrinks() -> None:
    """A loader that is found late adds series to a histogram that is in use."""
    histograms = one(1 * MS)
    histograms.grow(3)
    histograms.grow(2)
    histograms.add([2], [2 * MS])

    assert len(histograms) == 3
    assert [histograms.count(i) for i in range(3)] == [1, 0, 1]
    assert histograms.point(0).min == 0.001


def test_a_window_holds_what_came_since_the_copy() -> None:
    """2 ms was before; the window is 3 and 5 ms, its edges within a bucket of the truth."""
    histograms = one(2 * MS, 8 * MS)
    earlier = histograms.copy()
    histograms.grow(2)
    histograms.add([0, 0, 1], [3 * MS, 5 * MS, 7 * MS])

    window = histograms.minus(earlier)

    first = window.point(0)
    assert (first.count, first.sum) == (2, 0.008)
    assert 0.003 / 1.045 <= first.min <= 0.003
    assert 0.005 <= first.max <= 0.005 * 1.045
    assert window.point(1)[1:5] == (1, 0.007, 0.007, 0.007)


@pytest.mark.parametrize(("before", "then", "ends"), [
    # The slowest step of the run is the one people look at.
    pytest.param([2 * MS], [1 * MS, 9 * MS], (0.001, 0.009), id="a record is known exactly"),
    # The last bucket is open upward: its edge would be below what it holds.
    pytest.param([30 * DAY], [20 * DAY], (20 * 86_400, 30 * 86_400), id="beyond the range the maximum is that of all time"),
])  # fmt: skip
def test_the_ends_of_a_window(before: list[int], then: list[int], ends: tuple[float, float]) -> None:
    """A window has no minimum and maximum of its own but for a record."""
    histograms = one(*before)
    earlier = histograms.copy()
    histograms.add([0] * len(then), then)
    point = histograms.minus(earlier).point(0)

    assert (point.min, point.max) == ends
