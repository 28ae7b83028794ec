"""Static report of a run: the pages of the browser in one file that needs nothing else."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING, Any

from otel_train.ui.captures import capture_analysis, captures_table
from otel_train.ui.components import asset, board, section
from otel_train.ui.pages import memory, name_of, overview, timing, title_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from otel_train.rundata.live_view import RankView

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"


def render(view: RankView, captures: Sequence[Mapping[str, Any]]) -> str:
    """Returns the report as HTML. Every name in it is escaped, and it loads nothing.

    ``captures`` are ``name``, ``analysis`` as of ``trace_analysis.summarize``, and ``flame`` of the newest, of each rank.
    """
    parts = {
        "Overview": overview(view, static=True),
        "Timing": timing(view, static=True),
        "Memory": memory(view),
        "Captures": _captures(view, captures),
    }
    links = "".join(f'<a href="#{name.lower()}">{name}</a>' for name in parts)
    body = "".join(
        f'<div id="{name.lower()}" role="region" aria-labelledby="h-{name.lower()}">'
        f'<h2 class="part" id="h-{name.lower()}">{name}</h2>{part}</div>'
        for name, part in parts.items()
    )
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(name_of(view))} · otel_train</title>'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><meta name="color-scheme" content="light dark">'
        f'<style>{asset("page.css")}</style></head><body><a class="skip" href="#main">Skip to the findings</a>'
        f'<header class="top"><nav aria-label="Sections"><span class="brand">otel_train</span> {links}</nav></header>'
        f'<main id="main">{title_of(view, static=True)}{board(view.notices, unfold=len(view.notices))}{body}</main>'
        f"<script>{asset('flames.js')}flames();</script></body></html>\n"
    )


def _captures(view: RankView, captures: Sequence[Mapping[str, Any]]) -> str:
    return section("Taken", lambda: captures_table(view, static=True)) + "".join(
        section(each["name"], lambda each=each: capture_analysis(each["analysis"], each["flame"]))  # type: ignore[misc]  # a default argument in a lambda
        for each in captures
    )
