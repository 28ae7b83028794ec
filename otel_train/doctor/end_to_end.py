"""Sends a metric and a span with a unique run id; checks that they arrive in Prometheus, trace store and Grafana."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING
from urllib.parse import quote

from otel_train import catalog as c
from otel_train.datamodel import NS_PER_S, AttributeValue, MetricFamily, Point, Snapshot, Span
from otel_train.doctor import checks
from otel_train.doctor.checks import NOTE, OK, PROBLEM, CheckResult
from otel_train.doctor.endpoint import settings_with_targets, skew
from otel_train.errors import ConfigError, OtelTrainError
from otel_train.exporters.otlp_json import metrics_line, spans_line
from otel_train.exporters.otlp_transport import OtlpTransport
from otel_train.stack import configuration
from otel_train.stack.configuration import HOST, Ports
from otel_train.stack.local import LocalStack

if TYPE_CHECKING:
    from pathlib import Path

    from otel_train.exporters.otlp_settings import OtlpSettings

AREA = "end to end"
SEND_WITHIN_S = 5.0  # limit of an export request
ASK_EVERY_S = 0.5  # between two queries for the probe
PROMETHEUS, TRACES, GRAFANA = "Prometheus", "trace store", "Grafana"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeTargets:
    """Where sent telemetry is expected."""

    urls: Mapping[str, str]  # addresses by target
    named: frozenset[str] = frozenset()  # targets that the user named, which must answer
    grafana_token: str = ""  # of a service account, to query through Grafana; "" checks only its health


def usual_places(state: Path, environ: Mapping[str, str]) -> dict[str, str]:
    """Returns the addresses of the stack on this machine: of that in ``state``, else by the ports of ``.env``."""
    try:
        settings = configuration.settings(environ)
        local = LocalStack.of(state, environ)
        ports = Ports.of(settings) if local is None else local.ports
    except OtelTrainError:
        return {}
    places = {PROMETHEUS: f"http://{HOST}:{ports.prometheus}", TRACES: f"http://{HOST}:{ports.jaeger}"}
    if local is None:
        places[GRAFANA] = f"http://{HOST}:{settings['GRAFANA_PORT']}"
    return places


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """A metric and a span with a unique run id and trace id."""

    run_id: str = field(default_factory=lambda: f"doctor-{os.urandom(4).hex()}")
    trace_id: int = field(default_factory=lambda: int.from_bytes(os.urandom(16), "big") | 1)
    unix_ns: int = field(default_factory=time.time_ns)
    """Also the value of the metric, in seconds."""

    def requests(self, resource: Mapping[str, AttributeValue]) -> dict[str, bytes]:
        """Returns the request bodies by signal."""
        point = Point((), self.unix_ns / NS_PER_S)
        span = Span(
            name=c.PROBE_SPAN.name,
            trace_id=self.trace_id,
            span_id=(self.trace_id >> 64) | 1,
            start_unix_ns=self.unix_ns,
            end_unix_ns=self.unix_ns,
            attributes={c.RUN_ID.name: self.run_id},
        )
        snapshot = Snapshot(self.unix_ns, self.unix_ns, (MetricFamily(c.PROBE_TIME, (point,)),))
        return {
            "metrics": metrics_line(snapshot, resource).encode(),
            "traces": spans_line((span,), resource).encode(),
        }


def check_end_to_end(
    environ: Mapping[str, str],
    places: ProbeTargets,
    *,
    endpoint: str = "",
    wanted: bool = False,
    wait_s: float,
) -> Iterator[CheckResult]:
    """Sends a probe and checks that it arrives."""
    try:
        settings = settings_with_targets(environ, endpoint, wanted=wanted)
    except ConfigError:
        return  # reported by the endpoint's check
    probe = Probe()
    sent: set[str] = set()
    if settings is None:
        # Nothing is sent, so only targets named by the user are checked, not the stack of this machine.
        named = {place: url for place, url in places.urls.items() if place in places.named}
        places = replace(places, urls=named)
    else:
        for signal, finding in _send(probe, settings, environ):
            yield finding
            if finding.state == OK:
                sent.add(signal)
    yield from _wait(probe, places, sent, wait_s=wait_s)


def _send(
    probe: Probe, settings: OtlpSettings, environ: Mapping[str, str]
) -> Iterator[tuple[str, CheckResult]]:
    resource = {"service.name": environ.get("OTEL_SERVICE_NAME") or "otel-train", c.RUN_ID.name: probe.run_id}
    transport = OtlpTransport(settings.targets)
    try:
        for signal, line in probe.requests(resource).items():
            if signal not in settings.targets:
                continue
            address = settings.targets[signal].address
            response = transport.send(signal, line, SEND_WITHIN_S)
            if response.accepted:
                yield signal, CheckResult(OK, f"{address} accepted {signal} ({probe.run_id})")
                continue
            problem, _, remedy = response.reason.partition(": ")
            remedy = remedy or "correct OTEL_EXPORTER_OTLP_ENDPOINT, or start the service on that port"
            yield signal, CheckResult(PROBLEM, f"{signal}: {address} {problem}", remedy)
    finally:
        transport.close()


def _wait(probe: Probe, places: ProbeTargets, sent: set[str], *, wait_s: float) -> Iterator[CheckResult]:
    missing: dict[str, Callable[[], bool]] = {}
    for place, url in places.urls.items():
        health = checks.get(f"{url}{_HEALTH[place]}")
        if not health.ok:
            yield _silent(place, url, health, named=place in places.named)
            continue
        yield from _readiness(place, url)
        if is_there := _query(place, url, probe, sent=sent, token=places.grafana_token):
            missing[place] = is_there
    began_s = time.monotonic()
    while missing:
        for place in [place for place, is_there in missing.items() if is_there()]:
            del missing[place]
            took_s = time.monotonic() - began_s
            yield CheckResult(OK, f"found in {place} after {took_s:.1f} s ({places.urls[place]})")
        if time.monotonic() - began_s > wait_s:
            break
        time.sleep(min(ASK_EVERY_S, wait_s))
    for place in missing:
        what = f"not found in {place} within {wait_s:g} s ({places.urls[place]})"
        yield CheckResult(PROBLEM, what, _REMEDIES[place])


def _query(place: str, url: str, probe: Probe, *, sent: set[str], token: str) -> Callable[[], bool] | None:
    """Returns a function that queries a target for the probe; None if the target cannot be queried."""
    if place == PROMETHEUS and "metrics" in sent:
        return partial(_in_prometheus, f"{url}/api/v1/query", probe)
    if place == TRACES and "traces" in sent:
        return partial(_in_traces, url, probe)
    if place == GRAFANA and token and "metrics" in sent:
        proxied = f"{url}/api/datasources/proxy/uid/prometheus/api/v1/query"
        return partial(_in_prometheus, proxied, probe, {"Authorization": f"Bearer {token}"})
    return None


_HEALTH = {PROMETHEUS: "/-/ready", TRACES: "/", GRAFANA: "/api/health"}
_REMEDIES = {
    PROMETHEUS: "the Collector accepted it: look for its errors (otel-train stack logs collector), whether it sends to "
    "this Prometheus, and whether that has --web.enable-otlp-receiver and promotes train.run.id",
    TRACES: "the Collector accepted it: look for its errors (otel-train stack logs collector), and whether it sends to "
    "this trace store",
    GRAFANA: "look at the data source Prometheus in Grafana (uid: prometheus), and whether the token may query it",
}


def _silent(place: str, url: str, answer: checks.HttpResult, *, named: bool) -> CheckResult:
    problem = answer.reason or f"status {answer.status}"
    option = {PROMETHEUS: "--prometheus", TRACES: "--traces", GRAFANA: "--grafana"}[place]
    if named:
        what = f"{place}: {url} does not answer ({problem})"
        return CheckResult(PROBLEM, what, f"start it, or correct {option}")
    what = f"{place}: nothing is ready at {url} ({problem}), so arrival there was not checked"
    return CheckResult(NOTE, what, f"name its address: {option} URL")


def _readiness(place: str, url: str) -> Iterator[CheckResult]:
    yield CheckResult(OK, f"{place} is ready ({url})")
    if place != PROMETHEUS:
        return
    sent_s = time.time()
    response = checks.get(f"{url}/api/v1/query?query=time()").json()
    with suppress(TypeError, KeyError, ValueError, IndexError):
        server_s = float(response["data"]["result"][1])
        yield skew(server_s - (sent_s + time.time()) / 2, f"{place} ({url})")


def _in_prometheus(address: str, probe: Probe, headers: Mapping[str, str] | None = None) -> bool:
    query = f'{c.PROBE_TIME.prometheus}{{train_run_id="{probe.run_id}"}}'
    found = checks.get(f"{address}?query={quote(query)}", headers).json()
    with suppress(TypeError, KeyError):
        return bool(found["data"]["result"])
    return False


def _in_traces(url: str, probe: Probe) -> bool:
    """Returns whether the trace is stored. Jaeger and Tempo answer at the same path."""
    answer = checks.get(f"{url}/api/traces/{probe.trace_id:032x}")
    return answer.ok and probe.run_id.encode() in answer.body
