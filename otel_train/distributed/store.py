"""Exchange of rank reports over the job's TCPStore, on a thread of its own."""

from __future__ import annotations

import logging
import os
import socket
import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from datetime import timedelta
from typing import Any, Final, Protocol

from otel_train.errors import imported
from otel_train.fast_classes import FastNamedTuple
from otel_train.resource import find_job
from otel_train.safety import Guard, daemon_thread

MOST_HELD = 1024
"""World size up to which each rank keeps its connection open. With more, the store's host would run out of file descriptors."""


class Store(Protocol):
    """Key-value store shared by all ranks."""

    def reachable(self) -> bool:
        """Returns whether the store accepts connections."""

    def put(self, key: str, value: str) -> None:
        """Sets a key."""

    def read(self, keys: Iterable[str]) -> dict[str, str]:
        """Returns the keys that have a value, without waiting."""

    def remove(self, key: str) -> None:
        """Deletes a key."""


class ExchangeRequest(FastNamedTuple):
    """One exchange with the store: this rank's encoded report, and the ranks whose reports to read."""

    record: str
    wanted: range


class Exchange:
    """Writes and reads reports on a daemon thread, the only one that a blocked store blocks.

    Args:
        connect: returns a connection to the store; None if there is none. OSError if it does not answer: tried again next time.
        arrived: called after reports have been fetched.

    Attributes:
        guard: contains faults; after three the exchange stops.
    """

    def __init__(
        self,
        connect: Callable[[], Store | None],
        *,
        prefix: str,
        rank: int,
        world_size: int,
        arrived: Callable[[], None] = lambda: None,
    ) -> None:
        self.guard = Guard("rank report")
        self._arrived = arrived
        self._connect = connect
        self._prefix = prefix
        self._rank = rank
        self._world_size = world_size
        self._store: Store | None = None
        self._request: ExchangeRequest | None = None
        self._found: dict[int, str] | None = None
        self._wake = threading.Event()
        self._stopped = False
        self._thread = daemon_thread(self._loop, "otel-train-ranks")
        self._thread.start()

    @property
    def faults(self) -> int:
        """Faults so far."""
        return self.guard.faults

    @property
    def off(self) -> bool:
        """Whether the exchange has stopped after repeated faults."""
        return self.guard.closed

    def send(self, request: ExchangeRequest) -> None:
        """Queues a request. One that has not started yet is replaced. Does not block."""
        self._request = request
        self._wake.set()

    def take(self) -> dict[int, str] | None:
        """Returns the reports fetched since the last call, by rank; None if there are none. Does not block."""
        found, self._found = self._found, None
        return found

    def close(self, timeout_s: float) -> None:
        """Removes this rank's report from the store, within ``timeout_s``, and ends the thread."""
        self._stopped = True
        self._wake.set()
        self._thread.join(timeout_s)

    def run(self) -> None:
        """Performs the queued request. Tests call it directly."""
        request, self._request = self._request, None
        if request is None or not self._open():
            return
        assert self._store is not None
        self._store.put(self._key(self._rank), request.record)
        if request.wanted:
            by_key = {self._key(rank): rank for rank in request.wanted}
            found = self._store.read(by_key)
            self._found = {by_key[key]: text for key, text in found.items()}
            self._arrived()
        if self._world_size > MOST_HELD:
            self._store = None

    def clear(self) -> None:
        """Removes this rank's report from the store."""
        if (self._store is not None or self._world_size > MOST_HELD) and self._open():
            assert self._store is not None
            self._store.remove(self._key(self._rank))
        self._store = None

    def _open(self) -> bool:
        if self._store is None:
            with suppress(OSError):
                self._store = self._connect()
        elif not self._store.reachable():
            self._store = None  # a connection that was lost is made anew next time
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


_log = logging.getLogger("otel_train")

CONNECT_TIMEOUT_S: Final = 5.0
PEEK_TIMEOUT_S: Final = 2.0

