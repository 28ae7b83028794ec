"""Checks the OTLP endpoint: connection or its proxy, protocol, TLS, token and clock.

It connects without the SDK and the exporters, so that each kind of network problem can be reported.
"""

from __future__ import annotations

import http.client
import re
import socket
import ssl
import time
from collections.abc import Iterator, Mapping
from contextlib import closing, suppress
from email.utils import parsedate_to_datetime
from typing import Any, Final, NamedTuple
from urllib.parse import urlsplit

from otel_train.doctor.checks import NOTE, OK, PROBLEM, WARNING, CheckResult
from otel_train.errors import ConfigError
from otel_train.exporters.otlp_response import (
    JSON,
    MOST_ANSWER_BYTES,
    PROTOBUF,
    SIGNED,
    UNTRUSTED_CLIENT,
    ExportResponse,
    HttpResponse,
    read_http,
    why_untrusted,
)
from otel_train.exporters.otlp_settings import GRPC, HTTP_JSON, OtlpSettings, Target, switched_off
from otel_train.exporters.otlp_transport import (
    GRPC_PROXIES,
    GrpcClient,
    LimitedConnection,
    LimitedTlsConnection,
    login_of,
    named_proxy,
    proxy_in,
    trusting,
)
from otel_train.safety import printable

AREA = "endpoint"
EXPIRES_SOON_S = 14 * 86400.0
SKEW_NOTED_S, SKEW_HARMFUL_S = 5.0, 300.0
"""Clock skew to report. Prometheus refuses samples from the future and those older than its window."""

LOOPBACK = ("127.", "localhost", "::1")
_TLS_REMEDY = "write https:// in place of http:// in OTEL_EXPORTER_OTLP_ENDPOINT"
_SLOW_RESOLVER = "a name server does not answer in time: correct or remove it in /etc/resolv.conf"
_PROXY_STATUSES = frozenset({403, 407, 500, 502, 503, 504})

WITHIN_S: Final = 3.0
"""Limit for each connection, handshake and response."""

LOOK_UP_NOTED_S: Final = 1.0
"""Shortest look-up of a name that is reported. The resolver waits 5 s for a name server, then asks the next one."""

HTTP1, TLS = "http", "tls"
"""With ``GRPC``, the protocols that can be detected."""

SCHEME_PORTS: Final = {"http": 80, "https": 443, "grpc": 4317}

_MOST_BYTES: Final = 2 * MOST_ANSWER_BYTES
_PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0"
"""Connection preface of HTTP/2, with empty SETTINGS."""

_FRAME_BYTES: Final = 9  # head of an HTTP/2 frame
_SETTINGS: Final = 4  # type of a frame
_ALERT: Final = b"\x15\x03"  # start of a TLS alert
_ALERT_WITHIN_S: Final = 0.3
_TUNNEL: Final = re.compile(r"Tunnel connection failed: (\d+)")
_NO_CERTIFICATE: Final = (
    *("CERTIFICATE_REQUIRED", "PEER_DID_NOT_RETURN", "BAD_CERTIFICATE", "UNKNOWN_CA"),
    *("CERTIFICATE_EXPIRED", "CERTIFICATE_UNKNOWN", "CERTIFICATE_REVOKED"),
)


def settings_with_targets(
    environ: Mapping[str, str], endpoint: str = "", *, wanted: bool = False
) -> OtlpSettings | None:
    """Returns the OTLP settings; None if no signal is sent."""
    settings = OtlpSettings.read(environ, endpoint=endpoint, wanted=wanted)
    return settings if settings.targets else None


def endpoints(settings: OtlpSettings) -> list[tuple[str, Target]]:
    """Returns every address once, with one of the signals that are sent there."""
    found: dict[tuple[str, int], tuple[str, Target]] = {}
    for signal, target in settings.targets.items():
        found.setdefault(_place_of(target), (signal, target))
    return list(found.values())


