"""When TorchDynamo compiles, by its own callbacks; its lists of them are fakes here."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import SimpleNamespace
from typing import Any

import pytest

from otel_train.datamodel import Compile
from otel_train.instrumentation.compile_events import CompilerProbe
from otel_train.testing import FakeClock

MS = 1_000_000


class Handler:
    """TorchDynamo's list of callbacks in torch 2.4 to 2.7: called at every compile, also inside another."""

    def __init__(self) -> None:
        self.start_callbacks: list[Callable[..., None]] = []
        self.end_callbacks: list[Callable[..., None]] = []

    def register_start_callback(self, callback: Callable[..., None]) -> None:
        self.start_callbacks.append(callback)

    def register_end_callback(self, callback: Callable[..., None]) -> None:
        self.end_callbacks.append(callback)

    def remove_start_callback(self, callback: Callable[..., None]) -> None:
        self.start_callbacks.remove(callback)

    def remove_end_callback(self, callback: Callable[..., None]) -> None:
        self.end_callbacks.remove(callback)

    def clear(self) -> None:
        self.start_callbacks.clear()
        self.end_callbacks.clear()

    @contextmanager
    def install_callbacks(self, *about: object) -> Iterator[None]:
        try:
            for callback in self.start_callbacks:
                callback(*about)
            yield
        finally:
            for callback in self.end_callbacks:
                callback(*about)

    @contextmanager
    def compiling(self, compile_id: str = "0/0", trigger: str = "DYNAMO") -> Iterator[None]:
        with self.install_callbacks():
            yield


class NewerHandler(Handler):
    """Since torch 2.8: called at the outermost compile, with what is compiled and why."""

    depth = 0

    @contextmanager
    def compiling(self, compile_id: str = "0/0", trigger: str = "DYNAMO") -> Iterator[None]:
        self.depth += 1
        try:
            if self.depth > 1:
                yield
                return
            about = SimpleNamespace(callback_trigger=SimpleNamespace(name=trigger), compile_id=compile_id)
            with self.install_callbacks(about):
                yield
        finally:
            self.depth -= 1


@pytest.fixture(params=[Handler, NewerHandler], ids=["torch 2.4 to 2.7", "torch 2.8 and later"])
def handler(request: pytest.FixtureRequest) -> Any:
    return request.param()


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock(1000 * MS)


def listening(clock: FakeClock, handler: Handler) -> CompilerProbe:
    probe = CompilerProbe(clock, lambda: handler)
    probe.listen()
    return probe


def test_a_compile_is_timed_whatever_torch_calls_back_with(handler: Any, clock: FakeClock) -> None:
    """The first call of a compiled model ended with a TypeError in otel_train on torch 2.4 to 2.7."""
    probe = listening(clock, handler)
    with handler.compiling():
        clock.tick(ms=5)

    assert [each[:2] for each in probe.take()] == [(1000 * MS, 1005 * MS)]


def test_compiles_inside_a_compile_are_part_of_it(handler: Any, clock: FakeClock) -> None:
    """The time before and after the inner one is compiling, too."""
    probe = listening(clock, handler)
    with handler.compiling():
        clock.tick(ms=1)
        with handler.compiling():
            clock.tick(ms=2)
        clock.tick(ms=4)

    assert [each[:2] for each in probe.take()] == [(1000 * MS, 1007 * MS)]


def test_a_compile_that_fails_is_timed_and_its_error_is_the_programs(handler: Any, clock: FakeClock) -> None:
    """Programs catch what the compiler raises and go on without it."""
    probe = listening(clock, handler)
    with suppress(ZeroDivisionError), handler.compiling():
        clock.tick(ms=3)
        raise ZeroDivisionError
    with handler.compiling():
        clock.tick(ms=1)

    assert [each.ended_ns - each.begun_ns for each in probe.take()] == [3 * MS, 1 * MS]


def test_what_began_before_we_listened_is_not_counted(handler: Any, clock: FakeClock) -> None:
    """A session may begin while another thread compiles: when that began is unknown."""
    probe = CompilerProbe(clock, lambda: handler)
    with handler.compiling():
        probe.listen()
    with handler.compiling():
        clock.tick(ms=1)

    assert [each[:2] for each in probe.take()] == [(1000 * MS, 1001 * MS)]


def test_a_reset_inside_a_compile_does_not_end_the_timing_for_good(handler: Any, clock: FakeClock) -> None:
    """``torch._dynamo.reset()`` forgets the callbacks, and so the end of a compile that is under way."""
    probe = listening(clock, handler)
    with handler.compiling():
        handler.clear()
    probe.listen()
    with handler.compiling():
        clock.tick(ms=2)

    assert [each.ended_ns - each.begun_ns for each in probe.take()] == [2 * MS]


@pytest.mark.parametrize(
    ("compile_id", "trigger", "again"),
    [
        ("0/0", "DYNAMO", False),
        ("0/1", "DYNAMO", True),
        ("0/1", "LAZY_BACKWARD", False),
        ("None", "DYNAMO", False),
    ],
)
def test_a_second_compile_of_a_frame_is_distinguished(
    clock: FakeClock, compile_id: str, trigger: str, *, again: bool
) -> None:
    """Compiling again and again is what slows a run down; compiling once is not."""
    handler = NewerHandler()
    probe = listening(clock, handler)
    with handler.compiling(compile_id, trigger):
        pass

    assert probe.take() == [Compile(1000 * MS, 1000 * MS, again)]


def test_an_internal_fault_does_not_reach_the_programs_compile(
    handler: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """The callbacks run inside the program's own call of its model."""

    def broken() -> int:
        raise RuntimeError("no clock")

    probe = CompilerProbe(broken, lambda: handler)
    probe.listen()
    with handler.compiling():
        pass

    assert probe.take() == []
    assert "torch compiler failed; training goes on without it" in caplog.text
