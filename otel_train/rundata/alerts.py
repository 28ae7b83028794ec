"""Notices about a rank for the pages of ``otel-train ui``: end state, findings, alerts, missing data."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from otel_train import catalog
from otel_train.console.text import bytes_of, count, duration, percent, plural, rounded, stage_place
from otel_train.datamodel import EVENTS_FILE, NS_PER_S
from otel_train.files import parse_line, read_part
from otel_train.rundata.files import mapping, number, rows, text, whole

if TYPE_CHECKING:
    from pathlib import Path

    from otel_train.rundata.liveness import Liveness

_TAIL_BYTES = 1 << 18
"""Bytes read from the end of ``events.jsonl``: about a thousand events."""

_LONGEST = 1000
"""Most characters of a text from a file."""
_RANKS_NAMED = 8
SEVERITIES = ("critical", "warning", "info", "ok")
_ALERTS = {
    catalog.STALL_SPAN.name: "critical",
    catalog.NONFINITE_EVENT.name: "critical",
    catalog.LOADER_WORKER_EXIT_EVENT.name: "critical",
    catalog.STRAGGLER_EVENT.name: "warning",
}
_UNITS: dict[str, Callable[[float], str]] = {
    catalog.STALL_AGE.name: duration, catalog.STRAGGLER_EXCESS.name: duration, catalog.PROFILER_SIZE.name: bytes_of,
}  # fmt: skip
_WORDS = {
    catalog.STEP_NUMBER.name: "step", catalog.STALL_AGE.name: "without progress for",
    catalog.STRAGGLER_EXCESS.name: "more per step", catalog.SPAN_EXHAUSTION_REASON.name: "reason",
    catalog.WORKER_NUMBER.name: "worker", catalog.WORKER_PID.name: "pid", catalog.STALL_SUSPECT.name: "others wait for it",
}  # fmt: skip
_ENDS = {
    "failed": "An exception ended it.",
    "killed": "A signal killed it: it ran out of memory, native code crashed, or another process sent the signal.",
    "interrupted": "Ctrl-C ended it.",
    "terminated": "SIGTERM ended it.",
    "gone": "Its process has ended, and no end is recorded.",
    "silent": "Nothing has been written for a while. Its process may hang, be stopped, or run on another host or in another container.",
}


class Notice(NamedTuple):
    """One notice. ``severity`` is of ``SEVERITIES``; notices about events have their number and the time of the last one."""

    severity: str
    title: str
    summary: str
    advice: str = ""
    facts: tuple[str, ...] = ()
    times: int = 0
    at_unix_s: float | None = None


def events_of(folder: Path) -> list[dict[str, Any]]:
    """Returns the last events of a rank, oldest first; incomplete lines and lines that are not events are skipped."""
    try:
        lines = read_part(folder / EVENTS_FILE, -_TAIL_BYTES, _TAIL_BYTES).splitlines(keepends=True)
    except OSError:
        return []
    return [
        {**event, "attributes": mapping(event.get("attributes"))}
        for event in filter(None, map(parse_line, lines))
        if isinstance(event.get("name"), str)
    ]


def notices(
    state: Liveness,
    summary: Mapping[str, Any],
    events: Sequence[Mapping[str, Any]],
    warnings: Iterable[str],
    *,
    others: Mapping[int, Mapping[str, Any]],
    postmortem: bool,
) -> list[Notice]:
    """Returns all notices about a rank, the most severe first.

    Args:
        state: state of the rank.
        summary: summary of the rank.
        events: events of the rank, oldest first.
        warnings: one sentence for each file that could not be read.
        others: summaries of all ranks of the run, by rank; the rank itself may be among them.
        postmortem: whether the run has a flight file, which ``otel-train postmortem`` reads.
    """
    found = [
        *_findings(summary),
        *_alerts(events, _straggler(summary)),
        *_ranks(summary),
        *_failed_ranks(summary, others, "'otel-train postmortem' names the first one." if postmortem else ""),
        *_missing(summary),
        *_trainings(summary),
    ]
    if (sentence := _ENDS.get(state.word)) is not None:
        cause = "" if state.live else text(summary.get("end_cause"))
        advice = (
            "'otel-train postmortem' shows what it was doing." if postmortem and state.word == "gone" else ""
        )
        found.insert(0, Notice(state.severity, state.word, sentence, advice, (cause,) if cause else ()))
    severity = "warning" if state.word == "unknown" else "info"  # an unreadable file may have the end state
    found += [Notice(severity, "not shown", warning[:_LONGEST]) for warning in warnings]
    return sorted(found, key=lambda notice: SEVERITIES.index(notice.severity))


def _trainings(summary: Mapping[str, Any]) -> Iterator[Notice]:
    training = whole(summary.get("training")) or 1
    if training > 1:
        yield Notice(
            "info",
            f"training {training}",
            f"The run has had {training - 1} before. Each is a run directory of its own in the folder of this run.",
            "otel-train ui RUN/training-1 shows the first; other commands take that folder, too.",
        )


def _findings(summary: Mapping[str, Any]) -> Iterator[Notice]:
    for finding in rows(summary.get("findings")):
        severity = finding.get("severity")
        share, seconds = number(finding.get("share")), number(finding.get("seconds"))
        of = "training time" if finding.get("phase") == "train" else "the run"
        facts = (f"{percent(share)} of {of}" if share else "", duration(seconds) if seconds else "")
        yield Notice(
            str(severity) if severity in SEVERITIES else "info",
            text(finding.get("name")).replace("_", " ") or "finding",
            _cut_text(finding.get("summary")),
            _cut_text(finding.get("advice")),
            tuple(filter(None, facts)),
        )


def _straggler(summary: Mapping[str, Any]) -> int | None:
    """Returns the rank that a finding names as slow."""
    found = (each for each in rows(summary.get("findings")) if each.get("name") == "straggler_bound")
    return next((whole(mapping(each.get("evidence")).get("rank")) for each in found), None)


def _alerts(events: Sequence[Mapping[str, Any]], straggler: int | None) -> Iterator[Notice]:
    """Yields a notice for the alerting events of the last attempt that have the same name, loader, stage and rank.

    Events about the rank ``straggler`` are left out: a finding reports it for the whole run.
    """
    together: dict[tuple[str, ...], list[Mapping[str, Any]]] = {}
    last_attempt = max((whole(event.get("attempt")) or 0 for event in events), default=0)
    for event in events:
        if event["name"] in _ALERTS and (whole(event.get("attempt")) or 0) == last_attempt:
            about = (text(event["attributes"].get(f"train.{key}")) for key in ("loader", "stage", "rank"))
            together.setdefault((event["name"], *about), []).append(event)
    for (name, *_), group in together.items():
        last = group[-1]
        at_ns = number(last.get("time_unix_ns"))
        rank = whole(last["attributes"].get(catalog.SPAN_RANK.name))
        if name == catalog.STRAGGLER_EVENT.name and rank is not None and rank == straggler:
            continue
        yield Notice(
            _ALERTS[name],
            name.removeprefix("train.").replace(".", " "),
            _SAYS[name](last["attributes"]),
            times=len(group),
            at_unix_s=None if at_ns is None else at_ns / NS_PER_S,
        )


def _stall(about: Mapping[str, Any]) -> str:
    step, age_s = whole(about.get(catalog.STEP_NUMBER.name)), number(about.get(catalog.STALL_AGE.name))
    problem = (
        f"Rank {_value(about, catalog.SPAN_RANK)}, which the others wait for, made no progress"
        if about.get(catalog.STALL_SUSPECT.name)
        else "No progress"
    )
    since = "" if step is None else f" since step {count(step)}"
    return f"{problem}{since}, {_place(about)}{'' if age_s is None else f': {duration(age_s)} until this notice'}."


def _place(about: Mapping[str, Any]) -> str:
    return stage_place(_value(about, catalog.SPAN_STAGE), _value(about, catalog.SPAN_LOADER), quote="`")


def _nonfinite(about: Mapping[str, Any]) -> str:
    name = _cut_text(about.get("name")) or _value(about, catalog.SPAN_NONFINITE_KIND)
    return f"{f'`{name}`' if name else 'A value'} was not finite{_at_step(about)}."


def _worker_exit(about: Mapping[str, Any]) -> str:
    cause = _value(about, catalog.SPAN_ERROR_TYPE)
    killed = " The kernel sends SIGKILL where memory is short." if cause == "SIGKILL" else ""
    worker, pid, loader = (
        _value(about, each) for each in (catalog.WORKER_NUMBER, catalog.WORKER_PID, catalog.SPAN_LOADER)
    )
    return f"Worker {worker} (pid {pid}) of loader `{loader}` ended{_at_step(about)}: {cause or 'no cause is known'}.{killed}"


def _slow_rank(about: Mapping[str, Any]) -> str:
    excess_s = number(about.get(catalog.STRAGGLER_EXCESS.name))
    more = "" if excess_s is None else f": {duration(excess_s)} more per step than the median rank"
    return f"Rank {_value(about, catalog.SPAN_RANK)} was slow{_at_step(about)}, {_place(about)}{more}. The others waited for it."


def _at_step(about: Mapping[str, Any]) -> str:
    step = whole(about.get(catalog.STEP_NUMBER.name))
    return "" if step is None else f" at step {count(step)}"


_SAYS: dict[str, Callable[[Mapping[str, Any]], str]] = {
    catalog.STALL_SPAN.name: _stall,
    catalog.NONFINITE_EVENT.name: _nonfinite,
    catalog.LOADER_WORKER_EXIT_EVENT.name: _worker_exit,
    catalog.STRAGGLER_EVENT.name: _slow_rank,
}


def _value(about: Mapping[str, Any], attribute: catalog.Attribute) -> str:
    """Returns an attribute of an event as text; "" if it is absent."""
    value = about.get(attribute.name)
    return "" if value is None else str(value)[:_LONGEST]


def facts_of(event: Mapping[str, Any]) -> Iterator[str]:
    """Yields each attribute of an event as text: a name, and the value with its unit; empty values are left out."""
    for key, value in event["attributes"].items():
        size = number(value)
        unit = _UNITS.get(key, rounded if isinstance(value, float) else None)
        shown = unit(size) if unit is not None and size is not None else str(value)[:_LONGEST]
        if shown:
            word = _WORDS.get(key) or re.sub("[._]", " ", key[:_LONGEST].removeprefix("train."))
            yield word if value is True and key in _WORDS else f"{word} {shown}"


def _ranks(summary: Mapping[str, Any]) -> Iterator[Notice]:
    silent = mapping(summary.get("ranks")).get("silent")
    if isinstance(silent, list) and silent:
        listed = ", ".join(str(rank)[:_LONGEST] for rank in silent[:20])
        yield Notice("critical", "ranks are silent", f"No report has come lately from rank {listed}.")


def _failed_ranks(
    summary: Mapping[str, Any], others: Mapping[int, Mapping[str, Any]], advice: str
) -> Iterator[Notice]:
    """Yields one notice about the other ranks that failed or were killed in the same attempt."""
    failed = {
        rank: text(found.get("end_cause")) or text(found.get("state"))
        for rank, found in others.items()
        if found.get("state") in ("failed", "killed")
        and rank != summary.get("rank")
        and found.get("attempt") == summary.get("attempt")
    }
    if failed:
        causes = [f"rank {rank}: {_cut_text(cause)}" for rank, cause in failed.items()]
        more = [f"and {len(causes) - _RANKS_NAMED} more"] if len(causes) > _RANKS_NAMED else []
        sentence = (
            f"{plural(len(failed), 'other rank')} failed or {'was' if len(failed) == 1 else 'were'} killed."
        )
        facts = (*causes[:_RANKS_NAMED], *more)
        yield Notice("critical", "other ranks failed", sentence, advice, facts)


def _missing(summary: Mapping[str, Any]) -> Iterator[Notice]:
    telemetry = mapping(summary.get("telemetry"))
    if lost := whole(telemetry.get("records_lost")):
        sentence = f"{count(lost)} records were lost: no metric counts what happened in them."
        yield Notice("warning", "records lost", sentence)
    if faults := mapping(telemetry.get("faults")):
        parts = tuple(f"{_cut_text(part)}: {_cut_text(str(number))}" for part, number in faults.items())
        sentence = "Parts of the telemetry failed; training went on."
        yield Notice("warning", "faults of otel_train", sentence, facts=parts)
    for row in rows(summary.get("settings_ignored")):
        value = _cut_text(row.get("used"))
        facts = (f"in force: {value}",) if value else ()
        yield Notice("info", "setting ignored", _cut_text(row.get("problem")), facts=facts)
    for row in rows(summary.get("instrumentation_gaps")):
        about = " ".join(part for part in (text(row.get("what")), text(row.get("name"))) if part)
        yield Notice("info", f"not observed: {about}", _cut_text(row.get("reason")))


def _cut_text(value: object) -> str:
    return value[:_LONGEST] if isinstance(value, str) else ""
