"""Throughput of one epoch under flat names."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import numpy as np

from otel_train.accounting.types import TRAIN
from otel_train.aggregation.flat_names import SafeNames
from otel_train.aggregation.histogram import Histograms
from otel_train.clock import NS_PER_S
from otel_train.recording.events import SourceKind

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from otel_train.aggregation.counters import Totals
    from otel_train.aggregation.flat import Slice

    Memory = Callable[[Iterable[str], int], Mapping[str, float]]

MS_PER_S = 1e3
_QUANTILES = {"p50": 0.5, "p95": 0.95, "p99": 0.99}


def no_memory(_: Iterable[str], __: int) -> Mapping[str, float]:
    """Nobody looks at memory."""
    return {}


class HasWorkers(Protocol):
    """What an epoch must know of a loader."""

    @property
    def workers(self) -> int | None:
        """Its ``num_workers``; None where it has no such setting."""

    @property
    def given(self) -> bool:
        """The program gave it; else it was found when it was first iterated."""


class EpochWindow:
    """What an epoch comes to: rates, times to load and to transform a batch, efficiency.

    Args:
        totals: where the workers' build times are.
        loaders: the loaders known now.
        memory: figures of memory, from the training loaders' names and when the epoch ended.

    Attributes:
        safe: makes names safe.
        loaders: as given.
    """

    def __init__(
        self,
        totals: Totals,
        loaders: Callable[[], Mapping[str, HasWorkers]],
        *,
        memory: Memory = no_memory,
    ) -> None:
        self.safe = SafeNames()
        self._totals = totals
        self.loaders = loaders
        self._memory = memory
        self._exposed = totals.device.copy()
        self._begin()

    def _begin(self) -> None:
        self._loads: dict[str, Histograms] = {}
        self._built: dict[str, Histograms] = {}
        self._batches: dict[str, int] = {}
        self._samples: dict[str, int] = {}
        self._blind: set[str] = set()
        self._step_ns = 0
        self._work_ns = 0
        self._loader_ns: dict[str, int] = {}

    def add(self, part: Slice) -> None:
        """Count what ended."""
        self._step_ns += int(part.step_ns.sum())
        self._work_ns += int(part.work_ns.sum())
        for source, phase, ns, _ in part.loader_ns.tolist():
            if phase == TRAIN:
                name = self._name(source)
                self._loader_ns[name] = self._loader_ns.get(name, 0) + ns
        train = part.batches[part.batches[:, 1] == TRAIN]
        for source in np.unique(train[:, 0]).tolist():
            name, samples = self._name(source), train[train[:, 0] == source, 2]
            self._batches[name] = self._batches.get(name, 0) + len(samples)
            self._samples[name] = self._samples.get(name, 0) + int(samples[samples >= 0].sum())
            if (samples < 0).any():
                self._blind.add(name)
            self._claim(name)
        data = (part.kind == SourceKind.DATA) & (part.phase == TRAIN)
        for source in np.unique(part.source[data]).tolist():
            lasted = part.lasted_ns[data & (part.source == source)]
            loads = self._loads.setdefault(self._name(source), Histograms(size=1))
            loads.add(np.zeros(len(lasted), dtype=np.int64), lasted)

    def skip(self) -> None:
        """Nobody listened: what was built up to now is no epoch's."""
        self._totals.loaders.claim_all()

    def take(self, at_ns: int) -> dict[str, float]:
        """The figures of the epoch, which ended at ``at_ns``; the next one begins there.

        Empty when no training step was seen.
        """
        builds, waits_ns = self._builds(), self._exposed_ns()
        names = list(self._batches)
        memory = self._memory(names, at_ns)
        found: dict[str, float] = {}
        if names and self._step_ns:
            found = self._figures(names, builds)
            efficiency = self._efficiency(builds, waits_ns)
            if efficiency is not None:
                found["throughput_efficiency"] = efficiency
            found.update(memory)
            if len(names) > 1:
                for name in names:
                    prefix = f"dl_{self.safe(name)}"
                    figures = self._figures([name], builds)
                    found.update({f"{prefix}/{key}": value for key, value in figures.items()})
        self._begin()
        return found

    def _name(self, source: int) -> str:
        return self._totals.names.sources[source].name

    def _claim(self, name: str) -> None:
        """A batch has one build; workers are ahead, so builds are there before their batches."""
        built = self._built.setdefault(name, Histograms(size=1))
        builds_ns = self._totals.loaders.claim(name, self._batches[name] - built.count(0))
        built.add(np.zeros(len(builds_ns), dtype=np.int64), builds_ns)

    def _builds(self) -> dict[str, Histograms]:
        """Times to build the batches of the epoch: a worker's, or without workers the wait itself."""
        found = {}
        workers = self._workers()
        for name in self._batches:
            if self._built[name].count(0):
                found[name] = self._built[name]
            elif workers.get(name) == 0 and name in self._loads:
                found[name] = self._loads[name]
        return found

    def _workers(self) -> dict[str, int | None]:
        return {name: facts.workers for name, facts in self.loaders().items()}

    def _figures(self, names: list[str], builds: Mapping[str, Histograms]) -> dict[str, float]:
        # Of one loader over the time of its own batches, as ``rates`` of the summary; of several over that of all steps.
        seconds = (self._loader_ns.get(names[0], 0) if len(names) == 1 else self._step_ns) / NS_PER_S
        found: dict[str, float] = {}
        if not seconds:
            return found
        if not self._blind.intersection(names):
            found["samples_per_second"] = sum(self._samples[name] for name in names) / seconds
        found["batches_per_second"] = sum(self._batches[name] for name in names) / seconds
        found.update(_milliseconds("batch_load_time_ms", [self._loads[n] for n in names if n in self._loads]))
        if all(name in builds for name in names):
            found.update(_milliseconds("batch_transform_time_ms", [builds[name] for name in names]))
        return found

    def _exposed_ns(self) -> float | None:
        """How long devices stood idle for want of a batch since the last epoch; None where that is not measured."""
        device, names = self._totals.device, self._totals.names
        window, self._exposed = device.minus(self._exposed), device.copy()
        found, measured = 0.0, set()
        for number, key in enumerate(names.keys[: len(window)]):
            if key.stage == "data" and key.phase == "train" and window.count(number):
                mean_s = window.point(number).sum / window.count(number)
                found += mean_s * self._batches.get(key.loader, 0) * NS_PER_S
                measured.add(key.loader)
        return found if self._batches and measured.issuperset(self._batches) else None

    def _efficiency(self, builds: Mapping[str, Histograms], exposed_ns: float | None) -> float | None:
        """Time that the slower of loaders alone and computing alone would take, to the time it took."""
        known = self._workers()
        work_ns = self._work_ns if exposed_ns is None else max(0.0, self._step_ns - exposed_ns)
        alone = [work_ns / NS_PER_S]
        for name, batches in self._batches.items():
            workers = known.get(name)
            if name not in builds or workers is None:
                return None
            mean_s = builds[name].point(0).sum / builds[name].count(0)
            alone.append(batches * mean_s / max(workers, 1))
        return min(1.0, max(alone) * NS_PER_S / self._step_ns)


def _milliseconds(key: str, parts: list[Histograms]) -> dict[str, float]:
    together = Histograms(size=1)
    for part in parts:
        together.merge(part)
    count = together.count(0)
    if not count:
        return {}
    mean_s = together.point(0).sum / count
    quantiles = {name: together.quantile(0, q) for name, q in _QUANTILES.items()}
    return {f"{key}_{name}": value * MS_PER_S for name, value in {"avg": mean_s, **quantiles}.items()}
