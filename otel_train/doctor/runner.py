"""Runs all checks, in the order in which telemetry depends on them."""

from __future__ import annotations

from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

from otel_train.config.sources import resolve
from otel_train.doctor import end_to_end, endpoint, environment
from otel_train.doctor.checks import NOTE, PROBLEM, Check, CheckResult, run
from otel_train.errors import OtelTrainError
from otel_train.stack import configuration
from otel_train.stack.configuration import HOST, Ports
from otel_train.stack.local import LocalStack

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

LOCAL_WITHIN_S = 10.0
ENDPOINT_WITHIN_S = 30.0
SENDING_WITHIN_S = 30.0
"""Two signals of five seconds each, and three queries; the wait for arrival is added."""


def examine(
    environ: Mapping[str, str], places: end_to_end.ProbeTargets, *, endpoint_url: str = "", wait_s: float
) -> list[CheckResult]:
    """Runs all checks."""
    config = resolve(environ=environ).config
    wanted = config.otlp == "on"
    ours = _version()
    checks = [
        Check(environment.PACKAGES, environment.check_packages, LOCAL_WITHIN_S),
        Check(environment.SETTINGS, partial(environment.check_settings, environ), LOCAL_WITHIN_S),
        Check(
            environment.RUNS, partial(environment.check_run_directory, config, version=ours), LOCAL_WITHIN_S
        ),
        Check(environment.MACHINE, partial(environment.check_machine, config, environ), LOCAL_WITHIN_S),
        Check(
            endpoint.AREA,
            partial(endpoint.check_endpoint, environ, endpoint_url, wanted=wanted),
            ENDPOINT_WITHIN_S,
        ),
    ]
    found = run(checks)
    if wait_s <= 0:
        return found
    if any(finding.area == endpoint.AREA and finding.state == PROBLEM for finding in found):
        skipped = CheckResult(
            NOTE,
            "nothing is sent: the endpoint does not take an empty request, as said above",
            area=end_to_end.AREA,
        )
        return [*found, skipped]
    send = partial(
        end_to_end.check_end_to_end, environ, places, endpoint=endpoint_url, wanted=wanted, wait_s=wait_s
    )
    return [*found, *run([Check(end_to_end.AREA, send, SENDING_WITHIN_S + wait_s)])]


def usual_places(state: Path, environ: Mapping[str, str]) -> dict[str, str]:
    """Returns the addresses of this machine's stack: of the one in ``state``, else from ``.env``."""
    try:
        settings = configuration.settings(environ)
        local = LocalStack.of(state, environ)
        ports = Ports.of(settings) if local is None else local.ports
    except OtelTrainError:
        return {}
    places = {
        end_to_end.PROMETHEUS: f"http://{HOST}:{ports.prometheus}",
        end_to_end.TRACES: f"http://{HOST}:{ports.jaeger}",
    }
    if local is None:
        places[end_to_end.GRAFANA] = f"http://{HOST}:{settings['GRAFANA_PORT']}"
    return places


def _version() -> str | None:
    try:
        return version("otel-train")
    except PackageNotFoundError:
        return None
