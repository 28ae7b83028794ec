"""A ring buffer of events with one writer; readers never block it."""

from __future__ import annotations

import struct
from _thread import get_ident
from collections.abc import Callable
from importlib import import_module
from types import BuiltinFunctionType
from typing import TYPE_CHECKING, Any, TypeAlias

from otel_train.datamodel import Clock, system_clock
from otel_train.fast_classes import FastNamedTuple
from otel_train.recording.events import EDGE_WORDS, OP_MASK, START_BITS, Op

INTERFACE = 7
"""What functions of ``_edges.c`` are given. One that was built from other sources would crash the interpreter: it is not used."""

EXTENSION: Any
"""``_edges.c``; None where it was not built."""
try:
    EXTENSION = import_module("otel_train._edges")
    # gevent and eventlet replace what tells threads apart: their greenlets are one thread to C.
    if getattr(EXTENSION, "INTERFACE", 0) != INTERFACE or not isinstance(get_ident, BuiltinFunctionType):
        EXTENSION = None
except ImportError:  # no compiler was there when the package was built, or this is another system than Linux
    EXTENSION = None

if TYPE_CHECKING:
    import numpy as np


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


_BEGINNINGS = frozenset({Op.BEGIN, Op.MARK, Op.EPOCH})


class RingReader:
    """Reads the ring of another thread or process without blocking it.

    A rank only writes: reading imports numpy, which a program that has no torch may not have loaded.

    Args:
        words: int64 memory of ``2 * capacity`` words, capacity a power of two.

    Attributes:
        capacity: edges that the ring holds.
        taken: edges read, or counted as missed, so far.
    """

    def __init__(self, words: memoryview) -> None:
        self.capacity = len(words) // EDGE_WORDS
        self.taken = 0
        self._size = len(words)
        self._words = memoryview(words)

    @property
    def written(self) -> int:
        """Edges written since the ring was made."""
        raise NotImplementedError

    @property
    def pending(self) -> int:
        """Edges written and not yet read."""
        return self.written - self.taken

    def read(self, most: int) -> EdgeBatch:
        """Takes up to ``most`` edges, oldest first.

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

    def peek(self, since: int) -> EdgeBatch:
        """Returns the edges from number ``since`` on, as far as they are there, without taking them. For the owner alone."""
        last = self.written
        first = max(since, last - self.capacity)
        pairs = self._copy(first * EDGE_WORDS, last * EDGE_WORDS).reshape(-1, EDGE_WORDS)
        return EdgeBatch(times=pairs[:, 1], codes=pairs[:, 0], missed=first - since)

    def begun_since(self, since: int) -> bool:
        """Returns whether something has begun after edge number ``since``, not only ended. For the owner alone."""
        words, mask = self._words, self._size - 1
        last = self.written if words else since
        places = (number * EDGE_WORDS & mask for number in range(max(since, last - self.capacity), last))
        return any(words[place] & (OP_MASK | START_BITS) in _BEGINNINGS for place in places)

    def _copy(self, first_word: int, last_word: int) -> np.ndarray:
        import numpy as np

        if first_word == last_word or not self._words:
            return np.empty(0, dtype=np.int64)
        words = np.frombuffer(self._words, dtype=np.int64)
        start, stop = first_word & (self._size - 1), last_word & (self._size - 1)
        return words[start:stop].copy() if start < stop else np.concatenate((words[start:], words[:stop]))


class Ring(RingReader):
    """Holds the last ``capacity`` events of one thread.

    ``intercept(interceptor)`` has ``interceptor(code, write)`` called for every event of the owner, in place of writing it, until
    ``intercept(None)``; ``intercept_first`` sets another one, which is called before it. Without them that costs nothing: the writer
    asks for its owner anyway.

    The writer is ``edge(code)``, a closure or a method in C: a clock read and two stores. It publishes its position after
    both stores, so a reader that looks at the position before and after copying knows exactly which edges
    are whole and how many it was too late for.

    Args:
        words: int64 memory of ``2 * capacity`` words, capacity a power of two.
        owner: identity of the only thread that may write.
        on_other_thread: takes the codes of every other thread.
        progress: int64 memory of 2 words, for readers in other processes: words written, nanoseconds that recording took per edge
            that was timed. None where there are none.
    """

    def __init__(
        self,
        words: memoryview,
        *,
        clock: Clock,
        owner: int,
        on_other_thread: Callable[[int], None],
        progress: memoryview | None = None,
    ) -> None:
        size = len(words)
        if size < EDGE_WORDS or size & (size - 1):
            raise ValueError(f"ring of {size} words: expected a power of two")
        super().__init__(words)
        self.owner = owner
        self._interceptors: list[_Interceptor | None] = [None, None]
        self._on_other_thread = on_other_thread
        self._detached = False
        make = _writer if EXTENSION is None else _native_writer
        self.edge, self._counts, self._detach, self._set_owner = make(
            words, clock, owner, on_other_thread, shown=_private_words() if progress is None else progress
        )

    def detach(self) -> None:
        """Writes no more, and gives the memory back: all codes go to ``on_other_thread``, also from the middle of an edge."""
        self._detached = True
        self._detach()

    def disown(self) -> None:
        """Has all codes go to ``on_other_thread``: the owner is over, and a later thread may have its identity."""
        self.owner = 0
        self._set_owner(0, self._on_other_thread)

    def release_memory(self) -> None:
        """Holds the memory no longer; nothing can be read any more."""
        self._words = memoryview(b"").cast("q")

    @property
    def written(self) -> int:
        """Edges written since the ring was made."""
        return self._counts()[0] // EDGE_WORDS

    @property
    def spent_ns(self) -> int:
        """Nanoseconds that recording took of the thread: estimated from one edge in ``SAMPLED``."""
        return self._counts()[1] * SAMPLED

    def intercept(self, interceptor: _Interceptor | None) -> None:
        """Calls ``interceptor(code, write)`` for each event instead of writing it; None, by the owner alone: stop. See the class."""
        self._set_interceptor(1, interceptor)

    def intercept_first(self, interceptor: _Interceptor | None) -> None:
        """Does the same for one more callable, which is called before the one that ``intercept`` was given."""
        self._set_interceptor(0, interceptor)

    def _set_interceptor(self, place: int, interceptor: _Interceptor | None) -> None:
        edge, set_owner, owner, on_other_thread = (
            self.edge,
            self._set_owner,
            self.owner,
            self._on_other_thread,
        )
        interceptors = self._interceptors
        interceptors[place] = interceptor
        if not any(interceptors):
            set_owner(owner, on_other_thread)
            return

        def write(code: int) -> None:
            set_owner(owner, intercepted)
            edge(code)
            if any(interceptors):
                set_owner(0, intercepted)

        def pass_on(code: int) -> None:
            if interceptors[1] is not None:
                interceptors[1](code, write)
            else:
                write(code)

        def intercepted(code: int) -> None:
            if self._detached or get_ident() != owner:  # the writer passes on all codes once it is detached
                on_other_thread(code)
            elif interceptors[0] is not None:
                interceptors[0](code, pass_on)
            else:
                pass_on(code)

        # Without an owner the writer hands over every code.
        set_owner(0, intercepted)


def packed(*codes: int) -> bytes:
    """Codes for a hook in C."""
    return struct.pack(f"{len(codes)}q", *codes)


_Edge: TypeAlias = "Callable[[int], None]"
_Interceptor: TypeAlias = "Callable[[int, _Edge], None]"
_WriterParts: TypeAlias = (
    "tuple[_Edge, Callable[[], tuple[int, int]], Callable[[], None], Callable[[int, _Edge], None]]"
)


def _private_words() -> memoryview:
    """Returns the memory for positions that no other process reads."""
    return memoryview(bytearray(16)).cast("q")


def _native_writer(
    words: memoryview, clock: Clock, owner: int, on_other_thread: Callable[[int], None], *, shown: memoryview
) -> _WriterParts:
    # A clock that was replaced before we were imported is Python's to read.
    own = clock is system_clock and isinstance(clock, BuiltinFunctionType)
    writer = EXTENSION.Writer(words, None if own else clock, owner, on_other_thread, shown)
    return writer.edge, writer.read, writer.detach, writer.set_owner


def _writer(
    words: memoryview, clock: Clock, owner: int, on_other_thread: Callable[[int], None], *, shown: memoryview
) -> _WriterParts:
    mask, stride = len(words) - 1, SAMPLED * EDGE_WORDS
    position, fastest, over = 0, FIRST_SAMPLE_NS, False

    def edge(code: int) -> None:
        nonlocal position, fastest
        if get_ident() != owner:
            on_other_thread(code)
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

    def detach() -> None:
        nonlocal owner, over, words, shown
        owner, over = 0, True
        # A thread in the middle of an edge finishes it here: the ring's own memory is free to go.
        words = memoryview(bytearray(len(words) * words.itemsize)).cast("q")
        shown = memoryview(bytearray(shown)).cast("q")

    def set_owner(to: int, others: _Edge) -> None:
        nonlocal owner, on_other_thread
        on_other_thread = others
        owner = 0 if over else to

    return edge, read, detach, set_owner
