"""Checks the OTLP endpoint: connection or its proxy, protocol, TLS, token and clock.

Neither SDK nor exporters connect, so that network problems are reported as they are.
"""

from __future__ import annotations

import http.client
import io
import socket
import ssl
import time
from contextlib import suppress
from email.utils import parsedate_to_datetime
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from urllib.parse import urlsplit
from urllib.request import getproxies_environment, proxy_bypass

from otel_train.doctor.checks import NOTE, OK, PROBLEM, WARNING, CheckResult
from otel_train.errors import ConfigError
from otel_train.exporters.otlp_response import JSON, PROTOBUF, ExportResponse, HttpResponse, read_http
from otel_train.exporters.otlp_settings import GRPC, HTTP_JSON, OtlpSettings
from otel_train.exporters.otlp_transport import GrpcClient, login_of, trusting
from otel_train.safety import printable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from otel_train.exporters.otlp_settings import Target

AREA = "endpoint"
EXPIRES_SOON_S = 14 * 86400.0
SKEW_NOTED_S, SKEW_HARMFUL_S = 5.0, 300.0
"""Clock skew to report. Prometheus refuses samples from the future and those older than its window."""

LOOPBACK = ("127.", "localhost", "::1")
_TLS_REMEDY = "write https:// in place of http:// in OTEL_EXPORTER_OTLP_ENDPOINT"
_PROXY_STATUSES = frozenset({403, 407, 500, 502, 503, 504})

WITHIN_S: Final = 3.0
"""Limit for each connection, handshake and response."""

HTTP1, TLS = "http", "tls"
"""With ``GRPC``, the protocols that can be detected."""

SCHEME_PORTS: Final = {"http": 80, "https": 443, "grpc": 4317}

_MOST_BYTES: Final = 128 << 10
_PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0"
"""Connection preface of HTTP/2, with empty SETTINGS."""

_FRAME_BYTES: Final = 9
_SETTINGS: Final = 4
_ALERT: Final = b"\x15\x03"
_ALERT_WITHIN_S: Final = 0.3
_NO_CERTIFICATE: Final = ("CERTIFICATE_REQUIRED", "PEER_DID_NOT_RETURN", "BAD_CERTIFICATE", "UNKNOWN_CA")


def settings_of(
    environ: Mapping[str, str], endpoint: str = "", *, wanted: bool = False
) -> OtlpSettings | None:
    """Returns what is sent, and how; None if nothing is."""
    settings = OtlpSettings.read(environ, endpoint=endpoint, wanted=wanted)
    return settings if settings.targets else None


def endpoints(settings: OtlpSettings) -> list[tuple[str, Target]]:
    """Returns every address once, with a signal that is sent there."""
    found: dict[tuple[str, int], tuple[str, Target]] = {}
    for signal, target in settings.targets.items():
        found.setdefault(_place_of(target), (signal, target))
    return list(found.values())


def check_endpoint(
    environ: Mapping[str, str],
    endpoint: str = "",
    *,
    wanted: bool = False,
    now_s: Callable[[], float] = time.time,
) -> Iterator[CheckResult]:
    """Checks for every address whether it accepts an empty request, its TLS, and its clock."""
    try:
        settings = settings_of(environ, endpoint, wanted=wanted)
    except ConfigError as error:
        yield CheckResult(PROBLEM, str(error), "correct the variable it names")
        return
    if settings is None:
        what = "no OTLP endpoint is set: a run writes its run directory and /metrics, and sends nothing"
        start = "set OTEL_EXPORTER_OTLP_ENDPOINT=http://127.0.0.1:4318; otel-train stack up starts what listens there"
        yield CheckResult(NOTE, what, start)
        return
    token = any(name.endswith("_HEADERS") and value for name, value in environ.items() if "_OTLP_" in name)
    for signal, target in endpoints(settings):
        yield from look_at(signal, target, now_s, token=token)


def look_at(
    signal: str, target: Target, now_s: Callable[[], float] = time.time, *, token: bool = False
) -> Iterator[CheckResult]:
    """Sends an empty request to an address; ``token``: whether headers are sent, which may be secrets."""
    asked_s = now_s()
    try:
        line = _open(target, _proxy_of(target))
        with line.sock:
            date = _ask_grpc(signal, target, line) if target.protocol == GRPC else _post(signal, target, line)
    except _ConnectionProblem as problem:
        yield CheckResult(PROBLEM, f"{problem.whose or target.address} {problem.what}", problem.remedy)
        return
    through = f" through {line.proxy.name}" if line.proxy else ""
    what = f"{target.address} takes connections and accepts an empty request ({target.protocol}){through}"
    yield CheckResult(OK, what)
    if target.tls:
        yield _certificate(target, line, now_s())
    elif token:
        yield _unencrypted(target)
    yield from _clock(target, date, (asked_s + now_s()) / 2)


