"""Loops by the shape in which they ask for batches."""

from __future__ import annotations

import itertools
import queue
import random
import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from tests.integration.loops.truth import (
    TRAIN,
    TRAIN_ALONE,
    Net,
    Slow,
    Truth,
    Watch,
    loader,
    loop,
    loss_of,
    sgd,
    timed,
)


@loop
def plain(watch: Watch) -> None:
    """The loop of every tutorial."""
    truth, (model, optimizer, train) = watch.training({"train": 6})
    for _ in range(3):
        truth.train_on(model, optimizer, train)


@loop
def accumulation_with_a_remainder_that_is_carried_over(watch: Watch) -> None:
    """Ten batches in groups of four: the two left over count towards the first update of the next epoch."""
    truth, (model, optimizer, train) = watch.training({"train": 10})
    for _ in range(2):
        for i, batch in enumerate(train):
            truth.batch("train")
            truth.backward(truth.loss(model, batch) / 4)
            if (i + 1) % 4 == 0:
                truth.update_that_ends_a_step(optimizer)
    truth.partial = 1


@loop
def accumulation_with_a_remainder_that_is_flushed(watch: Watch) -> None:
    """The last group of an epoch is smaller; it is a step like the others."""
    truth, (model, optimizer, train) = watch.training({"train": 10})
    for _ in range(2):
        for i, batch in enumerate(train):
            truth.batch("train")
            truth.backward(truth.loss(model, batch) / 4)
            if (i + 1) % 4 == 0 or i + 1 == len(train):
                truth.update_that_ends_a_step(optimizer)


@loop
def accumulation_by_drawing_several_batches(watch: Watch) -> None:
    """A group is drawn first and trained on afterwards, as newer trainers do."""
    truth, (model, optimizer, train) = watch.training({"train": 8})
    batches = iter(train)
    while group := list(itertools.islice(batches, 4)):
        for _ in group:
            truth.batch("train")
        for batch in group:
            truth.backward(truth.loss(model, batch))
        truth.update_that_ends_a_step(optimizer)


@timed
def gradients_of_cached_features(watch: Watch) -> None:
    """Contrastive losses: the features of a group, without gradients in training mode, then its batches again, and an update."""
    truth, (model, optimizer, train) = watch.slow_training({"train": (6, 0.02)}, rated=TRAIN_ALONE)
    truth.at(TRAIN, "train")
    for _ in range(2):
        group = []
        for batch in train:
            truth.batch("train")
            with torch.no_grad():
                truth.forward()
                model(batch[0])
            group.append(batch)
            if len(group) == 3:
                for each in group:
                    truth.backward(truth.loss(model, each))
                truth.update_that_ends_a_step(optimizer)
                group.clear()


@loop
def zip_of_two_loaders(watch: Watch) -> None:
    """``zip`` asks the longer one once more before it learns that the shorter is at its end."""
    model, code, prose, truth = Net(), loader(5), loader(3, size=2), watch.truth(partial=None)
    optimizer = sgd(model)
    watch(model, {"code": code, "prose": prose})
    for first, second in zip(code, prose, strict=False):
        truth.batch("code")
        truth.batch("prose", 2)
        truth.forward()
        truth.backward(truth.loss(model, first) + loss_of(model, second))
        truth.update_that_ends_a_step(optimizer)
    truth.batch("code")


@loop
def zip_of_a_loader_with_itself(watch: Watch) -> None:
    """Two live iterators of one loader, a batch of each per update."""
    truth, (model, optimizer, train) = watch.training({"train": 4})
    for left, right in zip(train, train, strict=False):
        truth.batch("train")
        truth.batch("train")
        truth.forward()
        truth.backward(truth.loss(model, left) + loss_of(model, right))
        truth.update_that_ends_a_step(optimizer)


