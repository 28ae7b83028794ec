"""Compares two runs or traces: ratios with confidence intervals."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import NormalDist
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from otel_train import catalog as c
from otel_train.console.summary import activity_shares
from otel_train.datamodel import METRICS_FILE, RUN_FILE, SUMMARY_FILE
from otel_train.errors import ComparisonError, RunDirectoryError
from otel_train.files import JsonFileCache
from otel_train.rundata.files import mapping, number, rows, text, whole
from otel_train.rundata.metrics_history import buckets_of, points_of, values_of
from otel_train.rundata.run import read_metrics, read_summary

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import ArrayLike, NDArray

    Floats = NDArray[np.float64]


CONFIDENCE = 0.95
ENOUGH = 4
"""Fewest occurrences for a confidence interval: with fewer the variance is not known."""

_NOT_COMPARED = frozenset({"run_id", "run_name", "run_dir", "attempt", "prometheus_address", "console"})
"""Settings of identity, place and output, which differ between runs."""

_Z = NormalDist().inv_cdf(0.5 + CONFIDENCE / 2)


class Estimate(NamedTuple):
    """A value and its 95 % confidence interval; NaN where it is not known."""

    value: float = math.nan
    low: float = math.nan
    high: float = math.nan


class Sample(NamedTuple):
    """Durations in seconds, in ascending buckets; a bucket of width 0 holds exact values."""

    low: Floats
    high: Floats  # equal to ``low`` for exact values
    number: NDArray[np.int64]  # occurrences
    total: float  # exact sum of all

    @property
    def size(self) -> int:
        """Number of occurrences."""
        return int(self.number.sum())

    @property
    def is_possible(self) -> bool:
        """Whether no duration is longer than ``_LONGEST_S``; unknown upper bounds are ignored."""
        known = (self.low, self.high[np.isfinite(self.high)], np.array([self.total]))
        return all(bool((np.abs(each) <= _LONGEST_S).all()) for each in known)

    @property
    def mean(self) -> float:
        """Mean in seconds; NaN without occurrences."""
        return self.total / self.size if self.size else math.nan

    @property
    def variance_of_mean(self) -> float:
        """Variance of the mean of independent occurrences, in seconds squared; NaN with fewer than ``ENOUGH``.

        Occurrences are assumed to be spread evenly in their bucket, as nothing else is known of those in the same bucket.
        """
        if self.size < ENOUGH or not np.isfinite(self.high).all():
            return math.nan
        middle = (self.low + self.high) / 2
        between = (middle - float((self.number * middle).sum()) / self.size) ** 2
        within = (self.high - self.low) ** 2 / 12
        return float((self.number * (between + within)).sum()) / (self.size - 1) / self.size

    def quantile(self, q: float) -> Estimate:
        """Returns a quantile, within one bucket of ``numpy.quantile``, with its confidence interval.

        Source: the distribution-free interval by order statistics; the rank of the quantile is binomial.
        """
        size = self.size
        if not size:
            return Estimate()
        rank = q * (size - 1)
        below, above = self._ranked(math.floor(rank)), self._ranked(math.ceil(rank))
        value = below + (rank - math.floor(rank)) * (above - below)
        if size < ENOUGH:
            return Estimate(value)
        spread = _Z * math.sqrt(size * q * (1 - q)) + 1
        first, last = self._bucket(max(rank - spread, 0.0)), self._bucket(min(rank + spread, size - 1))
        return Estimate(value, float(self.low[first]), float(self.high[last]))

    def _bucket(self, rank: float) -> int:
        return int(np.searchsorted(np.cumsum(self.number), rank, side="right"))

    def _ranked(self, rank: int) -> float:
        """Estimates the occurrence at ``rank``: occurrences are spread evenly in their bucket."""
        bucket = self._bucket(rank)
        before, inside = int(self.number[:bucket].sum()), int(self.number[bucket])
        width = self.high[bucket] - self.low[bucket]
        return float(self.low[bucket] + width * (rank - before + 0.5) / inside)


def of_values(seconds: ArrayLike) -> Sample:
    """Returns a sample of exact values."""
    values = np.sort(np.asarray(seconds, np.float64))
    return Sample(values, values, np.ones(values.size, np.int64), float(values.sum()))


def together(samples: Iterable[Sample]) -> Sample:
    """Returns one sample with the occurrences of all."""
    parts = list(samples)
    low, high, number = (np.concatenate([part[column] for part in parts]) for column in range(3))
    order = np.lexsort((high, low))
    return Sample(low[order], high[order], number[order], sum(part.total for part in parts))


def ratio(before: Sample, after: Sample) -> Estimate:
    """Returns the ratio of the means, ``after`` to ``before``, with its confidence interval.

    Source: the delta method for a ratio of means, with Student's quantile at Welch's degrees of freedom. The relative variance
    of each side is at least the pooled one: a side of twenty steps may lack the rare long ones. Occurrences are assumed to be
    independent; consecutive steps are similar, so the true interval is somewhat wider.
    """
    if not before.size or not after.size or not before.mean > 0:
        return Estimate()
    value = after.mean / before.mean
    sides = (before, after)
    own = [side.size * side.variance_of_mean / side.mean**2 if side.mean else math.nan for side in sides]
    freedoms = [max(1, side.size - 1) for side in sides]
    pooled = sum(map(operator.mul, own, freedoms)) / sum(freedoms)
    parts = [max(each, pooled) / side.size for each, side in zip(own, sides, strict=True)]
    variance = sum(parts)
    if not math.isfinite(variance):
        return Estimate(value)
    scatter = sum(part**2 / freedom for part, freedom in zip(parts, freedoms, strict=True))
    freedom = variance**2 / scatter if variance else math.inf
    reach = value * _student(freedom) * math.sqrt(variance)
    return Estimate(value, max(0.0, value - reach), value + reach)


def _student(freedom: float) -> float:
    """Returns the two-sided 95 % quantile of Student's distribution.

    Source: the Cornish-Fisher expansion, Abramowitz and Stegun 26.7.5; within 1 % from 3 degrees of freedom up.
    """
    z = _Z
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
    )
    return z + sum(term / freedom ** (power + 1) for power, term in enumerate(terms))


SCHEMA = "otel_train.comparison/2"
STEP = "step"
WHOLE_STEPS = 2
"""Fewest steps on each side: the mean of fewer is one step."""
_LONGEST_S = 1e12
"""Longest credible duration (30,000 years): a longer one is of a damaged file, and its square might overflow."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """One of the two runs or traces that are compared."""

    name: str
    kind: str  # ``trace`` or ``run``
    samples: Mapping[str, Sample]  # by the name of the row; ``step`` is the whole step
    # Values without which a comparison has no meaning unless they are equal.
    must_match: Mapping[str, object] = field(default_factory=dict)
    # Values that the document lists where both sides have them and they differ.
    facts: Mapping[str, object] = field(default_factory=dict)
    settings: Mapping[str, object] = field(default_factory=dict)
    # Shares of the step time, such as the idle time of the device.
    shares: Mapping[str, float] = field(default_factory=dict)


def compare(before: Side, after: Side) -> dict[str, Any]:
    """Compares two sides: which rows became slower or faster.

    Returns:
        The document of docs/reference/comparison.md. The first of its ``rows`` is the whole step.

    Raises:
        ComparisonError: the two are not comparable; the message has the reason.
    """
    _refuse(before, after)
    names = [name for name in before.samples if name in after.samples]
    rows = [_row(name, before.samples[name], after.samples[name]) for name in names]
    rows[1:] = sorted(rows[1:], key=lambda row: -_change_per_step(row, rows[0]))
    return {
        "schema": SCHEMA,
        "kind": before.kind,
        "before": before.name,
        "after": after.name,
        "differences": [
            f"{key}: {value} → {after.facts[key]}"
            for key, value in before.facts.items()
            if after.facts.get(key, value) != value
        ]
        + [
            f"setting {name}: {value} → {after.settings[name]}"
            for name, value in before.settings.items()
            if after.settings.get(name, value) != value
        ],
        "only_before": [name for name in before.samples if name not in after.samples],
        "only_after": [name for name in after.samples if name not in before.samples],
        "rows": rows,
        "shares": [
            {"name": name, "before": before.shares[name], "after": after.shares[name]}
            for name in before.shares
            if name in after.shares
        ],
    }


def is_slower(document: Mapping[str, Any], limit: float) -> bool | None:
    """Returns whether the step is longer by more than ``limit`` (0.05 is 5 %), with 95 % confidence.

    Returns:
        None if it is undecided: the limit lies within the interval, or there is no interval.
    """
    step = document["rows"][0]
    if step["low"] is None:
        return None
    if step["low"] > 1 + limit:
        return True
    return False if step["high"] <= 1 + limit else None


def side_of_trace(document: Mapping[str, Any], *, name: str) -> Side:
    """Returns the side of a trace from its analysis, the document of ``trace_analysis.summarize``."""
    steps: Sequence[Mapping[str, Any]] = document["breakdown"]["by_step"]
    samples = {STEP: of_values([step["seconds"] for step in steps])}
    for row in document["breakdown"]["stages"]:
        samples[f"stage {row['stage']}"] = of_values(
            [step["stages"].get(row["stage"], 0.0) for step in steps]
        )
    if document["device"] is not None:
        samples["device busy"] = of_values([step["device_busy_seconds"] for step in steps])
    if steps:
        for key, what in (("top_cpu_ops", "op"), ("top_cuda_ops", "kernel")):
            for row in document[key]:
                samples[f"{what} {row['name']}"] = _sum_over(len(steps), row["seconds"])
    shares = {}
    if idle := document["idle"]:
        shares["device idle"] = idle["share"]
        shares |= {f"idle: {cause}": part["share"] for cause, part in idle["causes"].items()}
    if document["overlap"] is not None:
        shares["exposed communication"] = document["overlap"]["exposed_share_of_steps"]
    return Side(
        name=name,
        kind="trace",
        samples=samples,
        must_match={
            "what ran on a device": "something" if document["device"] else "nothing",
            "ranks": document["world_size"],
        },
        facts={"rank": document["rank"], "steps": len(steps)},
        shares=shares,
    )


def side_of_run(folder: Path, *, name: str) -> Side:
    """Returns the side of one rank of a run, from the last exported histograms of its training steps and stages."""
    summary, line = read_summary(folder / SUMMARY_FILE), read_metrics(folder / METRICS_FILE)
    samples: dict[str, list[Sample]] = {}
    for metric in (c.STEP_DURATION.name, c.STAGE_DURATION.name):
        for about, point in points_of(line, metric):
            if about.get(c.PHASE.name) == "train":
                stage, loader = f"stage {about.get(c.STAGE.name)}", about.get(c.LOADER.name)
                key = STEP if metric == c.STEP_DURATION.name else " · ".join(filter(None, (stage, loader)))
                samples.setdefault(key, []).append(_sample_of(point))
    if STEP not in samples:
        raise RunDirectoryError(f"{folder}: exported no training step yet, so there is nothing to compare")
    steps = whole(mapping(summary.get("steps")).get("train"))
    for row in rows(summary.get("stages")):
        if steps and (row.get("stage"), row.get("phase")) == ("other", "train"):
            key = " · ".join(filter(None, ("stage other", text(row.get("loader")))))
            samples[key] = [_sum_over(steps, number(row.get("self_seconds")) or 0.0)]
    resource = values_of(line["resourceMetrics"][-1]["resource"])
    return Side(
        name=name,
        kind="run",
        samples={key: together(parts) for key, parts in samples.items()},
        must_match={
            "ranks": summary.get("world_size"),
            "what steps are counted by": summary.get("step_source"),
        },
        facts={
            **{key: resource.get(f"train.{key}.version") for key in ("torch", "cuda")},
            "host": resource.get("host.name"),
            "loaders": ", ".join(sorted(summary.get("batches") or {})),
            "steps": steps,
            **_loader_facts(summary),
        },
        settings=_settings_of(folder.parent),
        shares={f"activity {activity}": share for activity, share in activity_shares(summary).items()},
    )


def _loader_facts(summary: Mapping[str, Any]) -> dict[str, object]:
    """Returns the known arguments of each loader: workers, prefetch factor, samples per batch."""
    batches, samples = mapping(summary.get("batches")), mapping(summary.get("samples"))
    facts: dict[str, object] = {}
    for row in rows(summary.get("loaders")):
        loader = text(row.get("loader"))
        batch_count, sample_count = whole(batches.get(loader)), number(samples.get(loader))
        facts[f"workers of {loader}"] = row.get("workers")
        facts[f"prefetch factor of {loader}"] = row.get("prefetch_factor")
        if batch_count and sample_count is not None:
            facts[f"samples per batch of {loader}"] = round(sample_count / batch_count, 1)
    return {key: value for key, value in facts.items() if value is not None}


def _settings_of(run: Path) -> dict[str, object]:
    given = mapping(JsonFileCache().get_or_empty(run / RUN_FILE, []).get("settings"))
    return {name: value for name, value in given.items() if name not in _NOT_COMPARED}


def _sum_over(steps: int, seconds: float) -> Sample:
    """Returns a sample of which only the sum over the steps is known: it has a mean, and no interval."""
    return Sample(np.array([0.0]), np.array([math.inf]), np.array([steps]), seconds)


def _sample_of(point: Mapping[str, Any]) -> Sample:
    """Returns the sample of one histogram data point."""
    low, high, number = buckets_of(point)
    used = number > 0
    buckets = Sample(low[used], high[used], number[used], float(point["sum"]))
    zeros = int(point.get("zeroCount", 0))
    return together([of_values(np.zeros(zeros)), buckets]) if zeros else buckets


def _refuse(before: Side, after: Side) -> None:
    if before.kind != after.kind:
        raise ComparisonError(
            f"{before.name} is a {before.kind} and {after.name} a {after.kind}: give two of a kind"
        )
    for key, value in before.must_match.items():
        other = after.must_match.get(key)
        if value != other and value is not None and other is not None:
            raise ComparisonError(
                f"not comparable: {key} differ: {value} in {before.name}, {other} in {after.name}"
            )
    for side in (before, after):
        steps = side.samples.get(STEP)
        if steps is None or steps.size < WHOLE_STEPS:
            raise ComparisonError(
                f"not comparable: {side.name} has {steps.size if steps else 0} steps, {WHOLE_STEPS} are needed"
            )
        for name, sample in side.samples.items():
            if not sample.is_possible:
                raise ComparisonError(
                    f"not comparable: {side.name} has durations of {name} that no run can have; its files are damaged"
                )


def _change_per_step(row: Mapping[str, Any], step: Mapping[str, Any]) -> float:
    """Returns the absolute difference of the seconds per step: the two may have different numbers of steps."""
    before, after = (row[side]["seconds"] / max(step[side]["count"], 1) for side in ("before", "after"))
    return float(abs(after - before))


def _row(name: str, before: Sample, after: Sample) -> dict[str, Any]:
    change = ratio(before, after)
    shown = "slower" if change.low > 1 else "faster" if change.high < 1 else "no difference shown"
    return {
        "name": name,
        "before": _statistics(before),
        "after": _statistics(after),
        "ratio": _known(change.value),
        "low": _known(change.low),
        "high": _known(change.high),
        "conclusion": shown if math.isfinite(change.low) else "not known",
    }


def _statistics(sample: Sample) -> dict[str, Any]:
    quantiles = {name: sample.quantile(q) for name, q in (("p50", 0.5), ("p95", 0.95), ("p99", 0.99))}
    return {
        "count": sample.size,
        "seconds": sample.total,
        "mean": _known(sample.mean),
        **{name: [_known(number) for number in estimate] for name, estimate in quantiles.items()},
    }


def _known(number: float) -> float | None:
    return number if math.isfinite(number) else None
