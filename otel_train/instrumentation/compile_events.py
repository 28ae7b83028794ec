"""When the compiler of torch runs, told by its own callbacks."""

from __future__ import annotations

import sys
from collections import deque
from typing import TYPE_CHECKING, Any

from otel_train.guard import Guard
from otel_train.records import Compile

if TYPE_CHECKING:
    from collections.abc import Callable

    from otel_train.clock import Clock

MOST_HELD = 4096
"""Compiles kept until they are fetched; of more, the oldest are forgotten."""


def _handler() -> object:
    """TorchDynamo's list of callbacks; None while it is not loaded, or in a torch that has none."""
    return getattr(sys.modules.get("torch._dynamo.callback"), "callback_handler", None)


class CompilerProbe:
    """Listens to TorchDynamo from the moment it is loaded; loads nothing itself.

    TorchDynamo calls back from the thread that waits for the compile: since torch 2.8 at the outermost compile only,
    and with what is compiled; before, at every frame, and without an argument.

    Args:
        clock: nanoseconds, monotonic.
        find: gives TorchDynamo's list of callbacks once the program has imported it.
    """

    def __init__(self, clock: Clock, find: Callable[[], Any] = _handler) -> None:
        self._clock = clock
        self._find = find
        self._guard = Guard("torch compiler")
        self._begun_ns = 0
        self._open = 0
        self._done: deque[Compile] = deque(maxlen=MOST_HELD)

    def listen(self) -> None:
        """Register, once it is loaded; again, where ``torch._dynamo.reset()`` has forgotten us."""
        handler = self._find()
        if handler is not None and self._begin not in handler.start_callbacks:
            self._open = 0
            handler.register_start_callback(self._begin)
            handler.register_end_callback(self._end)

    def take(self) -> list[Compile]:
        """What was compiled since the last call."""
        return [self._done.popleft() for _ in range(len(self._done))]

    def remove(self) -> None:
        """Listen no more."""
        handler = self._find()
        if handler is not None and self._begin in handler.start_callbacks:
            handler.remove_start_callback(self._begin)
            handler.remove_end_callback(self._end)

    # What these raise would be raised in the program's own call of its model.

    def _begin(self, *_: object) -> None:
        with self._guard:
            if not self._open:
                self._begun_ns = self._clock()
            self._open += 1

    def _end(self, *about: Any) -> None:
        with self._guard:
            if self._open:  # else it began before we listened
                self._open -= 1
                if not self._open:
                    self._done.append(Compile(self._begun_ns, self._clock(), _compiled_before(*about)))


def _compiled_before(about: Any = None) -> bool | None:
    """Whether the code of this compile had been compiled before; None if TorchDynamo does not say.

    Args:
        about: TorchDynamo's ``CallbackArgs``; torch 2.4 to 2.7 give none, and call back for traced frames alone.
    """
    if about is not None:
        # A backward that is compiled late carries the id of its forward.
        return getattr(about.callback_trigger, "name", "") == "DYNAMO" and _counts_again(about.compile_id)
    context = getattr(sys.modules.get("torch._guards"), "CompileContext", None)
    compile_id = None if context is None else context.current_compile_id()
    return None if compile_id is None else _counts_again(compile_id)


def _counts_again(compile_id: object) -> bool:
    """An id reads "frame/times compiled before"."""
    return str(compile_id).rpartition("/")[2] not in ("0", "None")
