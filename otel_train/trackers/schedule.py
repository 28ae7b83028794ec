"""Decides when rows for trackers are due, and builds them from closed steps."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np

from otel_train.accounting.types import NO_PHASE, NOTHING, TRAIN, ClosedSteps, StageCalls, StepSource
from otel_train.console.summary import StepWindow
from otel_train.datamodel import NS_PER_S, system_clock
from otel_train.safety import Guard
from otel_train.trackers.metrics import EpochWindow, FlatMetrics, FlatRow, left_out, without

if TYPE_CHECKING:
    from otel_train.aggregation.epochs import EpochBoundary
    from otel_train.aggregation.run_state import RunState
    from otel_train.config import Config

MOST_HELD = 100_000
"""Most operations held back while the training thread writes no events; 6 MB."""


def operation_calls(ended: np.ndarray) -> StageCalls:
    """Converts timed operations to stage calls, sorted by end; ``ended`` is int64[n, 3]: source, begin and end in ns."""
    source, begun_ns, ended_ns = ended[np.argsort(ended[:, 2], kind="stable")].T
    zeros = np.zeros(len(ended), dtype=np.int64)
    return StageCalls(source, begun_ns, ended_ns - begun_ns, zeros, zeros - 1, zeros + NO_PHASE, zeros - 1)


class HeldOperations:
    """Holds operations until the accounting of the training thread has passed their end: then the row they belong to is known."""

    def __init__(self) -> None:
        self._held: StageCalls = NOTHING.occurrences

    def add(self, calls: StageCalls) -> None:
        """Adds operations that have ended."""
        if len(calls.source):
            self._held = _merged_by_end(self._held, calls)

    def among(self, closed: ClosedSteps, until_ns: int) -> ClosedSteps:
        """Returns the closed steps with the operations that ended up to ``until_ns`` merged into their calls."""
        if not len(self._held.source):
            return closed
        count = int(np.searchsorted(_ends(self._held), until_ns, side="right"))
        taken = StageCalls(*(column[:count] for column in self._held))
        self._held = StageCalls(*(column[count:].copy() for column in self._held))
        return closed._replace(occurrences=_merged_by_end(closed.occurrences, taken))

    def rest(self, *, least: int = 1) -> ClosedSteps | None:
        """Returns all held operations, without any steps, if there are at least ``least``; else None."""
        if len(self._held.source) < least:
            return None
        held, self._held = self._held, NOTHING.occurrences
        return NOTHING._replace(occurrences=held)


def _ends(calls: StageCalls) -> np.ndarray:
    """Estimates the ends of calls, ascending; a call that was suspended in between ended later than its begin plus its duration."""
    ends: np.ndarray = np.maximum.accumulate(calls.started_ns + calls.inclusive_ns)
    return ends


def _merged_by_end(calls: StageCalls, more: StageCalls) -> StageCalls:
    at = np.searchsorted(_ends(calls), _ends(more), side="right")
    return StageCalls(*(np.insert(column, at, new) for column, new in zip(calls, more, strict=True)))


class StepWindows:
    """Sums up training steps in windows that end at each multiple of ``every_steps``; 0 for no windows."""

    def __init__(self, every_steps: int) -> None:
        self._every_steps = every_steps
        self._due: list[StepWindow] = []
        self._since_ns = -1  # end of the last window, or start of the first step
        self._open = StepWindow(0, 0, 0.0, None, None)

    def take(self) -> list[StepWindow]:
        """Returns the windows that have ended since the last call."""
        due, self._due = self._due, []
        return due

    def add(self, closed: ClosedSteps, rows: np.ndarray, numbers: np.ndarray) -> None:
        """Adds the training thread's steps at indices ``rows`` of ``closed.steps``, which have these ``numbers``."""
        if not self._every_steps:
            return
        steps = closed.steps
        if self._since_ns < 0 and len(rows):
            self._since_ns = int(steps.started_ns[rows[0]])
        batches = closed.batches[closed.batches[:, 1] == TRAIN]
        cuts = np.flatnonzero((numbers + 1) % self._every_steps == 0) + 1
        first = 0
        for cut in cuts.tolist():
            ended_ns = int(steps.ended_ns[rows[cut - 1]])
            among = batches[:, 3] <= ended_ns
            self._count(batches[among], steps.wait_ns[rows[first:cut]])
            window = self._open._replace(
                last=int(numbers[cut - 1]) + 1, seconds=(ended_ns - self._since_ns) / NS_PER_S
            )
            self._due.append(window)
            self._open = StepWindow(0, 0, 0.0, None, None)
            self._since_ns, batches, first = ended_ns, batches[~among], cut
        self._count(batches, steps.wait_ns[rows[first:]])

    def _count(self, batches: np.ndarray, wait_ns: np.ndarray) -> None:
        known = batches[batches[:, 2] >= 0, 2]
        _, steps, seconds, samples, waited_s = self._open
        if len(known):
            samples = (samples or 0) + int(known.sum())
        if len(batches) or waited_s is not None:
            waited_s = (waited_s or 0.0) + float(wait_ns.sum()) / NS_PER_S
        self._open = StepWindow(0, steps + len(wait_ns), seconds, samples, waited_s)


