"""Synthetic records of ranks."""

from __future__ import annotations

from typing import Any

from otel_train.catalog import STAGES
from otel_train.distributed.rank_report import NAMED, ON_DEVICE, RankReport


def report(rank: int, **facts: Any) -> RankReport:
    """A rank in the middle of training, but for what is said of it."""
    usual: dict[str, Any] = {
        "host": f"node-{rank}", "sequence": 1, "steps": 100, "step": 100, "stage": "backward", "loader": "",
        "after": "forward", "quiet_s": 0.0, "stalled": False, "over": False, "doing": "training", "away_s": 0.0,
        "barrier": "backward", "every": 0, "events": {}, "patience_s": 300.0, "counted": {},
    }  # fmt: skip
    stages = dict.fromkeys((*STAGES, NAMED), 0.0) | facts.pop("stages", {})
    return RankReport(rank=rank, stages=stages, **{**usual, **facts})


def later(
    before: RankReport,
    steps: int,
    per_step: dict[str, float],
    on_device: dict[str, float] | None = None,
    **facts: Any,
) -> RankReport:
    """The same rank after so many steps of these stage times, of which a device may have taken its own."""
    stages = {stage: before.stages[stage] + steps * per_step.get(stage, 0.0) for stage in before.stages}
    if on_device:
        known = before.device or dict.fromkeys(ON_DEVICE, 0.0)
        facts["device"] = {stage: known[stage] + steps * on_device.get(stage, 0.0) for stage in ON_DEVICE}
    return before._replace(
        sequence=before.sequence + 1,
        steps=before.steps + steps,
        step=before.step + steps,
        stages=stages,
        **facts,
    )


def world(size: int, **facts: Any) -> dict[int, RankReport]:
    """Ranks that are all alike."""
    return {rank: report(rank, **facts) for rank in range(size)}
