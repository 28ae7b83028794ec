"""Real trackers beside a program that uses them itself: its own rows stay as they are, ours are there as well."""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
import sys
import threading
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

import otel_train
from otel_train.trackers.metrics import FlatRow
from otel_train.trackers.mlflow import MlflowTracker
from tests.support import wandb_file
from tests.support.zero_code import launched

ROOT = Path(__file__).parents[2]
PROGRAM = Path(__file__).parent / "trackers" / "program.py"
ENVIRON = {
    **os.environ, "PYTHONPATH": str(ROOT), "WANDB_ERROR_REPORTING": "false", "WANDB_SILENT": "true",
    "MLFLOW_ALLOW_FILE_STORE": "true", "PYTHONWARNINGS": "ignore",
}  # fmt: skip
Metrics = dict[str, list[tuple[int, float]]]
"""(step, value) by key."""
STEPS = "profile/train/dl_loader/time_forward_ms"
TOTALS = "profiling/training_step_count"
RATES = "samples_per_second"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def run(tracker: str, folder: Path, how: str, **settings: Any) -> dict[str, Any]:
    """What the program says when it is over."""
    package = tracker.partition("-")[0]
    if find_spec(package) is None:
        pytest.skip(f"{package} is not installed: pip install 'otel-train[{package}]'")
    folder.mkdir(exist_ok=True)
    done = launched([sys.executable, PROGRAM, tracker, folder, how, json.dumps(settings)], ENVIRON, folder)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    said: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return said


def is_ours(key: str) -> bool:
    """Whether otel_train writes the key."""
    return key.startswith(("otel_train", "profil", "batch", "samples", "throughput", "memory"))


def test_rows_in_wandb_are_as_many_and_numbered_as_without_us(tmp_path: Path) -> None:
    """A second ``log`` would add rows, and ``step=`` would shift theirs: charts would change under their feet."""
    bare = run("wandb", tmp_path / "bare", "bare")
    instrumented = run("wandb", tmp_path / "instrumented", "instrumented")
    theirs, both = wandb_file.history(tmp_path / "bare"), wandb_file.history(tmp_path / "instrumented")

    assert instrumented == bare
    assert len(theirs) == 60
    assert [(row["_step"], row["loss"]) for row in both] == [(row["_step"], row["loss"]) for row in theirs]
    added = {key for row in both for key in row} - {key for row in theirs for key in row}
    assert {STEPS, TOTALS, RATES} <= added
    assert [key for key in added if not is_ours(key)] == []
    assert [row["otel_train/step"] for row in both if RATES in row] == [20, 40, 60]


def test_a_run_of_our_own_in_wandb_is_asked_for_and_leaves_the_programs_alone(tmp_path: Path) -> None:
    """``wandb={"mode": "offline"}``: only otel_train's rows, each committed."""
    if find_spec("tensorboard") is None:
        pytest.skip("tensorboard is not installed: pip install 'otel-train[tensorboard]'")
    run("wandb", tmp_path / "theirs", "bare")  # skips where there is no W&B
    settings = {"mode": "offline", "dir": str(tmp_path / "ours"), "settings": {"silent": True}}
    (tmp_path / "ours").mkdir()

    run("tensorboard", tmp_path / "run", "instrumented", wandb=settings, exit_timeout_s=30)

    rows = wandb_file.history(tmp_path / "ours")
    assert [row["otel_train/step"] for row in rows if TOTALS in row] == [10, 20, 30, 40, 50, 60]
    assert [row["_step"] for row in rows] == list(range(len(rows)))


@pytest.mark.parametrize("store", ["file", "sqlite"])
def test_metrics_in_mlflow_go_to_the_run_of_the_training_thread(tmp_path: Path, store: str) -> None:
    """The active run belongs to a thread: logging from ours would open a second one. Its last rows come after its end."""
    if store == "sqlite" and find_spec("sqlalchemy") is None:
        pytest.skip("sqlalchemy is not installed: make frameworks")
    bare = run(f"mlflow-{store}", tmp_path / "bare", "bare")
    instrumented = run(f"mlflow-{store}", tmp_path / "instrumented", "instrumented")

    assert instrumented == bare
    theirs, both = (READ[store](tmp_path / how) for how in ("bare", "instrumented"))
    assert list(theirs) == ["loss"]
    assert both["loss"] == theirs["loss"]
    assert [key for key in both if key != "loss" and not is_ours(key)] == []
    assert [step for step, _ in both[TOTALS]] == [10, 20, 30, 40, 50, 60]
    assert [value for _, value in both[TOTALS]] == [10, 20, 30, 40, 50, 60]
    assert [step for step, _ in both[RATES]] == [20, 40, 60]


def in_files(folder: Path) -> Metrics:
    """(step, value) by key, of the one run in the file store below ``folder``."""
    (home,) = (path for path in folder.glob("mlruns/*/*/metrics") if path.is_dir())
    found: Metrics = {}
    for path in sorted(home.rglob("*")):
        if path.is_file():
            lines = (line.split() for line in path.read_text().splitlines())
            found[str(path.relative_to(home))] = [(int(step), float(value)) for _, value, step in lines]
    return found


def in_sqlite(folder: Path) -> Metrics:
    """The same, of the one run in the database in ``folder``."""
    with contextlib.closing(sqlite3.connect(folder / "mlflow.db")) as database:
        assert len(database.execute("select run_uuid from runs").fetchall()) == 1
        rows = database.execute(
            "select key, step, value from metrics order by key, step, timestamp"
        ).fetchall()
    found: Metrics = {}
    for key, step, value in rows:
        found.setdefault(key, []).append((step, value))
    return found


READ = {"file": in_files, "sqlite": in_sqlite}


