"""Worker processes of loaders: what they take to build batches, and how they end."""

from __future__ import annotations

import os
import signal
import time
import weakref
from multiprocessing.connection import wait
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from otel_train.instrumentation.worker_timer import (
    LONGEST_NS,
    ROW_WORDS,
    SEQUENCE,
    SLOTS,
    TIME_BITS,
    BuildClock,
    SharedRows,
)

if TYPE_CHECKING:
    from collections.abc import Callable


_NEWER = (SEQUENCE + 1) // 2


class BatchBuildTimes(NamedTuple):
    """Batches that workers have built since the last look.

    Attributes:
        build_ns: int64[n], how long each took.
        missed: batches that were overwritten before they could be read.
    """

    build_ns: np.ndarray
    missed: int


class BuildTimes:
    """Reads the rows of one iterator's workers. One thread owns it.

    The law: every batch is returned whole exactly once, or counted as missed exactly once.

    Args:
        rows: what the workers write.
    """

    def __init__(self, rows: SharedRows) -> None:
        self._words = np.frombuffer(rows.memory, dtype=np.int64).reshape(rows.workers, ROW_WORDS)
        self._taken = np.zeros(rows.workers, dtype=np.int64)

    def read(self) -> BatchBuildTimes:
        """Take everything that is there, in the order in which batches are built: the workers take turns."""
        written = self._words[:, 0].copy()
        parts = [
            self._read(worker, int(written[worker]))
            for worker in np.flatnonzero(written > self._taken).tolist()
        ]
        if not parts:
            return BatchBuildTimes(np.zeros(0, dtype=np.int64), 0)
        turns = np.concatenate([np.arange(len(part.build_ns)) for part in parts])
        times = np.concatenate([part.build_ns for part in parts])
        return BatchBuildTimes(times[np.argsort(turns, kind="stable")], sum(part.missed for part in parts))

    def _read(self, worker: int, written: int) -> BatchBuildTimes:
        taken = int(self._taken[worker])
        numbers = np.arange(max(taken, written - SLOTS), written)
        words = self._words[worker, 1 + numbers % SLOTS]
        ahead = ((words >> TIME_BITS) - (numbers + 1)) & SEQUENCE
        # Another processor may show the count before the slot: what is older comes with the next look.
        behind = np.flatnonzero(ahead >= _NEWER)
        there = int(behind[0]) if len(behind) else len(numbers)
        whole = words[:there][ahead[:there] == 0] & LONGEST_NS
        self._taken[worker] = int(numbers[0]) + there
        return BatchBuildTimes(whole, int(self._taken[worker]) - taken - len(whole))


CREW = "_otel_train_crew"
INIT = "_worker_init_fn"

UNKNOWN = "unknown"
"""Ended, and nobody knows how: of a fork server's child, and of one that was reaped by a call which a signal broke off."""

_REAPING_S = 0.002
"""Between the end of a process and its status lie its last moments in the kernel, or another thread that reaps it."""


class WorkerExit(NamedTuple):
    """A worker that ended although nobody had told it to.

    Attributes:
        worker: its number.
        pid: its process.
        cause: signal name, or ``exit_<status>``.
    """

    worker: int
    pid: int
    cause: str


