"""Which steps are worth a trace: the first, the slow, the failed, and every Nth as a baseline."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from otel_train.datamodel import NS_PER_S

if TYPE_CHECKING:
    from collections.abc import Callable

    from otel_train.accounting.types import StepRows

REMEMBERED_STEPS = 512
"""Durations the rolling median looks back on."""

ENOUGH_STEPS = 20
"""Steps before a median means anything."""

DEVIATIONS = 5.0
"""A slow step is also this many median absolute deviations above the median: a noisy run is not all slow."""

BASELINE_S = 30.0
"""A baseline trace about this often, when the user does not say how often."""

UNDECIDED = 1 << 62
"""Steps between baselines before the run has a pace: more than it will ever have."""


class SamplingRules(NamedTuple):
    """Settings of ``SpanSampler``; see ``Config`` for their meaning."""

    warmup_steps: int
    every_steps: int
    slow_factor: float
    per_s: float
    burst: int


class SampledStep(NamedTuple):
    """A step that was chosen.

    Attributes:
        row: its row in the ``StepRows`` it came in.
        number: its step number.
        reason: ``warmup``, ``slow``, ``nonfinite``, ``error``, ``profiler`` or ``baseline``.
        baseline_ns: the rolling median it was compared with; 0 while there is none.
    """

    row: int
    number: int
    reason: str
    baseline_ns: int


class SpanSampler:
    """Chooses among closed training steps; at most ``per_s`` on average, ``burst`` at once.

    Args:
        rules: what to keep.
        started_ns: when the run began.
    """

    def __init__(self, rules: SamplingRules, started_ns: int) -> None:
        self.limited = 0
        self.slow = 0
        """Slow steps up to now."""
        self.captured_ns: Callable[[], tuple[int, int]] = lambda: (0, 0)
        """When the last capture began and ended; asked, because a short one is over before anybody could tell."""
        self._rules = rules
        self._recent = np.zeros(0, dtype=np.int64)
        self._seen = 0
        self._tokens = float(rules.burst)
        self._filled_ns = started_ns
        self._nonfinite_ns: list[int] = []
        self._agreed = 0

    def __getstate__(self) -> dict[str, Any]:
        """What is left behind for after a crash holds when the last capture was, not whoever makes captures."""
        return {**self.__dict__, "captured_ns": partial(tuple, self.captured_ns())}

    @property
    def every(self) -> int:
        """Baselines are this many steps apart; 0 while that is undecided."""
        every = self._every(self.median_ns)
        return 0 if every == UNDECIDED else every

    def agree(self, every: int) -> None:
        """Keep the baselines that rank 0 keeps, so that all ranks of a step are in its trace."""
        self._agreed = every

    @property
    def median_ns(self) -> int:
        """Rolling median of step durations; 0 while there are too few."""
        return int(np.median(self._recent)) if len(self._recent) >= ENOUGH_STEPS else 0

    def nonfinite(self, at_ns: int) -> None:
        """A value of the step that ran at ``at_ns`` was not finite."""
        self._nonfinite_ns = [*self._nonfinite_ns[-63:], at_ns]

    def choose(self, steps: StepRows, numbers: np.ndarray, rows: np.ndarray) -> list[SampledStep]:
        """Look at newly closed training steps.

        Args:
            steps: where they are.
            numbers: int64[n], their step numbers.
            rows: int64[n], their rows.
        """
        durations = steps.duration_ns[rows]
        median = self.median_ns
        reasons = self._reasons(steps, numbers, rows, median)
        self._recent = np.concatenate((self._recent, durations[-REMEMBERED_STEPS:]))[-REMEMBERED_STEPS:]
        self._seen += len(rows)
        chosen = []
        for place in np.flatnonzero(reasons != "").tolist():
            free = reasons[place] == "profiler"  # bounded by the capture, and it links to them
            if free or self._take(int(steps.ended_ns[rows[place]])):
                chosen.append(SampledStep(int(rows[place]), int(numbers[place]), str(reasons[place]), median))
            else:
                self.limited += 1
        return chosen

    def _reasons(self, steps: StepRows, numbers: np.ndarray, rows: np.ndarray, median: int) -> np.ndarray:
        """The weightiest reason for each step; "" for none."""
        durations = steps.duration_ns[rows]
        reasons = np.full(len(rows), "", dtype="<U9")
        reasons[numbers % self._every(median) == 0] = "baseline"
        if median:
            deviation = float(np.median(np.abs(self._recent - median)))
            limit = max(self._rules.slow_factor * median, median + DEVIATIONS * deviation)
            reasons[durations > limit] = "slow"
            self.slow += int(np.count_nonzero(durations > limit))
        first = self._rules.warmup_steps - self._seen
        if first > 0:
            reasons[:first] = "warmup"
        for at_ns in self._nonfinite_ns:
            reasons[(steps.started_ns[rows] <= at_ns) & (at_ns < steps.ended_ns[rows])] = "nonfinite"
        reasons[steps.failed[rows] > 0] = "error"
        begun_ns, ended_ns = self.captured_ns()
        reasons[(steps.started_ns[rows] < ended_ns) & (steps.ended_ns[rows] > begun_ns)] = "profiler"
        return reasons

    def _every(self, median: int) -> int:
        """A power of two: whoever keeps steps half as often keeps a part of the same steps."""
        if self._rules.every_steps or self._agreed:
            return self._rules.every_steps or self._agreed
        if not median:
            return UNDECIDED
        return int(1 << int(np.ceil(np.log2(max(1.0, BASELINE_S * NS_PER_S / median)))))

    def _take(self, now_ns: int) -> bool:
        refill = max(0, now_ns - self._filled_ns) / NS_PER_S * self._rules.per_s
        self._tokens = min(float(self._rules.burst), self._tokens + refill)
        self._filled_ns = max(now_ns, self._filled_ns)
        if self._tokens < 1:
            return False
        self._tokens -= 1
        return True
