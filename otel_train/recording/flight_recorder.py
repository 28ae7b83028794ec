"""The memory that survives the process: rings, thread names, source names, in one file of fixed layout.

Layout (little-endian, offsets in bytes):

    0        header     magic, then int64 fields (``Header``), then the signal that came to end the process
    4096     directory  one 128-byte entry per ring (``_ENTRY``)
    8192     names      two halves of JSON; the header says which one is whole
    ...      rings      the training thread's first, then the small ones of other threads

Memory that is shared goes on behind the rings, with what devices did (``device_ring``). No file has that.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import struct
import tempfile
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Final, NamedTuple

import numpy as np

from otel_train.errors import RunDirectoryError
from otel_train.files import open_binary, parse_json
from otel_train.recording.device_ring import DEVICE_RING_WORDS
from otel_train.recording.events import EDGE_WORDS, MAX_SOURCES, Instrumented, SourceKind

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from otel_train.datamodel import Anchor

MAGIC = b"OTELTRN1"
PAGE = 4096
SIDE_RINGS = 15
"""Threads beside the first that find room in the file; further ones get plain memory."""

HEADER = struct.Struct("<8s9q")
_ENTRY = struct.Struct("<5q80sq")
_ENTRY_BYTES = 128
_PROGRESS_OFFSET = 24
_NAME_OFFSET = 40
_NAME_BYTES = 80
_FREE, _IN_USE, _OVER = 0, 1, 2
_NAMES_OFFSET = 2 * PAGE
_NAMES_HALF = 128 * 1024
_RINGS_OFFSET = _NAMES_OFFSET + 2 * _NAMES_HALF
_SIDE_EDGES = 8192
_WORD = 8
_WAS_USED = 2

_MOST_NS = 1 << 62
"""Of an instant on the wall clock: the year 2116. Sums and differences of two fit into 64 bits."""

_MOST_CLOCK_NS = 1 << 58
"""Of an instant on the monotonic clock, which begins when the machine starts: nine years."""

_MOST_EDGES = 1 << 24
_MOST_SIDE_EDGES = 1 << 16
_FIELDS: Final[dict[str, tuple[int, int]]] = {
    "pid": (1, (1 << 31) - 1),
    "anchor_unix_ns": (0, _MOST_NS),
    "anchor_clock_ns": (0, _MOST_CLOCK_NS),
    "main_edges": (1, _MOST_EDGES),
    "side_edges": (1, _MOST_SIDE_EDGES),
    "side_rings": (1, SIDE_RINGS),
    "names_half": (0, 1),
    "names_bytes": (0, _NAMES_HALF),
    "turn_unix_ns": (0, _MOST_NS),
}
"""What a header may hold."""

_TEXTS, _NUMBERS = ("run_id", "host"), ("rank", "attempt", "world_size", "started_unix_ns")
_KINDS = frozenset(map(int, SourceKind))


class Header(NamedTuple):
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


class RingEntry(NamedTuple):
    """What the file knows of one ring.

    Attributes:
        used: whether a thread has it now (1), had it (2) or never did (0).
        ident: identity of the thread.
        written: edges written when the pump last looked.
        thread: name of the thread.
        engine: it is one of autograd's own.
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
        shared: an agent reads it.
        make: memory of so many bytes; where it is not shared.

    Attributes:
        shared: as above.
        map: the memory itself.
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
        self._device_ring = _end_of_rings(main_edges, _SIDE_EDGES, SIDE_RINGS)
        self._bytes = self._device_ring + DEVICE_RING_WORDS * _WORD
        self.map = self._share() if shared else make(self._bytes)
        self._view = memoryview(self.map)
        self._header = Header(
            MAGIC, os.getpid(), *anchor, main_edges, _SIDE_EDGES, SIDE_RINGS, 0, 0, anchor.unix_ns
        )
        self._write_header()

    def ring_words(self, index: int) -> memoryview:
        """int64 memory of ring ``index``: 0 is the training thread's, 1 to ``SIDE_RINGS`` the others."""
        offset, edges = _ring_place(index, self._main_edges, _SIDE_EDGES)
        return _words(self._view[offset : offset + edges * EDGE_WORDS * _WORD])

    @property
    def signal_word(self) -> memoryview:
        """Where the number of a signal goes that came to end the process."""
        return _words(self._view[HEADER.size : HEADER.size + _WORD])

    @property
    def device_ring(self) -> memoryview:
        """Where it is written what devices did: memory of a ``DeviceRing``."""
        return _words(self._view[self._device_ring : self._bytes])

    def progress(self, index: int) -> memoryview | None:
        """Where the writer of ring ``index`` says how far it is, for another process; None where none reads."""
        if not self.shared:
            return None
        offset = PAGE + index * _ENTRY_BYTES + _PROGRESS_OFFSET
        return _words(self._view[offset : offset + 2 * _WORD])

    def write_entry(self, index: int, entry: RingEntry) -> None:
        """Say which thread has ring ``index``, and how far it is. Whether it is used is said last."""
        offset = PAGE + index * _ENTRY_BYTES
        name = entry.thread.encode()[:_NAME_BYTES]
        self._view[offset + _NAME_OFFSET : offset + _ENTRY_BYTES] = struct.pack(
            f"<{_NAME_BYTES}sq", name, int(entry.engine)
        )
        self._view[offset + _WORD : offset + 3 * _WORD] = struct.pack("<2q", entry.ident, entry.written)
        self._view[offset : offset + _WORD] = struct.pack("<q", entry.used)

    def end_entry(self, index: int) -> None:
        """The thread that has ring ``index`` is over."""
        with contextlib.suppress(ValueError):  # the memory has been given back
            offset = PAGE + index * _ENTRY_BYTES
            self._view[offset : offset + _WORD] = struct.pack("<q", _OVER)

    def free_entries(self) -> list[int]:
        """Rings that no thread has, and that have been read to their end by whoever shares the memory."""
        return [
            index
            for index in range(1, SIDE_RINGS + 1)
            if not self._view[PAGE + index * _ENTRY_BYTES]  # its lowest byte
        ]

    def write_names(self, names: dict[str, Any]) -> None:
        """Store what a reader needs to understand the codes. Too much to hold is left out, oldest kept."""
        text = json.dumps(names).encode()
        if len(text) > _NAMES_HALF:
            return
        half = 1 - self._header.names_half
        offset = _NAMES_OFFSET + half * _NAMES_HALF
        self._view[offset : offset + len(text)] = text
        self._header = self._header._replace(names_half=half, names_bytes=len(text))
        self._write_header()

    def beat(self, unix_ns: int) -> None:
        """Note that the pump was alive at ``unix_ns``."""
        self._header = self._header._replace(turn_unix_ns=unix_ns)
        self._write_header()

    def close(self) -> None:
        """Let go of the memory as soon as nobody looks at it any more."""
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
        except (
            OSError
        ):  # none is left, or RLIMIT_FSIZE forbids it: then the agent is a thread of this process
            if self.descriptor >= 0:
                os.close(self.descriptor)
                self.descriptor = -1
            return mmap.mmap(-1, self._bytes)

    def _write_header(self) -> None:
        self._view[: HEADER.size] = HEADER.pack(*self._header)


