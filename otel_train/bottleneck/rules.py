"""What the figures of a run mean: findings, the weightiest first."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from otel_train.aggregate.names import CHECKPOINT
from otel_train.bottleneck.dataloader import (
    LoaderThroughput,
    compared,
    loader_advice,
    milliseconds,
    start_advice,
)
from otel_train.bottleneck.device import Compiled, busy_advice, dispatch_limits, host_limits, recompiling
from otel_train.records import Finding, Pace

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from otel_train.aggregate.names import Key
    from otel_train.aggregate.totals import StageTotals

WARNING_SHARE, CRITICAL_SHARE = 0.10, 0.20
"""Share of training time spent waiting for data from which it is worth a word, and worth an alarm.
Source: the thresholds that TraceML uses for the same question."""

LARGE_SHARE = 0.30
"""Share of the run from which evaluation or unclaimed time is worth a word."""

_COMPUTE = ("forward", "backward", "optimizer")
_NOT_TAKEN = Pace()
_UNKNOWN = LoaderThroughput()
_NOTHING_COMPILED = Compiled()
_FIRST = ("input_bound", "recompiling", "compile_heavy")
"""Whoever computes all the time is busy; unless it is one of these, which come before that."""

SEVERAL_PASSES = 2
"""A pass that begins once is preparation."""

ENOUGH_STEPS = 10
"""Steps below which figures say more about warm-up than about the run."""


def findings(
    stages: Sequence[StageTotals],
    *,
    steps: int,
    activities: Mapping[str, float],
    supplies: Mapping[str, LoaderThroughput],
    pace: Pace = _NOT_TAKEN,
    compiled: Compiled = _NOTHING_COMPILED,
) -> list[Finding]:
    """Findings about a run or a window of it.

    Args:
        stages: the stage table.
        steps: training steps counted.
        activities: seconds by activity.
        supplies: how loaders get their batches, by name, as far as that is known.
        pace: how far the device ran behind the host.
        compiled: what is known of compiled code.

    Returns:
        At least one; the first is the verdict. "No finding" is a finding, too.
    """
    training = [row for row in stages if row.key.phase == "train"]
    total_s = sum(row.self_s for row in training)
    if steps < ENOUGH_STEPS or not total_s:
        claim = f"Too early to say: {steps} training steps, a verdict needs {ENOUGH_STEPS}."
        return [_finding("too_early", claim, advice="Let it run.", evidence={"steps": steps})]
    again = recompiling(compiled.recompiled, total_s)
    outside = _outside(activities, training, total_s)
    found = [
        *_waits(training, total_s, supplies),
        *_slow_starts(total_s, supplies),
        *again,
        *(finding for finding in outside if not (again and finding.name == "compile_heavy")),  # it says why
    ]
    found.sort(key=lambda finding: -finding.seconds)
    first = [finding for finding in found if finding.name in _FIRST]
    rest = [finding for finding in found if finding.name not in _FIRST]
    if first:
        return [*first, *rest]
    compute_s = sum(row.self_s for row in training if row.key.stage in _COMPUTE)
    limit = host_limits(pace, step_s=total_s / steps, total_s=total_s, compute_share=compute_s / total_s)
    limit = limit or dispatch_limits(training, compiled, total_s)
    return [limit or _busy(training, total_s, supplies, compiled), *rest]


def _waits(
    training: Sequence[StageTotals], total_s: float, supplies: Mapping[str, LoaderThroughput]
) -> list[Finding]:
    """One finding per loader that training waits for in mid-pass. What beginning a pass costs is another matter."""
    found = []
    exposed = _on_device(training)
    who = "The device" if exposed else "Training"
    rest_s = sum(row.self_s for row in training if row.key.stage != "data")
    for row in training:
        name, supply = row.key.loader, supplies.get(row.key.loader, _UNKNOWN)
        wait_s = max(
            0.0, exposed[row.key] - supply.first_s if row.key in exposed else row.self_s - supply.start_s
        )
        share, batches = wait_s / total_s, row.count - supply.passes
        if row.key.stage != "data" or share < WARNING_SHARE:
            continue
        each_s, ask_s = (wait_s / batches, rest_s / row.count) if batches > 0 else (0.0, 0.0)
        each = f", {milliseconds(each_s)} per batch" if each_s else ""
        evidence = {"data_wait_ratio": share, "data_wait_seconds": wait_s, "batches": row.count}
        if exposed:
            evidence["host_wait_seconds"] = row.self_s
        found.append(
            _finding(
                "input_bound",
                f"{who} waits for loader `{name}`: {share:.0%} of training time{each}.{compared(supply, ask_s)}",
                advice=loader_advice(name, supply, wait_s=each_s, ask_s=ask_s),
                evidence={**evidence, **_build_evidence(supply, ask_s)},
                share=share,
                seconds=wait_s,
                loader=name,
                severity="critical" if share >= CRITICAL_SHARE else "warning",
            )
        )
    return found


def _build_evidence(supply: LoaderThroughput, ask_s: float) -> dict[str, float]:
    if supply.build_p50_s is None or supply.build_p99_s is None:
        return {}
    found = {"build_p50_seconds": supply.build_p50_s, "build_p99_seconds": supply.build_p99_s}
    return {**found, "ask_interval_seconds": ask_s} if ask_s else found


def _slow_starts(total_s: float, supplies: Mapping[str, LoaderThroughput]) -> list[Finding]:
    """Loaders whose passes take long to begin, again and again."""
    found = []
    for name, supply in supplies.items():
        share = min(1.0, supply.start_s / total_s)
        if supply.passes < SEVERAL_PASSES or share < WARNING_SHARE:
            continue
        each_s = supply.start_s / supply.passes
        claim = (
            f"Beginning a pass over loader `{name}` takes {milliseconds(each_s)}, {supply.passes} times: "
            f"{share:.0%} of training time."
        )
        evidence = {
            "start_ratio": share,
            "making_seconds": supply.making_s,
            "first_batch_seconds": supply.first_s,
            "passes": supply.passes,
        }
        found.append(
            _finding(
                "slow_start",
                claim,
                advice=start_advice(name, supply),
                evidence=evidence,
                share=share,
                seconds=supply.start_s,
                loader=name,
                severity="warning",
            )
        )
    return found


def _on_device(training: Sequence[StageTotals]) -> dict[Key, float]:
    """Seconds that the device stood idle for each loader, if that is known for all of them.

    A wait that the device does not notice costs nothing. One clock per window: with one loader not measured,
    or less than half of its batches, none is judged by the device.
    """
    found: dict[Key, float] = {}
    for row in training:
        if row.key.stage != "data" or not row.count:
            continue
        if row.device is None or row.device.measured * 2 < row.count:
            return {}
        found[row.key] = row.device.seconds * row.count / row.device.measured
    return found


def _outside(
    activities: Mapping[str, float], training: Sequence[StageTotals], total_s: float
) -> list[Finding]:
    """Findings about time that is not training itself."""
    wall_s = sum(activities.values())
    found = []
    for activity, advice in (
        (
            "eval",
            "Evaluate less often, on fewer batches, or with a larger batch size: no gradients are kept.",
        ),
        (
            "compile",
            "In a longer run it weighs less. A cache on disk keeps it: jax_compilation_cache_dir, TORCHINDUCTOR_CACHE_DIR.",
        ),
        (CHECKPOINT, "Save less often, or asynchronously (torch.distributed.checkpoint.async_save)."),
    ):
        spent = activities.get(activity, 0.0)
        if wall_s and spent / wall_s >= LARGE_SHARE:
            claim = f"{spent / wall_s:.0%} of the run is {activity}."
            found.append(
                _finding(f"{activity}_heavy", claim, advice=advice, share=spent / wall_s, seconds=spent)
            )
    other_s = sum(row.self_s for row in training if row.key.stage == "other")
    if other_s / total_s >= LARGE_SHARE:
        found.append(
            _finding(
                "unattributed",
                f"{other_s / total_s:.0%} of training time is in no stage: code of the loop itself.",
                advice='Wrap suspects in `with otel_train.stage("name"):`; logging and .item() are common.',
                share=other_s / total_s,
                seconds=other_s,
            )
        )
    return found


def _busy(
    training: Sequence[StageTotals],
    total_s: float,
    supplies: Mapping[str, LoaderThroughput],
    compiled: Compiled,
) -> Finding:
    """Training waits for no loader: say what it does instead."""
    by_stage: dict[str, float] = {}
    for row in training:
        by_stage[row.key.stage] = by_stage.get(row.key.stage, 0.0) + row.self_s
    stage, seconds = max(by_stage.items(), key=lambda item: item[1])
    steady_s = by_stage.get("data", 0.0) - sum(supply.start_s for supply in supplies.values())
    waiting = (sum(_on_device(training).values()) or max(0.0, steady_s)) / total_s
    claim = f"Training waits for no loader ({waiting:.1%} of training time); most goes to {stage}."
    advice = busy_advice(stage, seconds / total_s, training, compiled) or (
        "Nothing to do about the input. A profiler capture shows what the time in the model is spent on."
    )
    evidence = {"data_wait_ratio": waiting, f"{stage}_ratio": seconds / total_s}
    return _finding("compute_bound", claim, advice=advice, evidence=evidence, severity="ok")


def _finding(name: str, claim: str, **facts: Any) -> Finding:  # Any: the other fields of Finding
    """A finding about training, with what is usual for the fields that are not given."""
    share = facts.get("share", 0.0)
    usual: dict[str, Any] = {"evidence": {"share": share}, "share": share, "seconds": 0.0, "phase": "train"}
    return Finding(name=name, claim=claim, **{**usual, **facts})
