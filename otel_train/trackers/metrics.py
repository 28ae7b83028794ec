"""Builds rows for trackers: flat names with values, per window of steps and per epoch."""

from __future__ import annotations

import logging
import re
from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from otel_train.accounting.types import EVAL, TRAIN, ClosedSteps
from otel_train.aggregation.histogram import Histograms
from otel_train.config.validation import words_of
from otel_train.datamodel import NS_PER_S
from otel_train.recording.events import Op, SourceKind

if TYPE_CHECKING:
    from otel_train.aggregation.counters import Totals
    from otel_train.aggregation.epochs import EpochBoundary
    from otel_train.aggregation.series_names import SeriesNames
    from otel_train.bottleneck.dataloader import LoaderFacts

    Memory = Callable[[Iterable[str], int], Mapping[str, float]]


_UNSAFE: Final = re.compile(r"[^A-Za-z0-9_.\-]")
_log = logging.getLogger("otel_train")


OPERATIONS: Final = ("data_batch_production", "loss_fn_computation", "make_step_total", "training_step")
"""Operations that are found in every program. A name of the program that equals one gets a number."""


class SafeNames:
    """Maps names to distinct names of letters, digits and ``_-.``, which all trackers accept."""

    def __init__(self) -> None:
        self._safe: dict[str, str] = {}
        self._warned = False

    def __call__(self, name: str) -> str:
        """Returns ``name`` with other characters as ``_``; ``_2``, ``_3``, ... are appended to a name in use, with one warning."""
        if name not in self._safe:
            self._safe[name] = self._new(name)
        return self._safe[name]

    def _new(self, name: str) -> str:
        plain = _UNSAFE.sub("_", name) or "_"
        used = {*OPERATIONS, *self._safe.values()}
        safe, number = plain, 1
        while safe in used:
            number += 1
            safe = f"{plain}_{number}"
        if number > 1 and not self._warned:
            self._warned = True
            _log.warning(
                "%r and another name both become %r in trackers: it is logged as %r. Rename it",
                name, plain, safe,
            )  # fmt: skip
        return safe


_PARTS: Final = {
    "timing": ("batch_load_time_ms", "batch_transform_time_ms"),
    "memory": ("memory_",),
}
"""Prefixes of keys in an epoch's row, by the value of ``throughput_metrics`` that selects them."""


def left_out(parts: str) -> tuple[str, ...]:
    """Returns the prefixes of keys that ``throughput_metrics`` does not select."""
    wanted = words_of(parts)
    return tuple(start for part, starts in _PARTS.items() if part not in wanted for start in starts)


def without(values: Mapping[str, float], starts: tuple[str, ...]) -> dict[str, float]:
    """Returns ``values`` without keys that have one of the prefixes, also after ``dl_<loader>/``."""
    return {key: value for key, value in values.items() if not key.rpartition("/")[2].startswith(starts)}


MS_PER_S = 1e3
_QUANTILES = {"p50": 0.5, "p95": 0.95, "p99": 0.99}


