"""The line of rows that wait for one tracker."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from otel_train.exporters.background_queue import BackgroundQueue

if TYPE_CHECKING:
    from otel_train.trackers import Tracker
    from otel_train.trackers.metrics import FlatRow

MOST_WAITING = 256
"""Rows that wait for a tracker at most; a row has some dozens of figures."""


class TrackerQueue(BackgroundQueue["tuple[FlatRow, Any]"]):
    """Hands rows to one tracker, in order, on a thread that begins with the first row.

    Args:
        tracker: the tracker.
        most: rows that may wait.
    """

    def __init__(self, tracker: Tracker, *, most: int = MOST_WAITING) -> None:
        super().__init__(tracker.name, lambda item: tracker.write(*item), tracker.close, most=most)
        self.tracker = tracker

    def put(self, row: FlatRow, place: Any) -> None:  # Any: what the tracker calls a place
        """Hand over a row for ``place``. Never waits: a row that finds no room is dropped, and counted."""
        self.hand((row, place))
