"""Whose fault a hang is: the one behind, not those who wait for it."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from otel_train.distributed.hang import MOST_NAMED, suspects
from tests.support.rank_reports import report

STILL = {"stalled": True, "quiet_s": 300.0}


def named(*ranks: dict[str, Any], silent: dict[int, float] | None = None) -> list[tuple[int, str, str]]:
    reports = {rank: report(rank, **facts) for rank, facts in enumerate(ranks)}
    return [(found.rank, found.stage, found.loader) for found in suspects(reports, silent or {})]


def test_the_rank_still_in_its_loader_is_named_and_not_those_in_backward() -> None:
    """In a synchronous hang all ranks freeze within one step; only the place in the step tells."""
    waiting = {"stage": "backward", **STILL}
    stuck = {"stage": "data", "loader": "train", "after": "optimizer", **STILL}

    assert named(waiting, stuck, waiting) == [(1, "data", "train")]
    assert named(waiting, stuck) == [(1, "data", "train")]


def test_the_rank_that_is_a_step_behind_is_named() -> None:
    """Its own step has not closed, while the others wait in the next."""
    waiting = {"stage": "forward", "step": 8, **STILL}
    stuck = {"stage": "other", "after": "optimizer", "step": 7, **STILL}

    assert named(waiting, waiting, stuck) == [(2, "other", "")]


def test_time_between_two_stages_has_a_place_in_the_step() -> None:
    """A lock taken between forward and backward hangs as well."""
    waiting = {"stage": "backward", "after": "forward", **STILL}
    stuck = {"stage": "other", "after": "forward", **STILL}

    assert named(waiting, stuck) == [(1, "other", "")]


def test_a_user_defined_stage_is_compared_with_what_most_do() -> None:
    """It has no place in a step, but a rank alone in it stands out."""
    waiting = {"stage": "backward", **STILL}
    stuck = {"stage": "augment", "after": "", **STILL}

    assert named(waiting, waiting, stuck) == [(2, "augment", "")]
    assert named(waiting, stuck) == []


def test_where_nothing_tells_the_ranks_apart_none_is_named() -> None:
    """All in backward: it may be the network. A wrong name costs a night."""
    assert named(*[{"stage": "backward", **STILL}] * 4) == []


def test_a_rank_that_makes_progress_is_late_and_not_stuck() -> None:
    """Rank 0 evaluates for ten minutes, the others wait in backward: none hangs."""
    waiting = {"stage": "backward", **STILL}

    assert named({"stage": "forward", "step": 99, "doing": "evaluating"}, waiting, waiting) == []


def test_as_long_as_no_rank_stands_still_none_is_suspected() -> None:
    """Ranks are never at the same place at the same time."""
    assert named({"stage": "data"}, {"stage": "backward"}) == []


def test_a_rank_that_sends_nothing_any_more_is_named_first() -> None:
    """Killed, stopped or cut off: it cannot say so itself, and the others only wait."""
    waiting = {"stage": "backward", **STILL}
    silent = {"stage": "data", "loader": "train"}

    assert named(waiting, silent, silent={1: 12.0}) == [(1, "data", "train")]
    found = suspects({1: report(1)}, {1: 12.0})
    assert (found[0].silent, found[0].quiet_s) == (True, 12.0)


def test_a_rank_whose_loops_are_over_is_not_waited_for() -> None:
    """It has said good-bye; that it is silent means nothing."""
    waiting = {"stage": "backward", **STILL}

    assert named({"over": True, "step": 10}, waiting, waiting, silent={0: 500.0}) == []


def test_when_a_whole_node_is_gone_its_first_ranks_are_named() -> None:
    """A list of a thousand names is too long to act on."""
    ranks = {rank: report(rank) for rank in range(64)}

    assert [s.rank for s in suspects(ranks, dict.fromkeys(ranks, 400.0))] == list(range(MOST_NAMED))


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["data", "forward", "backward", "other"]), st.integers(5, 7), st.booleans()
        ),
        min_size=2,
        max_size=6,
    ),
    st.data(),
)
def test_the_numbers_of_the_ranks_do_not_matter(places: list[Any], data: st.DataObject) -> None:
    """Rank 0 is suspected as soon as any other."""
    order = data.draw(st.permutations(range(len(places))))

    def found(each: list[Any]) -> list[Any]:
        reports = {
            rank: report(rank, stage=stage, step=step, stalled=stalled, quiet_s=9.0)
            for rank, (stage, step, stalled) in enumerate(each)
        }
        return sorted(each[suspect.rank] for suspect in suspects(reports, {}))

    assert found(places) == found([places[rank] for rank in order])
