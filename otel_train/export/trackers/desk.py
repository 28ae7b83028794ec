"""A thread between the pump and one tracker, so that a tracker that hangs holds up nobody."""

from __future__ import annotations

import logging
import queue
import threading
from typing import TYPE_CHECKING, Any

from otel_train.guard import Guard

if TYPE_CHECKING:
    from otel_train.aggregate.flat import FlatRow
    from otel_train.export.trackers import Outlet

MOST_WAITING = 256
"""Rows that wait for a tracker at most; a row has some dozens of figures."""

_log = logging.getLogger("otel_train")


class Desk:
    """Hands rows to one tracker, in order, on a thread that begins with the first row.

    Args:
        outlet: the tracker.
        most: rows that may wait.

    Attributes:
        guard: contains the tracker's faults; after three it is off.
        dropped: rows that the tracker did not take in time.
    """

    def __init__(self, outlet: Outlet, *, most: int = MOST_WAITING) -> None:
        self.outlet = outlet
        self.guard = Guard(outlet.name)
        self.dropped = 0
        self._rows: queue.Queue[tuple[FlatRow, Any] | None] = queue.Queue(most)
        self._thread: threading.Thread | None = None
        self._over = False

    def put(self, row: FlatRow, place: Any) -> None:  # Any: what the tracker calls a place
        """Hand over a row for ``place``. Never waits: a row that finds no room is dropped, and counted."""
        if self.guard.closed or self._over:
            return
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._work, name=f"otel-train-{self.outlet.name}", daemon=True
            )
            self._thread.start()
        try:
            self._rows.put_nowait((row, place))
        except queue.Full:
            self._drop(1)

    def end(self) -> None:
        """No row comes any more."""
        if self._thread is None or self._over:
            return
        self._over = True
        try:
            self._rows.put_nowait(None)
        except queue.Full:
            return  # it hangs; nobody waits for it

    def join(self, timeout_s: float) -> None:
        """Wait for what has been handed over, in at most ``timeout_s`` seconds."""
        if self._thread is None:
            return
        self._thread.join(max(0.0, timeout_s))
        if self._thread.is_alive():
            self._drop(self._rows.qsize())

    def _drop(self, rows: int) -> None:
        if not self.dropped:
            _log.warning("%s does not answer; rows for it are dropped, training goes on", self.outlet.name)
        self.dropped += max(rows, 1)

    def _work(self) -> None:
        while True:
            item = self._rows.get()
            if item is None or self.guard.closed:
                break
            with self.guard:
                self.outlet.write(*item)
        with self.guard:
            self.outlet.close()
