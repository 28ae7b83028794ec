"""Records compilations by TorchDynamo and JAX."""

from __future__ import annotations

import re
import sys
import threading
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from otel_train.datamodel import Clock, Compile
from otel_train.safety import Guard

MOST_HELD = 4096
"""Compilations kept until they are taken; the oldest are dropped."""


def _handler() -> object:
    """Returns TorchDynamo's callback registry; None if it is not loaded or this torch has none."""
    return getattr(sys.modules.get("torch._dynamo.callback"), "callback_handler", None)


class _Compilations:
    """Queue of finished compilations, until the service thread takes them."""

    def __init__(self, part: str, clock: Clock, find: Callable[[], Any], changed: Callable[[], None]) -> None:
        self._clock = clock
        self._find = find
        self._changed = changed
        self._guard = Guard(part)
        self._done: deque[Compile] = deque(maxlen=MOST_HELD)

    def take(self) -> list[Compile]:
        """Returns the compilations since the last call."""
        return [self._done.popleft() for _ in range(len(self._done))]

    def _add(self, compilation: Compile) -> None:
        self._done.append(compilation)
        self._changed()


class CompilerProbe(_Compilations):
    """Registers callbacks with TorchDynamo once the program has loaded it; imports nothing itself.

    TorchDynamo calls back on the thread that waits for the compilation: since torch 2.8 at the outermost compilation only,
    with a description of it; before, at every frame and without arguments.
    """

    def __init__(
        self, clock: Clock, find: Callable[[], Any] = _handler, changed: Callable[[], None] = lambda: None
    ) -> None:
        super().__init__("torch compiler", clock, find, changed)
        self._begun_ns = 0
        self._open = 0

    def listen(self) -> None:
        """Registers the callbacks once TorchDynamo is loaded, and again after ``torch._dynamo.reset()``."""
        handler = self._find()
        if handler is not None and self._begin not in handler.start_callbacks:
            self._open = 0
            handler.register_start_callback(self._begin)
            handler.register_end_callback(self._end)

    def remove(self) -> None:
        """Unregisters the callbacks."""
        handler = self._find()
        if handler is not None and self._begin in handler.start_callbacks:
            handler.remove_start_callback(self._begin)
            handler.remove_end_callback(self._end)

    # An exception of these two would leave the program's call of its model.

    def _begin(self, *_: object) -> None:
        with self._guard:
            if not self._open:
                self._begun_ns = self._clock()
            self._open += 1

    def _end(self, *about: Any) -> None:
        with self._guard:
            if self._open:  # else it began before registration
                self._open -= 1
                if not self._open:
                    self._add(Compile(self._begun_ns, self._clock(), _compiled_before(*about)))


def _compiled_before(about: Any = None) -> bool | None:
    """Returns whether this code had been compiled before; None if unknown.

    Args:
        about: TorchDynamo's ``CallbackArgs``; None with torch 2.4 to 2.7, which call back for traced frames alone.
    """
    if about is not None:
        # A backward that is compiled lazily has the id of its forward.
        return getattr(about.callback_trigger, "name", "") == "DYNAMO" and _was_compiled(about.compile_id)
    context = getattr(sys.modules.get("torch._guards"), "CompileContext", None)
    compile_id = None if context is None else context.current_compile_id()
    return None if compile_id is None else _was_compiled(compile_id)


def _was_compiled(compile_id: object) -> bool:
    """Returns whether an id of the form "frame/previous compilations" has previous compilations."""
    return str(compile_id).rpartition("/")[2] not in ("0", "None")


COMPILED = "/jax/core/compile/backend_compile_duration"
"""Last event of a compilation: XLA has compiled, or loaded from the cache on disk. Tracing and lowering come before."""

PARTS = frozenset(
    ("/jax/core/compile/jaxpr_trace_duration", "/jax/core/compile/jaxpr_to_mlir_module_duration", COMPILED)
)
"""The events of a compilation, each reported at its end with its duration."""

_WRAPPED_NAME = r"^\w+\((.*)\)$"
_OPERATIONS_OF_JAX = ("jax.lax", "jax.numpy", "jax.random", "jax.nn")

