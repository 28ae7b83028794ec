"""Whatever the environment or a settings file says, training starts; what is wrong in them is said."""

from __future__ import annotations

import errno
import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest

import otel_train
from otel_train.console.summary import render_run_summary
from otel_train.console.text import TextLayout
from otel_train.errors import ConfigError
from otel_train.rundata import alerts
from tests.support.zero_code import launched

WRONG = [
    ("OTEL_TRAIN_EXPORT_INTERVAL_S", "fast"),
    ("OTEL_TRAIN_PROMETHEUS_ADDRESS", "127.0.0.1:70000"),
    ("OTEL_TRAIN_PROMETHEUS", "maybe"),
    ("OTEL_TRAIN_RUN_DRI", "x"),
    ("OTEL_TRAIN_OTLP", "yes please"),
    ("OTEL_TRAIN_PROMETHEUS_ADDRESS", "no.such.host.invalid:9464"),
    ("OTEL_TRAIN_PROMETHEUS_ADDRESS", "192.0.2.1:9464"),
    ("OTEL_TRAIN_PROMETHEUS_ADDRESS", "x" * 70 + ":9464"),
    ("OTEL_TRAIN_EXPORTERS", "nosuch"),
    ("OTEL_TRAIN_WANDB", "on"),
    ("OTEL_TRAIN_CONFIG", "/nowhere.yaml"),
    ("OTEL_TRAIN_CONFIG", "/dev/zero"),
    ("OTEL_TRAIN_RUN_ID", "a\nb"),
    ("OTEL_TRAIN_ATTEMPT", "x"),
    ("OTEL_TRAIN_DISABLED", "maybe"),
    ("OTEL_TRAIN_PROFILER_ACTIVITIES", "cpu,gpu"),
    ("OTEL_EXPORTER_OTLP_ENDPOINT", "collector"),
    ("OTEL_EXPORTER_OTLP_ENDPOINT", "http://[::1"),
    ("OTEL_EXPORTER_OTLP_ENDPOINT", "http://collector:port"),
    ("OTEL_EXPORTER_OTLP_METRICS_PROTOCOL", "udp"),
    ("OTEL_EXPORTER_OTLP_TIMEOUT", "ten"),
    ("OTEL_EXPORTER_OTLP_TIMEOUT", "-1"),
    ("OTEL_EXPORTER_OTLP_CERTIFICATE", "/nowhere.pem"),
    ("OTEL_EXPORTER_OTLP_CLIENT_KEY", "/nowhere.key"),
    ("OTEL_METRICS_EXPORTER", "oltp"),
    ("OTEL_SDK_DISABLED", "1"),
    ("OTEL_RESOURCE_ATTRIBUTES", "oops"),
]


@pytest.mark.parametrize(("variable", "value"), WRONG)
def test_a_wrong_variable_stops_no_training_and_is_in_the_summary(
    variable: str, value: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A variable may be of a whole cluster; whoever starts a run there did not write it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "wandb", None)
    monkeypatch.setattr("otel_train.trackers.manager.find_spec", lambda _: None)
    monkeypatch.setenv("OTEL_TRAIN_PROMETHEUS_ADDRESS", "127.0.0.1:0")
    monkeypatch.setenv("OTEL_TRAIN_EXIT_TIMEOUT_S", "0.1")
    if "OTLP" in variable:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv(variable, value)

    with otel_train.instrument(console=False) as session:
        [ignored] = session.summary()["settings_ignored"]

    assert ignored["name"].replace(" ", "") in {variable, variable.removeprefix("OTEL_TRAIN_").lower()}
    assert ignored["problem"]
    assert ignored["from"] == "environment"
    [path] = (tmp_path / "runs").glob("*/rank0/summary.json")
    assert json.loads(path.read_text(encoding="utf-8"))["settings_ignored"] == [ignored]


