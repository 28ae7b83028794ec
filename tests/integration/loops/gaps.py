"""Loops that do something else between their batches: save, log, sleep."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch.utils.data import default_collate

import otel_train
from tests.integration.loops.kinds import Endless
from tests.integration.loops.truth import (
    EVAL,
    TRAIN,
    TRAIN_ALONE,
    TRAIN_AND_VAL,
    Slow,
    Truth,
    Watch,
    loader,
    loss_of,
    sgd,
    slow_loader,
    timed,
)

SAVING_S = 0.12
"""Long enough to be distinguished from what a busy machine adds to a step."""


class SlowCollate(NamedTuple):
    """Collates in a stated time, in whichever process."""

    takes_s: float

    def __call__(self, rows: list[Any]) -> Any:
        time.sleep(self.takes_s)
        return default_collate(rows)


@timed
def saving_between_epochs(watch: Watch) -> None:
    """The loop saves after every epoch, without saying so: that time is of no step and of no phase."""
    truth, (model, optimizer, train) = watch.slow_training({"train": 5}, rated=TRAIN_ALONE)
    for _ in range(2):
        truth.train_on(model, optimizer, train)
        truth.sleep(SAVING_S, "outside")


@timed
def setting_up_before_the_loop(watch: Watch) -> None:
    """Time before the first batch is initialisation."""
    truth, (model, optimizer, train) = watch.slow_training({"train": 5}, rated=TRAIN_ALONE)
    truth.sleep(SAVING_S, "init")
    truth.train_on(model, optimizer, train)


@timed
def exporting_after_the_loop(watch: Watch) -> None:
    """The program goes on after its last epoch, with the session open."""
    truth, (model, optimizer, train) = watch.slow_training({"train": 5}, rated=TRAIN_ALONE)
    truth.train_on(model, optimizer, train)
    truth.sleep(2 * SAVING_S, "outside")


@timed
def saving_after_a_break(watch: Watch) -> None:
    """A pass that is broken off is over when its iterator is disposed of, not when the next one begins."""
    truth, (model, optimizer, train) = watch.slow_training({"train": 8}, rated=TRAIN_ALONE)
    for _ in range(2):
        truth.at(TRAIN, "train")
        for i, batch in enumerate(train):
            truth.batch("train")
            truth.one_step(model, optimizer, batch)
            if i == 3:
                break
        truth.sleep(SAVING_S, "outside")


@timed
def leaving_a_pass_while_its_worker_builds(watch: Watch) -> None:
    """A break waits until the worker has built its batch and exits: that wait is for the loader; the saving after it is not."""
    truth = watch.truth(partial=None)  # the wait at the end is in no step
    model = Slow(truth)
    train = loader(8, num_workers=1, prefetch_factor=1, collate_fn=SlowCollate(0.1 * truth.sleeps))
    optimizer = sgd(model)
    watch(model, {"train": train})
    truth.at(TRAIN, "train")
    for _ in range(2):
        with truth.spent("data_wait", "data", "train"):
            batches = iter(train)
        for _ in range(3):
            with truth.spent("data_wait", "data", "train"):
                batch = next(batches)
            truth.batch("train")
            truth.one_step(model, optimizer, batch)
        with truth.spent("data_wait", "data", "train"):
            del batches
        truth.sleep(SAVING_S, "outside")


@timed
def saving_after_an_islice(watch: Watch) -> None:
    """``islice`` stops without asking for the end: the pass is over all the same."""
    truth, (model, optimizer, train) = watch.slow_training({"train": 8}, rated=TRAIN_ALONE)
    for _ in range(2):
        truth.train_on(model, optimizer, itertools.islice(train, 4))
        truth.sleep(SAVING_S, "outside")


@timed
def saving_after_a_break_out_of_a_generator(watch: Watch) -> None:
    """A generator stands between loop and loader, as progress bars and prefetchers do: a break ends both."""
    truth, (model, optimizer, train) = watch.slow_training({"train": 8}, rated=TRAIN_ALONE)

    def shown(batches: Iterable[Any]) -> Iterator[Any]:
        yield from batches

    for _ in range(2):
        truth.at(TRAIN, "train")
        for i, batch in enumerate(shown(train)):
            truth.batch("train")
            truth.one_step(model, optimizer, batch)
            if i == 3:
                break
        truth.sleep(SAVING_S, "outside")


@timed
def saving_after_passes_of_one_iterator(watch: Watch) -> None:
    """Loaders keep their only iterator, as those of Ultralytics and timm: a pass ends with the loop over them, also by a break."""
    truth = watch.truth(rated=TRAIN_AND_VAL)
    model, loaders = Slow(truth), {}
    for name, batches in (("train", 5), ("val", 2)):
        loaders[name] = Endless(batches, collate_fn=SlowBatches(truth, name))
    optimizer = sgd(model)
    watch(model, loaders)
    for _ in range(2):
        truth.train_on(model, optimizer, loaders["train"])
        truth.sleep(SAVING_S, "outside")
        truth.evaluate_on(model, loaders["val"])
        truth.sleep(SAVING_S, "outside")
    truth.at(TRAIN, "train")
    for i, batch in enumerate(loaders["train"]):
        truth.batch("train")
        truth.one_step(model, optimizer, batch)
        if i == 1:
            break
    truth.sleep(SAVING_S, "outside")


class SlowBatches(NamedTuple):
    """Collates in the time that a loader takes for a batch."""

    truth: Truth
    name: str

    def __call__(self, rows: list[Any]) -> Any:
        self.truth.work(0.01, "data", self.name)
        return default_collate(rows)


@timed
def waiting_after_the_loader_failed(watch: Watch) -> None:
    """A batch cannot be read: the pass ends there, the program waits, and begins a new one."""
    truth = watch.truth()
    model, faults = Slow(truth), [2]

    def collate(rows: list[Any]) -> Any:
        truth.work(0.01, "data", "train")
        if faults and truth.batches["train"] == faults[0]:
            faults.pop()
            raise OSError("the share is gone")
        return default_collate(rows)

    train = loader(5, collate_fn=collate)
    optimizer = sgd(model)
    watch(model, {"train": train})
    with contextlib.suppress(OSError):
        truth.train_on(model, optimizer, train)
    truth.sleep(SAVING_S, "outside")
    truth.train_on(model, optimizer, train)


@timed
def a_pause_after_the_first_validation(watch: Watch) -> None:
    """Two batches are evaluated to see that it works; the pause before training is of no phase."""
    truth, (model, optimizer, train, val) = watch.slow_training(
        {"train": 4, "val": (4, 0.02)}, rated=TRAIN_AND_VAL
    )
    truth.sleep(0.08, "init")
    model.eval()
    truth.evaluate_on(model, itertools.islice(val, 2))
    model.train()
    truth.sleep(SAVING_S, "outside")
    truth.train_on(model, optimizer, train)


@timed
def waiting_after_an_exception(watch: Watch) -> None:
    """A step fails in the middle of a pass; the program catches it outside, waits, and begins a new pass."""
    truth, (model, optimizer, train) = watch.slow_training({"train": 6})

    def one_pass(*, last: int) -> None:
        truth.at(TRAIN, "train")
        for i, batch in enumerate(train):
            truth.batch("train")
            truth.one_step(model, optimizer, batch)
            if i == last:
                raise RuntimeError("the link is down")

    for last in (2, 3):
        with contextlib.suppress(RuntimeError):
            one_pass(last=last)
        truth.sleep(SAVING_S, "outside")
    truth.train_on(model, optimizer, train)


@timed
def waiting_between_training_and_evaluation(watch: Watch) -> None:
    """Neither phase is charged for what lies between them."""
    truth, (model, optimizer, train, val) = watch.slow_training({"train": 4, "val": 3}, rated=TRAIN_AND_VAL)
    for _ in range(2):
        model.train()
        truth.train_on(model, optimizer, train)
        truth.sleep(SAVING_S, "outside")
        model.eval()
        truth.evaluate_on(model, val)
        truth.sleep(SAVING_S, "outside")


@timed
def evaluation_that_does_more_than_forwards(watch: Watch) -> None:
    """In a batch of evaluation all time is evaluation, before its forward and after; after the pass none is."""
    truth, (model, optimizer, train, val) = watch.slow_training({"train": 4, "val": 3}, rated=TRAIN_AND_VAL)
    for _ in range(2):
        model.train()
        truth.train_on(model, optimizer, train)
        model.eval()
        truth.at(EVAL, "val")
        with torch.no_grad():
            for batch in val:
                truth.batch("val")
                truth.work(0.02)
                truth.forward(EVAL)
                loss_of(model, batch)
                truth.work(0.02)
                truth.step(EVAL)
        truth.sleep(SAVING_S, "outside")


@timed
def evaluation_without_a_loader_between_epochs(watch: Watch) -> None:
    """It lasts from its first forward to the end of its last; what lies before and after is of no phase."""
    truth, (model, optimizer, train) = watch.slow_training({"train": 4}, rated=TRAIN_ALONE)
    rows = torch.randn(4, 4)
    for _ in range(2):
        model.train()
        truth.train_on(model, optimizer, train)
        truth.sleep(SAVING_S, "outside")
        model.eval()
        truth.at(EVAL)
        with torch.no_grad():
            for last in (False, False, True):
                truth.forward(EVAL)
                model(rows)
                truth.step(EVAL)
                if not last:
                    truth.work(0.04)
        truth.sleep(SAVING_S, "outside")


@timed
def logging_after_the_update(watch: Watch) -> None:
    """What the loop does between its update and its next ask is part of the step."""
    truth, (model, optimizer, train) = watch.slow_training({"train": 8}, rated=TRAIN_ALONE)
    truth.at(TRAIN, "train")
    for i, batch in enumerate(train):
        truth.batch("train")
        truth.one_step(model, optimizer, batch)
        if i % 3 == 1:
            truth.work(0.05)


@timed
def augmenting_before_the_forward(watch: Watch) -> None:
    """What the loop does between its ask and its forward is part of the step, as is a stage of its own there."""
    truth, (model, optimizer, train) = watch.slow_training({"train": 6}, rated=TRAIN_ALONE)
    truth.at(TRAIN, "train")
    for batch in train:
        truth.batch("train")
        truth.work(0.02)
        truth.stages["augment"] += 1
        with otel_train.stage("augment"):
            truth.work(0.02, "augment")
        truth.one_step(model, optimizer, batch)


@timed
def checkpoints_that_take_their_time(watch: Watch) -> None:
    """A checkpoint is an activity of its own, between epochs and inside one; what surrounds it is not."""
    truth, (model, optimizer, train) = watch.slow_training({"train": 4}, rated=TRAIN_ALONE)
    for _ in range(2):
        truth.at(TRAIN, "train")
        for i, batch in enumerate(train):
            truth.batch("train")
            truth.one_step(model, optimizer, batch)
            if i == 1:
                truth.checkpoints += 1
                with otel_train.checkpoint():
                    truth.sleep(0.06, "checkpoint")
        truth.sleep(0.06, "outside")
        truth.checkpoints += 1
        with otel_train.checkpoint():
            truth.sleep(0.06, "checkpoint")
        truth.sleep(0.06, "outside")


@timed
def a_loader_that_yields_nothing(watch: Watch) -> None:
    """Its pass is over at once, and the time after it is of no phase."""
    truth = watch.truth(rated={"train": TRAIN})
    model, train, empty = Slow(truth), slow_loader(truth, "train", 4), loader(0)
    optimizer = sgd(model)
    watch(model, {"empty": empty, "train": train})
    truth.train_on(model, optimizer, empty, name="empty")
    truth.sleep(SAVING_S, "outside")
    truth.train_on(model, optimizer, train)
    truth.train_on(model, optimizer, empty, name="empty")
    truth.sleep(SAVING_S, "outside")


@timed
def a_remainder_and_then_a_pause(watch: Watch) -> None:
    """The last batches of an epoch come to no update; the pause after the epoch is not theirs."""
    truth, (model, optimizer, train) = watch.slow_training({"train": 5}, partial=None, rated=TRAIN_ALONE)
    for _ in range(2):
        truth.at(TRAIN, "train")
        for i, batch in enumerate(train):
            truth.batch("train")
            truth.backward(truth.loss(model, batch))
            if i % 2 == 1:
                truth.update_that_ends_a_step(optimizer)
        truth.sleep(SAVING_S, "outside")


@timed
def stopping_early_in_mid_epoch(watch: Watch) -> None:
    """Validation inside the epoch says that it is enough: both passes end, and the best weights are restored."""
    truth, (model, optimizer, train, val) = watch.slow_training({"train": 9, "val": 2}, rated={"val": EVAL})
    truth.at(TRAIN, "train")
    for i, batch in enumerate(train):
        truth.batch("train")
        truth.one_step(model, optimizer, batch)
        if i % 3 == 2:
            model.eval()
            truth.evaluate_on(model, val)
            model.train()
            truth.at(TRAIN, "train")
        if i == 5:
            break
    truth.sleep(2 * SAVING_S, "outside")


@timed
def the_same_loader_asked_by_next(watch: Watch) -> None:
    """An endless loop makes a new iterator when the old one has run out; the data are waited for, nothing else."""
    truth, (model, optimizer, train) = watch.slow_training({"train": 3})
    truth.at(TRAIN, "train")
    batches = iter(train)
    for _ in range(8):
        batch = next(batches, None)
        if batch is None:
            batches = iter(train)
            batch = next(batches)
        truth.batch("train")
        truth.one_step(model, optimizer, batch)


@timed
def a_new_iterator_for_every_batch(watch: Watch) -> None:
    """`next(iter(loader))` in every step: from the second on what follows the update is the step's, and after the last it is not."""
    truth, (model, optimizer, train) = watch.slow_training({"train": 3}, rated={"train": TRAIN})
    truth.at(TRAIN, "train")
    for i in range(8):
        batch = next(iter(train))
        truth.batch("train")
        truth.one_step(model, optimizer, batch)
        if i in {0, 7}:
            truth.sleep(0.02, "outside")
        else:
            truth.work(0.02)


