"""Metrics that went out, by push and by pull, compared with keys of the summary that they are of."""

from __future__ import annotations

import json
import math
import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    Summary = Mapping[str, Any]
    Series = Mapping[tuple[str, ...], float]


def rows(summary: Summary, key: str, *labels: str, of: str = "count") -> dict[tuple[str, ...], float]:
    """A column of a table of the summary, by the labels that metrics have."""
    return {tuple(row[label] for label in labels): row[of] for row in summary[key] if row[of] is not None}


def timed(summary: Summary, of: str) -> dict[tuple[str, ...], float]:
    """Calls of stages of a phase, models together: how many, or how long they took."""
    found: dict[tuple[str, ...], float] = {}
    for row in summary["stages"]:
        if row["phase"] and row["count"]:
            value = row["count"] if of == "count" else row["avg"] * row["count"]
            key = row["loader"], row["phase"], row["stage"]
            found[key] = found.get(key, 0.0) + value
    return found


def starts(summary: Summary, of: str) -> dict[tuple[str, ...], float]:
    return {(row["loader"],): row["start"][of] for row in summary["loaders"] if row["start"]}


def builds(summary: Summary, of: str) -> dict[tuple[str, ...], float]:
    """Of workers; on the training thread the wait is the building."""
    found = {row["loader"]: row["build"] for row in summary["loaders"] if row["build"]}
    return {(name,): build[of] for name, build in found.items() if build["measured_in"] == "worker"}


def endings(summary: Summary) -> dict[tuple[str, ...], float]:
    return {(row["loader"], why): n for row in summary["loaders"] for why, n in row["endings"].items()}


METRICS: dict[str, Callable[[Summary], Series]] = {
    "train.batches": lambda s: rows(s, "rates", "loader", "phase", of="batches"),
    "train.samples": lambda s: rows(s, "rates", "loader", "phase", of="samples"),
    "train.tokens": lambda s: rows(s, "rates", "loader", "phase", of="tokens"),
    "train.batch.time": lambda s: rows(s, "rates", "loader", "phase", of="seconds"),
    "train.steps": lambda s: rows(s, "step_durations", "loader", "phase"),
    "train.step.duration.count": lambda s: rows(s, "step_durations", "loader", "phase"),
    "train.step.duration.sum": lambda s: rows(s, "step_durations", "loader", "phase", of="total_seconds"),
    "train.stage.duration.count": lambda s: timed(s, "count"),
    "train.stage.duration.sum": lambda s: timed(s, "seconds"),
    "train.run.time": lambda s: {(name,): seconds for name, seconds in s["activities"].items()},
    "train.loader.exhaustions": endings,
    "train.loader.start.duration.count": lambda s: starts(s, "count"),
    "train.loader.start.duration.sum": lambda s: starts(s, "total_seconds"),
    "train.loader.batch.build.duration.count": lambda s: builds(s, "count"),
    "train.loader.batch.build.duration.sum": lambda s: builds(s, "total_seconds"),
    "train.loader.errors": lambda s: {
        (error, row["loader"]): number for row in s["loaders"] for error, number in row["errors"].items()
    },
    "train.checkpoint.duration.count": lambda s: {("save",): s["checkpoints"]["count"]},
    "train.checkpoint.duration.sum": lambda s: {("save",): s["checkpoints"]["seconds"]},
    "train.step.skips": lambda s: {("amp_overflow",): s["skipped_updates"] or 0},
    "train.compile.recompiles": lambda s: {(): s["recompiles"]},
    "train.rank.time": lambda s: {(): s["wall_seconds"]},
    "train.world.size": lambda s: {(): s["world_size"]},
    "train.telemetry.overhead.time": lambda s: {(): s["telemetry"]["overhead_seconds"]},
    "train.telemetry.faults": lambda s: {
        (part,): number for part, number in s["telemetry"]["faults"].items()
    },
}
"""What metrics with a key in the summary must say, by the values of their labels in the order of their names."""

WITHOUT_KEY = {
    "target_info", "train.heartbeat.step", "train.step.index", "train.amp.scale", "train.compile.duration.count", "train.compile.duration.sum", "train.checkpoint.failures", "train.checkpoint.interval", "train.checkpoint.last_success.time",
    "train.epoch.index", "train.eval.duration.count", "train.eval.duration.sum", "train.heartbeat.time",
    "train.learning_rate", "train.loss", "train.model.flops", "train.nonfinite.detections", "train.profiler.active",
    "train.profiler.captures", "train.ranks.expected", "train.run.progress.ratio", "train.run.restarts",
    "train.run.info", "train.run.status", "train.stall.events", "train.stall.threshold", "train.telemetry.attribute.overflows",
    "train.telemetry.drops", "train.throughput.theoretical", "train.instrumentation.gaps",
}  # fmt: skip
"""What the summary has no key for: readings of an instant, of the machine, of what the program logs."""


def of_otlp(text: str) -> dict[str, dict[tuple[str, ...], float]]:
    """Series by metric, as they are in the golden of ``metrics.otlp.jsonl``."""
    found: dict[str, dict[tuple[str, ...], float]] = {}
    name = ""
    for each in text.splitlines():
        if each.startswith('{"'):
            name = json.loads(each).get("name", "")
        elif each.startswith("  {"):
            point = json.loads(each)
            labels = tuple(str(value) for _, value in sorted(point.get("attributes", {}).items()))
            for part in ("count", "sum"):
                if part in point:
                    found.setdefault(f"{name}.{part}", {})[labels] = float(point[part])
            if "asDouble" in point and point["asDouble"] != "(machine)":
                found.setdefault(name, {})[labels] = point["asDouble"]
    return found


def of_page(text: str, names: Iterable[str]) -> dict[str, dict[tuple[str, ...], float]]:
    """The same of ``/metrics``, under the names of OTLP."""
    known = {name.replace(".", "_"): name for name in names}
    found: dict[str, dict[tuple[str, ...], float]] = {}
    for each in text.splitlines():
        read = re.match(r"(\w+)\{([^}]*)\} (\S+)", each)
        if read is None or read[1].endswith("_bucket") or read[3] == "(machine)":
            continue
        part = next((f"_{part}" for part in ("count", "sum") if read[1].endswith(f"_seconds_{part}")), "")
        base = re.sub(r"(_seconds|_bytes|_per_second)?(_total)?$", "", read[1].removesuffix(part))
        labels = tuple(value for _, value in sorted(re.findall(r'(\w+)="([^"]*)"', read[2])))
        found.setdefault(known.get(base + part, base + part), {})[labels] = float(read[3])
    return found


def metric_differences(shown: Mapping[str, Series], summary: Summary) -> Iterator[str]:
    """Series that are not what their key says; a series of which there is no key is 0."""
    for name, series in shown.items():
        if name not in METRICS:
            if name not in WITHOUT_KEY:
                yield f"{name}: no key is known of it"
            continue
        keys = {tuple(filter(None, labels)): key for labels, key in METRICS[name](summary).items()}
        for labels in series.keys() | {label for label, value in keys.items() if value}:
            metric, key = series.get(labels), keys.get(labels, 0.0)
            if metric is None or not math.isclose(metric, key, rel_tol=1e-9, abs_tol=1e-9):
                yield f"{name} {labels} is {metric}; the key is {key}"
