"""A ring buffer of events with one writer; readers never block it."""

from __future__ import annotations

import struct
from _thread import get_ident
from importlib import import_module
from types import BuiltinFunctionType
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from otel_train.datamodel import system_clock
from otel_train.fast_classes import FastNamedTuple
from otel_train.recording.events import EDGE_WORDS

INTERFACE = 4
"""What functions of ``_edges.c`` are given. One that was built from other sources would crash the interpreter: it is not used."""

EXTENSION: Any
"""``_edges.c``; None where it was not built."""
try:
    EXTENSION = import_module("otel_train._edges")
    if getattr(EXTENSION, "INTERFACE", 0) != INTERFACE:
        EXTENSION = None
except ImportError:  # no compiler was there when the package was built, or this is another system than Linux
    EXTENSION = None

if TYPE_CHECKING:
    from collections.abc import Callable

    from otel_train.datamodel import Clock


NATIVE = EXTENSION is not None
"""Edges are written by ``_edges.c``: a sixth of the time that the writer in Python takes."""

SAMPLED = 61
"""One edge in so many is timed, to know what it costs here and now. A prime: a loop of 8 edges per step meets each of them. In C the
hook around the edge is timed with it; in Python the edge alone."""

MOST_OF_FASTEST = 4
FASTEST_NS, FIRST_SAMPLE_NS = 25, 250
"""A timed edge counts at most so many times the fastest one, which is taken to last at least the first of these, and at most the second.
What it takes longer is not recording's: the thread was put to sleep, or the loop had slept and all that runs next is slow,
with an edge or without. Loops that sleep 2 and 10 ms per step took 6 and 9 us of processor time more than bare ones, a loop that does
not 10; the mean timed edge took 0.6, 1.7 and 0.28 us, and 0.12, 0.15 and 0.11 up to this limit (two loops by turns, 2026-11-25,
AMD EPYC, torch 2.15)."""

COST_OF_SAMPLE, COST_OF_SAMPLE_IN_PYTHON = 12, 7
"""What recording takes of a thread per nanosecond of the timed edges, with writers in C and in Python. A sample does not see the calls
into the hooks, the hooks of the optimizer, which are Python, and the caches that all of them fill. The factors are measured: a step
of 8 edges took 9 to 14 us more than a bare one, and without C 21 to 25, of which the samples saw 0.85 and 3.3
(``python -m benchmarks --only step``; the row of the run summary compares both)."""


class EdgeBatch(FastNamedTuple):
    """Events taken from a ring, oldest first.

    Attributes:
        times: int64[n], monotonic nanoseconds, never falling.
        codes: int64[n], see ``otel_train.recording.events``.
        missed: edges that were overwritten before they could be read.
    """

    times: np.ndarray
    codes: np.ndarray
    missed: int


class RingReader:
    """Reads the ring of another thread or process without blocking it.

    Args:
        words: int64[2 * capacity], capacity a power of two.

    Attributes:
        capacity: edges that the ring holds.
        taken: edges read, or counted as missed, so far.
    """

    def __init__(self, words: np.ndarray) -> None:
        self.capacity = len(words) // EDGE_WORDS
        self.taken = 0
        self._size = len(words)
        self._array = words

    @property
    def written(self) -> int:
        """Edges written since the ring was made."""
        raise NotImplementedError

    @property
    def pending(self) -> int:
        """Edges written and not yet read."""
        return self.written - self.taken

    def read(self, most: int) -> EdgeBatch:
        """Take up to ``most`` edges, oldest first.

        The law: every edge is returned whole exactly once, or counted as missed exactly once.
        """
        first = max(self.taken, self.written - self.capacity)
        last = min(self.written, first + most)
        words = self._copy(first * EDGE_WORDS, last * EDGE_WORDS)
        # The slot after the published position may be half written: it held the edge one lap earlier.
        whole = max(first, min(last, self.written + 1 - self.capacity))
        pairs = words[(whole - first) * EDGE_WORDS :].reshape(-1, EDGE_WORDS)
        missed = whole - self.taken
        self.taken = last
        return EdgeBatch(times=pairs[:, 1], codes=pairs[:, 0], missed=missed)

    def look(self, since: int) -> EdgeBatch:
        """Edges from number ``since`` on, as far as they are there, without taking them. For the owner alone."""
        last = self.written
        first = max(since, last - self.capacity)
        pairs = self._copy(first * EDGE_WORDS, last * EDGE_WORDS).reshape(-1, EDGE_WORDS)
        return EdgeBatch(times=pairs[:, 1], codes=pairs[:, 0], missed=first - since)

    def _copy(self, first_word: int, last_word: int) -> np.ndarray:
        start, stop = first_word & (self._size - 1), last_word & (self._size - 1)
        if first_word == last_word:
            return np.empty(0, dtype=np.int64)
        if start < stop:
            words: np.ndarray = self._array[start:stop].copy()
            return words
        return np.concatenate((self._array[start:], self._array[:stop]))


