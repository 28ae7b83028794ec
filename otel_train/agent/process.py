"""Connects a rank to the agent of its node, starts the agent (a process, or a thread of the program), and replaces it if it dies."""

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
_IN_THREAD: Final = "a thread of this process does its work"
_ROOT = Path(__file__).resolve().parents[2]
_NO_THREAD_POOLS = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
"""Environment of the agent: its numeric libraries start no thread pools, which would take memory for little computation."""

_PROGRAM = (
    "import sys; sys.path[:] = [place for place in sys.path if place]; sys.path.append({root!r}); "
    "from otel_train.agent.node import main; main({connection}, {listener})"
)
_SHELL = ("/bin/sh", "-c", 'exec "$@" >/dev/null & echo $!', "sh")
"""Starts the agent in the background and prints its process id. The shell exits at once, so the agent is not a child of the training
program: a program that waits for any child must not get the agent's exit status."""

_LISTEN_BACKLOG = 1024
"""Most ranks that can wait to be accepted while the agent starts."""

BUSY_S: Final = 10.0
"""A wait for an agent that runs, or waits for a processor, is repeated for this long. A wait for an agent that is stopped or blocked, as by
a disk, is not repeated."""

MOST_STARTS: Final = 3
"""Agents in a row that may end within ``STEADY_S`` of their start and are replaced; after one more nothing more is exported."""

STEADY_S: Final = 60.0
"""An agent that lived longer than this is replaced without counting its end: the cause is unlikely to end the next one at once."""

_CONNECT_S = 5.0
_TRIES = 10
_RETRY_S = 0.01
"""Pause between two of the ``_TRIES`` attempts to bind the agent's address or connect to it."""

_PR_SET_CHILD_SUBREAPER, _PR_GET_CHILD_SUBREAPER = 36, 37  # prctl(2)
_HOST_PID_NAMESPACE: Final = 0xEFFFFFFC  # linux/proc_ns.h, PROC_PID_INIT_INO

_AGENT_VARIABLES: Final = "(OTEL_(?!TRAIN_)|PYTHON|SSL_CERT_|GRPC_|REQUESTS_CA_BUNDLE$|CURL_CA_BUNDLE$|LD_LIBRARY_PATH$|.*_PROXY$|MASTER_PORT$)"
"""Environment variables that act on the whole agent process, so all its ranks must have the same values; MASTER_PORT distinguishes
jobs that run at the same time."""


class ConnectedAgent(FastNamedTuple):
    """A connection to an agent process.

    Attributes:
        found: whether another rank has started the agent; it may be about to exit.
        pid: process id of the agent; 0 if it is not known.
    """

    channel: MessageChannel
    found: bool
    pid: int


def connect_agent(
    info: RunInfo, environ: Mapping[str, str], stderr: int = subprocess.DEVNULL
) -> ConnectedAgent:
    """Connects to the agent of this node; starts it if there is none.

    Ranks of one run on one node, of one user and in the same namespaces, share an agent. Its address is a name in the
    abstract namespace of Unix sockets: only one process can bind it, it ends with the process, and it needs no disk.
    ``stderr``: descriptor for the error output of an agent that is started here.

    Raises:
        OSError: no process can be started here.
    """
    if not interpreter():
        raise OSError("this program is frozen, or does not know its interpreter (sys.executable is empty)")
    if info.local_world_size < 2:  # noqa: PLR2004 - alone
        return _start_alone(stderr)
    address = _address(info, environ)
    for _ in range(_TRIES):  # the agent that has bound the name may not listen yet, or may be exiting
        try:
            return _start_and_connect(address, stderr) or _connect_to_running(address)
        except ConnectionRefusedError:  # noqa: PERF203 - ten times at most
            time.sleep(_RETRY_S)
        except PermissionError:  # the system has no abstract sockets, or another user has bound the name
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
        listener.listen(_LISTEN_BACKLOG)
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
        PermissionError: the agent is another user's, or does not accept the connection in time.
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
    """Returns the socket name of the agent: a hash of everything that must be equal for its ranks."""
    namespaces = [namespace_of(name) for name in ("pid", "mnt", "net", "user")]
    variables = sorted(
        (name, value) for name, value in environ.items() if re.match(_AGENT_VARIABLES, name, re.IGNORECASE)
    )
    installation = (sys.executable, str(_ROOT), VERSION, _folder())
    shared = (os.getuid(), namespaces, info.run_id, installation, variables)
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
    client_end, agent_end = socket.socketpair()
    with agent_end:
        try:
            pid = _start(agent_end.fileno(), -1, stderr)
        except BaseException:
            client_end.close()
            raise
    return ConnectedAgent(MessageChannel(client_end), found=False, pid=pid)


