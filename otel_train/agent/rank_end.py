"""How a rank ended that has not said it."""

from __future__ import annotations

import os
import select
import signal
import time
from pathlib import Path

_PATIENCE_S = 2.0
_POLL_S = 0.01
_EXIT_CODE_FIELD = 50  # of /proc/<pid>/stat, counted from 1 behind the name: proc(5), field 52


def how_it_ended(pid: int, process: int) -> tuple[str, str]:
    """State and cause: the name of the signal, or ``exit code <n>``; "killed" and "" where nobody can say.

    The kernel tells it as long as nobody has waited for the process.

    Args:
        pid: of the process.
        process: descriptor of it; -1 where there is none.
    """
    deadline_s = time.monotonic() + _PATIENCE_S
    while time.monotonic() < deadline_s:
        status = _status(pid)
        if status is not None:
            return _said(status)
        if process >= 0 and _is_over(process):
            return "killed", ""
        time.sleep(_POLL_S)
    # It lives, and has let go of the connection: it has become another program.
    return "failed", "exec"


def _is_over(process: int) -> bool:
    return bool(select.select([process], [], [], 0)[0])


def _status(pid: int) -> int | None:
    """Status as of ``waitpid``, of a process that has ended and that nobody has waited for; else None."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return None
    if not fields or fields[0] not in (b"Z", b"X", b"x"):
        return None
    return int(fields[_EXIT_CODE_FIELD - 1])


def _said(status: int) -> tuple[str, str]:
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        name = signal.Signals(number).name if number in list(signal.Signals) else f"signal {number}"
        return ("terminated" if number == signal.SIGTERM else "killed"), name
    code = os.WEXITSTATUS(status)
    return ("finished", "") if code == 0 else ("failed", f"exit code {code}")
