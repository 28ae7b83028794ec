"""Serves ``/metrics``. On loopback only requests to localhost and IP addresses are answered."""

from __future__ import annotations

import errno
import gzip
import io
import ipaddress
import math
import os
import re
import socket
import socketserver
import threading
import time
import weakref
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Final

from otel_train.catalog import Kind
from otel_train.config.validation import MOST_PORT
from otel_train.datamodel import NS_PER_S, AttributeValue, ExportBatch, HistogramPoint, MetricFamily, Snapshot
from otel_train.errors import ConfigError
from otel_train.files import dump_json, replace_json
from otel_train.resource import encodable

if TYPE_CHECKING:
    from pathlib import Path

    from prometheus_client import Metric as PrometheusFamily

    Take = Callable[[bytes, str], tuple[int, object]]

# --- which requests are answered --------------------------------------------------------------------
# A hostile site can point its own name at 127.0.0.1 and have a browser send requests there (DNS rebinding). Such a request
# has that name in ``Host``. An IP address in ``Host`` cannot come from another site's name.

REQUEST_BYTES: Final = 8 << 10
REQUEST_S: Final = 2.0
"""Limits of a request: bytes, body included, and seconds until all of it has arrived."""


def is_loopback(address: str) -> bool:
    """Returns whether a listening address can be reached from this machine only."""
    try:
        return ipaddress.ip_address(address.partition("%")[0]).is_loopback
    except ValueError:
        return False


def is_known_host(header: str, names: Collection[str] = ()) -> bool:
    """Returns whether a ``Host`` header is an address, ``localhost`` or one of the names (lower case), with or without a port."""
    name = header.rsplit(":", 1)[0] if header.rpartition(":")[2].isdecimal() else header
    if name.lower() in {"localhost", *names}:
        return True
    try:
        ipaddress.ip_address(name.strip("[]"))
    except ValueError:
        return False
    return True


_NEXT_PORTS = 64
"""Ports tried after the first one: more than any host has ranks."""

_MAX_CONNECTIONS = 16
"""Most clients served at once; another one disconnects the oldest. Prometheus needs one connection, a browser a few."""

_NO_DESCRIPTOR_S = 0.2  # pause after ``accept`` failed

_ANSWER_S = 5.0
"""Longest time for a client to read its answer."""

PAGE_S: Final = 5.0
"""Age from which a snapshot is replaced when a client requests the page; not without a client, as it takes 2 ms per rank."""

_TARGET_FILE = "prometheus_target.json"


class PrometheusExporter:
    """Holds the latest snapshot of one rank and serves it.

    Format (OpenMetrics with exemplars, or the classic text format) and compression are as the client accepts.
    If the port is taken, the next ones are tried, then any free one. A forked child serves nothing.
    A host that cannot be listened on is a ConfigError.

    Args:
        host: address to listen on.
        port: first port to try; 0 takes any.
        constant_labels: labels that every sample carries, by Prometheus name: ``train_run_id``, ...
        resource: resource attributes, by OpenTelemetry name; become ``target_info``.
        servers: servers shared by all ranks that publish on one page; None for a page of its own.
        snapshot: makes a new snapshot; returns None to keep the last one.
    """

    def __init__(
        self, host: str, port: int, constant_labels: Mapping[str, str],
        resource: Mapping[str, AttributeValue], *, servers: MetricsServers | None = None,
        snapshot: Callable[[], Snapshot | None] = lambda: None,
    ) -> None:  # fmt: skip
        self._written: Path | None = None
        self._host = host
        self._page = RankPage(constant_labels, resource, snapshot)
        self._servers = servers or MetricsServers()
        self._server = self._servers.join(host, port, self._page)
        self.port = int(self._server.server_address[1])

    @property
    def url(self) -> str:
        """Address of ``/metrics``."""
        return f"http://{self._target()}/metrics"

    def answer_captures(self, take: Take) -> None:
        """Answers ``POST /capture`` from now on; ``take`` gets the body and the bearer token, and returns status and answer."""
        self._page.take_capture = take

    def export(self, batch: ExportBatch) -> None:
        """Shows this snapshot from now on."""
        if batch.snapshot is not None:
            self._page.show(batch.snapshot)

    def close(self, timeout_s: float) -> None:
        """Removes this rank from the page, and the target file. The last rank frees the port. Idempotent.

        A run that is killed leaves its target file, so that Prometheus has a target that is down, unlike after a normal end.
        """
        self._servers.leave(self._server, self._page, timeout_s)
        if self._written is not None:
            with suppress(OSError):
                self._written.unlink(missing_ok=True)

    def write_target(self, directory: Path) -> Path:
        """Writes ``prometheus_target.json`` for Prometheus' ``file_sd_configs`` into the folder of the rank."""
        path = directory / _TARGET_FILE
        replace_json(path, [{"targets": [self._target()], "labels": {}}])
        self._written = path
        return path

    def _target(self) -> str:
        # No client can connect to a wildcard address.
        host = socket.gethostname() if self._host in {"", "0.0.0.0", "::"} else self._host  # noqa: S104  # compared, not bound
        return f"[{host}]:{self.port}" if ":" in host else f"{host}:{self.port}"


