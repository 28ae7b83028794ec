"""What a run directory says, put together for its report."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from otel_train.analyze.flame import flame
from otel_train.analyze.scene import Scene
from otel_train.capturing.record import records_of
from otel_train.capturing.taken import captures_of, together
from otel_train.cli import captures, summary
from otel_train.cli.run_side import METRICS, buckets_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

MOST_LINES = 300
"""Lines of metrics that are drawn: more than that no screen can show."""
_MEMORY = ("process.memory.usage", "train.accelerator.memory.allocated", "train.accelerator.memory.reserved")
_HISTOGRAMS = 8


def gather(run: Path, folders: Mapping[int, Path], *, rank: int) -> dict[str, Any]:
    """Everything the report shows.

    Args:
        run: the run directory.
        folders: of the ranks that have a summary.
        rank: whose figures are drawn.

    Raises:
        RunDirectoryError: a summary cannot be read.
        TraceError: a capture cannot be read.
    """
    summaries = {number: summary.read(folder / summary.FILE_NAME) for number, folder in folders.items()}
    lines = list(_lines(folders[rank]))
    taken = captures_of(run)
    newest = together(taken, taken[-1]) if taken else []
    return {
        "summary": summaries[rank],
        "ranks": list(summaries.values()),
        "series": _series(lines),
        "histograms": _histograms(lines[-1]) if lines else [],
        "records": records_of(run / "captures"),
        "captures": [_capture(trace.path.name, Scene(trace)) for trace in captures.read_all(newest)],
    }


def _capture(name: str, scene: Scene) -> dict[str, Any]:
    from otel_train.analyze.summary import summarize

    return {"name": name, "analysis": summarize(scene.trace), "flame": flame(scene)}


def _lines(folder: Path) -> Iterator[dict[str, Any]]:
    """Lines of metrics, evenly spaced, the last two included: of those one may be torn, and is skipped."""
    paths = [path for path in (folder / f"{METRICS}.1", folder / METRICS) if path.is_file()]
    total = sum(1 for path in paths for _ in _read(path))
    every = max(1, total // MOST_LINES)
    for number, line in enumerate((line for path in paths for line in _read(path)), 1):
        if (total - number) % every == 0 or number == total - 1:
            yield from _parsed(line)


def _read(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        yield from file


def _parsed(line: bytes) -> Iterator[dict[str, Any]]:
    try:
        value = json.loads(line)
    except ValueError:
        return
    if isinstance(value, dict) and "resourceMetrics" in value:
        yield value


def _points(line: Mapping[str, Any], name: str) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Points of a metric, each with its attributes."""
    for group in line["resourceMetrics"]:
        for metric in (metric for scope in group["scopeMetrics"] for metric in scope["metrics"]):
            if metric["name"] == name:
                body = next(
                    metric[kind] for kind in ("sum", "gauge", "exponentialHistogram") if kind in metric
                )
                for point in body["dataPoints"]:
                    yield (
                        {item["key"]: next(iter(item["value"].values())) for item in point["attributes"]},
                        point,
                    )


def _series(lines: list[dict[str, Any]]) -> dict[str, Any]:
    """Counters as what happened between two lines, gauges as they were."""
    moments = _settled([_moment(line) for line in lines])
    pairs = list(pairwise(moments))
    activities = {name for moment in moments for name, value in moment["activities"].items() if value}
    stages = {name for moment in moments for name in moment["stages"]}
    memory = {name for moment in moments for name in moment["memory"]}
    return {
        "times": [other["at"] - moments[0]["at"] for _, other in pairs],
        "activities": {
            name: [_share_of(pair, name, activities) for pair in pairs] for name in sorted(activities)
        },
        "stages": {
            name: [
                _grown(pair, "stages", name) / max(1.0, pair[1]["steps"] - pair[0]["steps"]) for pair in pairs
            ]
            for name in sorted(stages)
        },
        "memory": {name: [other["memory"].get(name) for _, other in pairs] for name in sorted(memory)},
    }


def _settled(moments: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Moments between which some time has been accounted for: it is settled late, and then all at once."""
    kept: list[dict[str, Any]] = []
    for moment in moments:
        total = sum(moment["activities"].values())
        if moment["at"] is None or (
            kept and (moment["at"] <= kept[-1]["at"] or total == sum(kept[-1]["activities"].values()))
        ):
            continue
        kept.append(moment)
    return kept


def _grown(pair: tuple[dict[str, Any], dict[str, Any]], key: str, name: str) -> float:
    """By how much a counter rose; one that began anew with an attempt has risen from nothing."""
    before, after = (moment[key].get(name, 0.0) for moment in pair)
    return float(after - before if after >= before else after)


def _share_of(pair: tuple[dict[str, Any], dict[str, Any]], name: str, activities: set[str]) -> float:
    """Of the time settled between two lines: activities are settled late, so it may be more than lies between them."""
    whole = sum(_grown(pair, "activities", each) for each in activities)
    return _grown(pair, "activities", name) / whole if whole else 0.0


def _moment(line: Mapping[str, Any]) -> dict[str, Any]:
    activities = {
        told.get("train.run.activity"): (float(point["asDouble"]), int(point["timeUnixNano"]))
        for told, point in _points(line, "train.run.time")
    }
    stages: dict[str, float] = {}
    for told, point in _points(line, "train.stage.duration"):
        if told.get("train.phase") == "train":
            stages[told["train.stage"]] = stages.get(told["train.stage"], 0.0) + float(point["sum"])
    steps = sum(
        float(point["asDouble"])
        for told, point in _points(line, "train.steps")
        if told.get("train.phase") == "train"
    )
    memory = {
        " ".join([name.removeprefix("train.").replace(".", " "), *told.values()]): float(point["asDouble"])
        for name in _MEMORY
        for told, point in _points(line, name)
    }
    instants = [at for _, at in activities.values()]
    return {
        "at": max(instants) / 1e9 if instants else None,
        "activities": {name: value for name, (value, _) in activities.items()},
        "stages": stages,
        "steps": steps,
        "memory": memory,
    }


def _histograms(line: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The last histograms of steps and stages, the longest first."""
    found = []
    for metric, what in (("train.step.duration", "step"), ("train.stage.duration", "")):
        for told, point in _points(line, metric):
            low, high, number = buckets_of(point)
            stage = what or told.get("train.stage", "")
            parts = [told.get("train.phase"), told.get("train.loader"), stage]
            found.append(
                {
                    "name": " · ".join(part for part in parts if part),
                    "stage": stage,
                    "seconds": float(point["sum"]),
                    "edges": list(zip(low.tolist(), high.tolist(), strict=True)),
                    "numbers": number.tolist(),
                }
            )
    return sorted(found, key=lambda each: -each["seconds"])[:_HISTOGRAMS]
