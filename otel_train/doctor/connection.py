"""Connections of the checks: to the collector or its proxy, with TLS, and protocol detection.

Neither SDK nor exporters are used, so that network problems are reported as they are.
"""

from __future__ import annotations

import http.client
import io
import socket
import ssl
import time
from contextlib import suppress
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from urllib.parse import urlsplit
from urllib.request import getproxies_environment, proxy_bypass

from otel_train.exporters.otlp_response import HttpResponse
from otel_train.exporters.otlp_transport import login_of, trusting
from otel_train.safety import printable

if TYPE_CHECKING:
    from collections.abc import Mapping

    from otel_train.exporters.otlp_settings import Target

WITHIN_S: Final = 3.0
"""Limit for each connection, handshake and response."""

HTTP1, GRPC, TLS = "http", "grpc", "tls"
"""Protocols that can be detected."""

SCHEME_PORTS: Final = {"http": 80, "https": 443, "grpc": 4317}

_MOST_BYTES: Final = 128 << 10
_PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0"
"""Connection preface of HTTP/2, with empty SETTINGS."""

_FRAME_BYTES: Final = 9
_SETTINGS: Final = 4
_ALERT: Final = b"\x15\x03"
_ALERT_WITHIN_S: Final = 0.3
_NO_CERTIFICATE: Final = ("CERTIFICATE_REQUIRED", "PEER_DID_NOT_RETURN", "BAD_CERTIFICATE", "UNKNOWN_CA")


class ConnectionProblem(Exception):  # noqa: N818 - a check result, not an error of this package
    """Why a connection or request failed: ``what`` goes on from ``whose``, which is "" for the collector's address."""

    def __init__(self, what: str, remedy: str, whose: str = "") -> None:
        super().__init__(what)
        self.what = what
        self.remedy = remedy
        self.whose = whose


class Proxy(NamedTuple):
    """A proxy on the route to the collector."""

    variable: str
    host: str
    port: int
    headers: Mapping[str, str] = {}

    @property
    def name(self) -> str:
        """Its name in messages, without a password."""
        return f"the proxy {self.host}:{self.port} ({self.variable})"


class Connection(NamedTuple):
    """An open connection."""

    sock: socket.socket
    proxy: Proxy | None
    certificate: Mapping[str, Any] = {}


def place_of(target: Target) -> tuple[str, int]:
    """Returns host and port of an address."""
    parts = urlsplit(target.url if "://" in target.url else f"{GRPC}://{target.url}")
    return parts.hostname or "", parts.port or SCHEME_PORTS.get(parts.scheme, 0)


def proxy_of(target: Target) -> Proxy | None:
    """Returns the proxy that the standard variables name for an address, as exporters use it."""
    host, port = place_of(target)
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
        raise ConnectionProblem("names no http:// proxy", f"correct {variable}, or unset it", f"{variable}")
    return Proxy(variable, host, port, login_of(via, "proxy-authorization"))


def connect(host: str, port: int, *, whose: str = "", remedy: str = "") -> socket.socket:
    """Opens a connection."""
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
    raise ConnectionProblem(what, f"{todo}; {named}", whose)


def open_line(target: Target, proxy: Proxy | None) -> Connection:
    """Opens a connection to a collector, through its proxy if there is one, with TLS if the address says so."""
    host, port = place_of(target)
    if proxy is None:
        sock = connect(host, port)
    else:
        around = f"set NO_PROXY={host} if the collector can be reached without it"
        named = f"{around}; {proxy.variable} names it"
        sock = connect(proxy.host, proxy.port, whose=proxy.name, remedy=named)
        if target.tls or target.protocol == GRPC:
            _tunnel(sock, proxy, f"{host}:{port}", around)
    if not target.tls:
        return Connection(sock, proxy)
    try:
        return _secured(sock, target, proxy)
    except ConnectionProblem:
        sock.close()
        raise


def _tunnel(sock: socket.socket, proxy: Proxy, there: str, around: str) -> None:
    lines = [f"CONNECT {there} HTTP/1.1", f"Host: {there}", *(f"{k}: {v}" for k, v in proxy.headers.items())]
    answer = ask(sock, "\r\n".join([*lines, "", ""]).encode(), head=True)
    if answer.status == http.client.OK:
        return
    sock.close()
    raise denied(proxy, answer, there, around)


def denied(proxy: Proxy, answer: HttpResponse, there: str, around: str) -> ConnectionProblem:
    """Returns the problem for a refusal by a proxy."""
    if answer.status == http.client.PROXY_AUTHENTICATION_REQUIRED:
        remedy = f"write user:password@ into {proxy.variable}, or {around}"
        return ConnectionProblem("asks for a login (407)", remedy, proxy.name)
    said = f"answers {answer.status}" if answer.status else "gives no answer of HTTP"
    remedy = f"have {there} allowed there, or {around}"
    return ConnectionProblem(f"denies the way to {there} ({said})", remedy, proxy.name)


