"""What waits in a process for its next report, kept where the agent finds it if the process is killed before.

The memory is a head (one int64: entries that have been reported) and ``ENTRIES`` slots. A slot has the number of its
entry plus one, which is written last, then a kind, three int64, a float64, and text. One thread at a time writes a slot.
"""

from __future__ import annotations

import itertools
import struct
from contextlib import suppress

from otel_train.fast_classes import FastNamedTuple

ENTRIES = 4096
SLOT_BYTES = 256
_NUMBER = struct.Struct("<q")
_BODY = struct.Struct("<4qdq")
_HEAD_BYTES = _NUMBER.size
_TEXT = _HEAD_BYTES + _BODY.size
TEXT_BYTES = SLOT_BYTES - _TEXT
"""An entry with a longer text is not kept: it is lost with the process, as a tensor that was not read is."""

PENDING_BYTES = _HEAD_BYTES + ENTRIES * SLOT_BYTES


class PendingEntry(FastNamedTuple):
    """One entry.

    Attributes:
        numbers: three integers; the caller's.
    """

    kind: int
    numbers: tuple[int, int, int] = (0, 0, 0)
    value: float = 0.0
    text: str = ""


class PendingEntries:
    """Numbers entries and keeps the last ``ENTRIES``. Without memory it numbers them alone.

    Args:
        memory: ``PENDING_BYTES`` of memory that another process reads; None where none does.
    """

    def __init__(self, memory: memoryview | None = None) -> None:
        self._memory = memory
        self._numbers = itertools.count()  # a call of next() is whole, whatever thread makes it

    def add(
        self, kind: int, first: int, second: int = 0, third: int = 0, *, value: float = 0.0, text: str = ""
    ) -> int:
        """Keep a ``PendingEntry`` of these; kind 0: number one that cannot be kept. Returns its number."""
        number, memory = next(self._numbers), self._memory
        if not kind or memory is None:
            return number
        encoded = text.encode(errors="replace")
        length = len(encoded)
        if length <= TEXT_BYTES:
            at = _HEAD_BYTES + number % ENTRIES * SLOT_BYTES
            _BODY.pack_into(memory, at + _HEAD_BYTES, kind, first, second, third, value, length)
            memory[at + _TEXT : at + _TEXT + length] = encoded
            _NUMBER.pack_into(memory, at, number + 1)
        return number

    def report(self, before: int) -> None:
        """All entries with a lower number have been reported."""
        if self._memory is not None:
            _NUMBER.pack_into(self._memory, 0, before)

    def let_go(self) -> None:
        """Keep nothing more: the memory is given back, or is that of the parent of this process."""
        self._memory = None


def unreported(memory: memoryview) -> list[PendingEntry]:
    """Entries that were never reported, oldest first. Call it once the writer is gone.

    A slot that was half written, or holds what cannot be read, is left out.
    """
    (reported,) = _NUMBER.unpack_from(memory)
    found = []
    for number in range(reported, reported + ENTRIES):
        at = _HEAD_BYTES + number % ENTRIES * SLOT_BYTES
        if _NUMBER.unpack_from(memory, at)[0] != number + 1:
            continue
        kind, first, second, third, value, length = _BODY.unpack_from(memory, at + _HEAD_BYTES)
        text = bytes(memory[at + _TEXT : at + _TEXT + length]) if 0 <= length <= TEXT_BYTES else b""
        with suppress(UnicodeDecodeError):  # the process wrote over its own memory before it ended
            found.append(PendingEntry(kind, (first, second, third), value, text.decode()))
    return found
