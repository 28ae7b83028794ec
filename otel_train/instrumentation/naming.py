"""Names of loaders and models: as given, as the program calls them, or as a framework uses them."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from otel_train.errors import ConfigError, callable_, kind_of, name_of, one_of, text
from otel_train.fast_classes import FastNamedTuple
from otel_train.recording.events import PHASES
from otel_train.safety import frames

if TYPE_CHECKING:
    from types import FrameType


class Loader(FastNamedTuple):
    """A loader with options, accepted wherever ``instrument`` takes a loader.

    Attributes:
        loader: a ``DataLoader`` or any iterable.
        name: its name in metrics; "" to derive one.
        phase: ``train``, ``eval``, ``test`` or ``predict``; "" to infer it per batch.
        samples: returns the number of samples of a batch; None for the leading dimension.
        tokens: returns the number of tokens of a batch; None counts no tokens.
    """

    loader: Any
    name: str = ""
    phase: str = ""
    samples: Callable[[Any], int] | None = None
    tokens: Callable[[Any], int] | None = None


def named_loaders(loaders: Any) -> list[Loader]:  # Any: one, a sequence, or a mapping
    """Returns one named entry per loader.

    Raises:
        ConfigError: a loader cannot be iterated, or a name is used twice.
    """
    if loaders is None:
        return []
    if isinstance(loaders, Mapping):
        given = [_entry(loader, name_of(name)) for name, loader in loaders.items()]
    elif isinstance(loaders, (list, tuple)) and not isinstance(loaders, Loader):
        several = len(loaders) > 1
        given = [_entry(x, f"loader_{n}" if several else "loader") for n, x in enumerate(loaders)]
    else:
        given = [_entry(loaders, "loader")]
    seen: set[str] = set()
    for entry in given:
        text("loader name {}", entry.name, 'Give the name that metrics show: {"train": loader}')
        if entry.name in seen:
            raise ConfigError(f"loader name {entry.name!r} is used twice in one call: give each its own name")
        seen.add(entry.name)
        _check(entry)
    return given


def _entry(loader: Any, name: str) -> Loader:  # Any: the user's own
    entry = loader if isinstance(loader, Loader) else Loader(loader)
    return entry._replace(name=entry.name or name)


def _check(entry: Loader) -> None:
    kind = kind_of(entry.loader)
    made = type(entry.loader)  # not ``isinstance``, which may call code of the program
    if not issubclass(made, (Iterable, Iterator)) and not hasattr(made, "__getitem__"):
        remedy = "For a loop without a loader leave it out and mark steps with otel_train.step()"
        if _is_called(entry.loader, "Optimizer"):
            remedy = "Optimizers are found by themselves: leave it out"
        raise ConfigError(
            f"loader {entry.name!r} is {kind}: expected a DataLoader or another iterable. {remedy}"
        )
    if issubclass(made, (str, bytes)) or made.__name__ == "Tensor":
        raise ConfigError(
            f"loader {entry.name!r} is {kind}: expected an iterable of batches. "
            'To pass a list of batches name it: {"train": batches}'
        )
    if entry.phase != "":
        one_of(f"phase={{}} of loader {entry.name!r}", entry.phase, PHASES)
    for what in ("samples", "tokens"):
        given = getattr(entry, what)
        if given is not None:
            rule = f"a callable that takes a batch and returns its number of {what}"
            remedy = f"Write {what}=len, or leave it out"
            callable_(f"{what}={{}} of loader {entry.name!r}", given, rule, remedy)


def named_models(model: Any) -> dict[str, Any]:  # Any: one, a sequence, or a mapping
    """Returns the models by name, by default the name of the class.

    Raises:
        ConfigError: a model is not a ``torch.nn.Module``.
    """
    if model is None:
        return {}
    if isinstance(model, Mapping):
        named = {name_of(name): one for name, one in model.items()}
    else:
        models = list(model) if isinstance(model, Sequence) and not _is_module(model) else [model]
        named = {}
        for one in models:
            named[free_name(class_name(one), named)] = one
    for name, one in named.items():
        text("model name {}", name, 'Give the name that metrics show: {"student": model}')
        if not _is_module(one):
            remedy = (
                "For anything else mark its calls with otel_train.stage('forward'); for JAX wrap the step with "
                "otel_train.jax.make_step"
            )
            if _is_called(one, "Loader", "Dataset"):
                remedy = "Did you mean instrument(model, loaders), or instrument(loaders=...)?"
            elif _is_called(one, "Optimizer"):
                remedy = "Give the model that it updates; optimizers are found by themselves"
            rule = "expected a torch.nn.Module, a sequence or a mapping of them"
            raise ConfigError(f"model {name!r} is {kind_of(one)}: {rule}. {remedy}")
    return named


def _is_called(given: Any, *words: str) -> bool:  # Any: the user's own
    """Returns whether the name of an object's class, or of a base class, ends with one of these words."""
    return any(kind.__name__.endswith(words) for kind in type(given).__mro__)


