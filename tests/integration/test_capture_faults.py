"""What can go wrong during a capture, with torch's own profiler: training ends as it would have."""

from __future__ import annotations

import gzip
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import otel_train
from otel_train.cli.main import main
from tests.integration.loops.truth import QUIET

FAST: dict[str, Any] = {**QUIET, "tuning": {"poll_interval_s": 0.02}}


def profiling() -> bool:
    """Whether torch's profiler runs in this process."""
    return bool(torch.autograd.profiler._is_profiler_enabled)


def train(at: Callable[[], object], *, workers: int = 0, most_s: float = 60.0) -> None:
    """Train until ``at``, called in every step, says so."""
    model = torch.nn.Linear(8, 1)
    loader = DataLoader(TensorDataset(torch.randn(64, 8)), batch_size=8, num_workers=workers)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    deadline = time.monotonic() + most_s
    while time.monotonic() < deadline:
        for (batch,) in loader:
            model(batch).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            time.sleep(0.001)
            if at():
                return
    raise AssertionError("it never happened")


def records(runs: Path) -> list[dict[str, Any]]:
    """What is on the disk."""
    return [json.loads(path.read_text()) for path in runs.glob("*/captures/*.record.json")]


def whole(runs: Path) -> list[Path]:
    """The traces; each of them can be read to its end."""
    paths = list(runs.glob("*/captures/*.json.gz"))
    for path in paths:
        with gzip.open(path) as file:
            json.load(file)
    return paths


@pytest.mark.parametrize("fault", [ValueError, KeyboardInterrupt, SystemExit])
def test_what_the_loop_raises_during_a_capture_comes_out(tmp_path: Path, fault: type[BaseException]) -> None:
    """The traceback is the user's, and what was recorded until then is kept."""

    def at() -> None:
        if profiling():
            raise fault

    def observed() -> None:
        with otel_train.instrument(run_dir=str(tmp_path), **FAST):
            otel_train.capture(steps=1000)
            train(at)

    with pytest.raises(fault):
        observed()

    assert not profiling()
    assert records(tmp_path)[0]["problem"].startswith("captured ")
    assert len(whole(tmp_path)) <= 1


def test_a_session_closed_by_another_thread_ends_the_capture_there(tmp_path: Path) -> None:
    """A server that trains closes it on request. What is captured is written within the exit timeout, also on a slow machine."""
    session = otel_train.instrument(run_dir=str(tmp_path), exit_timeout_s=20, **FAST)
    otel_train.capture(steps=10_000)
    closing = threading.Thread(target=session.close)

    def at() -> bool:
        if profiling() and not closing.ident:
            closing.start()
        return bool(closing.ident) and not closing.is_alive()

    train(at)

    assert not profiling()
    assert "of 10000 steps" in records(tmp_path)[0]["problem"]


def test_workers_that_are_forked_during_a_capture_train_on(tmp_path: Path) -> None:
    """Every epoch forks them anew, with a profiler on in the parent."""
    with otel_train.instrument(run_dir=str(tmp_path), **FAST):
        otel_train.capture(steps=20)  # more than two epochs
        train(lambda: records(tmp_path), workers=1)

    (record,) = records(tmp_path)
    assert record["steps_recorded"] == 20
    assert whole(tmp_path)


def test_where_nothing_can_be_written_the_event_still_says_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A file lies where the folder belongs; elsewhere the permission is missing."""
    with otel_train.instrument(run_dir=str(tmp_path), **FAST) as session:
        assert session.run_directory is not None
        (session.run_directory / "captures").write_text("in the way")
        otel_train.capture(steps=2)
        train(lambda: "not written" in caplog.text)

    (rank,) = session.run_directory.glob("rank0")
    events = [json.loads(line) for line in (rank / "events.jsonl").read_text().splitlines()]
    (captured,) = [event for event in events if event["name"] == "train.profiler.capture"]
    assert "not written" in json.dumps(captured)


def test_a_full_disk_costs_the_capture_and_nothing_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The trace does not fit: none is left that looks whole."""
    with otel_train.instrument(run_dir=str(tmp_path), **FAST) as session:
        assert session.run_directory is not None
        small = session.run_directory / "captures"
        small.mkdir()
        mount = ["mount", "-t", "tmpfs", "-o", "size=8k", "none", str(small)]
        if subprocess.run(mount, capture_output=True, check=False).returncode:
            pytest.skip("no right to mount a small file system here")
        try:
            otel_train.capture(steps=50)
            train(lambda: "not written" in caplog.text)
            assert not list(small.glob("*.gz"))
        finally:
            subprocess.run(["umount", "-l", str(small)], check=True)


SCRIPT = """
import sys, time, torch, otel_train
from torch.utils.data import DataLoader, TensorDataset
model = torch.nn.Linear(8, 1)
loader = DataLoader(TensorDataset(torch.randn(64, 8)), batch_size=8)
otel_train.instrument(model, run_dir=sys.argv[1], run_id="dies", console=False, prometheus=False, tuning={"poll_interval_s": 0.05})
otel_train.capture(steps=5000)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
while True:
    for batch, in loader:
        model(batch).sum().backward(); optimizer.step(); optimizer.zero_grad(); time.sleep(0.001)
        if torch.autograd.profiler._is_profiler_enabled:
            print("captures", flush=True)
"""


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL, signal.SIGINT], ids=lambda how: how.name)
def test_a_run_that_is_ended_during_a_capture_leaves_nothing_that_only_looks_whole(
    tmp_path: Path, how: signal.Signals
) -> None:
    """Preempted in the middle of it: what is there can be read, and the run says how it ended."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("OTEL_")}
    command = [sys.executable, "-c", SCRIPT, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environ) as program:
        assert program.stdout is not None
        program.stdout.readline()
        program.send_signal(how)
        program.stdout.read()

    found = whole(tmp_path)
    assert len(found) == (how is not signal.SIGKILL)
    assert [bool(record["file"]) for record in records(tmp_path)] == [True] * len(found)
    for read in ("postmortem", "report"):
        assert main([read, "dies", "--run-dir", str(tmp_path)]) == 0