class WorkerPool:
    """Goes with one iterator and outlives it until everything about its workers is known.

    Args:
        iterator: held weakly.
        workers: how many it is going to have; None for one that has them already.
    """

    def __init__(self, iterator: Any, workers: int | None = None) -> None:  # Any: torch's iterator
        self.iterator = weakref.ref(iterator)
        self.processes: tuple[Any, ...] = ()
        self.pids: tuple[int, ...] = ()
        self.times: BuildTimes | None = None
        self._init: Any = None
        self._rows: SharedRows | None = None
        self._told: set[int] = set()
        self.reported = False
        """All about its workers has been told to another process, but for their last builds."""
        if workers is None:
            self._meet(iterator)
            return
        try:
            self._rows = SharedRows(workers)
        except OSError:  # no memory to share: build times are absent, training goes on
            return
        self.times = BuildTimes(self._rows)

    @property
    def over(self) -> bool:
        """Nobody will ask these workers for anything any more."""
        iterator = self.iterator()
        return iterator is None or bool(getattr(iterator, "_shutdown", False))

    def clock(self, init: Callable[[int], object] | None) -> BuildClock:
        """What to run in the workers instead of the user's ``worker_init_fn``."""
        self._init = init
        return BuildClock(init, self._rows, os.getpid())

    def complete(self) -> None:
        """The workers have been started: remember them, and give the iterator back what was the user's."""
        iterator = self.iterator()
        if self.processes or iterator is None:
            return
        self._meet(iterator)
        if isinstance(iterator.__dict__.get(INIT), BuildClock):
            iterator.__dict__[INIT] = self._init
        if self._rows is not None:
            self._rows.seal()
            self._rows = None

    def _meet(self, iterator: Any) -> None:  # Any: torch's iterator
        self.processes = tuple(getattr(iterator, "_workers", ()))
        self.pids = tuple(process.pid for process in self.processes)

    def deaths(self) -> list[WorkerExit]:
        """Workers that have died since the last look.

        A worker that would not stop when its iterator was done with is terminated by torch: no death.
        """
        found, over = [], self.over
        for worker, process in enumerate(self.processes):
            if worker in self._told:
                continue
            cause = how_it_ended(process, self.pids[worker])
            if cause is None or (cause == UNKNOWN and not over and _told_later(process)):
                continue
            self._told.add(worker)
            # After the end of the iterator nobody can tell a worker that died from one that stopped.
            if cause and not (over and cause in ("SIGTERM", UNKNOWN)):
                found.append(WorkerExit(worker, self.pids[worker], cause))
        return found

    @property
    def done(self) -> bool:
        """Everything about its workers is known."""
        return self.over and len(self._told) == len(self.processes)


class WorkerInit:
    """In place of an iterator's ``_worker_init_fn`` while it makes its workers; the loader is not touched.

    Any number of threads may make iterators of one loader at a time: each iterator has its own crew.
    """

    def __get__(self, iterator: Any, _: type | None = None) -> Any:  # Any: torch's iterator
        if iterator is None:
            return self
        try:
            return iterator.__dict__[INIT]
        except KeyError:
            raise AttributeError(INIT) from None

    def __set__(self, iterator: Any, init: Any) -> None:
        crew = iterator.__dict__.get(CREW)
        iterator.__dict__[INIT] = crew.clock(init) if crew is not None else init


def how_it_ended(process: Any, pid: int) -> str | None:  # Any: multiprocessing's process
    """How a worker ended: None if it runs, "" if well. It is not reaped: that is its owner's business."""
    popen: Any = getattr(process, "_popen", None)  # its own poll() would reap it
    status = getattr(popen, "returncode", 0)
    if status is None:
        status = _status_of(pid)
    if status is None and wait([popen.sentinel], 0):
        time.sleep(_REAPING_S)
        status = popen.returncode
        if status is None:
            status = _status_of(pid)
        if status is None:
            return UNKNOWN
    if status is None:
        return None
    if status >= 0:
        return f"exit_{status}" if status else ""
    return _signal_name(-status)


def _told_later(process: Any) -> bool:  # Any: as above
    """Whether its parent is a fork server, which tells the status when torch asks for it."""
    return getattr(getattr(process, "_popen", None), "method", "") == "forkserver"


def _status_of(pid: int) -> int | None:
    """Exit status of a child, negative for a signal; None if it runs or is not ours (a fork server's)."""
    try:
        ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except (ChildProcessError, AttributeError):  # reaped by somebody, or no waitid here
        return None
    if ended is None:
        return None
    return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal_{number}"
