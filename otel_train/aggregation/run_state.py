"""State of a run: its threads, steps and totals, and the spans and events derived from them."""

from __future__ import annotations

import re
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from otel_train.accounting.account import ThreadAccount
from otel_train.accounting.nesting import DATA
from otel_train.accounting.types import NOTHING, TRAIN, Activity, ClosedSteps, StageCalls, StepSource
from otel_train.aggregation.counters import (
    Compiles,
    DeviceAccount,
    ReclaimedTime,
    Totals,
    Transfers,
    WorkBeside,
)
from otel_train.aggregation.epochs import EpochBoundary, EpochTracker
from otel_train.aggregation.run_events import CaptureTotals, Checkpoints, EvalPasses, StallContext, Stalls
from otel_train.aggregation.series_names import SeriesNames
from otel_train.aggregation.spans import MOST_CHILDREN, Ids, SamplingRules, SpanBuilder, SpanSampler
from otel_train.catalog import (
    RECOMPILE_EVENT,
    RUN_END_CAUSE,
    RUN_KILLED_EVENT,
    SPAN_STAGE,
    STAGES,
    STEP_NUMBER,
)
from otel_train.datamodel import NS_PER_S, Anchor, AttributeValue, Capture, Compile, system_clock
from otel_train.recording.events import END, OP_MASK, SOURCE_MASK, SOURCE_SHIFT, STOP, SUSPEND, Op

if TYPE_CHECKING:
    from otel_train.recording.events import Instrumented


_EVENTS_PER_YIELD = 32
"""Events processed between two yields of the GIL: about 0.2 ms."""

SLICE_EDGES = 8192
"""Most events of a ring that are read at once."""

_NUMBER = re.compile(r"(?<=^Thread)-\d+")  # as in ``Thread-7 (fetch)``, the name that Python gives by default

_LAST_OF_A_LOOP = (Op.STOP, Op.EPOCH_END, Op.PASS_END)

MOST_BACKWARDS = 4096
"""Most backward passes of one step that are counted."""

REMEMBERED_STEPS = 8192
"""Most recent steps whose end and number are kept, for ``RecentSteps.at``."""


class StepPosition(NamedTuple):
    """Position of a thread within its step, by the events that have been read.

    Attributes:
        stage: the innermost open stage, or ``other``.
        loader: the loader it waits for, or "".
        after: built-in stage that ended last in this step, or ``UNKNOWN``; "" if none has.
        within: the innermost open built-in stage, or "".
        backwards: backward passes that have ended in this step.
    """

    stage: str = "other"
    loader: str = ""
    after: str = ""
    within: str = ""
    backwards: int = 0


UNKNOWN = "unknown"
"""Value of ``StepPosition.after`` if a loader had no further batch: such an end has no fixed place in a step."""


class StageEnds:
    """The last end of a built-in stage, and the recent ends of backward passes, of a thread."""

    def __init__(self) -> None:
        self._last_ns, self._last = -1, ""
        self._backwards: deque[int] = deque(maxlen=MOST_BACKWARDS)

    def add(self, times: np.ndarray, codes: np.ndarray, sources: Sequence[Instrumented]) -> None:
        """Takes the next events."""
        # By source number; the last entry is for numbers that are not in ``sources``.
        stages = [*(source.stage for source in sources), ""]
        ops, numbers = codes & OP_MASK, np.minimum((codes >> SOURCE_SHIFT) & SOURCE_MASK, len(sources))
        built_in = np.array([stage in STAGES for stage in stages])
        ends = np.flatnonzero((ops >= END) & (ops <= SUSPEND) & built_in[numbers])
        if len(ends):
            last = ends[-1]
            self._last_ns = int(times[last])
            self._last = UNKNOWN if ops[last] == STOP else stages[numbers[last]]
            backward = np.array([stage == "backward" for stage in stages])
            self._backwards.extend(times[ends[backward[numbers[ends]]]].tolist())

    def since(self, step_ended_ns: int) -> tuple[str, int]:
        """Returns the built-in stage that ended last after that instant ("" for none), and how many backward passes did."""
        while self._backwards and self._backwards[0] <= step_ended_ns:
            self._backwards.popleft()
        return self._last if self._last_ns > step_ended_ns else "", len(self._backwards)


