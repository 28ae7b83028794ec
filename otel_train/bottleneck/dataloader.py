"""DataLoader throughput: what is known of each loader, the workers it needs, and what to change about it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from otel_train.aggregation.counters import Start
from otel_train.console.text import duration
from otel_train.datamodel import NS_PER_S

if TYPE_CHECKING:
    from collections.abc import Mapping

    from otel_train.aggregation.counters import Totals
    from otel_train.aggregation.histogram import Histograms

ROOM = 0.9
"""Share of their time that workers may be busy. Without room every batch that takes longer is waited for."""

UNEVEN = 3.0
"""99th percentile of the build time over its mean from which batches are called uneven."""

MS_PER_S = 1e3
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


class LoaderThroughput(NamedTuple):
    """How a loader gets its batches. Seconds; None where it is not known.

    Attributes:
        workers: worker processes; 0 for none, None for a loader without that setting.
        build_s: mean time of a worker for a batch.
        build_p50_s: median.
        build_p99_s: 99th percentile.
        prefetch_factor: batches each worker reads ahead.
        persistent: the workers live on from pass to pass.
        passes: passes of training that gave a batch.
        making_s: time to make their iterators.
        first_s: wait for their first batches.
        processors: those this process may use.
    """

    workers: int | None = None
    build_s: float | None = None
    build_p50_s: float | None = None
    build_p99_s: float | None = None
    prefetch_factor: int | None = None
    persistent: bool | None = None
    passes: int = 0
    making_s: float = 0.0
    first_s: float = 0.0
    processors: int | None = None

    @property
    def start_s(self) -> float:
        """What beginning all passes has cost."""
        return self.making_s + self.first_s


def loader_rows(totals: Totals, facts: Mapping[str, LoaderFacts]) -> list[dict[str, Any]]:
    """One row per loader, in the order in which they were met."""
    waits = _waits(totals)
    return [_row(name, known, totals, waits.get(name)) for name, known in facts.items()]


def throughputs(
    totals: Totals, facts: Mapping[str, LoaderFacts], processors: int | None
) -> dict[str, LoaderThroughput]:
    """How each loader gets its batches. ``processors``: those that this process may use."""
    found = {}
    for name, known in facts.items():
        build = _distribution(totals.loaders.builds, totals.loaders.known(name)) or {}
        start = totals.loaders.starts.get((name, "train"), Start())
        found[name] = LoaderThroughput(
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
    """What was waited for every loader, per batch, in all phases.

    ``total_seconds`` has also the asks that gave no batch and the making of iterators, as the rows of stage ``data``.
    """
    numbers: dict[str, int] = {}
    total_ns: dict[str, int] = {}
    into = np.full(len(totals.stages), -1, dtype=np.int64)
    for series, key in enumerate(totals.names.keys[: len(into)]):
        if key.stage == "data":
            into[series] = numbers.setdefault(key.loader, len(numbers))
            total_ns[key.loader] = total_ns.get(key.loader, 0) + int(totals.inclusive_ns[series])
    folded = totals.stages.folded(into, len(numbers))
    found = {name: _distribution(folded, number) for name, number in numbers.items()}
    return {
        name: wait and {**wait, "total_seconds": total_ns[name] / NS_PER_S} for name, wait in found.items()
    }


def _distribution(histograms: Histograms, series: int | None) -> dict[str, Any] | None:
    count = histograms.count(series) if series is not None and series < len(histograms) else 0
    if series is None or not count:
        return None
    total_s = histograms.point(series).sum
    found: dict[str, Any] = {"count": count, "total_seconds": total_s, "avg": total_s / count}
    found.update({name: histograms.quantile(series, q) for name, q in _QUANTILES.items()})
    return found


def needed(build_s: float, ask_s: float) -> int:
    """Workers that keep up: each takes ``build_s`` for a batch, the loop asks every ``ask_s``."""
    return max(1, math.ceil(build_s / ask_s / ROOM))


def milliseconds(seconds: float) -> str:
    """A short time for a sentence; a second or more with the unit that suits it."""
    return f"{seconds * MS_PER_S:.3g} ms" if seconds < 1 else duration(seconds)


def percent(share: float, decimals: int = 0) -> str:
    """A share for a sentence; of a small one so many decimals that it does not read as nothing."""
    if share > 0:
        decimals = max(decimals, math.ceil(-math.log10(share)) - 2)
    return f"{share:.{decimals}%}"


def compared(supply: LoaderThroughput, ask_s: float) -> str:
    """What the workers take against what the loop asks for, as a sentence; "" where it is not known."""
    if not supply.workers or supply.build_s is None or ask_s <= 0:
        return ""
    each = milliseconds(supply.build_s)
    who = "Its worker takes" if supply.workers == 1 else f"Its {supply.workers} workers take"
    every = f", one every {milliseconds(supply.build_s / supply.workers)}" if supply.workers > 1 else ""
    return f" {who} {each} per batch{every}; the loop asks every {milliseconds(ask_s)}."


def loader_advice(name: str, supply: LoaderThroughput, *, wait_s: float, ask_s: float) -> str:
    """What to change about a loader that training waits for.

    Args:
        name: the loader.
        supply: how it gets its batches.
        wait_s: wait per batch.
        ask_s: time between its batches if it made nobody wait; 0 where that is not known.
    """
    if supply.workers is None:
        return f"Load `{name}` ahead of need: in a thread, or as a torch DataLoader with num_workers > 0."
    if supply.workers == 0:
        return _for_none(name, supply, wait_s=wait_s, ask_s=ask_s)
    if supply.build_s is None or ask_s <= 0:
        return (
            f"`{name}` has {supply.workers} workers and they do not keep up: raise num_workers or "
            "prefetch_factor, move decoding out of __getitem__, or look at the storage."
        )
    enough = needed(supply.build_s, ask_s)
    if enough > supply.workers:
        return _for_too_few(name, supply, enough)
    return _for_enough(name, supply)


def _for_none(name: str, supply: LoaderThroughput, *, wait_s: float, ask_s: float) -> str:
    number = needed(wait_s, ask_s) if ask_s > 0 and wait_s > 0 else 4
    limit = supply.processors
    more = f" It would take {number} workers to keep up." if limit and number > limit else ""
    number = min(number, limit) if limit else number
    return (
        f"`{name}` is read on the training thread (num_workers=0): DataLoader(..., num_workers={number}, "
        f"persistent_workers=True) reads it beside the training.{more}"
    )


def _for_too_few(name: str, supply: LoaderThroughput, enough: int) -> str:
    limit = supply.processors
    if limit and enough > limit:
        return (
            f"`{name}` would need num_workers={enough} to keep up, and this process has {limit} "
            f"{'processor' if limit == 1 else 'processors'}: make a batch cheaper to build (decode beforehand, "
            "smaller images, fewer transforms), or give it more processors."
        )
    return f"`{name}` keeps up with num_workers={enough} (it has {supply.workers})."


def _for_enough(name: str, supply: LoaderThroughput) -> str:
    assert supply.build_s is not None
    assert supply.workers is not None
    uneven = supply.build_p99_s is not None and supply.build_p99_s > UNEVEN * supply.build_s
    if uneven:
        factor = 2 * (supply.prefetch_factor or 2)
        return (
            f"The workers of `{name}` keep up on average, but their batches are uneven (p99 "
            f"{milliseconds(supply.build_p99_s or 0.0)}): prefetch_factor={factor} evens it out."
        )
    if supply.processors and supply.workers >= supply.processors:
        return (
            f"The workers of `{name}` build fast enough on average, but they and the training share "
            f"{supply.processors} processors: make a batch cheaper to build, or use fewer workers."
        )
    return (
        f"The workers of `{name}` build fast enough, so more of them do not help: look at how batches are handed "
        "over. Fewer and larger tensors in a batch and pin_memory make that cheaper."
    )


def start_advice(name: str, supply: LoaderThroughput) -> str:
    """What to change about a loader whose passes are slow to begin."""
    if supply.workers and not supply.persistent:
        return f"DataLoader(..., persistent_workers=True) for `{name}`: its workers then start once, not every pass."
    if supply.workers:
        return (
            f"The first batch of `{name}` is built while training waits: smaller batches, or an iterator made "
            "before the pass before has ended."
        )
    return f"`{name}` does much before its first batch: do that once, when its dataset is made."
