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
"""Version of the arguments of functions in ``_edges.c``. An extension of another version could crash the interpreter and is not used."""

EXTENSION: Any
"""The extension module ``_edges.c``, which writes an event in a sixth of the time that Python takes; None if it cannot be used."""
try:
    EXTENSION = import_module("otel_train._edges")
    # gevent and eventlet replace get_ident: to C all their greenlets are one thread.
    if getattr(EXTENSION, "INTERFACE", 0) != INTERFACE or not isinstance(get_ident, BuiltinFunctionType):
        EXTENSION = None
except ImportError:  # the package was built without a C compiler, or the system is not Linux
    EXTENSION = None

if TYPE_CHECKING:
    import numpy as np


SAMPLED = 61
"""One event in this many is timed, to estimate the overhead of recording. A prime, so that in a loop with 8 events per step each of
them is timed at some step. In C the hook around the event is timed as well; in Python the event alone."""

MOST_OF_FASTEST = 4
FASTEST_NS, FIRST_SAMPLE_NS = 25, 250
"""A timed event counts for at most ``MOST_OF_FASTEST`` times the fastest one so far, in nanoseconds; the fastest one is taken to be from
``FASTEST_NS`` to ``FIRST_SAMPLE_NS``. Time beyond that is not overhead: the thread was descheduled, or the loop had slept and all code is
slow then. Loops that sleep 2 and 10 ms per step took 6 and 9 us of processor time more than bare ones, a loop that does not sleep 10;
the mean timed event took 0.6, 1.7 and 0.28 us, and 0.12, 0.15 and 0.11 with this limit (two loops by turns, 2026-11-25, AMD EPYC,
torch 2.15)."""

COST_OF_SAMPLE, COST_OF_SAMPLE_IN_PYTHON = 12, 7
"""Overhead of the thread in nanoseconds per nanosecond of the timed events, with writers in C and in Python. A sample does not contain the
calls into the hooks, the hooks of the optimizer, which are Python, and the cache misses that all of them cause. The factors are measured: a
step of 8 events took 9 to 14 us more than a bare one, and without C 21 to 25, of which the samples contained 0.85 and 3.3
(``python -m benchmarks --only step``; the row of the run summary compares both)."""


class EdgeBatch(FastNamedTuple):
    """Events taken from a ring, oldest first.

    Attributes:
        times: int64[n], monotonic nanoseconds, never falling.
        codes: int64[n], see ``otel_train.recording.events``.
        missed: number of events that were overwritten before they could be read.
    """

    times: np.ndarray
    codes: np.ndarray
    missed: int


_BEGINNINGS = frozenset({Op.BEGIN, Op.MARK, Op.EPOCH})


