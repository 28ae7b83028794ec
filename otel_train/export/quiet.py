"""The SDK's exporters log every failure; this keeps those of one thread off the user's console."""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections import deque

_LOGGERS = (
    "opentelemetry.exporter.otlp.common.http",
    "opentelemetry.exporter.otlp.proto.common._internal",
    "opentelemetry.exporter.otlp.proto.common._internal.metrics_encoder",
    "opentelemetry.exporter.otlp.proto.common._internal.trace_encoder",
    "opentelemetry.exporter.otlp.proto.grpc.exporter",
    "opentelemetry.exporter.otlp.proto.http.metric_exporter",
    "opentelemetry.exporter.otlp.proto.http.trace_exporter",
)
"""Where the SDK's OTLP exporters log (opentelemetry-exporter-otlp 1.30 to 1.45)."""

_KEPT = 8
"""Messages of one request worth keeping: the SDK retries at most six times."""


_GRPC_VERBOSITY = "GRPC_VERBOSITY"


def import_grpc_quietly() -> None:
    """Import grpc so that its C library does not write to stderr for every handshake that fails.

    It reads ``GRPC_VERBOSITY`` once, when it is imported. A value of the user's holds, and the environment is left as
    it was.
    """
    if "grpc" in sys.modules or _GRPC_VERBOSITY in os.environ:
        return
    os.environ[_GRPC_VERBOSITY] = "NONE"
    try:
        import grpc
    finally:
        del os.environ[_GRPC_VERBOSITY]
    del grpc


class CallerLogs(logging.Filter):
    """A with-block in which the exporters' messages from this thread are kept here and shown nowhere.

    Messages from other threads, such as those of the user's own exporters, pass.
    """

    def __init__(self) -> None:
        super().__init__()
        self._thread_id: int | None = None
        self._messages: deque[str] = deque(maxlen=_KEPT)

    def __enter__(self) -> CallerLogs:
        self._thread_id = threading.get_ident()
        for name in _LOGGERS:
            # First of all: a filter of the SDK's drops what was said a minute ago, and we want the reason again.
            logging.getLogger(name).filters.insert(0, self)
        return self

    def __exit__(self, *_: object) -> None:
        for name in _LOGGERS:
            logging.getLogger(name).removeFilter(self)

    def filter(self, record: logging.LogRecord) -> bool:
        """Keep and hide a message of this thread, let any other pass."""
        if record.thread != self._thread_id:
            return True
        self._messages.append(record.getMessage())
        return False

    def clear(self) -> None:
        """Forget what was said."""
        self._messages.clear()

    def said(self) -> str:
        """What was said since, oldest first, one message a line."""
        return "\n".join(self._messages)
