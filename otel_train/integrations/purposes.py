"""What the loaders of a Trainer are for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import weakref
    from collections.abc import Iterator

    from otel_train.guard import Guard


def name_of(trainer: weakref.ref[Any], guard: Guard, loader: Any) -> str:
    """What a loader of this Trainer is for; "" for one that is not the Trainer's."""
    owner = trainer()
    with guard:
        for purpose, attribute in (
            ("train", "train_dataloader"),
            ("val", "val_dataloaders"),
            ("test", "test_dataloaders"),
            ("predict", "predict_dataloaders"),
        ):
            for path, one in _leaves(getattr(owner, attribute, None)):
                if one is loader:
                    # The keys of several training loaders are names already.
                    named = purpose == "train" and path and not path[0].isdigit()
                    return "_".join(path if named else (purpose, *path))
    return ""


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
