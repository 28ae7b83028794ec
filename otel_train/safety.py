"""Isolation from the program: fault isolation, fork-safe locks, deferred signals, printable text, reversible patches."""

from __future__ import annotations

import gc
import logging
import os
import select
import signal
import sys
import threading
import unicodedata
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from contextvars import copy_context
from typing import TYPE_CHECKING, Any, Final, TypeVar

if TYPE_CHECKING:
    from types import FrameType, TracebackType

log = logging.getLogger("otel_train")


PRINT_S: Final = 0.5
"""Longest that a stream may take nothing before a text is left out: the end of a program waits for it. A log record of the main
thread does not wait."""


class _ContainedLogger(logging.Logger):
    """Logger that drops exceptions of handlers. If standard error is closed, ``logging`` raises too.

    It drops records for which a handler would wait: a pipe may be full, and its reader stopped. A handler that waits holds
    its lock, and ``logging`` takes that lock at the end of the program.
    """

    def handle(self, record: logging.LogRecord) -> None:
        with suppress(Exception):
            wait_s = 0.0 if on_main_thread() else PRINT_S
            if all(takes_text(getattr(each, "stream", None), wait_s) for each in self._all_handlers()):
                super().handle(record)

    def _all_handlers(self) -> list[logging.Handler]:
        found, logger = [*self.handlers], self.parent if self.propagate else None
        while logger is not None:
            found += logger.handlers
            logger = logger.parent if logger.propagate else None
        return found or [each for each in (logging.lastResort,) if each is not None]


def takes_text(stream: Any, wait_s: float) -> bool:  # Any: what prints, or None
    """Returns whether a stream takes a part of a text within ``wait_s`` seconds. What has no descriptor always takes it."""
    try:
        poll = select.poll()
        poll.register(stream.fileno(), select.POLLOUT)
        return bool(poll.poll(wait_s * 1e3))
    except (AttributeError, OSError, ValueError):
        return True


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
        consequence: of a fault, and its remedy, for the log.
    """

    __slots__ = ("consequence", "faults", "limit", "part")

    def __init__(
        self, part: str, *, limit: int = 3, consequence: str = "training goes on without it"
    ) -> None:
        self.part = part
        self.limit = limit
        self.consequence = consequence
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
            log.warning("%s failed: %s; %s", self.part, fault, self.consequence)
        elif self.faults == 1:
            log.warning("%s failed; %s", self.part, self.consequence, exc_info=fault)
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


def frames() -> Iterator[FrameType]:
    """Yields the frames of this thread, innermost first."""
    frame: FrameType | None = sys._getframe()  # noqa: SLF001 - there is no public name for it
    while frame is not None:
        yield frame
        frame = frame.f_back


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


def on_main_thread() -> bool:
    """Returns whether this is the main thread, which alone may set handlers of signals."""
    return threading.current_thread() is threading.main_thread()


_Lock = TypeVar("_Lock")
_locks: weakref.WeakSet[Any] = weakref.WeakSet()


def free_in_forks(lock: _Lock) -> _Lock:
    """Returns ``lock``, which a forked child finds free: the thread that held it meanwhile is not there to release it."""
    _locks.add(lock)
    return lock


def _in_fork() -> None:
    for lock in list(_locks):
        lock._at_fork_reinit()  # noqa: SLF001 - what threading and logging call for theirs


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
    if not callable(before) or not on_main_thread():
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


class _Began(threading.Event):
    """Ends the wait of ``Thread.start``, which has no end where a thread dies before it has begun, without memory."""

    LONGEST_S = 10.0

    def wait(self, timeout: float | None = None) -> bool:
        """Waits until it is set, for ``LONGEST_S`` at most."""
        return super().wait(self.LONGEST_S if timeout is None else timeout)


FAULT_SIGNALS: Final = ("SIGSEGV", "SIGBUS", "SIGFPE", "SIGILL", "SIGABRT", "SIGTRAP", "SIGSYS")
"""Signals that a thread causes itself."""


class DaemonThread(threading.Thread):
    """A thread that does not keep the interpreter, and to which no signal is delivered.

    A program that blocks a signal, to wait for it later, has it wait: a thread that does not block it would take it.
    """

    def __init__(self, *args: Any, **how: Any) -> None:  # Any: of the base class
        super().__init__(*args, **how)
        self._started = _Began()

    def start(self) -> None:
        """Starts it.

        Raises:
            RuntimeError: no thread can be started, or it found no memory to begin with.
        """
        faults = {getattr(signal, name, None) for name in FAULT_SIGNALS}
        with _signals_blocked(signal.valid_signals() - faults):
            super().start()
        if not self._started.is_set():
            raise RuntimeError("can't start new thread: no memory is left for it")


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
        escaped(letter)
        if unicodedata.category(letter) in _UNPRINTABLE and not (lines and letter == "\n")
        else letter
        for letter in text
    )


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
    original = waited_before(there)
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


def waited_before(function: Any) -> Any:  # Any: as above
    """Returns the original of a function that a waiting detector has replaced, else the function."""
    return getattr(function, _WAITS_BEFORE, function)


def successor(owner: Any, name: str, waited: Callable[..., Any]) -> Callable[..., Any]:  # Any: as above
    """Returns what has replaced a waiting detector, else the original function."""
    now = getattr(owner, name)
    taken = getattr(now, _INSTEAD_OF, None) is waited
    found: Callable[..., Any] = now if taken else getattr(waited, _WAITS_BEFORE)
    return found