def _is_module(model: Any) -> bool:  # Any: the user's own
    torch: Any = sys.modules.get("torch")  # a program that has a Module has imported it
    return torch is not None and isinstance(model, torch.nn.Module)


def attribute(owner: Any, name: str, default: Any = None) -> Any:  # Any: the user's own
    """Returns an attribute; ``default`` if there is none, or if a method of the program raises anything when it is read."""
    found = default
    with suppress(Exception):
        found = getattr(owner, name)
    return found


def class_name(model: Any) -> str:  # Any: the user's own
    """Returns the class name of a model, inside wrappers of compilers."""
    inner = attribute(model, "_orig_mod", model)  # what torch.compile was given
    return str(attribute(inner, "original_name", type(inner).__name__))  # what torch.jit.script was given


def free_name(name: str, taken: Mapping[str, Any]) -> str:
    """Returns ``name``, with a number appended if it is taken."""
    number, free = 1, name
    while free in taken:
        number += 1
        free = f"{name}_{number}"
    return free


FRAMEWORKS = frozenset({"lightning", "pytorch_lightning"})
"""Packages whose variables are not searched for names of loaders."""


def role_of(owner: Any, held: Sequence[Any], *, alone: bool = False) -> str:  # Any: ``self`` of some frame
    """Returns the name for what a framework object uses a loader for; "" if it is no framework object or the use is unknown.

    ``held``: the loader, and objects that wrap it. ``alone``: no frame of the program is between ``owner``'s and the call, so
    the loader is that of the running stage.
    """
    for kind in type(owner).__mro__:
        find = _NAMED_BY.get((kind.__module__.partition(".")[0], kind.__name__))
        if find is not None:
            known = next((name for name, one in find(owner) if _is_any(one, held)), "")
            return known or (_running_stage(owner) if alone and find is _named_by_trainer else "")
    return ""


def _running_stage(trainer: Any) -> str:
    """Returns the stage that Lightning's Trainer runs now."""
    flags = (
        ("sanity_checking", "val"), ("training", "train"), ("validating", "val"), ("testing", "test"),
        ("predicting", "predict"),
    )  # fmt: skip
    return next((name for flag, name in flags if getattr(trainer, flag, False)), "")


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


def _named_by_learner(learner: Any) -> Iterator[tuple[str, Any]]:
    for number, each in enumerate(getattr(getattr(learner, "dls", None), "loaders", ())):
        name = "train" if number == 0 else "valid" if number == 1 else f"valid_{number}"
        yield name, each
        yield name, getattr(each, "fake_l", each)  # the object that torch iterates in its place


