"""Renders the run summary and progress lines as text for a terminal."""

from __future__ import annotations

import shlex
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from otel_train.catalog import PHASES, STAGES
from otel_train.console.text import (
    ABSENT,
    INDENT,
    TextLayout,
    bar,
    bytes_of,
    count,
    cut,
    display_width,
    duration,
    flow,
    hang,
    known,
    pad,
    percent,
    plural,
    rate,
    right,
    rounded,
    stacked,
    stage_place,
)

Summary = Mapping[str, Any]  # JSON: rundata/summary.schema.json says what is in it
Row = Mapping[str, Any]
Group = tuple[str, str]


_WIDEST_NAME = 20
_MOST_LOADERS = 6
_BAD_ENDS = {"short": "fell short of len()", "error": "ended by an exception"}


def loader_lines(page: TextLayout, summary: Summary) -> list[str]:
    """Returns lines about the loaders whose workers were measured, or that had a problem."""
    entries = [(row, facts) for row in summary.get("loaders") or () if (facts := _facts(page, row))]
    if not entries:
        return []
    names = [page.safe(row.get("loader") or ABSENT) for row, _ in entries]
    column = min(_WIDEST_NAME, max(map(display_width, names)))
    lines = [page.line("inside the loaders", "bold")]
    for name, (row, facts) in list(zip(names, entries, strict=True))[:_MOST_LOADERS]:
        head, margin = page.line(pad(name, column), "cyan") + "  ", len(INDENT) + column + 2
        columns = page.columns - margin
        body = flow(facts, columns)
        body += [page.paint(line, "red") for line in flow(_problems(page, row), columns)]
        lines += hang(head, margin, body)
    if len(entries) > _MOST_LOADERS:
        lines.append(page.line(f"and {len(entries) - _MOST_LOADERS} more in summary.json", "dim"))
    return lines


def _facts(page: TextLayout, row: Row) -> list[str]:
    build, start, weight = row.get("build") or {}, row.get("start") or {}, row.get("batch_bytes") or {}
    measured = build.get("measured_in") == "worker"
    if not measured and not _problems(page, row):
        return []
    facts = [plural(row["workers"], "worker") if row.get("workers") else "no workers"]
    if measured:
        p50, p95, p99 = (duration(build.get(name)) for name in ("p50", "p95", "p99"))
        facts.append(f"a batch takes one {p50} (p95 {p95}, p99 {p99})")
    if start:
        facts.append(f"a pass begins in {duration(start.get('avg'))}")
    if weight:
        facts.append(f"{bytes_of(weight.get('avg'))} per batch")
    if build.get("lost"):
        facts.append(f"{plural(build['lost'], 'build')} not read in time")
    return facts


def _problems(page: TextLayout, row: Row) -> list[str]:
    endings = row.get("endings") or {}
    entries = [
        f"{plural(endings[reason], 'pass')} {meaning}"
        for reason, meaning in _BAD_ENDS.items()
        if endings.get(reason)
    ]
    for what, key in (("raised", "errors"), ("worker died", "worker_exits")):
        entries += [
            f"{what}: {page.safe(name)}" + (f" ({count(number)} times)" if number > 1 else "")
            for name, number in (row.get(key) or {}).items()
        ]
    return entries


_SHARE_WORTH_A_COLOR = 0.2
_MOST_GROUPS = 8  # all groups are in summary.json
_STAGES = STAGES[:-1]  # "other" comes last
_STATISTICS = ("avg", "p50", "p95", "p99")
_COUNT_COLUMNS, _VALUE_COLUMNS, _SHARE_COLUMNS, _BAR_COLUMNS = 8, 9, 9, 8
_P95_FROM = 70
"""Least columns of a page on which the 95th percentile is shown."""
_GAP = 2
_SHORTEST_TITLE = 24
_NO_PHASE = ("", "")
_MILLION = 1_000_000