@timed
def a_look_at_the_first_batch(watch: Watch) -> None:
    """The model is tried on one batch of the training loader, without gradients: that batch is evaluation."""
    truth, (model, optimizer, train) = watch.slow_training({"train": 5}, owners=False)
    truth.at(EVAL, "train")
    batch = next(iter(train))
    truth.batch("train")
    with torch.no_grad():
        truth.forward(EVAL)
        model(batch[0])
    truth.step(EVAL)
    truth.sleep(SAVING_S, "outside")
    truth.train_on(model, optimizer, train)


@timed
def a_look_with_gradients_on(watch: Watch) -> None:
    """`print(model(batch).shape)` before the loop, in training mode and with gradients on: that batch trains nothing."""
    truth, (model, optimizer, train) = watch.slow_training({"train": 5}, owners=False)
    truth.at(EVAL, "train")
    for batch in train:
        truth.batch("train")
        truth.forward(EVAL)
        model(batch[0])
        break
    truth.step(EVAL)
    truth.sleep(SAVING_S, "outside")
    truth.train_on(model, optimizer, train)


@timed
def a_curriculum_of_loaders(watch: Watch) -> None:
    """Every epoch has a loader of its own, with larger batches: one place in the program, one name."""
    truth, (model, optimizer) = watch.slow_training({}, names=1)
    for size in (2, 4, 8):
        stage = slow_loader(truth, "?", 3, size=size)
        truth.train_on(model, optimizer, stage, name="?")
        truth.sleep(SAVING_S, "outside")


