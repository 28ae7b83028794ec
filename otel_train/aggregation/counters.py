"""Cumulative counters and histograms, per phase, loader and stage."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from operator import itemgetter
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from otel_train.accounting.types import NO_PHASE, TRAIN, Activity
from otel_train.aggregation.histogram import Histograms
from otel_train.catalog import PHASES, STEP_BOUNDS
from otel_train.datamodel import NS_PER_S, Compile, DeviceTimes, Outcomes, Pace
from otel_train.recording.events import Ending, Instrumented

if TYPE_CHECKING:
    from otel_train.accounting.types import ClosedSteps, StageCalls, StageTimes, StepRows
    from otel_train.aggregation.series_names import Key, SeriesNames


class Transfers:
    """Adds up bytes per transfer source, including transfers timed as part of another stage."""

    def __init__(self) -> None:
        self._bytes: Counter[int] = Counter()

    def add(self, moved: np.ndarray) -> None:
        """Adds transfers: rows of ``ClosedSteps.moved``."""
        for source, size in moved.tolist():
            self._bytes[source] += size

    def to_devices(self, sources: Sequence[Instrumented]) -> dict[str, int]:
        """Returns bytes by device, such as ``cuda:0``. Pinned memory and manual transfers name no device and are left out."""
        return {sources[n].name: moved for n, moved in self._bytes.items() if ":" in sources[n].name}


MOST_HELD = 8192
"""Most calls, and most device times, that wait for their counterpart; the oldest are dropped."""

_MOST_RECENT = 1024  # matched device times, for spans of sampled steps: those of the last poll or two


class _Calls(NamedTuple):
    """Calls that no device time is matched to yet."""

    source: np.ndarray
    started_ns: np.ndarray
    ended_ns: np.ndarray
    series: np.ndarray


class _DeviceTimes(NamedTuple):
    """Device times that no call is matched to yet."""

    source: np.ndarray
    begun_ns: np.ndarray
    ended_ns: np.ndarray
    device_ns: np.ndarray


class DeviceAccount:
    """Matches device times with the calls that they were measured in.

    A call gets at most one device time and a device time goes to at most one call, whatever the order of arrival. A call
    or device time without a counterpart is left out, because a call that was not measured has not taken 0 s.
    """

    def __init__(self, totals: Totals) -> None:
        self.measured = False
        """Whether device time is measured at all."""
        self._totals = totals
        self._calls = _Calls(*_empty(4))
        self._times = _DeviceTimes(*_empty(4))
        self._recent = _DeviceTimes(*_empty(4))
        self._until_ns = 0

    def add(self, times: DeviceTimes | None) -> None:
        """Adds device times; None if nothing is measured."""
        if times is None:
            return
        self.measured = True
        self._totals.pace = self._totals.pace.plus(times.pace)
        self._until_ns = max(self._until_ns, times.until_ns)
        self._times = _DeviceTimes(*_joined(self._times, _DeviceTimes(*times[:4])))
        self._match()

    def add_calls(self, ended: StageCalls, until_ns: int) -> None:
        """Adds ended calls of the main thread, whose device time is measured. Now all that ended before ``until_ns`` are known."""
        if not self.measured:
            return
        series = self._totals.names.series(ended.source, ended.loader, ended.phase)
        new = _Calls(ended.source, ended.started_ns, ended.started_ns + ended.inclusive_ns, series)
        self._calls = _Calls(*_joined(self._calls, new))
        self._match()
        self._times = _DeviceTimes(*_kept(self._times, self._times.ended_ns >= until_ns))

    def of(self, source: int, started_ns: int) -> int | None:
        """Returns the device time of a recent call in nanoseconds; None if it is not known (yet)."""
        found = (self._recent.source == source) & (self._recent.begun_ns == started_ns)
        places = np.flatnonzero(found)
        return int(self._recent.device_ns[places[-1]]) if len(places) else None

    def _match(self) -> None:
        calls, times = self._calls, self._times
        taken, given = np.zeros(len(calls.source), dtype=bool), np.zeros(len(times.source), dtype=bool)
        for source in set(times.source.tolist()).intersection(calls.source.tolist()):
            self._match_source(source, taken, given)
        self._calls = _Calls(*_kept(calls, ~taken & (calls.ended_ns >= self._until_ns)))
        self._times = _DeviceTimes(*_kept(times, ~given))

    def _match_source(self, source: int, taken: np.ndarray, given: np.ndarray) -> None:
        calls, times = self._calls, self._times
        mine = np.flatnonzero(calls.source == source)
        mine = mine[np.argsort(calls.started_ns[mine], kind="stable")]
        timed = np.flatnonzero(times.source == source)
        timed = timed[np.argsort(times.begun_ns[timed], kind="stable")]
        place = np.searchsorted(calls.started_ns[mine], times.begun_ns[timed], side="right") - 1
        inside = (place >= 0) & (times.ended_ns[timed] <= calls.ended_ns[mine[place]])
        timed, place = timed[inside], place[inside]
        given[timed] = True
        # If several device times lie inside one call (of a model that calls itself), the first one is that of the call.
        first = np.flatnonzero(np.diff(place, prepend=-1))
        timed, owner = timed[first], mine[place[first]]
        if not len(timed):
            return
        taken[owner] = True
        self._totals.add_device(calls.series[owner], times.device_ns[timed])
        pairs = _DeviceTimes(
            calls.source[owner], calls.started_ns[owner], calls.ended_ns[owner], times.device_ns[timed]
        )
        self._recent = _DeviceTimes(*(column[-_MOST_RECENT:] for column in _joined(self._recent, pairs)))


def _empty(columns: int) -> list[np.ndarray]:
    return [np.zeros(0, dtype=np.int64) for _ in range(columns)]


def _joined(held: tuple[np.ndarray, ...], new: tuple[np.ndarray, ...]) -> list[np.ndarray]:
    return [np.concatenate(pair)[-MOST_HELD:] for pair in zip(held, new, strict=True)]


def _kept(columns: tuple[np.ndarray, ...], keep: np.ndarray) -> list[np.ndarray]:
    return [column[keep] for column in columns]


_REASONS: dict[int, str] = {
    Ending.SHORT: "short",
    Ending.STREAMING_END: "streaming_end",
    Ending.ERROR: "error",
}
"""Of endings other than ``epoch_end``."""

_MOST_PENDING_BUILDS = 8192
"""Most build times of a loader that wait for the epoch of their batches: as many as a slice of events has batches at most."""


class LoaderStart(NamedTuple):
    """Start-up cost of the passes over a loader that returned at least one batch.

    Attributes:
        passes: number of passes.
        making_s: seconds to create their iterators, workers included.
        waiting_s: seconds of waiting for their first batches.
        longest_s: the largest sum of both in one pass, in seconds.
    """

    passes: int = 0
    making_s: float = 0.0
    waiting_s: float = 0.0
    longest_s: float = 0.0

    def minus(self, earlier: LoaderStart) -> LoaderStart:
        """Returns the difference to ``earlier``; ``longest_s`` is 0 if no pass since then exceeded the earlier ones."""
        longest_s = self.longest_s if self.longest_s > earlier.longest_s else 0.0
        return LoaderStart(
            self.passes - earlier.passes, self.making_s - earlier.making_s, self.waiting_s - earlier.waiting_s,
            longest_s,
        )  # fmt: skip


class LoaderTotals:
    """Counts and histograms by loader name. Not thread-safe.

    Attributes:
        builds: time that a worker took to build a batch.
        start_ups: time from the request for an iterator to its first batch.
        lost: build times that were overwritten before they were read, by loader.
        endings: passes that exhausted the loader or failed, by loader and reason.
        passes: passes that ended without an error, because the loader was exhausted or the iterator disposed of, by loader.
        starts: start-up cost, by loader and phase.
        numbers: series of both histograms, by loader.
    """

    def __init__(self) -> None:
        self.builds = Histograms()
        self.start_ups = Histograms()
        self.lost: Counter[str] = Counter()
        self.endings: Counter[tuple[str, str]] = Counter()
        self.passes: Counter[str] = Counter()
        self.starts: dict[tuple[str, str], LoaderStart] = {}
        self.numbers: dict[str, int] = {}
        self._pending_builds: dict[str, deque[int]] = {}

    def add_builds(self, loader: str, build_ns: np.ndarray, missed: int) -> None:
        """Counts batches built by workers, and ``missed`` ones whose build time was overwritten."""
        number = self.number(loader)
        self.builds.add(np.full(len(build_ns), number), build_ns)
        self.lost[loader] += missed
        self._pending_builds.setdefault(loader, deque(maxlen=_MOST_PENDING_BUILDS)).extend(build_ns.tolist())

    def take_builds(self, loader: str, most: int) -> np.ndarray:
        """Removes and returns the oldest pending build times, in ns, at most ``most``. Their batches arrive in the same order."""
        waiting = self._pending_builds.get(loader, deque[int]())
        return np.array([waiting.popleft() for _ in range(min(most, len(waiting)))], dtype=np.int64)

    def drop_builds(self) -> None:
        """Discards the pending build times of all loaders."""
        self._pending_builds.clear()

    def add_starts(self, batches: np.ndarray, names: SeriesNames) -> None:
        """Counts the passes whose first batch is in ``batches``, rows of ``ClosedSteps.batches``."""
        for source, phase, _, _, making_ns, waiting_ns in batches[batches[:, 4] >= 0].tolist():
            loader = names.sources[source].name
            key = (loader, PHASES[phase] if phase < len(PHASES) else "")
            making_s, waiting_s = making_ns / NS_PER_S, waiting_ns / NS_PER_S
            had = self.starts.get(key, LoaderStart())
            self.starts[key] = LoaderStart(
                had.passes + 1, had.making_s + making_s, had.waiting_s + waiting_s,
                max(had.longest_s, making_s + waiting_s),
            )  # fmt: skip
            self.start_ups.add([self.number(loader)], [making_ns + waiting_ns])

    def add_endings(self, endings: np.ndarray, names: SeriesNames) -> list[tuple[str, str, int]]:
        """Counts ends of passes, rows of ``ClosedSteps.endings``; returns loader, reason and time of those not disposed of."""
        counted = []
        for source, why, at_ns in endings.tolist():
            loader = names.sources[source].name
            self.passes[loader] += why != Ending.ERROR
            if why != Ending.DISPOSED:
                reason = _REASONS.get(why, "epoch_end")
                counted.append((loader, reason, at_ns))
                self.endings[loader, reason] += 1
        return counted

    def number(self, loader: str) -> int:
        """Returns the histogram series of a loader, adding it if needed."""
        number = self.numbers.setdefault(loader, len(self.numbers))
        self.builds.grow(len(self.numbers))
        self.start_ups.grow(len(self.numbers))
        return number

    def since(self, earlier: LoaderTotals) -> LoaderTotals:
        """Returns the difference to an earlier copy."""
        window = deepcopy(self)
        window.builds = self.builds.minus(earlier.builds)
        window.start_ups = self.start_ups.minus(earlier.start_ups)
        window.lost.subtract(earlier.lost)
        window.endings.subtract(earlier.endings)
        window.passes.subtract(earlier.passes)
        window.starts |= {key: self.starts[key].minus(had) for key, had in earlier.starts.items()}
        return window


MOST_RECLAIMED = 16_384
"""Most intervals that ``ReclaimedTime`` keeps; the oldest are dropped: a program without a training thread forgets none."""


class ReclaimedTime:
    """Intervals of stalls and compilations, which count as these activities whatever stage was open.

    Stages keep their time; only the run's time by activity changes, and its sum stays exact to the nanosecond.
    """

    def __init__(self) -> None:
        self._intervals: list[
            tuple[int, int, Activity]
        ] = []  # begin, end; none overlap, in the order of time

    def add(self, activity: Activity, begun_ns: int, ended_ns: int) -> None:
        """Assigns an interval to ``activity``. Where two intervals overlap, the one added first applies."""
        if begun_ns >= ended_ns:
            return
        touched = self._touching(begun_ns, ended_ns)
        known = self._intervals[touched]
        edges = [begun_ns, *(edge for interval in known for edge in interval[:2]), ended_ns]
        gaps = [
            (begin, end, activity) for begin, end in zip(edges[::2], edges[1::2], strict=True) if begin < end
        ]
        joined: list[tuple[int, int, Activity]] = []
        for begin, end, what in sorted(known + gaps):
            if joined and joined[-1][1:] == (begin, what):
                joined[-1] = (joined[-1][0], end, what)
            else:
                joined.append((begin, end, what))
        self._intervals[touched] = joined
        del self._intervals[:-MOST_RECLAIMED]

    def within(self, begun_ns: int, ended_ns: int) -> Sequence[tuple[Activity, int]]:
        """Returns the activities assigned within an interval, and the nanoseconds of each."""
        if not self._intervals:
            return ()
        touched = self._intervals[self._touching(begun_ns, ended_ns)]
        parts = ((what, min(end, ended_ns) - max(begin, begun_ns)) for begin, end, what in touched)
        return [(activity, ns) for activity, ns in parts if ns > 0]

    def forget(self, until_ns: int) -> None:
        """Drops intervals that end at or before ``until_ns``."""
        del self._intervals[: bisect_right(self._intervals, until_ns, key=itemgetter(1))]

    def _touching(self, begun_ns: int, ended_ns: int) -> slice:
        """Returns the places of the intervals that overlap or adjoin one."""
        first = bisect_left(self._intervals, begun_ns, key=itemgetter(1))
        return slice(first, bisect_right(self._intervals, ended_ns, key=itemgetter(0)))


MOST_TURNS = 256
"""Most intervals of other threads, and of the leading thread outside of batches, that ``WorkBeside`` keeps for a match."""


class _Work(NamedTuple):
    """An interval of a thread with ``ns`` nanoseconds of an ``Activity``, of which ``wait_ns`` were waits for training data."""

    thread: str
    begun_ns: int
    ended_ns: int
    activity: int
    ns: int = 0
    wait_ns: int = 0


class WorkBeside:
    """Finds the work of other threads in time that the leading thread spends outside of batches, for threads that take turns."""

    def __init__(self) -> None:
        self._outside: deque[tuple[int, int, int]] = deque(maxlen=MOST_TURNS)
        """Intervals of the leading thread: first and last instant, and nanoseconds of ``Activity.OUTSIDE``."""
        self._work: deque[_Work] = deque(maxlen=MOST_TURNS)

    def lead(self) -> None:
        """Discards the time outside of batches, because another thread becomes the leading one."""
        self._outside.clear()

    def add_outside(self, rows: list[list[int]]) -> None:
        """Adds time of the leading thread: from rows of ``ClosedSteps.apart``, those outside of batches."""
        self._outside.extend(
            (begun, ended, ns) for begun, ended, what, ns in rows if what == Activity.OUTSIDE
        )

    def add(self, thread: str, closed: ClosedSteps) -> None:
        """Adds closed steps of a thread that is not the leading one, or that another thread may replace as the leading one."""
        steps = closed.steps
        rows = (steps.started_ns, steps.ended_ns, steps.phase, steps.duration_ns, steps.wait_ns)
        for begun, ended, phase, ns, wait_ns in zip(*(column.tolist() for column in rows), strict=True):
            activity = Activity.PRODUCTIVE if phase == TRAIN else Activity.EVAL
            work = _Work(thread, begun, ended, activity)
            last = self._work[-1] if self._work else None
            if last and (last.thread, last.ended_ns, last.activity) == (thread, begun, activity):
                work = self._work.pop()._replace(ended_ns=ended)
            waited_ns = work.wait_ns + (wait_ns if phase == TRAIN else 0)
            self._work.append(work._replace(ns=work.ns + ns, wait_ns=waited_ns))
        for begun, ended, activity, ns in closed.apart.tolist():
            if activity not in (Activity.INIT, Activity.OUTSIDE):
                self._work.append(_Work(thread, begun, ended, activity, ns))

    def take(self, leading: str, led_ns: int, others_ns: int) -> np.ndarray:
        """Returns the work of other threads while the leading thread was outside of batches: nanoseconds by ``Activity``.

        Drops intervals that no later interval can overlap.

        Args:
            leading: label of the leading thread.
            led_ns: up to when the time of the leading thread is known.
            others_ns: up to when the time of all other threads is known.
        """
        found = np.zeros(len(Activity), dtype=np.int64)
        known, self._work = self._work, deque(maxlen=MOST_TURNS)
        for work in known:
            spent_ns = 0
            if work.thread != leading:
                spent_ns = min(work.ns, self._cut(work.begun_ns, work.ended_ns))
            waited_ns = spent_ns * work.wait_ns // max(work.ns, 1)
            found[Activity.DATA_WAIT] += waited_ns
            found[work.activity] += spent_ns - waited_ns
            if work.ended_ns > led_ns:
                rest = work._replace(ns=work.ns - spent_ns, wait_ns=work.wait_ns - waited_ns)
                self._work.append(rest)
        self._outside = deque((idle for idle in self._outside if idle[1] > others_ns), MOST_TURNS)
        return found

    def _cut(self, begun_ns: int, ended_ns: int) -> int:
        """Removes an interval from the time outside of batches; returns the nanoseconds of such time that it had."""
        kept, taken_ns = [], 0
        for begun, ended, ns in self._outside:
            first, last = max(begun, begun_ns), min(ended, ended_ns)
            if first >= last:
                kept.append((begun, ended, ns))
                continue
            for start, stop in ((begun, first), (last, ended)):
                rest_ns = ns * (stop - start) // (ended - begun)
                taken_ns -= rest_ns
                if start < stop:
                    kept.append((start, stop, rest_ns))
            taken_ns += ns
        self._outside = deque(kept, MOST_TURNS)
        return taken_ns


JAX_STEP = ("stage", "make_step")
"""Key in the instrumentation gaps of a JAX program that does not mark its step."""

_NO_STEP = "no training step was seen. "
_ADD_STEP = (
    "Add `step = otel_train.jax.make_step(step)` around the compiled function that updates the parameters"
)
_ADD_LOADER = ", and iterate `otel_train.watch(loader)` to see the waits for batches"
_EXAMPLE = "docs/howto/jax.md has an example"


class JaxCompiles(NamedTuple):
    """Totals of JAX compilations; ``longest`` is the program's function with the longest one, ``since_ns`` the start of the first."""

    functions: int = 0
    total_ns: int = 0
    longest: str = ""
    longest_ns: int = 0
    since_ns: int = 0

    def plus(self, begun_ns: int, ended_ns: int, function: str) -> JaxCompiles:
        """Returns the totals with one more compilation of ``function``; "" for one of JAX's own."""
        lasted_ns = ended_ns - begun_ns
        longer = bool(function) and lasted_ns > self.longest_ns
        return JaxCompiles(
            self.functions + 1,
            self.total_ns + lasted_ns,
            function if longer else self.longest,
            lasted_ns if longer else self.longest_ns,
            self.since_ns or begun_ns,
        )

    def describe(self, now_ns: int) -> str:
        """Returns what has been compiled until ``now_ns``, as the beginning of a message (see ``missing_step_reason``)."""
        if not self.functions:
            return "JAX is imported"
        functions = "1 function" if self.functions == 1 else f"{self.functions} functions"
        longest = f" (longest: `{self.longest}`)" if self.longest else ""
        ran_s = max(0, now_ns - self.since_ns) / NS_PER_S
        return (
            f"JAX compiled {functions} in {self.total_ns / NS_PER_S:.1f} s{longest} and the program has run for "
            f"{ran_s:.1f} s since"
        )


