"""A thread's time cut into units, each of one batch, one phase and one activity.

A unit ends at an ask that begins a batch, at the end of a loader, at the end of whatever closes a step (an
update, say), and around checkpoints and forwards that evaluate without a loader. All work is done on
numpy columns: per edge, then per unit.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from otel_train.aggregate.steps import TRAIN, StepSource
from otel_train.aggregate.words import (
    FLAG_GRAD,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from otel_train.aggregate.marks import Marks
    from otel_train.aggregate.pairing import Edges

LONGEST_UNIT = 8192
"""Edges after which a unit is cut although nothing calls for it, so that memory stays bounded."""

_KIND_BITS = (1 << 16) - 1


class Cut:
    """Why a unit begins. Plain integers, because columns are compared with them."""

    NONE = 0
    FORCED = 1
    CLOSER = 2
    STOP = 3
    BEGAN = 4
    ASK = 5
    CHECKPOINT = 6
    CHECKPOINT_END = 7
    SOLO = 8
    SOLO_END = 9
    SAID = 10


class Bursts(NamedTuple):
    """Asks, and which of them begin a batch.

    Attributes:
        at: entry of every ask.
        number: how many bursts began up to each.
        firsts: first loader of each burst; entry 0 is the burst from the slice before.
        new: bool, the ask begins a batch.
    """

    at: np.ndarray
    number: np.ndarray
    firsts: np.ndarray
    new: np.ndarray


class Pieces(NamedTuple):
    """Where the units lie; the last is the open one.

    Attributes:
        first: int64, entry of its first edge.
        cut: int8, why it begins.
        of_edge: int64 per edge, the unit that owns the tile after it.
        of_event: int64 per edge, the unit that an edge which closes something belongs to.
        group: int64, its batch; 0 is the one from the slice before.
        begins: int64 per batch, its first unit.
        init: bool, before training began.
        inside: bool, in a checkpoint.
        solo: bool, a forward that evaluates without a loader.
        bursts: asks.
    """

    first: np.ndarray
    cut: np.ndarray
    of_edge: np.ndarray
    of_event: np.ndarray
    group: np.ndarray
    begins: np.ndarray
    init: np.ndarray
    inside: np.ndarray
    solo: np.ndarray
    bursts: Bursts


class Evidence(NamedTuple):
    """What a batch has shown so far of its phase."""

    trained: bool = False
    """An update or a backward."""
    forward: bool = False
    grad: bool = False
    training: bool = False
    """A forward with grad, in training mode."""


@dataclass(slots=True)
class Context:
    """What a thread remembers from slice to slice, as of the first edge of its open unit."""

    breathe: Callable[[], None] = lambda: None
    """Called now and then, to let the training thread have the interpreter."""
    began: bool = False
    asked: bool = False
    trained: bool = False
    barrier: bool = True
    """A stage ran since the last ask, so the next ask begins a batch."""
    first_loader: int = -1
    """First loader of the present burst of asks."""
    asked_loader: int = -1
    got_loader: int = -1
    train_loader: int = -1
    evidence: Evidence = field(default_factory=Evidence)
    phase: int = TRAIN
    phase_of_loader: dict[int, int] = field(default_factory=dict)
    inside: bool = False
    solo: bool = False
    grad_models: frozenset[int] = frozenset()


def cut(edges: Edges, found: Marks, source: StepSource, context: Context, *, final: bool) -> Pieces:
    """Cut the edges into units."""
    bursts = _bursts(edges, found, context)
    why = _cuts(edges, found, source, context)
    why[bursts.at[bursts.new]] = Cut.ASK
    why[0] = Cut.NONE
    context.breathe()
    cuts_at = _force(why, final=final)
    first = np.concatenate((np.zeros(1, dtype=np.int64), cuts_at))
    cuts = why[first]
    lengths = np.diff(first, append=len(why))
    of_edge = np.repeat(np.arange(len(first)), lengths)
    of_event = of_edge.copy()
    of_event[cuts_at[found.close[cuts_at]]] -= 1
    solo = cuts == Cut.SOLO
    solo[0] = context.solo
    new_batch = (cuts == Cut.ASK) | (cuts == Cut.STOP)
    begins = np.concatenate((np.zeros(1, dtype=np.int64), np.flatnonzero(new_batch)))
    return Pieces(
        first, cuts, of_edge, of_event, np.cumsum(new_batch, dtype=np.int64), begins,
        _init(first, found, context), _inside(cuts, context), solo, bursts,
    )  # fmt: skip


def _cuts(edges: Edges, found: Marks, source: StepSource, context: Context) -> np.ndarray:
    why = np.zeros(len(edges.times), dtype=np.int8)
    why[found.epoch | found.report] = Cut.SAID
    why[_closers(found, source)] = Cut.CLOSER
    why[found.stop] = Cut.STOP
    if not context.asked:
        solo = _solo_forwards(edges, found, context)
        why[solo & found.begin] = Cut.SOLO
        why[solo & found.close] = Cut.SOLO_END
    if found.checkpoint.any():
        why[found.checkpoint & found.begin] = Cut.CHECKPOINT
        why[found.checkpoint & found.close] = Cut.CHECKPOINT_END
    if not context.began:
        why[training_begins(found)[:1]] = Cut.BEGAN
    return why


def _closers(found: Marks, source: StepSource) -> np.ndarray:
    """Which edges may end a step, by what steps are counted by."""
    if source is StepSource.MANUAL:
        later: np.ndarray = found.mark.copy()
        later[:1] = False
        return later
    if source is StepSource.BACKWARD:
        ended: np.ndarray = found.backward & found.close
        return ended
    if source is StepSource.BATCH:
        return np.zeros(len(found.begin), dtype=bool)
    return found.update


def _bursts(edges: Edges, found: Marks, context: Context) -> Bursts:
    """A batch begins at an ask after a stage, or when the same loader is asked again.

    Asks of other loaders right after one another (``zip``) fetch one batch together.
    """
    events = np.flatnonzero(found.ask | found.barrier)
    is_ask = found.ask[events]
    at = np.flatnonzero(is_ask)
    asks = events[at]
    fresh = ~is_ask[at - 1]  # what came before it was a barrier
    if len(at) and at[0] == 0:
        fresh[0] = context.barrier
    loaders = edges.sources[asks]
    number = np.cumsum(fresh)
    at_first = _firsts(number, ~found.starting[asks], carried=context.first_loader >= 0)
    firsts = np.append(loaders, -1)[at_first]
    firsts[0] = context.first_loader if context.first_loader >= 0 else firsts[0]
    again = (np.arange(len(asks)) > at_first[number]) & (loaders == firsts[number])
    return Bursts(asks, number, firsts, fresh | again)


def _firsts(number: np.ndarray, for_batch: np.ndarray, *, carried: bool) -> np.ndarray:
    """Place of the first ask for a batch in every burst, as many as there are asks where there is none.

    An ask for an iterator begins a batch, but is not yet the ask for it. Burst 0 is the one from the slice
    before; ``carried``: it has asked for a batch, which counts as place -1.
    """
    size = len(number)
    places = np.full((int(number[-1]) if size else 0) + 1, size)
    asks = np.flatnonzero(for_batch)[::-1]
    places[number[asks]] = asks  # backwards, so that the first of a burst is written last
    if carried:
        places[0] = -1
    return places


def _solo_forwards(edges: Edges, found: Marks, context: Context) -> np.ndarray:
    """Forwards without grad, outside every batch and stage, of a model that is also being trained."""
    candidates: np.ndarray = (
        found.forward & ((edges.flags & FLAG_GRAD) == 0) & ((edges.ancestors & _KIND_BITS) == 0)
    )
    if found.ask.any():
        candidates[np.argmax(found.ask) :] = False
    if not candidates.any():
        return candidates
    with_grad = found.forward & found.begin & ((edges.flags & FLAG_GRAD) > 0)
    for model in np.unique(edges.sources[candidates]).tolist():
        if model not in context.grad_models:
            mine = with_grad & (edges.sources == model)
            since = int(np.argmax(mine)) if mine.any() else len(mine)
            candidates[:since] &= edges.sources[:since] != model
    return candidates


def _force(why: np.ndarray, *, final: bool) -> np.ndarray:
    """Cut a unit that has become too long; at the end, cut at the last edge. All cuts."""
    last = len(why) - 1
    cuts = np.flatnonzero(why)
    since = int(cuts[-1]) if len(cuts) else 0
    if last > 0 and why[last] == 0 and (final or last - since > LONGEST_UNIT):
        why[last] = Cut.FORCED
        cuts = np.append(cuts, last)
    return cuts


def _inside(cuts: np.ndarray, context: Context) -> np.ndarray:
    begins, ends = cuts == Cut.CHECKPOINT, cuts == Cut.CHECKPOINT_END
    if not (context.inside or begins.any()):
        return np.zeros(len(cuts), dtype=bool)
    change = begins.view(np.int8) - ends.view(np.int8)
    change[0] = context.inside
    return np.cumsum(change, dtype=np.int32) > 0


def _init(first: np.ndarray, found: Marks, context: Context) -> np.ndarray:
    if context.began:
        return np.zeros(len(first), dtype=bool)
    start = training_begins(found)
    before: np.ndarray = first < (start[0] if len(start) else len(found.ask))
    return before


def training_begins(found: Marks) -> np.ndarray:
    """Entries with which training may begin: what comes before the first was preparation.

    Where steps are marked by hand, stages by hand are training, too, and the first mark ends a step.
    """
    training = found.ask | found.compute
    marks = np.flatnonzero(found.mark)
    if len(marks):
        training |= found.own
        if not training[: marks[0]].any():
            return np.zeros(1, dtype=np.int64)
    return np.flatnonzero(training)
