"""User stages: blocks, functions, generators, coroutines."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Generator, Iterator
from typing import Any

import pytest

from otel_train.instrumentation.stages import Checkpoint, Epoch, Stage, StageRecorder, active_session
from otel_train.instrumentation.timers import Timers
from otel_train.recording.events import MAX_SOURCES, SourceKind
from otel_train.recording.recorder import Recorder
from otel_train.testing import FakeClock
from tests.support.flight import PrivateMemory
from tests.support.written import Writer


class Oops(Exception):  # noqa: N818 - not an error of the program
    pass


def test_a_block_is_a_stage(writer: Writer) -> None:
    """The simplest way to see what a part of the loop costs."""
    with Stage("augment"):
        pass

    assert writer.edges == [("BEGIN", "augment", 0), ("END", "augment", 0)]


def test_a_block_that_raises_is_timed_and_marked(writer: Writer) -> None:
    """And the exception is the user's."""
    with pytest.raises(Oops), Stage("augment"):
        raise Oops

    assert writer.ops == ["BEGIN", "FAIL"]


def test_a_checkpoint_is_a_block(writer: Writer) -> None:
    """Its failure is a failed checkpoint."""
    with Checkpoint():
        pass
    with pytest.raises(Oops), Checkpoint():
        raise Oops

    assert writer.edges[1::2] == [("END", "checkpoint", 0), ("FAIL", "checkpoint", 0)]


def test_a_function_stays_what_it_is(writer: Writer) -> None:
    """Name, signature, documentation, result: a decorator that changes them breaks other tools."""

    @Stage("work")
    def work(x: int, *, by: int = 2) -> int:
        """Works."""
        return x * by

    assert work(3, by=4) == 12
    assert (work.__name__, work.__doc__) == ("work", "Works.")
    assert list(inspect.signature(work).parameters) == ["x", "by"]
    assert writer.ops == ["BEGIN", "END"]


def test_a_function_that_calls_itself_is_a_stage_inside_a_stage(writer: Writer) -> None:
    """Recursion nests."""

    @Stage("work")
    def work(depth: int) -> int:
        return work(depth - 1) + 1 if depth else 0

    assert work(2) == 2
    assert writer.ops == ["BEGIN", "BEGIN", "BEGIN", "END", "END", "END"]


def test_a_generator_counts_only_while_it_runs(writer: Writer) -> None:
    """What its user does between two items is not its work."""

    @Stage("read")
    def read() -> Iterator[int]:
        yield 1
        yield 2

    assert inspect.isgeneratorfunction(read)
    assert list(read()) == [1, 2]
    assert writer.ops == ["RESUME", "SUSPEND", "RESUME", "SUSPEND", "RESUME", "END"]
    assert len({token for _, _, token in writer.edges}) == 1


def test_a_generator_is_spoken_with_as_before(writer: Writer) -> None:
    """``send``, ``throw``, ``close`` and the return value go through."""
    heard: list[Any] = []

    @Stage("talk")
    def talk() -> Generator[str, Any, str]:
        try:
            heard.append((yield "one"))
            yield "two"
        except Oops:
            heard.append("oops")
        yield "three"
        return "done"

    talking = talk()
    assert next(talking) == "one"
    assert talking.send("hello") == "two"
    assert talking.throw(Oops) == "three"
    with pytest.raises(StopIteration) as stop:
        next(talking)

    assert stop.value.value == "done"
    assert heard == ["hello", "oops"]
    assert writer.ops[-1] == "END"


def test_a_generator_left_early_is_closed_and_ended(writer: Writer) -> None:
    """``break`` must run its finally block, and leave no stage open."""
    cleaned = []

    @Stage("read")
    def read() -> Iterator[int]:
        try:
            yield 1
            yield 2
        finally:
            cleaned.append(True)

    for _ in read():
        break

    assert cleaned == [True]
    assert writer.ops[-1] == "END"


@pytest.mark.parametrize("block", [lambda: Stage("read"), Checkpoint, Epoch])
def test_a_block_in_a_generator_that_is_left_early_did_not_fail(writer: Writer, block: Any) -> None:
    """``break`` closes the generator: its block ends, and nothing was raised."""

    def read() -> Iterator[int]:
        with block():
            yield 1

    for _ in read():
        break

    assert writer.edges[-1] in [("END", "read", 0), ("END", "checkpoint", 0), ("EPOCH_END", "epoch", 0)]


def test_two_generators_at_once_are_two_occurrences(writer: Writer) -> None:
    """``zip`` of a stage with itself."""

    @Stage("read")
    def read() -> Iterator[int]:
        yield from (1, 2)

    assert list(zip(read(), read(), strict=True)) == [(1, 1), (2, 2)]
    assert len({token for _, _, token in writer.edges}) == 2


