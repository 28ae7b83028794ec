"""Connects a rank to the agent of its node, or starts one: a process, or a thread of the program."""

from __future__ import annotations

import errno
import hashlib
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from otel_train.agent.messages import MessageChannel, user_of
from otel_train.fast_classes import FastNamedTuple
from otel_train.resource import VERSION, namespace_of
from otel_train.safety import DaemonThread, interpreter

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from otel_train.agent.rank_connection import RankConnection
    from otel_train.exporters.manager import SharedExporters
    from otel_train.resource import RunInfo

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

_CONNECT_S = 5.0
_TRIES = 10
_RETRY_S = 0.01

_PR_SET_CHILD_SUBREAPER, _PR_GET_CHILD_SUBREAPER = 36, 37  # prctl(2)
_MACHINE: Final = 0xEFFFFFFC  # linux/proc_ns.h, PROC_PID_INIT_INO

_OF_THE_AGENT: Final = "(OTEL_(?!TRAIN_)|PYTHON|SSL_CERT_|GRPC_|REQUESTS_CA_BUNDLE$|CURL_CA_BUNDLE$|LD_LIBRARY_PATH$|.*_PROXY$|MASTER_PORT$)"
"""Variables that a whole process has one value of; the last one tells jobs apart that run at once."""


class AgentConnection(FastNamedTuple):
    """A connection to an agent.

    Attributes:
        found: another rank has started it; it may be leaving just now.
        pid: of its process; 0 where that is not known.
    """

    link: MessageChannel
    found: bool
    pid: int


def connect_agent(info: RunInfo, environ: Mapping[str, str]) -> AgentConnection:
    """Connects to the agent of this node; starts it if there is none.

    Ranks of one run on one node, of one user and in the same namespaces, have one agent. Its address is a name in the
    abstract namespace of Unix sockets: taken by one rank at a time, gone with the process, and on no disk.

    Raises:
        OSError: no process can be started here.
    """
    if not interpreter():
        raise OSError("this program is frozen, or does not know its interpreter (sys.executable is empty)")
    if info.local_world_size < 2:  # noqa: PLR2004 - alone
        return _start_alone()
    address = _address(info, environ)
    for _ in range(_TRIES):  # the agent that has the name may not listen yet, or may be leaving
        try:
            return _start_and_connect(address) or _connect_to_running(address)
        except ConnectionRefusedError:  # noqa: PERF203 - ten times at most
            time.sleep(_RETRY_S)
        except PermissionError:  # no such sockets here, or another user's
            break
    return _start_alone()


def _start_and_connect(address: bytes) -> AgentConnection | None:
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
            pid = _start(-1, listener.fileno())
        except BaseException:
            connection.close()
            raise
    return AgentConnection(MessageChannel(connection), found=False, pid=pid)


def _connect_to_running(address: bytes) -> AgentConnection:
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
    return AgentConnection(MessageChannel(connection), found=True, pid=0)


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


def _start_alone() -> AgentConnection:
    ours, theirs = socket.socketpair()
    with theirs:
        try:
            pid = _start(theirs.fileno(), -1)
        except BaseException:
            ours.close()
            raise
    return AgentConnection(MessageChannel(ours), found=False, pid=pid)


def _start(connection: int, listener: int) -> int:
    program = _PROGRAM.format(root=str(_ROOT), connection=connection, listener=listener)
    said = _run_without_sigchld(
        [*_SHELL, sys.executable, "-c", program], pass_fds=[fd for fd in (connection, listener) if fd >= 0],
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True,
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


class AgentThread(DaemonThread):
    """The agent in a thread of the training process, if no process can be started or ``agent="thread"``.

    Attributes:
        link: the rank's end of the connection.
        service: what serves, once the rank has said hello.
        problem: why it could not begin; "" where it could.
    """

    def __init__(self, memory: memoryview, deliver_s: float) -> None:
        super().__init__(name="otel-train-agent", daemon=True)
        ours, theirs = socket.socketpair()
        self.link, self._theirs = MessageChannel(ours), MessageChannel(theirs)
        self.link.set_aside()
        self._theirs.set_aside()
        self.service: RankConnection | None = None
        self.problem = ""
        self._memory = memory
        self._deliver_s = deliver_s
        try:
            self.start()
        except BaseException:
            self.link.close()
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

    return store.start_of_job(environ)


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
