"""Libraries that start processes of their own, below ``otel-train run``: every rank is found, in one run."""

from __future__ import annotations

import importlib.util
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from tests.support.loop_table import counted, rows
from tests.support.zero_code import ROOT, environment, run_zero_code, summaries_below

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
LIGHTNING = """
    import lightning as L
    import torch
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset
    from tests.integration.frameworks.lightning_autoencoder import LitAutoEncoder

    if __name__ == "__main__":
        encoder = nn.Sequential(nn.Linear(28 * 28, 64), nn.ReLU(), nn.Linear(64, 3))
        decoder = nn.Sequential(nn.Linear(3, 64), nn.ReLU(), nn.Linear(64, 28 * 28))
        rows = TensorDataset(torch.rand(40, 1, 28, 28), torch.zeros(40))
        trainer = L.Trainer(
            max_epochs=1, accelerator="cpu", devices=2, strategy="ddp", logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False,
        )
        trainer.fit(LitAutoEncoder(encoder, decoder), DataLoader(rows, batch_size=4))
        assert trainer.global_step == 5
"""


def ranks(words: list[Any], folder: Path, world_size: int) -> list[dict[str, Any]]:
    """What every rank of a job counted."""
    environ = environment(
        HF_HUB_OFFLINE="1",
        CUDA_VISIBLE_DEVICES="",
        TEST_INSTRUMENTED_BY="nothing",
        TEST_RESULT=str(folder / "r.json"),
    )
    done = run_zero_code(words, folder / "runs", environ=environ)
    assert done.returncode == 0, done.stderr[-3000:]
    summaries = summaries_below(folder / "runs")
    assert [(s["rank"], s["world_size"], s["state"]) for s in summaries] == [
        (rank, world_size, "finished") for rank in range(world_size)
    ]
    assert len({summary["run_id"] for summary in summaries}) == 1
    assert [summary["telemetry"]["faults"] for summary in summaries] == [{}] * world_size
    return [counted(summary) for summary in summaries]


@pytest.mark.skipif(importlib.util.find_spec("accelerate") is None, reason="accelerate is not installed")
def test_a_script_that_accelerate_launches_is_counted(tmp_path: Path) -> None:
    """The usual way to start a training with the Hugging Face libraries: a console script that starts Python."""
    accelerate = Path(sys.executable).with_name("accelerate")
    options = [
        "--cpu",
        "--num_processes=1",
        "--num_machines=1",
        "--mixed_precision=no",
        "--dynamo_backend=no",
    ]
    script = ROOT / "tests" / "integration" / "frameworks" / "accelerate_loop.py"

    assert ranks([accelerate, "launch", *options, script], tmp_path, 1) == [
        rows()["frameworks"]["accelerate_loop"]["program"]
    ]


@pytest.mark.skipif(importlib.util.find_spec("lightning") is None, reason="lightning is not installed")
def test_both_ranks_of_a_script_that_lightning_starts_again_are_counted(tmp_path: Path) -> None:
    """Its strategy `ddp` starts the script a second time, as a child of the first rank."""
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(LIGHTNING), encoding="utf-8")

    found = ranks([script], tmp_path, 2)

    # Forty rows, in batches of four, over two ranks. The parts are called inside the wrapper of data parallelism.
    assert [{**rank, "forwards": None} for rank in found] == [
        {"steps": 5, "evals": 0, "batches": 5, "forwards": None, "backwards": 5, "updates": 5}
    ] * 2
    assert all(rank["forwards"] for rank in found)
