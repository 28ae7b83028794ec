"""Which parts of a watched model are recorded where the program calls them by themselves."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import torch

MOST_PARTS = 12
"""Parts per model. A call of one inside an open forward takes about 0.3 microseconds longer."""

_NO_FORWARD = ("Loss", "Criterion", "Metric")
"""Ends of class names of modules that are no forward though they may have parameters."""


def parts_of(model: torch.nn.Module, *, taken: Callable[[torch.nn.Module], bool]) -> list[torch.nn.Module]:
    """The modules below ``model`` that a program calls by themselves: encoder, head, the model inside a wrapper.

    They are its children and grandchildren that have parameters and are no loss or metric. A wrapper (no parameters of
    its own, one child) counts for no level, nor does a container without a forward (``ModuleList``), whose members
    stand in its place. What a ``Sequential`` or a list holds is not looked into. All children of a module are parts, or
    none is: where some were not recorded, the time of a method that calls them all would be wrong.

    Args:
        model: the watched model.
        taken: whether a module is recorded as another one's; it and what it holds are left out.
    """
    found = _Found(taken)
    inner = found.unwrap(model)
    for whole in [inner, *found.add_children(inner)]:
        if whole is not inner and not _is_sequential(whole):
            found.add_children(found.unwrap(whole))
    return list(found.modules.values())


class _Found:
    """Parts so far, by ``id``, at most ``MOST_PARTS``."""

    def __init__(self, taken: Callable[[torch.nn.Module], bool]) -> None:
        self.modules: dict[int, torch.nn.Module] = {}
        self._taken = taken

    def unwrap(self, model: torch.nn.Module) -> torch.nn.Module:
        """Add what ``model`` wraps, and what that wraps; the innermost."""
        while True:
            inside = self._new(_children(model))
            if (
                len(inside) != 1
                or not _is_called(inside[0])
                or next(_own_parameters(model), None) is not None
            ):
                return model
            if not self._add(inside):
                return model
            model = inside[0]

    def add_children(self, model: torch.nn.Module) -> list[torch.nn.Module]:
        """Add the children of ``model``, then the members of its containers; the children that are parts."""
        inside = self._new(_children(model))
        direct = [child for child in inside if _is_called(child)]
        added = direct if self._add(direct) else []
        for container in inside:
            if not _is_called(container):
                self._add(self._new(_members(container)))
        return added

    def _new(self, modules: Iterator[torch.nn.Module]) -> list[torch.nn.Module]:
        return [
            one
            for one in modules
            if id(one) not in self.modules and not self._taken(one) and _is_recorded(one)
        ]

    def _add(self, modules: list[torch.nn.Module]) -> bool:
        fits = len(self.modules) + len(modules) <= MOST_PARTS
        if fits:
            self.modules.update((id(one), one) for one in modules)
        return fits


def _children(model: Any) -> Iterator[Any]:  # Any: a module, of whatever class
    """Past ``children()``, which a class may override; not of a scripted module, which Python does not run."""
    if hasattr(type(model), "original_name"):
        return
    yield from (child for child in model.__dict__.get("_modules", {}).values() if child is not None)


def _members(container: Any) -> Iterator[Any]:  # Any: as above
    for member in _children(container):
        if _is_called(member):
            yield member
        else:
            yield from _members(member)


def _own_parameters(model: Any) -> Iterator[object]:  # Any: as above
    return (one for one in model.__dict__.get("_parameters", {}).values() if one is not None)


def _is_recorded(model: torch.nn.Module) -> bool:
    """Whether it has parameters, and is no loss or metric by the name of its class or of one that it derives from."""
    if any(kind.__name__.endswith(_NO_FORWARD) for kind in type(model).__mro__):
        return False
    import torch

    return next(torch.nn.Module.parameters(model), None) is not None


def _is_called(model: torch.nn.Module) -> bool:
    """Whether its class has a forward."""
    import torch

    return getattr(type(model), "forward", None) is not torch.nn.Module.forward


def _is_sequential(model: torch.nn.Module) -> bool:
    import torch

    return isinstance(model, torch.nn.Sequential)
