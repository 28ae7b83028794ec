"""Isolation from the program: fault isolation, exit hooks, fork-safe locks, printable text, reversible patches."""

from __future__ import annotations

import atexit
import functools
import gc
import logging
import os
import re
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
    from types import FrameType, TracebackType

log = logging.getLogger("otel_train")


class _ContainedLogger(logging.Logger):
    """Logger that drops exceptions of handlers. If standard error is closed, ``logging`` raises too."""

    def handle(self, record: logging.LogRecord) -> None:
        with suppress(Exception):
            super().handle(record)


log.__class__ = type("Logger", (_ContainedLogger, log.__class__), {})


class Guard:
    """Stops faults of one component of otel_train before they reach the training loop.

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
    """A registration; ``remove()``, or the end of its with-block, undoes it."""

    __slots__ = ("_undo",)

    def __init__(self, undo: Callable[[], None] | None = None) -> None:
        self._undo = undo

    def remove(self) -> None:
        """Takes it back. A second call does nothing."""
        undo, self._undo = self._undo, None
        if undo is not None:
            undo()

    def __enter__(self) -> Handle:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()


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
        elif _on_main_thread() and callable(before := signal.getsignal(signal.SIGTERM)):
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
        if ours and _on_main_thread():
            signal.signal(signal.SIGTERM, self._before)

    def _noting(self, original: Callable[[Any], NoReturn]) -> Callable[[object], NoReturn]:
        @functools.wraps(original)
        def exit(status: object = None, /) -> NoReturn:  # noqa: A001 - in its place
            if _on_main_thread():  # else it ends its thread alone
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


def frames() -> Iterator[FrameType]:
    """Yields the frames of this thread, innermost first."""
    frame: FrameType | None = sys._getframe()  # noqa: SLF001 - there is no public name for it
    while frame is not None:
        yield frame
        frame = frame.f_back


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


def interpreter() -> str:
    """Returns the program to run Python with; "" where that is not known.

    A frozen program (PyInstaller, cx_Freeze) names itself, and runs nothing but itself: it would train a second time.
    """
    return "" if getattr(sys, "frozen", False) else sys.executable or ""


def signal_name(number: int) -> str:
    """Returns the name of a signal; ``signal <n>`` for a real-time one, which has none."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


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


def _on_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def _adapt_all(_: object = None) -> int:
    for hook in list(_hooks):
        hook.adapt()
    return 0


def _adapt_on_main_thread() -> None:
    if _on_main_thread():
        _adapt_all()
        return
    with suppress(ImportError, AttributeError):  # an interpreter without it
        import ctypes

        if not _pending:
            _pending.append(ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(_adapt_all))
        ctypes.pythonapi.Py_AddPendingCall(_pending[0], None)


_Lock = TypeVar("_Lock")
_locks: weakref.WeakSet[Any] = weakref.WeakSet()


def free_in_forks(lock: _Lock) -> _Lock:
    """Returns ``lock``, which a forked child finds free: the thread that held it meanwhile is not there to release it."""
    _locks.add(lock)
    return lock


def _in_fork() -> None:
    for lock in list(_locks):
        lock._at_fork_reinit()  # noqa: SLF001 - what threading and logging call for theirs
    for hook in list(_hooks):
        hook.let_go_in_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_fork)


def is_importing_main() -> bool:
    """Returns whether ``multiprocessing`` is making this process ready, which imports the main module of its parent.

    Whatever the module does at its top level is done again here, in every child: it is no training.
    """
    process: Any = sys.modules.get("multiprocessing.process")
    return process is not None and bool(getattr(process.current_process(), "_inheriting", False))


def is_of_signal_handler(error: BaseException) -> bool:
    """Returns whether a handler of a signal has raised it: the program's watchdog, wherever the main thread happened to be."""
    handlers = [signal.getsignal(number) for number in signal.valid_signals()]
    codes = {id(code) for handler in handlers if (code := getattr(handler, "__code__", None)) is not None}
    trace = error.__traceback__
    while trace is not None:
        if id(trace.tb_frame.f_code) in codes:
            return True
        trace = trace.tb_next
    return False


