"""Trackers of experiments: where rows of flat figures go."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from otel_train.aggregate.flat import FlatRow

__all__ = ["Outlet"]


class Outlet(Protocol):
    """One tracker. ``write`` and ``close`` are called from one thread of its own, and may take long or raise."""

    name: str
    """As people call it."""

    def wanted(self) -> bool:
        """Whether there may be somebody to log to. Quick."""

    def write(self, row: FlatRow) -> None:
        """Log one row."""

    def close(self) -> None:
        """Give back what was opened."""
