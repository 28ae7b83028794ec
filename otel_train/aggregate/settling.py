"""Columns of settled facts: batches, occurrences, tiles, the sums of each step."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from otel_train.aggregate.steps import (
    EVAL,
    NO_PHASE,
    TRAIN,
    Activity,
    Occurrences,
    StepRows,
    Tiles,
)
from otel_train.aggregate.words import (
    KIND_DATA,
    KIND_SCALER,
    OP_END,
    OP_FAIL,
    OP_STOP,
    OP_SUSPEND,
)

if TYPE_CHECKING:
    from otel_train.aggregate.marks import Marks
    from otel_train.aggregate.pairing import Edges
    from otel_train.aggregate.phases import Labels
    from otel_train.aggregate.units import Pieces

_WAITING = np.zeros(16, dtype=bool)
_WAITING[KIND_DATA] = True


class OpenStep(NamedTuple):
    """Sums of the training step that has not closed."""

    started_ns: int = -1
    ended_ns: int = 0
    duration_ns: int = 0
    failed: int = 0
    samples: int = 0
    loader: int = -1
    backwards: bool = False
    fetched: bool = False


class UnitSums(NamedTuple):
    """What happened in every unit.

    Attributes:
        instants: int64, when it began; that of the open one ends the one before.
        duration_ns: int64 per complete unit.
        failed: int64, occurrences that ended by an exception.
        samples: int64, samples fetched, where known.
    """

    instants: np.ndarray
    duration_ns: np.ndarray
    failed: np.ndarray
    samples: np.ndarray


class StepColumns(NamedTuple):
    """Rows of the steps that closed, and to which the units belong.

    Attributes:
        rows: oldest first.
        row: int64 per complete unit: its step's row, the number of rows for the open step, -1 for none.
        open: sums of the open step.
    """

    rows: StepRows
    row: np.ndarray
    open: OpenStep


def sums_of(edges: Edges, found: Marks, pieces: Pieces) -> UnitSums:
    """Add up what happened in every unit."""
    complete = len(pieces.first) - 1
    instants = edges.times[pieces.first]
    failed = np.flatnonzero(found.close & (edges.ops == OP_FAIL))
    return UnitSums(
        instants,
        np.diff(instants),
        _count(pieces, failed, complete),
        _samples(edges, found, pieces, complete),
    )


def settle_steps(
    sums: UnitSums, pieces: Pieces, labels: Labels, *, closes: np.ndarray, held: OpenStep
) -> StepColumns:
    """Sum up the units of every step.

    Args:
        sums: what happened in every unit.
        pieces: the units.
        labels: their phases and loaders.
        closes: see ``Closing``.
        held: the step that was open before.
    """
    complete = len(pieces.first) - 1
    training = ((labels.phase == TRAIN) & ~pieces.solo)[:complete]
    step = np.cumsum(closes)[:complete]
    closing = np.flatnonzero(closes)
    closed = len(closing)
    mine = np.flatnonzero(training)
    before = np.zeros(complete + 1, dtype=np.int64)
    np.cumsum(training, out=before[1:])
    bounds = np.concatenate((np.zeros(1, dtype=np.int64), before[closing], before[-1:]))
    train, left = _train_rows(mine, bounds, sums, labels.loader, held=held)
    row = np.where(training, step, -1)
    other = np.flatnonzero(_evaluating(pieces, labels)[:complete])
    if not len(other):
        return StepColumns(train, row, left)
    rest = StepRows(
        labels.phase[other], labels.loader[other], sums.instants[other], sums.instants[other + 1],
        sums.duration_ns[other], np.ones(len(other), dtype=np.int64), sums.failed[other], sums.samples[other],
    )  # fmt: skip
    row[other] = closed + 1 + np.arange(len(other))
    rows = StepRows(*[np.concatenate(pair) for pair in zip(train, rest, strict=True)])
    order = np.argsort(rows.ended_ns, kind="stable")
    rank = np.empty(len(order) + 2, dtype=np.int64)
    rank[order + (order >= closed)] = np.arange(len(order))
    rank[closed], rank[-1] = len(order), -1
    return StepColumns(StepRows(*[column[order] for column in rows]), rank[row], left)


def _count(pieces: Pieces, at: np.ndarray, complete: int) -> np.ndarray:
    if not len(at):
        return np.zeros(complete + 1, dtype=np.int64)
    return np.bincount(pieces.of_event[at], minlength=complete + 1)


def _samples(edges: Edges, found: Marks, pieces: Pieces, complete: int) -> np.ndarray:
    at = np.flatnonzero(found.got & (edges.payloads > 0))
    if not len(at):
        return np.zeros(complete + 1, dtype=np.int64)
    sums = np.bincount(pieces.of_event[at], weights=edges.payloads[at] - 1, minlength=complete + 1)
    return sums.astype(np.int64)


def _train_rows(
    mine: np.ndarray, bounds: np.ndarray, sums: UnitSums, loaders: np.ndarray, *, held: OpenStep
) -> tuple[StepRows, OpenStep]:  # fmt: skip
    """Rows of the training steps that closed, and the sums of the one that has not."""
    closed = len(bounds) - 2
    instants = sums.instants
    first, past = bounds[:-1], bounds[1:]
    there = past > first
    duration, failed, samples = (_sums(column[mine], bounds) for column in sums[1:])
    started, ended = np.full(closed + 1, -1, dtype=np.int64), np.zeros(closed + 1, dtype=np.int64)
    loader = np.full(closed + 1, -1, dtype=np.int64)
    started[there] = instants[mine[first[there]]]
    ended[there] = instants[mine[past[there] - 1] + 1]
    loader[there] = loaders[mine[past[there] - 1]]
    if held.started_ns >= 0:
        started[0] = held.started_ns
        if not there[0]:
            ended[0], loader[0] = held.ended_ns, held.loader
    duration[0] += held.duration_ns
    failed[0] += held.failed
    samples[0] += held.samples
    zeros = np.zeros(closed, dtype=np.int64)
    left = OpenStep(
        started_ns=int(started[-1]),
        ended_ns=int(ended[-1]),
        duration_ns=int(duration[-1]),
        failed=int(failed[-1]),
        samples=int(samples[-1]),
        loader=int(loader[-1]),
        backwards=held.backwards and closed == 0,
        fetched=held.fetched and closed == 0,
    )
    rows = StepRows(
        zeros + TRAIN, loader[:-1], started[:-1], ended[:-1], duration[:-1], zeros + 1, failed[:-1], samples[:-1]
    )  # fmt: skip
    return rows, left


def _sums(values: np.ndarray, bounds: np.ndarray) -> np.ndarray:
    """Sums of ``values[bounds[i] : bounds[i + 1]]``."""
    if not values.any():
        return np.zeros(len(bounds) - 1, dtype=np.int64)
    so_far = np.zeros(len(values) + 1, dtype=np.int64)
    np.cumsum(values, out=so_far[1:])
    sums: np.ndarray = np.diff(so_far[bounds])
    return sums


def _evaluating(pieces: Pieces, labels: Labels) -> np.ndarray:
    """Units that are a step of their own: a batch outside phase train, or a forward without a loader."""
    phase = labels.phase
    other = (phase != TRAIN) & (phase != NO_PHASE) & (labels.got > 0)
    chosen: np.ndarray = other | (pieces.solo & (phase == EVAL))
    return chosen


def occurrences(
    edges: Edges, found: Marks, pieces: Pieces, labels: Labels, *, row: np.ndarray
) -> tuple[Occurrences, np.ndarray]:
    """Calls that ended, and the entries at which they did."""
    last = int(pieces.first[-1])
    data = edges.kinds == KIND_DATA
    failed = edges.ops == OP_FAIL
    ended = found.close & edges.counted & (edges.ops != OP_SUSPEND) & (edges.ops != OP_STOP)
    ended &= ~(data & (failed | found.starting))
    at = np.flatnonzero(ended[: last + 1])
    sources, begun = edges.sources[at], edges.begun_ns[at]
    unit = pieces.of_event[at]
    calls = Occurrences(
        sources, np.where(data[at], sources, labels.loader[unit]), labels.phase[unit], begun,
        edges.times[at] - begun, failed[at].astype(np.int64), row[unit],
    )  # fmt: skip
    return calls, at


def tiles(
    edges: Edges, pieces: Pieces, labels: Labels, row: np.ndarray, *, kinds: np.ndarray, idle: bool
) -> Tiles:
    """Self time of every edge's owner. ``idle``: the last unit is work that no update followed."""
    last = int(pieces.first[-1])
    unit = pieces.of_edge[:last]
    owner = edges.owner[:last]
    activity = _activities(pieces, labels, idle=idle)
    waiting = np.append(_WAITING[kinds], False)[owner]  # the last entry is for nobody
    return Tiles(
        owner, labels.loader.take(unit), labels.phase.take(unit), activity.take(unit + waiting * len(labels.phase)),
        np.diff(edges.times[: last + 1]), row.take(unit),
    )  # fmt: skip


