"""Loops by how they ask for gradients, down to those that never do."""

from __future__ import annotations

import time

import torch
from torch import nn
from torch.func import functional_call, grad
from torch.nn import functional as F  # noqa: N812 - its usual name

from tests.integration.loops.truth import (
    EVAL,
    TRAIN_AND_VAL,
    Net,
    Slow,
    Watch,
    loader,
    loop,
    loss_of,
    sgd,
    slow_loader,
    timed,
)


def train_inside_backward(watch: Watch, model: nn.Module) -> None:
    """Trains with an optimizer per parameter, in the hooks of the gradients."""
    train, truth = loader(5), watch.truth()
    optimizers = {p: torch.optim.SGD([p], lr=0.01) for p in model.parameters()}

    def apply(parameter: torch.Tensor) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()
        truth.update()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(apply)
    watch(model, {"train": train})
    for batch in train:
        truth.batch("train")
        truth.backward(truth.loss(model, batch))
        truth.step()


@loop
def optimizers_inside_backward(watch: Watch) -> None:
    """An optimizer per parameter, stepped as soon as its gradient is there: many updates, one step."""
    train_inside_backward(watch, Net())


@loop
def more_optimizers_inside_backward_than_names(watch: Watch) -> None:
    """An optimizer per parameter of a deeper model: from the 16th on they share one name, and it is still one step."""
    train_inside_backward(watch, nn.Sequential(*(nn.Linear(4, 4) for _ in range(10))))


@loop
def autograd_grad_and_an_optimizer(watch: Watch) -> None:
    """``backward`` is never called, so ``autograd.grad`` is the backward of this run."""
    truth, (model, optimizer, train) = watch.training({"train": 6})
    for batch in train:
        truth.batch("train")
        loss = truth.loss(model, batch)
        truth.backward()
        parameters = list(model.parameters())
        for p, g in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
            p.grad = g
        truth.update_that_ends_a_step(optimizer)


