"""What otel_train raises on purpose, and when."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import otel_train
from otel_train.errors import (
    ConfigError,
    MissingExtraError,
    imported,
    near,
    require,
    shown,
    text,
    truth,
    whole,
)
from otel_train.instrumentation.stages import active_session
from otel_train.session import Session


def test_a_module_that_is_there_is_imported() -> None:
    """Nothing stands between the caller and the real module."""
    assert require("json", extra="demo") is json


@pytest.mark.parametrize("module", ["no_such_package", "no_such_package.part"])
def test_a_missing_package_names_the_command_that_installs_it(module: str) -> None:
    """A remedy one can paste is worth more than a traceback."""
    with pytest.raises(MissingExtraError, match=r"pip install 'otel-train\[demo\]'") as caught:
        require(module, extra="demo")

    assert caught.value.name == module


def test_a_failure_inside_a_package_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A broken build is not a missing package; installing it again would not help."""
    (tmp_path / "our_broken_build.py").write_text("import a_library_it_needs\n")
    monkeypatch.syspath_prepend(str(tmp_path))

    with pytest.raises(ModuleNotFoundError, match="a_library_it_needs") as caught:
        require("our_broken_build", extra="demo")

    assert not isinstance(caught.value, MissingExtraError)
    assert "our_broken_build" not in sys.modules


def test_a_module_whose_import_is_not_over_is_not_there_yet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program that begins with JAX imports torch later, for seconds, while our thread looks for devices."""
    name = "our_slow_import"
    (tmp_path / f"{name}.py").write_text(
        f"from otel_train.errors import imported\nduring = imported({name!r})\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    assert imported(name) is None
    module = import_module(name)

    assert module.during is None
    assert imported(name) is module
    monkeypatch.delitem(sys.modules, name)


QUIET: dict[str, Any] = {"prometheus": False, "console": False, "otlp": "off", "flight_recorder": False}
ROWS = [1, 2]
SGD = torch.optim.SGD(torch.nn.Linear(1, 1).parameters(), lr=0.1)


def nothing() -> None:
    """Code of the program's own."""


