"""Cost of profiler captures for the training thread: while none runs, and while one does."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from benchmarks.loop import LARGE, SMALL, Loop
from benchmarks.plan import say
from benchmarks.receiver import receiving
from benchmarks.row import Row
from benchmarks.spread import percent_more, spread_of
from benchmarks.variants import Instrumented, interleaved

if TYPE_CHECKING:
    from benchmarks.plan import Plan
    from otel_train.session import Session

WHAT = (
    "One instrumented loop. Idle: sessions with captures allowed and off take turns. Active: in each round a block of steps by"
    " itself, one with torch.profiler alone, and one inside a capture, of the host without stacks; ends are in none."
)
BUDGET_ACTIVE_PERCENT = 5.0
WRITER_S = 60.0
START_S = 60.0
"""Longest time until the profiler starts after a request."""


class Load(NamedTuple):
    """What a step is made of, and what a capture of it records.

    Attributes:
        key: part of the names of its rows.
        what: description in the table.
        step_ms: duration of a bare step.
        side: side of the matrices whose products pad it.
        budget: most additional wall time while a capture runs, in percent; None for no limit.
        stacks: whether the profiler records call stacks (``with_stack``).
    """

    key: str
    what: str
    step_ms: float
    side: int
    budget: float | None = None
    stacks: bool = False


LOADS = (
    Load("large", "20 ms of few, large operations", 20.0, LARGE, BUDGET_ACTIVE_PERCENT),
    Load("stacks", "the same, with stacks", 20.0, LARGE, stacks=True),
    Load("short", "2 ms of few, large operations", 2.0, LARGE),
    Load("small", "20 ms of thousands of small operations", 20.0, SMALL),
)


def run(plan: Plan) -> list[Row]:
    """Measures idle captures, and captured steps of few and of many operations."""
    with receiving():
        return [_idle(plan), *(row for load in LOADS for row in _active(plan, load))]


def _idle(plan: Plan) -> Row:
    loop = Loop(step_ms=2.0)
    steps, rounds = loop.steps_in(1.0), plan.times(8, 2)
    say(f"  {rounds} rounds of 2 blocks of {steps} steps, captures allowed and off")
    variants: Any = {name: Instrumented(plan.folder, profiler=name) for name in ("off", "on_demand")}
    blocks = interleaved(loop, variants, steps=steps, rounds=rounds)
    means = {name: [float(block.mean()) for block in found] for name, found in blocks.items()}
    return Row(
        name="capture.idle",
        what="additional wall time of a 2 ms step with captures allowed and none running, against captures switched off",
        unit="%",
        values=tuple(percent_more(means["on_demand"], means["off"])),
    )


def _active(plan: Plan, load: Load) -> list[Row]:
    loop = Loop(step_ms=load.step_ms, side=load.side)
    steps, rounds = plan.times(20, 5), plan.times(10, 2)
    say(f"  {rounds} captures of {steps} steps of {load.step_ms:g} ms, {loop.products} products in each")
    found: dict[str, list[Cost]] = {"alone": [], "torch": [], "ours": []}
    settings = {
        "profiler_activities": "cpu",
        "tuning": {"poll_interval_s": 0.1},
        "profiler_top": 0,
        "profiler_kept": 1 << 10,
    }
    with Instrumented(plan.folder, **settings)(loop) as session:
        loop.run(loop.steps_in(1.0))
        for _ in range(rounds):
            found["alone"].append(_cost(loop, steps))
            found["torch"].append(_with_torch(loop, steps, stacks=load.stacks))
            found["ours"].append(_captured(session, loop, steps, stacks=load.stacks))
            _await_record(session, loop, len(found["ours"]))
    return rows_of(load, loop.products, found)


def rows_of(load: Load, products: int, found: dict[str, list[Cost]]) -> list[Row]:
    """Returns rows of wall time, which has the budget, and of processor time, which other programs disturb less and which shows the cause."""
    alone, torch_only, ours = ([cost.cpu for cost in found[name]] for name in ("alone", "torch", "ours"))
    wall = percent_more([cost.wall for cost in found["ours"]], [cost.wall for cost in found["alone"]])
    detail = {"products": products, "alone_ms": spread_of(alone).median / 1e6}
    if products:  # on a slow machine a short step has time for none
        detail["torch_us_each"] = (spread_of(torch_only).median - spread_of(alone).median) / products / 1e3
    name = f"capture.active.{load.key}"
    return [
        Row(
            name=name,
            what=f"additional wall time of a step inside a capture: {load.what}",
            unit="%",
            values=tuple(wall),
            budget=load.budget,
            detail=detail,
        ),
        Row(
            name=f"{name}.cpu",
            what="additional processor time of its thread",
            unit="%",
            values=tuple(percent_more(ours, alone)),
        ),
        Row(
            name=f"{name}.torch",
            what="the same with torch.profiler alone",
            unit="%",
            values=tuple(percent_more(torch_only, alone)),
        ),
        Row(
            name=f"{name}.own",
            what="a capture against torch.profiler alone",
            unit="%",
            values=tuple(percent_more(ours, torch_only)),
        ),
    ]


class Cost(NamedTuple):
    """Mean duration of a step in ns: wall time, and processor time of its thread."""

    wall: float
    cpu: float


def _cost(loop: Loop, steps: int) -> Cost:
    begun = time.thread_time_ns()
    wall = float(loop.run(steps).mean())
    return Cost(wall, (time.thread_time_ns() - begun) / steps)


def _with_torch(loop: Loop, steps: int, *, stacks: bool) -> Cost:
    """Measures torch's own profiler without otel_train."""
    profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], with_stack=stacks)
    profile.start()
    loop.run(2)
    found = _cost(loop, steps)
    profile.stop()
    return found


def _profiling() -> bool:
    return bool(getattr(torch.autograd.profiler, "_is_profiler_enabled", False))


def _captured(session: Session, loop: Loop, steps: int, *, stacks: bool) -> Cost:
    """Measures steps inside a capture, then trains until the capture has ended."""
    refusal = session.capture(steps=steps + 4, with_stack=stacks)
    if refusal:
        raise RuntimeError(refusal)
    deadline = time.monotonic() + START_S
    while not _profiling():
        _check(deadline, f"the capture has not begun after {START_S:g} s")
        loop.run(1)
    loop.run(2)  # the warm-up of the profiler is in here
    found = _cost(loop, steps)
    while _profiling():
        loop.run(1)
    return found


def _await_record(session: Session, loop: Loop, captures: int) -> None:
    """Trains until all captures are analysed: the thread that writes them must not run in a measured block."""
    deadline = time.monotonic() + WRITER_S
    while _finished(session) < captures or _writing():
        _check(deadline, f"the capture is not analysed after {WRITER_S:g} s")
        loop.run(1)


def _check(deadline: float, reason: str) -> None:
    """Raises if ``deadline`` has passed.

    Raises:
        TimeoutError: it has, for ``reason``.
    """
    if time.monotonic() > deadline:
        raise TimeoutError(reason)


def _finished(session: Session) -> int:
    folder = session.run_directory
    return 0 if folder is None else len(list((folder / "captures").glob("*.record.json")))


def _writing() -> bool:
    return any(thread.name == "otel-train-capture" for thread in threading.enumerate())
