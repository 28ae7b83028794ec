"""Runs the stack as plain processes."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from otel_train.errors import StackError
from otel_train.stack import configuration, tls
from otel_train.stack.configuration import COLLECTOR, HOST, Ports, render

ORDER = ("collector", "prometheus", "alertmanager", "jaeger")
"""Order of stopping: senders before receivers, so that none waits for a response."""


class Part(NamedTuple):
    """A process of the stack: name, command, additional variables, health URL."""

    name: str
    command: tuple[str, ...]
    environ: Mapping[str, str]
    health_url: str


READY_WITHIN_S = 120.0
LOOK_EVERY_S = 0.5  # for parts that have ended
SHOWN_LINES = 12  # of the log of a part that ended at once


class LocalStack:
    """Collector, Prometheus, Alertmanager and Jaeger, with the files of the containers. ``secure``: OTLP over TLS, with a token."""

    def __init__(
        self, state: Path, ports: Ports, environ: Mapping[str, str] | None = None, *, secure: bool = False
    ) -> None:
        self.state = state
        self.ports = ports
        self.secure = secure
        self._environ = os.environ if environ is None else environ
        self._children: dict[str, subprocess.Popen[bytes]] = {}

    @classmethod
    def of(cls, state: Path, environ: Mapping[str, str] | None = None) -> LocalStack | None:
        """Returns the stack of a state folder; None if it describes none."""
        try:
            described = json.loads((state / "stack.json").read_text(encoding="utf-8"))
            return cls(state, Ports(**described["ports"]), environ, secure=bool(described["secure"]))
        except (OSError, ValueError, TypeError, KeyError):
            return None

    def configure(self, *, webhook: str = "", scrape: Sequence[str] = ()) -> None:
        """Checks that there are programs to start and free ports, then writes the configuration."""
        alive = [part.name for part in self._parts() if running(self.state, part.name) is not None]
        if alive:
            raise StackError(
                f"a stack of this folder is running already ({', '.join(alive)}; {self.state}). "
                "`otel-train stack status` shows it, `otel-train stack down` stops it"
            )
        absent = self.missing()
        if len(absent) == len(ORDER):
            raise StackError(
                f"no program of the stack was found, so there is nothing to start. {absent[ORDER[0]]}"
            )
        self.ports.check_free()
        self.state.mkdir(parents=True, exist_ok=True, mode=0o700)
        render(self.state, self.ports, webhook=webhook, scrape=scrape)
        if self.secure:
            tls.make(self.state, endpoint_port=self.ports.otlp_http, environ=self._environ)
        text = json.dumps({"ports": asdict(self.ports), "secure": self.secure}, indent=2)
        (self.state / "stack.json").write_text(f"{text}\n", encoding="utf-8")

    def start(self, *names: str, say: Callable[[str], None] = lambda _: None) -> None:
        """Starts the named parts, or all that are installed, and waits until they are healthy."""
        for name, reason in self.missing().items():
            if name in names:
                raise StackError(reason)
        chosen = [part for part in self._parts() if not names or part.name in names]
        for part in chosen:
            self._children[part.name] = start(self.state, part, self._environ)
        urls = {part.name: part.health_url for part in chosen}
        configuration.wait(urls, timeout_s=READY_WITHIN_S, say=say, check=self._check_alive)

    def missing(self) -> dict[str, str]:
        """Returns, for each part whose program was not found, how to get it."""
        absent = [name for name in ORDER if _program(name, self._environ) is None]
        return {name: _not_found(name, self._environ) for name in absent}

    def stop(self, *names: str) -> list[str]:
        """Stops the named parts, or all, senders first; returns the names of those that ran."""
        stopped = []
        for name in ORDER:
            if not names or name in names:
                if stop(self.state, name):
                    stopped.append(name)
                if (child := self._children.pop(name, None)) is not None:
                    child.wait()
        return stopped

    def forget(self, *, data: bool = False) -> None:
        """Removes the description of the stack; with ``data``, also its data, logs, configuration and keys."""
        (self.state / "stack.json").unlink(missing_ok=True)
        if data:
            for folder in ("conf", "data", "log", "pid", tls.FOLDER):
                shutil.rmtree(self.state / folder, ignore_errors=True)

    def watch(self) -> str:
        """Waits until a part ends; returns its name, or "" if ``stack down`` has stopped the stack."""
        while True:
            ended = [name for name in self._children if running(self.state, name) is None]
            if ended:
                return ended[0] if (self.state / "stack.json").exists() else ""
            time.sleep(LOOK_EVERY_S)

    def states(self) -> dict[str, str]:
        """Returns for each part ``ready``, ``starting`` (runs, does not answer), ``down`` or ``missing`` (program not found)."""
        found = dict.fromkeys(self.missing(), "missing")
        for name, _, _, health_url in self._parts():
            state = "ready" if configuration.healthy(health_url) else "starting"
            found[name] = "down" if running(self.state, name) is None else state
        return found

    def addresses(self) -> dict[str, str]:
        """Returns the addresses to open and to send to, by purpose."""
        scheme = "https" if self.secure else "http"
        found = {
            "collector": {"send OTLP to": f"{scheme}://{HOST}:{self.ports.otlp_http}"},
            "prometheus": {"Prometheus": f"http://{HOST}:{self.ports.prometheus}"},
            "alertmanager": {"Alertmanager": f"http://{HOST}:{self.ports.alertmanager}"},
            "jaeger": {"Jaeger": f"http://{HOST}:{self.ports.jaeger}"},
        }
        if self.secure:
            found["collector"]["before training"] = tls.how_to_use(self.state)
        installed = (part.name for part in self._parts())
        return {what: where for name in installed for what, where in found[name].items()}

    def without(self) -> dict[str, str]:
        """Returns for each missing part what does not work without it."""
        direct = f"http://{HOST}:{self.ports.prometheus}/api/v1/otlp/v1/metrics"
        says = {
            "collector": f"nothing takes spans; metrics go straight to Prometheus with OTEL_EXPORTER_OTLP_METRICS_ENDPOINT={direct} "
            "and OTEL_TRACES_EXPORTER=none",
            "prometheus": "metrics wait in the Collector's queue, no rule is evaluated, and no alert fires",
            "alertmanager": "alerts are in Prometheus, and go nowhere",
            "jaeger": "spans wait in the Collector's queue, up to its bound",
        }
        return {name: f"{says[name]}. {reason}" for name, reason in self.missing().items()}

    def _parts(self) -> list[Part]:
        """Returns the parts whose programs were found, in the order in which they stop."""
        makers = {
            "collector": self._collector,
            "prometheus": self._prometheus,
            "alertmanager": self._alertmanager,
            "jaeger": self._jaeger,
        }
        absent = self.missing()
        return [makers[name]() for name in ORDER if name not in absent]

    def _part(self, name: str, health: str, arguments: Sequence[str], **environ: str) -> Part:
        program = str(find(name, self._environ))
        return Part(name, (program, *arguments), environ, f"http://{HOST}:{health}")

    def _collector(self) -> Part:
        ports, shipped = self.ports, configuration.folder() / "deploy" / "collector"
        configs = [shipped / name for name in ("config.yaml", *(["secure.yaml"] if self.secure else []))]
        return self._part(
            "collector",
            f"{ports.collector_health}/",
            [f"--config={path}" for path in configs],
            COLLECTOR_NAME=COLLECTOR,
            COLLECTOR_GRPC=f"{HOST}:{ports.otlp_grpc}",
            COLLECTOR_HTTP=f"{HOST}:{ports.otlp_http}",
            COLLECTOR_HEALTH=f"{HOST}:{ports.collector_health}",
            COLLECTOR_METRICS_PORT=str(ports.collector_metrics),
            COLLECTOR_KEYS=str(tls.folder(self.state).resolve()),
            COLLECTOR_QUEUE_DIR=str(self.state / "data" / "collector"),
            PROMETHEUS_URL=f"http://{HOST}:{ports.prometheus}",
            TRACES_GRPC=f"{HOST}:{ports.jaeger_otlp}",
        )

    def _prometheus(self) -> Part:
        settings, port = configuration.settings(self._environ), self.ports.prometheus
        arguments = [
            f"--config.file={self.state / 'conf' / 'prometheus.yml'}",
            f"--storage.tsdb.path={self.state / 'data' / 'prometheus'}",
            f"--storage.tsdb.retention.time={settings['METRICS_RETENTION_TIME']}",
            f"--storage.tsdb.retention.size={settings['METRICS_RETENTION_SIZE']}",
            f"--web.listen-address={HOST}:{port}",
            "--rules.alert.for-grace-period=1m",
            "--web.enable-otlp-receiver",
            "--web.enable-lifecycle",
            "--enable-feature=exemplar-storage,otlp-deltatocumulative",
        ]
        return self._part("prometheus", f"{port}/-/ready", arguments)

    def _alertmanager(self) -> Part:
        port = self.ports.alertmanager
        arguments = [
            f"--config.file={self.state / 'conf' / 'alertmanager.yml'}",
            f"--storage.path={self.state / 'data' / 'alertmanager'}",
            f"--web.listen-address={HOST}:{port}",
            "--cluster.listen-address=",
        ]
        return self._part("alertmanager", f"{port}/-/ready", arguments)

    def _jaeger(self) -> Part:
        ports, config = self.ports, configuration.folder() / "deploy" / "jaeger" / "config.yaml"
        return self._part(
            "jaeger",
            f"{ports.jaeger_health}/status",
            [f"--config={config}"],
            JAEGER_DIR=str(self.state / "data" / "jaeger"),
            JAEGER_OTLP=f"{HOST}:{ports.jaeger_otlp}",
            JAEGER_HTTP=f"{HOST}:{ports.jaeger}",
            JAEGER_QUERY_GRPC=f"{HOST}:{ports.jaeger_grpc}",
            JAEGER_HEALTH=f"{HOST}:{ports.jaeger_health}",
            JAEGER_METRICS_PORT=str(ports.jaeger_metrics),
            TRACES_RETENTION=configuration.settings(self._environ)["TRACES_RETENTION"],
        )

    def _check_alive(self) -> None:
        for name, child in self._children.items():
            if child.poll() is not None:
                log = log_file(self.state, name)
                tail = " | ".join(last_lines(log, SHOWN_LINES)) or "it printed nothing"
                raise StackError(
                    f"{name} ended at once with code {child.returncode}; {log} ends with: {tail}"
                )


STOP_WITHIN_S = 20.0
SAME_START_S = 1.0
"""Tolerance for two readings of a process's start time. Another start time is another process with the same pid."""


