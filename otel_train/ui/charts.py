"""SVG charts, without a library, in light and dark mode."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate, groupby
from typing import TypeVar

from otel_train.ui import escape

WIDTH, HALF_WIDTH, HEIGHT, LEFT, BOTTOM, TOP = 860.0, 430.0, 220.0, 64.0, 24.0, 8.0
COLORS = ("blue", "teal", "violet", "amber", "pink", "green", "brown", "gray")
_FIXED = {
    "data": "amber", "data_wait": "amber", "forward": "blue", "backward": "teal", "optimizer": "violet", "other": "gray",
    "productive": "blue", "eval": "green", "init": "brown", "checkpoint": "pink", "outside": "violet",
    "compile": "teal", "restart": "brown", "stalled": "gray",
}  # fmt: skip
"""A stage has the same colour wherever it appears."""
_TICKS = 4  # of the vertical axis, above 0
_ROUND = (1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 8.0, 10.0)
_SLACK = 1.0 + 1e-9
"""Tolerance of comparisons with round numbers, for errors of floating-point arithmetic."""

_MINUTE_S = 60
_CLOCK_S = (10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400)
_MARKS = 5  # of the time axis, about
_DASHES = 4  # dash patterns of lines
_LEAST_HOLE = 1 / 800
"""Shortest gap between two spans that is drawn, as a share of the time axis: about one pixel."""

T = TypeVar("T")


def color_of(name: str, place: int) -> str:
    """Returns the class that colours a series."""
    return _FIXED.get(name.partition(":")[0], COLORS[place % len(COLORS)])


def held(
    spans: Sequence[tuple[float, float]], series: Mapping[str, Sequence[float | None]]
) -> tuple[list[float], dict[str, list[float | None]]]:
    """Returns the points of a step function: two for each span, and a None between spans that do not touch.

    Args:
        spans: begin and end in seconds, increasing.
        series: by name a value for each span; None is a gap.
    """
    times: list[float] = []
    places: list[int | None] = []
    least = _LEAST_HOLE * (spans[-1][1] - spans[0][0]) if spans else 0.0
    for place, (begin, end) in enumerate(spans):
        if times and begin - times[-1] > least:
            times, places = [*times, times[-1]], [*places, None]
        times, places = [*times, begin, end], [*places, place, place]
    return times, {
        name: [None if place is None else values[place] for place in places]
        for name, values in series.items()
    }


def area(
    times: Sequence[float],
    series: Mapping[str, Sequence[float | None]],
    *,
    label: str,
    unit: Callable[[float], str],
    width: float = WIDTH,
) -> str:
    """Draws stacked series by name, the first at the bottom. None in one of them is a gap in all.

    Args:
        times: seconds from 0, increasing.
        series: a value for each time.
        label: what it shows, for screen readers.
        unit: formats a value.
        width: ``WIDTH``, or ``HALF_WIDTH`` for one of two.
    """
    if len(times) <= 1:
        return ""
    stacks = [_stack(column) for column in zip(*series.values(), strict=True)]
    highest = _round(max((stack[-1] for stack in stacks if stack), default=0.0))
    x, y = _x_scale(times, width), _y_scale(highest)
    shapes = []
    for place, name in enumerate(series):
        for part in _parts(stacks):
            upper = [f"{x(times[at]):.1f},{y(stack[place + 1]):.1f}" for at, stack in part]
            lower = [f"{x(times[at]):.1f},{y(stack[place]):.1f}" for at, stack in part][::-1]
            shapes.append(
                f'<polygon class="c-{color_of(name, place)}" points="{" ".join(upper + lower)}"><title>{escape(name)}</title></polygon>'
            )
    axes = _marks(times, x) + _grid(highest, unit, width)
    return _svg(axes + "".join(shapes), _with_values(label, series, unit), width) + legend(list(series))


def lines(
    times: Sequence[float],
    series: Mapping[str, Sequence[float | None]],
    *,
    label: str,
    unit: Callable[[float], str],
    width: float = WIDTH,
) -> str:
    """Draws series as lines; None is a gap. Arguments are those of ``area``."""
    known = [value for values in series.values() for value in values if value is not None]
    if len(times) <= 1 or not known:
        return ""
    highest = _round(max(known))
    x, y = _x_scale(times, width), _y_scale(highest)
    shapes = []
    for place, (name, values) in enumerate(series.items()):
        for part in _parts(values):
            points = " ".join(f"{x(times[at]):.1f},{y(value):.1f}" for at, value in part)
            shapes.append(
                f'<polyline class="s-{color_of(name, place)}{_dash(place)}" points="{points}"><title>{escape(name)}</title></polyline>'
            )
    axes = _marks(times, x) + _grid(highest, unit, width)
    return _svg(axes + "".join(shapes), _with_values(label, series, unit), width) + legend(
        list(series), of_lines=True
    )


def _stack(column: Sequence[float | None]) -> list[float] | None:
    """Returns the cumulative sums of stacked values; None if one is missing."""
    known = [value for value in column if value is not None]
    return [0.0, *accumulate(known)] if len(known) == len(column) else None


def _parts(values: Sequence[T | None]) -> Iterator[list[tuple[int, T]]]:
    """Yields each run of values between gaps, every value with its index."""
    numbered = ((at, value) for at, value in enumerate(values))
    for hole, part in groupby(numbered, lambda pair: pair[1] is None):
        if not hole:
            yield [(at, value) for at, value in part if value is not None]


def _dash(place: int) -> str:
    return f" d{place % _DASHES}" if place % _DASHES else ""


def _with_values(
    label: str, series: Mapping[str, Sequence[float | None]], unit: Callable[[float], str]
) -> str:
    """Returns the label with minimum, last value and maximum of each series."""
    ranges = []
    for name, values in series.items():
        known = [value for value in values if value is not None]
        if known:
            shown = f"min {unit(min(known))}, last {unit(known[-1])}, max {unit(max(known))}"
            ranges.append(f"{name.replace('_', ' ')} {shown}")
    return f"{label}: {'; '.join(ranges)}" if ranges else label


def bars(
    edges: Sequence[tuple[float, float]],
    numbers: Sequence[int],
    *,
    name: str,
    label: str,
    unit: Callable[[float], str],
) -> str:
    """Draws a histogram with buckets that grow by a constant factor."""
    if not numbers:
        return ""
    highest = _whole(max(numbers))
    step = (HALF_WIDTH - LEFT) / len(numbers)
    y = _y_scale(highest)
    shapes = []
    for place, ((low, high), number) in enumerate(zip(edges, numbers, strict=True)):
        text = escape(f"{unit(low)} to {unit(high)}: {number:,}")
        shapes.append(
            f'<rect class="c-{color_of(name, 0)}" x="{LEFT + place * step:.1f}" y="{y(number):.1f}" '
            f'width="{max(step - 0.6, 0.5):.1f}" height="{HEIGHT - BOTTOM - y(number):.1f}"><title>{text}</title></rect>'
        )
    marks = []
    for place in sorted({round(part * (len(numbers) - 1) / _TICKS) for part in range(_TICKS + 1)}):
        at = LEFT + (place + 0.5) * step
        anchor = "end" if at > HALF_WIDTH - 40 else "middle"
        marks.append(_mark(at, unit(edges[place][0]), anchor))
    grid = _grid(highest, lambda value: f"{value:,.0f}", HALF_WIDTH)
    text = f"{label}: {sum(numbers):,} calls of {unit(edges[0][0])} to {unit(edges[-1][1])}"
    return _svg(grid + "".join(shapes) + "".join(marks), text, HALF_WIDTH)


def legend(names: Sequence[str], *, of_lines: bool = False) -> str:
    """Returns the legend of series: colours, and dashes if ``of_lines``."""
    items = "".join(
        f'<li><span class="key b-{color_of(name, place)}{f" line{_dash(place)}" if of_lines else ""}"></span>{escape(name.replace("_", " "))}</li>'
        for place, name in enumerate(names)
    )
    return f'<ul class="legend">{items}</ul>'


def _x_scale(times: Sequence[float], width: float) -> Callable[[float], float]:
    return lambda at: LEFT + at / (times[-1] or 1.0) * (width - LEFT)


def _y_scale(highest: float) -> Callable[[float], float]:
    return lambda value: HEIGHT - BOTTOM - value / highest * (HEIGHT - BOTTOM - TOP)


def _round(highest: float) -> float:
    """Returns the smallest axis maximum whose ticks are round numbers."""
    if highest <= 0 or not math.isfinite(highest):
        return 1.0
    part = highest / _TICKS
    unit = 10.0 ** math.floor(math.log10(part))
    return _TICKS * unit * next(round_part for round_part in _ROUND if part <= round_part * unit * _SLACK)


def _whole(most: int) -> float:
    """Returns the axis maximum for counts, whose ticks are integers."""
    return _round(most) if most >= 10 * _TICKS else float(_TICKS * max(1, math.ceil(most / _TICKS)))


def _marks(times: Sequence[float], x: Callable[[float], float]) -> str:
    """Returns marks at round times; one near the right edge is aligned to end there."""
    step_s, end_s = _round_time(times[-1] / _MARKS), times[-1]
    marks = [_mark(x(0.0), elapsed(0.0), "start")]
    for number in range(1, math.floor(end_s / step_s * _SLACK) + 1 if step_s else 1):
        anchor = "end" if end_s - number * step_s < step_s / _MARKS else "middle"
        marks.append(_mark(x(min(number * step_s, end_s)), elapsed(number * step_s), anchor))
    return "".join(marks)


def _round_time(seconds: float) -> float:
    """Returns the smallest round time on a clock that is not below ``seconds``."""
    if not 0 < seconds < math.inf:
        return 0.0
    clock_s = next((each for each in _CLOCK_S if seconds <= each), 0)
    if seconds > _CLOCK_S[0] / 2 and clock_s:
        return float(clock_s)
    base_s = _CLOCK_S[-1] if seconds > _CLOCK_S[-1] else 1
    unit_s = base_s * 10.0 ** math.floor(math.log10(seconds / base_s))
    return unit_s * next(part for part in (1, 2, 5, 10) if seconds <= part * unit_s * _SLACK)


def _mark(x: float, text: str, anchor: str) -> str:
    return f'<text class="at" x="{x:.1f}" y="{HEIGHT - 6}" text-anchor="{anchor}">{escape(text)}</text>'


def _grid(highest: float, unit: Callable[[float], str], width: float) -> str:
    y = _y_scale(highest)
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
    """Formats seconds as a clock: ``45 s``, ``3:20``, ``2:05:00``."""
    whole = math.floor(seconds)
    if whole < _MINUTE_S:
        return f"{seconds:.3g} s"
    hours, minutes = divmod(whole // 60, 60)
    return f"{hours}:{minutes:02}:{whole % 60:02}" if hours else f"{minutes}:{whole % 60:02}"
