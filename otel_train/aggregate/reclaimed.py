"""Time that the ledger takes out of the stages it was measured in."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from otel_train.aggregate.steps import Activity, Tiles


class Reclaimed:
    """Intervals that belong to an activity of their own, whatever stage was open: stalls, compiling.

    Stages keep their time; only the ledger is told otherwise, to the nanosecond, and adds up as before.
    """

    def __init__(self) -> None:
        self._intervals: list[tuple[Activity, int, int]] = []

    def add(self, activity: Activity, begun_ns: int, ended_ns: int) -> None:
        """From ``begun_ns`` to ``ended_ns`` it was ``activity``. Where two overlap the first one told wins."""
        self._intervals.append((activity, begun_ns, ended_ns))

    def move(self, tiles: Tiles, until_ns: int, activity_ns: np.ndarray) -> None:
        """Move what of the intervals lies in ``tiles``.

        Args:
            tiles: without gap, in order, already counted in ``activity_ns``.
            until_ns: when the last of them ended.
            activity_ns: int64[activities], changed in place.
        """
        if not self._intervals or not len(tiles.self_ns):
            return
        left = tiles.self_ns.copy()
        ends = until_ns - left.sum() + np.cumsum(left)
        starts = ends - left
        for activity, begun, ended in self._intervals:
            inside = np.minimum(np.maximum(np.minimum(ends, ended) - np.maximum(starts, begun), 0), left)
            left -= inside
            np.subtract.at(activity_ns, tiles.activity, inside)
            activity_ns[activity] += int(inside.sum())
        self._intervals = [interval for interval in self._intervals if interval[2] > until_ns]
