"""Trackers that work, hang, raise or are not there: training hears of it once, and waits for none."""

from __future__ import annotations

import logging
import sys
import threading
import time
import types
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import otel_train
from otel_train import api
from otel_train.config import Config
from otel_train.config.settings import TRACKERS
from otel_train.errors import ConfigError
from otel_train.trackers import manager, tensorboard
from otel_train.trackers.manager import ConsoleTracker, TrackerQueue
from otel_train.trackers.metrics import FlatRow
from otel_train.trackers.tensorboard import TensorBoardTracker
from otel_train.trackers.wandb import WandbTracker
from tests.support.waiting import until

ROW = FlatRow(5 * 10**9, 100, 1, of_epoch=False, values={
    "profile/train/dl_code/time_data_ms": 5.0, "profiling/clip_avg_time": 0.0234,
    "profiling/clip_total_time": 2.34, "profiling/clip_count": 100,
})  # fmt: skip
EPOCH = FlatRow(5 * 10**9, 100, 1, of_epoch=True, values={
    "samples_per_second": 80.0, "batches_per_second": 10.0, "batch_load_time_ms_avg": 2.0,
    "batch_load_time_ms_p95": 3.5, "memory_peak_mb": 300.0, "throughput_efficiency": 0.8,
})  # fmt: skip


class FakeTracker:
    """Takes rows, or does with them what the test says."""

    name = "fake"

    def __init__(self, do: Callable[[FlatRow], object] = lambda _: None) -> None:
        self.rows: list[FlatRow] = []
        self.closed = False
        self._do = do

    def wanted(self) -> bool:
        return True

    def place(self) -> str:
        return "here"

    def write(self, row: FlatRow, _: str) -> None:
        self._do(row)
        self.rows.append(row)

    def close(self) -> None:
        self.closed = True


def fail(_: FlatRow) -> None:
    raise ConnectionError("server lost")


def test_rows_arrive_in_order_and_the_tracker_is_closed() -> None:
    """The ordinary case."""
    tracker = FakeTracker()
    queue = TrackerQueue(tracker)

    for step in range(5):
        queue.hand((ROW._replace(step=step), "here"))
    queue.close(30)

    assert [row.step for row in tracker.rows] == [0, 1, 2, 3, 4]
    assert tracker.closed


def test_a_tracker_that_raises_is_off_after_three(caplog: pytest.LogCaptureFixture) -> None:
    """A server that is gone must not fill the log for a week."""
    queue = TrackerQueue(FakeTracker(fail))
    with caplog.at_level(logging.WARNING, "otel_train"):
        for _ in range(10):
            queue.hand((ROW, "here"))
        queue.close(30)

    assert queue.guard.faults == 3
    assert [record.levelname for record in caplog.records] == ["WARNING", "ERROR"]


def test_a_tracker_that_hangs_does_not_block(caplog: pytest.LogCaptureFixture) -> None:
    """Rows are dropped and counted, it is said once, and the end of the program does not wait."""
    freed, began = threading.Event(), threading.Event()

    def hang(_: FlatRow) -> None:
        began.set()
        freed.wait(60)

    queue = TrackerQueue(FakeTracker(hang))
    with caplog.at_level(logging.WARNING, "otel_train"):
        queue.hand((ROW, "here"))
        assert began.wait(30)
        for _ in range(8 + manager.MOST_WAITING):
            queue.hand((ROW, "here"))
        begun = time.monotonic()
        queue.close(0.05)
        waited_s = time.monotonic() - begun

    freed.set()
    assert queue.dropped == 1 + 8 + manager.MOST_WAITING
    assert waited_s < 30
    assert len(caplog.records) == 1


