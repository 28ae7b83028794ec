"""Connects a rank to the agent of its node, or starts one: a process, or a thread of the program; and another where it dies."""

from __future__ import annotations

import errno
import hashlib
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from otel_train.agent.messages import FOLDER, Hello, MessageChannel, user_of
from otel_train.fast_classes import FastNamedTuple
from otel_train.recording.descriptors import require_descriptors
from otel_train.resource import VERSION, RunInfo, namespace_of
from otel_train.safety import DaemonThread, interpreter

if TYPE_CHECKING:
    from otel_train.agent.rank_connection import RankConnection
    from otel_train.agent.rank_end import LauncherFolder
    from otel_train.config import Config
    from otel_train.exporters.manager import SharedExporters
    from otel_train.recording.shared_memory import FlightMemory

_log = logging.getLogger("otel_train")
_ROOT = Path(__file__).resolve().parents[2]
_THREADS = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
"""Libraries of the agent start no pools of threads: they would take memory, and it computes little."""

_PROGRAM = (
    "import sys; sys.path[:] = [place for place in sys.path if place]; sys.path.append({root!r}); "
    "from otel_train.agent.node import main; main({connection}, {listener})"
)
_SHELL = ("/bin/sh", "-c", 'exec "$@" >/dev/null & echo $!', "sh")
"""It says the agent's process, and ends at once: the agent is no child of the program. One that waits for any of its children must
not meet it."""

_WAITING_RANKS = 1024
"""Ranks that may wait to be accepted while the agent starts."""

BUSY_S: Final = 10.0
"""Longest wait for an agent that works, or waits for a processor. One that is stopped, or waits for anything else, such as a disk,
gets the limit that the wait has."""

MOST_STARTS: Final = 3
"""Agents that may die, each within ``STEADY_S``, before nothing more is exported."""

STEADY_S: Final = 60.0
"""An agent that has lived for longer dies of what does not meet the next one at once."""

_CONNECT_S = 5.0
_TRIES = 10
_RETRY_S = 0.01

_PR_SET_CHILD_SUBREAPER, _PR_GET_CHILD_SUBREAPER = 36, 37  # prctl(2)
_MACHINE: Final = 0xEFFFFFFC  # linux/proc_ns.h, PROC_PID_INIT_INO

_OF_THE_AGENT: Final = "(OTEL_(?!TRAIN_)|PYTHON|SSL_CERT_|GRPC_|REQUESTS_CA_BUNDLE$|CURL_CA_BUNDLE$|LD_LIBRARY_PATH$|.*_PROXY$|MASTER_PORT$)"
"""Variables that a whole process has one value of; the last one tells jobs apart that run at once."""


class ConnectedAgent(FastNamedTuple):
    """An agent in a process, and the connection to it.

    Attributes:
        found: another rank has started it; it may be leaving just now.
        pid: of its process; 0 where that is not known.
    """

    channel: MessageChannel
    found: bool
    pid: int


def connect_agent(
    info: RunInfo, environ: Mapping[str, str], stderr: int = subprocess.DEVNULL
) -> ConnectedAgent:
    """Connects to the agent of this node; starts it if there is none.

    Ranks of one run on one node, of one user and in the same namespaces, have one agent. Its address is a name in the
    abstract namespace of Unix sockets: taken by one rank at a time, gone with the process, and on no disk.
    ``stderr``: where one that is started here writes what goes wrong before it begins.

    Raises:
        OSError: no process can be started here.
    """
    if not interpreter():
        raise OSError("this program is frozen, or does not know its interpreter (sys.executable is empty)")
    if info.local_world_size < 2:  # noqa: PLR2004 - alone
        return _start_alone(stderr)
    address = _address(info, environ)
    for _ in range(_TRIES):  # the agent that has the name may not listen yet, or may be leaving
        try:
            return _start_and_connect(address, stderr) or _connect_to_running(address)
        except ConnectionRefusedError:  # noqa: PERF203 - ten times at most
            time.sleep(_RETRY_S)
        except PermissionError:  # no such sockets here, or another user's
            break
    return _start_alone(stderr)


def _start_and_connect(address: bytes, stderr: int) -> ConnectedAgent | None:
    """Starts an agent and connects to it; returns None if another rank has bound the name."""
    with socket.socket(socket.AF_UNIX) as listener:
        try:
            listener.bind(address)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return None
            raise PermissionError from error
        listener.listen(_WAITING_RANKS)
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.connect(address)
            pid = _start(-1, listener.fileno(), stderr)
        except BaseException:
            connection.close()
            raise
    return ConnectedAgent(MessageChannel(connection), found=False, pid=pid)


