"""Loops that fetch before they use: a batch belongs where it is used, and waiting where it is waited."""

from __future__ import annotations

import itertools
import queue
import threading
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.utils.data import default_collate

import otel_train
from tests.integration.loops.truth import (
    EVAL,
    TRAIN,
    TRAIN_AND_VAL,
    Slow,
    Watch,
    loader,
    loss_of,
    sgd,
    slow_loader,
    timed,
)


class OneAhead:
    """Asks for a batch before it gives away the one before, to know which is the last: as accelerate does."""

    def __init__(self, batches: Iterable[Any]) -> None:
        self.batches = batches
        self.at_end = False

    def __iter__(self) -> Iterator[Any]:
        self.at_end = False
        ahead = iter(self.batches)
        present = next(ahead, None)
        while present is not None:
            following = next(ahead, None)
            self.at_end = following is None
            yield present
            present = following


@timed
def one_batch_ahead_in_both_phases(watch: Watch) -> None:
    """Training and evaluation look one batch ahead: the last batch of either is used after its pass has ended."""
    truth, (model, optimizer, train, val) = watch.slow_training({"train": 5, "val": (3, 0.02)}, owners=False)
    for _ in range(2):
        model.train()
        truth.train_on(model, optimizer, OneAhead(train))
        model.eval()
        truth.evaluate_on(model, OneAhead(val))


@timed
def one_batch_ahead_in_passes_of_one_batch(watch: Watch) -> None:
    """The same where a pass is one batch, as over few rows: it is used after its pass, which only asks have shown."""
    truth, (model, optimizer, train, val) = watch.slow_training(
        {"train": 1, "val": (1, 0.02)}, rated=TRAIN_AND_VAL
    )
    for _ in range(6):
        truth.train_on(model, optimizer, OneAhead(train))
        truth.sleep(0.03, "outside")
        truth.evaluate_on(model, OneAhead(val))


@timed
def an_evaluation_of_a_list_of_batches(watch: Watch) -> None:
    """`list(val)` reads all batches before the model uses the first: each of them is a step, and the forwards are of their loader."""
    truth, (model, optimizer, train, val) = watch.slow_training(
        {"train": 5, "val": (3, 0.02)}, rated=TRAIN_AND_VAL
    )
    for _ in range(2):
        truth.train_on(model, optimizer, train)
        truth.at(EVAL, "val")
        truth.evaluate_on(model, list(val))
        truth.sleep(0.03, "outside")


@timed
def an_evaluation_of_groups_of_batches(watch: Watch) -> None:
    """Batches are read and used two at a time, as by `itertools.batched`; the last one is used after its pass has ended."""
    truth, (model, optimizer, train, val) = watch.slow_training(
        {"train": 5, "val": (5, 0.02)}, rated=TRAIN_AND_VAL
    )
    for _ in range(2):
        truth.train_on(model, optimizer, train)
        truth.at(EVAL, "val")
        batches = iter(val)
        while group := list(itertools.islice(batches, 2)):
            truth.evaluate_on(model, group)


@timed
def accumulation_that_ends_with_the_loader(watch: Watch) -> None:
    """accelerate: the last group of an epoch is smaller, because the loader says one batch ahead that it ends."""
    truth, (model, optimizer, train, val) = watch.slow_training({"train": 5, "val": (3, 0.02)}, owners=False)
    ahead = OneAhead(train)
    for _ in range(2):
        model.train()
        truth.at(TRAIN, "train")
        for i, batch in enumerate(ahead):
            truth.batch("train")
            truth.backward(truth.loss(model, batch))
            if i % 2 == 1 or ahead.at_end:
                truth.update_that_ends_a_step(optimizer)
        model.eval()
        truth.evaluate_on(model, val)


