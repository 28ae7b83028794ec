"""SVG charts, without a library, in light and dark mode."""

from __future__ import annotations

import math
from html import escape
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

WIDTH, HALF_WIDTH, HEIGHT, LEFT, BOTTOM, TOP = 860.0, 430.0, 220.0, 64.0, 24.0, 8.0
COLORS = ("blue", "teal", "violet", "amber", "pink", "green", "brown", "gray")
_FIXED = {
    "data": "amber", "data_wait": "amber", "forward": "blue", "backward": "teal", "optimizer": "violet", "other": "gray",
    "productive": "blue", "eval": "green", "init": "brown", "checkpoint": "pink", "outside": "violet",
}  # fmt: skip
"""A stage has the same colour wherever it appears."""
_TICKS = 4
_ROUND = (1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 8.0, 10.0)
_SLACK = 1.0 + 1e-9
"""A part that was round stays so, whatever rounding made of it."""

_MINUTE_S = 60


def color_of(name: str, place: int) -> str:
    """Returns the class that colours a series."""
    return _FIXED.get(name.partition(":")[0], COLORS[place % len(COLORS)])


def area(
    times: Sequence[float],
    series: Mapping[str, Sequence[float]],
    *,
    label: str,
    unit: Callable[[float], str],
    width: float = WIDTH,
) -> str:
    """Draws stacked series by name, the first at the bottom; ``times`` are seconds, increasing.

    ``label`` says what it shows, for those who cannot see it; ``width`` is ``WIDTH``, or ``HALF_WIDTH`` for one of two.
    """
    if len(times) <= 1:
        return ""
    tops = [0.0] * len(times)
    shapes = []
    highest = _round(max((sum(column) for column in zip(*series.values(), strict=True)), default=0.0))
    x, y = _across(times, width), _up(highest)
    for place, (name, values) in enumerate(series.items()):
        floor, tops = tops, [top + value for top, value in zip(tops, values, strict=True)]
        upper = [f"{x(at):.1f},{y(top):.1f}" for at, top in zip(times, tops, strict=True)]
        lower = [f"{x(at):.1f},{y(low):.1f}" for at, low in zip(times, floor, strict=True)][::-1]
        title = f"<title>{escape(name)}</title>"
        shapes.append(
            f'<polygon class="c-{color_of(name, place)}" points="{" ".join(upper + lower)}">{title}</polygon>'
        )
    axes = _marks(times, x) + _grid(highest, unit, width)
    return _svg(axes + "".join(shapes), label, width) + legend(list(series))


def lines(
    times: Sequence[float],
    series: Mapping[str, Sequence[float | None]],
    *,
    label: str,
    unit: Callable[[float], str],
    width: float = WIDTH,
) -> str:
    """Series as lines; None is a hole. Arguments are those of ``area``."""
    known = [value for values in series.values() for value in values if value is not None]
    if len(times) <= 1 or not known:
        return ""
    highest = _round(max(known))
    x, y = _across(times, width), _up(highest)
    shapes = []
    for place, (name, values) in enumerate(series.items()):
        points = " ".join(
            f"{x(at):.1f},{y(value):.1f}"
            for at, value in zip(times, values, strict=True)
            if value is not None
        )
        title = f"<title>{escape(name)}</title>"
        shapes.append(f'<polyline class="s-{color_of(name, place)}" points="{points}">{title}</polyline>')
    axes = _marks(times, x) + _grid(highest, unit, width)
    return _svg(axes + "".join(shapes), label, width) + legend(list(series))


