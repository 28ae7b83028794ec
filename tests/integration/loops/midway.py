"""Loops that evaluate in the middle of a pass, of a group of batches or of a step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader

from tests.integration.loops.truth import (
    EVAL,
    TRAIN,
    TRAIN_AND_VAL,
    Net,
    Truth,
    Watch,
    loader,
    loop,
    loss_of,
    sgd,
    timed,
)


@timed
def the_rest_of_an_epoch_after_an_evaluation(watch: Watch) -> None:
    """An iterator is left in mid pass for an evaluation and gone on with afterwards; what lies between is of no phase."""
    truth, (model, optimizer, train, val) = watch.slow_training(
        {"train": 8, "val": (3, 0.02)}, rated=TRAIN_AND_VAL
    )
    batches = iter(train)
    for pauses in range(2):
        truth.at(TRAIN, "train")
        for _ in range(4):
            batch = next(batches)
            truth.batch("train")
            truth.one_step(model, optimizer, batch)
        truth.sleep(0.05 * (1 + pauses), "outside")
        truth.at(EVAL, "val")
        truth.evaluate_on(model, val)
        truth.sleep(0.05, "outside")


@timed
def validation_between_forward_and_backward(watch: Watch) -> None:
    """A second loader is evaluated when the loss is there and its backward is not: the step goes on after it."""
    truth, (model, optimizer, train, val) = watch.slow_training(
        {"train": 6, "val": (2, 0.02)}, rated={"val": EVAL}
    )
    truth.at(TRAIN, "train")
    for i, batch in enumerate(train):
        truth.batch("train")
        loss = truth.loss(model, batch)
        if i % 3 == 1:
            truth.evaluate_on(model, val)
            truth.at(TRAIN, "train")
        truth.backward(loss)
        truth.update_that_ends_a_step(optimizer)


@timed
def features_of_the_training_loader_before_every_epoch(watch: Watch) -> None:
    """Deep clustering: the training loader is read without gradients, clusters are found, then it is trained on."""
    truth, (model, optimizer, train) = watch.slow_training({"train": 5}, owners=False)
    for _ in range(2):
        truth.evaluate_on(model, train, "train")
        truth.sleep(0.06, "outside")
        truth.train_on(model, optimizer, train)


@timed
def a_batch_of_validation_every_few_steps(watch: Watch) -> None:
    """The validation loader is asked for one batch at a time, by an iterator that is made anew when it has run out."""
    truth, (model, optimizer, train, val) = watch.slow_training({"train": 9, "val": (2, 0.02)}, owners=False)
    batches = iter(val)
    truth.at(TRAIN)
    for i, batch in enumerate(train):
        truth.batch("train")
        truth.one_step(model, optimizer, batch)
        if i % 3 == 2:
            truth.at(EVAL)
            following = next(batches, None)
            if following is None:
                batches = iter(val)
                following = next(batches)
            truth.batch("val")
            truth.forward(EVAL)
            with torch.no_grad():
                loss_of(model, following)
            truth.step(EVAL)
            truth.at(TRAIN)


@timed
def a_batch_of_validation_between_backward_and_update(watch: Watch) -> None:
    """A batch of validation is evaluated when the gradients are there and the update is not: the step goes on after it."""
    truth, (model, optimizer, train, val) = watch.slow_training({"train": 9, "val": (4, 0.02)}, owners=False)
    batches = iter(val)
    truth.at(TRAIN)
    for i, batch in enumerate(train):
        truth.batch("train")
        truth.backward(truth.loss(model, batch))
        if i % 3 == 2:
            truth.at(EVAL)
            following = next(batches)
            truth.batch("val")
            truth.forward(EVAL)
            with torch.no_grad():
                loss_of(model, following)
            truth.step(EVAL)
            truth.at(TRAIN)
        truth.work(0.01)
        truth.update_that_ends_a_step(optimizer)


@timed
def a_batch_of_validation_with_gradients_on(watch: Watch) -> None:
    """The same by an iterator that stays, without `no_grad()` and `eval()`: the loader's name says that the batch is not trained on."""
    truth, (model, optimizer, train, val) = watch.slow_training({"train": 9, "val": (4, 0.02)}, owners=False)
    batches = iter(val)
    truth.at(TRAIN)
    for i, batch in enumerate(train):
        truth.batch("train")
        truth.one_step(model, optimizer, batch)
        if i % 3 == 2:
            truth.at(EVAL)
            following = next(batches)
            truth.batch("val")
            truth.forward(EVAL)
            loss_of(model, following)
            truth.step(EVAL)
            truth.at(TRAIN)


