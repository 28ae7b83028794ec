"""Phases, activities, and the columns in which the accounting returns what is final."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

import numpy as np

from otel_train.recording.events import PHASES, Instrumented, SourceKind

if TYPE_CHECKING:
    from collections.abc import Iterable

TRAIN, EVAL, TEST, PREDICT = range(4)
"""Indices into ``recording.events.PHASES``."""

NO_PHASE = 4
"""Phase of time in no batch: before the first one, outside, in checkpoints."""

PREFIXES = (("val", EVAL), ("eval", EVAL), ("dev", EVAL), ("test", TEST), ("predict", PREDICT))
"""Prefixes of loader names that give the phase of their batches; ``valid`` begins with ``val``."""


class StepSource(IntEnum):
    """The kind of event by which a thread's training steps are counted."""

    UNDECIDED = 0
    UPDATE = 1
    BACKWARD = 2
    BATCH = 3
    MANUAL = 4


class Activity(IntEnum):
    """Use of a run's time, in catalogue order. The activities add up to the wall time."""

    INIT = 0
    COMPILE = 1
    PRODUCTIVE = 2
    DATA_WAIT = 3
    EVAL = 4
    CHECKPOINT = 5
    RESTART = 6
    STALLED = 7
    OTHER = 8
    """Not accounted for yet."""
    OUTSIDE = 9
    """Time while no batch is open: saving, logging, sleeping between passes and after the last one."""


@dataclass(slots=True)
class SourceTable:
    """Properties of every source, indexed by source number. Sources are appended while the table is in use.

    Attributes:
        kinds: ``SourceKind``.
        declared: phase that the program declared; -1 for none.
        named: phase that the loader's name implies; -1 for none.
        losses: whether it is a user stage named ``loss``.
    """

    kinds: list[int] = field(default_factory=list)
    declared: list[int] = field(default_factory=list)
    named: list[int] = field(default_factory=list)
    losses: list[bool] = field(default_factory=list)

    def extend(self, sources: Iterable[Instrumented]) -> SourceTable:
        """Appends sources, and returns the table."""
        for source in sources:
            self.kinds.append(int(source.kind))
            self.declared.append(PHASES.index(source.phase) if source.phase in PHASES else -1)
            self.named.append(phase_of_name(source.name) if source.kind is SourceKind.DATA else -1)
            self.losses.append(source.kind is SourceKind.STAGE and source.name == "loss")
        return self


def phase_of_name(name: str) -> int:
    """Returns the phase that the name of a loader implies; -1 for none."""
    return next((phase for prefix, phase in PREFIXES if name.lower().startswith(prefix)), -1)


@dataclass(slots=True, eq=False)
class Home:
    """Row to which a call of a user stage or an update is booked whose intervals may lie in several batches.

    It is the row of the first interval that is booked under a phase, so that a stage around a whole pass belongs to the
    batches of that pass. Intervals before the first batch of a step take the loader of the next batch. A call outside
    all batches has no phase.

    Attributes:
        source: source number of the call.
        waiting: number of its intervals that are not booked yet.
        row: phase, loader and serial number of the step, as far as they are known.
        known: whether ``row`` is final.
        open_ns: inclusive time of the call that is not in its row yet.
        ended: of a call that has ended: start, nanoseconds, 1 if it failed, serial number of the step in which it ended.
    """

    source: int
    waiting: int = 0
    row: tuple[int, int, int] = (NO_PHASE, -1, -1)
    known: bool = False
    open_ns: int = 0
    ended: tuple[int, int, int, int] | None = None


class StepRows(NamedTuple):
    """Steps that have closed, in the order of their ends. All columns are int64[steps].

    Attributes:
        phase: index into ``PHASES``.
        loader: source of the loader fetched last; -1 for none.
        started_ns: first instant.
        ended_ns: last instant.
        duration_ns: time that belongs to the step; less than its span when it was suspended.
        counted: 1, or 0 for a partial step.
        failed: calls in it that ended by an exception.
        samples: samples in its batches, where known.
        wait_ns: its time in stage ``data``.
        loss_ns: sum over its losses: from the first forward that the loss uses to the end of its backward, less waits
            for data. Without a backward: the user stages named ``loss``.
        losses: number of losses in ``loss_ns``.
        training_ns: from the first forward (or loss) of the step to its last update or backward, including all time
            of the step in between; 0 if there was none.
        number: step number set manually; -1 for the next one.
    """

    phase: np.ndarray
    loader: np.ndarray
    started_ns: np.ndarray
    ended_ns: np.ndarray
    duration_ns: np.ndarray
    counted: np.ndarray
    failed: np.ndarray
    samples: np.ndarray
    wait_ns: np.ndarray
    loss_ns: np.ndarray
    losses: np.ndarray
    training_ns: np.ndarray
    number: np.ndarray


