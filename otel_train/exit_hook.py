"""The end of the training process: detects how the program ended, closes the session, and handles SIGTERM."""

from __future__ import annotations

import atexit
import functools
import os
import re
import signal
import sys
import threading
import weakref
from _thread import get_ident
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, NoReturn

from otel_train.safety import frames, free_in_forks, on_main_thread

SIGTERM_WAIT_NS = 1_000_000_000
"""Time for the main thread to return from C to Python where SIGTERM closes the session; then a second SIGTERM ends the process.
Batch systems send SIGKILL after ten seconds or more."""

_CAUSE_LENGTH = 200  # characters
_TRACEBACK = r"(?m)^.*Traceback \(most recent call last\):\n(?:[ \t].*\n)*"
"""The traceback in the message of an exception from another process, such as a DataLoader worker; its cause comes after it."""

_HANDLED_BEFORE = "_otel_train_handled_before"
"""Attribute of an exception that was being handled when a session started: the identity of its ``ExitHook``."""

ENDS = ("finished", "failed", "interrupted", "terminated")
"""End states of a run whose process could record one."""


class Terminated(BaseException):
    """SIGTERM arrived during ``instrument()``, which undoes what it has started. This exception never reaches the program."""


class ExitHook:
    """Closes the session when the program ends, without changing how it ends.

    SIGTERM ends a program without a handler of its own at once: the agent exports the remaining data. ``close_first`` changes
    that while something, such as a tracker, can be finished only by this process.

    Args:
        close: closes the session; takes the end state.
        ring: returns the ring of the main thread, with ``written`` and ``begun_since(written)``.
        signal_word: shared memory for the number of a SIGTERM that arrived; None for none.
        extension: ``_edges.c``, which writes that number, and ends the process if the main thread does not return to Python.
            Without it the agent reads the exit status from the kernel.

    Attributes:
        assumed: the state is ``finished`` because no exception and no exit code was seen. ``raise SystemExit(3)`` leaves none.
        cause: why the run failed, see ``cause_of``; "" if it did not.
    """

    def __init__(
        self,
        close: Callable[[str], None],
        ring: Callable[[], Any],  # Any: ``RingReader``, of a package above
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
        self._starting = 0  # identity of the thread that starts the session
        self._closes_first = self._closing = self._held = self._removed = False
        self._ring = ring
        self._extension = extension if signal_word is not None else None
        self._signal_word = signal_word
        self._changing = free_in_forks(threading.RLock())
        self._exit: tuple[object, Any] | None = None
        self._child: Any = None
        if (handled := sys.exc_info()[1]) is not None:  # not kept: it holds the local variables of its frames
            vars(handled)[_HANDLED_BEFORE] = id(self)
        self._sys_exit: tuple[Any, Any] = (None, None)

    @property
    def state(self) -> str:
        """End state of the run; ``running`` until it ends."""
        signalled = self._state == "running" and self._signal_word is not None and self._signal_word[0]
        return "terminated" if signalled else self._state

    def install(self) -> None:
        """Registers with ``atexit`` and ``multiprocessing``, wraps ``sys.exit``, and handles SIGTERM."""
        atexit.register(self._at_exit)
        util: Any = sys.modules.get("multiprocessing.util")
        if util is not None and sys.modules["multiprocessing.process"].parent_process() is not None:
            self._child = util.Finalize(None, self._child_ends, exitpriority=-100)
        if callable(sys_exit := getattr(sys, "exit", None)):
            self._sys_exit = sys_exit, self._exit_wrapper(sys_exit)
            vars(sys)["exit"] = self._sys_exit[1]
        _hooks.add(self)
        if self._extension is not None:
            self._extension.watch_term(self._signal_word, 0)
        elif on_main_thread() and callable(before := signal.getsignal(signal.SIGTERM)):
            self._set_handler(before)

    @contextmanager
    def starting(self) -> Iterator[None]:
        """Makes SIGTERM raise ``Terminated`` inside the block, where a Python handler would close the session.

        Python handles signals on the main thread. If another thread runs the block, SIGTERM is deferred until its end.
        """
        self._starting = get_ident()
        try:
            yield
        finally:
            self._starting = 0
        self._deliver()

    def close_first(self, wanted: bool) -> None:  # noqa: FBT001 - a state
        """Sets whether SIGTERM closes the session before it ends the program. Called repeatedly, from any thread.

        Repeatedly, because the program may meanwhile have set a handler, and then the default action again. Only the main thread
        may set a Python handler; for another thread it does so through ``Py_AddPendingCall``.
        """
        with self._changing:
            if self._removed or os.getpid() != self._pid:
                return
            changed, self._closes_first = wanted != self._closes_first, wanted
            is_on_top = True
            if self._extension is not None and (wanted or not changed):
                is_on_top = self._extension.watch_term(self._signal_word, SIGTERM_WAIT_NS if wanted else 0)
            if changed or (wanted and is_on_top and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL):
                _adapt_on_main_thread()

    def adapt(self) -> None:
        """Sets or removes the Python handler of SIGTERM, unless the program has set one. On the main thread."""
        now = signal.getsignal(signal.SIGTERM)
        if self._removed or os.getpid() != self._pid:
            return
        if self._closes_first and now is signal.SIG_DFL:
            extension = self._extension
            if extension is not None and not extension.watch_term(self._signal_word, SIGTERM_WAIT_NS):
                return  # a C library has set its own handler
            self._set_handler(signal.SIG_DFL)
            if extension is not None:
                signalled = extension.term_begun()
                extension.unwatch_term()
                extension.watch_term(self._signal_word, SIGTERM_WAIT_NS)
                if signalled:
                    self._terminated(signal.SIGTERM, None)
        elif not self._closes_first and self._handler is not None and now == self._handler:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            self._handler = None
            if self._extension is not None:
                self._extension.unwatch_term()
                self._extension.watch_term(self._signal_word, 0)

    def hold(self) -> None:
        """Defers a SIGTERM that would close the session until ``remove``."""
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
            self._restore_handler()
            self._signal_word = self._extension = None
        self._closing = False
        self._deliver()

    def _deliver(self) -> None:
        """Sends a deferred SIGTERM."""
        if self._held:
            self._held = False
            os.kill(os.getpid(), signal.SIGTERM)

    def let_go_in_fork(self) -> None:
        """Restores the previous SIGTERM handler in a forked child, which has no session."""
        if not self._removed:
            self._restore_handler()

    def set_state(self, state: str) -> None:
        """Sets the end state. ``terminated`` stays.

        If empty, it is derived from the exception that is being handled, unless that was being handled when the session started.
        """
        signalled, error = self.state == "terminated", sys.exc_info()[1]
        if error is not None and vars(error).get(_HANDLED_BEFORE) == id(self):
            del vars(error)[_HANDLED_BEFORE]
            error = None
        self._state = "terminated" if signalled else state or self.of(error)
        self.cause = self.cause or cause_of(error) if self._state == "failed" else ""
        self.assumed = self.assumed and not signalled

    @staticmethod
    def of(error: BaseException | None) -> str:
        """Returns the end state of a run that ended with this exception, or with none."""
        if error is None or (isinstance(error, SystemExit) and not error.code):
            return "finished"
        if isinstance(error, Terminated):
            return "terminated"
        return "interrupted" if isinstance(error, KeyboardInterrupt) else "failed"

    def _set_handler(self, before: Any) -> None:  # Any: what ``signal.signal`` takes
        self._before, self._handler = before, self._terminated
        signal.signal(signal.SIGTERM, self._handler)

    def _restore_handler(self) -> None:
        if self._extension is not None:
            self._extension.unwatch_term()
        is_set = self._handler is not None and signal.getsignal(signal.SIGTERM) == self._handler
        if is_set and on_main_thread():
            signal.signal(signal.SIGTERM, self._before)

    def _exit_wrapper(self, original: Callable[[Any], NoReturn]) -> Callable[[object], NoReturn]:
        """Returns a ``sys.exit`` that records the status, and how many events the main thread had written by then."""

        @functools.wraps(original)
        def exit(status: object = None, /) -> NoReturn:  # noqa: A001 - in its place
            if on_main_thread():  # in another thread SystemExit ends only that thread
                self._exit = status, self._ring().written
            original(status)

        return exit

    def _at_exit(self) -> None:
        if os.getpid() != self._pid:
            return
        # Before it runs atexit, the interpreter stores the exception that ended the program here, except SystemExit.
        error = getattr(sys, "last_value", None)
        if error is not None and _is_caught(error):
            error = None
        if error is None and self._exit is not None and not self._ring().begun_since(self._exit[1]):
            error = SystemExit(self._exit[0])  # if a stage began after it, the program had caught SystemExit
        elif error is None and (code := _code_of_forked_child()):
            error = SystemExit(code)
        self.assumed, self.cause = error is None, cause_of(error)
        with suppress(KeyboardInterrupt):  # Ctrl-C again: do not wait
            self._close(self.of(error))

    def _child_ends(self) -> None:
        """Closes the session at the end of a child of ``multiprocessing``, which does not run ``atexit``."""
        if self._closes_first:  # else the agent sees the end of the process, and exports the remaining data
            self._close("")

    def _terminated(self, number: int, frame: Any) -> None:  # Any: a frame
        """Handles SIGTERM: calls the program's handler; without one, closes the session and ends the process."""
        is_owner = os.getpid() == self._pid
        if self._extension is not None:
            self._extension.term_begun()
        if self._starting == get_ident() and is_owner:
            raise Terminated
        if (self._starting or self._closing) and is_owner:  # both take a bounded time
            self._held = True
            return
        if callable(self._before):
            if is_owner:
                self._state = "terminated"
            self._before(number, frame)
            return
        if is_owner and not self._removed:
            self._close("terminated")
        end_by_sigterm()


_FORKS = ("multiprocessing.popen_fork", "multiprocessing.forkserver")


def _code_of_forked_child() -> int:
    """Returns the exit code of a child that ``multiprocessing`` forked, where it runs ``atexit`` (Python 3.13 and later); else 0.

    ``multiprocessing`` has caught the exception by then; the frame that runs ``atexit`` has the code in a local variable.
    """
    exit_frames = (frame for frame in frames() if frame.f_globals.get("__name__") in _FORKS)
    return next((int(frame.f_locals.get("code") or 0) for frame in exit_frames), 0)


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
    """Ends this process by SIGTERM with its default action."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGTERM)


_hooks: weakref.WeakSet[ExitHook] = weakref.WeakSet()
_pending: list[Any] = []  # Any: the ctypes callback, kept alive while a pending call may use it


def _is_caught(error: BaseException) -> bool:
    """Returns whether the program went on after ``sys.last_value``: prompts and test runners set it for exceptions that they show.

    In IPython the last cell decides: tools that run a notebook stop at the first cell that fails.
    """
    trace = error.__traceback__
    if not hasattr(sys, "ps1") and (trace is None or trace.tb_frame.f_back is None):
        return False  # the exception has left the outermost frame
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
    with suppress(ImportError, AttributeError):  # an interpreter without ``ctypes.pythonapi``
        import ctypes

        if not _pending:
            _pending.append(ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(_adapt_all))
        ctypes.pythonapi.Py_AddPendingCall(_pending[0], None)


def _in_fork() -> None:
    for hook in list(_hooks):
        hook.let_go_in_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_fork)
