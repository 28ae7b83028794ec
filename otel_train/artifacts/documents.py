"""The JSON documents among the artifacts; docs/reference/artifacts.md has their schemas."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from otel_train.clock import NS_PER_S
from otel_train.values import SECRETS

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from otel_train.artifacts.run_reader import RunReader

VERSION = 1
MOST_STEPS = 10_000
"""Rows per step: two megabytes of JSON."""

_WORDS = ("phase", "loader", "model", "stage")
_FIGURES = (
    "count", "failed", "inclusive_seconds", "self_seconds", "min", "avg", "p50", "p95", "p99", "max",
    "device_count", "device_seconds", "device_p50", "device_p99",
)  # fmt: skip


def schema(name: str) -> str:
    """What the key ``schema`` of a document says."""
    return f"otel_train.artifacts.{name}/{VERSION}"


def config(left: RunReader) -> dict[str, Any]:
    """Who, where, versions and settings; what opens doors is left out."""
    about = {key: value for key, value in without_secrets(left.about).items() if key != "schema"}
    return {"schema": schema("config"), **identity(left), **about, "rank": left.rank}


def without_secrets(about: Mapping[str, Any]) -> dict[str, Any]:
    """What ``run.json`` says; of a setting that opens doors only whether it is set. Settings are always an object."""
    settings = about.get("settings")
    settings = dict(settings) if isinstance(settings, dict) else {}
    hidden = {name: "(set)" for name in SECRETS if settings.get(name)}
    return {**about, "settings": {**settings, **hidden}}


def identity(left: RunReader) -> dict[str, Any]:
    """What every document begins with."""
    known = {**left.about, **left.summary}
    return {key: known.get(key) for key in ("run_id", "run_name", "attempt")} | {"rank": left.rank}


def metrics(left: RunReader) -> dict[str, Any]:
    """The last value of every metric that this rank has exported."""
    rows = list(_metric_rows(left.metrics)) if left.metrics else []
    instants = [row.pop("at") for row in rows]
    return {
        "schema": schema("metrics"),
        **identity(left),
        "as_of_unix_s": max(instants, default=None),
        "metrics": rows,
    }


def _metric_rows(line: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    groups = (scope for group in _list(line, "resourceMetrics") for scope in _list(group, "scopeMetrics"))
    for metric in (metric for scope in groups for metric in _list(scope, "metrics")):
        kind = next((kind for kind in ("sum", "gauge", "exponentialHistogram") if kind in metric), "")
        for point in _list(metric.get(kind), "dataPoints"):
            row = {
                "name": str(metric.get("name")),
                "unit": str(metric.get("unit", "")),
                "kind": "histogram" if kind == "exponentialHistogram" else kind,
                "attributes": {
                    str(item.get("key")): next(iter(item.get("value", {"": None}).values()), None)
                    for item in _list(point, "attributes")
                },
                "at": (number(point.get("timeUnixNano")) or 0) / NS_PER_S,
            }
            if kind == "exponentialHistogram":
                row |= {name: number(point.get(name)) for name in ("count", "sum", "min", "max")}
            else:
                row["value"] = number(point.get("asDouble"))
            yield row


def _list(owner: object, key: str) -> list[dict[str, Any]]:
    found = owner.get(key) if isinstance(owner, dict) else None
    return [item for item in found if isinstance(item, dict)] if isinstance(found, list) else []


def number(value: object) -> float | int | None:
    """A finite number, also one that JSON holds as text; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return None
    try:
        found = float(value)
    except (ValueError, OverflowError):
        return None
    if not math.isfinite(found):
        return None
    return int(found) if found.is_integer() and not isinstance(value, float) else found


def totals(left: RunReader) -> tuple[str, list[dict[str, Any]]]:
    """Where the totals come from, and a row for each phase, loader, model and stage.

    The summary counts from the start of the process. That of a run which was killed is older than its last edge:
    then the flight file knows more, if it still holds the first edge.
    """
    timeline = left.timeline
    if timeline is not None and timeline.whole and not left.ended:
        rows, source = timeline.totals(), "flight.bin"
    elif left.summary:
        rows, source = _list(left.summary, "stages"), "summary.json"
    else:
        rows, source = (timeline.totals() if timeline is not None else []), "flight.bin"
    return source, [
        {key: str(row.get(key) or "") for key in _WORDS} | {key: number(row.get(key)) for key in _FIGURES}
        for row in map(_with_mean, rows)
    ]


