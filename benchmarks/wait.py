"""How long the training thread waits for the GIL while the service thread holds it."""

from __future__ import annotations

import resource
import time
from typing import TYPE_CHECKING

import numpy as np
import torch

from benchmarks.edges import write_steps
from benchmarks.loop import Loop
from benchmarks.plan import say
from benchmarks.receiver import receiving
from benchmarks.row import Row
from benchmarks.variants import Instrumented

if TYPE_CHECKING:
    from collections.abc import Callable

    from benchmarks.plan import Plan

WHAT = (
    "The training thread reads the clock as fast as it can while the agent, a process of its own, reads a backlog of 10,000"
    " steps, again and again, and exports every second. In the program only the service thread takes the GIL from it, to"
    " report to the agent. A gap counts when the training thread gave up the processor by itself, which here"
    " only waiting for the GIL makes it do. A spinning thread never releases the GIL; a working thread does so between"
    " small matrix products, as training does. A report costs some waits, one for each of its parts. In the first second"
    " after the agent has opened the run directory there are one or two reports: their waits are rows of their own."
    " Afterwards a loop like this one makes one in half a minute; one that logs values, or has a device, one in half a"
    " second."
)
BUDGET_MS = 0.1
BACKLOG_STEPS = 10_000
SPIN_S = 0.5
"""Measurement after each backlog. A thread that never releases the GIL is interrupted only every 5 ms, so others need that long."""

_LEAST_GAP_NS = {"spinning": 20_000, "working": 60_000}
"""Shorter gaps between two reads of the clock are the loop's own work."""


def run(plan: Plan) -> list[Row]:
    """Measures both kinds of thread, instrumented and bare."""
    rows = []
    torch.set_num_threads(1)
    for kind, work in (("spinning", None), ("working", _product())):
        backlogs = plan.times(15, 2)
        say(f"  {backlogs} backlogs, thread {kind}")
        bare = _bare(kind, work, plan.times(5, 1))
        with receiving():
            first, waits = _instrumented(plan, kind, work, backlogs)
        rows += _rows(kind, waits, bare, first)
    return rows


def _product() -> Callable[[], object]:
    left, right, out = (torch.randn(64, 64) for _ in range(3))
    return lambda: torch.mm(left, right, out=out)


def _bare(kind: str, work: Callable[[], object] | None, backlogs: int) -> list[int]:
    return [gap for _ in range(backlogs) for gap in _gaps(kind, work)]


def _instrumented(
    plan: Plan, kind: str, work: Callable[[], object] | None, backlogs: int
) -> tuple[list[int], list[int]]:
    """Returns the waits in the first second, and those after it, in ns."""
    loop = Loop()
    instrumented = Instrumented(plan.folder, export_interval_s=1.0)
    with instrumented(loop) as session:
        recorder = session._recording.recorder  # noqa: SLF001 - a backlog of whole steps cannot be made from outside
        loop.run(200)  # until the model's forward is observed
        assert session.run_directory is not None
        write_steps(recorder, 100)
        first = [gap for _ in range(2) for gap in _gaps(kind, work)]
        found = []
        for _ in range(backlogs):
            write_steps(recorder, BACKLOG_STEPS)
            found += _gaps(kind, work)
        return first, found


def _gaps(kind: str, work: Callable[[], object] | None) -> list[int]:
    """Returns the gaps in ns between two reads of the clock in which this thread made a voluntary context switch."""
    now, least = time.perf_counter_ns, _LEAST_GAP_NS[kind]
    found = []
    seen = _voluntary()
    last = now()
    until = last + int(SPIN_S * 1e9)
    while last < until:
        if work is not None:
            work()
        instant = now()
        if instant - last > least:
            switches = _voluntary()
            if switches > seen:
                found.append(instant - last)
            seen, instant = switches, now()
        last = instant
    return found


def _voluntary() -> int:
    return resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw


def _rows(kind: str, waits: list[int], bare: list[int], first: list[int]) -> list[Row]:
    name, what = f"wait.{kind}", f"wait for the service thread, training thread {kind}"
    p50, p99, p999 = (float(q) / 1e6 for q in np.percentile(waits or [0], (50, 99, 99.9)))
    detail = {"waits": float(len(waits)), "p50_ms": p50, "p99_ms": p99, "bare_waits": float(len(bare))}
    return [
        Row(name=name, what=f"{what}, p99.9", unit="ms", values=(p999,), budget=BUDGET_MS, detail=detail),
        Row(name=f"{name}.p50", what=f"{what}, p50", unit="ms", values=(p50,)),
        Row(name=f"{name}.p99", what=f"{what}, p99", unit="ms", values=(p99,)),
        Row(
            name=f"{name}.max",
            what=f"{what}, longest of {len(waits)}",
            unit="ms",
            values=(max(waits, default=0) / 1e6,),
        ),
        Row(
            name=f"{name}.first",
            what=f"{what}, longest of {len(first)} in the first second",
            unit="ms",
            values=(max(first, default=0) / 1e6,),
        ),
        Row(
            name=f"{name}.bare",
            what=f"longest such gap of the same thread without a session, of {len(bare)}",
            unit="ms",
            values=(max(bare, default=0) / 1e6,),
        ),
    ]
