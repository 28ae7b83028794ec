"""What changed between two traces or two runs."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from otel_train.analyze.sample import Sample, of_values, ratio
from otel_train.errors import ComparisonError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from otel_train.analyze.sample import Estimate

SCHEMA = "otel_train.comparison/1"
STEP = "step"
WHOLE_STEPS = 2
"""Steps from which a mean says something about steps rather than about one of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """One of the two.

    Attributes:
        name: what to call it.
        kind: ``trace`` or ``run``.
        samples: durations by what they are of; ``step`` is the whole step.
        must_match: facts that make a comparison meaningless where they differ.
        facts: facts worth telling where they differ.
        shares: ratios of the steps, by name, such as how long the device was idle.
    """

    name: str
    kind: str
    samples: Mapping[str, Sample]
    must_match: Mapping[str, object] = field(default_factory=dict)
    facts: Mapping[str, object] = field(default_factory=dict)
    shares: Mapping[str, float] = field(default_factory=dict)


def compare(before: Side, after: Side) -> dict[str, Any]:
    """What became slower and what faster.

    Returns:
        A document: docs/reference/comparison.md says what is in it. ``rows`` begin with the whole step.

    Raises:
        ComparisonError: a difference between the two would say nothing; the message says why.
    """
    _refuse(before, after)
    names = [name for name in before.samples if name in after.samples]
    rows = [_row(name, before.samples[name], after.samples[name]) for name in names]
    step, *others = rows
    others.sort(key=lambda row: -abs(row["after"]["seconds"] - row["before"]["seconds"]))
    return {
        "schema": SCHEMA,
        "kind": before.kind,
        "before": before.name,
        "after": after.name,
        "differences": _differences(before.facts, after.facts),
        "only_before": [name for name in before.samples if name not in after.samples],
        "only_after": [name for name in after.samples if name not in before.samples],
        "rows": [step, *others],
        "shares": [
            {"name": name, "before": before.shares[name], "after": after.shares[name]}
            for name in before.shares
            if name in after.shares
        ],
    }


def is_slower(document: Mapping[str, Any], limit: float) -> bool | None:
    """Whether the step has become longer by more than ``limit`` (0.05 is 5 %), beyond doubt.

    Returns:
        None where it cannot be told: the limit lies within the interval, or there is none.
    """
    step = document["rows"][0]
    if step["low"] is None:
        return None
    if step["low"] > 1 + limit:
        return True
    return False if step["high"] <= 1 + limit else None


def side_of_trace(document: Mapping[str, Any], *, name: str) -> Side:
    """An analysed trace, as ``summarize`` makes it."""
    steps: Sequence[Mapping[str, Any]] = document["breakdown"]["by_step"]
    samples = {STEP: of_values([step["seconds"] for step in steps])}
    for stage in [row["stage"] for row in document["breakdown"]["stages"]]:
        samples[f"stage {stage}"] = of_values([step["stages"].get(stage, 0.0) for step in steps])
    if document["device"] is not None:
        samples["device busy"] = of_values([step["device_busy_seconds"] for step in steps])
    if steps:
        for key, what in (("top_cpu_ops", "op"), ("top_cuda_ops", "kernel")):
            for row in document[key]:
                samples[f"{what} {row['name']}"] = _spread_evenly(row["seconds"], len(steps))
    idle = document["idle"]
    shares = {} if idle is None else {"device idle": idle["share"]}
    for cause, part in (idle["causes"] if idle else {}).items():
        shares[f"idle: {cause}"] = part["share"]
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


def _spread_evenly(seconds: float, steps: int) -> Sample:
    """A sum over steps of which the parts are not known: a mean without an interval."""
    return Sample(np.array([0.0]), np.array([math.inf]), np.array([steps]), seconds)


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


def _differences(before: Mapping[str, object], after: Mapping[str, object]) -> list[str]:
    return [
        f"{key}: {before.get(key)} → {after.get(key)}"
        for key in {**before, **after}
        if before.get(key) != after.get(key)
    ]


def _row(name: str, before: Sample, after: Sample) -> dict[str, Any]:
    change = ratio(before, after)
    return {
        "name": name,
        "before": _figures(before),
        "after": _figures(after),
        "ratio": _known(change.value),
        "low": _known(change.low),
        "high": _known(change.high),
        "verdict": _verdict(change),
    }


def _verdict(change: Estimate) -> str:
    if not math.isfinite(change.low):
        return "not known"
    return "slower" if change.low > 1 else "faster" if change.high < 1 else "no difference shown"


def _figures(sample: Sample) -> dict[str, Any]:
    quantiles = {name: sample.quantile(q) for name, q in (("p50", 0.5), ("p95", 0.95), ("p99", 0.99))}
    return {
        "count": sample.size,
        "seconds": sample.total,
        "mean": _known(sample.mean),
        **{name: [_known(figure) for figure in estimate] for name, estimate in quantiles.items()},
    }


def _known(figure: float) -> float | None:
    return figure if math.isfinite(figure) else None
