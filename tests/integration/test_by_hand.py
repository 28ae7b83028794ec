"""What a program says by hand, through a whole session."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

import otel_train
from tests.integration.loops.truth import Net, Watch, loader, loss_of, sgd

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def watch(tmp_path: Path) -> Iterator[Watch]:
    """``instrument``, quietly; what a test leaves open is closed."""
    started = Watch(tmp_path / "runs")
    yield started
    started.close()


def test_epochs_over_two_loaders_that_begin_again_give_a_block_each(
    watch: Watch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Passes of the shorter one would make four epochs of two."""
    model, short, long = Net(), loader(2), loader(4)
    session = watch(model, {"short": short, "long": long}, console_blocks="throughput")
    optimizer = sgd(model)
    for _ in otel_train.epoch(range(2)):
        for batches in (zip(short, long, strict=False), zip(short, long, strict=False)):
            for one, other in batches:
                (loss_of(model, one) + loss_of(model, other)).backward()
                optimizer.step()
                optimizer.zero_grad()
    session.close()

    said = capfd.readouterr().err
    assert [line for line in said.splitlines() if line.startswith("[Throughput]")] == [
        "[Throughput] Epoch 1:", "[Throughput] Epoch 2:"
    ]  # fmt: skip
