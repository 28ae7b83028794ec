"""Memory of a real device in an epoch, against its driver."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

import otel_train

torch = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("default"),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

MIB = 2**20
AGREEMENT = 0.02
"""The peak against the driver's own value. Source: the criteria for memory."""


class Writer:
    """A tracker that remembers."""

    def __init__(self) -> None:
        self.rows: dict[str, list[float]] = {}

    def add_scalar(self, tag: str, value: float, _: int) -> None:
        self.rows.setdefault(tag, []).append(value)


def test_a_buffer_on_the_device_is_in_the_peak_of_its_epoch(tmp_path: Path) -> None:
    """300 MB held for half a second: what nvidia-smi showed meanwhile, and no more of it in the next epoch."""
    model, writer = torch.nn.Linear(64, 10).cuda(), Writer()
    loader = torch.utils.data.DataLoader(torch.randn(640, 64), batch_size=32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session = otel_train.instrument(
        model, loader, run_dir=str(tmp_path), prometheus=False, console=False, tensorboard=writer,
        tuning={"poll_interval_s": 0.05},
    )  # fmt: skip
    most = 0
    for epoch in range(3):
        with otel_train.epoch():
            for x in loader:
                model(x.cuda()).sum().backward()
                optimizer.step()
            if epoch == 1:
                held = torch.empty(300 * 10**6, dtype=torch.uint8, device="cuda")
                free, total = torch.cuda.mem_get_info()
                most = total - free
                time.sleep(0.5)
                del held
                torch.cuda.empty_cache()
            time.sleep(1)
    session.close()

    peaks = writer.rows["memory_peak_device_mb"]
    assert peaks[1] == pytest.approx(most / MIB, rel=AGREEMENT)
    assert peaks[2] < peaks[1] - 250
