"""When JAX compiles, by its own events; its listeners are fakes here."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest

from otel_train.datamodel import Compile
from otel_train.instrumentation.compile_events import (
    COMPILED,
    TOGETHER_NS,
    JaxCompilerProbe,
    compiled_name,
    running,
)
from otel_train.testing import FakeClock

TRACED = "/jax/core/compile/jaxpr_trace_duration"
LOWERED = "/jax/core/compile/jaxpr_to_mlir_module_duration"
MS = 1_000_000


class Monitoring:
    """JAX's module of events."""

    def __init__(self) -> None:
        self.listeners: list[Callable[..., None]] = []

    def register_event_duration_secs_listener(self, listener: Callable[..., None]) -> None:
        self.listeners.append(listener)

    def unregister_event_duration_listener(self, listener: Callable[..., None]) -> None:
        self.listeners.remove(listener)

    def tell(self, event: str, ms: float) -> None:
        for listener in self.listeners:
            listener(event, ms / 1e3, fun_name="descend")


class OlderMonitoring(Monitoring):
    """As it was before listeners could be taken out officially."""

    unregister_event_duration_listener = None  # type: ignore[assignment]

    def _unregister_event_duration_listener_by_callback(self, listener: Callable[..., None]) -> None:
        self.listeners.remove(listener)


class Call:
    compiled = False
    compiling = False


class Compiler:
    """A JAX that compiles, and the probe that listens to it."""

    def __init__(self) -> None:
        self.clock = FakeClock(1000 * MS)
        self.jax: Any = Monitoring()
        self.probe = JaxCompilerProbe(self.clock, lambda: self.jax)

    def part(self, event: str, ms: float) -> None:
        """A part that begins now."""
        self.clock.tick(ms=ms)
        self.jax.tell(event, ms)


@pytest.fixture
def compiler() -> Iterator[Compiler]:
    """One with a listener; no call runs."""
    made = Compiler()
    made.probe.listen()
    yield made
    running.call = None


def test_tracing_lowering_and_compiling_are_one_compile(compiler: Compiler) -> None:
    """A person waits for all three."""
    for event, ms in ((TRACED, 10), (LOWERED, 20), (COMPILED, 70)):
        compiler.part(event, ms)
        compiler.clock.tick(ms=1)

    assert compiler.probe.take() == [
        Compile(1000 * MS, 1102 * MS, again=None, compiler="jax", function="descend")
    ]
    assert compiler.probe.take() == []


def test_what_is_traced_in_a_trace_is_a_part_of_it(compiler: Compiler) -> None:
    """A function that calls other compiled functions is traced through them."""
    compiler.clock.tick(ms=5)
    compiler.part(TRACED, 10)
    compiler.clock.tick(ms=5)
    compiler.jax.tell(TRACED, 20)  # the outer one, which began before
    compiler.part(COMPILED, 30)

    assert compiler.probe.take() == [
        Compile(1000 * MS, 1050 * MS, again=None, compiler="jax", function="descend")
    ]


def test_a_compile_that_began_before_the_session_counts_from_the_session_on() -> None:
    """Below ``otel-train run`` the session starts inside the first trace of the step."""
    clock = FakeClock(1000 * MS)
    probe = JaxCompilerProbe(clock, lambda: jax)
    jax = Monitoring()
    probe.listen()
    clock.tick(ms=30)
    jax.tell(COMPILED, 500)

    assert probe.take() == [Compile(1000 * MS, 1030 * MS, again=None, compiler="jax", function="descend")]


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ("jit(train_step)", "train_step"),
        ("train_step", "train_step"),
        ("jit(<lambda>)", ""),
        ("jit(_threefry_seed)", ""),
        ("", ""),
        (None, ""),
    ],
)
def test_only_functions_of_the_program_have_a_name(given: object, name: str) -> None:
    """A reader looks for the name in the own code: a lambda or a part of JAX is not found there."""
    assert compiled_name(given) == name


def test_an_operation_of_jax_is_no_function_of_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first operation that runs takes long to lower, and is not what the program means."""
    operations: Any = ModuleType("jax.lax")
    operations.convert_element_type = None
    monkeypatch.setitem(sys.modules, "jax.lax", operations)

    assert compiled_name("jit(convert_element_type)") == ""
    assert compiled_name("jit(train_step)") == "train_step"


def test_a_trace_that_nothing_follows_is_no_compile(compiler: Compiler) -> None:
    """``eval_shape`` and ``make_jaxpr`` trace and do not compile: what comes an hour later does not begin there."""
    compiler.part(TRACED, 10)
    compiler.clock.tick(TOGETHER_NS)
    compiler.part(COMPILED, 30)

    assert [each.ended_ns - each.begun_ns for each in compiler.probe.take()] == [30 * MS]


def test_a_function_that_was_compiled_in_an_earlier_call_is_compiled_again(compiler: Compiler) -> None:
    """That is what an alert rings for; the first compile of a function is not."""
    call = running.call = Call()
    compiler.part(COMPILED, 1)
    first = call.compiling
    call.compiled = True
    compiler.part(COMPILED, 1)
    running.call = None
    compiler.part(COMPILED, 1)

    assert first
    assert [each.again for each in compiler.probe.take()] == [False, True, None]


def test_other_events_are_none_of_its_business(compiler: Compiler) -> None:
    """JAX tells of caches and checkpoints by the same way."""
    compiler.part("/jax/checkpoint/write/durations_sec", 10)

    assert compiler.probe.take() == []


@pytest.mark.parametrize("kind", [Monitoring, OlderMonitoring])
def test_no_listener_stays_in_jax(kind: type[Monitoring]) -> None:
    """After close JAX calls no listener; in versions without an official way, too."""
    compiler = Compiler()
    compiler.jax = kind()
    compiler.probe.listen()
    compiler.probe.listen()
    listening = len(compiler.jax.listeners)
    compiler.probe.remove()

    assert (listening, compiler.jax.listeners) == (1, [])


def test_where_a_listener_cannot_be_taken_out_it_hears_nothing() -> None:
    """What stays in JAX is an inert function."""
    compiler = Compiler()
    compiler.jax = OlderMonitoring()
    compiler.jax._unregister_event_duration_listener_by_callback = None
    compiler.probe.listen()
    compiler.probe.remove()
    compiler.part(COMPILED, 1)

    assert compiler.probe.take() == []


def test_a_program_without_jax_is_left_alone() -> None:
    """Nothing is imported to listen to it."""
    probe = JaxCompilerProbe(FakeClock(), lambda: None)
    probe.listen()
    probe.remove()

    assert probe.take() == []


def test_an_internal_fault_does_not_reach_the_compiler(
    compiler: Compiler, caplog: pytest.LogCaptureFixture
) -> None:
    """It runs inside the user's call of their own function."""

    class Broken:
        compiled = False

        @property
        def compiling(self) -> bool:
            return False

    running.call = Broken()  # type: ignore[assignment]  # cannot be written to
    with caplog.at_level(logging.CRITICAL):
        for _ in range(4):
            compiler.part(COMPILED, 1)

    assert compiler.probe.take() == []