def _start(connection: int, listener: int, stderr: int) -> int:
    """Starts an agent process and returns its id. See ``node.main`` for the arguments."""
    program = _PROGRAM.format(root=str(_ROOT), connection=connection, listener=listener)
    output = _run_without_sigchld(
        [*_SHELL, sys.executable, "-c", program], pass_fds=[fd for fd in (connection, listener) if fd >= 0],
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=stderr, start_new_session=True,
        env={**os.environ, **_NO_THREAD_POOLS, "OTEL_TRAIN_DISABLED": "true"},
    )  # fmt: skip
    return int(output or 0)


@contextmanager
def _no_subreaper() -> Iterator[None]:
    """Turns off PR_SET_CHILD_SUBREAPER (prctl(2)) of this process in the block, so that init adopts the agent.

    For these few milliseconds, init adopts all other orphans of this process as well.
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
    """Runs a command that exits at once, and returns its output, which must be short.

    The SIGCHLD handler of the program is called only if one of its own children has ended meanwhile.
    """
    before = signal.getsignal(signal.SIGCHLD)
    replaces = callable(before) and threading.current_thread() is threading.main_thread()
    received: list[int] = []
    if replaces:
        signal.signal(signal.SIGCHLD, lambda number, _: received.append(number))
    try:
        with _no_subreaper(), subprocess.Popen(command, **how) as starting:  # noqa: S603 - our own program
            starting.wait()
            output = b""
            if starting.stdout is not None:
                # Not to its end: a process that another thread has forked meanwhile may keep the other end of the pipe open.
                os.set_blocking(starting.stdout.fileno(), False)
                output = starting.stdout.read() or b""
        if starting.returncode:
            raise OSError(f"{command[0]} ended with status {starting.returncode}")
        return bytes(output)
    finally:
        if replaces:
            signal.signal(signal.SIGCHLD, before)
            if received and _has_ended_child():
                os.kill(os.getpid(), signal.SIGCHLD)


def _has_ended_child() -> bool:
    """Returns whether a child of this process has ended and was not waited for."""
    try:
        return os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:
        return False


class _StartupStderr:
    """Keeps the error output of an agent that may die before it begins, in a file in memory (memfd_create(2)).

    Attributes:
        descriptor: of that file; ``subprocess.DEVNULL`` on a system without such files.
    """

    def __init__(self) -> None:
        self.descriptor, self._inode_number = subprocess.DEVNULL, 0
        with suppress(AttributeError, OSError):
            self.descriptor = os.memfd_create("otel-train-stderr")
            self._inode_number = os.fstat(self.descriptor).st_ino

    def take(self) -> str:
        """Closes the file; returns the line with the error, "" if there is none."""
        descriptor, self.descriptor = self.descriptor, subprocess.DEVNULL
        if descriptor < 0:
            return ""
        try:
            # The program may have closed the descriptor and opened a file of its own under its number.
            if os.fstat(descriptor).st_ino != self._inode_number:
                return ""
            output = os.pread(descriptor, 1 << 16, max(0, os.fstat(descriptor).st_size - (1 << 16)))
            os.close(descriptor)
        except OSError:
            return ""
        lines = [line.strip() for line in output.decode(errors="replace").splitlines() if line.strip()]
        return next((line for line in lines if line.startswith("Fatal Python error")), "".join(lines[-1:]))


class AgentThread(DaemonThread):
    """The agent in a thread of the training process, if no process can be started or ``agent="thread"``.

    Attributes:
        channel: the rank's end of the connection.
        service: serves the rank, once that has sent ``Hello``.
        problem: the error that ended the agent; "" for none.
    """

    def __init__(self, memory: memoryview, deliver_s: float) -> None:
        super().__init__(name="otel-train-agent", daemon=True)
        client_end, agent_end = socket.socketpair()
        self.channel, self._agent_end = MessageChannel(client_end), MessageChannel(agent_end)
        self.channel.set_aside()
        self._agent_end.set_aside()
        self.service: RankConnection | None = None
        self.problem = ""
        self._memory = memory
        self._deliver_s = deliver_s
        try:
            self.start()
        except BaseException:
            self.channel.close()
            self._agent_end.close()
            raise

    def run(self) -> None:
        """Serves the rank."""
        shared: SharedExporters | None = None
        try:
            from otel_train.agent.node import opened
            from otel_train.exporters.manager import SharedExporters

            shared = SharedExporters(alone=True)
            hello = self._agent_end.receive()
            self.service = opened(
                self._agent_end, hello, self._memory, -1, deliver_s=self._deliver_s, shared=shared
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
            self._agent_end.close()


class AgentConnection:
    """Connection of a rank to its agent, in a process or in a thread of the program, and to the next agent if it dies.

    Args:
        config: ``agent`` selects process or thread; a thread has ``exit_timeout_s`` to deliver at the end.

    Attributes:
        channel: sends and receives messages.
        thread: the agent if it is a thread of this process.
        pid: process id of the agent; 0 if it is not known.
        is_up: set once the agent runs, or no agent will run.

    Raises:
        OSError: neither a process nor a thread can be started, or no descriptor is left.
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
        self._errors: _StartupStderr | None = None
        self._logged: AgentThread | None = None
        self.thread: AgentThread | None = None
        self.pid = 0
        self.is_up = threading.Event()
        self.channel = self._connect_first(info)

    @property
    def outlives_program(self) -> bool:
        """Whether the agent continues after the end of this process."""
        return self.thread is None and not self._in_container

    # -- starting the first agent --------------------------------------------------------------------

    def _connect_first(self, info: RunInfo) -> MessageChannel:
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
        """Starts an agent in a thread because no agent process can be used, for the reason ``problem``.

        Raises:
            OSError: no thread can be started, or no socket can be opened.
        """
        try:
            channel = self._start_thread()
        except (OSError, RuntimeError) as error:
            raise OSError(
                f"no agent can run beside this process ({problem}) or in a thread of it ({error})"
            ) from error
        _log.warning("agent: no process can be started (%s); %s", problem, _IN_THREAD)
        return channel

    # -- the first message ---------------------------------------------------------------------------

    def send_first_hello(self, hello: Hello) -> None:
        """Sends ``Hello`` to the first agent; to an agent in a thread if descriptors cannot be passed to a process.

        Raises:
            OSError: no agent can receive it.
        """
        # ConnectionError: an agent process has left after its last rank, or was killed: the service thread starts another. An agent in
        # a thread could not begin: ``AgentClient._await_opening`` raises the reason.
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
        """Sends ``Hello``; to an agent process with the descriptors of the shared memory and of this process.

        Raises:
            OSError: the agent has closed the connection, or descriptors cannot be passed.
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
        """Moves the descriptors to numbers that the program does not reach; no thread may be receiving."""
        if self.thread is None:
            self._memory.set_descriptor_aside()
            self.channel.set_aside()

    # -- replacing an agent --------------------------------------------------------------------------

    def start_another(self, info: RunInfo, *, has_opened: bool) -> bool:
        """Connects to another agent after one has died; starts it in a thread if no process can be started.

        ``has_opened``: a previous agent has opened the run directory. Returns whether there is another agent; if not, logs the reason.
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
                "agent: it has ended %d times, each time within %g s of its start; nothing more is exported",
                self._starts, STEADY_S,
            )  # fmt: skip
            return False
        try:
            self.channel = self._connect_next(info, has_opened=has_opened)
        except (OSError, RuntimeError) as error:
            _log.error(
                "agent: no other one can be started (%s); nothing more is exported; raise pids.max, ulimit -u or ulimit -n",
                error,
            )
            return False
        return True

    def _connect_next(self, info: RunInfo, *, has_opened: bool) -> MessageChannel:
        """Connects to another agent, or starts one in a thread of this process.

        Raises:
            OSError: neither a process nor a thread can be started, or no descriptor is left.
            RuntimeError: no thread can be started.
        """
        error_text = "" if self._errors is None else self._errors.take()
        try:
            # An agent that another rank had started was probably about to exit, unless this happens each time.
            if self._found and not self.is_up.is_set() and self._starts < MOST_STARTS:
                return self._connect(info)
            if not has_opened and self._starts > 1:  # an agent process cannot run here
                _log.warning(
                    "agent: it ended before it began%s; %s",
                    f" ({error_text})" if error_text else "",
                    _IN_THREAD,
                )
                return self._start_thread()
            self._errors = None if has_opened or self.thread is not None else _StartupStderr()
            _log.warning("agent: it has ended; another one is started, and reads the events in memory")
            return self._connect(info) if self.thread is None else self._start_thread()
        except OSError as error:
            _log.warning("agent: no other process can be started (%s); %s", error, _IN_THREAD)
            return self._start_thread()

    # -- waiting, logging ----------------------------------------------------------------------------

    def wait_while_working(
        self, wait: Callable[[float], object], timeout_s: float, *, reading: bool = False
    ) -> bool:
        """Calls ``wait(timeout_s)`` until it returns true, as long as the agent process works, for ``BUSY_S`` at most; returns whether it did.

        ``reading``: see ``ProcessActivity``.
        """
        work, deadline_s = ProcessActivity(self.pid, reading=reading), time.monotonic() + BUSY_S
        while not (done := wait(timeout_s)) and time.monotonic() < deadline_s and work.is_working():
            pass
        return bool(done)

    def log_silence(self, waited_s: float) -> None:
        """Logs that the agent has not begun, and what to check."""
        process = f"process {self.pid or 'not known'}"
        if self._found and not self.pid:
            process = f"process {self.channel.opener()}, which opened its address,"
        _log.warning(
            "agent: %s has not begun in %.0f s; nothing is exported until it does, training is not affected; check whether it "
            "is stopped or waits for a disk; end it if it is not an agent of otel_train",
            process, waited_s,
        )  # fmt: skip

    def log_problem(self) -> None:
        """Logs once why an agent in a thread has ended."""
        if self.thread is not None and self.thread.problem and self._logged is not self.thread:
            self._logged = self.thread
            _log.error("agent: %s; nothing more is exported", self.thread.problem)


