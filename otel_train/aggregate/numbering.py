"""Which step an instant of the recent past belongs to."""

from __future__ import annotations

from collections import deque

import numpy as np

_SLICES = 64
"""Slices remembered: more than one turn of the pump reads from a loop without pause."""


class RecentSteps:
    """Ends and numbers of the steps that closed lately."""

    def __init__(self) -> None:
        self._slices: deque[tuple[np.ndarray, np.ndarray]] = deque(maxlen=_SLICES)

    def add(self, ends_ns: np.ndarray, numbers: np.ndarray) -> None:
        """Steps that have closed, oldest first."""
        if len(numbers):
            self._slices.append((ends_ns, numbers))

    def at(self, at_ns: int, running: int) -> int:
        """Number of the step that ran at ``at_ns``; ``running`` if that has not closed."""
        for ends_ns, numbers in self._slices:
            if at_ns < ends_ns[-1]:
                return int(numbers[np.searchsorted(ends_ns, at_ns, side="right")])
        return running
