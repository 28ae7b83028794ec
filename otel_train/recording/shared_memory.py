"""The memory that a rank records to: rings, names of threads, names of sources, in one fixed layout.

The same bytes are the file ``flight.bin``, which ``flight_recorder`` reads.

Layout (little-endian, offsets in bytes):

    0        header     magic, then int64 fields (``Header``), then the signal that came to end the process, then a number
                        that changes when there is something to report
    4096     directory  one 128-byte entry per ring (``ENTRY``)
    8192     names      two halves of JSON; the header says which one is whole
    ...      rings      the training thread's first, then the small ones of other threads

Memory that is shared goes on behind the rings, with what devices did (``device_ring``), then with logged values and with
operations that wait for a report (``pending_entries``). No file has that.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import struct
import tempfile
from typing import TYPE_CHECKING, Any

from otel_train.fast_classes import FastNamedTuple
from otel_train.recording.device_ring import DEVICE_RING_WORDS
from otel_train.recording.events import EDGE_WORDS
from otel_train.recording.pending_entries import PENDING_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from otel_train.datamodel import Anchor

MAGIC = b"OTELTRN1"
PAGE = 4096
SIDE_RINGS = 15
"""Threads beside the first that have a ring in the file; further ones get plain memory."""

HEADER = struct.Struct("<8s9q")
TURN_OFFSET = HEADER.size - 8
CHANGES_OFFSET = HEADER.size + 8
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
    """What a file begins with, as ``HEADER`` packs it."""

    magic: bytes
    pid: int
    anchor_unix_ns: int
    anchor_clock_ns: int
    main_edges: int
    side_edges: int
    side_rings: int
    names_half: int
    names_bytes: int
    turn_unix_ns: int


class RingEntry(FastNamedTuple):
    """What the file knows of one ring.

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
    """Memory in this layout: where what lies, for its rank and for the agent that reads it.

    Args:
        memory: a buffer.
        header: what it begins with; None where that is written already.

    Attributes:
        view: all of it.
        end_of_rings: where the rings end, in bytes: what a flight file holds.
    """

    def __init__(self, memory: mmap.mmap, header: Header | None = None) -> None:
        header = header or Header(*HEADER.unpack_from(memory))
        self.view = memoryview(memory)
        self._rings = header.main_edges, header.side_edges, header.side_rings
        self.end_of_rings = end_of_rings(*self._rings)

    def place(self, slot: int) -> tuple[int, int]:
        """Where a ring begins, in bytes, and its words. Ring 0 is the training thread's, the others are of side threads."""
        offset, edges = ring_place(slot, *self._rings[:2])
        return offset, edges * EDGE_WORDS

    def ring_words(self, slot: int) -> memoryview:
        """The int64 words of a ring."""
        return self._words(*self.place(slot))

    def progress(self, slot: int) -> memoryview:
        """Where the writer of a ring says how far it is, and what that took."""
        return self._words(PAGE + slot * ENTRY_BYTES + PROGRESS_OFFSET, 2)

    @property
    def signal_word(self) -> memoryview:
        """Where the number of a signal goes that came to end the process."""
        return self._words(HEADER.size, 1)

    @property
    def changes_word(self) -> memoryview:
        """Where it is counted what an agent has to ask the rank for; see ``Recorder.changed``."""
        return self._words(CHANGES_OFFSET, 1)

    @property
    def device_ring(self) -> memoryview:
        """Where it is written what devices did: memory of a ``DeviceRing``."""
        return self._words(self.end_of_rings, DEVICE_RING_WORDS)

    def pending(self, index: int) -> memoryview:
        """Memory of ``PendingEntries``: 0 of logged values, 1 of operations."""
        start = pending_place(index, self.end_of_rings)
        return self.view[start : start + PENDING_BYTES]

    def names(self) -> bytes:
        """The table of names, as text; it may be torn if the rank is writing it."""
        header = Header(*HEADER.unpack_from(self.view))
        start = NAMES_OFFSET + header.names_half * NAMES_HALF
        return bytes(self.view[start : start + header.names_bytes])

    def positions(self) -> list[tuple[int, int]]:
        """Of every ring that is or was used: its number, and words written."""
        return [(slot, entry[3]) for slot, entry in self._entries() if entry[0]]

    def entries(self) -> Iterator[tuple[int, int, int, str, bool]]:
        """Of every ring that is used: its number, whether its thread is over, and the thread."""
        for slot, (used, ident, _, _, _, name, engine) in self._entries():
            if used:
                yield slot, used, ident, name.rstrip(b"\0").decode(errors="replace"), bool(engine)

    def free(self, slot: int) -> None:
        """The ring has been read to its end: the rank may give it to another thread."""
        self._set_used(slot, FREE)

    def _entries(self) -> Iterator[tuple[int, tuple[Any, ...]]]:
        for slot in range(self._rings[2] + 1):
            yield slot, ENTRY.unpack_from(self.view, PAGE + slot * ENTRY_BYTES)

    def _set_used(self, slot: int, used: int) -> None:
        offset = PAGE + slot * ENTRY_BYTES
        self.view[offset : offset + WORD] = struct.pack("<q", used)

    def _words(self, offset: int, number: int) -> memoryview:
        return self.view[offset : offset + number * WORD].cast("q")


