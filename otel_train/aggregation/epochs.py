"""Finds the boundaries of epochs, and which epoch ran when."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from otel_train.accounting.types import TRAIN, ClosedSteps
from otel_train.recording.events import Ending, Op, SourceKind

if TYPE_CHECKING:
    from otel_train.aggregation.series_names import SeriesNames

REMEMBERED = 256
"""Most epoch boundaries that are kept, for ``EpochTracker.at``."""


class EpochBoundary(NamedTuple):
    """The end of epoch ``ended`` (None: no epoch ended), the beginning of one, or both; from here on ``running`` is the epoch."""

    at_ns: int
    ended: int | None
    running: int


class _End(NamedTuple):
    """The end of a pass: its time, and whether the loader was exhausted rather than abandoned."""

    at_ns: int
    exhausted: bool


_EXHAUSTED = (Ending.EPOCH_END, Ending.SHORT, Ending.STREAMING_END)


class EpochTracker:
    """Finds the epochs of the training thread: as marked by the program, else by the passes over the training loaders.

    The rule: an epoch ends when every loader that gave it a training batch has ended a pass in it, and one of them gives
    a batch of a new pass. The end of the epoch is the last end of those passes. So

    - of loaders used in turn, or drawn by weight until all are exhausted, the last one exhausted ends the epoch;
    - ``zip`` ends it with the shortest, because the iterators of the others are disposed of;
    - a loader that restarts each time it is exhausted does not: the longest other loader ends the epoch;
    - an abandoned pass counts as ended; a failed one as if its loader had not been used.

    If the loaders of an epoch are known, it ends without waiting for that batch: when each of them, and all others that were
    used, has ended a pass, and one was exhausted. Known are the loaders of the previous epoch, or else all that the program
    passed and that are not for evaluation. An abandoned pass that is not repeated is no epoch, unless the previous epoch ended
    in the same way.
    """

    def __init__(self, names: SeriesNames) -> None:
        self.loaders: Callable[[], Mapping[str, Any]] = dict  # Any: LoaderFacts
        self._names = names
        self._found: deque[EpochBoundary] = deque(maxlen=REMEMBERED)
        self._evaluated: set[int] = set()  # loaders that gave batches in another phase
        self._marked = False
        self._open: int | None = None  # the epoch that was marked and has not ended
        self._running = 1
        self._since_ns = -1  # end of the previous epoch
        self._before: set[int] = set()  # loaders of the previous epoch
        self._broken_off = False  # no loader was exhausted in the previous epoch
        self._first_ns: dict[int, int] = {}  # time of the first training batch in this epoch, by loader
        self._over: dict[int, _End] = {}  # first end of a pass in this epoch, by loader
        self._ended: dict[int, _End] = {}  # last end of a pass, by loader

    def take(self, closed: ClosedSteps) -> list[EpochBoundary]:
        """Returns the epoch boundaries in closed steps, in time order."""
        found = [*self._marks(closed), *self._passes(closed)]
        self._found += found
        return found

    def at(self, at_ns: int) -> int:
        """Returns the epoch at an instant; before the first boundary that is kept, the epoch that ended or began there."""
        if self._is_over() and at_ns >= self._over_ns():
            return self._running + 1
        running = (boundary.running for boundary in reversed(self._found) if boundary.at_ns <= at_ns)
        first = self._found[0] if self._found else EpochBoundary(0, None, self._running)
        return next(running, first.running if first.ended is None else first.ended)

    def close(self) -> EpochBoundary:
        """Returns the boundary that ends the last epoch at the end of the run; its time is 0 if no pass has ended it."""
        if self._is_over():
            return EpochBoundary(self._over_ns(), self._running, self._running)
        return EpochBoundary(0, self._open, self._running)

    def _marks(self, closed: ClosedSteps) -> Iterator[EpochBoundary]:
        """Yields the boundaries that the program marked; once there is one, passes no longer count."""
        for at_ns, op, payload in closed.said[closed.said[:, 1] != Op.REPORT].tolist():
            self._marked = True
            raised = op == Op.EPOCH_END and payload
            ended = None if raised else self._open
            self._open = payload if op == Op.EPOCH else None
            self._running = payload if op == Op.EPOCH else self._running
            yield EpochBoundary(at_ns, ended, self._running)

    def _passes(self, closed: ClosedSteps) -> Iterator[EpochBoundary]:
        """Yields the boundaries that passes over training loaders show."""
        if self._marked:
            return
        trained = closed.batches[:, 1] == TRAIN
        self._evaluated.update(np.unique(closed.batches[~trained, 0]).tolist())
        batches = closed.batches[trained]
        batches = batches[np.argsort(batches[:, 3], kind="stable")]
        endings = closed.endings[np.argsort(closed.endings[:, 2], kind="stable")]
        parts = np.split(batches, np.searchsorted(batches[:, 3], endings[:, 2], side="right"))
        yield from self._used(parts[0])
        for (source, why, at_ns), later in zip(endings.tolist(), parts[1:], strict=True):
            yield from self._stopped(source, why, at_ns)
            yield from self._used(later)

    def _used(self, batches: np.ndarray) -> Iterator[EpochBoundary]:
        """Handles training batches of loaders, in time order."""
        for at_ns, source in self._first_of_passes(batches):
            if self._all_over() and source in self._over and at_ns > self._over[source].at_ns:
                yield self._boundary()
            if at_ns > self._since_ns and source not in self._first_ns:
                self._first_ns[source] = at_ns
                # A prefetched batch, which is recorded after the end of its pass.
                if source in self._ended and self._ended[source].at_ns >= at_ns:
                    self._over[source] = self._ended[source]
                    yield from self._boundary_if_known()

    def _first_of_passes(self, batches: np.ndarray) -> list[tuple[int, int]]:
        """Returns time and source of each loader's first batch, and of its first after the end of its last pass, in time order."""
        found = set()
        for source in np.unique(batches[:, 0]).tolist():
            times = batches[batches[:, 0] == source, 3]
            ended_ns = self._ended[source].at_ns if source in self._ended else -1
            after = int(np.searchsorted(times, ended_ns, side="right"))
            found |= {(at_ns, source) for at_ns in times[[0, min(after, len(times) - 1)]].tolist()}
        return sorted(found)

    def _stopped(self, source: int, why: int, at_ns: int) -> Iterator[EpochBoundary]:
        """Handles the end of a pass over a loader."""
        if why == Ending.ERROR:
            self._first_ns.pop(source, None)
            self._over.pop(source, None)
        else:
            self._ended[source] = _End(at_ns, why in _EXHAUSTED)
            if source in self._first_ns:
                self._over.setdefault(source, self._ended[source])
        yield from self._boundary_if_known()

    def _boundary_if_known(self) -> Iterator[EpochBoundary]:
        if self._all_over() and self._any_exhausted() and self._are_all():
            yield self._boundary()

    def _are_all(self) -> bool:
        """Returns whether all loaders that are expected in this epoch have ended a pass in it."""
        if self._before:
            return self._before <= self._over.keys()
        names, facts = self._names, self.loaders()
        used = {names.sources[source].name for source in self._over}
        if not all(name in facts and facts[name].given for name in used):
            return False  # further loaders may be found later
        known = names.table
        for source in np.flatnonzero(names.kinds == SourceKind.DATA).tolist():
            evaluates = source in self._evaluated or max(known.declared[source], known.named[source]) > TRAIN
            if names.sources[source].name not in used and not evaluates:
                return False
        return True

    def _is_over(self) -> bool:
        """Returns whether the running epoch is over, if no further loader takes part in it."""
        return not self._marked and self._all_over() and (self._any_exhausted() or self._broken_off)

    def _all_over(self) -> bool:
        return bool(self._first_ns) and self._over.keys() == self._first_ns.keys()

    def _any_exhausted(self) -> bool:
        return any(end.exhausted for end in self._over.values())

    def _over_ns(self) -> int:
        return max(end.at_ns for end in self._over.values())

    def _boundary(self) -> EpochBoundary:
        self._since_ns, self._before = self._over_ns(), set(self._over)
        self._broken_off = not self._any_exhausted()
        self._first_ns, self._over = {}, {}
        self._running += 1
        return EpochBoundary(self._since_ns, self._running - 1, self._running)
