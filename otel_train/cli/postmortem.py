"""``otel-train postmortem``: shows the last steps of a run that was killed or hangs."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any

from otel_train.catalog import STAGES
from otel_train.cli import arguments, print_json
from otel_train.console import text
from otel_train.console.summary import state_badge
from otel_train.console.text import ABSENT, INDENT, TextLayout, cut, duration, known, pad, plural, right
from otel_train.datamodel import FLIGHT_FILE
from otel_train.distributed.hang import (
    OOM_KILL,
    HangSuspect,
    common_place,
    ended_first,
    is_unheard,
    suspects_after,
)
from otel_train.profiler.storage import finding_summary
from otel_train.rundata.files import has_ended, whole
from otel_train.rundata.flight import read_postmortem
from otel_train.rundata.run import records_below

Report = Mapping[str, Any]  # what read_postmortem returns

DESCRIPTION = "Show the last steps of a run, and the stage and loader that each rank was in at the end."
EPILOG = """\
Reads flight.bin, which holds the last events of every thread and survives SIGKILL, a segmentation fault and the
out-of-memory killer. The run may be live, hung or gone. With several ranks, the rank that the others waited for is
named first.

examples:
  otel-train postmortem runs/20260131-x7
  otel-train postmortem 20260131-x7 --rank 3
  otel-train postmortem 20260131-x7 --json | jq '.open[-1].stage'
"""
_STAGES_SHOWN, _STAGES_SHOWN_NARROW = 5, 4
_MOST_HOSTS = 4
_MOST_LINES, _MOST_PAGES = 16, 4
"""Ranks up to which each has a line and a page; in a larger run equal ranks share a line, and this many pages are printed."""

_NAME_COLUMNS, _STEP_COLUMNS, _TIME_COLUMNS, _BAR_COLUMNS = 24, 8, 9, 9


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of this command."""
    arguments.add_run_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Prints which rank the others were waiting for, and the last steps and open stages of each rank."""
    found, code = arguments.read_ranks(args, FLIGHT_FILE, read_postmortem, is_slow=True)
    for folder, report in found.items():
        report["rank"] = int(folder.name.removeprefix("rank"))  # flight.bin may be a copy of another rank's
    reports = list(found.values())
    records = records_below(next(iter(found)).parent)
    suspects = suspects_after(reports)
    for report in reports:
        report["captures"] = [each for each in records if each.get("rank") == report["rank"]]
        report["suspect"] = report["rank"] in {suspect.rank for suspect in suspects}
    page = TextLayout.of(sys.stdout)
    if not args.json and (len(reports) > 1 or _suspected_by_reports(reports)):
        print(render_overview(page, reports, suspects))
    shown = reports if args.json or len(reports) <= _MOST_LINES else _first_pages(reports)
    for report in shown:
        if args.json:
            print_json(report)
        else:
            print(render(page, report), end="")
    if len(shown) < len(reports):
        more = "'otel-train postmortem RUN --rank N' prints that of another one"
        print(f"Pages of {len(shown)} of {len(reports):,} ranks are above; {more}.")
    return code


def _first_pages(reports: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the ranks of a large run whose pages are printed: the suspects first, then the lowest."""
    first = sorted(range(len(reports)), key=lambda index: not reports[index]["suspect"])[:_MOST_PAGES]
    return [reports[index] for index in sorted(first)]


def render(page: TextLayout, report: Report) -> str:
    """Returns the page of one rank."""
    lines = [
        *_head(page, report, state_badge(page, _state(report)), headline(report)),
        *(page.line(line, "dim") for line in _facts(page, report)),
        "",
        *_open_stages(page, report.get("open") or ()),
        *_recent(page, report.get("recent_steps") or ()),
        *_threads(page, report.get("threads") or ()),
        *_captures(page, report.get("captures") or ()),
    ]
    for warning in report.get("warnings") or ():
        lines += [page.line(line, "yellow") for line in page.prose(warning, indent=len(INDENT))]
    return page.finish([*lines, page.paint("━" * page.columns, "dim")])


def _head(page: TextLayout, report: Report, badge: tuple[str, str], said: str) -> Iterable[str]:
    title = page.safe(report.get("run_id") or ABSENT)
    yield page.rule([("otel_train postmortem", "bold"), (title, "cyan")], badge)
    yield from (page.line(line, "bold") for line in page.prose(said, indent=len(INDENT)))