def test_a_coroutine_counts_only_while_it_runs(writer: Writer) -> None:
    """A wait for the network is not its work."""

    @Stage("fetch")
    async def fetch(x: int) -> int:
        await asyncio.sleep(0)
        return x + 1

    async def both() -> list[int]:
        return list(await asyncio.gather(fetch(1), fetch(2)))

    assert inspect.iscoroutinefunction(fetch)
    assert asyncio.run(both()) == [2, 3]
    assert writer.ops.count("RESUME") == 4
    assert writer.ops.count("END") == 2


def test_a_coroutine_that_is_cancelled_has_ended(writer: Writer) -> None:
    """Time-outs cancel."""

    @Stage("fetch")
    async def fetch() -> None:
        await asyncio.sleep(60)

    async def timed_out() -> None:
        task = asyncio.ensure_future(fetch())
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(timed_out())

    assert writer.ops[-1] in {"END", "FAIL"}


def test_an_asynchronous_generator_is_one_occurrence(writer: Writer) -> None:
    """It gives its items as before."""

    @Stage("stream")
    async def stream() -> AsyncIterator[int]:
        for number in range(3):
            await asyncio.sleep(0)
            yield number

    async def collected() -> list[int]:
        return [number async for number in stream()]

    assert inspect.isasyncgenfunction(stream)
    assert asyncio.run(collected()) == [0, 1, 2]
    assert writer.ops.count("END") == 1
    assert len({token for _, _, token in writer.edges}) == 1


@pytest.mark.parametrize("closes", [True, False])
def test_an_asynchronous_generator_that_the_loop_leaves_is_closed_and_has_ended(
    writer: Writer, *, closes: bool
) -> None:
    """``asyncio.run`` closes what a loop leaves, in a task; at its end it cancels all tasks."""
    cleaned = []

    @Stage("stream")
    async def stream() -> AsyncIterator[int]:
        try:
            yield 1
            yield 2
        finally:
            cleaned.append(True)

    async def leave() -> None:
        streaming = stream()
        async for _ in streaming:
            break
        if closes:
            await streaming.aclose()  # type: ignore[attr-defined]  # an async generator has it

    asyncio.run(leave())
    assert cleaned == [True]
    assert writer.ops == ["RESUME", "SUSPEND", "RESUME", "END"]
    assert len({token for _, _, token in writer.edges}) == 1


def test_an_asynchronous_generator_is_suspended_while_it_is_closed(writer: Writer) -> None:
    """Its ``finally`` may wait, and may raise."""

    @Stage("stream")
    async def stream() -> AsyncIterator[int]:
        try:
            yield 1
        finally:
            await asyncio.sleep(0)
            raise Oops

    async def leave() -> None:
        streaming = stream()
        await streaming.__anext__()
        with pytest.raises(Oops):
            await streaming.aclose()  # type: ignore[attr-defined]  # an async generator has it

    asyncio.run(leave())
    assert writer.ops == ["RESUME", "SUSPEND", "RESUME", "SUSPEND", "RESUME", "FAIL"]


def test_names_beyond_the_table_of_names_are_not_kept() -> None:
    """A program that gives every step a name has as many names as steps."""
    recorder = Recorder(PrivateMemory(1 << 4), clock=FakeClock())
    stages = StageRecorder(recorder)
    timers = Timers(recorder, FakeClock())
    for number in range(MAX_SOURCES + 200):
        stages.register(f"{number}")
        stages.register_function(SourceKind.STAGE, f"{number}")
        timers.begin(f"{number}")

    kept = len(stages.codes), len(stages.functions), len(timers._sources)
    assert max(kept) <= MAX_SOURCES
    assert stages.register("1") == stages.codes["1"]


def test_without_a_session_nothing_is_written_and_everything_works() -> None:
    """A library may carry its stages into programs that know nothing of us."""
    before, active_session.stages = active_session.stages, None
    try:

        @Stage("read")
        def read() -> Iterator[int]:
            yield from (1, 2)

        with Stage("work"), Checkpoint():
            assert list(read()) == [1, 2]
    finally:
        active_session.stages = before


def test_a_session_that_ends_inside_a_stage_is_no_fault(writer: Writer) -> None:
    """``close`` in a with-block of a stage."""

    @Stage("read")
    def read() -> list[int]:
        return []

    with Stage("work"):
        active_session.stages = None

    assert read() == []
    assert writer.ops == ["BEGIN"]
