"""A thread that leaves this rank's record in the job's store and fetches those of the others."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, NamedTuple, Protocol

from otel_train.guard import Guard
from otel_train.threads import daemon

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

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