class EpochWindow:
    """Accumulates the values of an epoch's row: rates, times to load and to transform a batch, efficiency, memory.

    ``totals`` has the workers' build times; ``loaders`` returns facts of the known loaders; ``memory`` returns memory metrics for
    the names of the training loaders and the end of the epoch.
    """

    def __init__(
        self,
        totals: Totals,
        loaders: Callable[[], Mapping[str, LoaderFacts]],
        *,
        memory: Memory | None = None,
    ) -> None:
        self.safe = SafeNames()
        self._totals = totals
        self.loaders = loaders
        self._memory = memory
        self._device_before = totals.device.copy()
        self._begin()

    def _begin(self) -> None:
        self._loader_sums: defaultdict[str, _LoaderSums] = defaultdict(_LoaderSums)
        self._step_ns = self._work_ns = 0

    def add(self, part: ClosedStepsPart) -> None:
        """Adds calls, batches and steps that have ended."""
        self._step_ns += int(part.step_ns.sum())
        self._work_ns += int(part.work_ns.sum())
        for source, phase, ns, _ in part.loader_ns.tolist():
            if phase == TRAIN:
                self._loader_sums[self._name(source)].ns += ns
        train = part.batches[part.batches[:, 1] == TRAIN]
        for source in np.unique(train[:, 0]).tolist():
            name, samples = self._name(source), train[train[:, 0] == source, 2]
            loader = self._loader_sums[name]
            loader.batches += len(samples)
            loader.samples += int(samples[samples >= 0].sum())
            loader.has_unknown = loader.has_unknown or bool((samples < 0).any())
            # Each batch has one build time. Workers prefetch, so build times arrive before their batches.
            _add(
                loader.builds, self._totals.loaders.take_builds(name, loader.batches - loader.builds.count(0))
            )
        data = (part.kind == SourceKind.DATA) & (part.phase == TRAIN)
        for source in np.unique(part.source[data]).tolist():
            _add(self._loader_sums[self._name(source)].loads, part.lasted_ns[data & (part.source == source)])

    def skip(self) -> None:
        """Drops the build times of batches from before a tracker had a run: they belong to no epoch's row."""
        self._totals.loaders.drop_builds()

    def take(self, at_ns: int) -> dict[str, float]:
        """Returns the metrics of the epoch that ended at ``at_ns``, and begins the next one. Empty without a training step."""
        loaders = {name: loader for name, loader in self._loader_sums.items() if loader.batches}
        facts = self.loaders()
        for name, loader in loaders.items():
            loader.workers = facts[name].workers if name in facts else None
            if not loader.builds.count(0) and loader.workers == 0:
                loader.builds = loader.loads  # without workers a batch is built during the wait for it
        waits_ns = self._exposed_ns(loaders)
        memory = self._memory(list(loaders), at_ns) if self._memory is not None else {}
        found: dict[str, float] = {}
        if loaders and self._step_ns:
            found = self._values(list(loaders.values()))
            efficiency = self._efficiency(loaders.values(), waits_ns)
            if efficiency is not None:
                found["throughput_efficiency"] = efficiency
            found.update(memory)
            for name, loader in loaders.items() if len(loaders) > 1 else ():
                prefix = f"dl_{self.safe(name)}"
                found.update({f"{prefix}/{key}": value for key, value in self._values([loader]).items()})
        self._begin()
        return found

    def _name(self, source: int) -> str:
        return self._totals.names.sources[source].name

    def _values(self, loaders: list[_LoaderSums]) -> dict[str, float]:
        # Rates of one loader are over the time of its own batches, as in ``rates`` of summary.json; others over all steps.
        seconds = (loaders[0].ns if len(loaders) == 1 else self._step_ns) / NS_PER_S
        found: dict[str, float] = {}
        if not seconds:
            return found
        if not any(loader.has_unknown for loader in loaders):
            found["samples_per_second"] = sum(loader.samples for loader in loaders) / seconds
        found["batches_per_second"] = sum(loader.batches for loader in loaders) / seconds
        found.update(_milliseconds("batch_load_time_ms", [loader.loads for loader in loaders]))
        if all(loader.builds.count(0) for loader in loaders):
            found.update(_milliseconds("batch_transform_time_ms", [loader.builds for loader in loaders]))
        return found

    def _exposed_ns(self, loaders: Mapping[str, _LoaderSums]) -> float | None:
        """Returns how long the device waited for batches since the last epoch; None if not measured for each loader."""
        device, names = self._totals.device, self._totals.names
        window, self._device_before = device.minus(self._device_before), device.copy()
        found, measured = 0.0, set()
        for number, key in enumerate(names.keys[: len(window)]):
            if key.stage == "data" and key.phase == "train" and window.count(number):
                mean_s = window.sum_s(number) / window.count(number)
                found += mean_s * (loaders[key.loader].batches if key.loader in loaders else 0) * NS_PER_S
                measured.add(key.loader)
        return found if loaders and measured.issuperset(loaders) else None

    def _efficiency(self, loaders: Iterable[_LoaderSums], exposed_ns: float | None) -> float | None:
        """Returns the ratio of the time of the slowest part alone (computing, or one loader) to the time of the steps, at most 1."""
        work_ns = self._work_ns if exposed_ns is None else max(0.0, self._step_ns - exposed_ns)
        alone = [work_ns / NS_PER_S]
        for loader in loaders:
            if not loader.builds.count(0) or loader.workers is None:
                return None
            mean_s = loader.builds.sum_s(0) / loader.builds.count(0)
            alone.append(loader.batches * mean_s / max(loader.workers, 1))
        return min(1.0, max(alone) * NS_PER_S / self._step_ns)


