"""Settings: what is allowed, where they come from, what a mistake is answered with."""

from __future__ import annotations

import ast
import inspect
from dataclasses import fields
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from otel_train.config import settings as module
from otel_train.config.settings import Config, settings_in
from otel_train.errors import ConfigError


@pytest.mark.parametrize(
    ("setting", "value", "rule"),
    [
        ("prometheus_address", "127.0.0.1:65536", "host:port with a port from 0 to 65535"),
        ("prometheus_address", "9464", "host:port with a port from 0 to 65535"),
        ("export_interval_s", 0.05, "0.1 to 3600"),
        ("export_interval_s", -1.0, "0.1 to 3600"),
        ("export_interval_s", float("nan"), "0.1 to 3600"),
        ("tuning", "poll_interval_s=0.001", "poll_interval_s to be 0.01 to 10"),
        ("flight_recorder_events", 5000, "a power of two"),
        ("flight_recorder_events", 2048, "4096 to 16777216"),
        ("trace_slow_factor", 1.0, "more than 1"),
        ("trace_rate_per_s", float("inf"), "more than 0"),
        ("stall_after_s", 0.0, "more than 0"),
        ("max_label_values", 0, "1 to 64"),
        ("max_run_dir_bytes", 1000, "16777216 or more"),
        ("otlp", "yes", "one of auto, on, off"),
        ("cuda_timing", "exact", "one of events, sync, off"),
        ("export_profile", "all", "one of auto, full, reduced, rank0_aggregate, rank0"),
        ("run_id", "a\nb", "no control characters"),
        ("run_dir", "", "not empty"),
        ("attempt", True, "a whole number"),
        ("attempt", 1.5, "a whole number"),
        ("prometheus", 1, "true or false"),
        ("run_id", 7, "text"),
        ("stall_after_s", "5", "a number"),
    ],
)
def test_a_value_we_cannot_honour_is_refused_with_value_rule_and_remedy(
    setting: str, value: object, rule: str
) -> None:
    """A run must not start with settings that its owner did not mean."""
    arguments: dict[str, Any] = {setting: value}

    with pytest.raises(ConfigError) as caught:
        Config(**arguments)

    message = str(caught.value)
    assert message.startswith(f"{setting}={value!r}: expected {rule}")
    assert "Leave it out for the default" in message


@pytest.mark.parametrize(("digits", "shown"), [(400, "1000"), (5000, "<a number of 16,610 bits>")])
def test_a_whole_number_beyond_what_can_be_computed_with_is_refused(digits: int, shown: str) -> None:
    """As a typing error in pyproject.toml it switched the instrumentation off, with a traceback."""
    for setting in ("stall_after_s", "attempt"):
        with pytest.raises(ConfigError, match=f"{setting}={shown}.*: expected"):
            Config(**{setting: 10**digits})


def test_whole_numbers_paths_and_numpy_numbers_become_the_type_of_their_setting() -> None:
    """``total_steps=np.int64(7)`` is a number to its author, and JSON must be able to write it."""
    arguments: dict[str, Any] = {"export_interval_s": 5, "total_steps": np.int64(7), "run_dir": Path("a/b")}

    config = Config(**arguments)

    assert (config.export_interval_s, config.total_steps, config.run_dir) == (5.0, 7, "a/b")
    assert [type(value) for value in (config.export_interval_s, config.total_steps)] == [float, int]


@pytest.mark.parametrize(
    ("text", "value"),
    [("true", True), ("1", True), ("yes", True), ("ON", True), ("false", False), ("0", False), ("No", False)],
)
def test_a_switch_understands_the_usual_words(text: str, value: object) -> None:
    """``OTEL_TRAIN_DISABLED=true`` must work, and so must 1."""
    assert Config.from_env({"OTEL_TRAIN_DISABLED": text}).disabled is value


@pytest.mark.parametrize(
    ("variable", "text", "rule"),
    [
        ("OTEL_TRAIN_DISABLED", "maybe", "true or false"),
        ("OTEL_TRAIN_FLIGHT_RECORDER_EVENTS", "many", "a whole number"),
        ("OTEL_TRAIN_EXPORT_INTERVAL_S", "15s", "a number"),
    ],
)
def test_a_variable_that_does_not_parse_is_ignored_and_reported_by_its_own_name(
    variable: str, text: str, rule: str
) -> None:
    """The user looks for the variable, not for our field."""
    values, [ignored], _ = settings_in({variable: text})

    assert values == {}
    assert ignored.problem.startswith(f"{variable}={text!r}: expected {rule}")
    assert Config.from_env({variable: text}) == Config()


def test_a_variable_like_no_setting_gets_the_list_of_all() -> None:
    """A far-fetched suggestion is worse than none."""
    [ignored] = settings_in({"OTEL_TRAIN_QQQ": "x"})[1]

    assert "Known: OTEL_TRAIN_DISABLED, OTEL_TRAIN_RUN_ID" in ignored.problem


def test_what_is_ignored_is_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    """Settings are read several times in a process, and by every callback of a framework."""
    for _ in range(3):
        Config.from_env({"OTEL_TRAIN_PROMETHEUS_ADDRESS": "127.0.0.1:70001"})

    assert caplog.text.count("OTEL_TRAIN_PROMETHEUS_ADDRESS='127.0.0.1:70001': expected host:port") == 1
    assert "Ignored; in force: prometheus_address='127.0.0.1:9464'" in caplog.text


def test_other_variables_and_reserved_ones_are_left_alone() -> None:
    """The environment is full of things that are not ours."""
    ours = {"OTEL_TRAIN_TEST_BIN": "/x", "OTEL_TRAIN_RUN_NAME": ""}

    assert Config.from_env({"OTEL_SERVICE_NAME": "x", "PATH": "/bin", **ours}) == Config()


def test_a_config_cannot_be_changed() -> None:
    """What a run was started with is what its run directory says."""
    config: Any = Config()

    with pytest.raises(AttributeError):
        config.run_id = "other"


def test_every_setting_says_what_it_means() -> None:
    """The docstring under a field is the only reference page a setting has."""
    [body] = [
        node.body
        for node in ast.parse(inspect.getsource(module)).body
        if isinstance(node, ast.ClassDef) and node.name == "Config"
    ]
    documented = {
        field.target.id
        for field, text in pairwise(body)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        if isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant)
    }

    assert documented == {field.name for field in fields(Config)}


def test_numbers_with_names_are_given_as_a_dict_or_as_text() -> None:
    """YAML and code have dicts, the environment has text; epochs count from 1, and may be several."""
    given: Any = {"steps": 500, "epoch": [1, 3]}
    assert Config(profiler_every=given) == Config(profiler_every="epoch=1, epoch=3, steps=500")
    assert Config(profiler_schedule="active=5").profiler_schedule == ""
    assert Config(profiler_schedule="active=20").schedule() == (10, 0, 1, 20, 0)
    for wrong, rule in {
        "epoch=0": "epoch to be a whole number, 1 or more",
        "steps": "steps to be a whole number, 0 or more",
        "steps=1.5": "steps to be a whole number",
        "minutes=inf": "minutes to be 0 to 1000000000.0",
        "hours=1": "name=value, divided by commas, with names of steps, epochs, minutes, epoch",
    }.items():
        with pytest.raises(ConfigError, match=f"profiler_every='{wrong}': expected {rule}"):
            Config(profiler_every=wrong)


def test_a_keyword_that_is_no_setting_is_refused_with_a_suggestion() -> None:
    """As one of ``instrument``."""
    with pytest.raises(ConfigError, match="Did you mean run_name"):
        Config(run_nam="a")  # type: ignore[call-arg]