def missing_step_reason(seen: str, *, loader: bool) -> str:
    """Returns the message for a JAX program without a training step; it begins with ``seen``, from ``JaxCompiles.describe``."""
    return f"{seen}; {_NO_STEP}{_ADD_STEP}{_ADD_LOADER if loader else ''}. {_EXAMPLE}"


class Recompiled(NamedTuple):
    """Compilations of code that had been compiled before: number, time, and how many of them were JAX's."""

    count: int = 0  # type: ignore[assignment]  # hides tuple.count, as StageTotals does
    total_ns: int = 0
    by_jax: int = 0

    def plus(self, compiled: Compile) -> Recompiled:
        """Returns the totals with one more recompilation."""
        lasted_ns, jax = compiled.ended_ns - compiled.begun_ns, compiled.compiler == "jax"
        return Recompiled(self.count + 1, self.total_ns + lasted_ns, self.by_jax + jax)

    def minus(self, earlier: Recompiled) -> Recompiled:
        """Returns the difference to ``earlier``."""
        return Recompiled(*(a - b for a, b in zip(self, earlier, strict=True)))


class Compiles:
    """Counts compilations and assigns their time to activity ``compile``.

    ``judged``: whether at least one compiler reported if it had compiled the same code before.
    """

    def __init__(self, reclaimed: ReclaimedTime, totals: Totals) -> None:
        self.durations = Histograms(size=1)
        self.judged = False
        self.jax = JaxCompiles()
        self._reclaimed = reclaimed
        self._totals = totals

    def add(self, compiles: Iterable[Compile]) -> list[Compile]:
        """Adds compilations; returns those that were recompilations."""
        again = []
        for each in compiles:
            self.durations.add([0], [each.ended_ns - each.begun_ns])
            self._reclaimed.add(Activity.COMPILE, each.begun_ns, each.ended_ns)
            self.judged |= each.again is not None
            if each.compiler == "jax":
                self.jax = self.jax.plus(each.begun_ns, each.ended_ns, each.function)
            if each.again:
                self._totals.recompiled = self._totals.recompiled.plus(each)
                again.append(each)
        return again


