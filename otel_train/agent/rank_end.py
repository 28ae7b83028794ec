"""Determines how a rank ended: from its launcher, the kernel and its last message."""

from __future__ import annotations

import os
import select
import signal
import struct
import time
from contextlib import suppress
from fcntl import ioctl
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from otel_train.agent.messages import FOLDER
from otel_train.errors import RunDirectoryError
from otel_train.files import read_json, replace_json
from otel_train.safety import signal_name

if TYPE_CHECKING:
    from collections.abc import Mapping

_EXIT_WAIT_S = 2.0
"""Longest wait for the end of a process that has disconnected."""

EXITING_S: Final = 10.0
"""Longest wait for the end of a process that has closed its session."""

_POLL_S = 0.01
_EXIT_CODE_FIELD = 50  # of /proc/<pid>/stat, counted from 1 after the name: proc(5), field 52

_BY_SIGNAL: Final[dict[int, str]] = {signal.SIGTERM: "terminated", signal.SIGINT: "interrupted"}
_PIDFD_INFO = struct.Struct("=Q52xi")  # linux/pidfd.h, struct pidfd_info: mask, ..., exit_code
_PIDFD_GET_INFO = 0xC040FF0B  # _IOWR(0xFF, 11, 64 bytes)
_PIDFD_INFO_EXIT = 1 << 3


def how_it_ended(pid: int, process: int, patience_s: float = _EXIT_WAIT_S) -> tuple[str, str]:
    """Returns the end state of a process and the cause: the name of a signal, ``exit code <n>``, ``exec``, or "".

    The kernel keeps the exit status until the parent has waited for the process; from Linux 6.15 on, as long as there is a
    descriptor of the process: ``process``, -1 for none. Without the exit status the state is "killed" and the cause "".
    """
    deadline_s = time.monotonic() + patience_s
    while time.monotonic() < deadline_s:
        over = _is_over(process) if process >= 0 else not Path(f"/proc/{pid}").exists()
        status = _status(pid)
        if status is None and over and process >= 0:
            status = _status_of_reaped(process)
        if status is not None:
            return _state_of_status(status)
        if over:
            return "killed", ""
        time.sleep(_POLL_S)
    # The process lives and has closed the connection: it has executed another program (execve(2)).
    return "finished", "exec"


class MappedFile(NamedTuple):
    """A file as ``/proc/<pid>/maps`` shows it. Files of other devices can have the same inode number."""

    inode: int
    name: bytes

    @classmethod
    def of(cls, descriptor: int) -> MappedFile | None:
        """Returns the file of a descriptor of this process; None without ``/proc``."""
        with suppress(OSError):
            name = os.fsencode(Path(f"/proc/self/fd/{descriptor}").readlink())
            return cls(os.fstat(descriptor).st_ino, name)
        return None


def maps_file(pid: int, file: MappedFile) -> bool:
    """Returns whether a process maps a file: it has not executed another program since it mapped that."""
    try:
        rows = Path(f"/proc/{pid}/maps").read_bytes().splitlines()
    except OSError:
        return False
    return any(row.split(None, 5)[4:] == [b"%d" % file.inode, file.name] for row in rows)


def _is_over(process: int) -> bool:
    poll = select.poll()  # ``select`` takes no descriptor from 1024 on
    poll.register(process, select.POLLIN)
    return bool(poll.poll(0))


def _status(pid: int) -> int | None:
    """Returns the ``waitpid`` status of a process that has ended and was not waited for; else None."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return None
    if not fields or fields[0] not in (b"Z", b"X", b"x"):
        return None
    return int(fields[_EXIT_CODE_FIELD - 1])


def _status_of_reaped(process: int) -> int | None:
    """Returns the ``waitpid`` status of a process that its parent has waited for; None if the kernel does not report it."""
    try:
        fields = _PIDFD_INFO.unpack(ioctl(process, _PIDFD_GET_INFO, _PIDFD_INFO.pack(_PIDFD_INFO_EXIT, 0)))
    except OSError:
        return None
    known, status = fields
    return int(status) if known & _PIDFD_INFO_EXIT else None


def _state_of_status(status: int) -> tuple[str, str]:
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        return _BY_SIGNAL.get(number, "killed"), signal_name(number)
    code = os.WEXITSTATUS(status)
    return ("finished", "") if code == 0 else ("failed", f"exit code {code}")


PATIENCE_S: Final = 3.0
"""Longest wait of the launcher for ranks that still run after the program has ended."""

WRITING_S: Final = 10.0
"""Longest wait of the launcher for an agent to finish the run of a rank that has ended."""

_OPEN, _ENDED = ".open", ".ended"
_FOLDER_POLL_S = 0.02


class RankEnd(NamedTuple):
    """A rank that has ended without closing its session, and whose run its agent has finished.

    Attributes:
        steps: number of training steps.
        lost: number of lost events.
    """

    rank_path: Path
    rank: int
    steps: int
    lost: int


class LauncherFolder:
    """Tells the launcher (``otel-train run``), by files, which ranks have an agent and how they ended. No effect without one."""

    def __init__(self, environ: Mapping[str, str], pid: int) -> None:
        folder = environ.get(FOLDER, "")
        self._path = Path(folder) / str(pid) if folder else None

    def opened(self, agent: int = 0) -> None:
        """Reports that the rank has an agent, with its process id; 0: the agent is being started."""
        self._write(_OPEN, {"agent": agent})

    def ended(self, end: RankEnd) -> None:
        """Reports that the rank has ended without closing its session, and that its run directory is complete."""
        self._write(_ENDED, {**end._asdict(), "rank_path": str(end.rank_path)})
        self.closed()

    def closed(self) -> None:
        """Reports that the launcher need not wait for the rank."""
        if self._path is not None:
            with suppress(OSError):
                self._path.with_suffix(_OPEN).unlink()

    def _write(self, suffix: str, document: dict[str, object]) -> None:
        if self._path is None:
            return
        with suppress(OSError):  # the launcher has ended and removed the folder
            replace_json(self._path.with_suffix(suffix), document)


def wait_for_ends(folder: Path) -> list[RankEnd]:
    """Returns the ranks that ended without closing their session, in order. Waits until their agents have finished their runs."""
    began_s = time.monotonic()
    while any(_is_worth_waiting(path, time.monotonic() - began_s) for path in folder.glob(f"*{_OPEN}")):
        time.sleep(_FOLDER_POLL_S)
    found = []
    for path in folder.glob(f"*{_ENDED}"):
        with suppress(RunDirectoryError, TypeError, KeyError):
            row = read_json(path)
            found.append(RankEnd(Path(row["rank_path"]), row["rank"], row["steps"], row["lost"]))
    return sorted(found, key=lambda end: end.rank)


def _is_worth_waiting(path: Path, waited_s: float) -> bool:
    from otel_train.rundata.liveness import is_running  # imports psutil, which a rank does not need

    if is_running(int(path.stem)):
        return waited_s < PATIENCE_S
    with suppress(RunDirectoryError, TypeError, KeyError):
        agent = read_json(path)["agent"]
        return waited_s < WRITING_S and (agent == 0 or is_running(agent))
    return False
