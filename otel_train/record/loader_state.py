"""What can be seen of a loader's workers and queue from outside, without touching them."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from otel_train.record.loader import LoaderProbe


class LoaderState(NamedTuple):
    """One look at the iterators of a loader.

    Attributes:
        expected: worker processes its settings ask for.
        alive: those that run now.
        pids: their process ids, the dead included.
        exits: how workers ended that were not told to: signal name or ``exit_<status>``, by process id.
        queued: batches ready; None where the platform cannot say.
        limit: batches that fit.
    """

    expected: int
    alive: int
    pids: tuple[int, ...]
    exits: dict[int, str]
    queued: int | None
    limit: int


def look(probe: LoaderProbe) -> LoaderState | None:
    """Look at the workers of a loader; None when it has none right now."""
    expected = alive = limit = 0
    queued: int | None = 0
    exits: dict[int, str] = {}
    pids: list[int] = []
    for iterator in list(probe.iterators):
        workers = getattr(iterator, "_workers", None)
        if not workers or getattr(iterator, "_shutdown", False):
            continue
        expected += len(workers)
        for worker in list(workers):
            pids.append(worker.pid)
            ended = _ended(worker.pid)
            if ended is None:
                alive += 1
            elif ended:
                exits[worker.pid] = ended
        limit += len(workers) * (getattr(iterator, "_prefetch_factor", None) or 2)
        queued = _queued(iterator, queued)
    return LoaderState(expected, alive, tuple(pids), exits, queued, limit) if expected else None


def _queued(iterator: Any, so_far: int | None) -> int | None:  # Any: torch's iterator
    if so_far is None:
        return None
    try:
        return so_far + int(iterator._data_queue.qsize())  # noqa: SLF001  # only looked at
    except (NotImplementedError, AttributeError, OSError):  # macOS has no qsize; the queue may be gone
        return None


def _ended(pid: int) -> str | None:
    """How a child ended: None if it runs, "" if well. It is not reaped: that is its owner's business."""
    try:
        status = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except (ChildProcessError, AttributeError):  # reaped already, or no waitid here: nothing known against it
        return ""
    if status is None:
        return None
    if status.si_code == os.CLD_EXITED:
        return f"exit_{status.si_status}" if status.si_status else ""
    return signal.Signals(status.si_status).name
