"""Starts and stops the profiler at step boundaries, on the training thread."""

from __future__ import annotations

import time
from _thread import get_ident
from collections.abc import Callable, Sequence
from enum import Enum
from typing import TYPE_CHECKING, Any, NamedTuple

from otel_train.datamodel import NS_PER_S, RANGE_PREFIX, Clock
from otel_train.profiler.requests import NEXT, CaptureRequest, Recorded
from otel_train.profiler.torch_profiler import STEP_PREFIX, Profiler
from otel_train.recording.events import OP_MASK, SOURCE_MASK, SOURCE_SHIFT, START_BITS, Op, SourceKind
from otel_train.safety import is_of_signal_handler

if TYPE_CHECKING:
    from otel_train.recording.events import Instrumented, StepRule


class StepBoundary:
    """Decides for every event, before it is written, whether a step ended just before it.

    Accounting decides later, and definitively, what a step was. Here, from the events so far, a step ends at the first
    batch request after an update; creating a loader's iterator is a request. In a loop without requests it ends after the
    last optimizer. The first round of optimizers, up to the first one again, shows which is last, and is not captured.
    """

    def __init__(self, rule: StepRule, sources: Sequence[Instrumented]) -> None:
        self._rule = rule
        self._sources = sources
        self._worked = False
        self._first = self._closing = self._latest = -1

    def before(self, code: int) -> bool:
        """Returns whether a step ended just before this event."""
        op, number = code & OP_MASK, code >> SOURCE_SHIFT & SOURCE_MASK
        kind = self._kind(number)
        if self._rule.work is SourceKind.MARK:
            return op == Op.MARK
        if self._rule.asks:
            return self._ends_at_request(op, kind, code)
        return self._ends_after_work(op, kind, number)

    @property
    def ended(self) -> bool:
        """Whether the step has done its work: the next event that can end a step ends this one."""
        return self._worked

    def begins(self, code: int) -> bool:
        """Returns whether a step, if none is running, begins with this event. An evaluation is not part of a step."""
        if not self._rule.asks or self._rule.work is SourceKind.MARK:
            return True
        number = code >> SOURCE_SHIFT & SOURCE_MASK
        requested = self._kind(number) is SourceKind.DATA and code & OP_MASK == Op.BEGIN
        return (requested and not self._is_aside(number)) or self.inside(code)

    def inside(self, code: int) -> bool:
        """Returns whether a step was certainly running just before this event, not an evaluation or a checkpoint."""
        number = code >> SOURCE_SHIFT & SOURCE_MASK
        if self._rule.work is SourceKind.MARK:
            return True  # marked steps are adjacent
        worked = self._kind(number) is self._rule.work and code & OP_MASK == Op.END and not code & START_BITS
        return worked and not self._is_aside(number)

    def _kind(self, number: int) -> SourceKind:
        kind = self._sources[number].kind
        return SourceKind.OPTIMIZER if kind is SourceKind.WHOLE else kind

    def _is_aside(self, number: int) -> bool:
        source = self._sources[number]
        return source.kind is SourceKind.DATA and source.name in self._rule.aside

    def _ends_at_request(self, op: int, kind: SourceKind, code: int) -> bool:
        if self.inside(code):
            self._worked = True
        if kind is not SourceKind.DATA or op != Op.BEGIN:
            return False
        ended, self._worked = self._worked, False
        return ended

    def _ends_after_work(self, op: int, kind: SourceKind, number: int) -> bool:
        ended, self._worked = self._worked, False
        if kind is not self._rule.work:
            return ended
        if op == Op.BEGIN:
            if number == self._first:
                self._closing = self._latest
            elif self._first < 0:
                self._first = number
        elif op == Op.END:
            self._latest = number
            self._worked = number == self._closing
        return ended


_POLL_S = 0.01
_NEVER_NS = (1 << 63) - 1
_RANGED = frozenset(SourceKind) - {SourceKind.MARK}


class CapturePhase(Enum):
    """Progress of a capture."""

    IDLE = "idle"
    WAITING = "waiting"
    WARMUP = "warmup"
    ACTIVE = "active"
    DONE = "done"


class ProfiledThread(NamedTuple):
    """The thread to record. ``intercept`` installs a function between the thread and its ring buffer; None removes it."""

    ident: int
    sources: Sequence[Instrumented]
    intercept: Callable[[Callable[[int, Callable[[int], None]], None] | None], None]


