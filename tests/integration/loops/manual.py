"""Loops that say themselves where a stage or a step begins."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Iterator
from typing import Any

import torch

import otel_train
from tests.integration.loops.truth import (
    EVAL,
    TRAIN,
    TRAIN_AND_VAL,
    Net,
    Watch,
    loader,
    loop,
    sgd,
    timed,
)


@loop
def stages_as_blocks_and_decorators(watch: Watch) -> None:
    """A block, a function, a method and one inside the other."""
    model, train, truth = Net(), loader(5), watch.truth()
    optimizer = sgd(model)

    @otel_train.stage("augment")
    def augment(x: torch.Tensor) -> torch.Tensor:
        return x + 0.1

    class Metrics:
        total = 0.0

        @otel_train.stage("metrics")
        def add(self, loss: torch.Tensor) -> None:
            self.total += float(loss)

    metrics = Metrics()
    watch(model, {"train": train})
    for x, y in train:
        truth.batch("train")
        truth.stages["prepare"] += 1
        with otel_train.stage("prepare"):
            truth.stages["augment"] += 1
            batch = augment(x), y
        truth.learn(model, optimizer, batch)
        truth.stages["metrics"] += 1
        metrics.add(torch.tensor(1.0))
        truth.step()
    assert metrics.total == 5
    assert augment.__name__ == "augment"


@loop
def a_stage_around_forward(watch: Watch) -> None:
    """What runs inside a user stage keeps its own time and its own count."""
    truth, (model, optimizer, train) = watch.training({"train": 5})
    for batch in train:
        truth.batch("train")
        truth.stages["compute"] += 1
        with otel_train.stage("compute"):
            truth.learn(model, optimizer, batch)
        truth.step()


@loop
def a_stage_as_a_generator(watch: Watch) -> None:
    """It counts while it runs, and is one occurrence, also when it is left unfinished."""
    model, train, truth = Net(), loader(5), watch.truth()
    optimizer = sgd(model)

    @otel_train.stage("crop")
    def crops(x: torch.Tensor) -> Iterator[torch.Tensor]:
        yield x
        yield x.flip(1)
        yield x.flip(0)

    watch(model, {"train": train})
    for i, (x, y) in enumerate(train):
        truth.batch("train")
        truth.stages["crop"] += 1
        views = crops(x)
        for n, view in enumerate(views):
            truth.backward(truth.loss(model, (view, y)))
            if i == 2 and n == 1:
                break
        views.close()  # type: ignore[attr-defined]
        truth.update_that_ends_a_step(optimizer)


@loop
def stages_in_a_coroutine(watch: Watch) -> None:
    """Batches are fetched by an event loop; what awaits does not count."""
    model, truth = Net(), watch.truth()
    optimizer = sgd(model)

    @otel_train.stage("fetch")
    async def fetch() -> tuple[torch.Tensor, torch.Tensor]:
        await asyncio.sleep(0.001)
        return torch.randn(4, 4), torch.tensor([0, 1, 0, 1])

    @otel_train.stage("score")
    async def scores(n: int) -> AsyncIterator[int]:
        for i in range(n):
            await asyncio.sleep(0)
            yield i

    async def train() -> None:
        for _ in range(5):
            truth.stages["fetch"] += 2
            first, second = await asyncio.gather(fetch(), fetch())
            for batch in (first, second):
                truth.one_step(model, optimizer, batch)
        truth.stages["score"] += 1
        assert [i async for i in scores(3)] == [0, 1, 2]

    watch(model)
    asyncio.run(train())


@loop
def blocks_in_coroutines_that_take_turns(watch: Watch) -> None:
    """Two requests under way at once, in blocks: each ends by itself, and none has failed."""
    model, truth = Net(), watch.truth()
    optimizer = sgd(model)

    async def fetch(name: str, turns: int) -> tuple[torch.Tensor, torch.Tensor]:
        truth.stages[name] += 1
        with otel_train.stage(name):
            for _ in range(turns):
                await asyncio.sleep(0)
        return torch.randn(4, 4), torch.tensor([0, 1, 0, 1])

    async def train() -> None:
        for _ in range(5):
            for batch in await asyncio.gather(fetch("short", 1), fetch("long", 3), fetch("middle", 2)):
                truth.one_step(model, optimizer, batch)

    watch(model)
    asyncio.run(train())


@loop
def manual_steps(watch: Watch) -> None:
    """The loop says where its steps end; nothing else does."""
    truth, (model, optimizer, train) = watch.training({"train": 8}, source="manual")
    for i, batch in enumerate(train):
        truth.batch("train")
        truth.learn(model, optimizer, batch)
        if i % 2 == 1:
            otel_train.step()
            truth.step()
    truth.partial = None


@loop
def manual_steps_after_a_resume(watch: Watch) -> None:
    """``step(start=...)`` gives the next step its number, and is no step itself."""
    truth, (model, optimizer, train) = watch.training({"train": 6}, source="manual")
    otel_train.step(start=1000)
    for batch in train:
        truth.batch("train")
        truth.learn(model, optimizer, batch)
        otel_train.step()
        truth.step()
    truth.partial = None


@loop
def values_and_events(watch: Watch) -> None:
    """``log`` and ``event`` are no stages, and change no count."""
    truth, (model, optimizer, train) = watch.training({"train": 6})
    for i, batch in enumerate(train):
        truth.batch("train")
        loss = truth.loss(model, batch)
        truth.backward(loss)
        truth.update(optimizer)
        otel_train.log(loss=loss, lr=0.01)
        otel_train.event("batch seen", index=i)
        truth.step()


@loop
def a_method_of_a_trainer(watch: Watch) -> None:
    """The loop lives in a class, the session in a with-block."""

    class Trainer:
        def __init__(self) -> None:
            self.model, self.train, self.truth = Net(), loader(6), watch.truth()
            self.optimizer = sgd(self.model)

        def training_step(self, batch: Any) -> None:
            self.truth.learn(self.model, self.optimizer, batch)

        def fit(self) -> None:
            with watch(self.model, {"train": self.train}):
                for batch in self.train:
                    self.truth.batch("train")
                    self.training_step(batch)
                    self.truth.step()

    Trainer().fit()


@timed
def a_stage_around_an_evaluation(watch: Watch) -> None:
    """It begins before the first batch tells that this is an evaluation, and ends after the last."""
    truth, (model, optimizer, train, val) = watch.slow_training(
        {"train": 4, "val": 3}, rated={"train": TRAIN, "val": EVAL}
    )
    for _ in range(2):
        truth.train_on(model, optimizer, train)
        truth.stages["evaluate"] += 1
        with otel_train.stage("evaluate"):
            truth.sleep(0.02, "outside")
            model.eval()
            truth.evaluate_on(model, val)
            model.train()
            truth.sleep(0.02, "outside")


@timed
def a_stage_around_an_epoch(watch: Watch) -> None:
    """Training and evaluation in one stage, with another one around the run."""
    truth, (model, optimizer, train, val) = watch.slow_training(
        {"train": 4, "val": 3}, rated={"train": TRAIN, "val": EVAL}
    )
    truth.stages["fit"] += 1
    with otel_train.stage("fit"):
        for _ in range(2):
            truth.stages["epoch"] += 1
            with otel_train.stage("epoch"):
                truth.train_on(model, optimizer, train)
                truth.evaluate_on(model, val)
            truth.sleep(0.02, "outside")


@timed
def epochs_of_endless_loaders(watch: Watch) -> None:
    """Two iterators that never end, as in trainers that count batches. Where an epoch ends is said: the pause after it is of no phase."""
    truth, (model, optimizer, train, val) = watch.slow_training({"train": 4, "val": 5}, owners=False)
    endless, probes = (itertools.chain.from_iterable(itertools.repeat(each)) for each in (train, val))
    for number in range(1, 5):
        with otel_train.epoch(number):
            truth.at(TRAIN)
            truth.train_on(model, optimizer, itertools.islice(endless, 3))
            if number > 2:
                truth.evaluate_on(model, itertools.islice(probes, 2))
        truth.sleep(0.1, "outside")


@timed
def marked_steps_without_gradients(watch: Watch) -> None:
    """MeZO: two forwards without gradients per batch, and the program changes the parameters. It marks its steps, of three batches each."""
    truth, (model, _, train, val) = watch.slow_training(
        {"train": 6, "val": 2}, source="manual", rated=TRAIN_AND_VAL
    )
    for _ in range(2):
        truth.at(TRAIN, "train")
        for i, batch in enumerate(train):
            truth.batch("train")
            with torch.no_grad():
                losses = [truth.loss(model, batch) for _ in range(2)]
                for p in model.parameters():
                    p.add_(0.01 * (losses[0] - losses[1]))
            truth.work(0.01)
            if i % 3 == 2:
                otel_train.step()
                truth.step()
        truth.evaluate_on(model, val)