def _with_mean(row: dict[str, Any]) -> dict[str, Any]:
    count, seconds = number(row.get("count")), number(row.get("inclusive_seconds"))
    return {"avg": seconds / count, **row} if count and seconds is not None else row


def steps(left: RunReader) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Rows per step, the last ones, and rows per epoch."""
    timeline = left.timeline
    if timeline is None or not len(timeline):
        return [], []
    first, first_epoch = first_step(left), _first_epoch(left)
    names = [name for place, name in enumerate(timeline.stages) if timeline.selves_ns[:, place].any()]
    places = [timeline.stages.index(name) for name in names]
    per_step = [
        {
            "step": first + row,
            "epoch": first_epoch + int(timeline.epoch[row]),
            "ended_unix_s": timeline.unix_s(int(timeline.ended_ns[row])),
            "seconds": int(timeline.duration_ns[row]) / NS_PER_S,
            "stages": _spent(names, timeline.selves_ns[row, places].tolist()),
        }
        for row in range(max(0, len(timeline) - MOST_STEPS), len(timeline))
    ]
    per_epoch = []
    for place, epoch in enumerate(np.unique(timeline.epoch).tolist()):
        mine = timeline.epoch == epoch
        per_epoch.append(
            {
                "epoch": first_epoch + epoch,
                "steps": int(np.count_nonzero(mine)),
                "seconds": int(timeline.duration_ns[mine].sum()) / NS_PER_S,
                "stages": _spent(names, timeline.selves_ns[mine][:, places].sum(axis=0).tolist()),
                "whole": place > 0 or timeline.whole,
            }
        )
    return per_step, per_epoch


def _spent(names: Sequence[str], spent_ns: Sequence[int]) -> dict[str, float]:
    return {name: ns / NS_PER_S for name, ns in zip(names, spent_ns, strict=True) if ns}


def first_step(left: RunReader) -> int:
    """Number of the first step on file: counted back from the summary where the file begins later."""
    timeline = left.timeline
    if timeline is None or timeline.whole:
        return 0
    counted = number((left.summary.get("steps") or {}).get("train"))
    return max(0, int(counted) - len(timeline)) if counted is not None else 0


def _first_epoch(left: RunReader) -> int:
    """Number of the first epoch on file, from 1; 0 where they are marked, and have their numbers."""
    timeline = left.timeline
    if timeline is None or timeline.whole or timeline.marked:
        return 0 if timeline is not None and timeline.marked else 1
    row = next((row for row in _list(left.summary, "loaders") if row.get("loader") == timeline.loader), {})
    endings = row.get("endings")
    ended = sum(int(number(count) or 0) for count in endings.values()) if isinstance(endings, dict) else 0
    return 1 + max(0, ended - timeline.passes - 1)


def stage_times(left: RunReader, source: str, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Totals, the last steps, the epochs."""
    per_step, per_epoch = steps(left)
    kept = ("count", "inclusive_seconds", "self_seconds", "avg")
    timeline = left.timeline
    return {
        "schema": schema("stage_times"),
        **identity(left),
        "totals_from": source,
        "totals": [{key: row[key] for key in (*_WORDS, *kept)} for row in rows],
        "per_step": per_step,
        "per_epoch": per_epoch,
        "epochs_of": timeline.loader if timeline is not None else "",
        "steps_on_file": len(timeline) if timeline is not None else 0,
        "whole": timeline is not None and timeline.whole,
    }


def by_stage(left: RunReader, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The same totals by the name of the stage alone, as a stage timer has them."""
    found: dict[str, dict[str, Any]] = {}
    for row in rows:
        one = found.setdefault(row["stage"], {"count": 0, "total_seconds": 0.0, "self_seconds": 0.0})
        one["count"] += row["count"] or 0
        one["total_seconds"] += row["inclusive_seconds"] or row["self_seconds"] or 0.0
        one["self_seconds"] += row["self_seconds"] or 0.0
    for one in found.values():
        one["avg_seconds"] = one["total_seconds"] / one["count"] if one["count"] else None
        one["count"] = one["count"] or None
    return {"schema": schema("by_stage"), **identity(left), "stages": found}
