"""The programs of the stack accept the files that ship."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from otel_train.stack import files
from tests.support.stack import program

pytestmark = pytest.mark.stack

LONG_RUNNING = {"otel-collector", "prometheus", "alertmanager", "grafana", "traces", "collector-health"}


def checked(*command: str, **environ: str) -> str:
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        env={**os.environ, **environ},
        cwd=files.folder(),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_collector_accepts_its_configuration() -> None:
    """A typo here is a stack without data."""
    checked(program("collector"), "validate", "--config=deploy/collector/config.yaml")


def test_prometheus_accepts_its_configuration_and_rules() -> None:
    """Its target files too."""
    checked(program("promtool"), "check", "config", "deploy/prometheus/prometheus.yml")


def test_alertmanager_accepts_its_configuration() -> None:
    """As shipped; with a webhook the tests of alerts run it."""
    checked(program("amtool"), "check-config", "deploy/alertmanager/alertmanager.yml")


def composed(*profiles: str, traces: str = "tempo") -> dict[str, Any]:
    words = [word for profile in profiles for word in ("--profile", profile)]
    text = checked(program("compose"), *words, "config", "--format", "json", TRACES=traces)
    services: dict[str, Any] = json.loads(text)["services"]
    return services


@pytest.mark.parametrize("traces", ["tempo", "jaeger"])
@pytest.mark.parametrize("profiles", [(), ("demo",), ("gpu",), ("demo", "gpu")])
def test_compose_accepts_every_combination(profiles: tuple[str, ...], traces: str) -> None:
    """Any of them is one command in the README."""
    services = composed(*profiles, traces=traces)

    assert set(services) >= LONG_RUNNING
    assert ("demo" in services) == ("demo" in profiles)
    assert ("dcgm-exporter" in services) == ("gpu" in profiles)
    assert (
        f"{'grafana/tempo' if traces == 'tempo' else 'jaegertracing/jaeger'}:" in services["traces"]["image"]
    )


@pytest.mark.parametrize("traces", ["tempo", "jaeger"])
def test_no_container_has_more_than_it_needs(traces: str) -> None:
    """Loopback, no root, nothing writable, nothing unbounded, no floating tag."""
    for name, service in composed("demo", "gpu", traces=traces).items():
        assert service["read_only"] is True, name
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert int(service["mem_limit"]) > 0, name
        assert service["logging"]["options"]["max-size"], name
        assert {port["host_ip"] for port in service.get("ports", [])} <= {"127.0.0.1"}, name
        once = service["restart"] == "no"
        # What runs as root ends at once and has no network.
        assert not service["user"].startswith("0:") or (once and service["network_mode"] == "none"), name
        image, _, tag = service["image"].partition(":")
        assert name == "demo" or tag.removeprefix("v")[:1].isdigit(), (image, tag)


def test_no_secret_is_in_the_files_or_in_the_environment() -> None:
    """`docker inspect` shows the environment to whoever may ask."""
    for name, service in composed("demo", "gpu").items():
        for variable, text in (service.get("environment") or {}).items():
            secret = any(word in variable for word in ("PASSWORD", "TOKEN", "SECRET"))
            assert not secret or text.startswith("/run/stack-secrets/"), (name, variable)


def test_what_is_mounted_is_there() -> None:
    """Docker makes an empty folder of a file that is missing, and the service fails with a riddle."""
    for name, service in composed("demo", "gpu").items():
        for mount in service.get("volumes", []):
            assert mount["type"] == "volume" or Path(mount["source"]).exists(), (name, mount["source"])
