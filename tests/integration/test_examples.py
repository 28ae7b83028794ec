"""The examples do what their pages say, as programs of their own."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import shutil
import socket
import sqlite3
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from tests.support import wandb_file

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
TRAINING = """
import torch
import otel_train

model, loss = torch.nn.Linear(4, 1), torch.nn.MSELoss()
rows = torch.utils.data.TensorDataset(torch.randn(64, 4), torch.randn(64, 1))
loader = torch.utils.data.DataLoader(rows, batch_size=8)
optimizer = torch.optim.SGD(model.parameters())
otel_train.instrument(model, {"train": loader}, run_id="x")
for x, y in loader:
    loss(model(x), y).backward()
    optimizer.step()
"""

pytestmark = pytest.mark.timeout(900)


def run(folder: Path, *command: str, path: tuple[Path, ...] = (), **variables: str) -> str:
    """What a program says on standard error; it must end well."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("OTEL_", "OMP_"))}
    environ = {
        **clean, "PYTHONPATH": os.pathsep.join(map(str, (*path, ROOT))), "OMP_NUM_THREADS": "1",
        "OTEL_TRAIN_PROMETHEUS_ADDRESS": "127.0.0.1:0", **variables,
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        env=environ,
        capture_output=True,
        text=True,
        check=False,
        timeout=800,
    )
    assert done.returncode == 0, done.stderr
    return done.stderr


def installed(package: Path, folder: Path) -> Path:
    """A package built by its own build system, and its wheel unpacked as an installer does."""
    shutil.copytree(package, folder / "source")
    build = "import sys; from setuptools import build_meta; build_meta.build_wheel(sys.argv[1])"
    run(folder / "source", "-c", build, str(folder))
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as opened:
        opened.extractall(folder / "site")
    return folder / "site"


def test_an_exporter_of_another_package_is_found_and_fed(tmp_path: Path) -> None:
    """A team's own store gets what ours gets, with no line in the training script."""
    site = installed(EXAMPLES / "exporter", tmp_path)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as server:
        server.bind(("127.0.0.1", 0))
        server.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)
        server.settimeout(10)
        address = f"127.0.0.1:{server.getsockname()[1]}"

        run(tmp_path, "-c", TRAINING, path=(site,), STATSD_ADDRESS=address)
        server.setblocking(False)
        lines = _received(server)

    assert lines["rank0.train.steps.train.train"] == "8|g"
    assert lines["rank0.train.samples.train.train"] == "64|g"
    assert lines["rank0.train.stage.duration.forward.train.train.count"] == "8|g"
    assert float(lines["rank0.train.stage.duration.forward.train.train.mean"].removesuffix("|g")) > 0


def test_loaders_drawn_by_weight_have_times_of_their_own(tmp_path: Path) -> None:
    """One runs out before the other, an evaluation comes in between, and every batch is counted once."""
    said = run(tmp_path, str(EXAMPLES / "several_loaders.py"))

    values = _summary(tmp_path)
    assert values["batches"] == {"code": 60, "prose": 20, "val": 20}
    assert values["steps"] == {"train": 80, "eval": 20}
    assert {row["loader"]: row["endings"]["epoch_end"] for row in values["loaders"]} == {
        "code": 1, "prose": 1, "val": 2,
    }  # fmt: skip
    assert "--- Profiling Metrics (Step 50) ---" in said
    assert values["instrumentation_gaps"] == []


@pytest.mark.slow
def test_a_run_leaves_artifacts_that_agree(tmp_path: Path) -> None:
    """With a capture among them, so that none is absent."""
    run(tmp_path, str(EXAMPLES / "run_artifacts.py"))

    artifacts = tmp_path / "runs" / "example-artifacts" / "artifacts"
    checked = run(tmp_path, "-m", "otel_train", "validate", "--analysis", "--report", str(artifacts))
    names = {path.name for path in artifacts.iterdir()}
    assert checked == ""
    assert names >= {
        "config.json", "metrics.json", "profiler_summary.json", "stage_times.json", "op_stats.csv", "trace.json",
        "profiler_context", "torch_profiler", "report.html",
    }  # fmt: skip
    totals = json.loads((artifacts / "profiler_context" / "stage_times.json").read_text(encoding="utf-8"))[
        "stages"
    ]
    assert totals["reward"]["count"] == 3000


