"""The end of the training process: how the program ended, what is done before, and SIGTERM."""

from __future__ import annotations

import atexit
import functools
import os
import re
import signal
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, NoReturn

from otel_train.safety import frames, free_in_forks, on_main_thread

SIGTERM_WAIT_NS = 1_000_000_000
"""Where SIGTERM closes the session, the main thread must run Python again within this time. Batch systems give ten seconds or
more."""

_CAUSE_LENGTH = 200
_TRACEBACK = r"(?m)^.*Traceback \(most recent call last\):\n(?:[ \t].*\n)*"
"""In the message of an exception that another process raised, as a worker of a loader: what it says comes behind."""

ENDS = ("finished", "failed", "interrupted", "terminated")
"""How a run may end that can still say so."""


class Terminated(BaseException):
    """SIGTERM arrived during ``instrument()``, which undoes what it has started. The program never sees it."""


class ExitHook:
    """Closes the session when the program ends, without changing how it ends.

    SIGTERM ends a program that has no handler of it at once: the agent delivers what is left. ``close_first`` is for what only
    this process can finish.

    Args:
        close: closes the session; takes the state.
        ring: gives the events of the main thread: ``written``, and ``begun_since(written)``; None for none.
        signal_word: memory for the number of a signal that came to end the program; None for none.
        extension: ``_edges.c``, which writes that number, and ends the program where the main thread never runs Python again.
            Without it the agent reads the end of the process from the kernel.

    Attributes:
        assumed: the state is ``finished`` because nothing else was seen. ``raise SystemExit(3)`` is not.
        cause: what the run failed by, see ``cause_of``; "" where it did not.
    """

    def __init__(
        self,
        close: Callable[[str], None],
        ring: Callable[[], Any] = lambda: None,  # Any: ``RingReader``, of a package above
        signal_word: memoryview | None = None,
        extension: Any = None,  # Any: a module written in C
    ) -> None:
        self.assumed = False
        self.cause = ""
        self._state = "running"
        self._close = close
        self._pid = os.getpid()
        self._before: Any = None
        self._handler: Any = None
        self._closes_first = self._starting = self._closing = self._held = self._removed = False
        self._ring = ring
        self._extension = extension if signal_word is not None else None
        self._signal_word = signal_word
        self._changing = free_in_forks(threading.RLock())
        self._exit: tuple[object, Any] | None = None
        self._child: Any = None
        self._sys_exit: tuple[Any, Any] = (None, None)

    @property
    def state(self) -> str:
        """How the run has ended; ``running`` until then."""
        came = self._state == "running" and self._signal_word is not None and self._signal_word[0]
        return "terminated" if came else self._state

    def install(self) -> None:
        """Registers with ``atexit`` and ``multiprocessing``, in place of ``sys.exit``, and for SIGTERM."""
        atexit.register(self._at_exit)
        util: Any = sys.modules.get("multiprocessing.util")
        if util is not None and sys.modules["multiprocessing.process"].parent_process() is not None:
            self._child = util.Finalize(None, self._child_ends, exitpriority=-100)
        if callable(sys_exit := getattr(sys, "exit", None)):
            self._sys_exit = sys_exit, self._noting(sys_exit)
            vars(sys)["exit"] = self._sys_exit[1]
        _hooks.add(self)
        if self._extension is not None:
            self._extension.watch_term(self._signal_word, 0)
        elif on_main_thread() and callable(before := signal.getsignal(signal.SIGTERM)):
            self._set_handler(before)

    @contextmanager
    def starting(self) -> Iterator[None]:
        """Lets SIGTERM raise ``Terminated`` inside the block where it would close the session."""
        self._starting = True
        try:
            yield
        finally:
            self._starting = False

    def close_first(self, wanted: bool) -> None:  # noqa: FBT001 - a state
        """Returns whether SIGTERM has to close the session before it ends the program. From any thread, and from time to time.

        The program may have set a handler of its own meanwhile, and then the default action again. Only the main thread may set a
        handler of Python, so another one has it do that between two of its bytecodes.
        """
        with self._changing:
            if self._removed or os.getpid() != self._pid:
                return
            changed, self._closes_first = wanted != self._closes_first, wanted
            mine = True
            if self._extension is not None and (wanted or not changed):
                mine = self._extension.watch_term(self._signal_word, SIGTERM_WAIT_NS if wanted else 0)
            if changed or (wanted and mine and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL):
                _adapt_on_main_thread()

    def adapt(self) -> None:
        """Sets the handler of SIGTERM that is wanted now, unless there is one of the program's. On the main thread."""
        now = signal.getsignal(signal.SIGTERM)
        if self._removed or os.getpid() != self._pid:
            return
        if self._closes_first and now is signal.SIG_DFL:
            extension = self._extension
            if extension is not None and not extension.watch_term(self._signal_word, SIGTERM_WAIT_NS):
                return  # a library has set its own, in C
            self._set_handler(signal.SIG_DFL)
            if extension is not None:
                came = extension.term_begun()
                extension.unwatch_term()
                extension.watch_term(self._signal_word, SIGTERM_WAIT_NS)
                if came:
                    self._terminated(signal.SIGTERM, None)
        elif not self._closes_first and self._handler is not None and now == self._handler:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            self._handler = None
            if self._extension is not None:
                self._extension.unwatch_term()
                self._extension.watch_term(self._signal_word, 0)

    def hold(self) -> None:
        """Lets SIGTERM wait until ``remove``, where it closes the session."""
        self._closing = True

    def remove(self) -> None:
        """Restores the previous handlers. A handler that was set over this one stays. A deferred SIGTERM is delivered now."""
        atexit.unregister(self._at_exit)
        if self._child is not None:
            self._child.cancel()
        original, replacement = self._sys_exit
        if replacement is not None and getattr(sys, "exit", None) is replacement:
            vars(sys)["exit"] = original
        with self._changing:
            self._removed = True
            self._put_back()
            self._signal_word = self._extension = None
        self._closing = False
        if self._held:
            self._held = False
            os.kill(os.getpid(), signal.SIGTERM)

    def let_go_in_fork(self) -> None:
        """Restores in a forked child what SIGTERM does without a session."""
        if not self._removed:
            self._put_back()

    def set_state(self, state: str) -> None:
        """Sets how the run ended; derived from the current exception if empty. ``terminated`` stays."""
        ended, error = self.state == "terminated", sys.exc_info()[1]
        self._state = "terminated" if ended else state or self.of(error)
        self.cause = self.cause or cause_of(error) if self._state == "failed" else ""
        self.assumed = self.assumed and not ended  # SIGTERM was seen

    @staticmethod
    def of(error: BaseException | None) -> str:
        """Returns the state that an exception leaves a run in."""
        if error is None or (isinstance(error, SystemExit) and not error.code):
            return "finished"
        if isinstance(error, Terminated):
            return "terminated"
        return "interrupted" if isinstance(error, KeyboardInterrupt) else "failed"

    def _set_handler(self, before: Any) -> None:  # Any: what ``signal.signal`` takes
        self._before, self._handler = before, self._terminated
        signal.signal(signal.SIGTERM, self._handler)

    def _put_back(self) -> None:
        if self._extension is not None:
            self._extension.unwatch_term()
        ours = self._handler is not None and signal.getsignal(signal.SIGTERM) == self._handler
        if ours and on_main_thread():
            signal.signal(signal.SIGTERM, self._before)

    def _noting(self, original: Callable[[Any], NoReturn]) -> Callable[[object], NoReturn]:
        @functools.wraps(original)
        def exit(status: object = None, /) -> NoReturn:  # noqa: A001 - in its place
            if on_main_thread():  # else it ends its thread alone
                self._exit = status, self._ring().written
            original(status)

        return exit

    def _at_exit(self) -> None:
        if os.getpid() != self._pid:
            return
        # The interpreter leaves the exception that ended the program here before it calls us, but for SystemExit.
        error = getattr(sys, "last_value", None)
        if error is not None and _is_caught(error):
            error = None
        if error is None and self._exit is not None and not self._ring().begun_since(self._exit[1]):
            error = SystemExit(self._exit[0])  # else the program has caught it, and went on
        elif error is None and (code := _code_of_forked_child()):
            error = SystemExit(code)
        self.assumed, self.cause = error is None, cause_of(error)
        with suppress(KeyboardInterrupt):  # Ctrl-C again: do not wait
            self._close(self.of(error))

    def _child_ends(self) -> None:
        """Closes when a child of ``multiprocessing`` ends, which it does without ``atexit``."""
        if self._closes_first:  # else the agent sees the end, and delivers what is left
            self._close("")

    def _terminated(self, number: int, frame: Any) -> None:  # Any: a frame
        """Handles SIGTERM: delivers the data, then does what would have been done without otel_train."""
        mine = os.getpid() == self._pid
        if self._extension is not None:
            self._extension.term_begun()
        if self._starting and mine:
            raise Terminated
        if self._closing and mine:  # takes a bounded time, and loses nothing
            self._held = True
            return
        if callable(self._before):
            if mine:
                self._state = "terminated"
            self._before(number, frame)
            return
        if mine:
            self._close("terminated")
        end_by_sigterm()


