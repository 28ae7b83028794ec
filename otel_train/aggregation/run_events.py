"""Checkpoints, evaluations, stalls and captures of a run."""

from __future__ import annotations

from collections import Counter, deque
from enum import Enum
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from otel_train.accounting.types import PHASES, TRAIN, Activity
from otel_train.aggregation.captures import TRIGGERS
from otel_train.aggregation.histogram import Histograms
from otel_train.datamodel import NS_PER_S
from otel_train.recording.events import SourceKind

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from otel_train.accounting.types import StageCalls, StepRows
    from otel_train.aggregation.captures import Capture
    from otel_train.aggregation.counters import Reclaimed
    from otel_train.aggregation.series_names import Names


class Saved(NamedTuple):
    """One checkpoint: when, and whether it failed."""

    within_ns: tuple[int, int]
    failed: bool


class Checkpoints:
    """Counts them.

    Attributes:
        durations: how long the loop was held up.
        failures: those that raised.
        last_ns: when the last good one was done; 0 before the first.
        interval_s: from the last but one to the last; 0 before the second.
    """

    def __init__(self) -> None:
        self.durations = Histograms(size=1)
        self.failures = self.last_ns = 0
        self.interval_s = 0.0

    def take(self, ended: StageCalls, kinds: np.ndarray) -> Iterator[Saved]:
        """Count the checkpoints among calls that have ended; each of them.

        Args:
            ended: calls.
            kinds: of every source.
        """
        for place in np.flatnonzero(kinds[ended.source] == SourceKind.CHECKPOINT).tolist():
            begun, lasted = int(ended.started_ns[place]), int(ended.inclusive_ns[place])
            saved = Saved((begun, begun + lasted), bool(ended.failed[place]))
            self.durations.add([0], [lasted])
            if saved.failed:
                self.failures += 1
            else:
                before, self.last_ns = self.last_ns, begun + lasted
                if before:
                    self.interval_s = (self.last_ns - before) / NS_PER_S
            yield saved


MEDIAN_STEPS = 20
"""A stall in training is at least this many median steps long; see ``train.stall.threshold``."""

UNKNOWN_FACTOR = 6
"""Least stall in an activity that was not seen to its end yet, over the least stall in training; no training step
needs more, whatever pauses there were."""

KNOWN_FACTOR = 2
"""The same in an activity that was: no shorter, however short it has been."""

LONGEST_FACTOR = 3
"""A stall in an evaluation or a checkpoint is so many times its longest silence so far."""

PAUSE_FACTOR = 2
"""A stall between training steps is so many times the longest pause there that ended by itself."""

OUTSIDE_NS = 24 * 3600 * 10**9
"""The threshold of a program whose loops have ended, where silence means nothing: rules know it by this value."""


class Doing(Enum):
    """What a run is silent in."""

    START = "start"
    """Before the first training step has closed: compilers and allocators may take their time."""
    TRAINING = "training"
    EVALUATION = "evaluation"
    CHECKPOINT = "checkpoint"
    OUTSIDE = "outside"


class Stalls:
    """Watches the time since the last sign of progress.

    Args:
        started_ns: when the run began.
        after_s: least silence that is a stall, in seconds.
        reclaimed: told of stalls that are over.
    """

    def __init__(self, started_ns: int, after_s: float, reclaimed: Reclaimed) -> None:
        self.last_ns = started_ns
        self.since_ns = 0
        """When the present stall passed its threshold; 0 while there is none."""
        self.quiet_ns = 0
        """Time without progress, as of the last look."""
        self.others_ns = 0
        """Longest silence that is no stall on a rank that this one may wait for."""
        self.events: dict[str, int] = {}
        self._least_ns = int(after_s * NS_PER_S)
        self.own_ns = self._least_ns
        """Silence that is a stall in what this rank does by itself."""
        self._doing = Doing.TRAINING
        self._longest_ns: dict[Doing, int] = {}
        self._reclaimed = reclaimed

    @property
    def threshold_ns(self) -> int:
        """Silence that is a stall now."""
        return OUTSIDE_NS if self.outside else max(self.own_ns, self.others_ns)

    @property
    def patience_ns(self) -> int:
        """How long others may wait for this rank before they call it a stall."""
        return min(self.own_ns, UNKNOWN_FACTOR * self._least_ns) if self.outside else self.own_ns

    @property
    def outside(self) -> bool:
        """The loops are over."""
        return self._doing is Doing.OUTSIDE

    def progress(self, at_ns: int) -> None:
        """Something happened."""
        if self.since_ns and at_ns > self.since_ns:
            self._reclaimed.add(Activity.STALLED, self.since_ns, at_ns)
            self.since_ns = 0
        silent_ns = at_ns - self.last_ns
        waited = self._doing is Doing.TRAINING and self.others_ns > self.own_ns
        if silent_ns > self._longest_ns.get(self._doing, 0) and not waited:
            self._longest_ns[self._doing] = silent_ns
        self.last_ns = max(self.last_ns, at_ns)

    def look(self, now_ns: int, median_step_ns: int, *, doing: Doing = Doing.TRAINING) -> bool:
        """Whether a stall has just begun.

        Args:
            now_ns: now.
            median_step_ns: rolling median of step durations; 0 if unknown.
            doing: what the run is in.
        """
        self._doing = doing
        self.own_ns = self._patience_ns(median_step_ns)
        self.quiet_ns = 0 if self.outside else max(0, now_ns - self.last_ns)
        if self.outside or self.since_ns or now_ns - self.last_ns < self.threshold_ns:
            return False
        self.since_ns = self.last_ns + self.threshold_ns
        return True

    def count(self, stage: str) -> None:
        """A stall was found while the run was in ``stage``."""
        self.events[stage] = self.events.get(stage, 0) + 1

    def _patience_ns(self, median_step_ns: int) -> int:
        least_ns, longest_ns = self._least_ns, self._longest_ns.get(self._doing, 0)
        at_most_ns = UNKNOWN_FACTOR * least_ns
        if self.outside:
            return OUTSIDE_NS
        if self._doing is Doing.TRAINING:
            pauses_ns = min(PAUSE_FACTOR * longest_ns, at_most_ns)
            return max(least_ns, MEDIAN_STEPS * median_step_ns, pauses_ns)
        if self._doing is Doing.START or not longest_ns:
            return at_most_ns
        return max(KNOWN_FACTOR * least_ns, LONGEST_FACTOR * longest_ns)


