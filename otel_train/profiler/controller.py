"""One capture at a time, with rests in between."""

from __future__ import annotations

import logging
from collections import deque
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from otel_train.aggregation.captures import Capture
from otel_train.datamodel import NS_PER_S
from otel_train.profiler.requests import NEXT, CaptureRequest, Options, Recorded
from otel_train.profiler.step_schedule import Phase, Rule, StepBoundary, StepScheduler
from otel_train.profiler.storage import RECORD_SUFFIX, CaptureOutcome, Place, Writing, write_record
from otel_train.recording.events import SourceKind

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from otel_train.datamodel import Clock
    from otel_train.profiler.requests import CaptureRequest
    from otel_train.profiler.step_schedule import Thread
    from otel_train.profiler.torch_profiler import Profiler
    from otel_train.recording.events import Instrumented

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


_log = logging.getLogger("otel_train")

MOST_ASKED = 2
"""Requests that wait while a capture runs: the schedule's, and one more."""


class CaptureController:
    """Takes requests, arms the gate, and hands what was recorded to a writer. Driven by the pump.

    Args:
        profiler: makes what records.
        loop: looks at the loop.
        story: told of everything.
        place: where files go.
        clock: monotonic nanoseconds.
        limits: in time.
    """

    def __init__(
        self,
        profiler: Callable[[Callable[[], None]], Profiler],
        *,
        loop: Callable[[], Loop],
        story: Story,
        place: Place,
        clock: Clock,
        limits: Limits,
    ) -> None:
        made: list[Profiler] = []

        def make(give_way: Callable[[], None]) -> Profiler:
            made.append(profiler(give_way))
            return made[0]

        self.gate = StepScheduler(make, clock=clock, max_s=limits.max_s)
        self._profiler = made[0]
        self._loop = loop
        self._story = story
        self._place = place
        self._clock = clock
        self._cooldown_ns = int(limits.cooldown_s * NS_PER_S)
        self._ended_ns: dict[str, int] = {}
        self._asked: deque[CaptureRequest] = deque()
        self._job: _Job | None = None
        self._recorded: Recorded | None = None
        self._bytes_per_step = 0
        self._told_active = False
        self.others: Callable[[], bool] = lambda: False
        """Whether something else stands between the training thread and its ring."""

    def ask(self, plan: CaptureRequest, *, patient: bool = True) -> str:
        """Want a capture. Any thread may ask.

        Args:
            plan: what is wanted.
            patient: it may wait for its turn, and need not keep the pause after the last one of its cause.

        Returns:
            "" if it will be made; else why not.
        """
        lacking = self._profiler.lacking()
        if lacking and self._loop().rule is not None:  # it trains without what records it
            return lacking
        asked = any(other.cause == plan.cause for other in self._asked)
        if len(self._asked) == MOST_ASKED or (not patient and (asked or self.gate.phase is not Phase.IDLE)):
            return "a capture is under way: one at a time"
        ended_ns = self._ended_ns.get(plan.cause)
        pause_ns = 0 if ended_ns is None else ended_ns + self._cooldown_ns - self._clock()
        if not patient and pause_ns > 0:
            return f"the last capture by {plan.cause} is too recent: next in {pause_ns / NS_PER_S:.0f} s"
        if plan.trigger == "schedule":
            self._asked.append(plan)
        else:  # somebody waits for it
            self._asked.appendleft(plan)
        return ""

    @property
    def in_a_hurry(self) -> bool:
        """Whether something waits for what only settling tells: what a step is, and its number."""
        gate = self.gate
        unnumbered = gate.first_ns > 0 and gate.first_number == NEXT
        unruled = bool(self._asked) and self._loop().rule is None
        return unruled or self._recorded is not None or (gate.phase is not Phase.IDLE and unnumbered)

    @property
    def busy(self) -> bool:
        """Whether one is armed, runs, or waits to be written, or something else stands in its place."""
        return self.gate.phase is not Phase.IDLE or self._recorded is not None or self.others()

    @property
    def running(self) -> bool:
        """Whether one is armed or runs."""
        return self.gate.phase not in (Phase.IDLE, Phase.DONE)

    @property
    def told(self) -> bool:
        """Whether all that was recorded is written, looked into and told."""
        return self.gate.phase is not Phase.DONE and self._recorded is None and self._job is None

    def begin(self, plan: CaptureRequest, loop: Loop) -> str:
        """Capture from here on, said by the training thread, between two steps, when nothing is busy; else why not."""
        return self._arm(plan, loop)

    def turn(self, loop: Loop, *, last: bool = False) -> None:
        """Do what is due: arm, number, write, tell.

        Args:
            loop: as it is now.
            last: nothing more is settled for now: write what there is, with the numbers there are.
        """
        for plan in list(self._asked):
            if not self.busy and loop.near(plan) and loop.rule is not None:
                self._asked.remove(plan)
                lacking = self._arm(plan, loop)
                if lacking:
                    _log.warning("Capture (%s): %s", plan.trigger, lacking)
        gate = self.gate
        if gate.first_number == NEXT and 0 < gate.first_ns < loop.settled_ns:
            gate.first_number = self._story.number(gate.first_ns)
        if gate.phase is Phase.ACTIVE and not self._told_active:
            self._told_active = True
            self._story.active(active=True)
        if self._recorded is None:
            self._recorded = gate.take()
        if self._recorded is not None and self._job is None:
            self._write(self._recorded, loop, last=last)
        if self._job is not None and self._job.writing is not None and self._job.writing.over:
            self._tell(self._job, self._job.writing)

    def end(self, timeout_s: float) -> None:
        """The session closes: what is open is cut short, what was recorded is written, in this time.

        Called with every edge settled, on whatever thread closes the session.
        """
        self._asked.clear()
        if self._recorded is None:
            self._recorded = self.gate.take()
        left = self._recorded
        if left is not None and not left.begun_ns and left.plan.trigger == "schedule":
            self._recorded = None  # its next one, which this run does not get to
        deadline_ns = self._clock() + int(timeout_s * NS_PER_S)
        while self._recorded is not None or self._job is not None:
            if self._recorded is not None and self._job is None:
                self._write(self._recorded, self._loop(), last=True)
            if self._job is not None and self._job.writing is not None:
                self._job.writing.end(max(0, deadline_ns - self._clock()) / NS_PER_S)
                self._tell(self._job, self._job.writing)

    def _arm(self, plan: CaptureRequest, loop: Loop) -> str:
        """Arm the gate; what is lacking for it, "" if nothing is."""
        lacking = self._profiler.lacking()
        if lacking:
            return lacking
        if self._bytes_per_step:  # the end of a recording costs training 15 ms for every MB that it holds
            most = max(1, self._place.max_bytes // self._bytes_per_step)
            if most < plan.steps:
                plan = plan._replace(steps=most, reason=f"{plan.reason} ({most} of {plan.steps} steps fit)")
        sources = loop.thread.sources
        self.gate.arm(plan, StepBoundary(loop.rule or _presumed(sources), sources), loop.thread)
        return ""

    def _write(self, recorded: Recorded, loop: Loop, *, last: bool = False) -> None:
        if recorded.begun_ns and loop.settled_ns <= recorded.ended_ns and not last:
            return  # its steps have no numbers yet
        self._recorded = None
        self._ended_ns[recorded.plan.cause] = recorded.ended_ns
        self._told_active = False
        self._story.active(active=False)
        within_ns = recorded.within_ns or recorded.begun_ns
        first = self._story.number(within_ns) if within_ns else NEXT
        steps = (first, first + recorded.steps - 1) if recorded.steps else (NEXT, NEXT)
        epoch = recorded.plan.epoch or self._story.epoch(within_ns or recorded.ended_ns)
        name = self._free_name(f"epoch_{epoch}-step_{max(first, 0)}")
        job = _Job(recorded._replace(trace=None), steps, epoch, name, None)
        if recorded.trace is None:
            record = self._document(job, CaptureOutcome())
            with suppress(OSError):  # the event and the log say it as well
                write_record(self._place.folder / (name + RECORD_SUFFIX), record)
            self._report(job, CaptureOutcome(), record)
        else:
            writing = Writing(
                recorded,
                name,
                self._place,
                self._profiler,
                first_step=max(first, 0),
                record=lambda outcome: self._document(job, outcome),
            )
            self._job = job._replace(writing=writing)

    def _free_name(self, wanted: str) -> str:
        name, number = f"{wanted}-rank{self._place.rank}", 1
        while (self._place.folder / (name + RECORD_SUFFIX)).exists():
            number += 1
            name = f"{wanted}-{number}-rank{self._place.rank}"
        return name

    def _tell(self, job: _Job, writing: Writing) -> None:
        self._job = None
        outcome = writing.outcome
        if job.recorded.steps and outcome.bytes:
            self._bytes_per_step = outcome.bytes // job.recorded.steps
        self._report(job, outcome, writing.record or self._document(job, outcome))

    def _report(self, job: _Job, outcome: CaptureOutcome, record: dict[str, Any]) -> None:
        recorded = job.recorded
        within_ns = (recorded.begun_ns or recorded.ended_ns, recorded.ended_ns)
        capture = Capture(
            recorded.plan.trigger, within_ns, job.steps, outcome.file, outcome.bytes,
            _error(recorded, outcome.problem), record["problem"], record["seconds"],
            str(record["finding"].get("claim", "")), record,
        )  # fmt: skip
        # What a machine lacks is no news where nobody asked for it by name.
        by_name = recorded.plan.options.activities != Options().activities
        for said in filter(None, (capture.problem, *outcome.notes, *(recorded.notes if by_name else ()))):
            _log.warning("Capture (%s): %s", capture.trigger, said)
        self._story.over(capture)

    def _document(self, job: _Job, outcome: CaptureOutcome) -> dict[str, Any]:
        """The record; what is found in the trace comes later."""
        recorded, unix_ns = job.recorded, self._story.unix_ns
        begun_ns = recorded.begun_ns or recorded.ended_ns
        return {
            "file": Path(outcome.file).name, "bytes": outcome.bytes, "trigger": recorded.plan.trigger,
            "reason": recorded.plan.reason, "alert": recorded.plan.alert, "rank": self._place.rank, "epoch": job.epoch,
            "steps": list(job.steps) if recorded.steps else [],
            "steps_asked": recorded.plan.steps, "steps_recorded": recorded.steps,
            "begun_unix_ns": unix_ns(begun_ns), "ended_unix_ns": unix_ns(recorded.ended_ns),
            "seconds": (self._clock() - begun_ns) / NS_PER_S,
            "options": recorded.plan.options._asdict(), "problem": _problem(recorded, outcome.problem),
            "notes": [*recorded.notes, *outcome.notes],
            "pinned": recorded.plan.pinned, "finding": {},
        }  # fmt: skip


class _Job(NamedTuple):
    """A capture that has been recorded and is on its way to the disk."""

    recorded: Recorded
    steps: tuple[int, int]
    epoch: int
    name: str
    writing: Writing | None


def _presumed(sources: Sequence[Instrumented]) -> Rule:
    """Where steps end before any has been seen."""
    return Rule(SourceKind.OPTIMIZER, asks=any(source.kind is SourceKind.DATA for source in sources))


def _problem(recorded: Recorded, writing: str) -> str:
    if recorded.problem or writing:
        return recorded.problem or writing
    asked = recorded.plan.steps
    return "" if recorded.steps >= asked else f"captured {recorded.steps} of {asked} steps"


def _error(recorded: Recorded, writing: str) -> str:
    """The problem in one word of a closed set."""
    if writing:
        return "size" if writing.startswith("too large") else "disk"
    if not recorded.begun_ns:
        return "refused" if recorded.problem else "short"
    if recorded.steps < recorded.plan.steps:
        return "profiler" if recorded.problem and recorded.trace is None else "short"
    return ""
