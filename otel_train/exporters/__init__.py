"""The interface between the export loop and exporters."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from otel_train.datamodel import ExportBatch
    from otel_train.safety import Guard

__all__ = ["ExportRoute", "Exporter"]


class Exporter(Protocol):
    """Exports batches. Called from one thread only."""

    def export(self, batch: ExportBatch) -> None:
        """Takes one batch; never waits for a network."""

    def close(self, timeout_s: float) -> None:
        """Flushes, and releases threads, files and sockets, in at most ``timeout_s`` seconds."""


class ExportRoute(NamedTuple):
    """An exporter, the guard that contains its faults, and the shortest time between two of its snapshots."""

    exporter: Exporter
    guard: Guard
    every_s: float
