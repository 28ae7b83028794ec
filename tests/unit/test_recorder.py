"""One ring per thread, one number per source."""

from __future__ import annotations

import gc
import itertools
import json
import logging
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import pytest

from otel_train.recording.events import MAX_SOURCES, Instrumented, Op, SourceKind, code
from otel_train.recording.recorder import Recorder
from otel_train.recording.shared_memory import SIDE_RINGS
from otel_train.testing import FakeClock
from tests.support.flight import PrivateMemory
from tests.support.waiting import in_threads


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock(1000)


@pytest.fixture
def memory() -> Iterator[PrivateMemory]:
    made = PrivateMemory(4096)
    yield made
    made.close()


@pytest.fixture
def recorder(memory: PrivateMemory, clock: FakeClock) -> Recorder:
    return Recorder(memory, clock=clock)


def test_a_source_has_one_number(recorder: Recorder) -> None:
    """The same loader name is the same series, whoever asks."""
    first = recorder.source(SourceKind.DATA, "code")

    assert recorder.source(SourceKind.DATA, "code") == first
    assert recorder.source(SourceKind.FORWARD, "code") != first
    assert recorder.source(SourceKind.DATA, "code", "eval") != first


@pytest.mark.parametrize(
    "name", ["stage {}", "load the images of shard {:06d} from the object store", "\U0001f600 {}" * 9]
)
def test_sources_beyond_the_bound_are_other_and_that_is_said_once(
    name: str, memory: PrivateMemory, recorder: Recorder, caplog: pytest.LogCaptureFixture
) -> None:
    """A number must fit in its twelve bits, and all names in the memory that the agent reads."""
    with caplog.at_level(logging.WARNING, "otel_train"):
        numbers = {recorder.source(SourceKind.STAGE, name.format(*[n] * 9)) for n in range(MAX_SOURCES + 10)}
        loader = recorder.source(SourceKind.DATA, "validation " * 9, "eval")

    names = [tuple(row) for row in json.loads(memory.names())["sources"]]
    assert [Instrumented(SourceKind(kind), *rest) for kind, *rest in names] == recorder.sources
    assert max(numbers) < loader == len(recorder.sources) - 1 < MAX_SOURCES
    assert recorder.sources[max(numbers)] == (SourceKind.STAGE, "_OTHER", "")
    assert recorder.sources[loader] == (SourceKind.DATA, "_OTHER", "eval")
    assert len(numbers) > 500
    assert [record.levelname for record in caplog.records] == ["WARNING"]


def test_a_name_that_is_too_long_for_the_table_leaves_others_as_they_are(
    memory: PrivateMemory, recorder: Recorder
) -> None:
    """One name of a megabyte would end the timing of all names after it."""
    recorder.source(SourceKind.STAGE, "x" * 1_000_000)
    recorder.source(SourceKind.STAGE, "augment")

    assert [row[1] for row in json.loads(memory.names())["sources"]] == ["_OTHER", "augment"]


def test_a_signal_handler_may_register_a_source_wherever_it_interrupts_the_registration_of_another(
    memory: PrivateMemory, recorder: Recorder
) -> None:
    """A handler that closes the session, or begins a stage, would wait for ever for a lock that its own thread holds."""
    for line in itertools.count(1):
        numbers: dict[str, int] = {}

        def handler(line: int = line, numbers: dict[str, int] = numbers) -> None:
            numbers[f"handler {line}"] = recorder.source(SourceKind.STAGE, f"handler {line}")
            assert recorder.unread == 0

        with _interrupted(line, handler):
            numbers[f"stage {line}"] = recorder.source(SourceKind.STAGE, f"stage {line}")
        names = [row[1] for row in json.loads(memory.names())["sources"]]
        assert {name: names.index(name) for name in numbers} == numbers
        assert names == [source.name for source in recorder.sources]
        if len(numbers) == 1:
            break
    assert line > 15


