"""Build times of batches, read from the memory that the workers write."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from otel_train.instrumentation.worker_timer import LONGEST_NS, ROW_WORDS, SEQUENCE, SLOTS, TIME_BITS

if TYPE_CHECKING:
    from otel_train.instrumentation.worker_timer import SharedRows

_NEWER = (SEQUENCE + 1) // 2


class BatchBuildTimes(NamedTuple):
    """Batches that workers have built since the last look.

    Attributes:
        build_ns: int64[n], how long each took.
        missed: batches that were overwritten before they could be read.
    """

    build_ns: np.ndarray
    missed: int


class BuildTimes:
    """Reads the rows of one iterator's workers. One thread owns it.

    The law: every batch is returned whole exactly once, or counted as missed exactly once.

    Args:
        rows: what the workers write.
    """

    def __init__(self, rows: SharedRows) -> None:
        self._words = np.frombuffer(rows.memory, dtype=np.int64).reshape(rows.workers, ROW_WORDS)
        self._taken = np.zeros(rows.workers, dtype=np.int64)

    def read(self) -> BatchBuildTimes:
        """Take everything that is there, in the order in which batches are built: the workers take turns."""
        written = self._words[:, 0].copy()
        parts = [
            self._read(worker, int(written[worker]))
            for worker in np.flatnonzero(written > self._taken).tolist()
        ]
        if not parts:
            return BatchBuildTimes(np.zeros(0, dtype=np.int64), 0)
        turns = np.concatenate([np.arange(len(part.build_ns)) for part in parts])
        times = np.concatenate([part.build_ns for part in parts])
        return BatchBuildTimes(times[np.argsort(turns, kind="stable")], sum(part.missed for part in parts))

    def _read(self, worker: int, written: int) -> BatchBuildTimes:
        taken = int(self._taken[worker])
        numbers = np.arange(max(taken, written - SLOTS), written)
        words = self._words[worker, 1 + numbers % SLOTS]
        ahead = ((words >> TIME_BITS) - (numbers + 1)) & SEQUENCE
        # Another processor may show the count before the slot: what is older comes with the next look.
        behind = np.flatnonzero(ahead >= _NEWER)
        there = int(behind[0]) if len(behind) else len(numbers)
        whole = words[:there][ahead[:there] == 0] & LONGEST_NS
        self._taken[worker] = int(numbers[0]) + there
        return BatchBuildTimes(whole, int(self._taken[worker]) - taken - len(whole))
