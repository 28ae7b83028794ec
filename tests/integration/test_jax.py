"""Programs of JAX, in processes of their own that have no torch: JAX does not bear the forks of other tests."""

from __future__ import annotations

import json
import os
import sys
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.support.zero_code import environment, launched, printed_by, run_zero_code, summaries_below

ROOT = Path(__file__).parents[2]
PROGRAMS = Path(__file__).parent / "jax_programs"

pytestmark = [
    pytest.mark.skipif(
        find_spec("jax") is None, reason="JAX is not installed: pip install 'otel-train[jax]'"
    ),
    pytest.mark.timeout(300),
]


@cache
def said_by(program: str, *arguments: str) -> dict[str, Any]:
    """What a program prints. It runs once for all tests; warnings are errors there, too."""
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    said: dict[str, Any] = json.loads(
        printed_by("-W", "error", PROGRAMS / program, *arguments, environ=environ)
    )
    return said


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Where the programs' runs are."""
    return str(tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="module")
def transparent(runs: str) -> dict[str, Any]:
    """Many ways of calling a function."""
    return said_by("transparent.py", runs)


def test_results_are_the_functions_own_to_the_bit(transparent: dict[str, Any]) -> None:
    """Compiled, traced, differentiated, vectorised, scanned, with donated buffers and static arguments."""
    assert transparent["different"] == []
    assert transparent["same outside"]
    assert transparent["same inside"]


def test_calls_that_compute_are_counted_and_calls_that_are_traced_are_not(
    transparent: dict[str, Any],
) -> None:
    """Seven of the ways compute: the four with jit, grad, vmap or scan around the function trace it."""
    assert transparent["calls"]["loss"] == 7
    assert transparent["calls"]["make_step"] == 3
    assert transparent["calls"]["block_until_ready"] == 9  # all but the one that raised
    assert transparent["failed"] == 1


def test_a_timed_call_returns_when_its_result_is_there(transparent: dict[str, Any]) -> None:
    """Else the time of the step would be the next one's."""
    assert transparent["ready"]


def test_methods_docstrings_and_exceptions_are_the_programs(transparent: dict[str, Any]) -> None:
    """And after close everything goes on as before."""
    assert transparent["method"]
    assert transparent["documented"] == "Scale it."
    assert transparent["raised"] == "division by zero"
    assert transparent["after close"]


def test_a_session_needs_no_torch(transparent: dict[str, Any]) -> None:
    """A program of JAX has none; and a model that is no Module is refused with what to do, not with an import."""
    assert transparent["torch"] == []
    assert transparent["faults"] == {}
    assert "otel_train.jax.make_step" in transparent["refused"]


def test_steps_are_counted_and_compiling_is_distinguished(runs: str) -> None:
    """40 steps, none of them minutes long; nothing that a compiled step hides by design is called missing."""
    steady = said_by("shapes.py", runs, "same")

    assert steady["steps"] == {"train": 40, "eval": 3}
    assert steady["updates"] == 40
    assert steady["instrumentation_gaps"] == []
    assert steady["activities"]["compile"] > 0
    assert sum(steady["activities"].values()) == pytest.approx(steady["wall_seconds"])
    assert "recompiling" not in [finding["name"] for finding in steady["findings"]]


def test_for_a_loop_of_changing_shapes_the_finding_names_recompiles(runs: str) -> None:
    """39 of 40 steps compile again."""
    changing = said_by("shapes.py", runs, "changing")
    first = changing["findings"][0]

    assert first["name"] == "recompiling"
    assert first["evidence"]["recompiles"] == 41  # 39 steps; 2 of the 3 batches of evaluation
    assert first["share"] > 0.3
    assert changing["activities"]["compile"] > changing["activities"]["productive"]


def test_a_capture_is_refused_with_what_to_use_instead(runs: str) -> None:
    """torch.profiler knows nothing of JAX."""
    assert "jax.profiler" in said_by("shapes.py", runs, "changing")["capture refused"]


# --- programs that do not say what their step is -----------------------------------------------------


@pytest.mark.parametrize(("kind", "asks"), [("bare", True), ("loader", False), ("loss", False)])
def test_a_session_in_which_no_step_was_seen_says_what_to_add(kind: str, asks: bool, runs: str) -> None:
    """`instrument` alone sees nothing of JAX but its compiler; the run summary of such a run was full of dashes."""
    summary = said_by("own_session.py", runs, kind)
    [missing] = summary["instrumentation_gaps"]
    leading = summary["findings"][0]

    assert (missing["what"], missing["name"]) == ("stage", "make_step")
    assert "step = otel_train.jax.make_step(step)" in missing["reason"]
    assert ("otel_train.watch(loader)" in missing["reason"]) is asks
    assert "`loss_of`" in missing["reason"]  # what JAX compiled
    assert leading["name"] == "incomplete"
    assert leading["summary"].startswith("INCOMPLETE")
    assert "step = otel_train.jax.make_step(step)" in leading["advice"]
    assert summary["updates"] == 0
    assert summary["telemetry"]["faults"] == {}


