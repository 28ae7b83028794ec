"""Stalls: no progress of any kind for longer than what the run is doing explains."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING

from otel_train.accounting.types import Activity
from otel_train.clock import NS_PER_S

if TYPE_CHECKING:
    from otel_train.aggregation.reclaimed import Reclaimed

MEDIAN_STEPS = 20
"""A stall in training is at least this many median steps long; see ``train.stall.threshold``."""

UNKNOWN_FACTOR = 6
"""Least stall in an activity that was not seen to its end yet, over the least stall in training; no training step
needs more, whatever pauses there were."""

KNOWN_FACTOR = 2
"""The same in an activity that was: no shorter, however short it has been."""

LONGEST_FACTOR = 3
"""A stall in an evaluation or a checkpoint is so many times its longest silence so far."""

PAUSE_FACTOR = 2
"""A stall between training steps is so many times the longest pause there that ended by itself."""

OUTSIDE_NS = 24 * 3600 * 10**9
"""The threshold of a program whose loops have ended, where silence means nothing: rules know it by this value."""


class Doing(Enum):
    """What a run is silent in."""

    START = "start"
    """Before the first training step has closed: compilers and allocators may take their time."""
    TRAINING = "training"
    EVALUATION = "evaluation"
    CHECKPOINT = "checkpoint"
    OUTSIDE = "outside"


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
        self.others_ns = 0
        """Longest silence that is no stall on a rank that this one may wait for."""
        self.events: dict[str, int] = {}
        self._least_ns = int(after_s * NS_PER_S)
        self.own_ns = self._least_ns
        """Silence that is a stall in what this rank does by itself."""
        self._doing = Doing.TRAINING
        self._longest_ns: dict[Doing, int] = {}
        self._reclaimed = reclaimed

    @property
    def threshold_ns(self) -> int:
        """Silence that is a stall now."""
        return OUTSIDE_NS if self.outside else max(self.own_ns, self.others_ns)

    @property
    def patience_ns(self) -> int:
        """How long others may wait for this rank before they call it a stall."""
        return min(self.own_ns, UNKNOWN_FACTOR * self._least_ns) if self.outside else self.own_ns

    @property
    def outside(self) -> bool:
        """The loops are over."""
        return self._doing is Doing.OUTSIDE

    def progress(self, at_ns: int) -> None:
        """Something happened."""
        if self.since_ns and at_ns > self.since_ns:
            self._reclaimed.add(Activity.STALLED, self.since_ns, at_ns)
            self.since_ns = 0
        silent_ns = at_ns - self.last_ns
        waited = self._doing is Doing.TRAINING and self.others_ns > self.own_ns
        if silent_ns > self._longest_ns.get(self._doing, 0) and not waited:
            self._longest_ns[self._doing] = silent_ns
        self.last_ns = max(self.last_ns, at_ns)

    def look(self, now_ns: int, median_step_ns: int, *, doing: Doing = Doing.TRAINING) -> bool:
        """Whether a stall has just begun.

        Args:
            now_ns: now.
            median_step_ns: rolling median of step durations; 0 if unknown.
            doing: what the run is in.
        """
        self._doing = doing
        self.own_ns = self._patience_ns(median_step_ns)
        self.quiet_ns = 0 if self.outside else max(0, now_ns - self.last_ns)
        if self.outside or self.since_ns or now_ns - self.last_ns < self.threshold_ns:
            return False
        self.since_ns = self.last_ns + self.threshold_ns
        return True

    def count(self, stage: str) -> None:
        """A stall was found while the run was in ``stage``."""
        self.events[stage] = self.events.get(stage, 0) + 1

    def _patience_ns(self, median_step_ns: int) -> int:
        least_ns, longest_ns = self._least_ns, self._longest_ns.get(self._doing, 0)
        at_most_ns = UNKNOWN_FACTOR * least_ns
        if self.outside:
            return OUTSIDE_NS
        if self._doing is Doing.TRAINING:
            pauses_ns = min(PAUSE_FACTOR * longest_ns, at_most_ns)
            return max(least_ns, MEDIAN_STEPS * median_step_ns, pauses_ns)
        if self._doing is Doing.START or not longest_ns:
            return at_most_ns
        return max(KNOWN_FACTOR * least_ns, LONGEST_FACTOR * longest_ns)