@contextmanager
def _interrupted(line: int, handler: Callable[[], None]) -> Iterator[None]:
    """Calls ``handler`` before the ``line``-th line that the block executes in ``otel_train.recording``, as a signal would."""
    lines = itertools.count(1)

    def trace(frame: FrameType, event: str, _: object) -> Any:
        if not str(frame.f_globals.get("__name__")).startswith("otel_train.recording."):
            return None
        if event == "line" and next(lines) == line:
            handler()
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)


def test_an_edge_goes_to_the_ring_of_its_thread(recorder: Recorder, clock: FakeClock) -> None:
    """Two threads that write into one ring would tear each other's edges."""
    source = recorder.source(SourceKind.STAGE, "work")
    recorder.edge(code(Op.BEGIN, source))
    clock.tick(ns=5)
    in_threads(lambda: recorder.edge(code(Op.END, source)))
    mine, other = recorder.threads

    assert mine is recorder.main
    assert [mine.ring.read(10).times.tolist(), other.ring.read(10).times.tolist()] == [[1000], [1005]]
    assert other.ring.read(10).missed == 0


def test_a_thread_that_is_over_is_noticed_and_its_ring_is_used_again(
    memory: PrivateMemory, recorder: Recorder
) -> None:
    """A pool that makes threads for ever must not use up the rings, nor lose the last edges."""
    source = recorder.source(SourceKind.STAGE, "work")
    for _ in range(3 * SIDE_RINGS):
        in_threads(lambda: recorder.edge(code(Op.BEGIN, source)))
        gc.collect()
        over = recorder.threads[-1]
        assert over.ended
        assert len(over.ring.read(10).times) == 1
        memory.free(over.slot)  # as the agent does

    slots = [thread.slot for thread in recorder.threads]
    assert -1 not in slots
    assert len(slots) <= SIDE_RINGS + 1


def test_a_thread_with_the_identity_of_the_one_that_began_has_a_ring_of_its_own(
    memory: PrivateMemory, clock: FakeClock
) -> None:
    """The system gives the identity of a thread that is over to the next: the waits of one were forwards of the other's."""
    made: list[Recorder] = []
    in_threads(lambda: made.append(Recorder(memory, clock=clock)))
    (recorder,), idents = made, set()
    word = code(Op.BEGIN, recorder.source(SourceKind.STAGE, "work"))

    def work() -> None:
        idents.add(threading.get_ident())
        recorder.edge(word)

    for _ in range(20):
        in_threads(work)

    assert recorder.main.ident in idents
    assert recorder.main.ring.written == 0


def test_a_recorder_does_not_outlive_its_session_in_a_thread_that_goes_on(
    memory: PrivateMemory, clock: FakeClock
) -> None:
    """A pool that runs one trial after the other in its threads must not keep the memory of each."""
    left: list[object] = []

    def session() -> weakref.ref[Recorder]:
        recorder = Recorder(memory, clock=clock)
        recorder.edge(code(Op.MARK, recorder.source(SourceKind.STAGE, "work")))
        recorder.silence()
        recorder.release_memory()
        return weakref.ref(recorder)

    def trial() -> None:
        gone = session()
        gc.collect()
        left.append(gone())

    in_threads(trial)

    assert left == [None]


def test_events_of_more_threads_than_there_are_rings_are_counted_as_lost(recorder: Recorder) -> None:
    """Nothing reads them. Nor may the memory of each such thread stay: a pool may begin anew in every epoch."""
    source, pool = recorder.source(SourceKind.STAGE, "work"), SIDE_RINGS + 3
    arrived = threading.Barrier(pool)

    def work() -> None:
        recorder.edge(code(Op.BEGIN, source))
        arrived.wait(20)

    for _ in range(4):
        in_threads(*[work] * pool)
        gc.collect()

    assert recorder.unread == 4 * pool - SIDE_RINGS  # the agent has read none
    assert len(recorder.threads) <= 1 + SIDE_RINGS + pool