class StageCalls(NamedTuple):
    """Calls that have ended, in the order of their ends. All columns are int64[calls].

    Attributes:
        source: number of the source that was called.
        started_ns: when it began.
        inclusive_ns: how long it ran, including the stages inside it.
        failed: 1 if it ended by an exception.
        loader: loader of the batch it worked on; -1 for none.
        phase: index into ``PHASES``, or ``NO_PHASE``.
        step: row of its step in ``StepRows``; the number of rows for the step still open; -1 for no step.
    """

    source: np.ndarray
    started_ns: np.ndarray
    inclusive_ns: np.ndarray
    failed: np.ndarray
    loader: np.ndarray
    phase: np.ndarray
    step: np.ndarray


class StageTimes(NamedTuple):
    """Time by stage, loader and phase, and by step if ``by_step`` was set. All columns are int64[rows].

    Attributes:
        source: source whose time it is; -1 for time of no stage.
        loader: loader of the batch; -1 for none.
        phase: index into ``PHASES``, or ``NO_PHASE``.
        self_ns: time in which it was the innermost stage; the sum over all rows is the accounted time.
        inclusive_ns: time in which it was open.
        step: as in ``StageCalls``; -1 without ``by_step``.
    """

    source: np.ndarray
    loader: np.ndarray
    phase: np.ndarray
    self_ns: np.ndarray
    inclusive_ns: np.ndarray
    step: np.ndarray


class ClosedSteps(NamedTuple):
    """What became final on one thread since the last call of ``take``.

    Attributes:
        steps: closed steps.
        occurrences: ended calls.
        times: time by stage.
        activity_ns: int64[activities].
        loader_ns: int64[n, 4]: loader source, phase, nanoseconds of a batch it took part in, end of that batch.
        batches: int64[n, 6]: of every batch fetched: loader source, phase, samples (-1 unknown), end of the request;
            nanoseconds to make the iterator (-1 unless it is the first batch of its pass), nanoseconds of the request.
            A batch fetched inside a request to another loader is a part of that loader's batch, and has ``NO_PHASE``.
        endings: int64[n, 3]: passes that ended: loader source, ``Ending``, when.
        failed_asks: int64[n, 1]: loader source of every request that raised, except for Ctrl-C and the like.
        updates: optimizer updates made.
        skipped_updates: ``GradScaler.step`` calls in which no update was made.
        said: int64[n, 3]: manual epochs and requested reports: when, ``Op``, payload.
        moved: int64[n, 2]: source of a transfer, bytes moved. Includes transfers whose time belongs to another stage.
        other_after: int64[n, 2]: source of a stage, -1 for none; nanoseconds of training in no stage that follow it.
        apart: int64[n, 4]: intervals in no step: first and last instant, ``Activity``, nanoseconds of it.
    """

    steps: StepRows
    occurrences: StageCalls
    times: StageTimes
    activity_ns: np.ndarray
    loader_ns: np.ndarray
    batches: np.ndarray
    endings: np.ndarray
    failed_asks: np.ndarray
    updates: int
    skipped_updates: int
    said: np.ndarray
    moved: np.ndarray
    other_after: np.ndarray
    apart: np.ndarray

    def without_steps(self) -> ClosedSteps:
        """Returns calls and times without steps. Drops time in no stage: there a helper thread waits for the one with the steps."""
        times = StageTimes(*(column[self.times.source >= 0] for column in self.times))
        return self._replace(
            steps=NOTHING.steps,
            occurrences=self.occurrences._replace(step=np.full_like(self.occurrences.step, -1)),
            times=times._replace(step=np.full_like(times.step, -1)),
            other_after=NOTHING.other_after,
        )


