"""A thread that leaves this rank's record in the job's store and fetches those of the others."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple, Protocol

from otel_train.children import free_in_forks
from otel_train.files import open_to_append
from otel_train.guard import Guard
from otel_train.runinfo import process_mark
from otel_train.threads import daemon

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

MOST_LOST = 3
"""Times that the store may have gone before nobody looks for it any more."""

MOST_HELD = 1024
"""Ranks up to which each holds its connection; in larger worlds the store's host would run out of descriptors."""


class Store(Protocol):
    """Keys and values that all ranks see."""

    def reachable(self) -> bool:
        """Whether it is still there."""

    def put(self, key: str, value: str) -> None:
        """Set a key, over what it held."""

    def read(self, keys: Iterable[str]) -> dict[str, str]:
        """Those keys that have a value, without waiting."""

    def remove(self, key: str) -> None:
        """Take a key away."""


class ExchangeRequest(NamedTuple):
    """What one exchange is to do.

    Attributes:
        record: of this rank.
        wanted: ranks whose records to fetch.
    """

    record: str
    wanted: range


class Exchange:
    """Carries records. A store that blocks, blocks this thread and nothing else.

    Args:
        connect: a connection to the store; None where there is none to use.
        prefix: of every key.
        rank: of this process.
        world_size: of the job.

    Attributes:
        guard: contains faults; after three nothing is exchanged any more.
    """

    def __init__(
        self, connect: Callable[[], Store | None], *, prefix: str, rank: int, world_size: int
    ) -> None:
        self.guard = Guard("rank digest")
        self._connect = connect
        self._prefix = prefix
        self._rank = rank
        self._world_size = world_size
        self._store: Store | None = None
        self._lost = 0
        self._errand: ExchangeRequest | None = None
        self._found: dict[int, str] | None = None
        self._wake = threading.Event()
        self._stopped = False
        self._thread = daemon(self._loop, "otel-train-ranks")
        self._thread.start()

    @property
    def off(self) -> bool:
        """Whether it has been given up."""
        return self.guard.closed or self._lost >= MOST_LOST

    def send(self, errand: ExchangeRequest) -> None:
        """Do this next; what has not been done yet is forgotten. Never waits."""
        self._errand = errand
        self._wake.set()

    def take(self) -> dict[int, str] | None:
        """Records fetched since the last call, by rank; None if none were. Never waits."""
        found, self._found = self._found, None
        return found

    def close(self, timeout_s: float) -> None:
        """Take this rank's record out of the store, if that can be done in time."""
        self._stopped = True
        self._wake.set()
        self._thread.join(timeout_s)

    def run(self) -> None:
        """One exchange. Tests call it directly."""
        errand, self._errand = self._errand, None
        if errand is None or not self._open():
            return
        assert self._store is not None
        self._store.put(self._key(self._rank), errand.record)
        if errand.wanted:
            by_key = {self._key(rank): rank for rank in errand.wanted}
            found = self._store.read(by_key)
            self._found = {by_key[key]: text for key, text in found.items()}
        if self._world_size > MOST_HELD:
            self._store = None

    def clear(self) -> None:
        """Take this rank's record out of the store."""
        if self._store is None and self._world_size > MOST_HELD:
            self._store = self._connect()
        if self._store is not None and self._store.reachable():
            self._store.remove(self._key(self._rank))
        self._store = None

    def _open(self) -> bool:
        if self._store is None:
            self._store = self._connect()
        elif not self._store.reachable():
            self._store = None
            self._lost += 1
        return self._store is not None

    def _key(self, rank: int) -> str:
        return f"{self._prefix}/{rank}"

    def _loop(self) -> None:
        while True:
            self._wake.wait()
            self._wake.clear()
            if self._stopped or self.off:
                break
            with self.guard:
                self.run()
        if not self.off:
            with self.guard:
                self.clear()


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
