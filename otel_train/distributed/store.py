"""A thread that leaves this rank's record in the job's store and fetches those of the others."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import re
import socket
import sys
import threading
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

from otel_train.errors import imported
from otel_train.files import open_to_append
from otel_train.resource import process_mark
from otel_train.safety import Guard, daemon_thread, free_in_forks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
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
        self._thread = daemon_thread(self._loop, "otel-train-ranks")
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


_log = logging.getLogger("otel_train")

CONNECT_TIMEOUT_S: Final = 5.0
PEEK_TIMEOUT_S: Final = 2.0

_START: Final = "otel_train/start"

_ABSENT: Final = "\x01"
"""What no record is. ``compare_set`` with it answers at once, where ``get`` waits for the key to appear."""


class JobStore:
    """A connection of our own to the store of the process group: the job's own is never held.

    Args:
        store: of the job, a ``TCPStore``.
        own: this is a connection of our own already.

    Raises:
        RuntimeError: the store cannot be reached.
    """

    def __init__(
        self, store: Any, *, own: bool = False
    ) -> None:  # Any: torch's own class, which is not imported here
        self._address = (str(store.host), int(store.port))
        self._store = store if own else _own_connection(store, self._address)

    def reachable(self) -> bool:
        """Whether somebody listens. Asking torch would print its fault, and a job ends in any order."""
        try:
            socket.create_connection(self._address, PEEK_TIMEOUT_S).close()
        except OSError:
            return False
        return True

    def agree(self, key: str, value: str) -> str:
        """The value of a key that every caller gets: that of whoever asked first. Waits for nobody."""
        held: str = self._store.compare_set(key, "", value).decode("ascii", "replace")
        return held

    def put(self, key: str, value: str) -> None:
        """Set a key, over what it held."""
        self._store.set(key, value)

    def read(self, keys: Iterable[str]) -> dict[str, str]:
        """Those of ``keys`` that have a value; never waits for one to appear."""
        found = {}
        for key in keys:
            value = self._store.compare_set(key, _ABSENT, _ABSENT).decode("ascii", "replace")
            if value not in ("", _ABSENT):
                found[key] = value
        return found

    def remove(self, key: str) -> None:
        """Take a key away."""
        self._store.delete_key(key)


def find_job(modules: Mapping[str, Any] = sys.modules) -> tuple[int, int] | None:
    """Rank and world size of a process group that the user has made; None if there is none of several ranks."""
    distributed = imported("torch.distributed", modules)
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return None
    ranks = distributed.get_rank(), distributed.get_world_size()
    return ranks if ranks[1] > 1 else None


def connect(modules: Mapping[str, Any] = sys.modules) -> JobStore | None:
    """A connection to the store of the default process group; None where that is no ``TCPStore``.

    A ``FileStore`` grows with every value set, and MPI has no store.

    Raises:
        RuntimeError: the store cannot be reached.
    """
    of_torch = modules.get("torch.distributed.distributed_c10d")
    find = getattr(of_torch, "_get_default_store", None)
    if find is None or find_job(modules) is None:
        return None
    store = find()
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return JobStore(store) if type(store).__name__ == "TCPStore" else None


_starts: dict[tuple[str, str], str] = {}
"""By address: a program may end its process group, and start another one, and be the same program."""


def start_of_job(environ: Mapping[str, str] = os.environ, modules: Mapping[str, Any] = sys.modules) -> str:
    """What all ranks of this start of the job have in common, and no other start; "" where they cannot meet.

    They meet in the store that torchrun shares with its workers, which outlives those that it starts again, or else in that
    of the process group. The first rank that asks makes it up; no rank waits for another.

    Args:
        environ: the process environment.
        modules: as ``sys.modules``; nothing is imported.
    """
    address = environ.get("MASTER_ADDR", ""), environ.get("MASTER_PORT", "")
    if address not in _starts:
        try:
            # torchrun's workers make a group at each of their starts, and are the same job.
            elastic = "TORCHELASTIC_RUN_ID" in environ
            store = _of_torchrun(address, environ, modules) if elastic else connect(modules)
            _starts[address] = "" if store is None else store.agree(_START, os.urandom(8).hex())
        except (OSError, RuntimeError, ValueError) as error:
            _log.warning(
                "the job's store at %s:%s did not answer (%s): should other ranks reach it, the figures of this one lie in a "
                "run of their own. Set run_id to the same on all ranks", *address, error,
            )  # fmt: skip
            return ""
    return _starts[address]


def _of_torchrun(
    address: tuple[str, str], environ: Mapping[str, str], modules: Mapping[str, Any]
) -> JobStore | None:
    make = getattr(imported("torch.distributed", modules), "TCPStore", None)
    if environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True" or make is None:
        return None
    where = address[0], int(address[1])
    socket.create_connection(where, PEEK_TIMEOUT_S).close()  # torch would try for long, and print
    return JobStore(_new_connection(make, where), own=True)


def _own_connection(store: Any, address: tuple[str, int]) -> Any:
    if hasattr(store, "clone"):
        own = store.clone()
        own.set_timeout(timedelta(seconds=CONNECT_TIMEOUT_S))
        return own
    return _new_connection(type(store), address)  # before torch 2.6


def _new_connection(make: Any, address: tuple[str, int]) -> Any:
    return make(*address, None, False, timedelta(seconds=CONNECT_TIMEOUT_S), wait_for_workers=False)
