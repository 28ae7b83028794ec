"""The page that lists the runs."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING
from urllib.parse import urlencode

from otel_train.analyze.report import table
from otel_train.analyze.report_text import ABSENT, duration, figure
from otel_train.ui.components import address, badge, moment
from otel_train.ui.page import frame

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from otel_train.ui.run_list import Row

PAGE = 50
_HEADS = ("run", "state", "started", "steps", "steps/s", "ranks", "host", "verdict")
_EVERY_S = 2.0


def runs_page(rows: Sequence[Row], root: Path, *, words: str, page: int) -> str:
    """The list.

    Args:
        rows: all runs, the newest first.
        root: their folder.
        words: those that each shown run says; "" for all runs.
        page: from 1; one past the last shows the last.
    """
    found = [row for row in rows if row.says(words)]
    pages = max(1, -(-len(found) // PAGE))
    page = min(max(1, page), pages)
    shown = found[(page - 1) * PAGE : page * PAGE]
    body = table(_HEADS, map(_row, shown)) or _nothing(root, words=words, runs=len(rows))
    going = sum(row.state.word == "running" for row in rows)
    facts = f"{len(rows):,} runs in <code>{escape(str(root))}</code>" + (
        f", {going:,} going on" if going else ""
    )
    main = (
        f'<div class="title"><h1>Runs</h1>{_filter(words)}</div><p class="dim facts">{facts}</p>'
        f'<div class="runs" id="runs">{body}</div>{_pages(words, page, pages, len(found))}'
    )
    return frame("Runs", main, every_s=_EVERY_S)


def _row(row: Row) -> list[str]:
    name = f"<strong>{escape(row.run_name)}</strong>"
    beside = f' <span class="dim">{escape(row.name)}</span>' if row.name != row.run_name else ""
    return [
        f'<a href="{address(row.name)}">{name}{beside}</a>',
        badge(row.state),
        moment(row.started_unix_s or None),
        figure(row.steps),
        figure(row.speed),
        figure(row.ranks),
        escape(row.host) or ABSENT,
        f'<span title="{duration(row.wall_s)}">{escape(row.verdict.replace("_", " ")) or ABSENT}</span>',
    ]


def _filter(words: str) -> str:
    return (
        '<form class="filter" role="search" action="/"><label><span class="sr">Show runs with these words</span>'
        f'<input type="search" name="filter" value="{escape(words)}" placeholder="Filter: name, host, state, verdict" '
        'autocomplete="off" spellcheck="false"></label><noscript><button>Show</button></noscript></form>'
    )


def _nothing(root: Path, *, words: str, runs: int) -> str:
    if runs:
        return f'<p class="empty">No run has all of these words: <strong>{escape(words)}</strong></p>'
    return (
        f'<p class="empty">No run lies in <code>{escape(str(root))}</code> yet. This page shows the first as soon as it begins: '
        "<code>otel-train run train.py</code>, or <code>otel-train demo</code>.</p>"
    )


def _pages(words: str, page: int, pages: int, found: int) -> str:
    if pages == 1:
        return ""
    first = (page - 1) * PAGE + 1

    def link(number: int, text: str) -> str:
        if not 1 <= number <= pages:
            return f'<span class="dim">{text}</span>'
        query = urlencode({**({"filter": words} if words else {}), "page": number})
        return f'<a href="/?{escape(query)}">{text}</a>'

    return (
        f'<nav class="pages" aria-label="Pages of the list">{link(page - 1, "Newer")} '
        f"<span>{first:,} to {min(found, page * PAGE):,} of {found:,}</span> {link(page + 1, 'Older')}</nav>"
    )