@timed
def a_batch_of_evaluation_before_a_step(watch: Watch) -> None:
    """A batch to train on is in hand when one of another loader is drawn, and evaluated: by a new iterator, then by one that stays."""
    truth, (model, optimizer, train, val) = watch.slow_training(
        {"train": 6, "val": (8, 0.02)}, rated={"val": EVAL}
    )
    for place, batches in ((0, None), (0, iter(val)), (2, None), (2, iter(val))):
        truth.at(TRAIN, "train")
        for i, batch in enumerate(train):
            truth.batch("train")
            if i % 3 == place:
                truth.at(EVAL, "val")
                drawn = next(iter(val) if batches is None else batches)
                truth.batch("val")
                truth.forward(EVAL)
                with torch.no_grad():
                    loss_of(model, drawn)
                truth.step(EVAL)
                truth.at(TRAIN, "train")
            truth.one_step(model, optimizer, batch)


@timed
def evaluations_by_iterators_that_stay(watch: Watch) -> None:
    """nanochat: the next batch is fetched before the update. In front of every third step some batches of a new iterator are evaluated, which stays."""
    truth, (model, optimizer, train, val) = watch.slow_training(
        {"train": 10, "val": (4, 0.02)}, rated={"val": EVAL}
    )
    batches = iter(train)
    truth.at(TRAIN, "train")
    batch = next(batches)
    truth.batch("train")
    for i in range(9):
        if i % 3 == 0:
            drawn = iter(val)
            model.eval()
            truth.evaluate_on(model, (next(drawn) for _ in range(2)))
            model.train()
            truth.at(TRAIN, "train")
        truth.backward(truth.loss(model, batch))
        batch = next(batches)
        truth.batch("train")
        truth.update_that_ends_a_step(optimizer)


@timed
def an_evaluation_before_the_last_step_of_a_pass(watch: Watch) -> None:
    """As in nanoGPT, the next batch, maybe of a new pass, is fetched between forward and backward. Every third step comes after an evaluation."""
    truth, (model, optimizer, train, val) = watch.slow_training(
        {"train": 3, "val": (2, 0.02)}, rated={"val": EVAL}
    )
    batches = iter(train)
    truth.at(TRAIN, "train")
    batch = next(batches)
    truth.batch("train")
    for i in range(8):
        if i % 3 == 2:
            truth.at(EVAL, "val")
            truth.evaluate_on(model, val)
            truth.at(TRAIN, "train")
        loss = truth.loss(model, batch)
        try:
            batch = next(batches)
        except StopIteration:
            batches = iter(train)
            batch = next(batches)
        truth.batch("train")
        truth.backward(loss)
        truth.update_that_ends_a_step(optimizer)


@timed
def evaluations_cut_short_at_the_top_of_the_loop(watch: Watch) -> None:
    """`if i % 3 == 0: evaluate(2)` with a batch to train on in hand; `break` leaves the evaluation with a third batch in hand, which is no step."""
    truth, (model, optimizer, train, val) = watch.slow_training(
        {"train": 6, "val": (4, 0.02)}, rated={"train": TRAIN}
    )
    for _ in range(2):
        truth.at(TRAIN, "train")
        for i, batch in enumerate(train):
            truth.batch("train")
            if i % 3 == 0:
                truth.at(EVAL, "val")
                for taken, drawn in enumerate(val):
                    truth.batch("val")
                    if taken == 2:
                        break
                    truth.forward(EVAL)
                    with torch.no_grad():
                        loss_of(model, drawn)
                    truth.step(EVAL)
                truth.at(TRAIN, "train")
            truth.one_step(model, optimizer, batch)


