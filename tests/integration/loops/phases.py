"""Loops that evaluate: when, with what, and how one can tell."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch.utils.data import DataLoader

import otel_train
from tests.integration.loops.truth import EVAL, Net, Watch, loader, loop, loss_of, sgd


@loop
def validation_after_every_epoch(watch: Watch) -> None:
    """As in every tutorial: ``eval()``, ``no_grad()``, a loader of its own."""
    truth, (model, optimizer, train, val) = watch.training({"train": 5, "val": 3})
    for _ in range(3):
        model.train()
        truth.train_on(model, optimizer, train)
        model.eval()
        truth.evaluate_on(model, val)


@loop
def validation_before_training(watch: Watch) -> None:
    """A sanity check of two batches first, broken off."""
    truth, (model, optimizer, train, val) = watch.training({"train": 5, "val": 3})
    model.eval()
    truth.evaluate_on(model, itertools.islice(val, 2))
    model.train()
    truth.train_on(model, optimizer, train)


@loop
def validation_in_mid_group(watch: Watch) -> None:
    """Evaluation suspends a step that has no update yet: four batches make a step, before or after it."""
    truth, (model, optimizer, train, val) = watch.training({"train": 12, "val": 3})
    for i, batch in enumerate(train):
        truth.batch("train")
        truth.backward(truth.loss(model, batch))
        if i % 4 == 3:
            truth.update_that_ends_a_step(optimizer)
        if i % 6 == 5:
            model.eval()
            truth.evaluate_on(model, val)
            model.train()


@loop
def validation_with_gradients_on(watch: Watch) -> None:
    """The program forgot ``no_grad()`` and ``eval()``: the loader's name says it."""
    truth, (model, optimizer, train, val) = watch.training({"train": 5, "val": 3})
    for _ in range(2):
        truth.train_on(model, optimizer, train)
        for batch in val:
            truth.batch("val")
            truth.forward(EVAL)
            loss_of(model, batch)
            truth.step(EVAL)


@loop
def training_on_a_loader_named_val(watch: Watch) -> None:
    """An update in the batch says more than the loader's name."""
    truth, (model, optimizer, val) = watch.training({"val": 5})
    truth.train_on(model, optimizer, val, name="val")


@loop
def testing_and_prediction(watch: Watch) -> None:
    """The phases a name can say, all four in a run."""
    model, truth = Net(), watch.truth()
    loaders = {"train": loader(4), "valid_b": loader(2), "test": loader(3), "predict": loader(1)}
    optimizer = sgd(model)
    watch(model, loaders)
    truth.train_on(model, optimizer, loaders["train"])
    model.eval()
    truth.evaluate_on(model, loaders["valid_b"], "valid_b")
    truth.evaluate_on(model, loaders["test"], "test", phase="test")
    truth.evaluate_on(model, loaders["predict"], "predict", phase="predict")


@loop
def attack_under_a_declared_phase(watch: Watch) -> None:
    """Evaluation that needs gradients: what the user declares comes before every sign of training."""
    model, train, attack, truth = Net(), loader(4), loader(3), watch.truth()
    optimizer = sgd(model)
    watch(
        model,
        [otel_train.Loader(train, name="train"), otel_train.Loader(attack, name="attack", phase="test")],
    )
    truth.train_on(model, optimizer, train)
    for x, y in attack:
        truth.batch("attack")
        x.requires_grad_()
        truth.forward("test")
        loss = loss_of(model, (x, y))
        truth.backward(phase="test")
        loss.backward()
        truth.step("test")


@loop
def two_loaders_in_one_evaluation(watch: Watch) -> None:
    """Each batch of each loader is a step outside phase train."""
    model, easy, hard, truth = Net(), loader(3), loader(2), watch.truth(source=None)
    watch(model, {"val_easy": easy, "val_hard": hard})
    model.eval()
    truth.evaluate_on(model, easy, "val_easy")
    truth.evaluate_on(model, hard, "val_hard")


@loop
def look_ahead_in_an_evaluation(watch: Watch) -> None:
    """The next batch is fetched before the present one is used; no name says what the loader is for.

    The first ask is followed by another and shows nothing: it is for what the batches after it are for.
    """
    truth, (model, optimizer, left, right) = watch.training({"left": 5, "right": 3})
    for epoch in range(2):
        model.train()
        truth.train_on(model, optimizer, left, name="left")
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


@loop
def hard_examples_mined_in_every_batch(watch: Watch) -> None:
    """A forward without gradients chooses the rows that the step trains on: it is the step's, although it looks like evaluation."""
    truth, (model, optimizer, train, val) = watch.training({"train": 6, "val": 2})
    for _ in range(2):
        for x, y in train:
            truth.batch("train")
            truth.forward()
            with torch.no_grad():
                hardest = torch.nn.functional.cross_entropy(model(x), y, reduction="none").topk(2).indices
            truth.one_step(model, optimizer, (x[hardest], y[hardest]))
        truth.evaluate_on(model, val)


@loop
def rollouts_over_a_loader_of_prompts(watch: Watch) -> None:
    """Generation without gradients over one loader, then two passes over what was stored, in a loader that is made for it."""
    truth, actor, critic, prompts = watch.truth(samples=None), Net(), Net(), loader(4)
    optimizers = sgd(actor), sgd(critic)
    watch({"actor": actor, "critic": critic}, {"prompts": prompts})
    stored: list[Any] = []
    for batch in prompts:
        truth.batch("prompts")
        with torch.no_grad():
            for _ in range(3):
                truth.forward(EVAL, "actor")
                loss_of(actor, batch)
            truth.forward(EVAL, "critic")
            loss_of(critic, batch)
        truth.step(EVAL)
        stored += zip(*batch, strict=True)
        if len(stored) < 8:
            continue
        for _ in range(2):
            for rows in DataLoader(stored, batch_size=4):
                truth.batch("?")
                for name, model, optimizer in zip(
                    ("actor", "critic"), (actor, critic), optimizers, strict=True
                ):
                    truth.forward(model=name)
                    truth.backward(loss_of(model, rows))
                    truth.update(optimizer)
                truth.step()
        stored.clear()
