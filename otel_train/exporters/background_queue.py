"""Bounded queues with a thread each, so that slow or hanging work delays nothing else."""

from __future__ import annotations

import errno
import logging
import math
import queue
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Final, Generic, TypeVar

from otel_train.safety import Guard, daemon_thread, free_in_forks

T = TypeVar("T")

_log = logging.getLogger("otel_train")


class BackgroundQueue(Generic[T]):
    """Calls ``write`` with each item in order, on a thread that starts with the first item, or with the end.

    ``write`` may take long and may raise; after three faults ``guard`` switches it off. ``close`` is called after the last
    item, on the same thread. At most ``most`` items wait; further ones are dropped and counted.
    """

    def __init__(
        self, name: str, write: Callable[[T], object], close: Callable[[], object], *, most: int
    ) -> None:
        self.guard = Guard(name)
        self.dropped = 0
        self._name = name
        self._write = write
        self._close = close
        self._most: float = most
        self._waiting: queue.Queue[tuple[T] | None] = (
            queue.Queue()
        )  # None, also in a full queue, ends the thread
        self._thread: threading.Thread | None = None
        self._starting = free_in_forks(threading.Lock())  # items may come from several threads
        self._over = False

    def hand(self, item: T) -> None:
        """Adds an item. Never waits: if the queue is full, the item is dropped and counted."""
        if self.guard.closed or self._over:
            return
        if self._thread is None:
            with self.guard:
                self._start()
        if self._thread is not None and self._waiting.qsize() < self._most:
            self._waiting.put_nowait((item,))
        else:
            self._drop(1)

    def keep_all(self) -> None:
        """Drops no item from now on."""
        self._most = math.inf

    def emptied(self, timeout_s: float) -> bool:
        """Waits until all items are written, at most ``timeout_s`` seconds. Returns whether they are, or never will be."""
        waiting = self._waiting
        with waiting.all_tasks_done:
            return waiting.all_tasks_done.wait_for(
                lambda: self.guard.closed or not waiting.unfinished_tasks, max(0.0, timeout_s)
            )

    def end(self) -> None:
        """Accepts no further items."""
        if not self._over:
            self._over = True
            # Without any item too: ``close`` is called. Python 3.12 starts no thread at the end of the interpreter.
            with suppress(OSError):
                self._start()
            self._waiting.put_nowait(None)

    def close(self, timeout_s: float) -> None:
        """Calls ``end``, and waits for the thread, at most ``timeout_s`` seconds.

        Items that are not written by then count as dropped; if only the call of ``close`` lasts longer, one does.
        """
        self.end()
        if self._thread is None:
            return
        self._thread.join(max(0.0, timeout_s))
        if self._thread.is_alive():
            self._drop(self._waiting.unfinished_tasks - 1)  # without the None

    def _start(self) -> None:
        """Starts the thread, if there is none; raises OSError if the system refuses it."""
        with self._starting:
            if self._thread is None and not self.guard.closed:
                thread = daemon_thread(self._work, f"otel-train-{self._name}")
                try:
                    thread.start()
                except RuntimeError as error:
                    raise OSError(errno.EAGAIN, str(error)) from error
                self._thread = thread

    def _drop(self, number: int) -> None:
        if not self.dropped and self._thread is not None:
            _log.warning("%s does not answer; its records are dropped, training continues", self._name)
        self.dropped += max(number, 1)

    def _work(self) -> None:
        while True:
            item = self._waiting.get()
            if item is not None and not self.guard.closed:
                with self.guard:
                    self._write(*item)
            self._waiting.task_done()
            if item is None or self.guard.closed:
                break
        with self._waiting.all_tasks_done:  # wakes ``emptied``: items that are left will not be written
            self._waiting.all_tasks_done.notify_all()
        with self.guard:
            self._close()


PATIENCE_S: Final = 0.25
"""Longest wait of ``DiskQueue.do``. After a timeout the next calls do not wait, until the queue is empty."""

_MOST = 512
"""Most operations that wait for a disk that hangs; further ones are dropped and counted."""


class DiskQueue:
    """Runs disk operations in order on a thread.

    ``do`` returns when the operation is done, so that a reader finds its result, unless the disk ``hangs``: an operation has
    taken longer than ``PATIENCE_S``, and is not done yet.
    """

    def __init__(self) -> None:
        self.hangs = False
        self._until_s = math.inf
        self._queue: BackgroundQueue[Callable[[], object]] = BackgroundQueue(
            "run directory", lambda write: write(), lambda: None, most=_MOST
        )

    @property
    def dropped(self) -> int:
        """Writes that were dropped because the queue was full."""
        return self._queue.dropped

    def do(self, guard: Guard, write: Callable[[], object]) -> None:
        """Runs an operation on the thread, and waits for it as above; ``guard`` contains its faults."""

        def guarded() -> None:
            if not guard.closed:
                with guard:
                    write()

        self._queue.hand(guarded)
        left_s = min(PATIENCE_S, self._until_s - time.monotonic())
        self.hangs = not self._queue.emptied(0.0 if self.hangs else left_s)

    def limit_waits(self, seconds: float) -> None:
        """Limits how long ``do`` waits for writes from now on: ``seconds``, for all writes together."""
        self._until_s = time.monotonic() + seconds

    def keep_all(self) -> None:
        """Drops no operation from now on. Call it as a run ends: few operations follow, and they are its result."""
        self._queue.keep_all()

    def refresh(self, guard: Guard, write: Callable[[], object]) -> None:
        """Queues a write that the next one replaces; it is skipped while the disk hangs."""
        if not self.hangs or self.written(0.0):
            self.do(guard, write)

    def written(self, timeout_s: float) -> bool:
        """Waits for all operations, at most ``timeout_s`` seconds. Returns whether they are done."""
        self.hangs = not self._queue.emptied(timeout_s)
        return not self.hangs

    def close(self, timeout_s: float) -> None:
        """Accepts no further operations, and waits up to ``timeout_s`` seconds for the thread."""
        self._queue.close(timeout_s)
