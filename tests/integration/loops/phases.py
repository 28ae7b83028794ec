"""Loops that evaluate: when, with what, and how one can tell."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import torch

import otel_train
from tests.integration.loops.truth import EVAL, Net, Truth, Watch, learn, loader, loop, loss_of, sgd

if TYPE_CHECKING:
    from torch.utils.data import DataLoader


def evaluate(
    truth: Truth, model: torch.nn.Module, batches: DataLoader[Any], name: str, *, phase: str = EVAL
) -> None:
    """One pass without gradients."""
    with torch.no_grad():
        for batch in batches:
            truth.batch(name)
            truth.forward(phase)
            loss_of(model, batch)
            truth.step(phase)


@loop
def validation_after_every_epoch(watch: Watch) -> Truth:
    """As in every tutorial: ``eval()``, ``no_grad()``, a loader of its own."""
    model, train, val, truth = Net(), loader(5), loader(3), Truth()
    optimizer = sgd(model)
    watch(model, {"train": train, "val": val})
    for _ in range(3):
        model.train()
        for batch in train:
            truth.batch("train")
            learn(truth, model, optimizer, batch)
            truth.step()
        model.eval()
        evaluate(truth, model, val, "val")
    return truth


@loop
def validation_before_training(watch: Watch) -> Truth:
    """A sanity check of two batches first, broken off."""
    model, train, val, truth = Net(), loader(5), loader(3), Truth()
    optimizer = sgd(model)
    watch(model, {"train": train, "val": val})
    model.eval()
    with torch.no_grad():
        for batch in itertools.islice(val, 2):
            truth.batch("val")
            truth.forward(EVAL)
            loss_of(model, batch)
            truth.step(EVAL)
    model.train()
    for batch in train:
        truth.batch("train")
        learn(truth, model, optimizer, batch)
        truth.step()
    return truth


@loop
def validation_in_mid_group(watch: Watch) -> Truth:
    """Evaluation suspends a step that has no update yet: four batches make a step, before or after it."""
    model, train, val, truth = Net(), loader(12), loader(3), Truth()
    optimizer = sgd(model)
    watch(model, {"train": train, "val": val})
    for i, batch in enumerate(train):
        truth.batch("train")
        truth.forward()
        loss = loss_of(model, batch)
        truth.backward()
        loss.backward()
        if i % 4 == 3:
            optimizer.step()
            optimizer.zero_grad()
            truth.update()
            truth.step()
        if i % 6 == 5:
            model.eval()
            evaluate(truth, model, val, "val")
            model.train()
    return truth


@loop
def validation_between_steps(watch: Watch) -> Truth:
    """Every few updates, inside the batch loop: it closes the step that has its update."""
    model, train, val, truth = Net(), loader(9), loader(2), Truth()
    optimizer = sgd(model)
    watch(model, {"train": train, "val": val})
    for i, batch in enumerate(train):
        truth.batch("train")
        learn(truth, model, optimizer, batch)
        truth.step()
        if i % 3 == 2:
            evaluate(truth, model, val, "val")
    return truth


@loop
def validation_in_training_mode(watch: Watch) -> Truth:
    """The program forgot ``eval()``, and the loader's name says nothing: gradients are off."""
    model, left, right, truth = Net(), loader(5), loader(3), Truth()
    optimizer = sgd(model)
    watch(model, {"left": left, "right": right})
    for _ in range(2):
        for batch in left:
            truth.batch("left")
            learn(truth, model, optimizer, batch)
            truth.step()
        evaluate(truth, model, right, "right")
    return truth


@loop
def validation_with_gradients_on(watch: Watch) -> Truth:
    """The program forgot ``no_grad()`` and ``eval()``: the loader's name says it."""
    model, train, val, truth = Net(), loader(5), loader(3), Truth()
    optimizer = sgd(model)
    watch(model, {"train": train, "val": val})
    for _ in range(2):
        for batch in train:
            truth.batch("train")
            learn(truth, model, optimizer, batch)
            truth.step()
        for batch in val:
            truth.batch("val")
            truth.forward(EVAL)
            loss_of(model, batch)
            truth.step(EVAL)
    return truth


