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
"""Longest wait for a blocked stream before a text is dropped; the end of the program may wait that long. Log records of the main
thread are dropped without a wait."""


class _ContainedLogger(logging.Logger):
    """Logger that suppresses exceptions of handlers, which ``logging`` raises where standard error is closed.

    It drops records for which a handler would block, as on a full pipe with a stopped reader: the blocked handler would hold
    its lock, which ``logging`` acquires at the end of the program.
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
    """Returns whether a stream is writable within ``wait_s`` seconds. A stream without a descriptor counts as writable."""
    try:
        poll = select.poll()
        poll.register(stream.fileno(), select.POLLOUT)
        return bool(poll.poll(wait_s * 1e3))
    except (AttributeError, OSError, ValueError):
        return True


log.__class__ = type("Logger", (_ContainedLogger, log.__class__), {})


class Guard:
    """Stops faults of one component of otel_train before they reach the training loop.

    The first fault is logged, with its traceback unless it is an OSError with an errno: a full disk is no error of the code.
    Later ones are only counted. After ``limit`` faults the component is off for the rest of the run: ``closed`` is true, and
    its caller checks that before each call. The program's loop never runs inside a guard, so its exceptions are never hidden;
    those of its callbacks may be.

    One guard belongs to one thread; ``faults`` may be read from any.

    Args:
        part: name of the component in the log, such as ``"run directory"``.
        limit: number of faults after which the component is switched off.
        consequence: consequence of a fault and its remedy, for the log.
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
        """Whether the component has been switched off."""
        return self.faults >= self.limit

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, trace: TracebackType | None
    ) -> bool:
        # Not faults: Ctrl-C, SystemExit, and what a signal handler of the program raises. They pass through to the program.
        if not isinstance(fault, Exception) or is_of_signal_handler(fault):
            return False
        self.faults += 1
        if self.faults == 1 and isinstance(fault, OSError) and fault.errno:  # no traceback, see above
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
        """Undoes the registration. A second call does nothing."""
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
    """Returns the path of the Python interpreter; "" where that is not known.

    In a frozen program (PyInstaller, cx_Freeze) ``sys.executable`` is the program itself: to start it would train a second time.
    """
    return "" if getattr(sys, "frozen", False) else sys.executable or ""


def signal_name(number: int) -> str:
    """Returns the name of a signal; ``signal <n>`` for a real-time signal without a name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def on_main_thread() -> bool:
    """Returns whether this is the main thread, the only one that may set Python signal handlers."""
    return threading.current_thread() is threading.main_thread()


_Lock = TypeVar("_Lock")
_locks: weakref.WeakSet[Any] = weakref.WeakSet()


def free_in_forks(lock: _Lock) -> _Lock:
    """Returns ``lock``; reinitializes it in every forked child, where the thread that holds it does not exist."""
    _locks.add(lock)
    return lock


def _in_fork() -> None:
    for lock in list(_locks):
        lock._at_fork_reinit()  # noqa: SLF001 - threading and logging call it for their own locks


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_fork)


def is_importing_main() -> bool:
    """Returns whether ``multiprocessing`` is preparing this child process, which imports the main module of its parent.

    Top-level code of that module runs again in every child then: an ``instrument()`` there starts no training.
    """
    process: Any = sys.modules.get("multiprocessing.process")
    return process is not None and bool(getattr(process.current_process(), "_inheriting", False))


def is_of_signal_handler(error: BaseException) -> bool:
    """Returns whether a signal handler, such as a watchdog of the program, raised it in the main thread, which this is."""
    if not on_main_thread():
        return False
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

    When a DataLoader worker has died, torch raises from that handler, at whatever line the main thread executes. Deferred,
    the exception leaves this block at its end.
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
    """Prevents automatic garbage collection inside the block; afterwards it is enabled or disabled as before.

    For imports: their objects stay alive, so the ten collections that would run cost 4 ms and free nothing. ``gc.freeze`` and
    ``gc.unfreeze`` move the new objects to the oldest generation: the next collection of the young one would traverse them
    for 0.6 ms.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        if not gc.get_freeze_count():  # else objects that the program has frozen would be unfrozen
            gc.freeze()
            gc.unfreeze()
        gc.enable()


