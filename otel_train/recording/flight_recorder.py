"""Reads and validates ``flight.bin``; its layout is in ``shared_memory``."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from otel_train.datamodel import NS_PER_S
from otel_train.errors import RunDirectoryError
from otel_train.files import open_binary, parse_json, read_part
from otel_train.recording.events import EDGE_WORDS, MAX_SOURCES, Instrumented, SourceKind
from otel_train.recording.shared_memory import (
    ENTRY,
    ENTRY_BYTES,
    HEADER,
    MAGIC,
    NAMES_HALF,
    NAMES_OFFSET,
    OVER,
    PAGE,
    RINGS_OFFSET,
    SIDE_RINGS,
    STEPS,
    STEPS_OFFSET,
    WORD,
    Header,
    RingEntry,
    end_of_rings,
    ring_place,
)

if TYPE_CHECKING:
    from pathlib import Path

_MOST_NS = 1 << 62
"""Latest accepted wall-clock time, in the year 2116: the sum of two such times fits into 64 bits."""

_MOST_CLOCK_NS = 1 << 58
"""Latest accepted time on the monotonic clock: nine years after the start of the machine."""

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
    "names_bytes": (0, NAMES_HALF),
    "polled_unix_ns": (0, _MOST_NS),
}
"""Smallest and largest accepted value of each header field."""

_TEXTS = ("run_id", "host", "pid_namespace", "process")
_NUMBERS = ("rank", "attempt", "world_size", "started_unix_ns")
_KINDS = frozenset(map(int, SourceKind))


class ThreadEdges(NamedTuple):
    """The events of one thread in the file.

    Attributes:
        times: int64[n], monotonic nanoseconds.
        codes: int64[n].
    """

    entry: RingEntry
    times: np.ndarray
    codes: np.ndarray


class Flight(NamedTuple):
    """Content of a flight file. It is validated: every number is in its range, every name is text.

    Attributes:
        anchor_unix_ns: one moment on the wall clock, which with ``anchor_clock_ns`` relates the two clocks.
        anchor_clock_ns: the same moment on the monotonic clock.
        polled_unix_ns: when the agent last copied the events to the file.
        steps: training steps that the agent had seen end; 0 if that is not known.
        step_ended_ns: when the last of these steps ended, on the monotonic clock.
        identity: any of ``run_id``, ``host``, ``pid_namespace`` and ``process``, a mark of the process (text), ``rank``,
            ``attempt``, ``world_size`` and ``started_unix_ns`` (whole numbers from 0).
    """

    pid: int
    anchor_unix_ns: int
    anchor_clock_ns: int
    polled_unix_ns: int
    identity: dict[str, Any]
    sources: tuple[Instrumented, ...]
    threads: tuple[ThreadEdges, ...]
    steps: int = 0
    step_ended_ns: int = 0


class Heartbeat(NamedTuple):
    """The last poll of the agent: process id of the rank, wall-clock time, and identity as in ``Flight``."""

    pid: int
    unix_s: float
    identity: dict[str, Any]


def heartbeat_of(path: Path) -> Heartbeat | None:
    """Returns the heartbeat in a flight file; None if it cannot be read."""
    try:
        header = _header(read_part(path, 0, PAGE))
        names = _names(read_part(path, NAMES_OFFSET + header.names_half * NAMES_HALF, header.names_bytes))
    except (OSError, ValueError):
        return None
    return Heartbeat(header.pid, header.polled_unix_ns / NS_PER_S, _identity(names.get("identity")))


def read_flight(path: Path) -> Flight:
    """Reads a flight file, also one whose process was killed or still runs.

    Raises:
        RunDirectoryError: it is missing, or is not a flight file.
    """
    try:
        with open_binary(path) as file:
            header = _header(file.read(RINGS_OFFSET))
            most = end_of_rings(header.main_edges, header.side_edges, header.side_rings)
            file.seek(0)
            before = file.read(most)
            file.seek(0)
            data = file.read(most)
        return flight_in(before, data)
    except OSError as error:
        hint = (
            " Was the run started with flight_recorder=True?" if isinstance(error, FileNotFoundError) else ""
        )
        raise RunDirectoryError(f"{path}: {error.strerror or error}.{hint}") from error
    except ValueError as error:
        raise RunDirectoryError(f"{path}: {error}") from error


def flight_in(before: bytes, data: bytes) -> Flight:
    """Parses a flight file that was read twice: events that changed between the two reads are skipped.

    Raises:
        ValueError: it is not a flight file, or a value in it is out of range.
    """
    header = _header(data)
    if min(len(before), len(data)) < RINGS_OFFSET:
        raise ValueError("it is cut off.")
    start = NAMES_OFFSET + header.names_half * NAMES_HALF
    names = _names(data[start : start + header.names_bytes])
    return Flight(
        header.pid, header.anchor_unix_ns, header.anchor_clock_ns, header.polled_unix_ns,
        _identity(names.get("identity")), _sources(names.get("sources")),
        tuple(_threads(before, data, header)), *_steps(data),
    )  # fmt: skip


def _header(data: bytes) -> Header:
    if (found := data[: len(MAGIC)]) != MAGIC:
        remedy = "use the otel-train that wrote it"
        raise ValueError(
            f"not a flight file of this version: begins with {found!r}, expected {MAGIC!r}; {remedy}."
        )
    if len(data) < HEADER.size:
        raise ValueError(f"its header is cut off: it has {len(data)} bytes, expected {HEADER.size}.")
    header = Header(*HEADER.unpack_from(data))
    for name, (least, most) in _FIELDS.items():
        if not least <= (value := getattr(header, name)) <= most:
            raise ValueError(f"its header cannot be right: {name} is {value}, expected {least} to {most}.")
    return header


def _steps(data: bytes) -> tuple[int, int]:
    steps, ended_ns = STEPS.unpack_from(data, STEPS_OFFSET)
    return (steps, ended_ns) if 0 < steps <= _MOST_CLOCK_NS and 0 < ended_ns <= _MOST_CLOCK_NS else (0, 0)


def _names(text: bytes) -> dict[str, Any]:
    try:
        names = parse_json(text or b"{}")
    except ValueError as error:
        raise ValueError(f"its table of names cannot be read ({error}).") from error
    if not isinstance(names, dict):
        raise ValueError("its table of names is not a JSON object.")  # noqa: TRY004  # of the file, not of an argument
    return names


def _identity(field: object) -> dict[str, Any]:
    """Returns the well-formed fields of the identity of the rank that wrote a file."""
    known = field if isinstance(field, dict) else {}
    texts = {name: known[name] for name in _TEXTS if isinstance(known.get(name), str)}
    numbers = {name: known[name] for name in _NUMBERS if type(known.get(name)) is int}
    return {**texts, **{name: number for name, number in numbers.items() if 0 <= number <= _MOST_NS}}


def _sources(field: object) -> tuple[Instrumented, ...]:
    """Returns the table of sources; raises ValueError if it is malformed."""
    rows = [] if field is None else field
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
    """Yields events of every complete ring in the file, without those that changed between the two reads."""
    for index in range(header.side_rings + 1):
        # The position in the first read: events that are copied later differ between the reads, and must not count as missing.
        used, ident, written, shown, _, thread, engine = ENTRY.unpack_from(before, PAGE + index * ENTRY_BYTES)
        if not (0 <= used <= OVER and 0 <= written <= _MOST_NS and 0 <= shown <= _MOST_NS):
            raise ValueError(f"its entry of ring {index} cannot be right: used is {used}, written {written}.")
        written = max(written, shown // EDGE_WORDS)
        offset, edges = ring_place(index, header.main_edges, header.side_edges)
        if offset + edges * EDGE_WORDS * WORD > min(len(data), len(before)):
            if index == 0 and used:  # the training thread's
                raise ValueError("it is cut off: the events of the training thread are missing.")
            continue
        words = edges * EDGE_WORDS
        earlier, pairs = (
            np.frombuffer(d, np.int64, words, offset).reshape(edges, -1) for d in (before, data)
        )
        if not used and not pairs.any():  # an unused ring may hold events of a thread that has ended
            continue
        known = written or _oldest_position(pairs[:, 1])
        times, codes = _in_order(pairs, (earlier == pairs).all(axis=1), known)
        name = thread.rstrip(b"\0").decode(errors="replace")
        entry = RingEntry(used, ident, written, name, bool(engine))
        yield ThreadEdges(entry, times, codes)


def _oldest_position(times: np.ndarray) -> int:
    """Returns the index of the oldest event in a ring whose position is unknown: the first index at which the times fall."""
    falls = np.flatnonzero(times[1:] < times[:-1])
    return int(falls[0]) + 1 if len(falls) else 0


def _in_order(pairs: np.ndarray, stable: np.ndarray, written: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns times and codes of a ring in order, also of events that were copied after its position: their times are later.

    ``stable``: whether both reads of an event are equal, so that it is not half copied. ``written``: the position when the
    agent last polled.
    """
    turn = -(written % len(pairs))
    pairs, stable = np.roll(pairs, turn, axis=0), np.roll(stable, turn)
    last_known = pairs[-1, 1] if written else 1
    older = pairs[:, 1] < last_known  # not <=: the first newer event may have the same time
    newer = int(np.argmax(older)) if older.any() else len(pairs)
    # The slot after the newest event may be half written, so the event in it is dropped.
    pairs, stable = np.roll(pairs, -newer, axis=0)[1:], np.roll(stable, -newer)[1:]
    times = pairs[:, 1]
    kept = stable & (times > 0) & (times <= _MOST_CLOCK_NS)
    times, codes = times[kept], pairs[kept, 0]
    rising = times >= np.maximum.accumulate(times) if len(times) else kept[:0]
    return times[rising], codes[rising]
