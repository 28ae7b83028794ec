"""HTML components shared by all pages."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import resources
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlencode

from otel_train.console.text import ABSENT, duration, instant, percent
from otel_train.datamodel import RANGE_PREFIX
from otel_train.rundata.files import FOREIGN
from otel_train.ui import escape
from otel_train.ui.charts import color_of

if TYPE_CHECKING:
    from otel_train.rundata.alerts import Notice
    from otel_train.rundata.liveness import Liveness


_LATEST_UNIX_S = 253402300799
"""End of the year 9999, the last one that ``datetime`` has."""

_CODE = re.compile(r"`([^`]+)`")
_FEW = 4
"""Up to this many leading values have a fixed width; more share the width of the page."""

MARKS = {"critical": "✖", "warning": "▲", "info": "•", "ok": "✓", "live": "●"}


def asset(name: str) -> str:
    """Returns the content of a file in this folder: style, scripts, icon."""
    return resources.files("otel_train.ui").joinpath(name).read_text(encoding="utf-8")


def section(title: str, draw: Callable[[], str], *, beside: str = "") -> str:
    """Returns a section of a tab; "" if ``draw`` returns nothing. If ``draw`` raises, the section has a note instead."""
    try:
        body = draw()
    except FOREIGN as error:
        what = "A value of the document has an unexpected shape"
        body = f'<p class="dim">{what}: {escape(repr(error)[:200])}</p>'
    if not body:
        return ""
    note = f' <span class="dim beside">{beside}</span>' if beside else ""
    return f"<section><h2>{escape(title)}{note}</h2>{labelled(body, title)}</section>"


def labelled(body: str, title: str) -> str:
    """Names the tables in ``body`` for screen readers: they take the keyboard focus, since they scroll."""
    return body.replace(
        _SCROLL, f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(title)}">'
    )


def leading_values(cells: Iterable[tuple[str, str, str]]) -> str:
    """Returns the main values: name, value, and a comparison. Unknown values are skipped."""
    shown = [
        f"<div><dt>{escape(what)}</dt><dd>{escape(value)}</dd>"
        + (f'<dd class="dim">{escape(beside)}</dd>' if beside else "")
        + "</div>"
        for what, value, beside in cells
        if value and value != ABSENT
    ]
    few = " few" if len(shown) <= _FEW else ""
    return f'<dl class="values{few}">{"".join(shown)}</dl>' if shown else ""


def board(notices: Sequence[Notice], *, unfold: int) -> str:
    """Returns the notices, a line each, with advice and facts to unfold; the first ``unfold`` are unfolded."""
    if not notices:
        return ""
    items = "".join(_notice(each, unfold=place < unfold) for place, each in enumerate(notices))
    return f'<section class="board" aria-label="Alerts and findings">{items}</section>'


def _notice(each: Notice, *, unfold: bool) -> str:
    times = f' <span class="times">{each.times:,} times</span>' if each.times > 1 else ""
    when = f' <span class="times">{moment(each.at_unix_s)}</span>' if each.at_unix_s else ""
    head = (
        f'<span class="mark" aria-hidden="true">{MARKS[each.severity]}</span><span><span class="sr">{escape(each.severity)}: '
        f"</span><strong>{escape(each.title)}</strong>{times} {_prose(each.summary)}{when}</span>"
    )
    more = f"<p>{_prose(each.advice)}</p>" if each.advice else ""
    more += f'<p class="dim">{escape(" · ".join(each.facts))}</p>' if each.facts else ""
    if not more:
        return f'<div class="notice {each.severity}">{head}</div>'
    return f'<details class="notice {each.severity}"{" open" if unfold else ""}><summary>{head}</summary><div>{more}</div></details>'


def _prose(sentence: str) -> str:
    """Returns a sentence as HTML; what is between backticks is set as code."""
    return _CODE.sub(r"<code>\1</code>", escape(sentence))


def texts(made: str) -> str:
    """Returns a table whose last column is text."""
    return f'<div class="texts">{made}</div>' if made else ""


def badge(state: Liveness) -> str:
    """Returns the state of a run as a coloured word."""
    lasts = state.word in {"silent", "stalled"} and state.quiet_s is not None
    quiet = f" for {duration(state.quiet_s)}" if lasts else ""
    return f'<span class="state {state.severity}"><span aria-hidden="true">{MARKS[state.severity]}</span> {escape(state.word)}{quiet}</span>'


def moment(unix_s: float | None) -> str:
    """Returns an instant, which the script of the page shows in the browser's time zone and as an age."""
    if unix_s is None or not 0 < unix_s < _LATEST_UNIX_S:
        return ABSENT
    return f'<time data-at="{unix_s:.3f}">{instant(unix_s)}</time>'


