"""Phase and loader of every unit, from what its batch has shown (docs/reference/loop.md)."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from otel_train.aggregate.steps import EVAL, NO_PHASE, TRAIN, SourceColumns
from otel_train.aggregate.units import Context, Cut, Evidence, Pieces
from otel_train.aggregate.words import (
    FLAG_GRAD,
    FLAG_TRAINING,
)

if TYPE_CHECKING:
    from otel_train.aggregate.marks import Marks
    from otel_train.aggregate.pairing import Edges


class Labels(NamedTuple):
    """One entry per unit; those of the open unit are not final.

    Attributes:
        phase: int64.
        loader: int64, loader fetched last; -1 for none.
        asked: int64, loader whose ask began its batch; -1 for none.
        trained: bool, its batch has an update or a backward up to its end.
        got: int64, batches fetched in it.
        batch_got: bool, its batch has fetched something up to its end.
        waits: a loader that is new has shown nothing yet: what follows may say what its batches are for.
    """

    phase: np.ndarray
    loader: np.ndarray
    asked: np.ndarray
    trained: np.ndarray
    got: np.ndarray
    batch_got: np.ndarray
    waits: bool


LOOKS_AHEAD = 8
"""Batches that a loop may fetch before the first is used. A loader that shows nothing for longer is for training."""


def label(edges: Edges, found: Marks, pieces: Pieces, context: Context, *, columns: SourceColumns) -> Labels:
    """Find the phase and the loader of every unit."""
    trained = _trained(found, pieces, context)
    asked = _asked(edges, pieces, context)
    context.breathe()
    phase, waits = _phases(edges, found, pieces, context, known=(columns, asked, trained))
    context.breathe()
    phase[pieces.solo] = EVAL
    alone = pieces.inside | pieces.init
    phase[alone] = NO_PHASE
    got_at = np.flatnonzero(found.got)
    got = np.bincount(pieces.of_event[got_at], minlength=len(phase))
    so_far = np.cumsum(got)
    in_batch = so_far > _before_batch(so_far, pieces)
    loader = np.full(len(phase), -1, dtype=np.int64)
    loader[in_batch] = edges.sources[got_at[so_far[in_batch] - 1]]
    carried = (pieces.group == 0) & ~in_batch
    loader[carried] = context.got_loader
    batch_got = in_batch | (carried & (context.got_loader >= 0))
    training = phase == TRAIN
    unfetched = ~training & (loader < 0)
    loader[unfetched] = asked[unfetched]
    loader[training] = _forward_fill(loader[training], context.train_loader)
    loader[alone | pieces.solo] = -1
    return Labels(phase, loader, asked, trained, got, batch_got, waits)


def _before_batch(so_far: np.ndarray, pieces: Pieces) -> np.ndarray:
    """What a running total was before each unit's batch began."""
    base = so_far[pieces.begins - 1]
    base[0] = 0
    before: np.ndarray = base[pieces.group]
    return before


def _shown(counts: np.ndarray, pieces: Pieces, *, before: bool) -> np.ndarray:
    """Whether each unit's batch has shown something up to the unit's end."""
    so_far = np.cumsum(counts)
    shown: np.ndarray = so_far > _before_batch(so_far, pieces)
    if before:
        shown |= pieces.group == 0
    return shown


def _trained(found: Marks, pieces: Pieces, context: Context) -> np.ndarray:
    size = len(pieces.first)
    counts = np.bincount(pieces.of_edge[np.flatnonzero(found.backward & found.begin)], minlength=size)
    counts += np.bincount(pieces.of_event[np.flatnonzero(found.update)], minlength=size)
    return _shown(counts, pieces, before=context.evidence.trained)


def _asked(edges: Edges, pieces: Pieces, context: Context) -> np.ndarray:
    """Loader whose ask began each unit's batch; -1 where no ask did."""
    begins = pieces.begins
    loaders = np.where(pieces.cut[begins] == Cut.ASK, edges.sources[pieces.first[begins]], -1)
    loaders[0] = context.asked_loader
    asked: np.ndarray = loaders[pieces.group]
    return asked


def _phases(
    edges: Edges, found: Marks, pieces: Pieces, context: Context, *,
    known: tuple[SourceColumns, np.ndarray, np.ndarray],
) -> tuple[np.ndarray, bool]:  # fmt: skip
    """Phase of each unit by the order of evidence in docs/reference/loop.md; whether more is needed to know."""
    columns, asked, trained = known
    declared = _of_loader(columns.declared, asked)
    phase = np.where(declared >= 0, declared, np.where(trained, TRAIN, _of_loader(columns.named, asked)))
    phase = phase.astype(np.int64)
    if (phase[:-1] < 0).any():  # that of the open unit is asked for later
        forward, grad, training = _forwards(edges, found, pieces, context)
        phase = np.where((phase < 0) & forward, np.where(grad & training, TRAIN, EVAL), phase)
    waits = False
    if (phase[:-1] < 0).any():
        waits = _fill_unknown(phase, asked, trained, pieces, context=context)
    return phase, waits


def _of_loader(column: np.ndarray, asked: np.ndarray) -> np.ndarray:
    """A loader's entry for each unit; -1 where no loader was asked."""
    with_none: np.ndarray = np.append(column, np.int8(-1))
    chosen: np.ndarray = with_none[asked]
    return chosen