@loop
def gradient_penalty(watch: Watch) -> None:
    """``autograd.grad`` in a run that has a backward stays where it runs, from the first step on.

    The pause lets the agent poll in between, when it has seen the former and not yet the latter.
    """
    truth, (model, optimizer, train) = watch.training({"train": 4}, model=Net(4, 1))
    for x, _ in train:
        truth.batch("train")
        x.requires_grad_()
        truth.forward()
        out = model(x)
        (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        time.sleep(0.03)
        truth.backward()
        (out.mean() + slope.square().sum()).backward()
        truth.update_that_ends_a_step(optimizer)


@loop
def functional_gradients(watch: Watch) -> None:
    """``torch.func.grad`` over a functional call, parameters in a dict, no optimizer: backwards are the steps."""
    model, train, truth = Net(), loader(6), watch.truth(source="backward")
    watch(model, {"train": train})
    parameters = {name: p.detach() for name, p in model.named_parameters()}

    def loss(parameters: dict[str, torch.Tensor], x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        truth.forward()
        return F.cross_entropy(functional_call(model, parameters, (x,)), y)

    for _ in range(2):
        for x, y in train:
            truth.batch("train")
            truth.backward()
            gradients = grad(loss)(parameters, x, y)
            parameters = {name: p - 0.01 * gradients[name] for name, p in parameters.items()}
            truth.step()
    truth.partial = None


def updated_manually(watch: Watch, batches: int, passes: int) -> None:
    """Passes without an optimizer."""
    model, train, truth = Net(), loader(batches), watch.truth(source="backward", partial=None)
    watch(model, {"train": train})
    for _ in range(passes):
        for batch in train:
            truth.batch("train")
            truth.backward(truth.loss(model, batch))
            with torch.no_grad():
                for p in model.parameters():
                    p.sub_(0.01 * p.grad)
                    p.grad = None
            truth.step()


@loop
def manual_updates(watch: Watch) -> None:
    """No optimizer: the loop updates the parameters itself, and backwards are the steps."""
    updated_manually(watch, 6, 3)


@loop
def manual_updates_in_one_long_pass(watch: Watch) -> None:
    """After 300 backwards the steps are decided without waiting for the end of the first pass."""
    updated_manually(watch, 310, 1)


@loop
def forwards_alone(watch: Watch) -> None:
    """Neither update nor backward, gradients on and in training mode: batches are the steps."""
    model, train, truth = Net(), loader(5), watch.truth(source="batch", partial=None)
    watch(model, {"train": train})
    for _ in range(2):
        for batch in train:
            truth.batch("train")
            truth.forward()
            loss_of(model, batch)
            truth.step()


@loop
def feature_extraction(watch: Watch) -> None:
    """Gradients are off and no name says otherwise: every batch is a step of evaluation."""
    model, corpus, truth = Net(), loader(7), watch.truth(source=None)
    watch(model, {"corpus": corpus})
    model.eval()
    with torch.inference_mode():
        for batch in corpus:
            truth.batch("corpus")
            truth.forward("eval")
            loss_of(model, batch)
            truth.step("eval")


@loop
def reinforcement_without_a_loader(watch: Watch) -> None:
    """An agent acts with gradients on, then learns: no ask, so steps close at their update."""
    model, truth = Net(), watch.truth()
    optimizer = sgd(model)
    watch(model)
    for _ in range(5):
        chances = []
        for _ in range(6):
            truth.forward()
            out = model(torch.randn(1, 4))
            chances.append(torch.log_softmax(out, dim=1)[0, 0])
        truth.backward()
        (-torch.stack(chances).mean()).backward()
        truth.update_that_ends_a_step(optimizer)


@loop
def rollouts_without_gradients(watch: Watch) -> None:
    """Without a loader forwards carry the phase: what acts under ``no_grad`` is no part of a training step.

    The first step trains, so that the model is known to be trained when it acts.
    """
    model, truth = Net(), watch.truth(partial=None)
    optimizer = sgd(model)
    watch(model)
    for _ in range(5):
        for _ in range(3):
            truth.forward()
            truth.backward(model(torch.randn(2, 4)).square().mean())
            truth.update_that_ends_a_step(optimizer)
        with torch.no_grad():
            for _ in range(4):
                truth.forward("eval")
                model(torch.randn(1, 4))
                truth.step("eval")


@loop
def sampling_after_the_last_update(watch: Watch) -> None:
    """Text is made from the trained model at the end: no update follows, so it is evaluation."""
    truth, (model, optimizer, train) = watch.training({"train": 5})
    truth.train_on(model, optimizer, train)
    with torch.no_grad():
        for _ in range(3):
            truth.forward("eval")
            truth.step("eval")
            model(torch.randn(1, 4))


@loop
def adversarial_examples_in_training_and_evaluation(watch: Watch) -> None:
    """Examples by `autograd.grad` in the input, before every step, and with gradients in every batch of the evaluation."""
    truth, (model, optimizer, train, val) = watch.training({"train": 6, "val": 2})

    def attacked(x: torch.Tensor, y: torch.Tensor, phase: str) -> torch.Tensor:
        for _ in range(2):
            x = x.detach().requires_grad_()
            truth.forward(phase)
            x = x + 0.1 * torch.autograd.grad(loss_of(model, (x, y)), x)[0].sign()
        return x.detach()

    for _ in range(2):
        model.train()
        for x, y in train:
            truth.batch("train")
            truth.one_step(model, optimizer, (attacked(x, y, "train"), y))
        model.eval()
        for x, y in val:
            truth.batch("val")
            harder = attacked(x, y, "eval")
            with torch.no_grad():
                truth.forward("eval")
                model(harder)
            truth.step("eval")


@loop
def gradients_cached_at_the_output(watch: Watch) -> None:
    """Outputs in parts without gradients, a backward to them, then every part again with them: all of it is the step."""
    truth, (model, optimizer, train) = watch.training({"train": 5})
    for x, y in train:
        truth.batch("train")
        with torch.no_grad():
            parts = []
            for part in x.split(2):
                truth.forward()
                parts.append(model(part))
        outputs = torch.cat(parts).requires_grad_()
        truth.backward(F.cross_entropy(outputs, y))
        assert outputs.grad is not None
        for part, gradient in zip(x.split(2), outputs.grad.split(2), strict=True):
            truth.forward()
            truth.backward((model(part) * gradient).sum())
        truth.update_that_ends_a_step(optimizer)


@timed
def a_loss_of_a_whole_pass(watch: Watch) -> None:
    """Survival models: the loss is of the outputs of all batches, so its backward comes after the pass. An evaluation with gradients on has none."""
    truth, (model, optimizer, train, val) = watch.slow_training({"train": 4, "val": 3}, rated=TRAIN_AND_VAL)
    for _ in range(3):
        truth.at("train", "train")
        losses = []
        for batch in train:
            truth.batch("train")
            losses.append(truth.loss(model, batch))
        optimizer.zero_grad()
        truth.backward(torch.stack(losses).mean())
        truth.update_that_ends_a_step(optimizer)
        truth.at(EVAL, "val")
        for batch in val:
            truth.batch("val")
            truth.forward(EVAL)
            loss_of(model, batch)
            truth.step(EVAL)


@timed
def a_head_on_the_features_of_a_pass(watch: Watch) -> None:
    """Multiple instance learning: a loader gives the instances of a bag, and a head is trained on the features of all."""
    truth = watch.truth(rated={"bag": "train"})
    encoder, head = Slow(truth), Slow(truth)
    bag, optimizer = slow_loader(truth, "bag", 3), sgd(encoder, head)
    watch({"encoder": encoder, "head": head}, {"bag": bag})
    truth.at("train", "bag")
    for _ in range(4):
        features = []
        for x, _ in bag:
            truth.batch("bag")
            truth.forward(model="encoder")
            features.append(encoder(x))
        truth.forward(model="head")
        scores = head(torch.cat(features).repeat(1, 2))
        optimizer.zero_grad()
        truth.backward(scores.square().mean())
        truth.update_that_ends_a_step(optimizer)
