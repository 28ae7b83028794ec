"""Counts samples and bytes of the batches that a loader returns."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from otel_train.recording import ring_buffer
from otel_train.recording.events import MAX_PAYLOAD

MOST_PARTS = 256
"""Most parts of a batch that are inspected (about 0.1 ms). If a batch has more, its loader's batches are not measured any more."""

_PLAIN = (int, float, str, bytes, type(None))


def weigh(batch: Any) -> int | None:  # Any: whatever a loader yields
    """Returns the bytes of the arrays in a batch: every ``nbytes`` in mappings, sequences and dataclasses.

    None where no array was found, or too many parts. Never raises, copies nothing, waits for no device.
    """
    arrays, parts = [], [batch]
    for number, part in enumerate(parts):  # the list grows during the iteration
        if number == MOST_PARTS:
            return None
        try:
            nbytes = getattr(part, "nbytes", None)
            if nbytes is not None:
                arrays.append(int(nbytes))
            else:
                parts += _inner(part)
        except Exception:  # noqa: S112  # the user's object may raise anything
            continue
    return sum(arrays) if arrays else None


def _inner(part: Any) -> Iterable[Any]:  # Any: a part of a batch
    """Returns the objects in ``part`` that may contain arrays."""
    if isinstance(part, (list, tuple)):
        if part and isinstance(part[0], _PLAIN):  # a list of ids or texts
            return [inner for inner in part[:MOST_PARTS] if not isinstance(inner, _PLAIN)]
        return part[:MOST_PARTS]
    if isinstance(part, _PLAIN):
        return ()
    if isinstance(part, Mapping):
        return islice(part.values(), MOST_PARTS)
    if hasattr(part, "__dataclass_fields__"):
        return list(vars(part).values())
    return ()


class BatchBytes:
    """Statistics of the bytes of a loader's batches. The training thread writes, the service thread reads.

    Attributes:
        hopeless: the bytes of a batch could not be measured: no further batch is tried.
    """

    def __init__(self) -> None:
        self.hopeless = False
        self._least = self._most = self._sum = self._number = 0

    def add(self, nbytes: int | None) -> None:
        """Adds the bytes of one batch; None if they could not be measured."""
        if nbytes is None:
            self.hopeless = True
            return
        self._least = min(nbytes, self._least) if self._number else nbytes
        self._most = max(nbytes, self._most)
        self._sum += nbytes
        self._number += 1

    @property
    def mean(self) -> float | None:
        """Bytes per batch; None when none was measured."""
        return self._sum / self._number if self._number else None

    def row(self) -> dict[str, float] | None:
        """Returns the row for the summary; None when none was measured."""
        mean = self.mean
        if mean is None:
            return None
        return {"sampled": self._number, "min": self._least, "avg": mean, "max": self._most}


Size = Callable[[Any], int]
"""Returns the number of samples of a batch plus one, or 0 if it is unknown. Never raises."""

_DEEPEST = 4  # levels of nesting of a batch that are searched for arrays and sequences
_WIDEST = 4  # items that are searched of each sequence


def size_of_batches(first: Any, batch_size: int | None) -> Size:
    """Returns the function that counts the samples of batches with the structure of ``first``.

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
    """Yields (path, samples, is it an array's leading dimension), outermost first for equal kinds."""
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
    if is_array and len(path) == 1:  # by far the commonest: an array in a list or in a mapping
        key = path[0]
        if ring_buffer.EXTENSION is not None:
            torch: Any = sys.modules.get("torch")  # a program that has a tensor has imported it
            base = getattr(getattr(torch, "_C", None), "TensorBase", None)  # its len() creates no torch.Size
            of_tensors = () if base is None else (torch.Tensor, base)
            leading: Size = ring_buffer.EXTENSION.hook("leading", (None, key, *of_tensors))
            return leading

        def read_first(batch: Any) -> int:
            try:
                samples = int(batch[key].shape[0])
                return samples + 1 if 0 <= samples < MAX_PAYLOAD else 0
            except Exception:  # a batch of another shape: its size is not known
                return 0

        return read_first

    def read(batch: Any) -> int:
        try:
            for key in path:
                batch = batch[key]
            samples = int(batch.shape[0] if is_array else len(batch))
            return samples + 1 if 0 <= samples < MAX_PAYLOAD else 0
        except Exception:  # as above
            return 0

    return read
