"""A capture on the training thread: where it begins, what it holds, how it ends."""

from __future__ import annotations

import threading
from _thread import get_ident
from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from otel_train.profiler.requests import CaptureRequest, Options, Recorded
from otel_train.profiler.step_schedule import (
    CapturePhase,
    ProfiledThread,
    StepBoundary,
    StepScheduler,
)
from otel_train.profiler.torch_profiler import TorchProfiler
from otel_train.recording.events import Flag, Instrumented, Op, SourceKind, StepRule, code
from otel_train.recording.ring_buffer import Ring
from otel_train.testing import FakeClock
from tests.support.profiler import FakeProfiler
from tests.support.watchdog import watchdog

DATA, FORWARD, BACKWARD, FIRST, SECOND, MARK, VAL = range(7)
SOURCES = [
    Instrumented(SourceKind.DATA, "train"),
    Instrumented(SourceKind.FORWARD, "Net"),
    Instrumented(SourceKind.BACKWARD, "backward"),
    Instrumented(SourceKind.OPTIMIZER, "SGD"),
    Instrumented(SourceKind.OPTIMIZER, "Adam"),
    Instrumented(SourceKind.MARK, "step"),
    Instrumented(SourceKind.DATA, "val"),
]
ASKS = StepRule(SourceKind.OPTIMIZER, asks=True)
STEP = (DATA, FORWARD, BACKWARD, FIRST)


class LoopState:
    """A training thread with a real ring, and a scheduler in front of it."""

    def __init__(self, rule: StepRule = ASKS, *, max_s: float = 60, profiler: Any = None) -> None:
        self.clock = FakeClock(1)
        self.profiler = FakeProfiler()
        self.ring = Ring(
            memoryview(bytearray(1 << 16)).cast("q"),
            clock=self.clock,
            owner=get_ident(),
            on_other_thread=print,
        )
        self.scheduler = StepScheduler(profiler or self.profiler, clock=self.clock, max_s=max_s)
        self.rule = rule

    def arm(self, steps: int = 2, **request: Any) -> None:
        thread = ProfiledThread(get_ident(), SOURCES, self.ring.intercept)
        self.scheduler.arm(
            CaptureRequest("on_demand", steps, **{"warmup": 0, **request}),
            StepBoundary(self.rule, SOURCES),
            thread,
        )

    def edge(self, op: Op, source: int, flags: int = 0) -> None:
        self.clock.tick(ms=1)
        self.ring.edge(code(op, source, flags))

    def step(self, *sources: int) -> None:
        for source in sources or STEP:
            if source == MARK:
                self.edge(Op.MARK, MARK)
            else:
                self.edge(Op.BEGIN, source)
                self.edge(Op.END, source)

    def steps(self, number: int) -> None:
        for _ in range(number):
            self.step()

    def recorded(self) -> Recorded:
        found = self.scheduler.take()
        assert found is not None
        return found


def marks(profiler: FakeProfiler) -> list[str]:
    """What was called, without the ranges of stages."""
    return [word for word in profiler.log if "otel_train:" not in word]


def test_it_begins_and_ends_between_two_steps() -> None:
    """Half a step in a trace explains nothing."""
    loop = LoopState()
    loop.arm(steps=2)
    loop.steps(4)

    assert marks(loop.profiler) == [
        "prepare", "start", "+ProfilerStep#0", "-ProfilerStep#0", "+ProfilerStep#1", "-ProfilerStep#1", "stop",
    ]  # fmt: skip
    assert loop.recorded().steps == 2
    assert loop.scheduler.phase is CapturePhase.IDLE


def test_ranges_that_an_exception_left_open_are_closed_with_the_one_around_them() -> None:
    """A trace with a range that never ends cannot be read."""
    loop = LoopState()
    loop.arm(steps=1)
    loop.step()
    loop.edge(Op.BEGIN, DATA)
    loop.edge(Op.END, DATA)
    loop.edge(Op.BEGIN, FORWARD)
    loop.edge(Op.BEGIN, BACKWARD)
    loop.edge(Op.FAIL, FORWARD)

    assert loop.profiler.log[-4:] == [
        "+otel_train:forward",
        "+otel_train:backward",
        "-otel_train:backward",
        "-otel_train:forward",
    ]


def test_every_edge_is_written_whatever_the_scheduler_does() -> None:
    """A capture must not cost a single metric."""
    loop = LoopState()
    loop.steps(1)
    loop.arm(steps=1, warmup=1)
    loop.steps(5)

    assert loop.ring.written == 6 * 2 * len(STEP)


def test_nothing_stands_in_the_way_before_and_after() -> None:
    """No cost when idle."""
    loop = LoopState()
    loop.steps(2)
    loop.arm(steps=1)
    loop.steps(3)
    calls = len(loop.profiler.log)
    loop.scheduler.take()
    loop.steps(3)

    assert len(loop.profiler.log) == calls


