"""Examples of libraries that own their loop are counted as a profiler of calls counts them."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from otel_train.instrumentation.checkpoints import SAVES
from tests.support.loop_table import check_row, counted
from tests.support.summary_laws import laws_of
from tests.support.zero_code import environment, launched, run_zero_code, summaries_below

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]
ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "tests" / "integration" / "frameworks"
TIMES = re.compile(r"\w+_(runtime|per_second)\W+[\d.]+")
"""What a library prints of its own speed."""

VALUES = ("batches", "forwards", "backwards", "updates")


class Example(NamedTuple):
    """An official example.

    Attributes:
        library: the module to import.
        shape: as the table has it.
        unseen: values that a session has not, or not as the program has them.
        why: why; or why the values of an unchanged program differ from those of an instrumented one.
        differs: whether they are not.
    """

    library: str
    shape: str
    unseen: tuple[str, ...] = ()
    why: str = ""
    differs: bool = False


NAMES: dict[str, Example] = {
    "lightning_autoencoder": Example("lightning", "Lightning"),
    "transformers_trainer": Example("transformers", "transformers Trainer"),
    "accelerate_loop": Example("accelerate", "accelerate"),
    "ignite_quickstart": Example("ignite", "PyTorch-Ignite"),
    "skorch_quickstart": Example("skorch", "skorch"),
    "fastai_learner": Example("fastai", "fastai", unseen=("updates",)),
    "tabnet_classifier": Example(
        "pytorch_tabnet",
        "pytorch-tabnet",
        differs=True,
        why="the network that `fit` makes is found, and its parts where it explains itself; in code there is none to give",
    ),
    "torchdata_stateful": Example("torchdata", "torchdata StatefulDataLoader"),
    "torchdata_nodes": Example(
        "torchdata",
        "torchdata nodes",
        differs=True,
        why="an iterable that is no DataLoader shows only to `watch`",
    ),
    "stable_baselines_ppo": Example(
        "stable_baselines3",
        "Stable-Baselines3",
        unseen=("evals",),
        why="the first rollout ends before anything was trained, and reads as a part of the first step",
    ),
}


def run(name: str, how: str, folder: Path) -> tuple[dict[str, Any], str]:
    """Run an example in a process of its own; what it says at the end, and what it printed."""
    result, runs = folder / how / "result.json", folder / how / "runs"
    result.parent.mkdir()
    environ = environment(
        HF_HUB_OFFLINE="1", CUDA_VISIBLE_DEVICES="", TEST_INSTRUMENTED_BY=how, TEST_RESULT=str(result)
    )
    program = EXAMPLES / f"{name}.py"
    if how == "nothing":
        done = run_zero_code([program], runs, environ=environ)
    else:
        done = launched([sys.executable, program], environ, folder)
    assert done.returncode == 0, done.stderr[-3000:]
    said = json.loads(result.read_text(encoding="utf-8"))
    if how == "nothing":
        [said["summary"]] = summaries_below(runs)
    return said, done.stdout


@pytest.mark.parametrize("name", NAMES)
def test_a_library_is_counted_as_a_profiler_counts_it(name: str, tmp_path: Path) -> None:
    """Most people do not write their loop: what Lightning or a Trainer calls must be seen all the same."""
    example = NAMES[name]
    if importlib.util.find_spec(example.library) is None:
        pytest.skip(f"{example.library} is not installed: pip install 'otel-train[frameworks]'")
    profiled, printed = run(name, "profile", tmp_path)
    instrumented, printed_instrumented = run(name, "session", tmp_path)
    found, printed_found = run(name, "nothing", tmp_path)

    program = {key: profiled[key] for key in ("steps", "evals")}
    program |= {value: profiled["counts"].get(value, 0) for value in VALUES}
    if "updates" in example.unseen:  # an optimizer that is none of torch's: one per step, as the library says
        program["updates"] = program["steps"]
    seen = counted(instrumented["summary"])
    same = [value for value in program if value not in example.unseen]
    assert {f: seen[f] or 0 for f in same} == {f: program[f] for f in same}
    assert all(seen[value] != program[value] for value in example.unseen)
    for one, text in ((instrumented, printed_instrumented), (found, printed_found)):
        assert one["summary"]["telemetry"]["faults"] == {}
        assert laws_of(one["summary"]) == []
        assert one["weights"] == profiled["weights"]
        assert TIMES.sub("", text) == TIMES.sub("", printed)
    without = counted(found["summary"])
    assert (without == seen) != example.differs
    head = (EXAMPLES / f"{name}.py").read_text(encoding="utf-8").split('"""')[1]
    row = {"shape": example.shape, "description": " ".join(head.split()), "program": program}
    check_row("frameworks", name, {**row, "in_code": seen, "zero_code": without, "why": example.why})


@pytest.mark.filterwarnings("ignore")  # of what frameworks import
@pytest.mark.parametrize(("module", "path"), SAVES, ids=[f"{module}:{path}" for module, path in SAVES])
def test_a_function_that_is_timed_as_a_checkpoint_is_there_in_the_installed_version(
    module: str, path: str
) -> None:
    """A function that a framework has renamed is left out without a word."""
    if importlib.util.find_spec(module.partition(".")[0]) is None:
        pytest.skip(f"{module} is not installed")

    assert callable(attrgetter(path)(importlib.import_module(module)))
