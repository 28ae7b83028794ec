"""Loops that call their model past the place where its calls can be seen: the parts that they call are."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F  # noqa: N812 - its usual name

import otel_train
from tests.integration.loops.truth import Net, Truth, Watch, loader, loop, loss_of, sgd


def forward_of_both_layers(truth: Truth) -> None:
    """The model's own call is not seen; each layer that is called is an occurrence of its forward."""
    truth.forward()
    truth.forward()


class Bypassing(Net):
    """A ``__call__`` that never reaches the usual one."""

    def __call__(self, x: Any) -> Any:
        return self.forward(x)


@loop
def a_call_that_is_bypassed(watch: Watch) -> None:
    """Own ``__call__``: its two layers are seen."""
    truth, (model, optimizer, train) = watch.training({"train": 10}, model=Bypassing())
    for _ in range(2):
        for batch in train:
            truth.batch("train")
            forward_of_both_layers(truth)
            truth.backward(loss_of(model, batch))
            truth.update_that_ends_a_step(optimizer)


@loop
def a_forward_that_is_called_directly(watch: Watch) -> None:
    """``model.forward(x)``: the two layers that it calls are seen."""
    truth, (model, optimizer, train) = watch.training({"train": 10})
    for _ in range(2):
        for batch in train:
            truth.batch("train")
            forward_of_both_layers(truth)
            truth.backward(loss_of(model.forward, batch))
            truth.update_that_ends_a_step(optimizer)


class Generative(Net):
    """Training calls a method of its own, as language models with a ``loss`` or diffusion models have it."""

    def loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(self.first(x))
        return F.cross_entropy(self.last(hidden), y)


@loop
def a_method_other_than_call(watch: Watch) -> None:
    """``model.loss(x, y)``: the two layers that it calls are seen, in the order in which it calls them."""
    truth, (model, optimizer, train) = watch.training({"train": 10}, model=Generative())
    for _ in range(2):
        for x, y in train:
            truth.batch("train")
            forward_of_both_layers(truth)
            loss = model.loss(x, y)
            truth.backward(loss)
            truth.update_that_ends_a_step(optimizer)


@loop
def a_method_other_than_call_with_a_user_stage(watch: Watch) -> None:
    """A user-defined stage around the method: its forward is inside that stage."""
    truth, (model, optimizer, train) = watch.training({"train": 5}, model=Generative())
    for x, y in train:
        truth.batch("train")
        forward_of_both_layers(truth)
        truth.stages["loss"] += 1
        with otel_train.stage("loss"):
            loss = model.loss(x, y)
        truth.backward(loss)
        truth.update_that_ends_a_step(optimizer)


@loop
def a_loader_that_is_not_the_one_iterated(watch: Watch) -> None:
    """A loader is given, and the loop takes its batches from elsewhere: waits for them are not seen, and that is said."""
    model, truth = Net(), watch.truth(unseen=("data",))
    optimizer = sgd(model)
    watch(model, {"train": loader(3)})
    for batch in [(torch.ones(4, 4), torch.tensor([0, 1, 0, 1]))] * 12:
        truth.one_step(model, optimizer, batch)
