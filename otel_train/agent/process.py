"""The agent's own process: how a rank starts it, and what it runs."""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from otel_train.agent.link import Link

if TYPE_CHECKING:
    import mmap
    from collections.abc import Sequence
    from types import FrameType

    from otel_train.agent.messages import Hello
    from otel_train.agent.service import RankService

DELIVERY_S: Final = 60.0
"""Longest that an agent outlives its last rank, with a Collector that does not answer."""

_ROOT = Path(__file__).resolve().parents[2]
_THREADS = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
"""Libraries of the agent start no pools of threads: they would take memory, and it computes little."""

_PROGRAM = (
    "import sys; sys.path[:1] = []; sys.path.append({root!r}); "
    "from otel_train.agent.process import main; main({descriptor})"
)
_SHELL = ("/bin/sh", "-c", 'exec "$@" &', "sh")
"""It ends at once: the agent is no child of the program. One that waits for any of its children must not meet it."""


def start() -> Link:
    """Start an agent; the connection to it.

    Raises:
        OSError: no process can be started here.
    """
    if not sys.executable:
        raise OSError("this interpreter does not know its own program (sys.executable is empty)")
    ours, theirs = socket.socketpair()
    try:
        command = [sys.executable, "-c", _PROGRAM.format(root=str(_ROOT), descriptor=theirs.fileno())]
        _run_aside(
            [*_SHELL, *command], pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL, start_new_session=True,
            env={**os.environ, **_THREADS, "OTEL_TRAIN_DISABLED": "true"},
        )  # fmt: skip
    except BaseException:
        ours.close()
        raise
    finally:
        theirs.close()
    return Link(ours)


def _run_aside(command: Sequence[str], **how: Any) -> None:
    """Run what ends at once, and let nobody hear of its end: handlers of SIGCHLD are the program's, for its children.

    Raises:
        OSError: it cannot be run.
    """
    before = signal.getsignal(signal.SIGCHLD)
    ours = callable(before) and threading.current_thread() is threading.main_thread()
    heard: list[int] = []
    if ours:
        signal.signal(signal.SIGCHLD, lambda number, _: heard.append(number))
    try:
        with subprocess.Popen(command, **how) as starting:  # noqa: S603 - our own program
            status = starting.wait()
        if status:
            raise OSError(f"{command[0]} ended with status {status}")
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


def main(descriptor: int) -> None:
    """Serve the rank at the other end of this socket, in the agent's own process."""
    link = Link(socket.socket(fileno=descriptor))
    handler = LogsToRank(link)
    logger = logging.getLogger("otel_train")
    logger.addHandler(handler)
    logger.propagate = False
    try:
        hello, descriptors = link.receive_first(2)
    except EOFError:
        return
    with suppress(OSError):
        os.chdir(hello.folder)
    process = descriptors[1] if len(descriptors) > 1 else -1
    service = _opened(link, hello, descriptors[0], process, deliver_s=DELIVERY_S)
    if service is None:
        return

    def terminated(number: int, frame: FrameType | None) -> None:
        del number, frame
        service.terminate()

    signal.signal(signal.SIGTERM, terminated)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    service.serve()


class AgentThread(threading.Thread):
    """An agent in a thread of the training process: where no process can be started, or none is wanted.

    Args:
        memory: that the rank writes to.
        deliver_s: longest that it delivers after the rank has let go of it.

    Attributes:
        link: the rank's end of the connection.
        service: what serves, once the rank has said hello.
        problem: why it could not begin; "" where it could.

    Raises:
        OSError: no descriptor is left.
        RuntimeError: no thread can be started.
    """

    def __init__(self, memory: mmap.mmap, deliver_s: float) -> None:
        super().__init__(name="otel-train-agent", daemon=True)
        ours, theirs = socket.socketpair()
        self.link, self._theirs = Link(ours), Link(theirs)
        self.service: RankService | None = None
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
        """Serve the rank."""
        try:
            hello = self._theirs.receive()
            self.service = _opened(self._theirs, hello, self._memory, -1, deliver_s=self._deliver_s)
            if self.service is not None:
                self.service.serve()
        except EOFError:
            pass
        except Exception as error:  # noqa: BLE001 - no fault of ours reaches the program
            self.problem = f"{type(error).__name__}: {error}"
        finally:
            self._theirs.close()


def _opened(
    link: Link, hello: Hello, memory: int | mmap.mmap, process: int, *, deliver_s: float
) -> RankService | None:
    """What serves the rank; None where it has set what cannot be honoured, and is told so."""
    from otel_train.agent.messages import Ask
    from otel_train.agent.service import RankService
    from otel_train.errors import ConfigError

    with suppress(OSError):  # a rank that is gone is counted to its end all the same
        link.send(Ask(0, "up", (os.getpid(),)))
    try:
        return RankService(link, hello, memory, process, deliver_s=deliver_s)
    except ConfigError as error:
        link.send(Ask(0, "refused", (str(error),)))
        return None


class LogsToRank(logging.Handler):
    """Has the rank log what the agent has to say: there are the program's own handlers.

    Args:
        link: to the rank.
    """

    def __init__(self, link: Link) -> None:
        super().__init__()
        self._link = link

    def emit(self, record: logging.LogRecord) -> None:
        """Send one record."""
        from otel_train.agent.messages import Ask

        text: Any = record.getMessage()
        if record.exc_info:
            text += "\n" + logging.Formatter().formatException(record.exc_info)
        with suppress(OSError):
            self._link.send(Ask(0, "log", (record.levelno, text)))
