"""Files of JSON lines, read as a test wants them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from otel_train.files import parse_line, predecessor


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """Every whole object of a file and its rotated predecessor, oldest first; none of a file that does not exist."""
    parts = [part.read_bytes() for part in (predecessor(path), path) if part.exists()]
    values = [parse_line(line) for part in parts for line in part.splitlines(keepends=True)]
    return [value for value in values if value is not None]


def points_of(export: Any) -> dict[str, list[dict[str, Any]]]:
    """The points of an export, by metric; each has its ``labels``, and its ``value`` unless it is of a histogram."""
    found: dict[str, list[dict[str, Any]]] = {}
    scopes = [scope for resource in export["resourceMetrics"] for scope in resource["scopeMetrics"]]
    for metric in (metric for scope in scopes for metric in scope["metrics"]):
        (data,) = (each for each in metric.values() if isinstance(each, dict))
        for point in data["dataPoints"]:
            labels = {each["key"]: next(iter(each["value"].values())) for each in point.get("attributes", ())}
            value = point.get("asDouble", point.get("asInt"))
            known = {} if value is None else {"value": float(value)}
            found.setdefault(metric["name"], []).append({**point, "labels": labels, **known})
    return found


def last_points(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """The same of the last export that a rank has recorded."""
    return points_of(read_jsonl(folder / "metrics.otlp.jsonl")[-1])