class MetricsServers:
    """Servers of ``/metrics``, each shared by the ranks of one process that use the same address."""

    def __init__(self) -> None:
        self._servers: dict[tuple[str, int], _Server] = {}
        self._lock = threading.Lock()

    def join(self, host: str, port: int, page: RankPage) -> _Server:
        """Adds a rank to the server at this address, which it returns. ConfigError if the host cannot be listened on."""
        with self._lock:
            server = self._servers.get((host, port))
            if server is None:
                server = self._servers[host, port] = _listen(host, port)
            server.ranks.append(page)
            return server

    def leave(self, server: _Server, page: RankPage, timeout_s: float) -> None:
        """Removes a rank from its server; after the last one the server stops."""
        with self._lock:
            if page not in server.ranks:
                return
            server.ranks.remove(page)
            if server.ranks:
                return
            self._servers = {key: each for key, each in self._servers.items() if each is not server}
        server.stop(timeout_s)


_USED_UP = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}
"""Errors that no other address would avoid: this process, or the machine, is out of descriptors, buffers or memory."""


def _listen(host: str, port: int) -> _Server:
    ports = [*range(port, min(port + _NEXT_PORTS, MOST_PORT) + 1), 0] if port else [0]
    problem: Exception | None = None
    for candidate in ports:
        try:
            return _Server(host, candidate)
        except (OSError, UnicodeError) as error:  # noqa: PERF203 - one attempt each; a label may have 64 letters
            problem, number = error, getattr(error, "errno", None)
            if number in _USED_UP:
                raise
            if number not in {errno.EADDRINUSE, errno.EACCES}:
                break
    raise ConfigError(
        f"Prometheus endpoint {host}:{port}: {problem}. Use an address of this machine, "
        "such as 127.0.0.1, or switch the endpoint off."
    ) from problem


