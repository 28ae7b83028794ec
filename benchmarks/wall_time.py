"""Additional wall time and processor time of an instrumented run."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np

from benchmarks.loop import Loop
from benchmarks.plan import say
from benchmarks.receiver import receiving, scraping
from benchmarks.row import Row
from benchmarks.spread import percent_more, spread_of
from benchmarks.variants import Instrumented, bare, interleaved, without_global_hooks

if TYPE_CHECKING:
    from benchmarks.plan import Plan

WALL = (
    "Mean step of bare and instrumented blocks that take turns, at bare steps of 0.3 and 50 ms: a small model, padded with"
    " matrix products."
)
CPU = (
    "Bare steps of 5 ms. Two loops take turns, some steps each, and one of them is instrumented, the other one in the second half: the"
    " time of such a step drifts by more than the budget within a second, and two loops differ by as much. Processor time of the"
    " training thread, of the one less that of the other, and of all other threads, with exports and scrapes; wall time likewise."
    " A value is the mean of a second of each loop in both halves."
)
BUDGET_SHORT_STEP_PERCENT = 4.0
BUDGET_CPU_PERCENT = 0.3

_IN_A_ROW = 2
"""Least consecutive steps of a loop, so that a step finds the caches as a step of the same loop leaves them."""


def run_wall(plan: Plan) -> list[Row]:
    """Measures steps of 0.3 and of 50 ms."""
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
        what=f"additional wall time of a {step_ms:g} ms step",
        unit="%",
        values=tuple(percent_more(means["instrumented"], means["bare"])),
        budget=budget,
        detail={"bare_ms": spread_of(means["bare"]).median / 1e6},
    )


def run_cpu(plan: Plan) -> list[Row]:
    """Measures steps of 5 ms, exports included."""
    loops = Loop(step_ms=5.0), Loop(step_ms=5.0)
    loops[1].pad_like(loops[0])
    blocks, pairs = plan.times(20, 3), 2 * _IN_A_ROW * max(1, loops[0].steps_in(1.0) // (2 * _IN_A_ROW))
    say(f"  2 x {blocks} blocks of {pairs} bare and {pairs} instrumented steps of 5 ms that take turns")
    idle_ns = _of_other_threads()
    loops[0].run(pairs)
    idle_ns = _of_other_threads() - idle_ns
    halves, others_ns = [], 0
    with receiving():
        instrumented = Instrumented(plan.folder)
        for plain, measured in (loops, loops[::-1]):
            with instrumented(measured) as session, scraping(str(session.metrics_url), every_s=blocks / 2):
                _take_turns(plain, measured, pairs)
                before_ns = _of_other_threads()
                halves.append([_take_turns(plain, measured, pairs) for _ in range(blocks)])
                others_ns += _of_other_threads() - before_ns
    return _cpu_rows(np.mean(halves, axis=0), (others_ns / (4 * blocks) - idle_ns) / pairs)


def _of_other_threads() -> int:
    """Returns the processor time that all threads but this one have taken, in nanoseconds."""
    return time.process_time_ns() - time.thread_time_ns()


def _take_turns(plain: Loop, measured: Loop, pairs: int) -> np.ndarray:
    """Trains two loops in turn; returns float64[2, 2], ns: bare and instrumented, processor and wall time of a mean step."""
    bare_steps, our_steps = plain.steps(pairs), measured.steps(pairs)
    spent = np.zeros((2, 2))
    for turn in range(2 * pairs):
        is_bare = (turn // _IN_A_ROW + 1) // 2 % 2 == 0  # first one, then twice the other, twice the one ...
        with without_global_hooks():  # before steps of both loops: its effect on caches counts for neither
            if is_bare:
                spent[0] += next(bare_steps)
        if not is_bare:
            spent[1] += next(our_steps)
    return spent / pairs


def _cpu_rows(blocks: np.ndarray, others_ns: float) -> list[Row]:
    """Returns the rows of processor time. ``blocks``: what ``_take_turns`` returns, of each; ``others_ns``: what other threads take in the time of a step."""
    bare_ns = float(np.median(blocks[:, 0, 0]))
    others = 100 * others_ns / bare_ns
    thread, wall = 100 * (blocks[:, 1] / blocks[:, 0] - 1).T
    return [
        Row(
            name="cpu.process",
            what="additional processor time of the process, per 5 ms step",
            unit="%",
            values=tuple((thread + others).tolist()),
            budget=BUDGET_CPU_PERCENT,
            detail={"bare_ms": bare_ns / 1e6},
        ),
        Row(name="cpu.threads", what="of it in threads of otel_train", unit="%", values=(others,)),
        Row(
            name="wall.5ms", what="additional wall time of a 5 ms step", unit="%", values=tuple(wall.tolist())
        ),
    ]
