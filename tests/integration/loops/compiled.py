"""Loops in which ``torch.compile`` takes a part, before or after the session begins."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tests.integration.loops.truth import Net, Truth, Watch, Wrapper, loader, loop, loss_of, sgd


def train_compiled(
    watch: Watch, given: nn.Module, called: Callable[[torch.Tensor], torch.Tensor], truth: Truth | None = None
) -> Truth:
    """An ordinary loop: ``given`` is what ``instrument`` receives, ``called`` what the loop calls."""
    train, truth = loader(5), truth or Truth()
    optimizer = sgd(given)
    watch(given, {"train": train})
    return epoch(truth, called, optimizer, train)


def epoch(truth: Truth, called: Any, optimizer: torch.optim.Optimizer, train: Any) -> Truth:
    """One pass."""
    truth.train_on(called, optimizer, train)
    return truth


@loop
def compiled_and_then_given(watch: Watch) -> Truth:
    """The compiled object is the model that the session receives."""
    compiled = torch.compile(Net(), backend="eager")
    return train_compiled(watch, compiled, compiled)


@loop
def compiled_before_its_model_is_given(watch: Watch) -> Truth:
    """The plain model is given, the loop calls what had been compiled of it before."""
    model = Net()
    return train_compiled(watch, model, torch.compile(model, backend="eager"))


@loop
def compiled_in_place_before(watch: Watch) -> Truth:
    """``model.compile()``, then the session."""
    model = Net()
    model.compile(backend="eager")
    return train_compiled(watch, model, model)


@loop
def compiled_without_any_break(watch: Watch) -> Truth:
    """The whole graph or nothing: the compiler refuses to go on where a hook would break the graph."""
    truth, (model, optimizer, train) = watch.training({"train": 5})
    return epoch(truth, torch.compile(model, backend="aot_eager", fullgraph=True), optimizer, train)


@loop
def compiled_in_place_without_any_break(watch: Watch) -> Truth:
    """``model.compile()`` of the whole graph or nothing, after the session began."""
    truth, (model, optimizer, train) = watch.training({"train": 5})
    model.compile(backend="aot_eager", fullgraph=True)
    return epoch(truth, model, optimizer, train)


@loop
def compiled_around_a_wrapper(watch: Watch) -> Truth:
    """The model is given, then wrapped, then the wrapper is compiled: the model itself is never called again."""
    truth, (model, optimizer, train) = watch.training({"train": 5})
    return epoch(truth, torch.compile(Wrapper(model), backend="eager"), optimizer, train)


@loop
def a_wrapper_that_compiles_itself(watch: Watch) -> Truth:
    """``ddp.compile()`` where the inner model was given."""
    truth, (model, optimizer, train) = watch.training({"train": 5})
    outer = Wrapper(model)
    outer.compile(backend="eager")
    return epoch(truth, outer, optimizer, train)


@loop
def a_wrapper_compiled_before_its_model_is_given(watch: Watch) -> Truth:
    """``ddp.compile()`` first, then the inner model is given: what is called is the wrapper's graph."""
    model, train, truth = Net(), loader(5), Truth()
    optimizer = sgd(model)
    outer = Wrapper(model)
    outer.compile(backend="eager")
    watch(model, {"train": train})
    return epoch(truth, outer, optimizer, train)


@loop
def compiled_region_by_region(watch: Watch) -> Truth:
    """Layers are compiled, the model around them is not."""
    truth, (model, optimizer, train) = watch.training({"train": 5})
    model.first.compile(backend="eager")
    model.last = torch.compile(model.last, backend="eager")
    return epoch(truth, model, optimizer, train)


@loop
def compiled_loss(watch: Watch) -> None:
    """A compiled function calls the model: its forward is a part of that function's graph and cannot be seen."""
    truth, (model, optimizer, train) = watch.training({"train": 12}, unseen=("forward",))
    loss_in_one_graph = torch.compile(lambda batch: loss_of(model, batch), backend="eager", fullgraph=True)
    for batch in train:
        truth.batch("train")
        truth.forward()
        truth.backward(loss_in_one_graph(batch))
        truth.update_that_ends_a_step(optimizer)


@loop
def compiled_backward(watch: Watch) -> None:
    """``.backward()`` is called in a compiled function."""
    truth, (model, optimizer, train) = watch.training({"train": 5})
    half = torch.compile(lambda out, y: nn.functional.cross_entropy(out, y).backward(), backend="eager")
    for x, y in train:
        truth.batch("train")
        truth.forward()
        out = model(x)
        truth.backward()
        half(out, y)
        truth.update_that_ends_a_step(optimizer)


@loop
def compiled_optimizer_step(watch: Watch) -> Truth:
    """``torch.compile(optimizer.step)``, as the documentation of torch has it."""
    model, train, truth = Net(), loader(5), Truth()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    watch(model, {"train": train})
    step = torch.compile(optimizer.step, backend="eager")
    for batch in train:
        truth.batch("train")
        optimizer.zero_grad()
        truth.backward(truth.loss(model, batch))
        step()
        truth.update()
        truth.step()
    return truth


@loop
def a_compiled_step(watch: Watch) -> None:
    """Forward, backward and update in one compiled function: it breaks by itself, and the latter two are seen."""
    truth, (model, optimizer, train) = watch.training({"train": 12}, unseen=("forward",))

    @torch.compile(backend="aot_eager")
    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()

    for x, y in train:
        truth.batch("train")
        optimizer.zero_grad()
        truth.forward()
        truth.backward()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the compiler says what it leaves out of torch's own optimizer
            step(x, y)
        truth.update()
        truth.step()
