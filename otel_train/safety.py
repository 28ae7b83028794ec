"""What keeps otel_train from disturbing the program: fault isolation, exit hooks, fork-safe locks, printable text."""

from __future__ import annotations

import atexit
import functools
import gc
import logging
import os
import signal
import sys
import threading
import unicodedata
import weakref
from contextlib import contextmanager, suppress
from contextvars import copy_context
from typing import TYPE_CHECKING, Any, Final, NoReturn, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from contextlib import AbstractContextManager
    from types import TracebackType
    from typing import Literal

log = logging.getLogger("otel_train")


class Guard:
    """Keeps a fault in one part of the telemetry from reaching the training loop.

    The first fault is logged, with its traceback unless the system refused something: a full disk is no error of the
    code. Later ones are only counted. After ``limit`` faults the part is switched off for the rest of the run: ``closed``
    is true, and whoever drives the part asks before driving. Faults of the user's loop are never put inside a guard, so
    never hidden; what the user has us call may be.

    One guard belongs to one thread; ``faults`` may be read from any.

    Args:
        part: what is guarded, as it will read in the log: ``"prometheus export"``.
        limit: faults to put up with before switching the part off.
    """

    __slots__ = ("faults", "limit", "part")

    def __init__(self, part: str, *, limit: int = 3) -> None:
        self.part = part
        self.limit = limit
        self.faults = 0

    @property
    def closed(self) -> bool:
        """Whether the part has been switched off."""
        return self.faults >= self.limit

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, trace: TracebackType | None
    ) -> bool:
        # Ctrl-C and SystemExit are not faults; they belong to the user.
        if not isinstance(fault, Exception):
            return False
        self.faults += 1
        if self.faults == 1 and isinstance(fault, OSError) and fault.errno:  # its text says everything
            log.warning("%s failed: %s; training goes on without it", self.part, fault)
        elif self.faults == 1:
            log.warning("%s failed; training goes on without it", self.part, exc_info=fault)
        if self.faults == self.limit:
            log.error("%s failed %d times and is now off", self.part, self.faults)
        return True


class Handle:
    """Stands for something registered; ``remove()``, or the end of its with-block, takes it back."""

    __slots__ = ("_undo",)

    def __init__(self, undo: Callable[[], None] | None = None) -> None:
        self._undo = undo

    def remove(self) -> None:
        """Take it back. A second call does nothing."""
        undo, self._undo = self._undo, None
        if undo is not None:
            undo()

    def __enter__(self) -> Handle:
        return self

    def __exit__(self, *_: object) -> Literal[False]:
        self.remove()
        return False


SIGTERM_WAIT_NS = 1_000_000_000
"""From SIGTERM until the main thread must run Python again: as long as that takes nothing can be closed. Batch systems give
ten seconds or more."""

ENDS = ("finished", "failed", "interrupted", "terminated")
"""How a run may end that can still say so."""


class ExitHook:
    """Closes the session when the program ends, without changing how it ends.

    Args:
        close: closes the session; takes the state.
        recorded: how much has been recorded so far.
        signal_word: memory for the number of a signal that ended the program; None for none.
        extension: ``_edges.c``, which ends the program where the main thread never runs Python again; None for none.
    """

    def __init__(
        self,
        close: Callable[[str], None],
        recorded: Callable[[], int] = lambda: 0,
        signal_word: memoryview | None = None,
        extension: Any = None,  # Any: a module written in C
    ) -> None:
        self.state = "running"
        self._close = close
        self._pid = os.getpid()
        self._before: Any = None
        self._handler: Any = None
        self._closing = self._held = False
        self._recorded = recorded
        self._extension = extension
        self._bound = extension is not None and signal_word is not None
        self._signal_word = signal_word
        self._exit: tuple[object, int] = (None, -1)
        self._sys_exit: tuple[Any, Any] = (None, None)

    def install(self) -> None:
        """Register with ``atexit``, in place of ``sys.exit``, and for SIGTERM."""
        atexit.register(self._at_exit)
        self._sys_exit = sys.exit, self._noting(sys.exit)
        vars(sys)["exit"] = self._sys_exit[1]
        if threading.current_thread() is threading.main_thread():
            self._before = signal.getsignal(signal.SIGTERM)
            self._handler = self._terminated
            signal.signal(signal.SIGTERM, self._handler)
            if self._before is signal.SIG_DFL and self._bound:
                # Else a main thread that hangs in C would outlive a signal that ends it without us.
                self._extension.bound_term(self._signal_word, SIGTERM_WAIT_NS)

    def hold(self) -> None:
        """Let SIGTERM wait until ``remove``."""
        self._closing = True

    def remove(self) -> None:
        """Put everything back. A handler that was set over this one stays. A SIGTERM that waits comes now."""
        atexit.unregister(self._at_exit)
        original, replacement = self._sys_exit
        if replacement is not None and sys.exit is replacement:
            vars(sys)["exit"] = original
        if self._bound:
            self._extension.unbound_term()
            self._bound = False
        ours = self._handler is not None and signal.getsignal(signal.SIGTERM) == self._handler
        if ours and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self._before or signal.SIG_DFL)
        self._closing = False
        if self._held:
            self._held = False
            os.kill(os.getpid(), signal.SIGTERM)

    def set_state(self, state: str) -> None:
        """Set how the run ended; derived from the current exception if empty. ``terminated`` stays."""
        if self.state != "terminated":
            self.state = state or self.of(sys.exc_info()[1])

    def of(self, error: BaseException | None) -> str:
        """The state that an exception leaves a run in."""
        if error is None or (isinstance(error, SystemExit) and not error.code):
            return "finished"
        return "interrupted" if isinstance(error, KeyboardInterrupt) else "failed"

    def _noting(self, original: Callable[[Any], NoReturn]) -> Callable[[object], NoReturn]:
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
        with suppress(
            KeyboardInterrupt
        ):  # Ctrl-C again: do not wait. The interpreter would print it, and go on
            self._close(self.of(error))

    def _terminated(self, number: int, frame: Any) -> None:  # Any: a frame
        """SIGTERM: write down what there is, then do what would have been done without us."""
        mine = os.getpid() == self._pid
        if self._extension is not None:
            self._extension.term_begun()
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


