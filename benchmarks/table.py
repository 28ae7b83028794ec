"""Formats the results table for a terminal and for the reference page."""

from __future__ import annotations

import unicodedata
from typing import TYPE_CHECKING

from benchmarks.row import Row, Status

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.machine import Machine

HEAD = ("what", "budget", "median [q1 .. q3]", "status")

PAGE = """\
# Overhead

Each value is a difference or a ratio against the bare loop, paired with it and taken in the same run.
`make bench` writes the table; `python -m benchmarks --help` says how each value is measured.
A row whose quartiles are further apart than twice its budget is too busy to quote; a run with such a row does not replace the table.

{block}

## What is missed, and why

Written manually, from the table above.
"""
"""Text of a new page. Later runs replace only the part between the marks."""


def begin_mark(device: str) -> str:
    """Returns the line that the table of ``device`` follows."""
    return f"<!-- bench {device}: begin (written by `make bench`) -->"


def end_mark(device: str) -> str:
    """Returns the line that ends the table of ``device``."""
    return f"<!-- bench {device}: end -->"


def number(value: float) -> str:
    """Writes a number with three significant digits and no exponent; whole from 100 up."""
    if abs(value) >= 100:
        return f"{value:.0f}"
    places = 1 if abs(value) >= 10 else 2 if abs(value) >= 1 else 3
    return f"{value:.{places}f}"


def cells_of(row: Row) -> tuple[str, str, str, str]:
    """Returns one line of the table as text."""
    budget = "" if row.budget is None else f"≤ {row.budget:g} {row.unit}"
    return row.what, budget, _measured(row), _status(row)


def _measured(row: Row) -> str:
    spread = row.spread
    if spread is None:
        return "-"
    if spread.repeats == 1:
        return f"{number(spread.median)} {row.unit}"
    return f"{number(spread.median)} [{number(spread.q1)} .. {number(spread.q3)}] {row.unit}"


def _status(row: Row) -> str:
    if row.status is Status.MISSED:
        return f"missed by {number(row.excess)} {row.unit}"
    if row.status is Status.NOT_MEASURED:
        return f"not measured: {row.reason}"
    return "" if row.status is Status.NO_BUDGET else row.status.value


def plain_table(rows: Sequence[Row]) -> str:
    """Returns the table for a terminal, columns aligned."""
    lines = [HEAD, *(cells_of(row) for row in rows)]
    widths = [max(_columns(line[index]) for line in lines) for index in range(len(HEAD))]
    lines.insert(1, tuple("-" * width for width in widths))  # type: ignore[arg-type]  # four cells, as all
    return "\n".join(
        "  ".join(
            cell + " " * (width - _columns(cell)) for cell, width in zip(line, widths, strict=True)
        ).rstrip()
        for line in lines
    )


def _columns(text: str) -> int:
    """Counts the terminal columns of ``text``: combining marks take none."""
    return sum(not unicodedata.combining(char) for char in text)


def markdown_table(rows: Sequence[Row]) -> str:
    """Returns the table for the reference page; budgets that are not met stand out."""
    lines = [HEAD, tuple("---" for _ in HEAD), *(_marked(row) for row in rows)]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def _marked(row: Row) -> tuple[str, str, str, str]:
    what, budget, measured, status = cells_of(row)
    loud = row.status in (Status.MISSED, Status.TOO_BUSY, Status.NOT_MEASURED)
    return what, budget, measured, f"**{status}**" if loud else status


def remarks(rows: Sequence[Row]) -> str:
    """Returns explanations of the rows that need one."""
    return "\n".join(f"- {row.what}: {row.reason}." for row in rows if row.reason and row.values)


def page_with(rows: Sequence[Row], machine: Machine, *, device: str, page: str) -> str:
    """Returns ``page`` with the table of ``device`` put between its marks; the text around it stays.

    Args:
        rows: the table.
        machine: where it was measured.
        device: ``cpu`` or ``cuda``; each has its own table.
        page: the page as it is; "" for none yet.
    """
    parts = [begin_mark(device), machine.sentence(), markdown_table(rows), remarks(rows), end_mark(device)]
    block = "\n\n".join(part for part in parts if part)
    begin, end = page.find(begin_mark(device)), page.find(end_mark(device))
    if begin >= 0 and end > begin:
        return page[:begin] + block + page[end + len(end_mark(device)) :]
    head, heading, written = page.partition("## What is missed, and why")
    return head + block + "\n\n" + heading + written if heading else PAGE.format(block=block)
