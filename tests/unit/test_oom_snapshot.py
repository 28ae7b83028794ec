"""What is left behind when a device runs out of memory."""

from __future__ import annotations

import pickle
import threading
import time
from pathlib import Path

import pytest

from otel_train.profiler.endpoint import MOST_SNAPSHOTS, OomSnapshots


def test_running_out_of_memory_leaves_one_snapshot_each_time(tmp_path: Path) -> None:
    """What filled the memory is gone a second after the error."""
    ooms = [0]
    snapshots = OomSnapshots(lambda: ooms[0], tmp_path / "captures", 2, lambda: {"segments": [1]})
    snapshots.write_if_due()
    assert not list(tmp_path.iterdir())
    ooms[0] = 1
    for _ in range(2):
        snapshots.write_if_due()
        snapshots.end(5.0)

    (path,) = tmp_path.rglob("*.pickle")
    assert path == tmp_path / "captures/oom_1-rank2.pickle"
    assert pickle.loads(path.read_bytes()) == {"segments": [1]}


def test_a_loop_that_runs_out_of_memory_for_ever_does_not_fill_the_disk(tmp_path: Path) -> None:
    """Some trainers catch the error and try again."""
    ooms = [0]
    snapshots = OomSnapshots(lambda: ooms[0], tmp_path, 0, dict)
    for ooms[0] in range(1, 20):
        snapshots.write_if_due()
        snapshots.end(5.0)

    assert len(list(tmp_path.iterdir())) == MOST_SNAPSHOTS


def test_a_torch_without_snapshots_leaves_none(tmp_path: Path) -> None:
    """Older builds, and builds without a device."""
    snapshots = OomSnapshots(lambda: 1, tmp_path, 0, lambda: None)
    snapshots.write_if_due()
    snapshots.end(5.0)

    assert not list(tmp_path.iterdir())


def test_a_disk_that_hangs_does_not_hold_up_the_thread_that_takes_snapshots(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That thread sends reports, and the end of the session waits for it."""
    goes_on = threading.Event()
    ooms = [1]
    monkeypatch.setattr(Path, "mkdir", lambda *_, **__: goes_on.wait(10.0))
    snapshots = OomSnapshots(lambda: ooms[0], tmp_path, 0, dict)
    began_s = time.monotonic()
    for ooms[0] in range(1, 5):
        snapshots.write_if_due()
    snapshots.end(0.05)
    took_s = time.monotonic() - began_s
    goes_on.set()
    snapshots.end(5.0)

    assert took_s < 5.0
    assert len(list(tmp_path.iterdir())) == 1


def test_a_snapshot_that_cannot_be_written_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A full disk, for example."""
    (tmp_path / "file").write_text("no folder")
    snapshots = OomSnapshots(lambda: 1, tmp_path / "file", 0, dict)
    snapshots.write_if_due()
    snapshots.end(5.0)

    assert "memory snapshot failed" in caplog.text
