"""What a user-defined stage costs without a session."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

from benchmarks.row import Row

if TYPE_CHECKING:
    from benchmarks.plan import Plan

WHAT = (
    "`with stage(name):` around nothing, against the same loop without it: once with no session, once after"
    " `instrument` under OTEL_TRAIN_DISABLED=true."
)
BUDGET_US = 0.3
BLOCKS = 50_000


def run(plan: Plan) -> list[Row]:
    """Measures a disabled session, and a process without a session."""
    import otel_train

    rounds = plan.times(15, 5)
    absent = _row("idle.absent", "stage() block without a session", rounds)
    before = os.environ.get("OTEL_TRAIN_DISABLED")
    os.environ["OTEL_TRAIN_DISABLED"] = "true"
    try:
        with otel_train.instrument():
            disabled = _row("idle.disabled", "stage() block with OTEL_TRAIN_DISABLED=true", rounds)
    finally:
        if before is None:
            del os.environ["OTEL_TRAIN_DISABLED"]
        else:
            os.environ["OTEL_TRAIN_DISABLED"] = before
    return [absent, disabled]


def _row(name: str, what: str, rounds: int) -> Row:
    values = tuple((_with_stage_ns() - _without_ns()) / BLOCKS / 1e3 for _ in range(rounds))
    return Row(name=name, what=what, unit="µs", values=values, budget=BUDGET_US)


def _with_stage_ns() -> int:
    from otel_train import stage

    begun = time.perf_counter_ns()
    for _ in range(BLOCKS):
        with stage("augment"):
            pass
    return time.perf_counter_ns() - begun


def _without_ns() -> int:
    begun = time.perf_counter_ns()
    for _ in range(BLOCKS):
        pass
    return time.perf_counter_ns() - begun
