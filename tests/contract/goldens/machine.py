"""A machine on which nothing is left to chance: one clock that moves only when advanced, one place that sets it.

Import this module, and call ``freeze``, before ``otel_train`` is imported: it takes its clocks from ``time``.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

START_NS = 1_000 * 10**9
"""First reading of the monotonic clock, in every loop."""

UNIX_NS = 1_800_000_000 * 10**9
"""Unix time at ``START_NS``: 2027-01-15 08:00 UTC."""

PROCESSORS = frozenset(range(4))

LEFT_OUT = (
    "OTEL_", "RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "NODE_", "MASTER_", "JOB_COMPLETION_", "KUBERNETES_", "TORCHELASTIC_",
    "SLURM_", "MPI_", "MV2_", "OMPI_", "PMI_", "WANDB_", "MLFLOW_", "RAY_", "FORCE_COLOR",
)  # fmt: skip
"""Variables that begin like this would say something about the run, or how it is shown."""

ENVIRONMENT = {
    "COLUMNS": "80",
    "NO_COLOR": "1",
    "CUDA_VISIBLE_DEVICES": "",
    "OTEL_RESOURCE_ATTRIBUTES": "host.name=golden",
}


class Clock:
    """Time, and what the program says it spent it on.

    Attributes:
        now_ns: nanoseconds on the monotonic clock.
        spent_ns: nanoseconds by what they were spent on.
    """

    def __init__(self) -> None:
        self.restart(0, lambda: None)

    def restart(self, after: int, then: Callable[[], object]) -> None:
        """Begin a loop: back to the first reading, with nothing spent.

        Args:
            after: how often time is spent before ``then`` is called, once; 0 for never.
            then: called inside whatever spends that time.
        """
        self.now_ns = START_NS
        self.spent_ns: dict[str, int] = {}
        self._left = after
        self._then = then

    def spend(self, ms: float, on: str) -> None:
        """Let milliseconds pass."""
        passed_ns = round(ms * 10**6)
        self.now_ns += passed_ns
        self.spent_ns[on] = self.spent_ns.get(on, 0) + passed_ns
        self._left -= 1
        if self._left == 0:
            self._then()


clock = Clock()


def freeze() -> None:
    """Make every clock of ``time`` read ``clock``, and let the environment say nothing.

    Waiting (``sleep``, locks, sockets) is left as it is: background threads go on. A deadline never passes.
    """
    for name in list(os.environ):
        if name.startswith(LEFT_OUT):
            del os.environ[name]
    os.environ.update(ENVIRONMENT)
    os.sched_getaffinity = lambda _: set(PROCESSORS)
    os.cpu_count = lambda: len(PROCESSORS)
    readings: dict[str, Any] = {
        "perf_counter": lambda: clock.now_ns / 10**9,
        "perf_counter_ns": lambda: clock.now_ns,
        "monotonic": lambda: clock.now_ns / 10**9,
        "monotonic_ns": lambda: clock.now_ns,
        "time": lambda: (clock.now_ns - START_NS + UNIX_NS) / 10**9,
        "time_ns": lambda: clock.now_ns - START_NS + UNIX_NS,
        "thread_time": lambda: 0.0,
        "thread_time_ns": lambda: 0,
        "process_time": lambda: 0.0,
        "process_time_ns": lambda: 0,
    }
    for name, reading in readings.items():
        setattr(time, name, reading)
