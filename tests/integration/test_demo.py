"""``otel-train demo``: the first program that a new user runs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]
MOST_ADDED_LINES = 2

# A test run in the background of a shell ignores Ctrl-C, and its children inherit that.
RUN = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
from otel_train.cli.main import main
sys.exit(main(sys.argv[1:]))
"""


def start(folder: Path, *words: str) -> subprocess.Popen[str]:
    """The demo in a process of its own, leaving its run below ``folder``."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("OTEL_")}
    return subprocess.Popen(
        [sys.executable, "-c", RUN, "demo", f"--run-dir={folder}", *words],
        env={
            **environ,
            "OTEL_TRAIN_PROMETHEUS_ADDRESS": "127.0.0.1:0",
            "OTEL_TRAIN_TUNING": "summary_interval_s=1",
            "PYTHONIOENCODING": "utf-8",
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def steps_below(folder: Path) -> int:
    """Training steps that the only run below ``folder`` has reported so far."""
    if not list(folder.glob("*/rank0/summary.json")):
        return 0
    return int(summary_below(folder)["steps"].get("train", 0))


def summary_below(folder: Path) -> dict[str, Any]:
    """What the only run below ``folder`` left behind."""
    [path] = folder.glob("*/rank0/summary.json")
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def test_the_finding_names_the_loader_that_training_waits_for(tmp_path: Path) -> None:
    """The whole promise in a third of a minute: an unchanged loop, and the right answer at the end."""
    process = start(tmp_path, "--minutes=0.35")
    shown, complaints = process.communicate(timeout=150)

    assert process.returncode == 0, complaints
    found = summary_below(tmp_path)
    leading = found["findings"][0]
    assert (leading["name"], leading["loader"]) == ("input_bound", "code")
    assert leading["share"] > 0.2
    assert found["state"] == "finished"
    assert found["updates"] == found["steps"]["train"] > 20
    assert abs(found["batches"]["code"] - found["batches"]["prose"]) <= 1
    assert sum(found["activities"].values()) == pytest.approx(found["wall_seconds"], rel=0.02)
    assert "finding: input_bound" in complaints
    assert "otel-train summary" in shown
    assert "/metrics was at" in shown
    assert "Traceback" not in complaints


@pytest.fixture
def busy() -> Iterator[None]:
    """Two programs that never stop computing."""
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2)]
    yield
    for loop in loops:
        loop.kill()
        loop.wait()


def wait_per_batch(summary: dict[str, Any]) -> float:
    """Seconds that training waited for a batch of ``code``."""
    rows = [row for row in summary["stages"] if row["stage"] == "data" and row["loader"] == "code"]
    return float(sum(row["self_seconds"] for row in rows) / sum(row["count"] for row in rows))


@pytest.mark.timeout(400)
def test_the_finding_and_its_remedy_hold_on_a_busy_machine(tmp_path: Path, busy: None) -> None:
    """The result of the first run must not depend on what else the machine does."""
    first = start(tmp_path / "first", "--steps=60", "--minutes=3")
    shown, complaints = first.communicate(timeout=150)
    before = summary_below(tmp_path / "first")
    assert "finding: input_bound" in complaints
    assert before["findings"][0]["loader"] == "code"

    [advice] = [line for line in shown.splitlines() if line.startswith("Follow the advice")]
    then = start(tmp_path / "then", "--steps=60", "--minutes=3", *advice.partition(" demo ")[2].split())
    then.communicate(timeout=150)
    assert wait_per_batch(summary_below(tmp_path / "then")) < wait_per_batch(before) / 2


def test_ctrl_c_ends_the_demo_with_the_run_summary(tmp_path: Path) -> None:
    """Ctrl-C prints the run summary at once, and is no failure."""
    process = start(tmp_path, "--minutes=5")
    began_s = time.monotonic()
    while not steps_below(tmp_path) and time.monotonic() < began_s + 90:
        time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    shown, complaints = process.communicate(timeout=30)

    assert process.returncode == 0, complaints
    assert "Stopped by Ctrl-C." in shown
    assert "otel_train ━━" in complaints
    assert "Traceback" not in complaints
    assert summary_below(tmp_path)["steps"]["train"] > 0


def test_a_device_that_is_not_there_is_refused_with_a_remedy(tmp_path: Path) -> None:
    """Thirty lines of traceback from inside torch are no answer to a wrong option."""
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device here")
    process = start(tmp_path, "--device=cuda")
    _, complaints = process.communicate(timeout=60)

    assert process.returncode == 2
    assert complaints.splitlines()[-1].startswith(
        "otel-train: --device=cuda: torch sees no CUDA device here."
    )
    assert not list(tmp_path.iterdir())


def test_one_line_of_the_script_is_ours() -> None:
    """The demo shows what a user has to write: an import, and one call."""
    from importlib.util import find_spec

    spec = find_spec("otel_train.demo")
    assert spec is not None
    assert spec.origin is not None
    with open(spec.origin, encoding="utf-8") as file:  # noqa: PTH123 - a path from the import system
        ours = [line for line in file if "otel_train" in line]

    assert len(ours) == MOST_ADDED_LINES
    assert ours[0] == "import otel_train\n"
    assert "otel_train.instrument(model, loaders)" in ours[1]