class Ring(RingReader):
    """Holds the last ``capacity`` events of one thread.

    ``divert(see)`` lets ``see(code, write)`` stand between the owner and its ring until ``divert(None)``, and
    ``attend(see)`` another one before it; without either, that costs nothing.

    The writer is ``edge(code)``, a closure or a method in C: a clock read and two stores. It publishes its position after
    both stores, so a reader that looks at the position before and after copying knows exactly which edges
    are whole and how many it was too late for.

    Args:
        words: int64 memory of ``2 * capacity`` words, capacity a power of two.
        clock: monotonic nanoseconds.
        owner: identity of the only thread that may write.
        elsewhere: takes the codes of every other thread.
        native: write in C; only where ``NATIVE`` is true. None: where there is an ``EXTENSION``.
        progress: int64 memory of 2 words, for readers in other processes: words written, nanoseconds that recording took per edge
            that was timed. None where there are none.
    """

    def __init__(
        self,
        words: memoryview,
        *,
        clock: Clock,
        owner: int,
        elsewhere: Callable[[int], None],
        native: bool | None = None,
        progress: memoryview | None = None,
    ) -> None:
        size = len(words)
        if size < EDGE_WORDS or size & (size - 1):
            raise ValueError(f"ring of {size} words: expected a power of two")
        super().__init__(np.frombuffer(words, dtype=np.int64))
        self.owner = owner
        self._sees: list[_See | None] = [None, None]
        self._elsewhere = elsewhere
        self._over = False
        make = _native_writer if (EXTENSION is not None if native is None else native) else _writer
        self.edge, self._counts, self._disown, self._lend = make(
            words, clock, owner, elsewhere, shown=_unseen() if progress is None else progress
        )

    def disown(self) -> None:
        """Write no more, and give the memory back: all codes go elsewhere, also from the middle of an edge."""
        self._over = True
        self._disown()

    def let_go(self) -> None:
        """Hold the memory no longer; nothing can be read any more."""
        self._array = np.zeros(0, dtype=np.int64)

    @property
    def written(self) -> int:
        """Edges written since the ring was made."""
        return self._counts()[0] // EDGE_WORDS

    @property
    def spent_ns(self) -> int:
        """Nanoseconds that recording took of the thread: estimated from one edge in ``SAMPLED``."""
        return self._counts()[1] * SAMPLED

    def divert(self, see: _See | None) -> None:
        """Call ``see(code, write)`` for each event instead of writing it; None: stop. See the class.

        The first may be said by any thread, the second by the owner alone. Without one it
        costs nothing: the writer asks for its owner anyway.
        """
        self._stand(1, see)

    def attend(self, see: _See | None) -> None:
        """The same for one more callable, which is called before the one that ``divert`` was given."""
        self._stand(0, see)

    def _stand(self, place: int, see: _See | None) -> None:
        edge, lend, owner, others = self.edge, self._lend, self.owner, self._elsewhere
        sees = self._sees
        sees[place] = see
        if not any(sees):
            lend(owner, others)
            return

        def write(code: int) -> None:
            lend(owner, seen)
            edge(code)
            if any(sees):
                lend(0, seen)

        def pass_on(code: int) -> None:
            if sees[1] is not None:
                sees[1](code, write)
            else:
                write(code)

        def seen(code: int) -> None:
            if self._over or get_ident() != owner:  # the writer passes on all codes once it is disowned
                others(code)
            elif sees[0] is not None:
                sees[0](code, pass_on)
            else:
                pass_on(code)

        lend(0, seen)


def packed(*codes: int) -> bytes:
    """Codes for a hook in C."""
    return struct.pack(f"{len(codes)}q", *codes)


_Edge: TypeAlias = "Callable[[int], None]"
_See: TypeAlias = "Callable[[int, _Edge], None]"
_WriterParts: TypeAlias = (
    "tuple[_Edge, Callable[[], tuple[int, int]], Callable[[], None], Callable[[int, _Edge], None]]"
)


def _unseen() -> memoryview:
    """Memory for positions that no other process reads."""
    return memoryview(bytearray(16)).cast("q")


def _native_writer(
    words: memoryview, clock: Clock, owner: int, elsewhere: Callable[[int], None], *, shown: memoryview
) -> _WriterParts:
    # A clock that was replaced before we were imported is Python's to read.
    own = clock is system_clock and isinstance(clock, BuiltinFunctionType)
    writer = EXTENSION.Writer(words, None if own else clock, owner, elsewhere, shown)
    return writer.edge, writer.read, writer.disown, writer.lend


def _writer(
    words: memoryview, clock: Clock, owner: int, elsewhere: Callable[[int], None], *, shown: memoryview
) -> _WriterParts:
    mask, stride = len(words) - 1, SAMPLED * EDGE_WORDS
    position, fastest, over = 0, FIRST_SAMPLE_NS, False

    def edge(code: int) -> None:
        nonlocal position, fastest
        if get_ident() != owner:
            elsewhere(code)
            return
        slot = position & mask
        begun = None if position % stride else clock()
        words[slot] = code
        words[slot + 1] = clock()
        shown[0] = position = position + 2
        if begun is not None:
            lasted = clock() - begun
            fastest = max(min(lasted, fastest), FASTEST_NS)
            shown[1] += COST_OF_SAMPLE_IN_PYTHON * min(lasted, MOST_OF_FASTEST * fastest)

    def read() -> tuple[int, int]:
        return position, shown[1]

    def disown() -> None:
        nonlocal owner, over, words, shown
        owner, over = 0, True
        # A thread in the middle of an edge finishes it here: the ring's own memory is free to go.
        words = memoryview(bytearray(len(words) * words.itemsize)).cast("q")
        shown = memoryview(bytearray(shown)).cast("q")

    def lend(to: int, others: _Edge) -> None:
        nonlocal owner, elsewhere
        elsewhere = others
        owner = 0 if over else to

    return edge, read, disown, lend
