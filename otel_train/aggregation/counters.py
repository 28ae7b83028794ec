"""Cumulative counters and histograms, per phase, loader and stage."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from otel_train.accounting.types import NO_PHASE, PHASES, Activity
from otel_train.aggregation.histogram import Histograms
from otel_train.catalog import STEP_BOUNDS
from otel_train.datamodel import NS_PER_S, Outcomes, Pace
from otel_train.recording.events import Ending

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from otel_train.accounting.types import ClosedSteps, StageCalls, StageTimes, StepRows
    from otel_train.aggregation.series_names import Key, Names
    from otel_train.datamodel import Compile, DeviceTimes
    from otel_train.recording.events import Instrumented


class Transfers:
    """Adds up what every source of transfers moved, also where the time of it belongs to another stage."""

    def __init__(self) -> None:
        self._bytes: dict[int, int] = {}

    def add(self, moved: np.ndarray) -> None:
        """Take in transfers: int64[n, 2], as in ``ClosedSteps``."""
        for source, size in moved.tolist():
            self._bytes[source] = self._bytes.get(source, 0) + size

    def to_devices(self, sources: Sequence[Instrumented]) -> dict[str, int]:
        """Bytes by device, such as ``cuda:0``. What was pinned or moved by hand names no device."""
        return {sources[n].name: moved for n, moved in self._bytes.items() if ":" in sources[n].name}


MOST_HELD = 8192
"""Occurrences, and device times, held back at most while they wait for their counterpart."""

_MOST_RECENT = 1024  # of the last turn or two: spans of kept steps ask for them


class _Calls(NamedTuple):
    """Settled occurrences without device time yet."""

    source: np.ndarray
    started_ns: np.ndarray
    ended_ns: np.ndarray
    series: np.ndarray


class _Times(NamedTuple):
    """Device times without an occurrence yet."""

    source: np.ndarray
    begun_ns: np.ndarray
    ended_ns: np.ndarray
    device_ns: np.ndarray


class DeviceAccount:
    """Gives every occurrence the device time that was taken inside it.

    An occurrence gets at most one device time and a device time goes to at most one occurrence, whatever the
    order in which they come. One without a counterpart is left out: not measured is not zero.

    Args:
        totals: takes the device time of every occurrence that has one.
    """

    def __init__(self, totals: Totals) -> None:
        self.measured = False
        """Whether device time is taken at all."""
        self._totals = totals
        self._calls = _Calls(*_empty(4))
        self._times = _Times(*_empty(4))
        self._recent = _Times(*_empty(4))
        self._until_ns = 0

    def tell(self, times: DeviceTimes | None) -> None:
        """Take what a device did; None where nothing is measured."""
        if times is None:
            return
        self.measured = True
        self._totals.pace = self._totals.pace.plus(times.pace)
        self._until_ns = max(self._until_ns, times.until_ns)
        self._times = _Times(*_joined(self._times, _Times(*times[:4])))
        self._match()

    def settle(self, ended: StageCalls, until_ns: int) -> None:
        """Take occurrences of the thread whose device time is taken.

        Args:
            ended: the occurrences.
            until_ns: of all that ended before, nothing more will come.
        """
        if not self.measured:
            return
        series = self._totals.names.series(ended.source, ended.loader, ended.phase)
        new = _Calls(ended.source, ended.started_ns, ended.started_ns + ended.inclusive_ns, series)
        self._calls = _Calls(*_joined(self._calls, new))
        self._match()
        self._times = _Times(*_kept(self._times, self._times.ended_ns >= until_ns))

    def of(self, source: int, started_ns: int) -> int | None:
        """Device time of an occurrence settled lately, in nanoseconds; None when it is not known (yet)."""
        found = (self._recent.source == source) & (self._recent.begun_ns == started_ns)
        places = np.flatnonzero(found)
        return int(self._recent.device_ns[places[-1]]) if len(places) else None

    def _match(self) -> None:
        calls, times = self._calls, self._times
        taken, given = np.zeros(len(calls.source), dtype=bool), np.zeros(len(times.source), dtype=bool)
        for source in set(times.source.tolist()).intersection(calls.source.tolist()):
            self._match_source(source, taken, given)
        self._calls = _Calls(*_kept(calls, ~taken & (calls.ended_ns >= self._until_ns)))
        self._times = _Times(*_kept(times, ~given))

    def _match_source(self, source: int, taken: np.ndarray, given: np.ndarray) -> None:
        calls, times = self._calls, self._times
        mine = np.flatnonzero(calls.source == source)
        mine = mine[np.argsort(calls.started_ns[mine], kind="stable")]
        told = np.flatnonzero(times.source == source)
        told = told[np.argsort(times.begun_ns[told], kind="stable")]
        place = np.searchsorted(calls.started_ns[mine], times.begun_ns[told], side="right") - 1
        inside = (place >= 0) & (times.ended_ns[told] <= calls.ended_ns[mine[place]])
        told, place = told[inside], place[inside]
        given[told] = True
        # Of several inside one occurrence (a model that calls itself) the first is the occurrence's own.
        first = np.flatnonzero(np.diff(place, prepend=-1))
        told, whose = told[first], mine[place[first]]
        if not len(told):
            return
        taken[whose] = True
        self._totals.add_device(calls.series[whose], times.device_ns[told])
        pairs = _Times(
            calls.source[whose], calls.started_ns[whose], calls.ended_ns[whose], times.device_ns[told]
        )
        self._recent = _Times(*(column[-_MOST_RECENT:] for column in _joined(self._recent, pairs)))


def _empty(columns: int) -> list[np.ndarray]:
    return [np.zeros(0, dtype=np.int64) for _ in range(columns)]


def _joined(held: tuple[np.ndarray, ...], new: tuple[np.ndarray, ...]) -> list[np.ndarray]:
    return [np.concatenate(pair)[-MOST_HELD:] for pair in zip(held, new, strict=True)]


def _kept(columns: tuple[np.ndarray, ...], keep: np.ndarray) -> list[np.ndarray]:
    return [column[keep] for column in columns]


_REASONS: dict[int, str] = {
    Ending.UNKNOWN: "epoch_end",
    Ending.EPOCH_END: "epoch_end",
    Ending.SHORT: "short",
    Ending.STREAMING_END: "streaming_end",
    Ending.ERROR: "error",
}
REMEMBERED_STOPS = 256
"""Of those the time is known."""

_UNCLAIMED = 8192
"""Builds of a loader that wait for the epoch their batches belong to: as many as one slice of edges can claim."""


class Start(NamedTuple):
    """What beginning its passes has cost a loader.

    Attributes:
        passes: those that gave a batch.
        making_s: seconds to make their iterators, workers included.
        waiting_s: seconds to wait for their first batches.
    """

    passes: int = 0
    making_s: float = 0.0
    waiting_s: float = 0.0

    @property
    def total_s(self) -> float:
        """Both together."""
        return self.making_s + self.waiting_s


class LoaderTotals:
    """Counts and histograms by loader name. One thread owns it."""

    def __init__(self) -> None:
        self.builds = Histograms()
        """Time of a worker for a batch."""
        self.start_ups = Histograms()
        """Time from the ask for an iterator to its first batch."""
        self.lost: dict[str, int] = {}
        """Builds that were not read in time."""
        self.endings: dict[tuple[str, str], int] = {}
        """By loader and reason."""
        self.starts: dict[tuple[str, str], Start] = {}
        """By loader and phase."""
        self._unclaimed: dict[str, deque[int]] = {}
        self._stops: deque[tuple[str, int]] = deque(maxlen=REMEMBERED_STOPS)
        self.names: list[str] = []
        self._numbers: dict[str, int] = {}

    def add_builds(self, loader: str, build_ns: np.ndarray, missed: int) -> None:
        """Count what workers have built."""
        number = self.number(loader)
        self.builds.add(np.full(len(build_ns), number), build_ns)
        self.lost[loader] = self.lost.get(loader, 0) + missed
        self._unclaimed.setdefault(loader, deque(maxlen=_UNCLAIMED)).extend(build_ns.tolist())

    def claim(self, loader: str, most: int) -> np.ndarray:
        """The oldest builds that nobody has claimed: int64[n], n at most ``most``. Batches come in the same order."""
        waiting = self._unclaimed.get(loader, deque[int]())
        return np.array([waiting.popleft() for _ in range(min(most, len(waiting)))], dtype=np.int64)

    def claim_all(self) -> None:
        """What was built up to now is nobody's."""
        self._unclaimed.clear()

    def add_starts(self, batches: np.ndarray, names: Names) -> None:
        """Count passes that gave their first batch, among batches: int64[n, 6] as in ``ClosedSteps``."""
        for source, phase, _, _, making_ns, waiting_ns in batches[batches[:, 4] >= 0].tolist():
            loader = names.sources[source].name
            key = (loader, PHASES[phase] if phase < len(PHASES) else "")
            had = self.starts.get(key, Start())
            self.starts[key] = Start(
                had.passes + 1, had.making_s + making_ns / NS_PER_S, had.waiting_s + waiting_ns / NS_PER_S
            )
            self.start_ups.add([self.number(loader)], [making_ns + waiting_ns])

    def add_endings(self, endings: np.ndarray, names: Names) -> list[tuple[str, str, int]]:
        """Count endings: int64[n, 3] as in ``ClosedSteps``; loader and reason of each, and when it was."""
        told = [
            (
                names.sources[source].name,
                _REASONS.get(why, "epoch_end"),
                at_ns,
            )  # of a torn edge it is not known
            for source, why, at_ns in endings.tolist()
            if why != Ending.DISPOSED
        ]
        self._stops += [
            (names.sources[source].name, at_ns)
            for source, why, at_ns in endings.tolist()
            if why not in (Ending.ERROR, Ending.DISPOSED)
        ]
        for loader, reason, _ in told:
            self.endings[loader, reason] = self.endings.get((loader, reason), 0) + 1
        return told

    def number(self, loader: str) -> int:
        """Series of a loader in the histograms."""
        if loader not in self._numbers:
            self._numbers[loader] = len(self.names)
            self.names.append(loader)
            self.builds.grow(len(self.names))
            self.start_ups.grow(len(self.names))
        return self._numbers[loader]

    def known(self, loader: str) -> int | None:
        """The same for a loader of which something has been counted."""
        return self._numbers.get(loader)

    def stops(self, loader: str) -> int:
        """Passes that came to an end."""
        return sum(n for (name, reason), n in self.endings.items() if name == loader and reason != "error")

    def stops_before(self, loader: str, at_ns: int) -> int:
        """The same up to an instant, of which the last ``REMEMBERED_STOPS`` are known."""
        return self.stops(loader) - sum(name == loader and when > at_ns for name, when in self._stops)

    def copy(self) -> LoaderTotals:
        """The same counts, independent from now on."""
        twin = LoaderTotals()
        twin.builds, twin.start_ups = self.builds.copy(), self.start_ups.copy()
        twin.lost, twin.endings, twin.starts = dict(self.lost), dict(self.endings), dict(self.starts)
        twin.names, twin._numbers = list(self.names), dict(self._numbers)
        return twin

    def since(self, earlier: LoaderTotals) -> LoaderTotals:
        """The window between an earlier copy and now."""
        window = self.copy()
        window.builds = self.builds.minus(earlier.builds)
        window.start_ups = self.start_ups.minus(earlier.start_ups)
        window.lost = {name: n - earlier.lost.get(name, 0) for name, n in self.lost.items()}
        window.endings = {key: n - earlier.endings.get(key, 0) for key, n in self.endings.items()}
        for key, had in earlier.starts.items():
            now = self.starts[key]
            window.starts[key] = Start(
                now.passes - had.passes, now.making_s - had.making_s, now.waiting_s - had.waiting_s
            )
        return window


