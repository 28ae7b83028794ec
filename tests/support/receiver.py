"""An OTLP collector for tests: http and gRPC, well behaved or not."""

from __future__ import annotations

import base64
import gzip
import json
import socket
import threading
import time
from collections.abc import Iterator
from concurrent import futures
from contextlib import contextmanager, suppress
from email.message import Message
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar

from google.protobuf import json_format
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
    ExportMetricsServiceResponse,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)


class Received:
    """What a receiver was sent, in order.

    Attributes:
        endpoint: base address.
        mode: how it answers; may be changed at any time.
        metrics: accepted metrics requests.
        traces: accepted trace requests.
        requests: how many came, accepted or not.
        headers: those of the last http request.
        retry_after: value of that header in answers other than 200; "" for none.
        location: value of that header.
        rejecting: how many records ``partial`` rejects.
        open_connections: of clients.
        connections: how many came in all.
        poison: only bodies with these bytes are answered with the status that the mode is.
    """

    def __init__(self) -> None:
        self.endpoint = ""
        self.mode = "ok"
        self.slow_s = 1.0
        self.metrics: list[ExportMetricsServiceRequest] = []
        self.traces: list[ExportTraceServiceRequest] = []
        self.requests = 0
        self.open_connections = self.connections = 0
        self.headers = Message()
        self.retry_after = ""
        self.location = ""
        self.rejecting = 0
        self.poison = b""
        self._came = threading.Condition()

    def take(self, request: Any) -> None:
        """Keep one accepted request."""
        with self._came:
            kept: list[Any] = (
                self.metrics if isinstance(request, ExportMetricsServiceRequest) else self.traces
            )
            kept.append(request)
            self._came.notify_all()

    def wait(self, *, metrics: int = 0, traces: int = 0, timeout_s: float = 10.0) -> bool:
        """Wait until at least so many requests were accepted."""
        with self._came:
            return self._came.wait_for(
                lambda: len(self.metrics) >= metrics and len(self.traces) >= traces, timeout_s
            )

    def points(self) -> dict[str, Any]:
        """The metrics of the last metrics request, by name."""
        scope = self.metrics[-1].resource_metrics[0].scope_metrics[0]
        return {metric.name: metric for metric in scope.metrics}

    def spans(self) -> list[Any]:
        """Every span received."""
        return [
            span
            for request in self.traces
            for group in request.resource_spans
            for part in group.scope_spans
            for span in part.spans
        ]


ANSWERS = {
    "html": (b"<html><form action=/login></form></html>", "text/html; charset=utf-8"),
    "text": (b"OK", "text/plain"),
    "odd": (b'{"status": "healthy"}', "application/json"),
}
"""What is answered with status 200 by what is no collector: body and content type."""


def request_of(path: str, body: bytes, kind: str) -> Any:
    """A request as a message; None when it is none."""
    message: Any = (
        ExportMetricsServiceRequest() if path.endswith("/v1/metrics") else ExportTraceServiceRequest()
    )
    try:
        if kind == "application/json":
            return json_format.ParseDict(ids_in_base64(json.loads(body)), message)
        message.ParseFromString(body)
    except Exception:  # noqa: BLE001 - whatever came
        return None
    return message


def ids_in_base64(node: Any) -> Any:
    """OTLP/JSON differs from protobuf's own JSON only in how ids are spelled."""
    if isinstance(node, dict):
        return {
            key: base64.urlsafe_b64encode(bytes.fromhex(value)).decode()
            if key in {"traceId", "spanId", "parentSpanId"}
            else ids_in_base64(value)
            for key, value in node.items()
        }
    return [ids_in_base64(item) for item in node] if isinstance(node, list) else node


def _response(path: str, kind: str, mode: str, received: Received) -> bytes:
    metrics = path.endswith("/v1/metrics")
    if mode != "partial":
        return b"{}" if kind == "application/json" else b""
    if kind == "application/json":
        key = "rejectedDataPoints" if metrics else "rejectedSpans"
        partial = {key: str(received.rejecting), "errorMessage": "too old"}
        return json.dumps({"partialSuccess": partial}).encode()
    response: Any = ExportMetricsServiceResponse() if metrics else ExportTraceServiceResponse()
    name = "rejected_data_points" if metrics else "rejected_spans"
    setattr(response.partial_success, name, received.rejecting)
    response.partial_success.error_message = "too old"
    return bytes(response.SerializeToString())