def stage_tables(page: TextLayout, summary: Summary) -> list[str]:
    """Returns a table of the stages per phase and loader: calls, durations, and share of the phase's time."""
    stages: dict[Group, list[Row]] = defaultdict(list)
    for row in summary.get("stages") or ():
        stages[_group(row)].append(row)
    whole = {_group(row): row for row in summary.get("step_durations") or ()}
    groups = sorted(dict.fromkeys([*stages, *whole]), key=_phase_order)
    if len(groups) > 1 and [row.get("stage") for row in stages[_NO_PHASE]] == ["other"]:
        groups.remove(_NO_PHASE)  # the bar of activities already shows its time
    if not groups:
        return [page.line("no stage has been seen yet", "dim")]
    shown = groups[:_MOST_GROUPS]
    models = len({row.get("model") for rows in stages.values() for row in rows if row.get("model")}) > 1
    labels = [_label(page, row, models=models) for group in shown for row in stages[group]]
    others = _COUNT_COLUMNS + len(_statistics(page)) * _VALUE_COLUMNS + _SHARE_COLUMNS
    others += 0 if page.is_narrow else _GAP + _BAR_COLUMNS
    widest = page.columns - len(INDENT) - others
    column = max(8, min(widest, max(map(display_width, labels), default=8)))
    lines = [_column_heads(page, column)]
    for group in shown:
        phase_s = _self_s(row for (phase, _), rows in stages.items() if phase == group[0] for row in rows)
        rows = sorted(stages[group], key=_stage_order)
        lines += _table(page, summary, group, _Table(rows, whole.get(group), phase_s, column, models))
    if len(groups) > len(shown):
        lines += [page.line(f"and {len(groups) - len(shown)} more in summary.json", "dim"), ""]
    return lines[:-1]


class _Table(NamedTuple):
    """The rows of one phase of one loader."""

    stages: Sequence[Row]  # in the order of a step, ``other`` last
    step: Row | None  # durations of whole steps, if there are any
    phase_s: float | None  # of all loaders in this phase: shares are of it, so that loaders can be compared
    column: int  # columns of the stage's name, the same in all tables
    models: bool  # whether the name of the model is shown, since there are several


def _table(page: TextLayout, summary: Summary, group: Group, table: _Table) -> list[str]:
    phase, loader = group
    inner = page.columns - len(INDENT)
    spent_s = _self_s(table.stages)
    facts = _rates(summary, group) or ([] if spent_s is None else [duration(spent_s)])
    name = page.safe(f"{phase or 'no phase'} · {loader}" if loader else phase or "outside any step")
    title = cut(name, max(_SHORTEST_TITLE, inner - display_width(" · ".join(facts)) - 3))
    head, margin = page.line(title, "bold", "cyan") + "   ", len(INDENT) + display_width(title) + 3
    beside = flow(facts, page.columns - margin) or [""]
    lines = hang(head, margin, [page.paint(text, "dim") for text in beside])
    lines += [_row(page, table, row) for row in table.stages]
    if table.step is not None:
        values = _values(page, table.step)
        number = right(_short_count(table.step.get("count")), _COUNT_COLUMNS)
        lines.append(page.paint(INDENT + pad("step", table.column) + number + values, "bold"))
    for row in table.stages:
        if row.get("failed"):
            failed = f"{plural(row['failed'], 'call')} of {_label(page, row, models=table.models)} failed"
            lines.append(page.line(cut(failed, inner), "yellow"))
    return [*lines, ""]


def _self_s(rows: Iterable[Row]) -> float | None:
    known_s = [row["self_seconds"] for row in rows if row.get("self_seconds") is not None]
    return sum(known_s) if known_s else None


def _row(page: TextLayout, table: _Table, row: Row) -> str:
    stage = row.get("stage")
    self_s = row.get("self_seconds")
    share = rate(self_s or None, table.phase_s)  # a stage without self time has no share
    values = right(_short_count(row.get("count")), _COUNT_COLUMNS) + _values(page, row)
    columns = page.columns - len(INDENT) - table.column - display_width(values) - _SHARE_COLUMNS - 2
    waits = stage == "data" and (share or 0) > _SHARE_WORTH_A_COLOR
    style = "yellow" if waits else "dim" if stage == "other" else "green"
    text = pad(_label(page, row, models=table.models), table.column)
    head = page.line(text, style if style != "green" else "") + values + right(percent(share), _SHARE_COLUMNS)
    return head if page.is_narrow else f"{head}  {page.paint(bar(share, max(4, columns)), style)}"


def _column_heads(page: TextLayout, column: int) -> str:
    heads = "".join(right(name, _VALUE_COLUMNS) for name in _statistics(page))
    text = pad("stage", column) + right("count", _COUNT_COLUMNS) + heads
    text += right("share", _SHARE_COLUMNS) + ("" if page.is_narrow else "  of phase")
    return page.line(text, "dim")


