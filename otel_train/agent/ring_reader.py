"""Reads the ring buffers of a rank from shared memory."""

from __future__ import annotations

import json
import mmap
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from otel_train.datamodel import Anchor, system_clock
from otel_train.exit_hook import ENDS
from otel_train.exporters.background_queue import DiskQueue
from otel_train.files import make_folder, open_to_write
from otel_train.instrumentation.logged_values import UserEvent, Value, unreported_values
from otel_train.instrumentation.timers import unreported_operations
from otel_train.recording.events import EDGE_WORDS, Instrumented, SourceKind
from otel_train.recording.ring_buffer import SAMPLED, RingReader
from otel_train.recording.shared_memory import (
    HEADER,
    NAMES_OFFSET,
    OVER,
    PAGE,
    RINGS_OFFSET,
    STEPS,
    STEPS_OFFSET,
    WORD,
    DeviceRingReader,
    Header,
    RankMemory,
)
from otel_train.safety import Guard, signal_name

if TYPE_CHECKING:
    from array import array
    from pathlib import Path


_COPY_EVERY_S = 1.0
"""Interval at which new events are copied to ``flight.bin``."""

_UNLIMITED = 1 << 62
_TRIES = 16
"""Attempts to read the table of names while the rank writes it, or to create a file in a folder that is being removed."""

_NOT_COPIED = (
    "until it can be written, which is tried every second, live progress and the last steps of a killed run are missing: "
    "free space for the run directory, or raise ulimit -f, or let this user write there; training is not affected"
)


class SharedRing(RingReader):
    """One ring buffer of another process; ``progress`` is int64[2], see ``Ring``.

    Attributes:
        limit: number of events that may be read: later ones may need a report to be interpreted.
    """

    def __init__(self, words: memoryview, progress: memoryview) -> None:
        super().__init__(words)
        self.limit = _UNLIMITED
        self._progress = progress

    @property
    def written(self) -> int:
        """Number of events written since the ring was made."""
        return self._progress[0] // EDGE_WORDS

    @property
    def spent_ns(self) -> int:
        """Overhead of recording on the thread in nanoseconds, estimated from one event in ``SAMPLED``."""
        return self._progress[1] * SAMPLED

    @property
    def readable(self) -> int:
        """Number of events written, within the limit."""
        return min(self.written, self.limit)


@dataclass(slots=True)
class SharedThread:
    """One recording thread of another process; see ``ThreadRing``."""

    ring: SharedRing
    slot: int
    name: str
    engine: bool
    ended: bool = False