def _connect_to_running(address: bytes) -> ConnectedAgent:
    """Connects to the agent that another rank has started.

    Raises:
        ConnectionRefusedError: no process listens.
        PermissionError: it is another user's, or accepts no connection.
    """
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.settimeout(_CONNECT_S)
        connection.connect(address)
        connection.settimeout(None)
        if user_of(connection) != os.getuid():
            raise PermissionError
    except OSError as error:
        connection.close()
        if isinstance(error, ConnectionRefusedError):
            raise
        raise PermissionError from error
    return ConnectedAgent(MessageChannel(connection), found=True, pid=0)


def _address(info: RunInfo, environ: Mapping[str, str]) -> bytes:
    """Returns the socket name of the agent, from everything that must be equal for its ranks."""
    spaces = [namespace_of(name) for name in ("pid", "mnt", "net", "user")]
    variables = sorted(
        (name, value) for name, value in environ.items() if re.match(_OF_THE_AGENT, name, re.IGNORECASE)
    )
    place = (sys.executable, str(_ROOT), VERSION, _folder())
    shared = (os.getuid(), spaces, info.run_id, place, variables)
    return (
        b"\0otel-train/"
        + hashlib.sha256(repr(shared).encode(errors="surrogateescape")).hexdigest()[:32].encode()
    )


def _folder() -> str:
    """Returns the working directory of the rank, and so of its agent: paths of settings are relative to it."""
    try:
        return os.getcwd()  # noqa: PTH109 - it may be gone
    except OSError:
        return "/"


def _start_alone(stderr: int) -> ConnectedAgent:
    ours, theirs = socket.socketpair()
    with theirs:
        try:
            pid = _start(theirs.fileno(), -1, stderr)
        except BaseException:
            ours.close()
            raise
    return ConnectedAgent(MessageChannel(ours), found=False, pid=pid)


def _start(connection: int, listener: int, stderr: int) -> int:
    program = _PROGRAM.format(root=str(_ROOT), connection=connection, listener=listener)
    said = _run_without_sigchld(
        [*_SHELL, sys.executable, "-c", program], pass_fds=[fd for fd in (connection, listener) if fd >= 0],
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=stderr, start_new_session=True,
        env={**os.environ, **_THREADS, "OTEL_TRAIN_DISABLED": "true"},
    )  # fmt: skip
    return int(said or 0)


@contextmanager
def _no_subreaper() -> Iterator[None]:
    """Lets the agent be a child of the system's init where this process adopts the orphans below it (prctl(2)).

    Other orphans of this process that arise in the block, a few milliseconds, go to init as well.
    """
    import ctypes

    prctl, adopts = getattr(ctypes.CDLL(None), "prctl", None), ctypes.c_int()
    if prctl is None or prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(adopts)) or not adopts.value:
        yield
        return
    prctl(_PR_SET_CHILD_SUBREAPER, 0)
    try:
        yield
    finally:
        prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _run_without_sigchld(command: Sequence[str], **how: Any) -> bytes:
    """Runs a command that ends at once, and returns what it prints.

    The program's SIGCHLD handler is not called: that is for its children.
    """
    before = signal.getsignal(signal.SIGCHLD)
    ours = callable(before) and threading.current_thread() is threading.main_thread()
    heard: list[int] = []
    if ours:
        signal.signal(signal.SIGCHLD, lambda number, _: heard.append(number))
    try:
        with _no_subreaper(), subprocess.Popen(command, **how) as starting:  # noqa: S603 - our own program
            said, _ = starting.communicate()
        if starting.returncode:
            raise OSError(f"{command[0]} ended with status {starting.returncode}")
        return bytes(said)
    finally:
        if ours:
            signal.signal(signal.SIGCHLD, before)
            if heard and _another_has_ended():
                os.kill(os.getpid(), signal.SIGCHLD)


def _another_has_ended() -> bool:
    try:
        return os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:
        return False


