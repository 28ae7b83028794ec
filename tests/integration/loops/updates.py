"""Loops by how they update: several optimizers, closures, scalers, none at all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F  # noqa: N812 - its usual name

from tests.integration.loops.truth import (
    TRAIN,
    TRAIN_ALONE,
    Net,
    Slow,
    Truth,
    Watch,
    loader,
    loop,
    loss_of,
    sgd,
    slow_loader,
    timed,
)


@loop
def two_optimizers_per_step(watch: Watch) -> None:
    """One for each half of the model, one after the other."""
    model, train, truth = Net(), loader(6), watch.truth()
    body, head = sgd(model.first), sgd(model.last)
    watch(model, {"train": train})
    for batch in train:
        truth.batch("train")
        truth.backward(truth.loss(model, batch))
        truth.update(body)
        truth.update_that_ends_a_step(head)


@timed
def several_updates_per_batch(watch: Watch) -> None:
    """Every batch is trained on three times: each update is a step, and the first has waited for the batch."""
    truth, (model, optimizer, train) = watch.slow_training({"train": (4, 0.03)}, rated=TRAIN_ALONE)
    truth.at(TRAIN, "train")
    for batch in train:
        truth.batch("train")
        for _ in range(3):
            truth.one_step(model, optimizer, batch)


@timed
def two_slow_optimizers_per_step(watch: Watch) -> None:
    """Two models, two backwards and two updates on every batch: one step, as long as all of it."""
    truth = watch.truth(rated={"train": TRAIN})
    left, right, train = Slow(truth), Slow(truth, 0.02), slow_loader(truth, "train", 6)
    optimizers = {"left": sgd(left), "right": sgd(right)}
    watch({"left": left, "right": right}, {"train": train})
    truth.at(TRAIN, "train")
    for batch in train:
        truth.batch("train")
        for name, model in (("left", left), ("right", right)):
            optimizers[name].zero_grad()
            truth.forward(model=name)
            truth.backward(loss_of(model, batch))
            optimizers[name].step()
            truth.update()
        truth.step()


@loop
def two_optimizers_without_an_ask(watch: Watch) -> None:
    """On one batch in hand, a step closes before its first optimizer updates again."""
    model, truth = Net(), watch.truth()
    train = loader(2)
    body, head = sgd(model.first), sgd(model.last)
    watch(model, {"train": train})
    batch = next(iter(train))
    truth.batch("train")
    for _ in range(6):
        truth.backward(truth.loss(model, batch))
        truth.update(body)
        truth.update_that_ends_a_step(head)


@loop
def an_optimizer_for_every_task(watch: Watch) -> None:
    """Meta-learning, folds, clients without a loader: the optimizer is made anew, and each of its updates is a step."""
    model, truth = Net(), watch.truth()
    watch(model)
    for _ in range(4):
        task, optimizer = (torch.randn(4, 4), torch.zeros(4, dtype=torch.long)), sgd(model)
        for _ in range(3):
            truth.backward(truth.loss(model, task))
            truth.update_that_ends_a_step(optimizer)


def adversaries() -> tuple[Net, Net]:
    """A generator of four features from four numbers, and a critic of four features."""
    return Net(4, 4), Net(4, 1)


def judge(truth: Truth, critic: Net, real: torch.Tensor, fake: torch.Tensor) -> None:
    """The backward of a critic's loss."""
    truth.forward(model="D")
    truth.forward(model="D")
    loss = critic(fake).mean() - critic(real).mean()
    truth.backward(loss)


@loop
def gan(watch: Watch) -> None:
    """Critic and generator, an update each per batch: one step."""
    (generator, critic), train, truth = adversaries(), loader(6), watch.truth()
    g_optimizer, d_optimizer = sgd(generator), sgd(critic)
    watch({"G": generator, "D": critic}, {"train": train})
    for real, _ in train:
        truth.batch("train")
        truth.forward(model="G")
        judge(truth, critic, real, generator(torch.randn(4, 4)).detach())
        truth.update(d_optimizer)
        truth.forward(model="G")
        truth.forward(model="D")
        truth.backward(-critic(generator(torch.randn(4, 4))).mean())
        truth.update_that_ends_a_step(g_optimizer)


@loop
def wgan_with_a_batch_per_critic_update(watch: Watch) -> None:
    """Every ask after an update closes a step, so each critic update is one; the fifth takes G along."""
    (generator, critic), train, truth = adversaries(), loader(10), watch.truth()
    g_optimizer, d_optimizer = sgd(generator), sgd(critic)
    watch({"G": generator, "D": critic}, {"train": train})
    for i, (real, _) in enumerate(train):
        truth.batch("train")
        judge(truth, critic, real, torch.randn(4, 4))
        truth.update(d_optimizer)
        if i % 5 == 4:
            truth.forward(model="G")
            truth.forward(model="D")
            truth.backward(-critic(generator(torch.randn(4, 4))).mean())
            truth.update(g_optimizer)
        truth.step()


