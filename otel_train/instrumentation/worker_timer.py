"""Measures in a DataLoader worker how long each batch takes to build.

A spawned worker imports this module, so it imports nothing heavy: no numpy, no torch, no OpenTelemetry.

Every worker has one row of shared memory, which no other process writes: the number of batches built, then a ring of the latest.
One word holds both build time and sequence number of a batch, so a reader in another process never sees one without the other.
"""

from __future__ import annotations

import os
import sys
import weakref
from _thread import get_ident
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any

from otel_train.recording.descriptors import mapped, unnamed_file

if TYPE_CHECKING:
    from collections.abc import Callable

SLOTS = 2048
"""Batches of a worker that can wait for the reader: enough for 1,000 per second, read every two seconds."""

ROW_WORDS = 1 + SLOTS
WORD_BYTES = 8

TIME_BITS = 44
LONGEST_NS = (1 << TIME_BITS) - 1
"""Largest value of a word, 4.9 hours; longer build times are capped."""

SEQUENCE = (1 << 63 - TIME_BITS) - 1
"""Sequence numbers, from 1, are kept modulo this plus one."""

_FETCHERS = "torch.utils.data._utils.fetch"
_MARK = "_otel_train_timed"
_FETCHER_CLASSES = ("_MapDatasetFetcher", "_IterableDatasetFetcher")


class SharedRows:
    """Memory that the workers of one iterator write and their parent reads.

    Args:
        file: an open file of the size of all rows; None to create one. It is closed by ``seal``.

    Raises:
        OSError: shared memory is not available.
    """

    def __init__(self, workers: int, file: int | None = None) -> None:
        size_bytes = workers * ROW_WORDS * WORD_BYTES
        self.workers = workers
        self._file = _memory_file(size_bytes) if file is None else file
        self.seal = weakref.finalize(self, os.close, self._file)
        self.seal.atexit = False
        self.memory = mapped(self._file, size_bytes)

    def row(self, worker: int) -> memoryview:
        """Returns the words of one worker."""
        return self.memory.cast("q")[worker * ROW_WORDS : (worker + 1) * ROW_WORDS]

    def __reduce__(self) -> tuple[Any, ...]:
        from multiprocessing.reduction import DupFd

        return _attach, (self.workers, DupFd(self._file))


def _memory_file(size_bytes: int) -> int:
    """Returns an open unnamed file with allocated blocks: touching an unallocated block could kill a process."""
    file = unnamed_file()
    try:
        os.write(file, bytes(size_bytes))
    except OSError:
        os.close(file)
        raise
    return file


def _attach(workers: int, file: Any) -> SharedRows | None:  # Any: multiprocessing's duplicate of a descriptor
    try:
        rows = SharedRows(workers, file.detach())
        rows.seal()
    except OSError:  # the worker runs without a timer
        return None
    return rows


class WorkerTimer:
    """Replaces the user's ``worker_init_fn`` in the workers of one iterator. In the process ``parent`` nothing is timed."""

    def __init__(self, init: Callable[[int], object] | None, rows: SharedRows | None, parent: int) -> None:
        self.init = init
        self._rows = rows
        self._parent = parent

    def __call__(self, worker: int) -> object:
        """Starts the timer of this worker, then calls the user's function."""
        if self._rows is not None and os.getpid() != self._parent:
            time_fetches(self._rows.row(worker), sys.modules.get(_FETCHERS), perf_counter_ns)
        return self.init(worker) if self.init is not None else None

    def __reduce__(self) -> tuple[Any, ...]:
        from multiprocessing.context import get_spawning_popen

        rows = self._rows if get_spawning_popen() is not None else None  # memory goes to workers only
        return WorkerTimer, (self.init, rows, self._parent)


def time_fetches(
    row: memoryview, fetchers: Any, clock: Callable[[], int]
) -> None:  # Any: torch's module, or None where it is not what we know
    """Times every batch that this process builds from now on.

    A fetch that raises builds no batch. A nested fetch (a dataset that reads a loader of its own) and a fetch on another
    thread are part of the worker's own.
    """
    built, busy, owner, slots = 0, False, get_ident(), len(row) - 1

    def timed(fetch: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
        def timed_fetch(self: Any, index: Any) -> Any:
            nonlocal built, busy
            if busy or get_ident() != owner:
                return fetch(self, index)
            busy = True
            begun = clock()
            try:
                batch = fetch(self, index)
                lasted = clock() - begun
            finally:
                busy = False
            slot = 1 + built % slots
            built += 1
            row[slot] = (built & SEQUENCE) << TIME_BITS | min(lasted, LONGEST_NS)
            row[0] = built
            return batch

        setattr(timed_fetch, _MARK, True)
        return timed_fetch

    for name in _FETCHER_CLASSES:
        cls: Any = getattr(fetchers, name, None)
        fetch = getattr(cls, "fetch", None)
        if fetch is not None and not hasattr(fetch, _MARK):  # with a DataPipe, two nested timers start
            cls.fetch = timed(fetch)
