"""Microseconds per step on the training thread."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import numpy as np

from benchmarks.loop import Loop
from benchmarks.plan import say
from benchmarks.receiver import receiving
from benchmarks.row import MOST_WIDTH_BUDGETS, Row
from benchmarks.spread import differences, fastest_mean, percent_more, spread_of
from benchmarks.variants import Instrumented, bare, floor, interleaved, prometheus_client, without_c

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from benchmarks.plan import Plan
    from benchmarks.variants import Variant

WHAT = (
    "Four stages per step on the CPU, everything exported. Blocks of about a second take turns in one process: bare, the"
    " same hooks writing nothing (the floor), instrumented, instrumented without the C module, and with four histograms of"
    " prometheus-client observed by lines in the loop; garbage collection off. Each value is the difference between blocks of"
    " one round."
)
BLOCK_S = 1.0
BUDGETS_US = {"median": 8.0, "mean": 10.0}
BUDGETS_WITHOUT_C_US = {"median": 14.0, "mean": 16.0}
BUDGET_OF_FLOOR = 1.5
REPORTED_BUDGET_PERCENT = 33.0
GPU_BUDGETS_US = {"median": 20.0, "mean": 20.0}
GPU_BUDGET_PERCENT, GPU_STEP_MS = 0.3, 10.0

_STATISTICS: dict[str, Callable[[np.ndarray], float]] = {
    "median": lambda steps: float(np.median(steps)) / 1e3,
    "mean": lambda steps: float(np.mean(steps)) / 1e3,
    "fastest 5 %": lambda steps: fastest_mean(steps) / 1e3,
}
"""Statistics of a block, in microseconds per step. Only the mean includes all of the export loop's share and of disturbances."""

Blocks = dict[str, list[np.ndarray]]


def run(plan: Plan) -> list[Row]:
    """Measures on the device of the plan."""
    return _on_cuda(plan) if plan.device == "cuda" else _on_cpu(plan)


def _on_cpu(plan: Plan) -> list[Row]:
    reported_us: list[float | None] = []
    blocks = _measure(plan, Loop(), block_s=BLOCK_S, rounds=plan.times(32, 3), reported_us=reported_us)
    rows = _cost_rows(blocks, "step", budgets=BUDGETS_US)
    return [
        *rows,
        _reported_row(blocks, [each for each in reported_us if each is not None]),
        *_variant_rows(
            blocks,
            "without C",
            name="step.python",
            what="the same without the C module",
            budgets=BUDGETS_WITHOUT_C_US,
        ),
        *_variant_rows(blocks, "prometheus-client", name="step.client", what="prometheus-client in the loop"),
        *_against_client(blocks),
    ]


def _variant_rows(
    blocks: Blocks, variant: str, *, name: str, what: str, budgets: dict[str, float] | None = None
) -> list[Row]:
    """Returns the additional time per step of one variant over the bare loop."""
    rows = []
    for label in BUDGETS_US:
        value = _STATISTICS[label]
        cost = differences([value(one) for one in blocks[variant]], [value(one) for one in blocks["bare"]])
        budget = budgets[label] if budgets else None
        rows.append(
            Row(name=f"{name}.{label}", what=f"{what}, {label}", unit="µs", values=tuple(cost), budget=budget)
        )
    return rows


def _against_client(blocks: Blocks) -> list[Row]:
    rows = []
    for label, budget_us in BUDGETS_US.items():
        instrumented, client = (
            [_STATISTICS[label](steps) for steps in blocks[variant]]
            for variant in ("instrumented", "prometheus-client")
        )
        rows.append(
            Row(
                name=f"step.less.{label}",
                what=f"instrumented over prometheus-client in the loop, {label}",
                unit="µs",
                values=tuple(differences(instrumented, client)),
                budget=0.0,
                most_width=MOST_WIDTH_BUDGETS * budget_us,
            )
        )
    return rows


def _reported_row(blocks: Blocks, reported_us: list[float]) -> Row:
    """Returns how far the overhead in the run summaries is from the paired difference of the means."""
    means = {variant: [float(steps.mean()) / 1e3 for steps in found] for variant, found in blocks.items()}
    cost = spread_of(differences(means["instrumented"], means["bare"]))
    quotable = cost.median > 0 and cost.width <= MOST_WIDTH_BUDGETS * BUDGETS_US["mean"]
    measured = bool(reported_us) and quotable
    return Row(
        name="step.reported",
        what="overhead in the run summary, off the paired mean",
        unit="%",
        values=tuple(abs(each / cost.median - 1) * 100 for each in reported_us) if measured else (),
        budget=REPORTED_BUDGET_PERCENT,
        detail={"reported_us": spread_of(reported_us).median} if measured else {},
        reason="" if measured else "the cost varied too much" if reported_us else "no run summary",
    )


