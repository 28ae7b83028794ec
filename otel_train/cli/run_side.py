"""A run directory as one side of a comparison."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from otel_train.analyze.compare import STEP, Side
from otel_train.analyze.report_text import activity_shares
from otel_train.analyze.sample import Sample, of_values, together
from otel_train.errors import RunDirectoryError
from otel_train.exporters.jsonl import last_metrics
from otel_train.exporters.series import buckets_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path


METRICS = "metrics.otlp.jsonl"
_TRAIN = "train"


def side_of_run(folder: Path, summary: Mapping[str, Any], *, name: str) -> Side:
    """One rank of a run: the histograms of its training steps and stages, as last exported.

    Args:
        folder: of the rank.
        summary: its ``summary.json``.
        name: what to call it.

    Raises:
        RunDirectoryError: it exported no histogram.
    """
    line = last_metrics(folder / METRICS)
    samples: dict[str, list[Sample]] = {}
    facts: dict[str, object] = {}
    for group in line["resourceMetrics"]:
        told = {item["key"]: next(iter(item["value"].values())) for item in group["resource"]["attributes"]}
        facts |= {key: told.get(f"train.{key}.version") for key in ("torch", "cuda")} | {
            "host": told.get("host.name")
        }
        for metric in (metric for scope in group["scopeMetrics"] for metric in scope["metrics"]):
            for key, sample in _series(metric):
                samples.setdefault(key, []).append(sample)
    if STEP not in samples:
        raise RunDirectoryError(f"{folder}: exported no training step yet, so there is nothing to compare")
    loaders = sorted(summary.get("batches") or {})
    return Side(
        name=name,
        kind="run",
        samples={
            STEP: together(samples.pop(STEP)),
            **{key: together(parts) for key, parts in samples.items()},
        },
        must_match={
            "ranks": summary.get("world_size"),
            "what steps are counted by": summary.get("step_source"),
        },
        facts={**facts, "loaders": ", ".join(loaders), "steps": (summary.get("steps") or {}).get(_TRAIN)},
        shares=_shares(summary),
    )


def _series(metric: Mapping[str, Any]) -> Iterator[tuple[str, Sample]]:
    """Durations of training, by what they are of."""
    name = metric["name"]
    if name not in {"train.step.duration", "train.stage.duration"}:
        return
    for point in metric["exponentialHistogram"]["dataPoints"]:
        told = {item["key"]: item["value"].get("stringValue") for item in point["attributes"]}
        if told.get("train.phase") != _TRAIN:
            continue
        stage, loader = told.get("train.stage"), told.get("train.loader")
        of_loader = f" · {loader}" if loader else ""
        yield STEP if name == "train.step.duration" else f"stage {stage}{of_loader}", sample_of(point)


def sample_of(point: Mapping[str, Any]) -> Sample:
    """The occurrences of one point of a histogram."""
    low, high, number = buckets_of(point)
    used = number > 0
    buckets = Sample(low[used], high[used], number[used], float(point["sum"]))
    zeros = int(point.get("zeroCount", 0))
    return together([of_values(np.zeros(zeros)), buckets]) if zeros else buckets


def _shares(summary: Mapping[str, Any]) -> dict[str, float]:
    return {f"activity {name}": share for name, share in activity_shares(summary).items()}
