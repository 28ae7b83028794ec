"""What could not be sent, kept on disk until it is replayed."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from otel_train.export.jsonl import BoundedLines
from otel_train.export.otlp_json import metrics_line, spans_line
from otel_train.records import Snapshot, Span

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from otel_train.records import AttributeValue

Payload = Snapshot | tuple[Span, ...]
"""What one request carries: every metric at one instant, or some spans."""

METRICS_FILE = "metrics.otlp.jsonl"
SPANS_FILE = "spans.otlp.jsonl"
FOLDER = "spool"

DEFAULT_MAX_BYTES = 64 << 20
"""Hours of snapshots at the default interval, and little enough for any scratch disk."""


class Spool:
    """Unsent payloads as OTLP/JSON lines in ``<directory>/spool``. Safe to use from several threads.

    Args:
        directory: the folder of the rank.
        resource: who we are; every line repeats it.
        version: version of the instrumentation scope.
        max_bytes: bound on the whole spool; the oldest lines go first, and are counted.
        on_error: told of every ``OSError``.
    """

    def __init__(
        self,
        directory: Path,
        resource: Mapping[str, AttributeValue],
        *,
        version: str,
        on_error: Callable[[OSError], None],
        max_bytes: int = DEFAULT_MAX_BYTES,
    ) -> None:
        self.directory = directory / FOLDER
        self._resource = dict(resource)
        self._version = version
        self._lock = threading.Lock()
        half = max_bytes // 2
        self._metrics = BoundedLines(self.directory / METRICS_FILE, max_bytes=half, on_error=on_error)
        self._spans = BoundedLines(self.directory / SPANS_FILE, max_bytes=half, on_error=on_error)

    @property
    def dropped_lines(self) -> int:
        """Lines given up because the spool was full."""
        return self._metrics.dropped_lines + self._spans.dropped_lines

    def put(self, payload: Payload) -> bool:
        """Keep one payload. False when the disk would not have it."""
        if isinstance(payload, Snapshot):
            line = metrics_line(payload, self._resource, self._version)
            with self._lock:
                return self._metrics.append(line)
        line = spans_line(payload, self._resource, self._version)
        with self._lock:
            return self._spans.append(line)

    def close(self) -> None:
        """Let go of the files."""
        with self._lock:
            self._metrics.close()
            self._spans.close()