def _words(part: memoryview) -> memoryview:
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


def _ring_place(index: int, main_edges: int, side_edges: int) -> tuple[int, int]:
    if index == 0:
        return _RINGS_OFFSET, main_edges
    past = main_edges + (index - 1) * side_edges
    return _RINGS_OFFSET + past * EDGE_WORDS * _WORD, side_edges


@dataclass(frozen=True, slots=True)
class SharedLayout:
    """Where things lie in memory that a rank shares, for the process that reads it.

    Attributes:
        main_edges: of the first ring.
        side_edges: of each other ring.
        side_rings: how many there are.
    """

    over: ClassVar[int] = _OVER
    names_offset: ClassVar[int] = _NAMES_OFFSET
    rings_offset: ClassVar[int] = _RINGS_OFFSET
    turn_offset: ClassVar[int] = HEADER.size - _WORD

    main_edges: int
    side_edges: int
    side_rings: int

    @classmethod
    def of(cls, memory: mmap.mmap) -> SharedLayout:
        """The layout of this memory."""
        header = Header(*HEADER.unpack_from(memory))
        return cls(header.main_edges, header.side_edges, header.side_rings)

    def names(self, memory: Any) -> bytes:  # Any: a buffer
        """The table of names, as text; it may be torn if the rank is writing it."""
        header = Header(*HEADER.unpack_from(memory))
        start = _NAMES_OFFSET + header.names_half * _NAMES_HALF
        return bytes(memory[start : start + header.names_bytes])

    def signal(self, memory: Any) -> int:  # Any: a buffer
        """The signal that came to end the process; 0 for none."""
        return int.from_bytes(memory[HEADER.size : HEADER.size + _WORD], "little")

    def positions(self, memory: Any) -> list[tuple[int, int]]:  # Any: a buffer
        """Of every ring that is or was used: its number, and words written."""
        found = (
            (slot, _ENTRY.unpack_from(memory, PAGE + slot * _ENTRY_BYTES))
            for slot in range(self.side_rings + 1)
        )
        return [(slot, entry[3]) for slot, entry in found if entry[0]]

    def entries(self, memory: Any) -> Iterable[tuple[int, int, int, str, bool]]:
        """Of every ring that is used: its number, whether its thread is over, and the thread."""
        for slot in range(self.side_rings + 1):
            used, ident, _, _, _, name, engine = _ENTRY.unpack_from(memory, PAGE + slot * _ENTRY_BYTES)
            if used:
                yield slot, used, ident, name.rstrip(b"\0").decode(errors="replace"), bool(engine)

    def place(self, slot: int) -> tuple[int, int]:
        """Where a ring begins, and its words."""
        offset, edges = _ring_place(slot, self.main_edges, self.side_edges)
        return offset, edges * EDGE_WORDS

    def ring(self, memory: mmap.mmap, slot: int) -> tuple[np.ndarray, np.ndarray]:
        """The words of a ring, and the two words of its progress."""
        offset, words = self.place(slot)
        at = PAGE + slot * _ENTRY_BYTES + _PROGRESS_OFFSET
        return np.frombuffer(memory, np.int64, words, offset), np.frombuffer(memory, np.int64, 2, at)

    @property
    def end_of_rings(self) -> int:
        """Where the rings end: what a flight file holds."""
        return _end_of_rings(self.main_edges, self.side_edges, self.side_rings)

    def device_ring(self, memory: Any) -> memoryview:  # Any: a buffer
        """What devices did: memory of a ``DeviceRing``."""
        start = self.end_of_rings
        return _words(memoryview(memory)[start : start + DEVICE_RING_WORDS * _WORD])

    def free(self, memory: mmap.mmap, slot: int) -> None:
        """The ring has been read to its end: the rank may give it to another thread."""
        offset = PAGE + slot * _ENTRY_BYTES
        memory[offset : offset + _WORD] = struct.pack("<q", _FREE)