def test_a_row_is_not_in_a_run_of_wandb_that_began_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first run may be finished before its rows are there; the second is another experiment."""
    logged: list[Any] = []
    run = SimpleNamespace(
        log=lambda values, commit: logged.append((values["otel_train/step"], commit)),
        define_metric=lambda *_, **__: None, start_time=20.5,
    )  # fmt: skip
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(run=run))
    tracker = WandbTracker()

    for step, at_ns in ((10, 20 * 10**9), (20, 21 * 10**9)):
        tracker.write(ROW._replace(step=step, unix_ns=at_ns), tracker.place())

    assert logged == [(20, False)]


def test_wandb_rows_are_left_for_the_program_to_commit() -> None:
    """On an axis of our own, defined once."""
    calls: list[tuple[Any, ...]] = []
    run = SimpleNamespace(
        log=lambda values, commit: calls.append((values, commit)),
        define_metric=lambda name, **how: calls.append((name, how)),
    )
    tracker = WandbTracker(run)

    tracker.write(ROW, tracker.place())
    tracker.write(ROW, tracker.place())

    assert calls[:3] == [
        ("otel_train/step", {"hidden": True}),
        ("profile/*", {"step_metric": "otel_train/step"}),
        ("profiling/*", {"step_metric": "otel_train/step"}),
    ]
    assert calls[3:] == [({"otel_train/step": 100, "otel_train/epoch": 1, **ROW.values}, False)] * 2


def test_wandb_is_asked_to_say_when_its_run_is_about_to_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row that comes after the end has no place; the program's own run keeps no hook of otel_train."""
    hooks: list[Any] = []
    calls: list[str] = []
    run = SimpleNamespace(log=print, define_metric=print, _teardown_hooks=hooks)
    module = SimpleNamespace(
        TeardownHook=lambda call, stage: (call, stage), TeardownStage=SimpleNamespace(EARLY=1)
    )
    monkeypatch.setitem(sys.modules, "wandb.sdk.wandb_run", module)
    tracker = WandbTracker(run, before_finish=lambda: calls.append("finishing"))
    assert tracker.wanted()
    assert tracker.wanted()

    ((call, stage),) = hooks
    call()
    tracker.close()
    assert (calls, stage, hooks) == (["finishing"], 1, [])


def test_blocks_read_as_they_always_have(capsys: pytest.CaptureFixture[str]) -> None:
    """Scripts read them."""
    tracker = ConsoleTracker({"profiling", "throughput"})

    tracker.write(ROW, None)
    tracker.write(EPOCH, None)

    assert capsys.readouterr().err == (
        "--- Profiling Metrics (Step 100) ---\n"
        "clip: avg=0.0234s, total=2.34s, count=100\n"
        "[Throughput] Epoch 1:\n"
        "  80.0 samples/s, 10.0 batches/s\n"
        "  batch load: 2.00 ms, 3.50 ms (p95)\n"
        "  memory: 300.0 MB peak\n"
        "  efficiency: 80.0%\n"
    )


def test_only_the_blocks_asked_for_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    """``console_metrics=["throughput"]``."""
    ConsoleTracker({"throughput"}).write(ROW, None)

    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("given", "held"), [(True, "on"), (False, "off"), ("auto", "auto"), ("false", "off"), ("on", "on")]
)
def test_a_tracker_is_set_by_a_switch_or_a_word(given: object, held: str) -> None:
    """``wandb=False`` in code, ``OTEL_TRAIN_WANDB=false`` around it."""
    assert Config(wandb=given).wandb == held  # type: ignore[arg-type]  # what people write


def test_blocks_are_given_as_a_list_or_as_text() -> None:
    """Hydra's lists are no ``list``, environment variables are text."""
    listed: Any = ["profiling", "throughput"]
    assert Config(console_metrics=listed) == Config(console_metrics="profiling,throughput")
    with pytest.raises(ConfigError, match="some of profiling,throughput"):
        Config(console_metrics="profling")


def test_runs_and_dicts_are_separated_from_settings() -> None:
    """A run cannot be an environment variable."""
    run = SimpleNamespace(define_metric=print)

    plain, given = manager.split_settings(
        {"wandb": run, "mlflow": {"run_name": "a"}, "attempt": 2, "tensorboard": False}
    )

    assert plain == {"wandb": "on", "mlflow": "on", "attempt": 2, "tensorboard": False}
    assert given == {"wandb": run, "mlflow": {"run_name": "a"}}