@pytest.mark.parametrize("address", ["", "192.0.2.1:9464"], ids=["default", "environment"])
def test_a_machine_without_the_loopback_address_runs_without_metrics_page(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A host with IPv6 alone has no 127.0.0.1; a sandbox may allow Unix sockets alone."""

    def refuse(host: str, port: int) -> None:
        raise OSError(errno.EAFNOSUPPORT, os.strerror(errno.EAFNOSUPPORT))

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("otel_train.exporters.prometheus._Server", refuse)
    monkeypatch.setenv("OTEL_TRAIN_PROMETHEUS_ADDRESS", address)

    with otel_train.instrument(console=False, agent="thread") as session:
        url = session.metrics_url

    assert url is None
    assert caplog.text.count("/metrics could not start: Prometheus endpoint 127.0.0.1:9464") == 1
    [path] = (tmp_path / "runs").glob("*/rank0/summary.json")
    assert json.loads(path.read_text(encoding="utf-8"))["state"] == "finished"


def test_an_address_that_the_agent_process_cannot_listen_on_costs_no_other_telemetry(tmp_path: Path) -> None:
    """``instrument()`` has returned when the agent tries it: the run goes on, with the default address."""
    program = """
import otel_train
otel_train.instrument(agent="process", run_dir="runs", prometheus_address="no.such.host.invalid:9464")
otel_train.step()
"""

    done = launched([sys.executable, "-c", program], {**os.environ}, tmp_path)

    assert done.returncode == 0
    assert (
        done.stderr.count("Prometheus endpoint no.such.host.invalid:9464") == 2
    )  # in the log, and in the run summary
    assert "Ignored; in force: prometheus_address='127.0.0.1:9464'" in done.stderr
    [path] = (tmp_path / "runs").glob("*/rank0/summary.json")
    summary = json.loads(path.read_text(encoding="utf-8"))
    [ignored] = summary["settings_ignored"]
    assert (ignored["name"], ignored["from"]) == ("prometheus_address", "code")
    assert (summary["state"], summary["steps"]) == ("finished", {"train": 1})


@pytest.mark.parametrize(
    ("written", "remedy"),
    [
        ("loader", "Did you mean loaders?"),
        ("train_loader", 'Did you mean loaders, as in instrument(model, {"train": loader})?'),
        ("models", "Did you mean model?"),
        ("run_dri", "Did you mean run_dir?"),
        ("optimizer", "Leave it out: what a loop calls is found without it"),
        ("endpoint", "Set OTEL_EXPORTER_OTLP_ENDPOINT, for example to http://127.0.0.1:4318"),
        ("world_size", "Leave it out: RANK, LOCAL_RANK and WORLD_SIZE of the launcher are read"),
        ("port", "Did you mean prometheus_address, such as 127.0.0.1:9464?"),
        ("hooks", "Known: disabled, "),
    ],
)
def test_an_argument_that_is_none_is_answered_with_what_was_meant_or_what_serves(
    written: str, remedy: str
) -> None:
    """``instrument(m, loader={...})`` was asked whether it meant ``max_label_values``, ``endpoint=`` whether ``hardware``."""
    arguments: dict[str, Any] = {written: {}}
    said = "^" + re.escape(f"{written}: not a setting of otel_train. {remedy}")

    with pytest.raises(ConfigError, match=said):
        otel_train.instrument(None, **arguments)


def test_a_program_under_the_launcher_trains_with_a_wrong_environment_and_warns_once(tmp_path: Path) -> None:
    """Exit code and output are the program's; the warning is one line on stderr."""
    (tmp_path / "train.py").write_text(
        "import otel_train\notel_train.instrument().close()\nprint('trained')\n"
    )
    (tmp_path / "pyproject.toml").write_text("[tool.otel_train]\nrun_dri = 1\n")
    environ = {**os.environ, "OTEL_TRAIN_STALL_AFTER_S": "soon", "OTEL_TRAIN_PROMETHEUS": "off"}

    done = launched([sys.executable, "-m", "otel_train", "run", "train.py"], environ, tmp_path)

    assert (done.returncode, done.stdout) == (0, "trained\n")
    # In the log, and in the run summary.
    assert done.stderr.count("OTEL_TRAIN_STALL_AFTER_S='soon': expected a number") == 2
    assert "run_dri: not a setting of otel_train. Did you mean run_dir?" in done.stderr


def test_what_is_ignored_is_in_the_run_summary_and_on_the_page() -> None:
    """Whoever looks at a run that behaves otherwise than set finds the reason there."""
    ignored = {
        "name": "OTEL_TRAIN_OTLP",
        "from": "environment",
        "problem": "otlp='x': wrong",
        "used": "otlp='auto'",
    }
    summary = {"settings_ignored": [ignored]}

    assert "ignored: otlp='x': wrong" in render_run_summary(TextLayout(120), summary)
    assert any("otlp='x': wrong" in notice.summary for notice in alerts._missing(summary))