class _ErrorsOfStart:
    """What an agent writes to stderr that dies before it begins: a file in memory, where the system has such.

    Attributes:
        descriptor: of it; else of nothing that is kept.
    """

    def __init__(self) -> None:
        self.descriptor, self._number = subprocess.DEVNULL, 0
        with suppress(AttributeError, OSError):
            self.descriptor = os.memfd_create("otel-train-stderr")
            self._number = os.fstat(self.descriptor).st_ino

    def take(self) -> str:
        """Closes it; returns the line that says what went wrong, "" where none does."""
        descriptor, self.descriptor = self.descriptor, subprocess.DEVNULL
        if descriptor < 0:
            return ""
        try:
            if (
                os.fstat(descriptor).st_ino != self._number
            ):  # the program has closed it, and opened a file of its own
                return ""
            said = os.pread(descriptor, 1 << 16, max(0, os.fstat(descriptor).st_size - (1 << 16)))
            os.close(descriptor)
        except OSError:
            return ""
        lines = [line.strip() for line in said.decode(errors="replace").splitlines() if line.strip()]
        return next((line for line in lines if line.startswith("Fatal Python error")), "".join(lines[-1:]))


class AgentThread(DaemonThread):
    """The agent in a thread of the training process, if no process can be started or ``agent="thread"``.

    Attributes:
        channel: the rank's end of the connection.
        service: what serves, once the rank has said hello.
        problem: why it could not begin; "" where it could.
    """

    def __init__(self, memory: memoryview, deliver_s: float) -> None:
        super().__init__(name="otel-train-agent", daemon=True)
        ours, theirs = socket.socketpair()
        self.channel, self._theirs = MessageChannel(ours), MessageChannel(theirs)
        self.channel.set_aside()
        self._theirs.set_aside()
        self.service: RankConnection | None = None
        self.problem = ""
        self._memory = memory
        self._deliver_s = deliver_s
        try:
            self.start()
        except BaseException:
            self.channel.close()
            self._theirs.close()
            raise

    def run(self) -> None:
        """Serves the rank."""
        shared: SharedExporters | None = None
        try:
            from otel_train.agent.node import opened
            from otel_train.exporters.manager import SharedExporters

            shared = SharedExporters(alone=True)
            hello = self._theirs.receive()
            self.service = opened(
                self._theirs, hello, self._memory, -1, deliver_s=self._deliver_s, shared=shared
            )
            if self.service is not None:
                self.service.serve()
        except EOFError:
            pass
        except Exception as error:  # noqa: BLE001 - an error of the agent must not end the program
            self.problem = f"{type(error).__name__}: {error}"
        finally:
            if shared is not None:
                shared.connections.close()
            self._theirs.close()


