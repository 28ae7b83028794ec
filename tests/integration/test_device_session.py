"""Hooks, timer, export loop and account together, on a device that does its work at once."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import otel_train
from otel_train import catalog as c
from otel_train.agent.ring_reader import SharedRings
from otel_train.agent.service import ExportLoop, PeriodicTask
from otel_train.aggregation.spans import SamplingRules
from otel_train.datamodel import Anchor, Snapshot, system_clock
from otel_train.exporters import ExportRoute
from otel_train.instrumentation.accelerator import DeviceDriver
from otel_train.instrumentation.cuda_events import time_devices
from otel_train.instrumentation.device_copy import TransferProbe
from otel_train.instrumentation.module import kind_of_device
from otel_train.instrumentation.naming import Loader
from otel_train.instrumentation.optimizer import ScaledUpdates, in_backward
from otel_train.instrumentation.registry import ProbeRegistry, TorchProbes
from otel_train.recording.recorder import Recorder
from otel_train.safety import Guard
from otel_train.testing import Kept
from tests.integration.loops.truth import QUIET, Net, loader, loss_of, sgd
from tests.support.device import AgentSide
from tests.support.flight import PrivateMemory
from tests.support.runs import run_state

STEPS = 40


class HostDriver(DeviceDriver):
    """Takes the host for its device: an event is reached when it is recorded."""

    def __init__(self, device_type: str = "meta", why_untimed: str = "") -> None:
        super().__init__(device_type, why_untimed=why_untimed)

    def devices(self) -> tuple[int, ...]:
        return (0,)

    def new_event(self, device: int) -> list[int]:
        return [0]

    def spare(self, device: int) -> list[list[int]]:
        return []

    def recorder(self, device: int) -> Callable[[list[int]], None]:
        def record(event: list[int]) -> None:
            event[0] = time.perf_counter_ns()

        return record

    def native(self, device: int) -> None:
        return

    def stamp(self, device: int) -> list[int]:
        return [time.perf_counter_ns()]

    def fetch(self, tensor: Any) -> Callable[[], float | None]:
        return lambda: float(tensor)

    def query(self, event: list[int]) -> bool:
        return True

    def elapsed_ns(self, begin: list[int], end: list[int]) -> int:
        return end[0] - begin[0]

    def synchronize(self, device: int) -> None:
        return


class InstrumentedTraining:
    """What a session wires, with a driver of our own."""

    def __init__(self, model: Any, loader: Any) -> None:
        anchor = Anchor.now()
        memory = PrivateMemory(1 << 14, anchor)
        self.recorder = Recorder(memory, clock=system_clock, in_backward=in_backward)
        self.timer = time_devices(self.recorder, HostDriver(), "events")
        self.agent = AgentSide(self.timer, self.recorder)
        self.timer.steps.one_in = 1
        # The first five steps are kept, and no slow one: other programs slow steps down.
        self.run = run_state(anchor, rules=SamplingRules(5, 0, 1e9, 100.0, 100))
        rings = SharedRings(memory.map)
        rings.limit(None)
        self.loop = ExportLoop(
            rings, self.run, snapshot=lambda: Snapshot(0, 0, ()), clock=system_clock, every_s=0.01
        )
        self.kept = Kept()
        self.guards = Guard("kept"), Guard("device time")
        self.loop.routes.append(ExportRoute(self.kept, self.guards[0], 0.0))
        self.loop.early_tasks.append(
            PeriodicTask(lambda: self.run.device.add(self.agent.take()), self.guards[1], 0.0)
        )
        self.probes = ProbeRegistry(self.recorder, compiled=lambda: None, passes=lambda: None)
        self.torch = TorchProbes(self.recorder, ScaledUpdates(HostDriver()))
        self.transfers = TransferProbe(self.recorder, HostDriver())
        self.transfers.poll()
        self.probes.watch_torch()
        self.probes.add_loader(Loader(loader, name="code"))
        self.probes.add_model("model", model)

    def close(self) -> None:
        self.probes.remove()
        self.torch.remove()
        self.transfers.remove()
        self.recorder.silence()
        self.loop.read_rings()
        self.run.close(system_clock())
        self.loop.run_once(final=True)
        assert [guard.faults for guard in self.guards] == [0, 0]


AWAY = "meta"
"""A kind of device that torch moves tensors to on any machine."""


def train(model: Any, loader: Any) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for host in loader:
        x, y = (tensor.to(AWAY, non_blocking=True) for tensor in host)
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.fixture
def instrumented() -> InstrumentedTraining:
    """A trained model, instrumented from the first step to the last, while the export loop runs."""
    model = torch.nn.Linear(8, 3, device=AWAY)
    data = TensorDataset(torch.randn(STEPS * 4, 8), torch.randint(0, 3, (STEPS * 4,)))
    loader = DataLoader(data, batch_size=4)
    made = InstrumentedTraining(model, loader)
    over = threading.Event()

    def turn() -> None:
        while not over.wait(0.002):
            made.loop.run_once()

    poller = threading.Thread(target=turn)
    poller.start()
    try:
        train(model, loader)
    finally:
        over.set()
        poller.join()
        made.close()
    return made


def test_every_occurrence_of_every_stage_has_its_device_time(instrumented: InstrumentedTraining) -> None:
    """However the polls cut the run: none lost, none counted twice, with every step timed."""
    rows = {row.key.stage: row for row in instrumented.run.totals.rows() if row.key.phase == "train"}

    for stage in ("data", "h2d", "forward", "backward", "optimizer"):
        row, calls = rows[stage], STEPS * (2 if stage == "h2d" else 1)
        assert row.device is not None
        assert (stage, row.device.measured) == (stage, row.count == calls and calls)
        assert 0 < row.device.seconds <= row.inclusive_s


def test_what_moved_is_counted_by_device(instrumented: InstrumentedTraining) -> None:
    """Two tensors per batch: eight floats a sample, and its class."""
    moved = instrumented.run.transfers.to_devices(instrumented.run.names.sources)

    assert moved == {"meta:0": STEPS * 4 * (8 * 4 + 8)}


def test_kept_steps_carry_it(instrumented: InstrumentedTraining) -> None:
    """Where it was known when the step was recorded."""
    stages = [span for span in instrumented.kept.spans if span.name in ("train.forward", "train.backward")]
    known = [span.attributes.get(c.STAGE_DEVICE_TIME.name) for span in stages]

    assert len(stages) == 10
    assert all(seconds is not None and 0 < float(str(seconds)) < 5 for seconds in known)


def test_after_the_close_no_event_is_recorded(instrumented: InstrumentedTraining) -> None:
    """What still holds our edge passes through."""
    model = torch.nn.Linear(8, 3, device=AWAY)
    instrumented.agent.take()

    train(model, [(torch.randn(4, 8), torch.randint(0, 3, (4,)))])
    times = instrumented.agent.take()

    assert times is not None
    assert len(times.source) == 0


def untimed(run_dir: Path, **settings: Any) -> list[dict[str, Any]]:
    """What the summary of a small training says of devices whose time was not taken."""
    model, batches = Net(), loader(4)
    session = otel_train.instrument(model, batches, run_dir=str(run_dir), **settings, **QUIET)
    optimizer = sgd(model)
    for batch in batches:
        loss_of(model, batch).backward()
        optimizer.step()
    session.close()
    return [gap for gap in session.summary()["instrumentation_gaps"] if gap["what"] == "device"]


@pytest.mark.parametrize(
    ("kind", "timing", "said"),
    [("xpu", "events", True), ("mps", "events", True), ("mps", "off", False), ("cpu", "events", False)],
)
def test_a_device_whose_time_is_not_taken_is_said_unless_that_is_the_wish(
    kind: str, timing: str, *, said: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A summary without device rows must not read as a device that did nothing."""
    monkeypatch.setattr("otel_train.instrumentation.manager.kind_of_device", lambda _: kind)

    assert [gap["name"] for gap in untimed(tmp_path, cuda_timing=timing)] == [kind] * said