def _unencrypted(target: Target) -> CheckResult:
    what = f"{target.address} gets its headers, which may hold a token, without encryption"
    if _place_of(target)[0].startswith(LOOPBACK):
        return CheckResult(NOTE, what)
    remedy = "use https:// and OTEL_EXPORTER_OTLP_CERTIFICATE (docs/howto/secure-the-stack.md)"
    return CheckResult(WARNING, what, remedy)


def _post(signal: str, target: Target, line: _Connection) -> str:
    """Posts an empty request over HTTP/1; returns the Date of the response."""
    answer = _http_request(line.sock, _request(target, line.proxy))
    if not answer.status:
        raise _no_http(target, line.proxy, answer.body)
    result = read_http(answer, signal, tls=target.tls)
    if result.accepted:
        return answer.headers.get("date", "")
    if line.proxy is not None and not target.tls and answer.status in _PROXY_STATUSES:
        raise _of_proxy(target, line.proxy, answer)
    raise _refused(result)


def _request(target: Target, proxy: _Proxy | None) -> bytes:
    parts = urlsplit(target.url)
    path = f"{parts.path or '/'}{'?' * bool(parts.query)}{parts.query}"
    there = parts.netloc.rpartition("@")[2]
    if proxy is not None and not target.tls:
        path = f"{parts.scheme}://{there}{path}"
    body, kind = (b"{}", JSON) if target.protocol == HTTP_JSON else (b"", PROTOBUF)
    headers = {
        "Host": there,
        "User-Agent": "otel-train-doctor",
        "Connection": "close",
        **login_of(parts, "authorization"),
        **(proxy.headers if proxy is not None and not target.tls else {}),
        **target.headers,
        "Content-Type": kind,
        "Content-Length": str(len(body)),
    }
    lines = [f"POST {path} HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items()), "", ""]
    return "\r\n".join(lines).encode("latin-1", "replace") + body


def _no_http(target: Target, proxy: _Proxy | None, said: bytes) -> _ConnectionProblem:
    """Why a request over HTTP/1 got no HTTP/1 response."""
    host, port = _place_of(target)
    if proxy is not None and not target.tls:
        remedy = f"correct {proxy.variable}, or set NO_PROXY={host}"
        return _ConnectionProblem("gives no answer of HTTP", remedy, proxy.name)
    if _is_settings(said):
        kind = GRPC
    elif _is_alert(said):
        kind = TLS
    elif said:
        kind = "unfinished" if said.startswith(b"HTTP/1.") else "foreign"
    else:
        kind = _speaks(host, port) if not target.tls and proxy is None else ""
    return _ConnectionProblem(*_NO_HTTP[kind])


_LOG = "look into the log of what listens there"
_SILENT = (
    f"takes connections and does not answer within {WITHIN_S:g} s",
    "look whether what listens there is overloaded or stopped, and whether it is a collector",
)
_WANTS_TLS = ("speaks TLS, and is asked without it", _TLS_REMEDY)
_NO_HTTP = {
    GRPC: (
        "speaks gRPC, and is asked over HTTP/1",
        "name the port for OTLP over HTTP, usually 4318, or set OTEL_EXPORTER_OTLP_PROTOCOL=grpc",
    ),
    TLS: _WANTS_TLS,
    HTTP1: ("answers other requests over HTTP, and none of OTLP", _LOG),
    "unfinished": (
        f"begins an answer and does not end it within {WITHIN_S:g} s",
        "look whether what listens there, or a proxy before it, is overloaded",
    ),
    "foreign": ("answers with something that is no HTTP", "correct the port in OTEL_EXPORTER_OTLP_ENDPOINT"),
    "": _SILENT,
}
"""By the protocol that was found instead."""


def _of_proxy(target: Target, proxy: _Proxy, answer: HttpResponse) -> _ConnectionProblem:
    """Finds whether the proxy or the collector refused, by asking the collector without the proxy."""
    host, port = _place_of(target)
    around = f"set NO_PROXY={host}"
    try:
        line = _open(target, None)
        with line.sock:
            if _http_request(line.sock, _request(target, None)).status != answer.status:
                around += f": {host} answers without it"
    except _ConnectionProblem:
        around += " if the collector can be reached without it"
    return _denied(proxy, answer, f"{host}:{port}", around)


def _refused(answer: ExportResponse) -> _ConnectionProblem:
    what, _, remedy = answer.reason.partition(": ")
    return _ConnectionProblem(what, remedy or f"{_LOG}; OTEL_EXPORTER_OTLP_ENDPOINT names it")


def _ask_grpc(signal: str, target: Target, line: _Connection) -> str:
    """Opens HTTP/2, then sends an empty request; returns "", since gRPC has no Date."""
    said = _greet_grpc(line.sock)
    if not _is_settings(said):
        raise _no_grpc(target, line.proxy, said)
    client = GrpcClient(target, signal)
    try:
        answer = client.post(b"", PROTOBUF, WITHIN_S)
    finally:
        client.close()
    if not answer.accepted:
        raise _refused(answer)
    return ""


def _no_grpc(target: Target, proxy: _Proxy | None, said: bytes) -> _ConnectionProblem:
    alert = _is_alert(said)
    known = alert or said.startswith(b"HTTP/") or target.tls or proxy is not None
    kind = "" if known else _speaks(*_place_of(target))
    if alert or kind == TLS:
        return _ConnectionProblem(*_WANTS_TLS)
    if said or kind == HTTP1:
        remedy = "name the port for gRPC, usually 4317, or set OTEL_EXPORTER_OTLP_PROTOCOL=http/json"
        return _ConnectionProblem("speaks HTTP/1, and is asked over gRPC", remedy)
    return _ConnectionProblem(*_SILENT)


def _certificate(target: Target, line: _Connection, now_s: float) -> CheckResult:
    until = line.certificate.get("notAfter", "unknown")
    what = f"{target.address} speaks TLS; its certificate is trusted until {until}"
    if until != "unknown" and ssl.cert_time_to_seconds(str(until)) - now_s < EXPIRES_SOON_S:
        return CheckResult(WARNING, what, "have it renewed")
    return CheckResult(OK, what)


def _clock(target: Target, date: str, between_s: float) -> Iterator[CheckResult]:
    """Compares clocks by the Date of the response; a gRPC server sends none."""
    if target.protocol == GRPC:
        return
    try:
        theirs_s = parsedate_to_datetime(date).timestamp()
    except (TypeError, ValueError):
        yield CheckResult(NOTE, f"{target.address} does not tell its time")
        return
    # A Date has whole seconds, cut off; half of one is the best guess.
    yield skew(theirs_s + 0.5 - between_s, target.address)


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
        """Its name in messages, without a password."""
        return f"the proxy {self.host}:{self.port} ({self.variable})"


class _Connection(NamedTuple):
    sock: socket.socket
    proxy: _Proxy | None
    certificate: Mapping[str, Any] = {}


def _place_of(target: Target) -> tuple[str, int]:
    parts = urlsplit(target.url if "://" in target.url else f"{GRPC}://{target.url}")
    return parts.hostname or "", parts.port or SCHEME_PORTS.get(parts.scheme, 0)


def _proxy_of(target: Target) -> _Proxy | None:
    """Returns the proxy that the standard variables name for an address, as exporters use it."""
    host, port = _place_of(target)
    named = getproxies_environment()
    if not host or proxy_bypass(f"{host}:{port}"):
        return None
    schemes = ("grpc", "https", "http") if target.protocol == GRPC else ("https" if target.tls else "http",)
    scheme = next((each for each in schemes if named.get(each)), "")
    if not scheme:
        return None
    variable = f"{scheme.upper()}_PROXY"
    try:
        via = urlsplit(named[scheme] if "://" in named[scheme] else f"http://{named[scheme]}")
        host, port = via.hostname or "", via.port or SCHEME_PORTS["http"]
    except ValueError:
        host = ""
    if not host or via.scheme != "http":
        raise _ConnectionProblem("names no http:// proxy", f"correct {variable}, or unset it", f"{variable}")
    return _Proxy(variable, host, port, login_of(via, "proxy-authorization"))


def _connect(host: str, port: int, *, whose: str = "", remedy: str = "") -> socket.socket:
    named = remedy or "OTEL_EXPORTER_OTLP_ENDPOINT names it"
    try:
        return socket.create_connection((host, port), WITHIN_S)
    except (socket.gaierror, UnicodeError):
        what = "has a name that cannot be resolved"
        todo = "correct the host name, or the resolver of this machine"
    except ConnectionRefusedError:
        what = "refuses connections"
        ours = "start what listens there (otel-train stack up), or correct the port"
        todo = "start it, or correct its port" if whose else ours
    except OSError as error:
        what = f"cannot be reached ({error})"
        todo = "look for a firewall, a proxy or a missing route between here and there"
    raise _ConnectionProblem(what, f"{todo}; {named}", whose)


def _open(target: Target, proxy: _Proxy | None) -> _Connection:
    """Opens a connection to a collector, through its proxy if there is one, with TLS if the address says so."""
    host, port = _place_of(target)
    if proxy is None:
        sock = _connect(host, port)
    else:
        around = f"set NO_PROXY={host} if the collector can be reached without it"
        named = f"{around}; {proxy.variable} names it"
        sock = _connect(proxy.host, proxy.port, whose=proxy.name, remedy=named)
        if target.tls or target.protocol == GRPC:
            _tunnel(sock, proxy, f"{host}:{port}", around)
    if not target.tls:
        return _Connection(sock, proxy)
    try:
        return _secured(sock, target, proxy)
    except _ConnectionProblem:
        sock.close()
        raise


def _tunnel(sock: socket.socket, proxy: _Proxy, there: str, around: str) -> None:
    lines = [f"CONNECT {there} HTTP/1.1", f"Host: {there}", *(f"{k}: {v}" for k, v in proxy.headers.items())]
    answer = _http_request(sock, "\r\n".join([*lines, "", ""]).encode(), head=True)
    if answer.status == http.client.OK:
        return
    sock.close()
    raise _denied(proxy, answer, there, around)


def _denied(proxy: _Proxy, answer: HttpResponse, there: str, around: str) -> _ConnectionProblem:
    if answer.status == http.client.PROXY_AUTHENTICATION_REQUIRED:
        remedy = f"write user:password@ into {proxy.variable}, or {around}"
        return _ConnectionProblem("asks for a login (407)", remedy, proxy.name)
    said = f"answers {answer.status}" if answer.status else "gives no answer of HTTP"
    remedy = f"have {there} allowed there, or {around}"
    return _ConnectionProblem(f"denies the way to {there} ({said})", remedy, proxy.name)


def _secured(sock: socket.socket, target: Target, proxy: _Proxy | None) -> _Connection:
    host, port = _place_of(target)
    context = _context(target)
    if target.protocol == GRPC:
        context.set_alpn_protocols(["h2"])
    sock.settimeout(WITHIN_S)
    try:
        secured = context.wrap_socket(sock, server_hostname=host)
    except ssl.SSLCertVerificationError as error:
        raise _distrusted(error, host) from error
    except (OSError, ValueError) as error:
        kind = "" if proxy else _speaks(host, port, tls=False)
        known = {HTTP1: " but HTTP without it", GRPC: " but gRPC without it"}.get(kind, "")
        remedy = "write http:// in place of https:// in OTEL_EXPORTER_OTLP_ENDPOINT, or correct the port"
        raise _ConnectionProblem(f"does not speak TLS{known} ({_reason(error)})", remedy) from error
    return _Connection(secured, proxy, secured.getpeercert() or {})


def _reason(error: Exception) -> str:
    return printable(getattr(error, "reason", "") or error)


def _context(target: Target) -> ssl.SSLContext:
    try:
        return trusting(target)
    except (ssl.SSLError, OSError) as error:
        whose = "what OTEL_EXPORTER_OTLP_CERTIFICATE or OTEL_EXPORTER_OTLP_CLIENT_CERTIFICATE names"
        remedy = "name PEM files that hold a certificate, and the key that belongs to it"
        raise _ConnectionProblem(f"cannot be used ({_reason(error)})", remedy, whose) from error


def _distrusted(error: ssl.SSLCertVerificationError, host: str) -> _ConnectionProblem:
    said = error.verify_message
    what = f"has a certificate that is not trusted: {said}"
    if "expired" in said or "not yet valid" in said:
        return _ConnectionProblem(what, "have it renewed, or correct the clock of this machine")
    if "mismatch" in said or "doesn't match" in said or "not valid for" in said:
        remedy = "use a host name that the certificate has in OTEL_EXPORTER_OTLP_ENDPOINT"
        return _ConnectionProblem(f"has a certificate for another name than {host} ({said})", remedy)
    remedy = "set OTEL_EXPORTER_OTLP_CERTIFICATE to the PEM file of the authority that signed it"
    return _ConnectionProblem(what, f"{remedy}, and use a host name that it has")


def _http_request(sock: socket.socket, request: bytes, *, head: bool = False) -> HttpResponse:
    """Sends an HTTP/1 request and reads the response; without one, returns status 0 and what was received."""
    raw = _exchange(sock, request, head=head)
    if not raw.startswith(b"HTTP/1.") or b"\r\n\r\n" not in raw:
        return HttpResponse(0, {}, raw)
    received = SimpleNamespace(makefile=lambda *_: io.BytesIO(raw))
    response = http.client.HTTPResponse(received)  # type: ignore[arg-type]  # as much of a socket as it needs
    try:
        response.begin()
        body = b"" if head else response.read()
    except (http.client.HTTPException, OSError, ValueError):  # it is not whole
        return HttpResponse(0, {}, raw)
    return HttpResponse(response.status, {name.lower(): value for name, value in response.getheaders()}, body)


def _exchange(sock: socket.socket, request: bytes, *, head: bool = False) -> bytes:
    """Receives until the end of the response, the size bound or the time limit."""
    until_s = time.monotonic() + WITHIN_S
    try:
        raw = _early_alerts(sock)
    except ssl.SSLError as error:
        raise _of_client(error) from error
    try:
        with suppress(BrokenPipeError, ConnectionResetError):  # it may answer before it has read everything
            sock.sendall(request)
        while len(raw) < _MOST_BYTES and not _is_complete(raw, head=head):
            sock.settimeout(max(0.01, until_s - time.monotonic()))
            piece = sock.recv(1 << 16)
            if not piece or time.monotonic() > until_s:
                break
            raw += piece
    except ssl.SSLError as error:
        raise _of_client(error) from error
    except OSError:
        pass
    return raw


def _early_alerts(sock: socket.socket) -> bytes:
    """TLS alerts received before anything was sent, which a pending request could hide."""
    if not isinstance(sock, ssl.SSLSocket):
        return b""
    sock.settimeout(_ALERT_WITHIN_S)
    try:
        return sock.recv(1 << 16)
    except OSError as error:
        if isinstance(error, ssl.SSLError) and not isinstance(error, ssl.SSLWantReadError):
            raise
        return b""
    finally:
        sock.settimeout(WITHIN_S)


def _of_client(error: ssl.SSLError) -> _ConnectionProblem:
    if any(word in str(error) for word in _NO_CERTIFICATE):
        remedy = "set OTEL_EXPORTER_OTLP_CLIENT_CERTIFICATE and OTEL_EXPORTER_OTLP_CLIENT_KEY"
        return _ConnectionProblem("wants to see a certificate of the client", remedy)
    what = f"ends the connection over TLS ({_reason(error)})"
    return _ConnectionProblem(what, "look into the log of what listens there")


def _is_complete(raw: bytes, *, head: bool) -> bool:
    """Whether an HTTP/1 response is complete; of other protocols, whether the first frame is."""
    if not raw.startswith(b"HTTP/1."[: len(raw)]):
        return len(raw) >= _FRAME_BYTES
    headers, end, body = raw.partition(b"\r\n\r\n")
    if not end or head:
        return bool(end)
    lengths = [line for line in headers.lower().split(b"\r\n") if line.startswith(b"content-length:")]
    with suppress(ValueError, IndexError):
        return len(body) >= int(lengths[0].partition(b":")[2])
    return b"chunked" in headers.lower() and body.endswith(b"0\r\n\r\n")


def _greet_grpc(sock: socket.socket) -> bytes:
    """The server's answer to the HTTP/2 preface; b"" without one."""
    return _exchange(sock, _PREFACE)


def _is_settings(raw: bytes) -> bool:
    """Whether this begins with a SETTINGS frame of HTTP/2."""
    return len(raw) >= _FRAME_BYTES and raw[3] == _SETTINGS and not any(raw[5:_FRAME_BYTES])


def _is_alert(raw: bytes) -> bool:
    return raw.startswith(_ALERT)


def _speaks(host: str, port: int, *, tls: bool = True) -> str:
    """Returns the protocol at an address: ``tls``, ``grpc``, ``http`` or "" if unknown."""
    with suppress(OSError, _ConnectionProblem):
        if tls and _shakes_hands(host, port):
            return TLS
        with _connect(host, port) as sock:
            if _is_settings(_greet_grpc(sock)):
                return GRPC
        with _connect(host, port) as sock:
            if _http_request(
                sock, f"GET / HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode()
            ).status:
                return HTTP1
    return ""


def _shakes_hands(host: str, port: int) -> bool:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE  # nothing is sent: only whether TLS is spoken is asked
    try:
        with _connect(host, port) as sock, context.wrap_socket(sock, server_hostname=host):
            return True
    except (OSError, ValueError):
        return False
