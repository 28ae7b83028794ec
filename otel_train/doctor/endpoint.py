"""Whether what the settings name answers OTLP: address, TLS, token, clock."""

from __future__ import annotations

import socket
import ssl
import time
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from otel_train.doctor import ask
from otel_train.doctor.findings import NOTE, OK, PROBLEM, WARNING, Finding
from otel_train.errors import ConfigError
from otel_train.export.settings import OtlpSettings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

AREA = "endpoint"
CONNECT_WITHIN_S = 3.0
EXPIRES_SOON_S = 14 * 86400.0
SKEW_NOTED_S, SKEW_HARMFUL_S = 5.0, 300.0
"""Samples from the future are refused by Prometheus, and those older than ten minutes as well."""

LOOPBACK = ("127.", "localhost", "::1")
HTTPS, GRPC = "https", "grpc"
PORTS = {HTTPS: 443, "http": 80, GRPC: 4317}


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """One address that figures go to.

    Attributes:
        address: as people write it.
        protocol: ``http/json``, ``http/protobuf`` or ``grpc``.
        host: to connect to.
        port: there.
        tls: whether it is asked to speak TLS.
        certificate: PEM file that its certificate is checked with; "" takes the system's.
        token: whether headers are sent, which may be secrets.
    """

    address: str
    protocol: str
    host: str
    port: int
    tls: bool
    certificate: str
    token: bool


def settings_of(
    environ: Mapping[str, str], endpoint: str = "", *, wanted: bool = False
) -> OtlpSettings | None:
    """What is sent, and how; None when nothing is.

    Raises:
        ConfigError: the variables cannot be honoured.
    """
    settings = OtlpSettings.read(environ, endpoint=endpoint, wanted=wanted)
    return settings if settings.targets else None


def endpoints(settings: OtlpSettings, environ: Mapping[str, str]) -> list[Endpoint]:
    """Every address once."""
    token = any(name.endswith("_HEADERS") and value for name, value in environ.items() if "_OTLP_" in name)
    found: dict[tuple[str, int], Endpoint] = {}
    for target in settings.targets.values():
        address = target.address
        parts = urlsplit(address if "://" in address else f"{GRPC}://{address}")
        where = parts.hostname or "", parts.port or PORTS.get(parts.scheme, 0)
        found[where] = Endpoint(
            address=address,
            protocol=target.protocol,
            host=where[0],
            port=where[1],
            tls=target.tls,
            certificate=target.certificate,
            token=token,
        )
    return list(found.values())


def look(
    environ: Mapping[str, str],
    endpoint: str = "",
    *,
    wanted: bool = False,
    now_s: Callable[[], float] = time.time,
) -> Iterator[Finding]:
    """Say of every address whether it can be reached, by TLS where that is asked for, and what its clock says."""
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
    for each in endpoints(settings, environ):
        yield from _look_at(each, now_s)


def _look_at(place: Endpoint, now_s: Callable[[], float]) -> Iterator[Finding]:
    try:
        with socket.create_connection((place.host, place.port), CONNECT_WITHIN_S):
            pass
    except OSError as error:
        yield _unreachable(place, error)
        return
    yield Finding(area=AREA, state=OK, what=f"{place.address} takes connections ({place.protocol})")
    if place.tls:
        finding = _handshake(place, now_s())
        yield finding
        if finding.state == PROBLEM:
            return
    elif place.token:
        near = place.host.startswith(LOOPBACK)
        yield Finding(
            area=AREA,
            state=NOTE if near else WARNING,
            what=f"{place.address} gets its headers, which may hold a token, without encryption",
            remedy=""
            if near
            else "use https:// and OTEL_EXPORTER_OTLP_CERTIFICATE (docs/howto/secure-the-stack.md)",
        )
    yield from _clock(place, now_s)


def _unreachable(place: Endpoint, error: OSError) -> Finding:
    if isinstance(error, socket.gaierror):
        why, remedy = (
            "has a name that cannot be resolved",
            "correct the host name, or the resolver of this machine",
        )
    elif isinstance(error, ConnectionRefusedError):
        why, remedy = (
            "refuses connections",
            "start what listens there (otel-train stack up), or correct the port",
        )
    else:
        why = f"cannot be reached ({error})"
        remedy = "look for a firewall, a proxy or a missing route between here and there"
    return Finding(
        area=AREA,
        state=PROBLEM,
        what=f"{place.address} {why}",
        remedy=f"{remedy}; OTEL_EXPORTER_OTLP_ENDPOINT names it",
    )


def _handshake(place: Endpoint, now_s: float) -> Finding:
    try:
        context = ssl.create_default_context(cafile=place.certificate or None)
        if place.protocol == GRPC:
            context.set_alpn_protocols(["h2"])
        with (
            socket.create_connection((place.host, place.port), CONNECT_WITHIN_S) as plain,
            context.wrap_socket(plain, server_hostname=place.host) as secured,
        ):
            told, version = secured.getpeercert() or {}, secured.version()
    except ssl.SSLCertVerificationError as error:
        return Finding(
            area=AREA,
            state=PROBLEM,
            what=f"{place.address} has a certificate that is not trusted: {error.verify_message}",
            remedy="set OTEL_EXPORTER_OTLP_CERTIFICATE to the PEM file of the authority that signed it, and use a host "
            "name that it has",
        )
    except OSError as error:
        return Finding(
            area=AREA,
            state=PROBLEM,
            what=f"{place.address} does not speak TLS ({getattr(error, 'reason', '') or error})",
            remedy="write http:// in place of https:// in OTEL_EXPORTER_OTLP_ENDPOINT, or correct the port",
        )
    left_s = ssl.cert_time_to_seconds(str(told["notAfter"])) - now_s if "notAfter" in told else float("inf")
    soon = left_s < EXPIRES_SOON_S
    return Finding(
        area=AREA,
        state=WARNING if soon else OK,
        what=f"{place.address} speaks {version}; its certificate is trusted until {told.get('notAfter', 'unknown')}",
        remedy="have it renewed" if soon else "",
    )


def _clock(place: Endpoint, now_s: Callable[[], float]) -> Iterator[Finding]:
    """By the Date of an answer; a gRPC server gives none."""
    if place.protocol == GRPC:
        return
    asked_s = now_s()
    scheme = HTTPS if place.tls else "http"
    host = f"[{place.host}]" if ":" in place.host else place.host
    answer = ask.get(f"{scheme}://{host}:{place.port}/", certificate=place.certificate)
    try:
        theirs_s = parsedate_to_datetime(answer.headers["date"]).timestamp()
    except (KeyError, ValueError):
        yield Finding(area=AREA, state=NOTE, what=f"{place.address} does not tell its time")
        return
    # A Date has whole seconds, cut off; half of one is the best guess.
    yield skew(theirs_s + 0.5 - (asked_s + now_s()) / 2, place.address, AREA)


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
