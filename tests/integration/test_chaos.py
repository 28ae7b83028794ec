"""Everything around the run breaks; the run does not."""

from __future__ import annotations

import gc
import json
import logging
import subprocess
import sys
import textwrap
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch.utils.data import DataLoader

import otel_train
from otel_train.cli.replay import replay
from otel_train.exporters import ExportRoute
from otel_train.safety import Guard
from tests.integration.loops.truth import Net, Watch, dataset, loader
from tests.integration.test_session import FAST, classic, page, rank_folder, train, validate
from tests.support.inside import inside
from tests.support.programs import command_of, environ, written
from tests.support.receiver import black_hole, http_receiver, refusing_address
from tests.support.waiting import until
from tests.support.warm import WarmProgram, ended
from tests.support.zero_code import environment, launched

LATER_S = 3.5
"""How much later a run may end with its collector away: 2 s, and a margin for a busy machine."""


# --- our own faults -------------------------------------------------------------------------------


class Broken:
    """An exporter that fails every time."""

    def __init__(self) -> None:
        self.called = 0

    def export(self, batch: Any) -> None:
        self.called += 1
        raise RuntimeError("broken on purpose")

    def close(self, timeout_s: float) -> None:
        raise RuntimeError("broken to the end")


def test_a_broken_exporter_is_switched_off_and_training_goes_on(
    watch: Watch, caplog: pytest.LogCaptureFixture
) -> None:
    """One traceback in the log, not one every half second for a week."""
    model, batches, broken = Net(), loader(20), Broken()
    with caplog.at_level(logging.WARNING, "otel_train"):
        session = watch(model, {"train": batches}, **FAST)
        inside(session).loop.routes.append(ExportRoute(broken, Guard("broken part"), 0.0))
        train(model, batches, epochs=3)
        assert until(lambda: broken.called >= 3)
        time.sleep(0.2)
        session.close()
    written = json.loads((rank_folder(session) / "summary.json").read_text())
    tracebacks = [
        record for record in caplog.records if record.exc_info and "broken part" in record.getMessage()
    ]

    assert broken.called == 3
    assert len(tracebacks) == 1
    assert written["telemetry"]["faults"] == {"broken part": 3}
    assert written["steps"] == {"train": 60}
    assert (rank_folder(session) / "metrics.otlp.jsonl").stat().st_size > 0


def test_what_the_run_directory_does_not_take_is_counted(watch: Watch) -> None:
    """One line in the log is lost among a week of others; a counter raises an alert."""
    session = watch(Net(), **FAST)
    metrics = rank_folder(session) / "metrics.otlp.jsonl"
    metrics.unlink(missing_ok=True)
    metrics.mkdir()  # as good as a full disk

    assert until(lambda: session.summary()["telemetry"]["faults"].get("run directory"))


def test_the_first_error_of_a_function_that_counts_is_logged(
    watch: Watch, caplog: pytest.LogCaptureFixture
) -> None:
    """Else a missing key of a batch reads as a loader without samples."""
    batches, count = loader(5), lambda batch: len(batch["input_ids"])
    session = watch(Net(), otel_train.Loader(batches, "train", samples=count, tokens=count))
    for _ in batches:
        pass

    logged = [record for record in caplog.records if record.exc_info]
    assert [record.getMessage() for record in logged] == [
        f"{what}= of loader 'train' failed; training goes on without it" for what in ("tokens", "samples")
    ]
    assert session.summary()["batches"] == {"train": 5}
    assert session.summary()["samples"] == {}


def test_a_hook_that_is_fed_nonsense_raises_nothing_into_the_loop(watch: Watch) -> None:
    """Batches of any kind: sizes are guessed, never demanded."""
    session = watch(Net(), **FAST)
    odd: list[Any] = [
        None,
        3,
        "text",
        object(),
        [],
        {},
        torch.tensor(1.0),
        [[]],
        {"x": None},
        iter([]),
    ]
    seen = list(otel_train.watch(odd, name="odd"))

    assert seen == odd
    assert session.summary()["batches"]["odd"] == len(odd)
    assert session.summary()["telemetry"]["faults"] == {}


# --- the collector is away ------------------------------------------------------------------------

PROGRAM = """
    import atexit, sys, time, torch
    import otel_train
    from torch.utils.data import DataLoader, TensorDataset
    atexit.register(lambda: print(time.monotonic() - end, flush=True))  # runs after what is registered later
    torch.set_num_threads(1)
    model = torch.nn.Linear(4, 2)
    data = DataLoader(TensorDataset(torch.randn(80, 4)), batch_size=4)
    otel_train.instrument(model, {"train": data}, run_dir=sys.argv[1], run_id="r", prometheus=False,
                          export_interval_s=0.3, tuning={"poll_interval_s": 0.05}, console=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    end = time.monotonic() + 1.5
    while time.monotonic() < end:
        for (x,) in data:
            model(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    end = time.monotonic()
"""


