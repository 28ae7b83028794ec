"""Which process of a launch has which rank: two that do not know of each other must not write into one folder."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

from otel_train.launch.names import WILL

if TYPE_CHECKING:
    from pathlib import Path

_MOST = 4096
_BEGINNING_S = 30.0
"""A process that has claimed a rank so lately may still be making its session."""


def claim(folder: Path, rank: int) -> int:
    """Take a rank for this process.

    Args:
        folder: of the launcher.
        rank: as the process knows itself.

    Returns:
        1 for the first that is alive; 2, 3, ... for others who believe to have the same rank: several
        trainings side by side, each a run of its own.
    """
    for number in range(1, _MOST):
        if _take(folder / f"rank{rank}.{number}"):
            return number
    return _MOST


def _take(path: Path) -> bool:
    try:
        held = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        if _is_held(path):
            return False
        held = os.open(path, os.O_WRONLY | os.O_TRUNC, 0o600)
    os.write(held, str(os.getpid()).encode())
    os.close(held)
    return True


def _is_held(path: Path) -> bool:
    """Whether a process that lives has a session under this claim, or has just begun to make one."""
    text = path.read_text(encoding="ascii")
    if not text.isdigit():  # being written this moment
        return True
    try:
        os.kill(int(text), 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    begins = time.time() - path.stat().st_mtime < _BEGINNING_S
    return int(text) != os.getpid() and (begins or (path.parent / f"{text}{WILL}").exists())
