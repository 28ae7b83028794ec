"""Checkpoints, epochs, evaluations, stalls and captures of a run."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from enum import Enum
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from otel_train.accounting.types import TRAIN, Activity, ClosedSteps, StageCalls, StepRows
from otel_train.aggregation.histogram import Histograms
from otel_train.catalog import PHASES
from otel_train.datamodel import NS_PER_S, TRIGGERS, Capture
from otel_train.recording.events import Ending, Op, SourceKind

if TYPE_CHECKING:
    from otel_train.aggregation.counters import ReclaimedTime
    from otel_train.aggregation.series_names import SeriesNames


class Checkpoints:
    """Counts checkpoints. ``last_ns`` and ``interval_s`` are of successful ones; 0 while there is none.

    ``interval_s`` is the longest of the last three: one save on demand between two others is no new rhythm. Saves
    without a step between them, such as of the last and the best model, are one checkpoint.
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
        """Counts the checkpoints among ended calls, and yields the interval of each, and whether it failed.

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
"""The same where the steps are so long that so many of them exceed the threshold in an unknown activity."""

UNKNOWN_FACTOR = 6
"""Stall threshold in an activity that has not ended before, as a multiple of the least threshold; also the upper bound
between training steps, unless they are long."""

KNOWN_FACTOR = 2
"""Least stall threshold in an activity that has ended before, as a multiple of the least threshold."""

LONGEST_FACTOR = 3
"""Stall threshold in an evaluation or checkpoint, as a multiple of its longest silence so far."""

PAUSE_FACTOR = 2
"""Stall threshold between training steps, as a multiple of the longest pause that ended."""

OUTSIDE_NS = 24 * 3600 * 10**9
"""Threshold of a program whose loops have ended, where silence is expected. Alert rules compare with this value."""


class StallContext(Enum):
    """What the run does during a silence."""

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
        """When the current stall passed its threshold; 0 without a stall. It began with the silence before."""
        self.quiet_ns = 0
        """Time without progress, as of the last check."""
        self.others_ns = 0
        """Largest stall threshold of ranks that this one may wait for."""
        self.events: Counter[str] = Counter()
        self._least_ns = int(after_s * NS_PER_S)
        self.own_ns = self._least_ns
        """Stall threshold of what this rank does itself."""
        self._doing = StallContext.TRAINING
        self._longest_ns: dict[StallContext, int] = {}
        self._reclaimed = reclaimed

    @property
    def threshold_ns(self) -> int:
        """Current stall threshold."""
        return OUTSIDE_NS if self.outside else max(self.own_ns, self.others_ns)

    @property
    def patience_ns(self) -> int:
        """How long other ranks may wait for this one before it counts as a stall."""
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
        waited = self._doing is StallContext.TRAINING and self.others_ns > self.own_ns
        if silent_ns > self._longest_ns.get(self._doing, 0) and not waited:
            self._longest_ns[self._doing] = silent_ns
        self.last_ns = max(self.last_ns, at_ns)

    def check(self, now_ns: int, median_step_ns: int, *, doing: StallContext = StallContext.TRAINING) -> bool:
        """Returns whether a stall has just begun. The median is 0 if unknown."""
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
            if not median_step_ns:  # few steps: the next ones may take, and compile, as long as the first
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
    """Groups the evaluation steps of each thread into passes. A pass ends when another phase or loader follows."""

    def __init__(self) -> None:
        self.durations = Histograms()
        self.loaders: dict[str, int] = {}
        """By name, its series of ``durations``."""
        self._open: dict[str, EvalPass] = {}
        """By thread."""

    def feed(
        self, steps: StepRows, names: SeriesNames, thread: str = "", *, gaps: bool = False
    ) -> list[EvalPass]:
        """Returns the passes that newly closed steps of a thread end; ``gaps``: so does time between two steps."""
        # A partial step is known at the end of the run, before the last batch of an evaluation, and ended long before.
        known = (steps.phase != TRAIN) | (steps.counted > 0)
        steps = StepRows(*(column[known] for column in steps))
        if not len(steps.phase):
            return []
        over = []
        loaders = names.loader(steps.loader)
        change = (np.diff(steps.phase, prepend=-1) != 0) | (np.diff(loaders, prepend=-1) != 0)
        if gaps:
            change[1:] |= steps.started_ns[1:] > steps.ended_ns[:-1]
        starts = np.flatnonzero(change)
        for start, stop in zip(starts.tolist(), [*starts[1:].tolist(), len(change)], strict=True):
            phase, loader = int(steps.phase[start]), names.loaders.names[loaders[start]]
            begun_ns, ended_ns = int(steps.started_ns[start]), int(steps.ended_ns[stop - 1])
            before, batches = self._open.get(thread), stop - start
            if before and before[:2] == (PHASES[phase], loader) and not (gaps and begun_ns > before.ended_ns):
                begun_ns, batches = before.started_ns, before.batches + batches
            else:
                over += self.close(thread)
            if phase != TRAIN:
                self._open[thread] = EvalPass(PHASES[phase], loader, begun_ns, ended_ns, batches)
        return over

    def close(self, thread: str | None = None) -> list[EvalPass]:
        """Ends the open pass of a thread, or of every one, if there is one."""
        threads = list(self._open) if thread is None else [thread]
        over = [self._open.pop(each) for each in threads if each in self._open]
        for done in over:
            number = self.loaders.setdefault(done.loader, len(self.loaders))
            self.durations.grow(len(self.loaders))
            self.durations.add([number], [done.ended_ns - done.started_ns])
        return over


RECENT = 8
"""Captures listed in the summary."""


class CaptureTotals:
    """Counts captures for metrics and summary."""

    def __init__(self) -> None:
        self.active = False
        self.counts: Counter[tuple[str, str]] = Counter()
        self.durations = Histograms(size=len(TRIGGERS))
        self.bytes = 0
        self.recent: deque[Capture] = deque(maxlen=RECENT)
        self.newest: Capture | None = None
        """The last one with a file."""

    def add(self, capture: Capture) -> None:
        """Counts a finished capture."""
        self.recent.append(capture)
        self.counts[capture.trigger, capture.error] += 1
        if capture.file:
            self.bytes, self.newest = capture.bytes, capture
            self.durations.add([TRIGGERS.index(capture.trigger)], [int(capture.seconds * NS_PER_S)])

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
        return {**dict.fromkeys(((trigger, "") for trigger in TRIGGERS), 0), **self.counts}


REMEMBERED_EPOCHS = 256
"""Epochs whose boundaries are kept."""


class EpochBoundary(NamedTuple):
    """The end of an epoch (None for none), the beginning of one, or both; ``running`` is the epoch from there on."""

    at_ns: int
    ended: int | None
    running: int


class _End(NamedTuple):
    """The end of a pass: its time, and whether the loader was exhausted rather than abandoned."""

    at_ns: int
    exhausted: bool


_EXHAUSTED = (Ending.EPOCH_END, Ending.SHORT, Ending.STREAMING_END)


class EpochTracker:
    """Finds the epochs of the training thread: as marked, else by the passes over the training loaders.

    One rule: an epoch ends when every loader that gave it a training batch has ended a pass in it, and one of them gives
    a batch of a new pass. Its end is the last of those ends. So

    - of loaders used in turn, or drawn by weight until all are exhausted, the last one exhausted ends the epoch;
    - ``zip`` ends it with the shortest, because the iterators of the others are disposed of;
    - a loader that restarts each time it is exhausted does not: the longest other loader ends the epoch;
    - an abandoned pass counts as ended; a failed one as if its loader had not been used.

    If the loaders of an epoch are known, the next batch is not waited for. They are those of the previous epoch, or all
    that the program passed and that are not for evaluation. When each of them, and all others that were used, has ended a
    pass and one was exhausted, the epoch is over. An abandoned pass that is not repeated is no epoch, unless the previous
    epoch ended in the same way.
    """

    def __init__(self, names: SeriesNames) -> None:
        self.loaders: Callable[[], Mapping[str, Any]] = dict  # Any: LoaderFacts
        self._names = names
        self._found: deque[EpochBoundary] = deque(maxlen=REMEMBERED_EPOCHS)
        self._evaluated: set[int] = set()  # loaders that gave batches in another phase
        self._marked = False
        self._open: int | None = None  # the epoch that was marked and is not over
        self._running = 1
        self._since_ns = -1  # the epoch before ended then
        self._before: set[int] = set()  # its loaders
        self._broken_off = False  # none of them was exhausted in it
        self._first_ns: dict[int, int] = {}  # by loader of this epoch, when it gave the first training batch
        self._over: dict[int, _End] = {}  # by loader of this epoch, its first end in it
        self._ended: dict[int, _End] = {}  # by loader, its last end

    def take(self, closed: ClosedSteps) -> list[EpochBoundary]:
        """Returns the epoch boundaries in closed steps, in time order."""
        found = [*self._marks(closed), *self._passes(closed)]
        self._found += found
        return found

    def at(self, at_ns: int) -> int:
        """Returns the epoch at an instant; of one before the first mark, the one that was marked first."""
        if self._is_over() and at_ns >= self._over_ns():
            return self._running + 1
        running = (boundary.running for boundary in reversed(self._found) if boundary.at_ns <= at_ns)
        first = self._found[0] if self._found else EpochBoundary(0, None, self._running)
        return next(running, first.running if first.ended is None else first.ended)

    def close(self) -> EpochBoundary:
        """Returns the boundary at the end of the run, which ends the last epoch."""
        if self._is_over():
            return EpochBoundary(self._over_ns(), self._running, self._running)
        return EpochBoundary(0, self._open, self._running)

    def _marks(self, closed: ClosedSteps) -> Iterator[EpochBoundary]:
        """Boundaries marked by the program; once there is one, passes no longer count."""
        for at_ns, op, payload in closed.said[closed.said[:, 1] != Op.REPORT].tolist():
            self._marked = True
            broken = op == Op.EPOCH_END and payload
            ended = None if broken else self._open
            self._open = payload if op == Op.EPOCH else None
            self._running = payload if op == Op.EPOCH else self._running
            yield EpochBoundary(at_ns, ended, self._running)

    def _passes(self, closed: ClosedSteps) -> Iterator[EpochBoundary]:
        """Boundaries found by the passes over training loaders."""
        if self._marked:
            return
        trained = closed.batches[:, 1] == TRAIN
        self._evaluated.update(np.unique(closed.batches[~trained, 0]).tolist())
        batches = closed.batches[trained]
        batches = batches[np.argsort(batches[:, 3], kind="stable")]
        endings = closed.endings[np.argsort(closed.endings[:, 2], kind="stable")]
        parts = np.split(batches, np.searchsorted(batches[:, 3], endings[:, 2], side="right"))
        yield from self._used(parts[0])
        for (source, why, at_ns), later in zip(endings.tolist(), parts[1:], strict=True):
            yield from self._stopped(source, why, at_ns)
            yield from self._used(later)

    def _used(self, batches: np.ndarray) -> Iterator[EpochBoundary]:
        """Handles training batches of loaders, in time order."""
        for at_ns, source in self._first_of_passes(batches):
            if self._all_over() and source in self._over and at_ns > self._over[source].at_ns:
                yield self._boundary()
            if at_ns > self._since_ns and source not in self._first_ns:
                self._first_ns[source] = at_ns
                # It is prefetched, and recorded after the end of its pass.
                if source in self._ended and self._ended[source].at_ns >= at_ns:
                    self._over[source] = self._ended[source]
                    yield from self._boundary_if_known()

    def _first_of_passes(self, batches: np.ndarray) -> list[tuple[int, int]]:
        """Times of each loader's first batch and of the first after the end of its last pass, in order."""
        found = set()
        for source in np.unique(batches[:, 0]).tolist():
            times = batches[batches[:, 0] == source, 3]
            ended_ns = self._ended[source].at_ns if source in self._ended else -1
            after = int(np.searchsorted(times, ended_ns, side="right"))
            found |= {(at_ns, source) for at_ns in times[[0, min(after, len(times) - 1)]].tolist()}
        return sorted(found)

    def _stopped(self, source: int, why: int, at_ns: int) -> Iterator[EpochBoundary]:
        """Handles the end of a pass over a loader."""
        if why == Ending.ERROR:
            self._first_ns.pop(source, None)
            self._over.pop(source, None)
        else:
            self._ended[source] = _End(at_ns, why in _EXHAUSTED)
            if source in self._first_ns:
                self._over.setdefault(source, self._ended[source])
        yield from self._boundary_if_known()

    def _boundary_if_known(self) -> Iterator[EpochBoundary]:
        if self._all_over() and self._any_exhausted() and self._are_all():
            yield self._boundary()

    def _are_all(self) -> bool:
        """Returns whether no further loader is expected in this epoch."""
        if self._before:
            return self._before <= self._over.keys()
        names, facts = self._names, self.loaders()
        used = {names.sources[source].name for source in self._over}
        if not all(name in facts and facts[name].given for name in used):
            return False  # further loaders may be found later
        known = names.table
        for source in np.flatnonzero(names.kinds == SourceKind.DATA).tolist():
            evaluates = source in self._evaluated or max(known.declared[source], known.named[source]) > TRAIN
            if names.sources[source].name not in used and not evaluates:
                return False
        return True

    def _is_over(self) -> bool:
        """Returns whether the running epoch is over, unless one more loader takes part in it."""
        return not self._marked and self._all_over() and (self._any_exhausted() or self._broken_off)

    def _all_over(self) -> bool:
        return bool(self._first_ns) and self._over.keys() == self._first_ns.keys()

    def _any_exhausted(self) -> bool:
        return any(end.exhausted for end in self._over.values())

    def _over_ns(self) -> int:
        return max(end.at_ns for end in self._over.values())

    def _boundary(self) -> EpochBoundary:
        self._since_ns, self._before = self._over_ns(), set(self._over)
        self._broken_off = not self._any_exhausted()
        self._first_ns, self._over = {}, {}
        self._running += 1
        return EpochBoundary(self._since_ns, self._running - 1, self._running)
