"""Child processes: locks that a forked one finds free, and deaths that must not interrupt what is to be finished."""

from __future__ import annotations

import os
import signal
import sys
import threading
import weakref
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Iterator


_Lock = TypeVar("_Lock")
_locks: weakref.WeakSet[Any] = weakref.WeakSet()


def free_in_forks(lock: _Lock) -> _Lock:
    """``lock``, which a forked child finds free: the thread that held it meanwhile is not there to release it."""
    _locks.add(lock)
    return lock


def _free_locks() -> None:
    for lock in list(_locks):
        lock._at_fork_reinit()  # noqa: SLF001 - what threading and logging call for theirs


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_free_locks)


def is_importing_main() -> bool:
    """Whether ``multiprocessing`` is making this process ready, which imports the main module of its parent.

    Whatever the module does at its top level is done again here, in every child: it is no training.
    """
    process: Any = sys.modules.get("multiprocessing.process")
    return process is not None and bool(getattr(process.current_process(), "_inheriting", False))


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
