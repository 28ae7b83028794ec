"""Everything that has been counted since the session began, by series."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from otel_train.accounting.types import NO_PHASE, PHASES, Activity
from otel_train.aggregation.compile_counters import Recompiled
from otel_train.aggregation.histogram import Histograms
from otel_train.aggregation.loader_counters import LoaderTotals
from otel_train.catalog import STEP_BOUNDS
from otel_train.clock import NS_PER_S
from otel_train.records import Outcomes, Pace

if TYPE_CHECKING:
    from collections.abc import Callable

    from otel_train.accounting.types import ClosedSteps, StageCalls, StageTimes, StepRows
    from otel_train.aggregation.series_names import Key, Names

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
        breathe: called between heavy columns.
    """

    def __init__(self, names: Names, *, breathe: Callable[[], None] = lambda: None) -> None:
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
        self._breathe = breathe

    def add(self, settled: ClosedSteps, *, ledger: bool) -> None:
        """Count what was settled. ``ledger``: the thread's time is the run's time."""
        self._add_times(settled.times)
        if ledger:
            self.activity_ns += settled.activity_ns
        self._breathe()
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
        self.stages.add(series, ended.inclusive_ns, breathe=self._breathe)
        if ended.failed.any():
            self.failed += np.bincount(series, weights=ended.failed, minlength=len(self.failed)).astype(
                np.int64
            )

    def add_device(self, series: np.ndarray, device_ns: np.ndarray) -> None:
        """Count device time of occurrences: int64[n] each."""
        self.device.grow(len(self.names.keys))
        self.device.add(series, device_ns, breathe=self._breathe)

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
        self.steps.add(numbers, steps.duration_ns[counted], breathe=self._breathe)
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
        twin = Totals(self.names, breathe=self._breathe)
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
        self._breathe()
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
