"""Loops by what their model is, and how it is called."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.integration.loops.truth import (
    EVAL,
    TRAIN,
    TRAIN_ALONE,
    Net,
    Watch,
    loader,
    loop,
    loss_of,
    sgd,
    timed,
)


class Recomputed(Net):
    """Its first layer is computed again in backward."""

    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.requires_grad_()
        hidden = checkpoint(self.first, x, use_reentrant=self.reentrant)
        return self.last(torch.relu(hidden))


def train_model(watch: Watch, model: nn.Module, batches: int = 5) -> None:
    """An ordinary loop for ``model``."""
    truth, (model, optimizer, train) = watch.training({"train": batches}, model=model)
    truth.train_on(model, optimizer, train)


@loop
def activation_checkpointing(watch: Watch) -> None:
    """A part of the model is recomputed."""
    train_model(watch, Recomputed(reentrant=False))


@loop
def reentrant_activation_checkpointing(watch: Watch) -> None:
    """The old way runs a backward inside the backward."""
    train_model(watch, Recomputed(reentrant=True))


@loop
def the_whole_model_recomputed_reentrantly(watch: Watch) -> None:
    """The instrumented model is called again in backward: forward and backward there stay in the outer one."""
    truth, (model, optimizer, train) = watch.training({"train": 5})
    for x, y in train:
        truth.batch("train")
        x.requires_grad_()
        truth.forward()
        truth.backward(nn.functional.cross_entropy(checkpoint(model, x, use_reentrant=True), y))
        truth.update_that_ends_a_step(optimizer)


@timed
def a_slow_model_recomputed(watch: Watch) -> None:
    """The time of the second forward is backward's."""
    truth, (model, optimizer, train) = watch.slow_training({"train": 5}, takes_s=0.02, rated=TRAIN_ALONE)
    truth.at(TRAIN, "train")
    for x, y in train:
        truth.batch("train")
        truth.forward()
        model.stage = "forward"
        loss = nn.functional.cross_entropy(checkpoint(model, x, use_reentrant=False), y)
        truth.backward()
        model.stage = "backward"
        loss.backward()
        truth.update_that_ends_a_step(optimizer)


@loop
def siamese(watch: Watch) -> None:
    """One model, two calls, one backward."""
    truth, (model, optimizer, train) = watch.training({"train": 5})
    for x, _ in train:
        truth.batch("train")
        truth.forward()
        truth.forward()
        truth.backward((model(x) - model(x.flip(0))).square().mean())
        truth.update_that_ends_a_step(optimizer)


@loop
def unrolled_cell(watch: Watch) -> None:
    """A recurrent cell is the instrumented model, called once per time step."""
    truth, (cell, optimizer, train) = watch.training({"train": 4}, model=nn.GRUCell(4, 3))
    for x, _ in train:
        truth.batch("train")
        state = torch.zeros(len(x), 3)
        for _ in range(9):
            truth.forward()
            state = cell(x, state)
        truth.backward()
        state.square().mean().backward()
        truth.update_that_ends_a_step(optimizer)


@loop
def loss_modules_are_not_models(watch: Watch) -> None:
    """A loss with parameters of its own is called like a model, but was not given as one."""
    model, train, truth = Net(), loader(5), watch.truth()
    criterion, metric = nn.CrossEntropyLoss(), nn.PairwiseDistance()
    optimizer = sgd(model)
    watch(model, {"train": train})
    for x, y in train:
        truth.batch("train")
        truth.forward()
        out = model(x)
        loss = criterion(out, y) + metric(out, torch.zeros_like(out)).mean()
        truth.backward(loss)
        truth.update_that_ends_a_step(optimizer)


@loop
def scripted_model(watch: Watch) -> None:
    """TorchScript is deprecated, and still in use."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that it is going out of use: there are such models still
        model = torch.jit.script(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)))
    train_model(watch, model)


class Shouting(Net):
    """A class with a ``__call__`` of its own."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return super().__call__(*args, **kwargs) * 2


@loop
def a_call_of_its_own(watch: Watch) -> None:
    """``__call__`` is overridden and goes on to the usual one."""
    train_model(watch, Shouting())


