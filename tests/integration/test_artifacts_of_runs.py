"""Artifacts of real trainings: at the end, after SIGKILL, and of a program that is profiled."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema  # type: ignore[import-untyped]  # it publishes no types
import pytest
import torch

import otel_train
from otel_train.cli.main import main
from tests.integration.loops.truth import QUIET, Net, loader, sgd
from tests.support.zero_code import environment, launched

ROOT = Path(__file__).parents[2]
SCHEMA = json.loads((ROOT / "otel_train/rundata/artifacts.schema.json").read_text(encoding="utf-8"))

PROGRAM = """
import os, signal, sys, time
import torch
from torch.utils.data import DataLoader, TensorDataset

torch.set_num_threads(1)
train_loader = DataLoader(TensorDataset(torch.randn(80, 4), torch.arange(80) % 2), batch_size=4)
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(int(sys.argv[1])):
    for x, y in train_loader:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        time.sleep(float(sys.argv[2]))
    if epoch == 2 and "die" in sys.argv:
        os.kill(os.getpid(), signal.SIGKILL)
"""


def otel_train_command(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environ = environment(OTEL_TRAIN_PROMETHEUS="false", OTEL_TRAIN_CONSOLE="false")
    return launched([sys.executable, "-m", "otel_train", *words], environ, folder)


def stage_times(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "stage_times.json").read_text(encoding="utf-8"))
    return found


def test_a_training_that_ends_leaves_its_artifacts(tmp_path: Path) -> None:
    """Two epochs and two evaluations; what is written one by one adds up to what was counted."""
    model, train, val = Net(), loader(6), loader(2)
    with otel_train.instrument(
        model, {"train": train, "val": val}, run_dir=str(tmp_path), run_id="r1", artifacts=True, **QUIET
    ) as session:
        optimizer = sgd(model)
        for _ in range(2):
            for x, y in session.loaders["train"]:
                optimizer.zero_grad()
                torch.nn.functional.cross_entropy(model(x), y).backward()
                optimizer.step()
            with torch.no_grad():
                for x, _ in session.loaders["val"]:
                    model(x)
    folder = tmp_path / "r1" / "artifacts"
    times = stage_times(folder)

    assert main(["validate", str(folder)]) == 0
    assert main(["validate", str(tmp_path / "r1")]) == 0
    for path in folder.rglob("*.json"):
        if path.name != "trace.json":
            jsonschema.Draft202012Validator(SCHEMA).validate(json.loads(path.read_text(encoding="utf-8")))
    assert [(row["epoch"], row["steps"]) for row in times["per_epoch"]] == [(1, 6), (2, 6)]
    summary = json.loads((folder / "profiler_summary.json").read_text(encoding="utf-8"))
    [trained] = [row for row in summary["step_durations"] if row["phase"] == "train"]
    assert sum(row["seconds"] for row in times["per_step"]) == pytest.approx(
        trained["total_seconds"], rel=1e-6
    )


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_after_sigkill_the_launcher_writes_them_up_to_the_last_step(tmp_path: Path) -> None:
    """Nothing in the program can: the launcher counts to the end, and its metrics agree."""
    (tmp_path / "train.py").write_text(PROGRAM)

    done = otel_train_command(tmp_path, "run", "--set", "artifacts=true", "train.py", "9", "0.002", "die")

    [folder] = tmp_path.glob("runs/*/artifacts")
    assert done.returncode == -9, done.stderr
    assert main(["validate", str(folder)]) == 0
    assert len(stage_times(folder)["per_step"]) == 60
    assert json.loads((folder / "profiler_summary.json").read_text())["state"] == "killed"


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_a_program_is_profiled_without_a_line_in_it(tmp_path: Path) -> None:
    """What run_profile.py did: run, capture, and leave a folder to look at."""
    (tmp_path / "train.py").write_text(PROGRAM)

    done = otel_train_command(
        tmp_path, "profile", "--steps", "5", "--output-dir", "out", "--", "train.py", "12", "0.02"
    )

    folder = tmp_path / "out"
    assert done.returncode == 0, done.stderr
    assert json.loads((folder / "trace.json").read_text())["otel_train"]["source"] == "capture"
    assert "aten::" in (folder / "op_stats.csv").read_text()
    assert json.loads((folder / "profiler_summary.json").read_text())["capture"]["breakdown"]["steps"] == 5
    assert main(["validate", str(folder), "--analysis", "--report"]) == 0


def test_a_program_that_ends_before_it_is_captured_gets_the_reason(tmp_path: Path) -> None:
    """The advice was to take a capture with otel-train profile, which had just run."""
    (tmp_path / "train.py").write_text(PROGRAM)
    words = ("profile", "--steps", "50", "--output-dir", "out", "--", "train.py", "1", "0")

    done = otel_train_command(tmp_path, *words)

    assert done.returncode == 1
    assert "Nothing was captured: the program ended too early. Before a capture of 50 steps " in done.stderr


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize("profiler", ["on", "off"])
def test_the_demo_trains_the_epochs_that_are_asked_for(tmp_path: Path, profiler: str) -> None:
    """With its artifacts, or bare."""
    words = ("demo", "--profiler", profiler, "--epochs", "2", "--steps-per-epoch", "15")

    done = otel_train_command(tmp_path, *words)

    found = [stage_times(folder) for folder in tmp_path.glob("runs/*/artifacts")]
    assert done.returncode == 0, done.stderr
    assert [len(times["per_step"]) for times in found] == ([30] if profiler == "on" else [])


def test_profile_clean_removes_what_the_targets_wrote_and_nothing_else(tmp_path: Path) -> None:
    """A clean that takes a run of the user's with it is never typed again."""
    shutil.copy(ROOT / "Makefile", tmp_path)
    mine = [tmp_path / "runs" / "r1" / "run.json", tmp_path / ".profile" / "other.txt"]
    written = [
        tmp_path / ".profile" / name for name in ("runs/r1/run.json", "artifacts/trace.json", ".gitignore")
    ]
    for path in (*mine, *written):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("x")

    done = launched(["make", "profile-clean"], folder=tmp_path)

    assert done.returncode == 0, done.stderr
    assert [path.exists() for path in mine] == [True, True]
    assert [path.exists() for path in written] == [False] * 3
