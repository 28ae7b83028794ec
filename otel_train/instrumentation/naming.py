"""What the user gave to be watched: checked, each with a name."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from otel_train.arguments import callable_, one_of, text
from otel_train.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

PHASES = ("train", "eval", "test", "predict")


class Loader(NamedTuple):
    """A loader with what there is to say about it; goes wherever a loader goes in ``instrument``.

    Attributes:
        loader: a ``DataLoader`` or any iterable.
        name: as it reads in every figure; "" to find one.
        phase: ``train``, ``eval``, ``test`` or ``predict``; "" to find out per batch.
        samples: from a batch to its number of samples, where that is not the leading dimension.
        tokens: from a batch to its number of tokens; without it tokens are not counted.
    """

    loader: Any
    name: str = ""
    phase: str = ""
    samples: Callable[[Any], int] | None = None
    tokens: Callable[[Any], int] | None = None


def named_loaders(loaders: Any) -> list[Loader]:  # Any: one, a sequence, or a mapping
    """What the user gave, one entry per loader, each with a name.

    Raises:
        ConfigError: something in it cannot be iterated, or a name is used twice.
    """
    if loaders is None:
        return []
    if isinstance(loaders, Mapping):
        given = [_entry(loader, str(name)) for name, loader in loaders.items()]
    elif isinstance(loaders, (list, tuple)) and not isinstance(loaders, Loader):
        several = len(loaders) > 1
        given = [_entry(x, f"loader_{n}" if several else "loader") for n, x in enumerate(loaders)]
    else:
        given = [_entry(loaders, "loader")]
    seen: set[str] = set()
    for entry in given:
        text("loader name {}", entry.name, 'Say how it reads in every figure: {"train": loader}')
        if entry.name in seen:
            raise ConfigError(f"loader name {entry.name!r} is used twice in one call: give each its own name")
        seen.add(entry.name)
        _check(entry)
    return given


def _entry(loader: Any, name: str) -> Loader:  # Any: the user's own
    entry = loader if isinstance(loader, Loader) else Loader(loader)
    return entry._replace(name=entry.name or name)


def _check(entry: Loader) -> None:
    kind = type(entry.loader).__name__
    if not isinstance(entry.loader, (Iterable, Iterator)) and not hasattr(entry.loader, "__getitem__"):
        raise ConfigError(
            f"loader {entry.name!r} is a {kind}: expected a DataLoader or another iterable. "
            "For a loop without a loader leave it out and mark steps with otel_train.step()"
        )
    if isinstance(entry.loader, (str, bytes)) or kind == "Tensor":
        raise ConfigError(
            f"loader {entry.name!r} is a {kind}: expected an iterable of batches. "
            'To pass a list of batches name it: {"train": batches}'
        )
    if entry.phase != "":
        one_of(f"phase={{}} of loader {entry.name!r}", entry.phase, PHASES)
    for what in ("samples", "tokens"):
        given = getattr(entry, what)
        if given is not None:
            rule = f"a callable that takes a batch and returns its number of {what}"
            callable_(
                f"{what}={{}} of loader {entry.name!r}", given, rule, f"Write {what}=len, or leave it out"
            )


def named_models(model: Any) -> dict[str, Any]:  # Any: one, a sequence, or a mapping
    """What the user gave, by name: the class's where they gave none.

    Raises:
        ConfigError: something in it is not a ``torch.nn.Module``.
    """
    if model is None:
        return {}
    if isinstance(model, Mapping):
        named = {str(name): one for name, one in model.items()}
    else:
        models = list(model) if isinstance(model, Sequence) and not _is_module(model) else [model]
        named = {}
        for one in models:
            named[free_name(class_name(one), named)] = one
    for name, one in named.items():
        text("model name {}", name, 'Say how it reads in every figure: {"student": model}')
        if not _is_module(one):
            raise ConfigError(
                f"model {name!r} is a {type(one).__name__}: expected a torch.nn.Module, a sequence or a mapping "
                "of them. For anything else mark its calls with otel_train.stage('forward'); for JAX wrap the step "
                "with otel_train.jax.make_step"
            )
    return named


def _is_module(model: Any) -> bool:  # Any: the user's own
    torch: Any = sys.modules.get("torch")  # who has a Module has imported it
    return torch is not None and isinstance(model, torch.nn.Module)


def class_name(model: Any) -> str:  # Any: the user's own
    """The name of a model that nobody named."""
    inner = getattr(model, "_orig_mod", model)  # what torch.compile was given
    name: str = getattr(inner, "original_name", type(inner).__name__)  # what torch.jit.script was given
    return name


def free_name(name: str, taken: Mapping[str, Any]) -> str:
    """``name``, with a number behind it where it is taken."""
    number, free = 1, name
    while free in taken:
        number += 1
        free = f"{name}_{number}"
    return free