def address(run: str, **query: object) -> str:
    """Returns the URL of a run's page, or of something below it, as HTML; None values are skipped."""
    return escape(url_of(run, **query))


def url_of(run: str, **query: object) -> str:
    """Returns the URL of a run's page, or of something below it, for a header."""
    words = {key: str(value) for key, value in query.items() if value is not None}
    path = f"/run/{quote(os.fsencode(run), safe='')}"  # the name of a folder, which need not be UTF-8
    return path + (f"?{urlencode(words, errors='replace')}" if words else "")


def share_strip(parts: Sequence[tuple[str, float, str]], *, label: str) -> str:
    """Draws shares of a whole as one strip: name, share from 0 to 1 and colour of each; ``label`` is for screen readers."""
    text = ", ".join(f"{name.replace('_', ' ')} {percent(share)}" for name, share, _ in parts)
    pieces = "".join(
        f'<span class="b-{color}" style="width:{share * 100:.3f}%" title="{escape(name.replace("_", " "))} {percent(share)}"></span>'
        for name, share, color in parts
    )
    return f'<div class="strip" role="img" aria-label="{escape(f"{label}: {text}")}">{pieces}</div>'


_SCROLL = '<div class="scroll">'
_ROW_PX = 20
_BAR = '<span class="bar'


def finding(each: Mapping[str, Any]) -> str:
    """Returns one finding, as a box."""
    title = escape(str(each["name"]).replace("_", " "))
    gain = ""
    if each.get("share"):
        saved_s = (each.get("hours_per_day") or 0.0) * 3600
        hours = f", {duration(saved_s)} of each day of training" if saved_s else ""
        sure = f" · confidence {escape(each['confidence'])}" if each.get("confidence") else ""
        gain = f'<p class="dim">{percent(each["share"])} of the time to win back{hours}{sure}</p>'
    places = "".join(f"<li><code>{escape(place)}</code></li>" for place in each.get("where") or ())
    where = f"<ul>{places}</ul>" if places else ""
    severity = escape(str(each.get("severity") or "info"))
    return (
        f'<article class="finding {severity}"><h3>{title}</h3><p>{escape(each["summary"])}</p>'
        f"<p>{escape(each['advice'])}</p>{gain}{where}</article>"
    )


def flame_graph(calls: Sequence[Mapping[str, Any]]) -> str:
    """Draws calls as boxes, callers above. Arrow keys move, Enter zooms in, Escape out."""
    if not calls:
        return ""
    depth = max(call["depth"] for call in calls) + 1
    boxes = "".join(
        f'<button tabindex="{0 if number == 0 else -1}" class="b-{_flame_color(call["name"])}" data-s="{call["start_share"]:.6f}" '
        f'data-w="{call["share"]:.6f}" data-d="{call["depth"]}" data-p="{call["parent"]}" '
        f'style="left:{call["start_share"] * 100:.3f}%;width:{call["share"] * 100:.3f}%;top:{call["depth"] * _ROW_PX}px" '
        f'title="{_flame_text(call)}">{escape(call["name"])}</button>'
        for number, call in enumerate(calls)
    )
    return (
        '<p class="dim">Time on the host by caller. Click or Enter zooms in, Escape out, arrow keys move.</p>'
        f'<div class="flame" role="group" aria-label="Flame graph" style="height:{depth * _ROW_PX}px">{boxes}</div>'
        '<p class="dim flame-text" aria-live="polite"></p>'
    )


def _flame_text(call: Mapping[str, Any]) -> str:
    spent = f"{duration(call['seconds'])}, {percent(call['share'])}, {call['count']:,} calls"
    return escape(f"{call['name']}: {spent}")


def _flame_color(name: str) -> str:
    backward = "autograd" in name or "Backward" in name
    return color_of(name.removeprefix(RANGE_PREFIX), 3 if name.startswith("aten::") else 1 if backward else 6)


def share_bar(share: float, name: str) -> str:
    """Returns a cell of a table: a share as a bar in the colour of the series ``name``."""
    color = f" b-{color_of(name, 0)}" if name else ""
    return f'{_BAR}{color}" style="width:{min(share, 1.0) * 50:.3f}%"></span> {percent(share)}'


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Returns a table of cells that are HTML already; "" without rows."""
    body = "".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in rows)
    if not body:
        return ""
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in heads)
    return f"{_SCROLL}<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"


def _cell(text: str) -> str:
    return f'<td class="track">{text}</td>' if text.startswith(_BAR) else f"<td>{text}</td>"
