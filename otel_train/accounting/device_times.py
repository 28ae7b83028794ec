"""Pairs the starts and ends of stages that a device has reached, and computes how far the device lags behind the host."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from otel_train.accounting.nesting import DEEPEST
from otel_train.datamodel import DeviceTimes, Pace
from otel_train.recording.events import (
    BEGIN,
    END,
    FAIL,
    FLAG_SHIFT,
    MARK,
    OP_MASK,
    SOURCE_MASK,
    SOURCE_SHIFT,
    Flag,
    SourceKind,
)

if TYPE_CHECKING:
    from otel_train.recording.events import Instrumented
    from otel_train.recording.shared_memory import DeviceRingReader, Record


_DRIFT = 1e-4
"""Largest drift between the clocks of host and device, as a share of the time. Crystal oscillators keep to half of it."""

_SURE_NS = 200_000
_SURE_SHARE = 0.1  # of a step: a lag that is less precise than both limits is not used
_GRAD = Flag.GRAD << FLAG_SHIFT
_COMPUTE = frozenset((SourceKind.FORWARD, SourceKind.BACKWARD, SourceKind.OPTIMIZER, SourceKind.SCALER))


@dataclass(slots=True)
class _Step:
    """A step, as far as its records have been read.

    Attributes:
        begun_ns: host time of its first event.
        trains: whether it has a forward with gradients.
        waited: whether no computing stage has ended since a wait for data: the device has no earlier work queued.
        unsure_ns: precision of its least precise lag.
        least_lag_ns, most_lag_ns, launch_idle_ns, idle_ns: as in ``Pace``.
    """

    begun_ns: int
    trains: bool = False
    waited: bool = False
    unsure_ns: float = 0.0
    least_lag_ns: int = 2**62
    most_lag_ns: int = 0
    launch_idle_ns: int = 0
    idle_ns: int = 0

    def lag(self, lag_ns: int) -> None:
        """Records the lag of one event: how long after the host the device reached it."""
        self.most_lag_ns = max(self.most_lag_ns, lag_ns)
        if not self.waited:
            self.least_lag_ns = min(self.least_lag_ns, lag_ns)

    def idle(self, most_ns: int, inside: frozenset[SourceKind]) -> None:
        """Records that the device waited for the host, at most ``most_ns``, between two events inside these kinds of stages."""
        if SourceKind.DATA not in inside:
            self.idle_ns += most_ns
            if inside & _COMPUTE:
                self.launch_idle_ns += most_ns


class PaceReader:
    """Converts the device's times to the host's clock, without making either of them wait.

    The device only gives the time between two events. The offset between the clocks is bounded from both sides: the
    device reaches no event before the host recorded it, nor before a query that found it pending, nor after the query
    that found it complete. Each record narrows the bounds, and drift of the clocks widens them. Stamps narrow them
    most, because the device reaches those at once.
    """

    def __init__(self) -> None:
        self._at_ns = 0
        """Time of the last event on the device's clock, from an arbitrary origin."""
        self._low: float = float("-inf")
        self._high: float = float("inf")
        """Bounds of the offset from the device's clock to the host's."""
        self._looked_ns = 0
        self._number = -1
        self._step: _Step | None = None
        self._reached_ns = 0
        """Time at which the device reached the last event, on the host's clock."""
        self._pace = Pace()

    def take(self) -> Pace:
        """Returns the pace since the last call."""
        pace, self._pace = self._pace, Pace()
        return pace

    def place(self, record: Record) -> None:
        """Updates the bounds of the clock offset with the next record."""
        now_ns = record.reached_ns
        drift = (now_ns - self._looked_ns) * _DRIFT if self._looked_ns else 0.0
        self._low, self._high, self._looked_ns = self._low - drift, self._high + drift, now_ns
        at_ns = self._at_ns + record.elapsed_ns[0]
        if record.devices:
            self._at_ns = at_ns
        self._bound(record.since_ns - at_ns, now_ns - at_ns)

    def count(self, record: Record, kind: SourceKind, inside: frozenset[SourceKind]) -> None:
        """Counts the event placed last, of a ``kind``; the time since the one before is ``inside`` these kinds.

        From the time at which the host has issued an event until the device reaches it, the device has work. So between
        two events it can only have been idle from when it reached the first until the host issued the second.
        """
        host_ns, code, number = record.host_ns, record.code, record.step
        step, op = self._step, code & OP_MASK
        lag_ns = max(0, round(self._at_ns + (self._low + self._high) / 2 - host_ns))
        if step is not None and number - self._number <= 1:
            step.idle(max(0, host_ns - self._reached_ns), inside)
            if kind is SourceKind.DATA and END <= op < MARK:
                step.waited = True
            elif kind in _COMPUTE and op == END:
                step.waited = False
            self._lag(step, lag_ns)
            if op == MARK or number != self._number:  # the first event of a step ends the step before
                self._close(step, host_ns)
        if op == MARK:
            step = self._step = None
        elif number != self._number:
            step = self._step = _Step(host_ns)
            self._number = number
            self._lag(step, lag_ns)
        if step is not None and kind is SourceKind.FORWARD and op == BEGIN and code & _GRAD:
            step.trains = True
        self._reached_ns = host_ns + lag_ns

    def _bound(self, low: float, high: float) -> None:
        self._low, self._high = max(self._low, low), min(self._high, high)
        if self._low > self._high:  # queries take time themselves
            self._low = self._high = (self._low + self._high) / 2

    def _lag(self, step: _Step, lag_ns: int) -> None:
        step.lag(lag_ns)
        step.unsure_ns = max(step.unsure_ns, self._high - self._low)

    def _close(self, step: _Step, now_ns: int) -> None:
        lasted_ns = now_ns - step.begun_ns
        if step.trains and step.unsure_ns <= max(_SURE_NS, _SURE_SHARE * lasted_ns):
            least_ns = min(step.least_lag_ns, step.most_lag_ns)
            self._pace = self._pace.plus(
                Pace(1, lasted_ns, least_ns, step.most_lag_ns, step.launch_idle_ns, step.idle_ns)
            )


