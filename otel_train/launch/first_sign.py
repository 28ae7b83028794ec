"""What is done once in a process, when it begins to train. Imports neither torch nor JAX: each waits in its own way."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from otel_train.children import free_in_forks

if TYPE_CHECKING:
    from collections.abc import Callable


class FirstSign:
    """Waits for the first sign that this process trains; other threads that give one meanwhile are held until it is dealt with.

    Args:
        found: called once, in the thread that gives the sign.
    """

    def __init__(self, found: Callable[[], None]) -> None:
        self._found = found
        self._lock = free_in_forks(threading.RLock())
        self._begun = self._over = False
        self._undo: list[Callable[[], None]] = []

    def sign(self) -> None:
        """This process trains."""
        if self._over:
            return
        with self._lock:
            if self._begun:
                return
            self._begun = True
            try:
                self._found()
            finally:
                self.stop()

    def stop(self) -> None:
        """Take out what gives signs."""
        self._begun = self._over = True
        undo, self._undo = self._undo, []
        for each in undo:
            each()