def _activities(pieces: Pieces, labels: Labels, *, idle: bool) -> np.ndarray:
    """Activity of each unit while it works, then of each unit while it waits for data."""
    phase, size = labels.phase, len(labels.phase)
    activity = np.full(2 * size, int(Activity.PRODUCTIVE), dtype=np.int64)
    activity[size:] = int(Activity.DATA_WAIT)
    working, waiting = activity[:size], activity[size:]
    for half in (working, waiting):
        half[(phase != TRAIN) & (phase != NO_PHASE)] = int(Activity.EVAL)
    if idle:
        working[-2] = int(Activity.OTHER)
    for half in (working, waiting):
        half[pieces.init] = int(Activity.INIT)
        half[pieces.inside] = int(Activity.CHECKPOINT)
    return activity


def batches(edges: Edges, found: Marks, pieces: Pieces, labels: Labels) -> np.ndarray:
    """Every batch, also of a loader read inside another loader."""
    last = int(pieces.first[-1])
    got = (edges.kinds[: last + 1] == KIND_DATA) & (edges.ops[: last + 1] == OP_END)
    got &= ~found.starting[: last + 1]
    got[0] = False
    at = np.flatnonzero(got)
    rows = np.empty((len(at), 4), dtype=np.int64)
    rows[:, 0] = edges.sources[at]
    rows[:, 1] = labels.phase[pieces.of_event[at]]
    rows[:, 2] = edges.payloads[at] - 1
    rows[:, 3] = edges.times[at]
    return rows


def skipped(edges: Edges, found: Marks, last: int, updated_ns: int) -> int:
    """``GradScaler.step`` calls that ended without an update inside; ``updated_ns``: the last update before."""
    scaler = np.flatnonzero((found.close & (edges.kinds == KIND_SCALER) & (edges.ops == OP_END))[: last + 1])
    if not len(scaler):
        return 0
    updates = np.concatenate((np.array([updated_ns]), edges.times[found.update]))
    latest = updates[np.searchsorted(updates, edges.times[scaler], side="right") - 1]
    return int(np.count_nonzero(latest <= edges.begun_ns[scaler]))