class AgentConnection:
    """The agent that a rank is connected to, in a process or in a thread of the program; another one where it dies.

    Args:
        config: ``agent`` says which; a thread gets ``exit_timeout_s`` to deliver what it has.
        environ: of the program.
        info: identity of the rank.
        memory: shared with the agent.

    Attributes:
        channel: messages to and from it.
        thread: the agent, where it is a thread of this process.
        pid: of its process; 0 where that is not known.
        is_up: set once it runs, or none will.

    Raises:
        OSError: no memory can be shared, or no process started here, and no thread either.
        RuntimeError: no thread can be started.
    """

    def __init__(
        self, config: Config, environ: Mapping[str, str], info: RunInfo, memory: FlightMemory
    ) -> None:
        self._config = config
        self._environ = environ
        self._memory = memory
        self._in_container = ends_its_container()
        self._starts, self._connected_s = 0, time.monotonic()
        self._found = False
        self._errors: _ErrorsOfStart | None = None
        self._logged: AgentThread | None = None
        self.thread: AgentThread | None = None
        self.pid = 0
        self.is_up = threading.Event()
        self.channel = self._first(info)

    @property
    def outlives_program(self) -> bool:
        """Whether the agent goes on when this process has ended."""
        return self.thread is None and not self._in_container

    # -- the first ---------------------------------------------------------------------------------

    def _first(self, info: RunInfo) -> MessageChannel:
        if self._config.agent != "process":
            return self._start_thread()
        if self._memory.descriptor < 0:
            return self._start_thread_instead("no memory can be shared")
        launcher = self._launcher(info) if self._environ.get(FOLDER) else None
        try:
            return self._connect(info)
        except OSError as error:
            if launcher is not None:
                launcher.closed()
            return self._start_thread_instead(error)

    def _launcher(self, info: RunInfo) -> LauncherFolder:
        from otel_train.agent.rank_end import LauncherFolder

        launcher = LauncherFolder(self._environ, info.pid)
        launcher.opened()
        return launcher

    def _connect(self, info: RunInfo) -> MessageChannel:
        self.is_up.clear()
        stderr = subprocess.DEVNULL if self._errors is None else self._errors.descriptor
        channel, self._found, self.pid = connect_agent(info, self._environ, stderr)
        return channel

    def _start_thread(self) -> MessageChannel:
        require_descriptors(above=False)
        self.thread = AgentThread(self._memory.map, self._config.exit_timeout_s)
        return self.thread.channel

    def _start_thread_instead(self, problem: object) -> MessageChannel:
        """Begins an agent in a thread, because of a problem of one in a process.

        Raises:
            OSError: no thread is left for one, or no socket.
        """
        try:
            channel = self._start_thread()
        except (OSError, RuntimeError) as error:
            raise OSError(
                f"no agent can run beside this process ({problem}) or in a thread of it ({error})"
            ) from error
        _log.warning("No agent can run beside this process (%s): a thread of it does its work", problem)
        return channel

    # -- what it gets first ------------------------------------------------------------------------

    def send_first_hello(self, hello: Hello) -> None:
        """Sends the first message of all, to a thread where a process cannot get it.

        Raises:
            OSError: no agent can get it.
        """
        # An agent that is gone already has left after its last rank, or was killed: the thread starts another. One in a thread could
        # not begin: what waits for it says why.
        try:
            self.send_hello(hello)
        except ConnectionError:
            pass
        except OSError as error:  # a sandbox in which no descriptor can be passed
            if self.thread is not None:
                raise
            self.channel.close()
            self.channel = self._start_thread_instead(error)
            with suppress(ConnectionError):
                self.send_hello(hello)

    def send_hello(self, hello: Hello) -> None:
        """Sends the first message, with descriptors of the memory and of this process to an agent in another one.

        Raises:
            OSError: the agent is gone, or takes no descriptor.
        """
        if self.thread is not None:
            self.channel.send(hello)
            return
        process = descriptor_of(os.getpid())
        given = (self._memory.descriptor, process)
        try:
            self.channel.send(hello, tuple(descriptor for descriptor in given if descriptor >= 0))
        finally:
            if process >= 0:
                os.close(process)

    def set_aside(self) -> None:
        """Moves the descriptors to numbers that the program does not reach; nothing may be receiving."""
        if self.thread is None:
            self._memory.set_descriptor_aside()
            self.channel.set_aside()

    # -- the next ----------------------------------------------------------------------------------

    def start_another(self, info: RunInfo, *, has_opened: bool) -> bool:
        """Connects to another agent after one has died; in a thread of this process if none can be started.

        Args:
            info: identity of the rank, as the agent before has determined it.
            has_opened: an agent has opened the run directory.

        Returns:
            Whether there is another. Where there is none, the log says why.
        """
        if self.channel.is_closed_elsewhere():
            _log.warning(
                "The program has closed the connection to its agent: logged values and the run summary are not exported"
            )
            return False
        before_s, self._connected_s = self._connected_s, time.monotonic()
        self._starts = 1 if self._connected_s - before_s > STEADY_S else self._starts + 1
        self.channel.close()
        if self._starts > MOST_STARTS:
            _log.error(
                "The agent has ended %d times, each time within %g s of its start: nothing more is exported",
                self._starts, STEADY_S,
            )  # fmt: skip
            return False
        try:
            self.channel = self._next(info, has_opened=has_opened)
        except (OSError, RuntimeError) as error:
            _log.error(
                "Nothing more is exported: no other agent can be started (%s). Raise pids.max, ulimit -u or ulimit -n",
                error,
            )
            return False
        return True

    def _next(self, info: RunInfo, *, has_opened: bool) -> MessageChannel:
        """Connects to another agent, or begins one in a thread of this process.

        Raises:
            OSError: no process and no descriptor is left for one.
            RuntimeError: no thread is left for one.
        """
        said = "" if self._errors is None else self._errors.take()
        try:
            # One that was found was about to leave, if it does not end each time.
            if self._found and not self.is_up.is_set() and self._starts < MOST_STARTS:
                return self._connect(info)
            if not has_opened and self._starts > 1:  # it cannot run here
                _log.warning(
                    "The agent ended before it began%s: a thread of this process does its work",
                    f" ({said})" if said else "",
                )
                return self._start_thread()
            self._errors = None if has_opened or self.thread is not None else _ErrorsOfStart()
            _log.warning("The agent has ended; another one goes on")
            return self._connect(info) if self.thread is None else self._start_thread()
        except OSError as error:
            _log.warning("No other agent can be started (%s): a thread of this process goes on", error)
            return self._start_thread()

    # -- while it works ----------------------------------------------------------------------------

    def wait_while_working(
        self, wait: Callable[[float], object], timeout_s: float, *, reading: bool = False
    ) -> bool:
        """Waits for the agent as long as it makes progress.

        Args:
            wait: waits for so many seconds; returns whether what is waited for has come.
            timeout_s: of one wait.
            reading: see ``ProcessActivity``.

        Returns:
            Whether it has come.
        """
        work, deadline_s = ProcessActivity(self.pid, reading=reading), time.monotonic() + BUSY_S
        while not (done := wait(timeout_s)) and time.monotonic() < deadline_s and work.is_working():
            pass
        return bool(done)

    def log_silence(self, waited_s: float) -> None:
        """Logs that the agent does not answer, and what to look at."""
        agent = f"agent (process {self.pid or 'not known'})"
        if self._found and not self.pid:
            agent = f"agent whose address process {self.channel.opener()} has opened"
        _log.warning(
            "The %s has not begun in %.0f s; nothing is exported until it does, training is not affected; see whether that "
            "process is stopped, waits for a disk, or is none of otel_train: end it then",
            agent, waited_s,
        )  # fmt: skip

    def log_problem(self) -> None:
        """Logs once why an agent in a thread has ended."""
        if self.thread is not None and self.thread.problem and self._logged is not self.thread:
            self._logged = self.thread
            _log.error("Nothing more is exported: %s", self.thread.problem)


