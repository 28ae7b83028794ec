"""Estimates the memory that a dataset holds."""

from __future__ import annotations

import gc
import sys
import types
from collections import deque
from contextlib import suppress
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

MOST_OBJECTS = 4096
"""Most objects inspected in all (about 5 ms), outermost first."""

SAMPLED = 64
"""Items of a long container that are inspected; the others are assumed to be as large."""

_PLAIN = (bytes, bytearray, str, int, float, complex, bool)
_FOREIGN = (
    type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.CodeType, types.FrameType,
    types.GeneratorType, types.CoroutineType, type(None), type(...),
)  # fmt: skip
"""Types that are no data, and whose objects refer to much of the program."""


class _Place(NamedTuple):
    """Position of objects: a sampled item of a container, with everything inside it.

    Attributes:
        within: position of the container; None at the top.
        stands_for: number of items that the sampled one represents.
    """

    within: _Place | None
    stands_for: float
    depth: int

    def inside(self, share: float) -> _Place:
        """Returns the position of one item; ``share`` of the items are inspected."""
        return self if share == 1 else _Place(self, self.stands_for / share, self.depth + 1)

    def common(self, other: _Place) -> _Place:
        """Returns the innermost position that encloses both."""
        one: _Place = self
        while one is not other:
            if one.within is not None and one.depth >= other.depth:
                one = one.within
            elif other.within is not None:
                other = other.within
        return one


def dataset_bytes(datasets: Iterable[Any]) -> int:
    """Returns the bytes that these datasets hold in this process; shared objects count once.

    Arrays, tensors, texts, containers and the attributes of objects are followed; long containers are sampled. Memory
    mapped from a file or on a device is not counted. No code of the objects is run, and each inspection is one step
    of the interpreter, so the program may change them meanwhile: the estimate is then of a moment in between.
    """
    found: dict[int, tuple[int, _Place]] = {}
    held: list[Any] = []  # keeps the objects alive, so that their ids stay unique
    whole = _Place(None, 1.0, 0)
    todo = deque((each, whole) for each in datasets)
    while todo and len(held) < MOST_OBJECTS:
        item, place = todo.popleft()
        key, size_bytes = _owned(item)
        if key in found:  # an object in two places counts once in the innermost place that holds both
            found[key] = (found[key][0], place.common(found[key][1]))
        else:
            found[key] = (size_bytes, place)
            held.append(item)
            # Waiting items share the remaining budget, so that each of them is sampled.
            budget = MOST_OBJECTS - len(held) - len(todo)
            if budget > 0:
                todo.extend(_inner(item, place, min(SAMPLED, max(1, budget // (len(todo) + 1)))))
    return round(sum(size_bytes * place.stands_for for size_bytes, place in found.values()))


def _owned(item: Any) -> tuple[int, int]:
    """Returns the identity of the memory and its size. Arrays and tensors are identified by address, as they may share it."""
    kind = type(item)
    if issubclass(kind, np.ndarray):
        return _array(item)
    torch = sys.modules.get("torch")
    tensors = (getattr(torch, "Tensor", None), getattr(getattr(torch, "nn", None), "Parameter", None))
    if kind in tensors:
        return _tensor(item)
    if kind in _PLAIN:
        return id(item), sys.getsizeof(item)
    for base in (list, tuple, dict, set, frozenset):
        if issubclass(kind, base):
            return id(item), base.__sizeof__(item)
    return id(item), 0 if issubclass(kind, _FOREIGN) else object.__sizeof__(item)


def _array(array: np.ndarray) -> tuple[int, int]:
    while isinstance(array.base, np.ndarray):
        array = array.base
    if issubclass(type(array), np.memmap) or not array.nbytes:
        return id(array), 0
    return array.__array_interface__["data"][0], array.nbytes


def _tensor(tensor: Any) -> tuple[int, int]:
    if tensor.device.type != "cpu" or tensor.layout != sys.modules["torch"].strided:
        return id(tensor), 0
    storage = tensor.untyped_storage()
    return storage.data_ptr() or id(tensor), storage.nbytes()


def _inner(item: Any, place: _Place, most: int) -> Iterator[tuple[Any, _Place]]:
    """Yields the objects inside ``item`` with their positions; of a container at most ``most``."""
    kind = type(item)
    if issubclass(kind, np.ndarray):
        if np.ndarray.dtype.__get__(item).hasobject:
            # Not ``ravel``: it copies an array that is not contiguous, with the GIL held.
            items = np.ndarray.flat.__get__(item)
            yield from _sampled(items, len(items), place, most)
    elif issubclass(kind, (list, tuple)):
        row = list if issubclass(kind, list) else tuple
        yield from _sampled(item, row.__len__(item), place, most, at=row.__getitem__)
    elif issubclass(kind, dict):
        for inner in (dict.keys(item), dict.values(item)):
            yield from _first(inner, dict.__len__(item), place, most)
    elif issubclass(kind, (set, frozenset)):
        base = set if issubclass(kind, set) else frozenset
        yield from _first(base.__iter__(item), base.__len__(item), place, most)
    elif kind not in _PLAIN and not issubclass(kind, _FOREIGN) and not _is_model(kind):
        for each in gc.get_referents(item):
            if not issubclass(type(each), _FOREIGN):
                yield each, place


def _sampled(
    items: Any,
    length: int,
    place: _Place,
    most: int,
    *,
    at: Callable[[Any, int], Any] = lambda items, number: items[number],
) -> Iterator[tuple[Any, _Place]]:
    some = min(length, most)
    with suppress(IndexError):  # it has become shorter
        for number in range(some):
            yield at(items, number * length // some), place.inside(some / length)


def _first(items: Iterable[Any], length: int, place: _Place, most: int) -> Iterator[tuple[Any, _Place]]:
    """Samples the first items of an unordered container."""
    try:
        some = list(islice(items, most))
    except RuntimeError:  # it has just changed
        return
    for item in some:
        yield item, place.inside(len(some) / max(length, len(some)))


def _is_model(kind: type) -> bool:
    """Returns whether a class is a ``torch.nn.Module``, which is not counted as data."""
    return any(base.__module__ == "torch.nn.modules.module" for base in kind.__mro__)