@pytest.mark.slow
def test_operations_arrive_in_wandb_beside_the_rows_of_the_program(tmp_path: Path) -> None:
    """Sixty rows of its own before, and sixty after."""
    needs("wandb")
    run(tmp_path, str(EXAMPLES / "operations.py"), WANDB_MODE="offline", WANDB_SILENT="true")

    rows = wandb_file.history(tmp_path)
    assert len([row for row in rows if "loss" in row]) == 60
    assert {"profiling/augment_avg_time", "profiling/clip_count"} <= {key for row in rows for key in row}


@pytest.mark.slow
def test_throughput_of_every_epoch_is_printed_and_in_mlflow(tmp_path: Path) -> None:
    """Three epochs are three blocks and three values of each metric."""
    needs("mlflow")
    said = run(tmp_path, str(EXAMPLES / "throughput.py"))

    with contextlib.closing(sqlite3.connect(tmp_path / "mlflow.db")) as database:
        steps = database.execute("SELECT step FROM metrics WHERE key = 'samples_per_second' ORDER BY step")
        assert [step for (step,) in steps] == [20, 40, 60]
        cached = database.execute("SELECT value FROM metrics WHERE key = 'memory_cache_mb'")
        assert {value for (value,) in cached} == {320 * 32 * 4 / 2**20}
    assert re.findall(r"\[Throughput\] Epoch (\d):", said) == ["1", "2", "3"]


@pytest.mark.slow
def test_lightning_with_hydra_leaves_traces_of_the_chosen_epochs(tmp_path: Path) -> None:
    """Epochs 1 and 2 of 3 were asked for: two files, none for 3; and a block of throughput for each of the three."""
    needs("lightning")
    needs("hydra")
    said = run(tmp_path, str(EXAMPLES / "lightning_hydra" / "train.py"))

    traces = sorted(path.name for path in (tmp_path / "traces").glob("*.json"))
    assert traces == ["epoch_1.json", "epoch_2.json"]
    assert re.findall(r"\[Throughput\] Epoch (\d):", said) == ["1", "2", "3"]
    assert _summary(tmp_path)["steps"] == {"train": 180}


def needs(package: str) -> None:
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed: pip install 'otel-train[{package}]'")


def _received(server: socket.socket) -> dict[str, str]:
    lines: dict[str, str] = {}
    while True:
        try:
            name, _, value = server.recv(1 << 12).decode().partition(":")
        except BlockingIOError:
            return lines
        lines[name] = value


@pytest.mark.slow
def test_an_installed_exporter_that_hangs_does_not_hold_up_the_end(tmp_path: Path) -> None:
    """Two seconds are what a run may cost at its end, whoever is at fault."""
    site = tmp_path / "site"
    (site / "slow-1.dist-info").mkdir(parents=True)
    (site / "slow-1.dist-info" / "METADATA").write_text("Name: slow\nVersion: 1\n", encoding="utf-8")
    (site / "slow-1.dist-info" / "entry_points.txt").write_text(
        "[otel_train.exporters]\nslow = slow:Slow\n", encoding="utf-8"
    )
    (site / "slow.py").write_text(
        "import time\n"
        "class Slow:\n"
        "    def __init__(self, resource): pass\n"
        "    def export(self, batch): time.sleep(3600)\n"
        "    def close(self, timeout_s): pass\n",
        encoding="utf-8",
    )
    # The end of a program with an agent in a process does not wait for delivery at all.
    timed = "import os\nos.environ['OTEL_TRAIN_AGENT'] = 'thread'\n"
    timed += TRAINING + "import time\nbegun = time.monotonic()\notel_train.current().close()\n"
    # In one write: on a busy machine the thread prints the run summary at the same time.
    timed += "__import__('sys').stderr.write(f'closed in {time.monotonic() - begun} s\\n')\n"

    said = run(tmp_path, "-c", timed, path=(site,))

    assert "exporter slow does not answer; its records are dropped, training continues" in said
    assert float(said.rpartition("closed in ")[2].split()[0]) < 60
    assert _summary(tmp_path)["telemetry"]["faults"].keys() <= {"exporter slow"}


def _summary(folder: Path) -> dict[str, Any]:
    (path,) = folder.glob("runs/*/rank0/summary.json")
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found
