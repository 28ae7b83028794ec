"""How the edges of a slice lie inside each other, as columns."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from otel_train.aggregate.mending import DEEPEST
from otel_train.aggregate.words import (
    KIND_BACKWARD,
    KIND_CHECKPOINT,
    KIND_DATA,
    KIND_FORWARD,
    KIND_GRAD,
    KIND_H2D,
    KIND_MARK,
    KIND_OPTIMIZER,
    KIND_SCALER,
    KIND_STAGE,
    KIND_WHOLE,
    OP_BEGIN,
    OP_END,
    OP_RESUME,
    OP_SUSPEND,
)
from otel_train.codes import FLAG_MASK, FLAG_SHIFT, PAYLOAD_SHIFT, SOURCE_MASK, SOURCE_SHIFT, SourceKind

_OP_BITS = (1 << SOURCE_SHIFT) - 1
_BIT = {int(kind): 1 << int(kind) for kind in SourceKind}
_OPTIMIZER_BITS = _BIT[KIND_OPTIMIZER] | _BIT[KIND_SCALER]
_OWN_STAGE_BITS = 16
"""Stages by hand have one ancestor bit each, from this bit up; the 48th shares with the last."""


class Open(NamedTuple):
    """A stage that had not ended when a slice did.

    Attributes:
        begun_ns: when it began.
        code: its begin edge.
        parent: whether other stages began inside it.
    """

    begun_ns: int
    code: int
    parent: bool


class Edges(NamedTuple):
    """Edges of one thread, worked out. All columns have one entry per edge, and none points to another.

    Attributes:
        times: int64, instants; entry i owns the tile from ``times[i]`` to ``times[i + 1]``.
        ops: int8.
        kinds: int8, ``SourceKind`` of the source.
        sources: int64.
        flags: int8, of the begin edge.
        payloads: int64.
        owner: int64, source that owns the tile after this edge; -1 for nobody.
        begun_ns: int64, when the stage that this edge opens or closes began.
        ancestors: int64, kinds that stage lies inside of, as bits.
        counted: bool, that stage is an occurrence of its own (not folded into an outer one).
    """

    times: np.ndarray
    ops: np.ndarray
    kinds: np.ndarray
    sources: np.ndarray
    flags: np.ndarray
    payloads: np.ndarray
    owner: np.ndarray
    begun_ns: np.ndarray
    ancestors: np.ndarray
    counted: np.ndarray

    def part(self, start: int, stop: int | None = None) -> Edges:
        """Entries from ``start`` to ``stop``. They are views: ``copy`` what is kept."""
        return Edges(*[column[start:stop] for column in self])

    def copy(self) -> Edges:
        """The same entries, keeping nothing else alive."""
        return Edges(*[column.copy() for column in self])

    def followed_by(self, later: Edges) -> Edges:
        """These edges and then ``later``."""
        return Edges(*[np.concatenate(pair) for pair in zip(self, later, strict=True)])


def origin(at_ns: int) -> Edges:
    """An edge at which nothing happens: where the account of a thread begins or ends."""
    zero = np.zeros(1, dtype=np.int64)
    none = np.zeros(1, dtype=np.int8)
    nobody = np.full(1, -1, dtype=np.int64)
    return Edges(
        zero + at_ns, none, none + np.int8(KIND_MARK), nobody, none, zero,
        nobody, zero + at_ns, zero, none.astype(bool),
    )  # fmt: skip


class Level(NamedTuple):
    """Begins and ends at one depth of nesting; the last begin may have no end."""

    begins: np.ndarray
    ends: np.ndarray


class Slice:
    """The columns of a slice while they are worked out."""

    def __init__(self, times: np.ndarray, codes: np.ndarray, kinds: np.ndarray) -> None:
        size = len(codes)
        self.flat = False
        self.kinds = kinds
        self.bits = bits_of(kinds)
        self.times = times
        self.codes = codes
        self.ops = (codes.astype(np.uint8) & np.uint8(_OP_BITS)).view(np.int8)
        self.sources = (codes >> SOURCE_SHIFT) & SOURCE_MASK
        self.flags = (codes.astype(np.uint32) >> FLAG_SHIFT).astype(np.int8) & np.int8(FLAG_MASK)
        self.kind = kinds.take(self.sources)
        self.opening = (self.ops == OP_BEGIN) | (self.ops == OP_RESUME)
        self.closing = (self.ops >= OP_END) & (self.ops <= OP_SUSPEND)
        self.begun = times.copy()
        self.counted = self.opening.copy()
        self.ancestors = np.zeros(size, dtype=np.int64)
        self.owner = np.full(size, -1, dtype=np.int64)

    def levels(self) -> list[Level] | None:
        """Pair edges, which alternate at every depth; None if they do not nest."""
        if self.opening[::2].all() and self.closing[1::2].all():
            return self._flat()
        depth = np.cumsum(self.opening.view(np.int8) - self.closing.view(np.int8), dtype=np.int32)
        deepest = int(depth.max(initial=0))
        if deepest > DEEPEST or depth.min(initial=0) < 0:
            return None
        depth += self.closing
        depth *= self.opening | self.closing  # marks are at no depth
        levels = []
        for height in range(1, deepest + 1):
            here = np.flatnonzero(depth == height)
            begins, ends = here[::2], here[1::2]
            if not np.array_equal(self.sources[begins[: len(ends)]], self.sources[ends]):
                return None
            levels.append(Level(begins, ends))
        return levels

    def _flat(self) -> list[Level] | None:
        """Nothing lies inside anything."""
        begins, ends = np.arange(0, len(self.ops), 2), np.arange(1, len(self.ops), 2)
        if not np.array_equal(self.sources[: 2 * len(ends) : 2], self.sources[1::2]):
            return None
        self.flat = True
        return [Level(begins, ends)] if len(begins) else []

    def fold_outermost(self, level: Level, hides: np.ndarray) -> None:
        """Nothing lies around these: only ``autograd.grad`` can be hidden."""
        begins: Any = slice(None, None, 2) if self.flat else level.begins
        sources = self.sources[begins]
        self.owner[begins] = sources
        if hides.min(initial=0) < 0:
            hidden = hides[sources] < 0
            self.counted[begins] = ~hidden
            self.owner[begins] = np.where(hidden, -1, sources)
        self._copy_to_ends(level)

    def fold_inner(
        self, height: int, levels: list[Level], hides: np.ndarray, carried: list[bool] | None
    ) -> bool:
        """The same one level further in. False if ``carried`` is given and an optimizer seems to have raised."""
        level, outer = levels[height], levels[height - 1].begins
        begins, ends = level
        parents = outer[np.searchsorted(outer, begins) - 1]
        sources = self.sources[begins]
        inside = self.ancestors[parents] | np.where(
            self.counted[parents], self.bits[self.sources[parents]], 0
        )
        if carried is not None and self._raised(height, levels, inside, carried):
            return False
        hiding = hides[sources]
        hidden = ((inside & hiding) != 0) | (hiding < 0)
        around = self.owner[parents]
        self.counted[begins] = ~hidden
        self.ancestors[begins] = inside
        self.owner[begins] = np.where(hidden, around, sources)
        self.owner[ends] = around[: len(ends)]
        self.ancestors[ends] = inside[: len(ends)]
        self._copy_to_ends(level)
        return True

    def _copy_to_ends(self, level: Level) -> None:
        """What is known where a stage begins is also asked for where it ends."""
        count = len(level.ends)
        ends: Any = slice(1, None, 2) if self.flat else level.ends
        begins: Any = slice(0, 2 * count, 2) if self.flat else level.begins[:count]
        self.begun[ends] = self.times[begins]
        self.flags[ends] = self.flags[begins]
        self.counted[ends] = self.counted[begins]

    def _raised(self, height: int, levels: list[Level], inside: np.ndarray, carried: list[bool]) -> bool:
        """Whether an optimizer step may have raised: it has no end, and encloses what comes after it.

        What may come inside: other optimizers, and right after it itself (a subclass that calls
        ``super().step()``).
        """
        enclosed = (inside & _BIT[KIND_OPTIMIZER]) != 0
        begins = levels[height].begins[enclosed]
        kind = self.kind[begins]
        if np.any(kind == KIND_DATA):
            return True
        begins = begins[kind == KIND_OPTIMIZER]
        for outer in levels[:height]:
            around = outer.begins[np.searchsorted(outer.begins, begins) - 1]
            itself = self.sources[around] == self.sources[begins]
            itself &= (begins != around + 1) | np.isin(around, np.flatnonzero(carried))
            if itself.any():
                return True
        return False

    def fill_marks(self, *, mended: bool) -> bool:
        """A mark changes nothing: the owner is the one before it. False if an optimizer seems to have raised."""
        if self.flat:
            return True
        marks = np.flatnonzero(~(self.opening | self.closing))
        if not len(marks):
            return True
        entries = np.arange(len(self.owner))
        entries[marks] = -1
        before = np.maximum.accumulate(entries)[marks]
        self.owner[marks] = np.where(before >= 0, self.owner[before], -1)
        owners = self.owner[marks]
        return mended or not np.any(self.kinds[owners[owners >= 0]] == KIND_OPTIMIZER)

    def still_open(self, levels: list[Level], parents: list[bool]) -> list[Open]:
        """What has begun and not ended, outermost first."""
        entries = [int(level.begins[-1]) for level in levels if len(level.begins) > len(level.ends)]
        found = []
        for height, entry in enumerate(entries):
            inner = levels[height + 1].begins if height + 1 < len(levels) else self.sources[:0]
            parent = (entry < len(parents) and parents[entry]) or bool(len(inner) and inner[-1] > entry)
            found.append(Open(int(self.times[entry]), int(self.codes[entry]), parent))
        return found

    def edges(self) -> Edges:
        """What was worked out."""
        return Edges(
            self.times, self.ops, self.kind, self.sources, self.flags, self.codes >> PAYLOAD_SHIFT,
            self.owner, self.begun, self.ancestors, self.counted,
        )  # fmt: skip


def bits_of(kinds: np.ndarray) -> np.ndarray:
    """Ancestor bit of every source: its kind's, or one of its own for a stage by hand."""
    by_hand = kinds == KIND_STAGE
    own = np.minimum(np.cumsum(by_hand) + _OWN_STAGE_BITS, 62)
    bits: np.ndarray = np.int64(1) << np.where(by_hand, own, kinds).astype(np.int64)
    return bits


def hides_of(kinds: np.ndarray, bits: np.ndarray, *, backward_seen: bool) -> np.ndarray:
    """For every source the bits of the ancestors that hide its occurrences; -1 hides them always.

    Forward, backward and transfers inside backward stay in backward (offloaded activations come back there), and
    transfers inside data stay in data; a call inside a call of the same kind is one;
    ``autograd.grad`` counts only in a run that has no other backward.
    """
    backward = _BIT[KIND_BACKWARD] | _BIT[KIND_GRAD]
    data = _BIT[KIND_DATA]
    table = np.zeros(16, dtype=np.int64)
    table[KIND_DATA] = data
    table[KIND_H2D] = data | _BIT[KIND_H2D] | backward
    table[KIND_FORWARD] = _BIT[KIND_FORWARD] | backward
    table[KIND_BACKWARD] = backward
    table[KIND_GRAD] = -1 if backward_seen else backward
    table[KIND_OPTIMIZER] = table[KIND_SCALER] = _OPTIMIZER_BITS
    table[KIND_CHECKPOINT] = _BIT[KIND_CHECKPOINT]
    table[KIND_WHOLE] = _BIT[KIND_WHOLE]
    return np.where(kinds == KIND_STAGE, bits, table[kinds])
