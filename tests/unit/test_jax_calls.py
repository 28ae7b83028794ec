"""Functions of a JAX program, timed: what is written, with a JAX that the test controls."""

from __future__ import annotations

import copy
import inspect
import types
from collections.abc import Callable
from typing import Any

import pytest

import otel_train
from otel_train.instrumentation.compile_events import running
from otel_train.instrumentation.stages import active_session
from otel_train.jax import Jax, TimedFunction, _trace_state
from otel_train.recording.events import SourceKind
from tests.support.watchdog import watchdog
from tests.support.written import Writer


class FakeJax:
    """Computes, or traces; keeps what was waited for."""

    def __init__(self) -> None:
        self.tracing = False
        self.waited: list[Any] = []

    def computes(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        return not self.tracing

    def wait_for(self, result: Any) -> None:
        self.waited.append(result)
        if isinstance(result, Exception):
            raise result

    def timed(
        self, function: Callable[..., Any], kind: SourceKind = SourceKind.WHOLE, *, wait: bool = True
    ) -> TimedFunction:
        return TimedFunction(function, kind, "make_step", jax=Jax(self.computes, self.wait_for), wait=wait)


@pytest.fixture
def jax() -> FakeJax:
    """A JAX that computes."""
    return FakeJax()


def add(a: int, b: int = 1) -> int:
    """Add them."""
    return a + b


def test_a_first_call_starts_the_session_where_one_is_wanted(
    jax: FakeJax, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Below ``otel-train run`` a program that wraps its step needs no `instrument`; its first step counts."""
    writes = Writer()
    monkeypatch.setattr(active_session, "stages", None)
    monkeypatch.setattr(
        active_session,
        "wanted",
        lambda: setattr(active_session, "stages", writes.stages()),
    )
    jax.tracing = True
    assert jax.timed(add)(1) == 2
    assert active_session.stages is None  # what is traced trains nothing
    jax.tracing = False

    assert jax.timed(add)(1) == 2
    assert writes.names[0] == ("BEGIN", "make_step")


def test_a_call_goes_on_where_no_session_could_be_started(
    jax: FakeJax, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker of a loader, a full disk: the function is called all the same."""
    monkeypatch.setattr(active_session, "stages", None)
    monkeypatch.setattr(active_session, "wanted", lambda: None)

    assert jax.timed(add)(1, b=4) == 5
    assert jax.waited == []


def test_a_call_is_a_stage_that_waits_for_its_result(jax: FakeJax, writer: Writer) -> None:
    """JAX returns before it has computed: without waiting the time would show up in whatever comes next."""
    result = jax.timed(add)(1, b=2)

    assert result == 3
    assert jax.waited == [3]
    assert writer.names == [
        ("BEGIN", "make_step"),
        ("BEGIN", "block_until_ready"),
        ("END", "block_until_ready"),
        ("END", "make_step"),
    ]


def test_who_does_not_want_to_wait_does_not(jax: FakeJax, writer: Writer) -> None:
    """A loop that dispatches several steps ahead is faster; then the stage is the dispatch."""
    jax.timed(add, wait=False)(1)

    assert jax.waited == []
    assert writer.names == [("BEGIN", "make_step"), ("END", "make_step")]


def test_a_call_that_is_traced_writes_nothing(jax: FakeJax, writer: Writer) -> None:
    """It makes a program, once; waiting for a tracer would raise in the user's program."""
    jax.tracing = True

    assert jax.timed(add)(1) == 2
    assert (writer.names, jax.waited) == ([], [])


def test_without_a_session_nothing_is_asked(jax: FakeJax) -> None:
    """The wrapper may stay in the code for good."""
    assert active_session.stages is None
    assert jax.timed(add)(1) == 2
    assert jax.waited == []


def test_an_exception_is_the_programs_and_the_stage_is_marked(jax: FakeJax, writer: Writer) -> None:
    """What fails is timed, too."""
    timed = jax.timed(lambda: 1 / 0)

    with pytest.raises(ZeroDivisionError):
        timed()

    assert writer.names == [("BEGIN", "make_step"), ("FAIL", "make_step")]
    assert running.call is None


def test_what_cannot_be_computed_raises_where_the_program_uses_it(jax: FakeJax, writer: Writer) -> None:
    """As without us: a result that is not used stops no program."""
    broken = RuntimeError("out of memory")

    assert jax.timed(lambda: broken)() is broken
    assert writer.names[-1] == ("END", "make_step")


def test_a_compile_is_assigned_to_the_call_it_is_of(jax: FakeJax, writer: Writer) -> None:
    """Whether code is compiled again is a question about a function."""
    calls: list[tuple[object, bool]] = []

    def compiles() -> None:
        call = running.call
        assert call is not None
        calls.append((call, call.compiled))
        call.compiling = True

    inner = jax.timed(compiles)
    outer = jax.timed(lambda: (inner(), running.call)[1])

    assert outer() is outer
    assert outer() is outer
    assert calls == [(inner, False), (inner, True)]
    assert (outer.compiled, running.call) == (False, None)


def test_everything_else_is_the_functions_own(jax: FakeJax, writer: Writer) -> None:
    """Programs ask a compiled function to lower itself, and tools read names and signatures."""
    timed = jax.timed(add)
    add.lower = "lowered"  # type: ignore[attr-defined]  # as jit's functions have it

    assert (timed.lower, timed.__name__, timed.__doc__) == ("lowered", "add", "Add them.")
    assert inspect.signature(timed) == inspect.signature(add)
    assert copy.copy(timed)(1) == 2
    with pytest.raises(AttributeError, match="nothing"):
        _ = timed.nothing
    with pytest.raises(AttributeError):
        _ = TimedFunction.__new__(TimedFunction).lower  # half made, as while unpickling


def test_a_method_keeps_its_object(jax: FakeJax, writer: Writer) -> None:
    """Trainers have their step as a method."""

    class Trainer:
        rate = 3
        step = jax.timed(lambda self, x: self.rate * x)

    assert Trainer().step(2) == 6
    assert isinstance(Trainer.step, TimedFunction)


@pytest.mark.parametrize(("name", "kind"), [("loss", SourceKind.STAGE), ("optimizer", SourceKind.OPTIMIZER)])
def test_what_updates_the_parameters_is_an_update(
    name: str, kind: SourceKind, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A loop whose step is in two functions has steps as well."""
    monkeypatch.setattr(otel_train.jax, "_jax", object)
    assert otel_train.jax.stage(abs, name)._key == (kind, name)


@pytest.mark.parametrize("place", ["_src", "public", "none"])
@pytest.mark.parametrize("tracing", [False, True])
def test_whether_it_traces_is_asked_as_this_jax_has_it(place: str, *, tracing: bool) -> None:
    """The function has moved between versions; where there is none the arguments tell."""
    tracer = type("Tracer", (), {})
    core: dict[str, Any] = {"Tracer": tracer}
    says = types.SimpleNamespace(trace_state_clean=lambda: not tracing)
    tree_util = types.SimpleNamespace(tree_leaves=lambda tree: [*tree[0], *tree[1].values()])
    if place == "public":
        core["trace_state_clean"] = says.trace_state_clean
    jax = types.SimpleNamespace(core=types.SimpleNamespace(**core), tree_util=tree_util)
    if place == "_src":
        jax._src = types.SimpleNamespace(core=says)

    assert _trace_state(jax)((1, tracer() if tracing else 2), {}) is not tracing


def test_what_a_watchdog_raises_while_a_result_is_awaited_reaches_the_program(
    jax: FakeJax, writer: Writer
) -> None:
    """Errors of the computation are raised where the result is used; this one is raised nowhere else."""
    with watchdog() as jax.wait_for, pytest.raises(TimeoutError, match="watchdog"):  # type: ignore[method-assign]
        jax.timed(add)(1)

    assert writer.ops[-1] == "FAIL"
