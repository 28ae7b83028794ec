"""Whatever the loop and whenever it is asked for, a capture's steps have the numbers that the loop counts."""

from __future__ import annotations

from _thread import get_ident
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from otel_train.agent.remote import rule_of
from otel_train.config.settings import Tuning
from otel_train.datamodel import Capture
from otel_train.profiler.controller import CaptureController
from otel_train.profiler.requests import NEXT, CaptureRequest
from otel_train.profiler.step_schedule import ProfiledThread
from otel_train.profiler.storage import CaptureStore
from otel_train.recording.events import OP_MASK, SOURCE_MASK, SOURCE_SHIFT, LoopState, Op, SourceKind
from otel_train.testing import FakeClock
from tests.support.edges import Tape
from tests.support.profiler import FakeProfiler, FakeTraining
from tests.support.runs import run_state

STEPS = 24
PERIOD = 3
"""Steps after which something lies between two of them."""

TURN_EVERY = 13
"""Edges that the agent reads at once: no divisor of any loop below."""

ASKED_EVERY = 5


class Replay:
    """Goes through a loop edge by edge, with an agent that reads every few of them."""

    def __init__(self, tape: Tape, folder: Path) -> None:
        self.tape = tape
        # No two the same, with a margin.
        self._times = [2 * (at + number) for number, at in enumerate(tape.times)]
        self.clock = FakeClock(0)
        self.profiler = FakeProfiler()
        self.captures: list[Capture] = []
        self._see: Any = None
        self._unread: list[int] = []
        self._run = run_state(stall_after_s=1e6)
        self._run.learn(tape.sources)
        training: Any = FakeTraining(self._loop, self._thread, self._number, self._run.epochs.at)
        self.controller = CaptureController(
            self.profiler, clock=self.clock, tuning=Tuning(profiler_max_s=60, profiler_cooldown_s=60),
            training=training, done=self.captures.append,
            place=CaptureStore(folder, 0, max_bytes=1 << 20, kept=1 << 20, analyze=()),
        )  # fmt: skip

    def go(self, request: CaptureRequest, *, at_edge: int) -> Capture:
        """The whole loop; the capture is asked for when ``at_edge`` edges have been written."""
        for at, word in enumerate(self.tape.codes):
            if at == at_edge:
                assert self.controller.ask(request) == ""
            self.clock.now_ns = self._times[at] - 1
            (self._see or (lambda code, write: write(code)))(word, self._unread.append)
            self.clock.now_ns += 1
            self._note_update(word)
            if at % TURN_EVERY == 0 or at == at_edge:
                self._turn(at)
        self._turn(len(self.tape.codes) - 1)
        self.controller.end(20)
        return self.captures[0]

    def _turn(self, at: int) -> None:
        first = at + 1 - len(self._unread)
        times = np.array(self._times[first : at + 1], dtype=np.int64)
        self._run.feed(1, times, np.array(self._unread, dtype=np.int64), name="MainThread", main=True)
        self._unread.clear()
        self.controller.poll()

    def _loop(self) -> LoopState:
        return LoopState(rule_of(self._run), step=self._run.step_number, final_ns=self._run.final_ns)

    def _thread(self) -> ProfiledThread:
        return ProfiledThread(get_ident(), self.tape.sources, self._intercept)

    def _intercept(self, see: Any) -> None:
        self._see = see

    def _number(self, at_ns: int) -> int:
        return self._run.recent.at(at_ns, self._run.step_number)

    def _note_update(self, word: int) -> None:
        """Note, between the words of the profiler, that a step of the loop has done its work."""
        source = self.tape.sources[word >> SOURCE_SHIFT & SOURCE_MASK]
        if source.name == "SGD" and word & OP_MASK == Op.END:
            number = sum(each.startswith("mine#") for each in self.profiler.log)
            self.profiler.log.append(f"mine#{number}")


def loops() -> dict[str, Callable[[Tape, int], object]]:
    """What one step of each is."""

    def plain(tape: Tape, number: int) -> None:
        tape.step()
        if number % 8 == 7:
            tape.stop().start()

    def evaluates(tape: Tape, number: int) -> None:
        plain(tape, number)
        if number % PERIOD == PERIOD - 1:
            tape.start("val").validate()

    def saves(tape: Tape, number: int) -> None:
        plain(tape, number)
        if number % PERIOD == PERIOD - 1:
            tape.spend(2).run(SourceKind.CHECKPOINT, "checkpoint", 9).spend(2)

    def samples(tape: Tape, number: int) -> None:
        tape.forward().backward().update()
        if number % PERIOD == PERIOD - 1:
            tape.forward(11, flags=0)

    def new_iterator_each_step(tape: Tape, number: int) -> None:
        del number
        tape.start().step()

    def two_in_turn(tape: Tape, number: int) -> None:
        tape.micro().update(optimizer="Adam").forward().backward().update()
        if number % PERIOD == PERIOD - 1:
            tape.start("val").validate()

    def manual(tape: Tape, number: int) -> None:
        tape.forward().backward().update()
        if number % PERIOD == PERIOD - 1:
            tape.forward(11, flags=0)
        tape.edge(Op.MARK, tape.source(SourceKind.MARK, "step"))

    return {each.__name__: each for each in (
        plain, evaluates, saves, samples, new_iterator_each_step, two_in_turn, manual,
    )}  # fmt: skip


def within_steps(log: list[str]) -> set[str]:
    """What was recorded from the begin of the profiler on, and inside of steps."""
    found, step = set(), True
    for word in log[log.index("start") :]:
        if "ProfilerStep#" in word:
            step = word.startswith("+")
        elif step:
            found.add(word)
    return found


@pytest.mark.parametrize("at_step", [NEXT, 20])
@pytest.mark.parametrize("name", loops())
def test_the_numbers_are_right_wherever_it_is_asked_for(name: str, at_step: int, tmp_path: Path) -> None:
    """A trace whose step 40 is the run's step 39 points to the wrong place."""
    tape = Tape()
    for number in range(STEPS):
        loops()[name](tape, number)
    edges, captured = len(tape.codes), 0
    for at_edge in range(edges // 2, edges // 2 + PERIOD * edges // STEPS, ASKED_EVERY):
        replay = Replay(tape, tmp_path / str(at_edge))
        capture = replay.go(CaptureRequest("on_demand", 2, warmup=0, at_step=at_step), at_edge=at_edge)
        if "was over" in capture.problem:
            continue
        assert "+otel_train:data:val" not in within_steps(replay.profiler.log)
        log = [word for word in replay.profiler.log if "otel_train:" not in word]
        begun = log.index("+ProfilerStep#0")
        mine = int(log[begun + 1].removeprefix("mine#"))
        assert log[begun + 1 : begun + 5] == [
            f"mine#{mine}", "-ProfilerStep#0", "+ProfilerStep#1", f"mine#{mine + 1}",
        ], f"asked for at edge {at_edge}"  # fmt: skip
        assert capture.steps == (mine, mine + 1), f"asked for at edge {at_edge}"
        assert at_step in (NEXT, mine)
        captured += 1
    assert captured
