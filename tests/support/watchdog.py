"""A watchdog of the program: a signal whose handler raises."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def watchdog() -> Iterator[Callable[..., None]]:
    """Yields a function that delivers the signal; its handler raises TimeoutError."""

    def expire(_number: int, _frame: Any) -> None:  # Any: a frame
        raise TimeoutError("watchdog")

    before = signal.signal(signal.SIGUSR1, expire)
    try:
        yield lambda *_, **__: signal.raise_signal(signal.SIGUSR1)
    finally:
        signal.signal(signal.SIGUSR1, before)