class _LoaderSums:
    """Sums of one loader in an epoch."""

    def __init__(self) -> None:
        self.loads = Histograms(size=1)  # waits for a batch
        self.builds = Histograms(size=1)  # times to build a batch
        self.batches = self.samples = 0
        self.has_unknown = False  # whether a batch had an unknown number of samples
        self.ns = 0  # wall time of its batches
        self.workers: int | None = None


def _add(histogram: Histograms, values_ns: np.ndarray) -> None:
    histogram.add(np.zeros(len(values_ns), dtype=np.int64), values_ns)


def _milliseconds(key: str, parts: list[Histograms]) -> dict[str, float]:
    merged = Histograms(size=1)
    for part in parts:
        merged.merge(part)
    count = merged.count(0)
    if not count:
        return {}
    mean_s = merged.sum_s(0) / count
    quantiles = {name: merged.quantile(0, q) for name, q in _QUANTILES.items()}
    return {f"{key}_{name}": value * MS_PER_S for name, value in {"avg": mean_s, **quantiles}.items()}


MS_PER_NS = 1e-6

_LOGGED = {
    TRAIN: ("train", ("data", "forward", "backward", "optimizer")),
    EVAL: ("val", ("data", "forward")),
}
_FORWARDS = (int(SourceKind.FORWARD), int(SourceKind.WHOLE))
_PHASES = 8  # more than there are phases: the factor of the phase in a combined key


class _Sums(dict[str, tuple[int, int]]):
    """Count and sum of durations, in nanoseconds, by name."""

    def add(self, name: str, lasted_ns: np.ndarray) -> None:
        self.add_up(name, len(lasted_ns), int(lasted_ns.sum()))

    def add_up(self, name: str, count: int, total_ns: int) -> None:
        if count or total_ns:
            had, had_ns = self.get(name, (0, 0))
            self[name] = had + count, had_ns + total_ns


class StageMeans:
    """``profile/{train,val}/dl_{loader}/time_{stage}_ms``: mean of one call since the last row."""

    def __init__(self, names: SeriesNames, safe: SafeNames) -> None:
        self._names = names
        self._safe = safe
        self._sums = _Sums()
        self._waits: dict[int, _BatchWait] = {}

    def add(self, part: ClosedStepsPart) -> None:
        """Adds calls that have ended."""
        keys = (part.source * (len(self._names.sources) + 1) + part.loader + 1) * _PHASES + part.phase
        for key in np.unique(keys).tolist():
            calls = np.flatnonzero(keys == key)
            phase = key % _PHASES
            source, loader = int(part.source[calls[0]]), int(part.loader[calls[0]])
            label, stages = _LOGGED.get(phase, ("", ()))
            stage = self._names.sources[source].stage
            if stage in stages and loader >= 0:
                name = f"profile/{label}/{self._loader(loader)}/time_{stage}_ms"
                self._sums.add(name, part.lasted_ns[calls])
        train = np.flatnonzero((part.phase == TRAIN) & (part.loader >= 0))
        for loader in np.unique(part.loader[train]).tolist():
            calls = train[part.loader[train] == loader]
            wait = self._waits.setdefault(loader, _BatchWait())
            found = wait.take(part.kind[calls], part.started_ns[calls], part.lasted_ns[calls])
            self._sums.add(f"profile/train/{self._loader(loader)}/time_batch_wait_ms", found)

    def take(self) -> dict[str, float]:
        """Returns the means since the last call."""
        sums, self._sums = self._sums, _Sums()
        return {key: total_ns / count * MS_PER_NS for key, (count, total_ns) in sums.items()}

    def _loader(self, source: int) -> str:
        return f"dl_{self._safe(self._names.sources[source].name)}"