@loop
def a_wrapped_model(watch: Watch) -> None:
    """The instrumented model is called by a wrapper that was not given, as DDP does."""
    inner, train, truth = Net(), loader(5), watch.truth()
    outer = nn.DataParallel(inner) if torch.cuda.device_count() == 0 else nn.Sequential(inner)
    optimizer = sgd(outer)
    watch(inner, {"train": train})
    truth.train_on(outer, optimizer, train)


@loop
def several_models_in_sequence(watch: Watch) -> None:
    """Encoder and decoder, given as a mapping."""
    encoder, decoder, train, truth = Net(4, 3), Net(3, 2), loader(5), watch.truth()
    optimizer = sgd(encoder, decoder)
    watch({"encoder": encoder, "decoder": decoder}, {"train": train})
    for batch in train:
        truth.batch("train")
        truth.forward(model="encoder")
        truth.forward(model="decoder")
        truth.backward(loss_of(lambda x: decoder(encoder(x)), batch))
        truth.update_that_ends_a_step(optimizer)


@loop
def compiled_in_place(watch: Watch) -> None:
    """``Module.compile`` takes the slot that we use, after us."""
    truth, (model, optimizer, train) = watch.training({"train": 5})
    model.compile(backend="eager")
    truth.train_on(model, optimizer, train)


@loop
def compiled_as_another_object(watch: Watch) -> None:
    """``torch.compile`` of an instrumented model gives a new callable, which the loop uses from then on."""
    truth, (model, optimizer, train) = watch.training({"train": 5})
    compiled = torch.compile(model, backend="eager")
    truth.train_on(compiled, optimizer, train)


class Features(nn.Module):
    """A backbone and a head, called one after the other by methods of their own, with the loss beside them."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8))
        self.head = nn.Linear(8, 2)
        self.criterion = nn.CrossEntropyLoss(torch.ones(2))

    def forward_features(self, x: torch.Tensor) -> torch.Tensor:
        return self.backbone(x)

    def forward_head(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.forward_head(self.forward_features(x))


@loop
def evaluated_part_by_part(watch: Watch) -> None:
    """Trained by its call; evaluated by ``forward_features`` and ``forward_head``, as image models are: two forwards."""
    truth, (model, optimizer, train, val) = watch.training({"train": 5, "val": 3}, model=Features())
    for _ in range(2):
        model.train()
        for x, y in train:
            truth.batch("train")
            truth.forward()
            truth.backward(model.criterion(model(x), y))
            truth.update_that_ends_a_step(optimizer)
        model.eval()
        with torch.no_grad():
            for x, _ in val:
                truth.batch("val")
                truth.forward(EVAL)
                features = model.forward_features(x)
                truth.forward(EVAL)
                model.forward_head(features)
                truth.step(EVAL)


@loop
def trained_part_by_part(watch: Watch) -> None:
    """The backbone runs frozen, without gradients, and the head is trained on what it gives."""
    model, train, truth = Features(), loader(5), watch.truth()
    optimizer = sgd(model.head)
    watch(model, {"train": train})
    for x, y in train:
        truth.batch("train")
        with torch.no_grad():
            truth.forward()
            features = model.backbone(x)
        truth.forward()
        truth.backward(model.criterion(model.head(features), y))
        truth.update_that_ends_a_step(optimizer)


@loop
def two_models_with_one_encoder(watch: Watch) -> None:
    """Actor and critic share it: where it is called by itself it is the actor's."""
    actor, critic, train, truth = Features(), Features(), loader(5), watch.truth()
    critic.backbone = actor.backbone
    optimizer = sgd(actor, critic.head)
    watch({"actor": actor, "critic": critic}, {"train": train})
    for x, y in train:
        truth.batch("train")
        truth.forward(model="actor")
        features = actor.backbone(x)
        truth.forward(model="actor")
        truth.forward(model="critic")
        loss = nn.functional.cross_entropy(actor.head(features) + critic.head(features), y)
        truth.forward(model="critic")
        loss = loss + critic(x).square().mean()
        truth.backward(loss)
        truth.update_that_ends_a_step(optimizer)
