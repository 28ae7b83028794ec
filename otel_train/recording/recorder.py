"""Gives every thread a ring buffer and every source a number."""

from __future__ import annotations

import itertools
import json
import logging
import os
import sys
import threading
import weakref
from _thread import get_ident
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from otel_train.recording.events import (
    EDGE_WORDS,
    MAX_SOURCES,
    PHASES,
    SOURCE_MASK,
    SOURCE_SHIFT,
    Instrumented,
    SourceKind,
)
from otel_train.recording.ring_buffer import Ring
from otel_train.recording.shared_memory import NAMES_HALF, SIDE_RINGS, FlightMemory, RingEntry
from otel_train.safety import Guard, free_in_forks

if TYPE_CHECKING:
    from otel_train.datamodel import Clock

_UNREAD_RING_EDGES = 4096
"""Events held by a ring in memory of this process, which no agent reads."""

_OTHER = "_OTHER"
"""Name of the sources that the table of names cannot take; ``catalog.OTHER_VALUE``."""

_OTHER_SOURCES = (max(SourceKind) + 1) * (len(PHASES) + 1)
_OTHER_BYTES = 64 * _OTHER_SOURCES
"""Part of the table of names, in sources and in bytes, that only sources named ``_OTHER`` use."""

_log = logging.getLogger("otel_train")

_FORK_TRAINS = (
    "process %d trains, and is a fork of the process that called otel_train.instrument(): nothing of it is recorded. Call "
    "instrument() after the fork, in the process that trains"
)


class ThreadRing:
    """A thread that writes events, and its ring.

    Attributes:
        slot: number of the ring in shared memory; -1 for a ring in memory of this process alone.
        engine: whether it is a worker thread of autograd: its events belong to the backward that waits for it.
        ended: the thread has ended; its ring can be given to another thread once it has been read.
        at_end: finalizer that is called as the thread ends; None for the ring of the main thread.
    """

    __slots__ = ("at_end", "ended", "engine", "ident", "name", "ring", "slot")

    def __init__(self, ring: Ring, name: str, ident: int, slot: int) -> None:
        self.ring = ring
        self.name = name
        self.ident = ident
        self.slot = slot
        self.engine = False
        self.ended = False
        self.at_end: weakref.finalize[..., _ThreadLifetime] | None = None


class _ThreadLifetime:
    """Object in thread-local storage, so that its finalizer is called as the thread ends."""

    __slots__ = ("__weakref__",)