EVERY_STEPS = 50
"""Default for training steps between two rows."""


class _Trackers(Protocol):
    """The members of ``otel_train.trackers.manager.Trackers`` that ``RowScheduler`` uses."""

    @property
    def any(self) -> bool: ...
    def listened(self) -> bool: ...
    def put(self, rows: Iterable[FlatRow]) -> None: ...


class RowScheduler:
    """Builds rows from closed steps on the export loop's thread and passes them to the trackers, on rank 0."""

    def __init__(
        self, config: Config, *, trackers: _Trackers, run: RunState, epochs: EpochWindow, first: bool
    ) -> None:
        self._trackers = trackers
        self._guard = Guard("tracker metrics")
        self._run = run
        self._held = HeldOperations()
        self._left_out = left_out(config.throughput_metrics)
        self._awake = False
        self._windows = StepWindows(config.log_every_steps if config.console else 0)
        self._metrics = FlatMetrics(
            run.names, epochs, every_steps=config.log_every_steps or EVERY_STEPS,
            every_epochs=config.log_every_epochs, unix=run.unix,
        )  # fmt: skip
        if first:
            run.on_closed_steps = self._take

    def reset(self) -> None:
        """Sets the totals of operations to zero."""
        self._metrics.reset()

    def report(self, number: int) -> None:
        """Writes a row now, unless the report with that number is written already."""
        if not self._awake or self._guard.closed or number <= self._metrics.reported:
            return
        if self._run.leading is None or self._run.step_source is not StepSource.UNDECIDED:
            self._flush()
            with self._guard:
                self._put(self._metrics.report(number, system_clock()))

    def hold(self, calls: StageCalls) -> None:
        """Adds ended operations that were timed by ``begin`` and ``end``."""
        if self._trackers.any:
            self._held.add(calls)
            self._flush(least=MOST_HELD)

    def take_windows(self) -> list[StepWindow]:
        """Returns the windows for progress lines that have ended since the last call."""
        return self._windows.take()

    def faults(self) -> dict[str, int]:
        """Returns the number of failures to build or pass rows, by component."""
        return {"trackers": self._guard.faults}

    def listened(self) -> bool:
        """Returns whether there is, or has been, a tracker to log to."""
        self._awake = self._awake or self._trackers.listened()
        return self._awake

    def hand_over(self) -> None:
        """Passes a row of all final values to the trackers, before a tracker run finishes."""
        if self._awake:
            self._flush()
            with self._guard:
                self._put(self._metrics.so_far())

    def close(self) -> None:
        """Writes the last row."""
        self._flush()
        if self._awake:
            with self._guard:
                self._put(self._metrics.finish(self._run.epochs.close()))

    def _flush(self, *, least: int = 1) -> None:
        rest = self._held.rest(least=least)
        if rest is not None:
            none = rest.failed_asks
            self._take(rest, none, none, ())

    def _take(
        self, closed: ClosedSteps, rows: np.ndarray, numbers: np.ndarray, boundaries: Sequence[EpochBoundary]
    ) -> None:
        if self._guard.closed:
            return
        with self._guard:
            self._windows.add(closed, rows, numbers)
            closed = self._held.among(closed, self._run.final_ns)
            if self.listened():
                self._put(self._metrics.take(closed, rows, numbers, boundaries))
            else:
                self._metrics.skip(numbers, boundaries)

    def _put(self, rows: list[FlatRow]) -> None:
        for number, row in enumerate(rows):
            if row.of_epoch and self._left_out:
                rows[number] = row._replace(values=without(row.values, self._left_out))
        self._trackers.put(rows)