class Failing(HostDriver):
    """Raises when an event is recorded."""

    def recorder(self, device: int) -> Callable[[list[int]], None]:
        def record(event: list[int]) -> None:
            raise RuntimeError("device lost")

        return record


@pytest.mark.parametrize(
    ("driver", "why"),
    [
        (Failing("xpu"), "the driver failed (RuntimeError: device lost)"),
        (HostDriver("xpu", "it has no clock"), "it has no clock"),  # memory and no events
    ],
)
def test_why_the_time_of_a_device_is_not_taken_is_said(
    driver: HostDriver, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether it is the kind of device or what happened to this one decides what to do about it."""
    monkeypatch.setattr("otel_train.instrumentation.manager.kind_of_device", lambda _: "xpu")
    monkeypatch.setattr("otel_train.instrumentation.manager.find_driver", lambda _: driver)
    [found] = untimed(tmp_path)

    assert found["name"] == "xpu"
    assert why in found["reason"]


def test_the_kind_of_a_models_device_is_that_of_its_first_parameter() -> None:
    """In a wrapper, too, and without running code of the model's."""

    class Own(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = torch.nn.Dropout()
            self.second = torch.nn.Linear(2, 2, device=AWAY)
            self.third = torch.nn.Linear(2, 2)

        def parameters(self, recurse: bool = True) -> Any:
            raise AssertionError

    assert kind_of_device(torch.nn.Sequential(Own())) == AWAY
    assert kind_of_device(torch.nn.Dropout()) == ""
    assert kind_of_device(None) == ""