class ThreadEdges(NamedTuple):
    """The edges of one thread, as found in the file.

    Attributes:
        entry: the thread.
        times: int64[n], monotonic nanoseconds.
        codes: int64[n].
        slot: which ring of the file.
        ended: edges the thread has written in all, the last of ``times`` being the last of them.
    """

    entry: RingEntry
    times: np.ndarray
    codes: np.ndarray
    slot: int = 0
    ended: int = 0


class Flight(NamedTuple):
    """What a flight file holds. It was checked when it was read: every number is in its range, every name is text.

    Attributes:
        pid: the process that wrote it.
        anchor_unix_ns: an instant on the wall clock ...
        anchor_clock_ns: ... and on the monotonic one.
        turn_unix_ns: when the pump was last alive.
        identity: who wrote it; any of ``run_id`` and ``host`` (text), ``rank``, ``attempt``, ``world_size`` and
            ``started_unix_ns`` (whole numbers from 0).
        sources: by their numbers in the codes.
        threads: one entry per ring that was used.
    """

    pid: int
    anchor_unix_ns: int
    anchor_clock_ns: int
    turn_unix_ns: int
    identity: dict[str, Any]
    sources: tuple[Instrumented, ...]
    threads: tuple[ThreadEdges, ...]


def read_flight(path: Path) -> Flight:
    """Read a flight file, also one whose process was killed or still runs.

    Raises:
        RunDirectoryError: it is missing, or is not a flight file.
    """
    try:
        with open_binary(path) as file:
            header = _header(file.read(_RINGS_OFFSET))
            most = _end_of_rings(header.main_edges, header.side_edges, header.side_rings)
            file.seek(0)
            before = file.read(most)
            file.seek(0)
            data = file.read(most)
        return flight_in(before, data)
    except OSError as error:
        why = error.strerror or error
        raise RunDirectoryError(f"{path}: {why}. Was the run started with flight_recorder=True?") from error
    except ValueError as error:
        raise RunDirectoryError(f"{path}: {error}") from error


def flight_in(before: bytes, data: bytes) -> Flight:
    """What a flight file holds, of which the content was read twice: what changed meanwhile is left out.

    Raises:
        ValueError: it is not a flight file, or something in it cannot be right.
    """
    header = _header(data)
    if len(before) < _RINGS_OFFSET:
        raise ValueError("it was cut off while it was read.")
    start = _NAMES_OFFSET + header.names_half * _NAMES_HALF
    try:
        names = parse_json(data[start : start + header.names_bytes] or b"{}")
    except ValueError as error:
        raise ValueError(f"its table of names cannot be read ({error}).") from error
    if not isinstance(names, dict):
        raise ValueError("its table of names is no JSON object.")  # noqa: TRY004  # of the file, not of an argument
    return Flight(
        header.pid, header.anchor_unix_ns, header.anchor_clock_ns, header.turn_unix_ns,
        _identity(names.get("identity")), _sources(names.get("sources")),
        tuple(_threads(before, data, header)),
    )  # fmt: skip