class _Server(socketserver.ThreadingTCPServer):
    """Accepts on one daemon thread, answers each client on another, and stops without waiting for clients."""

    daemon_threads = True
    block_on_close = False
    allow_reuse_address = True
    allow_reuse_port = False
    request_queue_size = 64

    def __init__(self, host: str, port: int) -> None:
        from prometheus_client import CollectorRegistry

        self.ranks: list[RankPage] = []
        self.registry = CollectorRegistry()
        self.registry.register(PageCollector(self.ranks))
        self._clients: dict[socket.socket, None] = {}  # in the order in which they came
        self._lock = threading.Lock()
        self._stopped = False
        if ":" in host:
            self.address_family = socket.AF_INET6
        super().__init__((host, port), _Handler)
        self.local = is_loopback(str(self.server_address[0]))
        self._thread = threading.Thread(target=self._accept, name="otel_train-prometheus", daemon=True)
        _live.add(self)
        try:
            self._thread.start()
        except RuntimeError:  # no thread is left
            self.stop(0)
            raise

    def _accept(self) -> None:
        while not self._stopped:
            self.handle_request()

    def get_request(self) -> Any:  # Any: as the base class has it
        """Accepts a connection; pauses if that fails. Without a free descriptor it stays in the backlog, and the loop would spin."""
        try:
            return super().get_request()
        except OSError:
            if not self._stopped:
                time.sleep(_NO_DESCRIPTOR_S)
            raise

    def process_request(self, request: Any, client_address: Any) -> None:  # Any: as the base class has it
        """Answers a request on a thread. Beyond the limit the oldest unfinished connection is closed."""
        with self._lock:
            dropped = list(self._clients)[: max(0, len(self._clients) + 1 - _MAX_CONNECTIONS)]
            for client in dropped:
                del self._clients[client]
            self._clients[request] = None
        for client in dropped:
            _shut(client)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:  # Any: as above
        with self._lock:
            self._clients.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:  # Any: as above
        """Ignores errors: a client may disconnect during a response."""

    def stop(self, timeout_s: float) -> None:
        if self._stopped:
            return
        self._stopped = True
        _live.discard(self)
        _shut(self.socket)  # wakes the thread that accepts
        if self._thread.is_alive():
            self._thread.join(timeout_s)
        self.server_close()
        with self._lock:
            clients = list(self._clients)
        for client in clients:
            _shut(client)

    def forget(self) -> None:
        """Closes the inherited sockets in a forked child, or the port would stay taken for the lifetime of the child."""
        self._stopped = True
        for inherited in (self.socket, *self._clients):
            inherited.close()


def _shut(connection: socket.socket) -> None:
    """Shuts a socket down, which wakes the thread that reads or accepts on it; that thread closes it."""
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


_live: weakref.WeakSet[_Server] = weakref.WeakSet()


def _forget_all() -> None:
    for server in list(_live):
        server.forget()


os.register_at_fork(after_in_child=_forget_all)


class TooLargeError(Exception):
    """A request exceeds the limit of bytes."""


