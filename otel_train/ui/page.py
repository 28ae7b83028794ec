"""The frame around every page: head, header, tabs."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

from otel_train.ui.artifacts import Captures, artifacts
from otel_train.ui.components import address, badge, board, moment
from otel_train.ui.memory import memory
from otel_train.ui.overview import overview
from otel_train.ui.run_list import number, text, whole
from otel_train.ui.timing import timing

if TYPE_CHECKING:
    from otel_train.ui.live_view import RankView

TABS = ("overview", "timing", "memory", "artifacts")


def frame(title: str, main: str, *, trail: str = "", every_s: float) -> str:
    """A whole page.

    Args:
        title: of the window.
        main: what it shows, as HTML.
        trail: where the reader is, below the list of runs, as HTML.
        every_s: after how many seconds it asks for what is new; 0 for never.
    """
    where = f'<span aria-hidden="true">/</span> {trail}' if trail else ""
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)} · otel_train</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><meta name="color-scheme" content="light dark">'
        '<link rel="icon" href="/icon.svg"><link rel="stylesheet" href="/style.css"><script src="/page.js" defer></script>'
        f'</head><body data-every="{every_s:g}"><a class="skip" href="#main">Skip to the figures</a>'
        f'<header class="top"><nav aria-label="Where you are"><a class="brand" href="/">otel_train</a> {where}</nav>'
        '<span id="told" role="status"></span></header>'
        f'<main id="main">{main}</main></body></html>\n'
    )


def run_page(view: RankView, tab: str, *, captures: Captures, capture: str | None) -> str:
    """The page of a run.

    Args:
        view: what is known.
        tab: which of ``TABS``.
        captures: analyses made before.
        capture: the one to look into; None for none.
    """
    draw = {"overview": overview, "timing": timing, "memory": memory}.get(tab)
    body = draw(view) if draw is not None else artifacts(view, captures, capture)
    if not body:
        body = '<p class="empty">Nothing has been written yet. The figures appear as soon as training begins.</p>'
    name = text(view.summary.get("run_name")) or text(view.about.get("run_name")) or view.run.name
    main = (
        f'<div class="title"><h1>{escape(name)}</h1>{badge(view.state)}{_ranks(view, tab)}</div>{_facts(view)}{_tabs(view, tab)}'
        f'<div role="tabpanel" id="panel" aria-labelledby="tab-{tab}" tabindex="0">'
        f"{board(view.notices, unfold=tab == TABS[0])}{body}</div>"
    )
    return frame(
        f"{name} · {tab}",
        main,
        trail=f"<span>{escape(view.run.name)}</span>",
        every_s=1.0 if view.state.live else 5.0,
    )


def gone_page(name: str) -> str:
    """Where a run was, or never has been."""
    main = (
        f'<div class="title"><h1>{escape(name[:200])}</h1></div><p class="empty">There is no such run in the folder. '
        'It may have been moved or deleted. <a href="/">All runs</a></p>'
    )
    return frame("no such run", main, every_s=5.0)


def _facts(view: RankView) -> str:
    known = {**view.about, **view.summary}
    started_s = (
        number(view.summary.get("started_unix_s")) or (number(view.about.get("started_unix_ns")) or 0.0) / 1e9
    )
    training, attempt = whole(known.get("training")) or 1, whole(known.get("attempt"))
    facts = [
        f"<code>{escape(view.run.name)}</code>",
        escape(text(known.get("host"))),
        f"started {moment(started_s)}" if started_s else "",
        f"training {training}" if training > 1 else "",
        f"attempt {attempt}" if attempt else "",
        f"rank {view.rank} of {whole(known.get('world_size')) or len(view.ranks)}"
        if view.rank is not None
        else "",
    ]
    return f'<p class="dim facts">{" · ".join(fact for fact in facts if fact)}</p>'


def _ranks(view: RankView, tab: str) -> str:
    """A choice of ranks: a form, so that it works before the script has come."""
    if len(view.ranks) <= 1:
        return ""
    options = "".join(
        f'<option value="{rank}"{" selected" if rank == view.rank else ""}>rank {rank}</option>'
        for rank in view.ranks
    )
    return (
        f'<form class="ranks" action="{address(view.run.name)}"><input type="hidden" name="tab" value="{tab}">'
        f'<label>Rank <select name="rank">{options}</select></label><noscript><button>Show</button></noscript></form>'
    )


def _tabs(view: RankView, chosen: str) -> str:
    links = "".join(
        f'<a role="tab" id="tab-{tab}" href="{address(view.run.name, tab=tab, rank=view.rank)}" aria-controls="panel" '
        f'aria-selected="{str(tab == chosen).lower()}" tabindex="{0 if tab == chosen else -1}">{tab.capitalize()}</a>'
        for tab in TABS
    )
    return f'<div role="tablist" aria-label="Views of this run">{links}</div>'