class Reclaimed:
    """Intervals that belong to an activity of their own, whatever stage was open: stalls, compiling.

    Stages keep their time; only the ledger is told otherwise, to the nanosecond, and adds up as before.
    """

    def __init__(self) -> None:
        self._intervals: list[tuple[Activity, int, int]] = []

    def add(self, activity: Activity, begun_ns: int, ended_ns: int) -> None:
        """From ``begun_ns`` to ``ended_ns`` it was ``activity``. Where two overlap the first one told wins."""
        for _, begun, ended in sorted(self._intervals, key=lambda interval: interval[1]):
            if begun < ended_ns and begun_ns < ended:
                if begun_ns < begun:
                    self._intervals.append((activity, begun_ns, begun))
                begun_ns = ended
        if begun_ns < ended_ns:
            self._intervals.append((activity, begun_ns, ended_ns))

    def within(self, begun_ns: int, ended_ns: int) -> Sequence[tuple[Activity, int]]:
        """Activities that own a part of an interval, and nanoseconds of it."""
        if not self._intervals:
            return ()
        parts = ((a, min(ended, ended_ns) - max(begun, begun_ns)) for a, begun, ended in self._intervals)
        return [(activity, ns) for activity, ns in parts if ns > 0]

    def forget(self, until_ns: int) -> None:
        """Everything up to ``until_ns`` has been settled."""
        self._intervals = [interval for interval in self._intervals if interval[2] > until_ns]


