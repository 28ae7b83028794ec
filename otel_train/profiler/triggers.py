"""Automatic captures: by schedule, and of slow steps."""

from __future__ import annotations

import logging
from collections import deque
from typing import TYPE_CHECKING, NamedTuple

from otel_train.datamodel import NS_PER_S

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from otel_train.datamodel import Clock
    from otel_train.profiler.controller import LoopState
    from otel_train.profiler.requests import CaptureRequest

_log = logging.getLogger("otel_train")


SLOW_STEPS = 3
"""Slow steps among ``SLOW_AMONG`` that trigger a capture."""

SLOW_AMONG = 200


class Every(NamedTuple):
    """When captures are due; 0 for never.

    Attributes:
        steps: interval in steps, equal on every rank.
        epochs: interval in passes over the training data; their first steps are captured.
        minutes: interval in minutes.
        skip_first: no capture before this step.
        most: captures in all; 0 for any number.
        chosen: passes over the training data whose first steps are captured, from 1.
    """

    steps: int
    epochs: int
    minutes: float
    skip_first: int
    most: int
    chosen: frozenset[int] = frozenset()

    @property
    def ever(self) -> bool:
        """Whether any capture will be due."""
        return bool(self.steps or self.epochs or self.minutes or self.chosen)

    def of_epoch(self, epoch: int) -> bool:
        """Whether a capture is due in this pass."""
        return epoch in self.chosen or bool(self.epochs and (epoch - 1) % self.epochs == 0)


class Schedule:
    """Requests captures when they are due.

    Args:
        every: when.
        plan: the request.
        clock: monotonic nanoseconds.
    """

    def __init__(self, every: Every, plan: CaptureRequest, clock: Clock) -> None:
        self._every = every
        self._plan = plan
        self._clock = clock
        self._made = 0
        self._from_step = max(1, every.skip_first)
        self._epoch = 0
        self._left = set(every.chosen)
        self._minutes_ns = clock()

    def look(self, loop: LoopState, ask: Callable[[CaptureRequest], str]) -> None:
        """Requests a capture if one is due."""
        every = self._every
        if every.most and self._made >= every.most:
            return
        self._give_up_on(sorted(epoch for epoch in self._left if epoch < loop.epoch))
        if every.steps:
            self._look_ahead(loop, ask)
        if loop.step < every.skip_first:
            return
        if loop.epoch != self._epoch and every.of_epoch(loop.epoch):
            self._ask(ask, f"epoch {loop.epoch}")
            self._epoch = loop.epoch
            self._left.discard(loop.epoch)
        elif every.minutes and self._clock() - self._minutes_ns >= every.minutes * 60 * NS_PER_S:
            self._ask(ask, f"every {every.minutes:g} minutes")
            self._minutes_ns = self._clock()

    def _give_up_on(self, passed: Sequence[int]) -> None:
        """Warns of epochs that ended before a capture could be requested."""
        self._left.difference_update(passed)
        for epoch in passed:
            _log.warning(
                "No capture of epoch %d: it was over before step %d (skip_first of profiler_schedule) or before a poll"
                " (poll_interval_s of tuning)", epoch, self._every.skip_first,
            )  # fmt: skip

    def _look_ahead(self, loop: LoopState, ask: Callable[[CaptureRequest], str]) -> None:
        plan = self._plan._replace(at_step=self._next(loop.step), reason=f"every {self._every.steps} steps")
        # A request far ahead would block others.
        if loop.near(plan) and not ask(plan):
            self._made += 1
            self._from_step = plan.at_step + 1

    def _ask(self, ask: Callable[[CaptureRequest], str], reason: str) -> None:
        if not ask(self._plan._replace(reason=reason)):
            self._made += 1

    def _next(self, step: int) -> int:
        """The next multiple not yet requested: a number that every rank computes by itself."""
        least = max(step + self._plan.warmup + 1, self._from_step)
        return -(-least // self._every.steps) * self._every.steps


class SlowSteps:
    """Requests a capture when steps have become slow.

    Args:
        plan: the request.
    """

    def __init__(self, plan: CaptureRequest) -> None:
        self._plan = plan
        self._seen: deque[tuple[int, int]] = deque()

    def look(self, step: int, slow: int, ask: Callable[[CaptureRequest], str]) -> None:
        """Requests a capture if enough of the last steps were slow.

        Args:
            step: number of the running step.
            slow: slow steps so far.
            ask: queues a request; returns "" if it is accepted.
        """
        # A fast loop makes more steps than that between two looks, so the last look always counts.
        while len(self._seen) > 1 and self._seen[1][0] <= step - SLOW_AMONG:
            self._seen.popleft()
        since, before = self._seen[0] if self._seen else (step, slow)
        enough = slow - before >= SLOW_STEPS
        if enough and (slow - before) * SLOW_AMONG >= SLOW_STEPS * (step - since):
            reason = f"{slow - before} of the last {step - since} steps were slow"
            if not ask(self._plan._replace(reason=reason)):
                self._seen.clear()
        self._seen.append((step, slow))
