"""Layout of the memory that a rank shares with its agent: rings, thread names, source names.

The same bytes are the file ``flight.bin``, which ``flight_recorder`` reads.

Layout (little-endian, offsets in bytes):

    0        header     magic, then int64 fields (``Header``), then the number of the signal that ended the process, then a
                        number that changes when the rank has something to report, then when and how the rank ended its run;
                        in the file also the number of steps that the agent has seen end (``STEPS``)
    4096     directory  one 128-byte entry per ring (``ENTRY``)
    8192     names      two halves of JSON; the header says which one is valid
    ...      rings      that of the training thread, then the smaller ones of other threads

Behind the rings the memory, but not the file, has the records of device events (``DeviceRing``), then the logged values and the
operations that wait for a report (``PendingEntries``).
"""

from __future__ import annotations

import contextlib
import itertools
import mmap
import os
import struct
import threading
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from otel_train.fast_classes import FastNamedTuple
from otel_train.recording.descriptors import mapped, set_aside, unnamed_file
from otel_train.recording.events import EDGE_WORDS
from otel_train.safety import free_in_forks

if TYPE_CHECKING:
    from otel_train.datamodel import Anchor

MAGIC = b"OTELTRN1"
PAGE = 4096
SIDE_RINGS = 15
"""Threads besides the training thread that have a shared ring; rings of further threads are not shared, and never read."""

HEADER = struct.Struct("<8s9q")
CHANGES_OFFSET = HEADER.size + 8
ENDED_OFFSET = CHANGES_OFFSET + 8
STEPS_OFFSET = ENDED_OFFSET + 24
STEPS = struct.Struct("<2q")
"""Training steps that the agent has seen end, and when the last of them ended, on the monotonic clock; zeros before."""
ENTRY = struct.Struct("<5q80sq")
ENTRY_BYTES = 128
PROGRESS_OFFSET = 24
_NAME_OFFSET = 40
_NAME_BYTES = 80
FREE, OVER = 0, 2
NAMES_OFFSET = 2 * PAGE
NAMES_HALF = 128 * 1024
RINGS_OFFSET = NAMES_OFFSET + 2 * NAMES_HALF
_SIDE_EDGES = 8192
WORD = 8


class Header(FastNamedTuple):
    """Header of the memory, as ``HEADER`` packs it."""

    magic: bytes
    pid: int
    anchor_unix_ns: int
    anchor_clock_ns: int
    main_edges: int
    side_edges: int
    side_rings: int
    names_half: int
    names_bytes: int
    polled_unix_ns: int


class RingEntry(FastNamedTuple):
    """Table entry of one ring.

    Attributes:
        used: 1: a thread has the ring; 2 (``OVER``): that thread has ended; 0 (``FREE``): no thread has it.
        written: number of events written when the agent last polled.
        engine: whether the thread is a worker thread of autograd.
    """

    used: int
    ident: int
    written: int
    thread: str
    engine: bool = False