def check_endpoint(
    environ: Mapping[str, str], endpoint: str = "", *, wanted: bool = False
) -> Iterator[CheckResult]:
    """Checks for every address whether it accepts an empty request, its TLS, and its clock."""
    try:
        settings = settings_with_targets(environ, endpoint, wanted=wanted)
    except ConfigError as error:
        yield CheckResult(PROBLEM, str(error), "correct the variable it names")
        return
    if settings is None:
        off = "".join(f", or {name} switches it off" for name in switched_off(environ))
        what = f"no OTLP endpoint is set{off}: a run writes its run directory and /metrics, and sends nothing"
        start = "set OTEL_EXPORTER_OTLP_ENDPOINT=http://127.0.0.1:4318; otel-train stack up starts a Collector there"
        yield CheckResult(NOTE, what, start)
        return
    token = any(name.endswith("_HEADERS") and value for name, value in environ.items() if "_OTLP_" in name)
    for signal, target in endpoints(settings):
        yield from look_at(signal, target, token=token)


def look_at(signal: str, target: Target, *, token: bool) -> Iterator[CheckResult]:
    """Sends an empty request to an address; ``token``: whether headers are sent, which may be secrets."""
    try:
        proxy = _proxy_of(target)
        with closing(_connect(target, proxy)) as connection:
            asked_s = time.time()  # not earlier: the look-up of the name may have taken long
            sock: Any = connection.sock
            certificate = sock.getpeercert() if target.tls else {}
            ask = _ask_grpc if target.protocol == GRPC else _post
            date = ask(signal, target, connection, proxy)
    except _ConnectionProblem as problem:
        yield CheckResult(PROBLEM, f"{problem.whose or target.address} {problem.what}", problem.remedy)
        return
    through = f" through {proxy.name}" if proxy else ""
    what = f"{target.address} takes connections and accepts an empty request ({target.protocol}){through}"
    yield CheckResult(OK, what)
    if connection.looked_up_s > LOOK_UP_NOTED_S:
        whose = proxy.name if proxy else target.address
        what = f"the name of {whose} takes {connection.looked_up_s:.0f} s to resolve; every new connection waits for it"
        yield CheckResult(WARNING, what, _SLOW_RESOLVER)
    if target.tls:
        yield _certificate(target, certificate, time.time())
    elif token:
        yield _unencrypted(target)
    yield from _clock(target, date, (asked_s + time.time()) / 2)


def _unencrypted(target: Target) -> CheckResult:
    what = f"{target.address} gets its headers, which may hold a token, without encryption"
    if _place_of(target)[0].startswith(LOOPBACK):
        return CheckResult(NOTE, what)
    remedy = "use https:// and OTEL_EXPORTER_OTLP_CERTIFICATE (docs/howto/secure-the-stack.md)"
    return CheckResult(WARNING, what, remedy)


def _post(signal: str, target: Target, connection: LimitedConnection, proxy: _Proxy | None) -> str:
    """Posts an empty request over HTTP/1; returns the Date of the response."""
    try:
        answer = _answer(target, connection, proxy)
    except (OSError, http.client.HTTPException) as error:
        raise _no_http(target, proxy, error, began=connection.bytes_left < _MOST_BYTES) from error
    result = read_http(answer, signal, tls=target.tls)
    if result.accepted:
        return answer.headers.get("date", "")
    if proxy is not None and not target.tls and answer.status in _PROXY_STATUSES:
        raise _refused_by_proxy(target, proxy, answer)
    raise _refused(result)


def _answer(target: Target, connection: LimitedConnection, proxy: _Proxy | None) -> HttpResponse:
    parts = urlsplit(target.url)
    path = f"{parts.path or '/'}{'?' * bool(parts.query)}{parts.query}"
    forwarded: Mapping[str, str] = {}
    if proxy is not None and not target.tls:
        path = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{path}"
        forwarded = proxy.headers
    body, kind = (b"{}", JSON) if target.protocol == HTTP_JSON else (b"", PROTOBUF)
    headers = {
        "user-agent": "otel-train-doctor", "connection": "close", **login_of(parts, "authorization"), **forwarded,
        **target.headers, "content-type": kind,
    }  # fmt: skip
    connection.limit(WITHIN_S, _MOST_BYTES)
    return connection.ask("POST", path, body, headers, most_bytes=MOST_ANSWER_BYTES)


