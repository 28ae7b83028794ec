"""Whether a process works, or waits for something: a busy machine is told from a disk that hangs."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Final

LEAST_SHARE: Final = 0.2
"""Of the time between two looks: what a process that only waits for something stays below."""


class Work:
    """The work of a process, on a processor or waiting for one, as Linux tells it: /proc/<pid>/task/<tid>/schedstat.

    Args:
        pid: of the process. The thread that asks is left out.
    """

    def __init__(self, pid: int) -> None:
        self._tasks = Path(f"/proc/{pid}/task")
        self._before = time.monotonic_ns(), self._spent_ns()

    def goes_on(self) -> bool:
        """Whether it has worked since the last look. False where the system does not tell."""
        (then_ns, before_ns), self._before = self._before, (time.monotonic_ns(), self._spent_ns())
        now_ns, spent_ns = self._before
        return spent_ns - before_ns > LEAST_SHARE * (now_ns - then_ns)

    def _spent_ns(self) -> int:
        spent_ns = 0
        mine = str(threading.get_native_id())
        try:
            for task in self._tasks.iterdir():
                if task.name != mine:
                    running, waiting, _ = (task / "schedstat").read_text(encoding="ascii").split()
                    spent_ns += int(running) + int(waiting)
        except (OSError, ValueError):  # the process, or one of its threads, is gone
            return spent_ns
        return spent_ns