def test_what_is_handed_over_can_be_waited_for() -> None:
    """Before a run of the program's ends; not for ever, and not for a tracker that is off."""
    freed = threading.Event()
    queue = TrackerQueue(FakeTracker(lambda _: freed.wait(60)))
    assert queue.emptied(0)
    queue.hand((ROW, "here"))
    assert not queue.emptied(0.01)
    freed.set()
    assert queue.emptied(30)

    off = TrackerQueue(FakeTracker(fail))
    for _ in range(9):
        off.hand((ROW, "here"))
    begun_s = time.monotonic()
    assert off.emptied(30)
    assert time.monotonic() - begun_s < 20, "the end of the tracker ends the wait"


@pytest.mark.parametrize(
    ("given", "remedy"),
    [
        ({"wandb": "myproject"}, r"If that is the project, write wandb={'project': 'myproject'}"),
        ({"mlflow": "nightly"}, r"write mlflow={'experiment_name': 'nightly'}"),
        ({"tensorboard": "logs/a"}, r"write tensorboard={'log_dir': 'logs/a'}"),
        ({"wandb": "atuo"}, "Did you mean 'auto'"),
        ({"wandb": None}, "Leave it out for the default"),
        ({"tensorboard": {"logdir": "x"}}, "Did you mean 'log_dir'"),
        ({"wandb": logging.getLogger()}, "a run of wandb"),  # it has ``log`` and ``info``, too
        ({"mlflow": logging.getLogger()}, "a run of mlflow"),
        ({"wandb": 3}, r"wandb=3: expected .* a run of wandb"),
        ({"mlflow": {"uri": "x"}}, r"'uri': expected one of tracking_uri, experiment_name, run_name"),
    ],
)
def test_a_name_in_the_place_of_a_tracker_is_refused_with_where_it_belongs(
    given: dict[str, Any], remedy: str
) -> None:
    """``wandb="myproject"`` is the usual first attempt."""
    with pytest.raises(ConfigError, match=remedy):
        manager.split_settings(given)


def test_keys_of_a_dict_are_those_that_the_tracker_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """``wandb.init`` would refuse them with the first row, minutes into training, on the tracker's thread."""
    module = types.ModuleType("wandb")
    module.__dict__["init"] = lambda project=None, entity=None: None
    monkeypatch.setitem(sys.modules, "wandb", module)

    assert manager.split_settings({"wandb": {"project": "a"}})[1] == {"wandb": {"project": "a"}}
    with pytest.raises(ConfigError, match=r"key 'projct': .* Did you mean 'project'"):
        manager.split_settings({"wandb": {"projct": "a"}})


def test_a_tracker_that_is_not_installed_is_refused_with_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Asked for by name: do it or raise."""
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigError, match=r"pip install 'otel-train\[wandb\]'"):
        manager.check_installed("wandb")


def test_nothing_is_written_where_there_is_no_run_directory(tmp_path: Path) -> None:
    """A read-only file system is no fault of the tracker."""
    assert TensorBoardTracker(None, asked=True).place() is None
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("rank", [0, 1])
def test_only_rank_0_logs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], rank: int
) -> None:
    """Of a hundred ranks, one writes to the tracker and to the console."""
    places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}
    for name, value in places.items():
        monkeypatch.setenv(name, str(value))
    session = api.instrument(
        run_dir=tmp_path,
        run_id="x",
        prometheus=False,
        console=False,
        flight_recorder=False,
        console_metrics=["profiling"],
    )
    for _ in session.watch(range(3), name="train", phase="train"):
        with api.stage("forward"):
            pass
        api.step()
    session.close()

    assert ("--- Profiling Metrics (Step 3) ---" in capsys.readouterr().err) is (rank == 0)


def test_every_tracker_with_a_setting_declares_itself() -> None:
    """A new one is a module with a ``KIND``, a line in the table, and a setting: nothing else names trackers."""
    names = {
        module.stem
        for module in Path(manager.__file__).parent.glob("*.py")
        if "\nKIND = " in module.read_text()
    }

    assert names == set(manager.TRACKERS) == set(TRACKERS)
    assert all(setting == kind.setting for setting, kind in manager.TRACKERS.items())


def test_a_given_writer_gets_scalars() -> None:
    """A ``SummaryWriter`` of the program's own."""
    calls: list[tuple[str, float, int]] = []
    writer = SimpleNamespace(add_scalar=lambda *scalar: calls.append(scalar))

    TensorBoardTracker(None, writer).write(EPOCH, writer)

    assert ("samples_per_second", 80.0, 100) in calls
    assert len(calls) == len(EPOCH.values)


