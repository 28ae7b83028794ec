"""What a loop calls its loader: the variable, attribute or key that holds it."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from types import FrameType

MOST_FRAMES = 24
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


def name_of(loader: Any) -> str:  # Any: somebody's loader
    """The name under which the program around this call holds ``loader``; "" when it has none.

    The nearest name that says something wins; a name that any loader could have is used when there is no
    better one. Done once per loader.
    """
    frame = inspect.currentframe()
    generic = ""
    for _ in range(MOST_FRAMES):
        if frame is None:
            break
        if not _is_ours(frame):
            for name in _names_in(frame, loader):
                if name.lower() not in _GENERIC:
                    return name
                generic = generic or ("" if name == "self" else name)
        frame = frame.f_back
    return generic


def _is_ours(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0] in _OWN


def _names_in(frame: FrameType, loader: Any) -> Iterator[str]:
    """Names of the loader in a frame: locals, then attributes of ``self``, then globals."""
    mine = frame.f_locals
    yield from _holding(mine, loader)
    yield from _holding(getattr(mine.get("self"), "__dict__", {}), loader)
    if mine is not frame.f_globals:
        yield from _holding(frame.f_globals, loader)


def _holding(names: Mapping[str, Any], loader: Any) -> Iterator[str]:
    held = [(name, value) for name, value in list(names.items())[:_MOST_NAMES] if name[:2] != "__"]
    yield from (name for name, value in held if value is loader)
    for name, value in held:
        if type(value) is dict and len(value) <= _MOST_KEYS and name != "kwargs":
            yield from (key for key, each in value.items() if each is loader and isinstance(key, str))