@contextmanager
def _signals_blocked(numbers: Iterable[int]) -> Iterator[None]:
    """Blocks exactly these signals inside the block, in this thread and in threads and processes that it starts."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_SETMASK, numbers)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def signals_unblocked() -> AbstractContextManager[None]:
    """Blocks no signal inside the block, for starting processes: a child inherits the signal mask of the thread."""
    return _signals_blocked(())


class _StartedEvent(threading.Event):
    """Bounds the wait of ``Thread.start``, which never returns if the thread dies for lack of memory before it sets this event."""

    LONGEST_S = 10.0

    def wait(self, timeout: float | None = None) -> bool:
        """Waits until the event is set, at most ``LONGEST_S`` seconds by default."""
        return super().wait(self.LONGEST_S if timeout is None else timeout)


FAULT_SIGNALS: Final = ("SIGSEGV", "SIGBUS", "SIGFPE", "SIGILL", "SIGABRT", "SIGTRAP", "SIGSYS")
"""Signals that the faulting thread itself receives."""


class DaemonThread(threading.Thread):
    """A thread that blocks all signals except those of its own faults.

    A program may block a signal and wait for it with ``sigwait``; a thread that does not block that signal would receive it.
    """

    def __init__(self, *args: Any, **how: Any) -> None:  # Any: of the base class
        super().__init__(*args, **how)
        self._started = _StartedEvent()

    def start(self) -> None:
        """Starts the thread.

        Raises:
            RuntimeError: the system refuses a thread, or the new thread had no memory to begin.
        """
        faults = {getattr(signal, name, None) for name in FAULT_SIGNALS}
        with _signals_blocked(signal.valid_signals() - faults):
            super().start()
        if not self._started.is_set():
            raise RuntimeError("can't start new thread: no memory is left for it")


def daemon_thread(target: Callable[[], object], name: str) -> threading.Thread:
    """Returns a ``DaemonThread``, not started yet, with the context variables of the calling thread.

    An agent serves many ranks: a context variable says which rank a thread works for, and receives its log records.
    """
    return DaemonThread(target=copy_context().run, args=(target,), name=name, daemon=True)


MOST_CHARACTERS: Final = 4000
"""Characters of one text that ``printable`` keeps: a name in a file may have megabytes."""

_UNPRINTABLE: Final = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})
"""Unicode categories of characters that move the cursor, change the direction of text, or cannot be encoded."""


def printable(value: object, *, most: int = MOST_CHARACTERS, lines: bool = False) -> str:
    """Returns ``str(value)`` with characters that could move the cursor, colour, hide or reorder text replaced by escapes.

    Args:
        value: any object, such as the name of a folder or the answer of a server.
        most: number of characters that are kept.
        lines: keep newlines.
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
    """Returns the Python escape sequence of a character."""
    return letter.encode("unicode_escape", "surrogatepass").decode("ascii")


class PrintableRecords(logging.Filter):
    """Applies ``printable`` to all records of a logger: answers of servers, paths and exceptions are untrusted text."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Changes the record in place; never drops it."""
        try:
            message = record.getMessage()
        except (TypeError, ValueError):  # its arguments do not fit; the handler that formats it reports that
            return True
        shown = printable(message, lines=True)
        if shown != message:
            record.msg, record.args = shown, None
        if record.exc_info and not record.exc_text:
            # Formatters use ``exc_text`` if it is set.
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

    Where a wrapper of ``autoinstrument`` waits for training, the instrumentation takes its place in one assignment: other
    threads always find one of the two.

    Args:
        owner: class or module that has the function.
        name: name of the function.
        make: returns the replacement.
        waits: the replacement is such a waiting wrapper.

    Returns:
        A function that restores the original, unless the replacement has been replaced.
    """
    present = getattr(owner, name)
    original = waited_before(present)
    inherited = name not in vars(owner)
    made = make(original)
    made.__dict__[_INSTEAD_OF] = present
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
    """Returns the original function below a waiting wrapper; any other function itself."""
    return getattr(function, _WAITS_BEFORE, function)


def successor(owner: Any, name: str, waited: Callable[..., Any]) -> Callable[..., Any]:  # Any: as above
    """Returns the function that replaced the waiting wrapper ``waited``, else the original function."""
    now = getattr(owner, name)
    is_replaced = getattr(now, _INSTEAD_OF, None) is waited
    found: Callable[..., Any] = now if is_replaced else getattr(waited, _WAITS_BEFORE)
    return found
