"""Which rank a dead run was waiting for, read from files: no process is left to ask."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from otel_train.cli.postmortem import render_overview, sentence
from otel_train.console.text import TextLayout
from otel_train.distributed.hang import suspects_after


def rank(number: int, stage: str | None = "backward", **facts: Any) -> dict[str, Any]:
    """What the flight file of a rank says."""
    inside = [] if stage is None else [{"stage": stage, "loader": "train", "for_seconds": 9.0}]
    usual = {
        "run_id": "job", "rank": number, "host": "node", "attempt": 0, "alive": False, "state": "running", "step": 7,
        "open": inside, "after": "", "backwards": 0, "steps_in_file": 7, "quiet_seconds": 9.0, "recent_steps": [], "end_cause": None,
        "ended_unix_s": None, "last_sign_unix_s": None,
        "warnings": [],
    }  # fmt: skip
    return usual | facts


def named(*reports: dict[str, Any]) -> list[tuple[int, str]]:
    return [(suspect.rank, suspect.stage) for suspect in suspects_after(reports)]


def test_the_rank_that_was_behind_is_named() -> None:
    """All were killed together after an hour of hanging: the place in the step tells."""
    assert named(rank(0), rank(1, "data"), rank(2)) == [(1, "data")]
    assert named(rank(0), rank(1, None, step=6, after="optimizer")) == [(1, "other")]


def test_the_rank_that_vanished_is_named_before_those_that_failed_after_it() -> None:
    """They failed because it was gone."""
    (suspect,) = suspects_after([rank(0, state="failed"), rank(1, "forward"), rank(2, state="terminated")])

    assert (suspect.rank, suspect.stage, suspect.silent) == (1, "forward", True)


def test_ranks_that_were_killed_together_are_compared_by_their_place() -> None:
    """Read at once: the agent has written how two of them ended, and one lost its connection before its turn came."""
    ranks = [rank(0, state="killed"), rank(1, "data"), rank(2, state="killed"), rank(3)]

    assert named(*ranks) == [(1, "data")]
    assert named(*ranks, rank(4, state="failed")) == [(1, "data")]


def test_the_rank_that_its_agent_saw_killed_vanished() -> None:
    """The out-of-memory killer took it; the others failed in the next collective operation, in the same place."""
    (suspect,) = suspects_after([rank(0, state="failed"), rank(1, state="killed"), rank(2, state="failed")])

    assert (suspect.rank, suspect.silent) == (1, True)


def test_ranks_that_trained_until_they_were_stopped_have_no_suspect() -> None:
    """Wherever they were at that instant, none waited for another; a hang is longer than a step."""
    trained: dict[str, Any] = {"state": "terminated", "recent_steps": [{"duration_s": 4.0}]}
    ranks = [rank(0, **trained, quiet_seconds=0.4), rank(1, "data", **trained, quiet_seconds=3.9)]

    assert named(*ranks) == []
    assert named(*(each | {"quiet_seconds": 4.1} for each in ranks)) == [(1, "data")]


def test_a_rank_that_was_killed_after_others_had_failed_did_not_vanish() -> None:
    """It hung, and they gave up waiting; then the launcher killed it."""
    waited: dict[str, Any] = {"state": "failed", "ended_unix_s": 40.0}
    ranks = [rank(0, **waited), rank(1, "data", state="killed", ended_unix_s=70.0), rank(2, **waited)]

    (suspect,) = suspects_after(ranks)
    assert (suspect.rank, suspect.stage, suspect.silent) == (1, "data", False)


def test_a_rank_whose_death_its_agent_noticed_late_vanished_first() -> None:
    """The other failed at once, and says so itself; that a process was killed is known when the agent looks."""
    failed = rank(0, state="failed", ended_unix_s=40.0, quiet_seconds=0.1)
    killed = rank(1, state="killed", ended_unix_s=40.4, quiet_seconds=0.2)

    (suspect,) = suspects_after([failed, killed])
    assert (suspect.rank, suspect.silent) == (1, True)
    assert "Nothing tells" in sentence([], [failed, killed | {"state": "terminated"}])


NODE_B: dict[str, Any] = {"host": "node-b", "alive": None, "quiet_seconds": 0.1, "last_sign_unix_s": 40.0}
"""A rank on a host that lost its power: its agent wrote last at that time."""


def test_the_ranks_of_a_host_that_lost_its_power_are_named_while_the_others_wait() -> None:
    """It said that nothing distinguished the ranks, for two minutes in which two of them wrote nothing."""
    waiting: dict[str, Any] = {"alive": True, "quiet_seconds": 120.0, "last_sign_unix_s": 160.5}
    ranks = [rank(0, **waiting), rank(1, **waiting), rank(2, None, **NODE_B), rank(3, **NODE_B)]

    assert named(*ranks) == [(2, "other"), (3, "backward")]
    assert named(*ranks, rank(4, **NODE_B)) == [(2, "other"), (3, "backward"), (4, "backward")]
    for later in ({"alive": False, "state": "killed", "ended_unix_s": 160.0}, {"alive": None}):
        assert named(*(each | later for each in ranks[:2]), *ranks[2:]) == [(2, "other"), (3, "backward")]
    assert sentence(suspects_after(ranks), ranks) == (
        "Ranks 2, 3 on node-b are silent since 00:00:40 UTC, and the others went no further: that host or container is gone, or "
        "cut off from the run directory. Rank 2 was between two stages, step 7."
    )


def test_the_ranks_of_a_host_that_is_gone_are_named_when_the_others_have_lost_the_connection() -> None:
    """They failed within the second in which the agent there wrote last."""
    failed: dict[str, Any] = {
        "state": "failed",
        "ended_unix_s": 40.9,
        "last_sign_unix_s": 40.9,
        "quiet_seconds": 0.1,
    }
    for alive in (False, None):  # read on that host, or elsewhere
        ranks = [rank(each, **failed, alive=alive) for each in (0, 1)]
        assert named(*ranks, rank(2, **NODE_B), rank(3, **NODE_B)) == [(2, "backward"), (3, "backward")]


def test_ranks_whose_agent_only_cannot_write_are_not_named() -> None:
    """A mount of one host hangs and training goes on; later another rank raises."""
    training: dict[str, Any] = {"alive": True, "quiet_seconds": 0.1, "last_sign_unix_s": 160.0}
    failed: dict[str, Any] = {"state": "failed", "ended_unix_s": 160.0, "quiet_seconds": 0.1}

    for others in (training, failed):
        assert named(rank(0, **others), rank(1, **others), rank(2, **NODE_B), rank(3, **NODE_B)) == []


def test_a_rank_that_was_heard_of_after_another_had_failed_did_not_vanish() -> None:
    """The scheduler killed that host with its agent a minute after the exception."""
    failed: dict[str, Any] = {"state": "failed", "ended_unix_s": 30.0, "quiet_seconds": 0.1}
    killed: dict[str, Any] = {"state": "killed", "ended_unix_s": 30.0}
    for alive in (None, False):
        assert named(rank(0, **failed), rank(1, **NODE_B | {"alive": alive})) == []
    others = [rank(each, **failed | {"ended_unix_s": 31.0}) for each in (1, 2)]
    assert named(rank(0, **killed), *others, rank(3, **NODE_B)) == [(0, "backward")]


def test_a_rank_that_was_killed_vanished_wherever_its_directory_is_read() -> None:
    """A run directory that was copied to another machine named none."""
    failed = rank(0, alive=None, state="failed", ended_unix_s=41.0)
    killed = rank(1, alive=None, state="killed", ended_unix_s=40.5)

    assert named(failed, killed) == [(1, "backward")]
    assert "Rank 1 vanished" in sentence(suspects_after([failed, killed]), [failed, killed])


REPORTED = {
    "rank": 3, "host": "node-b", "step": 7, "stage": "other", "loader": "", "quiet_s": 18.0, "silent": True
}  # fmt: skip


def test_a_rank_whose_files_are_on_its_host_is_named_by_the_reports_that_the_ranks_exchanged() -> None:
    """Each host had a run directory of its own, and that of rank 0 said that nothing distinguished the ranks."""
    ranks = [rank(0, reported_suspects=[REPORTED], world_size=4), rank(1, reported_suspects=[], world_size=4)]
    text = " ".join(render_overview(TextLayout(100, color=False, unicode=False), ranks, []).split())

    assert "2 of 4 ranks" in text
    assert (
        "Rank 3 on node-b held the run up, by the reports that the ranks exchanged: between two stages, step 7, silent for 18.0 s."
        in text
    )
    assert "No rank is behind" in sentence([], [each | {"world_size": 2} for each in ranks])


def test_a_rank_that_was_killed_because_it_had_waited_too_long_did_not_vanish() -> None:
    """The watchdog of NCCL aborts the first that gives up, and the launcher stops the others. One that did not wait did vanish."""
    stopped: dict[str, Any] = {"state": "terminated", "ended_unix_s": 41.0}
    aborted: dict[str, Any] = {"state": "killed", "ended_unix_s": 40.0, "end_cause": "SIGABRT"}
    others = [rank(1, "data", **stopped), rank(2, **stopped), rank(3, **stopped)]

    assert named(rank(0, **aborted), *others) == [(1, "data")]
    assert named(rank(0, **aborted, quiet_seconds=0.5), *others) == [(0, "backward")]
    assert named(rank(0, None, after="data", step=6, **aborted), *others) == [(0, "other")]


def test_a_rank_that_failed_without_having_waited_was_held_up_by_none() -> None:
    """The others stood where they were until the launcher stopped them, at an earlier place even."""
    failed = rank(
        1, None, step=8, state="failed", ended_unix_s=40.0, end_cause="ValueError: no", quiet_seconds=0.1
    )
    stopped = [rank(each, state="terminated", ended_unix_s=41.5) for each in (0, 2)]
    ranks = [stopped[0], failed, stopped[1]]

    assert named(*ranks) == []
    assert sentence([], ranks) == "Rank 1 failed first, 1.50 s before rank 0 was terminated: ValueError: no."
    assert "Nothing tells" in sentence([], [each | {"state": "interrupted"} for each in ranks])


def test_a_rank_alone_and_a_run_that_finished_have_no_suspect() -> None:
    """Every rank is last in something."""
    assert named(rank(0)) == []
    assert named(rank(0, "data", state="finished"), rank(1, state="finished")) == []


def test_ranks_of_different_attempts_are_not_compared() -> None:
    """One rank never came back after the restart: its file is of the life before."""
    assert named(rank(0), rank(1, "data", attempt=1)) == []


def test_of_a_run_on_several_hosts_that_of_the_rank_is_named() -> None:
    """Of a thousand ranks the number alone sends whoever reads it to a table of the scheduler."""

    def on_nodes(rank_of: Callable[[int], dict[str, Any]]) -> str:
        reports = [rank_of(number) | {"host": f"node{number // 8}"} for number in range(1000)]
        return sentence(suspects_after(reports), reports)

    def ended(number: int) -> dict[str, Any]:
        state, cause = ("failed", "CUDA error") if number == 777 else ("terminated", "SIGTERM")
        return rank(
            number, state=state, end_cause=cause, quiet_seconds=0.1, ended_unix_s=100.0 + 3 * (number != 777)
        )

    one = on_nodes(lambda number: rank(number, "data" if number == 777 else "backward", alive=True))
    assert one.startswith("Rank 777 on node97 held the run up, in stage data of loader train")
    node = on_nodes(lambda number: rank(number, "data" if number // 8 == 12 else "backward", alive=True))
    assert node.startswith("Ranks 96-103 on node12 held the run up; rank 96 in stage data")
    killed = on_nodes(lambda number: rank(number, state="killed" if number == 777 else "failed"))
    assert killed.startswith("Rank 777 on node97 vanished, in stage backward")
    assert (
        on_nodes(ended) == "Rank 777 on node97 failed first, 3.00 s before rank 0 was terminated: CUDA error."
    )


def test_the_rank_that_ran_out_of_memory_before_all_others_were_killed_is_named() -> None:
    """A launcher kills them with SIGKILL: nothing was said of the one that the kernel had killed seconds before."""

    def ended(number: int, cause: str) -> dict[str, Any]:
        first = number == 2
        times: dict[str, Any] = {"ended_unix_s": 100.0 + 3 * (not first), "quiet_seconds": 0.1}
        return rank(number, state="killed", end_cause=cause if first else "SIGKILL", **times)

    said = [
        sentence(suspects_after(reports), reports)
        for reports in ([ended(number, cause) for number in range(4)] for cause in ("OOM kill", "SIGKILL"))
    ]
    assert said[0] == "Rank 2 was killed first, 3.00 s before rank 0 was killed: OOM kill."
    assert said[1].startswith("Nothing tells one rank from the others")


def test_guessed_step_numbers_are_not_compared() -> None:
    """A long run no longer holds its first steps: one rank's 7 may be another's 8."""
    note: dict[str, Any] = {"warnings": ["The file no longer holds the first steps"]}

    assert named(rank(0, step=9, **note), rank(1, "data", step=7, **note), rank(2, step=3, **note)) == [
        (1, "data")
    ]
    assert named(rank(0, **note), rank(1, None, after="optimizer", **note)) == []


def test_the_page_names_the_suspect_in_a_sentence_and_marks_its_line() -> None:
    """Read at three in the morning."""
    reports = [rank(0), rank(1, "data")]
    page = TextLayout(100, color=False, unicode=False)
    text = render_overview(page, reports, suspects_after(reports))

    assert "Rank 1 held the run up, in stage data of loader train, step 7" in text
    assert len([line for line in text.splitlines() if "gone" in line]) == 2


def test_ranks_that_all_stand_still_in_one_place_are_said_to_do_so() -> None:
    """The network between two hosts is gone: nothing tells one rank from the others, but the place is known."""
    ranks = [rank(0, alive=True), rank(1, alive=True, quiet_seconds=8.0)]

    assert sentence(suspects_after(ranks), ranks).startswith(
        "No rank is behind: all 2 were in stage backward, step 7, for 8.00 s. A collective"
    )
    finished = [each | {"state": "finished"} for each in ranks]
    assert sentence(suspects_after(finished), finished) == "All 2 ranks finished."
    unknown = "Nothing tells one rank from the others"
    going_on = [ranks[0], rank(1, alive=True, quiet_seconds=0.1)]
    assert sentence(suspects_after(going_on), going_on).startswith(unknown)
    of_three = [each | {"world_size": 3} for each in ranks]
    assert sentence(suspects_after(of_three), of_three).startswith(unknown)


def test_equal_ranks_of_a_large_run_share_a_line() -> None:
    """The page had one line for each of a thousand ranks; the one that differs was to be found among them."""
    every = [rank(each, "data" if each == 512 else "backward") for each in range(1024) if each != 700]
    page = TextLayout(100, color=False, unicode=False)
    lines = render_overview(page, every, suspects_after(every)).splitlines()

    assert [line.split() for line in lines[-5:] if line.strip()] == [
        [ranks, "gone", "7", stage, "train"]
        for ranks, stage in (
            ("0-511", "backward"), ("512", "data"), ("513-699", "backward"), ("701-1023", "backward")
        )
    ]  # fmt: skip


def test_the_line_of_a_rank_that_finished_has_the_last_step_that_ended() -> None:
    """It had the number of the step that would have come, beside "finished after step 399" of the same rank."""
    finished = rank(0, None, step=400, state="finished", last_step={"index": 399})
    between = rank(1, None, step=7, last_step={"index": 7})
    page = TextLayout(100, color=False, unicode=False)
    lines = render_overview(page, [finished, between], []).splitlines()

    assert "0  finished           399  after the step" in "\n".join(lines)
    assert any("7  between stages" in line for line in lines)


def test_the_sentence_says_what_is_known_and_no_more() -> None:
    """None, one, several; stuck or gone."""
    assert sentence([], []).startswith("Nothing tells one rank from the others")
    ranks = [rank(0, state="failed"), rank(1, "forward")]
    assert "Rank 1 vanished, in stage forward, step 7: killed, out of memory" in sentence(
        suspects_after(ranks), ranks
    )
    ranks[1]["end_cause"] = "OOM kill"
    assert "Rank 1 vanished, in stage forward, step 7: OOM kill. The" in sentence(
        suspects_after(ranks), ranks
    )
    failed = {"state": "failed", "end_cause": "ValueError: no"}
    all_failed = [rank(0, **failed, ended_unix_s=12.5), rank(1, **failed, ended_unix_s=12.0)]
    assert (
        sentence(suspects_after(all_failed), all_failed)
        == "Rank 1 failed first, 500 ms before rank 0 failed: ValueError: no."
    )
    all_failed[1] |= {"state": "terminated", "end_cause": "SIGTERM"}
    assert "Rank 1 was terminated first, 500 ms before rank 0 failed: SIGTERM." in sentence([], all_failed)
    all_failed[0]["host"] = "another"
    assert sentence(suspects_after(all_failed), all_failed).startswith(
        "Nothing tells one rank from the others"
    )
    between = [rank(0), rank(1, None, step=6, after="optimizer")]
    assert sentence(suspects_after(between), between).startswith(
        "Rank 1 held the run up, between two stages, step 6"
    )
    several = suspects_after([rank(0), rank(1, "data"), rank(2, "data"), rank(3)])
    many = suspects_after(
        [*(rank(each) for each in range(9)), *(rank(each, "data") for each in range(9, 16))]
    )
    assert sentence(many, []).startswith("Ranks 9-15 held the run up; rank 9")
    assert sentence(several, []).startswith(
        "Ranks 1, 2 held the run up; rank 1 in stage data of loader train"
    )
