"""Layout of the memory that a rank shares with its agent: rings, thread names, source names.

The same bytes are the file ``flight.bin``, which ``flight_recorder`` reads.

Layout (little-endian, offsets in bytes):

    0        header     magic, then int64 fields (``Header``), then the signal that came to end the process, then a number
                        that changes when there is something to report, then when the rank ended its run,
                        and how; in the file then the steps that the agent has seen end
    4096     directory  one 128-byte entry per ring (``ENTRY``)
    8192     names      two halves of JSON; the header says which one is whole
    ...      rings      the training thread's first, then the small ones of other threads

Memory that is shared goes on behind the rings, with what devices did (``DeviceRing``), then with logged values and with
operations that wait for a report (``PendingEntries``). No file has that.
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
"""Threads beside the first that have a ring in the file; further ones get plain memory."""

HEADER = struct.Struct("<8s9q")
CHANGES_OFFSET = HEADER.size + 8
ENDED_OFFSET = CHANGES_OFFSET + 8
STEPS_OFFSET = ENDED_OFFSET + 24
STEPS = struct.Struct("<2q")
"""Training steps that the agent has seen end, and when the last of them did, on the monotonic clock; zeros before."""
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
        used: whether a thread has it now (1), had it (2) or never did (0).
        written: edges written when the agent last polled.
        engine: the thread is one of autograd's own.
    """

    used: int
    ident: int
    written: int
    thread: str
    engine: bool = False


class RankMemory:
    """Memory in this layout, for its rank and for the agent.

    Args:
        header: what it begins with; None where that is written already.

    Attributes:
        end_of_rings: where the rings end, in bytes: what a flight file holds.
    """

    def __init__(self, memory: mmap.mmap | memoryview, header: Header | None = None) -> None:
        header = header or Header(*HEADER.unpack_from(memory))
        self.view = memoryview(memory)
        self._rings = header.main_edges, header.side_edges, header.side_rings
        self.end_of_rings = end_of_rings(*self._rings)

    def place(self, slot: int) -> tuple[int, int]:
        """Returns where a ring begins, in bytes, and its words. Ring 0 is the training thread's."""
        offset, edges = ring_place(slot, *self._rings[:2])
        return offset, edges * EDGE_WORDS

    def ring_words(self, slot: int) -> memoryview:
        """Returns the int64 words of a ring."""
        return self._words(*self.place(slot))

    def progress(self, slot: int) -> memoryview:
        """Returns the position of a ring's writer, and the time it has spent."""
        return self._words(PAGE + slot * ENTRY_BYTES + PROGRESS_OFFSET, 2)

    @property
    def signal_word(self) -> memoryview:
        """Number of the signal that ended the process."""
        return self._words(HEADER.size, 1)

    @property
    def changes_word(self) -> memoryview:
        """Count of changes for which the agent has to request a report; see ``Recorder.changed``."""
        return self._words(CHANGES_OFFSET, 1)

    @property
    def ended_word(self) -> memoryview:
        """When the rank ended its run, on the monotonic clock; 0 before. It may wait for the agent then, which is no time of the run."""
        return self._words(ENDED_OFFSET, 1)

    @property
    def end_state_words(self) -> memoryview:
        """How it ended, an index of ``exit_hook.ENDS``, and whether that is assumed; written before ``ended_word``."""
        return self._words(ENDED_OFFSET + WORD, 2)

    @property
    def device_ring(self) -> memoryview:
        """Where it is written what devices did: memory of a ``DeviceRing``."""
        return self._words(self.end_of_rings, DEVICE_RING_WORDS)

    def pending(self, index: int) -> memoryview:
        """Returns the memory of ``PendingEntries``: 0 of logged values, 1 of operations."""
        start = pending_place(index, self.end_of_rings)
        return self.view[start : start + PENDING_BYTES]

    def names(self) -> bytes:
        """Returns the table of names, as text; it may be torn if the rank is writing it."""
        header = Header(*HEADER.unpack_from(self.view))
        start = NAMES_OFFSET + header.names_half * NAMES_HALF
        return bytes(self.view[start : start + header.names_bytes])

    def positions(self) -> list[tuple[int, int]]:
        """Returns of every ring that is or was used: its number, and words written."""
        return [
            (slot, entry[3])
            for slot, entry in self._entries(range(self._rings[2] + 1))
            if entry[0] or entry[3]
        ]

    def entries(self) -> Iterator[tuple[int, int, int, str, bool]]:
        """Yields of every ring that is used: its number, whether its thread is over, and the thread."""
        slots = [slot for slot, used in enumerate(self._lowest_bytes()) if used]  # one or two of sixteen
        for slot, (used, ident, _, _, _, name, engine) in self._entries(slots):
            yield slot, used, ident, name.rstrip(b"\0").decode(errors="replace"), bool(engine)

    def free(self, slot: int) -> None:
        """Frees a ring that has been read to its end: the rank may give it to another thread."""
        self._set_used(slot, FREE)

    def _entries(self, slots: Iterable[int]) -> Iterator[tuple[int, tuple[Any, ...]]]:
        for slot in slots:
            yield slot, ENTRY.unpack_from(self.view, PAGE + slot * ENTRY_BYTES)

    def _lowest_bytes(self) -> bytes:
        """Returns of each entry the first byte, which says whether its ring is used."""
        return bytes(self.view[PAGE : PAGE + (self._rings[2] + 1) * ENTRY_BYTES : ENTRY_BYTES])

    def _set_used(self, slot: int, used: int) -> None:
        offset = PAGE + slot * ENTRY_BYTES
        self.view[offset : offset + WORD] = struct.pack("<q", used)

    def _words(self, offset: int, number: int) -> memoryview:
        return self.view[offset : offset + number * WORD].cast("q")


