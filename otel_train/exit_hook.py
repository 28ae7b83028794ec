"""How a run ends: by itself, by an exception, by Ctrl-C, by SIGTERM."""

from __future__ import annotations

import atexit
import functools
import os
import signal
import sys
import threading
from typing import TYPE_CHECKING, Any, NoReturn

from otel_train.instrumentation.patching import replace
from otel_train.recording.ring_buffer import EXTENSION

if TYPE_CHECKING:
    from collections.abc import Callable


PATIENCE_NS = 1_000_000_000
"""From SIGTERM until the main thread must run Python again: as long as that takes nothing can be closed. Batch systems give
ten seconds or more."""

ENDS = ("finished", "failed", "interrupted", "terminated")
"""How a run may end that can still say so."""


class ExitHook:
    """Watches for the end and closes the session in time, without changing how the program ends.

    Args:
        close: closes the session; takes the state.
        recorded: how much has been recorded so far.
        told: memory for the number of a signal that ended the program; None for none.
    """

    def __init__(
        self,
        close: Callable[[str], None],
        recorded: Callable[[], int] = lambda: 0,
        told: memoryview | None = None,
    ) -> None:
        self.state = "running"
        self._close = close
        self._pid = os.getpid()
        self._before: Any = None
        self._handler: Any = None
        self._closing = self._held = False
        self._recorded = recorded
        self._told = told
        self._exit: tuple[object, int] = (None, -1)
        self._undo: Callable[[], None] = lambda: None

    def watch(self) -> None:
        """Be told of the end."""
        atexit.register(self._at_exit)
        self._undo = replace(sys, "exit", self._noting)
        if threading.current_thread() is threading.main_thread():
            self._before = signal.getsignal(signal.SIGTERM)
            self._handler = self._terminated
            signal.signal(signal.SIGTERM, self._handler)
            if self._before is signal.SIG_DFL and self._told is not None and EXTENSION is not None:
                # Else a main thread that hangs in C would outlive a signal that ends it without us.
                EXTENSION.bound_term(self._told, PATIENCE_NS)

    def hold(self) -> None:
        """Let SIGTERM wait until ``stop_watching``."""
        self._closing = True

    def stop_watching(self) -> None:
        """Put everything back. A handler that somebody set over ours stays. A SIGTERM that waits comes now."""
        atexit.unregister(self._at_exit)
        self._undo()
        if self._told is not None and EXTENSION is not None:
            EXTENSION.unbound_term()
            self._told = None
        ours = self._handler is not None and signal.getsignal(signal.SIGTERM) == self._handler
        if ours and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self._before or signal.SIG_DFL)
        self._closing = False
        if self._held:
            self._held = False
            os.kill(os.getpid(), signal.SIGTERM)

    def settle(self, state: str) -> None:
        """Say how it ended; found out when empty. Who was told to terminate has been terminated."""
        if self.state != "terminated":
            self.state = state or self.of(sys.exc_info()[1])

    def of(self, error: BaseException | None) -> str:
        """The state that an exception leaves a run in."""
        if error is None or (isinstance(error, SystemExit) and not error.code):
            return "finished"
        return "interrupted" if isinstance(error, KeyboardInterrupt) else "failed"

    def _noting(self, original: Callable[[object], NoReturn]) -> Callable[[object], NoReturn]:
        @functools.wraps(original)
        def exit(status: object = None, /) -> NoReturn:  # noqa: A001 - in its place
            if threading.current_thread() is threading.main_thread():  # else it ends its thread alone
                self._exit = status, self._recorded()
            original(status)

        return exit

    def _at_exit(self) -> None:
        if os.getpid() != self._pid:
            return
        # The interpreter leaves the exception that ended the program here before it calls us, but for SystemExit.
        error = getattr(sys, "last_value", None)
        status, recorded = self._exit
        if error is None and recorded == self._recorded():  # else the program has caught it, and went on
            error = SystemExit(status)
        self._close(self.of(error))

    def _terminated(self, number: int, frame: Any) -> None:  # Any: a frame
        """SIGTERM: write down what there is, then do what would have been done without us."""
        mine = os.getpid() == self._pid
        if EXTENSION is not None:
            EXTENSION.term_begun()
        if self._closing and mine:  # takes a bounded time, and loses nothing
            self._held = True
            return
        if callable(self._before):
            if mine:
                self.state = "terminated"
            self._before(number, frame)
            return
        if self._before is signal.SIG_IGN:
            return
        if mine:
            self._close("terminated")
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
