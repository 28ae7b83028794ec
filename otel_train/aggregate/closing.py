"""Where training steps close: after which units."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from otel_train.aggregate.steps import TRAIN, StepSource
from otel_train.aggregate.units import Cut, Pieces

if TYPE_CHECKING:
    from collections.abc import Callable

    from otel_train.aggregate.pairing import Edges
    from otel_train.aggregate.phases import Labels

_ENDS_REGION = np.zeros(Cut.SAID + 1, dtype=bool)
_ENDS_REGION[[Cut.ASK, Cut.CHECKPOINT, Cut.CHECKPOINT_END, Cut.SOLO, Cut.SOLO_END, Cut.SAID]] = True
"""What closes a step that has its update."""

_BEFORE_BREATH = 256


class Closing:
    """Remembers which optimizers have updated in the open step.

    Args:
        breathe: called now and then.
    """

    def __init__(self, breathe: Callable[[], None]) -> None:
        self._updated: list[int] = []
        self._breathe = breathe

    def closes(
        self, edges: Edges, pieces: Pieces, labels: Labels, source: StepSource, *, final: bool
    ) -> np.ndarray:
        """Bool per unit: a training step closes right before it.

        Args:
            edges: all.
            pieces: their units.
            labels: phases of the units.
            source: what steps are counted by.
            final: the last unit is the last of all.
        """
        complete = len(pieces.first) - 1
        training = (labels.phase == TRAIN) & ~pieces.solo
        ended_by = pieces.cut[1:]
        before = np.zeros(complete + 1, dtype=bool)
        closer = (ended_by == Cut.CLOSER) & training[:-1]
        if source is StepSource.MANUAL:
            before[1:] = closer
        elif source is StepSource.BATCH:
            fetched = labels.batch_got & training
            before[1:] = (ended_by == Cut.ASK) & fetched[:-1]
            before[-1] |= final and bool(fetched[-1])
        else:
            self._by_update(edges, pieces, closer, before)
            if final and self._updated:  # no ask comes: the step closes at the end of its last update
                closing = np.flatnonzero(closer)
                before[int(closing[-1]) + 1 if len(closing) else 0] = True
        return before

    def _by_update(self, edges: Edges, pieces: Pieces, closer: np.ndarray, before: np.ndarray) -> None:
        """A step closes at a region's end, or before an update that cannot belong to it."""
        ends = _ENDS_REGION[pieces.cut[1:]]
        closing = np.flatnonzero(closer)
        who = edges.sources[pieces.first[closing + 1]]
        region = np.cumsum(ends, dtype=np.int64) - ends
        regions = region[closing]
        again, firsts = self._again(who, regions)
        if again.any() and not (who == who[0]).all():
            self._one_by_one(ends, closing, who, before)
            return
        before[np.concatenate((np.array([-1]), closing[:-1]))[again] + 1] = True
        count = int(region[-1] + ends[-1]) + 1 if len(ends) else 1
        updated = np.zeros(count, dtype=bool)
        updated[regions] = True
        updated[0] |= bool(self._updated)
        before[np.flatnonzero(ends) + 1] |= updated[:-1]
        if not updated[-1]:
            self._updated = []
        elif len(regions) and regions[-1] == count - 1:
            self._updated = [int(who[-1] if again.any() else firsts[-1]), int(who[-1])]

    def _again(self, who: np.ndarray, regions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Whether each update is its region's first optimizer again, or the same twice in a row.

        Returns:
            bool per update; first optimizer of the region of each update.
        """
        if not len(who):
            return np.zeros(0, dtype=bool), who
        begins = np.concatenate((np.array([True]), regions[1:] != regions[:-1]))
        firsts = who[np.flatnonzero(begins)][np.cumsum(begins) - 1]
        same_as_before = np.concatenate((np.array([False]), who[1:] == who[:-1]))
        if self._updated and regions[0] == 0:
            firsts[regions == 0] = self._updated[0]
            begins[0] = False
            same_as_before[0] = who[0] == self._updated[-1]
        return ~begins & (same_as_before | (who == firsts)), firsts

    def _one_by_one(self, ends: np.ndarray, closing: np.ndarray, who: np.ndarray, before: np.ndarray) -> None:
        """Several optimizers that update again without an ask between: what is first depends on what was."""
        after_last, updated = 0, self._updated
        optimizers = dict(zip(closing.tolist(), who.tolist(), strict=True))
        for done, unit in enumerate(np.flatnonzero(ends | _at(closing, len(ends))).tolist()):
            optimizer = optimizers.get(unit)
            if optimizer is not None:
                if updated and optimizer in (updated[0], updated[-1]):
                    before[after_last] = True
                    updated = []
                updated = [*updated[:1], optimizer]
                after_last = unit + 1
            elif updated:
                before[unit + 1] = True
                updated = []
            if done % _BEFORE_BREATH == 0:
                self._breathe()
        self._updated = updated


def _at(entries: np.ndarray, size: int) -> np.ndarray:
    chosen = np.zeros(size, dtype=bool)
    chosen[entries] = True
    return chosen
