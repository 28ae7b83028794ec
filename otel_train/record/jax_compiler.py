"""When the compiler of JAX runs, told by its own events."""

from __future__ import annotations

import sys
import threading
from collections import deque
from typing import TYPE_CHECKING, Any, Protocol

from otel_train.guard import Guard
from otel_train.record.compiler import MOST_HELD
from otel_train.records import Compile

if TYPE_CHECKING:
    from collections.abc import Callable

    from otel_train.clock import Clock

COMPILED = "/jax/core/compile/backend_compile_duration"
"""XLA is done, or the cache on disk has given what it made before. Tracing and lowering come before it."""

_PARTS = frozenset(
    ("/jax/core/compile/jaxpr_trace_duration", "/jax/core/compile/jaxpr_to_mlir_module_duration", COMPILED)
)

TOGETHER_NS = 50_000_000
"""Between the parts of one compile less time passes than this. A trace that nothing follows is none."""


class Call(Protocol):
    """A function of the program's while it runs.

    Attributes:
        compiled: it has been compiled in an earlier call.
        compiling: it is compiled in this one.
    """

    compiled: bool
    compiling: bool


class Running(threading.local):
    """The innermost function whose call is timed, by thread."""

    call: Call | None = None


running = Running()


class JaxCompilerProbe:
    """Listens to JAX from the moment it is loaded; loads nothing itself.

    JAX tells of each part of a compile when it is over, on the thread that waits for it; parts may lie in each other.

    Args:
        clock: nanoseconds, monotonic.
        find: gives JAX's module of events once the program has imported it.
    """

    def __init__(
        self, clock: Clock, find: Callable[[], Any] = lambda: sys.modules.get("jax._src.monitoring")
    ) -> None:
        self._clock = clock
        self._find = find
        self._monitoring: Any = None
        self._guard = Guard("JAX compiler")
        self._done: deque[Compile] = deque(maxlen=MOST_HELD)
        self._parts = _Parts()

    def listen(self) -> None:
        """Register, once it is loaded."""
        monitoring = self._find()
        register = getattr(monitoring, "register_event_duration_secs_listener", None)
        if self._monitoring is None and register is not None:
            self._monitoring = monitoring
            register(self._heard)

    def take(self) -> list[Compile]:
        """What was compiled since the last call."""
        return [self._done.popleft() for _ in range(len(self._done))]

    def remove(self) -> None:
        """Listen no more."""
        monitoring, self._monitoring = self._monitoring, None
        for name in ("unregister_event_duration_listener", "_unregister_event_duration_listener_by_callback"):
            unregister = getattr(monitoring, name, None)
            if unregister is not None:
                unregister(self._heard)
                return

    def _heard(self, event: str, duration_s: float, **_: Any) -> None:
        if event in _PARTS and self._monitoring is not None and not self._guard.closed:
            with self._guard:
                self._take(event, int(duration_s * 1e9))

    def _take(self, event: str, lasted_ns: int) -> None:
        ended_ns, parts, call = self._clock(), self._parts, running.call
        begun_ns = ended_ns - lasted_ns
        if parts.begun_ns and begun_ns - parts.ended_ns < TOGETHER_NS:
            begun_ns = min(parts.begun_ns, begun_ns)
        parts.begun_ns, parts.ended_ns = begun_ns, ended_ns
        if event == COMPILED:
            parts.begun_ns = 0
            again = None
            if call is not None:
                again, call.compiling = call.compiled, True
            self._done.append(Compile(begun_ns, ended_ns, again, "jax"))


class _Parts(threading.local):
    """What has been heard of the compile that is under way on a thread; 0 for nothing."""

    begun_ns = 0
    ended_ns = 0
