"""Panels with a time axis: lines, areas, bars, heatmaps, states."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Any, NamedTuple

from grafana.preview import svg
from grafana.preview.ask import name_of
from grafana.preview.units import shown, ticks

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from grafana.preview.ask import Answer, Span

_LEGEND_LINE = 16
_SIZE = 11


class Box(NamedTuple):
    """Where something is drawn."""

    x: float
    y: float
    width: float
    height: float


class Mark(NamedTuple):
    """An annotation: a moment, and a colour."""

    at_s: float
    color: str


class Curve(NamedTuple):
    """A series to draw."""

    name: str
    points: list[tuple[float, float]]
    right_unit: str = ""
    dashed: bool = False


def curves(panel: Mapping[str, Any], answers: Sequence[Answer]) -> list[Curve]:
    """Every series of a panel, by name."""
    right = _overridden(panel, "custom.axisPlacement", "unit")
    dashed = _overridden(panel, "custom.lineStyle", "custom.lineStyle")
    return [
        Curve(
            name_of(answer, series),
            [(float(at), float(value)) for at, value in series.get("values", [])],
            right.get(answer.target["refId"], ""),
            answer.target["refId"] in dashed,
        )
        for answer in answers
        for series in answer.series
        if not answer.target.get("exemplar") or len(answers) == 1 or series.get("values")
    ]


def _overridden(panel: Mapping[str, Any], marker: str, wanted: str) -> dict[str, Any]:
    """By query: a property of those that have the marker."""
    found = {}
    for override in panel["fieldConfig"].get("overrides", []):
        properties = {entry["id"]: entry.get("value") for entry in override["properties"]}
        if marker in properties:
            found[override["matcher"]["options"]] = properties[wanted]
    return found


def legend(box: Box, names: Sequence[str], lines: int = 2) -> tuple[list[str], float]:
    """Names with their colours below a graph; the height they take."""
    parts: list[str] = []
    x, y = box.x, box.y + box.height - 4
    rows: list[list[tuple[str, str]]] = [[]]
    for number, name in enumerate(names):
        width = svg.text_width(name, _SIZE) + 26
        if rows[-1] and x + width > box.x + box.width - 40:
            if len(rows) == lines:
                rows[-1].append((f"+{len(names) - number}", svg.DIM))
                break
            rows.append([])
            x = box.x
        rows[-1].append((name, svg.SERIES[number % len(svg.SERIES)]))
        x += width
    height = len(rows) * _LEGEND_LINE
    for depth, row in enumerate(rows):
        x = box.x
        y = box.y + box.height - height + depth * _LEGEND_LINE + 12
        for name, color in row:
            parts.append(svg.line(x, y - 4, x + 12, y - 4, stroke=color, width=3))
            parts.append(svg.text(x + 16, y, name, size=_SIZE, fill=svg.DIM))
            x += svg.text_width(name, _SIZE) + 26
    return parts, height + 4


class Frame:
    """Axes around a graph: turns time and value into a place."""

    def __init__(self, box: Box, span: Span, low: float, high: float) -> None:
        self.box = box
        self._span = span
        self._low = low
        self._high = high if high > low else low + 1

    def x(self, at_s: float) -> float:
        """Where a moment lies."""
        share = (at_s - self._span.start_s) / (self._span.end_s - self._span.start_s)
        return self.box.x + share * self.box.width

    def y(self, value: float) -> float:
        """Where a value lies; what is outside, at the edge."""
        share = (value - self._low) / (self._high - self._low)
        return self.box.y + self.box.height * (1 - min(1.0, max(0.0, share)))

    def holds(self, value: float) -> bool:
        """Whether a value lies on the graph."""
        return self._low <= value <= self._high

    def values(self, unit: str, *, right: bool = False) -> list[str]:
        """Labels of the value axis, and its lines."""
        parts = []
        for value in ticks(self._low, self._high, unit):
            y = self.y(value)
            if right:
                parts.append(
                    svg.text(
                        self.box.x + self.box.width + 6, y + 4, shown(value, unit), size=_SIZE, fill=svg.DIM
                    )
                )
            else:
                parts.append(svg.line(self.box.x, y, self.box.x + self.box.width, y))
                parts.append(
                    svg.text(
                        self.box.x - 6, y + 4, shown(value, unit), size=_SIZE, fill=svg.DIM, anchor="end"
                    )
                )
        return parts

    def times(self) -> list[str]:
        """Labels of the time axis."""
        wanted = max(2, int(self.box.width // 90))
        length = self._span.end_s - self._span.start_s
        step = next((s for s in (30, 60, 120, 300, 600, 1800, 3600) if length / s <= wanted), 7200)
        first = math.ceil(self._span.start_s / step) * step
        return [
            svg.text(
                self.x(at),
                self.box.y + self.box.height + 15,
                time.strftime("%H:%M" if step >= 60 else "%H:%M:%S", time.gmtime(at)),
                size=_SIZE,
                fill=svg.DIM,
                anchor="middle",
            )
            for at in range(first, int(self._span.end_s) + 1, step)
        ]


def graph(
    panel: Mapping[str, Any], box: Box, answers: Sequence[Answer], span: Span, marks: Sequence[Mark]
) -> list[str]:
    """Lines, areas or bars."""
    found = [curve for curve in curves(panel, answers) if curve.points]
    if not found:
        return nothing(panel, box)
    custom = panel["fieldConfig"]["defaults"].get("custom", {})
    unit = panel["fieldConfig"]["defaults"].get("unit", "short")
    stacked = custom.get("stacking", {}).get("mode") == "normal"
    names, taken = legend(box, [curve.name for curve in found])
    has_right = next((curve.right_unit for curve in found if curve.right_unit), "")
    inner = Box(box.x + 58, box.y + 6, box.width - 70 - (44 if has_right else 0), box.height - taken - 30)
    left = [curve for curve in found if not curve.right_unit]
    frame = Frame(inner, span, *_limits(panel, left, stacked=stacked))
    parts = [*names, *frame.values(unit), *frame.times(), *_marks(frame, marks)]
    drawer = _bars if custom.get("drawStyle") == "bars" else _stacked if stacked else _lines
    order = {curve.name: number for number, curve in enumerate(found)}
    parts += drawer(frame, left, lambda curve: svg.SERIES[order[curve.name] % len(svg.SERIES)], span)
    if has_right:
        others = [curve for curve in found if curve.right_unit]
        beside = Frame(inner, span, *_limits(panel, others, stacked=False))
        parts += beside.values(has_right, right=True)
        parts += _lines(beside, others, lambda curve: svg.SERIES[order[curve.name] % len(svg.SERIES)], span)
    if custom.get("thresholdsStyle", {}).get("mode") == "dashed":
        parts += _thresholds(panel, frame)
    return parts


def _limits(panel: Mapping[str, Any], found: Sequence[Curve], *, stacked: bool) -> tuple[float, float]:
    defaults = panel["fieldConfig"]["defaults"]
    values = [value for curve in found for _, value in curve.points if math.isfinite(value)] or [0.0]
    high = max(values)
    if stacked:
        sums: dict[float, float] = {}
        for curve in found:
            for at, value in curve.points:
                sums[at] = sums.get(at, 0.0) + (value if math.isfinite(value) else 0)
        high = max(sums.values(), default=1.0)
    low = min(0.0, *values)
    counted = defaults.get("unit") in {"short", "percentunit"}
    narrow = not stacked and not counted and min(values) > 0 and min(values) > 0.7 * high
    if narrow:
        low = min(values) - (high - min(values)) * 0.3 - abs(high) * 0.02
    return defaults.get("min", low), defaults.get("max", low + (high - low) * 1.08 or 1.0)


def _lines(frame: Frame, found: Sequence[Curve], color: Callable[[Curve], str], span: Span) -> list[str]:
    parts = []
    for curve in found:
        dash = "5 4" if curve.dashed else ""
        for piece in _pieces(curve.points, span.step_s):
            places = [(frame.x(at), frame.y(value)) for at, value in piece]
            if len(places) == 1:
                places.append((places[0][0] + 2, places[0][1]))
            parts.append(svg.path(places, stroke=color(curve), dash=dash))
    return parts


def _pieces(points: Sequence[tuple[float, float]], step_s: float) -> list[list[tuple[float, float]]]:
    """Without the gaps: what is missing is not drawn."""
    pieces: list[list[tuple[float, float]]] = []
    before = -math.inf
    for at, value in points:
        if not math.isfinite(value):
            continue
        if at - before > 1.5 * step_s:
            pieces.append([])
        pieces[-1].append((at, value))
        before = at
    return pieces


def _stacked(frame: Frame, found: Sequence[Curve], color: Callable[[Curve], str], _: Span) -> list[str]:
    parts = []
    floor: dict[float, float] = {}
    for curve in found:
        top, bottom = [], []
        for at, value in curve.points:
            low = floor.get(at, 0.0)
            floor[at] = low + (value if math.isfinite(value) else 0.0)
            bottom.append((frame.x(at), frame.y(low)))
            top.append((frame.x(at), frame.y(floor[at])))
        parts.append(svg.path([*top, *reversed(bottom)], stroke="none", fill=color(curve), opacity=0.7))
        parts.append(svg.path(top, stroke=color(curve)))
    return parts


def _bars(frame: Frame, found: Sequence[Curve], color: Callable[[Curve], str], span: Span) -> list[str]:
    parts = []
    floor: dict[float, float] = {}
    width = max(1.0, frame.x(span.start_s + span.step_s) - frame.x(span.start_s) - 0.5)
    for curve in found:
        for at, value in curve.points:
            if value > 0 and math.isfinite(value):
                low = floor.get(at, 0.0)
                floor[at] = low + value
                y = frame.y(floor[at])
                parts.append(
                    svg.rect(frame.x(at) - width, y, width, frame.y(low) - y, fill=color(curve), opacity=0.8)
                )
    return parts


def _thresholds(panel: Mapping[str, Any], frame: Frame) -> list[str]:
    box = frame.box
    steps = panel["fieldConfig"]["defaults"]["thresholds"]["steps"]
    return [
        svg.line(box.x, y, box.x + box.width, y, stroke=svg.color(step["color"]), dash="8 5")
        for step in steps
        if step.get("value") is not None and frame.holds(step["value"])
        for y in [frame.y(step["value"])]
    ]


def _marks(frame: Frame, marks: Sequence[Mark]) -> list[str]:
    box = frame.box
    return [
        svg.line(
            frame.x(mark.at_s),
            box.y,
            frame.x(mark.at_s),
            box.y + box.height,
            stroke=svg.color(mark.color),
            dash="2 3",
        )
        for mark in marks
    ]


def exemplars(
    panel: Mapping[str, Any],
    box: Box,
    found: Sequence[tuple[float, float]],
    answers: Sequence[Answer],
    span: Span,
) -> list[str]:
    """Points that lead to a trace."""
    drawn = [curve for curve in curves(panel, answers) if curve.points]
    _, taken = legend(box, [curve.name for curve in drawn])
    inner = Box(box.x + 58, box.y + 6, box.width - 70, box.height - taken - 30)
    frame = Frame(inner, span, *_limits(panel, drawn, stacked=False))
    parts = []
    for at, value in found:
        if span.start_s <= at <= span.end_s:
            x, y = frame.x(at), frame.y(value)
            parts.append(
                svg.path(
                    [(x, y - 4), (x + 4, y), (x, y + 4), (x - 4, y), (x, y - 4)],
                    stroke="#5794f2",
                    fill="#5794f2",
                    opacity=0.6,
                )
            )
    return parts


def states(panel: Mapping[str, Any], box: Box, answers: Sequence[Answer], span: Span) -> list[str]:
    """A band for each series, coloured where its value is."""
    found = [curve for curve in curves(panel, answers) if curve.points]
    if not found:
        return nothing(panel, box)
    mapped = panel["fieldConfig"]["defaults"]["mappings"][0]["options"]
    inner = Box(box.x + 96, box.y + 2, box.width - 106, box.height - 26)
    frame = Frame(inner, span, 0, 1)
    height = inner.height / len(found)
    parts = frame.times()
    for number, curve in enumerate(found):
        y = inner.y + number * height
        parts.append(
            svg.text(inner.x - 8, y + height / 2 + 4, curve.name, size=_SIZE, fill=svg.DIM, anchor="end")
        )
        for at, value in curve.points:
            fill = svg.color(mapped.get(f"{value:g}", {}).get("color", "text"))
            if fill != svg.NAMED["transparent"]:
                x = max(frame.x(at - span.step_s), inner.x)
                parts.append(svg.rect(x, y + 2, frame.x(at) - x + 0.5, height - 4, fill=fill, opacity=0.7))
        parts.append(svg.line(inner.x, y + height, inner.x + inner.width, y + height))
    return parts


def heatmap(panel: Mapping[str, Any], box: Box, answers: Sequence[Answer], span: Span) -> list[str]:
    """Buckets over time; the more in it, the brighter."""
    buckets = sorted(
        (
            (float(series["metric"]["le"]), dict(series.get("values", [])))
            for answer in answers
            for series in answer.series
            if "le" in series["metric"]
        ),
        key=lambda bucket: bucket[0],
    )
    bounds = [bound for bound, _ in buckets]
    times = sorted({at for _, values in buckets for at in values})
    cells = []
    for at in times:
        below = 0.0
        for number, (_, values) in enumerate(buckets):
            total = float(values.get(at, below))
            if total - below > 0.01:
                cells.append((float(at), number, total - below))
            below = max(below, total)
    if not cells:
        return nothing(panel, box)
    used = [number for _, number, _ in cells]
    first, last = max(0, min(used) - 1), min(len(bounds) - 1, max(used) + 1)
    inner = Box(box.x + 58, box.y + 6, box.width - 70, box.height - 32)
    frame = Frame(inner, span, first, last + 1)
    most = max(count for _, _, count in cells)
    parts = frame.times()
    width = max(1.5, frame.x(span.start_s + span.step_s) - frame.x(span.start_s))
    for at, number, count in cells:
        y = frame.y(number + 1)
        parts.append(
            svg.rect(
                frame.x(at) - width,
                y,
                width,
                frame.y(number) - y,
                fill="#ff9830",
                opacity=0.12 + 0.88 * (count / most) ** 0.5,
            )
        )
    unit = panel["fieldConfig"]["defaults"].get("unit", "short")
    for number in range(first, last + 1):
        if math.isfinite(bounds[number]):
            parts.append(
                svg.text(
                    inner.x - 6,
                    frame.y(number + 1) + 4,
                    shown(bounds[number], unit),
                    size=_SIZE,
                    fill=svg.DIM,
                    anchor="end",
                )
            )
    return parts


def nothing(panel: Mapping[str, Any], box: Box) -> list[str]:
    """There is no data, and the panel says so."""
    said = panel["fieldConfig"]["defaults"]["noValue"]
    return [
        svg.text(box.x + box.width / 2, box.y + box.height / 2, said, size=14, fill=svg.DIM, anchor="middle")
    ]