LEAST_SHARE: Final = 0.2
"""Processor time, as a share of the time between two samples, above which a process works: a process that only waits stays below."""


class ProcessActivity:
    """Samples whether a process runs or waits for a processor, from /proc/<pid>/task.

    Args:
        pid: process id. The calling thread is left out.
        reading: count a thread in uninterruptible disk sleep as working if it has run since the last call: the disk answers.
        processes: where procfs is mounted.
    """

    def __init__(self, pid: int, *, reading: bool = False, processes: Path = Path("/proc")) -> None:
        self._tasks = processes / str(pid) / "task"
        self._reading = reading
        self._ran_ns: dict[str, int] = {}
        self._before_ns = time.monotonic_ns(), self._cpu_time()[0]

    def is_working(self) -> bool:
        """Returns whether the process has run since the last call, or is runnable; False if the system does not report that."""
        before_ns, (spent_ns, is_runnable) = self._before_ns, self._cpu_time()
        self._before_ns = now_ns, _ = time.monotonic_ns(), spent_ns
        return is_runnable or spent_ns - before_ns[1] > LEAST_SHARE * (now_ns - before_ns[0])

    def _cpu_time(self) -> tuple[int, bool]:
        """Returns the nanoseconds that the threads were running or runnable so far, and whether one of them is now.

        The kernel adds the time of a wait for a processor when the wait ends, so until then only the state shows it.
        """
        spent_ns, is_runnable = 0, False
        own_task = str(threading.get_native_id())
        with suppress(OSError, ValueError, IndexError):  # the process, or one of its threads, has ended
            for task in self._tasks.iterdir():
                if task.name != own_task:
                    running, waiting, _ = (task / "schedstat").read_text(encoding="utf-8").split()
                    spent_ns += int(running) + int(waiting)
                    state = (task / "stat").read_bytes().rpartition(b")")[2].split()[0]
                    has_run = int(running) > self._ran_ns.get(task.name, int(running))
                    self._ran_ns[task.name] = int(running)
                    is_runnable |= state == b"R" or (self._reading and state == b"D" and has_run)
        return spent_ns, is_runnable


def start_of_job(environ: Mapping[str, str]) -> str:
    """See ``distributed.store.start_of_job``. Only ranks on several hosts call this, and so import that module."""
    from otel_train.distributed import store

    return store.start_of_job(environ, sys.modules)


def descriptor_of(pid: int) -> int:
    """Returns a descriptor of a process (pidfd_open(2)): it reports the end at once, and a reused process id cannot be confused.

    -1 if the system has none: then the end of the connection counts as the end of the process.
    """
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError):
        return -1


def ends_its_container() -> bool:
    """Returns whether the end of this process may end its container: it is not in the pid namespace of the host."""
    return namespace_of("pid") != f"pid:[{_HOST_PID_NAMESPACE}]"
