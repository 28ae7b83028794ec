"""The card a run leaves in the terminal."""

from __future__ import annotations

from itertools import chain, repeat
from typing import TYPE_CHECKING, Any

from otel_train.analyze.report_text import activity_shares, steps_per_second
from otel_train.exporters import text_layout
from otel_train.exporters.loader_lines import loader_lines
from otel_train.exporters.stage_table import stage_tables
from otel_train.exporters.text_layout import (
    INDENT,
    Page,
    count,
    duration,
    known,
    pad,
    percent,
    plural,
    rate,
    right,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    Summary = Mapping[str, Any]  # JSON: docs/reference/summary.schema.json says what is in it
    Row = Mapping[str, Any]

_MOST_VERDICTS = 3
_MOST_UNOBSERVED = 5
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
    "finished": "green",
    "failed": "red",
    "interrupted": "yellow",
    "terminated": "yellow",
    "killed": "red",
}
_SEVERITIES = {
    "ok": ("✓", "green"),
    "info": ("•", "cyan"),
    "warning": ("▲", "yellow"),
    "critical": ("✖", "red"),
}
_MARGIN = 11


def render_card(summary: Summary, *, width: int = 100, color: bool, unicode: bool) -> str:
    """Everything worth knowing about a run at one glance.

    Args:
        summary: what ``summary.json`` holds. Keys may be missing and figures null: they show as a dash.
        width: columns of the terminal. The card is laid out for 80 to 120 of them.
        color: use ANSI colours.
        unicode: use block characters; else nothing but ASCII leaves here.

    Returns:
        Lines with a newline each. No line is wider than the layout, addresses and paths excepted.
    """
    page = Page(width, color, unicode)
    sections = [
        _header(page, summary),
        _activities(page, summary),
        stage_tables(page, summary),
        loader_lines(page, summary),
        _verdicts(page, summary),
        _captures(page, summary),
        _unobserved(page, summary),
        _footer(page, summary),
    ]
    lines = [line for section in sections if section for line in (*section, "")]
    return page.finish([*lines[:-1], page.paint("━" * page.columns, "dim")])


def _header(page: Page, summary: Summary) -> list[str]:
    name = page.safe(summary.get("run_name") or summary.get("run_id") or text_layout.ABSENT)
    state = page.safe(summary.get("state") or text_layout.ABSENT)
    title = page.rule(
        [("otel_train", "bold"), (name, "cyan")],
        (f"● {state}", _STATES.get(state, "")),
    )
    steps, wall_s = summary.get("steps") or {}, summary.get("wall_seconds")
    trained = steps.get("train")
    per_second = steps_per_second(summary)
    facts = [
        f"rank {known(summary.get('rank'))} of {known(summary.get('world_size'))}",
        duration(wall_s),
        plural(trained, "train step"),
        *([] if per_second is None else [f"{text_layout.figure(per_second)} steps/s of wall time"]),
        *(plural(number, f"{page.safe(phase)} step") for phase, number in steps.items() if phase != "train"),
        *_updates(summary),
    ]
    identity = [
        f"run {page.safe(known(summary.get('run_id')))}",
        *([] if summary.get("training") in (None, 1) else [f"training {page.safe(summary['training'])}"]),
        f"attempt {known(summary.get('attempt'))}",
        *(
            []
            if summary.get("restart_seconds") is None
            else [f"{duration(summary['restart_seconds'])} after the last"]
        ),
        f"pid {known(summary.get('pid'))} on {page.safe(known(summary.get('host')))}",
        *_unfinished(page, summary),
    ]
    inner = page.columns - len(INDENT)
    return [
        title,
        *(INDENT + page.paint(line, "bold") for line in text_layout.flow(facts, inner)),
        *(INDENT + page.paint(line, "dim") for line in text_layout.flow(identity, inner)),
    ]


def _updates(summary: Summary) -> list[str]:
    updates, skipped = summary.get("updates"), summary.get("skipped_updates")
    trained = (summary.get("steps") or {}).get("train")
    facts = []
    if updates is not None and (updates != (trained or 0) or skipped):
        facts.append(plural(updates, "update") + (f" ({count(skipped)} skipped)" if skipped else ""))
    source = summary.get("step_source")
    if source in {"backward", "batch", "manual"}:
        facts.append("steps counted by hand" if source == "manual" else f"steps counted by {source}")
    return facts


def _unfinished(page: Page, summary: Summary) -> list[str]:
    partial = summary.get("partial_steps") or {}
    return [
        plural(number, f"unfinished {page.safe(phase)} step") for phase, number in partial.items() if number
    ]


def _activities(page: Page, summary: Summary) -> list[str]:
    spent = {name: seconds for name, seconds in (summary.get("activities") or {}).items() if seconds}
    if not spent:
        return []
    shares = activity_shares(summary)
    names = sorted(spent, key=lambda name: -spent[name])
    inner = page.columns - len(INDENT)
    drawn = [_ACTIVITIES.get(name, ("░", "dim")) for name in names]
    cells = text_layout.stacked([spent[name] for name in names], inner)
    strip = "".join(
        page.paint(glyph * cell, style) for (glyph, style), cell in zip(drawn, cells, strict=True)
    )
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
    title = page.paint("where the time went", "bold")
    return [INDENT + title, INDENT + strip, *(INDENT + "    ".join(row) for row in rows)]


def _verdicts(page: Page, summary: Summary) -> list[str]:
    lines: list[str] = []
    for finding in (summary.get("verdicts") or ())[:_MOST_VERDICTS]:
        lines += _verdict(page, finding, leading=not lines)
    return lines


