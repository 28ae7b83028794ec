"""The ledger: stalls and compiling, taken out of the stages they were measured in."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from otel_train.accounting.steps import NOTHING, StepBook
from otel_train.accounting.types import Activity, SourceTable
from otel_train.aggregation.counters import MOST_RECLAIMED, Compiles, ReclaimedTime, Recompiled, Totals
from otel_train.aggregation.run_events import Stalls
from otel_train.aggregation.series_names import SeriesNames
from otel_train.datamodel import Compile
from otel_train.recording.events import Instrumented, SourceKind

NS_PER_S = 10**9


def seconds(number: float) -> int:
    return int(number * NS_PER_S)


def ledger(reclaimed: ReclaimedTime, *lasted_ns: int) -> dict[Activity, int]:
    """What a run's ledger says of productive time in pieces that follow each other from 0."""
    sources = SourceTable().extend([Instrumented(SourceKind.STAGE, "work")])
    book = StepBook(sources, reclaimed.within, by_step=False)
    begun_ns = 0
    for ns in lasted_ns:
        book.train([((0,), begun_ns, ns, NOTHING, None, None, (), 0)], -1, ())
        begun_ns += ns
        reclaimed.forget(begun_ns)
    activity_ns = book.take().activity_ns
    return {activity: int(activity_ns[activity]) for activity in Activity if activity_ns[activity]}


def test_the_time_of_a_stall_goes_to_its_own_activity() -> None:
    """Hours of hanging must not read as productive, from the last progress on; what came before and after stays what it was."""
    reclaimed = ReclaimedTime()
    stalls = Stalls(0, 300, reclaimed)
    stalls.progress(seconds(10))
    stalls.check(seconds(400), 0)
    stalls.progress(seconds(510))

    found = ledger(reclaimed, seconds(10), seconds(500), seconds(5))

    assert found == {Activity.PRODUCTIVE: seconds(15), Activity.STALLED: seconds(500)}


def test_time_that_is_accounted_later_is_found_as_well() -> None:
    """The hanging stage ends long after the stall was reported."""
    reclaimed = ReclaimedTime()
    reclaimed.add(Activity.STALLED, 310, 510)

    found = ledger(reclaimed, 10, 400, 100, 5)

    assert found == {Activity.PRODUCTIVE: 315, Activity.STALLED: 200}


def test_compiling_inside_a_forward_is_no_productive_time() -> None:
    """The first step of a compiled model takes a minute: the run's ledger says what for."""
    reclaimed = ReclaimedTime()
    totals = Totals(SeriesNames())
    compiles = Compiles(reclaimed, totals)

    again = compiles.add([Compile(100, 160, again=False), Compile(165, 170, again=True)])

    assert ledger(reclaimed, 90, 90, 20) == {Activity.COMPILE: 65, Activity.PRODUCTIVE: 135}
    assert compiles.durations.count(0) == 2
    assert [each.begun_ns for each in again] == [165]
    assert totals.recompiled.count == 1


def test_where_it_is_unknown_whether_it_was_compiled_before_nothing_is_said() -> None:
    """JAX compiles a hundred small things before the first step: zero recompilations would be a guess."""
    compiles = Compiles(ReclaimedTime(), Totals(SeriesNames()))
    compiles.add([Compile(0, 5, again=None, compiler="jax")])
    unknown = compiles.judged
    compiles.add([Compile(5, 9, again=False, compiler="jax")])

    assert (unknown, compiles.judged, compiles.durations.count(0)) == (False, True, 2)


def test_a_window_counts_what_was_compiled_again_in_it() -> None:
    """After ``reset_window()`` the compiles of warm-up are no reason to complain."""
    totals = Totals(SeriesNames())
    compiles = Compiles(ReclaimedTime(), totals)
    compiles.add([Compile(0, 5, again=True)])
    before = totals.copy()
    compiles.add([Compile(10, 17, again=True, compiler="jax")])

    assert totals.since(before).recompiled == Recompiled(1, 7, 1)
    assert totals.recompiled == Recompiled(2, 12, 1)


@given(
    intervals=st.lists(st.tuples(st.sampled_from(Activity), st.integers(0, 60), st.integers(0, 20))),
    window=st.tuples(st.integers(0, 80), st.integers(0, 30)),
    forgotten=st.integers(0, 80),
)
def test_of_intervals_that_overlap_the_one_added_first_applies(
    intervals: list[tuple[Activity, int, int]], window: tuple[int, int], forgotten: int
) -> None:
    """As if each nanosecond were assigned by itself."""
    reclaimed, by_ns = ReclaimedTime(), dict[int, Activity]()
    for activity, begun, length in intervals:
        reclaimed.add(activity, begun, begun + length)
        for ns in range(begun, begun + length):
            by_ns.setdefault(ns, activity)
    first = max(window[0], forgotten)
    reclaimed.forget(forgotten)

    found: Counter[Activity] = Counter()
    for activity, ns in reclaimed.within(first, first + window[1]):
        found[activity] += ns
    assert found == Counter(by_ns[ns] for ns in range(first, first + window[1]) if ns in by_ns)


def test_compilations_without_a_training_thread_are_bounded() -> None:
    """JAX without `make_step`: no thread leads, so that none is forgotten, and each one was compared with all before."""
    reclaimed = ReclaimedTime()
    for number in range(2 * MOST_RECLAIMED):
        reclaimed.add(Activity.COMPILE, 10 * number, 10 * number + 3)
    newest_ns = 10 * 2 * MOST_RECLAIMED

    assert reclaimed.within(0, newest_ns) == [(Activity.COMPILE, 3)] * MOST_RECLAIMED
    assert reclaimed.within(newest_ns - 10, newest_ns) == [(Activity.COMPILE, 3)]


def test_compilations_inside_one_are_one_interval() -> None:
    """The inner ones end first, and a model has thousands of them."""
    reclaimed = ReclaimedTime()
    for number in range(50):
        reclaimed.add(Activity.COMPILE, 10 * number, 10 * number + 3)
    reclaimed.add(Activity.COMPILE, 0, 1000)

    assert reclaimed.within(0, 2000) == [(Activity.COMPILE, 1000)]


@given(
    lasted=st.lists(st.integers(0, 50), max_size=20),
    intervals=st.lists(st.tuples(st.sampled_from(Activity), st.integers(0, 300), st.integers(0, 100))),
)
def test_the_ledger_adds_up_whatever_is_taken_out(
    lasted: list[int], intervals: list[tuple[Activity, int, int]]
) -> None:
    """The activities of a run add up to its wall time, and none of them ever shrinks."""
    reclaimed = ReclaimedTime()
    for activity, begun, length in intervals:
        reclaimed.add(activity, begun, begun + length)

    found = ledger(reclaimed, *lasted)

    assert sum(found.values()) == sum(lasted)
    assert all(spent > 0 for spent in found.values())