class Pass(NamedTuple):
    """One pass.

    Attributes:
        phase: name of the phase.
        loader: name of the loader; "" for none.
        started_ns: first instant.
        ended_ns: last instant.
        batches: steps in it.
    """

    phase: str
    loader: str
    started_ns: int
    ended_ns: int
    batches: int


class EvalPasses:
    """Puts evaluation steps together to passes; a pass is over when something else follows."""

    def __init__(self) -> None:
        self.durations = Histograms()
        self.loaders: list[str] = []
        self._open: Pass | None = None

    def feed(self, steps: StepRows, names: Names) -> list[Pass]:
        """Passes that the newly closed steps end."""
        if not len(steps.phase):
            return []
        over = []
        loaders = names.loader(steps.loader)
        change = (np.diff(steps.phase, prepend=-1) != 0) | (np.diff(loaders, prepend=-1) != 0)
        starts = np.flatnonzero(change)
        for start, stop in zip(starts.tolist(), [*starts[1:].tolist(), len(change)], strict=True):
            phase = int(steps.phase[start])
            if phase == TRAIN:
                over += self.close()
                continue
            within = (int(steps.started_ns[start]), int(steps.ended_ns[stop - 1]))
            over += self._extend(PHASES[phase], names.loaders.names[loaders[start]], within, stop - start)
        return over

    def close(self) -> list[Pass]:
        """End the pass that is open, if any."""
        done, self._open = self._open, None
        if done is None:
            return []
        if done.loader not in self.loaders:
            self.loaders.append(done.loader)
            self.durations.grow(len(self.loaders))
        self.durations.add([self.loaders.index(done.loader)], [done.ended_ns - done.started_ns])
        return [done]

    def _extend(self, phase: str, loader: str, within: tuple[int, int], batches: int) -> list[Pass]:
        same = self._open
        if same is not None and (same.phase, same.loader) == (phase, loader):
            self._open = same._replace(ended_ns=within[1], batches=same.batches + batches)
            return []
        over = self.close()
        self._open = Pass(phase, loader, *within, batches)
        return over


RECENT = 8
"""Captures that a summary names."""


class Captures:
    """What the metrics say of captures."""

    def __init__(self) -> None:
        self.active = False
        self.counts: Counter[tuple[str, str]] = Counter()
        self.durations = Histograms(size=len(TRIGGERS))
        self.bytes = 0
        self.recent: deque[Capture] = deque(maxlen=RECENT)
        self.newest: Capture | None = None
        """The last one that has a file."""

    def add(self, capture: Capture) -> None:
        """One is over."""
        self.recent.append(capture)
        self.counts[capture.trigger, capture.error] += 1
        if capture.file:
            self.bytes, self.newest = capture.bytes, capture
            self.durations.add([TRIGGERS.index(capture.trigger)], [int(capture.seconds * NS_PER_S)])

    def documents(self) -> list[dict[str, Any]]:
        """The last ones, the oldest first, as a summary names them."""
        return [
            {
                "file": capture.file or None, "trigger": capture.trigger, "steps": list(capture.steps),
                "problem": capture.problem, "finding": capture.finding,
            }
            for capture in self.recent
        ]  # fmt: skip

    def of_trigger(self) -> Mapping[tuple[str, str], int]:
        """Captures by (trigger, error); each trigger is there, with 0 where there was none."""
        return {**dict.fromkeys(((trigger, "") for trigger in TRIGGERS), 0), **self.counts}
