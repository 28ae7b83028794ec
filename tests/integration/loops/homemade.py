"""Loops with a user-defined update, precision or model."""

from __future__ import annotations

import types
import warnings
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from tests.integration.loops.truth import Net, Watch, loader, loop, loss_of, sgd


class Lion:
    """An optimizer that knows nothing of ``torch.optim``."""

    def __init__(self, parameters: Iterable[torch.Tensor], lr: float = 0.01) -> None:
        self.parameters = list(parameters)
        self.lr = lr

    @torch.no_grad()
    def step(self) -> None:
        for p in self.parameters:
            p.sub_(self.lr * p.grad.sign())

    def zero_grad(self) -> None:
        for p in self.parameters:
            p.grad = None


class Lookahead:
    """Steps an optimizer of torch's inside; never was one itself."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner
        self.param_groups = inner.param_groups

    def step(self) -> None:
        self.inner.step()

    def zero_grad(self) -> None:
        self.inner.zero_grad()


@loop
def an_optimizer_outside_torch(watch: Watch) -> None:
    """No class of torch: its update is unseen, so backwards are the steps, and the run says so."""
    model, train = Net(), loader(6)
    truth = watch.truth(source="backward", partial=None, unseen=("optimizer",))
    optimizer: Any = Lion(model.parameters())
    watch(model, {"train": train})
    for _ in range(2):
        truth.train_on(model, optimizer, train)


@loop
def an_optimizer_around_another(watch: Watch) -> None:
    """A wrapper that is no Optimizer has no hooks; what it steps has them."""
    model, train, truth = Net(), loader(5), watch.truth()
    optimizer: Any = Lookahead(sgd(model))
    watch(model, {"train": train})
    truth.train_on(model, optimizer, train)


class Sharpness(torch.optim.Optimizer):
    """Sharpness-aware: up the gradient, a second pass there, back and down. After the paper's reference code."""

    def __init__(
        self, parameters: Iterable[torch.Tensor], base: torch.optim.Optimizer, rho: float = 0.05
    ) -> None:
        super().__init__(list(parameters), {"rho": rho})
        self.base = base
        self.climbed: dict[torch.Tensor, torch.Tensor] = {}

    @torch.no_grad()
    def first_step(self) -> None:
        self.climbed = {p: 0.05 * p.grad for group in self.param_groups for p in group["params"]}
        for p, direction in self.climbed.items():
            p.add_(direction)
        self.zero_grad()

    @torch.no_grad()
    def second_step(self) -> None:
        for p, direction in self.climbed.items():
            p.sub_(direction)
        self.base.step()
        self.zero_grad()

    def step(self, closure: Any = None) -> None:
        with torch.enable_grad():
            closure()
        self.first_step()
        with torch.enable_grad():
            closure()
        self.second_step()


@loop
def sharpness_aware(watch: Watch) -> None:
    """Two forwards and two backwards per batch, one update, called in two halves."""
    model, train, truth = Net(), loader(5), watch.truth()
    optimizer = Sharpness(model.parameters(), sgd(model))
    watch(model, {"train": train})
    for batch in train:
        truth.batch("train")
        for half in (optimizer.first_step, optimizer.second_step):
            truth.backward(truth.loss(model, batch))
            half()
        truth.update()
        truth.step()


@loop
def sharpness_aware_with_a_closure(watch: Watch) -> None:
    """The same inside one ``step``: the base optimizer's update is a part of it."""
    model, train, truth = Net(), loader(5), watch.truth()
    optimizer = Sharpness(model.parameters(), sgd(model))
    watch(model, {"train": train})
    for batch in train:
        truth.batch("train")

        def closure(batch: Any = batch) -> None:
            truth.backward(truth.loss(model, batch))

        optimizer.step(closure)
        truth.update()
        truth.step()