WRONG: dict[str, tuple[Callable[[Any], object], str]] = {
    "a stage with a slip": (
        lambda s: s.on("foward", before=nothing),
        r"on\('foward'\): expected data, h2d, forward, .* Did you mean 'forward'\?",
    ),
    "a stage in capitals": (lambda s: s.on("Backward", after=nothing), "Did you mean 'backward'"),
    "a stage in the plural": (lambda s: s.on("checkpoints", after=nothing), "Did you mean 'checkpoint'"),
    "no stage": (lambda s: s.on(3, after=nothing), r"on\(3\): expected text"),
    "nothing to call": (lambda s: s.on("forward", before=5), "expected a callable"),
    "an epoch in words": (
        lambda _: otel_train.epoch("three"),
        r"epoch\('three'\): expected a whole number from 0 on, or something to go over\. Leave it out",
    ),
    "an epoch and a half": (lambda _: otel_train.epoch(1.5), r"epoch\(1\.5\)"),  # type: ignore[call-overload]
    "an epoch below zero": (lambda _: otel_train.epoch(-1), r"epoch\(-1\)"),
    "an epoch that is true": (lambda _: otel_train.epoch(True), r"epoch\(True\)"),
    "a tensor that is no number": (lambda _: otel_train.epoch(torch.tensor(1.5)), r"epoch\(tensor\(1\.5"),
    "a stage by number": (lambda _: otel_train.stage(5), r"stage\(5\): .* Name the stage: stage\('augment'\)"),  # type: ignore[arg-type]
    "a stage that cannot be hashed": (lambda _: otel_train.stage(["a"]), r"stage\(\['a'\]\)"),  # type: ignore[arg-type]
    "a stage without a name": (lambda _: otel_train.stage(""), r"stage\(''\)"),
    "a stage with a line break": (lambda _: otel_train.stage("a\nb"), r"stage\('a\\nb'\)"),
    "a stage around no function": (lambda _: otel_train.stage("a")(5), r"stage\('a'\)\(5\): expected a function"),  # type: ignore[type-var]
    "a decorator without its call": (lambda _: otel_train.stage(nothing), r"stage\(<function nothing"),  # type: ignore[arg-type]
    "a step in words": (lambda _: otel_train.step(start="3"), r"step\(start='3'\): expected a whole number"),  # type: ignore[arg-type]
    "a step below zero": (lambda _: otel_train.step(start=-1), r"step\(start=-1\)"),
    "an operation by number": (lambda _: otel_train.begin(5), r"begin\(5\): expected text"),  # type: ignore[arg-type]
    "an operation that cannot be hashed": (lambda _: otel_train.begin({}), r"begin\(\{\}\)"),  # type: ignore[arg-type]
    "a name in the place of a token": (
        lambda _: otel_train.end("load"),  # type: ignore[arg-type]
        r"end\('load'\): expected a token that begin\(\) returned",
    ),
    "no token": (lambda _: otel_train.end(None), r"end\(None\)"),  # type: ignore[arg-type]
    "what cannot be iterated": (lambda _: otel_train.watch(5), "is a whole number: expected a DataLoader or another iterable"),
    "an object for a model": (lambda s: s.add({"a": object()}), "model 'a' is of type object: expected a torch.nn.Module"),
    "nothing for a model": (lambda s: s.add({"a": None}), "model 'a' is None: expected a torch.nn.Module"),
    "a loader in the place of a model": (
        lambda _: otel_train.instrument(torch.utils.data.DataLoader(ROWS)),
        r"expected a torch\.nn\.Module, .* Did you mean instrument\(model, loaders\), or instrument\(loaders=\.\.\.\)\?$",
    ),
    "an optimizer as third": (
        lambda _: otel_train.instrument(None, ROWS, SGD),
        r"the third argument is of type SGD: .*Optimizers are found by themselves: leave it out",
    ),
    "an optimizer as first": (lambda _: otel_train.instrument(SGD), "Give the model that it updates; optimizers are found by themselves"),
    "an optimizer as second": (lambda _: otel_train.instrument(None, SGD), "Optimizers are found by themselves: leave it out"),
    "a loader by number": (lambda _: otel_train.watch(ROWS, name=5), r"watch\(\.\.\., name=5\)"),  # type: ignore[arg-type]
    "a loader without a name": (lambda _: otel_train.watch(ROWS, name=""), r"name=''"),
    "a phase with a slip": (
        lambda _: otel_train.watch(ROWS, name="a", phase="trian"),
        r"phase='trian' of loader 'a': expected one of train, eval, test, predict\. Did you mean 'train'\?",
    ),
    "a phase by number": (lambda s: s.watch(ROWS, name="a", phase=1), "phase=1 of loader 'a'"),
    "samples that are a number": (
        lambda s: s.add(loaders=otel_train.Loader(ROWS, name="a", samples=32)),  # type: ignore[arg-type]
        "samples=32 of loader 'a': expected a callable .* Write samples=len",
    ),
    "a loader named with nothing": (lambda s: s.add(loaders={"": ROWS}), "loader name ''"),
    "a model named with nothing": (lambda s: s.add({"": torch.nn.Linear(1, 1)}), "model name ''"),
    "values without names": (lambda s: s.log(0.5), r"log\(0\.5\): expected values by name\. Write log\(loss=loss\)"),
    "one value in the place of several": (lambda _: otel_train.log(0.5), r"log\(0\.5\): expected values by name\. Write log\(loss=loss\)"),  # type: ignore[arg-type]
    "values under numbers": (lambda s: s.log({1: 0.5}), r"log\(\{1: \.\.\.\}\): expected text"),
    "an event by number": (lambda _: otel_train.event(5), r"event\(5\): expected text"),  # type: ignore[arg-type]
    "an event without names": (lambda s: s.event("a", ["b"]), r"event\('a', \['b'\]\): expected attributes by name"),
    "an event with a text": (lambda _: otel_train.event("a", "b"), r"event\('a', 'b'\): expected attributes by name"),  # type: ignore[arg-type]
    "a capture with a slip": (lambda _: otel_train.capture(step=5), "capture request: 'step': .* Did you mean 'steps'"),
    "a capture in words": (lambda _: otel_train.capture(steps="5"), "steps='5': expected a whole number from 1 to"),
    "a switch in words": (lambda _: otel_train.capture(with_stack="False"), "with_stack='False': expected True or False"),
    "a block with a slip": (lambda s: s.show_blocks(["profilling"]), r"show_blocks\(\['profilling'\]\): .* Did you mean 'profiling'"),
    "a tracker with a slip": (lambda s: s.track({"wandbb": {}}), "Did you mean 'wandb'"),
    "a tracker that is none": (lambda s: s.track({"tensorboard": True}), "tensorboard=True: expected 'auto'"),
    "an end with a slip": (lambda s: s.close("finnished"), "Did you mean 'finished'"),
    "a cache by number": (lambda s: s.cache(5, size=lambda: 1), r"cache\(5, \.\.\.\): expected text"),
    "a cache of so many bytes": (lambda s: s.cache("a", size=5), r"size=5\): expected a callable that returns bytes"),
    "a meter provider that is none": (lambda s: s.provide(5), "expected"),
    "a file by number": (lambda _: otel_train.instrument(config_file=5), "config_file=5: expected the path"),  # type: ignore[arg-type]
    "settings in a dict": (lambda _: otel_train.instrument(config={"run_id": "a"}), "expected an otel_train.Config"),  # type: ignore[arg-type]
    "a setting with a slip": (lambda _: otel_train.instrument(run_nam="a"), "Did you mean run_name"),
    "a project of W&B": (lambda _: otel_train.instrument(wandb="myproject"), r"wandb=\{'project': 'myproject'\}"),
    "a step of JAX without a function": (lambda _: otel_train.jax.make_step(5), "^5: expected a function"),  # type: ignore[arg-type]
    "a step of JAX by number": (lambda _: otel_train.jax.make_step(nothing, name=5), r"make_step\(\.\.\., name=5\)"),  # type: ignore[arg-type]
    "a stage of JAX without a function": (lambda _: otel_train.jax.stage(None, "a"), "expected a function"),  # type: ignore[arg-type]
    "a stage of JAX by number": (lambda _: otel_train.jax.stage(nothing, 5), r"stage\(\.\.\., 5\): expected text"),  # type: ignore[arg-type]
    "a wait in words": (lambda _: otel_train.jax.stage(nothing, "a", wait="no"), "wait='no'.: expected True or False"),  # type: ignore[arg-type]
}  # fmt: skip
"""What a person may get wrong, the call, and what the message must say."""


