"""Device time brought together with the occurrences that it belongs to, whichever is known first."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from otel_train.accounting.types import StageCalls
    from otel_train.aggregation.counters import Totals
    from otel_train.records import DeviceTimes

MOST_HELD = 8192
"""Occurrences, and device times, held back at most while they wait for their counterpart."""

_MOST_RECENT = 1024  # of the last turn or two: spans of kept steps ask for them


class _Calls(NamedTuple):
    """Settled occurrences without device time yet."""

    source: np.ndarray
    started_ns: np.ndarray
    ended_ns: np.ndarray
    series: np.ndarray


class _Times(NamedTuple):
    """Device times without an occurrence yet."""

    source: np.ndarray
    begun_ns: np.ndarray
    ended_ns: np.ndarray
    device_ns: np.ndarray


class DeviceAccount:
    """Gives every occurrence the device time that was taken inside it.

    An occurrence gets at most one device time and a device time goes to at most one occurrence, whatever the
    order in which they come. One without a counterpart is left out: not measured is not zero.

    Args:
        totals: takes the device time of every occurrence that has one.
    """

    def __init__(self, totals: Totals) -> None:
        self.measured = False
        """Whether device time is taken at all."""
        self._totals = totals
        self._calls = _Calls(*_empty(4))
        self._times = _Times(*_empty(4))
        self._recent = _Times(*_empty(4))
        self._until_ns = 0

    def tell(self, times: DeviceTimes | None) -> None:
        """Take what a device did; None where nothing is measured."""
        if times is None:
            return
        self.measured = True
        self._totals.pace = self._totals.pace.plus(times.pace)
        self._until_ns = max(self._until_ns, times.until_ns)
        self._times = _Times(*_joined(self._times, _Times(*times[:4])))
        self._match()

    def settle(self, ended: StageCalls, until_ns: int) -> None:
        """Take occurrences of the thread whose device time is taken.

        Args:
            ended: the occurrences.
            until_ns: of all that ended before, nothing more will come.
        """
        if not self.measured:
            return
        series = self._totals.names.series(ended.source, ended.loader, ended.phase)
        new = _Calls(ended.source, ended.started_ns, ended.started_ns + ended.inclusive_ns, series)
        self._calls = _Calls(*_joined(self._calls, new))
        self._match()
        self._times = _Times(*_kept(self._times, self._times.ended_ns >= until_ns))

    def of(self, source: int, started_ns: int) -> int | None:
        """Device time of an occurrence settled lately, in nanoseconds; None when it is not known (yet)."""
        found = (self._recent.source == source) & (self._recent.begun_ns == started_ns)
        places = np.flatnonzero(found)
        return int(self._recent.device_ns[places[-1]]) if len(places) else None

    def _match(self) -> None:
        calls, times = self._calls, self._times
        taken, given = np.zeros(len(calls.source), dtype=bool), np.zeros(len(times.source), dtype=bool)
        for source in set(times.source.tolist()).intersection(calls.source.tolist()):
            self._match_source(source, taken, given)
        self._calls = _Calls(*_kept(calls, ~taken & (calls.ended_ns >= self._until_ns)))
        self._times = _Times(*_kept(times, ~given))

    def _match_source(self, source: int, taken: np.ndarray, given: np.ndarray) -> None:
        calls, times = self._calls, self._times
        mine = np.flatnonzero(calls.source == source)
        mine = mine[np.argsort(calls.started_ns[mine], kind="stable")]
        told = np.flatnonzero(times.source == source)
        told = told[np.argsort(times.begun_ns[told], kind="stable")]
        place = np.searchsorted(calls.started_ns[mine], times.begun_ns[told], side="right") - 1
        inside = (place >= 0) & (times.ended_ns[told] <= calls.ended_ns[mine[place]])
        told, place = told[inside], place[inside]
        given[told] = True
        # Of several inside one occurrence (a model that calls itself) the first is the occurrence's own.
        first = np.flatnonzero(np.diff(place, prepend=-1))
        told, whose = told[first], mine[place[first]]
        if not len(told):
            return
        taken[whose] = True
        self._totals.add_device(calls.series[whose], times.device_ns[told])
        pairs = _Times(
            calls.source[whose], calls.started_ns[whose], calls.ended_ns[whose], times.device_ns[told]
        )
        self._recent = _Times(*(column[-_MOST_RECENT:] for column in _joined(self._recent, pairs)))


def _empty(columns: int) -> list[np.ndarray]:
    return [np.zeros(0, dtype=np.int64) for _ in range(columns)]


def _joined(held: tuple[np.ndarray, ...], new: tuple[np.ndarray, ...]) -> list[np.ndarray]:
    return [np.concatenate(pair)[-MOST_HELD:] for pair in zip(held, new, strict=True)]


def _kept(columns: tuple[np.ndarray, ...], keep: np.ndarray) -> list[np.ndarray]:
    return [column[keep] for column in columns]