class RankMemory:
    """Accesses memory in this layout, in the rank and in the agent.

    Args:
        header: the header that will be written to it; None to read the one that it has.

    Attributes:
        end_of_rings: offset of the end of the rings in bytes, which is the size of a flight file.
    """

    def __init__(self, memory: mmap.mmap | memoryview, header: Header | None = None) -> None:
        header = header or Header(*HEADER.unpack_from(memory))
        self.view = memoryview(memory)
        self._rings = header.main_edges, header.side_edges, header.side_rings
        self.end_of_rings = end_of_rings(*self._rings)

    def place(self, slot: int) -> tuple[int, int]:
        """Returns the offset of a ring in bytes, and its size in words. Ring 0 is that of the training thread."""
        offset, edges = ring_place(slot, *self._rings[:2])
        return offset, edges * EDGE_WORDS

    def ring_words(self, slot: int) -> memoryview:
        """Returns the int64 words of a ring."""
        return self._words(*self.place(slot))

    def progress(self, slot: int) -> memoryview:
        """Returns the two words ``progress`` of a ring; see ``Ring``."""
        return self._words(PAGE + slot * ENTRY_BYTES + PROGRESS_OFFSET, 2)

    @property
    def signal_word(self) -> memoryview:
        """Number of the signal that ended the process; 0 for none."""
        return self._words(HEADER.size, 1)

    @property
    def changes_word(self) -> memoryview:
        """Count of changes for which the agent has to request a report; see ``Recorder.changed``."""
        return self._words(CHANGES_OFFSET, 1)

    @property
    def ended_word(self) -> memoryview:
        """Time at which the rank ended its run, on the monotonic clock; 0 before. Its wait for the agent afterwards is not run time."""
        return self._words(ENDED_OFFSET, 1)

    @property
    def end_state_words(self) -> memoryview:
        """How the run ended, an index of ``exit_hook.ENDS``, and whether that is assumed; written before ``ended_word``."""
        return self._words(ENDED_OFFSET + WORD, 2)

    @property
    def device_ring(self) -> memoryview:
        """Memory of the ``DeviceRing``."""
        return self._words(self.end_of_rings, DEVICE_RING_WORDS)

    def pending(self, index: int) -> memoryview:
        """Returns the memory of ``PendingEntries``; index 0: logged values, 1: operations."""
        start = pending_place(index, self.end_of_rings)
        return self.view[start : start + PENDING_BYTES]

    def names(self) -> bytes:
        """Returns the table of names as JSON text; it may be torn if the rank writes it at the same time."""
        header = Header(*HEADER.unpack_from(self.view))
        start = NAMES_OFFSET + header.names_half * NAMES_HALF
        return bytes(self.view[start : start + header.names_bytes])

    def positions(self) -> list[tuple[int, int]]:
        """Returns number and written words of every ring that is or was in use."""
        return [
            (slot, entry[3])
            for slot, entry in self._entries(range(self._rings[2] + 1))
            if entry[0] or entry[3]
        ]

    def entries(self) -> Iterator[tuple[int, int, int, str, bool]]:
        """Yields, for every ring in use, its number, ``used``, and identity, name and ``engine`` of its thread; see ``RingEntry``."""
        slots = [slot for slot, used in enumerate(self._lowest_bytes()) if used]  # mostly 1 or 2 of 16
        for slot, (used, ident, _, _, _, name, engine) in self._entries(slots):
            yield slot, used, ident, name.rstrip(b"\0").decode(errors="replace"), bool(engine)

    def free(self, slot: int) -> None:
        """Frees a ring that has been read to its end, so that the rank can give it to another thread."""
        self._set_used(slot, FREE)

    def _entries(self, slots: Iterable[int]) -> Iterator[tuple[int, tuple[Any, ...]]]:
        for slot in slots:
            yield slot, ENTRY.unpack_from(self.view, PAGE + slot * ENTRY_BYTES)

    def _lowest_bytes(self) -> bytes:
        """Returns the lowest byte of ``used`` of each entry."""
        return bytes(self.view[PAGE : PAGE + (self._rings[2] + 1) * ENTRY_BYTES : ENTRY_BYTES])

    def _set_used(self, slot: int, used: int) -> None:
        offset = PAGE + slot * ENTRY_BYTES
        self.view[offset : offset + WORD] = struct.pack("<q", used)

    def _words(self, offset: int, number: int) -> memoryview:
        return self.view[offset : offset + number * WORD].cast("q")


class FlightMemory(RankMemory):
    """Allocates anonymous memory that an agent can map, and writes to it in the rank.

    Args:
        main_edges: number of events that the ring of the training thread holds, a power of two.
        anchor: one moment on both clocks, so that a reader can convert times to wall-clock time.

    Attributes:
        descriptor: passed to the agent process, which maps it; -1 if the memory cannot be shared.
    """

    def __init__(self, main_edges: int, anchor: Anchor) -> None:
        self.descriptor = -1
        self._moving = free_in_forks(threading.Lock())
        rings = main_edges, _SIDE_EDGES, SIDE_RINGS
        self.map = self._allocate(pending_place(2, end_of_rings(*rings)))
        self._header = Header(MAGIC, os.getpid(), *anchor, *rings, 0, 0, anchor.unix_ns)
        super().__init__(self.map, self._header)
        self._write_header()

    def write_entry(self, index: int, entry: RingEntry) -> None:
        """Stores which thread has ring ``index``. The field that marks it as used is written last."""
        at = PAGE + index * ENTRY_BYTES
        name = struct.pack(f"<{_NAME_BYTES}sq", entry.thread.encode(errors="replace"), int(entry.engine))
        self.view[at + _NAME_OFFSET : at + ENTRY_BYTES] = name
        self.view[at + WORD : at + 3 * WORD] = struct.pack("<2q", entry.ident, entry.written)
        self._set_used(index, entry.used)

    def end_entry(self, index: int) -> None:
        """Records that the thread that has ring ``index`` has ended."""
        with contextlib.suppress(ValueError):  # the memory has been released
            self._set_used(index, OVER)

    def free_entries(self) -> list[int]:
        """Returns the rings that no thread has and that the agent has read to the end."""
        return [index for index, used in enumerate(self._lowest_bytes()) if index and not used]

    def write_names(self, names: str) -> None:
        """Stores the names of sources, as JSON in ASCII. A table that does not fit is left out; the previous one stays."""
        if len(names) > NAMES_HALF:
            return
        text = names.encode()
        half = 1 - self._header.names_half
        offset = NAMES_OFFSET + half * NAMES_HALF
        self.view[offset : offset + len(text)] = text
        self._header = self._header._replace(names_half=half, names_bytes=len(text))
        self._write_header()

    def set_descriptor_aside(self) -> None:
        """Moves the descriptor to a number that the program does not reach; slow, see ``descriptors.set_aside``."""
        with self._moving:
            copy = set_aside(self.descriptor) if self.descriptor >= 0 else -1
            if copy >= 0:
                os.close(self.descriptor)
                self.descriptor = copy

    def close(self) -> None:
        """Releases the memory; the mapping lasts as long as a thread holds its ring."""
        with self._moving:
            if self.descriptor >= 0:
                with contextlib.suppress(OSError):  # the program has closed it
                    os.close(self.descriptor)
                self.descriptor = -1
        self.view.release()
        with contextlib.suppress(BufferError):  # a thread still holds its ring
            self.map.release()

    def _allocate(self, size: int) -> memoryview:
        try:
            self.descriptor = unnamed_file()
            os.ftruncate(self.descriptor, size)
            return mapped(self.descriptor, size)
        except OSError:
            # No descriptor is left, or RLIMIT_FSIZE forbids the size: the agent runs in a thread of this process.
            if self.descriptor >= 0:
                os.close(self.descriptor)
                self.descriptor = -1
            return memoryview(mmap.mmap(-1, size))

    def _write_header(self) -> None:
        self.view[: HEADER.size] = HEADER.pack(*self._header)


