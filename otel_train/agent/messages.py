"""Messages between a rank and its agent, and the socket that carries them.

Both run the same version, on one machine, as one user.
"""

from __future__ import annotations

import io
import itertools
import logging
import os
import pickle
import queue
import select
import socket
import struct
import sys
import threading
from _thread import get_ident
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from otel_train.fast_classes import FastNamedTuple, fast_dataclass
from otel_train.recording.descriptors import set_aside
from otel_train.safety import free_in_forks

if TYPE_CHECKING:
    from array import array

    from otel_train.config import Config
    from otel_train.datamodel import Anchor, AttributeValue, Compile, DeviceMemory, Outcomes
    from otel_train.instrumentation.dataloader_workers import BatchBuildTimes, WorkerExit
    from otel_train.instrumentation.loader_probe import LoaderReport
    from otel_train.instrumentation.logged_values import UserEvent, Value
    from otel_train.resource import RunInfo

LOGGED_VALUES: Final = "logged values"
"""Component of faults in logged values, timers and callbacks, in the rank and in the agent."""

CAPTURES_OFF: Final = "captures are off, or there is no run directory to write to"
"""Why a capture is refused, in the rank and in the agent."""

FOLDER: Final = "OTEL_TRAIN_LAUNCH"
"""Names the launcher's private folder to the programs below it. It is gone when the launcher ends."""


class OomKills:
    """Counts processes that the kernel has killed for lack of memory in a process's control group since construction.

    Args:
        pid: of the process.
        groups: where control groups are mounted.
    """

    def __init__(self, pid: int, groups: Path = Path("/sys/fs/cgroup")) -> None:
        self._files = [path for path in _counters(pid, groups) if os.access(path, os.R_OK)]
        self._before = self._count()

    @property
    def count(self) -> int:
        """How many; 0 where that is not known."""
        return self._count() - self._before

    def _count(self) -> int:
        found = 0
        for path in self._files:
            with suppress(OSError, ValueError):
                # As bytes: Python 3.13 cannot load a codec for a file where the working directory is gone.
                rows = dict(row.split(b" ", 1) for row in path.read_bytes().splitlines())
                found += int(rows.get(b"oom_kill", 0))
        return found


def _counters(pid: int, groups: Path) -> list[Path]:
    """Returns the files with a row ``oom_kill``, of version 2 and version 1 of control groups (cgroup-v2.rst; memory.rst)."""
    try:
        rows = Path(f"/proc/{pid}/cgroup").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
    found = []
    for row in rows:
        _, kinds, path = row.split(":", 2)
        inside = path.lstrip("/")
        if not kinds:
            found += [place / inside / "memory.events" for place in (groups, groups / "unified")]
        elif "memory" in kinds.split(","):
            # In a container without a namespace of its own the path is that of the host, and the group is mounted as the root.
            found += [groups / "memory" / there / "memory.oom_control" for there in {inside, ""}]
    return found


@fast_dataclass(frozen=True, kw_only=True)
class Hello:
    """First message of a rank, sent with the descriptors of its memory and of its process.

    Attributes:
        origins: where settings come from.
        resource: attributes of the OpenTelemetry resource that only the rank knows.
        page: what its terminal shows.
        again: an agent has opened its run directory before, and is gone.
        oom_kills: counts those of its control group from now on: it may be gone before the agent looks.
    """

    config: Config
    info: RunInfo
    environ: Mapping[str, str]
    origins: Mapping[str, str]
    anchor: Anchor
    resource: Mapping[str, AttributeValue]
    page: tuple[int, bool, bool] | tuple[()]
    again: bool = False
    oom_kills: OomKills | None = None


@fast_dataclass(frozen=True, kw_only=True)
class Opened:
    """The agent's answer to ``Hello``.

    Attributes:
        run_directory: folder of the run; "" where it cannot be written.
        metrics_url: address of ``/metrics``; "" where it is not served.
    """

    info: RunInfo
    run_directory: str
    metrics_url: str
    resource: Mapping[str, AttributeValue]