# An interval of a suspended stage is not a call, and neither is the creation of an iterator.
_WHOLE = OP_MASK | Flag.START << FLAG_SHIFT


class _OpenStage(NamedTuple):
    """A stage that has begun and not ended.

    Attributes:
        code: code of its start event.
        host_ns: when the host recorded that event.
        at_ns: when each device reached it, on the device's clock.
    """

    code: int
    host_ns: int
    at_ns: tuple[int, ...]


class DevicePairs:
    """Pairs the starts and ends of one thread's stages as the devices reached them. Drops those without a counterpart.

    Args:
        ring: contains the records.
        sources: returns the sources that the codes refer to; called at every ``take``.
    """

    def __init__(self, ring: DeviceRingReader, sources: Callable[[], Sequence[Instrumented]]) -> None:
        self._ring = ring
        self._learn = sources
        self._sources: Sequence[Instrumented] = ()
        self._pace = PaceReader()
        self._waiting: deque[Record] = deque()
        self._open: list[_OpenStage] = []
        self._at_ns: tuple[int, ...] = ()
        self._step = 0
        self._rows: list[tuple[int, int, int, int]] = []

    @property
    def missed(self) -> int:
        """Number of records that were overwritten before they could be read."""
        return self._ring.missed

    def take(self) -> DeviceTimes | None:
        """Returns all calls whose end was reached since the last call; None while no device is timed."""
        records, until_ns = self._ring.read()
        if not until_ns and not records:
            return None
        self._waiting.extend(records)
        self._sources = self._learn()
        while self._waiting and _source(self._waiting[0].code) < len(self._sources):
            self._take_in(self._waiting.popleft())
        if self._waiting:  # names of sources are still being written
            until_ns = self._waiting[0].host_ns
        rows, self._rows = self._rows, []
        source, begun_ns, ended_ns, device_ns = np.array(rows, dtype=np.int64).reshape(-1, 4).T
        return DeviceTimes(source, begun_ns, ended_ns, device_ns, until_ns, self._pace.take())

    def _take_in(self, record: Record) -> None:
        self._pace.place(record)
        if not record.devices:
            return
        if record.step - self._step > 1:  # the open stages end in steps that are not timed
            self._open.clear()
        self._step = record.step
        kind, inside = self._kind(record.code), frozenset(self._kind(each.code) for each in self._open)
        self._pace.count(record, kind, inside)
        before = self._at_ns + (0,) * (record.devices - len(self._at_ns))
        self._at_ns = tuple(at + ns for at, ns in zip(before, record.elapsed_ns, strict=False))
        op = record.code & OP_MASK
        if op < END:
            self._open.append(_OpenStage(record.code, record.host_ns, self._at_ns))
            del self._open[:-DEEPEST]
        elif op < MARK:
            self._end(record)

    def _kind(self, code: int) -> SourceKind:
        return self._sources[_source(code)].kind

    def _end(self, end: Record) -> None:
        source = _source(end.code)
        places = [place for place, begin in enumerate(self._open) if _source(begin.code) == source]
        if not places:
            return
        begin = self._open[places[-1]]
        del self._open[places[-1] :]  # the end of an outer stage also ends those that an exception left open
        if begin.code & _WHOLE == BEGIN and end.code & OP_MASK in (END, FAIL):
            elapsed = [at - since for since, at in zip(begin.at_ns, self._at_ns, strict=False)]
            # Waiting for data is exposed only while all devices are idle; work is done when the last device is.
            device_ns = min(elapsed) if self._kind(begin.code) is SourceKind.DATA else max(elapsed)
            if device_ns >= 0:  # else it ended on another stream that was ahead
                self._rows.append((source, begin.host_ns, end.host_ns, device_ns))


def _source(code: int) -> int:
    return code >> SOURCE_SHIFT & SOURCE_MASK
