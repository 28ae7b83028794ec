"""Which steps are timed on the device: whole ones, chosen at random, as many as their cost leaves room for."""

from __future__ import annotations

import math
from enum import IntEnum
from random import Random

WORTH = 0.003
"""Share of training time that recording may take."""

FIRST_ONE_IN = 8
"""Before it is known what recording costs."""

_MOST_ONE_IN = 1000
_KNOWN_BY = 2  # steps that were timed: of some ten edges each
_LONGEST = 64  # beginnings in a step, at most: a loop may show us neither a loader nor passes
_RAN, _PASSED, _NEVER = 1, 2, 3  # what a step has come to


class Does(IntEnum):
    """What an edge does. Those up to ``PASSES`` close a stage, those above open one."""

    NOTHING = 1
    """Nothing that a device has time for."""
    CLOSES = 2
    PASSES = 3
    """It closes a backward or an update."""
    OPENS = 4
    STAGES = 5
    """It opens a stage by hand."""
    RUNS = 6
    """A forward."""
    ASKS = 7
    """A wait for data."""


ASKS, RUNS = int(Does.ASKS), int(Does.RUNS)


class Steps:
    """Steps of the thread that is timed, as it goes through them.

    A step begins where a loader is asked after work, and in a loop that asks none, at the forward after a pass.

    Attributes:
        one_in: one step in so many is timed. A fixed stride could meet the same half of a cycle each time, so it is a
            random one of so many in a row.
        sampled: whether the present one is.
        number: of the present one.
        timed: how many have been timed.
    """

    __slots__ = (
        "_begun",
        "_enough",
        "_left",
        "_random",
        "_rest",
        "_work",
        "number",
        "one_in",
        "sampled",
        "timed",
    )

    def __init__(self) -> None:
        self.one_in = FIRST_ONE_IN
        self.sampled = True
        self.number = self.timed = 1
        self._begun = self._left = self._rest = self._work = 0
        self._enough = _PASSED
        self._random = Random().random  # noqa: S311 - not the program's: it would have other weights

    def passed(self) -> None:
        """A backward or an update is over."""
        self._work = _PASSED

    def begin(self, does: int) -> bool:
        """A stage is about to begin. Whether that is the end of a step that is timed, and the next is not."""
        self._begun += 1
        ends = bool(self._work) if does == ASKS else does == RUNS and self._work >= self._enough
        last = (ends or self._begun > _LONGEST) and self._next(_NEVER if does == ASKS else _PASSED)
        if does == RUNS and not self._work:
            self._work = _RAN
        return last

    def choose(self, cost_ns: int, lasted_ns: int, steps: int) -> None:
        """Let recording cost its share.

        Args:
            cost_ns: of all steps that were timed.
            lasted_ns: that ``steps`` steps lasted.
            steps: of any kind.
        """
        if self.timed >= _KNOWN_BY and steps > 0 and lasted_ns > 0:
            share = cost_ns / self.timed * steps / lasted_ns
            self.one_in = min(_MOST_ONE_IN, max(1, math.ceil(share / WORTH)))

    def _next(self, enough: int) -> bool:
        self.number += 1
        self._begun = self._work = 0
        self._enough = enough
        was = self.sampled
        self.sampled = not self._left
        if self._left:
            self._left -= 1
        else:
            self.timed += 1
            place = int(self._random() * self.one_in)
            self._left, self._rest = self._rest + place, self.one_in - 1 - place
        return was and not self.sampled
