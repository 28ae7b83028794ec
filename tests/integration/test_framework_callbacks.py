"""Callbacks of transformers, accelerate, Ignite and fastai count what the launcher counts, in the library itself."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.loop_table import counted
from tests.support.zero_code import environment, launched, run_zero_code, summaries_below

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

PROGRAMS = Path(__file__).parent / "callbacks"
EPOCHS = {"transformers": 2, "accelerate": 0, "ignite": 2, "fastai": 2}
"""Blocks of throughput on the console: a loop of accelerate has no epochs but those that it marks."""

LOADERS = {
    "accelerate": {"train_loader": 20},
    "fastai": {"train": 20, "valid": 4},
    "ignite": {"train_loader": 20, "val_loader": 4},
    "transformers": {"train_dataloader": 20, "eval_dataloader": 4},
}
"""Batches by what loaders are called."""


def run(library: str, folder: Path, how: str) -> tuple[dict[str, Any], dict[str, Any], str]:
    """The program in a process of its own: what it says, what was counted, what it printed on standard error."""
    folder.mkdir()
    environ = environment(
        TEST_OBSERVED_BY=how, TEST_FOLDER=str(folder), CUDA_VISIBLE_DEVICES="", HF_HUB_OFFLINE="1"
    )
    program = PROGRAMS / f"{library}_program.py"
    if how == "callback":
        done = launched([sys.executable, program], environ, folder)
    else:
        done = run_zero_code([program], folder / "run" / "runs", environ=environ)
    assert done.returncode == 0, done.stderr[-3000:]
    [summary] = summaries_below(folder / "run" / "runs")
    return json.loads((folder / "said.json").read_text(encoding="utf-8")), summary, done.stderr


@pytest.mark.parametrize("library", EPOCHS)
def test_a_callback_counts_what_the_launcher_counts(library: str, tmp_path: Path) -> None:
    """A translation: the same values, in the library's own words for epochs, and weights as without us."""
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed: pip install 'otel-train[frameworks]'")
    said, summary, printed = run(library, tmp_path / "with", "callback")
    said_bare, bare, _ = run(library, tmp_path / "without", "nothing")

    values = counted(summary)
    assert values == counted(bare)
    assert (values["steps"], values["evals"]) == (said["steps"], said["evals"])
    assert said == said_bare
    assert [each["checkpoints"]["count"] for each in (summary, bare)] == [said["checkpoints"]] * 2
    assert (summary["state"], summary["telemetry"]["faults"]) == ("finished", {})
    assert summary["batches"] == bare["batches"] == LOADERS[library]
    blocks = re.findall(r"^\[Throughput\] Epoch (\d+):$", printed, re.MULTILINE)
    assert blocks == [str(number + 1) for number in range(EPOCHS[library])]
