"""Detects that a process trains with JAX."""

from __future__ import annotations

import atexit
import functools
import logging
import sys
from typing import TYPE_CHECKING, Any

from otel_train.aggregation.counters import JaxCompiles, missing_step_reason
from otel_train.autoinstrument.training_detector import FirstSign
from otel_train.datamodel import system_clock
from otel_train.instrumentation.compile_events import (
    COMPILED,
    PARTS,
    events,
    listen,
    name_of,
    retire,
    unlisten,
)
from otel_train.safety import Guard, replace, successor

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from otel_train.datamodel import Clock

_DIFFERENTIATE = ("grad", "value_and_grad", "vjp", "linearize")
"""Functions of JAX that training programs call."""

_log = logging.getLogger("otel_train")


class JaxTrainingDetector(FirstSign):
    """Waits until JAX compiles in a program that has requested a gradient.

    The gradient functions are wrapped: a wrapper records the call and forwards it, so results and traces are JAX's own.
    Compilations are reported by JAX's monitoring events.
    """

    def __init__(
        self,
        found: Callable[[], None],
        *,
        clock: Clock = system_clock,
        log: Callable[[str, str], None] = _log.warning,
        modules: Mapping[str, Any] = sys.modules,
    ) -> None:
        super().__init__(found)
        self._clock = clock
        self._log = log
        self._modules = modules
        self._guard = Guard("looking for training with JAX", limit=1)
        self._differentiates = self._inside_listener = False
        self._seen = JaxCompiles()
        self._monitoring: Any = None

    def wait(self) -> None:
        """Installs wrappers and listener; JAX has been imported."""
        jax = self._modules["jax"]
        for name in _DIFFERENTIATE:
            if name in vars(jax):
                self._undo.append(
                    replace(jax, name, functools.partial(self._recording_wrapper, jax, name), waits=True)
                )
        self._monitoring = events(self._modules)
        listen(self._monitoring, self._on_event)
        atexit.register(self._at_exit)

    def stop(self) -> None:
        """Removes wrappers and listener."""
        super().stop()
        monitoring, self._monitoring = self._monitoring, None
        if monitoring is not None:
            (retire if self._inside_listener else unlisten)(monitoring, self._on_event)
        atexit.unregister(self._at_exit)

    def _recording_wrapper(self, jax: Any, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            self._differentiates = True
            return successor(jax, name, wrapper)(*args, **kwargs)

        wrapper.__module__, wrapper.__qualname__ = jax.__name__, name  # where a pickle finds it
        return wrapper

    def _on_event(self, event: str, duration_s: float, fun_name: object = "", **_: Any) -> None:
        if event not in PARTS or self._begun or self._guard.closed:
            return
        with self._guard:
            if event == COMPILED:
                now_ns = self._clock()
                self._seen = self._seen.plus(now_ns - int(duration_s * 1e9), now_ns, name_of(fun_name))
            if self._differentiates:
                self._inside_listener = True
                self.sign()

    def _at_exit(self) -> None:
        """Explains why nothing was recorded if JAX compiled and no training was detected."""
        if self._seen.functions and not self._begun and not _is_helper():
            seen = f"{self._seen.describe(self._clock())}; no gradient was asked for"
            self._log("nothing was recorded: %s", missing_step_reason(seen, loader=True))


def _is_helper() -> bool:
    """Returns whether this process is a child of multiprocessing: a pool, a loader, a fork."""
    processes: Any = sys.modules.get("multiprocessing.process")
    return processes is not None and processes.parent_process() is not None
