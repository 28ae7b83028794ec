"""Finds the parts of a model: the modules below it that a program may call directly."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

MOST_PARTS = 12
"""Parts per model. A call of one inside an open forward takes about 0.25 microseconds longer."""

_NO_FORWARD = ("Loss", "Criterion", "Metric")
"""Ends of class names of modules whose call is not a forward of the model, though they may have parameters."""


def parts_of(
    model: torch.nn.Module, *, taken: Callable[[torch.nn.Module], bool]
) -> list[tuple[torch.nn.Module, int]]:
    """Returns the modules below ``model`` that a program may call directly: encoder, head, the model inside a wrapper.

    Each part has a number, by which the agent tells that one does not train another: parts inside a part have its number,
    and the model inside a wrapper has 0, like the wrapper.

    Parts are the children and grandchildren that have parameters and are no loss or metric. Not counted as a level: a wrapper
    (no parameters of its own, one child), and a container without a forward (``ModuleList``), in whose place its members
    are parts. The children of a child that is a ``Sequential``, and of members, are no parts. All children of a module are
    parts, or none is: if some were not recorded, the time of a method that calls them all would be wrong.

    Args:
        model: the instrumented model.
        taken: whether a module is recorded as a part of another model; it and its submodules are left out.
    """
    import torch

    found = _Found(taken)
    for child in found.add_children(found.unwrap(model, 0)):
        if not isinstance(child, torch.nn.Sequential):
            number = found.numbers[id(child)]
            found.add_children(found.unwrap(child, number), number)
    return [(one, found.numbers[key]) for key, one in found.modules.items()]


class _Found:
    """Parts found so far, by ``id``, at most ``MOST_PARTS``."""

    def __init__(self, taken: Callable[[torch.nn.Module], bool]) -> None:
        self.modules: dict[int, torch.nn.Module] = {}
        self.numbers: dict[int, int] = {}
        self._taken = taken

    def unwrap(self, model: torch.nn.Module, number: int) -> torch.nn.Module:
        """Adds the module that ``model`` wraps, the one that this wraps, and so on, with a number; returns the innermost."""
        while True:
            inside = self._new(_children(model))
            if len(inside) != 1 or not _is_called(inside[0]) or _entries(model, "_parameters"):
                return model
            if not self._add(inside, number):
                return model
            model = inside[0]

    def add_children(self, model: torch.nn.Module, number: int | None = None) -> list[torch.nn.Module]:
        """Adds the children of ``model``, then the members of its containers; returns the children that are parts.

        Args:
            model: the model, or a part.
            number: of the part; None: each gets one of its own.
        """
        inside = self._new(_children(model))
        direct = [child for child in inside if _is_called(child)]
        added = direct if self._add(direct, number) else []
        for container in inside:
            if not _is_called(container):
                self._add(self._new(_members(container)), number)
        return added

    def _new(self, modules: Iterator[torch.nn.Module]) -> list[torch.nn.Module]:
        return [
            one
            for one in modules
            if id(one) not in self.modules and not self._taken(one) and _is_recorded(one)
        ]

    def _add(self, modules: list[torch.nn.Module], number: int | None) -> bool:
        fits = len(self.modules) + len(modules) <= MOST_PARTS
        for one in modules if fits else ():
            self.modules[id(one)] = one
            self.numbers[id(one)] = len(self.modules) if number is None else number
        return fits


def modules_of(model: Any) -> Iterator[Any]:  # Any: a module, of whatever class
    """Yields a module and all modules below it, each once.

    Like ``parameters_of`` it reads ``__dict__``: ``modules()`` and ``parameters()`` call methods that a class may override.
    """
    seen: set[int] = set()
    waiting = [model]
    while waiting:
        one = waiting.pop()
        if id(one) not in seen:
            seen.add(id(one))
            yield one
            waiting += reversed(_entries(one, "_modules"))


def parameters_of(model: Any) -> Iterator[Any]:  # Any: as above
    """Yields the parameters of a module and of all modules below it, each once."""
    seen: set[int] = set()
    for module in modules_of(model):
        for parameter in _entries(module, "_parameters"):
            if id(parameter) not in seen:
                seen.add(id(parameter))
                yield parameter


def _entries(model: Any, table: str) -> list[Any]:  # Any: as above
    """Returns what ``_modules`` or ``_parameters`` of a module contains, without None."""
    found = getattr(model, table, None) if _is_scripted(model) else model.__dict__.get(table)
    return [] if found is None else [one for one in list(found.values()) if one is not None]


def _is_scripted(model: Any) -> bool:  # Any: as above
    """Returns whether a module is scripted or traced: its ``__getattr__`` is torch's, and ``__dict__`` does not have its parameters."""
    return any("original_name" in vars(kind) for kind in type(model).__mro__)


def _children(model: Any) -> Iterator[Any]:  # Any: as above
    """Yields child modules; none of a scripted module."""
    if not _is_scripted(model):
        yield from _entries(model, "_modules")


def _members(container: Any) -> Iterator[Any]:  # Any: as above
    for member in _children(container):
        if _is_called(member):
            yield member
        else:
            yield from _members(member)


def _is_recorded(model: torch.nn.Module) -> bool:
    """Returns whether a module has parameters, and neither its class nor a base class is named as a loss or metric."""
    if any(kind.__name__.endswith(_NO_FORWARD) for kind in type(model).__mro__):
        return False
    return next(parameters_of(model), None) is not None


def _is_called(model: torch.nn.Module) -> bool:
    """Returns whether the class of a module has a forward."""
    import torch

    return getattr(type(model), "forward", None) is not torch.nn.Module.forward
