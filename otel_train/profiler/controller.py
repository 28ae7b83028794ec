"""Runs one capture at a time, with a cooldown between automatic ones."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from otel_train.datamodel import NS_PER_S, Capture, Clock
from otel_train.profiler.requests import NEXT, UNDER_WAY, CaptureRequest, Options, Recorded
from otel_train.profiler.step_schedule import CapturePhase, ProfiledThread, StepBoundary, StepScheduler
from otel_train.profiler.storage import (
    CaptureJob,
    CaptureOutcome,
    CaptureStore,
    CaptureWriter,
    finding_summary,
)
from otel_train.recording.events import Instrumented, LoopState, SourceKind, StepRule

if TYPE_CHECKING:
    from otel_train.config.settings import Tuning
    from otel_train.profiler.torch_profiler import Profiler


class TrainingState(Protocol):
    """Access to the training loop, and to its step accounting in the agent.

    Attributes:
        loop: its state as the agent last reported it, up to 2 s ago.
    """

    loop: LoopState

    def thread(self) -> ProfiledThread:
        """Returns the training thread."""

    def number(self, at_ns: int) -> int:
        """Returns the number of the step at an instant."""

    def epoch(self, at_ns: int) -> int:
        """Returns the pass over the training data at an instant, from 1."""

    def unix_ns(self, clock_ns: int) -> int:
        """Converts an instant to Unix time."""

    def active(self, *, active: bool) -> None:
        """Reports whether a capture runs."""

    def over(self, capture: Capture) -> None:
        """Reports a finished capture to the agent."""


_log = logging.getLogger("otel_train")

MAX_QUEUED = 2
"""Requests that may wait while a capture runs: the schedule's and one more."""


