"""Stalls: silence longer than the run's own steps explain."""

from __future__ import annotations

import pytest

from otel_train.aggregation.counters import Reclaimed
from otel_train.aggregation.run_events import MEDIAN_STEPS, OUTSIDE_NS, StallContext, Stalls

NS_PER_S = 10**9


def seconds(number: float) -> int:
    return int(number * NS_PER_S)


def test_one_stall_is_reported_once() -> None:
    """Ten hours of hanging are one event, not seventy thousand."""
    stalls = Stalls(0, after_s=300, reclaimed=Reclaimed())
    stalls.look(seconds(301), 0)

    assert not stalls.look(seconds(400), 0)
    stalls.progress(seconds(500))
    assert not stalls.look(seconds(600), 0)
    assert stalls.look(seconds(500 + 1000), 0)


def test_slow_steps_raise_the_threshold() -> None:
    """A run whose steps take a minute is not hanging after five."""
    stalls = Stalls(0, after_s=300, reclaimed=Reclaimed())

    assert not stalls.look(seconds(301), seconds(60))
    assert stalls.threshold_ns == seconds(60 * MEDIAN_STEPS)


def test_silence_after_the_last_loop_means_nothing() -> None:
    """A notebook whose training is over is not stalled."""
    assert not Stalls(0, after_s=300, reclaimed=Reclaimed()).look(
        seconds(9999), 0, doing=StallContext.OUTSIDE
    )


def test_the_threshold_after_the_loops_is_one_that_rules_know() -> None:
    """The age of the heartbeat goes on growing, and must not page."""
    stalls = Stalls(0, after_s=300, reclaimed=Reclaimed())
    stalls.look(seconds(9999), 0, doing=StallContext.OUTSIDE)

    assert (stalls.threshold_ns, stalls.quiet_ns) == (OUTSIDE_NS, 0)
    assert stalls.patience_ns == seconds(1800)  # whoever waits for it does not wait for ever


@pytest.mark.parametrize("doing", [StallContext.EVALUATION, StallContext.CHECKPOINT])
def test_an_evaluation_or_checkpoint_has_a_threshold_of_its_own_which_is_learned(doing: StallContext) -> None:
    """The first one may take half an hour; after one of seven minutes the next may take twenty-one."""
    stalls = Stalls(0, after_s=300, reclaimed=Reclaimed())

    assert not stalls.look(seconds(1799), 0, doing=doing)
    stalls.progress(seconds(60))
    assert not stalls.look(seconds(61 + 420), 0, doing=doing)
    assert stalls.threshold_ns == seconds(600)
    stalls.progress(seconds(60 + 420))
    stalls.look(seconds(500), 0, doing=doing)
    assert stalls.threshold_ns == seconds(3 * 420)


def test_the_first_step_may_take_its_time() -> None:
    """Compilers run for minutes, once."""
    stalls = Stalls(0, after_s=300, reclaimed=Reclaimed())

    assert not stalls.look(seconds(1799), 0, doing=StallContext.START)
    assert stalls.look(seconds(1800), 0, doing=StallContext.START)


def test_a_pause_that_ended_by_itself_is_no_stall_the_next_time() -> None:
    """What is done between steps and cannot be seen is done again; half an hour is the most that is learned."""
    stalls = Stalls(0, after_s=300, reclaimed=Reclaimed())
    assert stalls.look(seconds(301), 0)
    stalls.progress(seconds(360))

    assert not stalls.look(seconds(360 + 719), 0)
    assert stalls.look(seconds(360 + 720), 0)
    stalls.progress(seconds(9999))
    stalls.look(seconds(10000), 0)
    assert stalls.threshold_ns == seconds(1800)


def test_a_rank_that_waits_for_another_is_as_patient_and_learns_nothing_from_it() -> None:
    """While one rank evaluates the others sit in a collective: that is no hang, and no measure for one."""
    stalls = Stalls(0, after_s=300, reclaimed=Reclaimed())
    stalls.others_ns = seconds(1800)
    assert not stalls.look(seconds(400), 0)
    stalls.progress(seconds(400))
    stalls.others_ns = seconds(300)

    assert stalls.look(seconds(700), 0)
