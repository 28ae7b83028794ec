"""Stalls: silence longer than the run's own steps explain."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from otel_train.aggregation.counters import ReclaimedTime
from otel_train.aggregation.run_events import MEDIAN_STEPS, OUTSIDE_NS, StallContext, Stalls

NS_PER_S = 10**9
OUTSIDE, START, EVALUATION, CHECKPOINT = (
    StallContext.OUTSIDE, StallContext.START, StallContext.EVALUATION, StallContext.CHECKPOINT,
)  # fmt: skip


def silent(at_s: float, *, stalled: bool, median_s: float = 0, **doing: Any) -> Callable[[Stalls], None]:
    """The agent looks; whether that is a stall which was not one before."""

    def do(stalls: Stalls) -> None:
        assert stalls.check(int(at_s * NS_PER_S), int(median_s * NS_PER_S), **doing) is stalled, at_s

    return do


def progress(at_s: float) -> Callable[[Stalls], None]:
    return lambda stalls: stalls.progress(int(at_s * NS_PER_S))


def others(seconds: float) -> Callable[[Stalls], None]:
    """What the most patient of the other ranks waits for."""
    return lambda stalls: setattr(stalls, "others_ns", int(seconds * NS_PER_S))


def threshold(seconds: float) -> Callable[[Stalls], None]:
    def check(stalls: Stalls) -> None:
        assert stalls.threshold_ns == seconds * NS_PER_S

    return check


@pytest.mark.parametrize("history", [
    # Ten hours of hanging are one event, not seventy thousand.
    pytest.param([silent(301, stalled=True), silent(400, stalled=False), progress(500), silent(600, stalled=False),
                  silent(1500, stalled=True)], id="one stall is reported once"),
    # A run whose steps take a minute is not hanging after five.
    pytest.param([silent(301, stalled=False, median_s=60), threshold(60 * MEDIAN_STEPS)],
                 id="slow steps raise the threshold"),
    # A thousand devices wait until someone hears of it: half an hour, or three steps where those are longer.
    *(pytest.param([silent(1799, stalled=False, median_s=median_s), threshold(most_s)],
                   id=f"steps of {median_s} s raise the threshold to {most_s} s")
      for median_s, most_s in ((300, 1800), (1200, 3600))),
    # A notebook whose training is over is not stalled.
    pytest.param([silent(9999, stalled=False, doing=OUTSIDE)], id="silence after the last loop means nothing"),
    # The first one may take half an hour; after one of seven minutes the next may take twenty-one.
    *(pytest.param([silent(1799, stalled=False, doing=doing), progress(60), silent(61 + 420, stalled=False, doing=doing),
                    threshold(600), progress(60 + 420), silent(500, stalled=False, doing=doing), threshold(3 * 420)],
                   id=f"{doing.name.lower()} has a threshold of its own which is learned")
      for doing in (EVALUATION, CHECKPOINT)),
    # Compilers run for minutes, once.
    pytest.param([silent(1799, stalled=False, doing=START), silent(1800, stalled=True, doing=START)],
                 id="the first step may take its time"),
    # Steps of ten minutes have no median for hours; a second shape is compiled as well.
    pytest.param([silent(600, stalled=False, doing=START), progress(600), silent(600 + 1199, stalled=False),
                  threshold(1200), silent(600 + 301, stalled=True, median_s=1)],
                 id="the second step may take as long as the first, until steps are known"),
    # What is done between steps and cannot be seen is done again; half an hour is the most that is learned.
    pytest.param([silent(301, stalled=True), progress(360), silent(360 + 719, stalled=False),
                  silent(360 + 720, stalled=True), progress(9999), silent(10000, stalled=False), threshold(1800)],
                 id="a pause that ended by itself is no stall the next time"),
    # While one rank evaluates the others sit in a collective: that is no hang, and no measure for one.
    pytest.param([others(1800), silent(400, stalled=False), progress(400), others(300), silent(700, stalled=True)],
                 id="a rank that waits for another is as patient and learns nothing from it"),
])  # fmt: skip
def test_a_silence_is_a_stall_where_nothing_explains_it(history: list[Callable[[Stalls], None]]) -> None:
    """A slow batch is no reason to page; after 300 s of silence there is one."""
    stalls = Stalls(0, after_s=300, reclaimed=ReclaimedTime())
    for event in history:
        event(stalls)


def test_the_threshold_after_the_loops_is_one_that_rules_know() -> None:
    """The age of the heartbeat goes on growing, and must not page."""
    stalls = Stalls(0, after_s=300, reclaimed=ReclaimedTime())
    stalls.check(9999 * NS_PER_S, 0, doing=OUTSIDE)

    assert (stalls.threshold_ns, stalls.quiet_ns) == (OUTSIDE_NS, 0)
    assert stalls.patience_ns == 1800 * NS_PER_S  # whoever waits for it does not wait for ever
