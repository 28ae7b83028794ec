"""DataLoader throughput: rows per loader, the workers it needs, and advice."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from otel_train.aggregation.counters import LoaderStart, StageTotals, Totals
from otel_train.catalog import PHASES
from otel_train.console.text import duration
from otel_train.datamodel import NS_PER_S

if TYPE_CHECKING:
    from otel_train.aggregation.histogram import Histograms

WARNING_SHARE, CRITICAL_SHARE = 0.10, 0.20
"""Shares of training time spent waiting for data that give a warning and a critical finding.
Source: the thresholds that TraceML uses for the same question."""

TARGET_BUSY_SHARE = 0.9
"""Share of their time that workers may be busy. At a higher share every slower batch causes a wait."""

UNEVEN = 3.0
"""Ratio of the 99th percentile of the build time to its mean from which build times are uneven."""

USUAL = 2.0
"""Largest ratio of the mean wait for first batches to that for other batches at which they count as alike."""

MS_PER_S = 1e3
_QUANTILES = {"min": 0.0, "p50": 0.5, "p95": 0.95, "p99": 0.99, "max": 1.0}


class LoaderFacts(NamedTuple):
    """Facts about a loader that events do not contain, since the start of the session."""

    # Its ``num_workers``; this and the next two are None if it has no such setting.
    workers: int | None = None
    prefetch_factor: int | None = None  # batches that each worker reads ahead
    persistent: bool | None = None  # its ``persistent_workers``
    tokens: int = 0
    batch_bytes: Mapping[str, float] | None = None  # ``sampled``, ``min``, ``avg``, ``max``, if there are any
    errors: Mapping[str, int] = {}  # exceptions raised to the loop, by class
    worker_exits: Mapping[str, int] = {}  # unexpected ones, by cause
    given: bool = True  # passed by the program; else found at its first iteration


class LoaderThroughput(NamedTuple):
    """How fast a loader builds batches. Seconds; None if unknown."""

    workers: int | None = None  # as in ``LoaderFacts``
    build_s: float | None = None  # mean time of a worker per batch
    build_p50_s: float | None = None
    build_p99_s: float | None = None
    prefetch_factor: int | None = None
    persistent: bool | None = None
    passes: int = 0  # passes that returned a batch: those of training, if training reads it
    making_s: float = 0.0  # time to create their iterators
    first_s: float = 0.0  # wait for their first batches
    processors: int | None = None  # available to this process
    ends_s: float = 0.0  # requests at the ends of passes, which give no batch: workers stop
    single: bool = False  # every such pass gives one batch, built by the training thread
    longest_start_s: float = 0.0  # of one pass

    @property
    def start_s(self) -> float:
        """Cost of starting all passes."""
        return self.making_s + self.first_s

    @property
    def around_s(self) -> float:
        """Cost of starting and ending all passes."""
        return self.start_s + self.ends_s

    @property
    def repeated_s(self) -> float:
        """The same if every pass started like all but the slowest: persistent workers start once."""
        others_s = self.start_s - self.longest_start_s
        return others_s * self.passes / max(1, self.passes - 1) + self.ends_s


def with_costs_of_passes(
    loaders: Mapping[str, LoaderThroughput], training: Iterable[StageTotals]
) -> dict[str, LoaderThroughput]:
    """Returns ``loaders`` with the cost of ending passes, at which workers stop.

    Without workers the training thread builds the batches itself. The first batch of a pass is then a wait like any other,
    unless it takes longer.
    """
    found = dict(loaders)
    for row in training:
        known = loaders.get(row.key.loader)
        if row.key.stage != "data" or known is None:
            continue
        if known.workers:
            ends_s = max(0.0, row.inclusive_s - row.called_s - known.making_s)
            found[row.key.loader] = known._replace(ends_s=ends_s)
        elif known.workers == 0 and known.passes:
            others, others_s = row.count - known.passes, row.called_s - known.first_s
            if others <= 0 or known.first_s * others <= USUAL * known.passes * others_s:
                found[row.key.loader] = known._replace(passes=0, first_s=0.0, single=others <= 0)
    return found


def loader_rows(totals: Totals, facts: Mapping[str, LoaderFacts]) -> list[dict[str, Any]]:
    """Returns one row per loader, in the order of discovery."""
    waits = _waits(totals)
    return [_row(name, known, totals, waits.get(name)) for name, known in facts.items()]


def throughputs(
    totals: Totals, facts: Mapping[str, LoaderFacts], processors: int | None
) -> dict[str, LoaderThroughput]:
    """Returns the throughput of each loader; ``processors``: number of processors available to this process."""
    found = {}
    trained = {key.loader for key in totals.names.keys if (key.phase, key.stage) == ("train", "data")}
    for name, known in facts.items():
        build = _distribution(totals.loaders.builds, totals.loaders.numbers.get(name)) or {}
        phases = ("train",) if name in trained else PHASES
        starts = (totals.loaders.starts.get((name, phase)) for phase in phases)
        start = next((start for start in starts if start is not None), LoaderStart())
        found[name] = LoaderThroughput(
            known.workers, build.get("avg"), build.get("p50"), build.get("p99"), known.prefetch_factor, known.persistent,
            start.passes, start.making_s, start.waiting_s, processors, longest_start_s=start.longest_s,
        )  # fmt: skip
    return found


def _row(name: str, known: LoaderFacts, totals: Totals, wait: dict[str, Any] | None) -> dict[str, Any]:
    loaders = totals.loaders
    build = _distribution(loaders.builds, loaders.numbers.get(name))
    place = "worker" if build else None
    if known.workers == 0 and wait:  # without workers the wait is the build time
        build, place = wait, "training_thread"
    starts = [start for (loader, _), start in loaders.starts.items() if loader == name]
    first = _distribution(loaders.start_ups, loaders.numbers.get(name))
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
    """Returns the waits per batch of every loader; their total includes iterator creation and requests without a batch."""
    keys = totals.names.keys
    numbers, folded = totals.stages.folded(key.loader if key.stage == "data" else None for key in keys)
    total_ns: Counter[str] = Counter()
    for key, ns in zip(keys, totals.inclusive_ns.tolist(), strict=False):
        if key.stage == "data":
            total_ns[key.loader] += ns
    found = {name: _distribution(folded, number) for name, number in numbers.items()}
    return {
        name: wait and wait | {"total_seconds": total_ns[name] / NS_PER_S} for name, wait in found.items()
    }


def _distribution(histograms: Histograms, series: int | None) -> dict[str, Any] | None:
    count = histograms.count(series) if series is not None and series < len(histograms) else 0
    if series is None or not count:
        return None
    total_s = histograms.sum_s(series)
    found: dict[str, Any] = {"count": count, "total_seconds": total_s, "avg": total_s / count}
    found.update({name: histograms.quantile(series, q) for name, q in _QUANTILES.items()})
    return found


def workers_needed(build_s: float, ask_s: float) -> int:
    """Returns the workers that keep up when each takes ``build_s`` per batch and the loop requests one every ``ask_s``."""
    return max(1, math.ceil(build_s / ask_s / TARGET_BUSY_SHARE))


def milliseconds(seconds: float) -> str:
    """Formats a duration for a sentence: milliseconds below one second, else the fitting unit."""
    return f"{seconds * MS_PER_S:.3g} ms" if seconds < 1 else duration(seconds)


def sentence_percent(share: float, decimals: int = 0) -> str:
    """Formats a share for a sentence, with enough decimals that a small one does not read as 0."""
    if share > 0:
        decimals = max(decimals, math.ceil(-math.log10(share)) - 2)
    return f"{share:.{decimals}%}"


def demand_sentence(throughput: LoaderThroughput, ask_s: float) -> str:
    """Returns a sentence that compares the workers' rate with the loop's; "" if either is unknown."""
    if not throughput.workers or throughput.build_s is None or ask_s <= 0:
        return ""
    each = milliseconds(throughput.build_s)
    who = "Its worker takes" if throughput.workers == 1 else f"Its {throughput.workers} workers take"
    rate = milliseconds(throughput.build_s / throughput.workers)
    every = f", one every {rate}" if throughput.workers > 1 else ""
    return f" {who} {each} per batch{every}; the loop requests one every {milliseconds(ask_s)}."


def loader_advice(name: str, throughput: LoaderThroughput, *, wait_s: float, ask_s: float) -> str:
    """Returns what to change about a loader that training waits for ``wait_s`` per batch.

    ``ask_s`` is the time between its batches if the loop never waited; 0 if unknown.
    """
    if throughput.workers is None:
        return (
            f"Load `{name}` ahead of need: in a thread, or as a torch DataLoader with num_workers > 0. If something does "
            "already, it does not keep up: more threads or workers, or cheaper batches."
        )
    if throughput.single:
        return (
            f"Every pass over `{name}` gives one batch, so none can be read ahead of need: ask one iterator for many batches, "
            "keep the batch, or make it cheaper to build."
        )
    if throughput.workers == 0:
        return _without_workers_advice(name, throughput, wait_s=wait_s, ask_s=ask_s)
    if throughput.build_s is None or ask_s <= 0:
        return (
            f"`{name}` has {throughput.workers} workers and they do not keep up: raise num_workers or "
            "prefetch_factor, move decoding out of __getitem__, or look at the storage."
        )
    enough = workers_needed(throughput.build_s, ask_s)
    if enough > throughput.workers:
        return _too_few_workers_advice(name, throughput, enough)
    return _enough_workers_advice(name, throughput)


def _without_workers_advice(name: str, throughput: LoaderThroughput, *, wait_s: float, ask_s: float) -> str:
    number = workers_needed(wait_s, ask_s) if ask_s > 0 and wait_s > 0 else 4
    limit = throughput.processors
    more = f" It would take {number} workers to keep up." if limit and number > limit else ""
    number = min(number, limit) if limit else number
    return (
        f"`{name}` is read in the training process (num_workers=0): DataLoader(..., num_workers={number}, "
        f"persistent_workers=True) reads it beside the training.{more}"
    )


def _too_few_workers_advice(name: str, throughput: LoaderThroughput, enough: int) -> str:
    limit = throughput.processors
    if limit and enough > limit:
        return (
            f"`{name}` would need num_workers={enough} to keep up, and this process has {limit} "
            f"{'processor' if limit == 1 else 'processors'}: if workers wait for storage or a network, so many help; if they "
            "compute, make a batch cheaper to build (decode beforehand, smaller images, fewer transforms), or give it more "
            "processors."
        )
    return f"`{name}` keeps up with num_workers={enough} (it has {throughput.workers})."


def _enough_workers_advice(name: str, throughput: LoaderThroughput) -> str:
    assert throughput.build_s is not None
    assert throughput.workers is not None
    if throughput.build_p99_s is not None and throughput.build_p99_s > UNEVEN * throughput.build_s:
        factor = 2 * (throughput.prefetch_factor or 2)
        return (
            f"The workers of `{name}` keep up on average, but their batches are uneven (p99 "
            f"{milliseconds(throughput.build_p99_s)}): prefetch_factor={factor} evens it out."
        )
    if throughput.processors and throughput.workers >= throughput.processors:
        return (
            f"The workers of `{name}` build fast enough on average, but they and the training share "
            f"{throughput.processors} processors: make a batch cheaper to build, or use fewer workers."
        )
    return (
        f"The workers of `{name}` build fast enough, so more of them do not help: look at how batches are handed "
        "over. Fewer and larger tensors in a batch and pin_memory make that cheaper."
    )


def start_advice(name: str, throughput: LoaderThroughput) -> str:
    """Returns what to change about a loader whose passes start slowly."""
    if throughput.workers and not throughput.persistent:
        return f"DataLoader(..., persistent_workers=True) for `{name}`: its workers then start once, not every pass."
    if throughput.workers:
        return (
            f"The first batch of `{name}` is built while training waits: smaller batches, or create the "
            "next iterator before the current pass ends."
        )
    return f"`{name}` does much before its first batch: do that once, when its dataset is made."
