"""Trackers of experiments: where rows of flat figures go."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from otel_train.trackers.metrics import FlatRow

__all__ = ["Tracker"]


class Tracker(Protocol):
    """One tracker. ``write`` and ``close`` are called from one thread of its own, and may take long or raise.

    The other two are called by whoever makes the rows, and are quick.
    """

    name: str
    """As people call it."""

    def wanted(self) -> bool:
        """Whether there may be somebody to log to."""

    def place(self) -> Any:
        """Where a row that is made now belongs, for ``write``; None for nowhere.

        By the time it is written, the program's run may be over and the next one open.
        """

    def write(self, row: FlatRow, place: Any, /) -> None:
        """Log one row."""

    def close(self) -> None:
        """Give back what was opened."""
