"""Checks the OTLP endpoint: connection, protocol, TLS, token and clock."""

from __future__ import annotations

import ssl
import time
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from otel_train.doctor import connection
from otel_train.doctor.checks import NOTE, OK, PROBLEM, WARNING, CheckResult
from otel_train.doctor.connection import Connection, ConnectionProblem, Proxy
from otel_train.errors import ConfigError
from otel_train.exporters.otlp_response import JSON, PROTOBUF, ExportResponse, HttpResponse, read_http
from otel_train.exporters.otlp_settings import GRPC, HTTP_JSON, OtlpSettings
from otel_train.exporters.otlp_transport import login_of

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
        found.setdefault(connection.place_of(target), (signal, target))
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
        line = connection.open_line(target, connection.proxy_of(target))
        with line.sock:
            date = _ask_grpc(signal, target, line) if target.protocol == GRPC else _post(signal, target, line)
    except ConnectionProblem as problem:
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
    if connection.place_of(target)[0].startswith(LOOPBACK):
        return CheckResult(NOTE, what)
    remedy = "use https:// and OTEL_EXPORTER_OTLP_CERTIFICATE (docs/howto/secure-the-stack.md)"
    return CheckResult(WARNING, what, remedy)


def _post(signal: str, target: Target, line: Connection) -> str:
    """Posts an empty request over HTTP/1; returns the Date of the response."""
    answer = connection.ask(line.sock, _request(target, line.proxy))
    if not answer.status:
        raise _no_http(target, line.proxy, answer.body)
    result = read_http(answer, signal, tls=target.tls)
    if result.accepted:
        return answer.headers.get("date", "")
    if line.proxy is not None and not target.tls and answer.status in _PROXY_STATUSES:
        raise _of_proxy(target, line.proxy, answer)
    raise _refused(result)


def _request(target: Target, proxy: Proxy | None) -> bytes:
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


def _no_http(target: Target, proxy: Proxy | None, said: bytes) -> ConnectionProblem:
    """Why a request over HTTP/1 got no HTTP/1 response."""
    host, port = connection.place_of(target)
    if proxy is not None and not target.tls:
        remedy = f"correct {proxy.variable}, or set NO_PROXY={host}"
        return ConnectionProblem("gives no answer of HTTP", remedy, proxy.name)
    if connection.is_settings(said):
        kind = connection.GRPC
    elif connection.is_alert(said):
        kind = connection.TLS
    elif said:
        kind = "unfinished" if said.startswith(b"HTTP/1.") else "foreign"
    else:
        kind = connection.speaks(host, port) if not target.tls and proxy is None else ""
    return ConnectionProblem(*_NO_HTTP[kind])


_LOG = "look into the log of what listens there"
_SILENT = (
    f"takes connections and does not answer within {connection.WITHIN_S:g} s",
    "look whether what listens there is overloaded or stopped, and whether it is a collector",
)
_WANTS_TLS = ("speaks TLS, and is asked without it", _TLS_REMEDY)
_NO_HTTP = {
    connection.GRPC: (
        "speaks gRPC, and is asked over HTTP/1",
        "name the port for OTLP over HTTP, usually 4318, or set OTEL_EXPORTER_OTLP_PROTOCOL=grpc",
    ),
    connection.TLS: _WANTS_TLS,
    connection.HTTP1: ("answers other requests over HTTP, and none of OTLP", _LOG),
    "unfinished": (
        f"begins an answer and does not end it within {connection.WITHIN_S:g} s",
        "look whether what listens there, or a proxy before it, is overloaded",
    ),
    "foreign": ("answers with something that is no HTTP", "correct the port in OTEL_EXPORTER_OTLP_ENDPOINT"),
    "": _SILENT,
}
"""By the protocol that was found instead."""


def _of_proxy(target: Target, proxy: Proxy, answer: HttpResponse) -> ConnectionProblem:
    """Finds whether the proxy or the collector refused, by asking the collector without the proxy."""
    host, port = connection.place_of(target)
    around = f"set NO_PROXY={host}"
    try:
        line = connection.open_line(target, None)
        with line.sock:
            if connection.ask(line.sock, _request(target, None)).status != answer.status:
                around += f": {host} answers without it"
    except ConnectionProblem:
        around += " if the collector can be reached without it"
    return connection.denied(proxy, answer, f"{host}:{port}", around)


def _refused(answer: ExportResponse) -> ConnectionProblem:
    what, _, remedy = answer.reason.partition(": ")
    return ConnectionProblem(what, remedy or f"{_LOG}; OTEL_EXPORTER_OTLP_ENDPOINT names it")


def _ask_grpc(signal: str, target: Target, line: Connection) -> str:
    """Opens HTTP/2, then sends an empty request; returns "", since gRPC has no Date."""
    from otel_train.exporters.otlp_transport import GrpcClient

    said = connection.greets_grpc(line.sock)
    if not connection.is_settings(said):
        raise _no_grpc(target, line.proxy, said)
    client = GrpcClient(target, signal)
    try:
        answer = client.post(b"", PROTOBUF, connection.WITHIN_S)
    finally:
        client.close()
    if not answer.accepted:
        raise _refused(answer)
    return ""


def _no_grpc(target: Target, proxy: Proxy | None, said: bytes) -> ConnectionProblem:
    alert = connection.is_alert(said)
    known = alert or said.startswith(b"HTTP/") or target.tls or proxy is not None
    kind = "" if known else connection.speaks(*connection.place_of(target))
    if alert or kind == connection.TLS:
        return ConnectionProblem(*_WANTS_TLS)
    if said or kind == connection.HTTP1:
        remedy = "name the port for gRPC, usually 4317, or set OTEL_EXPORTER_OTLP_PROTOCOL=http/json"
        return ConnectionProblem("speaks HTTP/1, and is asked over gRPC", remedy)
    return ConnectionProblem(*_SILENT)


def _certificate(target: Target, line: Connection, now_s: float) -> CheckResult:
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
