"""Which modules below an instrumented model are recorded where the program calls them by themselves."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn

from otel_train.instrumentation.module_parts import MOST_PARTS, parts_of


def block() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))


def tree(root: nn.Module | None = None, **parts: Any) -> nn.Module:
    """A module with a forward, that holds ``parts``."""

    class Tree(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x

    made = root or Tree()
    for name, part in parts.items():
        setattr(made, name, part)
    return made


def layers(number: int) -> nn.ModuleList:
    return nn.ModuleList(nn.Linear(1, 1) for _ in range(number))


class FeatureLoss(nn.Module):
    """A loss with parameters of its own, as perceptual ones have."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.features(x)


SHAPES: dict[str, tuple[Any, list[str]]] = {
    "encoder and head, not what the encoder's Sequential holds": (
        lambda: tree(encoder=block(), head=nn.Linear(2, 2)), ["encoder", "head"],
    ),
    "children of children": (
        lambda: tree(backbone=tree(stem=nn.Linear(1, 1), body=block()), head=nn.Linear(1, 1)),
        ["backbone", "backbone.body", "backbone.stem", "head"],
    ),
    "not theirs": (
        lambda: tree(a=tree(b=tree(c=nn.Linear(1, 1), d=nn.Linear(1, 1)), e=nn.Linear(1, 1)), f=nn.Linear(1, 1)),
        ["a", "a.b", "a.e", "f"],
    ),
    "wrappers count for no level": (
        lambda: tree(module=tree(base_model=tree(a=tree(b=nn.Linear(1, 1), c=nn.Linear(1, 1)), d=nn.Linear(1, 1)))),
        ["module", "module.base_model", "module.base_model.a", "module.base_model.a.b", "module.base_model.a.c",
         "module.base_model.d"],
    ),
    "members of a container, not what they hold": (
        lambda: tree(transformer=nn.ModuleDict({"wte": nn.Linear(1, 1), "h": nn.ModuleList([block(), block()])})),
        ["transformer.h.0", "transformer.h.1", "transformer.wte"],
    ),
    "members of a Sequential that is the model": (block, ["0", "2"]),
    "no losses, no metrics, nothing without parameters": (
        lambda: tree(
            net=nn.Linear(1, 1), criterion=nn.CrossEntropyLoss(torch.ones(2)), perceptual=FeatureLoss(),
            drop=nn.Dropout(), act=nn.PReLU(),
        ),
        ["act", "net"],
    ),
    "all children or none": (lambda: tree(**{f"p{i}": nn.Linear(1, 1) for i in range(MOST_PARTS + 1)}), []),
    "a list that is too long is left out whole": (
        lambda: tree(stem=nn.Linear(1, 1), layers=layers(MOST_PARTS), head=nn.Linear(1, 1)), ["head", "stem"],
    ),
    "as many as there may be": (
        lambda: tree(layers=layers(MOST_PARTS)), [f"layers.{i}" for i in range(MOST_PARTS)],
    ),
}  # fmt: skip


def names(model: nn.Module, found: list[tuple[nn.Module, int]]) -> list[str]:
    known = {id(module): name for name, module in model.named_modules()}
    return sorted(known[id(module)] for module, _ in found)


@pytest.mark.parametrize("shape", SHAPES)
def test_parts_are_what_a_program_calls_by_itself(shape: str) -> None:
    """A module too few hides an evaluation, each module too many costs the forward of every step."""
    make, expected = SHAPES[shape]
    model = make()

    assert names(model, parts_of(model, taken=lambda _: False)) == sorted(expected)


def test_what_another_model_has_is_left_out_with_all_that_it_holds() -> None:
    """Two models with one encoder must not count its forward twice, or under two names."""
    encoder = tree(stem=nn.Linear(1, 1), body=block())
    model = tree(encoder=encoder, head=nn.Linear(1, 1))

    assert names(model, parts_of(model, taken=lambda module: module is encoder)) == ["head"]


def test_what_a_part_holds_has_its_number_and_what_a_wrapper_holds_none() -> None:
    """A frozen encoder differs from the head that trains on what it gives; its own parts do not differ from it."""
    inner = tree(encoder=tree(stem=nn.Linear(1, 1), body=block()), head=nn.Linear(1, 1))
    model = tree(module=inner)
    known = {id(module): name for name, module in inner.named_modules()}

    numbers = {known[id(part)]: number for part, number in parts_of(model, taken=lambda _: False)}

    assert numbers[""] == 0
    assert numbers["encoder"] == numbers["encoder.stem"] == numbers["encoder.body"]
    assert len({0, numbers["encoder"], numbers["head"]}) == 3


def test_a_scripted_part_is_one_and_what_it_holds_is_none() -> None:
    """TorchScript calls the modules inside it without Python."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that it is going out of use: there are such models still
        scripted = torch.jit.script(block())
    model = tree(encoder=scripted, head=nn.Linear(2, 2))

    assert names(model, parts_of(model, taken=lambda _: False)) == ["encoder", "head"]
    assert parts_of(scripted, taken=lambda _: False) == []