def _leaves(loaders: Any) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yields every loader in a nested collection, with its keys."""
    if isinstance(loaders, Mapping):
        pairs = [(name_of(key), value) for key, value in loaders.items()]
    elif isinstance(loaders, (list, tuple)):
        pairs = [(str(number), value) for number, value in enumerate(loaders)]
    else:
        yield (), loaders
        return
    for key, value in pairs:
        yield from (((key, *path), one) for path, one in _leaves(value))


_NAMED_BY: dict[tuple[str, str], Callable[[Any], Iterator[tuple[str, Any]]]] = {
    ("lightning", "Trainer"): _named_by_trainer,
    ("pytorch_lightning", "Trainer"): _named_by_trainer,
    ("fastai", "Learner"): _named_by_learner,
}
"""By package and class of a framework object: a function that yields names and loaders of the object."""


MOST_FRAMES = 40
"""Most frames inspected, from the one that creates an iterator outwards."""

_MOST_NAMES = 512
"""Most names inspected per frame: the last ones, defined after those of ``from library import *``."""

_MOST_KEYS = 32
"""Most entries of a mapping or list that is treated as a collection of loaders."""

_UNSHARED_REFERENCES = 3
"""References to the dict of ``f_locals`` if the program has none: of the frame, a variable, and the call that counts them."""

_OWN = ("torch", "otel_train")
_GENERIC = frozenset(
    {
        "self", "loader", "data_loader", "dataloader", "dl", "iterable", "iterator", "it", "data", "batches",
        "sequence", "seq", "obj", "x", "value", "item", "args", "loaders", "dataloaders", "data_loaders", "f",
        "pipeline", "bar", "pbar", "progress", "progress_bar", "prog_bar",
    }
)  # fmt: skip
"""Names that any loader may have: another name in an outer frame is preferred."""

_INNER_NAMES = frozenset({"base_dataloader", "fake_l", "_args"})
"""Names that accelerate, fastai and threading give inner loaders. Never used: the class of the dataset is preferred."""


class CallSite(FastNamedTuple):
    """The place in the program that iterates a loader, and the loader's name there; "" if it has none."""

    name: str
    key: Hashable


class _Binding(FastNamedTuple):
    """A name that holds a loader, and its scope: a function, a class or a module."""

    name: str
    key: tuple[Hashable, ...]
    parameter: bool = False


def call_site_of(loader: Any) -> CallSite:  # Any: the user's loader
    """Returns the place that iterates ``loader``, from the frames around this call. Called once per loader.

    A framework's name for the loader wins. Else the nearest specific name wins: a local variable, an attribute of ``self``,
    a global, a key of a mapping or an index of a list in one of them. A generic name is used if there is no better one; if
    it is a parameter, the place is the call that passed the loader.
    """
    held = [loader]
    search = _Search()
    for frame in islice(frames(), MOST_FRAMES):
        if not is_ours(frame):
            variables = variables_of(frame)
            if _package(frame) not in FRAMEWORKS:
                search.inspect(frame, variables, held)
            role = role_of(variables.get("self"), held, alone=search.nearest is None)
            if role:
                return CallSite(role, ("role", role))
            held += _wrapper_of(variables, held)
    return search.place()


class _Search:
    """Finds the best name for a loader in frames, innermost first."""

    def __init__(self) -> None:
        self.nearest: tuple[Hashable, ...] | None = None  # position in the innermost frame of the program
        self._named: _Binding | None = None
        self._generic: _Binding | None = None
        self._passed = False  # the generic name is a parameter, and the call is not found yet

    def inspect(self, frame: FrameType, variables: Mapping[str, Any], held: Sequence[Any]) -> None:
        """Inspects one more frame."""
        self.nearest = self.nearest or _position(frame)
        if self._named is not None:
            return
        generic: _Binding | None = None
        for binding in _names_in(frame, variables, held):
            if binding.name.lower() not in _GENERIC:
                self._named = binding
                return
            if generic is None and binding.name != "self":
                generic = binding
        if generic is not None and (self._generic is None or self._passed):
            name, key = (self._generic.name, self._generic.key) if self._generic else (generic.name, ())
            self._generic = _Binding(name, key + generic.key)
            self._passed = generic.parameter
        elif self._passed and self._generic is not None and not _in_collection(variables, held):
            self._generic = _Binding(self._generic.name, self._generic.key + _position(frame))
            self._passed = False

    def place(self) -> CallSite:
        """Returns the best place found."""
        best = self._named or self._generic
        return CallSite(best.name, best.key) if best is not None else CallSite("", self.nearest)


def is_passed(loader: Any) -> bool:  # Any: the user's loader
    """Returns whether a function of an installed package that runs now has ``loader`` as a parameter."""
    return any(
        variables.get(name) is loader
        for frame in islice(frames(), MOST_FRAMES)
        if not is_ours(frame)
        and (parameters := _parameters(frame))
        and is_installed(frame.f_code.co_filename)
        for variables in (variables_of(frame),)
        for name in parameters
    )


def _parameters(frame: FrameType) -> tuple[str, ...]:
    code = frame.f_code
    return code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]