@contextmanager
def sigchld_deferred() -> Iterator[None]:
    """Defers SIGCHLD handlers within the block; they are called afterwards if a signal arrived.

    Torch raises from that handler when a DataLoader's worker has died: wherever the main thread happens to be.
    What it raises then leaves this block at its end, as it would have left the line that it interrupted.
    """
    before = signal.getsignal(signal.SIGCHLD) if hasattr(signal, "SIGCHLD") else None
    if not callable(before) or not _on_main_thread():
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
    """Keeps the garbage collector from starting by itself inside the block.

    For imports: what they make stays, so a collection frees none of it, and the ten that would run cost 4 ms. The program
    finds the collector on afterwards, or off, as it was. The next collection of young objects does not go through what was
    made here, which would cost 0.6 ms: unfrozen objects are of the oldest generation.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        if not gc.get_freeze_count():  # else the program has frozen objects, which stay so
            gc.freeze()
            gc.unfreeze()
        gc.enable()


@contextmanager
def _signals_blocked(numbers: Iterable[int]) -> Iterator[None]:
    """Blocks these signals, and no others, in this thread and those that it starts."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_SETMASK, numbers)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def signals_unblocked() -> AbstractContextManager[None]:
    """Blocks no signal inside the block: for processes that are started, which inherit what their thread blocks."""
    return _signals_blocked(())


class DaemonThread(threading.Thread):
    """A thread that does not keep the interpreter, and to which no signal is delivered.

    A program that blocks a signal, to wait for it later, has it wait: a thread that does not block it would take it.
    """

    _FAULTS = ("SIGSEGV", "SIGBUS", "SIGFPE", "SIGILL", "SIGABRT", "SIGTRAP", "SIGSYS")

    def start(self) -> None:
        """Starts it.

        Raises:
            RuntimeError: no thread can be started.
        """
        faults = {getattr(signal, name, None) for name in self._FAULTS}  # a thread causes those itself
        with _signals_blocked(signal.valid_signals() - faults):
            super().start()


def daemon_thread(target: Callable[[], object], name: str) -> threading.Thread:
    """Returns a ``DaemonThread``, not started yet.

    It sees the context variables of the thread that makes it: an agent serves many ranks, and logs to the one that a
    thread works for.
    """
    return DaemonThread(target=copy_context().run, args=(target,), name=name, daemon=True)


MOST_CHARACTERS: Final = 4000
"""Of one text: a file may hold megabytes of name."""

_UNPRINTABLE: Final = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})
"""Unicode categories of what moves the cursor, changes the direction of text, or cannot be encoded."""


def printable(value: object, *, most: int = MOST_CHARACTERS, lines: bool = False) -> str:
    """Returns a text in which nothing moves the cursor, colours, hides or reorders: such characters read as their escapes.

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
    """Returns whether a character shows as itself and does nothing else."""
    return unicodedata.category(letter) not in _UNPRINTABLE


def escaped(letter: str) -> str:
    """Returns how a character reads that may not be shown."""
    return letter.encode("unicode_escape", "surrogatepass").decode("ascii")


class PrintableRecords(logging.Filter):
    """Makes every record of a logger printable: reasons of servers, paths and exceptions are foreign text."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Changes the record; keeps it."""
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


_WAITS_BEFORE = "_otel_train_waits_before"
_INSTEAD_OF = "_otel_train_instead_of"


def replace(
    owner: Any,  # Any: a class or a module
    name: str,
    make: Callable[[Callable[..., Any]], Callable[..., Any]],
    *,
    waits: bool = False,
) -> Callable[[], None]:
    """Replaces a function of ``owner`` by ``make(original)``.

    A detector that waits for training is replaced by the instrumentation in one assignment, so that another thread calls
    either of them.

    Args:
        owner: class or module that has the function.
        name: name of the function.
        make: returns the replacement.
        waits: the replacement is such a detector.

    Returns:
        A function that restores the original, unless the replacement has been wrapped.
    """
    there = getattr(owner, name)
    original = getattr(there, _WAITS_BEFORE, there)
    inherited = name not in vars(owner)
    made = make(original)
    made.__dict__[_INSTEAD_OF] = there
    if waits:
        made.__dict__[_WAITS_BEFORE] = original
    setattr(owner, name, made)

    def undo() -> None:
        if getattr(owner, name) is not made:
            return
        if inherited:
            delattr(owner, name)
        else:
            setattr(owner, name, original)

    return undo


def successor(owner: Any, name: str, waited: Callable[..., Any]) -> Callable[..., Any]:  # Any: as above
    """Returns what has replaced a waiting detector, else the original function."""
    now = getattr(owner, name)
    taken = getattr(now, _INSTEAD_OF, None) is waited
    found: Callable[..., Any] = now if taken else getattr(waited, _WAITS_BEFORE)
    return found
