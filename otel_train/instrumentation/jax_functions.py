"""Times functions of a JAX program until their results are computed."""

from __future__ import annotations

import functools
import types
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

from otel_train.errors import require
from otel_train.instrumentation.compile_events import running
from otel_train.instrumentation.stages import Stage, StageRecorder, active_session
from otel_train.recording.events import WAIT, SourceKind

if TYPE_CHECKING:
    from collections.abc import Callable

_OPTIMIZER = "optimizer"


class Jax(NamedTuple):
    """Functions of JAX that are needed.

    Attributes:
        computes: whether a call with these arguments computes on this thread and is not traced.
        wait_for: blocks until a result has been computed.
    """

    computes: Callable[[tuple[Any, ...], dict[str, Any]], bool]
    wait_for: Callable[[Any], object]


class TimedFunction:
    """A function whose calls are timed; everything else is the function's own.

    A call that JAX traces is not timed, because the computation runs later. It may be wrapped first and then passed to
    ``jit``, ``grad`` or ``vmap``, or the other way round. For JAX it is a pytree node that holds the function.

    Args:
        function: the function.
        kind: source kind of its calls.
        name: stage name.
        jax: functions of JAX.
        wait: block until the result has been computed.

    Attributes:
        compiled: it was compiled in an earlier call.
        compiling: it is compiled in this one.
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
        """Call the function."""
        recorder, function = active_session.stages, self.__wrapped__
        if (recorder is None and active_session.wanted is None) or not self._jax.computes(args, kwargs):
            return function(*args, **kwargs)
        if recorder is None:
            recorder = _session_wanted()
            if recorder is None:
                return function(*args, **kwargs)
        begin, end, fail = recorder.functions.get(self._key) or recorder.join_function(*self._key)
        outer, running.call = running.call, self
        recorder.edge(begin)
        try:
            result = function(*args, **kwargs)
            if self._wait:
                # What could not be computed raises where the program uses it, as it does without us.
                with Stage(WAIT), suppress(Exception):
                    self._jax.wait_for(result)
        except BaseException:
            recorder.edge(fail)
            raise
        finally:
            running.call = outer
            self.compiled |= self.compiling
            self.compiling = False
        recorder.edge(end)
        return result

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        """Binds it as a method."""
        return self if instance is None else types.MethodType(self, instance)

    def __getattr__(self, name: str) -> Any:
        if name == "__wrapped__":  # not set yet, while unpickling
            raise AttributeError(name)
        return getattr(self.__wrapped__, name)

    def tree_flatten(self) -> tuple[tuple[Any], tuple[Any, ...]]:
        """Returns the function as the only child, and what rebuilds the node around another one."""
        return (self.__wrapped__,), (*self._key, self._wait)


def _session_wanted() -> StageRecorder | None:
    if active_session.wanted is not None:
        active_session.wanted()
    return active_session.stages


def timed(function: Callable[..., Any], kind: SourceKind, name: str, *, wait: bool) -> TimedFunction:
    """Returns ``function``, timed.

    Raises:
        MissingExtraError: JAX is not installed.
    """
    return TimedFunction(function, kind, name, jax=_jax(), wait=wait)


def kind_of(name: str) -> SourceKind:
    """Returns the source kind of a stage name: ``optimizer`` counts steps."""
    return SourceKind.OPTIMIZER if name == _OPTIMIZER else SourceKind.STAGE


@functools.cache
def _jax() -> Jax:
    jax = require("jax", extra="jax")

    def together(facts: tuple[Any, ...], parts: tuple[Any]) -> TimedFunction:
        kind, name, wait = facts
        return TimedFunction(parts[0], kind, name, jax=known, wait=wait)

    known = Jax(_trace_state(jax), jax.block_until_ready)
    jax.tree_util.register_pytree_node(TimedFunction, TimedFunction.tree_flatten, together)
    return known


def _trace_state(jax: Any) -> Callable[[tuple[Any, ...], dict[str, Any]], bool]:
    """Returns how this version of JAX reports that it traces."""
    # It has moved. The public place warns where it is about to go.
    for place in (getattr(jax, "_src", None), jax):
        clean = getattr(getattr(place, "core", None), "trace_state_clean", None)
        if clean is not None:
            return lambda *_: bool(clean())

    def without_tracers(*given: Any) -> bool:
        return not any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree_util.tree_leaves(given))

    return without_tracers
