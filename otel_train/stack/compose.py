"""Runs the stack in containers with Docker Compose."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from otel_train.errors import StackError
from otel_train.stack import configuration, tls
from otel_train.stack.configuration import HOST, Ports

if TYPE_CHECKING:
    from pathlib import Path

PROFILES = ("demo", "gpu")
READY_WITHIN_S = 600.0
"""Limit for the first start, at which images are pulled."""


class Compose:
    """Docker Compose on the shipped file, with some variables of ``.env`` overridden.

    ``secure`` is the state folder of a stack: the Collector then accepts OTLP only over TLS, with the token of that folder.
    """

    def __init__(
        self,
        overrides: Mapping[str, str],
        environ: Mapping[str, str] | None = None,
        *,
        secure: Path | None = None,
    ) -> None:
        environ = os.environ if environ is None else environ
        self._environ = {**environ, **overrides}
        self._secure = secure
        self._command = _command(environ)

    def up(self, profiles: Sequence[str]) -> None:
        """Starts or updates the containers in the background."""
        if self._secure:
            tls.make(self._secure, endpoint_port=self._settings()[1].otlp_http, environ=self._environ)
            self._environ["COLLECTOR_KEYS"] = str(tls.folder(self._secure).resolve())
        self._run(profiles, ["up", "--detach", "--remove-orphans"])

    def down(self, *, data: bool) -> None:
        """Stops and removes the containers; with ``data``, their volumes too."""
        self._run(PROFILES, ["down", *(["--volumes"] if data else [])])

    def logs(self, names: Sequence[str], *, follow: bool) -> None:
        """Shows the logs of the containers."""
        self._run(PROFILES, ["logs", "--tail=200", *(["--follow"] if follow else []), *names])

    def status(self) -> None:
        """Shows the containers."""
        self._run(PROFILES, ["ps", "--all"])

    def states(self) -> dict[str, str]:
        """Returns ``ready`` or ``down`` for each part."""
        urls = self.health_urls().items()
        return {name: "ready" if configuration.healthy(url) else "down" for name, url in urls}

    def health_urls(self) -> dict[str, str]:
        """Returns the health URL of each part."""
        settings, ports = self._settings()
        return {
            "prometheus": f"http://{HOST}:{ports.prometheus}/-/ready",
            "alertmanager": f"http://{HOST}:{ports.alertmanager}/-/ready",
            "collector": f"http://{HOST}:{ports.collector_health}/",
            "grafana": f"http://{HOST}:{settings['GRAFANA_PORT']}/api/health",
            **({"jaeger": f"http://{HOST}:{ports.jaeger}/"} if settings["TRACES"] == "jaeger" else {}),
        }

    def addresses(self) -> dict[str, str]:
        """Returns the addresses to open and to send to, by purpose."""
        settings, ports = self._settings()
        return {
            "open Grafana": f"http://{HOST}:{settings['GRAFANA_PORT']} (user admin; password: see below)",
            "Prometheus": f"http://{HOST}:{ports.prometheus}",
            "Alertmanager": f"http://{HOST}:{ports.alertmanager}",
            "send OTLP to": f"{'https' if self._secure else 'http'}://{HOST}:{ports.otlp_http}",
            **({"before training": tls.how_to_use(self._secure)} if self._secure else {}),
            "password": f"{' '.join(self._command)} -p otel-train exec grafana cat /run/stack-secrets/grafana_admin",
            **({"Jaeger": f"http://{HOST}:{ports.jaeger}"} if settings["TRACES"] == "jaeger" else {}),
        }

    def _settings(self) -> tuple[dict[str, str], Ports]:
        settings = configuration.settings(self._environ)
        return settings, Ports.of(settings)

    def _run(self, profiles: Sequence[str], words: Sequence[str]) -> None:
        folder = configuration.folder()
        command = [*self._command, "--project-directory", str(folder)]
        command += ["--file", str(folder / configuration.MARK)]
        if self._secure and "COLLECTOR_KEYS" in self._environ:
            command += ["--file", str(folder / "deploy" / "collector" / "secure.yml")]
        for profile in profiles:
            command += ["--profile", profile]
        done = subprocess.run([*command, *words], env=self._environ, check=False)
        if done.returncode:
            raise StackError(
                f"docker compose {words[0]} ended with code {done.returncode}; what it printed is above. Without "
                "a container engine: otel-train stack up --local"
            )


def _command(environ: Mapping[str, str]) -> list[str]:
    path = environ.get("PATH")
    docker = shutil.which("docker", path=path)
    if docker:
        command = [docker, "compose", "version"]
        if not subprocess.run(command, capture_output=True, check=False, env=dict(environ)).returncode:
            return [docker, "compose"]
    if single := shutil.which("docker-compose", path=path):
        return [single]
    raise StackError(
        "Docker Compose was not found: neither `docker compose` nor docker-compose works. Install Docker with its "
        "compose plugin, or run the stack as plain processes: otel-train stack up --local"
    )
