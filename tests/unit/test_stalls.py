"""Stalls: silence longer than the run's own steps explain."""

from __future__ import annotations

from otel_train.aggregate.reclaimed import Reclaimed
from otel_train.aggregate.stalls import MEDIAN_STEPS, Stalls

NS_PER_S = 10**9


def seconds(number: float) -> int:
    return int(number * NS_PER_S)


def test_a_silence_is_a_stall_only_after_its_threshold() -> None:
    """A slow batch is no reason to wake anybody."""
    stalls = Stalls(0, after_s=300, reclaimed=Reclaimed())

    assert not stalls.look(seconds(299), 0, over=False)
    assert stalls.look(seconds(300), 0, over=False)


def test_one_stall_is_told_once() -> None:
    """Ten hours of hanging are one event, not seventy thousand."""
    stalls = Stalls(0, after_s=300, reclaimed=Reclaimed())
    stalls.look(seconds(301), 0, over=False)

    assert not stalls.look(seconds(400), 0, over=False)
    stalls.progress(seconds(500))
    assert not stalls.look(seconds(600), 0, over=False)
    assert stalls.look(seconds(801), 0, over=False)


def test_slow_steps_raise_the_threshold() -> None:
    """A run whose steps take a minute is not hanging after five."""
    stalls = Stalls(0, after_s=300, reclaimed=Reclaimed())

    assert not stalls.look(seconds(301), seconds(60), over=False)
    assert stalls.threshold_ns == seconds(60 * MEDIAN_STEPS)


def test_silence_after_the_last_loop_means_nothing() -> None:
    """A notebook whose training is over is not stalled."""
    assert not Stalls(0, after_s=300, reclaimed=Reclaimed()).look(seconds(9999), 0, over=True)


def test_stalls_are_counted_by_stage() -> None:
    """In a hang of all ranks the one whose stage differs is the suspect."""
    stalls = Stalls(0, after_s=300, reclaimed=Reclaimed())
    stalls.count("data")
    stalls.count("backward")
    stalls.count("data")

    assert stalls.events == {"data": 2, "backward": 1}
