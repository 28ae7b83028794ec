"""What each part of a local stack is: its command, its environment, the address that answers when it is well."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from otel_train.errors import StackError
from otel_train.stack import files, keys, programs
from otel_train.stack.ports import HOST, Ports
from otel_train.stack.render import COLLECTOR

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

ORDER = ("collector", "prometheus", "alertmanager", "jaeger")
"""Whoever sends is stopped before whom it sends to, so that nothing waits for an answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A process of the stack.

    Attributes:
        name: as in ``ORDER``.
        command: program and arguments.
        environ: what it is told beside the caller's environment.
        health_url: answers with 200 when the part is ready.
    """

    name: str
    command: tuple[str, ...]
    environ: Mapping[str, str]
    health_url: str


def parts(state: Path, ports: Ports, environ: Mapping[str, str], *, secure: bool = False) -> tuple[Part, ...]:
    """The parts of a local stack whose programs are there, in the order in which they stop.

    Args:
        state: its folder, with the rendered ``conf``.
        ports: where they listen.
        environ: where programs and settings are looked up.
        secure: the Collector takes OTLP by TLS alone, and only with the token.
    """
    makers: dict[str, Callable[[Path, Ports, Mapping[str, str]], Part]] = {
        "collector": partial(_collector, secure=secure),
        "prometheus": _prometheus,
        "alertmanager": _alertmanager,
        "jaeger": _jaeger,
    }
    absent = missing(environ)
    return tuple(makers[name](state, ports, environ) for name in ORDER if name not in absent)


def missing(environ: Mapping[str, str]) -> dict[str, str]:
    """Parts whose program is not there, and how to get it."""
    return {name: reason for name in ORDER if (reason := _not_found(name, environ))}


def _not_found(name: str, environ: Mapping[str, str]) -> str:
    try:
        programs.find(name, environ)
    except StackError as error:
        return str(error)
    return ""


def _collector(state: Path, ports: Ports, environ: Mapping[str, str], *, secure: bool) -> Part:
    shipped = files.folder() / "deploy" / "collector"
    configs = [shipped / name for name in ("config.yaml", *(["secure.yaml"] if secure else []))]
    return Part(
        name="collector",
        command=(str(programs.find("collector", environ)), *(f"--config={path}" for path in configs)),
        environ={
            "COLLECTOR_NAME": COLLECTOR,
            "COLLECTOR_GRPC": f"{HOST}:{ports.otlp_grpc}",
            "COLLECTOR_HTTP": f"{HOST}:{ports.otlp_http}",
            "COLLECTOR_HEALTH": f"{HOST}:{ports.collector_health}",
            "COLLECTOR_METRICS_PORT": str(ports.collector_metrics),
            "COLLECTOR_KEYS": str(keys.folder(state).resolve()),
            "COLLECTOR_QUEUE_DIR": str(state / "data" / "collector"),
            "PROMETHEUS_URL": f"http://{HOST}:{ports.prometheus}",
            "TRACES_GRPC": f"{HOST}:{ports.jaeger_otlp}",
        },
        health_url=f"http://{HOST}:{ports.collector_health}/",
    )


def _prometheus(state: Path, ports: Ports, environ: Mapping[str, str]) -> Part:
    settings = files.settings(environ)
    return Part(
        name="prometheus",
        command=(
            str(programs.find("prometheus", environ)),
            f"--config.file={state / 'conf' / 'prometheus.yml'}",
            f"--storage.tsdb.path={state / 'data' / 'prometheus'}",
            f"--storage.tsdb.retention.time={settings['METRICS_RETENTION_TIME']}",
            f"--storage.tsdb.retention.size={settings['METRICS_RETENTION_SIZE']}",
            f"--web.listen-address={HOST}:{ports.prometheus}",
            "--web.enable-otlp-receiver",
            "--web.enable-lifecycle",
            "--enable-feature=exemplar-storage,otlp-deltatocumulative",
        ),
        environ={},
        health_url=f"http://{HOST}:{ports.prometheus}/-/ready",
    )


def _alertmanager(state: Path, ports: Ports, environ: Mapping[str, str]) -> Part:
    return Part(
        name="alertmanager",
        command=(
            str(programs.find("alertmanager", environ)),
            f"--config.file={state / 'conf' / 'alertmanager.yml'}",
            f"--storage.path={state / 'data' / 'alertmanager'}",
            f"--web.listen-address={HOST}:{ports.alertmanager}",
            "--cluster.listen-address=",
        ),
        environ={},
        health_url=f"http://{HOST}:{ports.alertmanager}/-/ready",
    )


def _jaeger(state: Path, ports: Ports, environ: Mapping[str, str]) -> Part:
    config = files.folder() / "deploy" / "jaeger" / "config.yaml"
    return Part(
        name="jaeger",
        command=(str(programs.find("jaeger", environ)), f"--config={config}"),
        environ={
            "JAEGER_DIR": str(state / "data" / "jaeger"),
            "JAEGER_OTLP": f"{HOST}:{ports.jaeger_otlp}",
            "JAEGER_HTTP": f"{HOST}:{ports.jaeger}",
            "JAEGER_QUERY_GRPC": f"{HOST}:{ports.jaeger_grpc}",
            "JAEGER_HEALTH": f"{HOST}:{ports.jaeger_health}",
            "JAEGER_METRICS_PORT": str(ports.jaeger_metrics),
            "TRACES_RETENTION": files.settings(environ)["TRACES_RETENTION"],
        },
        health_url=f"http://{HOST}:{ports.jaeger_health}/status",
    )