_TABLES: Final[dict[str, tuple[int, tuple[int, ...]]]] = {
    "steps": (len(StepRows._fields) + 1, (3,)),
    "occurrences": (len(StageCalls._fields), (1, 2)),
    "times": (len(StageTimes._fields), ()),
    "loader_ns": (4, (3,)),
    "batches": (6, (3,)),
    "endings": (3, ()),
    "failed_asks": (1, ()),
    "said": (3, ()),
    "moved": (2, ()),
    "other_after": (2, ()),
    "apart": (4, ()),
}
"""Fields of ``ClosedSteps`` that are gathered as rows: number of integers per row, and the columns whose sum is the time to
sort by; empty if rows come in the order of time. Until ``Gathered.tables``, the last column of steps is their serial number,
and calls and times refer to their step by it."""

_COLUMNS: Final = {"steps": StepRows, "occurrences": StageCalls, "times": StageTimes}
"""Tables that are returned as named columns."""


_Row: TypeAlias = "tuple[int, int, int]"


class Gathered:
    """Collects the rows and sums of the next ``ClosedSteps``.

    Attributes:
        rows: by field: its rows in one flat list of integers, which is faster to fill and to convert than an array or lists.
        times: nanoseconds by (phase, loader, step), then by the sources of the open stages, outermost first.
        around: inclusive nanoseconds by (phase, loader, step), then by source, to be added to those that follow from ``times``.
        other_after: by phase, then as in ``ClosedSteps``.
        activity_ns: by ``Activity``.
        updates: see ``ClosedSteps``.
        skipped_updates: see ``ClosedSteps``.
    """

    def __init__(self) -> None:
        self.rows: dict[str, list[int]] = {name: [] for name in _TABLES}
        self.times: dict[_Row, dict[tuple[int, ...], int]] = defaultdict(lambda: defaultdict(int))
        self.around: dict[_Row, dict[int, int]] = defaultdict(lambda: defaultdict(int))
        self.other_after: dict[int, dict[int, int]] = defaultdict(lambda: defaultdict(int))
        self.activity_ns = [0] * len(Activity)
        self.updates = self.skipped_updates = 0

    def close(self, open_step: int) -> ClosedSteps:
        """Returns what was gathered; ``NOTHING`` itself if that is nothing. ``open_step``: serial number of the open step."""
        sums = self.updates or self.skipped_updates or any(self.activity_ns)
        booked = sums or self.times or self.around or any(self.rows.values())
        return self.tables(open_step) if booked else NOTHING

    def tables(self, open_step: int = -1) -> ClosedSteps:
        """Returns what was gathered as columns."""
        for row in {**self.times, **self.around}:
            by_source: dict[int, list[int]] = defaultdict(lambda: [0, 0])
            for stack, ns in self.times[row].items():
                for source in stack:
                    by_source[source][1] += ns
                by_source[stack[-1] if stack else -1][0] += ns
            for source, ns in self.around[row].items():
                by_source[source][1] += ns
            phase, loader, step = row
            for source, (self_ns, inclusive_ns) in by_source.items():
                self.rows["times"].extend((source, loader, phase, self_ns, inclusive_ns, step))
        self.rows["other_after"].extend(number for row in self.other_after[TRAIN].items() for number in row)
        tables: dict[str, Any] = {name: _table(self.rows[name], *form) for name, form in _TABLES.items()}
        steps, calls, times = (tables[name] for name in _COLUMNS)
        serials = np.append(steps[:, -1], open_step)
        order = np.argsort(serials)
        for column in (calls[:, -1], times[:, -1]):
            place = order[np.searchsorted(serials, column, sorter=order).clip(max=len(order) - 1)]
            column[:] = np.where((serials[place] == column) & (column >= 0), place, -1)
        tables["steps"] = steps[:, :-1]
        for name, columns in _COLUMNS.items():
            tables[name] = columns(*np.ascontiguousarray(tables[name].T))
        tables["activity_ns"] = np.array(self.activity_ns, dtype=np.int64)
        return ClosedSteps(**tables, updates=self.updates, skipped_updates=self.skipped_updates)


def _table(rows: list[int], width: int, by: tuple[int, ...]) -> np.ndarray:
    """Returns int64[rows, width], sorted by the sum of the columns ``by``; equal rows keep their order."""
    # np.fromiter takes two thirds of the time of np.array.
    found = np.fromiter(rows, dtype=np.int64, count=len(rows)).reshape(-1, width)
    return found[np.argsort(found[:, by].sum(axis=1), kind="stable")] if by else found


NOTHING = Gathered().tables()
"""Result of a call in which nothing became final."""