class CaptureController:
    """Takes requests, arms the step scheduler, and passes recordings to a writer. Runs on the service thread."""

    def __init__(
        self,
        profiler: Callable[[Callable[[], None]], Profiler],
        *,
        training: TrainingState,
        done: Callable[[Capture], None],
        place: CaptureStore,
        clock: Clock,
        tuning: Tuning,
    ) -> None:
        self.scheduler = StepScheduler(profiler, clock=clock, max_s=tuning.profiler_max_s)
        self._profiler = self.scheduler.profiler
        self._training = training
        self._done = done
        self._place = place
        self._clock = clock
        self._cooldown_ns = int(tuning.profiler_cooldown_s * NS_PER_S)
        self._ended_ns: dict[str, int] = {}
        self._queued: deque[CaptureRequest] = deque()
        self._queue_lock = threading.Lock()  # requests come from several threads
        self._job: _Job | None = None
        self._recorded: Recorded | None = None
        self._bytes_per_step = 0
        self._reported_active = False
        self.others: Callable[[], bool] = lambda: False  # whether the FLOP count is under way
        self.end_others: Callable[[], object] = (
            bool  # ends it; called by the training thread between two steps
        )

    def ask(self, request: CaptureRequest) -> str:
        """Queues a request. Thread-safe. Returns "", or the reason if it is refused."""
        with self._queue_lock:
            refusal = self.refusal(request)
            if refusal:
                return refusal
            if request.trigger == "schedule":
                self._queued.append(request)
            else:  # before scheduled ones: its caller waits for it
                self._queued.appendleft(request)
            return ""

    def refusal(self, request: CaptureRequest) -> str:
        """Returns the reason why ``ask`` would refuse a request now; "" if it would not."""
        unavailable = self._profiler.unavailable()
        if unavailable and self._training.loop.rule is not None:  # training runs, and has not imported torch
            return unavailable
        same_cause = any(other.cause == request.cause for other in tuple(self._queued))
        idle = self.scheduler.phase is CapturePhase.IDLE
        if len(self._queued) >= MAX_QUEUED or (request.automatic and (same_cause or not idle)):
            return UNDER_WAY
        ended_ns = self._ended_ns.get(request.cause)
        pause_ns = 0 if ended_ns is None else ended_ns + self._cooldown_ns - self._clock()
        if request.automatic and pause_ns > 0:
            return f"the last capture by {request.cause} is too recent: next in {pause_ns / NS_PER_S:.0f} s"
        return ""

    @property
    def needs_step_numbers(self) -> bool:
        """Whether a capture waits for the step rule or for step numbers, which only accounting provides."""
        scheduler = self.scheduler
        armed = scheduler.phase is not CapturePhase.IDLE
        unnumbered = armed and scheduler.first_ns > 0 and scheduler.first_number == NEXT
        unruled = bool(self._queued) and self._training.loop.rule is None
        return unruled or self._recorded is not None or unnumbered

    @property
    def busy(self) -> bool:
        """Whether a capture is armed, runs, or waits to be written, or ``others`` intercept the events."""
        return self.scheduler.phase is not CapturePhase.IDLE or self._recorded is not None or self.others()

    @property
    def running(self) -> bool:
        """Whether a capture is armed or runs."""
        return self.scheduler.running

    @property
    def finished(self) -> bool:
        """Whether all recordings are written, analysed and reported."""
        return self.scheduler.phase is not CapturePhase.DONE and self._recorded is None and self._job is None

    @property
    def recording(self) -> bool:
        """Whether a capture is armed, runs, or is being written."""
        return self.running or not self.finished

    @property
    def wanted(self) -> bool:
        """Whether a request waits, or a capture is armed, runs, or is being written."""
        return self.recording or bool(self._queued)

    def begin(self, request: CaptureRequest) -> str:
        """Arms the step scheduler, which must not be busy; returns why not, or "". Called by the service thread, or between two steps."""
        unavailable = self._profiler.unavailable()
        if unavailable:
            return unavailable
        if self._bytes_per_step:  # stopping the profiler takes the training thread 15 ms per MB of trace
            most = max(1, self._place.max_bytes // self._bytes_per_step)
            if most < request.steps:
                request = request._replace(
                    steps=most, reason=f"{request.reason} ({most} of {request.steps} steps fit)"
                )
        thread = self._training.thread()
        rule = self._training.loop.rule or _default_rule(thread.sources)
        self.scheduler.arm(request, StepBoundary(rule, thread.sources), thread)
        return ""

    def poll(self, *, last: bool = False) -> None:
        """Runs one iteration: arm, number, write, report. ``last``: no further step numbers will arrive."""
        loop = self._training.loop
        for request in list(self._queued):
            if not self.busy and request.is_near(loop) and loop.rule is not None:
                with self._queue_lock:
                    self._queued.remove(request)
                unavailable = self.begin(request)
                if unavailable:
                    _log.warning("Capture (%s): %s", request.trigger, unavailable)
        scheduler = self.scheduler
        if scheduler.first_number == NEXT and 0 < scheduler.first_ns < loop.final_ns:
            scheduler.first_number = self._training.number(scheduler.first_ns)
        if scheduler.phase is CapturePhase.ACTIVE and not self._reported_active:
            self._reported_active = True
            self._training.active(active=True)
        if self._recorded is None:
            self._recorded = scheduler.take()
        if self._recorded is not None and self._job is None:
            self._write(self._recorded, last=last)
        if self._job is not None and self._job.writer.over:
            self._finish(self._job)

    def end(self, timeout_s: float) -> None:
        """Writes what was recorded, within ``timeout_s``. To be called after all events are accounted.

        A request for which no step has come is reported as a capture without steps, unless the schedule made it.
        """
        last = self._recorded or self.scheduler.take()
        with self._queue_lock:
            waiting = [Recorded(request, None, 0, 0, self._clock()) for request in self._queued]
            self._queued.clear()
        left = deque(
            each
            for each in (last, *waiting)
            if each and (each.begun_ns or each.request.trigger != "schedule")
        )
        deadline_ns = self._clock() + int(timeout_s * NS_PER_S)
        while left or self._job is not None:
            if self._job is None:
                self._write(left.popleft(), last=True)
            if self._job is not None:
                self._job.writer.end(max(0, deadline_ns - self._clock()) / NS_PER_S)
                self._finish(self._job)
        self._recorded = None

    def _write(self, recorded: Recorded, *, last: bool) -> None:
        if recorded.begun_ns and self._training.loop.final_ns <= recorded.ended_ns and not last:
            return  # accounting has not numbered its steps yet
        self._recorded = None
        self._ended_ns[recorded.request.cause] = recorded.ended_ns
        self._reported_active = False
        self._training.active(active=False)
        within_ns = recorded.within_ns or recorded.begun_ns
        first = self._training.number(within_ns) if within_ns else NEXT
        steps = (first, first + recorded.steps - 1) if recorded.steps else (NEXT, NEXT)
        epoch = recorded.request.epoch or self._training.epoch(within_ns or recorded.ended_ns)
        wants_device = any(activity != "cpu" for activity in recorded.request.options.activities)
        name, metadata = f"epoch_{epoch}-step_{max(first, 0)}", self._metadata(recorded, steps, epoch)
        job = CaptureJob(
            self._place, name, metadata, max(first, 0), time.monotonic(),
            wants_device=wants_device and not recorded.missing, output=recorded.request.output_dir,
        )  # fmt: skip
        writer = CaptureWriter(job, recorded.trace, self._profiler)
        self._job = _Job(recorded._replace(trace=None), steps, writer)

    def _finish(self, job: _Job) -> None:
        self._job = None
        recorded, outcome, metadata = job.recorded, job.writer.outcome, job.writer.metadata
        if recorded.steps and outcome.bytes:
            self._bytes_per_step = outcome.bytes // recorded.steps
        interval_ns = (recorded.begun_ns or recorded.ended_ns, recorded.ended_ns)
        capture = Capture(
            recorded.request.trigger, interval_ns, job.steps, outcome.file, outcome.bytes,
            _error(recorded, outcome), metadata["problem"], metadata["seconds"],
            finding_summary(metadata), metadata,
        )  # fmt: skip
        # A missing activity is reported only if it was requested explicitly.
        by_name = recorded.request.options.activities != Options().activities
        problems = capture.problem, *outcome.missing, *(recorded.missing if by_name else ())
        for problem in filter(None, problems):
            _log.warning("Capture (%s): %s", capture.trigger, problem)
        self._done(capture)

    def _metadata(self, recorded: Recorded, steps: tuple[int, int], epoch: int) -> dict[str, Any]:
        """Returns the metadata. The writer adds file, size and its problems, the analysis adds the findings."""
        request, unix_ns = recorded.request, self._training.unix_ns
        begun_ns = recorded.begun_ns or recorded.ended_ns
        return {
            "file": "", "bytes": 0, "trigger": request.trigger, "reason": request.reason,
            "request_id": request.request_id, "alert": request.alert,
            "rank": self._place.rank, "epoch": epoch, "steps": list(steps) if recorded.steps else [],
            "steps_asked": request.steps, "steps_recorded": recorded.steps,
            "begun_unix_ns": unix_ns(begun_ns), "ended_unix_ns": unix_ns(recorded.ended_ns),
            "seconds": (self._clock() - begun_ns) / NS_PER_S,
            "options": request.options._asdict(), "problem": _problem(recorded),
            "warnings": list(recorded.missing), "pinned": request.pinned, "finding": {},
        }  # fmt: skip


class _Job(NamedTuple):
    recorded: Recorded
    steps: tuple[int, int]
    writer: CaptureWriter


def _default_rule(sources: Sequence[Instrumented]) -> StepRule:
    """Returns the step rule to use before any step has closed."""
    return StepRule(SourceKind.OPTIMIZER, asks=any(source.kind is SourceKind.DATA for source in sources))


def _problem(recorded: Recorded) -> str:
    if recorded.problem:
        return recorded.problem
    wanted = recorded.request.steps
    return "" if recorded.steps >= wanted else f"captured {recorded.steps} of {wanted} steps"


def _error(recorded: Recorded, outcome: CaptureOutcome) -> str:
    """Returns the ``error`` of a ``Capture``."""
    if outcome.problem:
        return "size" if outcome.problem.startswith("too large") else "disk"
    if recorded.problem and not outcome.file:
        return "profiler" if recorded.begun_ns else "refused"
    return "short" if recorded.steps < recorded.request.steps else ""