class Recorder:
    """Gives every thread a ring buffer and every source a number.

    Hooks call ``edge(code)`` alone. In the thread that made the recorder it writes to the ring of
    that thread; in another thread it looks the ring up first.

    Args:
        in_backward: returns whether the calling thread is running a node of autograd's graph.

    Attributes:
        when_silenced: called when this recorder stops recording, also in a forked child.
    """

    def __init__(
        self, memory: FlightMemory, *, clock: Clock, in_backward: Callable[[], bool] = lambda: False
    ) -> None:
        self.threads: list[ThreadRing] = []
        self.sources: list[Instrumented] = []
        self._identity = "{}"  # as JSON
        self._rows = 0, ""
        """Number of sources, and these as JSON. A signal handler may extend it between any two statements."""
        self.when_silenced: list[Callable[[], None]] = []
        self._memory = memory
        self._clock = clock
        self._in_backward = in_backward
        self._local = threading.local()
        self._free_slots = deque(range(1, SIDE_RINGS + 1))
        self._lock = free_in_forks(threading.RLock())  # a signal handler may register a source
        self._numbers: dict[Instrumented, int] = {}
        self._closed = False
        self._warns_of_updates = False  # in a forked child
        self._changes = memory.changes_word
        self._change_numbers = itertools.count(1)
        self._is_full = False
        self._guard = Guard("recording of a thread", limit=sys.maxsize)
        self._unread = 0
        self.main = self._add_ring(slot=0)
        self._write_entry(self.main)
        if threading.current_thread() is not threading.main_thread():
            self._end_with_thread(self.main)
        self.edge: Callable[[int], None] = self.main.ring.edge
        _recorders.add(self)

    def source(self, kind: SourceKind, name: str, phase: str = "") -> int:
        """Returns the number of a source, the same for the same (kind, name, phase). Never on the hot path."""
        source = Instrumented(kind, name, phase)
        with self._lock:
            if source not in self._numbers and not self._fits(source):
                self._warn_full(source)
                source = source._replace(name=_OTHER)
            number = self._numbers.get(source)
            if number is not None:
                return number
            number = len(self.sources)
            self.sources.append(source)
            while self.sources[number] is not source:  # a signal handler has registered another one
                number += 1
            self._numbers[source] = number
            self._write_names()
        self.changed()
        return number

    def _fits(self, source: Instrumented) -> bool:
        """Returns whether the table of names can take a source, and ``_OTHER`` of each kind and phase after it."""
        size = len(self._identity) + len(self._rows[1]) + len(json.dumps(list(source)))
        return size <= NAMES_HALF - _OTHER_BYTES and len(self.sources) < MAX_SOURCES - _OTHER_SOURCES

    def changed(self) -> None:
        """Signals that the agent needs a report before it reads later events.

        It is one store, so any thread and any signal handler may call it. Call it after the change has been stored.
        """
        if not self._closed:
            self._changes[0] = next(self._change_numbers)

    def positions(self) -> tuple[tuple[int, int], ...]:
        """Returns the number of each ring in shared memory, and the events written to it."""
        return tuple((thread.slot, thread.ring.written) for thread in list(self.threads) if thread.slot >= 0)

    @property
    def changes(self) -> int:
        """Number of the last change."""
        return self._changes[0]

    def _warn_full(self, source: Instrumented) -> None:
        if not self._is_full:
            self._is_full = True
            _log.warning(
                "%.64r is not timed under its own name, because the table of names is full (%d names): its time is exported as "
                "%s, and so is that of further names. Use fewer or shorter names",
                source.name, len(self.sources), _OTHER,
            )  # fmt: skip

    @property
    def device_ring(self) -> memoryview:
        """Memory of the ``DeviceRing``."""
        return self._memory.device_ring

    @property
    def unread(self) -> int:
        """Number of events of threads for which shared memory has no ring: no agent reads them."""
        forgotten = self._unread  # read before the threads, so that no event is counted twice
        return forgotten + sum(thread.ring.written for thread in list(self.threads) if thread.slot < 0)

    def has_own_ring(self) -> bool:
        """Returns whether the calling thread, if it did not make the recorder, has written an event before."""
        return hasattr(self._local, "edge")

    def calling_thread(self) -> ThreadRing | None:
        """Returns the ring of the calling thread; None if it has written nothing."""
        ident = get_ident()
        if self.main.ident == ident and not self.main.ended:
            return self.main
        return next((t for t in reversed(list(self.threads)) if t.ident == ident and not t.ended), None)

    def set_identity(self, identity: dict[str, object]) -> None:
        """Stores the identity of this rank, for readers of the flight file."""
        with self._lock:
            self._identity = json.dumps(identity)
            self._write_names()

    def silence(self) -> None:
        """Ignores all further events: after ``close`` and in forked children."""
        self._closed = True
        for thread in self.threads:
            thread.ring.detach()
            if thread.at_end is not None:  # the finalizer would keep the recorder until the thread ends
                thread.at_end.detach()
        for then in self.when_silenced:
            then()

    def silence_in_fork(self) -> None:
        """Ignores all further events of a forked child, and logs a warning at its first update."""
        self._warns_of_updates = not self._closed
        self.silence()

    def release_memory(self) -> None:
        """Releases the rings' memory; nothing can be read any more."""
        self._changes = memoryview(bytearray(8)).cast("q")
        for thread in self.threads:
            thread.ring.release_memory()

    def _write_from_other_thread(self, code: int) -> None:
        if self._closed:
            if self._warns_of_updates:
                self._warn_of_update(code)
            return
        try:
            edge = self._local.edge
        except AttributeError:
            edge = self._local.edge = _ignore  # of a thread for which the next call fails
            with self._guard:
                edge = self._add_calling_thread()
        edge(code)

    def _warn_of_update(self, code: int) -> None:
        """Logs once that a forked child trains. Only an update shows that: workers of a loader or an evaluation make none."""
        if self.sources[code >> SOURCE_SHIFT & SOURCE_MASK].kind is SourceKind.OPTIMIZER:
            self._warns_of_updates = False
            _log.warning(_FORK_TRAINS, os.getpid())

    def _add_calling_thread(self) -> Callable[[int], None]:
        with self._lock:
            if not self._free_slots:
                self._forget_threads()
            slot = self._free_slots.popleft() if self._free_slots else -1
            thread = self._add_ring(slot)
            thread.engine = self._in_backward() and thread.name.startswith("Dummy")
            self._write_entry(thread)
        self._end_with_thread(thread)
        self._local.edge = thread.ring.edge
        return thread.ring.edge

    def _end_with_thread(self, thread: ThreadRing) -> None:
        """Has ``_end_thread`` called when the calling thread ends."""
        self._local.lifetime = lifetime = _ThreadLifetime()
        thread.at_end = weakref.finalize(lifetime, self._end_thread, thread)
        thread.at_end.atexit = False

    def _forget_threads(self) -> None:
        """Reclaims the shared rings that the agent has read to the end, and drops unshared rings of threads that have ended."""
        self._free_slots.extend(self._memory.free_entries())
        lost = [thread for thread in self.threads if thread.slot < 0 and thread.ended]
        self.threads = [
            each for each in self.threads if each not in lost and each.slot not in self._free_slots
        ]
        self._unread += sum(thread.ring.written for thread in lost)

    def _end_thread(self, thread: ThreadRing) -> None:
        thread.ended = True
        thread.ring.disown()
        if thread.slot >= 0 and not self._closed:
            self._memory.end_entry(thread.slot)

    def _write_entry(self, thread: ThreadRing) -> None:
        if thread.slot >= 0:
            entry = RingEntry(1, thread.ident, 0, thread.name, thread.engine)
            self._memory.write_entry(thread.slot, entry)

    def _add_ring(self, slot: int) -> ThreadRing:
        if slot >= 0:
            words, progress = self._memory.ring_words(slot), self._memory.progress(slot)
            if slot:  # another thread may have used it; ring 0 is always new
                words.cast("B")[:] = bytes(words.nbytes)
                progress[0] = progress[1] = 0
        else:
            words, progress = memoryview(bytearray(_UNREAD_RING_EDGES * EDGE_WORDS * 8)).cast("q"), None
        ident = get_ident()
        others = self._write_from_other_thread
        ring = Ring(words, clock=self._clock, owner=ident, on_other_thread=others, progress=progress)
        thread = ThreadRing(ring, threading.current_thread().name, ident, slot)
        self.threads.append(thread)
        return thread

    def _write_names(self) -> None:
        """Stores the table of names; again if a signal handler has registered a source meanwhile.

        The rows are kept as JSON text: a program that gives every step a name has thousands.
        """
        count = -1
        # Not in a forked child: the memory belongs to its parent.
        while not self._closed and count < len(self.sources):
            count, rows = self._rows
            for source in self.sources[count:]:
                rows += (", " if count else "") + json.dumps(list(source))
                count += 1
            self._rows = count, rows
            self._memory.write_names(f'{{"identity": {self._identity}, "sources": [{rows}]}}')


def _ignore(_code: int) -> None:
    """Writes nothing."""


_recorders: weakref.WeakSet[Recorder] = weakref.WeakSet()


def _silence_all() -> None:
    """Stops recording in a forked child: the memory is shared with its parent."""
    for recorder in list(_recorders):
        recorder.silence_in_fork()


os.register_at_fork(after_in_child=_silence_all)