def ring_place(index: int, main_edges: int, side_edges: int) -> tuple[int, int]:
    """Returns the offset of ring ``index`` in bytes, and the number of events that it holds."""
    if index == 0:
        return RINGS_OFFSET, main_edges
    past = main_edges + (index - 1) * side_edges
    return RINGS_OFFSET + past * EDGE_WORDS * WORD, side_edges


def pending_place(index: int, end_of_rings: int) -> int:
    """Returns the offset of the memory of ``PendingEntries`` ``index`` in bytes; see ``RankMemory.pending``."""
    return end_of_rings + DEVICE_RING_WORDS * WORD + index * PENDING_BYTES


def end_of_rings(main_edges: int, side_edges: int, side_rings: int) -> int:
    """Returns the offset of the end of the rings in bytes, which is the size of a flight file."""
    offset, edges = ring_place(side_rings, main_edges, side_edges)
    return offset + edges * EDGE_WORDS * WORD


# --- records of device events -----------------------------------------------------------------------
# int64 words: a head (records written so far, monotonic time up to which they are complete, six unused), then ``RECORDS`` records
# of ``RECORD_WORDS``. One writer: ``DeviceRing``, or the reader of device events in ``_device_events.c``.

MOST_DEVICES = 16
"""Most devices of one process whose time is measured."""

HEAD_WORDS = 8
_FIXED_WORDS = 6
RECORD_WORDS = _FIXED_WORDS + MOST_DEVICES
RECORDS = 4096
DEVICE_RING_WORDS = HEAD_WORDS + RECORDS * RECORD_WORDS


class Record(FastNamedTuple):
    """Time at which devices reached a device event, or a stamp: a device event that was reached as soon as it was recorded.

    Attributes:
        devices: number of devices that the event was recorded on; 0 for a stamp, which is of the first device.
        host_ns: when the host recorded the event.
        code: code of the event in the ring. With op ``MARK`` a step that is not timed begins here, and the event only ends the
            step before.
        since_ns: latest time, on the host's clock, at which the first device is known not to have reached the event.
        reached_ns: earliest time, on the host's clock, at which it is known to have reached it.
        elapsed_ns: by device, time from the event before to this one, on the device's clock; 0 for a device that the event
            before was not recorded on.
    """

    devices: int
    host_ns: int
    code: int
    step: int
    since_ns: int
    reached_ns: int
    elapsed_ns: tuple[int, ...]


class DeviceRing:
    """Writes ``Record`` objects to shared memory; ``_device_events.c`` does the same in C."""

    def __init__(self, words: memoryview) -> None:
        self._words = words

    def write(self, record: Record) -> None:
        """Writes one record. The count is written last, so records below it are complete."""
        words, written = self._words, self._words[0]
        at = HEAD_WORDS + written % RECORDS * RECORD_WORDS
        for place, word in enumerate((*record[:-1], *record.elapsed_ns), at):
            words[place] = word
        words[0] = written + 1

    def complete(self, until_ns: int) -> None:
        """Marks that no further record of events before ``until_ns`` follows."""
        self._words[1] = until_ns


