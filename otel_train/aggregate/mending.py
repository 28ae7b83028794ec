"""Edges that do not nest, made to: the slow path, one edge at a time, for slices in which something went wrong."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from otel_train.aggregate.words import (
    KIND_DATA,
    KIND_OPTIMIZER,
    OP_BEGIN,
    OP_END,
    OP_FAIL,
    OP_RESUME,
    OP_SUSPEND,
)
from otel_train.codes import SOURCE_MASK, SOURCE_SHIFT

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

DEEPEST = 64
"""Stages inside each other that are told apart; what lies deeper belongs to the innermost of them."""

_OP_BITS = (1 << SOURCE_SHIFT) - 1
_BEFORE_BREATH = 128
"""Edges between two breaths: about 0.1 ms."""


class Mended(NamedTuple):
    """Edges that nest.

    Attributes:
        times: int64[n].
        codes: int64[n].
        dropped: ends without a begin.
        too_deep: begins beyond ``DEEPEST`` that are still open.
    """

    times: np.ndarray
    codes: np.ndarray
    dropped: int
    too_deep: int


def mend(
    times: np.ndarray,
    codes: np.ndarray,
    *,
    kinds: np.ndarray,
    parents: Sequence[bool],
    too_deep: int,
    breathe: Callable[[], None],
) -> Mended:
    """Close what an outer edge leaves open, drop ends without a begin.

    An ask closes an optimizer step that raised, and so does the next step of the same optimizer when other
    stages lie between the two (right after it, it is a subclass calling ``super().step()``).

    Args:
        times: int64[n].
        codes: int64[n]; the first ``len(parents)`` are begin edges carried from before.
        kinds: int8[sources].
        parents: for each carried begin, whether other stages began inside it.
        too_deep: begins beyond ``DEEPEST`` that were open before.
        breathe: called now and then.
    """
    mending = _Mending(kinds, parents, too_deep)
    for done, (instant, word) in enumerate(zip(times.tolist(), codes.tolist(), strict=True)):
        mending.take(instant, word)
        if done % _BEFORE_BREATH == 0:
            breathe()
    columns = np.array(mending.out, dtype=np.int64).reshape(-1, 2)
    return Mended(columns[:, 0].copy(), columns[:, 1].copy(), mending.dropped, mending.too_deep)


class _Mending:
    """A stack that is told one edge at a time and writes edges that nest."""

    def __init__(self, kinds: np.ndarray, parents: Sequence[bool], too_deep: int) -> None:
        self.out: list[tuple[int, int]] = []
        self.dropped = 0
        self.too_deep = too_deep
        self._kinds = kinds
        self._carried = list(parents)
        self._stack: list[int] = []
        self._parent: list[bool] = []

    def take(self, instant: int, word: int) -> None:
        source, op = (word >> SOURCE_SHIFT) & SOURCE_MASK, word & _OP_BITS
        if op in (OP_BEGIN, OP_RESUME):
            kept = self._begin(source, instant)
        elif OP_END <= op <= OP_SUSPEND:
            kept = self._end(source, instant)
        else:  # a mark is an outer edge
            kept = True
            if self._stack and self._is_optimizer(self._stack[-1]):
                self._close_down_to(len(self._stack) - 1, instant)
        if kept:
            self.out.append((instant, word))

    def _begin(self, source: int, instant: int) -> bool:
        if self._carried:
            self._push(source, parent=self._carried.pop(0))
            return True
        self._close_down_to(self._height_kept(source), instant)
        if self.too_deep or len(self._stack) == DEEPEST:
            self.too_deep += 1
            return False
        if self._parent:
            self._parent[-1] = True
        self._push(source, parent=False)
        return True

    def _end(self, source: int, instant: int) -> bool:
        if self.too_deep and (source not in self._stack[:-1] or source == self._stack[-1]):
            self.too_deep -= 1
            return False
        if source not in self._stack:
            self.dropped += 1
            return False
        self._close_down_to(len(self._stack) - self._stack[::-1].index(source), instant)
        self._stack.pop()
        self._parent.pop()
        self.too_deep = 0
        return True

    def _push(self, source: int, *, parent: bool) -> None:
        self._stack.append(source)
        self._parent.append(parent)

    def _close_down_to(self, height: int, instant: int) -> None:
        while len(self._stack) > height:
            self.out.append((instant, self._stack.pop() << SOURCE_SHIFT | OP_FAIL))
            self._parent.pop()
            self.too_deep = 0

    def _height_kept(self, source: int) -> int:
        """How much of the stack stays open when ``source`` begins."""
        if self._kinds[source] == KIND_DATA:
            optimizers = [h for h, s in enumerate(self._stack) if self._is_optimizer(s)]
            return optimizers[0] if optimizers else len(self._stack)
        if self._is_optimizer(source) and source in self._stack:
            height = len(self._stack) - 1 - self._stack[::-1].index(source)
            return height if self._parent[height] else len(self._stack)
        return len(self._stack)

    def _is_optimizer(self, source: int) -> bool:
        return bool(self._kinds[source] == KIND_OPTIMIZER)