def _secured(sock: socket.socket, target: Target, proxy: Proxy | None) -> Connection:
    host, port = place_of(target)
    context = _context(target)
    if target.protocol == GRPC:
        context.set_alpn_protocols(["h2"])
    sock.settimeout(WITHIN_S)
    try:
        secured = context.wrap_socket(sock, server_hostname=host)
    except ssl.SSLCertVerificationError as error:
        raise _distrusted(error, host) from error
    except (OSError, ValueError) as error:
        kind = "" if proxy else speaks(host, port, tls=False)
        known = {HTTP1: " but HTTP without it", GRPC: " but gRPC without it"}.get(kind, "")
        remedy = "write http:// in place of https:// in OTEL_EXPORTER_OTLP_ENDPOINT, or correct the port"
        raise ConnectionProblem(f"does not speak TLS{known} ({_said(error)})", remedy) from error
    return Connection(secured, proxy, secured.getpeercert() or {})


def _said(error: Exception) -> str:
    return printable(getattr(error, "reason", "") or error)


def _context(target: Target) -> ssl.SSLContext:
    try:
        return trusting(target)
    except (ssl.SSLError, OSError) as error:
        whose = "what OTEL_EXPORTER_OTLP_CERTIFICATE or OTEL_EXPORTER_OTLP_CLIENT_CERTIFICATE names"
        remedy = "name PEM files that hold a certificate, and the key that belongs to it"
        raise ConnectionProblem(f"cannot be used ({_said(error)})", remedy, whose) from error


def _distrusted(error: ssl.SSLCertVerificationError, host: str) -> ConnectionProblem:
    said = error.verify_message
    what = f"has a certificate that is not trusted: {said}"
    if "expired" in said or "not yet valid" in said:
        return ConnectionProblem(what, "have it renewed, or correct the clock of this machine")
    if "mismatch" in said or "doesn't match" in said or "not valid for" in said:
        remedy = "use a host name that the certificate has in OTEL_EXPORTER_OTLP_ENDPOINT"
        return ConnectionProblem(f"has a certificate for another name than {host} ({said})", remedy)
    remedy = "set OTEL_EXPORTER_OTLP_CERTIFICATE to the PEM file of the authority that signed it"
    return ConnectionProblem(what, f"{remedy}, and use a host name that it has")


def ask(sock: socket.socket, request: bytes, *, head: bool = False) -> HttpResponse:
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
        raw = _unasked(sock)
    except ssl.SSLError as error:
        raise _of_client(error) from error
    try:
        with suppress(BrokenPipeError, ConnectionResetError):  # it may answer before it has read everything
            sock.sendall(request)
        while len(raw) < _MOST_BYTES and not _whole(raw, head=head):
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


def _unasked(sock: socket.socket) -> bytes:
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


def _of_client(error: ssl.SSLError) -> ConnectionProblem:
    if any(word in str(error) for word in _NO_CERTIFICATE):
        remedy = "set OTEL_EXPORTER_OTLP_CLIENT_CERTIFICATE and OTEL_EXPORTER_OTLP_CLIENT_KEY"
        return ConnectionProblem("wants to see a certificate of the client", remedy)
    what = f"ends the connection over TLS ({_said(error)})"
    return ConnectionProblem(what, "look into the log of what listens there")


def _whole(raw: bytes, *, head: bool) -> bool:
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


def greets_grpc(sock: socket.socket) -> bytes:
    """Returns the server's answer to the HTTP/2 preface; b"" without one."""
    return _exchange(sock, _PREFACE)


def is_settings(raw: bytes) -> bool:
    """Whether this begins with a SETTINGS frame of HTTP/2."""
    return len(raw) >= _FRAME_BYTES and raw[3] == _SETTINGS and not any(raw[5:_FRAME_BYTES])


def is_alert(raw: bytes) -> bool:
    """Whether this is a TLS alert."""
    return raw.startswith(_ALERT)


def speaks(host: str, port: int, *, tls: bool = True) -> str:
    """Returns the protocol at an address: ``tls``, ``grpc``, ``http`` or "" if unknown."""
    with suppress(OSError, ConnectionProblem):
        if tls and _shakes_hands(host, port):
            return TLS
        with connect(host, port) as sock:
            if is_settings(greets_grpc(sock)):
                return GRPC
        with connect(host, port) as sock:
            if ask(sock, f"GET / HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode()).status:
                return HTTP1
    return ""


def _shakes_hands(host: str, port: int) -> bool:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE  # nothing is sent: only whether TLS is spoken is asked
    try:
        with connect(host, port) as sock, context.wrap_socket(sock, server_hostname=host):
            return True
    except (OSError, ValueError):
        return False
