"""What surrounds the desk: the loop it looks at, its limits in time, whom it tells."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

from otel_train.clock import NS_PER_S

if TYPE_CHECKING:
    from collections.abc import Callable

    from otel_train.aggregation.run_events import Capture
    from otel_train.profiler.capture_request import CaptureRequest
    from otel_train.profiler.step_boundary import Rule
    from otel_train.profiler.step_scheduler import Thread

NEAR_S = 6.0
"""A step this near is waited for at the edges: the pump's own view of the loop is up to 2 s old."""

NEAR_STEPS = 8


class Loop(NamedTuple):
    """What the pump knows of the training loop.

    Attributes:
        rule: where its steps end; None while that is not known.
        thread: the one that trains.
        step: number of the step that is running, as of the last look.
        median_ns: of its steps; 0 if unknown.
        epoch: pass over the training data, from 1.
        settled_ns: up to when steps have their numbers.
    """

    rule: Rule | None
    thread: Thread
    step: int
    median_ns: int
    epoch: int
    settled_ns: int

    def near(self, plan: CaptureRequest) -> bool:
        """Whether the steps of a plan are so near that they should be waited for at the edges."""
        ahead = plan.at_step - plan.warmup - self.step
        return ahead <= NEAR_STEPS or ahead * self.median_ns <= NEAR_S * NS_PER_S


class Limits(NamedTuple):
    """How long a capture may take, and how often one may be made that nobody asked for.

    Attributes:
        max_s: longest recording, in seconds.
        cooldown_s: least seconds between two of one cause: slow steps, or alerts of one name.
    """

    max_s: float
    cooldown_s: float


class Training(Protocol):
    """What captures must know of the account of a run, and tell it."""

    def loop(self) -> Loop:
        """The training loop as it is now."""

    def number(self, at_ns: int) -> int:
        """Number of the step that ran at an instant."""

    def epoch(self, at_ns: int) -> int:
        """The pass over the training data that ran at an instant, from 1."""

    def unix_ns(self, clock_ns: int) -> int:
        """Wall time of an instant."""

    def slow_steps(self) -> int:
        """Slow steps up to now."""

    def over(self, capture: Capture) -> None:
        """A capture is over."""

    def active(self, *, active: bool) -> None:
        """Whether one runs."""

    def watch(self, within_ns: Callable[[], tuple[int, int]]) -> None:
        """Ask there when the last recording began and ended: its steps are worth keeping."""


class Active(Protocol):
    """Told whether a capture runs."""

    def __call__(self, *, active: bool) -> None:
        """See above."""


class Story(NamedTuple):
    """Where captures are told.

    Attributes:
        over: takes one that is over.
        active: told whether one runs.
        number: from an instant to the number of the step that ran then.
        unix_ns: from the monotonic clock to wall time.
        epoch: from an instant to the pass over the training data that ran then, from 1.
    """

    over: Callable[[Capture], None]
    active: Active
    number: Callable[[int], int]
    unix_ns: Callable[[int], int]
    epoch: Callable[[int], int]