JAX_STEP = ("stage", "make_step")
"""What is missing, as ``unobserved`` names it, where a program does not say what its step is."""

_NO_STEP = "no training step was seen. "
_ADD_STEP = (
    "Add `step = otel_train.jax.make_step(step)` around the compiled function that updates the parameters"
)
_ADD_LOADER = ", and iterate `otel_train.watch(loader)` to see the waits for batches"
_EXAMPLE = "docs/howto/jax.md has an example"


class JaxCompiles(NamedTuple):
    """What JAX has compiled.

    Attributes:
        functions: how many compilations there were.
        total_ns: their time together.
        longest: the function of the program's whose compilation took longest; "" if none is known.
        longest_ns: how long that took.
        since_ns: when the first one began.
    """

    functions: int = 0
    total_ns: int = 0
    longest: str = ""
    longest_ns: int = 0
    since_ns: int = 0

    def plus(self, begun_ns: int, ended_ns: int, function: str) -> JaxCompiles:
        """One more compilation, of ``function``; "" for one that is not the program's."""
        lasted_ns = ended_ns - begun_ns
        longer = bool(function) and lasted_ns > self.longest_ns
        return JaxCompiles(
            self.functions + 1,
            self.total_ns + lasted_ns,
            function if longer else self.longest,
            lasted_ns if longer else self.longest_ns,
            self.since_ns or begun_ns,
        )

    def told(self, now_ns: int) -> str:
        """What has been seen, up to now: half a sentence."""
        if not self.functions:
            return "JAX is imported"
        functions = "1 function" if self.functions == 1 else f"{self.functions} functions"
        longest = f" (longest: `{self.longest}`)" if self.longest else ""
        ran_s = max(0, now_ns - self.since_ns) / NS_PER_S
        return (
            f"JAX compiled {functions} in {self.total_ns / NS_PER_S:.1f} s{longest} and the program has run for "
            f"{ran_s:.1f} s since"
        )