def _short_count(number: float | None) -> str:
    return count(number) if number is None or number < _MILLION else f"{rounded(number / _MILLION)} M"


def _statistics(page: TextLayout) -> tuple[str, ...]:
    return tuple(name for name in _STATISTICS if name != "p95" or page.columns >= _P95_FROM)


def _values(page: TextLayout, row: Row) -> str:
    return "".join(right(duration(row.get(name)), _VALUE_COLUMNS) for name in _statistics(page))


def _label(page: TextLayout, row: Row, *, models: bool) -> str:
    stage, model = page.safe(row.get("stage") or ABSENT), row.get("model")
    return f"{stage} {page.safe(model)}" if model and models else stage


def _rates(summary: Summary, group: Group) -> list[str]:
    for row in summary.get("rates") or ():
        if (row.get("phase"), row.get("loader")) == group:
            facts = [duration(row.get("seconds")), plural(row.get("batches"), "batch")]
            return facts + [
                f"{rounded(row[key])} {unit}/s"
                for unit in ("batches", "samples", "tokens")
                if row.get(key := f"{unit}_per_second") is not None
            ]
    return []


def _group(row: Row) -> Group:
    return row.get("phase") or "", row.get("loader") or ""


def _phase_order(group: Group) -> int:
    return PHASES.index(group[0]) if group[0] in PHASES else len(PHASES)


def _stage_order(row: Row) -> int:
    stage = row.get("stage")
    if stage == "other":
        return len(_STAGES) + 1
    return _STAGES.index(stage) if stage in _STAGES else len(_STAGES)


_MOST_FINDINGS = 3
_LIVE = ("running", "stalled", "silent")
"""States in which ``/metrics`` may still answer."""
_MOST_GAPS = 5
_MOST_CAPTURES = 3

_ACTIVITIES = {
    "productive": ("█", "green"),
    "data_wait": ("▒", "yellow"),
    "eval": ("▓", "blue"),
    "checkpoint": ("◆", "magenta"),
    "init": ("╌", "cyan"),
    "compile": ("▚", "cyan"),
    "restart": ("↻", "red"),
    "stalled": ("■", "red"),
    "other": ("░", "dim"),
    "outside": ("□", "yellow"),
}
_STATES = {
    "running": "cyan",
    "stalled": "red",
    "finished": "green",
    "failed": "red",
    "interrupted": "yellow",
    "terminated": "yellow",
    "killed": "red",
    "silent": "yellow",
    "gone": "red",
    "unknown": "yellow",
}
_SEVERITIES = {
    "ok": ("✓", "green"),
    "info": ("•", "cyan"),
    "warning": ("▲", "yellow"),
    "critical": ("✖", "red"),
}
_MARGIN = 11


def render_run_summary(page: TextLayout, summary: Summary) -> str:
    """Returns the run summary of one rank as text.

    Missing keys and null values of the summary show as a dash. No line is wider than the layout, except addresses and paths.
    """
    sections = [
        _header(page, summary),
        _activities(page, summary),
        stage_tables(page, summary),
        loader_lines(page, summary),
        _findings(page, summary),
        _captures(page, summary),
        _instrumentation_gaps(page, summary),
        _footer(page, summary),
    ]
    lines = [line for section in sections if section for line in (*section, "")]
    return page.finish([*lines[:-1], page.paint("━" * page.columns, "dim")])


def state_badge(page: TextLayout, state: object) -> tuple[str, str]:
    """Returns the text for the state of a rank in a title, and its colour."""
    word = page.safe(state)
    return f"● {word}", _STATES.get(word, "")


