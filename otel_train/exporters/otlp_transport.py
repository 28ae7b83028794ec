"""Sends lines of OTLP/JSON to a Collector over HTTP or gRPC, as stored or as protobuf, with limits on bytes and time."""

from __future__ import annotations

import gzip
import http.client
import io
import json
import os
import re
import select
import socket
import ssl
import sys
import threading
import time
import zlib
from base64 import b64encode
from collections.abc import Hashable, Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from ipaddress import ip_address, ip_network
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol
from urllib.parse import SplitResult, unquote, urlsplit
from urllib.request import getproxies, proxy_bypass

from otel_train.exporters.otlp_json import REQUEST_KEYS, load_protobuf, protobuf_of
from otel_train.exporters.otlp_response import (
    JSON,
    MOST_ANSWER_BYTES,
    PROTOBUF,
    PROXY_LOGIN,
    ExportResponse,
    HttpResponse,
    first_line,
    read_grpc,
    read_http,
    read_message,
    refused,
    retry,
    why,
)
from otel_train.exporters.otlp_settings import GRPC, HTTP_JSON, Target, no_password
from otel_train.safety import free_in_forks

_BEGINNINGS: Final = {
    signal: re.compile(rb'\s*\{\s*"' + key.encode() + rb'"\s*:\s*\[') for signal, key in REQUEST_KEYS.items()
}


class Transport(Protocol):
    """Sends requests."""

    def send(self, signal: str, line: bytes, timeout_s: float) -> ExportResponse:
        """Sends one line and reads the answer, within ``timeout_s`` seconds."""

    def close(self) -> None:
        """Drops connections; a send on another thread fails at once."""


class OtlpTransport:
    """Sends lines to the destination of their signal, as stored or converted. ``close`` may be called from any thread."""

    def __init__(self, targets: Mapping[str, Target], connections: Connections | None = None) -> None:
        self._targets = targets
        self._clients: dict[str, HttpClient | GrpcClient] = {}
        for signal, target in targets.items():
            if target.protocol != HTTP_JSON:
                load_protobuf(signal)  # imported now: during the first request the import would hold the GIL
            grpc = target.protocol == GRPC
            self._clients[signal] = (
                GrpcClient(target, signal) if grpc else HttpClient(target, signal, connections)
            )

    def send(self, signal: str, line: bytes, timeout_s: float) -> ExportResponse:
        """Sends one line and reads the answer, in ``timeout_s`` seconds and the time that DNS takes."""
        if problem := _unreadable(line, signal):
            return refused(problem)
        if self._targets[signal].protocol == HTTP_JSON:
            return self._clients[signal].post(line, JSON, timeout_s)
        try:
            message = protobuf_of(line, signal)
        except ValueError as error:
            return refused(f"is not asked: {first_line(str(error))}")
        return self._clients[signal].post(message, PROTOBUF, timeout_s)

    def close(self) -> None:
        """Drops connections; a send on another thread fails at once."""
        for client in self._clients.values():
            client.close()


def _unreadable(line: bytes, signal: str) -> str:
    """Returns why a line cannot be a request of this signal; "" if it can. Only its beginning is checked."""
    if _BEGINNINGS[signal].match(line) and line.rstrip().endswith(b"}"):
        return ""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return "is not asked: the line is no JSON"
    key = REQUEST_KEYS[signal]
    if isinstance(value, dict) and isinstance(value.get(key), list):
        return ""
    return f"is not asked: the line is no OTLP request of {signal}, which has a list {key}"


_OF_THE_PROXY: Final = (
    "refuses connections",
    "has a name that cannot be resolved",
    "does not accept requests (OSError: Tunnel",
)
"""Beginnings of reasons that concern the proxy, if there is one: connections go to it alone."""


def _through(proxy: str, reason: str) -> str:
    """Returns a reason that names the proxy, if there is one, because the Collector may not be the cause."""
    if not proxy or reason == PROXY_LOGIN:
        return reason
    if reason.startswith(_OF_THE_PROXY):
        remedy = "correct HTTP_PROXY or HTTPS_PROXY, or name the collector's host in NO_PROXY"
        return f"is asked through the proxy {proxy}, which {reason}: {remedy}"
    return f"is asked through the proxy {proxy} (HTTP_PROXY, HTTPS_PROXY, NO_PROXY) and {reason}"


_PORTS: Final = {"http": 80, "https": 443}


