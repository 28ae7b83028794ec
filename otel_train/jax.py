"""The functions that a JAX program calls."""

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
    """A function that makes one update of the parameters: each call is an update, and so a step.

    The result is the function's own, to the bit. Wrap the compiled function, ``make_step(jax.jit(f))``; called
    while JAX traces it is not timed. Without a session it only calls.

    Args:
        function: what is called once per update.
        name: of its stage. Give each its own where several update in turn.
        wait: until the result has been computed, so that the stage is the computation. Without it the stage is what
            the host takes to dispatch it, and the host may run ahead.

    Returns:
        What to call in place of ``function``; everything else of it is ``function``'s.

    Raises:
        ConfigError: it cannot be called, or an argument is not what it should be.
        MissingExtraError: JAX is not installed.
    """
    call = _callable(function)
    name = stage_name("make_step(..., name={})", name)
    return timed(call, SourceKind.WHOLE, name, wait=_wait("make_step(..., wait={})", wait=wait))


def stage(function: Callable[..., Any], name: str, *, wait: bool = True) -> TimedFunction:
    """A function whose calls are a stage: ``stage(loss_and_gradients, "loss")``.

    As ``make_step``, but no step is counted, except by ``optimizer``: what has that name updates parameters.

    Args:
        function: what is called.
        name: as it reads in every figure. Few names: each is a series.
        wait: see ``make_step``.

    Returns:
        What to call in place of ``function``.

    Raises:
        ConfigError: it cannot be called, or an argument is not what it should be.
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