def _header(page: TextLayout, summary: Summary) -> list[str]:
    name = page.safe(summary.get("run_name") or summary.get("run_id") or ABSENT)
    badge = state_badge(page, summary.get("state") or ABSENT)
    title = page.rule([("otel_train", "bold"), (name, "cyan")], badge)
    steps, wall_s = summary.get("steps") or {}, summary.get("wall_seconds")
    trained = steps.get("train")
    per_second = steps_per_second(summary)
    facts = [
        f"rank {known(summary.get('rank'))} of {known(summary.get('world_size'))}",
        duration(wall_s),
        plural(trained, "train step"),
        *([] if per_second is None else [f"{rounded(per_second)} steps/s of wall time"]),
        *(plural(number, f"{page.safe(phase)} step") for phase, number in steps.items() if phase != "train"),
        *_updates(summary),
    ]
    training, down_s = summary.get("training"), summary.get("restart_seconds")
    identity = [
        f"run {page.safe(known(summary.get('run_id')))}",
        *([] if training in (None, 1) else [f"training {page.safe(training)}"]),
        f"attempt {known(summary.get('attempt'))}",
        *([] if down_s is None else [f"{duration(down_s)} after the last"]),
        f"pid {known(summary.get('pid'))} on {page.safe(known(summary.get('host')))}",
        *_partial_steps(page, summary),
    ]
    inner = page.columns - len(INDENT)
    return [
        title,
        *(
            page.line(line, "red")
            for line in page.prose(summary.get("end_cause") or _stall(summary), indent=len(INDENT))
        ),
        *(page.line(line, "bold") for line in flow(facts, inner)),
        *(page.line(line, "dim") for line in flow(identity, inner)),
    ]


def _stall(summary: Summary) -> str:
    """Returns for how long, and where, a run has stalled; "" if it has not."""
    stall = summary.get("stall")
    return f"no progress for {duration(stall.get('seconds'))}, {stalled_at(stall)}" if stall else ""


def stalled_at(stall: Mapping[str, Any]) -> str:
    """Returns the step and stage of a stall as part of a sentence; ``stall``: the value of that key in a summary."""
    stage, loader, after = (stall.get(name) or "" for name in ("stage", "loader", "after"))
    return f"in step {known(stall.get('step'))}, {stage_place(stage, loader, after=after)}"


def _updates(summary: Summary) -> list[str]:
    updates, skipped = summary.get("updates"), summary.get("skipped_updates")
    trained = (summary.get("steps") or {}).get("train")
    facts = ["no update seen"] if updates is None and trained else []
    if updates is not None and (updates != (trained or 0) or skipped):
        facts.append(plural(updates, "update") + (f" ({count(skipped)} skipped)" if skipped else ""))
    source = summary.get("step_source")
    if source in {"backward", "batch", "manual"}:
        facts.append("steps counted by marks" if source == "manual" else f"steps counted by {source}")
    return facts


def _partial_steps(page: TextLayout, summary: Summary) -> list[str]:
    partial = (summary.get("partial_steps") or {}).items()
    return [plural(number, f"unfinished {page.safe(phase)} step") for phase, number in partial if number]