@loop
def bfloat16_autocast(watch: Watch) -> None:
    """Mixed precision without a scaler."""
    truth, (model, optimizer, train) = watch.training({"train": 5})
    for batch in train:
        truth.batch("train")
        truth.forward()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = loss_of(model, batch)
        truth.backward(loss)
        truth.update_that_ends_a_step(optimizer)


@loop
def grad_scaler_that_never_skips(watch: Watch) -> None:
    """With unscaled gradients clipped, as mixed precision is usually written."""
    model, train, truth = Net(), loader(6), watch.truth()
    optimizer = sgd(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    watch(model, {"train": train})
    for batch in train:
        truth.batch("train")
        optimizer.zero_grad()
        loss = truth.loss(model, batch)
        truth.backward()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        truth.update()
        scaler.update()
        truth.step()


@loop
def a_forward_put_in_its_place(watch: Watch) -> None:
    """``model.forward`` is overridden on the instance, as quantisers and offloaders do, after the session began."""
    truth, (model, optimizer, train) = watch.training({"train": 5})
    plain = model.forward
    model.forward = types.MethodType(lambda self, x: plain(x) * 2, model)
    truth.train_on(model, optimizer, train)


@loop
def a_traced_model(watch: Watch) -> None:
    """``torch.jit.trace``, then the session."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that it is going out of use: there are such models still
        model = torch.jit.trace(Net(), torch.randn(4, 4))
    truth, (model, optimizer, train) = watch.training({"train": 5}, model=model)
    truth.train_on(model, optimizer, train)


@loop
def training_in_evaluation_mode(watch: Watch) -> None:
    """Frozen statistics: ``eval()`` and gradients on. An update in the batch means training."""
    truth, (model, optimizer, train) = watch.training({"train": 6})
    model.eval()
    truth.train_on(model, optimizer, train)


@loop
def averaged_weights(watch: Watch) -> None:
    """``swa_utils.AveragedModel`` runs in validation beside the model: it is a copy, which was not given to the session."""
    model, train, val, truth = Net(), loader(5), loader(2), watch.truth()
    optimizer = sgd(model)
    averaged = torch.optim.swa_utils.AveragedModel(model)
    watch({"model": model, "average": averaged}, {"train": train, "val": val})
    for batch in train:
        truth.batch("train")
        truth.learn(model, optimizer, batch)
        averaged.update_parameters(model)
        truth.step()
    with torch.no_grad():
        for x, _ in val:
            truth.batch("val")
            truth.forward("eval", model="average")
            averaged(x)
            truth.step("eval")


@loop
def meta_learning(watch: Watch) -> None:
    """An inner step by ``autograd.grad`` with ``functional_call``; the outer one is the update."""
    truth, (model, optimizer, tasks) = watch.training({"tasks": 5})
    for x, y in tasks:
        truth.batch("tasks")
        parameters = dict(model.named_parameters())
        truth.forward()
        inner = nn.functional.cross_entropy(torch.func.functional_call(model, parameters, (x,)), y)
        gradients = torch.autograd.grad(inner, list(parameters.values()), create_graph=True)
        moved = {n: p - 0.1 * g for (n, p), g in zip(parameters.items(), gradients, strict=True)}
        truth.forward()
        outer = nn.functional.cross_entropy(torch.func.functional_call(model, moved, (x,)), y)
        truth.backward()
        outer.backward()
        truth.update_that_ends_a_step(optimizer)


@loop
def evolution(watch: Watch) -> None:
    """Gradients are estimated from scores, without autograd: updates, and no backward."""
    truth, (model, optimizer, train) = watch.training({"train": 12}, unseen=("backward",), phases=False)
    for batch in train:
        truth.batch("train")
        with torch.no_grad():
            for p in model.parameters():
                noise = torch.randn_like(p)
                p.add_(noise, alpha=0.01)
                truth.forward()
                p.grad = noise * loss_of(model, batch)
                p.sub_(noise, alpha=0.01)
        truth.update_that_ends_a_step(optimizer)
