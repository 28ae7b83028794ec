"""Several trainings of one run: one after another, at the same time, and after a crash."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.programs import written
from tests.support.zero_code import LIMIT_S, QUIET, environment, launched, run_zero_code

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2 * LIMIT_S)]

TRAINING = """
    import os, signal, subprocess, sys, time
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    def train(steps):
        model = torch.nn.Linear(4, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        rows = TensorDataset(torch.randn(4 * steps, 4), torch.arange(4 * steps) % 2)
        for x, y in DataLoader(rows, batch_size=4):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
"""

IN_CODE = """
    import otel_train

    def observed(steps):
        with otel_train.instrument(run_id="job"):
            train(steps)
"""


def script_of(folder: Path, text: str) -> Path:
    """A script that can train, in code or not, and does this."""
    return written(folder / "script.py", TRAINING, IN_CODE, text)


def variables(runs: Path) -> dict[str, str]:
    return {f"OTEL_TRAIN_{name.upper()}": value for name, value in {**QUIET, "run_dir": str(runs)}.items()}


def run(script: Path, runs: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return launched([sys.executable, script, *words], environment(**variables(runs)))


def kept(runs: Path) -> dict[str, tuple[int, int, str, int]]:
    """Every summary below a folder of runs, by where it is: training, attempt, state, steps."""
    found = {}
    for path in sorted(runs.rglob("summary.json")):
        said: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        place = str(path.parent.relative_to(runs))
        found[place] = (said["training"], said["attempt"], said["state"], said["steps"]["train"])
    return found


@pytest.mark.parametrize(("program", "summaries"), [
    # Folds and sweeps are loops of a program; only the last one was left of them.
    pytest.param("for steps in (3, 5, 7): observed(steps)", [("finished", 3), ("finished", 5), ("finished", 7)], id="in a loop"),
    # A program that goes on after an exception has not been restarted.
    pytest.param("""
        try:
            with otel_train.instrument(run_id="job"):
                train(3)
                raise ValueError
        except ValueError:
            observed(5)
    """, [("failed", 3), ("finished", 5)], id="after one that failed"),
])  # fmt: skip
def test_trainings_one_after_another_in_one_process_are_all_kept(
    program: str, summaries: list[tuple[str, int]], tmp_path: Path
) -> None:
    """Each has a folder of its own, and the last that of the run."""
    done = run(script_of(tmp_path, program), tmp_path / "runs")

    assert done.returncode == 0, done.stderr
    assert kept(tmp_path / "runs") == {
        f"job/training-{number}/rank0" if number < len(summaries) else "job/rank0": (number, 0, *summary)
        for number, summary in enumerate(summaries, 1)
    }


@pytest.mark.parametrize("way", ["in code", "otel-train run"])
def test_trainings_of_one_job_in_processes_one_after_another_are_all_kept(way: str, tmp_path: Path) -> None:
    """A script that trains twice by starting itself lost 10 of 24 steps."""
    train = "observed" if way == "in code" else "train"
    script = script_of(
        tmp_path,
        f"""
        if len(sys.argv) > 1:
            {train}(int(sys.argv[1]))
        else:
            for steps in ("10", "14"):
                subprocess.run([sys.executable, __file__, steps], check=True)
    """,
    )
    runs = tmp_path / "runs"
    done = run(script, runs) if way == "in code" else run_zero_code([script], runs, run_id="job")

    assert done.returncode == 0, done.stderr
    assert kept(runs) == {
        "job/training-1/rank0": (1, 0, "finished", 10),
        "job/rank0": (2, 0, "finished", 14),
    }


def test_a_restart_after_a_crash_is_an_attempt_of_the_same_training(tmp_path: Path) -> None:
    """It goes on with what was begun; and the training that had finished before is not touched."""
    script = script_of(
        tmp_path,
        """
        if sys.argv[1] == "dies":
            otel_train.instrument(run_id="job")
            train(4)
            os.kill(os.getpid(), signal.SIGKILL)
        observed(int(sys.argv[1]))
    """,
    )
    runs = tmp_path / "runs"
    codes = [run(script, runs, word).returncode for word in ("3", "dies", "dies", "6", "2")]

    assert codes == [0, -9, -9, 0, 0]
    assert kept(runs) == {
        "job/training-1/rank0": (1, 0, "finished", 3),
        "job/training-2/rank0": (2, 2, "finished", 6),
        "job/rank0": (3, 0, "finished", 2),
    }
    flights = sorted(path.name for path in (runs / "job" / "training-2" / "rank0").glob("flight*"))
    assert flights == ["flight-0.bin", "flight-1.bin", "flight.bin"]


def test_trainings_with_the_same_rank_at_the_same_time_are_runs_of_their_own(tmp_path: Path) -> None:
    """Two processes that do not know of each other must not write into one folder."""
    script = script_of(
        tmp_path,
        """
        with otel_train.instrument(run_id="job"):
            train(int(sys.argv[1]))
            print("trains", flush=True)
            sys.stdin.readline()
    """,
    )
    runs = tmp_path / "runs"
    running = [
        subprocess.Popen(
            [sys.executable, script, steps],
            env=environment(**variables(runs)),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for steps in ("3", "5")
    ]
    for process in running:
        assert process.stdout is not None
        assert process.stdout.readline() == "trains\n"
    said = [process.communicate("\n", timeout=LIMIT_S)[1] for process in running]

    assert [process.returncode for process in running] == [0, 0]
    assert "".join(said).count("run_id='job': another process has rank 0 of this run") == 1
    assert sorted(kept(runs)) == ["job-2/rank0", "job/rank0"]
    assert sorted(row[3] for row in kept(runs).values()) == [3, 5]


def test_every_reader_shows_the_newest_and_says_where_the_others_are(tmp_path: Path) -> None:
    """A summary that cannot be found is lost like one that was overwritten."""
    script = script_of(tmp_path, "observed(3); observed(5)")
    runs = tmp_path / "runs"
    assert run(script, runs).returncode == 0
    home, first = runs / "job", runs / "job" / "training-1"

    for words in (["summary"], ["report"], ["validate"], ["export"], ["compare", str(first)]):
        done = launched([sys.executable, "-m", "otel_train", *words, str(home)], environment())
        assert done.returncode == 0, done.stderr
        assert "training 2" in done.stderr
        assert str(first) in done.stderr
    for words in (["summary"], ["report"], ["validate"], ["export"]):
        done = launched([sys.executable, "-m", "otel_train", *words, str(first)], environment())
        assert (done.returncode, done.stderr) == (0, "")
    shown = launched([sys.executable, "-m", "otel_train", "summary", "--json", str(first)], environment())
    assert json.loads(shown.stdout)["steps"] == {"train": 3}