_PHASES = len(PHASES) + 1


class DeviceTotals(NamedTuple):
    """Device time of one row of the stage table, in seconds, over the ``measured`` calls."""

    measured: int
    seconds: float
    p50: float
    p99: float


class StageTotals(NamedTuple):
    """One row of the stage table: durations in seconds, None if not measured.

    Attributes:
        key: stage, loader, phase and model.
        count: calls.
        failed: calls that raised.
        inclusive_s: time in which the stage was open: its calls, requests that returned no batch, the creation of
            iterators, and calls that have not ended.
        self_s: time in which this stage was the innermost.
        quantiles: minimum, median, 95th, 99th percentile, maximum.
        device: device time of the same calls, where measured.
        called_s: time of the calls, with the stages inside them, as in the histogram.
    """

    key: Key
    count: int  # type: ignore[assignment]  # hides tuple.count
    failed: int
    inclusive_s: float
    self_s: float
    quantiles: tuple[float, float, float, float, float] | None
    device: DeviceTotals | None = None
    called_s: float = 0.0


class Totals:
    """Counters, sums and histograms. Not thread-safe. ``names`` must know every source that is counted."""

    def __init__(self, names: SeriesNames) -> None:
        self.names = names
        self.stages = Histograms()
        self.steps = Histograms(STEP_BOUNDS)
        self.device = Histograms()  # with the series numbers of ``stages``
        self.activity_ns = np.zeros(len(Activity), dtype=np.int64)
        self._published_ns = self.activity_ns
        self._owed_ns = 0  # published time that the new leading thread reports again: not counted twice
        self.self_ns = np.zeros(0, dtype=np.int64)
        self.inclusive_ns = np.zeros(0, dtype=np.int64)
        # By loader and phase; the time is that of all batches that the loader took part in.
        self.loader_ns: Counter[tuple[int, int]] = Counter()
        self.batches: Counter[tuple[int, int]] = Counter()
        self.samples: Counter[tuple[int, int]] = Counter()
        self.other_after: Counter[int] = Counter()  # ns of training in no stage, by the source before
        self.failed = np.zeros(0, dtype=np.int64)
        self.step_pairs: dict[tuple[int, int], int] = {}  # series of ``steps``, by loader and phase
        self.step_counts = np.zeros((0,), dtype=np.int64)
        self.partial_steps = np.zeros(_PHASES, dtype=np.int64)
        self.loaders = LoaderTotals()
        self.updates = 0
        self.skipped_updates = 0
        self.recompiled = Recompiled()
        self.pace = Pace()
        self.on_device = Outcomes()
        self.cpu_wait_ns: int | None = None  # time of the main thread on a run queue of the kernel

    def add(self, closed: ClosedSteps, *, ledger: bool) -> None:
        """Counts closed steps of a thread; ``ledger``: it is the leading thread, whose time by activity is that of the run."""
        self._add_times(closed.times)
        if ledger:
            self.activity_ns = self.activity_ns + self._not_owed(closed.activity_ns)
        self.add_occurrences(closed.occurrences)
        self._add_steps(closed.steps)
        self.add_batches(closed.batches)
        for pair, mine in self._by_pair(closed.loader_ns[:, 0], closed.loader_ns[:, 1]):
            self.loader_ns[pair] += int(closed.loader_ns[mine, 2].sum())
        self.loaders.add_starts(closed.batches, self.names)
        for source, ns in closed.other_after.tolist():
            self.other_after[source] += ns
        self.updates += closed.updates
        self.skipped_updates += closed.skipped_updates

    def publish(self) -> np.ndarray:
        """Returns the time by activity for an export. From now on no activity falls below it, because counters never fall."""
        self._published_ns = self.activity_ns
        return self.activity_ns

    def take_over(self, activity_ns: np.ndarray) -> None:
        """Makes the time of another thread the time of the run, except for the part that is already published.

        Time that both threads spent on the same activity counts once. The rest of the published time stays; as much is left out
        of the other thread's time, in the order of ``Activity``. So the sum is the run's time, and no published value falls.
        """
        alike_ns = np.minimum(self._published_ns, activity_ns)
        self._owed_ns = int((self._published_ns - alike_ns).sum())
        self.activity_ns = self._published_ns + self._not_owed(activity_ns - alike_ns)

    def add_outside(self, ns: int) -> None:
        """Counts time after the end of the leading thread as ``Activity.OUTSIDE``."""
        self.activity_ns = self.activity_ns.copy()
        self.activity_ns[Activity.OUTSIDE] += ns

    def move_from_outside(self, spent_ns: np.ndarray) -> None:
        """Moves time from ``Activity.OUTSIDE`` to other activities, at most what is not published yet."""
        free_ns = int(self.activity_ns[Activity.OUTSIDE] - self._published_ns[Activity.OUTSIDE])
        moved_ns = np.diff(np.minimum(np.cumsum(spent_ns), free_ns), prepend=0)
        moved_ns[Activity.OUTSIDE] -= moved_ns.sum()
        self.activity_ns = self.activity_ns + moved_ns

    def _not_owed(self, spent_ns: np.ndarray) -> np.ndarray:
        """Returns time by activity without the part that is in ``_owed_ns``, which is left out of the first activities."""
        owed_ns = np.minimum(np.cumsum(spent_ns), self._owed_ns)
        self._owed_ns -= int(owed_ns[-1])
        free_ns: np.ndarray = spent_ns - np.diff(owed_ns, prepend=0)
        return free_ns

    def add_beside(self, closed: ClosedSteps) -> None:
        """Counts closed steps of a thread that only reads loaders: its waits belong to no step, phase or activity."""
        nowhere = np.full(len(closed.times.source), NO_PHASE, dtype=np.int64)
        self._add_times(closed.times._replace(phase=nowhere))
        calls = closed.occurrences
        self.add_occurrences(calls._replace(phase=np.full(len(calls.source), NO_PHASE, dtype=np.int64)))
        self.add_batches(closed.batches)

    def _add_times(self, times: StageTimes) -> None:
        series = self.names.series(times.source, times.loader, times.phase)
        self._grow()
        np.add.at(self.self_ns, series, times.self_ns)
        np.add.at(self.inclusive_ns, series, times.inclusive_ns)

    def add_outcomes(self, outcomes: Outcomes) -> None:
        """Adds outcomes of updates reported by devices."""
        self.on_device = Outcomes(*(a + b for a, b in zip(self.on_device, outcomes, strict=True)))

    @property
    def skips(self) -> int | None:
        """Updates skipped by a gradient scaler; None if some were made on the device and no result of them is known yet."""
        unknown = self.on_device.made and not self.on_device.known
        return None if unknown else self.skipped_updates + self.on_device.skipped

    def add_operations(self, ended: StageCalls) -> None:
        """Counts calls timed by token, which run concurrently with the stages and add to no stage's self time."""
        self.add_occurrences(ended)
        if len(ended.source):
            series = self.names.series(ended.source, ended.loader, ended.phase)
            np.add.at(self.inclusive_ns, series, ended.inclusive_ns)

    def add_occurrences(self, ended: StageCalls) -> None:
        """Counts calls that ended."""
        if not len(ended.source):
            return
        series = self.names.series(ended.source, ended.loader, ended.phase)
        self._grow()
        self.stages.add(series, ended.inclusive_ns)
        if ended.failed.any():
            self.failed += np.bincount(series, weights=ended.failed, minlength=len(self.failed)).astype(
                np.int64
            )

    def add_device(self, series: np.ndarray, device_ns: np.ndarray) -> None:
        """Counts device time of calls: series and nanoseconds, int64[n] each."""
        self.device.grow(len(self.names.keys))
        self.device.add(series, device_ns)

    def _add_steps(self, steps: StepRows) -> None:
        counted = steps.counted > 0
        partial = steps.phase[~counted]
        self.partial_steps += np.bincount(partial, minlength=_PHASES)
        if not counted.any():
            return
        numbers = np.empty(np.count_nonzero(counted), dtype=np.int64)
        for pair, mine in self._by_pair(steps.loader[counted], steps.phase[counted]):
            numbers[mine] = self._step_number(pair)
        self.steps.add(numbers, steps.duration_ns[counted])
        self.step_counts += np.bincount(numbers, minlength=len(self.step_counts))

    def _by_pair(self, source: np.ndarray, phase: np.ndarray) -> Iterator[tuple[tuple[int, int], np.ndarray]]:
        """Yields each pair of loader and phase, with a mask of its rows."""
        flat = self.names.loader(source) * _PHASES + phase
        for value in set(flat.tolist()):
            yield divmod(value, _PHASES), flat == value

    def _step_number(self, pair: tuple[int, int]) -> int:
        if pair not in self.step_pairs:
            self.step_pairs[pair] = len(self.step_pairs)
            self.steps.grow(len(self.step_pairs))
            self.step_counts = np.append(self.step_counts, 0)
        return self.step_pairs[pair]

    def add_batches(self, batches: np.ndarray) -> None:
        """Counts batches: rows of ``ClosedSteps.batches``."""
        for pair, mine in self._by_pair(batches[:, 0], batches[:, 1]):
            samples = batches[mine, 2]
            self.batches[pair] += len(samples)
            if (samples >= 0).any():
                self.samples[pair] += int(samples[samples >= 0].sum())

    def rated(self) -> list[tuple[int, int]]:
        """Returns the loaders and phases whose batches belong to steps.

        A loader that another thread reads is included only if the thread that runs the steps reads no loader in the same phase.
        Else that loader is the queue between the threads, and returns the same batches. Unknown before the first step of a phase.
        """
        asked = {phase for _, phase in self.loader_ns}
        unasked = {phase for _, phase in self.step_pairs} - asked
        pairs = [pair for pair in self.batches if pair[1] < len(PHASES)]
        return [pair for pair in pairs if pair in self.loader_ns or pair[1] in unasked]

    def _grow(self) -> None:
        more = len(self.names.keys) - len(self.self_ns)
        if more > 0:
            self.stages.grow(len(self.names.keys))
            self.self_ns = np.append(self.self_ns, np.zeros(more, dtype=np.int64))
            self.inclusive_ns = np.append(self.inclusive_ns, np.zeros(more, dtype=np.int64))
            self.failed = np.append(self.failed, np.zeros(more, dtype=np.int64))

    def since(self, earlier: Totals) -> Totals:
        """Returns the difference to an earlier copy."""
        window = self.copy()
        for name in ("stages", "steps", "device", "pace", "recompiled"):
            setattr(window, name, getattr(self, name).minus(getattr(earlier, name)))
        for name in ("activity_ns", "self_ns", "inclusive_ns", "failed", "step_counts", "partial_steps"):
            before = getattr(earlier, name)
            getattr(window, name)[: len(before)] -= before
        for name in ("batches", "samples", "loader_ns", "other_after"):
            setattr(window, name, getattr(self, name) - getattr(earlier, name))
        window.loaders = self.loaders.since(earlier.loaders)
        window.updates -= earlier.updates
        window.skipped_updates -= earlier.skipped_updates
        if window.cpu_wait_ns is not None:
            window.cpu_wait_ns -= earlier.cpu_wait_ns or 0
        window.on_device = Outcomes(*(a - b for a, b in zip(self.on_device, earlier.on_device, strict=True)))
        return window

    def copy(self) -> Totals:
        """Returns an independent copy that shares the names; publishes first, so that no time since the copy is negative."""
        self.publish()
        return deepcopy(self, {id(self.names): self.names})

    def rows(self) -> list[StageTotals]:
        """Returns the stage table, training first, stages in the order of a step."""
        rows = [self._row(series, key) for series, key in enumerate(self.names.keys[: len(self.self_ns)])]
        order = {name: place for place, name in enumerate((*self.names.stages.names, ""))}
        phases = {name: place for place, name in enumerate((*PHASES, ""))}
        return sorted(
            (row for row in rows if row.count or row.self_s or row.inclusive_s),
            key=lambda row: (phases[row.key.phase], row.key.loader, order[row.key.stage], row.key.model),
        )

    def _row(self, series: int, key: Key) -> StageTotals:
        count = self.stages.count(series)
        quantiles = tuple(self.stages.quantile(series, q) for q in (0, 0.5, 0.95, 0.99, 1)) if count else None
        called = self.stages.sum_s(series) if count else 0.0
        return StageTotals(
            key,
            count,
            int(self.failed[series]),
            int(self.inclusive_ns[series]) / NS_PER_S,
            int(self.self_ns[series]) / NS_PER_S,
            quantiles,  # type: ignore[arg-type]  # five by construction
            self._device_row(series),
            called,
        )

    def _device_row(self, series: int) -> DeviceTotals | None:
        device = self.device
        count = device.count(series) if series < len(device) else 0
        if not count:
            return None
        return DeviceTotals(
            count, device.sum_s(series), device.quantile(series, 0.5), device.quantile(series, 0.99)
        )

    def phase_s(self, phase: str) -> float:
        """Returns the seconds of a phase: the self time of all its stages."""
        mine = [n for n, key in enumerate(self.names.keys[: len(self.self_ns)]) if key.phase == phase]
        return int(self.self_ns[mine].sum()) / NS_PER_S

    def train_s_by_loader(self) -> dict[str, tuple[float, float]]:
        """Returns two values by loader, in seconds of phase train: waiting for its batches, and everything else."""
        found: dict[str, tuple[float, float]] = {}
        for key, self_ns in zip(self.names.keys, self.self_ns.tolist(), strict=False):
            if key.phase == PHASES[0]:
                data_s, rest_s = found.get(key.loader, (0.0, 0.0))
                spent_s, waits = self_ns / NS_PER_S, key.stage == "data"
                found[key.loader] = (data_s + spent_s, rest_s) if waits else (data_s, rest_s + spent_s)
        return found

    def steps_by_phase(self) -> dict[str, int]:
        """Returns the number of counted steps by phase, without phases that have none."""
        found: Counter[str] = Counter()
        for (_, phase), count in zip(self.step_pairs, self.step_counts.tolist(), strict=True):
            found[PHASES[phase]] += count
        return dict(found)

    def by_loader(self, counts: Mapping[tuple[int, int], int]) -> dict[str, int]:
        """Returns ``batches`` or ``samples`` by loader name, all phases together."""
        found: Counter[str] = Counter()
        for (loader, _), count in counts.items():
            found[self.names.loaders.names[loader]] += count
        return dict(found)