def calling() -> str:
    """Returns file and line of the program's call into this package."""
    frame = next((frame for frame in frames() if not is_ours(frame)), None)
    return f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame is not None else ""


def variables_of(frame: FrameType) -> Mapping[str, Any]:
    """Returns the variables of a frame without keeping them alive.

    Up to Python 3.12 a frame keeps the dict created for ``f_locals`` with the values of that moment. It is cleared again
    unless the program holds it, after a call of ``locals()``.
    """
    held = frame.f_locals
    if not frame.f_code.co_flags & inspect.CO_OPTIMIZED:
        return held
    variables = dict(held)
    if type(held) is dict and sys.getrefcount(held) <= _UNSHARED_REFERENCES:
        held.clear()
    return variables


_INSTALLED = (str(Path(os.__file__).parent), "site-packages", "dist-packages")


def is_installed(path: str) -> bool:
    """Returns whether a source file belongs to the standard library or an installed package, not to the program."""
    return any(place in path for place in _INSTALLED)


def is_ours(frame: FrameType) -> bool:
    """Returns whether a frame belongs to this package or to torch."""
    return _package(frame) in _OWN


def _package(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]


def _function(frame: FrameType) -> tuple[Hashable, ...]:
    code = frame.f_code
    return code.co_filename, code.co_firstlineno, code.co_name


def _position(frame: FrameType) -> tuple[Hashable, ...]:
    return (*_function(frame), frame.f_lasti)


def _in_collection(variables: Mapping[str, Any], held: Sequence[Any]) -> bool:
    """Returns whether one of these variables is a collection that contains the loader, such as ``args`` in a decorator."""
    for value in list(variables.values())[:_MOST_NAMES]:
        entries = value.values() if type(value) is dict else value if type(value) in (tuple, list) else ()
        if len(entries) <= _MOST_KEYS and any(_is_any(each, held) for each in entries):
            return True
    return False


def _wrapper_of(variables: Mapping[str, Any], held: Sequence[Any]) -> list[Any]:
    """Returns the object whose method runs in this frame, if it is iterable and holds the loader, so that it wraps it."""
    owner = variables.get("self")
    attributes = getattr(owner, "__dict__", {})
    if not hasattr(type(owner), "__iter__") or _is_any(owner, held):
        return []
    wraps = any(_is_any(value, held) for value in attributes.values()) or _in_collection(attributes, held)
    return [owner] if wraps else []


def _is_any(value: Any, held: Sequence[Any]) -> bool:
    return any(value is each for each in held)


def _names_in(frame: FrameType, variables: Mapping[str, Any], held: Sequence[Any]) -> Iterator[_Binding]:
    """Yields the names of the loader in a frame: locals, then attributes of ``self``, then globals."""
    module = ("module", str(frame.f_globals.get("__name__", "")))
    if variables is not frame.f_globals:
        parameters = _parameters(frame)
        for name, key in _holding(variables, held):
            yield _Binding(name, (*_function(frame), *key), parameter=key == (name,) and name in parameters)
    owner = variables.get("self")
    kind = type(owner)
    for name, key in _holding(getattr(owner, "__dict__", {}), held):
        yield _Binding(name, (kind.__module__, kind.__qualname__, *key))
    for name, key in _holding(frame.f_globals, held):
        yield _Binding(name, (*module, *key))


def _holding(names: Mapping[str, Any], loaders: Sequence[Any]) -> Iterator[tuple[str, tuple[Hashable, ...]]]:
    """Yields the names that hold the loader, each with a key that identifies the variable or the entry."""
    held = [
        (name, value)
        for name, value in list(names.items())[-_MOST_NAMES:]
        if name[:2] != "__" and name not in _INNER_NAMES
    ]
    yield from ((name, (name,)) for name, value in held if _is_any(value, loaders))
    for name, value in held:
        if type(value) is dict and len(value) <= _MOST_KEYS and name != "kwargs":
            for key, each in value.items():
                if isinstance(key, str) and key not in _INNER_NAMES and _is_any(each, loaders):
                    yield key, (name, key)
        elif type(value) in (list, tuple) and len(value) <= _MOST_KEYS and name.lower() not in _GENERIC:
            for number, each in enumerate(value):
                if _is_any(each, loaders):
                    yield f"{name}_{number}", (name, number)