def headline(report: Report) -> str:
    """Returns one sentence: the rank, its state, the stage, step and loader that it was in, and for how long."""
    rank = f"rank {known(report.get('rank'))}"
    state = _state(report)
    running = {"running": "is running, ", "gone": "died ", "silent": "was last seen "}
    ended = f"{state} ({report['end_cause']})" if report.get("end_cause") else state
    verb = running.get(state) or (f"{ended} " if state in {"finished", "failed"} else f"was {ended} ")
    inside = (report.get("open") or [None])[-1]
    if inside is None:
        return f"{rank} {verb}{_between_stages(report)}"
    of_step = "" if report.get("step") is None else f" of step {report['step']}"
    parts = [f"{rank} {verb}in stage {inside.get('stage')}{of_step}"]
    if inside.get("loader"):
        parts.append(f"loader {inside['loader']}")
    if inside.get("for_seconds") is not None:
        parts.append(f"{duration(inside['for_seconds'])} after it began")
    return ", ".join(parts)


def _step_before(report: Report) -> Any:
    """Returns the number of the last step if the rank was between two steps at its end; None if it was in a step."""
    last = (report.get("last_step") or {}).get("index")
    return last if last != report.get("step") or report.get("state") == "finished" else None


def _between_stages(report: Report) -> str:
    last = (report.get("last_step") or {}).get("index")
    if last is None:
        return "with no stage open"
    if _step_before(report) is not None:
        return f"after step {last}, with no stage open"
    after = f"after {report['after']}, " if report.get("after") in STAGES else ""
    quiet_s = report.get("quiet_seconds")
    return (
        f"in step {last}, {after}with no stage open{'' if quiet_s is None else f' for {duration(quiet_s)}'}"
    )


def _facts(page: TextLayout, report: Report) -> list[str]:
    facts = [
        f"pid {known(report.get('pid'))}",
        f"attempt {known(report.get('attempt'))}",
        f"started {text.instant(report.get('started_unix_s'))}",
        f"last event {text.instant(report.get('last_edge_unix_s'))}",
        plural(report.get("edges_in_file"), "event"),
    ]
    if (steps := report.get("steps_in_file")) is not None:
        facts.insert(-1, f"{plural(steps, 'step')} on file")
    return text.flow(facts, page.columns - len(INDENT))


