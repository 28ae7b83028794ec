"""Words and facts of the accounting: phases, activities, and what leaves it as columns."""

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
"""Places in ``catalog.PHASES``."""

NO_PHASE = 4
"""Time in no batch: before the first, outside, in checkpoints."""

PREFIXES = (("val", EVAL), ("eval", EVAL), ("dev", EVAL), ("test", TEST), ("predict", PREDICT))
"""Loader names that say what their batches are for; ``valid`` begins with ``val``."""


class StepSource(IntEnum):
    """What a thread's training steps are counted by."""

    UNDECIDED = 0
    UPDATE = 1
    BACKWARD = 2
    BATCH = 3
    MANUAL = 4


class Activity(IntEnum):
    """What the time of a run goes to, in catalogue order. The activities add up to the wall time."""

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
    """Time of no open batch: saving, logging, sleeping between passes and after the last."""


@dataclass(slots=True)
class SourceTable:
    """What is known of every source beforehand, by its number. It grows while it is in use.

    Attributes:
        kinds: ``SourceKind``.
        declared: phase that the program declared; -1 for none.
        named: phase that the loader's name says; -1 for none.
        losses: whether it is a user stage named ``loss``.
    """

    kinds: list[int] = field(default_factory=list)
    declared: list[int] = field(default_factory=list)
    named: list[int] = field(default_factory=list)
    losses: list[bool] = field(default_factory=list)

    def extend(self, sources: Iterable[Instrumented]) -> SourceTable:
        """Takes in further sources."""
        for source in sources:
            self.kinds.append(int(source.kind))
            self.declared.append(PHASES.index(source.phase) if source.phase in PHASES else -1)
            self.named.append(phase_of_name(source.name) if source.kind is SourceKind.DATA else -1)
            self.losses.append(source.kind is SourceKind.STAGE and source.name == "loss")
        return self


def phase_of_name(name: str) -> int:
    """Returns the phase that the name of a loader says; -1 for none."""
    return next((phase for prefix, phase in PREFIXES if name.lower().startswith(prefix)), -1)


@dataclass(slots=True, eq=False)
class Home:
    """The row of a call of a user stage or an update, whatever batches the intervals of the call lie in.

    It is the row of the first of them that is booked under a phase, so that a stage around a whole pass belongs to the
    batches of that pass; what is before the first batch of a step is of the loader of the next. A call in no batch has
    no phase.

    Attributes:
        source: the stage.
        waiting: intervals that are not booked yet.
        row: phase, loader and step, as far as they are known.
        known: they are known.
        open_ns: time of the call that is not in its row yet.
        ended: once it has ended: the columns of ``StageCalls`` from ``started_ns`` on.
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
        failed: occurrences in it that ended by an exception.
        samples: samples in its batches, where known.
        wait_ns: its time in stage ``data``.
        loss_ns: from a first forward through the loss function to the end of its backward, all of them, less
            waits for data; where there is no backward, the user stages named ``loss``.
        losses: how many those were.
        training_ns: from the first forward (or loss) of the step to its last update or backward, with all that is
            of the step between them; 0 where none was seen.
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
    """Calls that have ended, in the order of their ends. All columns are int64[occurrences].

    Attributes:
        source: number of the source that was called.
        started_ns: when it began.
        inclusive_ns: how long it ran, with what ran inside it.
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
    """Time by stage and batch, where asked for by step too, each combination once. All columns are int64[rows].

    Attributes:
        source: whose time; -1 for time of no stage.
        loader: loader of the batch; -1 for none.
        phase: index into ``PHASES``, or ``NO_PHASE``.
        self_ns: time in which it was the innermost stage; over all rows without gap or overlap.
        inclusive_ns: time in which it was open.
        step: as in ``StageCalls``; -1 where steps were not asked for.
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
        loader_ns: int64[n, 4]: loader source, phase, nanoseconds of a batch it took part in, and when that ended.
        batches: int64[n, 6]: loader source, phase, samples (-1 unknown) of every batch fetched, and when; nanoseconds
            to make the iterator (-1 unless it is the first batch of its pass), nanoseconds to wait for it. One that is
            fetched inside an ask of another loader is a part of that one's batch, and has no phase.
        endings: int64[n, 3]: passes that ended: loader source, ``Ending``, when.
        failed_asks: int64[n, 1]: loader source of every ask that raised, but for Ctrl-C and the like.
        updates: optimizer updates made.
        skipped_updates: ``GradScaler.step`` calls in which no update was made.
        said: int64[n, 3]: manual epochs, and requested reports: when, ``Op``, payload.
        moved: int64[n, 2]: source of transfers, bytes moved, also where their time belongs to another stage.
        other_after: int64[n, 2]: source of a stage, -1 for none; nanoseconds of training in no stage that follow it.
        apart: int64[n, 4]: intervals that are in no step: first and last instant, ``Activity``, nanoseconds of it.
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
        """Returns the time of stages and the calls, of no step. What lies between them is a wait for the thread that has the steps."""
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
"""Fields of ``ClosedSteps`` that are gathered in rows: how many integers make a row, and the columns whose sum is the time to
sort by, where rows do not come in the order of time. Until ``Gathered.close``, steps end with a serial number, and
occurrences and times name their step by it."""

_COLUMNS: Final = {"steps": StepRows, "occurrences": StageCalls, "times": StageTimes}
"""Those of them that leave as columns."""


_Row: TypeAlias = "tuple[int, int, int]"


class Gathered:
    """What becomes a ``ClosedSteps``.

    Attributes:
        rows: by field: its rows, one after another. A list of integers grows, and becomes a table, faster than an array or rows.
        times: by phase, loader and step, and by the sources of the open stages, outermost first: time.
        around: by the same and by source: time around that of others, beyond what ``times`` says.
        other_after: by phase: see ``ClosedSteps``.
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

    def close(self, open_step: int = -1) -> ClosedSteps:
        """Returns all of it, ``NOTHING`` itself for nothing; ``open_step``: serial number of the step that has not closed."""
        sums = self.updates or self.skipped_updates or any(self.activity_ns)
        booked = sums or self.times or self.around or any(self.rows.values())
        return self.tables(open_step) if booked else NOTHING

    def tables(self, open_step: int = -1) -> ClosedSteps:
        """Returns all of it."""
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
    """Returns int64[rows, width], sorted by the sum of some columns; equal rows in the order they came."""
    # It takes two thirds of the time of np.array.
    found = np.fromiter(rows, dtype=np.int64, count=len(rows)).reshape(-1, width)
    return found[np.argsort(found[:, by].sum(axis=1), kind="stable")] if by else found


NOTHING = Gathered().tables()
"""Nothing became final."""
