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
    from collections.abc import Callable

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


class FlightMemory:
    """Memory for the rings: of this process, or shared with an agent that reads it. No disk stands behind it.

    Args:
        main_edges: edges of the training thread's ring, a power of two.
        anchor: one instant on both clocks, so that a reader can tell the time.
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
        self._main_edges = main_edges
        self._device_ring = end_of_rings(main_edges, _SIDE_EDGES, SIDE_RINGS)
        self._bytes = pending_place(2, self._device_ring)
        self.map = self._share() if shared else make(self._bytes)
        self._view = memoryview(self.map)
        self._header = Header(
            MAGIC, os.getpid(), *anchor, main_edges, _SIDE_EDGES, SIDE_RINGS, 0, 0, anchor.unix_ns
        )
        self._write_header()

    def ring_words(self, index: int) -> memoryview:
        """int64 memory of ring ``index``: 0 is the training thread's, 1 to ``SIDE_RINGS`` the others."""
        offset, edges = ring_place(index, self._main_edges, _SIDE_EDGES)
        return words(self._view[offset : offset + edges * EDGE_WORDS * WORD])

    @property
    def signal_word(self) -> memoryview:
        """Where the number of a signal goes that came to end the process."""
        return words(self._view[HEADER.size : HEADER.size + WORD])

    @property
    def changes_word(self) -> memoryview:
        """Where it is counted what an agent has to ask the rank for; see ``Recorder.changed``."""
        return words(self._view[CHANGES_OFFSET : CHANGES_OFFSET + WORD])

    @property
    def device_ring(self) -> memoryview:
        """Where it is written what devices did: memory of a ``DeviceRing``."""
        return words(self._view[self._device_ring : pending_place(0, self._device_ring)])

    def pending(self, index: int) -> memoryview | None:
        """Memory of ``PendingEntries``: 0 of logged values, 1 of operations; None where no other process reads it."""
        start = pending_place(index, self._device_ring)
        return self._view[start : start + PENDING_BYTES] if self.shared else None

    def progress(self, index: int) -> memoryview | None:
        """Where the writer of ring ``index`` says how far it is, for another process; None where none reads."""
        if not self.shared:
            return None
        offset = PAGE + index * ENTRY_BYTES + PROGRESS_OFFSET
        return words(self._view[offset : offset + 2 * WORD])

    def write_entry(self, index: int, entry: RingEntry) -> None:
        """Say which thread has ring ``index``, and how far it is. Whether it is used is said last."""
        at = PAGE + index * ENTRY_BYTES
        name = struct.pack(f"<{_NAME_BYTES}sq", entry.thread.encode(), int(entry.engine))
        self._view[at + _NAME_OFFSET : at + ENTRY_BYTES] = name
        self._view[at + WORD : at + 3 * WORD] = struct.pack("<2q", entry.ident, entry.written)
        self._view[at : at + WORD] = struct.pack("<q", entry.used)

    def end_entry(self, index: int) -> None:
        """The thread that has ring ``index`` is over."""
        with contextlib.suppress(ValueError):  # the memory has been given back
            offset = PAGE + index * ENTRY_BYTES
            self._view[offset : offset + WORD] = struct.pack("<q", OVER)

    def free_entries(self) -> list[int]:
        """Rings that no thread has, and that have been read to their end by whoever shares the memory."""
        lowest_bytes = self._view[PAGE : PAGE + (SIDE_RINGS + 1) * ENTRY_BYTES : ENTRY_BYTES]
        return [index for index, used in enumerate(lowest_bytes) if index and not used]

    def write_names(self, names: dict[str, Any]) -> None:
        """Store what a reader needs to understand the codes. Too much to hold is left out, oldest kept."""
        text = json.dumps(names).encode()
        if len(text) > NAMES_HALF:
            return
        half = 1 - self._header.names_half
        offset = NAMES_OFFSET + half * NAMES_HALF
        self._view[offset : offset + len(text)] = text
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
        self._view.release()
        with contextlib.suppress(BufferError):  # a thread may still hold its ring: freed with it
            self.map.close()

    def _share(self) -> mmap.mmap:
        try:
            self.descriptor = _anonymous()
            os.ftruncate(self.descriptor, self._bytes)
            return mmap.mmap(self.descriptor, self._bytes)
        except OSError:
            # None is left, or RLIMIT_FSIZE forbids it: then the agent is a thread of this process.
            if self.descriptor >= 0:
                os.close(self.descriptor)
                self.descriptor = -1
            return mmap.mmap(-1, self._bytes)

    def _write_header(self) -> None:
        self._view[: HEADER.size] = HEADER.pack(*self._header)


def words(part: memoryview) -> memoryview:
    """The same memory as int64 words."""
    return part.cast("q")


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