_Lock = TypeVar("_Lock")
_locks: weakref.WeakSet[Any] = weakref.WeakSet()


def free_in_forks(lock: _Lock) -> _Lock:
    """``lock``, which a forked child finds free: the thread that held it meanwhile is not there to release it."""
    _locks.add(lock)
    return lock


def _free_locks() -> None:
    for lock in list(_locks):
        lock._at_fork_reinit()  # noqa: SLF001 - what threading and logging call for theirs


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_free_locks)


def is_importing_main() -> bool:
    """Whether ``multiprocessing`` is making this process ready, which imports the main module of its parent.

    Whatever the module does at its top level is done again here, in every child: it is no training.
    """
    process: Any = sys.modules.get("multiprocessing.process")
    return process is not None and bool(getattr(process.current_process(), "_inheriting", False))


@contextmanager
def sigchld_deferred() -> Iterator[None]:
    """Inside the block no handler of SIGCHLD runs; afterwards it is called if there was cause.

    Torch raises from that handler when a DataLoader's worker has died: wherever the main thread happens to be.
    What it raises then leaves this block at its end, as it would have left the line that it interrupted.
    """
    before = signal.getsignal(signal.SIGCHLD) if hasattr(signal, "SIGCHLD") else None
    if not callable(before) or threading.current_thread() is not threading.main_thread():
        yield
        return
    held: list[tuple[int, Any]] = []

    def hold(number: int, frame: Any) -> None:  # Any: a frame
        held.append((number, frame))

    signal.signal(signal.SIGCHLD, hold)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGCHLD) is hold:
            signal.signal(signal.SIGCHLD, before)
        if held:
            before(*held[-1])


@contextmanager
def collection_deferred() -> Iterator[None]:
    """Inside the block the garbage collector does not start by itself.

    For imports: what they make stays, so a collection frees none of it, and the ten that would run cost 4 ms. The program
    finds the collector on afterwards, or off, as it was.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@contextmanager
def _signals_blocked(numbers: Iterable[int]) -> Iterator[None]:
    """Inside the block this thread, and those that it starts, block these signals and no others."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_SETMASK, numbers)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def signals_unblocked() -> AbstractContextManager[None]:
    """Inside the block no signal is blocked: for processes that are started, which inherit what their thread blocks."""
    return _signals_blocked(())


class DaemonThread(threading.Thread):
    """A thread that does not keep the interpreter, and to which no signal is delivered.

    A program that blocks a signal, to wait for it later, has it wait: a thread that does not block it would take it.
    """

    _FAULTS = ("SIGSEGV", "SIGBUS", "SIGFPE", "SIGILL", "SIGABRT", "SIGTRAP", "SIGSYS")

    def start(self) -> None:
        """Start it.

        Raises:
            RuntimeError: no thread can be started.
        """
        faults = {getattr(signal, name, None) for name in self._FAULTS}  # a thread causes those itself
        with _signals_blocked(signal.valid_signals() - faults):
            super().start()


def daemon_thread(target: Callable[[], object], name: str) -> threading.Thread:
    """A ``DaemonThread``, not started yet.

    It sees the context variables of the thread that makes it: an agent serves many ranks, and logs to the one that a
    thread works for.
    """
    return DaemonThread(target=copy_context().run, args=(target,), name=name, daemon=True)


MOST_CHARACTERS: Final = 4000
"""Of one text: a file may hold megabytes of name."""

_UNPRINTABLE: Final = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})
"""Unicode categories of what moves the cursor, changes the direction of text, or cannot be encoded."""


def printable(value: object, *, most: int = MOST_CHARACTERS, lines: bool = False) -> str:
    """Text in which nothing moves the cursor, colours, hides or reorders: such characters read as their escapes.

    Args:
        value: anything with a text, such as the name of a folder or what a server answered.
        most: characters that are kept.
        lines: keep ends of lines.
    """
    text = str(value)[:most]
    if text.isascii() and text.isprintable():
        return text
    return "".join(
        letter if is_printable(letter) or (lines and letter == "\n") else escaped(letter) for letter in text
    )


def is_printable(letter: str) -> bool:
    """Whether a character shows as itself and does nothing else."""
    return unicodedata.category(letter) not in _UNPRINTABLE


def escaped(letter: str) -> str:
    """How a character reads that may not be shown."""
    return letter.encode("unicode_escape", "surrogatepass").decode("ascii")


class PrintableRecords(logging.Filter):
    """Makes every record of a logger printable: reasons of servers, paths and exceptions are foreign text."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Change the record; keep it."""
        try:
            said = record.getMessage()
        except (TypeError, ValueError):  # its arguments do not fit; the handler that formats it reports that
            return True
        shown = printable(said, lines=True)
        if shown != said:
            record.msg, record.args = shown, None
        if record.exc_info and not record.exc_text:
            # Formatters take the text that is there.
            trace = logging.Formatter().formatException(record.exc_info)
            record.exc_text = printable(trace, most=len(trace), lines=True)
        return True