_FORKS = ("multiprocessing.popen_fork", "multiprocessing.forkserver")


def _code_of_forked_child() -> int:
    """Returns the exit code of a child that ``multiprocessing`` has forked, if ``atexit`` runs there, as of Python 3.13; else 0.

    The exception that ended it was caught by then; the function that runs ``atexit`` has the code.
    """
    found = (frame for frame in frames() if frame.f_globals.get("__name__") in _FORKS)
    return next((int(frame.f_locals.get("code") or 0) for frame in found), 0)


def cause_of(error: BaseException | None) -> str:
    """Returns type and message of an exception, in one line of 200 characters at most, or ``exit code <n>``; "" for none."""
    if isinstance(error, SystemExit) and isinstance(error.code, int):
        return f"exit code {error.code}"
    if error is None:
        return ""
    try:
        message = " ".join(re.sub(_TRACEBACK, "", str(error)).split())
    except Exception:  # noqa: BLE001 - the program's own code
        message = ""
    cause = f"{type(error).__name__}: {message}".removesuffix(": ")
    return cause if len(cause) <= _CAUSE_LENGTH else f"{cause[: _CAUSE_LENGTH - 1]}…"


def end_by_sigterm() -> None:
    """Ends this process as SIGTERM ends one without a handler."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGTERM)


_hooks: weakref.WeakSet[ExitHook] = weakref.WeakSet()
_pending: list[Any] = []  # Any: a function of ctypes, which lives as long as Python may call it


def _is_caught(error: BaseException) -> bool:
    """Returns whether the program went on after an exception: at a prompt, or in a test runner, which show it.

    A notebook ends as its last cell: a program that runs one cell by cell stops at the first that fails.
    """
    trace = error.__traceback__
    if not hasattr(sys, "ps1") and (trace is None or trace.tb_frame.f_back is None):
        return False  # it has left the outermost frame
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return bool(getattr(shell, "last_execution_succeeded", True))


def _adapt_all(_: object = None) -> int:
    for hook in list(_hooks):
        hook.adapt()
    return 0


def _adapt_on_main_thread() -> None:
    if on_main_thread():
        _adapt_all()
        return
    with suppress(ImportError, AttributeError):  # an interpreter without it
        import ctypes

        if not _pending:
            _pending.append(ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(_adapt_all))
        ctypes.pythonapi.Py_AddPendingCall(_pending[0], None)


def _in_fork() -> None:
    for hook in list(_hooks):
        hook.let_go_in_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_fork)
