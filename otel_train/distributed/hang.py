"""Finds the rank that the others wait for, during the run and from post-mortems."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import itemgetter
from typing import Any, Final, NamedTuple

from otel_train.console.text import stage_place
from otel_train.distributed.rank_report import RankReport

PostmortemDocument = Mapping[str, Any]  # what ``rundata.flight.read_postmortem`` returns


_CYCLE: Final = ("optimizer", "data", "h2d", "forward", "backward")
ORDER: Final = {stage: 2 * place + 1 for place, stage in enumerate(_CYCLE)}
"""Position of each stage in the cycle from one backward to the next. Time after a stage, in a user-defined stage too, is one further
than that stage. Time before the first stage of a step, or directly after a backward, is at 0."""

OTHER: Final = "other"
"""Stage of a rank that has no open stage."""

LEAST_STALL_S: Final = 1.0
"""Shortest silence, in seconds, that counts as a stall in a post-mortem: the agent reads the rings every 0.5 s."""


class HangSuspect(NamedTuple):
    """A rank that the others seem to wait for.

    Attributes:
        stage: its innermost open stage at the last report; ``OTHER`` if none was open.
        loader: the loader it waits for, or "".
        quiet_s: seconds without progress, or without a report.
        silent: whether its reports stopped: the process has ended, is stopped, or is disconnected.
    """

    rank: int
    host: str
    step: int
    stage: str
    loader: str
    quiet_s: float
    silent: bool

    def place(self, quote: str = "") -> str:
        """Returns where it is, as part of a sentence; ``quote``: around names."""
        return stage_place(self.stage, self.loader, quote=quote)


def suspects(reports: Mapping[int, RankReport], silent_s: Mapping[int, float]) -> list[HangSuspect]:
    """Returns the ranks that the others wait for; empty if the ranks cannot be distinguished.

    ``silent_s``: seconds without a report, for each rank that is silent longer than the stall threshold.
    """
    here = {rank: report for rank, report in reports.items() if not report.over}
    gone = [_suspect(here[rank], silent_s[rank], silent=True) for rank in sorted(silent_s) if rank in here]
    if gone:
        return gone
    if not any(report.stalled for report in here.values()):
        return []
    last_step = min(report.step for report in here.values())
    behind: Mapping[int, RankReport] = {
        rank: report for rank, report in here.items() if report.step == last_step
    }
    if len(behind) == len(here):
        behind = _behind_in_step(here)
    # A rank that is behind and makes progress (evaluates, saves, loads) is late, not stuck.
    stuck = [report for _, report in sorted(behind.items()) if report.stalled]
    if len(behind) == len(here) or len(stuck) < len(behind):
        return []
    # When a hang ends, the ranks report that one after the other. A rank that makes progress waits for no other.
    since_s = max((each.quiet_s for each in stuck), default=0.0)
    if any(2 * each.quiet_s < since_s for rank, each in here.items() if rank not in behind):
        return []
    return [_suspect(report, report.quiet_s, silent=False) for report in stuck]


def _behind_in_step(reports: Mapping[int, RankReport]) -> Mapping[int, RankReport]:
    """Returns the ranks with the lowest position in their step; if one is unknown or all are equal, those in an unusual stage."""
    reached = {rank: _reached(report) for rank, report in reports.items()}
    if None not in reached.values() and len(set(reached.values())) > 1:
        least = min(place for place in reached.values() if place is not None)
        return {rank: report for rank, report in reports.items() if reached[rank] == least}
    stages = [report.stage for report in reports.values()]
    usual = max(sorted(set(stages)), key=stages.count)
    if 2 * stages.count(usual) <= len(stages):
        return reports
    return {rank: report for rank, report in reports.items() if report.stage != usual}


def _reached(report: RankReport) -> int | None:
    """Returns the progress of a rank in its step: ended backwards, then position; None if that is unknown."""
    inside = report.stage if report.stage in ORDER else report.within
    if inside:
        place = ORDER[inside]
    elif report.after in ("", "backward"):
        place = 0
    elif report.after in ORDER:
        place = ORDER[report.after] + 1
    else:
        return None
    return report.backwards * (ORDER["backward"] + 1) + place


def _suspect(report: RankReport, quiet_s: float, *, silent: bool) -> HangSuspect:
    return HangSuspect(report.rank, report.host, report.step, report.stage, report.loader, quiet_s, silent)


SILENT_ENDS = (None, "running", "killed")
"""States of a process that did not record how it ended: "running" stays until its agent records that it was killed."""

OOM_KILL: Final = "OOM kill"
"""Cause of an end by the kernel for lack of memory, which is not the work of a launcher."""

CLOCKS_AGREE_S: Final = 1.0
"""Largest difference, in seconds, between the clocks of two hosts that NTP synchronises."""

NOTICED_S: Final = 0.5
"""Seconds after which an agent notices at the latest that a signal ended its process: it checks that often."""

NOT_ON_FILE_S: Final = CLOCKS_AGREE_S + 1.0
"""Seconds by which a rank without a recorded end may have outlived its last sign: its agent writes every second."""


def ended_before_s(first: PostmortemDocument, second: PostmortemDocument) -> float:
    """Returns the seconds by which a rank ended before another; 0 if it did not, or if that is uncertain."""
    lived_until_s = _last_sign_s(second)
    if first["ended_unix_s"] is None or lived_until_s is None:
        return 0.0
    before_s: float = lived_until_s - first["ended_unix_s"]
    least_s = NOTICED_S if second["state"] in (*SILENT_ENDS, "terminated") else 0.0
    if first["host"] != second["host"]:
        least_s = CLOCKS_AGREE_S
    return before_s if before_s >= least_s else 0.0


def ended_first(
    documents: Sequence[PostmortemDocument],
) -> tuple[PostmortemDocument, PostmortemDocument, float] | None:
    """Returns the rank that ended first, the next one, and the seconds between; None if that is uncertain."""
    if len(documents) <= 1 or any(document["ended_unix_s"] is None for document in documents):
        return None
    first, second = sorted(documents, key=itemgetter("ended_unix_s"))[:2]
    before_s = ended_before_s(first, second)
    return (first, second, before_s) if before_s else None


def suspects_after(documents: Sequence[PostmortemDocument]) -> list[HangSuspect]:
    """Returns the ranks that the others waited for, from one post-mortem per rank of one attempt; ranks that vanished first."""
    attempts = {document["attempt"] for document in documents}
    if len(documents) <= 1 or len(attempts) > 1:
        return []
    reports = {place: _report_of(document) for place, document in enumerate(documents)}
    vanished = [place for place, document in enumerate(documents) if _vanished(document, documents)]
    behind = _behind(documents, reports)
    unheard = [place for place in vanished if is_unheard(documents[place])]
    if not unheard and not 0 < 2 * len(vanished) <= len(documents):
        # If most were killed, that was the end of the job, and a rank that failed had lost its connection before.
        return behind
    vanished = unheard or vanished  # ranks killed later waited for those
    # The other ranks had time to fail or to be stopped, so they outlived it. But if it had stalled before, the watchdog of a
    # collective operation may have ended it because it waited too long for another rank.
    waited = all(reports[place].stalled for place in vanished)
    if (
        waited
        and behind
        and {one.rank for one in behind}.isdisjoint(reports[place].rank for place in vanished)
    ):
        return behind
    return suspects(reports, {place: reports[place].quiet_s for place in vanished})


def common_place(documents: Sequence[PostmortemDocument]) -> HangSuspect | None:
    """Returns where all ranks are stuck, as the rank that arrived last; None if the places differ, or an end explains the hang."""
    if any(document["state"] in ("failed", "finished") for document in documents):
        return None
    reports = [_report_of(document) for document in documents]
    places = {
        (report.step, report.stage, report.loader, report.after, report.backwards) for report in reports
    }
    if len(reports) <= 1 or len(places) > 1 or not all(report.stalled for report in reports):
        return None
    last = min(reports, key=lambda report: report.quiet_s)
    return _suspect(last, last.quiet_s, silent=False)


def _vanished(document: PostmortemDocument, documents: Sequence[PostmortemDocument]) -> bool:
    """Returns whether a rank ended without recording it, and not after ranks that recorded their end."""
    if document["alive"] or document["state"] not in SILENT_ENDS:
        return False
    # A launcher kills a rank that hangs because another one has failed.
    if any(ended_before_s(other, document) for other in documents if other["state"] not in SILENT_ENDS):
        return False
    return not is_unheard(document) or _others_waited(document, documents)


def is_unheard(document: PostmortemDocument) -> bool:
    """Returns whether the fate of a rank is unknown: its process is not visible here, and its agent has stopped writing."""
    return document["alive"] is None and document["state"] in (None, "running")


def _others_waited(document: PostmortemDocument, documents: Sequence[PostmortemDocument]) -> bool:
    """Returns whether the others stopped soon after the last sign of a rank. If they went on, only its agent could not write."""
    since_s = _last_sign_s(document)
    signs = [(_last_sign_s(each), each) for each in documents]
    if since_s is None or any(sign_s is None for sign_s, _ in signs):
        return False
    later = [
        (sign_s - since_s, sign_s - since_s - (each["quiet_seconds"] or 0.0))
        for sign_s, each in signs
        if sign_s > since_s + (NOT_ON_FILE_S if is_unheard(each) else 0.0)
    ]
    silence_s, went_on_s = map(max, zip(*later, strict=True)) if later else (0.0, 0.0)
    return bool(later) and went_on_s <= max(NOT_ON_FILE_S, silence_s / 2)


def _last_sign_s(document: PostmortemDocument) -> Any:
    """Returns the Unix time at which a rank ended, else the last at which it lived; None if neither is known."""
    return document["last_sign_unix_s"] if document["ended_unix_s"] is None else document["ended_unix_s"]


def _behind(documents: Sequence[PostmortemDocument], reports: Mapping[int, RankReport]) -> list[HangSuspect]:
    """Returns the ranks that the others waited for, by their positions in the step."""
    if all(document["state"] == "finished" for document in documents):
        return []
    ended = ended_first(documents)
    if ended and ended[0]["state"] == "failed" and not _report_of(ended[0]).stalled:  # it was not waiting
        return []
    if any(document["warnings"] for document in documents):
        # The first steps are no longer on file, so step numbers are guesses and only positions within a step compare.
        # A rank at the end of a step may then be behind ranks at the beginning of the next.
        if any(_may_end_a_step(report) for report in reports.values()):
            return []
        reports = {place: report._replace(step=0) for place, report in reports.items()}
    return suspects(reports, {})


def _may_end_a_step(report: RankReport) -> bool:
    inside = report.stage if report.stage in ORDER else report.within
    return inside == "optimizer" or (not inside and report.after in ("backward", "optimizer"))


def _report_of(document: PostmortemDocument) -> RankReport:
    """Returns the last report that the rank would have sent; stalled if it was silent for longer than any of its steps took."""
    longest_s = max((step["duration_s"] for step in document["recent_steps"]), default=0.0)
    quiet_s = document["quiet_seconds"] or 0.0
    inside = (document["open"] or [{}])[-1]
    stage = inside.get("stage") or OTHER
    return RankReport(
        rank=document["rank"] or 0,
        host=document["host"] or "",
        sequence=0,
        steps=document["steps_in_file"] or 0,
        step=document["step"] or 0,
        stage=stage,
        loader=(inside.get("loader") or "") if stage == "data" else "",
        after=document["after"],
        quiet_s=quiet_s,
        stalled=quiet_s >= max(LEAST_STALL_S, longest_s),
        over=document["state"] == "finished",
        within=next((each["stage"] for each in reversed(document["open"]) if each["stage"] in ORDER), ""),
        backwards=document["backwards"],
    )