TOGETHER_NS = 50_000_000
"""Longest pause in nanoseconds between the events of one compilation. A trace without a following event is no compilation."""


_retired: list[tuple[Any, Callable[..., None]]] = []
"""Listeners to unregister, and the modules that have them."""


def events(modules: Mapping[str, Any] = sys.modules) -> Any:  # Any: a module of JAX's
    """Returns JAX's monitoring module; None if the program has not imported it."""
    return modules.get("jax._src.monitoring")


def listen(monitoring: Any, listener: Callable[..., None]) -> bool:  # Any: as above
    """Registers ``listener`` for durations of JAX events; returns whether that is supported."""
    register = getattr(monitoring, "register_event_duration_secs_listener", None)
    if register is not None:
        register(listener)
    return register is not None


def unlisten(monitoring: Any, listener: Callable[..., None]) -> None:  # Any: as above
    """Unregisters ``listener``."""
    for name in ("unregister_event_duration_listener", "_unregister_event_duration_listener_by_callback"):
        unregister = getattr(monitoring, name, None)
        if unregister is not None:
            unregister(listener)
            return


def retire(monitoring: Any, listener: Callable[..., None]) -> None:  # Any: as above
    """Unregisters ``listener`` when the session closes.

    While JAX iterates over its listeners, one that removes itself hides the event from the next one.
    """
    _retired.append((monitoring, listener))


def compiled_name(compiled: object) -> str:
    """Returns the program's function that JAX compiled under this name; "" for an operation of JAX."""
    name = re.sub(_WRAPPED_NAME, r"\1", str(compiled or ""))
    if not name.isidentifier() or name.startswith("_"):
        return ""
    own = any(name in vars(sys.modules[module]) for module in _OPERATIONS_OF_JAX if module in sys.modules)
    return "" if own else name


class Call(Protocol):
    """A timed function of the program during a call: whether an earlier call compiled it, and whether this one does."""

    compiled: bool
    compiling: bool


class Running(threading.local):
    """The innermost timed call of each thread."""

    call: Call | None = None


running = Running()


class _Parts(threading.local):
    """Interval of the current compilation on a thread; 0 without one."""

    begun_ns = 0
    ended_ns = 0


class JaxCompilerProbe(_Compilations):
    """Registers a listener with JAX once the program has loaded it; imports nothing itself.

    JAX reports each phase of a compilation at its end, on the thread that waits for it; phases may nest.
    """

    def __init__(
        self,
        clock: Clock,
        find: Callable[[], Any] = events,
        changed: Callable[[], None] = lambda: None,
        since_ns: int | None = None,
    ) -> None:
        super().__init__("JAX compiler", clock, find, changed)
        self._monitoring: Any = None
        self._parts = _Parts()
        self._since_ns = clock() if since_ns is None else since_ns

    def listen(self) -> None:
        """Registers the listener once JAX is loaded."""
        monitoring = self._find()
        if self._monitoring is None and listen(monitoring, self._on_event):
            self._monitoring = monitoring

    def remove(self) -> None:
        """Unregisters the listener."""
        monitoring, self._monitoring = self._monitoring, None
        unlisten(monitoring, self._on_event)
        while _retired:
            unlisten(*_retired.pop())

    def _on_event(self, event: str, duration_s: float, fun_name: object = "", **_: Any) -> None:
        if event in PARTS and self._monitoring is not None and not self._guard.closed:
            with self._guard:
                self._take(event, int(duration_s * 1e9), fun_name)

    def _take(self, event: str, lasted_ns: int, compiled: object) -> None:
        ended_ns, parts, call = self._clock(), self._parts, running.call
        begun_ns = max(ended_ns - lasted_ns, self._since_ns)  # time before the session is not accounted
        if parts.begun_ns and begun_ns - parts.ended_ns < TOGETHER_NS:
            begun_ns = min(parts.begun_ns, begun_ns)
        parts.begun_ns, parts.ended_ns = begun_ns, ended_ns
        if event == COMPILED:
            parts.begun_ns = 0
            again = None
            if call is not None:
                again, call.compiling = call.compiled, True
            self._add(Compile(begun_ns, ended_ns, again, "jax", compiled_name(compiled)))