class StepScheduler:
    """Intercepts the training thread's events from the arming of a capture until its end.

    The service thread arms it and takes the recording. Everything else runs on the training thread, at its events. A fault
    of the profiler ends the capture with a problem and does not reach the program.

    ``begun_ns`` is the start of the recording, ``first_ns`` an instant in the first step that began after arming, 0 before
    that; ``first_number`` is the number of that step, set later by the service thread.
    """

    def __init__(
        self, profiler: Callable[[Callable[[], None]], Profiler], *, clock: Clock, max_s: float
    ) -> None:
        self.phase = CapturePhase.IDLE
        self._result: Recorded | None = None
        self.begun_ns = self.first_ns = self._ended_ns = self._within_ns = 0
        self.first_number = NEXT
        self.profiler = profiler(self._give_way)
        self._clock = clock
        self._max_ns = int(max_s * NS_PER_S)
        self._request = CaptureRequest("on_demand", 1)
        self._abort = ""

    def arm(self, request: CaptureRequest, boundary: StepBoundary, thread: ProfiledThread) -> None:
        """Arms a capture. Called by the service thread when idle."""
        self._request, self._boundary, self._thread = request, boundary, thread
        self._abort, self._missing = "", list[str]()
        self._over = self._between = False
        self._open: list[tuple[int, Callable[[], object]]] = []
        self._step: Callable[[], object] | None = None
        self._boundaries = self._left = self._steps = 0
        self._result = None
        self.first_ns, self.first_number, self.begun_ns, self._ended_ns, self._within_ns = 0, NEXT, 0, 0, 0
        self.phase = CapturePhase.WAITING
        thread.intercept(self._on_edge)
        if request.at_once and get_ident() == thread.ident:
            self._contain(self._end_of_step)
            self._contain(self._begin_of_step)

    def take(self) -> Recorded | None:
        """Returns the finished recording and becomes idle; None while there is none. Called by the service thread."""
        result, self._result = self._result, None
        if result is not None:  # without one, the training thread may be stopping the profiler
            self.phase = CapturePhase.IDLE
        return result

    @property
    def running(self) -> bool:
        """Whether a capture is armed or runs."""
        return self.phase not in (CapturePhase.IDLE, CapturePhase.DONE)

    @property
    def within_ns(self) -> tuple[int, int]:
        """Start and end of the last recording, or a distant end while it runs; (0, 0) without one."""
        return (self.begun_ns, self._ended_ns or _NEVER_NS) if self.begun_ns else (0, 0)

    def abort(self, why: str) -> None:
        """Ends the capture: at once if called on the training thread, else at the next event of that thread."""
        if not self.running:
            return
        self._abort = self._abort or why
        self._over = True
        if get_ident() == self._thread.ident:
            self._finish()

    def over(self) -> None:
        """Ends the capture of an epoch with the steps it has. Called by the training thread."""
        if self._request.at_once and self.running:
            if self._boundary.ended and get_ident() == self._thread.ident:
                self._contain(self._end_of_step)
            self.abort("")

    def wait(self, timeout_s: float) -> None:
        """Waits until the training thread has ended the recording at an event, at most ``timeout_s``."""
        deadline_ns = self._clock() + int(timeout_s * NS_PER_S)
        while (
            self.phase not in (CapturePhase.IDLE, CapturePhase.WAITING)
            and self._result is None
            and self._clock() < deadline_ns
        ):
            time.sleep(_POLL_S)

    # -- on the training thread --------------------------------------------------------------------

    def _on_edge(self, code: int, write: Callable[[int], None]) -> None:
        try:
            self._contain(self._before, code)
        finally:
            write(code)
        if code & OP_MASK < Op.END and self.phase is CapturePhase.ACTIVE:
            self._contain(self._open_range, code >> SOURCE_SHIFT & SOURCE_MASK)

    def _before(self, code: int) -> None:
        if self._boundaries and self._boundary.inside(code):
            self._record_instant()
        if self._boundary.before(code):
            self._end_of_step()
        if not self._over and self.begun_ns and self._clock() - self.begun_ns > self._max_ns:
            self._abort = self._abort or f"stopped after {self._max_ns / NS_PER_S:g} s"
            self._over = True
        if self._over:
            if self.phase is not CapturePhase.DONE:
                self._finish()
        elif self._between and self._boundary.begins(code):
            self._begin_of_step()
        if code & OP_MASK >= Op.END and self._open:
            self._close_range(code >> SOURCE_SHIFT & SOURCE_MASK)

    def _contain(self, do: Callable[..., None], *what: int) -> None:
        try:
            do(*what)
        except Exception as error:  # the profiler's fault is the capture's, not training's
            self._abort = self._abort or f"{type(error).__name__}: {error}".splitlines()[0][:300]
            if self.phase is not CapturePhase.DONE:
                self._finish()
            if is_of_signal_handler(error):  # the program's, such as a watchdog
                raise

    def _record_instant(self) -> None:
        """Records an instant inside the step, by which accounting finds its number later."""
        if self.begun_ns:
            self._within_ns = self._within_ns or self._clock()
        self.first_ns = self.first_ns or self._clock()

    def _end_of_step(self) -> None:
        self._boundaries += 1
        self._between = True
        if self.phase is CapturePhase.ACTIVE:
            self._steps += 1
            self._end_step()
            if self._steps >= self._request.steps:
                self._finish()

    def _begin_of_step(self) -> None:
        self._between = False
        if self.phase is CapturePhase.WAITING and self._is_time():
            self._warm_up()
        elif self.phase is CapturePhase.WARMUP:
            self._left -= 1
        if self.phase is CapturePhase.WARMUP and self._left <= 0:
            self.profiler.start()
            self.begun_ns = self._clock()
            self.phase = CapturePhase.ACTIVE
        if self.phase is CapturePhase.ACTIVE:
            # The number in the run may not be known yet: ``storage`` replaces this one in the file.
            self._step = self.profiler.range(f"{STEP_PREFIX}{self._steps}")

    def _is_time(self) -> bool:
        """Returns whether to warm up for the step that begins now."""
        ahead = self._boundaries - 1
        if self._request.at_step == NEXT:
            return ahead >= self._request.wait
        if self.first_number == NEXT:
            return False
        late = self.first_number + ahead - (self._request.at_step - self._request.warmup)
        if late > 0:  # other ranks may have captured the requested steps: others are not comparable
            self._abort = f"step {self._request.at_step} was over when the request reached this process"
            self._finish()
        return late == 0

    def _warm_up(self) -> None:
        if self.profiler.busy():
            self._abort = "another profiler is running in this process"
            self._finish()
            return
        self.phase = CapturePhase.WARMUP
        self._left = self._request.warmup
        self._missing = self.profiler.prepare(self._request.options)

    def _end_step(self) -> None:
        while self._open:
            self._open.pop()[1]()
        if self._step is not None:
            self._step()
            self._step = None

    def _open_range(self, number: int) -> None:
        source = self._thread.sources[number]
        if source.kind in _RANGED:
            name = f"{source.stage}:{source.name}" if source.kind is SourceKind.DATA else source.stage
            self._open.append((number, self.profiler.range(RANGE_PREFIX + name)))

    def _close_range(self, number: int) -> None:
        """Closes this range, and ranges inside it that an exception left open."""
        if any(number == each for each, _ in self._open):
            while self._open:
                each, close = self._open.pop()
                close()
                if each == number:
                    return

    def _finish(self) -> None:
        """Ends the recording."""
        before, self.phase = self.phase, CapturePhase.DONE
        self._thread.intercept(None)
        self._trace: Any = None
        self._ended_ns = self._clock()
        try:
            if before in (CapturePhase.WARMUP, CapturePhase.ACTIVE):
                self._contain(self._stop, before is CapturePhase.WARMUP)
        finally:
            self._result = Recorded(
                self._request, self._trace, self._steps, self.begun_ns, self._clock(),
                self._abort, tuple(self._missing), self._within_ns,
            )  # fmt: skip

    def _stop(self, warming: int) -> None:
        if warming:
            self.profiler.start()  # a profiler that was only prepared cannot be stopped
        self._end_step()
        trace = self.profiler.stop()
        self._trace = None if warming else trace

    def _give_way(self) -> None:
        if not self.running:
            return
        self._abort, self._over = "the program started a profiler of its own", True
        if get_ident() == self._thread.ident:
            self._finish()