def _no_http(target: Target, proxy: _Proxy | None, error: Exception, *, began: bool) -> _ConnectionProblem:
    """Returns why a request over HTTP/1 got no response; ``began``: bytes of one were received."""
    host, port = _place_of(target)
    if proxy is not None and not target.tls:
        remedy = f"correct {proxy.variable}, or set NO_PROXY={host}"
        return _ConnectionProblem("does not answer over HTTP", remedy, proxy.name)
    if target.tls and (alert := _alert(target, proxy)) is not None:
        return alert
    kind = "" if target.tls or proxy is not None else _speaks(host, port)
    if kind not in (GRPC, TLS) and began:
        kind = "foreign" if isinstance(error, http.client.BadStatusLine) else "unfinished"
    if not kind and isinstance(error, (ConnectionError, ssl.SSLEOFError)):
        kind = "closed"
    return _ConnectionProblem(*_NO_HTTP[kind])


_LOG = "check the log of the service on that port"
_SILENT = (
    f"takes connections and does not answer within {WITHIN_S:g} s",
    "check that the service on that port is a collector, and that it is not overloaded or stopped",
)
_CLOSED = ("takes connections and closes them without an answer", _LOG)
_WANTS_TLS = ("expects TLS, and the request came without it", _TLS_REMEDY)
_NO_HTTP = {
    GRPC: (
        "expects gRPC, and the request came over HTTP/1",
        "name the port for OTLP over HTTP, usually 4318, or set OTEL_EXPORTER_OTLP_PROTOCOL=grpc",
    ),
    TLS: _WANTS_TLS,
    HTTP1: ("answers HTTP requests, but no OTLP request", _LOG),
    "unfinished": (
        f"starts a response and does not complete it within {WITHIN_S:g} s",
        "check whether the service on that port, or a proxy in front of it, is overloaded",
    ),
    "closed": _CLOSED,
    "foreign": ("answers with something other than HTTP", "correct the port in OTEL_EXPORTER_OTLP_ENDPOINT"),
    "": _SILENT,
}
"""Problem and remedy by what was found instead of OTLP over HTTP/1."""


def _refused_by_proxy(target: Target, proxy: _Proxy, answer: HttpResponse) -> _ConnectionProblem:
    """Returns the refusal of a proxy; the remedy says whether the collector answers differently without it."""
    host, port = _place_of(target)
    around = f"set NO_PROXY={host}"
    try:
        with closing(_connect(target, None)) as connection:
            if _answer(target, connection, None).status != answer.status:
                around += f": {host} answers without it"
    except (_ConnectionProblem, OSError, http.client.HTTPException):
        around += " if the collector can be reached without it"
    return _denied(proxy, answer.status, f"{host}:{port}", around)


def _refused(answer: ExportResponse) -> _ConnectionProblem:
    what, _, remedy = answer.reason.partition(": ")
    return _ConnectionProblem(what, remedy or f"{_LOG}; OTEL_EXPORTER_OTLP_ENDPOINT names it")


def _ask_grpc(signal: str, target: Target, connection: LimitedConnection, proxy: _Proxy | None) -> str:
    """Sends an HTTP/2 preface, then an empty request; returns "", since gRPC has no Date."""
    greeting = _greet_grpc(connection.sock)
    if not _is_settings(greeting):
        raise _no_grpc(target, proxy, greeting, closed=_is_closed(connection.sock))
    client = GrpcClient(target, signal)
    try:
        answer = client.post(b"", PROTOBUF, WITHIN_S)
    finally:
        client.close()
    if not answer.accepted:
        raise _refused(answer)
    return ""