def exit_delay_s(folder: Path, endpoint: str, protocol: str) -> float:
    """Seconds from the program's last line until we have let go of it."""
    settings = {"OTEL_EXPORTER_OTLP_ENDPOINT": endpoint, "OTEL_EXPORTER_OTLP_PROTOCOL": protocol}
    done = ended(command_of(folder, PROGRAM), environ(**settings))
    assert done.returncode == 0, done.stderr
    return float(done.stdout.splitlines()[-1])


@contextmanager
def slow() -> Iterator[str]:
    """A collector that answers, much too late."""
    with http_receiver("slow", slow_s=30) as received:
        yield received.endpoint


@pytest.mark.parametrize(
    ("trouble", "protocol"),
    [
        (refusing_address, "http/json"),
        (black_hole, "http/protobuf"),
        (black_hole, "grpc"),
        (slow, "http/json"),
    ],
)
def test_a_collector_that_is_away_delays_no_exit_and_loses_nothing(
    trouble: Callable[[], AbstractContextManager[str]], protocol: str, tmp_path: Path
) -> None:
    """The job's allocation must not be held by its telemetry; what could not be sent is sent later."""
    with trouble() as endpoint:
        delay_s = exit_delay_s(tmp_path, endpoint, protocol)
    spooled = [path for path in (tmp_path / "runs/r/rank0/spool").rglob("*") if path.is_file()]
    with http_receiver() as received:
        counts = replay(tmp_path / "runs/r", endpoint=received.endpoint)
        last = received.points()["train.steps"].sum.data_points[0]
        steps = last.as_int or last.as_double
    written = json.loads((tmp_path / "runs/r/rank0/summary.json").read_text())

    assert delay_s <= LATER_S
    assert spooled
    assert (counts.kept, counts.rejected, counts.torn) == (0, 0, 0)
    assert counts.accepted > 0
    assert steps == written["steps"]["train"]


# --- sudden exit_ ---------------------------------------------------------------------------------

