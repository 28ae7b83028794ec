"""A store in memory that can go away, fail, and block."""

from __future__ import annotations

import threading
from collections.abc import Iterable


class FakeStore:
    """What the exchange thinks is the job's."""

    def __init__(self) -> None:
        self.held: dict[str, str] = {}
        self.there = True
        self.fails = False
        self.opened = 0
        self.released = threading.Event()
        self.released.set()

    def connect(self) -> FakeStore:
        if not self.there:
            raise ConnectionRefusedError
        self.opened += 1
        return self

    def reachable(self) -> bool:
        return self.there

    def put(self, key: str, value: str) -> None:
        self.released.wait(30)
        if self.fails:
            raise RuntimeError("Connection reset by peer")
        self.held[key] = value

    def read(self, keys: Iterable[str]) -> dict[str, str]:
        return {key: self.held[key] for key in keys if key in self.held}

    def remove(self, key: str) -> None:
        self.held.pop(key, None)