class _Incoming(io.RawIOBase):
    """Reads a request with limits on total time and size."""

    def __init__(self, connection: socket.socket) -> None:
        super().__init__()
        self._connection = connection
        self._left_bytes = REQUEST_BYTES
        self._until_s = time.monotonic() + REQUEST_S

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:  # Any: a buffer
        left_s = self._until_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("a request took too long")
        if not self._left_bytes:
            raise TooLargeError
        self._connection.settimeout(left_s)
        read = self._connection.recv_into(memoryview(buffer)[: self._left_bytes])
        self._left_bytes -= read
        return read


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    timeout = REQUEST_S
    server_version = "otel_train"
    sys_version = ""

    def setup(self) -> None:
        super().setup()
        self.rfile.close()
        self.rfile = io.BufferedReader(_Incoming(self.connection))

    def handle_one_request(self) -> None:
        """Answers one request; one that is too large gets status 431."""
        try:
            super().handle_one_request()
        except TooLargeError:
            self.close_connection = True
            self.connection.settimeout(_ANSWER_S)
            self.wfile.write(b"HTTP/1.0 431 Request Header Fields Too Large\r\nContent-Length: 0\r\n\r\n")

    def parse_request(self) -> bool:
        """Returns whether to handle the request: on a loopback address not if ``Host`` is another site's name."""
        if not super().parse_request():
            return False
        self.connection.settimeout(_ANSWER_S)
        hosts = self.headers.get_all("Host", [])
        if len(hosts) > 1:  # RFC 9112: a proxy in front of this server may have used the other one
            self.send_error(HTTPStatus.BAD_REQUEST)
            return False
        # Without ``Host`` the client is no browser.
        if not self.server.local or not hosts or is_known_host(hosts[0]):
            return True
        text = (
            "This endpoint listens on loopback, so it answers to localhost and to addresses only. "
            "Use http://127.0.0.1 and its port; or set OTEL_TRAIN_PROMETHEUS_ADDRESS to an address that other names lead to.\n"
        )
        headers = {"Content-Type": "text/plain; charset=utf-8", "Connection": "close"}
        self._answer(text.encode(), headers, HTTPStatus.MISDIRECTED_REQUEST)
        return False

    def do_GET(self) -> None:  # the base class asks for this name
        path = self.path.partition("?")[0]
        if path == "/metrics":
            self._page()
        elif path == "/":
            body = b'<a href="/metrics">metrics</a>\n'
            self._answer(body, {"Content-Type": "text/html; charset=utf-8"})
        else:
            self.send_error(HTTPStatus.NOT_FOUND)

    def do_POST(self) -> None:
        pages = list(self.server.ranks) if self.path.partition("?")[0] == "/capture" else []
        takes = [page.take_capture for page in pages if page.take_capture is not None]
        length = self.headers.get("Content-Length", "0")
        if not takes:
            self.send_error(HTTPStatus.NOT_FOUND)
        elif "Transfer-Encoding" in self.headers:  # read as empty, it would start a default capture
            self.send_error(HTTPStatus.LENGTH_REQUIRED)
        elif not re.fullmatch("[0-9]{1,9}", length) or int(length) > REQUEST_BYTES:
            self.send_error(HTTPStatus.REQUEST_ENTITY_TOO_LARGE)
        else:
            body = self.rfile.read(int(length))
            if len(body) < int(length):
                self.send_error(HTTPStatus.BAD_REQUEST)
                return
            scheme, _, token = self.headers.get("Authorization", "").partition(" ")
            self.connection.settimeout(_ANSWER_S)
            status: int = HTTPStatus.UNAUTHORIZED
            answer: object = {}
            for take in takes:  # the rank that the request is for accepts the token
                status, answer = take(body, token.strip() if scheme == "Bearer" else "")
                if status != HTTPStatus.UNAUTHORIZED:
                    break
            self._answer(dump_json(answer).encode() + b"\n", {"Content-Type": "application/json"}, status)

    do_HEAD = do_GET  # noqa: N815  # as above

    def _page(self) -> None:
        from prometheus_client.exposition import choose_encoder

        try:
            encode, content_type = choose_encoder(self.headers.get("Accept", ""))
        except (TypeError, ValueError):  # a malformed version in ``Accept``
            encode, content_type = choose_encoder("")
        body = encode(self.server.registry)
        headers = {"Content-Type": content_type, "Vary": "Accept, Accept-Encoding"}
        if _takes_gzip(self.headers.get("Accept-Encoding", "")):
            body = gzip.compress(body, compresslevel=1)
            headers["Content-Encoding"] = "gzip"
        self._answer(body, headers)

    def _answer(self, body: bytes, headers: Mapping[str, str], status: int = HTTPStatus.OK) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  # the base class's name
        """Prints nothing: the console belongs to the program."""


def _takes_gzip(accept_encoding: str) -> bool:
    for item in accept_encoding.lower().split(","):
        name, _, weight = item.partition(";")
        if name.strip() in {"gzip", "*"}:
            return not re.fullmatch(r"q=0(\.0*)?", weight.replace(" ", ""))
    return False


# --- the page ---------------------------------------------------------------------------------------

_UNITS = ("seconds", "bytes", "ratio", "watts", "celsius")
"""Units that the OpenTelemetry translation appends to a name, and that OpenMetrics then requires as ``# UNIT``."""

_TYPES = {Kind.COUNTER: "counter", Kind.HISTOGRAM: "histogram"}


