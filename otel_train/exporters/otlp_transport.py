"""Sends lines of OTLP/JSON to a collector: as they are stored, or as protobuf where that is asked for."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any, Final, Protocol

from otel_train.exporters.otlp_answer import JSON, PROTOBUF, Answer, refused
from otel_train.exporters.otlp_errors import first_line
from otel_train.exporters.otlp_json import load_protobuf, protobuf_of
from otel_train.exporters.settings import GRPC, HTTP_JSON

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from otel_train.exporters.otlp_http import Connections
    from otel_train.exporters.settings import Target

_KEYS: Final = {"metrics": "resourceMetrics", "traces": "resourceSpans"}
_BEGINNINGS: Final = {
    signal: re.compile(rb'\s*\{\s*"' + key.encode() + rb'"\s*:\s*\[') for signal, key in _KEYS.items()
}


class Transport(Protocol):
    """Where requests go."""

    def send(self, signal: str, line: bytes, timeout_s: float) -> Answer:
        """Send one line and read the answer, within ``timeout_s`` seconds."""

    def close(self) -> None:
        """Drop connections; a send on another thread fails at once."""


class OtlpTransport:
    """Sends lines to the collectors of their signals. Used from one thread; ``close`` from any.

    With ``http/json``, the default, a line is posted as it is stored. With ``http/protobuf`` and ``grpc`` it is
    converted first.

    Args:
        targets: signal to where it goes, and how.
        connections: shared with others that send; None for connections of its own.
    """

    def __init__(self, targets: Mapping[str, Target], connections: Connections | None = None) -> None:
        self._connections = connections
        self._clients: dict[str, Any] = {}  # Any: of HTTP or of gRPC
        self._posts: dict[str, Callable[[bytes, float], Answer]] = {}
        for signal, target in targets.items():
            self._open(signal, target)

    def send(self, signal: str, line: bytes, timeout_s: float) -> Answer:
        """Send one line and read the answer, in ``timeout_s`` seconds; to connect may take as long again."""
        problem = unreadable(line, signal)
        return refused(problem) if problem else self._posts[signal](line, timeout_s)

    def close(self) -> None:
        """Drop connections; a send on another thread fails at once."""
        for client in self._clients.values():
            client.close()

    def _open(self, signal: str, target: Target) -> None:
        if target.protocol != HTTP_JSON:
            load_protobuf(signal)
        if target.protocol == GRPC:
            from otel_train.exporters.otlp_grpc import GrpcClient

            call = GrpcClient(target, signal)
            self._clients[signal] = call
            self._posts[signal] = lambda line, limit_s: _converted(
                line, signal, lambda m: call.post(m, limit_s)
            )
            return
        from otel_train.exporters.otlp_http import HttpClient

        client = self._clients[signal] = HttpClient(target, signal, self._connections)
        if target.protocol == HTTP_JSON:
            self._posts[signal] = lambda line, limit_s: client.post(line, JSON, limit_s)
        else:
            self._posts[signal] = lambda line, limit_s: _converted(
                line, signal, lambda message: client.post(message, PROTOBUF, limit_s)
            )


def unreadable(line: bytes, signal: str) -> str:
    """Why a line cannot be a request of this signal; "" when it can. Only its beginning is looked at."""
    if _BEGINNINGS[signal].match(line) and line.rstrip().endswith(b"}"):
        return ""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return "is not asked: the line is no JSON"
    if isinstance(value, dict) and isinstance(value.get(_KEYS[signal]), list):
        return ""
    return f"is not asked: the line is no OTLP request of {signal}, which has a list {_KEYS[signal]}"


def _converted(line: bytes, signal: str, post: Callable[[bytes], Answer]) -> Answer:
    try:
        message = protobuf_of(line, signal)
    except ValueError as error:
        return refused(f"is not asked: {first_line(str(error))}")
    return post(message)
