"""Pieces that every tab is made of."""

from __future__ import annotations

import re
from datetime import datetime, timezone
from html import escape
from typing import TYPE_CHECKING
from urllib.parse import quote, urlencode

from otel_train.console.text import ABSENT, duration

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from otel_train.ui.liveness import Liveness
    from otel_train.ui.notices import Notice

_LATEST_UNIX_S = 253402300799
"""The end of the year 9999, behind which there are no dates."""

_CODE = re.compile(r"`([^`]+)`")
_FEW = 4
"""So many tiles keep their size; more share the width among them."""

MARKS = {"critical": "✖", "warning": "▲", "info": "•", "ok": "✓", "live": "●"}
_FOREIGN = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RuntimeError)
"""What figures of a shape that we have never written may raise."""


def section(title: str, draw: Callable[[], str], *, beside: str = "") -> str:
    """A part of a tab; "" if there is nothing to show. One that cannot be drawn says so, and the rest is shown.

    Args:
        title: its heading.
        draw: makes its body, as HTML.
        beside: a few words on where the figures are from, as HTML.
    """
    try:
        body = draw()
    except _FOREIGN as error:
        body = f'<p class="dim">A figure has not the shape it should have: {escape(repr(error)[:200])}</p>'
    if not body:
        return ""
    told = f' <span class="dim beside">{beside}</span>' if beside else ""
    return f"<section><h2>{escape(title)}{told}</h2>{body}</section>"


def tiles(cells: Iterable[tuple[str, str, str]]) -> str:
    """The leading figures: what, how much, and what to compare it with. One that is not known is left out."""
    shown = [
        f"<div><dt>{escape(what)}</dt><dd>{escape(value)}</dd>"
        + (f'<dd class="dim">{escape(beside)}</dd>' if beside else "")
        + "</div>"
        for what, value, beside in cells
        if value and value != ABSENT
    ]
    few = " few" if len(shown) <= _FEW else ""
    return f'<dl class="tiles{few}">{"".join(shown)}</dl>' if shown else ""


def board(notices: Sequence[Notice], *, unfold: bool) -> str:
    """What a reader must know, a line each; advice and figures unfold.

    Args:
        notices: the gravest first.
        unfold: show the first with all that belongs to it.
    """
    if not notices:
        return ""
    items = "".join(_notice(each, unfold=unfold and place == 0) for place, each in enumerate(notices))
    return f'<section class="board" aria-label="Alerts and verdicts">{items}</section>'


def _notice(each: Notice, *, unfold: bool) -> str:
    times = f' <span class="times">{each.times:,} times</span>' if each.times > 1 else ""
    when = f" {moment(each.at_unix_s)}" if each.at_unix_s else ""
    head = (
        f'<span class="mark" aria-hidden="true">{MARKS[each.severity]}</span><span><span class="sr">{escape(each.severity)}: '
        f"</span><strong>{escape(each.title)}</strong>{times}{when} {_prose(each.claim)}</span>"
    )
    more = f"<p>{_prose(each.advice)}</p>" if each.advice else ""
    more += f'<p class="dim">{escape(" · ".join(each.facts))}</p>' if each.facts else ""
    if not more:
        return f'<div class="notice {each.severity}">{head}</div>'
    return f'<details class="notice {each.severity}"{" open" if unfold else ""}><summary>{head}</summary><div>{more}</div></details>'


def _prose(sentence: str) -> str:
    """A sentence as HTML; what is between backticks is set as code."""
    return _CODE.sub(r"<code>\1</code>", escape(sentence))


def texts(made: str) -> str:
    """A table whose last column is text."""
    return f'<div class="texts">{made}</div>' if made else ""


def badge(state: Liveness) -> str:
    """How a run is, as a word in its colour."""
    quiet = f" for {duration(state.quiet_s)}" if state.word == "silent" and state.quiet_s is not None else ""
    return f'<span class="state {state.severity}"><span aria-hidden="true">{MARKS[state.severity]}</span> {escape(state.word)}{quiet}</span>'


def moment(unix_s: float | None) -> str:
    """An instant, which the page shows in the reader's own time zone and as an age."""
    if unix_s is None or not 0 < unix_s < _LATEST_UNIX_S:
        return ABSENT
    return f'<time data-at="{unix_s:.3f}">{datetime.fromtimestamp(unix_s, timezone.utc):%Y-%m-%d %H:%M:%S} UTC</time>'


def address(run: str, **query: object) -> str:
    """The address of a run's page, or of something below it; what is None is left out."""
    words = {key: str(value) for key, value in query.items() if value is not None}
    return escape(f"/run/{quote(run, safe='')}" + (f"?{urlencode(words)}" if words else ""))


def share_strip(parts: Sequence[tuple[str, float, str]], *, label: str) -> str:
    """Shares of a whole as one strip.

    Args:
        parts: name, share from 0 to 1, class of the colour.
        label: what it shows, for those who cannot see it.
    """
    said = ", ".join(f"{name.replace('_', ' ')} {share * 100:.1f} %" for name, share, _ in parts)
    pieces = "".join(
        f'<span class="b-{color}" style="width:{share * 100:.3f}%" title="{escape(name.replace("_", " "))} {share * 100:.1f} %"></span>'
        for name, share, color in parts
    )
    return f'<div class="strip" role="img" aria-label="{escape(f"{label}: {said}")}">{pieces}</div>'