def _header(data: bytes) -> Header:
    if len(data) < _RINGS_OFFSET or data[: len(MAGIC)] != MAGIC:
        raise ValueError(f"not a flight file of this version (expected {MAGIC.decode()}).")
    header = Header(*HEADER.unpack_from(data))
    for name, (least, most) in _FIELDS.items():
        if not least <= (value := getattr(header, name)) <= most:
            raise ValueError(f"its header cannot be right: {name} is {value}, expected {least} to {most}.")
    return header


def _end_of_rings(main_edges: int, side_edges: int, side_rings: int) -> int:
    offset, edges = _ring_place(side_rings, main_edges, side_edges)
    return offset + edges * EDGE_WORDS * _WORD


def _identity(told: object) -> dict[str, Any]:
    """Who wrote a file, as far as that is well-formed."""
    known = told if isinstance(told, dict) else {}
    texts = {name: known[name] for name in _TEXTS if isinstance(known.get(name), str)}
    numbers = {name: known[name] for name in _NUMBERS if type(known.get(name)) is int and known[name] >= 0}
    return {**texts, **{name: number for name, number in numbers.items() if number <= _MOST_NS}}


def _sources(told: object) -> tuple[Instrumented, ...]:
    """The table of sources.

    Raises:
        ValueError: an entry is none.
    """
    rows = [] if told is None else told
    if not isinstance(rows, list) or len(rows) > MAX_SOURCES:
        raise ValueError(f"its table of sources cannot be read (expected a list of at most {MAX_SOURCES}).")
    return tuple(map(_source, rows))


def _source(row: object) -> Instrumented:
    if isinstance(row, list) and len(row) == len(Instrumented._fields):
        kind, name, phase = row
        if type(kind) is int and kind in _KINDS and isinstance(name, str) and isinstance(phase, str):
            return Instrumented(SourceKind(kind), name, phase)
    raise ValueError(f"its table of sources cannot be read (an entry is {row!r:.80}).")


def _threads(before: bytes, data: bytes, header: Header) -> Iterable[ThreadEdges]:
    """Edges of every ring that is whole in the file; what changed between the two readings is left out."""
    for index in range(header.side_rings + 1):
        # How far the pump had come before the first reading: later edges are not stable, and are no gap either.
        used, ident, written, shown, _, thread, engine = _ENTRY.unpack_from(
            before, PAGE + index * _ENTRY_BYTES
        )
        if not (0 <= used <= _WAS_USED and 0 <= written <= _MOST_NS and 0 <= shown <= _MOST_NS):
            raise ValueError(f"its entry of ring {index} cannot be right: used is {used}, written {written}.")
        written = max(written, shown // EDGE_WORDS)
        offset, edges = _ring_place(index, header.main_edges, header.side_edges)
        if offset + edges * EDGE_WORDS * _WORD > min(len(data), len(before)):
            continue
        earlier, pairs = (
            np.frombuffer(d, np.int64, edges * EDGE_WORDS, offset).reshape(edges, EDGE_WORDS)
            for d in (before, data)
        )
        if not used and not pairs.any():  # it may have been used since the pump last looked
            continue
        known = written or _fall(pairs[:, 1])
        times, codes, newer = _in_order(pairs, (earlier == pairs).all(axis=1), known)
        name = thread.rstrip(b"\0").decode(errors="replace")
        yield ThreadEdges(
            RingEntry(used, ident, written, name, bool(engine)), times, codes, index, known + newer
        )


def _fall(times: np.ndarray) -> int:
    """Where in a ring that nobody has looked at the oldest edge lies."""
    falls = np.flatnonzero(times[1:] < times[:-1])
    return int(falls[0]) + 1 if len(falls) else 0


def _in_order(pairs: np.ndarray, stable: np.ndarray, written: int) -> tuple[np.ndarray, np.ndarray, int]:
    """Unroll a ring of which we know only how far the pump had seen it: later edges have later times.

    Returns times, codes, and how many edges are newer than the pump had seen.

    Args:
        pairs: int64[n, 2], code and time.
        stable: bool[n], read twice and found the same, so not caught half copied.
        written: edges written when the pump last looked.
    """
    turn = -(written % len(pairs))
    pairs, stable = np.roll(pairs, turn, axis=0), np.roll(stable, turn)
    last_known = pairs[-1, 1] if written else 1
    older = pairs[:, 1] < last_known  # not <=: the first newer edge may be of the same tick
    newer = int(np.argmax(older)) if older.any() else len(pairs)
    # The slot after the newest edge may be half written: what it held before is not to be trusted.
    pairs, stable = np.roll(pairs, -newer, axis=0)[1:], np.roll(stable, -newer)[1:]
    times = pairs[:, 1]
    kept = stable & (times > 0) & (times <= _MOST_CLOCK_NS)
    times, codes = times[kept], pairs[kept, 0]
    rising = times >= np.maximum.accumulate(times) if len(times) else kept[:0]
    return times[rising], codes[rising], newer
