"""What holds for every job: the name of a rank, and the unit of time, decide nothing."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from otel_train.distributed.rank_report import RankReport
from otel_train.distributed.straggler import Straggler, Stragglers, window_between
from tests.support.rank_reports import later, world

STAGES = ("data", "forward", "backward", "optimizer", "other")
times = st.lists(st.floats(1e-4, 1.0), min_size=len(STAGES), max_size=len(STAGES))
jobs = st.lists(times, min_size=2, max_size=6)


def window(
    spent: list[list[float]], *, scale: float = 1.0
) -> tuple[dict[int, RankReport], dict[int, RankReport]]:
    begun = world(len(spent))
    now = {
        rank: later(begun[rank], 10, {s: t * scale for s, t in zip(STAGES, mine, strict=True)})
        for rank, mine in enumerate(spent)
    }
    return begun, now


def synchronous(spent: list[list[float]]) -> list[list[float]]:
    """Backward filled up, so that all steps last as long as the longest."""
    longest = max(map(sum, spent))
    return [[*mine[:2], mine[2] + longest - sum(mine), *mine[3:]] for mine in spent]


def candidate(spent: list[list[float]], *, scale: float = 1.0) -> Straggler | None:
    found = window_between(*window(spent, scale=scale))
    assert found is not None
    return found.candidate


@given(jobs, st.data())
def test_renaming_the_ranks_renames_the_finding(spent: list[list[float]], data: st.DataObject) -> None:
    """Rank 0 is treated like any other."""
    spent = synchronous(spent)
    order = data.draw(st.permutations(range(len(spent))))
    plain, renamed = candidate(spent), candidate([spent[rank] for rank in order])

    assert (plain is None) == (renamed is None)
    if plain is not None and renamed is not None:
        # Of two that are slow by as much, in stages of their own, either may be named.
        same = spent[order[renamed.rank]] == spent[plain.rank]
        assert same or renamed.excess_s == pytest.approx(plain.excess_s)


EQUALS = [[1.0, 1.0, 1.0, 1.0, 0.75], [1.0, 1.0, 1.0, 1.0, 0.25], [1.0, 0.75, 1.0, 1.0, 1.0]]
"""Ranks 0 and 2 are slow by as much. Rounding must not decide which of them is named: it has to be the same in every window."""


@given(jobs, st.sampled_from([0.01, 0.5, 2.0, 100.0]))
@example(EQUALS, 0.01)
def test_a_job_twice_as_slow_has_the_same_straggler(spent: list[list[float]], scale: float) -> None:
    """Thresholds are shares of the step, never seconds."""
    spent = synchronous(spent)
    plain, scaled = candidate(spent), candidate(spent, scale=scale)

    if plain is None or scaled is None:
        # Only a job on the very edge of a threshold may fall on both sides of it.
        seen = plain or scaled
        assert seen is None or abs(seen.ratio - 0.05) < 1e-6 or abs(seen.waits_s - seen.excess_s / 2) < 1e-6
    else:
        assert (plain.rank, plain.stage) == (scaled.rank, scaled.stage)


@given(times, st.integers(2, 8), st.integers(1, 20))
def test_without_a_difference_no_rank_is_named(mine: list[float], ranks: int, rounds: int) -> None:
    """No evidence, no finding."""
    stragglers = Stragglers()
    now = world(ranks)
    stragglers.take(now)
    for _ in range(rounds):
        now = {rank: later(before, 10, dict(zip(STAGES, mine, strict=True))) for rank, before in now.items()}
        stragglers.take(now)

    assert stragglers.slow is None


@given(jobs)
def test_whoever_is_named_waits_least(spent: list[list[float]]) -> None:
    """The slow rank arrives last at the barrier: it never is the one with the longest backward."""
    spent = synchronous(spent)
    found = candidate(spent)

    if found is not None:
        waits = [mine[2] + mine[3] for mine in spent]
        assert waits[found.rank] == pytest.approx(min(waits))
