"""The programs of the stack accept the files that ship."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from otel_train.stack import configuration, tls
from tests.support.stack import program
from tests.support.zero_code import ended_well

pytestmark = pytest.mark.stack

LONG_RUNNING = {"otel-collector", "prometheus", "alertmanager", "grafana", "traces", "collector-health"}


def checked(*command: str, **environ: str) -> str:
    return ended_well(command, {**os.environ, **environ}, configuration.folder()).stdout


def test_the_collector_accepts_its_configuration() -> None:
    """A typo here is a stack without data."""
    checked(program("collector"), "validate", "--config=deploy/collector/config.yaml")


def test_prometheus_accepts_its_configuration_and_rules() -> None:
    """Its target files too."""
    checked(program("promtool"), "check", "config", "deploy/prometheus/prometheus.yml")


def test_alertmanager_accepts_its_configuration() -> None:
    """As shipped; with a webhook the tests of alerts run it."""
    checked(program("amtool"), "check-config", "deploy/alertmanager/alertmanager.yml")


def test_the_collector_accepts_tls_and_a_token_on_top(tmp_path: Path) -> None:
    """With keys as `stack up --secure` makes them."""
    tls.make(tmp_path, endpoint_port=4318)
    configs = [f"--config=deploy/collector/{name}.yaml" for name in ("config", "secure")]

    checked(program("collector"), "validate", *configs, COLLECTOR_KEYS=str(tls.folder(tmp_path)))


def composed(*profiles: str, traces: str = "tempo", keys_folder: str = "") -> dict[str, Any]:
    words = [word for profile in profiles for word in ("--profile", profile)]
    if keys_folder:
        words = ["-f", configuration.MARK, "-f", "deploy/collector/secure.yml", *words]
    environ = {"TRACES": traces, "COLLECTOR_KEYS": keys_folder}
    text = checked(program("compose"), *words, "config", "--format", "json", **environ)
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


SECRET = ("PASSWORD", "TOKEN", "SECRET", "CREDENTIAL", "HEADERS")


def test_no_secret_is_in_what_docker_inspect_shows(tmp_path: Path) -> None:
    """The environment and the command of a container are for whoever may ask."""
    tls.make(tmp_path, endpoint_port=4318)
    token = (tls.folder(tmp_path) / tls.TOKEN).read_text()
    services = composed("demo", "gpu", keys_folder=str(tls.folder(tmp_path)))

    assert token not in json.dumps(services)
    for name, service in services.items():
        for variable, text in (service.get("environment") or {}).items():
            secret = any(word in variable for word in SECRET)
            assert not secret or text.startswith("/run/stack-secrets/"), (name, variable)
        words = [*(service.get("command") or []), *(service.get("entrypoint") or [])]
        assert not any("password=" in str(word).lower() for word in words), name


def test_the_collector_reads_its_keys_from_files_it_cannot_write(tmp_path: Path) -> None:
    """And the one root process that hands them over sees a folder, read-only."""
    tls.make(tmp_path, endpoint_port=4318)
    place = str(tls.folder(tmp_path))
    services = composed(keys_folder=place)
    collector, prepare = services["otel-collector"], services["prepare"]

    assert collector["command"][-1] == "--config=/etc/otelcol/secure.yaml"
    mounts = {mount["target"]: mount for mount in collector["volumes"]}
    assert mounts["/etc/otelcol/keys"]["read_only"] is True
    assert {"/etc/otelcol/config.yaml", "/etc/otelcol/secure.yaml"} <= mounts.keys()
    [given] = [mount for mount in prepare["volumes"] if mount["target"] == "/given"]
    assert given["source"] == place
    assert given["read_only"] is True


def test_grafana_has_no_anonymous_admin_and_no_default_password() -> None:
    """What reaches its port may look at most, and that only when it is enabled."""
    environ = composed()["grafana"]["environment"]

    assert environ["GF_AUTH_ANONYMOUS_ENABLED"] == "false"
    assert environ["GF_AUTH_ANONYMOUS_ORG_ROLE"] == "Viewer"
    assert environ["GF_SECURITY_ADMIN_PASSWORD__FILE"] == "/run/stack-secrets/grafana_admin"
    assert "GF_SECURITY_ADMIN_PASSWORD" not in environ
    assert environ["GF_USERS_ALLOW_SIGN_UP"] == "false"


def test_what_is_mounted_is_there() -> None:
    """Docker makes an empty folder of a file that is missing, and the service fails with a riddle."""
    for name, service in composed("demo", "gpu").items():
        for mount in service.get("volumes", []):
            assert mount["type"] == "volume" or Path(mount["source"]).exists(), (name, mount["source"])
