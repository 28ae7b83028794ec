"""How large the program's own caches are, asked of whoever keeps them."""

from __future__ import annotations

from operator import index
from typing import TYPE_CHECKING, NamedTuple

from otel_train.errors import callable_, text
from otel_train.safety import Guard, Handle

if TYPE_CHECKING:
    from collections.abc import Callable


class _Cache(NamedTuple):
    size: Callable[[], int]
    guard: Guard


class CacheSizes:
    """Callables that say how many bytes a cache holds, by name. Any thread adds, one thread reads."""

    def __init__(self) -> None:
        self._caches: dict[str, _Cache] = {}
        self._faults_before = 0

    def add(self, name: str, size: Callable[[], int]) -> Handle:
        """Ask ``size`` from now on; in the place of one of the same name, if there is one.

        Raises:
            ConfigError: it cannot be called, or has no name.
        """
        text("cache({}, ...)", name, "Say what the cache is called")
        remedy = "Write size=lambda: number_of_bytes"
        callable_("cache(..., size={})", size, "a callable that returns bytes", remedy)
        self._forget(name)
        mine = self._caches[name] = _Cache(size, Guard(f"size of cache {name!r}"))
        return Handle(lambda: self._forget(name) if self._caches.get(name) is mine else None)

    def read(self) -> dict[str, int]:
        """Bytes by name. One that fails is absent, and after three faults not asked any more."""
        found = {}
        for name, cache in list(self._caches.items()):
            if not cache.guard.closed:
                with cache.guard:
                    found[name] = _bytes(cache.size())
        return found

    @property
    def faults(self) -> int:
        """Times that one failed."""
        return self._faults_before + sum(cache.guard.faults for cache in list(self._caches.values()))

    def _forget(self, name: str) -> None:
        gone = self._caches.pop(name, None)
        self._faults_before += gone.guard.faults if gone else 0


def _bytes(said: object) -> int:
    """What was said, if it is a number of bytes.

    Raises:
        ValueError: it is none.
    """
    try:
        size = index(said)  # type: ignore[arg-type]  # that it may be something else is the point
    except TypeError:
        size = -1
    if size < 0:
        raise ValueError(f"said {said!r}: expected a whole number of bytes")
    return size
