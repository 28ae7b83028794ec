"""How a script uses the package, for the type checker: this file is checked and never run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

import otel_train
from otel_train import Config, ConfigError, Loader, Session
from otel_train.datamodel import Event, ExportBatch, Span
from otel_train.testing import FakeClock, Kept


def a_script(model: torch.nn.Module, train: DataLoader[Any], val: DataLoader[Any]) -> None:
    session: Session = otel_train.instrument(model, {"train": train, "val": val}, run_dir="runs", otlp="off")
    otel_train.instrument([model, model], [train, val], config=Config(console=False))
    otel_train.instrument(model, meter_provider=None, tracer_provider=None)
    otel_train.instrument({"generator": model}, Loader(train, name="code", phase="train", tokens=len))
    for _ in session.loaders["train"]:
        otel_train.log(loss=torch.zeros(()), lr=0.1)
        otel_train.step()
    otel_train.step(start=500)
    otel_train.event("resumed", checkpoint=Path("x.pt"), epoch=3)
    for _ in otel_train.watch([1, 2, 3], name="numbers", phase="eval"):
        pass
    with otel_train.checkpoint():
        pass
    for number in otel_train.epoch(range(3)):
        with otel_train.epoch(number) as epoch:
            token = otel_train.begin("upload")
            otel_train.end(token)
            epoch.end()
    with session.on("forward", before=lambda: None, after=session.report) as handle:
        session.cache("images", size=lambda: 1 << 20).remove()
        handle.remove()
    name: str | None = session.last_loader_name
    wait_ms: float | None = session.last_batch_fetch_ms
    del name, wait_ms
    values: dict[str, Any] = otel_train.summary()
    values.clear()
    otel_train.reset_window()
    folder: Path | None = session.run_directory
    url: str | None = session.metrics_url
    unseen: list[dict[str, str]] = session.instrumentation_gaps()
    del folder, url, unseen
    session.close()


def a_block(model: torch.nn.Module) -> None:
    try:
        with otel_train.instrument(model) as session:
            session.summary()
    except ConfigError as error:
        raise SystemExit(str(error)) from error
    current: Session | None = otel_train.current()
    if current is not None:
        current.close("failed")


@otel_train.stage("augment")
def augmented(x: int, *, by: float = 0.5) -> float:
    return x * by


@otel_train.stage("read")
def read(path: Path) -> Iterator[str]:
    yield from path.read_text().splitlines()


@otel_train.stage("fetch")
async def fetched(url: str) -> bytes:
    return url.encode()


def decorators_keep_signatures() -> None:
    number: float = augmented(3, by=0.1)
    lines: list[str] = list(read(Path("x")))
    del number, lines
    with otel_train.stage("manual"):
        pass


async def also_asynchronous() -> bytes:
    data: bytes = await fetched("x")
    return data


def in_tests_of_ones_own() -> None:
    clock, kept = FakeClock(), Kept()
    now: int = clock.tick(ms=5)
    kept.export(ExportBatch(final=True))
    kept.close(1.0)
    spans: list[Span] = kept.spans
    events: list[Event] = kept.events
    del now, spans, events
