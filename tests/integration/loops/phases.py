"""Loops that evaluate: when, with what, and how one can tell."""

from __future__ import annotations

import itertools

import torch

import otel_train
from tests.integration.loops.truth import (
    EVAL,
    Net,
    Truth,
    Watch,
    evaluate_on,
    loader,
    loop,
    loss_of,
    sgd,
    train_on,
    training,
)


@loop
def validation_after_every_epoch(watch: Watch) -> None:
    """As in every tutorial: ``eval()``, ``no_grad()``, a loader of its own."""
    truth, (model, optimizer, train, val) = training(watch, {"train": 5, "val": 3})
    for _ in range(3):
        model.train()
        train_on(truth, model, optimizer, train)
        model.eval()
        evaluate_on(truth, model, val)


@loop
def validation_before_training(watch: Watch) -> None:
    """A sanity check of two batches first, broken off."""
    truth, (model, optimizer, train, val) = training(watch, {"train": 5, "val": 3})
    model.eval()
    evaluate_on(truth, model, itertools.islice(val, 2))
    model.train()
    train_on(truth, model, optimizer, train)


@loop
def validation_in_mid_group(watch: Watch) -> None:
    """Evaluation suspends a step that has no update yet: four batches make a step, before or after it."""
    truth, (model, optimizer, train, val) = training(watch, {"train": 12, "val": 3})
    for i, batch in enumerate(train):
        truth.batch("train")
        truth.backward(truth.loss(model, batch))
        if i % 4 == 3:
            truth.update_that_ends_a_step(optimizer)
        if i % 6 == 5:
            model.eval()
            evaluate_on(truth, model, val)
            model.train()


@loop
def validation_with_gradients_on(watch: Watch) -> None:
    """The program forgot ``no_grad()`` and ``eval()``: the loader's name says it."""
    truth, (model, optimizer, train, val) = training(watch, {"train": 5, "val": 3})
    for _ in range(2):
        train_on(truth, model, optimizer, train)
        for batch in val:
            truth.batch("val")
            truth.forward(EVAL)
            loss_of(model, batch)
            truth.step(EVAL)


@loop
def training_on_a_loader_named_val(watch: Watch) -> None:
    """An update in the batch says more than the loader's name."""
    truth, (model, optimizer, val) = training(watch, {"val": 5})
    train_on(truth, model, optimizer, val, name="val")


@loop
def testing_and_prediction(watch: Watch) -> Truth:
    """The phases a name can say, all four in a run."""
    model, truth = Net(), Truth()
    loaders = {"train": loader(4), "valid_b": loader(2), "test": loader(3), "predict": loader(1)}
    optimizer = sgd(model)
    watch(model, loaders)
    train_on(truth, model, optimizer, loaders["train"])
    model.eval()
    evaluate_on(truth, model, loaders["valid_b"], "valid_b")
    evaluate_on(truth, model, loaders["test"], "test", phase="test")
    evaluate_on(truth, model, loaders["predict"], "predict", phase="predict")
    return truth


@loop
def attack_under_a_declared_phase(watch: Watch) -> Truth:
    """Evaluation that needs gradients: what the user declares comes before every sign of training."""
    model, train, attack, truth = Net(), loader(4), loader(3), Truth()
    optimizer = sgd(model)
    watch(
        model,
        [otel_train.Loader(train, name="train"), otel_train.Loader(attack, name="attack", phase="test")],
    )
    train_on(truth, model, optimizer, train)
    for x, y in attack:
        truth.batch("attack")
        x.requires_grad_()
        truth.forward("test")
        loss = loss_of(model, (x, y))
        truth.backward(phase="test")
        loss.backward()
        truth.step("test")
    return truth


@loop
def two_loaders_in_one_evaluation(watch: Watch) -> Truth:
    """Each batch of each loader is a step outside phase train."""
    model, easy, hard, truth = Net(), loader(3), loader(2), Truth(source=None)
    watch(model, {"val_easy": easy, "val_hard": hard})
    model.eval()
    evaluate_on(truth, model, easy, "val_easy")
    evaluate_on(truth, model, hard, "val_hard")
    return truth


@loop
def look_ahead_in_an_evaluation(watch: Watch) -> None:
    """The next batch is fetched before the present one is used; no name says what the loader is for.

    The first ask is followed by another and shows nothing: it is for what the batches after it are for.
    """
    truth, (model, optimizer, left, right) = training(watch, {"left": 5, "right": 3})
    for epoch in range(2):
        model.train()
        train_on(truth, model, optimizer, left, name="left")
        if epoch == 1:
            break
        model.eval()
        with torch.no_grad():
            batches = iter(right)
            ahead = next(batches, None)
            while ahead is not None:
                batch, ahead = ahead, next(batches, None)
                truth.batch("right")
                truth.forward(EVAL)
                loss_of(model, batch)
                truth.step(EVAL)