@loop
def wgan_with_five_critic_updates_per_batch(watch: Watch) -> None:
    """No ask between them, so the rule for updates holds: the critic twice in a row closes a step.

    The generator's update follows the fifth and shares its step. What it makes for the critic, without gradients, is training.
    """
    (generator, critic), train, truth = adversaries(), loader(4), watch.truth()
    g_optimizer, d_optimizer = sgd(generator), sgd(critic)
    watch({"G": generator, "D": critic}, {"train": train})
    for real, _ in train:
        truth.batch("train")
        for _ in range(5):
            truth.forward(model="G")
            with torch.no_grad():
                fake = generator(torch.randn(4, 4))
            judge(truth, critic, real, fake)
            truth.update_that_ends_a_step(d_optimizer)
        truth.forward(model="G")
        truth.forward(model="D")
        truth.backward(-critic(generator(torch.randn(4, 4))).mean())
        truth.update(g_optimizer)


def closure_of(
    truth: Truth, model: torch.nn.Module, optimizer: torch.optim.Optimizer, batch: Any
) -> Callable[[], Any]:
    """Forward and backward on a batch, for the optimizer to call."""

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = truth.loss(model, batch)
        truth.backward(loss)
        return loss

    return closure


@timed
def a_slow_closure(watch: Watch) -> None:
    """Forwards inside the update keep their own time, and take it from the optimizer's."""
    truth = watch.truth(rated={"train": TRAIN})
    model, train = Slow(truth), slow_loader(truth, "train", 3)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4)
    watch(model, {"train": train})
    truth.at(TRAIN, "train")
    for batch in train:
        truth.batch("train")
        optimizer.step(closure_of(truth, model, optimizer, batch))
        truth.update()
        truth.step()
    assert truth.forwards["model", "train"] > 4


@timed
def a_closure_that_asks_for_its_batches(watch: Watch) -> None:
    """Every call of the closure draws a batch of its own: the asks are inside the update, and of its step."""
    truth = watch.truth(rated={"train": TRAIN})
    model, train = Slow(truth), slow_loader(truth, "train", 12)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3, tolerance_change=0.0)
    watch(model, {"train": train})
    truth.at(TRAIN, "train")
    batches = iter(train)

    def closure() -> torch.Tensor:
        batch = next(batches)
        truth.batch("train")
        optimizer.zero_grad()
        loss = truth.loss(model, batch)
        truth.backward(loss)
        return loss

    for _ in range(4):
        optimizer.step(closure)
        truth.update()
        truth.step()
    assert truth.batches["train"] == 12


@timed
def a_closure_that_reads_a_whole_loader(watch: Watch) -> None:
    """Full-batch L-BFGS: passes begin and end inside the update, all of which is its step."""
    truth, (model, _, train) = watch.slow_training({"train": 3}, rated={"train": TRAIN})
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=2, tolerance_change=0.0)
    truth.at(TRAIN, "train")

    def closure() -> float:
        optimizer.zero_grad()
        total = 0.0
        for batch in train:
            truth.batch("train")
            loss = truth.loss(model, batch)
            truth.backward(loss)
            total += loss.item()
        return total

    for _ in range(3):
        optimizer.step(closure)
        truth.update()
        truth.step()
    assert truth.batches["train"] == 18


@loop
def a_closure_that_asks_a_further_loader(watch: Watch) -> None:
    """The loop asks one loader, the closure another one: no exception, although nothing asked that one before."""
    truth, (model, optimizer, train, more) = watch.training({"train": 4, "more": 8})
    batches = iter(more)

    def closure() -> torch.Tensor:
        truth.batch("more")
        optimizer.zero_grad()
        loss = truth.loss(model, next(batches))
        truth.backward(loss)
        return loss

    for _ in train:
        truth.batch("train")
        optimizer.step(closure)
        truth.update()
        truth.step()


@loop
def a_hook_of_an_optimizer_that_asks_a_loader(watch: Watch) -> None:
    """The hook after every update draws a batch of another loader, and evaluates on a third one after every second."""
    truth, (model, optimizer, train, extra, val) = watch.training({"train": 4, "extra": 4, "val": 2})
    batches = iter(extra)

    def hook(*_: Any) -> None:
        truth.batch("extra")
        next(batches)
        if truth.updates % 2:
            truth.evaluate_on(model, val)

    optimizer.register_step_post_hook(hook)
    truth.train_on(model, optimizer, train)


@loop
def sgd_with_a_closure(watch: Watch) -> None:
    """Forward and backward inside the update, once."""
    truth, (model, optimizer, train) = watch.training({"train": 5})
    for batch in train:
        truth.batch("train")
        optimizer.step(closure_of(truth, model, optimizer, batch))
        truth.update()
        truth.step()


class Decaying(torch.optim.SGD):
    """A subclass in the usual manner."""

    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        loss: float | None = super().step(closure)
        return loss