class DeviceRingReader:
    """Reads records without blocking their writer.

    Attributes:
        missed: number of records that were overwritten before they could be read.
    """

    def __init__(self, words: memoryview) -> None:
        self.missed = 0
        self._words = words
        self._taken = 0

    def read(self) -> tuple[list[Record], int]:
        """Returns the records since the last call, and the time up to which they are complete; 0 while no device is timed."""
        until_ns, written = self._words[1], self._words[0]
        first = max(self._taken, written - RECORDS)
        records = [self._record(number) for number in range(first, written)]
        # The slot after the published number may be half written; its former record is ``RECORDS`` records older.
        whole = max(first, min(written, self._words[0] + 1 - RECORDS))
        self.missed += whole - self._taken
        self._taken = written
        return records[whole - first :], until_ns

    def _record(self, number: int) -> Record:
        at = HEAD_WORDS + number % RECORDS * RECORD_WORDS
        devices, host_ns, code, step, since_ns, reached_ns = self._words[at : at + _FIXED_WORDS]
        elapsed_ns = self._words[at + _FIXED_WORDS : at + _FIXED_WORDS + max(1, devices)]
        return Record(devices, host_ns, code, step, since_ns, reached_ns, tuple(elapsed_ns))


# --- entries that wait for a report -----------------------------------------------------------------
# In shared memory, so that the agent has them if the process is killed before its next report: a head (one int64: number of
# reported entries) and ``ENTRIES`` slots. A slot has the number of its entry plus one, which is written last, then a kind, three
# int64, a float64, the length of a text, and the text. One thread at a time writes a slot.

ENTRIES = 4096
SLOT_BYTES = 256
_NUMBER = struct.Struct("<q")
_BODY = struct.Struct("<4qdq")
_HEAD_BYTES = _NUMBER.size
_TEXT = _HEAD_BYTES + _BODY.size
TEXT_BYTES = SLOT_BYTES - _TEXT
"""Longest text in bytes. An entry with a longer text is not kept here, and lost if the process is killed."""

PENDING_BYTES = _HEAD_BYTES + ENTRIES * SLOT_BYTES

_MOST_UNREPORTED = 1 << 24
"""Most entries that can wait for a report; a slot with a higher number has been overwritten by a process that crashed."""


class PendingEntry(FastNamedTuple):
    """One numbered entry: a logged value or timed operation. The writer defines its fields."""

    kind: int
    numbers: tuple[int, int, int] = (0, 0, 0)
    value: float = 0.0
    text: str = ""


class PendingEntries:
    """Numbers entries and keeps the last ``ENTRIES`` in shared memory, if there is any.

    Args:
        memory: ``PENDING_BYTES`` of memory that another process reads; None where none does.
    """

    def __init__(self, memory: memoryview | None = None) -> None:
        self._memory = memory
        self._numbers = itertools.count()  # next() of it is atomic

    def add(
        self, kind: int, first: int, second: int = 0, third: int = 0, *, value: float = 0.0, text: str = ""
    ) -> int:
        """Stores a ``PendingEntry`` of these and returns its number; kind 0: only numbers an entry that cannot be stored."""
        number, memory = next(self._numbers), self._memory
        if not kind or memory is None:
            return number
        encoded = text.encode(errors="replace")
        length = len(encoded)
        if length <= TEXT_BYTES:
            at = _HEAD_BYTES + number % ENTRIES * SLOT_BYTES
            _BODY.pack_into(memory, at + _HEAD_BYTES, kind, first, second, third, value, length)
            memory[at + _TEXT : at + _TEXT + length] = encoded
            _NUMBER.pack_into(memory, at, number + 1)
        return number

    def report(self, before: int) -> None:
        """Records that all entries with a lower number have been reported."""
        if self._memory is not None:
            _NUMBER.pack_into(self._memory, 0, before)

    def release_memory(self) -> None:
        """Stores nothing more: the memory is released, or belongs to the parent of this forked process."""
        self._memory = None


def unreported(memory: memoryview, since: int = 0) -> tuple[list[PendingEntry], int]:
    """Returns the entries from number ``since`` on that were never reported, oldest first, and how many later ones have replaced.

    Call it after the writer has died. A slot that is half written or unreadable is left out.
    """
    since = max(since, *_NUMBER.unpack_from(memory))
    found: dict[int, PendingEntry] = {}
    newest = -1
    for slot in range(ENTRIES):
        at = _HEAD_BYTES + slot * SLOT_BYTES
        number = _NUMBER.unpack_from(memory, at)[0] - 1
        if number % ENTRIES != slot or not since <= number < since + _MOST_UNREPORTED:
            continue
        newest = max(newest, number)
        kind, first, second, third, value, length = _BODY.unpack_from(memory, at + _HEAD_BYTES)
        text = bytes(memory[at + _TEXT : at + _TEXT + length]) if 0 <= length <= TEXT_BYTES else b""
        with contextlib.suppress(UnicodeDecodeError):  # the process wrote over its own memory before it ended
            found[number] = PendingEntry(kind, (first, second, third), value, text.decode())
    oldest_slot = newest + 1 - ENTRIES
    replaced = max(0, oldest_slot - since) - sum(number < oldest_slot for number in found)
    return [found[number] for number in sorted(found)], replaced
