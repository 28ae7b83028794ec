"""Training runs in processes of their own: how they end, what memory they hold."""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

import psutil

from benchmarks.loop import Loop
from benchmarks.spread import slope

EXIT_STEPS = 300
EXIT_AFTER_S = 3.0
"""Training before the exit: a shorter run waits at its end until the agent has started (half a second of another core)."""
NODE_S = 40.0
"""Training of each rank: two exports, after all other ranks have imported torch."""

NODE_FROM_S = 15.0
"""Time after which every rank of the node trains; the measurement begins here."""

STEPS_PER_S = 100
"""Rate of every rank of the node."""

SAMPLES = 200
"""Samples of resident memory, spread evenly over the steps."""

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_MIB = 1 << 20


def _instrument(loop: Loop, folder: str, **settings: Any) -> None:
    import otel_train

    otel_train.instrument(
        loop.model,
        {"bench": loop.loader},
        run_dir=folder,
        otlp="on",
        prometheus_address="127.0.0.1:0",
        console=False,
        **settings,
    )


def end(folder: str) -> dict[str, float]:
    """Trains for ``EXIT_AFTER_S`` seconds; returns the time of the last step, from which the exit is measured."""
    loop = Loop()
    if folder:
        _instrument(loop, folder)
    until_s = time.monotonic() + EXIT_AFTER_S
    while time.monotonic() < until_s:
        loop.run(EXIT_STEPS)
    return {"ended_ns": time.perf_counter_ns()}


def remember(folder: str, steps: int, export_interval_s: float) -> dict[str, float]:
    """Trains ``steps`` steps as fast as they go; returns resident memory over the second half, and its growth, MiB."""
    loop = Loop()
    if folder:
        _instrument(loop, folder, export_interval_s=export_interval_s)
    resident = []
    for _ in range(SAMPLES):
        loop.run(max(1, steps // SAMPLES))
        resident.append(_resident_mib())
    later = sorted(resident[SAMPLES // 2 :])
    return {
        "resident_mib": later[len(later) // 2],
        "growth_mib": slope(resident[SAMPLES // 2 :]) * (SAMPLES // 2),
        "peak_mib": max(resident),
    }


def share_an_agent(folder: str) -> dict[str, float]:
    """Trains as one of several ranks of a node, and measures the agent that they share.

    Returns:
        Its process id, its proportional set size (PSS) in MiB, and its share of a core in %, once all ranks train.

    Raises:
        RuntimeError: the kernel does not report its PSS.
    """
    import otel_train

    loop = Loop()
    session = otel_train.instrument(
        loop.model, {"bench": loop.loader}, run_dir=folder, run_id="node", otlp="on", prometheus_address="127.0.0.1:0",
        console=False,
    )  # fmt: skip
    _train_evenly(loop, NODE_FROM_S, time.monotonic())
    agent = session._service.connection.pid  # noqa: SLF001 - no public member has the process
    process = psutil.Process(agent)
    looked_s, spent_s = time.monotonic(), _processor_s(process)
    _train_evenly(loop, NODE_S - NODE_FROM_S, looked_s)
    # Over the nominal time of the steps: ranks that fall behind for lack of processors must not make the agent look cheap.
    percent = 100 * (_processor_s(process) - spent_s) / (NODE_S - NODE_FROM_S)
    for line in Path(f"/proc/{agent}/smaps_rollup").read_text(encoding="ascii").splitlines():
        if line.startswith("Pss:"):
            return {"agent": agent, "percent": percent, "mib": int(line.split()[1]) / 1024}
    raise RuntimeError(f"/proc/{agent}/smaps_rollup has no Pss line")


def _train_evenly(loop: Loop, seconds: float, begun_s: float) -> None:
    for step, _ in enumerate(loop.steps(int(seconds * STEPS_PER_S)), 1):
        time.sleep(max(0.0, begun_s + step / STEPS_PER_S - time.monotonic()))


def _processor_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def _resident_mib() -> float:
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * _PAGE_BYTES / _MIB


def main() -> None:
    """Runs one measurement and prints its numbers as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("end", "remember", "node"))
    parser.add_argument("--folder", default="", help="watch, with the run directory in here; else bare")
    parser.add_argument("--steps", type=int, default=0)
    parser.add_argument("--export-interval-s", type=float, default=15.0)
    options = parser.parse_args()
    if options.what == "end":
        numbers = end(options.folder)
    elif options.what == "node":
        numbers = share_an_agent(options.folder)
    else:
        numbers = remember(options.folder, options.steps, options.export_interval_s)
    print(json.dumps(numbers), flush=True)


if __name__ == "__main__":
    main()
