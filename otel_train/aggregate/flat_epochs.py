"""Throughput of one epoch under flat names."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from otel_train.aggregate.histogram import Histograms
from otel_train.aggregate.loader_rows import LoaderFacts
from otel_train.aggregate.steps import TRAIN
from otel_train.codes import SourceKind

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from otel_train.aggregate.flat import Slice
    from otel_train.aggregate.flat_names import SafeNames
    from otel_train.aggregate.totals import Totals

NS_PER_S = 10**9
MS_PER_S = 1e3
_QUANTILES = {"p50": 0.5, "p95": 0.95, "p99": 0.99}


class EpochWindow:
    """What an epoch comes to: rates, times to load and to transform a batch, efficiency.

    Args:
        totals: where the workers' build times are.
        loaders: the loaders known now.
        safe: makes names safe.
    """

    def __init__(
        self, totals: Totals, loaders: Callable[[], Mapping[str, LoaderFacts]], safe: SafeNames
    ) -> None:
        self._totals = totals
        self._facts = loaders
        self._safe = safe
        self._built = totals.loaders.builds.copy()
        self._begin()

    def _begin(self) -> None:
        self._loads: dict[str, Histograms] = {}
        self._batches: dict[str, int] = {}
        self._samples: dict[str, int] = {}
        self._blind: set[str] = set()
        self._step_ns = 0
        self._work_ns = 0

    def add(self, part: Slice) -> None:
        """Count what ended."""
        self._step_ns += int(part.step_ns.sum())
        self._work_ns += int(part.work_ns.sum())
        train = part.batches[part.batches[:, 1] == TRAIN]
        for source in np.unique(train[:, 0]).tolist():
            name, samples = self._name(source), train[train[:, 0] == source, 2]
            self._batches[name] = self._batches.get(name, 0) + len(samples)
            self._samples[name] = self._samples.get(name, 0) + int(samples[samples >= 0].sum())
            if (samples < 0).any():
                self._blind.add(name)
        data = (part.kind == SourceKind.DATA) & (part.phase == TRAIN)
        for source in np.unique(part.source[data]).tolist():
            lasted = part.lasted_ns[data & (part.source == source)]
            loads = self._loads.setdefault(self._name(source), Histograms(size=1))
            loads.add(np.zeros(len(lasted), dtype=np.int64), lasted)

    def take(self) -> dict[str, float]:
        """The figures of the epoch; the next one begins here. Empty when no training step was seen."""
        builds = self._builds()
        names = list(self._batches)
        found: dict[str, float] = {}
        if names and self._step_ns:
            found = self._figures(names, builds)
            efficiency = self._efficiency(builds)
            if efficiency is not None:
                found["throughput_efficiency"] = efficiency
            if len(names) > 1:
                for name in names:
                    prefix = f"dl_{self._safe(name)}"
                    figures = self._figures([name], builds)
                    found.update({f"{prefix}/{key}": value for key, value in figures.items()})
        self._begin()
        return found

    def _name(self, source: int) -> str:
        return self._totals.names.sources[source].name

    def _builds(self) -> dict[str, Histograms]:
        """Times to build a batch since the last epoch: a worker's, or without workers the wait itself."""
        loaders = self._totals.loaders
        window, self._built = loaders.builds.minus(self._built), loaders.builds.copy()
        found = {}
        facts = self._facts()
        for name in self._batches:
            number = loaders.known(name)
            if number is not None and window.count(number):
                into = np.full(len(window), -1, dtype=np.int64)
                into[number] = 0
                found[name] = window.folded(into, 1)
            elif facts.get(name, LoaderFacts()).workers == 0 and name in self._loads:
                found[name] = self._loads[name]
        return found

    def _figures(self, names: list[str], builds: Mapping[str, Histograms]) -> dict[str, float]:
        seconds = self._step_ns / NS_PER_S
        found = {}
        if not self._blind.intersection(names):
            found["samples_per_second"] = sum(self._samples[name] for name in names) / seconds
        found["batches_per_second"] = sum(self._batches[name] for name in names) / seconds
        found.update(_milliseconds("batch_load_time_ms", [self._loads[n] for n in names if n in self._loads]))
        if all(name in builds for name in names):
            found.update(_milliseconds("batch_transform_time_ms", [builds[name] for name in names]))
        return found

    def _efficiency(self, builds: Mapping[str, Histograms]) -> float | None:
        """Time that the slower of loaders alone and computing alone would take, to the time it took."""
        facts = self._facts()
        alone = [self._work_ns / NS_PER_S]
        for name, batches in self._batches.items():
            workers = facts.get(name, LoaderFacts()).workers
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
