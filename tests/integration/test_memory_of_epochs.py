"""Memory of real epochs against what the system says: a buffer held for half a second, workers, caches, datasets."""

from __future__ import annotations

import json
import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.support.zero_code import printed_by

if find_spec("tensorboard") is None:  # a writer is logged to
    pytest.skip(
        "tensorboard is not installed: pip install 'otel-train[tensorboard]'", allow_module_level=True
    )
ROOT = Path(__file__).parents[2]
PROGRAM = r"""
import json, sys, threading, time
import numpy as np, psutil, torch
import otel_train
from torch.utils.data import DataLoader, TensorDataset

class Writer:
    def __init__(self):
        self.rows = {}
    def add_scalar(self, tag, value, step):
        self.rows.setdefault(tag, []).append(value)

workers, settings = int(sys.argv[1]), json.loads(sys.argv[2])
model, writer = torch.nn.Linear(1024, 2), Writer()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
held = TensorDataset(torch.zeros(16384, 1024))  # 64 MiB
loader = DataLoader(held, batch_size=4096, num_workers=workers, persistent_workers=bool(workers))
session = otel_train.instrument(
    model, loader, prometheus=False, console=False, tensorboard=writer, run_dir=sys.argv[3], **settings
)
session.cache("features", size=lambda: 7 * 2**20)

def resident():
    own = psutil.Process()
    return own.memory_info().rss + sum(child.memory_full_info().uss for child in own.children(recursive=True))

def train(hold):
    most = 0
    for (x,) in loader:
        model(x).sum().backward()
        optimizer.step()
    buffer = np.ones(300 * 10**6 if hold else 1, dtype=np.uint8)
    until = time.monotonic() + 0.5
    while time.monotonic() < until:
        most = max(most, resident())
        time.sleep(0.05)
    del buffer
    time.sleep(0.5)
    return most / 2**20

time.sleep(1)  # the first look at what is there
peaks = []
for epoch in range(3):
    with otel_train.epoch():
        peaks.append(train(hold=epoch == 1))
session.close()
print(json.dumps({"rows": writer.rows, "system": peaks}))
"""

pytestmark = [pytest.mark.slow, pytest.mark.alone, pytest.mark.timeout(300)]


def run(folder: Path, workers: int = 0, **settings: Any) -> dict[str, Any]:
    """What the program says when it is over: the rows of its tracker, and the system's value."""
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    printed = printed_by("-c", PROGRAM, str(workers), json.dumps(settings), folder, environ=environ)
    said: dict[str, Any] = json.loads(printed.splitlines()[-1])
    return said


@pytest.mark.parametrize(("workers", "within"), [(0, 0.01), (2, 0.15)])
def test_a_buffer_held_for_half_a_second_is_in_the_peak_of_its_epoch(
    tmp_path: Path, workers: int, within: float
) -> None:
    """And in no other: the epoch that needs the memory is the one to look at.

    What workers share with the program changes with every page they write to, and is looked at now and then.
    """
    said = run(tmp_path, workers)
    peaks = said["rows"]["memory_peak_mb"]

    assert peaks[1] == pytest.approx(said["system"][1], rel=within)
    assert peaks[2] == pytest.approx(said["system"][2], rel=0.15)  # what training holds goes up and down
    assert peaks[1] - peaks[0] > 250
    # Pages that the program writes to become its workers' own.
    assert peaks[2] < peaks[1] - (150 if workers else 250)
    assert said["rows"]["memory_dataset_mb"] == pytest.approx([64] * 3, rel=0.01)
    assert said["rows"]["memory_cache_mb"] == [7] * 3


def test_who_does_not_want_memory_does_not_get_it(tmp_path: Path) -> None:
    """``throughput_metrics="timing"``: no key, no look."""
    rows = run(tmp_path, throughput_metrics="timing")["rows"]

    assert "samples_per_second" in rows
    assert not [key for key in rows if key.startswith("memory")]
