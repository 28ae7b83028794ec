"""Keeps the death of a child process from interrupting what must be finished."""

from __future__ import annotations

import signal
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def deaths_held_back() -> Iterator[None]:
    """Inside the block no handler of SIGCHLD runs; afterwards it is called if there was cause.

    Torch raises from that handler when a DataLoader's worker has died: wherever the main thread happens to be.
    What it raises then leaves this block at its end, as it would have left the line that it interrupted.
    """
    before = signal.getsignal(signal.SIGCHLD) if hasattr(signal, "SIGCHLD") else None
    if not callable(before) or threading.current_thread() is not threading.main_thread():
        yield
        return
    held: list[tuple[int, Any]] = []

    def hold(number: int, frame: Any) -> None:  # Any: a frame
        held.append((number, frame))

    signal.signal(signal.SIGCHLD, hold)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGCHLD) is hold:
            signal.signal(signal.SIGCHLD, before)
        if held:
            before(*held[-1])
