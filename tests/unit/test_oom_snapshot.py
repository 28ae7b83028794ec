"""What is left behind when a device runs out of memory."""

from __future__ import annotations

import pickle
from pathlib import Path

from otel_train.profiler.endpoint import MOST_SNAPSHOTS, OomSnapshots


def test_running_out_of_memory_leaves_one_snapshot_each_time(tmp_path: Path) -> None:
    """What filled the memory is gone a second after the error."""
    ooms = [0]
    snapshots = OomSnapshots(lambda: ooms[0], tmp_path / "captures", 2, lambda: {"segments": [1]})
    assert snapshots.write_if_due() is None
    ooms[0] = 1
    path = snapshots.write_if_due()

    assert path == tmp_path / "captures/oom_1-rank2.pickle"
    assert pickle.loads(path.read_bytes()) == {"segments": [1]}
    assert snapshots.write_if_due() is None


def test_a_loop_that_runs_out_of_memory_for_ever_does_not_fill_the_disk(tmp_path: Path) -> None:
    """Some trainers catch the error and try again."""
    ooms = [0]
    snapshots = OomSnapshots(lambda: ooms[0], tmp_path, 0, dict)
    for ooms[0] in range(1, 20):
        snapshots.write_if_due()

    assert len(list(tmp_path.iterdir())) == MOST_SNAPSHOTS


def test_a_torch_without_snapshots_leaves_none(tmp_path: Path) -> None:
    """Older builds, and builds without a device."""
    assert OomSnapshots(lambda: 1, tmp_path, 0, lambda: None).write_if_due() is None
    assert not list(tmp_path.iterdir())
