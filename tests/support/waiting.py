"""Waits for what another thread or process does."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

_LONGEST_PAUSE_S = 0.05


def until(holds: Callable[[], T | None], what: str = "what the test waits for", seconds: float = 20.0) -> T:
    """Wait until something holds; its value.

    Raises:
        AssertionError: it did not in this time.
    """
    ends_s, pause_s = time.monotonic() + seconds, 0.002
    while not (found := holds()):
        assert time.monotonic() < ends_s, f"not within {seconds:g} s: {what}"
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
    return found


def in_threads(*works: Callable[[], object]) -> None:
    """Does each of these in a thread of its own, and waits for all."""
    threads = [threading.Thread(target=work) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
