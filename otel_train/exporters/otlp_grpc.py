"""OTLP over gRPC: one unary call at a time, without retries of its own."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

from otel_train.exporters.otlp_answer import MOST_ANSWER_BYTES, Answer, read_grpc, read_message, retry

if TYPE_CHECKING:
    from otel_train.exporters.settings import Target

_METHODS: Final = {
    "metrics": "/opentelemetry.proto.collector.metrics.v1.MetricsService/Export",
    "traces": "/opentelemetry.proto.collector.trace.v1.TraceService/Export",
}
_OPTIONS: Final = (
    ("grpc.max_receive_message_length", MOST_ANSWER_BYTES),
    ("grpc.enable_retries", 0),
    ("grpc.primary_user_agent", "otel-train"),
)
_VERBOSITY: Final = "GRPC_VERBOSITY"
_STATUS_DETAILS: Final = "grpc-status-details-bin"


class GrpcClient:
    """Calls one method of a collector.

    Args:
        target: where to, and how.
        signal: ``metrics`` or ``traces``.
    """

    def __init__(self, target: Target, signal: str) -> None:
        _import_quietly()
        self._target = target
        self._signal = signal
        self._channel: Any = None  # Any: grpc has no types
        self._closed = False

    def post(self, request: bytes, timeout_s: float) -> Answer:
        """Send one request in protobuf and read its answer, in at most ``timeout_s`` seconds."""
        import grpc

        if self._closed:
            return retry("is not asked any more: this process is closing")
        if self._channel is None:
            self._channel = self._opened()
        call = self._channel.unary_unary(_METHODS[self._signal])
        try:
            response = call(request, timeout=timeout_s, metadata=tuple(self._target.headers.items()))
        except grpc.RpcError as error:
            code = error.code()
            if (
                code is grpc.StatusCode.UNAVAILABLE
            ):  # a new channel connects at once, the old one in its own time
                self._drop()
            return read_grpc(code.name, error.details() or "", _wait_s(error.trailing_metadata()))
        except ValueError as error:  # the channel was closed meanwhile
            self._drop()
            return retry(f"cannot be called ({error})")
        try:
            return read_message(response, self._signal)
        except ValueError:
            return retry(
                "answers OK with a body that is no OTLP response: correct OTEL_EXPORTER_OTLP_ENDPOINT"
            )

    def close(self) -> None:
        """Drop the connection. What waits for an answer on another thread fails at once."""
        self._closed = True
        self._drop()

    def _drop(self) -> None:
        channel, self._channel = self._channel, None
        if channel is not None:
            channel.close()

    def _opened(self) -> Any:  # Any: as above
        import grpc

        target = self._target
        address = urlsplit(target.url).netloc.rpartition("@")[2] if "://" in target.url else target.url
        compression = grpc.Compression.Gzip if target.compression else grpc.Compression.NoCompression
        if not target.tls:
            return grpc.insecure_channel(address, options=_OPTIONS, compression=compression)
        credentials = grpc.ssl_channel_credentials(
            root_certificates=_content(target.certificate),
            private_key=_content(target.client_key or target.client_certificate),
            certificate_chain=_content(target.client_certificate),
        )
        return grpc.secure_channel(address, credentials, options=_OPTIONS, compression=compression)


def _import_quietly() -> None:
    """Import grpc so that its C library does not write to stderr for every handshake that fails.

    It reads ``GRPC_VERBOSITY`` once, when it is imported. A value of the user's holds, and the environment is left as
    it was.
    """
    if "grpc" in sys.modules or _VERBOSITY in os.environ:
        return
    os.environ[_VERBOSITY] = "NONE"
    try:
        import grpc
    finally:
        del os.environ[_VERBOSITY]
    del grpc


def _content(path: str) -> bytes | None:
    return Path(path).read_bytes() if path else None


def _wait_s(metadata: Any) -> float | None:  # Any: as above
    """What ``RetryInfo`` in the status of a call asks for."""
    details = dict(metadata or ()).get(_STATUS_DETAILS)
    if not details:
        return None
    from google.protobuf.message import DecodeError
    from google.rpc.error_details_pb2 import RetryInfo
    from google.rpc.status_pb2 import Status

    info = RetryInfo()
    try:
        found = any(each.Unpack(info) for each in Status.FromString(details).details)
    except DecodeError:
        return None
    return float(info.retry_delay.seconds + info.retry_delay.nanos / 1e9) if found else None
