"""Iterables that are not a DataLoader, wrapped: their ``next`` is timed."""

from __future__ import annotations

from _thread import get_ident
from typing import TYPE_CHECKING, Any

from otel_train.instrumentation.dataloader import ASK, OWNER, PROBE, START_BITS, end_pass

if TYPE_CHECKING:
    from collections.abc import Iterator

    from otel_train.instrumentation.dataloader import LoaderProbe


class Watched:
    """An iterable whose ``next`` is timed. Everything else is the iterable's own.

    Args:
        iterable: what the loop wanted to iterate.
        probe: how it is recorded.
    """

    def __init__(self, iterable: Any, probe: LoaderProbe) -> None:
        self._iterable = iterable
        self._probe = probe
        self._given = self._ask = 0

    def __iter__(self) -> Iterator[Any]:
        probe = self._probe
        ask = probe.next_pass()
        probe.edge(ask | START_BITS)
        try:
            return _WatchedIterator(iter(self._iterable), self._iterable, probe, ask)
        finally:
            probe.edge(probe.started)

    def __next__(self) -> Any:
        if not self._given:
            self._ask = self._probe.next_pass()
        try:
            batch = _asked(self._iterable, self._iterable, self._probe, self._ask, given=self._given)
        except StopIteration:
            self._given = 0  # it may begin again
            raise
        self._given += 1
        return batch

    def __len__(self) -> int:
        return len(self._iterable)

    def __getattr__(self, name: str) -> Any:
        if name == "_iterable":  # not set yet, while unpickling
            raise AttributeError(name)
        return getattr(self._iterable, name)


class _WatchedIterator:
    def __init__(self, iterator: Iterator[Any], iterable: Any, probe: LoaderProbe, ask: int) -> None:
        self._ask = ask
        self._thread = get_ident()
        self._iterator = iterator
        self._iterable = iterable
        self._probe = probe
        self._given = 0

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        batch = _asked(self._iterator, self._iterable, self._probe, self._ask, given=self._given)
        self._given += 1
        return batch

    def __getattr__(self, name: str) -> Any:
        if name == "_iterator":
            raise AttributeError(name)
        return getattr(self._iterator, name)

    def __del__(self) -> None:
        end_pass({PROBE: self._probe, ASK: self._ask, OWNER: self._thread})


def _asked(iterator: Iterator[Any], iterable: Any, probe: LoaderProbe, ask: int, *, given: int) -> Any:
    edge = probe.edge
    edge(ask)
    try:
        batch = next(iterator)
    except StopIteration:
        edge(probe.stopped(given, _promised(iterable)))
        raise
    except BaseException as error:
        edge(probe.failed(error))
        raise
    edge(probe.payload(batch))
    return batch


def _promised(iterable: Any) -> int | None:  # Any: the user's own
    """Batches that it says it has; None where it does not."""
    try:
        return len(iterable)
    except Exception:  # noqa: BLE001  # somebody else's __len__ may raise anything
        return None