class SharedRings:
    """Reads the shared memory that a ``Recorder`` in another process writes, for the export loop. Any thread may call it.

    Args:
        memory: memory of the rank, or its descriptor.
        copy: path of ``flight.bin``, a copy that is at most a second old; None for no copy.

    Attributes:
        guard: contains the faults of the copy.
        device_ring: reads the records of device events.
        steps: returns the two numbers that the copy stores as ``STEPS``.
    """

    def __init__(
        self, memory: int | memoryview, copy: Path | None = None, disk: DiskQueue | None = None
    ) -> None:
        self._memory = RankMemory(mmap.mmap(memory, 0) if isinstance(memory, int) else memory)
        self._threads: dict[int, SharedThread] = {}
        self._names = b""
        self._spent_before_ns = 0
        self._copy = FlightCopy(copy, self._memory) if copy is not None else None
        self._disk = disk or DiskQueue()
        self._copied_s = 0.0
        # Never switched off: a full disk may accept writes again.
        self.guard = Guard("flight file", limit=sys.maxsize, consequence=_NOT_COPIED)
        self.device_ring = DeviceRingReader(self._memory.device_ring)
        self._limited = True
        self._lock = threading.RLock()  # for `_threads`, and the limits of their rings
        self._reported_changes = -1
        self.steps: Callable[[], tuple[int, int]] = lambda: (0, 0)
        self._sources: list[Instrumented] = []
        self.main = self._find()[0]

    def touch(self) -> None:
        """Allocates all pages of the first ring by reading them: else the training thread has a page fault at every 256th event.

        4 MiB take 3 ms of this process.
        """
        words = np.frombuffer(self._memory.ring_words(0), dtype=np.int64)
        words[:: PAGE // words.itemsize].max()

    def unreported(self, reported: tuple[int, int]) -> tuple[list[Value | UserEvent], array[int], int]:
        """Returns the logged values and timed operations that were not reported, and how many more are lost.

        Call it after the rank has died. ``reported``: that of its last report.
        """
        values, lost_values = unreported_values(self._memory.pending(0), reported[0])
        operations, lost_operations = unreported_operations(self._memory.pending(1), reported[1])
        return values, operations, lost_values + lost_operations

    @property
    def threads(self) -> list[SharedThread]:
        """Threads that write, and threads that have ended and whose rings are not read to the end."""
        return self._find()

    @property
    def sources(self) -> list[Instrumented]:
        """All sources of the events written so far, by number. Always the same list object."""
        self._learn()
        return self._sources

    @property
    def end_state(self) -> tuple[str, bool]:
        """How the rank ended its run, and whether that is assumed; valid if ``ended_ns`` is not 0."""
        state, assumed = self._memory.end_state_words
        return ENDS[state], bool(assumed)

    def _learn(self) -> None:
        for _ in range(_TRIES):  # the rank may write the table at the same time
            text = self._memory.names()
            if text == self._names:
                return
            with suppress(ValueError):  # the text was torn
                found = json.loads(text or b"{}")
                new = found.get("sources", ())[len(self._sources) :]
                self._sources += [Instrumented(SourceKind(kind), *rest) for kind, *rest in new]
                self._names = text
                return

    @property
    def ended_ns(self) -> int:
        """Monotonic time at which the rank ended its run; 0 before."""
        return int(self._memory.ended_word[0])

    def run_clock(self) -> int:
        """Returns the current monotonic time, or that of the end of the run if the rank has ended it and waits for the agent."""
        now_ns = system_clock()
        return self.ended_ns or now_ns

    def limit(self, positions: Iterable[tuple[int, int]] | None, changes: int = 0) -> None:
        """Lets the export loop read each ring up to its position in a report, and other rings not; None: all rings without limit.

        ``positions``: see ``Recorder.positions``. ``changes``: ``RankMemory.changes_word`` before the report.
        """
        by_slot = None if positions is None else dict(positions)
        with self._lock:
            self._limited = by_slot is not None
            self._reported_changes = changes
            for thread in self._find():
                ring = thread.ring
                before = 0 if ring.limit == _UNLIMITED else ring.limit
                ring.limit = _UNLIMITED if by_slot is None else max(before, by_slot.get(thread.slot, 0))

    @property
    def covered(self) -> bool:
        """Whether the events up to now can be interpreted: nothing has changed in the rank since its last report."""
        return not self._limited or self._memory.changes_word[0] == self._reported_changes

    def advance(self) -> None:
        """Lets the export loop read the events up to now, unless the rank has to report first."""
        with self._lock:
            written = [(thread.ring, thread.ring.written) for thread in self._find()]
            # `covered` is read after the positions: the rank changes that word before it writes an event that needs a report.
            if self._limited and self.covered:
                for ring, edges in written:
                    ring.limit = max(ring.limit, edges)

    def release(self, thread: SharedThread) -> None:
        """Frees the ring of a thread that has ended, after it was read to the end. Ring 0 is never given to another thread."""
        if not thread.slot:
            return
        with self._lock:
            self._spent_before_ns += thread.ring.spent_ns
            self._threads.pop(thread.slot, None)
            if self._copy is not None:
                self._copy.released(thread.slot)
            self._memory.free(thread.slot)

    def publish(self, unix_ns: int) -> None:
        """Copies new events to the file if the last copy is ``_COPY_EVERY_S`` old. ``unix_ns``: time of this poll."""
        if time.monotonic() - self._copied_s >= _COPY_EVERY_S:
            self._copied_s = time.monotonic()
            self.copy_now(unix_ns)

    def copy_now(self, unix_ns: int) -> None:
        """Copies new events to the file at once, unless its disk hangs."""
        copy = self._copy
        if copy is not None:
            steps = self.steps()
            self._disk.refresh(self.guard, lambda: copy.save(unix_ns, steps))

    @property
    def ended_by(self) -> str:
        """Name of the signal that ended the process; "" if none was received."""
        number = self._memory.signal_word[0]
        return signal_name(number) if number else ""

    @property
    def spent_ns(self) -> int:
        """Overhead of recording on all threads of the rank in nanoseconds."""
        with self._lock:
            return self._spent_before_ns + sum(thread.ring.spent_ns for thread in self._find())

    def close(self) -> None:
        """Copies the remaining events and closes the file."""
        copy = self._copy
        if copy is not None:
            steps = self.steps()
            self._disk.do(self.guard, lambda: copy.save(time.time_ns(), steps))
            self._disk.do(Guard("flight file"), copy.close)

    def _find(self) -> list[SharedThread]:
        with self._lock:
            for slot, used, _, name, engine in self._memory.entries():
                thread = self._threads.get(slot)
                if thread is None:
                    words, progress = self._memory.ring_words(slot), self._memory.progress(slot)
                    thread = SharedThread(SharedRing(words, progress), slot, name, engine)
                    thread.ring.limit = 0 if self._limited else _UNLIMITED
                    self._threads[slot] = thread
                thread.ended = used == OVER and thread.ring.written <= thread.ring.limit
            return list(self._threads.values())


class FlightCopy:
    """Copies the rings to ``flight.bin``."""

    def __init__(self, path: Path, memory: RankMemory) -> None:
        self._path = path
        self._memory = memory
        self._file = -1
        self._saved: dict[int, tuple[int, bool, int]] = {}
        """By ring, at the last copy: how often it had been released, whether a thread had it, and the words written to it."""
        self._released: Counter[int] = Counter()
        self._names = b""
        header = Header(*HEADER.unpack_from(memory.view))
        self._anchor = Anchor(header.anchor_unix_ns, header.anchor_clock_ns)

    def save(self, unix_ns: int, steps: tuple[int, int]) -> None:
        """Copies the events written since the last call; ``steps``: see ``STEPS``.

        Raises:
            OSError: the disk is full or cannot be reached.
        """
        if self._file >= 0 and not os.fstat(self._file).st_nlink:
            self.close()  # the file was removed while the run goes on
        if self._file < 0:
            self._file = self._opened()
            self._saved.clear()
            self._names = b""
            os.ftruncate(self._file, 0)
            os.ftruncate(self._file, self._memory.end_of_rings)
        # In this order: a ring that is released and reused meanwhile is copied from its beginning, now or at the next call.
        released = self._released.copy()
        positions, names = self._memory.positions(), self._memory.names()
        used = {slot for slot, *_ in self._memory.entries()}
        if names != self._names:
            self._write(NAMES_OFFSET, RINGS_OFFSET)
            self._names = names
        head = bytearray(self._memory.view[:NAMES_OFFSET])
        self._anchor = self._anchor.renewed(system_clock())
        unix, clock = self._anchor
        header = Header(*HEADER.unpack_from(head))
        header = header._replace(anchor_unix_ns=unix, anchor_clock_ns=clock, polled_unix_ns=unix_ns)
        HEADER.pack_into(head, 0, *header)
        STEPS.pack_into(head, STEPS_OFFSET, *steps)
        for slot, words in positions:
            self._save_ring(slot, released[slot], words, used=slot in used)
        os.pwrite(self._file, head, 0)

    def released(self, slot: int) -> None:
        """Records that a ring is freed: the next thread writes it from the beginning."""
        self._released[slot] += 1

    def close(self) -> None:
        """Closes the file."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _opened(self) -> int:
        for _ in range(_TRIES):  # a deletion of the run directory may remove the folder between the two calls
            with suppress(FileNotFoundError):
                make_folder(self._path.parent)
                return open_to_write(self._path)
        return open_to_write(self._path)

    def _save_ring(self, slot: int, released: int, written: int, *, used: bool) -> None:
        offset, size = self._memory.place(slot)
        known, was_used, before = self._saved.get(slot, (released, used, 0))
        if known != released or used > was_used or written < before:  # another thread has, or had, the ring
            before = 0
        first = max(before, written - size)
        while first < written:
            start = first % size
            stop = min(size, start + written - first)
            self._write(offset + start * WORD, offset + stop * WORD)
            first += stop - start
        self._saved[slot] = released, used, written

    def _write(self, start: int, stop: int) -> None:
        while start < stop:  # pwrite(2) may write a part only, on a disk that is nearly full
            start += os.pwrite(self._file, self._memory.view[start:stop], start)