class RingReader:
    """Reads the ring of another thread or process without blocking it.

    Only reading imports numpy: a rank only writes, and a program without torch may not have imported numpy.

    Args:
        words: int64 memory of ``2 * capacity`` words, capacity a power of two.

    Attributes:
        capacity: number of events that the ring holds.
        taken: number of events read, or counted as missed, so far.
    """

    def __init__(self, words: memoryview) -> None:
        self.capacity = len(words) // EDGE_WORDS
        self.taken = 0
        self._size = len(words)
        self._words = memoryview(words)

    @property
    def written(self) -> int:
        """Number of events written since the ring was made."""
        raise NotImplementedError

    @property
    def readable(self) -> int:
        """Number of events of these that may be read."""
        return self.written

    @property
    def pending(self) -> int:
        """Number of events that may be read and were not yet."""
        return max(0, self.readable - self.taken)

    def read(self, most: int) -> EdgeBatch:
        """Takes up to ``most`` events, oldest first.

        Every event is either returned complete once or counted as missed once.
        """
        first = max(self.taken, self.written - self.capacity)
        last = max(first, min(self.readable, first + most))
        words = self._copy(first * EDGE_WORDS, last * EDGE_WORDS)
        # The slot after the published position may be half written; its former event is ``capacity`` events older.
        whole = max(first, min(last, self.written + 1 - self.capacity))
        pairs = words[(whole - first) * EDGE_WORDS :].reshape(-1, EDGE_WORDS)
        missed = whole - self.taken
        self.taken = last
        return EdgeBatch(times=pairs[:, 1], codes=pairs[:, 0], missed=missed)

    def peek(self, since: int) -> EdgeBatch:
        """Returns the events from number ``since`` on that the ring still holds, without taking them.

        Unlike ``read`` it does not check whether the oldest were overwritten meanwhile.
        """
        last = self.written
        first = max(since, last - self.capacity)
        pairs = self._copy(first * EDGE_WORDS, last * EDGE_WORDS).reshape(-1, EDGE_WORDS)
        return EdgeBatch(times=pairs[:, 1], codes=pairs[:, 0], missed=first - since)

    def begun_since(self, since: int) -> bool:
        """Returns whether a stage has begun after event number ``since``. For the thread that owns the ring alone."""
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
    ``intercept(None)``; ``intercept_first`` sets another interceptor, which is called before that one. Without interceptors there is no
    cost: they are called in place of ``on_other_thread``, and the writer compares the thread with its owner in any case.

    The writer is ``edge(code)``, a closure or a method in C: a clock read and two stores. It publishes its position after
    both stores, so a reader that reads the position before and after copying knows which events are
    complete and how many were overwritten.

    Args:
        owner: identity of the only thread that may write.
        on_other_thread: called with the codes of all other threads.
        progress: int64 memory of 2 words for readers in other processes: words written, and the sum of the sampled overhead in
            nanoseconds. None if there are no such readers.
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
        """Stops writing and releases the writer's memory, also in the middle of an event; all codes go to ``on_other_thread``."""
        self._detached = True
        self._detach()

    def disown(self) -> None:
        """Passes all codes to ``on_other_thread``: the owner has ended, and a later thread may get its identity."""
        self.owner = 0
        self._set_owner(0, self._on_other_thread)

    def release_memory(self) -> None:
        """Releases the reader's memory; nothing can be read any more."""
        self._words = memoryview(b"").cast("q")

    @property
    def written(self) -> int:
        """Number of events written since the ring was made."""
        return self._counts()[0] // EDGE_WORDS

    def intercept(self, interceptor: _Interceptor | None) -> None:
        """Calls ``interceptor(code, write)`` for each event instead of writing it, until it is None, which only the owner may set."""
        self._set_interceptor(1, interceptor)

    def intercept_first(self, interceptor: _Interceptor | None) -> None:
        """Sets an interceptor that is called before the one of ``intercept``."""
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
            if self._detached or get_ident() != owner:  # a detached writer passes on all codes
                on_other_thread(code)
            elif interceptors[0] is not None:
                interceptors[0](code, pass_on)
            else:
                pass_on(code)

        # With owner 0 the writer passes every code to `intercepted`.
        set_owner(0, intercepted)


def packed(*codes: int) -> bytes:
    """Returns codes as bytes, for a hook in C."""
    return struct.pack(f"{len(codes)}q", *codes)


_Edge: TypeAlias = "Callable[[int], None]"
_Interceptor: TypeAlias = "Callable[[int, _Edge], None]"
_WriterParts: TypeAlias = (
    "tuple[_Edge, Callable[[], tuple[int, int]], Callable[[], None], Callable[[int, _Edge], None]]"
)


def _private_words() -> memoryview:
    """Returns memory for ``progress`` that no other process reads."""
    return memoryview(bytearray(16)).cast("q")


def _native_writer(
    words: memoryview, clock: Clock, owner: int, on_other_thread: Callable[[int], None], *, shown: memoryview
) -> _WriterParts:
    # A clock that was replaced (by a fake clock, before otel_train was imported) is called through Python.
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
        # A thread in the middle of an event finishes it in this memory: that of the ring can be unmapped.
        words = memoryview(bytearray(len(words) * words.itemsize)).cast("q")
        shown = memoryview(bytearray(shown)).cast("q")

    def set_owner(to: int, others: _Edge) -> None:
        nonlocal owner, on_other_thread
        on_other_thread = others
        owner = 0 if over else to

    return edge, read, detach, set_owner
