"""Run directories as a training leaves them, made without one."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from otel_train.datamodel import Anchor
from otel_train.recording.events import Op, SourceKind, code
from otel_train.recording.recorder import Recorder
from otel_train.testing import FakeClock
from tests.support.flight import PrivateMemory

MS = 1_000_000
STAGES_MS = {"data": 1, "forward": 2, "backward": 4, "optimizer": 1}
"""What the stages of every step take; 2 ms of a step are in none."""

STEP_S = 0.010
TOKEN = "opens-every-door"
FORWARD_FLAGS = 3  # gradients on, training


def leave_run(
    runs: Path, epochs: Sequence[int], *, loader: str = "code", edges: int = 1 << 12, marked_from: int = -1
) -> Path:
    """The run directory of a process that was killed: ``run.json`` and a flight file.

    Args:
        runs: folder of all runs.
        epochs: steps of each; after it the loader has come to its end.
        loader: its name.
        edges: that the ring holds.
        marked_from: number of the first epoch, where the program marks them; -1 where it does not.
    """
    run = runs / "r1"
    folder = run / "rank0"
    folder.mkdir(parents=True)
    about = {
        "run_id": "r1",
        "run_name": "nightly",
        "attempt": 0,
        "settings": {"profiler_token": TOKEN, "flight_recorder": True},
    }
    (run / "run.json").write_text(json.dumps(about), encoding="utf-8")
    clock = FakeClock(1000)
    memory = PrivateMemory(edges, Anchor(10**18, clock()), folder / "flight.bin")
    recorder = Recorder(memory, clock=clock)
    recorder.set_identity({"run_id": "r1", "rank": 0, "attempt": 0})
    sources = {
        "data": recorder.source(SourceKind.DATA, loader),
        "forward": recorder.source(SourceKind.FORWARD, "net"),
        "backward": recorder.source(SourceKind.BACKWARD, "backward"),
        "optimizer": recorder.source(SourceKind.OPTIMIZER, "SGD"),
    }
    epoch = recorder.source(SourceKind.MARK, "epoch")
    for number, steps in enumerate(epochs, marked_from):
        if marked_from >= 0:
            recorder.edge(code(Op.EPOCH, epoch, payload=number))
        for _ in range(steps):
            for name, source in sources.items():
                recorder.edge(code(Op.BEGIN, source, FORWARD_FLAGS if name == "forward" else 0))
                clock.tick(STAGES_MS[name] * MS)
                recorder.edge(code(Op.END, source))
            clock.tick(2 * MS)
        recorder.edge(code(Op.BEGIN, sources["data"]))
        recorder.edge(code(Op.STOP, sources["data"]))
    memory.poll(10**18 + clock())
    recorder.release_memory()
    memory.close()
    return run


def say_summary(run: Path, **values: Any) -> None:
    """Leave a ``summary.json`` of rank 0, of a run that ended."""
    stages = [
        {"stage": name, "phase": "train", "loader": "code", "model": "", "count": 5, "failed": 0,
         "inclusive_seconds": 5 * ms / 1e3, "self_seconds": 5 * ms / 1e3,
         **dict.fromkeys(("min", "avg", "p50", "p95", "p99", "max"), ms / 1e3)}
        for name, ms in STAGES_MS.items()
    ]  # fmt: skip
    summary = {
        "schema": "otel_train.summary/2", "run_id": "r1", "run_name": "nightly", "attempt": 0, "rank": 0,
        "state": "finished", "wall_seconds": 0.05, "steps": {"train": 5}, "stages": stages,
        "activities": {"productive": 0.045, "data_wait": 0.005}, "findings": [],
        "telemetry": {
            "overhead_seconds": 0.0, "overhead_us_per_step": 0.0, "agent_cpu_seconds": 0.0, "records": 40,
            "records_lost": 0, "drops": {}, "faults": {},
        },
        "world_size": 1, "pid": os.getpid(), "host": "here", "started_unix_s": 1e9, "step_source": "update", "updates": 5,
        "batches": {"code": 5}, **{key: {} for key in ("partial_steps", "samples", "tokens")}, "instrumentation_gaps": [],
        "step_durations": [{"phase": "train", "loader": "code", "count": 5, "total_seconds": 0.05,
                            **dict.fromkeys(("min", "avg", "p50", "p95", "p99", "max"), 0.01)}],
        "rates": [{"phase": "train", "loader": "code", "seconds": 0.05, "batches": 5, "samples": None, "tokens": None,
                   "batches_per_second": 100.0, "samples_per_second": None, "tokens_per_second": None}],
        "throughput": {"wall_seconds": 0.05, "steps_per_second": 100.0, "batches_per_second": 100.0,
                       "samples_per_second": None},
        **dict.fromkeys(("skipped_updates", "metrics_url", "run_dir")),
        "checkpoints": {"count": 0, "seconds": 0.0},
    } | values  # fmt: skip
    (run / "rank0" / "summary.json").write_text(json.dumps(summary), encoding="utf-8")