@timed
def an_epoch_of_uneven_groups_with_an_evaluation_inside(watch: Watch) -> None:
    """Groups of four batches, the last one smaller; after the second batch of a group a second loader is evaluated."""
    truth, (model, optimizer, train, val) = watch.slow_training(
        {"train": 10, "val": (3, 0.02)}, rated={"val": EVAL}
    )
    for _ in range(2):
        truth.at(TRAIN, "train")
        for i, batch in enumerate(train, 1):
            truth.batch("train")
            truth.backward(truth.loss(model, batch))
            if i % 4 == 0 or i == len(train):
                truth.update_that_ends_a_step(optimizer)
            if i == 6:
                truth.evaluate_on(model, val)
                truth.at(TRAIN, "train")
        truth.sleep(0.05, "outside")


@timed
def a_batch_of_another_loader_inside_a_batch(watch: Watch) -> None:
    """DARTS: for every batch one of a second loader is drawn by `next(iter(loader))`, for an update of its own; one step."""
    truth, (model, optimizer, train, search) = watch.slow_training({"train": 6, "search": 3}, owners=False)
    architecture = sgd(model.last)
    truth.at(TRAIN)
    for i, batch in enumerate(train):
        truth.batch("train")
        drawn = next(iter(search))
        truth.batch("search")
        truth.learn(model, architecture, drawn)
        truth.learn(model, optimizer, batch)
        truth.step()
        if i < 5:
            truth.work(0.02)


class _Recalling(Net):
    """Adds rows of a memory to its input."""

    truth: Truth
    memory: Iterator[Any]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        recalled, _ = next(self.memory)
        self.truth.batch("memory")
        return super().forward(x + recalled.mean(0))


@loop
def a_memory_asked_in_every_forward(watch: Watch) -> None:
    """Retrieval: the model asks a loader inside its forward. Those rows are a part of the batch that it was given."""
    truth = watch.truth()
    model = _Recalling()
    loaders = {name: loader(batches) for name, batches in (("train", 6), ("val", 3), ("memory", 40))}
    optimizer = sgd(model)
    watch(model, loaders)
    model.truth, model.memory = truth, iter(loaders["memory"])
    for _ in range(2):
        truth.train_on(model, optimizer, loaders["train"])
        truth.evaluate_on(model, loaders["val"])


class _Drawing(Net):
    """Draws its batches itself, in either mode from another loader."""

    truth: Truth
    batches: dict[str, DataLoader[Any]]
    drawn: dict[str, Iterator[Any]]

    def forward(self, _: Any = None) -> torch.Tensor:
        name = "train" if self.training else "val"
        batch = next(self.drawn[name], None)
        if batch is None:
            self.drawn[name] = iter(self.batches[name])
            batch = next(self.drawn[name])
        self.truth.batch(name)
        return loss_of(super().forward, batch)


@loop
def a_model_that_draws_its_own_batches(watch: Watch) -> None:
    """``loss = model()``: the batch begins with the forward in which it is asked for, also where a pass ends in that."""
    truth = watch.truth()
    model = _Drawing()
    model.batches = {"train": loader(4), "val": loader(3)}
    watch(model, model.batches)
    model.truth, model.drawn = truth, {name: iter(each) for name, each in model.batches.items()}
    optimizer = sgd(model)
    for step in range(10):
        truth.forward()
        truth.backward(model())
        truth.update_that_ends_a_step(optimizer)
        if step % 5 == 4:
            model.eval()
            with torch.no_grad():
                for _ in range(2):
                    truth.forward(EVAL)
                    model()
                    truth.step(EVAL)
            model.train()
