"""OTLP: snapshots and spans into the spool, and from its head to a collector."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from otel_train.exporters.otlp_json import metrics_line, spans_line
from otel_train.exporters.otlp_transport import OtlpTransport
from otel_train.exporters.sender import Sender
from otel_train.exporters.settings import OtlpSettings, otlp_configured
from otel_train.exporters.spool import DEFAULT_MAX_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from otel_train.datamodel import AttributeValue, ExportBatch
    from otel_train.exporters.otlp_http import Connections
    from otel_train.exporters.otlp_transport import Transport

__all__ = ["OtlpExporter", "OtlpSettings", "otlp_configured"]

_log = logging.getLogger("otel_train")

_SPANS_PER_REQUEST = 512  # the batch size that the SDK's own span processor uses by default


class OtlpExporter:
    """Appends every batch to the spool and returns; a thread of its own sends from there.

    Args:
        settings: what to send, and how; ``OtlpSettings.read(os.environ)``.
        resource: who we are; every request repeats it.
        version: version of the instrumentation scope.
        directory: the folder of the rank, where the spool lies; None keeps what waits in memory.
        max_bytes: bound on the spool on disk.
        on_error: told of every ``OSError`` of the spool.
        transport: carries requests, in place of HTTP or gRPC.
        connections: shared with others that send; None for connections of its own.
    """

    def __init__(  # noqa: PLR0913 - all but two by keyword
        self,
        settings: OtlpSettings,
        resource: Mapping[str, AttributeValue],
        *,
        version: str,
        directory: Path | None = None,
        max_bytes: int = DEFAULT_MAX_BYTES,
        on_error: Callable[[OSError], None] = lambda _error: None,
        transport: Transport | None = None,
        connections: Connections | None = None,
    ) -> None:
        self._signals = frozenset(settings.targets)
        self._resource = dict(resource)
        self._version = version
        self._told = False
        self._sender = Sender(
            self._signals,
            transport or OtlpTransport(settings.targets, connections),
            directory=directory,
            endpoint=settings.addresses,
            timeout_s=settings.timeout_s,
            max_bytes=max_bytes,
            on_error=on_error,
        )

    @property
    def drops(self) -> Mapping[tuple[str, str], int]:
        """Records that are not where people look, by (signal, reason); see ``Sender.drops``."""
        return self._sender.drops

    @property
    def failures(self) -> int:
        """Requests that were not accepted."""
        return self._sender.failures

    def export(self, batch: ExportBatch) -> None:
        """Append one batch to the spool."""
        snapshot = batch.snapshot
        if snapshot is not None and "metrics" in self._signals:
            points = sum(len(family.points) for family in snapshot.families)
            self._put("metrics", points, lambda: metrics_line(snapshot, self._resource, self._version))
        if batch.spans and "traces" in self._signals:
            for first in range(0, len(batch.spans), _SPANS_PER_REQUEST):
                spans = batch.spans[first : first + _SPANS_PER_REQUEST]
                self._put("traces", len(spans), lambda: spans_line(spans, self._resource, self._version))  # noqa: B023 - called at once

    def _put(self, signal: str, records: int, line: Callable[[], str]) -> None:
        try:
            request = line().encode("utf-8", "replace")
        except Exception:  # noqa: BLE001 - whatever is in a label, the pump goes on
            self._sender.count(signal, "serialization", records)
            if not self._told:
                self._told = True
                _log.exception(
                    "OTLP: %d records of %s cannot be written as a request; dropped", records, signal
                )
            return
        self._sender.put(signal, request)

    def close(self, timeout_s: float) -> None:
        """Send what waits, in at most ``timeout_s`` seconds; the rest stays in the spool."""
        self._sender.close(timeout_s)