def without_step(seen: str, *, loader: bool) -> str:
    """What is said of a program of JAX in which no training step was seen.

    Args:
        seen: what was, as ``JaxCompiles.told`` says it.
        loader: say how the loader is seen, too.
    """
    return f"{seen}; {_NO_STEP}{_ADD_STEP}{_ADD_LOADER if loader else ''}. {_EXAMPLE}"


def what_to_add(reason: str) -> str:
    """The part of such a text that says what to do."""
    return reason.partition(_NO_STEP)[2]


class Recompiled(NamedTuple):
    """Runs of compilers on code that they had compiled before.

    Attributes:
        count: of them.
        total_ns: what they took together.
        by_jax: how many of them were JAX's.
    """

    count: int = 0  # type: ignore[assignment]  # hides tuple.count, as StageTotals does
    total_ns: int = 0
    by_jax: int = 0

    def plus(self, compiled: Compile) -> Recompiled:
        """One more."""
        lasted_ns, jax = compiled.ended_ns - compiled.begun_ns, compiled.compiler == "jax"
        return Recompiled(self.count + 1, self.total_ns + lasted_ns, self.by_jax + jax)

    def minus(self, earlier: Recompiled) -> Recompiled:
        """What came after ``earlier``."""
        return Recompiled(*(a - b for a, b in zip(self, earlier, strict=True)))


class Compiles:
    """Counts them, and gives their time to the ledger.

    Args:
        reclaimed: told of their time.
        totals: take what was compiled again.

    Attributes:
        judged: of some it is known whether they compiled again.
        jax: those of JAX.
    """

    def __init__(self, reclaimed: Reclaimed, totals: Totals) -> None:
        self.durations = Histograms(size=1)
        self.judged = False
        self.jax = JaxCompiles()
        self._reclaimed = reclaimed
        self._totals = totals

    @property
    def again(self) -> int:
        """Those that compiled again."""
        return self._totals.recompiled.count

    def tell(self, compiles: Iterable[Compile]) -> list[Compile]:
        """Take in what compilers have done; which of it had been done before."""
        told = list(compiles)
        for each in told:
            self.durations.add([0], [each.ended_ns - each.begun_ns])
            self._reclaimed.add(Activity.COMPILE, each.begun_ns, each.ended_ns)
            self.judged |= each.again is not None
            if each.compiler == "jax":
                self.jax = self.jax.plus(each.begun_ns, each.ended_ns, each.function)
        again = [each for each in told if each.again]
        for each in again:
            self._totals.recompiled = self._totals.recompiled.plus(each)
        return again


