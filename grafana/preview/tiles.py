"""Panels without a time axis: figures, gauges, bars, tables."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from grafana.preview import svg
from grafana.preview.ask import name_of
from grafana.preview.graphs import Box, nothing
from grafana.preview.units import shown

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from grafana.preview.ask import Answer

_HIDDEN = {"__name__", "job", "instance", "service_name", "train_run_id"}


def last(answers: Sequence[Answer]) -> list[tuple[str, float, list[float]]]:
    """(name, last value, all values) of every series."""
    found = []
    for answer in answers:
        for series in answer.series:
            values = [float(value) for _, value in series.get("values", [])] or [float(series["value"][1])]
            finite = [value for value in values if math.isfinite(value)]
            if finite:
                found.append((name_of(answer, series), finite[-1], finite))
    return found


def color_of(panel: Mapping[str, Any], value: float) -> str:
    """By the thresholds."""
    found = svg.TEXT
    for step in panel["fieldConfig"]["defaults"]["thresholds"]["steps"]:
        if step.get("value") is None or value >= step["value"]:
            found = svg.color(step["color"])
    return found


def stat(panel: Mapping[str, Any], box: Box, answers: Sequence[Answer]) -> list[str]:
    """Large figures, side by side."""
    found = last(answers)
    if not found:
        return nothing(panel, box)
    unit = panel["fieldConfig"]["defaults"].get("unit", "short")
    mode = panel["options"]["textMode"]
    width = box.width / len(found)
    parts = []
    for number, (name, value, values) in enumerate(found):
        middle = box.x + width * (number + 0.5)
        words = name if mode == "name" else shown(value, unit)
        size = min(30.0, (width - 12) / max(1, len(words)) / 0.56)
        if panel["options"]["graphMode"] == "area" and len(values) > 1:
            parts += _spark(
                Box(box.x + width * number + 4, box.y + box.height - 22, width - 8, 20),
                values,
                color_of(panel, value),
            )
        parts.append(
            svg.text(
                middle,
                box.y + box.height * 0.48,
                words,
                size=size,
                fill=color_of(panel, value),
                anchor="middle",
                bold=True,
            )
        )
        if mode == "value_and_name":
            parts.append(
                svg.text(middle, box.y + box.height * 0.48 + 18, name, size=11, fill=svg.DIM, anchor="middle")
            )
    return parts


def _spark(box: Box, values: Sequence[float], color: str) -> list[str]:
    low, high = min(values), max(values)
    height = high - low or 1
    places = [
        (box.x + box.width * n / (len(values) - 1), box.y + box.height * (1 - (value - low) / height))
        for n, value in enumerate(values)
    ]
    corners = [(box.x + box.width, box.y + box.height), (box.x, box.y + box.height)]
    return [svg.path([*places, *corners], stroke="none", fill=color, opacity=0.15)]


def gauge(panel: Mapping[str, Any], box: Box, answers: Sequence[Answer]) -> list[str]:
    """An arc, filled as far as the value goes."""
    found = last(answers)
    if not found:
        return nothing(panel, box)
    _, value, _ = found[0]
    defaults = panel["fieldConfig"]["defaults"]
    share = min(1.0, max(0.0, value / defaults.get("max", 1)))
    x, y = box.x + box.width / 2, box.y + box.height * 0.78
    radius = min(box.width / 2 - 8, box.height * 0.7)
    color = color_of(panel, value)
    return [
        svg.path(_arc(x, y, radius, 1), stroke="none", fill=svg.GRID),
        svg.path(_arc(x, y, radius, share), stroke="none", fill=color),
        svg.text(
            x, y, shown(value, defaults.get("unit", "short")), size=22, fill=color, anchor="middle", bold=True
        ),
    ]


def _arc(x: float, y: float, radius: float, share: float) -> list[tuple[float, float]]:
    angles = [math.pi * (1 - share * n / 40) for n in range(41)]
    outer = [(x + radius * math.cos(angle), y - radius * math.sin(angle)) for angle in angles]
    inner = [(x + radius * 0.78 * math.cos(angle), y - radius * 0.78 * math.sin(angle)) for angle in angles]
    return [*outer, *reversed(inner)]


def bar_gauge(panel: Mapping[str, Any], box: Box, answers: Sequence[Answer]) -> list[str]:
    """A bar for each series."""
    found = last(answers)
    if not found:
        return nothing(panel, box)
    defaults = panel["fieldConfig"]["defaults"]
    most = defaults.get("max") or max(value for _, value, _ in found) or 1
    label = min(box.width * 0.4, max(svg.text_width(name, 12) for name, _, _ in found) + 10)
    room = box.width - label - 76
    height = min(30.0, box.height / len(found))
    parts = []
    for number, (name, value, _) in enumerate(found):
        y = box.y + number * height
        color = color_of(panel, value)
        parts.append(svg.text(box.x, y + height / 2 + 4, name, size=12))
        parts.append(svg.rect(box.x + label, y + 3, room, height - 6, fill=svg.GRID))
        parts.append(
            svg.rect(
                box.x + label,
                y + 3,
                room * min(1.0, max(0.0, value / most)),
                height - 6,
                fill=color,
                opacity=0.6,
            )
        )
        parts.append(
            svg.text(
                box.x + box.width - 4,
                y + height / 2 + 4,
                shown(value, defaults.get("unit", "short")),
                size=13,
                fill=color,
                anchor="end",
                bold=True,
            )
        )
    return parts


def table(panel: Mapping[str, Any], box: Box, answers: Sequence[Answer]) -> list[str]:
    """Rows of labels and values; answers whose common labels are the same share a row."""
    options = next(t["options"] for t in panel["transformations"] if t["id"] == "organize")
    renamed, placed = options["renameByName"], options.get("indexByName", {})
    hidden = _HIDDEN - renamed.keys() | options["excludeByName"].keys()
    found: list[tuple[dict[str, str], dict[str, str]]] = []
    for answer in answers:
        column = f"Value #{answer.target['refId']}" if len(answers) > 1 else "Value"
        unit = _unit(panel, renamed.get(column, ""))
        for series in answer.series:
            labels = {key: value for key, value in series["metric"].items() if key not in hidden}
            for known, values in found:
                if column not in values and all(known.get(k, v) == v for k, v in labels.items()):
                    break
            else:
                known, values = {}, {}
                found.append((known, values))
            known.update(labels)
            values[column] = shown(float(series["value"][1]), unit)
    rows = [
        {renamed.get(key, key): row[key] for key in sorted(row, key=lambda key: placed.get(key, 0)) if key not in hidden}
        for row in ({**known, **values} for known, values in found)
    ]  # fmt: skip
    if not rows:
        return nothing(panel, box)
    columns = list(dict.fromkeys(column for row in rows for column in row))
    width = box.width / len(columns)
    parts = [
        svg.text(box.x + width * n, box.y + 12, column, size=12, fill="#6e9fff", bold=True)
        for n, column in enumerate(columns)
    ]
    fitting = max(1, int((box.height - 20) // 22))
    for number, row in enumerate(rows[:fitting]):
        y = box.y + 34 + number * 22
        parts.append(svg.line(box.x, y - 16, box.x + box.width, y - 16))
        parts += [
            svg.text(box.x + width * n, y, row.get(column, ""), size=12) for n, column in enumerate(columns)
        ]
    if len(rows) > fitting:
        parts.append(
            svg.text(
                box.x + box.width,
                box.y + 12,
                f"{len(rows) - fitting} more rows",
                size=11,
                fill=svg.DIM,
                anchor="end",
            )
        )
    return parts


def _unit(panel: Mapping[str, Any], column: str) -> str:
    config = panel["fieldConfig"]
    for override in config.get("overrides", []):
        if override["matcher"] == {"id": "byName", "options": column}:
            for changed in override["properties"]:
                if changed["id"] == "unit":
                    return str(changed["value"])
    return str(config["defaults"].get("unit", "short"))


def words(panel: Mapping[str, Any], box: Box) -> list[str]:
    """Text, wrapped."""
    fitting = int(box.width / (12 * 0.5))
    lines: list[str] = []
    for paragraph in panel["options"]["content"].replace("`", "").split("\n"):
        line = ""
        for word in paragraph.split():
            if len(line) + len(word) > fitting:
                lines.append(line)
                line = ""
            line = f"{line} {word}".strip()
        lines.append(line)
    return [svg.text(box.x, box.y + 14 + 18 * n, line, size=12) for n, line in enumerate(lines)]
