"""How many samples a batch holds, found once per loader and then read off in a few hundred nanoseconds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

Size = Callable[[Any], int]
"""From a batch to its number of samples plus one; 0 where that cannot be told. Never raises."""

_DEEPEST = 4
_WIDEST = 4


def size_of_batches(first: Any, batch_size: int | None) -> Size:
    """The reader that suits batches shaped like ``first``.

    A candidate is the leading dimension of an array, or the length of a sequence. Among them the first that
    equals ``batch_size`` wins, else the first array, else the first sequence of plain values.
    """
    candidates = list(_candidates(first, ()))
    fits = [c for c in candidates if c[1] == batch_size]
    arrays = [c for c in candidates if c[2]]
    for path, _, is_array in (fits or arrays or candidates)[:1]:
        return _reader(path, is_array=is_array)
    return lambda _: 0


def _candidates(item: Any, path: tuple[Any, ...]) -> Iterator[tuple[tuple[Any, ...], int, bool]]:
    """(path, samples, is it an array's leading dimension), outermost first for equal kinds."""
    shape = getattr(item, "shape", None)
    if shape is not None:
        if len(shape):
            yield path, int(shape[0]), True
    elif len(path) < _DEEPEST and isinstance(item, Mapping):
        for key in list(item)[:8]:
            yield from _candidates(item[key], (*path, key))
    elif isinstance(item, Sequence) and not isinstance(item, (str, bytes)) and len(item):
        for place in range(min(len(item), _WIDEST) if len(path) < _DEEPEST else 0):
            yield from _candidates(item[place], (*path, place))
        yield path, len(item), False


def _reader(path: tuple[Any, ...], *, is_array: bool) -> Size:
    if is_array and len(path) == 1:  # by far the commonest: the first of a list or of a mapping
        key = path[0]

        def read_first(batch: Any) -> int:
            try:
                return int(batch[key].shape[0]) + 1
            except Exception:  # noqa: BLE001  # a batch of another shape: its size is not known
                return 0

        return read_first

    def read(batch: Any) -> int:
        try:
            for key in path:
                batch = batch[key]
            return int(batch.shape[0] if is_array else len(batch)) + 1
        except Exception:  # noqa: BLE001  # as above
            return 0

    return read
