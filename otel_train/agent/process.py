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
from typing import TYPE_CHECKING, Any

from otel_train.agent.link import Link

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import FrameType

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
    """Serve the rank at the other end of this socket."""
    from otel_train.agent.messages import Ask, Hello
    from otel_train.errors import ConfigError

    link = Link(socket.socket(fileno=descriptor))
    handler = LogsToRank(link)
    logger = logging.getLogger("otel_train")
    logger.addHandler(handler)
    logger.propagate = False
    try:
        hello, (memory, process) = link.receive_first(2)
    except (EOFError, ValueError):
        return
    assert isinstance(hello, Hello)
    with suppress(OSError):
        os.chdir(hello.folder)
    from otel_train.agent.service import RankService

    try:
        service = RankService(link, hello, memory, process)
    except ConfigError as error:
        link.send(Ask(0, "refused", (str(error),)))
        return

    def terminated(number: int, frame: FrameType | None) -> None:
        del number, frame
        service.terminate()

    signal.signal(signal.SIGTERM, terminated)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    service.serve()


def serve_here() -> Link:
    """The same in a thread of this process; the connection to it.

    Raises:
        OSError: no descriptor is left.
        RuntimeError: no thread can be started.
    """
    ours, theirs = socket.socketpair()

    def serve() -> None:
        from otel_train.agent.service import RankService

        link = Link(theirs)
        try:
            hello, (memory, process) = link.receive_first(2)
        except (EOFError, ValueError):
            return
        RankService(link, hello, memory, process).serve()

    threading.Thread(target=serve, name="otel-train-agent", daemon=True).start()
    return Link(ours)


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
