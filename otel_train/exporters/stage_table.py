"""How long the stages of each loader took, as tables with bars."""

from __future__ import annotations

from collections import defaultdict
from itertools import chain, repeat
from typing import TYPE_CHECKING, Any, NamedTuple

from otel_train.exporters import text_layout
from otel_train.exporters.text_layout import (
    INDENT,
    Page,
    bar,
    count,
    cut,
    display_width,
    duration,
    pad,
    percent,
    plural,
    rate,
    right,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    Summary = Mapping[str, Any]  # JSON: docs/reference/summary.schema.json says what is in it
    Row = Mapping[str, Any]
    Group = tuple[str, str]

_SHARE_WORTH_A_COLOR = 0.2
_MOST_GROUPS = 8  # a card is for one look; summary.json has the rest
_PHASES = ("train", "eval", "test", "predict")
_STAGES = ("data", "h2d", "forward", "backward", "optimizer")
_FIGURES = ("avg", "p50", "p95", "p99")
_COUNT_COLUMNS, _FIGURE_COLUMNS, _SHARE_COLUMNS, _BAR_COLUMNS = 8, 9, 9, 8
_GAP = 2
_SHORTEST_TITLE = 24
_MILLION = 1_000_000


def stage_tables(page: Page, summary: Summary) -> list[str]:
    """Lines that show each stage of each phase and loader: how often, how long, and which share of its phase."""
    stages: dict[Group, list[Row]] = defaultdict(list)
    for row in summary.get("stages") or ():
        stages[row.get("phase") or "", row.get("loader") or ""].append(row)
    whole: dict[Group, Row] = {
        (row.get("phase") or "", row.get("loader") or ""): row for row in summary.get("step_durations") or ()
    }
    groups = sorted({**dict.fromkeys(stages), **dict.fromkeys(whole)}, key=_phase_order)
    if not groups:
        return [INDENT + page.paint("no stage has been seen yet", "dim")]
    shown = groups[:_MOST_GROUPS]
    models = len({row.get("model") for rows in stages.values() for row in rows if row.get("model")}) > 1
    labels = [_label(page, row, models=models) for group in shown for row in stages[group]]
    taken = _COUNT_COLUMNS + len(_FIGURES) * _FIGURE_COLUMNS + _SHARE_COLUMNS + _GAP + _BAR_COLUMNS
    widest = page.columns - len(INDENT) - taken
    column = max(8, min(widest, max(map(display_width, labels), default=8)))
    lines = [_column_heads(page, column)]
    for group in shown:
        phase_s = _self_s(row for (phase, _), rows in stages.items() if phase == group[0] for row in rows)
        rows = sorted(stages[group], key=_stage_order)
        lines += _table(page, summary, group, _Table(rows, whole.get(group), phase_s, column, models))
    if len(groups) > len(shown):
        lines += [INDENT + page.paint(f"and {len(groups) - len(shown)} more in summary.json", "dim"), ""]
    return lines[:-1]


class _Table(NamedTuple):
    """The rows of one phase of one loader.

    Attributes:
        stages: in the order of a step, ``other`` last.
        step: figures of the whole step, where there are any.
        phase_s: seconds of all loaders in this phase: what shares are shares of, so that loaders can be compared.
        column: columns of the stage's name, the same in all tables.
        models: whether stages must say which model they mean.
    """

    stages: Sequence[Row]
    step: Row | None
    phase_s: float | None
    column: int
    models: bool


def _table(page: Page, summary: Summary, group: Group, table: _Table) -> list[str]:
    phase, loader = group
    inner = page.columns - len(INDENT)
    spent_s = _self_s(table.stages)
    facts = _rates(summary, group) or ([] if spent_s is None else [duration(spent_s)])
    name = page.safe(f"{phase or 'no phase'} · {loader}" if loader else phase or "outside any step")
    title = cut(name, max(_SHORTEST_TITLE, inner - display_width(" · ".join(facts)) - 3))
    beside = text_layout.flow(facts, inner - display_width(title) - 3)
    margins = chain([page.paint(title, "bold", "cyan")], repeat(" " * display_width(title)))
    lines = [
        f"{INDENT}{margin}   {page.paint(text, 'dim')}"
        for margin, text in zip(margins, beside or [""], strict=False)
    ]
    lines += [_row(page, table, row) for row in table.stages]
    if table.step is not None:
        figures = _figures(table.step)
        text = (
            INDENT
            + pad("step", table.column)
            + right(_short_count(table.step.get("count")), _COUNT_COLUMNS)
            + figures
        )
        lines.append(page.paint(text, "bold"))
    for row in table.stages:
        if row.get("failed"):
            failed = f"{plural(row['failed'], 'call')} of {_label(page, row, models=table.models)} failed"
            lines.append(INDENT + page.paint(cut(failed, inner), "yellow"))
    return [*lines, ""]


def _self_s(rows: Iterable[Row]) -> float | None:
    known_s = [row["self_seconds"] for row in rows if row.get("self_seconds") is not None]
    return sum(known_s) if known_s else None


def _row(page: Page, table: _Table, row: Row) -> str:
    stage = row.get("stage")
    self_s = row.get("self_seconds")
    share = rate(self_s or None, table.phase_s)  # what was never innermost has no share
    figures = right(_short_count(row.get("count")), _COUNT_COLUMNS) + _figures(row)
    room = page.columns - len(INDENT) - table.column - display_width(figures) - _SHARE_COLUMNS - 2
    waits = stage == "data" and (share or 0) > _SHARE_WORTH_A_COLOR
    style = "yellow" if waits else "dim" if stage == "other" else "green"
    text = pad(_label(page, row, models=table.models), table.column)
    return (
        INDENT
        + page.paint(text, style if style != "green" else "")
        + figures
        + right(percent(share), _SHARE_COLUMNS)
        + "  "
        + page.paint(bar(share, max(4, room)), style)
    )


def _column_heads(page: Page, column: int) -> str:
    heads = "".join(right(name, _FIGURE_COLUMNS) for name in _FIGURES)
    text = (
        pad("stage", column)
        + right("count", _COUNT_COLUMNS)
        + heads
        + right("share", _SHARE_COLUMNS)
        + "  of phase"
    )
    return INDENT + page.paint(text, "dim")


def _short_count(number: float | None) -> str:
    return (
        count(number) if number is None or number < _MILLION else f"{text_layout.figure(number / _MILLION)} M"
    )


def _figures(row: Row) -> str:
    return "".join(right(duration(row.get(name)), _FIGURE_COLUMNS) for name in _FIGURES)


def _label(page: Page, row: Row, *, models: bool) -> str:
    stage, model = page.safe(row.get("stage") or text_layout.ABSENT), row.get("model")
    return f"{stage} {page.safe(model)}" if model and models else stage


def _rates(summary: Summary, group: Group) -> list[str]:
    """How long the work on a loader's batches took, and how fast it goes."""
    for row in summary.get("rates") or ():
        if (row.get("phase"), row.get("loader")) == group:
            facts = [duration(row.get("seconds")), plural(row.get("batches"), "batch")]
            return facts + [
                f"{text_layout.figure(row[key])} {unit}/s"
                for unit in ("batches", "samples", "tokens")
                if row.get(key := f"{unit}_per_second") is not None
            ]
    return []


def _phase_order(group: Group) -> int:
    return _PHASES.index(group[0]) if group[0] in _PHASES else len(_PHASES)


def _stage_order(row: Row) -> int:
    stage = row.get("stage")
    if stage == "other":
        return len(_STAGES) + 1
    return _STAGES.index(stage) if stage in _STAGES else len(_STAGES)