class RecentSteps:
    """Maps instants to the numbers of recently closed steps."""

    def __init__(self) -> None:
        self._steps: deque[tuple[int, int]] = deque(maxlen=REMEMBERED_STEPS)

    def add(self, ends_ns: np.ndarray, numbers: np.ndarray) -> None:
        """Adds closed steps, oldest first."""
        self._steps.extend(zip(ends_ns.tolist(), numbers.tolist(), strict=True))

    def at(self, at_ns: int, running: int) -> int:
        """Returns the number of the step at ``at_ns``; ``running`` if it has not closed."""
        found = running
        for ended_ns, number in reversed(self._steps):
            if ended_ns <= at_ns:
                break
            found = number
        return found


@dataclass(slots=True)
class ThreadState:
    """One thread that writes events.

    Attributes:
        label: distinguishes its traces from those of the leading thread.
        follows: the leading thread that had ended when this one began, unless this one leads now; the time of this one begins at
            that end.
        step_ended_ns: when its last training step ended.
        steps_ended: training steps that have ended.
        open_step: calls of the open step, in case the step is sampled.
        in_rows: whether its time is in the rows of phases.
        activity_ns: the run's time by ``Activity``, if this thread had been the leading one since it began.
    """

    name: str
    main: bool
    account: ThreadAccount
    label: str = ""
    follows: ThreadState | None = None
    key: int = 0
    over: bool = False
    last_ns: int = 0
    last_code: int = 0
    ends: StageEnds = field(default_factory=StageEnds)
    step_ended_ns: int = -1
    steps_ended: int = 0
    open_step: list[StageCalls] = field(default_factory=list)
    next_number: int = 0
    in_rows: bool = False
    activity_ns: np.ndarray = field(default_factory=partial(np.zeros, len(Activity), dtype=np.int64))

    @property
    def works(self) -> bool:
        """Whether it computes or marks steps: it does not only read a loader."""
        return self.account.computes or self.account.marks

    @property
    def idle(self) -> bool:
        """Whether its loops have ended, so that silence is expected."""
        return self.over or (self.last_code & OP_MASK in _LAST_OF_A_LOOP and not self.account.open)

    def works_since(self, at_ns: int) -> bool:
        """Returns whether it is in a stage, or has written an event since then."""
        return bool(self.account.open) or self.last_ns > at_ns

    def number(self, manual: np.ndarray) -> np.ndarray:
        """Returns numbers of closed steps: those set manually, else consecutive."""
        numbers = np.empty(len(manual), dtype=np.int64)
        for place, number in enumerate(manual.tolist()):
            numbers[place] = number if number >= 0 else self.next_number
            self.next_number = int(numbers[place]) + 1
        if self.account.number >= 0:
            self.next_number = self.account.number
        return numbers

    def position(self, sources: Sequence[Instrumented]) -> StepPosition:
        """Returns the position of the thread in its step; ``sources`` are all known sources."""
        after, backwards = self.ends.since(self.step_ended_ns)
        if not self.account.open:
            return StepPosition(after=after, backwards=backwards)
        innermost = self.account.open[-1]
        source = sources[innermost.source]
        stages = [sources[each.source].stage for each in self.account.open]
        within = next((stage for stage in reversed(stages) if stage in STAGES), "")
        loader = source.name if innermost.kind == DATA else ""
        return StepPosition(source.stage, loader, after, within, backwards)


