"""Operations timed by token: calls with a time of their own, in no step's time."""

from __future__ import annotations

import numpy as np

from otel_train.accounting.types import NO_PHASE, NOTHING, ClosedSteps, StageCalls

MOST_HELD = 100_000
"""Operations held back while the thread that trains writes nothing; 6 MB."""


def calls_of(ended: np.ndarray) -> StageCalls:
    """As calls, in the order of their ends.

    Args:
        ended: int64[n, 3]: operation, when it began, when it ended.
    """
    source, begun_ns, ended_ns = ended[np.argsort(ended[:, 2], kind="stable")].T
    zeros = np.zeros(len(ended), dtype=np.int64)
    return StageCalls(source, zeros - 1, zeros + NO_PHASE, begun_ns, ended_ns - begun_ns, zeros, zeros - 1)


class HeldOperations:
    """Keeps operations until what the training thread did up to their ends has been settled.

    Only then is it known whether they ended before a step or an epoch did.
    """

    def __init__(self) -> None:
        self._held: StageCalls = NOTHING.occurrences

    def add(self, calls: StageCalls) -> None:
        """Operations are over."""
        if len(calls.source):
            self._held = _together(self._held, calls)

    def among(self, settled: ClosedSteps, until_ns: int) -> ClosedSteps:
        """What was settled, with the operations that had ended by then."""
        if not len(self._held.source):
            return settled
        ripe = int(np.searchsorted(_ends(self._held), until_ns, side="right"))
        taken = StageCalls(*(column[:ripe] for column in self._held))
        self._held = StageCalls(*(column[ripe:].copy() for column in self._held))
        return settled._replace(occurrences=_together(settled.occurrences, taken))

    def rest(self, *, least: int = 1) -> ClosedSteps | None:
        """All that are held, if there are ``least``, as if they alone had been settled; else None."""
        if len(self._held.source) < least:
            return None
        held, self._held = self._held, NOTHING.occurrences
        return NOTHING._replace(occurrences=held)


def _ends(calls: StageCalls) -> np.ndarray:
    """When they ended; what ran in pieces began longer before its end than it took."""
    ends: np.ndarray = np.maximum.accumulate(calls.started_ns + calls.inclusive_ns)
    return ends


def _together(calls: StageCalls, more: StageCalls) -> StageCalls:
    """Both, in the order of their ends."""
    at = np.searchsorted(_ends(calls), _ends(more), side="right")
    return StageCalls(*(np.insert(had, at, new) for had, new in zip(calls, more, strict=True)))