@fast_dataclass(frozen=True, kw_only=True)
class RankState:
    """Current state of a rank; replaces the previous one.

    Attributes:
        barrier: stage in which the models wait for other ranks; "" if that is not known.
        job: rank and world size of the process group; None while there is none.
        modules: those of torch and jax that are loaded.
        taken: bytes taken on them, as their driver says.
        hardware: name and UUID of each.
        spent_ns: nanoseconds of the training thread on device events.
        dropped: logged values, readings and operations that exceeded a queue.
        unread: events of threads without a ring, which nothing reads.
        datasets: by loader: what identifies its dataset, and its bytes.
        trackers: there may be one to log to.
        listened: there is, or was, one that listens.
        captured_ns: when the last capture began and ended.
        needs_step_numbers: a capture waits for step numbers, which the agent knows after it has accounted the events.
        follows: it must know its ``LoopState`` all the time.
        untimed: kinds of devices that models are on and whose time is not taken; why.
        step_flops: model FLOP of one step of this rank, counted; 0 if that is not known.
        uncounted: why they are not counted, where that was asked for.
    """

    loaders: dict[str, LoaderReport] = field(default_factory=dict)
    models: tuple[str, ...] = ()
    barrier: str = ""
    job: tuple[int, int] | None = None
    modules: frozenset[str] = frozenset()
    memory: tuple[DeviceMemory, ...] = ()
    taken: Mapping[str, int] = field(default_factory=dict)
    hardware: Mapping[str, str] = field(default_factory=dict)
    copied_to_host: Mapping[str, int] = field(default_factory=dict)
    spent_ns: int = 0
    dropped: int = 0
    unread: int = 0
    faults: Mapping[str, int] = field(default_factory=dict)
    datasets: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    caches: Mapping[str, int] = field(default_factory=dict)
    trackers: bool = False
    listened: bool = False
    captured_ns: tuple[int, int] = (0, 0)
    needs_step_numbers: bool = False
    follows: bool = False
    untimed: Mapping[str, str] = field(default_factory=dict)
    step_flops: int = 0
    uncounted: str = ""


@fast_dataclass(frozen=True, kw_only=True)
class Report:
    """What a rank has collected since its last report, except events.

    Attributes:
        changes: number of the last change when this was made; see ``Recorder.changed``.
        positions: by ring, edges written before anything else here but ``reports`` was read.
        device_steps: steps in which a device was in use, and how many of them were timed.
        scale: the last loss scale; None if none was read.
        logged_values: a value that is no number is None.
        operations: see ``Timers.take``.
        builds: batches that workers have built, by loader.
        reports: calls of ``Session.report`` so far.
        records: of other ranks, fetched since the last report; None if none were.
        exchange: whether the exchange of records has been given up, and its faults.
        state: what is known now; None where it is not new.
    """

    changes: int
    positions: tuple[tuple[int, int], ...]
    device_steps: tuple[int, int]
    outcomes: Outcomes | None
    scale: float | None
    compiles: list[Compile]
    logged_values: list[Value | UserEvent]
    operations: array[int] | None
    builds: list[tuple[str, BatchBuildTimes]]
    exits: list[tuple[str, WorkerExit]]
    reports: int
    records: dict[int, str] | None
    exchange: tuple[bool, int]
    state: RankState | None


class Request(FastNamedTuple):
    """A request, answered by the ``Response`` of the same number; 0: no answer is expected."""

    number: int
    what: str
    args: tuple[Any, ...] = ()


class Response(FastNamedTuple):
    """The answer to a request; ``error`` is the reason if there is none."""

    number: int
    value: Any
    error: str = ""


ResponseBox: TypeAlias = "queue.SimpleQueue[Response]"
"""Where a response comes, for the thread that waits for it."""

_log = logging.getLogger("otel_train")
_LENGTH = struct.Struct("<Q")
_CREDENTIALS = struct.Struct("3i")  # unix(7), struct ucred: process, user, group
_MOST_BYTES = 1 << 30
_SEND_TIMEOUT_S = 5.0
_PLAIN: Final[dict[type, Callable[[Any], Any]]] = {
    str: str.__str__,
    int: int.__int__,
    float: float.__float__,
}
"""Functions of plain types that make one of an object of a subclass, without a method of the subclass."""