class FlightMemory(RankMemory):
    """Memory for the rings: of this process, or shared with an agent that reads it. No disk stands behind it.

    Args:
        main_edges: edges of the training thread's ring, a power of two.
        anchor: one instant on both clocks, so that a reader can tell the time.
        shared: an agent reads it.
        make: memory of so many bytes; where it is not shared.

    Attributes:
        descriptor: what another process is handed to map it; -1 where that cannot be.
    """

    def __init__(
        self,
        main_edges: int,
        anchor: Anchor,
        *,
        shared: bool = False,
        make: Callable[[int], mmap.mmap] = lambda size: mmap.mmap(-1, size),
    ) -> None:
        self.descriptor = -1
        self.shared = shared
        rings = main_edges, _SIDE_EDGES, SIDE_RINGS
        size = pending_place(2, end_of_rings(*rings))
        self.map = self._share(size) if shared else make(size)
        self._header = Header(MAGIC, os.getpid(), *anchor, *rings, 0, 0, anchor.unix_ns)
        super().__init__(self.map, self._header)
        self._write_header()

    def write_entry(self, index: int, entry: RingEntry) -> None:
        """Say which thread has ring ``index``, and how far it is. Whether it is used is said last."""
        at = PAGE + index * ENTRY_BYTES
        name = struct.pack(f"<{_NAME_BYTES}sq", entry.thread.encode(), int(entry.engine))
        self.view[at + _NAME_OFFSET : at + ENTRY_BYTES] = name
        self.view[at + WORD : at + 3 * WORD] = struct.pack("<2q", entry.ident, entry.written)
        self._set_used(index, entry.used)

    def end_entry(self, index: int) -> None:
        """The thread that has ring ``index`` is over."""
        with contextlib.suppress(ValueError):  # the memory has been given back
            self._set_used(index, OVER)

    def free_entries(self) -> list[int]:
        """Rings that no thread has, and that have been read to their end by whoever shares the memory."""
        lowest_bytes = self.view[PAGE : PAGE + (SIDE_RINGS + 1) * ENTRY_BYTES : ENTRY_BYTES]
        return [index for index, used in enumerate(lowest_bytes) if index and not used]

    def write_names(self, names: dict[str, Any]) -> None:
        """Store what a reader needs to understand the codes. Too much to hold is left out, oldest kept."""
        text = json.dumps(names).encode()
        if len(text) > NAMES_HALF:
            return
        half = 1 - self._header.names_half
        offset = NAMES_OFFSET + half * NAMES_HALF
        self.view[offset : offset + len(text)] = text
        self._header = self._header._replace(names_half=half, names_bytes=len(text))
        self._write_header()

    def write_heartbeat(self, unix_ns: int) -> None:
        """Write that the agent polled at ``unix_ns``."""
        self._header = self._header._replace(turn_unix_ns=unix_ns)
        self._write_header()

    def close(self) -> None:
        """Release the memory; what a thread still maps is freed with that thread."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1
        self.view.release()
        with contextlib.suppress(BufferError):  # a thread may still hold its ring: freed with it
            self.map.close()

    def _share(self, size: int) -> mmap.mmap:
        try:
            self.descriptor = _anonymous()
            os.ftruncate(self.descriptor, size)
            return mmap.mmap(self.descriptor, size)
        except OSError:
            # None is left, or RLIMIT_FSIZE forbids it: then the agent is a thread of this process.
            if self.descriptor >= 0:
                os.close(self.descriptor)
                self.descriptor = -1
            return mmap.mmap(-1, size)

    def _write_header(self) -> None:
        self.view[: HEADER.size] = HEADER.pack(*self._header)


def _anonymous() -> int:
    """A descriptor of memory without a name; of a file without one where the system has no such memory.

    Raises:
        OSError: neither can be had.
    """
    if hasattr(os, "memfd_create"):
        return os.memfd_create("otel_train", os.MFD_CLOEXEC)
    with tempfile.TemporaryFile() as opened:
        return os.dup(opened.fileno())


def ring_place(index: int, main_edges: int, side_edges: int) -> tuple[int, int]:
    """Where ring ``index`` begins, in bytes, and how many edges it holds."""
    if index == 0:
        return RINGS_OFFSET, main_edges
    past = main_edges + (index - 1) * side_edges
    return RINGS_OFFSET + past * EDGE_WORDS * WORD, side_edges


def pending_place(index: int, end_of_rings: int) -> int:
    """Where the memory of ``PendingEntries`` ``index`` begins, in bytes."""
    return end_of_rings + DEVICE_RING_WORDS * WORD + index * PENDING_BYTES


def end_of_rings(main_edges: int, side_edges: int, side_rings: int) -> int:
    """Where the rings end, in bytes from the beginning: what a flight file holds."""
    offset, edges = ring_place(side_rings, main_edges, side_edges)
    return offset + edges * EDGE_WORDS * WORD
