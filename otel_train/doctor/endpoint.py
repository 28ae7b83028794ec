"""Whether what the settings name answers OTLP: one POST of an empty request says why not; then TLS, token, clock."""

from __future__ import annotations

import ssl
import time
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from otel_train.doctor import wire
from otel_train.doctor.checks import NOTE, OK, PROBLEM, WARNING, Finding
from otel_train.doctor.wire import Line, Proxy, Trouble
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
"""Samples from the future are refused by Prometheus, and those older than its window as well."""

LOOPBACK = ("127.", "localhost", "::1")
_TLS_REMEDY = "write https:// in place of http:// in OTEL_EXPORTER_OTLP_ENDPOINT"
_PROXY_STATUSES = frozenset({403, 407, 500, 502, 503, 504})


def settings_of(
    environ: Mapping[str, str], endpoint: str = "", *, wanted: bool = False
) -> OtlpSettings | None:
    """What is sent, and how; None when nothing is.

    Raises:
        ConfigError: the variables cannot be honoured.
    """
    settings = OtlpSettings.read(environ, endpoint=endpoint, wanted=wanted)
    return settings if settings.targets else None


def endpoints(settings: OtlpSettings) -> list[tuple[str, Target]]:
    """Every address once, with the signal that goes there."""
    found: dict[tuple[str, int], tuple[str, Target]] = {}
    for signal, target in settings.targets.items():
        found.setdefault(wire.place_of(target), (signal, target))
    return list(found.values())


def look(
    environ: Mapping[str, str],
    endpoint: str = "",
    *,
    wanted: bool = False,
    now_s: Callable[[], float] = time.time,
) -> Iterator[Finding]:
    """Say of every address whether it takes an empty request, by TLS where that is asked for, and what its clock says."""
    try:
        settings = settings_of(environ, endpoint, wanted=wanted)
    except ConfigError as error:
        yield Finding(area=AREA, state=PROBLEM, what=str(error), remedy="correct the variable it names")
        return
    if settings is None:
        yield Finding(
            area=AREA,
            state=NOTE,
            what="no OTLP endpoint is set: a run writes its run directory and /metrics, and sends nothing",
            remedy="set OTEL_EXPORTER_OTLP_ENDPOINT=http://127.0.0.1:4318; otel-train stack up starts what listens there",
        )
        return
    token = any(name.endswith("_HEADERS") and value for name, value in environ.items() if "_OTLP_" in name)
    for signal, target in endpoints(settings):
        yield from look_at(signal, target, now_s, token=token)


def look_at(
    signal: str, target: Target, now_s: Callable[[], float] = time.time, *, token: bool = False
) -> Iterator[Finding]:
    """Send an empty request to an address and say what became of it.

    Args:
        signal: ``metrics`` or ``traces``.
        target: the address, and how it is spoken to.
        now_s: the clock of this machine.
        token: whether headers are sent, which may be secrets.
    """
    asked_s = now_s()
    try:
        line = wire.open_line(target, wire.proxy_of(target))
        with line.sock:
            date = _ask_grpc(signal, target, line) if target.protocol == GRPC else _post(signal, target, line)
    except Trouble as trouble:
        whose = trouble.whose or target.address
        yield Finding(area=AREA, state=PROBLEM, what=f"{whose} {trouble.what}", remedy=trouble.remedy)
        return
    through = f" through {line.proxy.name}" if line.proxy else ""
    what = f"{target.address} takes connections and accepts an empty request ({target.protocol}){through}"
    yield Finding(area=AREA, state=OK, what=what)
    if target.tls:
        yield _certificate(target, line, now_s())
    elif token:
        yield _unencrypted(target)
    yield from _clock(target, date, (asked_s + now_s()) / 2)


def _unencrypted(target: Target) -> Finding:
    near = wire.place_of(target)[0].startswith(LOOPBACK)
    return Finding(
        area=AREA,
        state=NOTE if near else WARNING,
        what=f"{target.address} gets its headers, which may hold a token, without encryption",
        remedy=""
        if near
        else "use https:// and OTEL_EXPORTER_OTLP_CERTIFICATE (docs/howto/secure-the-stack.md)",
    )


def _post(signal: str, target: Target, line: Line) -> str:
    """Post an empty request over HTTP/1; the Date of the answer.

    Raises:
        Trouble: it is not accepted.
    """
    answer = wire.ask(line.sock, _request(target, line.proxy))
    if not answer.status:
        raise _no_http(target, line.proxy, answer.body)
    verdict = read_http(answer, signal, tls=target.tls)
    if verdict.accepted:
        return answer.headers.get("date", "")
    if line.proxy is not None and not target.tls and answer.status in _PROXY_STATUSES:
        raise _of_proxy(target, line.proxy, answer)
    raise _refused(verdict)


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


def _no_http(target: Target, proxy: Proxy | None, said: bytes) -> Trouble:
    """Why a request over HTTP/1 got no answer of HTTP/1."""
    host, port = wire.place_of(target)
    if proxy is not None and not target.tls:
        return Trouble(
            "gives no answer of HTTP", f"correct {proxy.variable}, or set NO_PROXY={host}", proxy.name
        )
    kind = wire.GRPC if wire.is_settings(said) else wire.TLS if wire.is_alert(said) else ""
    if not kind and said:
        kind = "unfinished" if said.startswith(b"HTTP/1.") else "foreign"
    if not kind and not target.tls and proxy is None:
        kind = wire.speaks(host, port)
    return Trouble(*_NO_HTTP[kind])