def test_warm_up_and_wait_are_steps_before_the_first() -> None:
    """As in ``torch.profiler.schedule``."""
    loop = LoopState()
    loop.arm(steps=1, wait=2, warmup=1)
    phases = []
    for _ in range(6):
        loop.steps(1)
        phases.append(loop.scheduler.phase)

    assert phases == [
        *[CapturePhase.WAITING] * 3,
        CapturePhase.WARMUP,
        CapturePhase.ACTIVE,
        CapturePhase.DONE,
    ]


def test_a_step_number_is_met_exactly() -> None:
    """Several ranks capture the same step without asking each other."""
    loop = LoopState()
    loop.arm(steps=1, warmup=1, at_step=105)
    loop.steps(2)
    loop.scheduler.first_number = 101
    loop.steps(3)

    assert "+ProfilerStep#0" not in loop.profiler.log
    loop.steps(1)
    assert "+ProfilerStep#0" in loop.profiler.log


def test_a_step_that_has_passed_is_refused() -> None:
    """The other ranks were in time: other steps than theirs explain nothing."""
    loop = LoopState()
    loop.arm(steps=1, at_step=100)
    loop.steps(2)
    loop.scheduler.first_number = 101
    loop.steps(1)

    assert "was over" in loop.recorded().problem
    assert not loop.profiler.log


def test_another_profiler_is_left_alone() -> None:
    """Two at once crash the process, or leave the user's without events."""
    loop = LoopState()
    loop.profiler.taken = True
    loop.arm()
    loop.steps(2)

    assert loop.recorded().problem == "another profiler is running in this process"
    assert not loop.profiler.log


@pytest.mark.parametrize("broken", ["prepare", "start", "stop", "+ProfilerStep#0", "+otel_train:forward"])
def test_a_fault_of_the_profiler_ends_the_capture_and_nothing_else(broken: str) -> None:
    """Training does not know that there is a profiler."""
    loop = LoopState()
    loop.profiler.broken = {broken}
    loop.arm()
    loop.steps(4)

    assert loop.recorded().problem == f"RuntimeError: {broken} is broken"
    assert loop.ring.written == 4 * 2 * len(STEP)


def test_a_capture_that_takes_too_long_is_cut_short() -> None:
    """Steps may become a hundred times slower than whoever asked believed."""
    loop = LoopState(max_s=0.012)
    loop.arm(steps=1000)
    loop.steps(5)

    recorded = loop.recorded()
    assert recorded.problem == "stopped after 0.012 s"
    assert 0 < recorded.steps < 4
    assert recorded.trace is not None


def test_a_profiler_that_only_warmed_up_is_stopped_too() -> None:
    """It must not run on for ever."""
    loop = LoopState()
    loop.arm(steps=1, warmup=5)
    loop.steps(3)
    loop.scheduler.abort("")

    assert loop.profiler.log == ["prepare", "start", "stop"]
    assert loop.recorded().trace is None


@pytest.mark.parametrize(("asked", "steps", "end", "recorded", "problem"), [
    # A schedule longer than the run still gives a trace.
    pytest.param({"steps": 100}, 4, lambda loop: loop.scheduler.abort(""), 2, "",
                 id="the end of a run leaves what there is"),
    # Who debugs their program gets their events.
    pytest.param({"steps": 100}, 3, lambda loop: loop.profiler.give_way(), 1,
                 "the program started a profiler of its own", id="the program's own profiler goes first"),
    # No ask follows it that would say so.
    pytest.param({"steps": 3, "at_once": True}, 3, lambda loop: loop.scheduler.over(), 3, "",
                 id="at the end of an epoch its last step is whole"),
    # The next epoch's steps are not this one's.
    pytest.param({"steps": 100, "at_once": True}, 4, lambda loop: loop.scheduler.over(), 4, "",
                 id="an epoch that ends early ends its capture"),
])  # fmt: skip
def test_what_ends_a_capture_leaves_the_steps_before_it(
    asked: dict[str, Any], steps: int, end: Callable[[LoopState], None], *, recorded: int, problem: str
) -> None:
    """Ours ends on the spot, with a trace of what there was."""
    loop = LoopState()
    loop.arm(**asked)
    loop.steps(steps)
    end(loop)

    assert loop.profiler.log[-1] == "stop"
    found = loop.recorded()
    assert (found.steps, found.problem, found.request.steps) == (recorded, problem, asked["steps"])
    assert found.trace is not None
    assert loop.scheduler.phase is CapturePhase.IDLE


