"""Measurements of whole processes: time to exit, memory, agents of a node."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import TYPE_CHECKING

from benchmarks.child import STEPS_PER_S
from benchmarks.plan import say
from benchmarks.receiver import endpoint, receiving, refusing_url
from benchmarks.row import Row
from benchmarks.spread import differences

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from benchmarks.plan import Plan

EXIT = (
    "A training run of three seconds in a process of its own, bare, with a collector that refuses and with one that accepts and"
    " never answers: seconds from its last step to the end of the process, minus the bare run's."
)
MEMORY = (
    "120,000 steps (ten minutes at 5 ms) as fast as they go, with as many exports as ten minutes have: resident memory"
    " over the second half, minus that of a bare process; and its trend over that half."
)
NODE = (
    "Eight ranks of one run train on this machine, 100 steps per second each, and export to one Collector: proportional memory"
    " and processor time of the agents that serve them, over the last 25 of 40 seconds, as each rank saw it."
)
RANKS = 8
BUDGET_NODE_MB = 150.0
BUDGET_NODE_PERCENT = 2.0
BUDGET_EXIT_S = 0.1
BUDGET_MEMORY_MB = 25.0
BUDGET_GROWTH_MB = 1.0
"""Growth that counts as flat. One leaked object of 32 bytes per step would be 1.9 MB in the 60,000 steps that are measured."""

EXPORTS_IN_TEN_MINUTES = 40


def run_exit(plan: Plan) -> list[Row]:
    """Measures exit delays, in rounds of three processes."""
    delays: dict[str, list[float]] = {"bare": [], "refuses": [], "does not answer": []}
    for _ in range(plan.times(3, 1)):
        for name, seen in delays.items():
            say(f"  a run, {name}")
            collector: AbstractContextManager[object] = nullcontext()
            if name != "bare":
                collector = endpoint(refusing_url()) if name == "refuses" else receiving("swallow")
            with collector:
                seen.append(_exit_s(plan.folder, instrumented=name != "bare"))
    return [
        Row(
            name=f"exit.{key}",
            what=f"exit, the collector {name}",
            unit="s",
            values=tuple(differences(delays[name], delays["bare"])),
            budget=BUDGET_EXIT_S,
        )
        for key, name in (("refuses", "refuses"), ("swallows", "does not answer"))
    ]


def _exit_s(folder: Path, *, instrumented: bool) -> float:
    with tempfile.TemporaryDirectory(dir=folder) as runs:
        [numbers] = numbers_of([_start("end", *(("--folder", runs) if instrumented else ()))])
        # On Linux perf_counter() is CLOCK_MONOTONIC, which all processes of a host share.
        return (time.perf_counter_ns() - numbers["ended_ns"]) / 1e9


def run_memory(plan: Plan) -> list[Row]:
    """Measures a bare and an instrumented process side by side."""
    steps = plan.times(120_000, 10_000)
    step_s = 0.3e-3  # rough step time of the child: it only spaces the exports
    every_s = max(0.1, steps * step_s / EXPORTS_IN_TEN_MINUTES)
    say(f"  {steps} steps, bare and instrumented side by side")
    with tempfile.TemporaryDirectory(dir=plan.folder) as runs, receiving():
        sizes = ("--steps", str(steps), "--export-interval-s", str(every_s))
        started = [_start("remember", *sizes), _start("remember", "--folder", runs, *sizes)]
        bare, ours = numbers_of(started)
    return [
        Row(
            name="memory.resident",
            what="memory of the library after ten minutes' worth of steps",
            unit="MB",
            values=(_megabytes(ours["resident_mib"] - bare["resident_mib"]),),
            budget=BUDGET_MEMORY_MB,
            detail={"bare_mib": bare["resident_mib"], "instrumented_mib": ours["resident_mib"]},
        ),
        Row(
            name="memory.growth",
            what="its growth over the second half of them",
            unit="MB",
            values=(_megabytes(ours["growth_mib"]),),
            budget=BUDGET_GROWTH_MB,
            detail={"bare_mib": bare["growth_mib"]},
        ),
    ]


def run_node(plan: Plan) -> list[Row]:
    """Measures the agents of eight ranks; of two in a quick run."""
    ranks = plan.times(RANKS, 2)
    say(f"  {ranks} ranks")
    with tempfile.TemporaryDirectory(dir=plan.folder) as runs, receiving():
        found = numbers_of([_rank(rank, ranks, runs) for rank in range(ranks)])
    agents = {numbers["agent"]: numbers["mib"] for numbers in found}
    return [
        Row(
            name="agent.node",
            what=f"processor time of the agents of {ranks} ranks x {STEPS_PER_S} steps/s",
            unit="% of a core",
            values=tuple(numbers["percent"] * len(agents) for numbers in found),
            budget=BUDGET_NODE_PERCENT,
        ),
        Row(
            name="memory.node",
            what=f"memory of the agents of {ranks} ranks",
            unit="MB",
            values=(_megabytes(sum(agents.values())),),
            budget=BUDGET_NODE_MB,
            detail={"agents": len(agents)},
        ),
    ]


def _rank(rank: int, ranks: int, folder: str) -> subprocess.Popen[str]:
    where = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    environ = {**os.environ, **{name: str(value) for name, value in where.items()}}
    return _start("node", "--folder", folder, env=environ)


def _megabytes(mib: float) -> float:
    return mib * (1 << 20) / 1e6


def _start(*arguments: str, env: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "benchmarks.child", *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env)


def numbers_of(children: Sequence[subprocess.Popen[str]]) -> list[dict[str, float]]:
    """Returns what each child printed, once all have ended; if one fails, the others are killed.

    Raises:
        RuntimeError: a child failed.
    """
    with ExitStack() as ends:
        for process in children:
            ends.enter_context(process)
            ends.callback(process.kill)  # has no effect on a process that has ended
        return [_numbers(process) for process in children]


def _numbers(process: subprocess.Popen[str]) -> dict[str, float]:
    output, _ = process.communicate()
    if process.returncode:
        raise RuntimeError(f"a child ended with {process.returncode}: its error is above")
    numbers: dict[str, float] = json.loads(output)
    return numbers
