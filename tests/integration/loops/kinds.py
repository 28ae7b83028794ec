"""Loops by what gives them their batches."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

import otel_train
from tests.integration.loops.truth import Net, Watch, dataset, loader, loop, loss_of, sgd


class Stream(IterableDataset[tuple[torch.Tensor, torch.Tensor]]):
    """Rows one after the other, their number unknown beforehand."""

    def __init__(self, rows: int) -> None:
        self.rows = rows

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for _ in range(self.rows):
            yield torch.randn(4), torch.tensor(1)


class Records(Dataset[dict[str, Any]]):
    """Rows as dicts."""

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"id": index, "x": torch.randn(4), "y": index % 2}


def as_list(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A collate function that leaves the rows alone, as detection models have them."""
    return rows


def train_by(watch: Watch, train: DataLoader[Any], *, epochs: int = 1, size: int | None = 4) -> None:
    """An ordinary loop over ``train``; samples are counted off each batch itself."""
    model, truth = Net(), watch.truth()
    optimizer = sgd(model)
    watch(model, {"train": train})
    for _ in range(epochs):
        for batch in train:
            truth.batch("train", len(batch[0]) if size else None)
            truth.one_step(model, optimizer, batch)
    if size is None:
        truth.samples = None


@loop
def persistent_workers(watch: Watch) -> None:
    """Two workers serve three epochs through one iterator."""
    train_by(watch, loader(5, num_workers=2, persistent_workers=True), epochs=3)


@loop
def workers_of_an_epoch(watch: Watch) -> None:
    """New workers, and a new iterator, every epoch."""
    train_by(watch, loader(5, num_workers=2), epochs=2)


@loop
def spawned_workers(watch: Watch) -> None:
    """A worker that knows nothing but what was pickled for it."""
    train_by(watch, loader(5, num_workers=1, multiprocessing_context="spawn"))


class ReadInBlocks(Stream):
    """Times what it does for a row, around the ``yield`` of the row."""

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for row in super().__iter__():
            with otel_train.stage("read"):
                yield row


@loop
def a_block_around_the_yield_of_a_dataset(watch: Watch) -> None:
    """In the training process the block is suspended with its dataset: it ends with the request, and none has failed."""
    train_by(watch, DataLoader(ReadInBlocks(12), batch_size=4))
    watch.said.stages["read"] += 12


@loop
def iterable_dataset(watch: Watch) -> None:
    """No length; the last batch is smaller."""
    train_by(watch, DataLoader(Stream(22), batch_size=4))


@loop
def no_automatic_batching(watch: Watch) -> None:
    """Batching is switched off: the dataset makes its own batches."""
    rows = dataset(6)
    batches = [rows[i * 4 : i * 4 + 4] for i in range(6)]
    train_by(watch, DataLoader(batches, batch_size=None))


@loop
def incomplete_batches_kept_and_dropped(watch: Watch) -> None:
    """Samples are counted off the batches, not planned from ``batch_size``."""
    model, truth = Net(), watch.truth()
    rows = dataset(5, size=5)
    kept, dropped = DataLoader(rows, batch_size=4), DataLoader(rows, batch_size=4, drop_last=True)
    optimizer = sgd(model)
    watch(model, {"kept": kept, "dropped": dropped})
    for name, train in (("kept", kept), ("dropped", dropped)):
        for batch in train:
            truth.batch(name, len(batch[0]))
            truth.one_step(model, optimizer, batch)


@loop
def batches_by_a_sampler_of_batches(watch: Watch) -> None:
    """Batches of different sizes, as bucketing makes them."""
    groups = [[0, 1, 2], [3], [4, 5, 6, 7, 8, 9], [10, 11]]
    train_by(watch, DataLoader(dataset(3), batch_sampler=groups))


@loop
def lists_of_dicts(watch: Watch) -> None:
    """A custom collate function gives a list of rows."""
    model, truth = Net(), watch.truth()
    train = DataLoader(Records(), batch_size=3, collate_fn=as_list)
    optimizer = sgd(model)
    watch(model, {"train": train})
    for rows in train:
        truth.batch("train", len(rows))
        batch = torch.stack([row["x"] for row in rows]), torch.tensor([row["y"] for row in rows])
        truth.one_step(model, optimizer, batch)


@loop
def dicts_of_tensors(watch: Watch) -> None:
    """The default collate function makes a dict of columns."""
    model, truth = Net(), watch.truth()
    train = DataLoader(Records(), batch_size=3)
    optimizer = sgd(model)
    watch(model, {"train": train})
    for columns in train:
        truth.batch("train", len(columns["x"]))
        truth.one_step(model, optimizer, (columns["x"], columns["y"]))