def test_a_session_that_another_thread_closes_is_no_capture_that_took_too_long() -> None:
    """What there is, is what there is: the record says how many steps, and no more."""
    loop = LoopState()
    loop.arm(steps=100)
    loop.steps(3)
    helper = threading.Thread(target=loop.scheduler.abort, args=("",))
    helper.start()
    helper.join()
    loop.edge(Op.END, DATA)

    assert loop.recorded().problem == ""


def test_an_evaluation_between_two_steps_is_in_neither_and_not_what_begins_a_recording() -> None:
    """A schedule often meets the step after an evaluation, and that would fill the trace."""
    loop = LoopState(ASKS._replace(aside=frozenset({"val"})))
    loop.arm(steps=2)
    for _ in range(3):
        loop.step()
        loop.step(VAL, FORWARD, VAL, FORWARD)
    loop.step()

    log = loop.profiler.log
    assert log[: log.index("+otel_train:data:train")] == ["prepare", "start", "+ProfilerStep#0"]
    between = log[log.index("-ProfilerStep#0") : log.index("+ProfilerStep#1")]
    assert between.count("+otel_train:data:val") == 2
    assert log.count("+otel_train:data:val") == 2


def test_a_loader_that_was_only_evaluated_may_be_trained_on_later() -> None:
    """Then a step begins where its work is seen: late, but not never."""
    loop = LoopState(ASKS._replace(aside=frozenset({"val"})))
    loop.arm(steps=1)
    loop.step()
    loop.step(VAL, FORWARD, BACKWARD, FIRST)
    loop.step(VAL)

    assert marks(loop.profiler)[-2:] == ["-ProfilerStep#0", "stop"]


def test_from_another_thread_it_ends_at_the_next_edge() -> None:
    """The profiler can only be stopped where it was started."""
    loop = LoopState()
    loop.arm(steps=100)
    loop.steps(3)
    helper = threading.Thread(target=loop.profiler.give_way)
    helper.start()
    helper.join()
    assert loop.scheduler.phase is CapturePhase.ACTIVE
    loop.edge(Op.BEGIN, DATA)

    assert loop.recorded().problem == "the program started a profiler of its own"


# -- where a step ends -----------------------------------------------------------------------------


def calls(*sources: int) -> list[tuple[Op, int]]:
    return (
        [(Op.MARK, MARK)] if sources == (MARK,) else [(op, s) for s in sources for op in (Op.BEGIN, Op.END)]
    )


START = [(Op.BEGIN, DATA | 1 << 8), (Op.END, DATA | 1 << 8)]
"""The making of an iterator."""

WHOLE = len(SOURCES)
NO_LOADER, BATCHES = StepRule(SourceKind.OPTIMIZER, asks=False), StepRule(SourceKind.DATA, asks=True)


@pytest.mark.parametrize(("rule", "edges", "at"), [
    # Accumulated batches, and batches of another loader, are part of it.
    pytest.param(ASKS, calls(DATA, FORWARD, DATA, FORWARD, FIRST, VAL, FORWARD, DATA, FIRST, SECOND, DATA), [10, 20],
                 id="a step ends at the first ask after an update"),
    # A program of JAX that loads with torch can be captured as well.
    pytest.param(ASKS, calls(DATA, WHOLE) * 3, [4, 8],
                 id="a function that makes a whole update ends steps as an optimizer does"),
    pytest.param(NO_LOADER, calls(DATA, WHOLE) * 3, [8], id="without a loader, too"),
    # A GAN's two optimizers make one step; the first round shows which one is the last.
    pytest.param(NO_LOADER, calls(FORWARD, FIRST, FORWARD, SECOND) * 4, [16, 24],
                 id="without a loader a round of updates is a step"),
    # Who marks steps has said what a step is.
    pytest.param(StepRule(SourceKind.MARK, asks=True),
                 [*calls(DATA, FIRST, DATA), *calls(MARK), *calls(FIRST), *calls(MARK)], [6, 9],
                 id="manual marks end steps and nothing else does"),
    # A loop without updates and backwards. The end of an epoch gives no batch, and the iterator is none.
    pytest.param(BATCHES, [*calls(DATA, DATA), (Op.BEGIN, DATA), (Op.STOP, DATA), *START, *calls(DATA, DATA)],
                 [2, 4, 10], id="where batches are the steps the ask after each ends it"),
])  # fmt: skip
def test_a_step_ends_before(rule: StepRule, edges: list[tuple[Op, int]], at: list[int]) -> None:
    """The place of the edge that begins the next one."""
    boundary = StepBoundary(rule, [*SOURCES, Instrumented(SourceKind.WHOLE, "make_step")])
    words = [code(op, source & 0xFF, Flag.START if source >> 8 else 0) for op, source in edges]

    assert [place for place, word in enumerate(words) if boundary.before(word)] == at


