"""Epochs: where they begin and end, and which one ran when."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np

from otel_train.accounting.types import TRAIN
from otel_train.recording.events import Ending, Op, SourceKind

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from otel_train.accounting.types import ClosedSteps
    from otel_train.aggregation.counters import Totals
    from otel_train.aggregation.series_names import Names

REMEMBERED = 256
"""Epochs of which the time is known."""


class EpochLog:
    """Remembers which epoch ran when.

    Args:
        totals: where the passes over loaders are.
    """

    def __init__(self, totals: Totals) -> None:
        self._totals = totals
        self._begun: deque[tuple[int, int]] = deque(maxlen=REMEMBERED)

    def add(self, said: np.ndarray) -> None:
        """Take in marks, as in ``ClosedSteps.said``."""
        begun = said[said[:, 1] == Op.EPOCH]
        self._begun += zip(begun[:, 0].tolist(), begun[:, 2].tolist(), strict=True)

    def at(self, at_ns: int) -> int:
        """Which epoch ran at an instant: as it was marked, else which pass over the training data, from 1."""
        if self._begun:
            first = self._begun[0][1]  # also for what came before it
            return next((number for begun, number in reversed(self._begun) if begun <= at_ns), first)
        names = self._totals.names.loaders.names
        trained = {names[loader] for loader, phase in self._totals.batches if phase == TRAIN}
        return 1 + max((self._totals.loaders.stops_before(name, at_ns) for name in trained), default=0)


class Turn(NamedTuple):
    """Where an epoch ends, or begins, or both.

    Attributes:
        at_ns: when.
        ended: number of the epoch that is over; None for none.
        running: number of the epoch from there on.
    """

    at_ns: int
    ended: int | None
    running: int


class _End(NamedTuple):
    """The end of a pass: when, and whether the loader had no further batch; else it was broken off."""

    at_ns: int
    exhausted: bool


_EXHAUSTED = (Ending.EPOCH_END, Ending.SHORT, Ending.STREAMING_END)


class HasOrigin(Protocol):
    """What an epoch must know of a loader."""

    @property
    def given(self) -> bool:
        """The program gave it; else it was found when it was first iterated."""


class EpochTurns:
    """Finds the epochs of the thread that trains: as they are marked, else by the passes of the training loaders.

    One rule: an epoch is over when every loader that gave it a training batch has ended a pass in it, and one of
    them gives a batch of a new pass. Its end is the last of those ends. So

    - of loaders in turn, or drawn by weight until all have run out, the last one to run out ends the epoch;
    - ``zip`` ends it with the shortest: there the iterators of the others are disposed of;
    - a loader that begins again each time it runs out does not: the longest one beside it ends the epoch;
    - a pass that was broken off has ended; one that failed is as if its loader had not been there.

    The next batch is not waited for where the loaders of an epoch are known: they are those of the epoch before, or
    all that the program gave and that are not for evaluation. When each of them, and all others that were there, has
    ended a pass and one was exhausted, the epoch is over. What was broken off and does not begin again is no epoch,
    unless the one before was ended in that way, too.

    Args:
        names: what the sources are called.
        loaders: the loaders known now.
    """

    def __init__(self, names: Names, loaders: Callable[[], Mapping[str, HasOrigin]]) -> None:
        self._names = names
        self._loaders = loaders
        self._evaluated: set[int] = set()  # loaders that gave batches in another phase
        self._marked = False
        self._open: int | None = None  # the epoch that was marked and is not over
        self._running = 1
        self._since_ns = -1  # the epoch before ended then
        self._before: set[int] = set()  # its loaders
        self._broken_off = False  # none of them was exhausted in it
        self._first_ns: dict[int, int] = {}  # by loader of this epoch, when it gave the first training batch
        self._over: dict[int, _End] = {}  # by loader of this epoch, its first end in it
        self._ended: dict[int, _End] = {}  # by loader, its last end

    def take(self, settled: ClosedSteps) -> list[Turn]:
        """The turns in what was settled, in time."""
        return [*self._marks(settled), *self._passes(settled)]

    def close(self) -> Turn:
        """The end of the run: also of the epoch that was marked last, and of one whose passes have all ended."""
        if not self._marked and self._all_over() and (self._any_exhausted() or self._broken_off):
            return Turn(self._over_ns(), self._running, self._running)
        return Turn(0, self._open, self._running)

    def _marks(self, settled: ClosedSteps) -> Iterator[Turn]:
        """Epochs that the program marks: then they count, and nothing else does."""
        for at_ns, op, payload in settled.said[settled.said[:, 1] != Op.REPORT].tolist():
            self._marked = True
            broken = op == Op.EPOCH_END and payload
            ended = None if broken else self._open
            self._open = payload if op == Op.EPOCH else None
            self._running = payload if op == Op.EPOCH else self._running + 1
            yield Turn(at_ns, ended, self._running)

    def _passes(self, settled: ClosedSteps) -> Iterator[Turn]:
        """Epochs that the training loaders show."""
        if self._marked:
            return
        trained = settled.batches[:, 1] == TRAIN
        self._evaluated.update(np.unique(settled.batches[~trained, 0]).tolist())
        batches = settled.batches[trained]
        batches = batches[np.argsort(batches[:, 3], kind="stable")]
        endings = settled.endings[np.argsort(settled.endings[:, 2], kind="stable")]
        parts = np.split(batches, np.searchsorted(batches[:, 3], endings[:, 2], side="right"))
        yield from self._used(parts[0])
        for (source, why, at_ns), later in zip(endings.tolist(), parts[1:], strict=True):
            yield from self._stopped(source, why, at_ns)
            yield from self._used(later)

    def _used(self, batches: np.ndarray) -> Iterator[Turn]:
        """Loaders have given training batches, in time."""
        for at_ns, source in self._first_of_passes(batches):
            if self._all_over() and source in self._over and at_ns > self._over[source].at_ns:
                yield self._turn()
            if at_ns > self._since_ns and source not in self._first_ns:
                self._first_ns[source] = at_ns
                if source in self._ended and self._ended[source].at_ns >= at_ns:
                    self._over[source] = self._ended[
                        source
                    ]  # fetched ahead, and told after the end of its pass
                    yield from self._turn_if_known()

    def _first_of_passes(self, batches: np.ndarray) -> list[tuple[int, int]]:
        """When each loader gave its first batch, and the first after the end of its last pass, in time."""
        found = set()
        for source in np.unique(batches[:, 0]).tolist():
            times = batches[batches[:, 0] == source, 3]
            ended_ns = self._ended[source].at_ns if source in self._ended else -1
            after = int(np.searchsorted(times, ended_ns, side="right"))
            found |= {(at_ns, source) for at_ns in times[[0, min(after, len(times) - 1)]].tolist()}
        return sorted(found)

    def _stopped(self, source: int, why: int, at_ns: int) -> Iterator[Turn]:
        """A pass over a loader has ended."""
        if why == Ending.ERROR:
            self._first_ns.pop(source, None)
            self._over.pop(source, None)
        else:
            self._ended[source] = _End(at_ns, why in _EXHAUSTED)
            if source in self._first_ns:
                self._over.setdefault(source, self._ended[source])
        yield from self._turn_if_known()

    def _turn_if_known(self) -> Iterator[Turn]:
        if self._all_over() and self._any_exhausted() and self._are_all():
            yield self._turn()

    def _are_all(self) -> bool:
        """Whether no other loader is to be expected in this epoch."""
        if self._before:
            return self._before <= self._over.keys()
        names, facts = self._names, self._loaders()
        used = {names.sources[source].name for source in self._over}
        if not all(name in facts and facts[name].given for name in used):
            return False  # others may be found, too
        known = names.table
        for source in np.flatnonzero(names.kinds == SourceKind.DATA).tolist():
            evaluates = source in self._evaluated or max(known.declared[source], known.named[source]) > TRAIN
            if names.sources[source].name not in used and not evaluates:
                return False
        return True

    def _all_over(self) -> bool:
        return bool(self._first_ns) and self._over.keys() == self._first_ns.keys()

    def _any_exhausted(self) -> bool:
        return any(end.exhausted for end in self._over.values())

    def _over_ns(self) -> int:
        return max(end.at_ns for end in self._over.values())

    def _turn(self) -> Turn:
        self._since_ns, self._before, self._broken_off = (
            self._over_ns(),
            set(self._over),
            not self._any_exhausted(),
        )
        self._first_ns, self._over = {}, {}
        self._running += 1
        return Turn(self._since_ns, self._running - 1, self._running)
