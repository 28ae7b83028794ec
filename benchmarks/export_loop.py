"""How long the export loop works on a large backlog."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from benchmarks.edges import STAGES_PER_STEP, write_steps
from benchmarks.row import Row
from otel_train.agent.service import ExportLoop
from otel_train.aggregation.run_state import RunState
from otel_train.aggregation.span_sampler import SamplingRules
from otel_train.aggregation.spans import Ids, Tracer
from otel_train.config import Config
from otel_train.datamodel import Anchor
from otel_train.recording.recorder import Recorder
from otel_train.recording.shared_memory import FlightMemory

if TYPE_CHECKING:
    from benchmarks.plan import Plan
    from otel_train.datamodel import Snapshot

WHAT = (
    f"10,000 synthetic steps of {STAGES_PER_STEP} stages lie in a ring; one turn of the real export loop reads and accounts for them."
    " The first turn of a process is not counted."
)
STEPS = 10_000
EDGE_NS = 40_000
"""Synthetic time between two edges: steps of 0.4 ms."""
BUDGET_MS = 20.0


class _Ticking:
    """A clock that moves by ``EDGE_NS`` whenever it is read."""

    def __init__(self, start_ns: int) -> None:
        self._now_ns = start_ns

    def __call__(self) -> int:
        self._now_ns += EDGE_NS
        return self._now_ns


def run(plan: Plan) -> list[Row]:
    """Turn after turn, each over a full backlog."""
    recorder, export_loop = _export_loop()
    wall_ms, cpu_ms = [], []
    for _ in range(1 + plan.times(20, 6)):
        write_steps(recorder, STEPS)
        begun = time.perf_counter_ns(), time.thread_time_ns()
        export_loop.run_once()
        wall_ms.append((time.perf_counter_ns() - begun[0]) / 1e6)
        cpu_ms.append((time.thread_time_ns() - begun[1]) / 1e6)
    return [
        Row(
            name="export_loop.turn",
            what="export loop: one turn over 10,000 steps of five stages",
            unit="ms",
            values=tuple(wall_ms[1:]),
            budget=BUDGET_MS,
        ),
        Row(name="export_loop.cpu", what="processor time of that turn", unit="ms", values=tuple(cpu_ms[1:])),
    ]


def _export_loop() -> tuple[Recorder, ExportLoop]:
    """A recorder on synthetic time, and the export loop that reads it, wired as a session does."""
    anchor = Anchor.now()
    ticking = _Ticking(anchor.clock_ns)
    recorder = Recorder(FlightMemory(Config().flight_recorder_events, anchor), clock=ticking)
    defaults = Config()
    rules = SamplingRules(
        warmup_steps=defaults.tuned().trace_warmup_steps,
        every_steps=defaults.tuned().trace_every_steps,
        slow_factor=defaults.trace_slow_factor,
        per_s=defaults.trace_rate_per_s,
        burst=defaults.tuned().trace_burst,
    )
    run_account = RunState(
        anchor.clock_ns,
        anchor=anchor,
        tracer=Tracer(Ids("bench", 0, 0), anchor),
        rules=rules,
        stall_after_s=defaults.stall_after_s,
    )
    export_loop = ExportLoop(recorder, run_account, snapshot=_nothing, clock=ticking, every_s=1.0)
    return recorder, export_loop


def _nothing() -> Snapshot:
    raise AssertionError("no exporter is attached, so no snapshot is needed")