_PHASES = len(PHASES) + 1


class DeviceTotals(NamedTuple):
    """What a device did for the occurrences of one row, in seconds.

    Attributes:
        measured: occurrences that the figures are of; there may be more.
        seconds: their device time.
        p50: median.
        p99: 99th percentile.
    """

    measured: int
    seconds: float
    p50: float
    p99: float


class StageTotals(NamedTuple):
    """One row of the stage table: durations in seconds, None where there is no figure.

    Attributes:
        key: what the row is about.
        count: occurrences.
        failed: those that ended by an exception.
        inclusive_s: time in which the stage was open: that of the occurrences, of asks that gave no batch, of the
            making of iterators, and of what had not ended.
        self_s: time in which this stage was the innermost.
        quantiles: minimum, median, 95th, 99th percentile, maximum.
        device: the same occurrences on the device's clock, as far as they were measured there.
        called_s: time of the occurrences, with what ran inside them: what the histogram shows.
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
    """Counts, sums and histograms. One thread owns it.

    Args:
        names: tables of sources; ``learn`` must have been called for every source counted here.
        yield_gil: called between heavy columns.
    """

    def __init__(self, names: Names, *, yield_gil: Callable[[], None] = lambda: None) -> None:
        self.names = names
        self.stages = Histograms()
        self.steps = Histograms(STEP_BOUNDS)
        self.device = Histograms()
        """Device time of the occurrences that have one, by the series of ``stages``."""
        self.activity_ns = np.zeros(len(Activity), dtype=np.int64)
        self.self_ns = np.zeros(0, dtype=np.int64)
        self.inclusive_ns = np.zeros(0, dtype=np.int64)
        self.loader_ns: dict[tuple[int, int], int] = {}
        """Time of the batches that each loader took part in, by loader and phase."""
        self.failed = np.zeros(0, dtype=np.int64)
        self.step_pairs: list[tuple[int, int]] = []
        self.step_counts = np.zeros((0,), dtype=np.int64)
        self.partial_steps = np.zeros(_PHASES, dtype=np.int64)
        self.batches: dict[tuple[int, int], int] = {}
        self.samples: dict[tuple[int, int], int] = {}
        self.loaders = LoaderTotals()
        self.updates = 0
        self.skipped_updates = 0
        self.recompiled = Recompiled()
        self.pace = Pace()
        """How far the device ran behind the host."""
        self.on_device = Outcomes()
        """Updates of optimizers that skip on their device, and what is known of them by now."""
        self._step_numbers: dict[tuple[int, int], int] = {}
        self._yield_gil = yield_gil

    def add(self, settled: ClosedSteps, *, ledger: bool) -> None:
        """Count what was settled. ``ledger``: the thread's time is the run's time."""
        self._add_times(settled.times)
        if ledger:
            self.activity_ns += settled.activity_ns
        self._yield_gil()
        self.add_occurrences(settled.occurrences)
        self._add_steps(settled.steps)
        self.add_batches(settled.batches)
        loaders = self.names.loader(settled.loader_ns[:, 0]) * _PHASES + settled.loader_ns[:, 1]
        for value in set(loaders.tolist()):
            pair = divmod(value, _PHASES)
            self.loader_ns[pair] = self.loader_ns.get(pair, 0) + int(
                settled.loader_ns[loaders == value, 2].sum()
            )
        self.loaders.add_starts(settled.batches, self.names)
        self.updates += settled.updates
        self.skipped_updates += settled.skipped_updates

    def add_beside(self, settled: ClosedSteps) -> None:
        """Count what a thread did that only reads loaders: its waits are nobody's step, phase or activity."""
        nowhere = np.full(len(settled.times.source), NO_PHASE, dtype=np.int64)
        self._add_times(settled.times._replace(phase=nowhere))
        calls = settled.occurrences
        self.add_occurrences(calls._replace(phase=np.full(len(calls.source), NO_PHASE, dtype=np.int64)))
        self.add_batches(settled.batches)

    def _add_times(self, times: StageTimes) -> None:
        series = self.names.series(times.source, times.loader, times.phase)
        self._grow()
        np.add.at(self.self_ns, series, times.self_ns)
        np.add.at(self.inclusive_ns, series, times.inclusive_ns)

    def tell(self, outcomes: Outcomes) -> None:
        """Take in what devices have told of their updates."""
        self.on_device = Outcomes(*(a + b for a, b in zip(self.on_device, outcomes, strict=True)))

    @property
    def skips(self) -> int | None:
        """Updates that a scaler skipped; None while only a device knows."""
        unknown = self.on_device.made and not self.on_device.known
        return None if unknown else self.skipped_updates + self.on_device.skipped

    def add_operations(self, ended: StageCalls) -> None:
        """Count calls timed by token: they run beside everything else, in no stage's self time."""
        self.add_occurrences(ended)
        if len(ended.source):
            series = self.names.series(ended.source, ended.loader, ended.phase)
            np.add.at(self.inclusive_ns, series, ended.inclusive_ns)

    def add_occurrences(self, ended: StageCalls) -> None:
        """Count calls that ended."""
        if not len(ended.source):
            return
        series = self.names.series(ended.source, ended.loader, ended.phase)
        self._grow()
        self.stages.add(series, ended.inclusive_ns, yield_gil=self._yield_gil)
        if ended.failed.any():
            self.failed += np.bincount(series, weights=ended.failed, minlength=len(self.failed)).astype(
                np.int64
            )

    def add_device(self, series: np.ndarray, device_ns: np.ndarray) -> None:
        """Count device time of occurrences: int64[n] each."""
        self.device.grow(len(self.names.keys))
        self.device.add(series, device_ns, yield_gil=self._yield_gil)

    def _add_steps(self, steps: StepRows) -> None:
        counted = steps.counted > 0
        partial = steps.phase[~counted]
        self.partial_steps += np.bincount(partial, minlength=_PHASES)
        if not counted.any():
            return
        loader = self.names.loader(steps.loader[counted])
        flat = loader * _PHASES + steps.phase[counted]
        numbers = np.empty(len(flat), dtype=np.int64)
        for value in set(flat.tolist()):
            numbers[flat == value] = self._step_number(*divmod(value, _PHASES))
        self.steps.add(numbers, steps.duration_ns[counted], yield_gil=self._yield_gil)
        self.step_counts += np.bincount(numbers, minlength=len(self.step_counts))

    def _step_number(self, loader: int, phase: int) -> int:
        pair = (loader, phase)
        if pair not in self._step_numbers:
            self._step_numbers[pair] = len(self.step_pairs)
            self.step_pairs.append(pair)
            self.steps.grow(len(self.step_pairs))
            self.step_counts = np.append(self.step_counts, 0)
        return self._step_numbers[pair]

    def add_batches(self, batches: np.ndarray) -> None:
        """Count batches: int64[n, 6] as in ``ClosedSteps``."""
        if not len(batches):
            return
        flat = self.names.loader(batches[:, 0]) * _PHASES + batches[:, 1]
        for value in set(flat.tolist()):
            mine = flat == value
            pair = divmod(value, _PHASES)
            samples = batches[mine, 2]
            self.batches[pair] = self.batches.get(pair, 0) + int(mine.sum())
            if (samples >= 0).any():
                self.samples[pair] = self.samples.get(pair, 0) + int(samples[samples >= 0].sum())

    def _grow(self) -> None:
        more = len(self.names.keys) - len(self.self_ns)
        if more > 0:
            self.stages.grow(len(self.names.keys))
            self.self_ns = np.append(self.self_ns, np.zeros(more, dtype=np.int64))
            self.inclusive_ns = np.append(self.inclusive_ns, np.zeros(more, dtype=np.int64))
            self.failed = np.append(self.failed, np.zeros(more, dtype=np.int64))

    def since(self, earlier: Totals) -> Totals:
        """The window between an earlier copy and now."""
        window = self.copy()
        window.stages = self.stages.minus(earlier.stages)
        window.steps = self.steps.minus(earlier.steps)
        window.device = self.device.minus(earlier.device)
        window.activity_ns = self.activity_ns - earlier.activity_ns
        window.self_ns[: len(earlier.self_ns)] -= earlier.self_ns
        window.inclusive_ns[: len(earlier.inclusive_ns)] -= earlier.inclusive_ns
        window.failed[: len(earlier.failed)] -= earlier.failed
        window.step_counts[: len(earlier.step_counts)] -= earlier.step_counts
        window.partial_steps -= earlier.partial_steps
        window.batches = _less(self.batches, earlier.batches)
        window.samples = _less(self.samples, earlier.samples)
        window.loader_ns = _less(self.loader_ns, earlier.loader_ns)
        window.loaders = self.loaders.since(earlier.loaders)
        window.updates -= earlier.updates
        window.skipped_updates -= earlier.skipped_updates
        window.pace = self.pace.minus(earlier.pace)
        window.recompiled = self.recompiled.minus(earlier.recompiled)
        window.on_device = Outcomes(*(a - b for a, b in zip(self.on_device, earlier.on_device, strict=True)))
        return window

    def copy(self) -> Totals:
        """The same counts, independent from now on; the names are shared."""
        twin = Totals(self.names, yield_gil=self._yield_gil)
        twin.stages, twin.steps, twin.device = self.stages.copy(), self.steps.copy(), self.device.copy()
        for name in ("activity_ns", "self_ns", "inclusive_ns", "failed", "step_counts", "partial_steps"):
            setattr(twin, name, getattr(self, name).copy())
        twin.step_pairs, twin._step_numbers = list(self.step_pairs), dict(self._step_numbers)
        twin.batches, twin.samples = dict(self.batches), dict(self.samples)
        twin.loader_ns = dict(self.loader_ns)
        twin.loaders = self.loaders.copy()
        twin.updates, twin.skipped_updates = self.updates, self.skipped_updates
        twin.on_device, twin.pace, twin.recompiled = self.on_device, self.pace, self.recompiled
        return twin

    def rows(self) -> list[StageTotals]:
        """The stage table, training first, in the order in which a step meets its stages."""
        rows = [self._row(series, key) for series, key in enumerate(self.names.keys[: len(self.self_ns)])]
        order = {name: place for place, name in enumerate((*self.names.stages.names, ""))}
        phases = {name: place for place, name in enumerate((*PHASES, ""))}
        return sorted(
            (row for row in rows if row.count or row.self_s or row.inclusive_s),
            key=lambda row: (phases[row.key.phase], row.key.loader, order[row.key.stage], row.key.model),
        )

    def _row(self, series: int, key: Key) -> StageTotals:
        self._yield_gil()
        count = self.stages.count(series)
        quantiles = tuple(self.stages.quantile(series, q) for q in (0, 0.5, 0.95, 0.99, 1)) if count else None
        called = self.stages.point(series).sum if count else 0.0
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
            count, device.point(series).sum, device.quantile(series, 0.5), device.quantile(series, 0.99)
        )

    def phase_s(self, phase: str) -> float:
        """Seconds of a phase: the self time of all its stages."""
        mine = [n for n, key in enumerate(self.names.keys[: len(self.self_ns)]) if key.phase == phase]
        return int(self.self_ns[mine].sum()) / NS_PER_S

    def train_s_by_loader(self) -> dict[str, tuple[float, float]]:
        """Seconds of phase train by loader: waiting for its batches, and everything else."""
        found: dict[str, tuple[float, float]] = {}
        for key, self_ns in zip(self.names.keys, self.self_ns.tolist(), strict=False):
            if key.phase == PHASES[0]:
                data_s, rest_s = found.get(key.loader, (0.0, 0.0))
                waits = key.stage == "data"
                found[key.loader] = (
                    data_s + waits * self_ns / NS_PER_S,
                    rest_s + (not waits) * self_ns / NS_PER_S,
                )
        return found

    def steps_by_phase(self) -> dict[str, int]:
        """Counted steps of every phase that has any."""
        found: dict[str, int] = {}
        for (_, phase), count in zip(self.step_pairs, self.step_counts.tolist(), strict=True):
            found[PHASES[phase]] = found.get(PHASES[phase], 0) + count
        return found

    def by_loader(self, counts: dict[tuple[int, int], int]) -> dict[str, int]:
        """``batches`` or ``samples`` by loader name, all phases together."""
        found: dict[str, int] = {}
        for (loader, _), count in counts.items():
            name = self.names.loaders.names[loader]
            found[name] = found.get(name, 0) + count
        return found


def _less(now: dict[tuple[int, int], int], before: dict[tuple[int, int], int]) -> dict[tuple[int, int], int]:
    return {pair: count - before.get(pair, 0) for pair, count in now.items() if count > before.get(pair, 0)}
