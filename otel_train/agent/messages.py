"""Messages between a rank and its agent, and the socket that carries them.

Both ends run the same version of otel_train, on one machine, as one user.
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
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from otel_train.fast_classes import FastNamedTuple, fast_dataclass
from otel_train.recording.descriptors import set_aside
from otel_train.resource import GROUPS, memory_groups
from otel_train.safety import free_in_forks

if TYPE_CHECKING:
    from array import array
    from pathlib import Path

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
"""Variable with the private folder of ``otel-train run``, for the programs below it. The launcher removes the folder as it ends."""


class OomKills:
    """Counts the out-of-memory kills by the kernel in the control group of a process since construction.

    ``groups``: folder in which control groups are mounted.
    """

    def __init__(self, pid: int, groups: Path = GROUPS) -> None:
        self._files = [path for path in _counters(pid, groups) if os.access(path, os.R_OK)]
        self._before = self._count()

    @property
    def count(self) -> int:
        """Number of kills; 0 if that is not known."""
        return self._count() - self._before

    def _count(self) -> int:
        found = 0
        for path in self._files:
            with suppress(OSError, ValueError):
                # As bytes: Python 3.13 cannot load a codec for a file if the working directory has been removed.
                rows = dict(row.split(b" ", 1) for row in path.read_bytes().splitlines())
                found += int(rows.get(b"oom_kill", 0))
        return found


def _counters(pid: int, groups: Path) -> list[Path]:
    """Returns the files with a row ``oom_kill`` of the control groups of a process."""
    found = []
    for group in memory_groups(pid, groups):
        own, *_, root = *group.folders, group.mount
        if group.version == 1:
            found += [each / "memory.oom_control" for each in {own, root}]
        else:
            found.append(own / "memory.events")
    return found


@fast_dataclass(frozen=True, kw_only=True)
class Hello:
    """First message of a rank, sent with the descriptors of its memory and of its process.

    Attributes:
        origins: source of each setting, by name.
        resource: attributes of the OpenTelemetry resource that only the rank knows.
        page: columns of its terminal, whether it shows colours, and non-ASCII characters; () without standard error.
        again: an earlier agent, which has ended, had opened the run directory of the rank.
        oom_kills: counts the kills in its control group from now on: the group may be removed before the agent looks.
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
        run_directory: folder of the run; "" if it cannot be written.
        metrics_url: address of ``/metrics``; "" if it is not served.
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
        modules: imported modules among ``torch`` and ``jax``.
        memory: allocator memory of each device.
        taken: bytes in use by device as its driver reports them, also of other processes.
        hardware: UUID by name of each device.
        spent_ns: time that the training thread spent on device events, in nanoseconds.
        dropped: logged values, readings and operations that exceeded a queue.
        unread: events of threads without a shared ring, which the agent cannot read.
        datasets: by loader: identity of its dataset object, and the bytes of that.
        trackers: whether there may be a tracker to log to.
        listened: whether there is, or has been, a tracker to log to.
        captured_ns: when the last capture began and ended, on the monotonic clock.
        needs_step_numbers: whether a capture waits for step numbers, which the agent knows once it has accounted the events.
        follows: whether the rank needs its ``LoopState`` continuously, for a capture or a FLOP count.
        untimed: reason by kind of device for devices that models are on and whose time is not measured.
        step_flops: model FLOP of one step of this rank, counted; 0 if that is not known.
        uncounted: why the FLOP of a step could not be counted; "" if they were, or were not requested.
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
        positions: by ring, events written before all other fields except ``reports`` and ``changes`` were read.
        device_steps: steps in which a device was in use, and how many of them were timed.
        scale: the last loss scale; None if none was read.
        logged_values: values and events; a value that is not a number is None.
        operations: see ``Timers.take``.
        reported: ``ValueQueue.drained`` and ``Timers.taken``: lower numbers are in this report or an earlier one.
        builds: build times of batches by DataLoader workers, by loader.
        exits: workers that have died, by loader.
        reports: number of calls of ``Session.report`` so far.
        records: reports of other ranks, if they were fetched since the last report; else None.
        exchange: whether the exchange of reports between ranks has been given up, and its faults.
        state: state of the rank; None if this report does not renew it.
    """

    changes: int
    positions: tuple[tuple[int, int], ...]
    device_steps: tuple[int, int]
    outcomes: Outcomes | None
    scale: float | None
    compiles: list[Compile]
    logged_values: list[Value | UserEvent]
    operations: array[int] | None
    reported: tuple[int, int]
    builds: list[tuple[str, BatchBuildTimes]]
    exits: list[tuple[str, WorkerExit]]
    reports: int
    records: dict[int, str] | None
    exchange: tuple[bool, int]
    state: RankState | None


class Request(FastNamedTuple):
    """A request, answered by the ``Response`` with the same number; number 0: no answer is expected."""

    number: int
    what: str
    args: tuple[Any, ...] = ()


class Response(FastNamedTuple):
    """The answer to a request; ``error`` is the reason if it could not be answered."""

    number: int
    value: Any
    error: str = ""


ResponseBox: TypeAlias = "queue.SimpleQueue[Response]"
"""Queue that gets the response, for the thread that waits for it."""

_log = logging.getLogger("otel_train")
_LENGTH = struct.Struct("<Q")
_CREDENTIALS = struct.Struct("3i")  # unix(7), struct ucred: process, user, group
_MOST_BYTES = 1 << 30
"""Longest message that is read; a longer one ends the connection."""

_SEND_TIMEOUT_S = 5.0
_PLAIN: Final[dict[type, Callable[[Any], Any]]] = {
    str: str.__str__,
    int: int.__int__,
    float: float.__float__,
}
"""Functions that convert an object of a subclass to its plain type, without calling a method of the subclass."""

_IMPORTABLE_PACKAGES: Final = frozenset({"otel_train", *sys.stdlib_module_names})
"""Packages whose classes the agent can import."""


class _Pickler(pickle.Pickler):
    """Pickles ``str``, ``int`` and ``float`` subclasses of the program (such as enumerations) as plain ones: the agent cannot import them."""

    def reducer_override(self, value: Any) -> Any:
        if type(value).__module__.partition(".")[0] in _IMPORTABLE_PACKAGES:
            return NotImplemented
        for plain, convert in _PLAIN.items():
            if isinstance(value, plain):
                return plain, (convert(value),)
        return NotImplemented


def _pickled(message: object) -> bytes:
    buffer = io.BytesIO()
    _Pickler(buffer, protocol=5).dump(message)
    return buffer.getvalue()


class MessageChannel:
    """One end of the socket between a rank and its agent.

    A message is a pickle, which is safe because both ends run otel_train as one user: each checks the user of the other.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._sending = free_in_forks(threading.Lock())
        self._sender = 0
        self._outgoing: tuple[memoryview, list[int]] = memoryview(b""), []
        """The last message, and how many bytes of it each call has sent."""
        self._numbers = itertools.count(1)
        self._boxes: dict[int, ResponseBox] = {}
        self.limit_sends(_SEND_TIMEOUT_S)

    def fileno(self) -> int:
        """Returns the descriptor of the socket; -1 once it is closed."""
        return self._socket.fileno()

    def set_aside(self) -> None:
        """Moves the socket to a descriptor number that the program does not reach; no thread may be receiving."""
        with self._exclusive_send():
            copy = set_aside(self.fileno())
            if copy >= 0:  # assigned before the old one is closed: `close` must find an open one
                before, after = self._socket, socket.socket(fileno=copy)
                after.settimeout(before.gettimeout())
                self._socket = after
                before.close()

    def opener(self) -> int:
        """Returns the id of the process that opened the other end, or listened on its address."""
        return _peer(self._socket)[0]

    def is_closed_elsewhere(self) -> bool:
        """Returns whether the program has closed the descriptor of this socket, as a loop over all descriptors does."""
        try:
            os.fstat(self.fileno())
        except OSError:
            return self.fileno() >= 0
        return False

    def limit_sends(self, seconds: float) -> None:
        """Limits how long ``send`` waits for an end that takes no bytes, or for another thread that sends."""
        self._send_timeout_s = seconds
        with suppress(OSError):  # the socket is closed
            self._limit(socket.SO_SNDTIMEO, seconds)

    def send(self, message: object, descriptors: tuple[int, ...] = ()) -> None:
        """Sends one message, with file descriptors.

        If the other end takes only a part of the message in time, the rest is sent before the next message, so that the
        other end never reads an incomplete one.

        Raises:
            OSError: the other end has closed the connection or takes no bytes; or a signal handler calls this in a thread that
                is sending already.
        """
        body = _pickled(message)
        head = _LENGTH.pack(len(body))
        with self._exclusive_send():
            self._write_rest()
            if descriptors:
                socket.send_fds(self._socket, [head], list(descriptors))
                self._write(memoryview(body))
                return
            # Head and body in one call, because each call releases the GIL and waits for it again.
            whole = memoryview(head + body)
            try:
                self._write(whole)
            except BlockingIOError:
                if not self._outgoing[1]:  # nothing was sent
                    self._outgoing = memoryview(b""), []
                    raise

    def tell(self, what: str, *args: Any) -> None:
        """Sends a request that needs no answer; does nothing if it cannot be sent."""
        with suppress(OSError):
            self.send(Request(0, what, args))

    def ask(self, wait: Callable[[ResponseBox], Response], what: str, *args: Any) -> Any:
        """Sends a request and returns its answer; None if the connection is closed or no answer arrives in time.

        Any thread may call this, also in a signal handler that interrupts a call. ``wait`` takes the response from its
        box and raises ``queue.Empty`` if none arrives in time.
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

    def respond(self, response: Response) -> None:
        """Sends an answer, unless none is expected; does nothing if it cannot be sent, as the other end waits for a limited time."""
        if response.number:
            with suppress(OSError):
                self.send(response)

    def take_response(self, response: Response) -> None:
        """Passes a response to the thread that waits for it, if it still waits."""
        box = self._boxes.get(response.number)
        if box is not None:
            box.put(response)

    def fail_questions(self) -> None:
        """Answers all pending requests with None: no further response will arrive."""
        for number in list(self._boxes):
            self.take_response(Response(number, None))

    def receive(self) -> Any:
        """Returns the next message; blocks until it has arrived.

        Raises:
            EOFError: the other end has closed the connection.
        """
        return self._read(self._receive_exactly(_LENGTH.size))

    def receive_first(self, descriptors: int, timeout_s: float) -> tuple[Any, list[int]]:
        """Returns the next message and at most ``descriptors`` descriptors; ``timeout_s`` limits each wait for bytes.

        Raises:
            EOFError: the other end has closed the connection, or sends nothing.
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
        """Waits for a message or another descriptor; returns the descriptors that are ready, of the socket and of ``others``."""
        poll = select.poll()
        for descriptor in (self.fileno(), *others):
            if descriptor >= 0:
                poll.register(descriptor, select.POLLIN | select.POLLHUP | select.POLLERR)
        return [descriptor for descriptor, _ in poll.poll(max(0.0, timeout_s) * 1e3)]

    def takes(self, timeout_s: float) -> bool:
        """Returns whether the socket becomes writable in time, which shows that the other end receives."""
        if self.fileno() < 0:  # the socket is closed: a send fails at once
            return True
        poll = select.poll()
        poll.register(self.fileno(), select.POLLOUT)
        return bool(poll.poll(timeout_s * 1e3))

    def close(self) -> None:
        """Shuts the connection down: the other end reads EOF, even if forked processes have inherited this end."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        with suppress(OSError):  # the program has closed it
            self._socket.close()

    def end_sends(self) -> None:
        """Shuts down sending: the other end reads EOF, and can still answer."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)

    def close_in_fork(self) -> None:
        """Closes the descriptor in a forked child; the connection of the parent goes on."""
        with suppress(OSError):
            os.close(self._socket.detach())

    def _limit(self, which: int, seconds: float) -> None:
        whole = int(seconds)
        self._socket.setsockopt(
            socket.SOL_SOCKET, which, struct.pack("ll", whole, int((seconds - whole) * 1e6))
        )

    @contextmanager
    def _exclusive_send(self) -> Iterator[None]:
        if self._sender == get_ident() or not self._sending.acquire(timeout=self._send_timeout_s):
            raise BlockingIOError("another message is being sent")
        self._sender = get_ident()
        try:
            yield
        finally:
            self._sender = 0
            self._sending.release()

    def _write(self, data: memoryview) -> None:
        self._outgoing = data, []
        self._write_rest()

    def _write_rest(self) -> None:
        """Sends what is left of the last message."""
        data, sent = self._outgoing
        while len(rest := data[sum(sent) :]):
            # One call of C, so that Ctrl-C cannot come between the call that sends and the note of its number of bytes.
            sent.extend(map(self._socket.send, (rest,)))

    def _read(self, head: bytes) -> Any:
        (length,) = _LENGTH.unpack(head) if len(head) == _LENGTH.size else (_MOST_BYTES + 1,)
        if length > _MOST_BYTES:
            raise EOFError
        return pickle.loads(self._receive_exactly(length))  # noqa: S301 - see the class

    def _receive_exactly(self, length: int) -> bytes:
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
    """Returns the user id of the other end of a Unix socket (SO_PEERCRED)."""
    return _peer(connection)[1]


def _peer(connection: socket.socket) -> tuple[int, int]:
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, user, _ = _CREDENTIALS.unpack(credentials)
    return pid, user