class _ResponseLines(io.BufferedReader):
    """Reads the lines of a response. IncompleteRead if the connection closes in the headers, which ``http.client`` would accept."""

    in_head = False

    def readline(self, size: int | None = -1) -> bytes:
        line = super().readline(size)
        if self.in_head and not line:
            raise http.client.IncompleteRead(b"")
        self.in_head = line.startswith(b"HTTP/") or (self.in_head and line not in (b"\r\n", b"\n"))
        return line


class _LimitedReader(io.RawIOBase):
    """Reader for ``http.client`` that stops at the limits of the connection's request."""

    def __init__(self, sock: socket.socket, limit: LimitedConnection) -> None:
        # The unbuffered file keeps the socket open when http.client lets go of it before the body is read.
        self._file = sock.makefile("rb", buffering=0)
        self._sock = sock
        self._limit = limit

    def makefile(self, _: str) -> io.BufferedReader:
        return _ResponseLines(self)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:  # Any: a buffer
        limit = self._limit
        if limit.bytes_left <= 0:
            return 0
        self._sock.settimeout(limit.seconds_left())
        count = self._file.readinto(memoryview(buffer)[: limit.bytes_left]) or 0
        limit.bytes_left -= count
        return count

    def close(self) -> None:
        if not self.closed:
            self._file.close()
        super().close()


class LimitedConnection(http.client.HTTPConnection):
    """HTTP connection that limits the total time of a request and the bytes read of its response."""

    until_s = 0.0
    bytes_left = 0
    looked_up_s = 0.0  # time of the last look-up of the host name

    def limit(self, seconds: float, most_bytes: int) -> None:
        """Sets the limits of the next request: seconds until its end, and bytes to receive."""
        self.until_s, self.bytes_left = time.monotonic() + seconds, most_bytes

    def seconds_left(self) -> float:
        """Returns the seconds left. TimeoutError if there are none."""
        left_s = self.until_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("timed out")
        return left_s

    def response_class(self, sock: Any, **more: Any) -> http.client.HTTPResponse:  # type: ignore[override]  # a factory as good as the class
        """Returns a response that is read within the limits."""
        limited: Any = _LimitedReader(sock, self)
        return http.client.HTTPResponse(limited, **more)

    def connect(self) -> None:
        """Connects, through the tunnel of a proxy if one was set."""
        self._create_connection = self._to_an_address
        self.timeout = self.seconds_left()
        super().connect()

    def _to_an_address(self, end: tuple[str, int], *_: object) -> socket.socket:
        """Returns a socket connected to the first address of a host that answers. Each address gets a share of the time left."""
        begun_s = time.monotonic()
        try:
            found: Any = socket.getaddrinfo(*end, type=socket.SOCK_STREAM)  # Any: an address of any family
        finally:  # ``getaddrinfo`` has no timeout, so its time is added to the limit
            self.looked_up_s = time.monotonic() - begun_s
            self.until_s += self.looked_up_s
        for left in range(len(found), 0, -1):
            try:
                sock = socket.create_connection(found[-left][4][:2], self.seconds_left() / left)
            except OSError as error:  # noqa: PERF203 - a handful of addresses
                problem = error
            else:
                sock.settimeout(self.seconds_left())
                return sock
        raise problem

    def send(self, data: Any) -> None:
        """Sends bytes of a request."""
        if self.sock is not None:
            self.sock.settimeout(self.seconds_left())
        super().send(data)

    def ask(
        self, method: str, path: str, body: bytes, headers: Mapping[str, str], *, most_bytes: int
    ) -> HttpResponse:
        """Sends a request and reads its response; closed afterwards if it cannot be used again."""
        # A server may refuse before it has read everything.
        with suppress(BrokenPipeError, ConnectionResetError):
            self.request(method, path, body or None, dict(headers))
        response = self.getresponse()
        found = {name.lower(): value for name, value in response.getheaders()}
        answer = HttpResponse(response.status, found, response.read(most_bytes + 1))
        left = response.length or 0
        if left and len(answer.body) <= most_bytes:  # ``read`` with a size does not raise this itself
            raise http.client.IncompleteRead(answer.body, left)
        if not response.isclosed():  # the body is longer than ``most_bytes``
            response.close()
            self.close()
        return answer


class LimitedTlsConnection(LimitedConnection, http.client.HTTPSConnection):
    """The same over TLS."""


class _Route(NamedTuple):
    """Address and proxy of a Collector."""

    key: Hashable  # equal for routes that may share a connection
    end: tuple[str, int]  # host and port to connect to: of the collector, or of a proxy
    headers: dict[str, str] = {}  # noqa: RUF012 - never changed; a proxy wants them with every request
    forwarded: bool = False  # whether a proxy forwards each request, without a tunnel
    tunnel: tuple[str, int, dict[str, str]] | None = None  # host, port and headers for a proxy, before TLS