_START: Final = "otel_train/start"

_ABSENT: Final = "\x01"
"""A value that no report has. ``compare_set`` with it returns at once; ``get`` would wait for the key."""


class JobStore:
    """A separate connection to the process group's ``TCPStore``, so that the job's own connection is never blocked.

    ``own``: ``store`` is such a connection already.

    Raises:
        OSError: the store does not answer.
        RuntimeError: torch cannot connect to it.
    """

    def __init__(
        self, store: Any, *, own: bool = False
    ) -> None:  # Any: torch's own class, which is not imported here
        self._address = (str(store.host), int(store.port))
        self._store = store if own else _own_connection(store, self._address)

    def reachable(self) -> bool:
        """Returns whether the store accepts connections. Checked by a socket, because torch prints its connection errors."""
        try:
            _peek(self._address)
        except OSError:
            return False
        return True

    def agree(self, key: str, value: str) -> str:
        """Sets a key unless it has a value, and returns its value: every caller gets the same. Does not wait."""
        held: str = self._store.compare_set(key, "", value).decode("ascii", "replace")
        return held

    def put(self, key: str, value: str) -> None:
        """Sets a key."""
        self._store.set(key, value)

    def read(self, keys: Iterable[str]) -> dict[str, str]:
        """Returns the keys that have a value; does not wait for one to appear."""
        found = {}
        for key in keys:
            value = self._store.compare_set(key, _ABSENT, _ABSENT).decode("ascii", "replace")
            if value not in ("", _ABSENT):
                found[key] = value
        return found

    def remove(self, key: str) -> None:
        """Deletes a key."""
        self._store.delete_key(key)


def connect(modules: Mapping[str, Any] = sys.modules) -> JobStore | None:
    """Returns a connection to the store of the default process group; None if that is no ``TCPStore``.

    A ``FileStore`` grows with every value set, and MPI has no store.

    Raises:
        OSError: the store does not answer.
        RuntimeError: torch cannot connect to it.
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
"""Id of the start of the job, by the address of its store: a program may end its process group and start another one."""


def start_of_job(environ: Mapping[str, str], modules: Mapping[str, Any]) -> str:
    """Returns an id shared by all ranks of this start of the job; "" if they have no common store.

    The id is kept in the store that torchrun shares with its workers and keeps across restarts, else in that of the
    process group. The first rank that needs it creates it; no rank waits for another.
    """
    address = environ.get("MASTER_ADDR", ""), environ.get("MASTER_PORT", "")
    if address not in _starts:
        try:
            # The workers of torchrun make a process group at each restart, but all restarts belong to one start of the job.
            elastic = "TORCHELASTIC_RUN_ID" in environ
            store = _of_torchrun(address, environ, modules) if elastic else connect(modules)
            _starts[address] = "" if store is None else store.agree(_START, os.urandom(8).hex())
        except (OSError, RuntimeError, ValueError) as error:
            _log.warning(
                "the job's store at %s:%s did not answer (%s): if other ranks reach it, this rank's metrics belong to a "
                "different run. Set run_id to the same on all ranks", *address, error
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
    _peek(where)
    return JobStore(_new_connection(make, where), own=True)


def _peek(address: tuple[str, int]) -> None:
    """Raises OSError if nothing accepts connections there. torch would retry for half an hour, and print errors."""
    socket.create_connection(address, PEEK_TIMEOUT_S).close()


def _own_connection(store: Any, address: tuple[str, int]) -> Any:
    _peek(address)
    if hasattr(store, "clone"):
        own = store.clone()
        own.set_timeout(timedelta(seconds=CONNECT_TIMEOUT_S))
        return own
    return _new_connection(type(store), address)  # before torch 2.6


def _new_connection(make: Any, address: tuple[str, int]) -> Any:
    return make(*address, None, False, timedelta(seconds=CONNECT_TIMEOUT_S), wait_for_workers=False)
