"""What happened inside the loaders, as lines of the card."""

from __future__ import annotations

from itertools import chain, repeat
from typing import TYPE_CHECKING, Any

from otel_train.exporters import text_layout
from otel_train.exporters.text_layout import INDENT, Page, cut, display_width, duration, pad, plural

if TYPE_CHECKING:
    from collections.abc import Mapping

    Summary = Mapping[str, Any]  # JSON: docs/reference/summary.schema.json says what is in it
    Row = Mapping[str, Any]

_WIDEST_NAME = 20
_MOST_LOADERS = 6
_BYTE_UNITS = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"))
_BAD_ENDS = {"short": "fell short of len()", "error": "ended by an exception"}


def loader_lines(page: Page, summary: Summary) -> list[str]:
    """Lines about loaders that have workers, or of which something must be said; none for the rest."""
    told = [(row, facts) for row in summary.get("loaders") or () if (facts := _facts(page, row))]
    if not told:
        return []
    names = [page.safe(row.get("loader") or text_layout.ABSENT) for row, _ in told]
    column = min(_WIDEST_NAME, max(map(display_width, names)))
    lines = [INDENT + page.paint("inside the loaders", "bold")]
    for name, (row, facts) in list(zip(names, told, strict=True))[:_MOST_LOADERS]:
        margins = chain([page.paint(pad(cut(name, column), column), "cyan")], repeat(" " * column))
        room = page.columns - len(INDENT) - column - 2
        body = text_layout.flow(facts, room)
        body += [page.paint(line, "red") for line in text_layout.flow(_trouble(page, row), room)]
        lines += [f"{INDENT}{margin}  {line}" for margin, line in zip(margins, body, strict=False)]
    if len(told) > _MOST_LOADERS:
        lines.append(INDENT + page.paint(f"and {len(told) - _MOST_LOADERS} more in summary.json", "dim"))
    return lines


def _facts(page: Page, row: Row) -> list[str]:
    build, start, weight = row.get("build") or {}, row.get("start") or {}, row.get("batch_bytes") or {}
    measured = build.get("measured_in") == "worker"
    if not measured and not _trouble(page, row):
        return []
    facts = [plural(row["workers"], "worker")] if row.get("workers") else ["no workers"]
    if measured:
        p50, p95, p99 = (duration(build.get(name)) for name in ("p50", "p95", "p99"))
        facts.append(f"a batch takes one {p50} (p95 {p95}, p99 {p99})")
    if start:
        facts.append(f"a pass begins in {duration(start.get('avg'))}")
    if weight:
        facts.append(f"{_bytes(weight.get('avg'))} per batch")
    if build.get("lost"):
        facts.append(f"{plural(build['lost'], 'build')} not read in time")
    return facts


def _trouble(page: Page, row: Row) -> list[str]:
    endings = row.get("endings") or {}
    told = [
        f"{plural(endings[reason], 'pass')} {meaning}"
        for reason, meaning in _BAD_ENDS.items()
        if endings.get(reason)
    ]
    for what, key in (("raised", "errors"), ("worker died", "worker_exits")):
        told += [
            f"{what}: {page.safe(name)}" + (f" ({text_layout.count(number)} times)" if number > 1 else "")
            for name, number in (row.get(key) or {}).items()
        ]
    return told


def _bytes(number: float | None) -> str:
    for unit_bytes, unit in _BYTE_UNITS:
        if number is not None and number >= unit_bytes:
            return f"{text_layout.figure(float(f'{number / unit_bytes:.3g}'))} {unit}"
    return f"{text_layout.count(number)} B"
