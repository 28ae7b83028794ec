"""What captures cost training: while there is none, and while one runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from benchmarks.loop import Loop
from benchmarks.plan import say
from benchmarks.receiver import receiving
from benchmarks.row import Row
from benchmarks.spread import percent_more, spread_of
from benchmarks.variants import Watched, interleaved

if TYPE_CHECKING:
    import numpy as np

    from benchmarks.plan import Plan
    from otel_train.session import Session

WHAT = (
    "One watched loop. Idle: sessions with captures allowed and off take turns. Active: blocks of steps inside a capture"
    " of the host without stacks, each between two blocks outside of it; the end of the capture is in neither."
)
BUDGET_ACTIVE_PERCENT = 5.0


def run(plan: Plan) -> list[Row]:
    """Idle, and steps of 20 and of 2 ms."""
    with receiving():
        return [_idle(plan), _active(plan, 20.0, BUDGET_ACTIVE_PERCENT), _active(plan, 2.0, None)]


def _idle(plan: Plan) -> Row:
    loop = Loop(step_ms=2.0)
    steps, rounds = loop.steps_in(1.0), plan.times(8, 2)
    say(f"  {rounds} rounds of 2 blocks of {steps} steps, captures allowed and off")
    variants: Any = {name: Watched(plan.folder, capture=name) for name in ("off", "asked")}
    blocks = interleaved(loop, variants, steps=steps, rounds=rounds)
    means = {name: [float(block.mean()) for block in found] for name, found in blocks.items()}
    return Row(
        name="capture.idle",
        what="wall time of a 2 ms step with no capture under way, against captures switched off, more",
        unit="%",
        values=tuple(percent_more(means["asked"], means["off"])),
    )


def _active(plan: Plan, step_ms: float, budget: float | None) -> Row:
    loop = Loop(step_ms=step_ms)
    steps, rounds = plan.times(20, 5), plan.times(8, 2)
    say(f"  {rounds} captures of {steps} steps of {step_ms:g} ms")
    inside, outside = [], []
    settings = {"capture_activities": "cpu", "turn_every_s": 0.1, "capture_top": 0}
    with Watched(plan.folder, **settings)(loop) as session:
        loop.run(loop.steps_in(1.0))
        for _ in range(rounds):
            before = loop.run(steps)
            inside.append(float(_captured(session, loop, steps).mean()))
            outside.append(float((before.mean() + loop.run(steps).mean()) / 2))
    return Row(
        name=f"capture.active.{step_ms:g}ms",
        what=f"wall time of a {step_ms:g} ms step inside a capture without stacks, more",
        unit="%",
        values=tuple(percent_more(inside, outside)),
        budget=budget,
        detail={"bare_ms": spread_of(outside).median / 1e6},
    )


def _profiling() -> bool:
    return bool(getattr(torch.autograd.profiler, "_is_profiler_enabled", False))


def _captured(session: Session, loop: Loop, steps: int) -> np.ndarray:
    """Durations of steps inside a capture, which is over afterwards."""
    refusal = session.capture(steps=steps + 4)
    if refusal:
        raise RuntimeError(refusal)
    while not _profiling():
        loop.run(1)
    loop.run(2)  # the warm-up of the profiler is in here
    found = loop.run(steps)
    while _profiling():
        loop.run(1)
    return found
