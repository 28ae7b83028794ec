"""The stack as plain processes of this machine."""

from __future__ import annotations

import json
import os
import shutil
import time
from contextlib import suppress
from dataclasses import asdict
from typing import TYPE_CHECKING

import psutil

from otel_train.errors import StackError
from otel_train.stack import health, keys, process
from otel_train.stack.parts import ORDER, Part, missing, parts
from otel_train.stack.ports import HOST, Ports
from otel_train.stack.render import render

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

READY_WITHIN_S = 120.0
LOOK_EVERY_S = 0.5
SHOWN_LINES = 12


class LocalStack:
    """Collector, Prometheus, Alertmanager and Jaeger, with the files that the containers use.

    Args:
        state: folder for configuration, data, logs and pid files. Made when missing.
        ports: where the parts listen.
        environ: where programs and settings are looked up; the parts inherit it.
        secure: the Collector takes OTLP by TLS alone, and only with the token.
    """

    def __init__(
        self, state: Path, ports: Ports, environ: Mapping[str, str] = os.environ, *, secure: bool = False
    ) -> None:
        self.state = state
        self.ports = ports
        self.secure = secure
        self._environ = environ
        self._children: dict[str, subprocess.Popen[bytes]] = {}

    @classmethod
    def of(cls, state: Path, environ: Mapping[str, str] = os.environ) -> LocalStack | None:
        """The stack that a state folder describes, or None."""
        try:
            noted = json.loads((state / "stack.json").read_text(encoding="utf-8"))
            return cls(state, Ports(**noted["ports"]), environ, secure=bool(noted["secure"]))
        except (OSError, ValueError, TypeError, KeyError):
            return None

    def configure(self, *, webhook: str = "", scrape: Sequence[str] = ()) -> None:
        """Check that there is something to start and ports for it, then write the configuration.

        Args:
            webhook: address that alerts go to; "" for none.
            scrape: addresses of trainers whose ``/metrics`` are scraped.

        Raises:
            StackError: no program is there, a port is taken, this stack runs already, or there is no certificate.
            ConfigError: ``webhook`` is not an address.
        """
        alive = [part.name for part in self._parts() if process.running(self.state, part.name) is not None]
        if alive:
            raise StackError(
                f"a stack of this folder is running already ({', '.join(alive)}; {self.state}). "
                "`otel-train stack status` shows it, `otel-train stack down` stops it"
            )
        absent = self.missing()
        if len(absent) == len(ORDER):
            raise StackError(f"there is nothing to start. {absent[ORDER[0]]}")
        self.ports.check_free()
        self.state.mkdir(parents=True, exist_ok=True, mode=0o700)
        render(self.state, self.ports, webhook=webhook, scrape=scrape)
        if self.secure:
            keys.make(self.state, endpoint_port=self.ports.otlp_http, environ=self._environ)
        text = json.dumps({"ports": asdict(self.ports), "secure": self.secure}, indent=2)
        (self.state / "stack.json").write_text(f"{text}\n", encoding="utf-8")

    def start(self, *names: str, say: Callable[[str], None] = lambda _: None) -> None:
        """Start parts, all that are there without a name, and wait until they are well.

        Raises:
            StackError: a named one is not there, one ended at once, or was not well in time.
        """
        for name, reason in self.missing().items():
            if name in names:
                raise StackError(reason)
        chosen = [part for part in self._parts() if not names or part.name in names]
        for part in chosen:
            self._children[part.name] = process.start(self.state, part, self._environ)
        urls = {part.name: part.health_url for part in chosen}
        health.wait(urls, timeout_s=READY_WITHIN_S, say=say, check=self._check_alive)

    def missing(self) -> dict[str, str]:
        """Parts whose program is not there, and how to get it."""
        return missing(self._environ)

    def kill(self, name: str) -> None:
        """End a part as SIGKILL does: without a chance to tidy up."""
        found = process.running(self.state, name)
        if found is not None:
            with suppress(psutil.NoSuchProcess):
                found.kill()
                found.wait(process.STOP_WITHIN_S)
        self._reap(name)

    def stop(self, *names: str) -> list[str]:
        """Stop parts, all without a name, senders first; the names of those that ran."""
        stopped = []
        for name in ORDER:
            if not names or name in names:
                if process.stop(self.state, name):
                    stopped.append(name)
                self._reap(name)
        return stopped

    def forget(self, *, data: bool = False) -> None:
        """Remove the note that a stack is here; with ``data``, everything it kept."""
        (self.state / "stack.json").unlink(missing_ok=True)
        if data:
            for folder in ("conf", "data", "log", "pid", keys.FOLDER):
                shutil.rmtree(self.state / folder, ignore_errors=True)

    def watch(self) -> str:
        """Wait until a part ends that nobody asked to; its name, or "" when ``down`` stopped them all."""
        while True:
            ended = [name for name in self._children if process.running(self.state, name) is None]
            if ended:
                asked = not (self.state / "stack.json").exists()
                return "" if asked else ended[0]
            time.sleep(LOOK_EVERY_S)

    def states(self) -> dict[str, str]:
        """Part to ``ready``, ``starting`` (runs, does not answer), ``down`` or ``missing`` (there is no program)."""
        found = dict.fromkeys(self.missing(), "missing")
        for part in self._parts():
            runs = process.running(self.state, part.name) is not None
            found[part.name] = (
                ("ready" if health.healthy(part.health_url) else "starting") if runs else "down"
            )
        return found

    def addresses(self) -> dict[str, str]:
        """What to open, and where to send."""
        scheme = "https" if self.secure else "http"
        found = {
            "collector": {"send OTLP to": f"{scheme}://{HOST}:{self.ports.otlp_http}"},
            "prometheus": {"Prometheus": f"http://{HOST}:{self.ports.prometheus}"},
            "alertmanager": {"Alertmanager": f"http://{HOST}:{self.ports.alertmanager}"},
            "jaeger": {"Jaeger": f"http://{HOST}:{self.ports.jaeger}"},
        }
        if self.secure:
            found["collector"]["before that"] = keys.how_to_use(self.state)
        there = (part.name for part in self._parts())
        return {what: where for name in there for what, where in found[name].items()}

    def without(self) -> dict[str, str]:
        """Missing part to what does not work without it."""
        direct = f"http://{HOST}:{self.ports.prometheus}/api/v1/otlp/v1/metrics"
        says = {
            "collector": f"nothing takes spans; metrics go straight to Prometheus with OTEL_EXPORTER_OTLP_METRICS_ENDPOINT={direct} "
            "and OTEL_TRACES_EXPORTER=none",
            "prometheus": "metrics wait in the Collector's queue, no rule is evaluated, and no alert fires",
            "alertmanager": "alerts are in Prometheus, and go nowhere",
            "jaeger": "spans wait in the Collector's queue, up to its bound",
        }
        return {name: f"{says[name]}. {reason}" for name, reason in self.missing().items()}

    def _parts(self) -> tuple[Part, ...]:
        return parts(self.state, self.ports, self._environ, secure=self.secure)

    def _check_alive(self) -> None:
        for name, child in self._children.items():
            if child.poll() is not None:
                log = process.log_file(self.state, name)
                tail = " | ".join(process.last_lines(log, SHOWN_LINES)) or "it printed nothing"
                raise StackError(
                    f"{name} ended at once with code {child.returncode}; {log} ends with: {tail}"
                )

    def _reap(self, name: str) -> None:
        child = self._children.pop(name, None)
        if child is not None:
            child.wait()
