"""Chooses the steps to trace: the first, slow and failed ones, and every Nth as a baseline."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from otel_train.datamodel import NS_PER_S

if TYPE_CHECKING:
    from collections.abc import Callable

    from otel_train.accounting.types import StepRows

REMEMBERED_STEPS = 512
"""Durations in the rolling median."""

ENOUGH_STEPS = 20
"""Steps before the median is used."""

DEVIATIONS = 5.0
"""A slow step also exceeds the median by this many median absolute deviations, so that in a noisy run not every step is slow."""

BASELINE_S = 30.0
"""Seconds between baseline traces unless configured."""

UNDECIDED = 1 << 62
"""Steps between baselines while the step duration is unknown: more than a run has."""


class SamplingRules(NamedTuple):
    """Settings of ``SpanSampler``; see ``Config``."""

    warmup_steps: int
    every_steps: int
    slow_factor: float
    per_s: float
    burst: int


class SampledStep(NamedTuple):
    """A sampled step.

    Attributes:
        row: its row in the ``StepRows`` it came in.
        number: its step number.
        reason: ``warmup``, ``slow``, ``nonfinite``, ``error``, ``profiler`` or ``baseline``.
        baseline_ns: the rolling median at the time; 0 while there is none.
    """

    row: int
    number: int
    reason: str
    baseline_ns: int


class SpanSampler:
    """Samples closed training steps, limited by a token bucket of ``per_s`` and ``burst``."""

    def __init__(self, rules: SamplingRules, started_ns: int) -> None:
        self.limited = 0
        self.slow = 0
        """Slow steps so far."""
        self.captured_ns: Callable[[], tuple[int, int]] = lambda: (0, 0)
        """Returns begin and end of the last capture. Polled, because a short capture may be over before a notification."""
        self._rules = rules
        self._recent = np.zeros(0, dtype=np.int64)
        self._seen = 0
        self._tokens = float(rules.burst)
        self._filled_ns = started_ns
        self._nonfinite_ns: list[int] = []
        self._agreed = 0

    @property
    def every(self) -> int:
        """Steps between baselines; 0 while undecided."""
        every = self._every(self.median_ns)
        return 0 if every == UNDECIDED else every

    def agree(self, every: int) -> None:
        """Uses the baseline interval of rank 0, so that all ranks of a step are in one trace."""
        self._agreed = every

    @property
    def median_ns(self) -> int:
        """Rolling median of step durations; 0 while there are too few."""
        return int(np.median(self._recent)) if len(self._recent) >= ENOUGH_STEPS else 0

    def nonfinite(self, at_ns: int) -> None:
        """Marks the step at ``at_ns`` as one with a value that is not finite."""
        self._nonfinite_ns = [*self._nonfinite_ns[-63:], at_ns]

    def choose(self, steps: StepRows, numbers: np.ndarray, rows: np.ndarray) -> list[SampledStep]:
        """Samples newly closed training steps."""
        durations = steps.duration_ns[rows]
        median = self.median_ns
        reasons = self._reasons(steps, numbers, rows, median)
        self._recent = np.concatenate((self._recent, durations[-REMEMBERED_STEPS:]))[-REMEMBERED_STEPS:]
        self._seen += len(rows)
        chosen = []
        for place in np.flatnonzero(reasons != "").tolist():
            free = reasons[place] == "profiler"  # bounded by the capture, whose span links to them
            if free or self._take(int(steps.ended_ns[rows[place]])):
                chosen.append(SampledStep(int(rows[place]), int(numbers[place]), str(reasons[place]), median))
            else:
                self.limited += 1
        return chosen

    def _reasons(self, steps: StepRows, numbers: np.ndarray, rows: np.ndarray, median: int) -> np.ndarray:
        """The highest-priority reason of each step; "" for none."""
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
        """A power of two, so that a rank with half the rate samples a subset of the same steps."""
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
