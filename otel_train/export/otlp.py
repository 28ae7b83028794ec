"""OTLP: snapshots and spans to a collector, or to the spool when it is away."""

from __future__ import annotations

from typing import TYPE_CHECKING

from otel_train.export.otlp_sdk import SdkTransport
from otel_train.export.sender import Places, Sender
from otel_train.export.settings import OtlpSettings, otlp_configured

if TYPE_CHECKING:
    from collections.abc import Mapping

    from otel_train.export.sender import Transport
    from otel_train.export.spool import Payload, Spool
    from otel_train.records import AttributeValue, Batch

__all__ = ["OtlpExporter", "OtlpSettings", "otlp_configured"]


class OtlpExporter:
    """Hands every batch to a sender thread of its own and returns at once.

    Args:
        settings: what to send, and how; ``OtlpSettings.read(os.environ)``.
        resource: who we are.
        version: version of the instrumentation scope.
        spool: where unsent figures are kept; None drops them.
        transport: what carries them, in place of the SDK's exporters.

    Raises:
        ConfigError: the exporters refuse their settings.
    """

    def __init__(
        self,
        settings: OtlpSettings,
        resource: Mapping[str, AttributeValue],
        *,
        version: str,
        spool: Spool | None = None,
        transport: Transport | None = None,
    ) -> None:
        self._metrics = "metrics" in settings.protocols
        self._traces = "traces" in settings.protocols
        self._spool = spool
        endpoint = ", ".join(dict.fromkeys(settings.endpoints.values()))
        self._sender = Sender(
            transport or SdkTransport(settings, resource, version=version),
            spool or _Nowhere(),
            places=Places(endpoint, str(spool.directory) if spool else ""),
            timeout_s=settings.timeout_s,
        )

    @property
    def drops(self) -> Mapping[tuple[str, str], int]:
        """Records not exported, by (signal, reason); see ``Sender``."""
        return self._sender.drops

    @property
    def failures(self) -> int:
        """Requests that were not accepted."""
        return self._sender.failures

    def export(self, batch: Batch) -> None:
        """Queue the figures of one batch."""
        snapshot = batch.snapshot if self._metrics else None
        spans = batch.spans if self._traces else ()
        if snapshot is not None or spans:
            self._sender.put(snapshot, spans)

    def close(self, timeout_s: float) -> None:
        """Send or spool what is left, in at most ``timeout_s`` seconds."""
        self._sender.close(timeout_s)
        if self._spool is not None:
            self._spool.close()


class _Nowhere:
    """Keeps nothing."""

    def put(self, payload: Payload) -> bool:
        """Drop one payload."""
        del payload
        return False