class FlightMemory(RankMemory):
    """Allocates the memory, shared with an agent. It is not backed by a file.

    Args:
        main_edges: edges of the training thread's ring, a power of two.
        anchor: one instant on both clocks, so that a reader can tell the time.

    Attributes:
        descriptor: what another process is handed to map it; -1 where that cannot be.
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
        """Stores which thread has ring ``index`` and its position. The field that marks it as used is written last."""
        at = PAGE + index * ENTRY_BYTES
        name = struct.pack(f"<{_NAME_BYTES}sq", entry.thread.encode(), int(entry.engine))
        self.view[at + _NAME_OFFSET : at + ENTRY_BYTES] = name
        self.view[at + WORD : at + 3 * WORD] = struct.pack("<2q", entry.ident, entry.written)
        self._set_used(index, entry.used)

    def end_entry(self, index: int) -> None:
        """Records that the thread that has ring ``index`` is over."""
        with contextlib.suppress(ValueError):  # the memory has been given back
            self._set_used(index, OVER)

    def free_entries(self) -> list[int]:
        """Rings that no thread has, and that have been read to their end by whoever shares the memory."""
        return [index for index, used in enumerate(self._lowest_bytes()) if index and not used]

    def write_names(self, names: str) -> None:
        """Stores the names of sources, as JSON in ASCII. If they do not fit, the oldest are kept."""
        if len(names) > NAMES_HALF:
            return
        text = names.encode()
        half = 1 - self._header.names_half
        offset = NAMES_OFFSET + half * NAMES_HALF
        self.view[offset : offset + len(text)] = text
        self._header = self._header._replace(names_half=half, names_bytes=len(text))
        self._write_header()

    def set_descriptor_aside(self) -> None:
        """Moves the descriptor to a number that the program does not reach. Not for the training thread: see ``set_aside``."""
        with self._moving:
            copy = set_aside(self.descriptor) if self.descriptor >= 0 else -1
            if copy >= 0:
                os.close(self.descriptor)
                self.descriptor = copy

    def close(self) -> None:
        """Releases the memory; what a thread still maps is freed with that thread."""
        with self._moving:
            if self.descriptor >= 0:
                with contextlib.suppress(OSError):  # the program has closed it
                    os.close(self.descriptor)
                self.descriptor = -1
        self.view.release()
        with contextlib.suppress(BufferError):  # a thread may still hold its ring: freed with it
            self.map.release()

    def _allocate(self, size: int) -> memoryview:
        try:
            self.descriptor = unnamed_file()
            os.ftruncate(self.descriptor, size)
            return mapped(self.descriptor, size)
        except OSError:
            # None is left, or RLIMIT_FSIZE forbids it: then the agent is a thread of this process.
            if self.descriptor >= 0:
                os.close(self.descriptor)
                self.descriptor = -1
            return memoryview(mmap.mmap(-1, size))

    def _write_header(self) -> None:
        self.view[: HEADER.size] = HEADER.pack(*self._header)


def ring_place(index: int, main_edges: int, side_edges: int) -> tuple[int, int]:
    """Returns where ring ``index`` begins, in bytes, and how many edges it holds."""
    if index == 0:
        return RINGS_OFFSET, main_edges
    past = main_edges + (index - 1) * side_edges
    return RINGS_OFFSET + past * EDGE_WORDS * WORD, side_edges


def pending_place(index: int, end_of_rings: int) -> int:
    """Returns where the memory of ``PendingEntries`` ``index`` begins, in bytes."""
    return end_of_rings + DEVICE_RING_WORDS * WORD + index * PENDING_BYTES


def end_of_rings(main_edges: int, side_edges: int, side_rings: int) -> int:
    """Returns where the rings end, in bytes from the beginning: what a flight file holds."""
    offset, edges = ring_place(side_rings, main_edges, side_edges)
    return offset + edges * EDGE_WORDS * WORD


# --- what devices did -------------------------------------------------------------------------------
# int64 words: a head (records written in all, the instant until which it is complete, six unused), then ``RECORDS`` records
# of ``RECORD_WORDS``. One writer: ``DeviceRing``, or the reader of device events in ``_device_events.c``.

MOST_DEVICES = 16
"""Devices of one process whose time is taken, at most."""

HEAD_WORDS = 8
_FIXED_WORDS = 6
RECORD_WORDS = _FIXED_WORDS + MOST_DEVICES
RECORDS = 4096
DEVICE_RING_WORDS = HEAD_WORDS + RECORDS * RECORD_WORDS


class Record(FastNamedTuple):
    """Time at which a device reached an event, or a stamp: an event that a device reached as soon as it was recorded.

    Attributes:
        devices: that the edge was recorded on; 0 for a stamp, which is of the first device.
        host_ns: when the host recorded the edge.
        code: of the edge. With op ``MARK`` it is the first of a step that is not timed: the last of the one before, and
            nothing else.
        since_ns: the first device had not got there before; on the host's clock.
        reached_ns: it had by then.
        elapsed_ns: by device, from the edge before to this one, on the device's clock; 0 for a device that the edge before
            was not recorded on.
    """

    devices: int
    host_ns: int
    code: int
    step: int
    since_ns: int
    reached_ns: int
    elapsed_ns: tuple[int, ...]


class DeviceRing:
    """Writes records; ``_device_events.c`` does the same in C."""

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
        missed: records that were overwritten before they could be read.
    """

    def __init__(self, words: memoryview) -> None:
        self.missed = 0
        self._words = words
        self._taken = 0

    def read(self) -> tuple[list[Record], int]:
        """Returns every record since the last call, and the instant until which they are complete; 0 while no device is timed."""
        until_ns, written = self._words[1], self._words[0]
        first = max(self._taken, written - RECORDS)
        records = [self._record(number) for number in range(first, written)]
        # The slot after the published number may be half written: it held the record one lap earlier.
        whole = max(first, min(written, self._words[0] + 1 - RECORDS))
        self.missed += whole - self._taken
        self._taken = written
        return records[whole - first :], until_ns

    def _record(self, number: int) -> Record:
        at = HEAD_WORDS + number % RECORDS * RECORD_WORDS
        devices, host_ns, code, step, since_ns, reached_ns = self._words[at : at + _FIXED_WORDS]
        elapsed_ns = self._words[at + _FIXED_WORDS : at + _FIXED_WORDS + max(1, devices)]
        return Record(devices, host_ns, code, step, since_ns, reached_ns, tuple(elapsed_ns))


