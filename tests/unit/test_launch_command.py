"""What a launcher starts, and what it refuses to start."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

import pytest

from otel_train.autoinstrument import attach
from otel_train.autoinstrument.runner import SITE, command_line, environment, interpreter_flags, unreachable
from otel_train.cli import run as run_command
from otel_train.errors import ConfigError
from otel_train.resource import detect


def parsed(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    run_command.add_arguments(parser)
    return parser.parse_args(words)


@pytest.mark.parametrize(
    ("words", "flags"),
    [
        (["python", "-m", "otel_train", "run", "-u", "x.py"], []),
        (["python", "-u", "-X", "dev", "-Werror", "-m", "otel_train"], ["-u", "-X", "dev", "-Werror"]),
        (["python", "-um", "otel_train", "run"], ["-u"]),
        (["python", "-OO", "-W", "ignore", "/bin/otel-train", "run", "-B"], ["-OO", "-W", "ignore"]),
        (["python", "-Xfaulthandler", "-c", "pass"], ["-Xfaulthandler"]),
        (["python"], []),
    ],
)
def test_the_interpreter_keeps_its_flags(words: Sequence[str], flags: Sequence[str]) -> None:
    """`python -u` below a scheduler must stay unbuffered."""
    assert interpreter_flags(words) == flags


@pytest.mark.parametrize(
    ("words", "option"),
    [
        (["/opt/bin/python3.12", "-I", "x.py"], "-I"),
        (["python3", "-uEm", "pkg.train"], "-E"),
        (["python3.13t", "-X", "dev", "-W", "S", "-OS", "x.py"], "-S"),
        (["python", "-Xfrozen_modules=off", "-Wignore:E", "x.py", "-I"], ""),
        (["python", "-c", "import sys"], ""),
        (["torchrun", "-I"], ""),
    ],
)
def test_an_interpreter_that_ignores_pythonpath_is_named(words: Sequence[str], option: str) -> None:
    """Nothing is instrumented, which would be said by nothing else."""
    assert unreachable(words) == option


@pytest.mark.parametrize(
    "words",
    [
        ["train.py", "--run-id", "theirs", "-m", "x", "--", "a"],
        ["-m", "pkg.train", "--set", "a=b", "--help"],
        ["--", "train.py", "--", "a"],
    ],
)
def test_what_comes_after_the_program_is_the_programs_own(words: Sequence[str]) -> None:
    """If otel-train takes an option of the program, the training changes."""
    args = parsed("--run-name", "mine", *words)
    assert args.run_name == "mine"
    assert args.run_id is None
    if words[0] == "-m":
        assert args.module == words[1:]
    else:
        assert args.program == list(words)


def test_options_are_settings_and_any_setting_is_an_option() -> None:
    """Who cannot touch the code sets everything from outside."""
    args = parsed("--run-name", "a b", "--no-summary", "--no-prometheus", "--endpoint", "http://c:4318",
                  "--config", "a.yaml", "--set", "export_interval_s=5", "--set", "run_dir=x=y", "train.py")  # fmt: skip

    assert run_command.environment_of(args) == {
        "OTEL_TRAIN_RUN_NAME": "a b", "OTEL_TRAIN_CONSOLE": "false", "OTEL_TRAIN_PROMETHEUS": "false",
        "OTEL_TRAIN_EXPORT_INTERVAL_S": "5", "OTEL_TRAIN_RUN_DIR": "x=y",
        "OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318", "OTEL_TRAIN_CONFIG": "a.yaml",
    }  # fmt: skip


def test_the_former_name_of_an_option_is_accepted(capsys: pytest.CaptureFixture[str]) -> None:
    """Until version 0.2, for scripts that have it."""
    assert run_command.environment_of(parsed("--no-card", "train.py")) == {"OTEL_TRAIN_CONSOLE": "false"}
    assert "is now --no-summary" in capsys.readouterr().err
    assert run_command.environment_of(parsed("train.py")) == {}


def test_a_script_is_run_by_this_interpreter_and_a_command_as_it_is(tmp_path: Path) -> None:
    """A console script has an interpreter of its own."""
    for name, text, mode in (
        ("a.py", "", 0o644),
        ("train", "", 0o644),
        ("b", "#!/usr/bin/env python3\n", 0o755),
        ("c", "#!/bin/sh\n", 0o755),
    ):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(mode)

    def started(name: str) -> list[str]:
        return command_line([str(tmp_path / name), "x"], flags=["-u"])

    for name in ("a.py", "train", "b"):
        assert started(name) == [sys.executable, "-u", str(tmp_path / name), "x"]
    assert started("c") == [str(tmp_path / "c"), "x"]
    assert command_line(["sh", "-c", "true"]) == ["sh", "-c", "true"]
    assert command_line([str(tmp_path)]) == [sys.executable, str(tmp_path)]
    assert command_line(["--lr", "3"], module="pkg") == [sys.executable, "-m", "pkg", "--lr", "3"]


@pytest.mark.parametrize("words", [[], ["no_such_program.py"]])
def test_a_program_that_is_not_there_is_refused(words: list[str]) -> None:
    """With the remedy, before anything is started."""
    with pytest.raises(ConfigError, match="-m"):
        command_line(words)


def test_the_environment_lets_us_in_and_keeps_what_the_user_has(tmp_path: Path) -> None:
    """The run id is made once: all processes below a launch are one run."""
    made = environment({"PYTHONPATH": "/theirs", "A": "b"}, {"OTEL_TRAIN_RUN_NAME": "n"}, tmp_path)

    assert made["PYTHONPATH"] == f"{SITE}{os.pathsep}/theirs"
    assert made["A"] == "b"
    assert made["OTEL_TRAIN_RUN_NAME"] == "n"
    assert made["OTEL_TRAIN_RUN_DIR"] == os.path.abspath("runs")  # noqa: PTH100 - said twice, two ways
    from otel_train.config import Config

    config = Config.from_env(made)
    ids = {detect(config, {**made, "RANK": str(rank), "WORLD_SIZE": "2"}).run_id for rank in range(2)}
    assert len(ids) == 1
    given = {detect(config, {**made, "TORCHELASTIC_RUN_ID": "job7", "RANK": rank}).run_id for rank in "01"}
    assert [run_id.partition("-")[0] for run_id in given] == ["job7"]


def test_a_program_that_is_to_run_bare_has_the_environment_of_a_bare_one(tmp_path: Path) -> None:
    """Switched off is off."""
    bare = {"OTEL_TRAIN_DISABLED": "true", "PYTHONPATH": "/theirs"}

    assert environment(bare, {}, tmp_path) == bare


def test_a_wrong_option_is_refused_and_a_wrong_variable_is_left_to_the_program(tmp_path: Path) -> None:
    """An option is typed for this start; an environment may be of a whole cluster, and stops no training."""
    wrong = {"OTEL_TRAIN_EXPORT_INTERVAL_S": "-1"}

    with pytest.raises(ConfigError, match="OTEL_TRAIN_EXPORT_INTERVAL_S=-1"):
        environment({}, wrong, tmp_path)
    assert environment(wrong, {}, tmp_path)["OTEL_TRAIN_EXPORT_INTERVAL_S"] == "-1"


def test_the_folder_on_the_path_is_no_package_of_modules() -> None:
    """Whatever lies there can shadow a module of the user's."""
    assert sorted(path.name for path in SITE.glob("*.py")) == ["__init__.py", "sitecustomize.py"]
    assert str(SITE) not in sys.path


def test_what_a_session_needs_can_be_imported_before_it_starts() -> None:
    """A name that is none would end the watching at the first sign of training."""
    assert [import_module(name).__name__ for name in attach._NEEDED] == list(attach._NEEDED)