class Connections:
    """Pool of idle connections, at most one to each Collector, for all ranks that send there."""

    def __init__(self) -> None:
        self._idle: dict[Hashable, LimitedConnection] = {}
        self._lock = free_in_forks(threading.Lock())

    def take(self, key: Hashable) -> LimitedConnection | None:
        """Removes and returns an idle connection, if there is one and the server has neither closed it nor sent data."""
        with self._lock:
            connection = self._idle.pop(key, None)
        if connection is not None and (connection.sock is None or _readable(connection.sock)):
            connection.close()
            return None
        return connection

    def give(self, key: Hashable, connection: LimitedConnection) -> None:
        """Adds a connection for the next request of any client."""
        with self._lock:
            before, self._idle[key] = self._idle.get(key), connection
        if before is not None:
            before.close()

    def close(self) -> None:
        """Closes all idle connections."""
        with self._lock:
            kept, self._idle = list(self._idle.values()), {}
        for connection in kept:
            connection.close()


def needs_no_proxy(host: str, port: int) -> bool:
    """Returns whether ``NO_PROXY`` names a host: its name, its domain, its address, or the network of its address."""
    if proxy_bypass(f"{host}:{port}"):
        return True
    with suppress(ValueError):  # a name is in no network
        address = ip_address(host)
        for named in getproxies().get("no", "").split(","):
            with suppress(ValueError):
                if address in ip_network(named.strip().strip("[]"), strict=False):
                    return True
    return False


GRPC_PROXIES: Final = ("grpc", "https", "http")
"""Schemes whose variables name the proxy of a gRPC connection; the first that is set counts."""


def named_proxy(schemes: Sequence[str], host: str, port: int) -> tuple[str, str]:
    """Returns name and value of the variable of the first of these schemes that has a proxy for an address; two "" without one."""
    proxies = {} if needs_no_proxy(host, port) else getproxies()
    scheme = next((each for each in schemes if proxies.get(each)), "")
    return (f"{scheme.upper()}_PROXY", proxies[scheme]) if scheme else ("", "")


def proxy_in(variable: str, named: str) -> SplitResult:
    """Parses the value of a proxy variable. ValueError if it is no proxy that can be used."""
    via = urlsplit(named if "://" in named else f"http://{named}")
    try:
        _ = via.port
    except ValueError:  # its message repeats what may be a password
        raise ValueError(f"proxy: correct {variable}, whose port is no number") from None
    if via.scheme != "http" or not via.hostname:
        raise ValueError(f"proxy {via.scheme}://{via.hostname or ''}: only http:// proxies can be used")
    return via


def proxy_of(schemes: Sequence[str], host: str, port: int) -> SplitResult | None:
    """Returns the proxy for an address: see ``named_proxy`` and ``proxy_in``; None without one."""
    variable, named = named_proxy(schemes, host, port)
    return proxy_in(variable, named) if variable else None


