"""What an instrumented ``Tensor.to`` costs; ``python -m benchmarks.transfers``. Needs no device."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.machine import this_machine
from benchmarks.row import Row
from benchmarks.table import plain_table
from otel_train.datamodel import Anchor, system_clock
from otel_train.instrumentation.device_copy import TransferProbe
from otel_train.recording.recorder import Recorder
from otel_train.recording.shared_memory import FlightMemory

if TYPE_CHECKING:
    from collections.abc import Callable

AWAY = "meta"
"""A kind of device that torch moves tensors to on any machine, so the copy itself costs nothing."""

CALLS, ROUNDS = 200, 101


class _AwayDriver:
    """The part of an accelerator driver that ``TransferProbe`` uses."""

    device_type = AWAY

    def devices(self) -> tuple[int, ...]:
        return (0,)

    def current(self) -> int:
        return 0


def run() -> list[Row]:
    """Returns the nanoseconds that instrumentation adds to one call: differences of two consecutive runs."""
    here, away = torch.ones(8), torch.ones(8, device=AWAY)
    calls: dict[str, tuple[str, Callable[[], Any]]] = {
        "transfer": ("a batch to the device", lambda: here.to(AWAY, non_blocking=True)),
        "cast_there": ("a cast on the device", lambda: away.to(torch.float32)),
        "cast_here": ("a cast on the host", lambda: here.to(torch.float32)),
    }
    rows = []
    for name, (what, call) in calls.items():
        added = [_instrumented_ns(call) - _spent_ns(call) for _ in range(ROUNDS)]
        rows.append(Row(name=f"transfer.{name}", what=f"added to {what}", unit="ns", values=tuple(added)))
    return rows


def _instrumented_ns(call: Callable[[], Any]) -> float:
    recorder = Recorder(FlightMemory(1 << 12, Anchor.now()), clock=system_clock)
    driver: Any = _AwayDriver()
    probe = TransferProbe(recorder, driver)
    probe.poll()
    try:
        return _spent_ns(call)
    finally:
        probe.remove()


def _spent_ns(call: Callable[[], Any]) -> float:
    call()
    begun_ns = time.perf_counter_ns()
    for _ in range(CALLS):
        call()
    return (time.perf_counter_ns() - begun_ns) / CALLS


if __name__ == "__main__":
    print(this_machine(device="cpu").sentence())
    print(plain_table(run()))