LEAST_SHARE: Final = 0.2
"""Of the time between two looks: what a process that only waits for something stays below."""


class ProcessActivity:
    """Whether a process runs or waits for a processor, from /proc/<pid>/task.

    Args:
        pid: of the process. The thread that asks is left out.
        reading: a thread works as well that waits for a disk, and has run since the last call: the disk answers.
        processes: where the system tells of its processes.
    """

    def __init__(self, pid: int, *, reading: bool = False, processes: Path = Path("/proc")) -> None:
        self._tasks = processes / str(pid) / "task"
        self._reading = reading
        self._ran_ns: dict[str, int] = {}
        self._before_ns = time.monotonic_ns(), self._cpu_time()[0]

    def is_working(self) -> bool:
        """Returns whether it has run since the last call, or is runnable. False if the system does not say."""
        before_ns, (spent_ns, is_runnable) = self._before_ns, self._cpu_time()
        self._before_ns = now_ns, _ = time.monotonic_ns(), spent_ns
        return is_runnable or spent_ns - before_ns[1] > LEAST_SHARE * (now_ns - before_ns[0])

    def _cpu_time(self) -> tuple[int, bool]:
        """Returns the nanoseconds running or runnable, and whether a thread is now.

        The kernel adds the time of a wait when that is over, so a process that starves shows in its state alone.
        """
        spent_ns, is_runnable = 0, False
        mine = str(threading.get_native_id())
        with suppress(OSError, ValueError, IndexError):  # the process, or one of its threads, is gone
            for task in self._tasks.iterdir():
                if task.name != mine:
                    running, waiting, _ = (task / "schedstat").read_text(encoding="utf-8").split()
                    spent_ns += int(running) + int(waiting)
                    state = (task / "stat").read_bytes().rpartition(b")")[2].split()[0]
                    has_run = int(running) > self._ran_ns.get(task.name, int(running))
                    self._ran_ns[task.name] = int(running)
                    is_runnable |= state == b"R" or (self._reading and state == b"D" and has_run)
        return spent_ns, is_runnable


def start_of_job(environ: Mapping[str, str]) -> str:
    """See ``distributed.store.start_of_job``, which only ranks on several hosts import here."""
    from otel_train.distributed import store

    return store.start_of_job(environ, sys.modules)


def descriptor_of(pid: int) -> int:
    """Returns a descriptor of a process: its end is seen at once, and no later process of its number is taken for it.

    -1 where this system has none: then the end of the connection is the end of the process.
    """
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError):
        return -1


def ends_its_container() -> bool:
    """Returns whether the end of this process may be that of all others here: it is not in the namespace of the machine."""
    return namespace_of("pid") != f"pid:[{_MACHINE}]"