KILLED = """
    import sys, time, torch
    from pathlib import Path
    import otel_train
    torch.set_num_threads(1)

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.calls = torch.nn.Linear(4, 2), 0
        def forward(self, x):
            self.calls += 1
            if self.calls == 31:
                Path(sys.argv[1], "inside").touch()
                time.sleep(60)
            return self.inner(x)

    model = Net()
    data = torch.utils.data.DataLoader(torch.randn(400, 4), batch_size=4)
    otel_train.instrument(model, {"train": data}, run_dir=sys.argv[1], run_id="r", prometheus=False,
                          console=False, tuning={"poll_interval_s": 0.05})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for x in data:
        model(x).sum().backward()
        optimizer.step()
"""


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run directory of a process that was killed inside its 31st forward."""
    folder = tmp_path_factory.mktemp("killed")
    command = [sys.executable, str(written(folder / "program.py", KILLED)), str(folder)]
    process = WarmProgram(command, env=environment(), text=True)
    try:
        assert until((folder / "inside").exists, seconds=100)
    finally:
        process.kill()
        process.wait()
    # The agent writes it, and may still be starting when a program of less than a second dies.
    assert until((folder / "r/rank0/flight.bin").exists, seconds=30)
    return folder / "r"


# --- the disk -------------------------------------------------------------------------------------

FULL = """
    import json, os, resource, signal, sys, torch
    import otel_train
    from torch.utils.data import DataLoader
    torch.set_num_threads(1)
    if sys.argv[2] != "0":
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]), int(sys.argv[2])))
    model = torch.nn.Linear(4, 2)
    data = DataLoader(torch.randn(400, 4), batch_size=4)
    session = otel_train.instrument(model, {"train": data}, run_dir=sys.argv[1], run_id="r", prometheus=False,
                                    console=False, tuning={"poll_interval_s": 0.02}, export_interval_s=0.1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for epoch in range(30):
        for x in data:
            model(x).sum().backward()
            optimizer.step()
        if epoch == 3 and len(sys.argv) > 3:
            with open(sys.argv[3], "wb", buffering=0) as fill:  # what is left in a buffer is written at close
                try:
                    while True:
                        fill.write(bytes(1 << 16))
                except OSError:
                    pass
    session.close()
    print(session.summary()["steps"]["train"])
"""


def trains_on(
    folder: Path, program_folder: Path, limit: int = 0, *fill: str
) -> subprocess.CompletedProcess[str]:
    program = written(program_folder / "program.py", FULL)
    return ended([sys.executable, str(program), str(folder), str(limit), *fill], environment())


@pytest.mark.parametrize("limit", [1000, 1 << 20])
def test_files_that_cannot_grow_stop_no_training(limit: int, tmp_path: Path) -> None:
    """A quota is met in the middle of a write."""
    done = trains_on(tmp_path / "runs", tmp_path, limit)

    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "3000"
    assert "Traceback" not in done.stderr
    assert done.stderr.count("otel") <= 3


@pytest.mark.parametrize("when", ["before", "during"])
def test_a_full_disk_stops_no_training(small_disk: Path, tmp_path: Path, when: str) -> None:
    """A map of a file without blocks kills with SIGBUS at the first write. Checkpoints fill disks."""
    if when == "before":
        with suppress(OSError), (small_disk / "fill").open("wb", buffering=0) as fill:
            while True:
                fill.write(bytes(1 << 16))
    filled = [str(small_disk / "fill")] if when == "during" else []
    done = trains_on(small_disk / "runs", tmp_path, 0, *filled)

    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "3000"
    assert "Traceback" not in done.stderr


# --- many -----------------------------------------------------------------------------------------


def test_hundreds_of_loaders_and_models_stay_bounded(watch: Watch) -> None:
    """Sweeps and notebooks make new ones all day: no series, thread, file or object may pile up."""
    session = watch(prometheus=True, prometheus_address="127.0.0.1:0", max_label_values=16, **FAST)
    rows, gone = dataset(2), []
    process = psutil.Process()

    def one(number: int) -> None:
        batches = DataLoader(rows, batch_size=4)
        if number % 2:
            session.add(loaders={f"loader {number}": batches})
        gone.append(weakref.ref(batches))
        model = Net()
        if number % 10 == 0:
            session.add({f"model {number}": model})
            gone.append(weakref.ref(model))
        train(model, batches)

    for number in range(20):
        one(number)
    gc.collect()
    threads, files = threading.active_count(), process.num_fds()
    for number in range(20, 200):
        one(number)
    gc.collect()
    assert until(lambda: session.summary()["steps"]["train"] >= 398)
    time.sleep(0.3)
    samples = [
        sample
        for family in classic(page(session))
        for sample in family.samples
        if not sample.name.endswith("_bucket")
    ]

    assert [reference for reference in gone if reference() is not None] == []
    assert threading.active_count() <= threads
    assert process.num_fds() <= files + 1
    assert len({sample.labels.get("train_loader") for sample in samples}) <= 16 + 2
    assert len({(s.name, tuple(sorted(s.labels.items()))) for s in samples}) < 450
    assert sum(session.summary()["batches"].values()) == 400


def test_a_run_with_a_validation_loader_and_checkpoints_has_at_most_450_classic_series(
    watch: Watch, tmp_path: Path
) -> None:
    """Every bucket of a classic histogram is one; a store is paid by their number."""
    model, training, validation = Net(), loader(8), loader(4)
    session = watch(
        model,
        {"train": training, "val": validation},
        prometheus=True,
        prometheus_address="127.0.0.1:0",
        **FAST,
    )
    for _ in range(3):
        train(model, training)
        validate(model, validation)
        torch.save(model.state_dict(), tmp_path / "checkpoint.pt")
    assert until(lambda: "train_eval_duration_seconds_bucket{" in page(session))

    names = [sample.name for family in classic(page(session)) for sample in family.samples]

    assert any(name.startswith("train_checkpoint") for name in names)
    assert sum(name.endswith("_bucket") for name in names) > 200
    assert len(names) <= 450


WITHOUT_PROC = ("unshare", "-m", "sh", "-c", 'umount -l /proc && exec "$@"', "sh")


def test_without_proc_a_run_is_exported_but_for_what_only_proc_tells(tmp_path: Path) -> None:
    """A sandbox may mount none; its steps count all the same."""
    if subprocess.run([*WITHOUT_PROC, "true"], capture_output=True, check=False).returncode:
        pytest.skip("needs to unmount /proc in a mount namespace of its own")
    program = tmp_path / "program.py"
    program.write_text(
        textwrap.dedent("""
            import sys

            import torch

            import otel_train

            loader = torch.utils.data.DataLoader([(torch.randn(4), 0)] * 6, batch_size=2)
            model = torch.nn.Linear(4, 2)
            optimizer = torch.optim.SGD(model.parameters())
            otel_train.instrument(model, {"train": loader}, run_dir=sys.argv[1], otlp="off", prometheus=False)
            for x, y in loader:
                torch.nn.functional.cross_entropy(model(x), y).backward()
                optimizer.step()
        """)
    )
    command = [*WITHOUT_PROC, sys.executable, str(program), str(tmp_path / "runs")]
    done = launched(command, environment())
    (summary,) = (tmp_path / "runs").glob("*/rank0/summary.json")

    assert done.returncode == 0
    assert "agent ended" not in done.stderr
    assert "No such file" not in done.stderr
    assert json.loads(summary.read_text())["steps"] == {"train": 3}