@pytest.fixture
def session(tmp_path: Path) -> Iterator[Session]:
    with otel_train.instrument(run_dir=str(tmp_path), **QUIET) as opened:
        yield opened


def said(call: Callable[[Any], object], session: object) -> str:
    """What a call is refused with; what else becomes of it."""
    try:
        call(session)
    except ConfigError as error:
        return str(error)
    except Exception as error:  # noqa: BLE001  # any other error is what is looked for
        return f"another error: {error!r}"
    return "accepted"


def test_wrong_arguments_are_refused_at_the_call(session: Session) -> None:
    """Accepted, they would be silently without effect, or fail later in words of Python's."""
    answers = {what: said(call, session) for what, (call, _) in WRONG.items()}
    wrong = {what: answer for what, answer in answers.items() if not re.search(WRONG[what][1], answer)}

    assert wrong == {}
    assert not session.closed


def test_disabled_telemetry_leaves_wrong_arguments_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who switches it off wants the program to run as if it were not there."""
    monkeypatch.setattr(active_session, "disabled", None)
    monkeypatch.setenv("OTEL_TRAIN_DISABLED", "true")
    assert otel_train.stage(5).name == "5", "a decorator is made before the session"  # type: ignore[arg-type]
    off = otel_train.instrument(torch.nn.Linear(1, 1), 5)
    answers = {what: said(call, off) for what, (call, _) in WRONG.items()}

    assert {what: answer for what, answer in answers.items() if answer != "accepted"} == {}


def test_a_stage_of_the_programs_own_may_have_any_name(session: Session) -> None:
    """Also one that is like ours, and also before it is made."""
    with otel_train.stage("forwards"):
        pass
    for name in (
        "forwards",
        "forward_teacher",
        "optimizer2",
        "reward",
        "d2h",
        "load_data",
        "save checkpoint",
    ):
        session.on(name, before=nothing).remove()


def test_numbers_of_other_libraries_are_numbers(session: Session) -> None:
    """An epoch is often a tensor, and a step one of numpy's."""
    del session
    otel_train.step(start=np.int64(3))
    with otel_train.epoch(torch.tensor(3)):
        pass
    assert list(otel_train.epoch(np.arange(2))) == [0, 1]


def test_a_value_that_cannot_be_shown_does_not_hide_the_message() -> None:
    """The object that is wrong may be broken as well, or a megabyte long."""

    class Broken:
        def __repr__(self) -> str:
            raise RuntimeError

    assert shown(Broken()) == "<Broken>"
    assert len(shown("x" * 1000)) == 80
    assert "\n" not in shown(np.zeros((9, 9)))
    with pytest.raises(ConfigError, match=r"name=<Broken>: expected text"):
        text("name={}", Broken(), "Say it")


@pytest.mark.parametrize("value", [0, -1, True, 1.5, "2", None, [], float("nan"), torch.ones(3)])
def test_what_is_no_number_of_something_is_refused(value: Any) -> None:
    """A message is better than a fault in the middle of an epoch."""
    with pytest.raises(ConfigError, match=r"expected a whole number from 1 on\. Leave it out for 5"):
        whole("steps={}", value, "Leave it out for 5", least=1)


@pytest.mark.parametrize("value", ["False", 1, None])
def test_what_is_no_truth_value_is_refused(value: Any) -> None:
    """The text "False", as a configuration file may give it, is true to Python."""
    with pytest.raises(ConfigError, match="expected True or False"):
        truth("enabled={}", value)
    assert truth("enabled={}", np.bool_(0)) is False


def test_only_what_is_near_is_suggested() -> None:
    """A wrong suggestion is worse than none."""
    assert near("trian", ["train", "eval"]) == "train"
    assert near("xyz", ["train", "eval"]) == ""