def _measure(
    plan: Plan, loop: Loop, *, block_s: float, rounds: int, reported_us: list[float | None] | None = None
) -> Blocks:
    steps = loop.steps_in(block_s)
    with receiving():
        instrumented = Instrumented(plan.folder)
        with instrumented(loop):  # work done once per process is not a cost per step
            loop.run(steps)

        @contextlib.contextmanager
        def reporting(loop: Loop) -> Iterator[None]:
            with instrumented(loop) as session:
                yield
            if reported_us is not None:
                reported_us.append(session.summary()["telemetry"]["overhead_us_per_step"])

        @contextlib.contextmanager
        def in_python(loop: Loop) -> Iterator[None]:
            with without_c(), instrumented(loop):
                yield

        variants: dict[str, Variant] = {"bare": bare, "floor": floor, "instrumented": reporting}
        if loop.device == "cpu":
            variants |= {"without C": in_python, "prometheus-client": prometheus_client}
        say(f"  {rounds} rounds of {len(variants)} blocks of {steps} steps")
        return interleaved(loop, variants, steps=steps, rounds=rounds)


def _cost_rows(blocks: Blocks, name: str, *, budgets: dict[str, float]) -> list[Row]:
    rows = []
    for label, value in _STATISTICS.items():
        by_variant = {variant: [value(steps) for steps in found] for variant, found in blocks.items()}
        cost = differences(by_variant["instrumented"], by_variant["bare"])
        least = differences(by_variant["floor"], by_variant["bare"])
        key = f"{name}.{label.split()[0]}"
        rows += [
            Row(
                name=key,
                what=f"training thread per step, {label}",
                unit="µs",
                values=tuple(cost),
                budget=budgets.get(label),
                detail={f"{v}_us": spread_of(found).median for v, found in by_variant.items()},
            ),
            Row(
                name=f"{key}.floor",
                what=f"the same hooks writing nothing, {label}",
                unit="µs",
                values=tuple(least),
            ),
            _of_floor(key, label, cost, spread_of(least).median),
        ]
    return rows


def _of_floor(key: str, label: str, cost: list[float], floor_us: float) -> Row:
    what = f"training thread over that floor, {label}"
    budget = BUDGET_OF_FLOOR if label == "median" else None
    if floor_us <= 0:  # noise was larger than the hooks
        reason = "the floor varied too much"
        return Row(name=f"{key}.ratio", what=what, unit="x", budget=budget, reason=reason)
    values = tuple(each / floor_us for each in cost)
    return Row(name=f"{key}.ratio", what=what, unit="x", values=values, budget=budget)


def _on_cuda(plan: Plan) -> list[Row]:
    import torch

    if not torch.cuda.is_available():
        reason = "torch finds no CUDA device here"
        return [
            Row(
                name="cuda.step",
                what="training thread per step, on CUDA",
                unit="µs",
                budget=GPU_BUDGETS_US["median"],
                reason=reason,
            ),
            Row(
                name="cuda.wall",
                what="additional wall time of a 10 ms device step",
                unit="%",
                budget=GPU_BUDGET_PERCENT,
                reason=reason,
            ),
        ]
    # A tiny model takes only host time (kernel launches), so device time does not hide the cost of the hooks.
    small = _measure(plan, Loop(device="cuda"), block_s=BLOCK_S, rounds=plan.times(12, 3))
    rows = _cost_rows(small, "cuda.step", budgets=GPU_BUDGETS_US)
    large = _measure(plan, Loop(step_ms=GPU_STEP_MS, device="cuda"), block_s=2.0, rounds=plan.times(12, 3))
    means = {variant: [float(steps.mean()) for steps in found] for variant, found in large.items()}
    more = percent_more(means["instrumented"], means["bare"])
    wall = Row(
        name="cuda.wall",
        what="additional wall time of a 10 ms device step",
        unit="%",
        values=tuple(more),
        budget=GPU_BUDGET_PERCENT,
        detail={"bare_ms": spread_of(means["bare"]).median / 1e6},
    )
    return [*rows, wall]