def _no_grpc(target: Target, proxy: _Proxy | None, said: bytes, *, closed: bool) -> _ConnectionProblem:
    if target.tls and (alert := _alert(target, proxy)) is not None:
        return alert
    known = said.startswith((_ALERT, b"HTTP/")) or target.tls or proxy is not None
    kind = "" if known else _speaks(*_place_of(target))
    if said.startswith(_ALERT) or kind == TLS:
        return _ConnectionProblem(*_WANTS_TLS)
    if said or kind == HTTP1:
        remedy = "name the port for gRPC, usually 4317, or set OTEL_EXPORTER_OTLP_PROTOCOL=http/json"
        return _ConnectionProblem("expects HTTP/1, and the request came over gRPC", remedy)
    return _ConnectionProblem(*(_CLOSED if closed else _SILENT))


def _certificate(target: Target, certificate: Mapping[str, Any], now_s: float) -> CheckResult:
    until = certificate.get("notAfter", "unknown")
    what = f"{target.address} speaks TLS; its certificate is trusted until {until}"
    if until != "unknown" and ssl.cert_time_to_seconds(str(until)) - now_s < EXPIRES_SOON_S:
        return CheckResult(WARNING, what, "have it renewed")
    return CheckResult(OK, what)


def _clock(target: Target, date: str, between_s: float) -> Iterator[CheckResult]:
    """Compares clocks by the Date of the response; a gRPC server sends none."""
    if target.protocol == GRPC:
        return
    try:
        server_s = parsedate_to_datetime(date).timestamp()
    except (TypeError, ValueError):
        yield CheckResult(NOTE, f"{target.address} sends no Date, so its clock is not known")
        return
    # A Date is truncated to whole seconds: half a second is added on average.
    yield skew(server_s + 0.5 - between_s, target.address)


def skew(ahead_s: float, whose: str) -> CheckResult:
    """Returns the result for a clock that is ahead by ``ahead_s``."""
    off_s = abs(ahead_s)
    if off_s <= SKEW_NOTED_S:
        return CheckResult(OK, f"the clocks of this machine and {whose} agree within {SKEW_NOTED_S:g} s")
    what = f"the clock of {whose} is {off_s:.0f} s {'ahead of' if ahead_s > 0 else 'behind'} this machine's"
    remedy = "synchronise both with NTP: samples from too far off are refused, and traces do not align with metrics"
    return CheckResult(PROBLEM if off_s > SKEW_HARMFUL_S else WARNING, what, remedy)


# --- connections ------------------------------------------------------------------------------------


class _ConnectionProblem(Exception):  # noqa: N818 - a check result, not an error of this package
    """Why a connection or request failed: ``what`` completes ``whose``, which is "" for the collector's address."""

    def __init__(self, what: str, remedy: str, whose: str = "") -> None:
        super().__init__(what)
        self.what = what
        self.remedy = remedy
        self.whose = whose


class _Proxy(NamedTuple):
    variable: str
    host: str
    port: int
    headers: Mapping[str, str] = {}

    @property
    def name(self) -> str:
        """Name in messages, without a password."""
        return f"the proxy {self.host}:{self.port} ({self.variable})"


def _place_of(target: Target) -> tuple[str, int]:
    parts = urlsplit(target.url if "://" in target.url else f"{GRPC}://{target.url}")
    return parts.hostname or "", parts.port or SCHEME_PORTS.get(parts.scheme, 0)


def _proxy_of(target: Target) -> _Proxy | None:
    """Returns the proxy for an address by the standard variables, as exporters do; None without one."""
    schemes = GRPC_PROXIES if target.protocol == GRPC else ("https" if target.tls else "http",)
    host, port = _place_of(target)
    variable, named = named_proxy(schemes, host, port) if host else ("", "")
    if not variable:
        return None
    try:
        url = proxy_in(variable, named)
    except ValueError:
        raise _ConnectionProblem(
            "names no http:// proxy", f"correct {variable}, or unset it", variable
        ) from None
    login = login_of(url, "proxy-authorization")
    return _Proxy(variable, url.hostname or "", url.port or SCHEME_PORTS["http"], login)


