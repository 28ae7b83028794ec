"""Loops that evaluate in the middle of a pass, of a group of batches or of a step."""

from __future__ import annotations

import torch

from tests.integration.loops.truth import EVAL, TRAIN, TRAIN_AND_VAL, Watch, loss_of, sgd, timed


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
