"""Workers of a DataLoader are our guests: they record nothing and send nothing."""

from __future__ import annotations

import multiprocessing
import os
from typing import TYPE_CHECKING, Any

import pytest
from torch.utils.data import DataLoader

import otel_train
from tests.integration.loops.decoding import Decoded
from tests.integration.loops.truth import Net, Truth, learn, sgd
from tests.support.receiver import Received, http_receiver

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
EPOCHS = 3


@pytest.fixture
def receiver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Received]:
    """A collector that the environment names, as workers inherit it."""
    for name in list(os.environ):
        if name.startswith("OTEL_"):
            monkeypatch.delenv(name)
    with http_receiver() as received:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", received.endpoint)
        yield received


def senders(received: Received) -> set[tuple[str, int]]:
    """Identity and process of everybody who sent anything."""
    resources = [group.resource for request in received.metrics for group in request.resource_metrics]
    resources += [group.resource for request in received.traces for group in request.resource_spans]
    found = set()
    for resource in resources:
        values = {attribute.key: attribute.value for attribute in resource.attributes}
        found.add((values["service.instance.id"].string_value, values["process.pid"].int_value))
    return found


@pytest.mark.parametrize("context", ["fork", "spawn", "forkserver"])
def test_workers_neither_send_nor_record(context: str, receiver: Received, tmp_path: Path) -> None:
    """Each worker of each epoch would be one more phantom process, with figures frozen at the fork."""
    start = multiprocessing.get_context(context)
    if context == "forkserver":
        start.set_forkserver_preload(["torch"])  # else every worker imports it anew
    number = 1 if context == "spawn" else 2
    model, truth = Net(), Truth()
    rows = Decoded(12, updates=context == "fork")
    train = DataLoader(rows, batch_size=4, num_workers=number, multiprocessing_context=start)
    optimizer = sgd(model)
    session = otel_train.instrument(
        model, {"train": train}, run_dir=str(tmp_path), prometheus=False, console=False,
        export_every_s=0.1, turn_every_s=0.02,
    )  # fmt: skip
    workers: set[int] = set()
    for _ in range(EPOCHS):
        for x, y, pids in train:
            workers.update(pids.tolist())
            truth.batch("train", len(x))
            learn(truth, model, optimizer, (x, y))
            truth.step()
    assert receiver.wait(metrics=2)
    session.close()

    summary: dict[str, Any] = session.summary()
    assert len(workers) == number * EPOCHS
    assert os.getpid() not in workers
    assert [pid for _, pid in senders(receiver)] == [os.getpid()]
    assert receiver.traces
    assert summary["batches"] == dict(truth.batches)
    assert summary["steps"] == dict(truth.steps)
    assert summary["updates"] == truth.updates
    stages = {row["stage"]: row["count"] for row in summary["stages"] if row["count"]}
    assert stages == {"data": 9, "forward": 9, "backward": 9, "optimizer": 9}
    assert summary["telemetry"]["records_lost"] == 0
    assert [path.name for path in tmp_path.glob("*/*") if path.is_dir()] == ["rank0"]


def test_a_forked_child_that_trains_leaves_its_parent_exact(receiver: Received, tmp_path: Path) -> None:
    """``os.fork`` in mid-run: the child's edges must not land in the parent's map, nor its figures be sent."""
    model, truth = Net(), Truth()
    train = DataLoader(Decoded(8, updates=True), batch_size=4)
    optimizer = sgd(model)
    session = otel_train.instrument(
        model, {"train": train}, run_dir=str(tmp_path), prometheus=False, console=False,
        export_every_s=0.1, turn_every_s=0.02,
    )  # fmt: skip
    batches = [(x, y) for x, y, _ in train]
    inner = session.summary()["updates"] or 0
    child = os.fork()
    if not child:
        try:
            for batch in batches * 5:
                learn(Truth(), model, optimizer, batch)
            session.close()
        finally:
            os._exit(0)
    _, status = os.waitpid(child, 0)
    for batch in batches:
        learn(truth, model, optimizer, batch)
    session.close()

    assert status == 0
    assert [pid for _, pid in senders(receiver)] == [os.getpid()]
    forwards = sum(row["count"] for row in session.summary()["stages"] if row["stage"] == "forward")
    assert forwards == truth.forwards["model", "train"] == 2
    assert session.summary()["updates"] >= inner + truth.updates
