"""Public functions for JAX programs: they time functions until their results are computed."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any, NamedTuple

from otel_train.errors import require, shown, truth, wrong_argument
from otel_train.instrumentation.compile_events import running
from otel_train.instrumentation.stages import Stage, StageRecorder, active_session, stage_name
from otel_train.recording.events import WAIT, SourceKind
from otel_train.safety import is_of_signal_handler


def make_step(function: Callable[..., Any], *, name: str = "make_step", wait: bool = True) -> TimedFunction:
    """Wraps a function that updates parameters: each call is one training step.

    The result is bitwise that of the function. Wrap the compiled function, ``make_step(jax.jit(f))``; calls that JAX traces
    are not timed. Without a session it only calls.

    Args:
        function: called once per update.
        name: stage name. Use different names if several functions update in turn.
        wait: block until the result has been computed, so that the stage is the computation. Otherwise the stage is the
            dispatch, and the host may run ahead.

    Returns:
        The function to call in place of ``function``, with its attributes.

    Raises:
        ConfigError: it is not callable, or an argument is invalid.
        MissingExtraError: JAX is not installed.
    """
    call = _callable(function)
    name = stage_name("make_step(..., name={})", name)
    wait = _wait("make_step(..., wait={})", wait=wait)
    return TimedFunction(call, SourceKind.WHOLE, name, jax=_jax(), wait=wait)


def stage(function: Callable[..., Any], name: str, *, wait: bool = True) -> TimedFunction:
    """Wraps a function whose calls are a stage: ``stage(loss_and_gradients, "loss")``.

    As ``make_step``, but counts no step, except with name ``optimizer``, which stands for an update of parameters.

    Args:
        function: the function.
        name: stage name. Use few names: each is a series.
        wait: see ``make_step``.

    Returns:
        The function to call in place of ``function``.

    Raises:
        ConfigError: it is not callable, or an argument is invalid.
        MissingExtraError: JAX is not installed.
    """
    call = _callable(function)
    name = stage_name("stage(..., {})", name)
    kind = SourceKind.OPTIMIZER if name == "optimizer" else SourceKind.STAGE
    return TimedFunction(call, kind, name, jax=_jax(), wait=_wait("stage(..., wait={})", wait=wait))


def _wait(call: str, *, wait: bool) -> bool:
    return bool(wait) if active_session.off() else truth(call, wait)


def _callable(function: Any) -> Callable[..., Any]:  # Any: the user's own
    if callable(function) or active_session.off():
        given: Callable[..., Any] = function
        return given
    remedy = 'Wrap what is called, make_step(jax.jit(f)) or stage(f, "loss"), and call what comes back'
    raise wrong_argument(shown(function), "a function", remedy)


class Jax(NamedTuple):
    """Functions of JAX that are needed.

    Attributes:
        computes: whether a call with these arguments computes on this thread and is not traced.
        wait_for: blocks until a result has been computed.
    """

    computes: Callable[[tuple[Any, ...], dict[str, Any]], bool]
    wait_for: Callable[[Any], object]


class TimedFunction:
    """A function whose calls are timed; all other attributes are those of the function.

    A call that JAX traces is not timed, because the computation runs later. A timed function may be passed to ``jit``,
    ``grad`` or ``vmap``, and may wrap their result. For JAX it is a pytree node that holds the function.

    Attributes:
        compiled: JAX compiled it in an earlier call.
        compiling: JAX compiles it in the present call.
    """

    def __init__(
        self, function: Callable[..., Any], kind: SourceKind, name: str, *, jax: Jax, wait: bool
    ) -> None:
        functools.update_wrapper(self, function, updated=())
        self._key = kind, name
        self._jax = jax
        self._wait = wait
        self.compiled = False
        self.compiling = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the function."""
        recorder, function = active_session.stages, self.__wrapped__
        if (recorder is None and active_session.wanted is None) or not self._jax.computes(args, kwargs):
            return function(*args, **kwargs)
        if recorder is None:
            recorder = _session_wanted()
            if recorder is None:
                return function(*args, **kwargs)
        begin, end, fail = recorder.functions.get(self._key) or recorder.register_function(*self._key)
        outer, running.call = running.call, self
        recorder.edge(begin)
        try:
            result = function(*args, **kwargs)
            if self._wait:
                self._wait_for(result)
        except BaseException:
            recorder.edge(fail)
            raise
        finally:
            running.call = outer
            self.compiled |= self.compiling
            self.compiling = False
        recorder.edge(end)
        return result

    def _wait_for(self, result: Any) -> None:
        """Blocks until the result is computed. An error of the computation raises where the program uses the result, as without otel_train."""
        with Stage(WAIT):
            try:
                self._jax.wait_for(result)
            except Exception as error:
                if is_of_signal_handler(error):
                    raise

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        """Binds the function to ``instance`` as a method."""
        return self if instance is None else types.MethodType(self, instance)

    def __getattr__(self, name: str) -> Any:
        if name == "__wrapped__":  # not set yet while unpickling
            raise AttributeError(name)
        return getattr(self.__wrapped__, name)

    def tree_flatten(self) -> tuple[tuple[Any], tuple[Any, ...]]:
        """Returns the function as the only child, and the arguments that rebuild the node around another one."""
        return (self.__wrapped__,), (*self._key, self._wait)


def _session_wanted() -> StageRecorder | None:
    if active_session.wanted is not None:
        active_session.wanted()
    return active_session.stages


@functools.cache
def _jax() -> Jax:
    jax = require("jax", extra="jax")

    def together(facts: tuple[Any, ...], parts: tuple[Any]) -> TimedFunction:  # unflattens a node
        kind, name, wait = facts
        return TimedFunction(parts[0], kind, name, jax=known, wait=wait)

    known = Jax(_trace_state(jax), jax.block_until_ready)
    jax.tree_util.register_pytree_node(TimedFunction, TimedFunction.tree_flatten, together)
    return known


def _trace_state(jax: Any) -> Callable[[tuple[Any, ...], dict[str, Any]], bool]:
    """Returns ``Jax.computes`` for the installed version of JAX."""
    # ``trace_state_clean`` has moved. Where its public name is deprecated, access to it warns: the private one is tried first.
    for place in (getattr(jax, "_src", None), jax):
        clean = getattr(getattr(place, "core", None), "trace_state_clean", None)
        if clean is not None:
            return lambda *_: bool(clean())

    def without_tracers(*given: Any) -> bool:
        return not any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree_util.tree_leaves(given))

    return without_tracers
