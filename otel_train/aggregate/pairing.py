"""Edges of one thread paired, nested and tiled, as columns.

At every instant the innermost open stage owns the time. What that means for each edge is worked out with a
few numpy calls per slice and level; only a slice whose edges do not nest (an optimizer step raised, an
edge was lost) is first mended one edge at a time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from otel_train.aggregate.mending import mend
from otel_train.aggregate.nesting import Edges, Level, Open, Slice, hides_of, origin
from otel_train.aggregate.words import KIND_BACKWARD

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["SLICE_EDGES", "Edges", "Open", "Pairing", "origin"]

SLICE_EDGES = 8192
"""Edges per slice: smaller ones cost more per edge, larger ones keep the interpreter longer between breaths."""


class Pairing:
    """Carries the open stages of one thread from slice to slice.

    Attributes:
        open: stages open after the last slice, outermost first.
        ignored: ends without a begin so far.
        backward_seen: a backward has run, so ``autograd.grad`` is none.
    """

    def __init__(self) -> None:
        self.open: list[Open] = []
        self.ignored = 0
        self.backward_seen = False
        self._too_deep = 0

    def feed(
        self,
        times: np.ndarray,
        codes: np.ndarray,
        kinds: np.ndarray,
        *,
        breathe: Callable[[], None] = lambda: None,
    ) -> Edges:
        """Work out the next slice.

        Args:
            times: int64[n], never falling.
            codes: int64[n].
            kinds: int8[sources], the ``SourceKind`` of every source.
            breathe: called now and then, to let the training thread have the interpreter.
        """
        parents = [entry.parent for entry in self.open]
        times = np.concatenate((np.array([e.begun_ns for e in self.open], dtype=np.int64), times))
        codes = np.concatenate((np.array([e.code for e in self.open], dtype=np.int64), codes))
        work = Slice(times, codes, kinds)
        levels = None if self._too_deep else work.levels()
        breathe()
        if levels is None or not self._fold(work, levels, parents, mended=False):
            mended = mend(
                times, codes, kinds=kinds, parents=parents, too_deep=self._too_deep, breathe=breathe
            )
            self.ignored += mended.dropped
            self._too_deep = mended.too_deep
            work = Slice(mended.times, mended.codes, kinds)
            levels = work.levels()
            assert levels is not None, "mended edges nest"
            self._fold(work, levels, parents, mended=True)
        breathe()
        edges = work.edges().part(len(parents))
        self.open = work.still_open(levels, parents)
        return edges

    def _fold(self, work: Slice, levels: list[Level], parents: list[bool], *, mended: bool) -> bool:
        """Decide, outermost level first, which begins are occurrences of their own.

        Returns:
            False if an optimizer seems to have raised, so that its end is missing.
        """
        if not self.backward_seen:
            self.backward_seen = bool(np.any(work.opening & (work.kind == KIND_BACKWARD)))
        hides = hides_of(work.kinds, work.bits, backward_seen=self.backward_seen)
        for height, level in enumerate(levels):
            if height == 0:
                work.fold_outermost(level, hides)
            elif not work.fold_inner(height, levels, hides, None if mended else parents):
                return False
        return work.fill_marks(mended=mended)