class HttpClient:
    """Sends requests to one URL.

    Redirects are not followed, and nothing is retried: ``OtlpExporter`` does that. Proxies come from the standard variables
    (``HTTPS_PROXY``, ``NO_PROXY``, ...). ``signal`` is "" for requests that are not OTLP.
    """

    def __init__(
        self,
        target: Target,
        signal: str = "",
        connections: Connections | None = None,
        *,
        most_answer_bytes: int = MOST_ANSWER_BYTES,
    ) -> None:
        self._target = target
        self._connections = connections or Connections()
        self._shares = connections is not None
        self._signal = signal
        self._most_answer_bytes = most_answer_bytes
        self._url = urlsplit(target.url)
        self._connection: LimitedConnection | None = None  # of the request in progress
        self._context: ssl.SSLContext | None = None
        self._route: _Route | None = None
        self._headers = {
            "user-agent": "otel-train",
            "accept": "application/json, application/x-protobuf",
            **login_of(self._url, "authorization"),
            **target.headers,
        }
        if target.compression:
            self._headers["content-encoding"] = target.compression

    def post(self, body: bytes, content_type: str, timeout_s: float) -> ExportResponse:
        """Posts one request and reads its answer, in at most ``timeout_s`` seconds and the time that DNS takes."""
        if self._target.compression == "gzip":
            body = gzip.compress(body, compresslevel=6, mtime=0)
        elif self._target.compression == "deflate":
            body = zlib.compress(body)
        try:
            answer = self._exchange("POST", timeout_s, body=body, content_type=content_type)
            return read_http(answer, self._signal, tls=self._target.tls)
        except (OSError, http.client.HTTPException, ValueError) as error:
            proxy = self._failed()
            return retry(_through(proxy, why(f"{type(error).__name__}: {error}", tls=self._target.tls)))

    def get(self, query: str, timeout_s: float) -> HttpResponse:
        """Gets the URL with this query, with the time limit of ``post``. OSError, with the reason, if that fails."""
        try:
            return self._exchange("GET", timeout_s, query=query)
        except (OSError, http.client.HTTPException, ValueError) as error:
            self._failed()
            raise OSError(f"{type(error).__name__}: {error}") from error

    def prepare(self) -> None:
        """Reads the certificates now, not with the first request. OSError if one cannot be read."""
        if self._target.tls and self._context is None:
            self._context = trusting(self._target)

    def close(self) -> None:
        """Closes the connection. A request in progress on another thread fails at once."""
        connection, self._connection = self._connection, None
        if not self._shares:
            self._connections.close()
        if connection is None:
            return
        # Keeps http.client from connecting again if a thread has sent the head of a request but not its body.
        connection.auto_open = 0
        if connection.sock is not None:
            with suppress(OSError):
                connection.sock.shutdown(socket.SHUT_RDWR)
        connection.close()

    def _failed(self) -> str:
        """Closes the connection after a failure; returns host and port of the proxy, "" without one."""
        self.close()
        self._context = None  # read again, because the files of certificates may be replaced
        route = self._route
        if route is None or not (route.forwarded or route.tunnel):
            return ""
        return "{}:{}".format(*route.end)

    def _exchange(
        self, method: str, timeout_s: float, *, query: str = "", body: bytes = b"", content_type: str = ""
    ) -> HttpResponse:
        route = self._route = self._route or self._find_route()
        connection = self._connection = self._connections.take(route.key) or self._made(route)
        connection.limit(timeout_s, 2 * self._most_answer_bytes)
        if connection.sock is None:
            connection.connect()
        query = query or self._url.query
        path = f"{self._url.path or '/'}{'?' * bool(query)}{query}"
        headers = {**self._headers, **route.headers}
        if content_type:
            headers["content-type"] = content_type
        if route.forwarded:  # a proxy needs the absolute URL
            path = f"{self._url.scheme}://{self._url.netloc.rpartition('@')[2]}{path}"
        answer = connection.ask(method, path, body, headers, most_bytes=self._most_answer_bytes)
        if self._connection is not None:  # else another thread has called ``close``
            self._connection = None
            if connection.sock is not None:
                self._connections.give(route.key, connection)
        return answer

    def _find_route(self) -> _Route:
        target, scheme = self._target, self._url.scheme
        host = self._url.hostname or "", self._url.port or _PORTS[scheme]
        via = proxy_of((scheme,), *host)
        proxy = via.geturl() if via is not None else ""
        key = scheme, host, proxy, target.certificate, target.client_certificate, target.client_key
        if via is None:
            return _Route(key, host)
        login = login_of(via, "proxy-authorization")
        end = via.hostname or "", via.port or _PORTS["http"]
        if not target.tls:
            return _Route(key, end, headers=login, forwarded=True)
        return _Route(key, end, tunnel=(*host, login))

    def _made(self, route: _Route) -> LimitedConnection:
        if not self._target.tls:
            return LimitedConnection(*route.end)
        self.prepare()
        connection = LimitedTlsConnection(*route.end, context=self._context)
        if route.tunnel is not None:
            connection.set_tunnel(*route.tunnel)
        return connection


def trusting(target: Target) -> ssl.SSLContext:
    """Returns a TLS context that checks the Collector with the certificates that were named, else with those of the machine."""
    named = target.certificate or os.environ.get("REQUESTS_CA_BUNDLE") or os.environ.get("CURL_CA_BUNDLE")
    if named:
        folder = os.path.isdir(named)  # noqa: PTH112 - one of the two arguments takes it as it is
        context = ssl.create_default_context(
            cafile=None if folder else named, capath=named if folder else None
        )
    else:
        context = ssl.create_default_context()
        if not context.cert_store_stats()["x509_ca"]:  # as in minimal containers
            with suppress(ImportError):
                import certifi

                context.load_verify_locations(certifi.where())
    if target.client_certificate:
        context.load_cert_chain(target.client_certificate, target.client_key or None, no_password)
    return context


def login_of(url: SplitResult, header: str) -> dict[str, str]:
    """Returns user name and password of an address, as a header."""
    if url.username is None:
        return {}
    login = f"{unquote(url.username)}:{unquote(url.password or '')}"
    return {header: f"Basic {b64encode(login.encode()).decode()}"}