def _activities(page: TextLayout, summary: Summary) -> list[str]:
    spent = {name: seconds for name, seconds in (summary.get("activities") or {}).items() if seconds}
    if not spent:
        return []
    shares = activity_shares(summary)
    names = sorted(spent, key=lambda name: -spent[name])  # the longest first
    inner = page.columns - len(INDENT)
    drawn = [_ACTIVITIES.get(name, ("░", "dim")) for name in names]
    cells = zip(drawn, stacked([spent[name] for name in names], inner), strict=True)
    strip = "".join(page.paint(glyph * cell, style) for (glyph, style), cell in cells)
    column = max(map(len, names)) + 1
    legend = [
        page.paint(glyph, style)
        + f" {pad(page.safe(name.replace('_', ' ')), column)}"
        + right(percent(shares.get(name)), 7)
        + right(duration(spent[name]), 9)
        for name, (glyph, style) in zip(names, drawn, strict=True)
    ]
    per_line = max(1, (inner + 4) // (column + 22))
    rows = [legend[first : first + per_line] for first in range(0, len(legend), per_line)]
    title = page.line(f"where the time went, of {duration(sum(spent.values()))}", "bold")
    return [title, INDENT + strip, *(INDENT + "    ".join(row) for row in rows)]


def _findings(page: TextLayout, summary: Summary) -> list[str]:
    lines: list[str] = []
    for finding in (summary.get("findings") or ())[:_MOST_FINDINGS]:
        lines += _finding(page, finding, leading=not lines)
    return lines


def _finding(page: TextLayout, finding: Row, *, leading: bool) -> list[str]:
    glyph, style = _SEVERITIES.get(finding.get("severity") or "info", _SEVERITIES["info"])
    lead = f"{glyph} {'finding' if leading else 'also'}: {page.safe(finding.get('name') or ABSENT)}"
    lines = [page.line(lead, "bold", style)]
    indent = INDENT * 2
    columns = page.columns - len(indent) - _MARGIN
    sentences = page.prose(finding.get("summary") or "", indent=len(indent))
    lines += [indent + page.paint(line, "bold") for line in sentences]
    share, seconds = finding.get("share"), finding.get("seconds")
    if share or seconds:
        of = "the training time" if finding.get("phase") == "train" else "the run"
        cost = f"{duration(seconds)}, {percent(share)} of {of}"
        lines += _entry(page, "costs", [page.paint(cost, "bold")], indent=indent)
    values = (finding.get("evidence") or {}).items()
    evidence = (f"{page.safe(name)} {_evidence(name, value)}" for name, value in values)
    advice = page.prose(finding.get("advice") or "", indent=page.columns - columns)
    lines += _entry(page, "seen", flow(evidence, columns), indent=indent)
    return lines + _entry(page, "do", advice, indent=indent)


def _evidence(name: str, value: float | None) -> str:
    if name.endswith(("_seconds", "_s")) or name == "seconds":
        return duration(value)
    return percent(value) if name.endswith(("share", "ratio")) else rounded(value)


def _entry(page: TextLayout, name: str, lines: Iterable[str], *, indent: str) -> list[str]:
    return hang(indent + page.paint(pad(name, _MARGIN), "dim"), len(indent) + _MARGIN, lines)


def _captures(page: TextLayout, summary: Summary) -> list[str]:
    lines: list[str] = []
    for row in (summary.get("captures") or ())[-_MOST_CAPTURES:]:
        first, last = row.get("steps") or (-1, -1)
        steps = f"steps {first} to {last}" if first >= 0 else "no steps"
        entry = [f"{steps}, {page.safe(row.get('trigger') or ABSENT)}"]
        for text in (row.get("finding"), row.get("problem")):
            entry += page.prose(text or "", indent=len(INDENT) + _MARGIN)
        if row.get("file"):
            entry.append(page.paint(page.path(row["file"]), "dim"))
        lines += _entry(page, "capture", entry, indent=INDENT)
    return lines


def _instrumentation_gaps(page: TextLayout, summary: Summary) -> list[str]:
    lines: list[str] = []
    gaps = summary.get("instrumentation_gaps") or ()
    for row in gaps[:_MOST_GAPS]:
        what, name = page.safe(row.get("what") or ABSENT), page.safe(row.get("name") or "")
        text = f"incomplete, not seen: {what} {name}".rstrip() + f": {row.get('reason') or ABSENT}"
        lines += [page.line(line, "yellow") for line in page.prose(text, indent=len(INDENT))]
    if len(gaps) > _MOST_GAPS:
        lines.append(INDENT + f"incomplete, not seen: {len(gaps) - _MOST_GAPS} more, in summary.json")
    return lines


def _footer(page: TextLayout, summary: Summary) -> list[str]:
    cost = flow(_overhead(page, summary), page.columns - len(INDENT) - _MARGIN)
    lines = _entry(page, "telemetry", cost, indent=INDENT)
    lines += _entry(page, "otlp", map(page.path, undelivered(summary.get("undelivered"))), indent=INDENT)
    url = page.path(known(summary.get("metrics_url")))
    was = "was at " * bool(summary.get("metrics_url") and summary.get("state") not in _LIVE)
    lines += _entry(page, "metrics", [was + url], indent=INDENT)
    lines += _entry(page, "files", [page.path(known(summary.get("run_dir")))], indent=INDENT)
    return lines + _entry(page, "settings", _settings(page, summary), indent=INDENT)


def undelivered(left: Row | None) -> list[str]:
    """Returns lines about the requests that the Collector has not accepted, with the command that sends them; none if all were.

    Keys of ``left``: ``waiting``, the number in the spool (None: some, of unknown number); ``rejected``; ``run``, the run
    directory (None: waiting requests are in memory only, and are lost at the end); ``unsaved``, the number in memory
    because the disk cannot be written, which are lost at the end, too.
    """
    if left is None:
        return []
    waiting, rejected, run = left["waiting"], left["rejected"], left["run"]
    where = "wait in the spool" if run else "are in memory alone, as there is no run directory"
    facts = [f"the Collector has not accepted the last requests: they {where}"] * (waiting is None)
    if waiting:
        facts.append(f"{plural(waiting, 'request')} {'waits' if waiting == 1 else 'wait'} in the spool")
    if run and (unsaved := left.get("unsaved")):
        facts.append(f"{plural(unsaved, 'request')} in memory alone, as the disk cannot be written")
    if rejected:
        facts.append(f"{plural(rejected, 'request')} {'was' if rejected == 1 else 'were'} rejected")
    if not facts or not run:
        return [", ".join(facts)] if facts else []
    return [", ".join(facts), f"otel-train replay {shlex.quote(run)}" + " --rejected" * bool(rejected)]


def _settings(page: TextLayout, summary: Summary) -> list[str]:
    """Returns lines about settings from files, and about ignored settings: the user may not know of either."""
    files: dict[str, list[str]] = {}
    for name, origin in (summary.get("settings_from") or {}).items():
        if origin not in {"code", "environment"}:
            files.setdefault(origin, []).append(name)
    entries = [f"{', '.join(names)} from {file}" for file, names in files.items()]
    entries += [f"ignored: {known(row.get('problem'))}" for row in summary.get("settings_ignored") or ()]
    return [page.path(line) for line in entries]


def _overhead(page: TextLayout, summary: Summary) -> list[str]:
    cost = summary.get("telemetry") or {}
    per_step, overhead_s = cost.get("overhead_us_per_step"), cost.get("overhead_seconds")
    share = rate(overhead_s, summary.get("wall_seconds"))
    lost = cost.get("records_lost")
    facts = [
        f"{duration(None if per_step is None else per_step * 1e-6)} per step",
        f"{percent(share)} of wall time",
        *([f"agent {duration(agent_s)} of CPU"] if (agent_s := cost.get("agent_cpu_seconds")) else []),
        f"{plural(cost.get('records'), 'record')}, {'none' if lost == 0 else count(lost)} lost",
    ]
    for heading in ("drops", "faults"):
        for name, number in (cost.get(heading) or {}).items():
            if name != "sampled_out":  # traces beyond the setting trace_rate_per_s are left out on purpose
                facts.append(f"{page.safe(name)} {heading}: {count(number)}")
    return facts


class StepWindow(NamedTuple):
    """Training steps of one progress line: those since the line before, up to step ``last``."""

    last: int
    steps: int
    seconds: float
    samples: int | None  # None if the number of samples of no batch is known
    waited_s: float | None  # None if no loader was seen


def progress_line(page: TextLayout, window: StepWindow, summary: Summary) -> str:
    """Returns the progress line of a window of steps; ``summary``: summary of the run so far, of which the finding is shown."""
    facts = [f"step {count(window.last)}", f"{rounded(rate(window.steps, window.seconds))} steps/s"]
    if window.samples is not None:
        facts.append(f"{rounded(rate(window.samples, window.seconds))} samples/s")
    if window.waited_s is not None:
        facts.append(f"{percent(rate(window.waited_s, window.seconds))} waiting for data")
    leading: Row = next(iter(summary["findings"]), {})
    if leading:
        facts.append(f"finding so far: {page.safe(leading['name'])}")
    return page.finish([f"otel_train: {' · '.join(facts)}"])


def data_wait_s(summary: Mapping[str, Any]) -> float | None:
    """Returns the seconds that training waited for its loaders; None if the summary has no loader."""
    waited: float | None = (summary.get("activities") or {}).get("data_wait")
    return waited if waited or summary.get("batches") else None


def activity_shares(summary: Mapping[str, Any]) -> dict[str, float]:
    """Returns each activity's share of the wall time. The shares sum to one; ``data_wait`` is absent if there is no loader."""
    spent: Mapping[str, float] = summary.get("activities") or {}
    whole_s = sum(spent.values())
    known = {name: s for name, s in spent.items() if name != "data_wait" or data_wait_s(summary) is not None}
    return {name: seconds / whole_s for name, seconds in known.items()} if whole_s else {}


def steps_per_second(summary: Mapping[str, Any]) -> float | None:
    """Returns the training steps per second of wall time; None if the summary has no throughput."""
    found: float | None = (summary.get("throughput") or {}).get("steps_per_second")
    return found
