"""The figures of a run under flat names, as rows for trackers: at every so many steps, and per epoch."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from otel_train.accounting.types import TRAIN
from otel_train.aggregation.epochs import EpochTurns
from otel_train.aggregation.flat_windows import Operations, StageMeans
from otel_train.recording.events import Op

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterator

    from otel_train.accounting.types import ClosedSteps
    from otel_train.aggregation.epochs import Turn
    from otel_train.aggregation.flat_epochs import EpochWindow
    from otel_train.aggregation.series_names import Names


class FlatRow(NamedTuple):
    """What a tracker logs at once.

    Attributes:
        unix_ns: when the last of it happened.
        step: training steps that had been counted.
        epoch: the epoch, from 1 where the program gives it no other number.
        of_epoch: a row about a whole epoch; else one about the steps since the last.
        values: figures by flat name.
    """

    unix_ns: int
    step: int
    epoch: int
    of_epoch: bool
    values: dict[str, float]


class Slice(NamedTuple):
    """A part of what was settled at once. Columns are int64.

    Attributes:
        source: who was called, per call that ended.
        loader: loader of the batch it worked on; -1 for none.
        phase: index into ``PHASES``, or ``NO_PHASE``.
        started_ns: when it began.
        lasted_ns: how long it ran.
        kind: ``SourceKind`` of the source.
        batches: as in ``ClosedSteps``.
        step_ns: durations of the training steps that closed.
        work_ns: the same, less what they waited for data.
        loader_ns: as in ``ClosedSteps``.
        loss_ns: time of their loss computations, as in ``StepRows``.
        losses: how many loss computations they had.
        training_ns: from their first forward, or loss, to the end of their last update.
    """

    source: np.ndarray
    loader: np.ndarray
    phase: np.ndarray
    started_ns: np.ndarray
    lasted_ns: np.ndarray
    kind: np.ndarray
    batches: np.ndarray
    step_ns: np.ndarray
    work_ns: np.ndarray
    loader_ns: np.ndarray
    loss_ns: np.ndarray
    losses: np.ndarray
    training_ns: np.ndarray


class _Mark(NamedTuple):
    """Where a row is due.

    Attributes:
        at_ns: when.
        step: training steps up to there.
        turn: of epochs, if it is about one; else so many steps are over.
    """

    at_ns: int
    step: int
    turn: Turn | None = None


class FlatFigures:
    """Cuts what is settled at the steps and epochs that are logged, and sums each part up.

    Args:
        names: what the sources are called.
        epochs: sums up the epoch that is running.
        every_steps: training steps between two rows; 0 for none.
        every_epochs: epochs between two rows; 0 for none.
        unix: from the run's clock to Unix time, in nanoseconds.
    """

    def __init__(
        self,
        names: Names,
        epochs: EpochWindow,
        *,
        every_steps: int,
        every_epochs: int,
        unix: Callable[[int], int],
    ) -> None:
        self.epoch = 1
        self.reported = 0  # reports asked for, and made
        self._names = names
        self._every_steps = every_steps
        self._every_epochs = every_epochs
        self._unix = unix
        self._turns = EpochTurns(names, epochs.loaders)
        self._step = self._logged = 0
        self._stepped_ns = 0  # when that step ended
        self._means = StageMeans(names, epochs.safe)
        self._operations = Operations(names, epochs.safe)
        self._epochs = epochs

    def reset(self) -> None:
        """Let the totals of operations start from now."""
        self._operations.reset()

    def take(self, settled: ClosedSteps, rows: np.ndarray, numbers: np.ndarray) -> list[FlatRow]:
        """Take in what has been settled of the thread that trains; the rows that are due.

        Args:
            settled: the facts.
            rows: which of its steps are counted training steps.
            numbers: their numbers.
        """
        made: list[FlatRow] = []
        marks = self._marks(settled, rows, numbers)
        for part, mark in zip(
            self._parts(settled, [mark.at_ns for mark in marks]), [*marks, None], strict=True
        ):
            self._means.add(part)
            self._operations.add(part)
            self._epochs.add(part)
            if mark is not None:
                self._step = max(self._step, mark.step)
                made += self._epoch_row(mark.turn, mark.at_ns) if mark.turn else self._step_row(mark.at_ns)
        if len(numbers):
            self._step, self._stepped_ns = int(numbers[-1]) + 1, int(settled.steps.ended_ns[rows[-1]])
        return made

    def skip(self, settled: ClosedSteps, rows: np.ndarray, numbers: np.ndarray) -> None:
        """Only keep count: nobody listens yet."""
        self._epochs.skip()
        for mark in self._marks(settled, rows, numbers):
            if mark.turn:
                self.epoch = mark.turn.running
        if len(numbers):
            self._step = self._logged = int(numbers[-1]) + 1

    def report(self, number: int, at_ns: int) -> list[FlatRow]:
        """A row of what is known now, unless the report with that number has been made."""
        row = self._step_row(at_ns) if number > self.reported else []
        self.reported = number if row else self.reported
        return row

    def so_far(self) -> list[FlatRow]:
        """A row of the steps since the last one, if there were any."""
        return self._step_row(self._stepped_ns) if self._step > self._logged else []

    def finish(self) -> list[FlatRow]:
        """A row of the steps since the last one, if there were any, and one of the epoch that ends here.

        That is one that was marked: a pass that was not finished is none.
        """
        return [*self.so_far(), *self._epoch_row(self._turns.close(), self._stepped_ns)]

    def _step_row(self, at_ns: int) -> list[FlatRow]:
        self._logged = self._step
        values = {**self._means.take(), **self._operations.values()}
        return [self._row(at_ns, self.epoch, values, of_epoch=False)] if values else []

    def _epoch_row(self, turn: Turn, at_ns: int) -> list[FlatRow]:
        values, ended = self._epochs.take(at_ns), turn.ended
        self.epoch = turn.running
        if ended is None or not values or not self._every_epochs or ended % self._every_epochs:
            return []
        return [self._row(at_ns, ended, values, of_epoch=True)]

    def _row(self, at_ns: int, epoch: int, values: dict[str, float], *, of_epoch: bool) -> FlatRow:
        return FlatRow(self._unix(at_ns), self._step, epoch, of_epoch=of_epoch, values=values)

    def _marks(self, settled: ClosedSteps, rows: np.ndarray, numbers: np.ndarray) -> list[_Mark]:
        """Where rows are due, in time."""
        found = []
        if self._every_steps:
            due = np.flatnonzero((numbers + 1) % self._every_steps == 0)
            ended = settled.steps.ended_ns[rows[due]]
            found = [
                _Mark(at, step) for at, step in zip(ended.tolist(), (numbers[due] + 1).tolist(), strict=True)
            ]
        said: list[tuple[int, Turn | None]] = [
            (at_ns, None) for at_ns in self._asked(settled, {mark.at_ns for mark in found})
        ]
        said += [(turn.at_ns, turn) for turn in self._turns.take(settled)]
        for at_ns, turn in said:
            before = np.flatnonzero(settled.steps.ended_ns[rows] <= at_ns)
            found.append(_Mark(at_ns, int(numbers[before[-1]]) + 1 if len(before) else self._step, turn))
        return sorted(found, key=lambda mark: mark.at_ns)  # a step ends before the epoch does

    def _asked(self, settled: ClosedSteps, due: Container[int]) -> Iterator[int]:
        """When reports were asked for that have not been made, and are not due all the same."""
        for at_ns, op, number in settled.said.tolist():
            if op == Op.REPORT and number > self.reported:
                self.reported = number
                if at_ns not in due:
                    yield at_ns

    def _parts(self, settled: ClosedSteps, cuts: list[int]) -> Iterator[Slice]:
        """What was settled, in one part more than there are cuts; what ends at a cut comes before it."""
        calls, steps, batches = settled.occurrences, settled.steps, settled.batches
        ended = np.maximum.accumulate(calls.started_ns + calls.inclusive_ns)
        kind = self._names.kinds[calls.source].astype(np.int64)
        train = np.flatnonzero(steps.phase == TRAIN)
        waited = steps.wait_ns[train]
        counted = steps.counted[train] > 0
        edges = [
            np.concatenate(([0], np.searchsorted(times, cuts, side="right"), [len(times)]))
            for times in (ended, np.sort(batches[:, 3]), steps.ended_ns[train], settled.loader_ns[:, 3])
        ]
        batches = batches[np.argsort(batches[:, 3], kind="stable")]
        for number in range(len(cuts) + 1):
            call, batch, step, loader = (slice(*at[number : number + 2].tolist()) for at in edges)
            mine = train[step][counted[step]]
            lasted = steps.duration_ns[mine]
            yield Slice(
                calls.source[call], calls.loader[call], calls.phase[call], calls.started_ns[call],
                calls.inclusive_ns[call], kind[call], batches[batch], lasted,
                lasted - waited[step][counted[step]], settled.loader_ns[loader], steps.loss_ns[mine], steps.losses[mine], steps.training_ns[mine],
            )  # fmt: skip
