"""Transfers, skipped updates, host and device waits, hardware: what unit tests promise on simulated devices."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import otel_train
from otel_train import catalog as c
from otel_train.aggregation.metrics import MetricBuilder
from otel_train.collectors.hardware import HardwareReader
from otel_train.datamodel import Point, system_clock
from otel_train.instrumentation.manager import NVIDIA_FILES, cuda_driver
from otel_train.instrumentation.optimizer import ScaledUpdates
from otel_train.session import Session
from tests.support.inside import inside

torch = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("default"),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

STEPS = 60


@pytest.fixture(autouse=True)
def quiet_device() -> Iterator[None]:
    """Nothing of one test is still running in the next."""
    yield
    torch.cuda.synchronize()


def watch(model: Any, loader: Any, folder: Path, **settings: Any) -> Session:
    return otel_train.instrument(
        model, {"train": loader}, run_dir=str(folder), prometheus=False, console=False, tuning={"poll_interval_s": 0.05},
        **settings,
    )  # fmt: skip


def stage_of(summary: dict[str, Any], name: str) -> dict[str, Any]:
    [row] = [row for row in summary["stages"] if row["stage"] == name and row["phase"] == "train"]
    found: dict[str, Any] = row
    return found


def moved(session: Session) -> dict[tuple[str, ...], float]:
    """Bytes by direction and device, as they are published."""
    families = inside(session).service._reporter.snapshot(system_clock()).families
    points = [point for family in families if family.metric is c.ACCELERATOR_IO for point in family.points]
    return {
        tuple(str(value) for value in dict(point.attributes).values()): point.value
        for point in points
        if isinstance(point, Point)
    }


def train(model: Any, batches: Any, *, move: Callable[[Any], Any], after: Callable[[Any], None]) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for batch in batches:
        loss = model(move(batch)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        after(loss)


def test_batches_on_their_way_are_a_stage_with_bytes_and_device_time(tmp_path: Path) -> None:
    """From pinned memory, without blocking: the host goes on, and the device's clock has the copy."""
    model = torch.nn.Linear(1024, 16).cuda()
    batches = [torch.randn(8192, 1024).pin_memory()] * STEPS
    session = watch(model, batches, tmp_path)

    train(
        model,
        session.loaders["train"],
        move=lambda x: x.to("cuda", non_blocking=True),
        after=lambda x: x.cpu(),
    )
    torch.cuda.synchronize()
    summary, io = session.summary(), moved(session)
    session.close()

    row = stage_of(summary, "h2d")
    size = 8192 * 1024 * 4
    assert row["count"] == STEPS
    assert 0 < row["device_count"] <= row["count"]
    assert row["device_seconds"] / row["device_count"] > size / 1e12  # no bus moves a terabyte per second
    assert io == {("h2d", "cuda:0"): STEPS * size, ("d2h", "cuda:0"): STEPS * 4}
    assert summary["telemetry"]["faults"] == {}


def test_a_model_moved_in_mid_run_is_no_batch(tmp_path: Path) -> None:
    """A teacher, say."""
    model = torch.nn.Linear(8, 8).cuda()
    session = watch(model, [torch.randn(4, 8, device="cuda")] * STEPS, tmp_path)

    train(
        model,
        session.loaders["train"],
        move=lambda x: x,
        after=lambda _: torch.nn.BatchNorm1d(8).cuda() and None,
    )
    summary, io = session.summary(), moved(session)
    session.close()

    assert [row for row in summary["stages"] if row["stage"] == "h2d"] == []
    assert io == {}


def test_watching_transfers_synchronises_no_more_than_the_transfers(tmp_path: Path) -> None:
    """By torch's own account."""
    model = torch.nn.Linear(64, 16).cuda()
    session = watch(model, [torch.randn(32, 64).pin_memory()] * STEPS, tmp_path)

    torch.cuda.set_sync_debug_mode("error")
    try:
        train(model, session.loaders["train"], move=lambda x: x.cuda(non_blocking=True), after=lambda _: None)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    summary = session.summary()
    session.close()

    assert stage_of(summary, "h2d")["count"] == STEPS