@loop
def two_live_iterators_of_one_loader(watch: Watch) -> None:
    """They take turns, an update each."""
    truth, (model, optimizer, train) = watch.training({"train": 4})
    turns = [iter(train), iter(train)]
    for i in range(8):
        batch = next(turns[i % 2])
        truth.batch("train")
        truth.one_step(model, optimizer, batch)


@loop
def weighted_sampling_of_two_loaders(watch: Watch) -> None:
    """The next batch is drawn from either loader, until both have run out; one runs out first."""
    model, code, prose, truth = Net(), loader(9), loader(3, size=2), watch.truth()
    optimizer = sgd(model)
    watch(model, {"code": code, "prose": prose})
    dice = random.Random(0)
    live = {"code": iter(code), "prose": iter(prose)}
    while live:
        name = dice.choice(sorted(live))
        try:
            batch = next(live[name])
        except StopIteration:
            del live[name]
            continue
        truth.batch(name, 4 if name == "code" else 2)
        truth.one_step(model, optimizer, batch)


@loop
def itertools_cycle(watch: Watch) -> None:
    """``cycle`` replays the first pass from memory: further steps have no ask at all."""
    truth, (model, optimizer, train) = watch.training({"train": 4})
    for i, batch in enumerate(itertools.islice(itertools.cycle(train), 11)):
        if i < len(train):
            truth.batch("train")
        truth.one_step(model, optimizer, batch)


@loop
def endless_generator(watch: Watch) -> None:
    """The usual way round ``cycle``: ask the loader again and again."""
    truth, (model, optimizer, train) = watch.training({"train": 4})

    def forever() -> Iterator[Any]:
        while True:
            yield from train

    batches = forever()
    for _ in range(10):
        batch = next(batches)
        truth.batch("train")
        truth.one_step(model, optimizer, batch)


@loop
def manual_next(watch: Watch) -> None:
    """The iterator is made anew when it has run out."""
    truth, (model, optimizer, train) = watch.training({"train": 3})
    batches = iter(train)
    for _ in range(8):
        try:
            batch = next(batches)
        except StopIteration:
            batches = iter(train)
            batch = next(batches)
        truth.batch("train")
        truth.one_step(model, optimizer, batch)


@loop
def a_pass_given_up_for_a_new_one(watch: Watch) -> None:
    """The old iterator is still held when a new one is made: the loop goes on with the new one."""
    truth, (model, optimizer, train) = watch.training({"train": 6})
    held = []
    for batches in (2, 3, 6):
        held.append(iter(train))
        for _ in range(batches):
            batch = next(held[-1])
            truth.batch("train")
            truth.one_step(model, optimizer, batch)


@loop
def one_batch_overfitted(watch: Watch) -> None:
    """A single ask, then many updates: each step closes where its update ended."""
    truth, (model, optimizer, train) = watch.training({"train": 3})
    batch = next(iter(train))
    truth.batch("train")
    for _ in range(7):
        truth.one_step(model, optimizer, batch)


@loop
def look_ahead(watch: Watch) -> None:
    """The next batch is fetched before the present one is trained on."""
    truth, (model, optimizer, train) = watch.training({"train": 6})
    for _ in range(2):
        batches = iter(train)
        ahead = next(batches, None)
        while ahead is not None:
            batch, ahead = ahead, next(batches, None)
            truth.batch("train")
            truth.one_step(model, optimizer, batch)


@loop
def look_ahead_between_forward_and_backward(watch: Watch) -> None:
    """The next batch is fetched in the middle of the step, while a device would be busy."""
    truth, (model, optimizer, train) = watch.training({"train": 6})
    batches = iter(train)
    batch = next(batches)
    while batch is not None:
        truth.batch("train")
        loss = truth.loss(model, batch)
        batch = next(batches, None)
        truth.backward(loss)
        truth.update_that_ends_a_step(optimizer)


