"""The job's own TCPStore, where ranks leave records for each other: one connection of ours, no waiting for keys."""

from __future__ import annotations

import socket
import sys
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

from otel_train.optional import imported

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

CONNECT_TIMEOUT_S: Final = 5.0
PEEK_TIMEOUT_S: Final = 2.0

_ABSENT: Final = "\x01"
"""What no record is. ``compare_set`` with it answers at once, where ``get`` waits for the key to appear."""


class JobStore:
    """A connection of our own to the store of the process group: the job's own is never held.

    Args:
        store: of the job, a ``TCPStore``.

    Raises:
        RuntimeError: the store cannot be reached.
    """

    def __init__(self, store: Any) -> None:  # Any: torch's own class, which must not be imported here
        self._address = (str(store.host), int(store.port))
        self._store = _own_connection(store, self._address)

    def reachable(self) -> bool:
        """Whether somebody listens. Asking torch would print its fault, and a job ends in any order."""
        try:
            socket.create_connection(self._address, PEEK_TIMEOUT_S).close()
        except OSError:
            return False
        return True

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


def _own_connection(store: Any, address: tuple[str, int]) -> Any:
    timeout = timedelta(seconds=CONNECT_TIMEOUT_S)
    if hasattr(store, "clone"):
        own = store.clone()
        own.set_timeout(timeout)
        return own
    return type(store)(*address, None, False, timeout, wait_for_workers=False)  # before torch 2.6