def _open_stages(page: TextLayout, stages: Sequence[Report]) -> Iterable[str]:
    if not stages:
        return
    names = ["  " * depth + page.safe(stage.get("stage") or ABSENT) for depth, stage in enumerate(stages)]
    column = min(max(map(text.display_width, names)), _NAME_COLUMNS)
    yield page.line("open at the end, the outermost first", "bold")
    for name, stage in zip(names, stages, strict=True):
        keys = [key for key in ("loader", "model", "thread") if stage.get(key)]
        facts = [f"{key} {page.safe(stage[key])}" for key in keys]
        available = page.columns - len(INDENT) - column - _TIME_COLUMNS - 2
        beside = " · ".join(facts)
        if text.display_width(beside) > available:
            beside = " · ".join(cut(fact, available // len(facts) - 3) for fact in facts)
        line = f"{pad(name, column)}{right(duration(stage.get('for_seconds')), _TIME_COLUMNS)}  {beside}"
        yield page.line(line, "red" if stage is stages[-1] else "")
    yield ""


def _recent(page: TextLayout, steps: Sequence[Report]) -> Iterable[str]:
    if not steps:
        return
    spent: dict[str, float] = {}
    for step in steps:
        for stage, seconds in (step.get("stages") or {}).items():
            spent[stage] = spent.get(stage, 0.0) + (seconds or 0.0)
    most, bars = (_STAGES_SHOWN_NARROW, 0) if page.is_narrow else (_STAGES_SHOWN, 2 + _BAR_COLUMNS)
    shown = sorted(spent, key=lambda stage: -spent[stage])[:most]
    longest_s = max((step.get("duration_s") or 0.0 for step in steps), default=0.0)
    column = min(12, (page.columns - len(INDENT) - _STEP_COLUMNS - _TIME_COLUMNS - bars) // most)
    heads = "".join(right(cut(page.safe(stage), column - 1), column) for stage in shown)
    yield page.line("the last steps", "bold")
    first = right("step", _STEP_COLUMNS) + right("took", _TIME_COLUMNS)
    yield page.line(first + " " * bars + heads, "dim")
    for step in steps:
        took_s = step.get("duration_s")
        share = took_s / longest_s if took_s and longest_s else None
        drawn = page.paint(pad("  " + text.bar(share, _BAR_COLUMNS), bars), "cyan") if bars else ""
        cells = "".join(right(duration((step.get("stages") or {}).get(stage)), column) for stage in shown)
        first = right(str(known(step.get("index"))), _STEP_COLUMNS) + right(duration(took_s), _TIME_COLUMNS)
        yield f"{INDENT}{first}{drawn}{cells}"
    yield ""


def _threads(page: TextLayout, threads: Sequence[Report]) -> Iterable[str]:
    if len(threads) < 2:  # noqa: PLR2004 - with one thread all has been said above
        return
    yield page.line("threads", "bold")
    for thread in threads:
        inside = " > ".join(page.safe(stage["stage"]) for stage in thread.get("open") or ())
        name = pad(page.safe(known(thread.get("name"))), _NAME_COLUMNS)
        edges = right(plural(thread.get("edges"), "event"), 16)
        last = text.instant(thread.get("last_edge_unix_s"), "%H:%M:%S")
        line = f"{name}{edges}  last {last}  {f'in {inside}' if inside else 'nothing open'}"
        yield INDENT + cut(line, page.columns - len(INDENT))
    yield ""


def _captures(page: TextLayout, records: Sequence[Report]) -> Iterable[str]:
    for record in records[-1:]:
        steps = " to ".join(map(str, record.get("steps") or ())) or "none"
        yield page.line("the last capture", "bold")
        yield INDENT + cut(f"steps {steps}  {page.safe(record.get('file'))}", page.columns - len(INDENT))
        for sentence in (finding_summary(record), record.get("problem")):
            for line in page.prose(str(sentence), indent=len(INDENT)) if sentence else ():
                yield INDENT + line
        yield ""


_RANK, _STATE, _STEP, _STAGE = 6, 13, 9, 24


def render_overview(page: TextLayout, reports: Sequence[Report], suspects: Sequence[HangSuspect]) -> str:
    """Returns a sentence about the suspects, and a line per rank, in a large run per group of consecutive equal ranks."""
    marked = {suspect.rank for suspect in suspects}
    rows = [(_cells(page, report), report.get("rank") in marked) for report in reports]
    ranks = [whole(report.get("rank")) or 0 for report in reports]
    large = len(rows) > _MOST_LINES
    lines: list[tuple[str, tuple[tuple[str, ...], bool]]] = []
    for _, group in groupby(range(len(rows)), lambda at: (rows[at], ranks[at] - at) if large else at):
        first, *more = group
        rank = f"{ranks[first]}-{ranks[more[-1]]}" if more else str(known(reports[first].get("rank")))
        lines.append((rank, rows[first]))
    rank_columns = max(_RANK, *(len(rank) for rank, _ in lines))
    stage_columns = max(len("stage"), *(len(cells[2]) for _, (cells, _) in lines))

    def row(*cells: str) -> str:
        rank, state, step, stage, loader = cells
        line = f"{right(rank, rank_columns)}  {pad(state, _STATE)}{right(step, _STEP)}  {pad(stage, stage_columns)}  {loader}"
        return cut(line.rstrip(), page.columns - len(INDENT))

    return page.finish(
        [
            *_head(page, reports[0], (arguments.ranks_present(reports), ""), sentence(suspects, reports)),
            "",
            page.line(row("rank", "", "step", "stage", "loader"), "dim"),
            *(page.line(row(rank, *cells), "red" if suspect else "") for rank, (cells, suspect) in lines),
            "",
        ]
    )


def _cells(page: TextLayout, report: Report) -> tuple[str, ...]:
    """Returns state, step, stage and loader of a rank."""
    inside = (report.get("open") or [{}])[-1]
    last = None if inside else _step_before(report)
    stage = page.safe(inside.get("stage") or ("between stages" if last is None else "after the step"))
    step = str(known(report.get("step") if last is None else last))
    return _state(report), step, stage[:_STAGE], page.safe(inside.get("loader") or "")


def sentence(suspects: Sequence[HangSuspect], reports: Sequence[Report]) -> str:
    """Returns the headline of a run: the rank that the others waited for or that ended first, and why, or that none stands out."""
    if not suspects:
        if len(reports) > 1 and all(report["state"] == "finished" for report in reports):
            return f"All {len(reports)} ranks finished."
        unknown = "Nothing tells one rank from the others: look at what they were all doing."
        return _first_ended(reports) or _suspected_by_reports(reports) or _in_one_place(reports) or unknown
    first = suspects[0]
    where = f"{first.place()}, step {first.step}"
    unheard = {report["rank"]: report for report in reports if is_unheard(report)}
    if first.silent and first.rank in unheard:
        return _silent_since(suspects, where, unheard[first.rank]["last_sign_unix_s"])
    subject = _ranks(suspects)
    if _has_several_hosts(reports):
        subject += _on_hosts(suspects)
    if len(suspects) > 1:
        verb = "vanished first" if first.silent else "held the run up"
        return f"{subject} {verb}; rank {first.rank} {where}."
    if first.silent:
        causes = (report.get("end_cause") for report in reports if report.get("rank") == first.rank)
        why = next(filter(None, causes), "killed, out of memory, or its node is gone")
        return f"{subject} vanished, {where}: {why}. The other ranks outlived it."
    return f"{subject} held the run up, {where}: the other ranks were further, and waited."


def _ranks(suspects: Sequence[HangSuspect]) -> str:
    return arguments.named_ranks([suspect.rank for suspect in suspects]).capitalize()


def _on_hosts(suspects: Sequence[HangSuspect]) -> str:
    hosts = sorted({one.host for one in suspects})
    more = f" and {plural(len(hosts) - _MOST_HOSTS, 'more host')}" if len(hosts) > _MOST_HOSTS else ""
    return f" on {', '.join(hosts[:_MOST_HOSTS])}{more}"


def _silent_since(suspects: Sequence[HangSuspect], where: str, last_sign_unix_s: float) -> str:
    several, hosts = len(suspects) > 1, {one.host for one in suspects}
    subject = f"{_ranks(suspects)}{_on_hosts(suspects)} {'are' if several else 'is'} silent"
    gone = "these hosts or containers are" if len(hosts) > 1 else "that host or container is"
    at = f"Rank {suspects[0].rank}" if several else "It"
    return (
        f"{subject} since {text.instant(last_sign_unix_s, '%H:%M:%S UTC')}, and the others went no further: {gone} gone, or cut off "
        f"from the run directory. {at} was {where}."
    )


def _suspected_by_reports(reports: Sequence[Report]) -> str:
    """Returns the suspects that a summary has from the rank reports, if not all ranks left their files here; "" if none."""
    suspects: Sequence[Any] = next(
        (report["reported_suspects"] for report in reports if report.get("reported_suspects")), []
    )
    if not suspects or len(reports) >= max(report.get("world_size") or 0 for report in reports):
        return ""
    first, more = HangSuspect(**suspects[0]), len(suspects) - 1
    others = f" and {plural(more, 'more rank')}" if more else ""
    quiet = f"{'silent' if first.silent else 'without progress'} for {duration(first.quiet_s)}"
    return (
        f"Rank {first.rank} on {first.host}{others} held the run up, by the reports that the ranks exchanged: {first.place()}, "
        f"step {first.step}, {quiet}."
    )


def _in_one_place(reports: Sequence[Report]) -> str:
    """Returns the stage and step in which all ranks stand still; "" if they do not, or files of some ranks are not here."""
    last = common_place(reports)
    if last is None or len(reports) < max(report.get("world_size") or 0 for report in reports):
        return ""
    return (
        f"No rank is behind: all {len(reports)} were {last.place()}, step {last.step}, for {duration(last.quiet_s)}. A collective "
        "operation or the network may have hung, or what they all wait for there."
    )


def _first_ended(reports: Sequence[Report]) -> str:
    """Returns which rank ended first, if its end ended the others; "" if that is not certain."""
    ended = ended_first(reports)
    if ended is None:
        return ""
    first, second, before_s = ended
    # After a rank has failed, a launcher stops the others. After one was stopped or killed, the others fail.
    by_itself = first["state"] == "failed" or first["end_cause"] == OOM_KILL
    resulting = {"failed", "terminated", "killed"} if by_itself else {"failed"}
    if first["state"] == "finished" or any(
        each["state"] not in resulting for each in reports if each is not first
    ):
        return ""
    why = f": {first['end_cause']}" if first["end_cause"] else ""
    on = f" on {first['host']}" if _has_several_hosts(reports) else ""
    end, then = (f"{'' if each['state'] == 'failed' else 'was '}{each['state']}" for each in (first, second))
    return f"Rank {first['rank']}{on} {end} first, {duration(before_s)} before rank {second['rank']} {then}{why}."


def _has_several_hosts(reports: Sequence[Report]) -> bool:
    return len({report["host"] for report in reports}) > 1


def _state(report: Report) -> str:
    if has_ended(report):
        return str(report["state"])
    alive = report.get("alive")
    return "running" if alive else "gone" if alive is False else "silent"
