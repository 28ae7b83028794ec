"""What holds for histograms of any durations."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from otel_train.aggregation.histogram import MAX_SCALE, MAX_SIZE, Histograms, downscale, whole_ns
from otel_train.catalog import DURATION_BOUNDS

SERIES = 3
NS_PER_S = 10**9
WIDTH = 2 ** (2**-MAX_SCALE) * (1 + 1e-9)
"""One bucket is a factor of 2**(1/16)."""

edges = [round(bound * NS_PER_S) for bound in DURATION_BOUNDS] + [NS_PER_S << k for k in range(10)]
durations = st.one_of(
    st.integers(0, 100),
    st.integers(0, 2**49),
    st.integers(0, 60 * NS_PER_S),
    st.sampled_from(edges).flatmap(lambda edge: st.integers(edge - 1, edge + 1)),
)
observations = st.lists(st.tuples(st.integers(0, SERIES - 1), durations), max_size=60)
some_durations = st.lists(durations, min_size=1, max_size=60)
Observations = list[tuple[int, int]]


def filled(pairs: Observations) -> Histograms:
    """Histograms that hold ``pairs`` of series and nanoseconds."""
    histograms = Histograms(size=SERIES)
    histograms.add([series for series, _ in pairs], [value for _, value in pairs])
    return histograms


def points(histograms: Histograms) -> list[str]:
    """Every series, comparable where NaN is not."""
    return [repr(histograms.point(series)) for series in range(SERIES)]


@given(observations, observations)
def test_merging_two_windows_equals_the_histogram_of_both(a: Observations, b: Observations) -> None:
    """Windows are joined for longer ones; nothing may depend on where they were cut."""
    merged = filled(a)
    merged.merge(filled(b))

    assert points(merged) == points(filled(a + b))


@given(observations)
def test_both_forms_agree_on_the_count_and_lose_nothing(pairs: Observations) -> None:
    """The push path shows one form, the pull path the other."""
    histograms = filled(pairs)

    for series in range(SERIES):
        point = histograms.point(series)
        expected = [value for which, value in pairs if which == series]
        assert point.count == len(expected)
        assert sum(point.explicit_counts) == point.count
        assert sum(point.exponential_counts) + point.zero_count == point.count
        assert point.sum == sum(expected) / NS_PER_S
        assert len(point.exponential_counts) <= MAX_SIZE


@given(some_durations)
def test_explicit_buckets_hold_what_numpy_puts_there(values: list[int]) -> None:
    """Independent count: upper edges are inclusive."""
    counts = filled([(0, value) for value in values]).point(0).explicit_counts

    buckets = np.searchsorted(DURATION_BOUNDS, np.array(values) / NS_PER_S, side="left")
    assert list(counts) == np.bincount(buckets, minlength=len(DURATION_BOUNDS) + 1).tolist()


@given(some_durations)
def test_every_value_lies_inside_a_published_exponential_bucket(values: list[int]) -> None:
    """A backend rebuilds the bucket edges from scale and offset alone."""
    point = filled([(0, value) for value in values]).point(0)
    base = 2.0 ** (2.0**-point.scale)
    first, last = base**point.offset, base ** (point.offset + len(point.exponential_counts))

    for value in values:
        assert value == 0 or first * (1 - 1e-9) <= value / NS_PER_S <= last * (1 + 1e-9)


@given(some_durations, st.floats(0, 1))
def test_a_quantile_is_within_one_bucket_of_numpys(values: list[int], q: float) -> None:
    """Small enough an error to act on, at any shape of the distribution."""
    truth = float(np.quantile(np.array(values) / NS_PER_S, q))

    estimate = filled([(0, value) for value in values]).quantile(0, q)

    assert truth / WIDTH <= estimate <= truth * WIDTH


@given(some_durations, st.lists(st.floats(0, 1), min_size=2, max_size=10))
def test_quantiles_rise_with_q_from_the_minimum_to_the_maximum(values: list[int], qs: list[float]) -> None:
    """A p50 above the p95 would discredit every other metric."""
    histograms = filled([(0, value) for value in values])

    estimates = [histograms.quantile(0, q) for q in [0.0, *sorted(qs), 1.0]]

    assert estimates == sorted(estimates)
    assert estimates[0] == min(values) / NS_PER_S
    assert estimates[-1] == max(values) / NS_PER_S


@given(observations)
def test_nothing_is_left_of_a_window_in_which_nothing_happened(pairs: Observations) -> None:
    """Else an idle loader would show the durations of an hour ago."""
    histograms = filled(pairs)

    assert points(histograms.minus(histograms.copy())) == points(Histograms(size=SERIES))


@given(observations, some_durations)
def test_a_window_counts_its_own_and_brackets_their_range(before: Observations, values: list[int]) -> None:
    """Counts are exact; minimum and maximum err outward, by a bucket at most."""
    histograms = filled(before)
    earlier = histograms.copy()
    histograms.add([0] * len(values), values)

    window, truth = histograms.minus(earlier).point(0), filled([(0, value) for value in values]).point(0)

    assert window.explicit_counts == truth.explicit_counts
    assert window.exponential_counts == truth.exponential_counts
    assert (window.count, window.sum, window.scale) == (truth.count, truth.sum, truth.scale)
    assert truth.min / WIDTH <= window.min <= truth.min
    assert truth.max <= window.max <= truth.max * WIDTH


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=864), st.integers(-600, 600))
@settings(max_examples=50)
def test_downscaling_keeps_the_total_and_the_place_of_every_bucket(counts: list[int], offset: int) -> None:
    """Bucket i becomes part of bucket i >> steps, negative indices too."""
    scale, first, merged = downscale(np.array(counts), offset)

    rebuilt: dict[int, int] = {}
    for i, count in enumerate(counts):
        if count:
            coarse = (offset + i) >> (MAX_SCALE - scale)
            rebuilt[coarse] = rebuilt.get(coarse, 0) + count
    assert {first + i: count for i, count in enumerate(merged) if count} == rebuilt
    assert len(merged) <= MAX_SIZE


nanoseconds_s = st.integers(1, 2**50).map(lambda ns: ns / NS_PER_S)
just_below = nanoseconds_s.map(lambda edge: math.nextafter(edge, 0))


@given(st.lists(nanoseconds_s | just_below, min_size=20))
def test_an_edge_in_nanoseconds_is_the_last_that_is_not_above_it(edges_s: list[float]) -> None:
    """A product of floats can miss a whole number by one, and a window's minimum with it."""
    whole = whole_ns(np.array(edges_s))

    assert (whole / NS_PER_S <= edges_s).all()
    assert ((whole + 1) / NS_PER_S > edges_s).all()