def _verdict(page: Page, finding: Row, *, leading: bool) -> list[str]:
    glyph, style = _SEVERITIES.get(finding.get("severity") or "info", _SEVERITIES["info"])
    lead = (
        f"{glyph} {'verdict' if leading else 'also'}: {page.safe(finding.get('name') or text_layout.ABSENT)}"
    )
    lines = [INDENT + page.paint(lead, "bold", style)]
    indent = INDENT * 2
    room = page.columns - len(indent) - _MARGIN
    lines += [
        indent + page.paint(line, "bold")
        for line in page.prose(finding.get("claim") or "", indent=len(indent))
    ]
    share, seconds = finding.get("share"), finding.get("seconds")
    if share or seconds:
        of = "the training time" if finding.get("phase") == "train" else "the run"
        cost = f"{duration(seconds)}, {percent(share)} of {of}"
        lines += _entry(page, "costs", [page.paint(cost, "bold")], indent=indent)
    evidence = (
        f"{page.safe(name)} {_evidence(name, value)}"
        for name, value in (finding.get("evidence") or {}).items()
    )
    lines += _entry(page, "seen", text_layout.flow(evidence, room), indent=indent)
    return lines + _entry(
        page, "do", page.prose(finding.get("advice") or "", indent=page.columns - room), indent=indent
    )


def _evidence(name: str, value: float | None) -> str:
    if name.endswith(("_seconds", "_s")) or name == "seconds":
        return duration(value)
    return percent(value) if name.endswith(("share", "ratio")) else text_layout.figure(value)


def _entry(page: Page, name: str, lines: Iterable[str], *, indent: str) -> list[str]:
    """A name in the margin and what belongs to it beside it."""
    margins = chain([page.paint(pad(name, _MARGIN), "dim")], repeat(" " * _MARGIN))
    return [indent + margin + line for margin, line in zip(margins, lines, strict=False)]


def _captures(page: Page, summary: Summary) -> list[str]:
    lines: list[str] = []
    for row in (summary.get("captures") or ())[-_MOST_CAPTURES:]:
        first, last = row.get("steps") or (-1, -1)
        steps = f"steps {first} to {last}" if first >= 0 else "no steps"
        lines += _entry(
            page,
            "capture",
            [f"{steps}, {page.safe(row.get('trigger') or text_layout.ABSENT)}"],
            indent=INDENT,
        )
        for said in (row.get("finding"), row.get("problem")):
            if said:
                room = page.prose(str(said), indent=len(INDENT) + _MARGIN)
                lines += [INDENT + " " * _MARGIN + line for line in room]
        if row.get("file"):
            lines.append(INDENT + " " * _MARGIN + page.paint(page.safe(row["file"]), "dim"))
    return lines


def _unobserved(page: Page, summary: Summary) -> list[str]:
    lines: list[str] = []
    unobserved = summary.get("unobserved") or ()
    for row in unobserved[:_MOST_UNOBSERVED]:
        what, name = page.safe(row.get("what") or text_layout.ABSENT), page.safe(row.get("name") or "")
        text = (
            f"incomplete, not seen: {what} {name}".rstrip() + f": {row.get('reason') or text_layout.ABSENT}"
        )
        lines += [INDENT + page.paint(line, "yellow") for line in page.prose(text, indent=len(INDENT))]
    if len(unobserved) > _MOST_UNOBSERVED:
        lines.append(
            INDENT + f"incomplete, not seen: {len(unobserved) - _MOST_UNOBSERVED} more, in summary.json"
        )
    return lines


def _footer(page: Page, summary: Summary) -> list[str]:
    cost = text_layout.flow(_cost(page, summary), page.columns - len(INDENT) - _MARGIN)
    lines = _entry(page, "telemetry", cost, indent=INDENT)
    for name, key in (("metrics", "metrics_url"), ("files", "run_dir")):
        lines += _entry(page, name, [page.safe(known(summary.get(key)))], indent=INDENT)
    return lines + _entry(page, "settings", _settings(page, summary), indent=INDENT)


def _settings(page: Page, summary: Summary) -> list[str]:
    """Those that a file has, and those that are ignored: whoever started the run may not know of them."""
    files: dict[str, list[str]] = {}
    for name, origin in (summary.get("settings_from") or {}).items():
        if origin not in {"code", "environment"}:
            files.setdefault(origin, []).append(name)
    told = [f"{', '.join(names)} from {file}" for file, names in files.items()]
    told += [f"ignored: {known(row.get('problem'))}" for row in summary.get("settings_ignored") or ()]
    return [page.safe(line) for line in told]


def _cost(page: Page, summary: Summary) -> list[str]:
    cost = summary.get("telemetry") or {}
    per_step, overhead_s = cost.get("overhead_us_per_step"), cost.get("overhead_seconds")
    share = rate(overhead_s, summary.get("wall_seconds"))
    lost = cost.get("records_lost")
    facts = [
        f"{duration(None if per_step is None else per_step * 1e-6)} per step",
        f"{percent(share)} of wall time",
        f"pump {duration(cost.get('pump_cpu_seconds'))} of CPU",
        f"{plural(cost.get('records'), 'record')}, {'none' if lost == 0 else count(lost)} lost",
    ]
    for heading in ("drops", "faults"):
        for name, number in (cost.get(heading) or {}).items():
            facts.append(f"{page.safe(name)} {heading}: {count(number)}")
    return facts