@loop
def look_ahead_in_another_thread(watch: Watch) -> None:
    """A thread fetches into a queue: its asks end no step of the thread that trains; its waits are its own."""
    truth, (model, optimizer, train) = watch.training({"train": 6}, threads=2)
    ready: queue.Queue[Any] = queue.Queue(maxsize=2)

    def fetch() -> None:
        for batch in train:
            ready.put(batch)
        ready.put(None)

    thread = threading.Thread(target=fetch)
    thread.start()
    while (batch := ready.get()) is not None:
        truth.batch("train")
        truth.one_step(model, optimizer, batch)
    thread.join()


@loop
def a_thread_of_every_epoch_reads_the_loader(watch: Watch) -> None:
    """A thread fetches into a queue and ends with its pass. Without code the session begins in it, and it trains nothing."""
    truth, (model, optimizer, train) = watch.training({"train": 6}, threads=2)

    def fetch(ready: queue.Queue[Any]) -> None:
        for batch in train:
            ready.put(batch)
        ready.put(None)

    for _ in range(2):
        ready: queue.Queue[Any] = queue.Queue(maxsize=1)
        thread = threading.Thread(target=fetch, args=(ready,))
        thread.start()
        for batch in iter(ready.get, None):
            truth.batch("train")
            truth.one_step(model, optimizer, batch)
        thread.join()


class _Halves(IterableDataset[Any]):
    """Takes the batches of a loader in halves."""

    def __init__(self, truth: Truth, inner: DataLoader[Any]) -> None:
        self.truth, self.inner = truth, inner

    def __iter__(self) -> Iterator[Any]:
        for x, y in self.inner:
            self.truth.batch("inner", len(x))
            self.truth.work(0.01, "data", "train")
            for first in range(0, len(x), 2):
                yield x[first : first + 2], y[first : first + 2]


@timed
def a_loader_inside_the_dataset_of_another(watch: Watch) -> None:
    """Both give batches. The wait for the inner one lies in the wait for the outer one, and is counted once."""
    truth = watch.truth(rated=TRAIN_ALONE, inside=("inner",))
    model, inner = Slow(truth), loader(4, 8)
    train = DataLoader(_Halves(truth, inner), batch_size=None)
    optimizer = sgd(model)
    watch(model, {"train": train, "inner": inner})
    for _ in range(2):
        truth.train_on(model, optimizer, train)


@timed
def a_second_loader_goes_on_from_epoch_to_epoch(watch: Watch) -> None:
    """Semi-supervised learning: an epoch is a pass over the labelled rows; the unlabelled ones come from an iterator that stays."""
    truth, (model, optimizer, labelled, unlabelled) = watch.slow_training(
        {"labelled": 3, "unlabelled": 9}, owners=False, rated=dict.fromkeys(("labelled", "unlabelled"), TRAIN)
    )
    _epochs_of_both(truth, (model, optimizer), labelled, iter(unlabelled))


@timed
def a_second_loader_begins_anew_in_a_generator(watch: Watch) -> None:
    """The same, where a generator goes round and round the unlabelled rows: it drops an iterator before it makes the next."""
    truth, (model, optimizer, labelled, unlabelled) = watch.slow_training(
        {"labelled": 3, "unlabelled": 2}, owners=False, rated=dict.fromkeys(("labelled", "unlabelled"), TRAIN)
    )

    def endless() -> Iterator[Any]:
        while True:
            yield from unlabelled

    _epochs_of_both(truth, (model, optimizer), labelled, endless())


def _epochs_of_both(truth: Truth, trained: tuple[Any, Any], labelled: Any, others: Iterator[Any]) -> None:
    model, optimizer = trained
    truth.at(TRAIN)
    for _ in range(3):
        for batch in labelled:
            truth.batch("labelled")
            other = next(others)
            truth.batch("unlabelled")
            truth.forward()
            truth.backward(truth.loss(model, batch) + loss_of(model, other))
            truth.update_that_ends_a_step(optimizer)
        truth.sleep(0.05, "outside")
