"""Whom a run that is over was waiting for, from what its ranks left behind."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from otel_train.aggregation.hangs import ORDER, HangSuspect, suspects
from otel_train.aggregation.rank_report import RankReport

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    Report = Mapping[str, Any]  # what ``postmortem.read`` returns

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