def test_making_an_iterator_is_an_ask_like_any_other() -> None:
    """The step before an evaluation ends where that begins to fetch; the next ask does not end another one."""
    boundary = StepBoundary(ASKS, SOURCES)
    boundary.before(code(Op.END, FIRST))

    assert boundary.before(code(Op.BEGIN, VAL, Flag.START))
    assert not boundary.before(code(Op.BEGIN, VAL))


def test_batches_of_an_evaluation_are_no_steps_where_batches_are() -> None:
    """Neither do they begin one."""
    boundary = StepBoundary(StepRule(SourceKind.DATA, asks=True, aside=frozenset({"val"})), SOURCES)
    edges = [code(op, source) for op, source in calls(DATA, VAL, VAL, DATA, DATA)]

    assert [place for place, edge in enumerate(edges) if boundary.before(edge)] == [2, 8]
    assert [boundary.begins(edge) for edge in edges[2:7]] == [False, False, False, False, True]


def test_a_number_is_reported_with_an_instant_at_the_step_s_own_work() -> None:
    """Between the end of one step and the work of the next there may be an evaluation, which is of neither."""
    loop = LoopState()
    loop.arm(steps=1)
    loop.step()
    loop.step(VAL, FORWARD, VAL, FORWARD)
    assert loop.scheduler.first_ns == 0
    loop.step()

    assert loop.scheduler.first_ns == loop.clock.now_ns


def test_what_the_training_thread_asks_for_counts_from_the_step_that_comes_next() -> None:
    """An epoch begins there: its first step is the first, also where it is the first of the run."""
    loop = LoopState()
    loop.arm(steps=2, wait=1, warmup=1, at_once=True)
    loop.steps(5)

    assert marks(loop.profiler)[:3] == ["prepare", "start", "+ProfilerStep#0"]
    assert loop.recorded().begun_ns == 17_000_001  # 8 edges a step, 1 ms each: at the first of the third step


def test_the_end_of_an_epoch_does_not_end_a_capture_that_was_requested_otherwise() -> None:
    """It was asked for by number of steps, wherever they lie."""
    loop = LoopState()
    loop.arm(steps=4)
    loop.steps(3)
    loop.scheduler.over()

    assert loop.scheduler.phase is CapturePhase.ACTIVE


def test_what_a_watchdog_raises_in_the_profiler_ends_the_capture_and_reaches_the_program() -> None:
    """The event at which the profiler was called is written as well: accounting needs each end."""
    loop = LoopState()
    loop.arm()
    loop.step()
    with watchdog() as loop.profiler.start, pytest.raises(TimeoutError, match="watchdog"):  # type: ignore[method-assign]
        loop.step()
    written = loop.ring.written
    loop.step()

    assert loop.recorded().problem == "TimeoutError: watchdog"
    assert (written, loop.ring.written - written) == (2 * len(STEP) + 1, 2 * len(STEP))


@pytest.mark.parametrize("broken", ["prepare_trace", "start_trace", "add_metadata_json"])
def test_a_torch_profiler_that_does_not_start_leaves_torch_unchanged(
    monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    """Otherwise the next profiler of the program ends a capture that is over, or waits for it."""
    profile = torch.autograd.profiler.profile
    original, refused = profile._prepare_trace, RuntimeError("no counters")
    loop = LoopState(profiler=TorchProfiler)
    loop.arm(steps=1, warmup=1, options=Options(("cpu",), record_shapes=True))
    with monkeypatch.context() as patch:
        patch.setattr(torch.profiler._KinetoProfile, broken, Mock(side_effect=refused))
        loop.steps(4)

    assert loop.recorded().problem == "RuntimeError: no counters"
    assert profile._prepare_trace is original
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        torch.ones(1)
    assert loop.scheduler.take() is None
    loop.arm(steps=1)
    loop.steps(3)
    assert loop.recorded().problem == ""
    assert profile._prepare_trace is original


def test_a_capture_that_is_over_does_not_end_again_for_a_profiler_of_the_program() -> None:
    """It would be reported twice."""
    loop = LoopState()
    loop.arm(steps=1)
    loop.steps(3)
    loop.profiler.give_way()

    assert loop.recorded().problem == ""
    loop.profiler.give_way()
    assert loop.scheduler.take() is None


def test_activities_without_an_initialised_device_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with CUDA and a program on the host: the reason is the program."""
    activity = torch.profiler.ProfilerActivity
    monkeypatch.setattr(torch.profiler, "supported_activities", lambda: {activity.CPU, activity.CUDA})
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    profiler = TorchProfiler(lambda: None)
    missing = profiler.prepare(Options(("cpu", "cuda", "mtia")))
    profiler.start()
    profiler.stop()

    assert missing == [
        "no cuda activity: this process has not initialised CUDA",
        "no mtia activity: torch does not support it on this machine",
    ]
