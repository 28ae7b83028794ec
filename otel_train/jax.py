"""Public functions for JAX programs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from otel_train.errors import ConfigError, shown, truth
from otel_train.instrumentation.jax_functions import kind_of, timed
from otel_train.instrumentation.stages import active_session, stage_name
from otel_train.recording.events import SourceKind

if TYPE_CHECKING:
    from collections.abc import Callable

    from otel_train.instrumentation.jax_functions import TimedFunction


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
    return timed(call, SourceKind.WHOLE, name, wait=_wait("make_step(..., wait={})", wait=wait))


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
    return timed(call, kind_of(name), name, wait=_wait("stage(..., wait={})", wait=wait))


def _wait(call: str, *, wait: bool) -> bool:
    return bool(wait) if active_session.off() else truth(call, wait)


def _callable(function: Any) -> Callable[..., Any]:  # Any: the user's own
    if callable(function) or active_session.off():
        given: Callable[..., Any] = function
        return given
    raise ConfigError(
        f"{shown(function)} is a {type(function).__name__}: expected a function. "
        'Wrap what is called, make_step(jax.jit(f)) or stage(f, "loss"), and call what comes back'
    )