_KNOWN: Final = frozenset({"otel_train", *sys.stdlib_module_names})
"""Packages whose classes the agent has."""


class _Pickler(pickle.Pickler):
    """Writes texts and numbers of the program's own classes, as of an enumeration, as what they are: the agent cannot import those."""

    def reducer_override(self, value: Any) -> Any:
        if type(value).__module__.partition(".")[0] in _KNOWN:
            return NotImplemented
        for plain, convert in _PLAIN.items():
            if isinstance(value, plain):
                return plain, (convert(value),)
        return NotImplemented


def _pickled(message: object) -> bytes:
    text = io.BytesIO()
    _Pickler(text, protocol=5).dump(message)
    return text.getvalue()


class MessageChannel:
    """One end of the socket between a rank and its agent.

    A message is a pickle: both ends run otel_train as one user, and no other process can open the socket.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._sending = free_in_forks(threading.Lock())
        self._sender = 0
        self._rest = memoryview(b"")
        self._numbers = itertools.count(1)
        self._boxes: dict[int, ResponseBox] = {}
        self.limit_sends(_SEND_TIMEOUT_S)

    def fileno(self) -> int:
        """Returns the descriptor of the socket; -1 once it is closed."""
        return self._socket.fileno()

    def set_aside(self) -> None:
        """Moves the socket to a number that the program does not reach; nothing may be receiving."""
        with self._alone():
            copy = set_aside(self.fileno())
            if copy >= 0:  # before the other is closed: what closes the connection meanwhile ends both
                before, after = self._socket, socket.socket(fileno=copy)
                after.settimeout(before.gettimeout())
                self._socket = after
                before.close()

    def opener(self) -> int:
        """Returns the number of the process that has opened the other end, or its address."""
        return _peer(self._socket)[0]

    def is_closed_elsewhere(self) -> bool:
        """Returns whether the program has closed the socket, with all descriptors that it does not know."""
        try:
            os.fstat(self.fileno())
        except OSError:
            return self.fileno() >= 0
        return False

    def limit_sends(self, seconds: float) -> None:
        """Limits how long the other end may take nothing before ``send`` gives up."""
        self._patience_s = seconds
        with suppress(OSError):  # it is closed
            self._limit(socket.SO_SNDTIMEO, seconds)

    def send(self, message: object, descriptors: tuple[int, ...] = ()) -> None:
        """Sends one message, with file descriptors.

        Where the other end takes only a part of it in time, the rest goes ahead of the next message: no end ever reads half
        of one.

        Raises:
            OSError: the other end is gone, or takes nothing for seconds; or this thread is sending already, and a handler of
                a signal has called this.
        """
        text = _pickled(message)
        head = _LENGTH.pack(len(text))
        with self._alone():
            self._write(self._rest)
            if descriptors:
                socket.send_fds(self._socket, [head], list(descriptors))
                self._write(memoryview(text))
                return
            # One call: each lets go of the interpreter, and waits for it again.
            whole = memoryview(head + text)
            try:
                self._write(whole)
            except BlockingIOError:
                if len(self._rest) == len(whole):
                    self._rest = memoryview(b"")
                    raise

    def tell(self, what: str, *args: Any) -> None:
        """Has the other end do something, if it is there."""
        with suppress(OSError):
            self.send(Request(0, what, args))

    def ask(self, wait: Callable[[ResponseBox], Response], what: str, *args: Any) -> Any:
        """Sends a request and returns its answer; None if the connection is closed or no answer arrives in time.

        Any thread may ask, also in a handler of a signal that came while it asked. ``wait`` takes the response out of its
        box, and raises ``queue.Empty`` where none comes in time.
        """
        number, box = next(self._numbers), queue.SimpleQueue[Response]()
        self._boxes[number] = box
        try:
            self.send(Request(number, what, args))
            response = wait(box)
        except (OSError, queue.Empty):
            return None
        finally:
            self._boxes.pop(number, None)
        if response.error:
            _log.warning("the agent: %s", response.error)
        return response.value

    def take_response(self, response: Response) -> None:
        """Hands a response to the thread that waits for it, if it still does."""
        box = self._boxes.get(response.number)
        if box is not None:
            box.put(response)

    def fail_questions(self) -> None:
        """Fails all pending requests: no further response will arrive."""
        for number in list(self._boxes):
            self.take_response(Response(number, None))

    def receive(self) -> Any:
        """Returns the next message; blocks.

        Raises:
            EOFError: the other end is gone.
        """
        return self._read(self._exactly(_LENGTH.size))

    def receive_first(self, descriptors: int, timeout_s: float) -> tuple[Any, list[int]]:
        """Returns the next message with at most that many descriptors; ``timeout_s`` limits each pause within it.

        Raises:
            EOFError: the other end is gone, or silent.
            OSError: the same.
        """
        self._limit(socket.SO_RCVTIMEO, timeout_s)
        head, found, _, _ = socket.recv_fds(self._socket, _LENGTH.size, descriptors)
        try:
            message = self._read(head)
        except BaseException:
            for descriptor in found:
                os.close(descriptor)
            raise
        self._limit(socket.SO_RCVTIMEO, 0)
        return message, list(found)

    def wait(self, timeout_s: float, *others: int) -> list[int]:
        """Waits for a message, or for one of these descriptors; returns which of them are ready."""
        poll = select.poll()
        for descriptor in (self.fileno(), *others):
            if descriptor >= 0:
                poll.register(descriptor, select.POLLIN | select.POLLHUP | select.POLLERR)
        return [descriptor for descriptor, _ in poll.poll(max(0.0, timeout_s) * 1e3)]

    def takes(self, timeout_s: float) -> bool:
        """Returns whether the other end takes messages, or will in time: the most of what was sent to it has been received."""
        if self.fileno() < 0:  # it is closed: what is sent is refused at once
            return True
        poll = select.poll()
        poll.register(self.fileno(), select.POLLOUT)
        return bool(poll.poll(timeout_s * 1e3))

    def close(self) -> None:
        """Ends the connection: the other end reads EOF, whatever processes have inherited this one."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        with suppress(OSError):  # the program has closed it
            self._socket.close()

    def end_sends(self) -> None:
        """Ends this direction: the other end reads EOF, and may still answer."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)

    def close_in_fork(self) -> None:
        """Leaves the connection to the parent, in a forked child."""
        with suppress(OSError):
            os.close(self._socket.detach())

    def _limit(self, which: int, seconds: float) -> None:
        whole = int(seconds)
        self._socket.setsockopt(
            socket.SOL_SOCKET, which, struct.pack("ll", whole, int((seconds - whole) * 1e6))
        )

    @contextmanager
    def _alone(self) -> Iterator[None]:
        if self._sender == get_ident() or not self._sending.acquire(timeout=self._patience_s):
            raise BlockingIOError("another message is being sent")
        self._sender = get_ident()
        try:
            yield
        finally:
            self._sender = 0
            self._sending.release()

    def _write(self, data: memoryview) -> None:
        self._rest = data
        while len(self._rest):
            self._rest = self._rest[self._socket.send(self._rest) :]

    def _read(self, head: bytes) -> Any:
        (length,) = _LENGTH.unpack(head) if len(head) == _LENGTH.size else (_MOST_BYTES + 1,)
        if length > _MOST_BYTES:
            raise EOFError
        return pickle.loads(self._exactly(length))  # noqa: S301 - see the class

    def _exactly(self, length: int) -> bytes:
        parts = bytearray()
        while len(parts) < length:
            try:
                part = self._socket.recv(min(1 << 20, length - len(parts)))
            except OSError:
                part = b""
            if not part:
                raise EOFError
            parts += part
        return bytes(parts)


def user_of(connection: socket.socket) -> int:
    """Returns the number of the user at the other end of a Unix socket."""
    return _peer(connection)[1]


def _peer(connection: socket.socket) -> tuple[int, int]:
    text = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, user, _ = _CREDENTIALS.unpack(text)
    return pid, user