@contextmanager
def http_receiver(
    mode: str = "ok", *, slow_s: float = 1.0, port: int = 0, ahead_s: float = 0.0
) -> Iterator[Received]:
    """A receiver of OTLP over HTTP, in JSON and in protobuf.

    Modes: ok; slow (answers after ``slow_s``); a status (429 with Retry-After: 30); html (a login page with status 200);
    text (status 200 with plain text); partial (accepts with rejected records); odd (status 200, JSON that is no OTLP);
    endless (status 200, a body without end); trickle (headers, a byte at a time); close (the connection is closed
    without an answer). ``ahead_s``: of its clock.
    """
    received = Received()
    received.mode, received.slow_s = mode, slow_s
    if mode == "429":
        received.retry_after = "30"

    class Handler(BaseHTTPRequestHandler):
        def setup(self) -> None:
            super().setup()
            received.open_connections += 1
            received.connections += 1

        def finish(self) -> None:
            received.open_connections -= 1
            super().finish()

        def date_time_string(self, timestamp: float | None = None) -> str:
            return super().date_time_string((timestamp or time.time()) + ahead_s)

        def do_POST(self) -> None:
            # Before the request is counted: a test that waits for it may change the mode then.
            mode = received.mode
            received.requests += 1
            body = self.rfile.read(int(self.headers["Content-Length"]))
            received.headers = self.headers
            if mode == "slow":
                time.sleep(received.slow_s)
            if mode.isdigit() and received.poison in body:
                self._answer(int(mode), b"", "")
                return
            kind = self.headers["Content-Type"]
            if mode in ANSWERS:
                self._answer(200, *ANSWERS[mode])
                return
            if mode in {"endless", "trickle", "close"}:
                self._misbehave(mode, kind)
                return
            if self.headers.get("Content-Encoding") == "gzip":
                body = gzip.decompress(body)
            asked = request_of(self.path, body, kind)
            if asked is None:
                self._answer(400, b"not OTLP", "text/plain")
                return
            received.take(asked)
            self._answer(200, _response(self.path, kind, mode, received), kind)

        def _answer(self, status: int, body: bytes, kind: str) -> None:
            self.send_response(status)
            if received.retry_after and status != 200:
                self.send_header("Retry-After", received.retry_after)
            if received.location:
                self.send_header("Location", received.location)
            if kind:
                self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def _misbehave(self, mode: str, kind: str) -> None:
            self.close_connection = True
            if mode == "endless":
                self.wfile.write(f"HTTP/1.1 200 OK\r\nContent-Type: {kind}\r\n\r\n{{".encode())
                while True:
                    self.wfile.write(b" " * (1 << 16))
            if mode == "trickle":
                for each in b"HTTP/1.1 200 OK\r\nX-Slow: " + b"x" * 10_000:
                    self.wfile.write(bytes([each]))
                    time.sleep(0.05)

        def log_message(self, *args: object) -> None:
            pass

        protocol_version = "HTTP/1.1"

    class Server(ThreadingHTTPServer):
        daemon_threads = True
        block_on_close = False
        connections: ClassVar[list[socket.socket]] = []

        def process_request(self, request: Any, client_address: Any) -> None:
            self.connections.append(request)
            super().process_request(request, client_address)

        def handle_error(self, request: Any, client_address: Any) -> None:
            """A sender that gave up is no error."""

    server = Server(("127.0.0.1", port), Handler)
    received.endpoint = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield received
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
        for connection in Server.connections:  # those that are kept, too
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)


@contextmanager
def grpc_receiver() -> Iterator[Received]:
    """A receiver on gRPC. Modes: ok, partial, the name of a status."""
    import grpc
    from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2_grpc as metrics_grpc
    from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as trace_grpc

    received = Received()

    def answer(request: Any, context: Any, path: str) -> Any:
        mode = received.mode
        received.requests += 1
        if mode not in {"ok", "partial"}:
            context.abort(getattr(grpc.StatusCode, mode), "as set")
        received.take(request)
        kind: Any = ExportMetricsServiceResponse if path == "/v1/metrics" else ExportTraceServiceResponse
        return kind.FromString(_response(path, "", mode, received))

    class Metrics(metrics_grpc.MetricsServiceServicer):
        def Export(self, request: Any, context: Any) -> Any:  # noqa: N802
            return answer(request, context, "/v1/metrics")

    class Traces(trace_grpc.TraceServiceServicer):
        def Export(self, request: Any, context: Any) -> Any:  # noqa: N802
            return answer(request, context, "/v1/traces")

    server = grpc.server(futures.ThreadPoolExecutor(max_workers=2))
    metrics_grpc.add_MetricsServiceServicer_to_server(Metrics(), server)  # type: ignore[no-untyped-call]  # generated
    trace_grpc.add_TraceServiceServicer_to_server(Traces(), server)  # type: ignore[no-untyped-call]  # generated
    received.endpoint = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        yield received
    finally:
        server.stop(None).wait()


@contextmanager
def refusing_address() -> Iterator[str]:
    """An address that refuses connections, kept so for the while."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{held.getsockname()[1]}"


@contextmanager
def black_hole() -> Iterator[str]:
    """An address that takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0), backlog=64) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"
