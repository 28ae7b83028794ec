"""Test doubles for code that uses otel_train: a fake clock and an in-memory exporter."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from otel_train.datamodel import Event, ExportBatch, MetricFamily, Snapshot, Span

__all__ = ["FakeClock", "Kept"]

_NS_PER_US, _NS_PER_MS, _NS_PER_S = 10**3, 10**6, 10**9


class FakeClock:
    """Monotonic clock in nanoseconds that moves only when advanced.

    Args:
        now_ns: first reading.

    Attributes:
        now_ns: what it reads.
    """

    def __init__(self, now_ns: int = 0) -> None:
        self.now_ns = now_ns

    def __call__(self) -> int:
        """Returns the present reading, in nanoseconds."""
        return self.now_ns

    def tick(self, ns: int = 0, *, us: float = 0, ms: float = 0, s: float = 0) -> int:
        """Lets time pass: nanoseconds, microseconds, milliseconds and seconds add up.

        Returns:
            The new reading.

        Raises:
            ValueError: time would run backwards, which a monotonic clock never does.
        """
        passed_ns = ns + round(us * _NS_PER_US) + round(ms * _NS_PER_MS) + round(s * _NS_PER_S)
        if passed_ns < 0:
            raise ValueError(f"tick of {passed_ns} ns: expected 0 or more")
        self.now_ns += passed_ns
        return self.now_ns


class Kept:
    """In-memory exporter: keeps every batch.

    Attributes:
        batches: in the order in which they came.
        closed: ``close`` has been called.
    """

    def __init__(self) -> None:
        self.batches: list[ExportBatch] = []
        self.closed = False

    def export(self, batch: ExportBatch) -> None:
        """Keeps ``batch``."""
        self.batches.append(batch)

    def close(self, timeout_s: float) -> None:
        """Records that it is over; there is nothing to wait for."""
        del timeout_s
        self.closed = True

    @property
    def spans(self) -> list[Span]:
        """Spans of all batches."""
        return [span for batch in self.batches for span in batch.spans]

    @property
    def events(self) -> list[Event]:
        """Events of all batches."""
        return [event for batch in self.batches for event in batch.events]

    @property
    def snapshots(self) -> list[Snapshot]:
        """Snapshots of all batches that had one."""
        return [batch.snapshot for batch in self.batches if batch.snapshot is not None]

    def family(self, name: str) -> MetricFamily | None:
        """Returns the last reading of a metric, by its OpenTelemetry name; None if it was never published."""
        families = self.snapshots[-1].families if self.snapshots else ()
        return next((family for family in families if family.metric.name == name), None)
