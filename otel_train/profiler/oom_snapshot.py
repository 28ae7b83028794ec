"""Writes torch's memory snapshot after a device has run out of memory."""

from __future__ import annotations

import pickle
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

MOST = 3
"""Snapshots per process. A loop that catches the error and retries would fill the disk."""


class OomSnapshots:
    """Writes torch's memory snapshot when the allocator has reported an out-of-memory error.

    The snapshot is taken up to two seconds later. It has allocation stacks only if the program has called
    ``torch.cuda.memory._record_memory_history``.

    Args:
        ooms: returns the number of out-of-memory errors on all devices.
        folder: where to write.
        rank: rank of this process.
        snapshot: takes a snapshot; torch's own when None.
    """

    def __init__(
        self, ooms: Callable[[], int], folder: Path, rank: int, snapshot: Callable[[], object] | None = None
    ) -> None:
        self._ooms = ooms
        self._folder = folder
        self._rank = rank
        self._snapshot = snapshot or _torch_snapshot
        self._seen = 0
        self._made = 0

    def look(self) -> Path | None:
        """Writes a snapshot if memory has run out since the last call; returns its path.

        Raises:
            OSError: it cannot be written.
        """
        ooms = self._ooms()
        if ooms <= self._seen or self._made == MOST:
            return None
        self._seen = ooms
        found = self._snapshot()
        if found is None:
            return None
        self._made += 1
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / f"oom_{ooms}-rank{self._rank}.pickle"
        with path.open("wb") as file:
            pickle.dump(found, file)
        return path


def _torch_snapshot() -> object:
    """For https://pytorch.org/memory_viz; None if this torch has none."""
    memory: Any = sys.modules.get("torch.cuda.memory")
    take = getattr(memory, "_snapshot", None)
    return None if take is None else take()
