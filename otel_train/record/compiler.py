"""When the compiler of torch runs, told by its own callbacks."""

from __future__ import annotations

import sys
from collections import deque
from typing import TYPE_CHECKING, Any

from otel_train.records import Compile

if TYPE_CHECKING:
    from otel_train.clock import Clock

MOST_HELD = 4096
"""Compiles kept until they are fetched; of more, the oldest are forgotten."""


class CompilerProbe:
    """Listens to TorchDynamo from the moment it is loaded; loads nothing itself.

    TorchDynamo calls back at the outermost compile only, from the thread that waits for it.

    Args:
        clock: nanoseconds, monotonic.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._begun_ns = 0
        self._done: deque[Compile] = deque(maxlen=MOST_HELD)

    def listen(self) -> None:
        """Register, once it is loaded; again, where ``torch._dynamo.reset()`` has forgotten us."""
        handler: Any = _handler()
        if handler is not None and self._begin not in handler.start_callbacks:
            handler.register_start_callback(self._begin)
            handler.register_end_callback(self._end)

    def take(self) -> list[Compile]:
        """What was compiled since the last call."""
        return [self._done.popleft() for _ in range(len(self._done))]

    def remove(self) -> None:
        """Listen no more."""
        handler: Any = _handler()
        if handler is not None and self._begin in handler.start_callbacks:
            handler.remove_start_callback(self._begin)
            handler.remove_end_callback(self._end)

    def _begin(self, _: object) -> None:
        self._begun_ns = self._clock()

    def _end(self, compiled: Any) -> None:
        if self._begun_ns:
            # "frame/times compiled before". A backward that is compiled late carries its forward's.
            traced = getattr(compiled.callback_trigger, "name", "") == "DYNAMO"
            again = traced and str(compiled.compile_id).rpartition("/")[2] not in ("0", "None")
            self._done.append(Compile(self._begun_ns, self._clock(), again))
            self._begun_ns = 0


def _handler() -> object:
    """TorchDynamo's list of callbacks; None while it is not loaded, or in a torch that has none."""
    return getattr(sys.modules.get("torch._dynamo.callback"), "callback_handler", None)
