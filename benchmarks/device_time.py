"""What an event beside an edge costs, and what reading it back does; ``python -m benchmarks.device_time``."""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.machine import this_machine
from benchmarks.row import Row
from benchmarks.table import plain_table
from otel_train.datamodel import Anchor, system_clock
from otel_train.instrumentation.cuda_events import DeviceTimer
from otel_train.instrumentation.manager import NVIDIA_FILES, cuda_driver
from otel_train.recording.events import Op, SourceKind, code
from otel_train.recording.recorder import Recorder
from otel_train.recording.shared_memory import FlightMemory

if TYPE_CHECKING:
    from collections.abc import Callable

STAGES = (SourceKind.DATA, SourceKind.FORWARD, SourceKind.BACKWARD, SourceKind.OPTIMIZER)
STEPS, ROUNDS = 100, 21
BUDGET_US = 30.0
"""Per step of four stages. The budget is in docs/reference/overhead.md."""


def run() -> list[Row]:
    """Measures four stages per step without and with CUDA events, on an idle and a busy device, then each driver call."""
    driver = cuda_driver(os.environ, NVIDIA_FILES)
    if driver is None or not torch.cuda.is_available():
        return [Row(name="device", what="device time", unit="µs", reason="no CUDA device")]
    matrix = torch.randn(4096, 4096, device="cuda")
    bare, _ = _steps("off", driver, lambda: None)
    idle, read = _steps("events", driver, lambda: None)
    busy, _ = _steps("events", driver, lambda: torch.mm(matrix, matrix))
    rows = [
        Row(name="device.bare", what="four stages, edges alone", unit="µs", values=tuple(bare)),
        Row(name="device.idle", what="four stages with events, idle device", unit="µs", values=tuple(idle), budget=BUDGET_US),
        Row(name="device.busy", what="four stages with events, busy device", unit="µs", values=tuple(busy), budget=BUDGET_US),
        Row(name="device.read", what="export loop, reading back one edge", unit="µs", values=tuple(read)),
    ]  # fmt: skip
    return rows + _parts(driver)


def _steps(mode: str, driver: Any, work: Callable[[], Any]) -> tuple[list[float], list[float]]:
    """Returns microseconds per step and microseconds per edge read back, one of each per round."""
    recorder = Recorder(FlightMemory(1 << 16, Anchor.now()), clock=system_clock)
    timer = DeviceTimer(recorder, driver, mode=mode, clock=system_clock)
    timer.poll()
    timer.steps.one_in = 1  # the cost of a step that is timed
    codes = [code(op, recorder.source(kind, kind.name)) for kind in STAGES for op in (Op.BEGIN, Op.END)]
    edge, step_us, read_us = timer.edge, [], []
    for _ in range(ROUNDS):
        spent_ns = 0
        for _ in range(STEPS):
            work()
            begun_ns = time.perf_counter_ns()
            for word in codes:
                edge(word)
            spent_ns += time.perf_counter_ns() - begun_ns
        step_us.append(spent_ns / STEPS / 1e3)
        torch.cuda.synchronize()
        begun_ns = time.perf_counter_ns()
        timer.read()
        read_us.append((time.perf_counter_ns() - begun_ns) / STEPS / len(codes) / 1e3)
    return step_us, read_us


def _parts(driver: Any) -> list[Row]:
    """Returns the time of each part of the driver's work for one step, in a tight loop."""
    driver.devices()
    event, other, record = driver.new_event(0), driver.new_event(0), driver.recorder(0)
    record(event)
    record(other)
    torch.cuda.synchronize()
    parts: dict[str, Callable[[], Any]] = {
        "record an event": lambda: record(event),
        "ask whether a graph is captured": driver.capturing,
        "make an event": lambda: driver.new_event(0),
        "ask whether an event was reached": lambda: driver.query(event),
        "time between two events": lambda: driver.elapsed_ns(event, other),
        "memory of all devices": driver.memory,
        "devices in use": driver.devices,
    }
    rows = []
    for what, call in parts.items():
        values = []
        for _ in range(ROUNDS):
            record(event)
            record(other)
            torch.cuda.synchronize()
            begun_ns = time.perf_counter_ns()
            for _ in range(STEPS):
                call()
            values.append((time.perf_counter_ns() - begun_ns) / STEPS / 1e3)
        rows.append(Row(name=f"device.{what.replace(' ', '_')}", what=what, unit="µs", values=tuple(values)))
    return rows


def main() -> None:
    """Measures and prints the rows; ``--json`` stores them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="write the results here")
    options = parser.parse_args()
    machine = this_machine(device="cuda" if torch.cuda.is_available() else "cpu")
    rows = run()
    print(machine.sentence())
    print(plain_table(rows))
    if options.json is not None:
        stored = {"machine": machine.as_json(), "rows": [row.as_json() for row in rows]}
        options.json.write_text(json.dumps(stored, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
