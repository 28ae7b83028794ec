"""Worker processes of DataLoaders: build times of batches, unexpected exits, and how many batches wait."""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Callable, Iterable
from contextlib import suppress
from multiprocessing.connection import wait
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from otel_train.fast_classes import FastNamedTuple
from otel_train.instrumentation.worker_timer import (
    LONGEST_NS,
    ROW_WORDS,
    SEQUENCE,
    SLOTS,
    TIME_BITS,
    SharedRows,
    WorkerTimer,
)
from otel_train.safety import signal_name

if TYPE_CHECKING:
    import numpy as np


_OLDER = (SEQUENCE + 1) // 2
"""Sequence numbers that are ahead by this much or more, modulo ``SEQUENCE`` + 1, are in fact behind."""


class BatchBuildTimes(FastNamedTuple):
    """Batches built by workers since the last read.

    Attributes:
        build_ns: int64[n], build time of each.
        missed: batches that were overwritten before they were read.
    """

    build_ns: np.ndarray
    missed: int


class BuildTimeReader:
    """Reads the build times written by the workers of one iterator. Not thread-safe.

    Every batch is returned exactly once, or counted as missed exactly once. numpy is imported here: where a DataLoader has
    workers, torch has loaded it.
    """

    def __init__(self, rows: SharedRows) -> None:
        import numpy as np

        self._words = np.frombuffer(rows.memory, dtype=np.int64).reshape(rows.workers, ROW_WORDS)
        self._taken = np.zeros(rows.workers, dtype=np.int64)

    def read(self) -> BatchBuildTimes:
        """Returns all new build times, in the order of the batches: workers take turns."""
        import numpy as np

        written = self._words[:, 0].copy()
        new = np.flatnonzero(written > self._taken).tolist()
        parts = [self._read(worker, int(written[worker])) for worker in new]
        if not parts:
            return BatchBuildTimes(np.zeros(0, dtype=np.int64), 0)
        turns = np.concatenate([np.arange(len(part.build_ns)) for part in parts])
        times = np.concatenate([part.build_ns for part in parts])
        return BatchBuildTimes(times[np.argsort(turns, kind="stable")], sum(part.missed for part in parts))

    def _read(self, worker: int, written: int) -> BatchBuildTimes:
        import numpy as np

        taken = int(self._taken[worker])
        numbers = np.arange(max(taken, written - SLOTS), written)
        words = self._words[worker, 1 + numbers % SLOTS]
        ahead = ((words >> TIME_BITS) - (numbers + 1)) & SEQUENCE
        # This processor may see the new count before the new slot: slots that are still behind are read at the next call.
        behind = np.flatnonzero(ahead >= _OLDER)
        there = int(behind[0]) if len(behind) else len(numbers)
        whole = words[:there][ahead[:there] == 0] & LONGEST_NS
        self._taken[worker] = int(numbers[0]) + there
        return BatchBuildTimes(whole, int(self._taken[worker]) - taken - len(whole))


POOL = "_otel_train_worker_pool"
INIT = "_worker_init_fn"

UNKNOWN = "unknown"
"""Exit cause of a fork server's child, and of a worker whose status was lost because the call that reaped it was interrupted."""

_REAPING_S = 0.002
"""Wait in seconds for the status of a process that has ended: the kernel, or another thread that reaps it, may need a moment."""


class WorkerExit(FastNamedTuple):
    """A worker that ended without being stopped. ``cause``: signal name, or ``exit_<status>``."""

    worker: int
    pid: int
    cause: str


class WorkerPool:
    """The workers of one iterator. It outlives the iterator until the exits of all workers are known.

    Args:
        iterator: held weakly.
        workers: number of workers to be started; None if they are running.
    """

    def __init__(self, iterator: Any, workers: int | None = None) -> None:  # Any: torch's iterator
        self.iterator = weakref.ref(iterator)
        self.processes: tuple[Any, ...] = ()
        self.pids: tuple[int, ...] = ()
        self.times: BuildTimeReader | None = None
        self._init: Any = None
        self._rows: SharedRows | None = None
        self._reported: set[int] = set()
        self.reported = False
        """Whether exits have been reported to another process, so that only build times may follow."""
        if workers is None:
            self._take_workers(iterator)
            return
        try:
            self._rows = SharedRows(workers)
        except OSError:  # no shared memory: build times are absent, training goes on
            return
        self.times = BuildTimeReader(self._rows)

    @property
    def over(self) -> bool:
        """Whether the iterator was deleted or shut down."""
        iterator = self.iterator()
        return iterator is None or bool(getattr(iterator, "_shutdown", False))

    def clock(self, init: Callable[[int], object] | None) -> WorkerTimer:
        """Returns the replacement of the user's ``worker_init_fn`` in the workers."""
        self._init = init
        return WorkerTimer(init, self._rows, os.getpid())

    def complete(self) -> None:
        """Stores the started workers, and restores the user's ``worker_init_fn``."""
        iterator = self.iterator()
        if self.processes or iterator is None:
            return
        self._take_workers(iterator)
        if isinstance(iterator.__dict__.get(INIT), WorkerTimer):
            iterator.__dict__[INIT] = self._init
        if self._rows is not None:
            self._rows.seal()
            self._rows = None

    def _take_workers(self, iterator: Any) -> None:  # Any: torch's iterator
        self.processes = tuple(getattr(iterator, "_workers", ()))
        self.pids = tuple(process.pid for process in self.processes)

    def exits(self, patience_s: float = 0.0) -> list[WorkerExit]:
        """Returns unexpected exits since the last call.

        A worker that does not stop with its iterator is terminated by torch; that is not unexpected.

        Args:
            patience_s: longest wait for a worker that is about to end: its connections are closed before it has a status.
        """
        found, over = [], self.over
        if patience_s and not over:
            with suppress(ValueError):  # torch has closed a process
                wait([each.sentinel for each in self.processes], patience_s)
        known = set(self._reported)
        for worker, process in enumerate(self.processes):
            if worker in known:
                continue
            cause = exit_cause(process, self.pids[worker])
            if cause is None or (cause == UNKNOWN and not over and _status_comes_later(process)):
                continue
            known.add(worker)
            # After the end of the iterator a killed worker cannot be distinguished from one that was stopped.
            if cause and not (over and cause in ("SIGTERM", UNKNOWN)):
                found.append(WorkerExit(worker, self.pids[worker], cause))
        self._reported = known
        return found

    @property
    def done(self) -> bool:
        """Whether the exits of all workers are known."""
        return self.over and len(self._reported) == len(self.processes)


