"""The first sign of training with JAX; JAX and its events are fakes here."""

from __future__ import annotations

import atexit
import inspect
import logging
import pickle
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest

from otel_train.autoinstrument.attach import JaxTrainingDetector
from otel_train.instrumentation.compile_events import COMPILED, JaxCompilerProbe
from otel_train.testing import FakeClock


class Monitoring:
    """JAX's module of events, which goes through its own list."""

    def __init__(self) -> None:
        self.listeners: list[Callable[..., None]] = []
        self.register_event_duration_secs_listener = self.listeners.append
        self.unregister_event_duration_listener = self.listeners.remove

    def compile(self, function: str) -> None:
        for listener in self.listeners:
            listener(COMPILED, 0.5, fun_name=f"jit({function})")


def grad(fun: Callable[..., Any], argnums: int = 0) -> tuple[str, Any, int]:
    """Creates a function that evaluates the gradient of ``fun``."""
    return "gradient of", fun, argnums


class Program:
    """A program with JAX in it, and what waits for it to train."""

    def __init__(self, found: Callable[[], None] = lambda: None) -> None:
        self.signs = 0
        self._found = found
        self.lines: list[str] = []
        self.monitoring = Monitoring()
        jax: Any = ModuleType("jax")
        jax.grad = grad
        self.jax = jax
        self.clock = FakeClock(10**9)
        self.evidence = JaxTrainingDetector(
            self._sign,
            clock=self.clock,
            log=lambda text, *said: self.lines.append(text % said),
            modules={"jax": self.jax, "jax._src.monitoring": self.monitoring},
        )
        self.evidence.wait()

    def _sign(self) -> None:
        self.signs += 1
        self._found()


@pytest.fixture
def program() -> Iterator[Program]:
    """One that has begun."""
    made = Program()
    yield made
    made.evidence.stop()


def test_a_compile_after_a_gradient_is_the_sign_and_then_no_listener_stays(program: Program) -> None:
    """The parameters are made before: a session that started there would come before the program's own."""
    program.monitoring.compile("init")
    program.jax.grad(abs)
    assert program.signs == 0
    program.monitoring.compile("train_step")
    program.monitoring.compile("train_step")

    assert program.signs == 1
    assert program.jax.grad is grad


def test_what_gives_gradients_is_the_programs_own_function_in_all_but_identity(program: Program) -> None:
    """JAX differentiates what it was given, with the arguments it was given, and no wrapper is traced."""
    held = program.jax.grad

    assert held(abs, argnums=2) == ("gradient of", abs, 2)
    assert (held.__name__, held.__doc__, held.__wrapped__) == ("grad", grad.__doc__, grad)
    assert inspect.signature(held) == inspect.signature(grad)
    program.evidence.stop()
    assert held(abs) == ("gradient of", abs, 0)  # imported by name before, and kept


def test_a_function_that_gives_gradients_can_be_pickled(
    program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A configuration may hold it; it is found again under its public name."""
    monkeypatch.setitem(sys.modules, "jax", program.jax)
    kept = pickle.dumps(program.jax.grad)
    program.evidence.stop()

    assert pickle.loads(kept) is grad


def test_the_programs_own_listeners_hear_every_event() -> None:
    """JAX goes through its list while the session starts: no listener may be left out because of us."""
    heard: list[str] = []
    probes: list[JaxCompilerProbe] = []

    def found() -> None:
        probes.append(JaxCompilerProbe(made.clock, lambda: made.monitoring))
        probes[0].listen()

    made = Program(found)
    made.monitoring.listeners.append(lambda event, _, **more: heard.append(more["fun_name"]))
    made.jax.grad(abs)
    for name in ("first", "second"):
        made.clock.tick(ms=600)
        made.monitoring.compile(name)

    assert heard == ["jit(first)", "jit(second)"]
    assert [each.function for each in probes[0].take()] == ["first", "second"]
    probes[0].remove()
    assert len(made.monitoring.listeners) == 1  # the program's


def at_exit(program: Program) -> list[str]:
    """What is said when the interpreter ends, asked of the function that it would call."""
    program.evidence._at_exit()
    return program.lines


def test_a_program_that_compiles_and_takes_no_gradient_is_advised_at_exit(program: Program) -> None:
    """Evolution, a solver of its own: it may well train. Silence would read as a defect of otel_train."""
    program.monitoring.compile("generation")
    program.clock.tick(ms=2000)

    [line] = at_exit(program)

    for part in (
        "nothing was recorded", "1 function in 0.5 s", "`generation`", "2.5 s", "no gradient",
        "step = otel_train.jax.make_step(step)", "otel_train.watch(loader)",
    ):  # fmt: skip
        assert part in line, part


def test_a_program_that_only_imports_jax_gets_no_advice(program: Program) -> None:
    """A launcher, a tool, a library that looks whether JAX is there."""
    program.jax.grad(abs)

    assert at_exit(program) == []


def test_a_program_that_trains_has_its_run_summary_and_no_line_at_the_end(program: Program) -> None:
    """The session says what is missing."""
    program.jax.grad(abs)
    program.monitoring.compile("train_step")

    assert at_exit(program) == []


def test_a_session_that_cannot_start_does_not_fail_the_program(caplog: pytest.LogCaptureFixture) -> None:
    """JAX would hand the exception to the program, out of the middle of a compile."""

    def found() -> None:
        raise OSError("no such disk")

    program = Program(found)
    program.jax.grad(abs)
    with caplog.at_level(logging.WARNING):
        program.monitoring.compile("train_step")
        program.monitoring.compile("train_step")

    assert program.signs == 1
    assert "looking for training with JAX" in caplog.text
    assert program.jax.grad is grad


def test_nothing_is_called_at_exit_after_the_wait_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that is done with us keeps no exit handler, for as long as it lives."""
    left: list[Any] = []
    monkeypatch.setattr(atexit, "register", left.append)
    monkeypatch.setattr(atexit, "unregister", left.remove)
    program = Program()
    assert len(left) == 1
    program.evidence.stop()

    assert left == []
    assert program.monitoring.listeners == []
