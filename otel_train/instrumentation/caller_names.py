"""What the program around a call says of it: where it is, and what it calls its loader."""

from __future__ import annotations

import inspect
import sys
from typing import TYPE_CHECKING, Any, NamedTuple

from otel_train.instrumentation.dataloader_roles import FRAMEWORKS, role_of

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterator, Mapping, Sequence
    from types import FrameType

MOST_FRAMES = 40
"""Frames looked at, from the one that asks for an iterator outwards."""

_MOST_NAMES = 512
"""Names of one frame that are looked at: the newest, behind those of ``from library import *``."""

_MOST_KEYS = 32
"""A mapping or a list with more entries is not a table of loaders."""

_HELD_BY_FRAME_AND_US = 3
"""References to the dict of ``f_locals``: of the frame, of a variable, and of the call that counts them."""

_OWN = ("torch", "otel_train")
_GENERIC = frozenset(
    {
        "self", "loader", "data_loader", "dataloader", "dl", "iterable", "iterator", "it", "data", "batches",
        "sequence", "seq", "obj", "x", "value", "item", "args", "loaders", "dataloaders", "data_loaders",
    }
)  # fmt: skip
"""Names of parameters rather than of loaders: a name that a caller further out uses says more."""

_PLUMBING = frozenset({"base_dataloader", "fake_l", "_args"})
"""What accelerate, fastai and threading call the loader inside theirs: the dataset's class says more."""


class Place(NamedTuple):
    """A place in the program that iterates a loader.

    Attributes:
        name: what the loader is called there; "" where it has no name.
        key: the same for every loader that is iterated there, and for no loader of another place.
    """

    name: str
    key: Hashable


class _Binding(NamedTuple):
    """A name that holds a loader, and where that name lives: a function, a class or a module."""

    name: str
    key: tuple[Hashable, ...]
    parameter: bool = False


def place_of(loader: Any) -> Place:  # Any: somebody's loader
    """The place that iterates ``loader``, as seen from the frames around this call. Done once per loader.

    A framework that knows what the loader is for says its name. Else the nearest name that says something wins: a
    variable of a function, an attribute of ``self``, a global, a key of a mapping or an entry of a list in one of
    them. A name that any loader could have is used when there is no better one; where it is a parameter, the place
    is the call that passed the loader.
    """
    held = [loader]
    search = _Search()
    for frame in _frames():
        if not is_ours(frame):
            variables = variables_of(frame)
            if _package(frame) not in FRAMEWORKS:
                search.look(frame, variables, held)
            role = role_of(variables.get("self"), held, alone=search.nearest is None)
            if role:
                return Place(role, ("role", role))
            held += _passing_on(frame, variables, held)
    return search.place()


class _Search:
    """Finds the best name for a loader in frames, from the innermost outwards."""

    def __init__(self) -> None:
        self.nearest: tuple[Hashable, ...] | None = None  # position in the innermost frame of the program
        self._named: _Binding | None = None
        self._generic: _Binding | None = None
        self._passed = False  # the generic name is a parameter, and the call is not found yet

    def look(self, frame: FrameType, variables: Mapping[str, Any], held: Sequence[Any]) -> None:
        """Take in one more frame."""
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
        elif self._passed and self._generic is not None and not _carries(variables, held):
            self._generic = _Binding(self._generic.name, self._generic.key + _position(frame))
            self._passed = False

    def place(self) -> Place:
        """The place, when all frames were looked at."""
        best = self._named or self._generic
        return Place(best.name, best.key) if best is not None else Place("", self.nearest)


def calling() -> str:
    """File and line of the program that called us."""
    frame = next((frame for frame in _frames(most=None) if not is_ours(frame)), None)
    return f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame is not None else ""