@timed
def a_batch_in_hand_while_estimating(watch: Watch) -> None:
    """llama2.c: the next training batch is fetched during the step; the loss is estimated with it in hand."""
    truth = watch.truth()
    model, train = Slow(truth), slow_loader(truth, "train", 12)
    some_of_train, val = slow_loader(truth, "some_of_train", 2, 0.02), slow_loader(truth, "val", 2, 0.02)
    optimizer = sgd(model)
    watch(model, {"train": train, "some_of_train": some_of_train, "val": val})
    truth.at(TRAIN, "train")
    batches = iter(train)
    batch = next(batches)
    truth.batch("train")
    for iteration in range(8):
        if iteration % 4 == 0:
            model.eval()
            truth.evaluate_on(model, some_of_train, "some_of_train")
            truth.evaluate_on(model, val)
            model.train()
            truth.at(TRAIN, "train")
        loss = truth.loss(model, batch)
        batch = next(batches)
        truth.batch("train")
        truth.backward(loss)
        truth.update_that_ends_a_step(optimizer)


@timed
def the_next_batch_is_fetched_after_the_update(watch: Watch) -> None:
    """A prefetcher: the batch in hand is trained on, then the next one is fetched, to the end."""
    truth, (model, optimizer, train) = watch.slow_training({"train": 5})
    for _ in range(2):
        truth.at(TRAIN, "train")
        batches = iter(train)
        batch = next(batches, None)
        while batch is not None:
            truth.batch("train")
            truth.one_step(model, optimizer, batch)
            batch = next(batches, None)
        truth.sleep(0.08, "outside")


@timed
def a_slow_loader_behind_a_queue(watch: Watch) -> None:
    """A thread iterates the loader: its waits are that thread's; the loop waits for the queue, which is instrumented."""
    truth = watch.truth(threads=2, partial=None, rated={"queue": TRAIN})
    model = Slow(truth, 0.005)
    optimizer = sgd(model)
    ready: queue.Queue[Any] = queue.Queue(maxsize=2)

    def collate(rows: list[Any]) -> Any:
        truth.sleep(0.03, "", "data", "train")
        return default_collate(rows)

    def fetch() -> None:
        for batch in train:
            ready.put(batch)
        ready.put(None)

    def get() -> Any:
        with truth.spent("data_wait", "data", "queue"):
            return ready.get()

    train = loader(8, collate_fn=collate)
    watch(model, {"train": train})
    thread = threading.Thread(target=fetch)
    thread.start()
    truth.at(TRAIN, "queue")
    for batch in otel_train.watch(iter(get, None), name="queue"):
        truth.batch("train")
        truth.batch("queue")
        truth.one_step(model, optimizer, batch)
    thread.join()


@timed
def an_evaluation_that_fetches_ahead_manually(watch: Watch) -> None:
    """Loaders whose names say nothing: the first ask of each pass shows nothing until its batch is used."""
    truth, (model, optimizer, left, right) = watch.slow_training(
        {"left": 4, "right": (3, 0.02)}, owners=False
    )
    for _ in range(2):
        truth.train_on(model, optimizer, left, name="left")
        truth.at(EVAL, "right")
        with torch.no_grad():
            batches = iter(right)
            ahead = next(batches, None)
            while ahead is not None:
                batch, ahead = ahead, next(batches, None)
                truth.batch("right")
                truth.forward(EVAL)
                loss_of(model, batch)
                truth.step(EVAL)


@timed
def the_next_batch_is_fetched_in_every_micro_step(watch: Watch) -> None:
    """Accumulation over three batches, each fetched between forward and backward of the one before; evaluated every third step."""
    truth, (model, optimizer, train, val) = watch.slow_training(
        {"train": (24, 0.005), "val": (3, 0.005)}, takes_s=0.005
    )
    batches = iter(train)

    def fetched() -> Any:
        truth.at(TRAIN, "train")
        truth.batch("train")
        return next(batches)

    batch = fetched()
    for number in range(7):
        if number % 3 == 0:
            truth.evaluate_on(model, val)
        truth.at(TRAIN, "train")
        for _ in range(3):
            loss = truth.loss(model, batch)
            batch = fetched()
            truth.backward(loss / 3)
        truth.update_that_ends_a_step(optimizer)
