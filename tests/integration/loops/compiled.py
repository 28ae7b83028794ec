"""Loops in which ``torch.compile`` takes a part, before or after the session begins."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import nn

from tests.integration.loops.truth import Net, Watch, Wrapper, loader, loop, loss_of, sgd


def train_compiled(watch: Watch, given: nn.Module, called: Any) -> None:
    """An ordinary loop: ``given`` is what ``instrument`` receives, ``called`` what the loop calls."""
    truth, (_, optimizer, train) = watch.training({"train": 5}, model=given)
    truth.train_on(called, optimizer, train)


@loop
def compiled_and_then_given(watch: Watch) -> None:
    """The compiled object is the model that the session receives."""
    compiled = torch.compile(Net(), backend="eager")
    train_compiled(watch, compiled, compiled)


@loop
def compiled_before_its_model_is_given(watch: Watch) -> None:
    """The plain model is given, the loop calls what had been compiled of it before."""
    model = Net()
    train_compiled(watch, model, torch.compile(model, backend="eager"))


@loop
def compiled_in_place_before(watch: Watch) -> None:
    """``model.compile()``, then the session."""
    model = Net()
    model.compile(backend="eager")
    train_compiled(watch, model, model)


@loop
def compiled_without_any_break(watch: Watch) -> None:
    """The whole graph or nothing: the compiler refuses to go on where a hook would break the graph."""
    truth, (model, optimizer, train) = watch.training({"train": 5})
    truth.train_on(torch.compile(model, backend="aot_eager", fullgraph=True), optimizer, train)


@loop
def compiled_in_place_without_any_break(watch: Watch) -> None:
    """``model.compile()`` of the whole graph or nothing, after the session began."""
    truth, (model, optimizer, train) = watch.training({"train": 5})
    model.compile(backend="aot_eager", fullgraph=True)
    truth.train_on(model, optimizer, train)


@loop
def compiled_around_a_wrapper(watch: Watch) -> None:
    """The model is given, then wrapped, then the wrapper is compiled: the model itself is never called again."""
    truth, (model, optimizer, train) = watch.training({"train": 5})
    truth.train_on(torch.compile(Wrapper(model), backend="eager"), optimizer, train)


@loop
def a_wrapper_that_compiles_itself(watch: Watch) -> None:
    """``ddp.compile()`` where the inner model was given."""
    truth, (model, optimizer, train) = watch.training({"train": 5})
    outer = Wrapper(model)
    outer.compile(backend="eager")
    truth.train_on(outer, optimizer, train)


@loop
def a_wrapper_compiled_before_its_model_is_given(watch: Watch) -> None:
    """``ddp.compile()`` first, then the inner model is given: what is called is the wrapper's graph."""
    model, train, truth = Net(), loader(5), watch.truth()
    optimizer = sgd(model)
    outer = Wrapper(model)
    outer.compile(backend="eager")
    watch(model, {"train": train})
    truth.train_on(outer, optimizer, train)


@loop
def compiled_region_by_region(watch: Watch) -> None:
    """Layers are compiled, the model around them is not."""
    truth, (model, optimizer, train) = watch.training({"train": 5})
    model.first.compile(backend="eager")
    model.last = torch.compile(model.last, backend="eager")
    truth.train_on(model, optimizer, train)


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
def compiled_optimizer_step(watch: Watch) -> None:
    """``torch.compile(optimizer.step)``, as the documentation of torch has it."""
    model, train, truth = Net(), loader(5), watch.truth()
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
