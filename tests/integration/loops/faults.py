"""Loops in which something raises, and the user catches it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

import otel_train
from tests.integration.loops.truth import Net, Watch, loader, loop, sgd


class Fault(Exception):  # noqa: N818 - not an error of the program
    """What is raised on purpose."""


class Moody(Net):
    """Raises in every third forward."""

    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.calls % 3 == 0:
            raise Fault
        return super().forward(x)


@loop
def forward_raises(watch: Watch) -> None:
    """The failed forward is timed and marked; its batch belongs to the next step."""
    truth, (model, optimizer, train) = watch.training({"train": 8}, model=Moody())
    for batch in train:
        truth.batch("train")
        try:
            truth.backward(truth.loss(model, batch))
            truth.update_that_ends_a_step(optimizer)
        except Fault:
            truth.failed["forward"] += 1


def refuse(_gradient: torch.Tensor) -> None:
    """A gradient hook, say, that raises."""
    raise Fault


@loop
def backward_raises(watch: Watch) -> None:
    """A gradient hook raises; the loop goes on with the next batch."""
    truth, (model, optimizer, train) = watch.training({"train": 8})
    for i, batch in enumerate(train):
        truth.batch("train")
        loss = truth.loss(model, batch)
        if i % 3 == 0:
            loss.register_hook(refuse)
        truth.backward()
        try:
            loss.backward()
        except Fault:
            truth.failed["backward"] += 1
            continue
        truth.update_that_ends_a_step(optimizer)


@loop
def loss_not_finite_ends_the_pass(watch: Watch) -> None:
    """The loop leaves its pass between a forward and its backward, and begins another one."""
    truth, (model, optimizer, train) = watch.training({"train": 8})
    for _ in range(3):
        for i, batch in enumerate(train):
            truth.batch("train")
            loss = truth.loss(model, batch)
            if i == 3:
                break
            truth.backward(loss)
            truth.update_that_ends_a_step(optimizer)
    truth.partial = 1  # what the loop gave up last


class Torn(Dataset[tuple[torch.Tensor, int]]):
    """Every tenth row cannot be read."""

    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        if index % 10 == 9:
            raise Fault
        return torch.randn(4), index % 2


def draw_past_faults(watch: Watch, train: DataLoader[Any], fault: type[Exception]) -> None:
    """Calls ``next`` itself; a call that raises is no batch."""
    model, truth = Net(), watch.truth()
    optimizer = sgd(model)
    watch(model, {"train": train})
    batches, faults = iter(train), 0
    while True:
        try:
            batch = next(batches)
        except StopIteration:
            break
        except fault:
            faults += 1
            continue
        truth.batch("train")
        truth.one_step(model, optimizer, batch)
    assert faults == 3


@loop
def loader_raises(watch: Watch) -> None:
    """In the training process."""
    draw_past_faults(watch, DataLoader(Torn(), batch_size=4), Fault)


@loop
def loader_raises_in_a_worker(watch: Watch) -> None:
    """In a worker, whose exception is handed over and raised again."""
    draw_past_faults(watch, DataLoader(Torn(), batch_size=4, num_workers=1), Fault)


class Choking(torch.optim.SGD):
    """Its third and sixth steps raise."""

    calls = 0

    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        self.calls += 1
        if self.calls % 3 == 0:
            raise Fault
        loss: float | None = super().step(closure)
        return loss


@loop
def optimizer_raises(watch: Watch) -> None:
    """A step that raises is an occurrence that failed, and no update."""
    model, train, truth = Net(), loader(8), watch.truth()
    optimizer = Choking(model.parameters(), lr=0.01)
    watch(model, {"train": train})
    for batch in train:
        truth.batch("train")
        try:
            truth.one_step(model, optimizer, batch)
        except Fault:
            truth.optimizer += 1
            truth.failed["optimizer"] += 1


@loop
def closure_raises(watch: Watch) -> None:
    """The forward in a closure raises through the optimizer."""
    truth, (model, optimizer, train) = watch.training({"train": 8}, model=Moody())
    for batch in train:
        truth.batch("train")

        def closure(batch: Any = batch) -> float:
            optimizer.zero_grad()
            loss = truth.loss(model, batch)
            truth.backward(loss)
            return float(loss.item())

        try:
            optimizer.step(closure)
            truth.update()
            truth.step()
        except Fault:
            truth.optimizer += 1
            truth.failed.update(("forward", "optimizer"))


@loop
def a_user_stage_raises(watch: Watch) -> None:
    """What an exception leaves open is closed, and the next step is whole again."""
    truth, (model, optimizer, train) = watch.training({"train": 6})
    for i, batch in enumerate(train):
        truth.batch("train")
        try:
            truth.stages["augment"] += 1
            with otel_train.stage("augment"):
                if i == 2:
                    refuse(batch[0])
        except Fault:
            truth.failed["augment"] += 1
            continue
        truth.one_step(model, optimizer, batch)


@loop
def a_batch_out_of_memory_is_retried_in_halves(watch: Watch) -> None:
    """The usual answer to an error of memory: forward failed, then two smaller ones and one update."""
    truth, (model, optimizer, train) = watch.training({"train": 6}, model=Moody())
    for x, y in train:
        truth.batch("train")
        try:
            truth.backward(truth.loss(model, (x, y)))
        except Fault:
            truth.failed["forward"] += 1
            for half in (slice(0, 2), slice(2, 4)):
                truth.backward(truth.loss(model, (x[half], y[half])))
        truth.update_that_ends_a_step(optimizer)
    assert truth.failed["forward"]


class Choosy(Net):
    """Raises while a batch does not fit."""

    fits = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.fits:
            raise Fault
        return super().forward(x)


@loop
def a_pass_given_up_at_its_first_forward(watch: Watch) -> None:
    """The search for a batch size: the model raises in training mode, and the next pass goes on. That is no evaluation."""
    truth, (model, optimizer, train) = watch.training({"train": 5}, model=Choosy())
    for model.fits in (True, False, True, False, True):
        for batch in train:
            truth.batch("train")
            try:
                loss = truth.loss(model, batch)
            except Fault:
                truth.failed["forward"] += 1
                break
            truth.backward(loss)
            truth.update_that_ends_a_step(optimizer)
