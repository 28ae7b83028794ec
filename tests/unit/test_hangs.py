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
from otel_train.distributed.hang import suspects, suspects_after
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
BACKWARD = {"stage": "backward", **STILL}
"""Where the ranks wait that another one holds up."""


def at(stage: str, after: str = "", **facts: Any) -> dict[str, Any]:
    """A rank that stands still there."""
    return {"stage": stage, "after": after, **STILL, **facts}


IN_DATA = at("data", "optimizer", loader="train")
ALIKE, REDUCES = at("other", "backward"), at("reduce", "data", within="forward")


@pytest.mark.parametrize(("ranks", "silent", "named"), [
    # In a synchronous hang all ranks freeze within one step; only the place in the step tells.
    pytest.param([BACKWARD, IN_DATA, BACKWARD], {}, [(1, "data", "train")], id="the rank that is still in its loader"),
    pytest.param([BACKWARD, IN_DATA], {}, [(1, "data", "train")], id="of two ranks as well"),
    # Its own step has not closed, while the others wait in the next.
    pytest.param([at("forward", step=8)] * 2 + [at("other", "optimizer", step=7)], {}, [(2, "other", "")],
                 id="the rank that is a step behind"),
    # A lock taken between forward and backward hangs as well.
    pytest.param([at("backward", "forward"), at("other", "forward")], {}, [(1, "other", "")],
                 id="time between two stages has a place in the step"),
    # Of two ranks, one in a user-defined stage and one in backward, none was named.
    *(pytest.param([BACKWARD, at("augment", after)] * (number // 2), {}, [(r, "augment", "") for r in range(1, number, 2)],
                   id=f"a user-defined stage comes after the stage that ended last: {after}, of {number} ranks")
      for after in ("", "data", "forward") for number in (2, 4)),
    pytest.param([BACKWARD, at("augment", "backward", backwards=1)], {}, [(0, "backward", "")],
                 id="a user-defined stage after the backward that another rank is in"),
    # A layer that reduces over the ranks waits in forward for a rank that hangs there or before it.
    pytest.param([REDUCES, at("other", "data")], {}, [(1, "other", "")], id="a user-defined stage inside a built-in one"),
    pytest.param([REDUCES, at("forward", "data")], {}, [], id="none of two that are in the same built-in one"),
    # After its last batch, or in the same place as the others, a rank alone in a stage stands out.
    pytest.param([BACKWARD, BACKWARD, at("collect", UNKNOWN)], {}, [(2, "collect", "")],
                 id="where the place of a rank is not known what most do decides"),
    pytest.param([BACKWARD, at("collect", UNKNOWN)], {}, [], id="of two there is no most"),
    pytest.param([ALIKE, {**ALIKE, "stage": "log"}, ALIKE], {}, [(1, "log", "")], id="the one alone in its stage"),
    # All in backward: it may be the network. A wrong name costs a night.
    pytest.param([BACKWARD] * 4, {}, [], id="none where nothing tells the ranks apart"),
    # Rank 0 evaluates for ten minutes, the others wait in backward: none hangs.
    pytest.param([{"stage": "forward", "step": 99, "doing": "evaluating"}, BACKWARD, BACKWARD], {}, [],
                 id="none where a rank makes progress"),
    # When a hang ends: rank 0 has written that it goes on, the reports of the others are five seconds old.
    pytest.param([{"stage": "forward", "step": 99, "quiet_s": 0.01}, BACKWARD, BACKWARD, {**BACKWARD, "stage": "other"}], {}, [],
                 id="none where one goes on that is further"),
    # Ranks are never at the same place at the same time.
    pytest.param([{"stage": "data"}, {"stage": "backward"}], {}, [], id="none as long as no rank stands still"),
    # Killed, stopped or cut off: it cannot say so itself, and the others only wait.
    pytest.param([BACKWARD, {"stage": "data", "loader": "train"}], {1: 12.0}, [(1, "data", "train")],
                 id="a rank that sends nothing any more"),
    # It has said good-bye; that it is silent means nothing.
    pytest.param([{"over": True, "step": 10}, BACKWARD, BACKWARD], {0: 500.0}, [],
                 id="no rank whose loops are over"),
])  # fmt: skip
def test_the_rank_that_holds_up_the_others_is_named(
    ranks: list[dict[str, Any]], silent: dict[int, float], named: list[tuple[int, str, str]]
) -> None:
    """And not those that wait for it."""
    found = suspects({rank: report(rank, **facts) for rank, facts in enumerate(ranks)}, silent)

    assert [(each.rank, each.stage, each.loader) for each in found] == named
    assert [each.silent for each in found] == [each.rank in silent for each in found]
    assert all(each.quiet_s == silent.get(each.rank, 300.0) for each in found)


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
            for named in (suspects(dict([*reports.items()][:two]), {}), suspects_after(left[:two]))
        ]
        if found != ([[]] * 4 if hangs == waits else [[1], [1], [1, 3], [1, 3]]):
            wrong.append((hangs - step * each, found))

    assert wrong == []


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
