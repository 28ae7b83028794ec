"""Everything known of each loader, as rows of the summary and for the verdict."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from otel_train.aggregate.loader_totals import Start
from otel_train.aggregate.supply import Supply

if TYPE_CHECKING:
    from collections.abc import Mapping

    from otel_train.aggregate.histogram import Histograms
    from otel_train.aggregate.totals import Totals

_QUANTILES = {"min": 0.0, "p50": 0.5, "p95": 0.95, "p99": 0.99, "max": 1.0}


class LoaderFacts(NamedTuple):
    """What no edge tells of a loader; since the start of the session.

    Attributes:
        workers: its ``num_workers``; None where it has no such setting.
        prefetch_factor: batches that each worker reads ahead; None where it has none.
        persistent: its workers live on from pass to pass; None where it has no such setting.
        tokens: tokens counted.
        batch_bytes: of the batches that were weighed: ``sampled``, ``min``, ``avg``, ``max``; None for none.
        errors: exceptions that left it, by class.
        worker_exits: workers that died, by cause.
        given: the program gave it; else it was found when it was first iterated.
    """

    workers: int | None = None
    prefetch_factor: int | None = None
    persistent: bool | None = None
    tokens: int = 0
    batch_bytes: Mapping[str, float] | None = None
    errors: Mapping[str, int] = {}
    worker_exits: Mapping[str, int] = {}
    given: bool = True


def loader_rows(totals: Totals, facts: Mapping[str, LoaderFacts]) -> list[dict[str, Any]]:
    """One row per loader, in the order in which they were met."""
    waits = _waits(totals)
    return [_row(name, known, totals, waits.get(name)) for name, known in facts.items()]


def supplies(totals: Totals, facts: Mapping[str, LoaderFacts], processors: int | None) -> dict[str, Supply]:
    """How each loader gets its batches. ``processors``: those that this process may use."""
    found = {}
    for name, known in facts.items():
        build = _distribution(totals.loaders.builds, totals.loaders.known(name)) or {}
        start = totals.loaders.starts.get((name, "train"), Start())
        found[name] = Supply(
            known.workers,
            build.get("avg"),
            build.get("p50"),
            build.get("p99"),
            known.prefetch_factor,
            known.persistent,
            start.passes,
            start.making_s,
            start.waiting_s,
            processors,
        )
    return found


def _row(name: str, known: LoaderFacts, totals: Totals, wait: dict[str, Any] | None) -> dict[str, Any]:
    loaders = totals.loaders
    build = _distribution(loaders.builds, loaders.known(name))
    place = "worker" if build else None
    if known.workers == 0 and wait:  # there the wait is the building
        build, place = wait, "training_thread"
    starts = [start for (loader, _), start in loaders.starts.items() if loader == name]
    first = _distribution(loaders.start_ups, loaders.known(name))
    return {
        "loader": name,
        "workers": known.workers,
        "prefetch_factor": known.prefetch_factor,
        "persistent_workers": known.persistent,
        "build": build and {"measured_in": place, "lost": loaders.lost.get(name, 0), **build},
        "wait": wait,
        "start": first
        and {
            "making_seconds": sum(start.making_s for start in starts),
            "first_batch_seconds": sum(start.waiting_s for start in starts),
            **first,
        },
        "batch_bytes": dict(known.batch_bytes) if known.batch_bytes else None,
        "endings": {
            reason: number
            for (loader, reason), number in loaders.endings.items()
            if loader == name and number
        },
        "errors": dict(known.errors),
        "worker_exits": dict(known.worker_exits),
    }


def _waits(totals: Totals) -> dict[str, dict[str, Any] | None]:
    """What the loop waited for every loader, per batch, in all phases."""
    numbers: dict[str, int] = {}
    into = np.full(len(totals.stages), -1, dtype=np.int64)
    for series, key in enumerate(totals.names.keys[: len(into)]):
        if key.stage == "data":
            into[series] = numbers.setdefault(key.loader, len(numbers))
    folded = totals.stages.folded(into, len(numbers))
    return {name: _distribution(folded, number) for name, number in numbers.items()}


def _distribution(histograms: Histograms, series: int | None) -> dict[str, Any] | None:
    count = histograms.count(series) if series is not None and series < len(histograms) else 0
    if series is None or not count:
        return None
    total_s = histograms.point(series).sum
    found: dict[str, Any] = {"count": count, "total_seconds": total_s, "avg": total_s / count}
    found.update({name: histograms.quantile(series, q) for name, q in _QUANTILES.items()})
    return found