class _BatchWait:
    """Time from the end of the last stage of a loader's batch to the first forward of its next batch."""

    def __init__(self) -> None:
        self._worked_ns = -1  # end of the last stage so far
        self._since_ns = -1  # the same for the batch before the present one; -1 once that had its forward

    def take(self, kind: np.ndarray, started_ns: np.ndarray, lasted_ns: np.ndarray) -> np.ndarray:
        """Returns the waits of the batches whose first forward is among these calls, which are in the order of their ends."""
        fetched = kind == SourceKind.DATA
        ended = started_ns + lasted_ns
        batch = np.cumsum(fetched)
        last = int(batch[-1])
        worked = np.full(last + 1, -1, dtype=np.int64)
        worked[batch[~fetched]] = ended[
            ~fetched
        ]  # of equal indices numpy keeps the last value: the latest end
        worked[0] = max(worked[0], self._worked_ns)
        np.maximum.accumulate(worked, out=worked)
        since = np.concatenate(([self._since_ns], worked[:-1]))
        forwards = np.flatnonzero(np.isin(kind, _FORWARDS))
        batches, first = np.unique(batch[forwards], return_index=True)
        known = since[batches] >= 0
        waits: np.ndarray = (started_ns[forwards[first]] - since[batches])[known]
        self._worked_ns = int(worked[-1])
        self._since_ns = -1 if last in batches else int(since[-1])
        return waits


class Operations:
    """``profiling/{operation}_{avg_time,total_time,count}``, in seconds: totals since the start or the last reset."""

    def __init__(self, names: SeriesNames, safe: SafeNames) -> None:
        self._names = names
        self._safe = safe
        self._sums = _Sums()

    def reset(self) -> None:
        """Sets the totals to zero."""
        self._sums = _Sums()

    def add(self, part: ClosedStepsPart) -> None:
        """Adds calls and steps that have ended."""
        train, sums = part.phase == TRAIN, self._sums
        sums.add("data_batch_production", part.lasted_ns[train & (part.kind == SourceKind.DATA)])
        sums.add_up("loss_fn_computation", int(part.losses.sum()), int(part.loss_ns.sum()))
        # ``training_ns`` is 0 for a step without a recorded call.
        sums.add("training_step", part.training_ns[part.training_ns > 0])
        sums.add("make_step_total", part.work_ns)
        is_user_stage = part.kind == SourceKind.STAGE
        for source in np.unique(part.source[is_user_stage]).tolist():
            calls = is_user_stage & (part.source == source)
            sums.add(self._safe(self._names.sources[source].name), part.lasted_ns[calls])

    def values(self) -> dict[str, float]:
        """Returns the present values, times in seconds."""
        found: dict[str, float] = {}
        for name, (count, total_ns) in self._sums.items():
            if count:
                total_s = total_ns / NS_PER_S
                found[f"profiling/{name}_avg_time"] = total_s / count
                found[f"profiling/{name}_total_time"] = total_s
                found[f"profiling/{name}_count"] = count
        return found


class FlatRow(NamedTuple):
    """Values that a tracker logs in one call."""

    unix_ns: int  # end of the period that the row is about
    step: int  # training steps counted by then
    epoch: int  # its number; counted from 1 unless the program gives numbers
    of_epoch: bool  # whether the row is about an epoch; else about the steps since the last row
    values: dict[str, float]  # by flat name


