"""Epochs: where they begin and end, and which one ran when."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from otel_train.accounting.types import TRAIN, EpochMark
from otel_train.codes import Ending

if TYPE_CHECKING:
    from collections.abc import Iterator

    from otel_train.accounting.types import Settled
    from otel_train.aggregate.totals import Totals

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

    def add(self, epochs: np.ndarray) -> None:
        """Take in marks, as in ``Settled.epochs``."""
        begun = epochs[epochs[:, 1] == EpochMark.BEGUN]
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


class EpochTurns:
    """Finds the epochs of the thread that trains: as they are marked, else passes of the training loaders."""

    def __init__(self) -> None:
        self._marked = False
        self._open: int | None = None  # the epoch that was marked and is not over
        self._running = 1
        self._trained: set[int] = set()
        self._stops: dict[int, int] = {}

    def take(self, settled: Settled) -> list[Turn]:
        """The turns in what was settled, in time."""
        return [*self._marks(settled), *self._passes(settled)]

    def close(self) -> Turn:
        """The end of the run: also that of the epoch that was marked last, but of no pass."""
        return Turn(0, self._open, self._running)

    def _marks(self, settled: Settled) -> Iterator[Turn]:
        """Epochs that the program marks: then they count, and nothing else does."""
        for at_ns, what, number in settled.epochs.tolist():
            self._marked = True
            ended = None if what == EpochMark.BROKEN else self._open
            begun = what == EpochMark.BEGUN
            self._open = number if begun else None
            self._running = number if begun else self._running + 1
            yield Turn(at_ns, ended, self._running)

    def _passes(self, settled: Settled) -> Iterator[Turn]:
        """Of several training loaders, the one that has ended most often says which epoch it is."""
        batches = settled.batches
        self._trained.update(np.unique(batches[batches[:, 1] == TRAIN, 0]).tolist())
        for source, why, at_ns in settled.endings[np.argsort(settled.endings[:, 2], kind="stable")].tolist():
            if self._marked or why == Ending.ERROR or source not in self._trained:
                continue
            self._stops[source] = self._stops.get(source, 0) + 1
            if self._stops[source] == self._running:
                self._running += 1
                yield Turn(at_ns, self._stops[source], self._running)
