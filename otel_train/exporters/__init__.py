"""The seam between the pump and everything that carries figures out of the process."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from otel_train.datamodel import ExportBatch

__all__ = ["Exporter"]


class Exporter(Protocol):
    """What carries figures out of the process. Called from one thread only."""

    def export(self, batch: ExportBatch) -> None:
        """Take one batch; never wait for a network."""

    def close(self, timeout_s: float) -> None:
        """Flush what can be flushed and give everything back, in at most ``timeout_s`` seconds."""
