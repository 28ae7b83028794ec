"""A thread between the pump and somebody who may hang, so that nobody is held up by it."""

from __future__ import annotations

import logging
import queue
from typing import TYPE_CHECKING, Generic, TypeVar

from otel_train.safety import Guard, daemon_thread

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable

T = TypeVar("T")

_log = logging.getLogger("otel_train")


class BackgroundQueue(Generic[T]):
    """Hands things over one by one, in order, on a thread that begins with the first of them.

    Args:
        name: of whoever takes them, as people call it.
        write: takes one; may take long, and may raise.
        close: called after the last, on the same thread.
        most: how many may wait.

    Attributes:
        guard: contains the faults of ``write`` and ``close``; after three it is off.
        dropped: things that were not taken in time.
    """

    def __init__(
        self, name: str, write: Callable[[T], object], close: Callable[[], object], *, most: int
    ) -> None:
        self.guard = Guard(name)
        self.dropped = 0
        self._name = name
        self._write = write
        self._close = close
        self._waiting: queue.Queue[tuple[T] | None] = queue.Queue(most)
        self._thread: threading.Thread | None = None
        self._over = False

    def hand(self, item: T) -> None:
        """Hand over one thing. Never waits: what finds no room is dropped, and counted."""
        if self.guard.closed or self._over:
            return
        if self._thread is None:
            self._thread = daemon_thread(self._work, f"otel-train-{self._name}")
            self._thread.start()
        try:
            self._waiting.put_nowait((item,))
        except queue.Full:
            self._drop(1)

    def emptied(self, timeout_s: float) -> bool:
        """Wait until what was handed over is written, in at most ``timeout_s`` seconds. Whether it is."""
        waiting = self._waiting
        with waiting.all_tasks_done:
            return waiting.all_tasks_done.wait_for(
                lambda: self.guard.closed or not waiting.unfinished_tasks, max(0.0, timeout_s)
            )

    def end(self) -> None:
        """Nothing comes any more."""
        if self._thread is None or self._over:
            return
        self._over = True
        try:
            self._waiting.put_nowait(None)
        except queue.Full:
            return  # it hangs; nobody waits for it

    def join(self, timeout_s: float) -> None:
        """Wait for what has been handed over, in at most ``timeout_s`` seconds."""
        if self._thread is None:
            return
        self._thread.join(max(0.0, timeout_s))
        if self._thread.is_alive():
            self._drop(self._waiting.qsize())

    def _drop(self, number: int) -> None:
        if not self.dropped:
            _log.warning("%s does not answer; what is for it is dropped, training goes on", self._name)
        self.dropped += max(number, 1)

    def _work(self) -> None:
        while True:
            item = self._waiting.get()
            if item is None or self.guard.closed:
                break
            with self.guard:
                self._write(*item)
            self._waiting.task_done()
        with self.guard:
            self._close()
