"""Ranks that hang: told while they live, and after their death."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

from otel_train.distributed.rank_report import RankReport

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    Report = Mapping[str, Any]  # what ``postmortem.read`` returns


ORDER: Final = {
    stage: 2 * place for place, stage in enumerate(("data", "h2d", "forward", "backward", "optimizer"))
}
"""How far into a step each stage is. Between two stages is one further than the first."""

MOST_NAMED: Final = 8
"""Ranks named in one standstill; where more are behind, a node or a switch is the place to look."""


class HangSuspect(NamedTuple):
    """A rank that the others seem to wait for.

    Attributes:
        rank: who.
        host: where.
        step: the step it is in.
        stage: what it was last seen doing.
        loader: the loader it waits for, or "".
        quiet_s: seconds without progress, or without a record.
        silent: it sends no records any more: the process is gone, stopped, or cut off.
    """

    rank: int
    host: str
    step: int
    stage: str
    loader: str
    quiet_s: float
    silent: bool


def suspects(digests: Mapping[int, RankReport], silent_s: Mapping[int, float]) -> list[HangSuspect]:
    """Who holds the run up; nobody where nothing tells them from the others.

    Args:
        digests: the last record of every rank.
        silent_s: ranks from which no record came for as long as a stall takes, and for how long.
    """
    here = {rank: digest for rank, digest in digests.items() if not digest.over}
    gone = [_suspect(here[rank], silent_s[rank], silent=True) for rank in sorted(silent_s) if rank in here]
    if gone:
        return gone[:MOST_NAMED]
    if not any(digest.stalled for digest in here.values()):
        return []
    last_step = min(digest.step for digest in here.values())
    behind: Mapping[int, RankReport] = {
        rank: digest for rank, digest in here.items() if digest.step == last_step
    }
    if len(behind) == len(here):
        behind = _behind_in_step(here)
    # Somebody who is behind and moves (evaluates, saves, loads) is late, not stuck.
    stuck = [digest for _, digest in sorted(behind.items()) if digest.stalled]
    if len(behind) == len(here) or len(stuck) < len(behind):
        return []
    return [_suspect(digest, digest.quiet_s, silent=False) for digest in stuck][:MOST_NAMED]


def _behind_in_step(digests: Mapping[int, RankReport]) -> Mapping[int, RankReport]:
    """Those least far into their step. Where that is unknown of somebody: those in a stage of their own."""
    reached = {rank: _reached(digest) for rank, digest in digests.items()}
    if None not in reached.values():
        least = min(place for place in reached.values() if place is not None)
        return {rank: digest for rank, digest in digests.items() if reached[rank] == least}
    stages = [digest.stage for digest in digests.values()]
    usual = max(sorted(set(stages)), key=stages.count)
    if 2 * stages.count(usual) <= len(stages):
        return digests
    return {rank: digest for rank, digest in digests.items() if digest.stage != usual}


def _reached(digest: RankReport) -> int | None:
    """How far into its step a rank is; None where its stage has no place in a step."""
    if digest.stage in ORDER:
        return ORDER[digest.stage]
    return ORDER[digest.after] + 1 if digest.after in ORDER else None


def _suspect(digest: RankReport, quiet_s: float, *, silent: bool) -> HangSuspect:
    return HangSuspect(digest.rank, digest.host, digest.step, digest.stage, digest.loader, quiet_s, silent)


UNFINISHED = (None, "running")
"""States of a process that had no time to say how it ended."""


def compare(reports: Sequence[Report]) -> list[HangSuspect]:
    """Who held the run up, or vanished from it; nobody where nothing tells the ranks apart.

    Args:
        reports: one per rank, of the same attempt.
    """
    attempts = {report.get("attempt") for report in reports}
    if len(reports) <= 1 or len(attempts) > 1:
        return []
    digests = {place: _digest(report) for place, report in enumerate(reports)}
    vanished = [place for place, report in enumerate(reports) if _vanished(report)]
    if vanished and len(vanished) < len(reports):
        # The others had time to fail, or to be told to stop: they outlived it.
        return suspects(digests, {place: digests[place].quiet_s for place in vanished})
    if all(report.get("state") == "finished" for report in reports):
        return []
    if any(report.get("notes") for report in reports):
        # The first steps are no longer on file, so their numbers are guesses: only the place in the step is left,
        # and who is at the end of one may be behind those at the beginning of the next.
        ends = [digest.stage if digest.stage in ORDER else digest.after for digest in digests.values()]
        if "optimizer" in ends:
            return []
        digests = {place: digest._replace(step=0) for place, digest in digests.items()}
    return suspects(digests, {})


def _vanished(report: Report) -> bool:
    return report.get("alive") is False and report.get("state") in UNFINISHED


def _digest(report: Report) -> RankReport:
    """What the rank would have said last."""
    inside = (report.get("open") or [{}])[-1]
    stage = inside.get("stage") or "other"
    state = report.get("state")
    return RankReport(
        rank=report.get("rank") or 0,
        host=report.get("host") or "",
        sequence=0,
        steps=report.get("steps_in_file") or 0,
        step=report.get("step") or 0,
        stage=stage,
        loader=(inside.get("loader") or "") if stage == "data" else "",
        after=report.get("after") or "",
        quiet_s=float(inside.get("for_seconds") or 0.0),
        stalled=True,
        over=state == "finished",
        doing="stalled",
        away_s=0.0,
        barrier="",
        every=0,
        stages={},
        events={},
    )
