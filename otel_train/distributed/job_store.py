"""The job's own TCPStore, where ranks leave records for each other: one connection of ours, no waiting for keys."""

from __future__ import annotations

import logging
import os
import socket
import sys
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

from otel_train.errors import imported

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

log = logging.getLogger("otel_train")

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
            log.warning(
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
