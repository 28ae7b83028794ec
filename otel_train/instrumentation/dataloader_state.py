"""What can be seen of a loader's workers and queue from outside, without touching them."""

from __future__ import annotations

from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple

from otel_train.instrumentation.worker_pool import UNKNOWN, how_it_ended

if TYPE_CHECKING:
    from otel_train.instrumentation.dataloader import LoaderProbe

_TASKS_AND_QUEUE = attrgetter("_task_info", "_data_queue")
_BEFORE_PINNING = attrgetter("_worker_result_queue")


class LoaderState(NamedTuple):
    """One look at the iterators of a loader.

    Attributes:
        expected: worker processes its settings ask for.
        alive: those that run now.
        dead: those that ended although nobody had told them to.
        pids: their process ids, the dead included.
        queued: batches ready; None where the platform cannot say.
        pinned: those among them in pinned memory.
        limit: batches that fit.
    """

    expected: int
    alive: int
    dead: int
    pids: tuple[int, ...]
    queued: int | None
    pinned: int
    limit: int


def look(probe: LoaderProbe) -> LoaderState | None:
    """Look at the workers of a loader; None when it has none right now."""
    pids: list[int] = []
    ends: list[str | None] = []
    queued: int | None = 0
    limit = pinned = 0
    for crew in list(probe.crews):
        iterator = crew.iterator()
        if crew.over or iterator is None:
            continue
        pids += crew.pids
        ends += [how_it_ended(*worker) for worker in zip(crew.processes, crew.pids, strict=True)]
        limit += len(crew.processes) * (getattr(iterator, "_prefetch_factor", None) or 2)
        ready = _ready(iterator)
        queued = None if queued is None or ready is None else queued + sum(ready)
        pinned += ready[1] if ready is not None else 0
    if not pids:
        return None
    dead = sum(1 for end in ends if end and end != UNKNOWN)
    return LoaderState(len(ends), ends.count(None), dead, tuple(pids), queued, pinned, limit)


def _ready(iterator: Any) -> tuple[int, int] | None:  # Any: torch's iterator
    """Batches that wait in shared memory, and in pinned memory; None where the platform cannot say."""
    try:
        tasks, queue = _TASKS_AND_QUEUE(iterator)
        # Those that came before their turn lie in the parent already.
        held = [len(info) for info in list(tasks.values())].count(2)
        queued = int(queue.qsize())
        if not getattr(iterator, "_pin_memory", False):
            return queued + held, 0
        return int(_BEFORE_PINNING(iterator).qsize()), queued + held
    except (NotImplementedError, AttributeError, OSError):  # macOS has no qsize; the queue may be gone
        return None
