"""Operations timed by token, from ``begin`` to the metrics."""

from __future__ import annotations

import itertools
import logging

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import otel_train
from otel_train.accounting.types import NOTHING, StageCalls
from otel_train.instrumentation.timers import MOST_WAITING, Timers, Token
from otel_train.recording.recorder import Recorder
from otel_train.testing import FakeClock
from otel_train.trackers.schedule import HeldOperations, operation_calls
from tests.support.flight import PrivateMemory
from tests.support.waiting import in_threads


class Bench:
    """Timers on a clock that stands still."""

    def __init__(self) -> None:
        self.clock = FakeClock(1_000)
        self.recorder = Recorder(PrivateMemory(1 << 8), clock=self.clock)
        self.timers = Timers(self.recorder, self.clock)

    def lasted(self) -> list[tuple[str, int]]:
        """Name and duration of what has ended since the last call."""
        rows = zip(*[iter(self.timers.take())] * 3, strict=True)
        return [(self.recorder.sources[source].name, ended - begun) for source, begun, ended in rows]


@given(st.lists(st.tuples(st.integers(0, 9), st.booleans(), st.integers(0, 5)), max_size=60))
@settings(deadline=None)
def test_durations_are_exact_in_whatever_order(said: list[tuple[int, bool, int]]) -> None:
    """Against a reference that remembers who began when."""
    bench = Bench()
    open_: list[tuple[Token, str, int]] = []
    expected: list[tuple[str, int]] = []
    for gap, begins, which in said:
        bench.clock.tick(gap)
        if begins or not open_:
            name = f"operation {which}"
            open_.append((bench.timers.begin(name), name, bench.clock()))
        else:
            token, name, begun_ns = open_.pop(which % len(open_))
            bench.timers.end(token)
            expected.append((name, bench.clock() - begun_ns))

    assert bench.lasted() == expected


def test_a_token_may_end_in_another_thread() -> None:
    """That is where a queue's other end is."""
    bench = Bench()
    token = bench.timers.begin("upload")
    bench.clock.tick(4)
    in_threads(lambda: bench.timers.end(token))

    assert bench.lasted() == [("upload", 4)]


def test_a_token_that_has_ended_is_said_once_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    """The metric stays that of the first end; after three the operation is off, others go on."""
    bench = Bench()
    with caplog.at_level(logging.WARNING, "otel_train"):
        for _ in range(3):
            token = bench.timers.begin("twice")
            bench.timers.end(token)
            bench.timers.end(token)
    after, other = bench.timers.begin("twice"), bench.timers.begin("once")
    bench.timers.end(after)
    bench.timers.end(other)
    bench.timers.end(other)

    assert bench.lasted() == [("twice", 0)] * 3 + [("once", 0)]
    assert bench.timers.faults == 4
    assert [record.levelname for record in caplog.records] == ["WARNING", "ERROR", "WARNING"]
    assert "it has ended before" in caplog.text
    assert __file__ in caplog.text


def test_what_is_no_token_of_this_session_changes_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """A token that outlived its session."""
    bench, other = Bench(), Bench()
    with caplog.at_level(logging.WARNING, "otel_train"):
        bench.timers.end(other.timers.begin("elsewhere"))

    assert bench.lasted() == []
    assert bench.timers.faults == 1
    assert len(caplog.records) == 1


def test_a_token_begun_before_the_session_is_nobodys_fault() -> None:
    """``begin`` may be the first line of the program, and ``instrument`` the second."""
    bench = Bench()

    bench.timers.end(otel_train.begin("start"))

    assert (bench.lasted(), bench.timers.faults) == ([], 0)


def test_after_the_session_tokens_are_empty() -> None:
    """And in a forked child: it has no reader that takes them out."""
    bench = Bench()
    before = bench.timers.begin("work")
    bench.recorder.silence()
    bench.timers.end(bench.timers.begin("work"))
    bench.timers.end(before)

    assert (len(bench.lasted()), bench.timers.faults) == (1, 0)


def test_the_box_is_bounded() -> None:
    """A program that times everything must not fill the memory when the service thread stands still."""
    bench = Bench()
    for _ in range(MOST_WAITING + 7):
        bench.timers.end(bench.timers.begin("tiny"))

    assert len(bench.lasted()) == MOST_WAITING
    assert bench.timers.dropped == 7


def test_without_a_session_a_token_is_a_token() -> None:
    """The code stays as it is when telemetry goes."""
    token = otel_train.begin("work")
    otel_train.end(token)
    otel_train.end(token)

    assert isinstance(token, Token)
    assert token.name == "work"


# --- on the agent's side ---------------------------------------------------------------------------


@given(
    ends=st.lists(st.integers(0, 50), max_size=30),
    reported=st.lists(st.integers(0, 30), max_size=4).map(sorted),
    finals=st.lists(st.integers(0, 60), max_size=5).map(sorted),
)
@settings(deadline=None)
def test_operations_come_in_the_order_of_their_ends_and_never_early(
    ends: list[int], reported: list[int], finals: list[int]
) -> None:
    """What ended after a step belongs to the row after it, however early it was reported."""
    held, given_ = HeldOperations(), sorted(ends)
    seen: list[int] = []
    bounds = [0, *[min(at, len(given_)) for at in reported], len(given_)]
    for begin, end in itertools.pairwise(bounds):
        held.add(
            operation_calls(np.array([(0, 0, at) for at in given_[begin:end]], dtype=np.int64).reshape(-1, 3))
        )
    for until in finals:
        part = ends_of(held.among(NOTHING, until).occurrences)
        assert all(at <= until for at in part)
        seen += part
    rest = held.rest()

    assert seen + (ends_of(rest.occurrences) if rest else []) == given_


def ends_of(calls: StageCalls) -> list[int]:
    ends: list[int] = (calls.started_ns + calls.inclusive_ns).tolist()
    return ends