def _readable(sock: socket.socket) -> bool:
    """Returns whether an idle connection was closed by the server, or has data that was not requested."""
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    return bool(poll.poll(0))


_METHODS: Final = {
    "metrics": "/opentelemetry.proto.collector.metrics.v1.MetricsService/Export",
    "traces": "/opentelemetry.proto.collector.trace.v1.TraceService/Export",
}
_OPTIONS: Final = (
    ("grpc.max_receive_message_length", MOST_ANSWER_BYTES),
    ("grpc.enable_retries", 0),
    # A connection to a host that vanished without closing it ends after 20 s without an acknowledgement; TCP alone would take
    # 15 minutes. ``keepalive_time`` switches that on; servers allow one ping in 5 minutes.
    ("grpc.keepalive_time_ms", 300_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.primary_user_agent", "otel-train"),
)
_UNREACHED: Final = ("UNAVAILABLE", "DEADLINE_EXCEEDED")
_VERBOSITY: Final = "GRPC_VERBOSITY"
_STATUS_DETAILS: Final = "grpc-status-details-bin"


class GrpcClient:
    """Calls the ``Export`` method of a collector."""

    def __init__(self, target: Target, signal: str) -> None:
        _import_quietly()
        self._target = target
        self._signal = signal
        self._proxy = ""
        self._channel: Any = None  # Any: grpc has no types
        self._closed = False

    def post(self, request: bytes, _: str, timeout_s: float) -> ExportResponse:
        """Sends one request in protobuf and reads its answer, in at most ``timeout_s`` seconds."""
        import grpc

        if self._closed:
            return retry("is not asked any more: this process is closing")
        try:
            self._channel = self._channel or self._opened()
        except (OSError, ValueError) as error:
            # From the file of a certificate, which may be replaced at this moment, or a wrong proxy.
            return retry(why(f"{type(error).__name__}: {error}", tls=True))
        call = self._channel.unary_unary(_METHODS[self._signal])
        headers = self._target.headers.items()
        metadata = [(name, value.encode() if name.endswith("-bin") else value) for name, value in headers]
        try:
            response = call(request, timeout=timeout_s, metadata=metadata)
        except grpc.RpcError as error:
            code = error.code()
            if code is grpc.StatusCode.UNAVAILABLE:
                self._drop()  # a new channel connects at once, this one only after its own backoff
            wait_s = _wait_s(error.trailing_metadata())
            answer = read_grpc(code.name, error.details() or "", wait_s, tls=self._target.tls)
            return answer._replace(reason=_through(self._proxy * (code.name in _UNREACHED), answer.reason))
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
        """Closes the connection. A request in progress on another thread fails at once."""
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
        more, self._proxy = _proxy_for(address)
        options = (*_OPTIONS, *more)
        if not target.tls:
            return grpc.insecure_channel(address, options=options, compression=compression)
        credentials = grpc.ssl_channel_credentials(_content(target.certificate), *_pair(target))
        return grpc.secure_channel(address, credentials, options=options, compression=compression)


def _proxy_for(address: str) -> tuple[tuple[tuple[str, Any], ...], str]:
    """Returns options for the proxy that HTTP would use, and its host and port. gRPC itself reads only lower-case variables."""
    place = urlsplit(f"//{address}")
    try:
        via = proxy_of(GRPC_PROXIES, place.hostname or "", place.port or _PORTS["https"])
    except ValueError:  # gRPC connects without a proxy that it cannot use
        return (), ""
    if via is None:
        return (("grpc.enable_http_proxy", 0),), ""
    return (("grpc.http_proxy", via.geturl()),), f"{via.hostname}:{via.port or _PORTS['http']}"


def _import_quietly() -> None:
    """Imports grpc with GRPC_VERBOSITY=NONE, or its C library would write to standard error for every failed handshake."""
    if "grpc" in sys.modules or _VERBOSITY in os.environ:
        return
    os.environ[_VERBOSITY] = "NONE"
    try:
        import_module("grpc")
    finally:
        del os.environ[_VERBOSITY]


def _pair(target: Target) -> tuple[bytes | None, bytes | None]:
    """Returns key and certificate for the Collector. OSError if only one has content, for which gRPC would abort the process."""
    key, certificate = (
        _content(path) for path in (target.client_key or target.client_certificate, target.client_certificate)
    )
    if bool(key) != bool(certificate):
        raise OSError("the file of a client certificate or of its key is empty")
    return key, certificate


def _content(path: str) -> bytes | None:
    return Path(path).read_bytes() if path else None


def _wait_s(metadata: Any) -> float | None:  # Any: as above
    """Returns the delay in ``RetryInfo`` of a call's status."""
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