class RankPage:
    """What one rank contributes to a page: its newest snapshot, and an answer to requests of captures."""

    def __init__(
        self,
        constant_labels: Mapping[str, str],
        resource: Mapping[str, AttributeValue],
        renew: Callable[[], Snapshot | None],
    ) -> None:
        self._snapshot: Snapshot | None = None
        self._renew = renew
        self._shown_s = -math.inf
        self.take_capture: Take | None = None
        self._labels = {name: encodable(text) for name, text in constant_labels.items()}
        self._target = target_labels({key: str(value) for key, value in resource.items()})

    def show(self, snapshot: Snapshot) -> None:
        """Replaces the snapshot."""
        self._snapshot, self._shown_s = snapshot, time.monotonic()

    def current(self) -> Snapshot | None:
        """Returns the snapshot, replaced by a new one if it is older than ``PAGE_S`` and one can be made."""
        before = self._snapshot
        fresh = self._renew() if time.monotonic() - self._shown_s > PAGE_S else None
        # Not if the export loop has shown one meanwhile: it may be the final one.
        if fresh is not None and self._snapshot is before:
            self.show(fresh)
        return self._snapshot

    def add_target(self, page: PrometheusFamily) -> None:
        """Adds ``target_info``, which carries the resource attributes."""
        page.add_sample("target_info", {**self._target, **self._labels}, 1.0)

    def add(self, page: PrometheusFamily, family: MetricFamily) -> None:
        """Adds the points of one metric."""
        metric = family.metric
        name = page.name + ("_total" if metric.kind is Kind.COUNTER else "")
        for point in family.points:
            labels = {
                **self._labels,
                **{label_name(key): encodable(value) for key, value in point.attributes},
            }
            if metric.kind is Kind.HISTOGRAM:
                _add_histogram(page, metric.bounds, point, labels)  # type: ignore[arg-type]  # the kind says which
            else:
                page.add_sample(name, labels, point.value)  # type: ignore[union-attr]  # the kind says which


class PageCollector:
    """Collector for ``prometheus_client``: merges the snapshots of all ranks into the families of one page."""

    def __init__(self, ranks: Sequence[RankPage]) -> None:
        self._ranks = ranks

    def collect(self) -> Iterator[PrometheusFamily]:
        """Yields every family once, with the points of all ranks, the targets first."""
        from prometheus_client import Metric

        target = Metric("target", "Resource attributes of the process.", "info")
        found: dict[str, list[tuple[RankPage, MetricFamily]]] = {}
        for rank in list(self._ranks):
            rank.add_target(target)
            snapshot = rank.current()
            for family in snapshot.families if snapshot is not None else ():
                if family.points:
                    found.setdefault(family.metric.prometheus, []).append((rank, family))
        yield target
        for parts in found.values():
            metric = parts[0][1].metric
            name = metric.prometheus.removesuffix("_total")
            unit = next((unit for unit in _UNITS if name.endswith(f"_{unit}")), "")
            page = Metric(name, metric.meaning, _TYPES.get(metric.kind, "gauge"), unit)
            for rank, family in parts:
                rank.add(page, family)
            yield page


def target_labels(resource: Mapping[str, str]) -> dict[str, str]:
    """Returns the labels of ``target_info``, without names that Prometheus reserves: it refuses a page that has one."""
    labels = {label_name(key): encodable(text) for key, text in resource.items()}
    return {name: text for name, text in labels.items() if not name.startswith("__")}


def label_name(attribute: str) -> str:
    """Returns an attribute's name as a label, by the OpenTelemetry to Prometheus translation."""
    name = "".join(char if char.isascii() and char.isalnum() else "_" for char in attribute)
    return f"key_{name}" if name[:1].isdigit() else name


def _add_histogram(
    page: PrometheusFamily, bounds: tuple[float, ...], point: HistogramPoint, labels: dict[str, str]
) -> None:
    from prometheus_client.samples import Exemplar
    from prometheus_client.utils import floatToGoString

    newest = {}  # newest exemplar by bucket: OpenMetrics allows one
    for each in sorted(point.exemplars, key=lambda exemplar: exemplar.time_unix_ns):
        ids = {"trace_id": f"{each.trace_id:032x}", "span_id": f"{each.span_id:016x}"}
        newest[bisect_left(bounds, each.value)] = Exemplar(ids, each.value, each.time_unix_ns / NS_PER_S)
    edges = (*bounds, math.inf)
    for bucket, count in enumerate(accumulate(point.explicit_counts)):
        edge = floatToGoString(edges[bucket])  # type: ignore[no-untyped-call]  # theirs
        page.add_sample(f"{page.name}_bucket", {**labels, "le": edge}, count, exemplar=newest.get(bucket))
    page.add_sample(f"{page.name}_count", labels, point.count)
    page.add_sample(f"{page.name}_sum", labels, point.sum)
