"""How many bytes a batch holds, looked up now and then."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import islice
from typing import Any

MOST_PARTS = 256
"""Parts of a batch that are looked at: some 0.1 ms. A batch of more is not weighed, and its loader no more."""

_PLAIN = (int, float, str, bytes, type(None))


def weigh(batch: Any) -> int | None:  # Any: whatever a loader yields
    """Bytes of the arrays in a batch: whatever says ``nbytes``, in mappings, sequences and dataclasses.

    Returns:
        None where no array was found, or too many parts. Never raises, copies nothing, waits for no device.
    """
    arrays, parts = [], [batch]
    for number, part in enumerate(parts):  # the list grows while it is gone through
        if number == MOST_PARTS:
            return None
        try:
            nbytes = getattr(part, "nbytes", None)
            if nbytes is not None:
                arrays.append(int(nbytes))
            else:
                parts += _inner(part)
        except Exception:  # noqa: BLE001, S112  # somebody else's object may raise anything
            continue
    return sum(arrays) if arrays else None


def _inner(part: Any) -> Iterable[Any]:  # Any: a part of a batch
    """What may hold arrays in it."""
    if isinstance(part, (list, tuple)):
        if part and isinstance(part[0], _PLAIN):  # identifiers, texts
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
    """What is known of the bytes of a loader's batches. The training thread writes, the pump reads.

    Attributes:
        hopeless: a batch could not be weighed.
    """

    def __init__(self) -> None:
        self.hopeless = False
        self._least = self._most = self._sum = self._number = 0

    def add(self, nbytes: int | None) -> None:
        """One batch has been weighed."""
        if nbytes is None:
            self.hopeless = True
            return
        self._least = min(nbytes, self._least) if self._number else nbytes
        self._most = max(nbytes, self._most)
        self._sum += nbytes
        self._number += 1

    @property
    def mean(self) -> float | None:
        """Bytes per batch; None when none was weighed."""
        return self._sum / self._number if self._number else None

    def row(self) -> dict[str, float] | None:
        """For the summary; None when none was weighed."""
        mean = self.mean
        if mean is None:
            return None
        return {"sampled": self._number, "min": self._least, "avg": mean, "max": self._most}