class Both(torch.optim.Optimizer):
    """An optimizer that steps two others, as sharded and look-ahead optimizers do."""

    def __init__(self, left: torch.optim.Optimizer, right: torch.optim.Optimizer) -> None:
        super().__init__([p for o in (left, right) for g in o.param_groups for p in g["params"]], {})
        self.parts = (left, right)

    def step(self, closure: Callable[[], float] | None = None) -> None:
        for part in self.parts:
            part.step()


@loop
def optimizer_subclass(watch: Watch) -> None:
    """``super().step()`` fires the hooks a second time; it is one update."""
    warm, model, train, truth = Net(), Net(), loader(5), watch.truth()
    sgd(warm).step()
    optimizer = Decaying(model.parameters(), lr=0.01)
    watch(model, {"train": train})
    truth.train_on(model, optimizer, train)


@loop
def optimizer_of_optimizers(watch: Watch) -> None:
    """An update inside an update is none."""
    model, train, truth = Net(), loader(5), watch.truth()
    optimizer = Both(sgd(model.first), sgd(model.last))
    watch(model, {"train": train})
    truth.train_on(model, optimizer, train)


@loop
def learning_rate_scheduler(watch: Watch) -> None:
    """A scheduler patches ``step`` on the instance."""
    truth, (model, optimizer, train) = watch.training({"train": 6})
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2)
    for batch in train:
        truth.batch("train")
        truth.learn(model, optimizer, batch)
        scheduler.step()
        truth.step()


def scaled(watch: Watch, model: Net, optimizer: torch.optim.Optimizer, *, skip_closes: bool) -> None:
    """Eight updates by a scaler, which skips three of them."""
    train, truth = loader(8), watch.truth()
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    watch(model, {"train": train})
    for i, batch in enumerate(train):
        truth.batch("train")
        optimizer.zero_grad()
        truth.forward()
        truth.backward(scaler.scale(loss_of(model, batch)))
        if i in {2, 3, 5}:
            model.first.weight.grad[0, 0] = float("inf")
        before = model.last.bias.detach().clone()
        scaler.step(optimizer)
        truth.optimizer += 1
        scaler.update()
        skipped = torch.equal(before, model.last.bias)
        truth.skipped += skipped
        truth.updates += not skipped
        if skip_closes or not skipped:
            truth.step()
    assert truth.skipped == 3


@loop
def grad_scaler_with_skipped_updates(watch: Watch) -> None:
    """A skipped update is no update, so its batch belongs to the next step; it is an optimizer occurrence."""
    model = Net()
    scaled(watch, model, sgd(model), skip_closes=False)


@loop
def fused_optimizer_that_skips_on_its_device(watch: Watch) -> None:
    """The kernel skips, and the host learns of it later: the step has closed by then, the update does not count."""
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    scaled(watch, model, optimizer, skip_closes=True)


@loop
def several_backwards_per_step(watch: Watch) -> None:
    """Two losses on two forwards, two backwards, one update."""
    truth, (model, optimizer, train) = watch.training({"train": 5})
    for batch in train:
        truth.batch("train")
        for scale in (1.0, 0.5):
            truth.backward(truth.loss(model, batch) * scale)
        truth.update_that_ends_a_step(optimizer)


@loop
def retained_graph(watch: Watch) -> None:
    """Two backwards over one graph."""
    truth, (model, optimizer, train) = watch.training({"train": 5})
    for x, y in train:
        truth.batch("train")
        truth.forward()
        out = model(x)
        truth.backward()
        F.cross_entropy(out, y).backward(retain_graph=True)
        truth.backward()
        out.square().mean().backward()
        truth.update_that_ends_a_step(optimizer)


@loop
def two_optimizers_of_a_scaler_one_of_which_skips(watch: Watch) -> None:
    """Infinite gradients in one half of the model: the other half updates, so the batch is a step."""
    model, train, truth = Net(), loader(6), watch.truth()
    body, head = sgd(model.first), sgd(model.last)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    watch(model, {"train": train})
    for i, batch in enumerate(train):
        truth.batch("train")
        model.zero_grad()
        truth.forward()
        truth.backward(scaler.scale(loss_of(model, batch)))
        if i % 3 == 1:
            model.last.bias.grad[0] = float("inf")
        scaler.step(body)
        truth.update()
        before = model.last.bias.detach().clone()
        scaler.step(head)
        skips = torch.equal(before, model.last.bias)
        truth.optimizer += 1
        truth.updates += not skips
        truth.skipped += skips
        scaler.update()
        truth.step()
    assert truth.skipped == 2


@timed
def a_hook_of_an_optimizer_that_waits_for_a_loader(watch: Watch) -> None:
    """The hook after every update draws from a slow loader: the wait is that loader's, and no time of the optimizer."""
    truth, (model, optimizer, train, extra) = watch.slow_training({"train": (6, 0.001), "extra": (6, 0.01)})
    batches = iter(extra)

    def hook(*_: Any) -> None:
        truth.batch("extra")
        next(batches)

    optimizer.register_step_post_hook(hook)
    truth.at(TRAIN)
    for batch in train:
        truth.batch("train")
        truth.one_step(model, optimizer, batch)
