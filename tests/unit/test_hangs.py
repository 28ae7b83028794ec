"""Whose fault a hang is: the one behind, not those who wait for it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from otel_train.aggregation.run_state import UNKNOWN
from otel_train.datamodel import Anchor
from otel_train.distributed.hang import compare, suspects
from otel_train.distributed.rank_report import RankReport, decode, encode, rank_report
from otel_train.recording.events import Op, SourceKind, code
from otel_train.recording.recorder import Recorder
from otel_train.rundata.flight import read_postmortem
from otel_train.testing import FakeClock
from tests.support.edges import Tape
from tests.support.flight import PrivateMemory
from tests.support.rank_reports import report
from tests.support.runs import Run

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


@pytest.mark.parametrize("after", ["", "data", "forward"])
def test_a_user_defined_stage_comes_after_the_stage_that_ended_last(after: str) -> None:
    """Of two ranks, one in a user-defined stage and one in backward, none was named."""
    waiting = {"stage": "backward", **STILL}
    stuck = {"stage": "augment", "after": after, **STILL}

    assert named(waiting, stuck) == [(1, "augment", "")]
    assert named(waiting, stuck, waiting, stuck) == [(1, "augment", ""), (3, "augment", "")]
    assert named(waiting, {**stuck, "after": "backward", "backwards": 1}) == [(0, "backward", "")]


def test_a_user_defined_stage_inside_a_built_in_one_has_its_place() -> None:
    """A layer that reduces over the ranks waits in forward for a rank that hangs there or before it."""
    waiting = {"stage": "reduce", "after": "data", "within": "forward", **STILL}

    assert named(waiting, {"stage": "other", "after": "data", **STILL}) == [(1, "other", "")]
    assert named(waiting, {"stage": "forward", "after": "data", **STILL}) == []


def test_where_the_place_of_a_rank_is_not_known_what_most_do_decides() -> None:
    """After its last batch, or in the same place as the others, a rank alone in a stage stands out."""
    waiting = {"stage": "backward", **STILL}
    stuck = {"stage": "collect", "after": UNKNOWN, **STILL}

    assert named(waiting, waiting, stuck) == [(2, "collect", "")]
    assert named(waiting, stuck) == []
    alike = {"stage": "other", "after": "backward", **STILL}
    assert named(alike, {**alike, "stage": "log"}, alike) == [(1, "log", "")]


def own(tape: Tape) -> Tape:
    return tape.spend(1).run(SourceKind.STAGE, "own", 3).spend(1)


LOOPS: dict[str, Callable[[Tape], Tape]] = {
    "usual": lambda tape: own(own(own(own(own(tape).ask()).forward()).backward()).update()),
    "without a loader": lambda tape: own(own(own(own(tape).forward()).backward()).update()),
    "accumulates": lambda tape: own(own(own(own(tape).micro()).micro()).update()),
    "two models": lambda tape: own(
        own(own(own(tape.ask()).forward().backward()).update()).forward().backward()
    ).update(optimizer="B"),
    "looks ahead": lambda tape: own(own(own(own(tape).forward()).ask()).backward()).update(),
    "marked": lambda tape: own(own(own(own(own(tape).ask()).forward()).backward()).update()).mark(),
}


def halted(whole: Tape, edges: int, folder: Path) -> tuple[RankReport, dict[str, Any]]:
    """A rank that wrote so many edges and hangs: what it reports, and its post-mortem a minute later."""
    tape, clock = Tape(started_ns=1), FakeClock(1)
    tape.sources, tape.times, tape.codes = whole.sources, whole.times[:edges], whole.codes[:edges]
    said = rank_report(Run().feed(tape).account, rank=0, host="a", barrier="", events={}, counted={})
    memory = PrivateMemory(1 << 10, Anchor(10**18, 0), folder / "flight.bin")
    recorder = Recorder(memory, clock=clock)
    recorder.set_identity({"rank": 0, "attempt": 0})
    for each in tape.sources:
        recorder.source(each.kind, each.name, each.phase)
    for at_ns, word in zip(tape.times, tape.codes, strict=True):
        clock.tick(at_ns - clock())
        recorder.edge(word)
    memory.poll(10**18 + 60 * 10**9)
    left = read_postmortem(folder)
    memory.close()
    return decode(encode(said._replace(stalled=True, quiet_s=60.0))), left


@pytest.mark.parametrize("step", [2, 10])
@pytest.mark.parametrize("loop", LOOPS)
def test_the_rank_that_hangs_is_named_wherever_it_hangs_and_never_one_that_waits(
    loop: str, step: int, tmp_path: Path
) -> None:
    """The others wait in the next backward: live and from the files, of two ranks and of two in four."""
    whole = Tape(started_ns=1).repeat(14, LOOPS[loop])
    each, backward = len(whole.codes) // 14, whole.source(SourceKind.BACKWARD, "backward")
    waiting = code(Op.BEGIN, backward)
    wrong: list[tuple[int, list[list[int]]]] = []
    seen: dict[int, tuple[RankReport, dict[str, Any]]] = {}
    for hangs in range(step * each, (step + 1) * each):
        waits = whole.codes.index(waiting, hangs)
        for edges in {waits, hangs} - seen.keys():
            seen[edges] = halted(whole, edges + 1, tmp_path)
        ranks = [seen[waits], seen[hangs]] * 2
        reports = {rank: said._replace(rank=rank) for rank, (said, _) in enumerate(ranks)}
        left = [{**document, "rank": rank} for rank, (_, document) in enumerate(ranks)]
        found = [
            [one.rank for one in named]
            for two in (2, 4)
            for named in (suspects(dict([*reports.items()][:two]), {}), compare(left[:two]))
        ]
        if found != ([[]] * 4 if hangs == waits else [[1], [1], [1, 3], [1, 3]]):
            wrong.append((hangs - step * each, found))

    assert wrong == []


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