@loop
def validation_known_by_its_mode_alone(watch: Watch) -> Truth:
    """Gradients on, no telling name; the module that ran was evaluating."""
    model, left, right, truth = Net(), loader(5), loader(3), Truth()
    optimizer = sgd(model)
    watch(model, {"left": left, "right": right})
    for _ in range(2):
        model.train()
        for batch in left:
            truth.batch("left")
            learn(truth, model, optimizer, batch)
            truth.step()
        model.eval()
        for batch in right:
            truth.batch("right")
            truth.forward(EVAL)
            loss_of(model, batch)
            truth.step(EVAL)
    return truth


@loop
def evaluation_on_the_training_loader(watch: Watch) -> Truth:
    """Training accuracy, under ``no_grad``: its batches are no training steps."""
    model, train, truth = Net(), loader(5), Truth()
    optimizer = sgd(model)
    watch(model, {"train": train})
    for _ in range(2):
        for batch in train:
            truth.batch("train")
            learn(truth, model, optimizer, batch)
            truth.step()
        evaluate(truth, model, train, "train")
    return truth


@loop
def training_on_a_loader_named_val(watch: Watch) -> Truth:
    """An update in the batch says more than the loader's name."""
    model, val, truth = Net(), loader(5), Truth()
    optimizer = sgd(model)
    watch(model, {"val": val})
    for batch in val:
        truth.batch("val")
        learn(truth, model, optimizer, batch)
        truth.step()
    return truth


@loop
def testing_and_prediction(watch: Watch) -> Truth:
    """The phases a name can say, all four in a run."""
    model, truth = Net(), Truth()
    loaders = {"train": loader(4), "valid_b": loader(2), "test": loader(3), "predict": loader(1)}
    optimizer = sgd(model)
    watch(model, loaders)
    for batch in loaders["train"]:
        truth.batch("train")
        learn(truth, model, optimizer, batch)
        truth.step()
    model.eval()
    evaluate(truth, model, loaders["valid_b"], "valid_b")
    evaluate(truth, model, loaders["test"], "test", phase="test")
    evaluate(truth, model, loaders["predict"], "predict", phase="predict")
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
    for batch in train:
        truth.batch("train")
        learn(truth, model, optimizer, batch)
        truth.step()
    for x, y in attack:
        truth.batch("attack")
        x.requires_grad_()
        truth.forward("test")
        loss = loss_of(model, (x, y))
        truth.backward("test")
        loss.backward()
        truth.step("test")
    return truth


@loop
def a_teacher_without_gradients(watch: Watch) -> Truth:
    """Distillation: the teacher's forward is part of the training step."""
    student, teacher, train, truth = Net(), Net(), loader(5), Truth()
    optimizer = sgd(student)
    watch({"student": student, "teacher": teacher}, {"train": train})
    teacher.eval()
    for x, _ in train:
        truth.batch("train")
        with torch.no_grad():
            truth.forward(model="teacher")
            wanted = teacher(x)
        truth.forward(model="student")
        loss = (student(x) - wanted).square().mean()
        optimizer.zero_grad()
        truth.backward()
        loss.backward()
        optimizer.step()
        truth.update()
        truth.step()
    return truth


@loop
def two_loaders_in_one_evaluation(watch: Watch) -> Truth:
    """Each batch of each loader is a step outside phase train."""
    model, easy, hard, truth = Net(), loader(3), loader(2), Truth(source=None)
    watch(model, {"val_easy": easy, "val_hard": hard})
    model.eval()
    evaluate(truth, model, easy, "val_easy")
    evaluate(truth, model, hard, "val_hard")
    return truth


@loop
def look_ahead_in_an_evaluation(watch: Watch) -> Truth:
    """The next batch is fetched before the present one is used; no name says what the loader is for.

    The first ask is followed by another and shows nothing: it is for what the batches after it are for.
    """
    model, left, right, truth = Net(), loader(5), loader(3), Truth()
    optimizer = sgd(model)
    watch(model, {"left": left, "right": right})
    for epoch in range(2):
        model.train()
        for batch in left:
            truth.batch("left")
            learn(truth, model, optimizer, batch)
            truth.step()
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
    return truth