def test_a_program_with_another_writer_of_events_gets_no_event_files_without_tensorboard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its package, tensorboardX, writes without that package."""
    monkeypatch.setitem(sys.modules, "tensorboardX", types.ModuleType("tensorboardX"))
    monkeypatch.setattr(tensorboard, "find_spec", lambda _: "found")
    assert TensorBoardTracker(tmp_path).wanted()

    monkeypatch.setattr(tensorboard, "find_spec", find_spec)
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    assert not TensorBoardTracker(tmp_path).wanted()
    assert TensorBoardTracker(tmp_path, asked=True).wanted()


def test_a_given_writer_needs_no_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A writer of tensorboardX has all that is called: ``add_scalar``."""
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    settings: dict[str, Any] = {"run_dir": tmp_path, "console": False, "prometheus": False}

    with otel_train.instrument(tensorboard=SimpleNamespace(add_scalar=print), **settings) as session:
        assert session.info is not None
    with pytest.raises(ConfigError, match=r"pip install 'otel-train\[tensorboard\]'"):
        otel_train.instrument(tensorboard={"log_dir": "logs"}, **settings)


def test_a_tracker_that_a_run_of_the_program_replaces_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else its separate run stays open, and its thread alive."""
    made: list[FakeTracker] = []

    def make(_: object) -> FakeTracker:
        made.append(FakeTracker(lambda _: None))
        return made[-1]

    monkeypatch.setitem(manager.TRACKERS, "mlflow", replace(manager.TRACKERS["mlflow"], make=make))
    trackers = manager.Trackers(Config(mlflow="on"), tmp_path, thread=0, before_finish=lambda: None)
    trackers.put([ROW])
    trackers.attach({"mlflow": SimpleNamespace(info=SimpleNamespace(run_id="r2"))})
    until(lambda: made[0].closed)
    trackers.put([ROW])
    trackers.close(10)

    assert [(len(tracker.rows), tracker.closed) for tracker in made] == [(1, True), (1, True)]


@pytest.mark.parametrize(
    ("state", "ends"),
    [
        ("finished", [("r1", "FINISHED"), 0]),
        ("failed", [("r1", "FAILED"), 1]),
        ("terminated", [("r1", "KILLED"), 1]),
    ],
)
def test_a_separate_run_ends_as_the_training_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state: str, ends: list[object]
) -> None:
    """A failed run that the tracker lists as finished is taken for a result."""
    ended: list[object] = []
    opened = SimpleNamespace(info=SimpleNamespace(run_id="r1"))
    client = SimpleNamespace(
        get_experiment_by_name=lambda _: SimpleNamespace(experiment_id="e1"),
        create_run=lambda *_, **__: opened,
        log_batch=lambda *_, **__: None,
        set_terminated=lambda run_id, status: ended.append((run_id, status)),
    )
    run = SimpleNamespace(
        define_metric=lambda *_, **__: None, log=lambda *_, **__: None,
        finish=lambda **how: ended.append(how["exit_code"]),
    )  # fmt: skip
    modules: dict[str, dict[str, Any]] = {
        "mlflow": {"MlflowClient": lambda tracking_uri: client},
        "mlflow.entities": {"Metric": lambda *_: None},
        "wandb": {"init": lambda **_: run},
    }
    for name, members in modules.items():
        module = types.ModuleType(name)
        module.__dict__.update(members)
        monkeypatch.setitem(sys.modules, name, module)
    trackers = manager.Trackers(
        Config(mlflow="on", wandb="on"), tmp_path, thread=0, before_finish=lambda: None
    )
    trackers.put([ROW])
    trackers.state = state
    trackers.close(10)

    assert sorted(ended, key=str) == ends
