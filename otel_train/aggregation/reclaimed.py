"""Time that the ledger takes out of the stages it was measured in."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from otel_train.accounting.types import Activity


class Reclaimed:
    """Intervals that belong to an activity of their own, whatever stage was open: stalls, compiling.

    Stages keep their time; only the ledger is told otherwise, to the nanosecond, and adds up as before.
    """

    def __init__(self) -> None:
        self._intervals: list[tuple[Activity, int, int]] = []

    def add(self, activity: Activity, begun_ns: int, ended_ns: int) -> None:
        """From ``begun_ns`` to ``ended_ns`` it was ``activity``. Where two overlap the first one told wins."""
        for _, begun, ended in sorted(self._intervals, key=lambda interval: interval[1]):
            if begun < ended_ns and begun_ns < ended:
                if begun_ns < begun:
                    self._intervals.append((activity, begun_ns, begun))
                begun_ns = ended
        if begun_ns < ended_ns:
            self._intervals.append((activity, begun_ns, ended_ns))

    def within(self, begun_ns: int, ended_ns: int) -> Sequence[tuple[Activity, int]]:
        """Activities that own a part of an interval, and nanoseconds of it."""
        if not self._intervals:
            return ()
        parts = ((a, min(ended, ended_ns) - max(begun, begun_ns)) for a, begun, ended in self._intervals)
        return [(activity, ns) for activity, ns in parts if ns > 0]

    def forget(self, until_ns: int) -> None:
        """Everything up to ``until_ns`` has been settled."""
        self._intervals = [interval for interval in self._intervals if interval[2] > until_ns]