class ClosedStepsPart(NamedTuple):
    """A part of ``ClosedSteps``. Columns are int64."""

    source: np.ndarray  # this and the next five: of stage calls
    loader: np.ndarray  # -1 for none
    phase: np.ndarray
    started_ns: np.ndarray
    lasted_ns: np.ndarray
    kind: np.ndarray
    batches: np.ndarray  # as in ``ClosedSteps``
    step_ns: np.ndarray  # of training steps, as the columns below
    work_ns: np.ndarray  # without waits for data
    loader_ns: np.ndarray  # as in ``ClosedSteps``
    loss_ns: np.ndarray
    losses: np.ndarray
    training_ns: np.ndarray  # from the first forward, or loss, to the end of the last update


class _Mark(NamedTuple):
    """A time at which a row is due, and the training steps by then. ``boundary``: set if the row is about an epoch."""

    at_ns: int
    step: int
    boundary: EpochBoundary | None = None


class FlatMetrics:
    """Splits closed steps at the steps and epochs at which a row is due, and builds a row from each part.

    A row is due every ``every_steps`` training steps and every ``every_epochs`` epochs; 0 for none. ``unix`` converts the
    monotonic clock to Unix time, in nanoseconds.
    """

    def __init__(
        self,
        names: SeriesNames,
        epochs: EpochWindow,
        *,
        every_steps: int,
        every_epochs: int,
        unix: Callable[[int], int],
    ) -> None:
        self.epoch = 1
        self.reported = 0  # number of the last report that was written
        self._names = names
        self._every_steps = every_steps
        self._every_epochs = every_epochs
        self._unix = unix
        self._step = self._logged = 0  # training steps counted, and those in rows
        self._stepped_ns = 0  # when the last step ended
        self._beside_ns = 0  # end of the last evaluation or user-defined stage that is in no row; 0 for none
        self._means = StageMeans(names, epochs.safe)
        self._operations = Operations(names, epochs.safe)
        self._epochs = epochs

    def reset(self) -> None:
        """Sets the totals of operations to zero."""
        self._operations.reset()

    def take(
        self, closed: ClosedSteps, rows: np.ndarray, numbers: np.ndarray, boundaries: Sequence[EpochBoundary]
    ) -> list[FlatRow]:
        """Returns the rows that are due; ``rows`` are the indices of the training thread's steps, ``numbers`` their numbers."""
        made: list[FlatRow] = []
        marks = self._marks(closed, rows, numbers, boundaries)
        parts = self._parts(closed, [mark.at_ns for mark in marks])
        for part, mark in zip(parts, [*marks, None], strict=True):
            self._means.add(part)
            self._operations.add(part)
            self._epochs.add(part)
            if (beside := (part.phase == EVAL) | (part.kind == SourceKind.STAGE)).any():
                self._beside_ns = int((part.started_ns + part.lasted_ns)[beside].max())
            if mark is not None:
                self._step = max(self._step, mark.step)
                made += (
                    self._epoch_row(mark.boundary, mark.at_ns)
                    if mark.boundary
                    else self._step_row(mark.at_ns)
                )
        if len(numbers):
            self._step, self._stepped_ns = int(numbers[-1]) + 1, int(closed.steps.ended_ns[rows[-1]])
        return made

    def skip(self, numbers: np.ndarray, boundaries: Sequence[EpochBoundary]) -> None:
        """Counts steps and epochs without building rows, while no tracker has a run."""
        self._epochs.skip()
        for boundary in boundaries:
            self.epoch = boundary.running
        if len(numbers):
            self._step = self._logged = int(numbers[-1]) + 1

    def report(self, number: int, at_ns: int) -> list[FlatRow]:
        """Returns a row of the present values, unless the report with that number has been written."""
        row = self._step_row(at_ns) if number > self.reported else []
        self.reported = number if row else self.reported
        return row

    def so_far(self) -> list[FlatRow]:
        """Returns a row if there were steps, evaluations or user-defined stages since the last one."""
        if self._step > self._logged:
            return self._step_row(self._stepped_ns)
        return self._step_row(self._beside_ns) if self._beside_ns else []

    def finish(self, last: EpochBoundary) -> list[FlatRow]:
        """Returns the row of ``so_far``, and that of the last epoch if it ends here."""
        return [*self.so_far(), *self._epoch_row(last, self._stepped_ns)]

    def _step_row(self, at_ns: int) -> list[FlatRow]:
        self._logged, self._beside_ns = self._step, 0
        values = {**self._means.take(), **self._operations.values()}
        return [self._row(at_ns, self.epoch, values, of_epoch=False)] if values else []

    def _epoch_row(self, boundary: EpochBoundary, at_ns: int) -> list[FlatRow]:
        values, ended = self._epochs.take(at_ns), boundary.ended
        self.epoch = boundary.running
        if ended is None or not values or not self._every_epochs or ended % self._every_epochs:
            return []
        return [self._row(at_ns, ended, values, of_epoch=True)]

    def _row(self, at_ns: int, epoch: int, values: dict[str, float], *, of_epoch: bool) -> FlatRow:
        return FlatRow(self._unix(at_ns), self._step, epoch, of_epoch=of_epoch, values=values)

    def _marks(
        self, closed: ClosedSteps, rows: np.ndarray, numbers: np.ndarray, boundaries: Sequence[EpochBoundary]
    ) -> list[_Mark]:
        found = []
        if self._every_steps:
            due = np.flatnonzero((numbers + 1) % self._every_steps == 0)
            ended = closed.steps.ended_ns[rows[due]]
            found = [
                _Mark(at, step) for at, step in zip(ended.tolist(), (numbers[due] + 1).tolist(), strict=True)
            ]
        requested: list[tuple[int, EpochBoundary | None]] = [
            (at_ns, None) for at_ns in self._requested(closed, {mark.at_ns for mark in found})
        ]
        requested += [(boundary.at_ns, boundary) for boundary in boundaries]
        for at_ns, boundary in requested:
            before = np.flatnonzero(closed.steps.ended_ns[rows] <= at_ns)
            found.append(_Mark(at_ns, int(numbers[before[-1]]) + 1 if len(before) else self._step, boundary))
        # The sort is stable: at equal times the row of a step precedes that of an epoch.
        return sorted(found, key=lambda mark: mark.at_ns)

    def _requested(self, closed: ClosedSteps, due: Container[int]) -> Iterator[int]:
        """Yields the times of requested reports that are not written yet and not due anyway."""
        for at_ns, op, number in closed.said.tolist():
            if op == Op.REPORT and number > self.reported:
                self.reported = number
                if at_ns not in due:
                    yield at_ns

    def _parts(self, closed: ClosedSteps, cuts: list[int]) -> Iterator[ClosedStepsPart]:
        """Splits closed steps at the cuts into ``len(cuts) + 1`` parts. What ends at a cut is in the part before it."""
        calls, steps, batches = closed.occurrences, closed.steps, closed.batches
        ended = np.maximum.accumulate(calls.started_ns + calls.inclusive_ns)
        kind = self._names.kinds[calls.source].astype(np.int64)
        train = np.flatnonzero(steps.phase == TRAIN)
        waited = steps.wait_ns[train]
        counted = steps.counted[train] > 0
        edges = [
            np.concatenate(([0], np.searchsorted(times, cuts, side="right"), [len(times)]))
            for times in (ended, np.sort(batches[:, 3]), steps.ended_ns[train], closed.loader_ns[:, 3])
        ]
        batches = batches[np.argsort(batches[:, 3], kind="stable")]
        for number in range(len(cuts) + 1):
            call, batch, step, loader = (slice(*at[number : number + 2].tolist()) for at in edges)
            own = train[step][counted[step]]
            lasted = steps.duration_ns[own]
            yield ClosedStepsPart(
                calls.source[call], calls.loader[call], calls.phase[call], calls.started_ns[call],
                calls.inclusive_ns[call], kind[call], batches[batch], lasted,
                lasted - waited[step][counted[step]], closed.loader_ns[loader], steps.loss_ns[own], steps.losses[own], steps.training_ns[own],
            )  # fmt: skip
