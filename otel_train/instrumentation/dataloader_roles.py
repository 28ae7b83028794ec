"""What a framework that owns the loop uses a loader for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

FRAMEWORKS = frozenset({"lightning", "pytorch_lightning"})
"""Packages whose own variables say nothing of the loaders that they iterate."""


def role_of(owner: Any, held: Sequence[Any], *, alone: bool = False) -> str:  # Any: ``self`` of some frame
    """What ``owner`` uses a loader for, as a name; "" where it is no framework's, or does not know the loader.

    Args:
        owner: a Trainer of Lightning's, a Learner of fastai's, or anything else.
        held: the loader, and what stands for it.
        alone: no code of the program's own lies between ``owner`` and the call: the loader is of the stage that runs.
    """
    for kind in type(owner).__mro__:
        find = _ROLES.get((kind.__module__.partition(".")[0], kind.__name__))
        if find is not None:
            names, running = find(owner)
            known = next((name for name, one in names if any(one is each for each in held)), "")
            return known or (running if alone else "")
    return ""


def _of_trainer(trainer: Any) -> tuple[Iterator[tuple[str, Any]], str]:
    """Loaders of Lightning's Trainer with their names; the stage that runs."""
    stages = ("train", "training"), ("val", "validating"), ("test", "testing"), ("predict", "predicting")
    running = next((name for name, flag in stages if getattr(trainer, flag, False)), "")
    return _named_by_trainer(trainer), "val" if getattr(trainer, "sanity_checking", False) else running


def _named_by_trainer(trainer: Any) -> Iterator[tuple[str, Any]]:
    # After ``fit``, ``val_dataloaders`` are still those of ``fit``: ``validate`` may have been given others.
    validating = getattr(getattr(trainer, "validate_loop", None), "_combined_loader", None)
    for purpose, loaders in (
        ("train", getattr(trainer, "train_dataloader", None)),
        ("val", getattr(trainer, "val_dataloaders", None)),
        ("val", getattr(validating, "iterables", None)),
        ("test", getattr(trainer, "test_dataloaders", None)),
        ("predict", getattr(trainer, "predict_dataloaders", None)),
    ):
        for path, one in _leaves(loaders):
            # The keys of several training loaders are names already.
            named = purpose == "train" and path and not path[0].isdigit()
            yield "_".join(path if named else (purpose, *path)), one


def _of_learner(learner: Any) -> tuple[Iterator[tuple[str, Any]], str]:
    """Loaders of fastai's Learner with their names."""
    return _named_by_learner(learner), ""


def _named_by_learner(learner: Any) -> Iterator[tuple[str, Any]]:
    for number, each in enumerate(getattr(getattr(learner, "dls", None), "loaders", ())):
        name = "train" if number == 0 else "valid" if number == 1 else f"valid_{number}"
        yield name, each
        yield name, getattr(each, "fake_l", each)  # stands for it in torch


def _leaves(loaders: Any) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every loader in what a Trainer was given, with the keys that lead to it."""
    if isinstance(loaders, Mapping):
        pairs = [(str(key), value) for key, value in loaders.items()]
    elif isinstance(loaders, (list, tuple)):
        pairs = [(str(number), value) for number, value in enumerate(loaders)]
    else:
        yield (), loaders
        return
    for key, value in pairs:
        yield from (((key, *path), one) for path, one in _leaves(value))


_ROLES: dict[tuple[str, str], Callable[[Any], tuple[Iterator[tuple[str, Any]], str]]] = {
    ("lightning", "Trainer"): _of_trainer,
    ("pytorch_lightning", "Trainer"): _of_trainer,
    ("fastai", "Learner"): _of_learner,
}
"""By package and class."""
