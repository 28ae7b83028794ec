"""Stalls: no progress of any kind for longer than the run's own steps explain."""

from __future__ import annotations

from typing import TYPE_CHECKING

from otel_train.accounting.types import Activity

if TYPE_CHECKING:
    from otel_train.aggregate.reclaimed import Reclaimed

MEDIAN_STEPS = 20
"""A stall is at least this many median steps long; see ``train.stall.threshold``."""

NS_PER_S = 10**9


class Stalls:
    """Watches the time since the last sign of progress.

    Args:
        started_ns: when the run began.
        after_s: least silence that is a stall, in seconds.
        reclaimed: told of stalls that are over.
    """

    def __init__(self, started_ns: int, after_s: float, reclaimed: Reclaimed) -> None:
        self.last_ns = started_ns
        self.since_ns = 0
        """When the present stall passed its threshold; 0 while there is none."""
        self.quiet_ns = 0
        """Time without progress, as of the last look."""
        self.threshold_ns = int(after_s * NS_PER_S)
        self.events: dict[str, int] = {}
        self._least_ns = self.threshold_ns
        self._reclaimed = reclaimed

    def progress(self, at_ns: int) -> None:
        """Something happened."""
        if self.since_ns and at_ns > self.since_ns:
            self._reclaimed.add(Activity.STALLED, self.since_ns, at_ns)
            self.since_ns = 0
        self.last_ns = max(self.last_ns, at_ns)

    def look(self, now_ns: int, median_step_ns: int, *, over: bool) -> bool:
        """Whether a stall has just begun.

        Args:
            now_ns: now.
            median_step_ns: rolling median of step durations; 0 if unknown.
            over: the loops are over, so silence means nothing.
        """
        self.threshold_ns = max(self._least_ns, MEDIAN_STEPS * median_step_ns)
        self.quiet_ns = 0 if over else max(0, now_ns - self.last_ns)
        if over or self.since_ns or now_ns - self.last_ns < self.threshold_ns:
            return False
        self.since_ns = self.last_ns + self.threshold_ns
        return True

    def count(self, stage: str) -> None:
        """A stall was found while the run was in ``stage``."""
        self.events[stage] = self.events.get(stage, 0) + 1
