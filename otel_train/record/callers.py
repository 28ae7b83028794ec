"""What the program around a call says of it: where it is, and what it calls its loader."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from types import FrameType

MOST_FRAMES = 40
"""Frames looked at, from the one that asks for an iterator outwards."""

_MOST_NAMES = 512
"""Names of one frame that are looked at."""

_MOST_KEYS = 32
"""A mapping with more entries is not a table of loaders."""

_OWN = ("torch", "otel_train")
_GENERIC = frozenset(
    {
        "self", "loader", "data_loader", "dataloader", "dl", "iterable", "iterator", "it", "data", "batches",
        "sequence", "seq", "obj", "x", "value", "item", "args", "loaders", "dataloaders", "data_loaders",
    }
)  # fmt: skip
"""Names of parameters rather than of loaders: a name that a caller further out uses says more."""

_PLUMBING = frozenset({"base_dataloader", "fake_l", "_iterables", "_combined_loader"})
"""What accelerate, fastai and Lightning call the loader inside theirs: the dataset's class says more."""


def name_of(loader: Any) -> str:  # Any: somebody's loader
    """The name under which the program around this call holds ``loader``; "" when it has none.

    The nearest name that says something wins; a name that any loader could have is used when there is no
    better one. Done once per loader.
    """
    frame = inspect.currentframe()
    generic, held = "", [loader]
    for _ in range(MOST_FRAMES):
        if frame is None:
            break
        if not _is_ours(frame):
            for name in _names_in(frame, held):
                if name.lower() not in _GENERIC:
                    return name
                generic = generic or ("" if name == "self" else name)
            held += _passing_on(frame, held)
        frame = frame.f_back
    return generic


def calling() -> str:
    """File and line of the program that called us."""
    frame = inspect.currentframe()
    while frame is not None and _is_ours(frame):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame is not None else ""


def _is_ours(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0] in _OWN


def _passing_on(frame: FrameType, held: Sequence[Any]) -> list[Any]:
    """The loader whose ``__iter__`` this is, if it is the one that holds ours: the program knows it alone."""
    mine = frame.f_locals.get("self")
    attributes = getattr(mine, "__dict__", {})
    if frame.f_code.co_name != "__iter__" or not any(_is_any(value, held) for value in attributes.values()):
        return []
    return [] if _is_any(mine, held) else [mine]


def _is_any(value: Any, held: Sequence[Any]) -> bool:
    return any(value is each for each in held)


def _names_in(frame: FrameType, held: Sequence[Any]) -> Iterator[str]:
    """Names of the loader in a frame: locals, then attributes of ``self``, then globals."""
    mine = frame.f_locals
    attributes = getattr(mine.get("self"), "__dict__", {})
    for names in (mine, attributes, frame.f_globals) if mine is not frame.f_globals else (mine, attributes):
        yield from (name for name in _holding(names, held) if name not in _PLUMBING)


def _holding(names: Mapping[str, Any], loaders: Sequence[Any]) -> Iterator[str]:
    held = [(name, value) for name, value in list(names.items())[:_MOST_NAMES] if name[:2] != "__"]
    yield from (name for name, value in held if _is_any(value, loaders))
    for name, value in held:
        if type(value) is dict and len(value) <= _MOST_KEYS and name != "kwargs":
            yield from (key for key, each in value.items() if _is_any(each, loaders) and isinstance(key, str))
