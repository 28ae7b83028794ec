"""Counts what the simulated ranks have sent."""

from __future__ import annotations

import threading
from dataclasses import asdict, dataclass
from typing import Any, Final

from otel_train.catalog import Kind

_EXTRA_SERIES: Final = 3
"""Series of a classic histogram besides one per bound: the bucket ``+Inf``, the sum and the count."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Size of one snapshot.

    Attributes:
        native: series where histograms are native: one per data point.
        classic: series where histograms are buckets of their own.
        payload_bytes: of the request, before compression.
    """

    native: int
    classic: int
    payload_bytes: int = 0


def sizes_of(families: Any, payload_bytes: int = 0) -> Sizes:
    """Counts the series of ``Snapshot.families``."""
    native = classic = 0
    for family in families:
        each = len(family.metric.bounds) + _EXTRA_SERIES if family.metric.kind is Kind.HISTOGRAM else 1
        native += len(family.points)
        classic += each * len(family.points)
    return Sizes(native=native, classic=classic, payload_bytes=payload_bytes)


@dataclass(slots=True, kw_only=True)
class ScaleResult:
    """Totals since the start.

    Attributes:
        ranks: of the run.
        senders: of those, the ones that send anything.
        seconds: since the start.
        series: of all ranks that have sent, with native histograms.
        series_classic: the same with classic histograms.
        most_series: of one rank, with native histograms.
        most_series_classic: the same with classic histograms.
        samples: data points accepted.
        spans: spans accepted.
        sent_bytes: of all accepted requests, before compression.
        requests: accepted.
        failures: refused, or not answered.
        skipped: not sent, because the one before was not through.
        latest_s: longest that a request began after it was due.
        steps: of the run.
    """

    ranks: int
    senders: int
    seconds: float = 0.0
    series: int = 0
    series_classic: int = 0
    most_series: int = 0
    most_series_classic: int = 0
    samples: int = 0
    spans: int = 0
    sent_bytes: int = 0
    requests: int = 0
    failures: int = 0
    skipped: int = 0
    latest_s: float = 0.0
    steps: int = 0

    def as_json(self) -> dict[str, float]:
        """Returns everything, by name."""
        return asdict(self)


class Counts:
    """Counts what many threads send.

    Args:
        ranks: of the run.
        senders: of those, the ones that send anything.
    """

    def __init__(self, ranks: int, senders: int) -> None:
        self.result = ScaleResult(ranks=ranks, senders=senders)
        self._series: dict[int, Sizes] = {}
        self._lock = threading.Lock()

    def metrics(self, rank: int, sizes: Sizes, *, accepted: bool) -> None:
        """Counts a rank's metrics as sent."""
        with self._lock:
            result = self.result
            if not accepted:
                result.failures += 1
                return
            before = self._series.get(rank, Sizes(native=0, classic=0))
            self._series[rank] = sizes
            result.series += sizes.native - before.native
            result.series_classic += sizes.classic - before.classic
            result.most_series = max(result.most_series, sizes.native)
            result.most_series_classic = max(result.most_series_classic, sizes.classic)
            result.samples += sizes.native
            result.sent_bytes += sizes.payload_bytes
            result.requests += 1

    def spans(self, number: int, payload_bytes: int, *, accepted: bool) -> None:
        """Counts a rank's spans as sent."""
        with self._lock:
            self.result.failures += not accepted
            if accepted:
                self.result.spans += number
                self.result.sent_bytes += payload_bytes
                self.result.requests += 1

    def fault(self, number: int) -> None:
        """Counts exports that failed by a fault in the generator."""
        with self._lock:
            self.result.failures += number

    def late(self, seconds: float) -> None:
        """Records how long after it was due a request began."""
        with self._lock:
            self.result.latest_s = max(self.result.latest_s, seconds)

    def skip(self) -> None:
        """Counts an export that was left out."""
        with self._lock:
            self.result.skipped += 1
