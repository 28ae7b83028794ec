"""What a thread's edges turn out to mean: the facts that leave ``ThreadSteps``."""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from otel_train.codes import SourceKind

if TYPE_CHECKING:
    from collections.abc import Sequence

    from otel_train.codes import Source

PHASES = ("train", "eval", "test", "predict")
TRAIN, EVAL, TEST, PREDICT = range(4)
NO_PHASE = 4
"""Time outside every batch: before the first, and in checkpoints."""

PREFIXES = (("val", EVAL), ("eval", EVAL), ("test", TEST), ("predict", PREDICT))
"""Loader names that say what their batches are for; ``valid`` begins with ``val``."""


class StepSource(IntEnum):
    """What a thread's training steps are counted by."""

    UNDECIDED = 0
    UPDATE = 1
    BACKWARD = 2
    BATCH = 3
    MANUAL = 4


class EpochMark(IntEnum):
    """What a mark says of an epoch."""

    BEGUN = 0
    ENDED = 1
    BROKEN = 2
    """An exception ended it."""


class Activity(IntEnum):
    """Entries of the coarse ledger, in catalogue order."""

    INIT = 0
    COMPILE = 1
    PRODUCTIVE = 2
    DATA_WAIT = 3
    EVAL = 4
    CHECKPOINT = 5
    RESTART = 6
    STALLED = 7
    OTHER = 8


class SourceColumns(NamedTuple):
    """What is known of every source beforehand, one entry per source.

    Attributes:
        kinds: int8, ``SourceKind``.
        declared: int8, phase the user declared; -1 for none.
        named: int8, phase that the loader's name says; -1 for none.
    """

    kinds: np.ndarray
    declared: np.ndarray
    named: np.ndarray


class StepRows(NamedTuple):
    """Steps that have closed, oldest first. All columns are int64[steps].

    Attributes:
        phase: index into ``PHASES``.
        loader: source of the loader fetched last; -1 for none.
        started_ns: first instant.
        ended_ns: last instant.
        duration_ns: time that belongs to the step; less than its span when it was suspended.
        counted: 1, or 0 for a partial step.
        failed: occurrences in it that ended by an exception.
        samples: samples in its batches, where known.
    """

    phase: np.ndarray
    loader: np.ndarray
    started_ns: np.ndarray
    ended_ns: np.ndarray
    duration_ns: np.ndarray
    counted: np.ndarray
    failed: np.ndarray
    samples: np.ndarray


class Occurrences(NamedTuple):
    """Calls that have ended, in order. All columns are int64[occurrences].

    Attributes:
        source: who was called.
        loader: loader of the batch it worked on; -1 for none.
        phase: index into ``PHASES``, or ``NO_PHASE``.
        started_ns: when it began.
        inclusive_ns: how long it ran, with what ran inside it.
        failed: 1 if it ended by an exception.
        step: row of its step in ``StepRows``; the number of rows for the step still open; -1 for no step.
    """

    source: np.ndarray
    loader: np.ndarray
    phase: np.ndarray
    started_ns: np.ndarray
    inclusive_ns: np.ndarray
    failed: np.ndarray
    step: np.ndarray


class Tiles(NamedTuple):
    """Self time by owner. All columns are int64[tiles].

    Attributes:
        owner: source, or -1 for time that nobody claimed.
        loader: loader of the batch; -1 for none.
        phase: index into ``PHASES``, or ``NO_PHASE``.
        activity: see ``Activity``.
        self_ns: time.
        step: as in ``Occurrences``.
    """

    owner: np.ndarray
    loader: np.ndarray
    phase: np.ndarray
    activity: np.ndarray
    self_ns: np.ndarray
    step: np.ndarray


class Settled(NamedTuple):
    """What one slice settled for good about one thread.

    Attributes:
        steps: closed steps.
        occurrences: ended calls.
        tiles: self time; without gap or overlap over all slices.
        batches: int64[n, 4]: loader source, phase, samples (-1 unknown) of every batch fetched, and when.
        starts: passes over loaders that began, as in ``PassEnds``.
        endings: passes that ended, as in ``PassEnds``.
        failed_asks: int64[n], loader source of every ask that raised.
        updates: optimizer updates made.
        skipped_updates: ``GradScaler.step`` calls in which no update was made.
        numbered: (row of the first step it holds for, number) set by hand, or None.
        epochs: int64[n, 3]: epochs marked by hand: when, ``EpochMark``, number of one that begins.
        reports: int64[n, 2]: when one was asked for, and how many had been by then.
    """

    steps: StepRows
    occurrences: Occurrences
    tiles: Tiles
    batches: np.ndarray
    starts: np.ndarray
    endings: np.ndarray
    failed_asks: np.ndarray
    updates: int
    skipped_updates: int
    numbered: tuple[int, int] | None
    epochs: np.ndarray
    reports: np.ndarray


def _empty(*shape: int) -> np.ndarray:
    return np.zeros((0, *shape), dtype=np.int64)


NOTHING = Settled(
    StepRows(*[_empty()] * 8), Occurrences(*[_empty()] * 7), Tiles(*[_empty()] * 6), _empty(4), _empty(4),
    _empty(3), _empty(), 0, 0, None, _empty(3), _empty(2),
)  # fmt: skip
"""A slice that settled nothing."""


def columns_of(sources: Sequence[Source]) -> SourceColumns:
    """What ``sources`` say beforehand, as columns."""
    named = [_phase_of_name(s.name) if s.kind is SourceKind.DATA else -1 for s in sources]
    return SourceColumns(
        np.array([s.kind for s in sources], dtype=np.int8),
        np.array([PHASES.index(s.phase) if s.phase in PHASES else -1 for s in sources], dtype=np.int8),
        np.array(named, dtype=np.int8),
    )


def _phase_of_name(name: str) -> int:
    return next((phase for prefix, phase in PREFIXES if name.lower().startswith(prefix)), -1)
