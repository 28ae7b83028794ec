"""Whether the device runs behind the host or waits for it, as the events at the edges tell."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from otel_train.recording.events import BEGIN, END, FLAG_SHIFT, MARK, OP_MASK, Flag, SourceKind
from otel_train.records import Pace

if TYPE_CHECKING:
    from otel_train.clock import Clock
    from otel_train.instrumentation.accelerator import DeviceDriver
    from otel_train.instrumentation.device_pairs import Entry

_DRIFT = 1e-4
"""How far two clocks may drift apart, as a share of the time between looks. Crystals keep to half of it."""

_SURE_NS = 200_000
_SURE_SHARE = 0.1  # of a step; what is known less well says nothing about launches
_TRIES = 20  # of a few microseconds each, to see the device get to a stamp
_GRAD = Flag.GRAD << FLAG_SHIFT
_COMPUTE = frozenset((SourceKind.FORWARD, SourceKind.BACKWARD, SourceKind.OPTIMIZER, SourceKind.SCALER))


@dataclass(slots=True)
class _Step:
    """A step as far as it has been read.

    Attributes:
        begun_ns: host time of its first edge.
        trains: it has a forward with gradients.
        waited: its last edges follow a wait for data: work that is launched since has none behind it.
        unsure_ns: how well the worst known of its lags is known.
        pace: of its edges.
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
        """The device got to an edge so long after the host."""
        self.most_lag_ns = max(self.most_lag_ns, lag_ns)
        if not self.waited:
            self.least_lag_ns = min(self.least_lag_ns, lag_ns)

    def idle(self, most_ns: int, inside: frozenset[SourceKind]) -> None:
        """Between two edges that lie ``inside`` these, the device waited for the host, at most so long."""
        if SourceKind.DATA not in inside:
            self.idle_ns += most_ns
            if inside & _COMPUTE:
                self.launch_idle_ns += most_ns


class PaceReader:
    """Puts the device's instants on the host's clock, without asking either to wait.

    The device tells times between events only. Where its clock stands against the host's is bounded from
    both sides: it gets to no event before the host recorded it, nor before a look that found it not there,
    nor after the look that did. The bounds close in from look to look, and open as the clocks drift. Each look
    also stamps a stream of its own, which the device gets to at once.
    """

    def __init__(self) -> None:
        self._last: Any = None
        self._at_ns = 0
        """Where the last event is on the device's clock, from an origin of our own."""
        self._low: float = float("-inf")
        self._high: float = float("inf")
        """Bounds of what takes the device's instants to the host's."""
        self._looked_ns = 0
        self._missed: tuple[int, int] | None = None
        self._number = -1
        self._step: _Step | None = None
        self._reached_ns = 0
        """When the device got to the last edge, on the host's clock."""
        self._pace = Pace()

    def take(self) -> Pace:
        """What was found since the last call."""
        pace, self._pace = self._pace, Pace()
        return pace

    def look(self, driver: DeviceDriver, device: int, clock: Clock) -> None:
        """Entries are about to be read; the first of their events are of ``device``."""
        now_ns = clock()
        drift = (now_ns - self._looked_ns) * _DRIFT if self._looked_ns else 0.0
        self._low, self._high, self._looked_ns = self._low - drift, self._high + drift, now_ns
        if self._last is None:
            return
        stamp = driver.stamp(device)
        for _ in range(_TRIES if stamp is not None else 0):
            if driver.query(stamp):
                at_ns = self._at_ns + driver.elapsed_ns(self._last, stamp)
                self._bound(now_ns - at_ns, clock() - at_ns)
                return

    def miss(self, entry: Entry, now_ns: int) -> None:
        """The device had not got to ``entry`` at ``now_ns``."""
        self._missed = (entry[0], now_ns)

    def reach(self, entry: Entry, driver: DeviceDriver, now_ns: int) -> None:
        """The device got to ``entry``, the next in order, by ``now_ns``."""
        if self._last is not None:
            self._at_ns += driver.elapsed_ns(self._last, entry[2][0])
        self._last = entry[2][0]
        since_ns = entry[0]
        if self._missed is not None and self._missed[0] == entry[0]:
            since_ns = max(since_ns, self._missed[1])
        self._bound(since_ns - self._at_ns, now_ns - self._at_ns)

    def count(self, entry: Entry, kind: SourceKind, inside: frozenset[SourceKind]) -> None:
        """Count the entry reached last, of a ``kind``; what lies between it and the one before is ``inside`` these.

        Once the host has issued an edge, the device has work until it gets there. So between two edges it can have
        stood idle only from when it got to the first until the host issued the second.
        """
        host_ns, code, _, number = entry
        step, op = self._step, code & OP_MASK
        lag_ns = max(0, round(self._at_ns + (self._low + self._high) / 2 - host_ns))
        if step is not None and number - self._number <= 1:
            step.idle(max(0, host_ns - self._reached_ns), inside)
            if kind is SourceKind.DATA and END <= op < MARK:
                step.waited = True
            elif kind in _COMPUTE and op == END:
                step.waited = False
            self._lag(step, lag_ns)
            if op == MARK or number != self._number:  # the first edge of a step is the last of the one before
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
        if self._low > self._high:  # by what the looks themselves take
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
