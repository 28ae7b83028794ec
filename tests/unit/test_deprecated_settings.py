"""Former names of settings: accepted wherever the present ones are, with a warning that says what to write."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from otel_train.config import Config
from otel_train.config.deprecated import FOLDED, FORMER, RENAMED, present
from otel_train.config.settings import DEFAULTS, SETTINGS, settings_in
from otel_train.config.sources import resolve
from otel_train.config.validation import FORMER_VALUES

CASES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"export_every_s": 5.0}, {"export_interval_s": 5.0}),
    ({"flight": False, "flight_edges": 8192}, {"flight_recorder": False, "flight_recorder_events": 8192}),
    ({"capture": "asked"}, {"profiler": "on_demand"}),
    ({"export_profile": "lean"}, {"export_profile": "reduced"}),
    ({"prometheus_port": 0}, {"prometheus_address": "127.0.0.1:0"}),
    ({"prometheus_host": "::1"}, {"prometheus_address": "[::1]:9464"}),
    ({"dcgm_endpoint": "node:9400"}, {"hardware": "node:9400"}),
    ({"hardware": "auto", "dcgm_endpoint": "node:9400"}, {"hardware": "node:9400"}),
    ({"max_loaders": 4, "max_stages": 30}, {"max_label_values": 60}),
    ({"max_stages": 2}, {"max_label_values": 16}),
    ({"capture_steps": 20, "capture_warmup": 3}, {"profiler_schedule": "warmup=3,active=20"}),
    ({"capture_every_steps": 500, "capture_epochs": "1,3"}, {"profiler_every": "steps=500,epoch=1,epoch=3"}),
    ({"capture_shapes": True, "capture_stacks": False}, {"profiler_options": "record_shapes"}),
    ({"turn_every_s": 0.1, "keep_burst": 9}, {"tuning": "poll_interval_s=0.1,trace_burst=9"}),
]


@pytest.mark.parametrize(("former", "now"), CASES)
def test_a_former_name_means_the_same_in_code_environment_and_files(
    tmp_path: Path, former: dict[str, Any], now: dict[str, Any]
) -> None:
    """A run that worked with the last version works with this one."""
    expected = Config(**now)
    environ = {f"OTEL_TRAIN_{name.upper()}": str(value).lower() for name, value in former.items()}
    yaml = tmp_path / "settings.yaml"
    yaml.write_text("\n".join(f"{name}: {value}" for name, value in former.items()), encoding="utf-8")
    lines = [
        f"{name} = {value!r}".replace("True", "true").replace("False", "false")
        for name, value in former.items()
    ]
    (tmp_path / "pyproject.toml").write_text("\n".join(["[tool.otel_train]", *lines]), encoding="utf-8")

    assert Config(**former) == expected
    for given in (
        resolve(None, former, environ={}, folder=tmp_path / "none"),
        resolve(environ=environ, folder=tmp_path / "none"),
        resolve(config_file=yaml, environ={}, folder=tmp_path / "none"),
        resolve(environ={}, folder=tmp_path),
    ):
        assert given.config == expected
        assert given.origins.ignored == ()
        assert given.origins.deprecated
        assert set(given.origins) == set(now)


def test_the_warning_says_what_to_write_instead() -> None:
    """Whoever reads it can paste it."""
    _, [keyword] = present({"prometheus_port": 0})
    [variable] = settings_in({"OTEL_TRAIN_CAPTURE_STEPS": "20"}).deprecated
    [value] = present({"capture": "asked"})[1][1:]

    assert keyword == (
        "prometheus_port: deprecated; set prometheus_address='127.0.0.1:0'. Version 0.2 refuses the former name"
    )
    assert "OTEL_TRAIN_CAPTURE_STEPS: deprecated; set OTEL_TRAIN_PROFILER_SCHEDULE=active=20" in variable
    assert "profiler=asked: deprecated; set profiler='on_demand'" in value


def test_a_secret_is_not_shown_in_the_warning() -> None:
    """It lands in a log."""
    [warning] = settings_in({"OTEL_TRAIN_CAPTURE_TOKEN": "s3cret"}).deprecated

    assert "set OTEL_TRAIN_PROFILER_TOKEN to the same value" in warning
    assert "s3cret" not in warning


def test_where_both_names_are_given_the_present_one_wins() -> None:
    """A script that is half moved must not run with what it has left behind."""
    given = resolve(None, {"prometheus_port": 1, "prometheus_address": "127.0.0.1:2"}, environ={})

    assert given.config.prometheus_address == "127.0.0.1:2"
    assert (
        "prometheus_port: ignored, because prometheus_address is set as well" in given.origins.deprecated[0]
    )


def test_a_former_name_is_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    """One line in the log, however often settings are read."""
    with caplog.at_level(logging.WARNING, "otel_train"):
        for _ in range(3):
            Config.from_env({"OTEL_TRAIN_KEEP_PER_S": "7"})

    assert caplog.text.count("OTEL_TRAIN_TRACE_RATE_PER_S=7") == 1


def test_a_wrong_value_under_a_former_name_is_reported() -> None:
    """It is refused by the rule of the setting that it stands for."""
    [wrong] = settings_in({"OTEL_TRAIN_CAPTURE_SHAPES": "maybe"}).ignored

    assert wrong.problem.startswith(
        "OTEL_TRAIN_PROFILER_OPTIONS='record_shapes=maybe': expected some of record_shapes"
    )


def test_every_former_name_leads_to_a_setting_and_none_is_one() -> None:
    """A table that points at nothing would lose the setting."""
    assert {*RENAMED.values(), *FOLDED, *FORMER_VALUES} <= set(DEFAULTS)
    assert FORMER.keys().isdisjoint(DEFAULTS)
    assert len(SETTINGS) <= 52


def test_the_standard_interval_of_exports_is_honoured() -> None:
    """``OTEL_METRIC_EXPORT_INTERVAL`` is in milliseconds; a variable of otel_train and whatever code says win."""
    environ = {"OTEL_METRIC_EXPORT_INTERVAL": "60000"}
    own = {**environ, "OTEL_TRAIN_EXPORT_INTERVAL_S": "5"}

    assert resolve(environ=environ).config.export_interval_s == 60.0
    assert resolve(environ=environ).origins["export_interval_s"] == "environment"
    assert resolve(environ=own).config.export_interval_s == 5.0
    assert resolve(None, {"export_interval_s": 7.0}, environ=environ).config.export_interval_s == 7.0
    [wrong] = resolve(environ={"OTEL_METRIC_EXPORT_INTERVAL": "1m"}).origins.ignored
    assert wrong.problem == "OTEL_METRIC_EXPORT_INTERVAL='1m': expected milliseconds, 100 to 3600000"


@pytest.mark.parametrize("former", ["max_loaders", "max_stages"])
def test_a_former_limit_that_is_no_number_is_reported(former: str) -> None:
    """As a present one: ignored with a warning, not without."""
    found = settings_in({f"OTEL_TRAIN_{former.upper()}": "abc"})

    assert (found.values, len(found.ignored)) == ({}, 1)
    assert "'abc'" in found.ignored[0].problem