def _forwards(edges: Edges, found: Marks, pieces: Pieces, context: Context) -> tuple[np.ndarray, ...]:
    """Whether each unit's batch has a forward, one with grad, one with grad in training mode."""
    at = np.flatnonzero(found.forward & found.begin)
    at = at[~pieces.solo[pieces.of_edge[at]]]
    flags, units, size = edges.flags[at], pieces.of_edge[at], len(pieces.first)
    grad = (flags & FLAG_GRAD) > 0
    training = grad & ((flags & FLAG_TRAINING) > 0)
    return tuple(
        _shown(np.bincount(chosen, minlength=size), pieces, before=before)
        for chosen, before in zip((units, units[grad], units[training]), context.evidence[1:], strict=True)
    )


def _fill_unknown(
    phase: np.ndarray, asked: np.ndarray, trained: np.ndarray, pieces: Pieces, *, context: Context
) -> bool:
    """Units that show nothing: as their loader's before; between loops, training if there was any.

    The first batches of a loader that is new are as the first of them that shows something. Whether it may yet.
    """
    unknown, waits = phase < 0, False
    gaps = unknown & (asked < 0)
    for loader in np.unique(asked[unknown & ~gaps]).tolist():
        mine = np.flatnonzero(asked == loader)
        before = context.phase_of_loader.get(loader, -1)
        if before < 0:
            shown = mine[:LOOKS_AHEAD][phase[mine[:LOOKS_AHEAD]] >= 0]
            shown = shown[shown < len(phase) - 1]  # what the open unit has shown is not the last word
            waits |= not len(shown) and len(mine) <= LOOKS_AHEAD
            before = int(phase[shown[0]]) if len(shown) else TRAIN
        phase[mine] = _forward_fill(phase[mine], before)
    if gaps.any():
        alone = pieces.solo | pieces.inside | pieces.init
        since = np.cumsum(trained & ~alone) > 0
        filled = _forward_fill(np.where(gaps | alone, -1, phase), context.phase)
        phase[gaps] = np.where(since | context.trained, TRAIN, filled)[gaps]
    return waits


def _forward_fill(values: np.ndarray, before: int) -> np.ndarray:
    """Replace -1 by the value before it."""
    if not (values < 0).any():
        return values
    last = np.maximum.accumulate(np.where(values >= 0, np.arange(len(values)), -1))
    filled: np.ndarray = np.where(last >= 0, values[last], before)
    return filled


def advance(context: Context, edges: Edges, found: Marks, pieces: Pieces, *, labels: Labels) -> None:
    """Bring the context to the first edge of the open unit, as if what that edge ends were done."""
    start = int(pieces.first[-1])
    if start == 0:
        return
    new_batch = pieces.cut[-1] in (Cut.ASK, Cut.STOP)
    _advance_burst(context, found, pieces, new_batch=new_batch)
    if new_batch:
        context.got_loader, context.evidence = -1, Evidence()
    else:
        _advance_batch(context, edges, found, pieces, labels=labels)
    context.began = not bool(pieces.init[-1])
    context.asked_loader = int(labels.asked[-1])
    context.inside, context.solo = bool(pieces.inside[-1]), bool(pieces.solo[-1])
    if not context.asked:
        graded = (found.forward & found.begin & ((edges.flags & FLAG_GRAD) > 0))[:start]
        context.grad_models |= frozenset(np.unique(edges.sources[:start][graded]).tolist())
    _advance_phases(context, pieces, labels)


def _advance_batch(context: Context, edges: Edges, found: Marks, pieces: Pieces, *, labels: Labels) -> None:
    """What the batch of the open unit has shown so far."""
    begin, start = int(pieces.first[pieces.begins[-1]]), int(pieces.first[-1])
    same = len(pieces.begins) == 1
    fetched = np.flatnonzero(found.got[begin : start + 1])
    if len(fetched):
        context.got_loader = int(edges.sources[begin + fetched[-1]])
    elif not same:
        context.got_loader = -1
    forward = (found.forward & found.begin)[begin:start] & ~pieces.solo[pieces.of_edge[begin:start]]
    flags = edges.flags[begin:start][forward]
    grad = (flags & FLAG_GRAD) > 0
    shown = Evidence(
        bool(labels.trained[-2]), bool(forward.any()), bool(grad.any()),
        bool((grad & ((flags & FLAG_TRAINING) > 0)).any()),
    )  # fmt: skip
    before = context.evidence if same else Evidence()
    context.evidence = Evidence(*(now or then for now, then in zip(shown, before, strict=True)))


def _advance_burst(context: Context, found: Marks, pieces: Pieces, *, new_batch: bool) -> None:
    start, bursts = int(pieces.first[-1]), pieces.bursts
    asked = int(np.searchsorted(bursts.at, start))
    if asked:
        context.asked = True
        context.barrier = bool(found.barrier[bursts.at[asked - 1] : start].any())
        context.first_loader = int(bursts.firsts[bursts.number[asked - 1]])
    else:
        context.barrier |= bool(found.barrier[:start].any())
    context.barrier |= new_batch


def _advance_phases(context: Context, pieces: Pieces, labels: Labels) -> None:
    batch = ~(pieces.init | pieces.inside | pieces.solo)
    batch[-1] = False
    phases, asked, loaders = labels.phase[batch], labels.asked[batch], labels.loader[batch]
    if not len(phases):
        return
    context.phase = int(phases[-1])
    context.trained |= bool(labels.trained[batch].any())
    for loader in np.flatnonzero(np.bincount(asked[asked >= 0])).tolist():
        context.phase_of_loader[loader] = int(phases[np.flatnonzero(asked == loader)[-1]])
    labelled = loaders[(phases == TRAIN) & (loaders >= 0)]
    if len(labelled):
        context.train_loader = int(labelled[-1])