@timed
def folds_with_unnamed_loaders(watch: Watch) -> None:
    """Cross-validation makes two loaders per fold: two places in the program, two names."""
    truth, (model, optimizer) = watch.slow_training({}, names=2)
    for _ in range(3):
        fold_train = slow_loader(truth, "?", 3)
        fold_val = slow_loader(truth, "?", 2)
        model.train()
        truth.train_on(model, optimizer, fold_train, name="?")
        model.eval()
        truth.evaluate_on(model, fold_val, "?")
        truth.sleep(0.08, "outside")


@timed
def a_session_that_only_waits(watch: Watch) -> None:
    """Nothing was asked for and nothing ran: all of it is initialisation."""
    truth = watch.truth(source=None)
    watch(Slow(truth), {"train": slow_loader(truth, "train", 2)})
    truth.sleep(0.2, "init")


@timed
def evaluation_alone_with_pauses(watch: Watch) -> None:
    """No training at all: batches are evaluation, pauses between passes are not."""
    truth = watch.truth(source=None, rated={"val_easy": EVAL, "val_hard": EVAL})
    model, easy, hard = (
        Slow(truth),
        slow_loader(truth, "val_easy", 4, 0.02),
        slow_loader(truth, "val_hard", 3, 0.02),
    )
    watch(model, {"val_easy": easy, "val_hard": hard})
    truth.sleep(0.08, "init")
    model.eval()
    truth.evaluate_on(model, easy, "val_easy")
    truth.sleep(SAVING_S, "outside")
    truth.evaluate_on(model, hard, "val_hard")
    truth.sleep(SAVING_S, "outside")


@timed
def passes_without_forwards(watch: Watch) -> None:
    """No model runs. By name or earlier use it is evaluation, as of a model that cannot be seen; a pass over another is outside."""
    truth, (model, optimizer, train, val, held, corpus, sample) = watch.slow_training(
        {"train": 4, "val": (3, 0.03), "held": 3, "corpus": (10, 0.02), "sample": (1, 0.05)}
    )
    truth.train_on(model, optimizer, train)
    truth.evaluate_on(model, held, "held")
    for phase, name, batches in (
        (EVAL, "val", val), (EVAL, "held", held), ("outside", "corpus", corpus), ("outside", "sample", sample),
    ):  # fmt: skip
        truth.sleep(SAVING_S, "outside")
        truth.at(phase, name)
        for _ in batches:
            truth.batch(name)
            truth.work(0.02, "other" if phase == EVAL else "")
            if phase == EVAL:
                truth.step(EVAL)
    truth.train_on(model, optimizer, train)
    truth.at("outside", "train")
    for _ in train:
        truth.batch("train")
    truth.sleep(SAVING_S, "outside")