@loop
def a_plain_list(watch: Watch) -> None:
    """An iterable that is no DataLoader comes back wrapped."""
    model, truth = Net(), watch.truth()
    batches = list(loader(5))
    optimizer = sgd(model)
    session = watch(model, {"train": batches})
    assert len(session.loaders["train"]) == 5
    for _ in range(2):
        for batch in session.loaders["train"]:
            truth.batch("train")
            truth.one_step(model, optimizer, batch)


@loop
def an_instrumented_generator(watch: Watch) -> None:
    """``watch`` for what cannot be handed over at the start."""
    model, truth = Net(), watch.truth()
    optimizer = sgd(model)
    watch(model)

    def synthetic() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for _ in range(6):
            yield torch.randn(3, 4), torch.tensor([0, 1, 0])

    for batch in otel_train.watch(synthetic(), name="synthetic"):
        truth.batch("synthetic", 3)
        truth.one_step(model, optimizer, batch)
    for x, _ in otel_train.watch(synthetic(), name="probe", phase="predict"):
        truth.batch("probe", 3)
        truth.forward("predict")
        model(x)
        truth.step("predict")


@loop
def an_unnamed_loader(watch: Watch) -> None:
    """A DataLoader made in mid-run is found when it is iterated."""
    truth, (model, optimizer, train) = watch.training({"train": 4})
    truth.train_on(model, optimizer, train)
    for batch in loader(3, size=2):
        truth.batch("?", 2)
        truth.one_step(model, optimizer, batch)


class Prepared:
    """Passes for the DataLoader that it holds, and iterates that one, a batch ahead, as accelerate does."""

    def __init__(self, inner: DataLoader[Any]) -> None:
        self.inner = inner

    @property  # type: ignore[misc]  # this is how it passes for one
    def __class__(self) -> Any:
        return DataLoader

    def __len__(self) -> int:
        return len(self.inner)

    def __iter__(self) -> Iterator[Any]:
        batches = iter(self.inner)
        ahead = next(batches, None)
        while ahead is not None:
            batch, ahead = ahead, next(batches, None)
            yield batch


@loop
def a_loader_that_passes_for_another(watch: Watch) -> None:
    """What it holds is iterated in its place: under the name that was given."""
    train_by(watch, Prepared(loader(5)), epochs=2)


class Endless(DataLoader[Any]):
    """Makes its only iterator when it is made, over a sampler that begins anew, as Ultralytics and timm do."""

    def __init__(self, batches: int, **options: Any) -> None:
        super().__init__(dataset(batches), batch_size=4, **options)
        object.__setattr__(self, "batch_sampler", Again(self.batch_sampler))
        self.iterator = super().__iter__()
        self.batches = batches

    def __iter__(self) -> Iterator[Any]:  # a generator, as theirs is
        for _ in range(self.batches):
            yield next(self.iterator)


class Again:
    """A sampler that begins anew at its end."""

    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler

    def __iter__(self) -> Iterator[Any]:
        while True:
            yield from self.sampler


@loop
def a_loader_that_makes_its_iterator_when_it_is_made(watch: Watch) -> None:
    """One iterator for all passes, older than the session: what the loader holds is timed."""
    model, train, val, truth = Net(), Endless(5), Endless(2), watch.truth()
    optimizer = sgd(model)
    watch(model, {"train": train, "val": val})
    for _ in range(3):
        truth.train_on(model, optimizer, train)
        truth.evaluate_on(model, val)


@loop
def a_dataset_that_trains_a_model_of_its_own(watch: Watch) -> None:
    """Online features: every row trains an encoder first. Those updates are a part of the batch that was asked for."""
    model, encoder, truth = Net(), Net(4, 4), watch.truth()
    optimizer, of_encoder = sgd(model), sgd(encoder)

    def encoded(rows: list[Any]) -> Any:
        for x, _ in rows:
            truth.forward(model="encoder")
            truth.backward((encoder(x) - x).square().mean())
            truth.update(of_encoder)
        return default_collate(rows)

    train = loader(5, collate_fn=encoded)
    watch({"model": model, "encoder": encoder}, {"train": train})
    for batch in train:
        truth.batch("train")
        truth.forward(model="model")
        truth.backward(loss_of(model, batch))
        truth.update_that_ends_a_step(optimizer)