def variables_of(frame: FrameType) -> Mapping[str, Any]:
    """The variables of a running function, or of a module or class; nothing in them is kept alive by the look.

    Up to Python 3.12 a frame keeps the dict that is made for ``f_locals``, and so what was in its variables then. It
    is emptied again, unless somebody else holds it: the program has called ``locals()``.
    """
    held = frame.f_locals
    if not frame.f_code.co_flags & inspect.CO_OPTIMIZED:
        return held
    variables = dict(held)
    if type(held) is dict and sys.getrefcount(held) <= _HELD_BY_FRAME_AND_US:
        held.clear()
    return variables


def _frames(most: int | None = MOST_FRAMES) -> Iterator[FrameType]:
    frame = inspect.currentframe()
    while frame is not None and (most is None or most > 0):
        yield frame
        frame = frame.f_back
        most = None if most is None else most - 1


def is_ours(frame: FrameType) -> bool:
    """Whether a frame is one of this package or of torch."""
    return _package(frame) in _OWN


def _package(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]


def _function(frame: FrameType) -> tuple[Hashable, ...]:
    code = frame.f_code
    return code.co_filename, code.co_firstlineno, code.co_name


def _position(frame: FrameType) -> tuple[Hashable, ...]:
    return (*_function(frame), frame.f_lasti)


def _carries(variables: Mapping[str, Any], held: Sequence[Any]) -> bool:
    """Whether a function only passes a loader on, as a decorator does in ``args``."""
    for value in list(variables.values())[:_MOST_NAMES]:
        entries = value.values() if type(value) is dict else value if type(value) in (tuple, list) else ()
        if len(entries) <= _MOST_KEYS and any(_is_any(each, held) for each in entries):
            return True
    return False


def _passing_on(frame: FrameType, variables: Mapping[str, Any], held: Sequence[Any]) -> list[Any]:
    """The loader whose ``__iter__`` this is, if it is the one that holds ours: the program knows it alone."""
    mine = variables.get("self")
    attributes = getattr(mine, "__dict__", {})
    if frame.f_code.co_name != "__iter__" or not any(_is_any(value, held) for value in attributes.values()):
        return []
    return [] if _is_any(mine, held) else [mine]


def _is_any(value: Any, held: Sequence[Any]) -> bool:
    return any(value is each for each in held)


def _names_in(frame: FrameType, variables: Mapping[str, Any], held: Sequence[Any]) -> Iterator[_Binding]:
    """Names of the loader in a frame: locals, then attributes of ``self``, then globals."""
    code = frame.f_code
    module = ("module", str(frame.f_globals.get("__name__", "")))
    if variables is not frame.f_globals:
        parameters = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        for name, key in _holding(variables, held):
            yield _Binding(name, (*_function(frame), *key), parameter=key == (name,) and name in parameters)
    owner = variables.get("self")
    kind = type(owner)
    for name, key in _holding(getattr(owner, "__dict__", {}), held):
        yield _Binding(name, (kind.__module__, kind.__qualname__, *key))
    for name, key in _holding(frame.f_globals, held):
        yield _Binding(name, (*module, *key))


def _holding(names: Mapping[str, Any], loaders: Sequence[Any]) -> Iterator[tuple[str, tuple[Hashable, ...]]]:
    """Names among ``names`` that hold a loader, each with what tells it from the others."""
    held = [
        (name, value)
        for name, value in list(names.items())[-_MOST_NAMES:]
        if name[:2] != "__" and name not in _PLUMBING
    ]
    yield from ((name, (name,)) for name, value in held if _is_any(value, loaders))
    for name, value in held:
        if type(value) is dict and len(value) <= _MOST_KEYS and name != "kwargs":
            for key, each in value.items():
                if isinstance(key, str) and key not in _PLUMBING and _is_any(each, loaders):
                    yield key, (name, key)
        elif type(value) in (list, tuple) and len(value) <= _MOST_KEYS and name.lower() not in _GENERIC:
            for number, each in enumerate(value):
                if _is_any(each, loaders):
                    yield f"{name}_{number}", (name, number)