def test_a_fused_optimizers_skips_are_counted_without_a_synchronisation(tmp_path: Path) -> None:
    """Every third gradient is infinite, and only the device ever sees it."""
    model = torch.nn.Linear(64, 16).cuda()
    session = watch(model, [torch.randn(32, 64, device="cuda")] * STEPS, tmp_path)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    scaler = torch.amp.GradScaler("cuda", init_scale=4.0)
    infinite = torch.full((), float("inf"), device="cuda")

    torch.cuda.set_sync_debug_mode("error")
    try:
        for step, x in enumerate(session.loaders["train"]):
            loss = scaler.scale(model(x).square().mean())
            (loss * infinite if step % 3 == 2 else loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    summary = session.summary()
    session.close()

    assert summary["skipped_updates"] == STEPS // 3
    assert summary["updates"] == STEPS - STEPS // 3
    assert summary["telemetry"]["faults"] == {}


def test_a_number_is_not_known_before_the_device_has_it() -> None:
    """The read that does not wait, on a device that is busy for half a second."""
    there = torch.ones((), device="cuda")
    driver = cuda_driver(os.environ, NVIDIA_FILES)
    assert driver is not None
    assert driver.devices() == (0,)
    torch.cuda.synchronize()

    torch.cuda._sleep(int(0.5 * 1e9))
    begun_s = time.perf_counter()
    fetched = driver.fetch(there)
    early = fetched()
    asked_s = time.perf_counter() - begun_s
    torch.cuda.synchronize()

    assert (early, fetched()) == (None, 1.0)
    assert asked_s < 0.1
    assert ScaledUpdates(driver).take().made == 0


def many_small(x: Any) -> Any:
    """Work that takes longer to launch than to do."""
    for _ in range(300):
        x = x + 1
    return x


class Launches(torch.nn.Module):  # type: ignore[name-defined]
    """Hundreds of tiny kernels."""

    shape = (8, 8)

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(8, 8)

    def forward(self, x: Any) -> Any:
        return self.layer(many_small(x))


class Computes(torch.nn.Module):  # type: ignore[name-defined]
    """A few large kernels."""

    shape = (8192, 4096)

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(*[torch.nn.Linear(4096, 4096) for _ in range(4)])

    def forward(self, x: Any) -> Any:
        return self.layers(x)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("kind", "after", "name"),
    [
        (Launches, lambda _: None, "launch_bound"),
        (Computes, lambda loss: loss.item(), "sync_bound"),
        (Computes, lambda _: None, "compute_bound"),
    ],
)
def test_the_finding_says_whether_host_or_device_waits(
    kind: Any, after: Any, name: str, tmp_path: Path
) -> None:
    """Three loops of which the cause is known."""
    model = kind().cuda()
    session = watch(model, [torch.randn(*kind.shape, device="cuda")] * 400, tmp_path)

    train(model, session.loaders["train"], move=lambda x: x, after=after)
    torch.cuda.synchronize()
    summary = session.summary()
    session.close()

    assert summary["findings"][0]["name"] == name, summary["findings"]


def test_the_hardware_answers_or_is_left_out() -> None:
    """By the real library, where it is installed."""
    pytest.importorskip("pynvml", reason="needs the nvml extra")
    held = torch.ones(1, device="cuda")
    driver = cuda_driver(os.environ, NVIDIA_FILES)
    assert driver is not None
    hardware = HardwareReader(driver.hardware_ids, mode="on", exporter_answers=bool)
    builder = MetricBuilder(lambda _: True)

    hardware.write(builder)
    hardware.close()

    names = {family.metric.name for family in builder.families()}
    assert held.is_cuda
    assert hardware.guard.faults == 0
    assert c.HW_GPU_MEMORY_USAGE.name in names
