"""Checkpoints, evaluations, stalls and captures of a run."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from enum import Enum
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from otel_train.accounting.types import TRAIN, Activity, StageCalls, StepRows
from otel_train.aggregation.histogram import Histograms
from otel_train.catalog import PHASES, PROFILER_TRIGGER
from otel_train.datamodel import NS_PER_S, Capture
from otel_train.recording.events import SourceKind

if TYPE_CHECKING:
    from otel_train.aggregation.counters import ReclaimedTime
    from otel_train.aggregation.series_names import SeriesNames


class Checkpoints:
    """Counts checkpoints. ``last_ns`` and ``interval_s`` are of successful ones; 0 while there is none.

    ``interval_s`` is the longest of the last three intervals, so that an extra save does not change it. Saves without a
    step between them, such as those of the last and the best model, are one checkpoint.
    """

    def __init__(self) -> None:
        self.durations = Histograms(size=1)
        self.failures = self.last_ns = 0
        self.interval_s = 0.0
        self._intervals_s: deque[float] = deque(maxlen=3)
        self._step = -1

    def take(
        self, ended: StageCalls, kinds: np.ndarray, step_at: Callable[[int], int]
    ) -> Iterator[tuple[tuple[int, int], bool]]:
        """Counts the checkpoints among ended calls, and yields begin and end of each, and whether it failed.

        ``step_at`` returns the number of the step at an instant.
        """
        for place in np.flatnonzero(kinds[ended.source] == SourceKind.CHECKPOINT).tolist():
            begun, lasted = int(ended.started_ns[place]), int(ended.inclusive_ns[place])
            self.durations.add([0], [lasted])
            if ended.failed[place]:
                self.failures += 1
            else:
                before, self.last_ns = self.last_ns, begun + lasted
                step = step_at(begun)
                if before and step != self._step:
                    self._intervals_s.append((self.last_ns - before) / NS_PER_S)
                    self.interval_s = max(self._intervals_s)
                self._step = step
            yield (begun, begun + lasted), bool(ended.failed[place])


MEDIAN_STEPS = 20
"""Stall threshold between training steps, in median steps; see ``train.stall.threshold``."""

LONG_STEPS = 3
"""Upper bound of that threshold, in median steps, for steps so long that it exceeds the bound of ``UNKNOWN_FACTOR``."""

UNKNOWN_FACTOR = 6
"""Stall threshold in an activity that has not ended before, in multiples of ``stall_after_s``; also the upper bound
between training steps, unless they are long."""

KNOWN_FACTOR = 2
"""Lower bound of the stall threshold in an activity that has ended before, in multiples of ``stall_after_s``."""

LONGEST_FACTOR = 3
"""Stall threshold in an evaluation or checkpoint, in multiples of the longest time without progress in one so far."""

PAUSE_FACTOR = 2
"""Stall threshold between training steps, in multiples of the longest time without progress so far."""

OUTSIDE_NS = 24 * 3600 * 10**9
"""Stall threshold, 24 h, of a program whose loops have ended: no progress is expected. Alert rules compare with this value."""


class StallContext(Enum):
    """What the run does while it makes no progress."""

    START = "start"
    """Before the first training step has closed: compilers and allocators may take long."""
    TRAINING = "training"
    EVALUATION = "evaluation"
    CHECKPOINT = "checkpoint"
    OUTSIDE = "outside"


class Stalls:
    """Detects stalls by the time since the last progress."""

    def __init__(self, started_ns: int, after_s: float, reclaimed: ReclaimedTime) -> None:
        self.last_ns = started_ns
        self.since_ns = 0
        """When the current stall passed its threshold; 0 without a stall. The stall itself began at ``last_ns``."""
        self.quiet_ns = 0
        """Time without progress, as of the last check."""
        self.others_ns = 0
        """Largest stall threshold of the other ranks that this one may wait for."""
        self.events: Counter[str] = Counter()
        self._least_ns = int(after_s * NS_PER_S)
        self.own_ns = self._least_ns
        """Stall threshold by what this rank itself does."""
        self._doing = StallContext.TRAINING
        self._longest_ns: dict[StallContext, int] = {}
        self._reclaimed = reclaimed

    @property
    def threshold_ns(self) -> int:
        """Current stall threshold."""
        return OUTSIDE_NS if self.outside else max(self.own_ns, self.others_ns)

    @property
    def patience_ns(self) -> int:
        """How long other ranks may wait for this one before that counts as a stall."""
        return min(self.own_ns, UNKNOWN_FACTOR * self._least_ns) if self.outside else self.own_ns

    @property
    def outside(self) -> bool:
        """Whether the training loops have ended."""
        return self._doing is StallContext.OUTSIDE

    def progress(self, at_ns: int) -> None:
        """Records progress."""
        if self.since_ns and at_ns > self.since_ns:
            self._reclaimed.add(Activity.STALLED, self.last_ns, at_ns)
            self.since_ns = 0
        silent_ns = at_ns - self.last_ns
        # A wait for another rank, such as one that saves a checkpoint, says nothing about pauses of this one.
        may_wait = self._doing is StallContext.TRAINING and self.others_ns > self.own_ns
        if silent_ns > self._longest_ns.get(self._doing, 0) and not may_wait:
            self._longest_ns[self._doing] = silent_ns
        self.last_ns = max(self.last_ns, at_ns)

    def check(self, now_ns: int, median_step_ns: int, *, doing: StallContext = StallContext.TRAINING) -> bool:
        """Returns whether a stall has just been detected. ``median_step_ns`` is 0 if unknown."""
        self._doing = doing
        self.own_ns = self._patience_ns(median_step_ns)
        self.quiet_ns = 0 if self.outside else max(0, now_ns - self.last_ns)
        if self.outside or self.since_ns or now_ns - self.last_ns < self.threshold_ns:
            return False
        self.since_ns = self.last_ns + self.threshold_ns
        return True

    def count(self, stage: str) -> None:
        """Counts a stall in ``stage``."""
        self.events[stage] += 1

    def _patience_ns(self, median_step_ns: int) -> int:
        least_ns, longest_ns = self._least_ns, self._longest_ns.get(self._doing, 0)
        at_most_ns = UNKNOWN_FACTOR * least_ns
        if self.outside:
            return OUTSIDE_NS
        if self._doing is StallContext.TRAINING:
            if not median_step_ns:  # few steps: the next ones may compile, and take as long as the first
                longest_ns = max(longest_ns, self._longest_ns.get(StallContext.START, 0))
            wanted_ns = max(least_ns, MEDIAN_STEPS * median_step_ns, PAUSE_FACTOR * longest_ns)
            return min(wanted_ns, max(at_most_ns, LONG_STEPS * median_step_ns))
        if self._doing is StallContext.START or not longest_ns:
            return at_most_ns
        return max(KNOWN_FACTOR * least_ns, LONGEST_FACTOR * longest_ns)


class EvalPass(NamedTuple):
    """One evaluation pass."""

    phase: str
    loader: str
    started_ns: int
    ended_ns: int
    batches: int


class EvalPasses:
    """Groups the evaluation steps of each thread into passes.

    A pass ends when a step of another phase or loader follows, or a gap in time: steps of a pass have no gaps between them.
    But a gap before a step that requested no batch does not end it: a loop that prefetches runs its last step after its end.
    """

    def __init__(self) -> None:
        self.durations = Histograms()
        self.loaders: dict[str, int] = {}
        """Series of ``durations``, by loader name."""
        self._open: dict[str, EvalPass] = {}
        """The running pass, by thread."""

    def feed(
        self, steps: StepRows, names: SeriesNames, thread: str = "", *, gaps: bool = False
    ) -> list[EvalPass]:
        """Returns the passes that newly closed steps of a thread end; ``gaps``: a gap before a step without a request ends one."""
        # A partial training step is left out: it ended long before, but arrives only now, at the end of the run.
        known = (steps.phase != TRAIN) | (steps.counted > 0)
        steps = StepRows(*(column[known] for column in steps))
        if not len(steps.phase):
            return []
        ended = []
        loaders = names.loader(steps.loader)
        change = (np.diff(steps.phase, prepend=-1) != 0) | (np.diff(loaders, prepend=-1) != 0)
        gap_counts = (steps.wait_ns > 0) | (steps.loader < 0) | gaps
        change[1:] |= (steps.started_ns[1:] > steps.ended_ns[:-1]) & gap_counts[1:]
        # Not ``started_ns``: the iterator of a pass is part of its first step, and may be created long before.
        starts_ns = steps.ended_ns - steps.duration_ns
        starts = np.flatnonzero(change)
        for start, stop in zip(starts.tolist(), [*starts[1:].tolist(), len(change)], strict=True):
            phase, loader = int(steps.phase[start]), names.loaders.names[loaders[start]]
            begun_ns, ended_ns = int(starts_ns[start]), int(steps.ended_ns[stop - 1])
            running, batches = self._open.get(thread), stop - start
            same = running and running[:2] == (PHASES[phase], loader)
            if running and same and not (gap_counts[start] and steps.started_ns[start] > running.ended_ns):
                begun_ns, batches = running.started_ns, running.batches + batches
            else:
                ended += self.close(thread)
            if phase != TRAIN:
                self._open[thread] = EvalPass(PHASES[phase], loader, begun_ns, ended_ns, batches)
        return ended

    def close(self, thread: str | None = None) -> list[EvalPass]:
        """Ends the running pass of a thread, if it has one; None: of every thread."""
        threads = list(self._open) if thread is None else [thread]
        ended = [self._open.pop(each) for each in threads if each in self._open]
        for each_pass in ended:
            number = self.loaders.setdefault(each_pass.loader, len(self.loaders))
            self.durations.grow(len(self.loaders))
            self.durations.add([number], [each_pass.ended_ns - each_pass.started_ns])
        return ended


RECENT = 8
"""Most captures that the summary lists."""


class CaptureTotals:
    """Counts captures for metrics and summary."""

    def __init__(self) -> None:
        self.active = False
        self.counts: Counter[tuple[str, str]] = Counter()
        self.durations = Histograms(size=len(PROFILER_TRIGGER.values))
        self.bytes = 0
        self.recent: deque[Capture] = deque(maxlen=RECENT)
        self.newest: Capture | None = None
        """The last capture that wrote a trace file."""

    def add(self, capture: Capture) -> None:
        """Counts a finished capture."""
        self.recent.append(capture)
        self.counts[capture.trigger, capture.error] += 1
        if capture.file:
            self.bytes, self.newest = capture.bytes, capture
            self.durations.add(
                [PROFILER_TRIGGER.values.index(capture.trigger)], [int(capture.seconds * NS_PER_S)]
            )

    def documents(self) -> list[dict[str, Any]]:
        """Returns the last captures for the summary, oldest first."""
        return [
            {
                "file": capture.file or None, "trigger": capture.trigger, "steps": list(capture.steps),
                "problem": capture.problem, "finding": capture.finding,
            }
            for capture in self.recent
        ]  # fmt: skip

    def of_trigger(self) -> Mapping[tuple[str, str], int]:
        """Returns captures by (trigger, error); 0 for triggers without any."""
        return {**dict.fromkeys(((trigger, "") for trigger in PROFILER_TRIGGER.values), 0), **self.counts}
