"""What a run takes longer, on the wall and on the processor."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, NamedTuple

from benchmarks.loop import Loop
from benchmarks.plan import say
from benchmarks.receiver import receiving, scraping
from benchmarks.row import Row
from benchmarks.spread import percent_more, spread_of
from benchmarks.variants import Instrumented, bare, interleaved

if TYPE_CHECKING:
    from benchmarks.plan import Plan

WALL = (
    "Mean step of bare and instrumented blocks that take turns, at bare steps of 0.3 and 50 ms: a small model, padded with"
    " matrix products."
)
CPU = (
    "Bare steps of 5 ms. An instrumented block longer than the interval between exports, so that one export and one scrape"
    " fall into it, between two bare ones of half its length: process time of all threads, and wall time."
)
BUDGET_SHORT_STEP_PERCENT = 4.0
BUDGET_CPU_PERCENT = 0.3


def run_wall(plan: Plan) -> list[Row]:
    """Steps of 0.3 and of 50 ms."""
    short = _wall(plan, step_ms=0.3, block_s=1.0, rounds=plan.times(12, 3), budget=BUDGET_SHORT_STEP_PERCENT)
    long = _wall(plan, step_ms=50.0, block_s=2.0, rounds=plan.times(5, 1), budget=None)
    return [short, long]


def _wall(plan: Plan, *, step_ms: float, block_s: float, rounds: int, budget: float | None) -> Row:
    loop = Loop(step_ms=step_ms)
    steps = loop.steps_in(block_s)
    say(f"  {rounds} rounds of 2 blocks of {steps} steps of {step_ms} ms")
    with receiving():
        instrumented = Instrumented(plan.folder)
        with instrumented(loop):
            loop.run(loop.steps_in(1.0))
        blocks = interleaved(loop, {"bare": bare, "instrumented": instrumented}, steps=steps, rounds=rounds)
    means = {variant: [float(block.mean()) for block in found] for variant, found in blocks.items()}
    return Row(
        name=f"wall.{step_ms:g}ms",
        what=f"wall time of a {step_ms:g} ms step, more",
        unit="%",
        values=tuple(percent_more(means["instrumented"], means["bare"])),
        budget=budget,
        detail={"bare_ms": spread_of(means["bare"]).median / 1e6},
    )


class _Spent(NamedTuple):
    """What a block took, per step, in nanoseconds."""

    wall_ns: float
    process_ns: float
    thread_ns: float


def run_cpu(plan: Plan) -> list[Row]:
    """Steps of 5 ms, exports included."""
    loop = Loop(step_ms=5.0)
    rounds, block_s = plan.times(3, 1), plan.times(16, 6)
    half = loop.steps_in(block_s / 2)
    say(f"  {rounds} rounds of {half} bare, {2 * half} instrumented, {half} bare steps of 5 ms")
    bares, watches = [], []
    with receiving():
        instrumented = Instrumented(plan.folder)
        with instrumented(loop):
            loop.run(loop.steps_in(1.0))
        for _ in range(rounds):
            before = _spend(loop, half)
            with instrumented(loop) as session, scraping(str(session.metrics_url), every_s=0.9 * block_s):
                watches.append(_spend(loop, 2 * half))
            after = _spend(loop, half)
            bares.append(_Spent(*(sum(pair) / 2 for pair in zip(before, after, strict=True))))
    return _cpu_rows(bares, watches)


def _spend(loop: Loop, steps: int) -> _Spent:
    begun = time.perf_counter_ns(), time.process_time_ns(), time.thread_time_ns()
    loop.run(steps)
    ended = time.perf_counter_ns(), time.process_time_ns(), time.thread_time_ns()
    return _Spent(*((b - a) / steps for a, b in zip(begun, ended, strict=True)))


def _cpu_rows(bares: list[_Spent], watches: list[_Spent]) -> list[Row]:
    detail = {"bare_ms": spread_of([each.process_ns for each in bares]).median / 1e6}
    process = percent_more([each.process_ns for each in watches], [each.process_ns for each in bares])
    wall = percent_more([each.wall_ns for each in watches], [each.wall_ns for each in bares])
    others = [
        100 * (watch.process_ns - watch.thread_ns - (plain.process_ns - plain.thread_ns)) / plain.process_ns
        for watch, plain in zip(watches, bares, strict=True)
    ]
    return [
        Row(
            name="cpu.process",
            what="process CPU at 5 ms steps, more",
            unit="%",
            values=tuple(process),
            budget=BUDGET_CPU_PERCENT,
            detail=detail,
        ),
        Row(name="cpu.threads", what="of it in threads of otel_train", unit="%", values=tuple(others)),
        Row(name="wall.5ms", what="wall time of a 5 ms step, more", unit="%", values=tuple(wall)),
    ]