@pytest.mark.parametrize("arguments", [("gradient",), ("gradient", "fails"), ("evolve",)])
def test_a_program_below_otel_train_run_ends_with_what_to_add(
    arguments: tuple[str, ...], tmp_path: Path
) -> None:
    """What it prints, and its exit code, stay its own; one that takes no gradient may be a tool, and leaves no run."""
    environ = environment(JAX_PLATFORMS="cpu")
    script = PROGRAMS / "plain.py"
    bare = launched([sys.executable, script, *arguments], environ)
    ours = run_zero_code([script, *arguments], tmp_path, environ=environ)

    assert (ours.returncode, ours.stdout) == (bare.returncode, bare.stdout)
    assert bare.stderr == ""
    assert ours.stderr.count("\n") == 1
    assert "step = otel_train.jax.make_step(step)" in ours.stderr
    assert "otel_train.watch(loader)" in ours.stderr
    assert f"`{'evolve' if 'evolve' in arguments else 'train_step'}`" in ours.stderr
    assert any(tmp_path.iterdir()) == ("gradient" in arguments)


def test_a_program_of_jax_that_takes_gradients_has_a_run(tmp_path: Path) -> None:
    """With a summary that says what is missing, for whoever reads it later."""
    environ = environment(JAX_PLATFORMS="cpu")
    done = run_zero_code([PROGRAMS / "plain.py", "gradient"], tmp_path, environ=environ, console="true")
    [summary] = summaries_below(tmp_path)

    assert [(thing["what"], thing["name"]) for thing in summary["instrumentation_gaps"]] == [
        ("stage", "make_step")
    ]
    assert summary["state"] == "finished"
    assert summary["activities"]["compile"] > 0
    assert sum(summary["activities"].values()) == pytest.approx(summary["wall_seconds"])
    assert "INCOMPLETE" in done.stderr


def test_a_wrapped_step_needs_no_instrument_below_otel_train_run(tmp_path: Path) -> None:
    """Two lines are enough there: the first call starts the session, and is counted."""
    environ = environment(JAX_PLATFORMS="cpu")
    done = run_zero_code([PROGRAMS / "steps_alone.py"], tmp_path, environ=environ)
    [summary] = summaries_below(tmp_path)

    assert (done.returncode, done.stderr) == (0, "")
    assert summary["steps"] == {"train": 12}
    assert summary["batches"] == {"train": 12}
    assert summary["updates"] == 12
    assert summary["instrumentation_gaps"] == []


# --- the example: Equinox and optax -----------------------------------------------------------------

BARE = """
import types
jax = types.SimpleNamespace(make_step=lambda function: function, stage=lambda function, name: function)
instrument = lambda loaders: types.SimpleNamespace(loaders=loaders)
log = lambda **values: None
"""
"""Goes where otel_train would be imported from: the example as it would be without us."""


def example(folder: Path, *packages: Path, **environ: str) -> str:
    """What the example prints."""
    if find_spec("equinox") is None or find_spec("optax") is None:
        pytest.skip("Equinox and optax are not installed: make frameworks")
    folder.mkdir(exist_ok=True)
    path = os.pathsep.join(map(str, packages))
    ours = {"PYTHONPATH": path, "JAX_PLATFORMS": "cpu", "OTEL_TRAIN_PROMETHEUS": "false"}
    command = ["-W", "error", str(ROOT / "examples/jax/train.py"), "--epochs", "2"]
    return printed_by(*command, environ={**os.environ, **ours, **environ}, folder=folder)


@pytest.mark.slow
def test_an_equinox_loop_is_counted_and_its_weights_are_the_same_without_us(tmp_path: Path) -> None:
    """Donated buffers, a filtered jit, two loaders: what the program prints is the same to the last bit."""
    stand_in = tmp_path / "bare_package"
    stand_in.mkdir()
    (stand_in / "otel_train.py").write_text(BARE)
    bare = example(tmp_path / "bare", stand_in)
    instrumented = example(tmp_path / "instrumented", ROOT)
    switched_off = example(tmp_path / "off", ROOT, OTEL_TRAIN_DISABLED="true")
    (summary,) = (tmp_path / "instrumented").glob("runs/*/rank0/summary.json")
    values = json.loads(summary.read_text())
    rows = {(row["stage"], row["loader"]): row["count"] for row in values["stages"]}

    assert "128 steps, weights " in bare  # its own counter
    assert instrumented == bare
    assert switched_off == bare
    assert not list((tmp_path / "bare").iterdir())
    assert values["steps"] == {"train": 128, "eval": 16}
    assert values["updates"] == 128
    assert (rows["make_step", "train"], rows["evaluate", "val"]) == (128, 16)
    assert values["samples"] == {"train": 8192, "val": 1024}
    assert values["activities"]["compile"] > 0
    assert values["instrumentation_gaps"] == []
    assert values["telemetry"]["faults"] == {}
