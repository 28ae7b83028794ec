"""An OTLP collector for tests: http and gRPC, well behaved or not."""

from __future__ import annotations

import gzip
import socket
import threading
import time
from concurrent import futures
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
    ExportMetricsServiceResponse,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)

if TYPE_CHECKING:
    from collections.abc import Iterator


class Received:
    """What a receiver was sent, in order.

    Attributes:
        endpoint: base address.
        metrics: accepted metrics requests.
        traces: accepted trace requests.
        requests: how many came, accepted or not.
        headers: those of the last http request.
    """

    def __init__(self) -> None:
        self.endpoint = ""
        self.mode = "ok"
        self.slow_s = 1.0
        self.metrics: list[ExportMetricsServiceRequest] = []
        self.traces: list[ExportTraceServiceRequest] = []
        self.requests = 0
        self.headers: dict[str, str] = {}
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


@contextmanager
def http_receiver(mode: str = "ok", *, slow_s: float = 1.0) -> Iterator[Received]:
    """A receiver on http/protobuf.

    Modes: ok, slow (answers after ``slow_s``), 500, 400, 429 (with Retry-After: 30).
    """
    received = Received()
    received.mode, received.slow_s = mode, slow_s

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            received.requests += 1
            body = self.rfile.read(int(self.headers["Content-Length"]))
            received.headers = dict(self.headers.items())
            if received.mode == "slow":
                time.sleep(received.slow_s)
            if received.mode.isdigit():
                self.send_response(int(received.mode))
                if received.mode == "429":
                    self.send_header("Retry-After", "30")
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            if self.headers.get("Content-Encoding") == "gzip":
                body = gzip.decompress(body)
            kind: dict[str, Any] = {
                "/v1/metrics": ExportMetricsServiceRequest,
                "/v1/traces": ExportTraceServiceRequest,
            }
            received.take(kind[self.path].FromString(body))
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *args: object) -> None:
            pass

    class Server(ThreadingHTTPServer):
        daemon_threads = True
        block_on_close = False

        def handle_error(self, request: Any, client_address: Any) -> None:
            """A sender that gave up is no error."""

    server = Server(("127.0.0.1", 0), Handler)
    received.endpoint = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield received
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@contextmanager
def grpc_receiver() -> Iterator[Received]:
    """A receiver on gRPC."""
    import grpc
    from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2_grpc as metrics_grpc
    from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as trace_grpc

    received = Received()

    class Metrics(metrics_grpc.MetricsServiceServicer):
        def Export(self, request: Any, context: Any) -> Any:  # noqa: N802
            received.take(request)
            return ExportMetricsServiceResponse()

    class Traces(trace_grpc.TraceServiceServicer):
        def Export(self, request: Any, context: Any) -> Any:  # noqa: N802
            received.take(request)
            return ExportTraceServiceResponse()

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
    """An address where nobody listens, kept so for the while."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{held.getsockname()[1]}"


@contextmanager
def black_hole() -> Iterator[str]:
    """An address that takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0), backlog=64) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"