def start(state: Path, part: Part, environ: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Starts a part with its output in its log, and writes its pid file.

    It gets a session of its own: Ctrl-C in the terminal then reaches only this process, which stops the parts in order.
    """
    for folder in ("log", "pid", "data"):
        (state / folder).mkdir(parents=True, exist_ok=True, mode=0o700)
    log = log_file(state, part.name)
    if log.exists():
        log.replace(log.with_suffix(".log.1"))
    try:
        with log.open("wb") as out:
            child = subprocess.Popen(
                part.command, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT,
                env={**environ, **part.environ}, start_new_session=True,
            )  # fmt: skip
    except OSError as error:
        raise StackError(f"{part.name}: {part.command[0]} cannot be started: {error.strerror}") from error
    path = _pid_file(state, part.name)
    try:
        began_s = psutil.Process(child.pid).create_time()
        text = json.dumps({"pid": child.pid, "began_s": began_s})
        path.write_text(f"{text}\n", encoding="utf-8")
    except BaseException as error:  # Ctrl-C, or a full disk: no process may run without a pid file
        child.kill()
        child.wait()
        if not isinstance(error, OSError):
            raise
        raise StackError(
            f"{part.name} was stopped again: {path} cannot be written: {error.strerror}"
        ) from error
    return child


def running(state: Path, name: str) -> Any | None:
    """Returns the psutil.Process of a part, or None when it does not run."""
    try:
        described = json.loads(_pid_file(state, name).read_text(encoding="utf-8"))
        process = psutil.Process(described["pid"])
        alive = process.status() != psutil.STATUS_ZOMBIE
        same = abs(process.create_time() - described["began_s"]) < SAME_START_S
    except (OSError, ValueError, KeyError, psutil.NoSuchProcess):
        return None
    return process if alive and same else None


def stop(state: Path, name: str) -> bool:
    """Terminates a part, and kills it after the timeout; returns whether it was running."""
    process = running(state, name)
    if process is not None:
        with suppress(psutil.NoSuchProcess):  # it has ended by itself meanwhile
            process.terminate()
            try:
                process.wait(STOP_WITHIN_S)
            except psutil.TimeoutExpired:
                process.kill()
                process.wait(STOP_WITHIN_S)
    _pid_file(state, name).unlink(missing_ok=True)
    return process is not None


def log_file(state: Path, name: str) -> Path:
    """Returns the path of a part's log."""
    return state / "log" / f"{name}.log"


def last_lines(path: Path, count: int) -> list[str]:
    """Returns the last lines of a text file; [] if there is none."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 65536))
            return file.read().decode("utf-8", "replace").splitlines()[-count:]
    except OSError:
        return []


def _pid_file(state: Path, name: str) -> Path:
    return state / "pid" / f"{name}.json"


NAMES = {
    "collector": ("otelcol-train", "otelcol-contrib"),
    "prometheus": ("prometheus",),
    "alertmanager": ("alertmanager", "prometheus-alertmanager"),
    "jaeger": ("jaeger",),
    "promtool": ("promtool",),
    "amtool": ("amtool",),
    "compose": ("docker-compose",),
    "kustomize": ("kustomize",),
}
"""Possible names of a component's program. Debian uses the second name of Alertmanager."""


def cache_folder(environ: Mapping[str, str] | None = None) -> Path:
    """Returns the folder into which ``tools/get_components.sh`` puts the programs."""
    environ = os.environ if environ is None else environ
    named = environ.get("OTEL_TRAIN_TEST_BIN")
    if named:
        return Path(named)
    cache = environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "otel-train" / "stack" / "bin"


def find(component: str, environ: Mapping[str, str] | None = None) -> Path:
    """Finds the program of a component: first in the cache, where its version is known, then on PATH."""
    environ = os.environ if environ is None else environ
    found = _program(component, environ)
    if found is None:
        raise StackError(_not_found(component, environ))
    return found


def _program(component: str, environ: Mapping[str, str]) -> Path | None:
    cache = cache_folder(environ)
    cached = (cache / name for name in NAMES[component] if os.access(cache / name, os.X_OK))
    on_path = (shutil.which(name, path=environ.get("PATH")) for name in NAMES[component])
    return next(cached, None) or next((Path(found) for found in on_path if found), None)


def _not_found(component: str, environ: Mapping[str, str]) -> str:
    return (
        f"{component}: no program {' or '.join(NAMES[component])} in {cache_folder(environ)} or on PATH. In a checkout "
        "run tools/get_components.sh, which builds what is missing from its Go modules; elsewhere put the project's "
        "own release into that folder"
    )