def bars(
    edges: Sequence[tuple[float, float]],
    numbers: Sequence[int],
    *,
    name: str,
    label: str,
    unit: Callable[[float], str],
) -> str:
    """Returns a histogram over buckets that grow by the same factor."""
    if not numbers:
        return ""
    highest = _whole(max(numbers))
    step = (HALF_WIDTH - LEFT) / len(numbers)
    y = _up(highest)
    shapes = []
    for place, ((low, high), number) in enumerate(zip(edges, numbers, strict=True)):
        said = escape(f"{unit(low)} to {unit(high)}: {number:,}")
        shapes.append(
            f'<rect class="c-{color_of(name, 0)}" x="{LEFT + place * step:.1f}" y="{y(number):.1f}" '
            f'width="{max(step - 0.6, 0.5):.1f}" height="{HEIGHT - BOTTOM - y(number):.1f}"><title>{said}</title></rect>'
        )
    marks = []
    for place in sorted({round(part * (len(numbers) - 1) / _TICKS) for part in range(_TICKS + 1)}):
        at = LEFT + (place + 0.5) * step
        anchor = "end" if at > HALF_WIDTH - 40 else "middle"
        marks.append(_mark(at, unit(edges[place][0]), anchor))
    grid = _grid(highest, lambda value: f"{value:,.0f}", HALF_WIDTH)
    return _svg(grid + "".join(shapes) + "".join(marks), label, HALF_WIDTH)


def legend(names: Sequence[str]) -> str:
    """Returns which colour is which."""
    items = "".join(
        f'<li><span class="key b-{color_of(name, place)}"></span>{escape(name.replace("_", " "))}</li>'
        for place, name in enumerate(names)
    )
    return f'<ul class="legend">{items}</ul>'


def _across(times: Sequence[float], width: float) -> Callable[[float], float]:
    first, length = times[0], (times[-1] - times[0]) or 1.0
    return lambda at: LEFT + (at - first) / length * (width - LEFT)


def _up(highest: float) -> Callable[[float], float]:
    return lambda value: HEIGHT - BOTTOM - value / highest * (HEIGHT - BOTTOM - TOP)


def _round(highest: float) -> float:
    """Returns the smallest axis maximum whose ticks are round numbers."""
    if highest <= 0 or not math.isfinite(highest):
        return 1.0
    part = highest / _TICKS
    unit = 10.0 ** math.floor(math.log10(part))
    return _TICKS * unit * next(round_part for round_part in _ROUND if part <= round_part * unit * _SLACK)


def _whole(most: int) -> float:
    """Returns the same for counts, whose ticks are integers."""
    return _round(most) if most >= 10 * _TICKS else float(_TICKS * max(1, math.ceil(most / _TICKS)))


def _marks(times: Sequence[float], x: Callable[[float], float]) -> str:
    marks = []
    for part in range(_TICKS + 1):
        at = times[0] + (times[-1] - times[0]) * part / _TICKS
        anchor = "end" if part == _TICKS else "start" if part == 0 else "middle"
        marks.append(_mark(x(at), elapsed(at), anchor))
    return "".join(marks)


def _mark(x: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{HEIGHT - 6}" text-anchor="{anchor}">{escape(text)}</text>'


def _grid(highest: float, unit: Callable[[float], str], width: float) -> str:
    y = _up(highest)
    rows = []
    for part in range(_TICKS + 1):
        value = highest * part / _TICKS
        rows.append(
            f'<line class="grid" x1="{LEFT}" x2="{width}" y1="{y(value):.1f}" y2="{y(value):.1f}"/>'
            f'<text x="{LEFT - 6}" y="{y(value) + 4:.1f}" text-anchor="end">{escape(unit(value))}</text>'
        )
    return "".join(rows)


def _svg(inside: str, label: str, width: float) -> str:
    box = f"0 0 {width:.0f} {HEIGHT:.0f}"
    wide = ' class="wide"' if width == WIDTH else ""
    return f'<svg{wide} viewBox="{box}" role="img" aria-label="{escape(label)}">{inside}</svg>'


def elapsed(seconds: float) -> str:
    """Returns the seconds as a clock reads: ``45 s``, ``3:20``, ``2:05:00``."""
    whole = math.floor(seconds)
    if whole < _MINUTE_S:
        return f"{seconds:.3g} s"
    hours, minutes = divmod(whole // 60, 60)
    return f"{hours}:{minutes:02}:{whole % 60:02}" if hours else f"{minutes}:{whole % 60:02}"