class RunState:
    """Takes events of all threads, keeps the run's totals, and derives spans and events.

    ``release_gil``, where it is given, is called after every few events, so that a training thread in the same process can take the GIL.

    Attributes:
        training_threads: threads whose time is in the rows of phases. The rows of several overlap.
    """

    def __init__(
        self,
        started_ns: int,
        *,
        anchor: Anchor,
        ids: Ids,
        rules: SamplingRules,
        stall_after_s: float,
        release_gil: Callable[[], None] | None = None,
    ) -> None:
        self.started_ns, self._anchor = started_ns, anchor
        self.names = SeriesNames()
        self.totals = Totals(self.names)
        self.device = DeviceAccount(self.totals)
        self.transfers = Transfers()
        self.spans = SpanBuilder(ids, self.unix, self.names, device_ns=self.device.of)
        self.sampler = SpanSampler(rules, started_ns)
        self.checkpoints = Checkpoints()
        self.evals = EvalPasses()
        self.epochs = EpochTracker(self.names)
        self._reclaimed = ReclaimedTime()
        self.stalls = Stalls(started_ns, stall_after_s, self._reclaimed)
        self.compiles = Compiles(self._reclaimed, self.totals)
        self.captures = CaptureTotals()
        self.loader_errors: Counter[str] = Counter()
        self.closed, self.training_threads = False, 0
        self.leading: ThreadState | None = None  # the training thread, once it is known
        self.down_s: float | None = None  # seconds between the previous attempt and this one
        self.total_down_s = 0.0  # with those before earlier attempts
        self._threads: dict[int, ThreadState] = {}
        self._computed = False  # whether a thread that has ended ran the forwards of steps
        self._source_before = StepSource.UNDECIDED  # of the leading threads that have ended
        self._last_reader = ""  # name of the last thread that only read a loader and has ended
        self._threads_seen, self._closed_ns, self._last_step, self._looked_ns = 0, 0, 0, 0
        self.recent, self._beside = RecentSteps(), WorkBeside()
        self.on_closed_steps: (
            Callable[[ClosedSteps, np.ndarray, np.ndarray, list[EpochBoundary]], object] | None
        ) = None
        self._release_gil = release_gil
        self._phase = TRAIN

    def unix(self, clock_ns: int) -> int:
        """Returns the Unix time, in nanoseconds, of an instant on the monotonic clock."""
        return self._anchor.unix(clock_ns)

    def began_unix(self, said_ns: int) -> int:
        """Returns the Unix time in nanoseconds when the run began: ``said_ns``, which was read from the system clock then.

        If that clock has been set back since, it is the earlier time by the present clock, so that nothing ends before it began.
        """
        return min(said_ns, self.unix(self.started_ns))

    def follow_system_clock(self) -> None:
        """Renews the mapping to Unix time after the system clock was set, or the machine was suspended."""
        self._anchor = self._anchor.renewed(system_clock())

    # -- input -------------------------------------------------------------------------------------

    def learn(self, sources: Sequence[Instrumented]) -> None:
        """Adds new sources."""
        self.names.learn(sources)

    def feed(self, thread: int, times: np.ndarray, codes: np.ndarray, *, name: str, main: bool) -> None:
        """Takes the next slice of a thread's events: int64[n] each, times never falling. ``main``: it called ``instrument``."""
        if not len(times):
            return
        mine = self._threads.get(thread)
        if mine is None:
            mine = self._threads[thread] = self._new_thread(name, int(times[0]), main=main)
            mine.key = thread
        # A stall ends with the first event of the slice, not with the last.
        self.stalls.progress(int(times[0]))
        release = self._release_gil
        size = len(times) if release is None else _EVENTS_PER_YIELD
        for first in range(0, len(times), size):
            part = slice(first, first + size)
            mine.account.feed(times[part].tolist(), codes[part].tolist())
            if release is not None:
                release()
        mine.ends.add(times, codes, self.names.sources)
        mine.last_ns, mine.last_code = int(times[-1]), int(codes[-1])
        self.stalls.progress(mine.last_ns)
        # Otherwise ``check_stalls`` takes its steps, after the events of all threads have been read.
        if (self.leading is not None or mine.works or not main) and not self._is_part(mine):
            self._take(mine, mine.account.take())

    def compiled(self, compiles: Iterable[Compile]) -> None:
        """Adds compilations."""
        for recompile in self.compiles.add(compiles):
            self.spans.event(RECOMPILE_EVENT.name, recompile.ended_ns, {STEP_NUMBER.name: self.step_number})

    def captured(self, capture: Capture) -> None:
        """Adds a finished capture."""
        self.captures.add(capture)
        self.spans.capture(capture)

    def killed(self, cause: str) -> None:
        """Records that the process was killed; ``cause``: a signal's name, ``exit code <n>``, or what is known."""
        stages = self.open_stages()
        attributes: dict[str, AttributeValue] = {
            STEP_NUMBER.name: self._last_step,
            RUN_END_CAUSE.name: cause,
            SPAN_STAGE.name: stages[-1] if stages else "other",
        }
        self.spans.event(RUN_KILLED_EVENT.name, self.final_ns, attributes)
        self.spans.end(self.final_ns, self.step_number, error=cause)

    def end_thread(self, thread: int) -> None:
        """Closes a thread that has ended and been read completely."""
        mine = self._threads.pop(thread, None)
        if mine is not None:
            self._take(mine, mine.account.close(mine.last_ns))
            for over in self.evals.close(mine.label):
                self.spans.evaluation(over, self.step_number)
            mine.over = True
            if self._only_reads(mine):
                self._last_reader = mine.name
            self._computed |= mine.account.computes and not self._is_part(mine)

    def check_stalls(self, now_ns: int, behind: Collection[int] = ()) -> None:
        """Detects stalls while they last, and accounts time that belongs to no batch. Threads ``behind`` have unread events."""
        # While other threads work, time of the leading one is accounted only up to where theirs is final.
        working = [each.account.final_ns for each in self._others if each.works_since(self._looked_ns)]
        until_ns, self._looked_ns = min([now_ns, *working]), now_ns
        for key, each in list(self._threads.items()):
            if key not in behind:
                each.account.pass_time(until_ns if each is self.leading else now_ns)
            self._take(each, each.account.take())
        self._share_outside(now_ns)
        thread = self.leading
        if thread is None or self.closed or thread.key in behind:
            return
        if self.stalls.check(now_ns, self.sampler.median_ns, doing=self._doing(thread)):
            at = thread.position(self.names.sources)
            self.stalls.count(at.stage)
            self.spans.stall((thread.last_ns, now_ns), self.step_number, at.stage, at.loader)

    def close(self, at_ns: int) -> None:
        """Accounts everything up to ``at_ns``."""
        self.stalls.progress(at_ns)
        if self.leading is None and not self._threads:
            self._threads[0] = self._new_thread("main", at_ns, main=True)
        threads = sorted(self._threads.values(), key=lambda each: not each.works)
        for thread in threads:
            thread.account.release_all()
            self._take(thread, thread.account.take())
        self._last_step = self.step_number  # before the end closes the open step, if that has an update
        for thread in threads:
            self._take(thread, thread.account.close(at_ns))
        if self.leading is None:  # without training all time is initialisation
            self.totals.activity_ns[Activity.INIT] = at_ns - self.started_ns
        elif self.leading.over and self._accounted_ns < at_ns:
            rest = [self._accounted_ns, at_ns, Activity.OUTSIDE, at_ns - self._accounted_ns]
            self._beside.add_outside([rest])
            self.totals.add_outside(rest[-1])
        self._share_outside(at_ns)
        self._closed_ns = at_ns
        for over in self.evals.close():
            self.spans.evaluation(over, self.step_number)
        self.closed = True

    # -- state --------------------------------------------------------------------------------------

    @property
    def step_number(self) -> int:
        """Number of the running step: the steps counted so far, unless set manually."""
        return self.leading.next_number if self.leading else 0

    def steps_ended(self) -> tuple[int, int]:
        """Returns how many training steps of the leading thread have ended, and when the last one did; two zeros if none has."""
        leading = self.leading
        return (leading.steps_ended, leading.step_ended_ns) if leading and leading.steps_ended else (0, 0)

    @property
    def step_source(self) -> StepSource:
        """What steps are counted by: those of the leading thread, or of earlier leading threads while it has none."""
        own = self.leading.account.source if self.leading else StepSource.UNDECIDED
        return self._source_before if own is StepSource.UNDECIDED else own

    @property
    def final_ns(self) -> int:
        """Time before this instant is final."""
        return max(self._closed_ns, self.leading.account.final_ns if self.leading else self.started_ns)

    def ended_by(self, now_ns: int) -> int:
        """Returns the end of the run's time: ``now_ns`` while it runs, else when it was closed."""
        return self.final_ns if self.closed else now_ns

    @property
    def loader_threads(self) -> list[str]:
        """Names of threads that only read a loader. The training thread's wait for them is not measured.

        They are without the number that Python adds, so that threads of successive epochs have one name.
        """
        names = [thread.name for thread in self._threads.values() if self._only_reads(thread)]
        if self._last_reader and not (names or (self.leading and self.leading.account.asks)):
            names = [self._last_reader]
        return list(dict.fromkeys(_NUMBER.sub("", name) for name in names))

    def open_stages(self) -> list[str]:
        """Returns the names of the open stages of the leading thread, by the events that have been read, outermost first."""
        if self.leading is None:
            return []
        return [self.names.sources[stage.source].stage for stage in self.leading.account.open]

    def stall(self, now_ns: int) -> dict[str, Any] | None:
        """Returns what is known of a stall while it lasts; None without one."""
        thread, stalls = self.leading, self.stalls
        if thread is None or not stalls.since_ns or self.closed:
            return None
        at = thread.position(self.names.sources)
        return {
            "seconds": (now_ns - stalls.last_ns) / NS_PER_S, "stage": at.stage, "loader": at.loader or None,
            "after": at.after or None, "step": self.step_number
        }  # fmt: skip

    def state(self) -> str:
        """Returns the current state: one of ``catalog.RUN_STATES``."""
        if self.stalls.since_ns:
            return "stalled"
        if self.leading is None:
            return "initializing"
        if "checkpoint" in self.open_stages():
            return "checkpointing"
        return "training" if self._phase == TRAIN else "evaluating"

    # -- threads and steps -------------------------------------------------------------------------

    @property
    def _accounted_ns(self) -> int:
        """Up to when the activities have all time: later than that of the leading thread, if another led before and was ahead."""
        return self.started_ns + int(self.totals.activity_ns.sum())

    @property
    def _others(self) -> list[ThreadState]:
        """Threads that have, or may have, steps of their own, without the leading one."""
        threads = (each for each in self._threads.values() if each is not self.leading)
        return [each for each in threads if each.works and not self._is_part(each)]

    def _share_outside(self, now_ns: int) -> None:
        """Counts the work of other threads in place of the time that the leading thread spends outside of batches."""
        if self.leading is not None:
            others_ns = min([now_ns, *(each.account.final_ns for each in self._others)])
            led_ns = self.leading.account.final_ns
            self.totals.move_from_outside(self._beside.take(self.leading.label, led_ns, others_ns))

    def _doing(self, leading: ThreadState) -> StallContext:
        if leading.idle:
            return StallContext.OUTSIDE
        if "checkpoint" in self.open_stages():
            return StallContext.CHECKPOINT
        if self._phase != TRAIN:
            return StallContext.EVALUATION
        return StallContext.TRAINING if self.totals.step_counts.any() else StallContext.START

    def _new_thread(self, name: str, begun_ns: int, *, main: bool) -> ThreadState:
        self._threads_seen += 1
        before = None
        if self.leading is not None and self.final_ns <= begun_ns:
            self._share_outside(self.started_ns)
            self.totals.publish()  # kept, also if the new thread leads later: it was before that began
            before = self.leading if self.leading.over and self._accounted_ns <= begun_ns else None
        since_ns = self._accounted_ns if before else self.started_ns
        account = ThreadAccount(since_ns, self.names.table, self._reclaimed.within, began=before is not None)
        state = ThreadState(name, main, account, label=f"{name} {self._threads_seen}", follows=before)
        if before is not None:
            state.activity_ns += self.totals.activity_ns
        return state

    def _lead(self, thread: ThreadState) -> None:
        """Makes ``thread`` the leading one, whose time is the run's time by activity, if it precedes the one so far.

        That is the first thread that trains; until one does, the first that evaluates, or the main thread. A thread that began
        after the leading one had ended continues its time and step numbers; any other brings its own.
        """
        leading = self.leading
        if leading is None:
            leads = not self._only_reads(thread)
        elif thread.follows is leading:
            leads = thread.account.computes
        else:
            leads = self._rank(thread) > self._rank(leading)
        if not leads or thread is leading:
            return
        if leading is not None and thread.follows is leading:
            self._source_before = self.step_source
            thread.next_number += leading.next_number
            self.training_threads -= 1  # the rows of the two do not overlap
            self.totals.publish()
        thread.follows = None  # else the state of all earlier leading threads would stay in memory
        self.leading = thread
        self._beside.lead()
        self.totals.take_over(thread.activity_ns)

    def _only_reads(self, thread: ThreadState) -> bool:
        """Returns whether a thread only reads loaders. The one that called `instrument` may still compute, until another leads."""
        beside = not thread.main or (self.leading is not None and self.leading is not thread)
        return beside and not thread.works

    def _helps(self, thread: ThreadState) -> bool:
        """Returns whether a thread only computes gradients or updates, or marks steps, for forwards of another thread."""
        others = self._threads.values()
        computed = self._computed or any(each.account.computes and not self._is_part(each) for each in others)
        return computed and self._is_part(thread)

    def _is_part(self, thread: ThreadState) -> bool:
        """Returns whether a thread runs only a part of others' steps, such as the backward of batches that another thread reads."""
        if thread.account.is_part or not thread.account.gives_gradients:
            return thread.account.is_part
        return any(each.account.takes_gradients for each in self._threads.values())

    def _rank(self, thread: ThreadState) -> int:
        """Returns the precedence of a thread as the leading one: 0 reads a loader, 1 evaluates or does part of a step, 2 trains."""
        return int(thread.works) + int(thread.account.trains and not self._is_part(thread))

    def _take(self, thread: ThreadState, closed: ClosedSteps) -> None:
        self._lead(thread)
        thread.activity_ns += closed.activity_ns
        if self._only_reads(thread):
            self.totals.add_beside(closed)
            self._take_endings(closed)
            return
        if closed is NOTHING and thread.in_rows and not self._is_part(thread):
            if thread.main:
                self.device.add_calls(closed.occurrences, thread.account.final_ns)
            return
        if self._helps(thread):
            closed = closed.without_steps()
        if not thread.in_rows:
            thread.in_rows = True
            self.training_threads += 1
        self.transfers.add(closed.moved)
        leading = thread is self.leading
        self.totals.add(closed, ledger=leading)
        if leading:
            self._reclaimed.forget(thread.account.final_ns)
            self._beside.add_outside(closed.apart.tolist())
        if not (leading and thread.account.trains):  # a leading thread that trains stays the leading one
            self._beside.add(thread.label, closed)
        if thread.main:
            self.device.add_calls(closed.occurrences, thread.account.final_ns)
        self.loader_errors.update(self.names.sources[loader].name for loader in closed.failed_asks.flat)
        self._take_steps(thread, closed)
        for within_ns, failed in self.checkpoints.take(closed.occurrences, self.names.kinds, self._step_at):
            self.spans.checkpoint(within_ns, self.step_number, failed=failed)
        self._take_endings(closed)

    def _take_endings(self, closed: ClosedSteps) -> None:
        for loader, reason, at_ns in self.totals.loaders.add_endings(closed.endings, self.names):
            self.spans.exhausted(loader, reason, at_ns, step=self._step_at(at_ns))

    def _step_at(self, at_ns: int) -> int:
        return self.recent.at(at_ns, self.step_number)

    def _take_steps(self, thread: ThreadState, closed: ClosedSteps) -> None:
        steps = closed.steps
        rows = np.flatnonzero((steps.phase == TRAIN) & (steps.counted > 0))
        numbers = thread.number(steps.number[rows])
        if len(rows):
            thread.step_ended_ns = int(steps.ended_ns[rows[-1]])
            thread.steps_ended += len(rows)
        if len(steps.phase) and thread is self.leading:
            self.recent.add(steps.ended_ns[rows], numbers)
            self._phase = int(steps.phase[-1])
        chosen = self.sampler.choose(steps, numbers, rows) if len(rows) else []
        for kept in chosen:
            before = thread.open_step if kept.row == rows[0] else ()
            self.spans.step(closed, kept, before, thread="" if thread is self.leading else thread.label)
        self._carry(thread, closed, step_closed=bool(len(rows)))
        leading = thread is self.leading
        if leading:
            boundaries = self.epochs.take(closed)
            if self.on_closed_steps is not None:
                self.on_closed_steps(closed, rows, numbers, boundaries)
        for over in self.evals.feed(steps, self.names, thread.label, gaps=not leading):
            self.spans.evaluation(over, self.step_number)

    def _carry(self, thread: ThreadState, closed: ClosedSteps, *, step_closed: bool) -> None:
        """Keeps the first calls of the open step, in case the step is sampled."""
        still = np.flatnonzero(closed.occurrences.step == len(closed.steps.phase))
        if step_closed:
            thread.open_step = []
        free = MOST_CHILDREN - sum(len(part.step) for part in thread.open_step)
        if len(still) and free > 0:
            thread.open_step.append(StageCalls(*(column[still[:free]] for column in closed.occurrences)))