class WorkerInit:
    """Replaces an iterator's ``_worker_init_fn`` while it starts its workers; the loader is not changed.

    Several threads may create iterators of one loader at a time: each iterator has its own pool.
    """

    def __get__(self, iterator: Any, _: type | None = None) -> Any:  # Any: torch's iterator
        if iterator is None:
            return self
        try:
            return iterator.__dict__[INIT]
        except KeyError:
            raise AttributeError(INIT) from None

    def __set__(self, iterator: Any, init: Any) -> None:
        pool = iterator.__dict__.get(POOL)
        iterator.__dict__[INIT] = pool.clock(init) if pool is not None else init


def exit_cause(process: Any, pid: int) -> str | None:  # Any: multiprocessing's process
    """Returns the exit cause of a worker: None while it runs, "" for a normal exit. Does not reap it."""
    popen: Any = getattr(process, "_popen", None)  # its own poll() would reap it
    status = getattr(popen, "returncode", 0)
    if status is None:
        status = _status_of(pid)
    if status is None:
        if not wait([popen.sentinel], 0):
            return None
        time.sleep(_REAPING_S)
        status = popen.returncode if popen.returncode is not None else _status_of(pid)
        if status is None:
            return UNKNOWN
    if status >= 0:
        return f"exit_{status}" if status else ""
    return signal_name(-status).replace(" ", "_")


def _status_comes_later(process: Any) -> bool:  # Any: as above
    """Returns whether its parent is a fork server, which reports the status when torch asks for it."""
    return getattr(getattr(process, "_popen", None), "method", "") == "forkserver"


def _status_of(pid: int) -> int | None:
    """Returns the exit status of a child, negative for a signal; None if it runs or is not a child of this process."""
    try:
        ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except (ChildProcessError, AttributeError):  # already reaped, or no waitid on this system
        return None
    if ended is None:
        return None
    return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status


_TASKS_AND_QUEUE = attrgetter("_task_info", "_data_queue")
_BEFORE_PINNING = attrgetter("_worker_result_queue")


class LoaderState(FastNamedTuple):
    """State of the iterators of a loader at one time.

    Attributes:
        expected: worker processes that were started.
        alive: workers that run now.
        dead: workers that ended without being stopped.
        pids: process ids of all of them.
        queued: batches ready; None if the platform does not tell.
        pinned: batches ready in pinned memory.
        limit: batches that fit.
    """

    expected: int
    alive: int
    dead: int
    pids: tuple[int, ...]
    queued: int | None
    pinned: int
    limit: int


def loader_state(pools: Iterable[WorkerPool]) -> LoaderState | None:
    """Returns the state of a loader's workers; None if it has none now."""
    pids: list[int] = []
    ends: list[str | None] = []
    queued: int | None = 0
    limit = pinned = 0
    for pool in list(pools):
        iterator = pool.iterator()
        if pool.over or iterator is None:
            continue
        pids += pool.pids
        ends += [exit_cause(*worker) for worker in zip(pool.processes, pool.pids, strict=True)]
        limit += len(pool.processes) * (getattr(iterator, "_prefetch_factor", None) or 2)
        ready = _ready(iterator)
        queued = None if queued is None or ready is None else queued + sum(ready)
        pinned += ready[1] if ready is not None else 0
    if not pids:
        return None
    dead = sum(1 for end in ends if end and end != UNKNOWN)
    return LoaderState(len(ends), ends.count(None), dead, tuple(pids), queued, pinned, limit)


def _ready(iterator: Any) -> tuple[int, int] | None:  # Any: torch's iterator
    """Returns the batches that wait in shared memory, and in pinned memory; None if the platform does not tell."""
    try:
        tasks, queue = _TASKS_AND_QUEUE(iterator)
        # Batches that arrived out of order are held by the iterator.
        held = [len(info) for info in list(tasks.values())].count(2)
        queued = int(queue.qsize())
        if not getattr(iterator, "_pin_memory", False):
            return queued + held, 0
        return int(_BEFORE_PINNING(iterator).qsize()), queued + held
    except (NotImplementedError, AttributeError, OSError):  # macOS has no qsize; the queue may be gone
        return None
