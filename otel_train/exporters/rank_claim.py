"""The claim of a process on the folder of a rank: a lock that it holds until it lets go or dies."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import threading
from contextlib import suppress
from typing import TYPE_CHECKING

from otel_train.children import free_in_forks
from otel_train.files import open_to_append
from otel_train.runinfo import process_mark

if TYPE_CHECKING:
    from pathlib import Path

_MOST_BYTES = 200
_CLOSED = "closed"
_TAKEN = {errno.EAGAIN, errno.EACCES, errno.EDEADLK}

_lock = free_in_forks(threading.Lock())
_held: dict[tuple[int, int], RankClaim] = {}
"""By device and inode. A POSIX lock goes when its process closes any descriptor of the file: it is opened once."""


class RankClaim:
    """A POSIX lock on a file, with the process that holds it written there for people and for the next one.

    A forked child (a DataLoader worker) does not inherit such a lock, so a worker that outlives its process holds nobody up.
    On a network file system it also holds against other hosts. The same process may take it several times.

    Attributes:
        closed_here: the last to let go wrote for the same process.
    """

    def __init__(self, descriptor: int, key: tuple[int, int], owner: str, *, closed_here: bool) -> None:
        self.closed_here = closed_here
        self._owner = owner
        self._descriptor = descriptor
        self._key = key
        self._pid = os.getpid()
        self._times = 1

    @classmethod
    def take(cls, path: Path, owner: int = 0) -> RankClaim | None:
        """The claim; None while a living process has it.

        Args:
            path: of the file with the lock; made where it is missing.
            owner: the training process that is written for; 0 for this one.

        Raises:
            OSError: it cannot be opened.
        """
        with _lock:
            ours = _ours(path)
            if ours is not None:
                ours.take_again()
                return ours
            descriptor = open_to_append(path)
            told = os.fstat(descriptor)
            said = os.pread(descriptor, _MOST_BYTES, 0).decode("ascii", "replace").strip()
            if not _locked(descriptor, said):
                os.close(descriptor)
                return None
            whose = process_mark(owner or os.getpid())
            key = told.st_dev, told.st_ino
            claim = cls(descriptor, key, whose, closed_here=said == f"{whose} {_CLOSED}")
            claim._say(process_mark(os.getpid()))
            _held[claim._key] = claim
            return claim

    def take_again(self) -> None:
        """Count one more session of this process."""
        self._times += 1
        self.closed_here = False

    def release(self) -> None:
        """Let go, once for every time it was taken. In a forked child nothing happens."""
        with _lock:
            self._times -= 1
            if self._times or self._pid != os.getpid():
                return
            _held.pop(self._key, None)
            self._say(f"{self._owner} {_CLOSED}")
            os.close(self._descriptor)

    def _say(self, text: str) -> None:
        with suppress(OSError):  # a full disk: the lock holds all the same
            os.ftruncate(self._descriptor, 0)
            os.write(self._descriptor, f"{text}\n".encode())


def _ours(path: Path) -> RankClaim | None:
    """The claim that this process holds already."""
    try:
        told = path.lstat()
    except OSError:
        return None
    claim = _held.get((told.st_dev, told.st_ino))
    return claim if claim is not None and claim._pid == os.getpid() else None  # noqa: SLF001  # of this module


def _locked(descriptor: int, said: str) -> bool:
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _TAKEN:
            return False
        # A file system without locks: whoever is written there has it as long as it lives, on this host.
        theirs, _, closed = said.partition(" ")
        pid = re.fullmatch("[^/]+/([0-9]{1,9})/[0-9]+", theirs)
        alive = pid is not None and theirs == process_mark(int(pid[1]))
        return bool(closed) or not alive or theirs == process_mark(os.getpid())
    return True
