"""Loops that evaluate in the middle of a pass, of a group of batches or of a step."""

from __future__ import annotations

import torch

from tests.integration.loops.truth import (
    EVAL,
    TRAIN,
    Slow,
    Truth,
    Watch,
    evaluate_on,
    learn,
    loss_of,
    sgd,
    slow_loader,
    timed,
    train_on,
)


@timed
def the_rest_of_an_epoch_after_an_evaluation(watch: Watch) -> Truth:
    """An iterator is left in mid pass for an evaluation and gone on with afterwards; what lies between is of no phase."""
    truth = watch.truth(rated={"train": TRAIN, "val": EVAL})
    model, train, val = Slow(truth), slow_loader(truth, "train", 8), slow_loader(truth, "val", 3, 0.02)
    optimizer = sgd(model)
    watch(model, {"train": train, "val": val})
    batches = iter(train)
    for pauses in range(2):
        truth.at(TRAIN, "train")
        for _ in range(4):
            batch = next(batches)
            truth.batch("train")
            learn(truth, model, optimizer, batch)
            truth.step()
        truth.sleep(0.05 * (1 + pauses), "outside")
        truth.at(EVAL, "val")
        with torch.no_grad():
            for batch in val:
                truth.batch("val")
                truth.forward(EVAL)
                loss_of(model, batch)
                truth.step(EVAL)
        truth.sleep(0.05, "outside")
    return truth


@timed
def validation_between_forward_and_backward(watch: Watch) -> Truth:
    """A second loader is evaluated when the loss is there and its backward is not: the step goes on after it."""
    truth = watch.truth(rated={"val": EVAL})
    model, train, val = Slow(truth), slow_loader(truth, "train", 6), slow_loader(truth, "val", 2, 0.02)
    optimizer = sgd(model)
    watch(model, {"train": train, "val": val})
    truth.at(TRAIN, "train")
    for i, batch in enumerate(train):
        truth.batch("train")
        truth.forward()
        loss = loss_of(model, batch)
        if i % 3 == 1:
            evaluate_on(truth, model, val)
            truth.at(TRAIN, "train")
        optimizer.zero_grad()
        truth.backward()
        loss.backward()
        optimizer.step()
        truth.update()
        truth.step()
    return truth


@timed
def features_of_the_training_loader_before_every_epoch(watch: Watch) -> Truth:
    """Deep clustering: the training loader is read without gradients, clusters are found, then it is trained on."""
    truth = watch.truth(owners=False)
    model, train = Slow(truth), slow_loader(truth, "train", 5)
    optimizer = sgd(model)
    watch(model, {"train": train})
    for _ in range(2):
        evaluate_on(truth, model, train, "train")
        truth.sleep(0.06, "outside")
        train_on(truth, model, optimizer, train)
    return truth


@timed
def a_batch_of_validation_every_few_steps(watch: Watch) -> Truth:
    """The validation loader is asked for one batch at a time, by an iterator that is made anew when it has run out."""
    truth = watch.truth(owners=False)
    model, train, val = Slow(truth), slow_loader(truth, "train", 9), slow_loader(truth, "val", 2, 0.02)
    optimizer = sgd(model)
    watch(model, {"train": train, "val": val})
    batches = iter(val)
    truth.at(TRAIN)
    for i, batch in enumerate(train):
        truth.batch("train")
        learn(truth, model, optimizer, batch)
        truth.step()
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
    return truth


@timed
def an_epoch_of_uneven_groups_with_an_evaluation_inside(watch: Watch) -> Truth:
    """Groups of four batches, the last one smaller; after the second batch of a group a second loader is evaluated."""
    truth = watch.truth(rated={"val": EVAL})
    model, train, val = Slow(truth), slow_loader(truth, "train", 10), slow_loader(truth, "val", 3, 0.02)
    optimizer = sgd(model)
    watch(model, {"train": train, "val": val})
    for _ in range(2):
        truth.at(TRAIN, "train")
        for i, batch in enumerate(train, 1):
            truth.batch("train")
            truth.forward()
            loss = loss_of(model, batch)
            truth.backward()
            loss.backward()
            if i % 4 == 0 or i == len(train):
                optimizer.step()
                optimizer.zero_grad()
                truth.update()
                truth.step()
            if i == 6:
                evaluate_on(truth, model, val)
                truth.at(TRAIN, "train")
        truth.sleep(0.05, "outside")
    return truth
