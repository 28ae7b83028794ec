"""Operations timed between ``begin`` and ``end(token)``: they may overlap, and run in any thread."""

from __future__ import annotations

from array import array
from collections import deque
from itertools import chain
from typing import TYPE_CHECKING

from otel_train.errors import shown, text, wrong_argument
from otel_train.instrumentation.naming import calling
from otel_train.recording.events import MAX_SOURCES, SourceKind
from otel_train.recording.shared_memory import PendingEntries, unreported
from otel_train.safety import Guard

if TYPE_CHECKING:
    from otel_train.datamodel import Clock
    from otel_train.recording.recorder import Recorder

MOST_WAITING = 32_768
"""Most ended operations between two polls of the service thread (5 MB); beyond that the oldest are dropped and counted."""

_OPERATION = 1


def unreported_operations(memory: memoryview, since: int = 0) -> tuple[array[int], int]:
    """Returns the operations that had ended in a dead process and were not reported, and how many are lost; see ``Timers.take``."""
    entries, lost = unreported(memory, since)
    numbers = (entry.numbers for entry in entries if entry.kind == _OPERATION)
    return array("q", chain.from_iterable(numbers)), lost


class Token:
    """One run of an operation, from ``begin`` to ``end``.

    Args:
        begun_ns: when the run began; 0 once it has ended.
        timers: records its end; None if no session was open.
    """

    __slots__ = ("begun_ns", "name", "source", "timers")

    def __init__(self, name: str, source: int = 0, begun_ns: int = 0, timers: Timers | None = None) -> None:
        self.name = name
        self.source = source
        self.begun_ns = begun_ns
        self.timers = timers


class Timers:
    """Times operations between two calls, without locks; ended ones are queued until they are taken.

    Args:
        pending: keeps operations in shared memory until they have been reported.

    Attributes:
        dropped: operations that did not fit into the queue.
        taken: number of the last operation that was taken, plus one.
    """

    def __init__(self, recorder: Recorder, clock: Clock, pending: PendingEntries | None = None) -> None:
        self.dropped = 0
        self._recorder = recorder
        self._clock = clock
        self._sources: dict[str, int] = {}
        self._changed = recorder.changed
        self._ended: deque[tuple[int, int, int, int]] = deque(maxlen=MOST_WAITING)
        self._pending = pending or PendingEntries()
        self.taken = 0
        self._guards: dict[str, Guard] = {}
        self._silent = False
        recorder.when_silenced.append(self._stop)

    def begin(self, name: str) -> Token:
        """Begins an operation; returns the token for ``end``.

        Raises:
            ConfigError: ``name`` is no name.
        """
        if self._silent:
            return Token(name)
        try:
            source = self._sources[name]
        except (KeyError, TypeError):  # the latter if the name cannot be hashed
            source = self._register(name)
        return Token(name, source, self._clock(), self)

    def end(self, token: object) -> None:
        """Ends an operation. One that has ended, or is of another session, is logged, counted and ignored.

        Raises:
            ConfigError: it is no token.
        """
        now_ns = self._clock()
        if not isinstance(token, Token):
            remedy = 'Write token = begin("load"), and end(token)'
            raise wrong_argument(f"end({shown(token)})", "a token that begin() returned", remedy)
        if token.timers is self and token.begun_ns:
            if token.name not in self._guards or not self._guards[token.name].closed:
                if len(self._ended) == MOST_WAITING:
                    self.dropped += 1
                operation = token.source, token.begun_ns, now_ns
                self._ended.append((*operation, self._pending.add(_OPERATION, *operation)))
                self._changed()
            token.begun_ns = 0
        elif token.timers is not None:
            again = token.timers is self
            self._refuse(token.name, "it has ended before" if again else "it was begun in another session")

    def take(self) -> array[int]:
        """Returns the operations that have ended since the last call, three numbers each: source, begin and end in nanoseconds.

        Not a list, which would hold the GIL for milliseconds while it is sent; not a numpy array, see ``RingReader``.
        """
        taken = array("q")
        for _ in range(len(self._ended)):
            *operation, number = self._ended.popleft()
            taken.extend(operation)
            self.taken = number + 1
        return taken

    def reported(self) -> None:
        """Records that the agent has all operations that were taken."""
        self._pending.report(self.taken)

    @property
    def faults(self) -> int:
        """Tokens that were refused."""
        return sum(guard.faults for guard in list(self._guards.values()))

    def _register(self, name: object) -> int:
        """Registers a name at its first use; returns its number."""
        checked = text("begin({})", name, 'Name the operation: begin("load")')
        number = self._recorder.source(SourceKind.STAGE, checked)
        if len(self._sources) < MAX_SOURCES:  # further names share a source
            self._sources[checked] = number
        return number

    def _refuse(self, name: str, why: str) -> None:
        guard = self._guards.setdefault(name, Guard(f"end(token of {name!r})"))
        if not guard.closed:
            with guard:
                raise ValueError(f"{why} ({calling()})")

    def _stop(self) -> None:
        self._silent = True
