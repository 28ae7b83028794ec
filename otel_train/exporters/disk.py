"""Writes to the disk of a run, on a thread of their own: a disk that hangs holds up nothing else."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

from otel_train.exporters.background_queue import BackgroundQueue

if TYPE_CHECKING:
    from collections.abc import Callable

    from otel_train.datamodel import ExportBatch
    from otel_train.exporters import Exporter
    from otel_train.safety import Guard

PATIENCE_S: Final = 0.25
"""How long somebody waits for what he has written. A disk that takes longer is not waited for until it is done again."""

_MOST = 512
"""Writes that may wait for a disk that hangs; what comes then is dropped and counted."""


class Disk:
    """Does what touches the disk, in order.

    While the disk answers, ``do`` returns when it is done: what somebody reads next is there.

    Attributes:
        hangs: something has taken longer than ``PATIENCE_S``, and is not done yet.
    """

    def __init__(self) -> None:
        self.hangs = False
        self._line: BackgroundQueue[Callable[[], object]] = BackgroundQueue(
            "run directory", lambda write: write(), lambda: None, most=_MOST
        )

    @property
    def dropped(self) -> int:
        """Writes that found no room."""
        return self._line.dropped

    def do(self, guard: Guard, write: Callable[[], object]) -> None:
        """Have something written; ``guard`` contains its faults."""

        def guarded() -> None:
            if not guard.closed:
                with guard:
                    write()

        self._line.hand(guarded)
        self.hangs = not self._line.emptied(0.0 if self.hangs else PATIENCE_S)

    def refresh(self, guard: Guard, write: Callable[[], object]) -> None:
        """Have something written that the next one replaces: it is left out while the disk hangs."""
        if not self.hangs or self.written(0.0):
            self.do(guard, write)

    def written(self, timeout_s: float) -> bool:
        """Wait for everything, in at most ``timeout_s`` seconds. Whether it is done."""
        self.hangs = not self._line.emptied(timeout_s)
        return not self.hangs

    def close(self, timeout_s: float) -> None:
        """Nothing comes any more: end the thread, which may take ``timeout_s`` seconds."""
        self._line.end()
        self._line.join(timeout_s)


class OnDisk:
    """An exporter that writes to the disk.

    Args:
        exporter: writes there.
        disk: on whose thread.
        guard: contains its faults.
    """

    def __init__(self, exporter: Exporter, disk: Disk, guard: Guard) -> None:
        self._exporter = exporter
        self._disk = disk
        self._guard = guard

    def export(self, batch: ExportBatch) -> None:
        """Have a batch written."""
        self._disk.do(self._guard, lambda: self._exporter.export(batch))

    def close(self, timeout_s: float) -> None:
        """Close the exporter once everything is written. On a disk that hangs it stays open."""
        until_s = time.monotonic() + timeout_s
        if self._disk.written(timeout_s):
            self._exporter.close(max(0.05, until_s - time.monotonic()))