@pytest.fixture
def mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """MLflow with a store of files of its own."""
    package: Any = pytest.importorskip("mlflow", reason="pip install 'otel-train[mlflow]'")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    package.set_tracking_uri(f"file://{tmp_path}/mlruns")
    yield package
    package.set_tracking_uri(None)


def test_a_row_of_a_run_of_mlflow_that_has_ended_is_still_its_own(tmp_path: Path, mlflow: Any) -> None:
    """Rows are written later than the steps they tell of; what was trained after the run is not put into it."""
    tracker = MlflowTracker(threading.get_ident())
    assert tracker.place() is None
    with mlflow.start_run():
        during = time.time_ns()
    row = FlatRow(during, 60, 3, of_epoch=False, values={"samples_per_second": 80.0})
    late = FlatRow(time.time_ns() + 10**9, 70, 3, of_epoch=False, values={"samples_per_second": 90.0})
    place = tracker.place()
    assert place is not None
    tracker.write(row, place)
    tracker.write(late, place)

    assert in_files(tmp_path) == {"samples_per_second": [(60, 80.0)]}


def test_a_row_in_mlflow_belongs_to_the_nested_run_of_its_last_step(mlflow: Any) -> None:
    """Rows are handed over up to half a second later, when a nested run has begun or ended."""
    tracker, row = MlflowTracker(threading.get_ident()), FlatRow(0, 0, 0, of_epoch=False, values={"v": 1.0})

    def now(step: int) -> FlatRow:
        time.sleep(0.01)
        made = row._replace(unix_ns=time.time_ns(), step=step)
        time.sleep(0.01)
        return made

    before = now(1)
    with mlflow.start_run() as outer:
        first = now(2)
        with mlflow.start_run(nested=True) as inner:
            second, at_second = now(3), tracker.place()
        last, at_last = now(4), tracker.place()
    for each, place in ((before, at_second), (first, at_second), (second, at_last), (last, at_last)):
        assert place is not None
        tracker.write(each, place)
    client = mlflow.MlflowClient()
    steps = [
        [found.step for found in client.get_metric_history(run.info.run_id, "v")] for run in (outer, inner)
    ]

    assert steps == [[2, 4], [3]]


def test_metrics_in_mlflow_go_to_the_store_of_their_run(
    tmp_path: Path, mlflow: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program may turn to another store in between. A run that ended before the session began gets no row."""
    monkeypatch.chdir(tmp_path)
    tracker, rows = MlflowTracker(threading.get_ident()), []
    row = FlatRow(0, 60, 3, of_epoch=False, values={"samples_per_second": 80.0})
    for store in ("a", "b"):
        mlflow.set_tracking_uri(f"file://{tmp_path}/{store}/mlruns")
        with mlflow.start_run():
            rows.append((row._replace(unix_ns=time.time_ns()), tracker.place()))
    mlflow.set_tracking_uri(None)
    rows.append((rows[-1][0], tracker.place()))
    for each, place in rows:
        assert place is not None
        tracker.write(each, place)

    assert MlflowTracker(threading.get_ident()).place() is None
    assert in_files(tmp_path / "a") == {"samples_per_second": [(60, 80.0)]}
    assert in_files(tmp_path / "b") == {"samples_per_second": [(60, 80.0)] * 2}
    assert not (tmp_path / "mlflow.db").exists()


def test_event_files_lie_in_the_run_directory_beside_the_programs_own(tmp_path: Path) -> None:
    """One ``tensorboard --logdir`` for both, and the program's file is untouched."""
    bare = run("tensorboard", tmp_path / "bare", "bare")
    instrumented = run("tensorboard", tmp_path / "instrumented", "instrumented")

    assert instrumented == bare
    assert scalars(tmp_path / "instrumented/own") == scalars(tmp_path / "bare/own")
    folder = tmp_path / "instrumented/runs/r/tensorboard"
    assert folder.stat().st_mode & 0o777 == 0o700
    ours = scalars(folder)
    assert ours[TOTALS] == [(step, float(step)) for step in (10, 20, 30, 40, 50, 60)]
    assert [step for step, _ in ours[RATES]] == [20, 40, 60]
    assert [key for key in ours if not is_ours(key)] == []


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """(step, value) by tag, none left out."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    return {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


class Hanging:
    """A run whose server has gone without a word."""

    def __init__(self) -> None:
        self.freed = threading.Event()

    def define_metric(self, *_: Any, **__: Any) -> None:
        pass

    def log(self, *_: Any, **__: Any) -> None:
        self.freed.wait(120)


class Raising:
    """A writer that has been closed."""

    def add_scalar(self, *_: Any) -> None:
        raise ValueError("I/O operation on closed file")


def test_training_goes_on_beside_trackers_that_hang_and_raise(tmp_path: Path) -> None:
    """Hours of training have been lost to a tracker's outage; ours are counted, and the end waits two seconds at most."""
    for name in ("wandb", "tensorboard"):
        pytest.importorskip(name, reason=f"pip install 'otel-train[{name}]'")
    model, hanging = torch.nn.Linear(4, 2), Hanging()
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(80, 4)), batch_size=4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session = otel_train.instrument(
        model, loader, run_dir=str(tmp_path), prometheus=False, console=False, tuning={"poll_interval_s": 0.02},
        log_every_steps=1, wandb=hanging, tensorboard=Raising(),
    )  # fmt: skip

    for _ in range(20):
        for (x,) in loader:
            model(x).sum().backward()
            optimizer.step()
        session.summary()
    session.close()
    hanging.freed.set()

    summary = session.summary()
    assert summary["steps"] == {"train": 400}
    # Three of the one that raises, at least; of the other all rows but the one that hangs and those that wait.
    assert summary["telemetry"]["faults"]["trackers"] > 3