_SILENT = (
    f"takes connections and does not answer within {wire.WITHIN_S:g} s",
    "look whether what listens there is overloaded or stopped, and whether it is a collector",
)
_NO_HTTP = {
    wire.GRPC: (
        "speaks gRPC, and is asked over HTTP/1",
        "name the port for OTLP over HTTP, usually 4318, or set OTEL_EXPORTER_OTLP_PROTOCOL=grpc",
    ),
    wire.TLS: ("speaks TLS, and is asked without it", _TLS_REMEDY),
    wire.HTTP1: (
        "answers other requests over HTTP, and none of OTLP",
        "look into the log of what listens there",
    ),
    "unfinished": (
        f"begins an answer and does not end it within {wire.WITHIN_S:g} s",
        "look whether what listens there, or a proxy before it, is overloaded",
    ),
    "foreign": (
        "answers with something that is no HTTP",
        "correct the port in OTEL_EXPORTER_OTLP_ENDPOINT",
    ),
    "": _SILENT,
}
"""What it means that something else speaks there."""


def _of_proxy(target: Target, proxy: Proxy, answer: HttpResponse) -> Trouble:
    """Whether a proxy or the collector behind it answers so: without it the collector is asked once more."""
    host, port = wire.place_of(target)
    around = f"set NO_PROXY={host}"
    try:
        line = wire.open_line(target, None)
        with line.sock:
            if wire.ask(line.sock, _request(target, None)).status != answer.status:
                return wire.denied(proxy, answer, f"{host}:{port}", f"{around}: {host} answers without it")
    except Trouble:
        around += " if the collector can be reached without it"
    return wire.denied(proxy, answer, f"{host}:{port}", around)


def _refused(answer: ExportResponse) -> Trouble:
    what, _, remedy = answer.reason.partition(": ")
    return Trouble(
        what, remedy or "look into the log of what listens there; OTEL_EXPORTER_OTLP_ENDPOINT names it"
    )


def _ask_grpc(signal: str, target: Target, line: Line) -> str:
    """Greet over HTTP/2, then call with an empty request; "", since gRPC has no Date.

    Raises:
        Trouble: it is not accepted.
    """
    from otel_train.exporters.otlp_transport import GrpcClient

    said = wire.greets_grpc(line.sock)
    if not wire.is_settings(said):
        raise _no_grpc(target, line.proxy, said)
    client = GrpcClient(target, signal)
    try:
        answer = client.post(b"", wire.WITHIN_S)
    finally:
        client.close()
    if not answer.accepted:
        raise _refused(answer)
    return ""


def _no_grpc(target: Target, proxy: Proxy | None, said: bytes) -> Trouble:
    kind = wire.TLS if wire.is_alert(said) else wire.HTTP1 if said.startswith(b"HTTP/") else ""
    if not kind and not target.tls and proxy is None:
        kind = wire.speaks(*wire.place_of(target))
    if kind == wire.TLS:
        return Trouble("speaks TLS, and is asked without it", _TLS_REMEDY)
    if kind == wire.HTTP1 or said:
        return Trouble(
            "speaks HTTP/1, and is asked over gRPC",
            "name the port for gRPC, usually 4317, or set OTEL_EXPORTER_OTLP_PROTOCOL=http/json",
        )
    return Trouble(*_SILENT)


def _certificate(target: Target, line: Line, now_s: float) -> Finding:
    told = line.certificate
    left_s = ssl.cert_time_to_seconds(str(told["notAfter"])) - now_s if "notAfter" in told else float("inf")
    soon = left_s < EXPIRES_SOON_S
    return Finding(
        area=AREA,
        state=WARNING if soon else OK,
        what=f"{target.address} speaks TLS; its certificate is trusted until {told.get('notAfter', 'unknown')}",
        remedy="have it renewed" if soon else "",
    )


def _clock(target: Target, date: str, between_s: float) -> Iterator[Finding]:
    """By the Date of the answer; a gRPC server gives none."""
    if target.protocol == GRPC:
        return
    try:
        theirs_s = parsedate_to_datetime(date).timestamp()
    except (TypeError, ValueError):
        yield Finding(area=AREA, state=NOTE, what=f"{target.address} does not tell its time")
        return
    # A Date has whole seconds, cut off; half of one is the best guess.
    yield skew(theirs_s + 0.5 - between_s, target.address, AREA)


def skew(ahead_s: float, whose: str, area: str) -> Finding:
    """What a clock that is ahead of ours by so many seconds means."""
    off_s = abs(ahead_s)
    state = PROBLEM if off_s > SKEW_HARMFUL_S else WARNING if off_s > SKEW_NOTED_S else OK
    which = "ahead of" if ahead_s > 0 else "behind"
    if state == OK:
        return Finding(
            area=area,
            state=OK,
            what=f"the clocks of this machine and {whose} agree within {SKEW_NOTED_S:g} s",
        )
    return Finding(
        area=area,
        state=state,
        what=f"the clock of {whose} is {off_s:.0f} s {which} this machine's",
        remedy="synchronise both with NTP: figures from too far off are refused, and traces lie beside their metrics",
    )