# --- what waits for a report ------------------------------------------------------------------------
# Kept where the agent finds it if the process is killed before: a head (one int64: entries that have been reported) and
# ``ENTRIES`` slots. A slot has the number of its entry plus one, which is written last, then a kind, three int64, a float64,
# and text. One thread at a time writes a slot.

ENTRIES = 4096
SLOT_BYTES = 256
_NUMBER = struct.Struct("<q")
_BODY = struct.Struct("<4qdq")
_HEAD_BYTES = _NUMBER.size
_TEXT = _HEAD_BYTES + _BODY.size
TEXT_BYTES = SLOT_BYTES - _TEXT
"""An entry with a longer text is not kept: it is lost with the process, as a tensor that was not read is."""

PENDING_BYTES = _HEAD_BYTES + ENTRIES * SLOT_BYTES


class PendingEntry(FastNamedTuple):
    """One numbered entry: a logged value or timed operation.

    Attributes:
        numbers: three integers; the caller's.
    """

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
        self._numbers = itertools.count()  # a call of next() is whole, whatever thread makes it

    def add(
        self, kind: int, first: int, second: int = 0, third: int = 0, *, value: float = 0.0, text: str = ""
    ) -> int:
        """Keeps a ``PendingEntry`` of these; kind 0: number one that cannot be kept. Returns its number."""
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
        """Keeps nothing more: the memory is given back, or is that of the parent of this process."""
        self._memory = None


def unreported(memory: memoryview) -> list[PendingEntry]:
    """Entries that were never reported, oldest first. Call it after the writer has died.

    A slot that was half written, or holds what cannot be read, is left out.
    """
    (reported,) = _NUMBER.unpack_from(memory)
    found = []
    for number in range(reported, reported + ENTRIES):
        at = _HEAD_BYTES + number % ENTRIES * SLOT_BYTES
        if _NUMBER.unpack_from(memory, at)[0] != number + 1:
            continue
        kind, first, second, third, value, length = _BODY.unpack_from(memory, at + _HEAD_BYTES)
        text = bytes(memory[at + _TEXT : at + _TEXT + length]) if 0 <= length <= TEXT_BYTES else b""
        with contextlib.suppress(UnicodeDecodeError):  # the process wrote over its own memory before it ended
            found.append(PendingEntry(kind, (first, second, third), value, text.decode()))
    return found
