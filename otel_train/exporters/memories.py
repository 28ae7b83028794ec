"""Memory of an epoch for the flat names: of datasets, of caches, and the most that was held."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from otel_train.exporters.peaks import Peak, Reading, TreeReader
from otel_train.guard import Guard

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from otel_train.clock import Clock

MEMORY_KEYS = ("memory_dataset_mb", "memory_cache_mb", "memory_peak_mb", "memory_peak_device_mb")
"""Flat names of what an epoch came to."""

LOOK_EVERY_S = 0.2
"""A buffer held for half a second is met twice. A look costs about 0.1 ms, mostly the system's."""

_ESTIMATE_EVERY_NS = 10 * 10**9
_MIB = 2**20


class Memories:
    """Looks at memory now and then, and says what an epoch came to.

    Args:
        datasets: bytes of the datasets of these loaders, estimated; None where there is none.
        caches: bytes of the caches known now, by name.
        devices: bytes taken on the devices in use, as their driver says.
        clock: monotonic nanoseconds.
        tree: reads the memory of the process and of those below it; this one's when None.
    """

    def __init__(
        self,
        *,
        datasets: Callable[[Iterable[str]], int | None],
        caches: Callable[[], Mapping[str, int]],
        devices: Callable[[], Mapping[str, int]],
        clock: Clock,
        tree: TreeReader | None = None,
    ) -> None:
        self.guard = Guard("memory")
        self._datasets = datasets
        self._caches = caches
        self._devices = devices
        self._clock = clock
        self._tree = tree or TreeReader(clock)
        self._peak, self._device_peak = Peak(), Peak()
        self._estimates: dict[tuple[str, ...], tuple[int, int]] = {}
        self._lock = threading.Lock()

    def look(self) -> float | None:
        """Read what is held now; in how many seconds again, None for not any more."""
        if self.guard.closed:
            return None
        with self.guard, self._lock:
            self._peak.add(self._tree.read())
            taken = self._devices()
            if taken:
                held = sum(taken.values())
                self._device_peak.add(Reading(self._clock(), held, held))
        return LOOK_EVERY_S

    def values(self, loaders: Iterable[str], until_ns: int) -> dict[str, float]:
        """What the epoch that ended at ``until_ns`` came to, by flat name, in MiB. The next one begins there.

        Args:
            loaders: those it trained with.
            until_ns: on the clock of the run.
        """
        if self.guard.closed:
            return {}
        with self.guard:
            with self._lock:
                peak, device_peak = self._peak.take(until_ns), self._device_peak.take(until_ns)
            caches = self._caches()
            dataset, cache = self._estimate(tuple(loaders)), sum(caches.values()) if caches else None
            sizes = zip(MEMORY_KEYS, (dataset, cache, peak, device_peak), strict=True)
            return {key: size / _MIB for key, size in sizes if size is not None}
        return {}

    def _estimate(self, loaders: tuple[str, ...]) -> int | None:
        """Bytes of the loaders' datasets; None when they have none. Epochs may be short: not anew for each."""
        now_ns = self._clock()
        at_ns, known = self._estimates.get(loaders, (0, None))
        if known is not None and now_ns - at_ns < _ESTIMATE_EVERY_NS:
            return known
        size = self._datasets(loaders)
        self._estimates = {} if size is None else {loaders: (now_ns, size)}
        return size