def _connect(target: Target, proxy: _Proxy | None) -> LimitedConnection:
    """Connects to a collector, through its proxy if there is one, with TLS if the address says so."""
    host, port = _place_of(target)
    end = (proxy.host, proxy.port) if proxy is not None else (host, port)
    connection = (
        LimitedTlsConnection(*end, context=_context(target)) if target.tls else LimitedConnection(*end)
    )
    if proxy is not None and (target.tls or target.protocol == GRPC):
        connection.set_tunnel(host, port, dict(proxy.headers))
    connection.limit(WITHIN_S, _MOST_BYTES)
    try:
        connection.connect()
    except (OSError, http.client.HTTPException, ValueError) as error:
        problem = _unconnected(target, proxy, connection, error)
        connection.close()
        raise problem from error
    return connection


def _unconnected(
    target: Target, proxy: _Proxy | None, connection: LimitedConnection, error: Exception
) -> _ConnectionProblem:
    """Returns why ``connect`` failed: name, connection, tunnel or TLS."""
    host, port = _place_of(target)
    status = _TUNNEL.search(str(error))
    connected, answered = connection.sock is not None, connection.bytes_left < _MOST_BYTES
    if isinstance(error, ssl.SSLCertVerificationError):
        return _distrusted(error, host)
    if proxy is not None and (status or answered < connected or isinstance(error, http.client.HTTPException)):
        around = f"set NO_PROXY={host} if the collector can be reached without it"
        return _denied(proxy, int(status[1]) if status else 0, f"{host}:{port}", around)
    if connected:
        kind = "" if proxy else _speaks(host, port, tls=False)
        if not kind and isinstance(error, TimeoutError):
            return _ConnectionProblem(*_SILENT)
        known = {HTTP1: " but HTTP without it", GRPC: " but gRPC without it"}.get(kind, "")
        remedy = "write http:// in place of https:// in OTEL_EXPORTER_OTLP_ENDPOINT, or correct the port"
        return _ConnectionProblem(f"does not speak TLS{known} ({_reason(error)})", remedy)
    if isinstance(error, (socket.gaierror, ValueError)):
        slow = connection.looked_up_s > LOOK_UP_NOTED_S
        what = "has a name that cannot be resolved" + f" in {connection.looked_up_s:.0f} s" * slow
        action = _SLOW_RESOLVER if slow else "correct the host name, or the resolver of this machine"
    elif isinstance(error, ConnectionRefusedError):
        what = "refuses connections"
        start_collector = "start the collector (otel-train stack up), or correct the port"
        action = "start it, or correct its port" if proxy else start_collector
    else:
        what = f"cannot be reached ({error})"
        action = "check for a firewall, a proxy or a missing route between this machine and that one"
    where = "OTEL_EXPORTER_OTLP_ENDPOINT names it"
    if proxy is not None:
        where = f"set NO_PROXY={host} if the collector can be reached without it; {proxy.variable} names it"
    return _ConnectionProblem(what, f"{action}; {where}", proxy.name if proxy else "")


def _denied(proxy: _Proxy, status: int, there: str, around: str) -> _ConnectionProblem:
    if status == http.client.PROXY_AUTHENTICATION_REQUIRED:
        remedy = f"write user:password@ into {proxy.variable}, or {around}"
        return _ConnectionProblem("asks for a login (407)", remedy, proxy.name)
    answer = f"answers {status}" if status else "does not answer over HTTP"
    remedy = f"have {there} allowed there, or {around}"
    return _ConnectionProblem(f"refuses to connect to {there} ({answer})", remedy, proxy.name)


def _reason(error: Exception) -> str:
    return printable(getattr(error, "reason", "") or error)


def _context(target: Target) -> ssl.SSLContext:
    try:
        context = trusting(target)
    except OSError as error:
        whose = "what OTEL_EXPORTER_OTLP_CERTIFICATE or OTEL_EXPORTER_OTLP_CLIENT_CERTIFICATE names"
        remedy = "name PEM files that hold a certificate, and the key that belongs to it"
        raise _ConnectionProblem(f"cannot be used ({_reason(error)})", remedy, whose) from error
    if target.protocol == GRPC:
        context.set_alpn_protocols(["h2"])
    return context


def _distrusted(error: ssl.SSLCertVerificationError, host: str) -> _ConnectionProblem:
    reason = error.verify_message
    what = f"has a certificate that is not trusted: {reason}"
    if "expired" in reason or "not yet valid" in reason:
        return _ConnectionProblem(what, "have it renewed, or correct the clock of this machine")
    if "mismatch" in reason or "doesn't match" in reason or "not valid for" in reason:
        remedy = "use a host name that the certificate has in OTEL_EXPORTER_OTLP_ENDPOINT"
        return _ConnectionProblem(f"has a certificate for another name than {host} ({reason})", remedy)
    return _ConnectionProblem(what, why_untrusted(reason)[1])


def _alert(target: Target, proxy: _Proxy | None) -> _ConnectionProblem | None:
    """Returns why the server ends a TLS connection, read from a new one without a request; None if it does not."""
    try:
        with closing(_connect(target, proxy)) as connection:
            connection.sock.settimeout(_ALERT_WITHIN_S)
            connection.sock.recv(1)
    except ssl.SSLError as error:
        if any(word in str(error) for word in _NO_CERTIFICATE):
            if target.client_certificate:
                return _ConnectionProblem(f"{UNTRUSTED_CLIENT} ({_reason(error)})", SIGNED)
            remedy = "set OTEL_EXPORTER_OTLP_CLIENT_CERTIFICATE and OTEL_EXPORTER_OTLP_CLIENT_KEY"
            return _ConnectionProblem("requires a certificate of the client", remedy)
        return _ConnectionProblem(f"ends the connection over TLS ({_reason(error)})", _LOG)
    except (_ConnectionProblem, OSError):
        pass
    return None


def _greet_grpc(sock: socket.socket) -> bytes:
    """Sends the HTTP/2 preface; returns the beginning of the answer, b"" without one."""
    received = b""
    sock.settimeout(WITHIN_S)
    with suppress(OSError):
        sock.sendall(_PREFACE)
        while len(received) < _FRAME_BYTES and (piece := sock.recv(1 << 10)):
            received += piece
    return received


def _is_closed(sock: socket.socket) -> bool:
    sock.settimeout(0)
    try:
        return not sock.recv(1)
    except (BlockingIOError, ssl.SSLWantReadError):
        return False
    except OSError:
        return True


def _is_settings(raw: bytes) -> bool:
    """Returns whether this begins with a SETTINGS frame of HTTP/2."""
    return len(raw) >= _FRAME_BYTES and raw[3] == _SETTINGS and not any(raw[5:_FRAME_BYTES])


def _speaks(host: str, port: int, *, tls: bool = True) -> str:
    """Returns the protocol of the server at an address: ``tls``, ``grpc``, ``http``, or "" if unknown."""
    with suppress(OSError, http.client.HTTPException, ValueError):
        if tls and _accepts_tls(host, port):
            return TLS
        with socket.create_connection((host, port), WITHIN_S) as sock:
            if _is_settings(_greet_grpc(sock)):
                return GRPC
        with closing(LimitedConnection(host, port)) as connection:
            connection.limit(WITHIN_S, _MOST_BYTES)
            connection.ask("GET", "/", b"", {"connection": "close"}, most_bytes=MOST_ANSWER_BYTES)
            return HTTP1
    return ""


def _accepts_tls(host: str, port: int) -> bool:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE  # nothing is sent: this tests only whether the server speaks TLS
    try:
        with (
            socket.create_connection((host, port), WITHIN_S) as sock,
            context.wrap_socket(sock, server_hostname=host),
        ):
            return True
    except (OSError, ValueError):
        return False
