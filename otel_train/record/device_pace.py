"""Whether the device runs behind the host or waits for it, as the events at the edges tell."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from otel_train.codes import FLAG_SHIFT, OP_MASK, Flag, Op, SourceKind
from otel_train.records import Pace

if TYPE_CHECKING:
    from otel_train.record.device_driver import DeviceDriver
    from otel_train.record.device_pairs import Entry

_DRIFT = 1e-4
"""How far two clocks may drift apart, as a share of the time between looks. Crystals keep to half of it."""

_SURE_NS = 200_000
_SURE_SHARE = 0.1  # of a step; what is known less well says nothing about launches
_GRAD = Flag.GRAD << FLAG_SHIFT
_COMPUTE = frozenset((SourceKind.FORWARD, SourceKind.BACKWARD, SourceKind.OPTIMIZER))


class PaceReader:
    """Puts the device's instants on the host's clock, without asking either to wait.

    The device tells times between events only. Where its clock stands against the host's is bounded from
    both sides: it gets to no event before the host recorded it, nor before a look that found it not there,
    nor after the look that did. The bounds close in from look to look, and open as the clocks drift.
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
        self._step_ns = 0
        self._forward_ns: int | None = None
        self._updated_ns: int | None = None
        self._pace = Pace()

    def take(self) -> Pace:
        """What was found since the last call."""
        pace, self._pace = self._pace, Pace()
        return pace

    def look(self, now_ns: int) -> None:
        """Entries are about to be read."""
        drift = (now_ns - self._looked_ns) * _DRIFT if self._looked_ns else 0.0
        self._low, self._high, self._looked_ns = self._low - drift, self._high + drift, now_ns

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
        self._low = max(self._low, since_ns - self._at_ns)
        self._high = min(self._high, now_ns - self._at_ns)
        if self._low > self._high:  # by what the looks themselves take
            self._low = self._high = (self._low + self._high) / 2

    def count(self, entry: Entry, kind: SourceKind, around: frozenset[SourceKind]) -> None:
        """Count the entry reached last, of a ``kind`` that lies inside those ``around``."""
        op = entry[1] & OP_MASK
        if kind is SourceKind.OPTIMIZER and op == Op.END:
            self._updated_ns = self._at_ns
        if op != Op.BEGIN or kind not in _COMPUTE or around & _COMPUTE:
            return
        if kind is SourceKind.FORWARD:
            if not entry[1] & _GRAD:
                self._updated_ns = self._forward_ns = None
                return
            self._open_step()
        if self._high - self._low <= max(_SURE_NS, _SURE_SHARE * self._step_ns):
            lag_ns = max(0, round(self._at_ns + (self._low + self._high) / 2 - entry[0]))
            self._pace = self._pace.plus(_begun(kind, lag_ns))

    def _open_step(self) -> None:
        if self._updated_ns is not None and self._forward_ns is not None:
            self._step_ns = self._at_ns - self._forward_ns
            gap_ns = max(0, self._at_ns - self._updated_ns)
            self._pace = self._pace.plus(Pace(gaps=1, gap_ns=gap_ns))
        self._forward_ns, self._updated_ns = self._at_ns, None


def _begun(kind: SourceKind, lag_ns: int) -> Pace:
    if kind is SourceKind.FORWARD:
        return Pace(forwards=1, forward_lag_ns=lag_ns)
    if kind is SourceKind.BACKWARD:
        return Pace(backwards=1, backward_lag_ns=lag_ns)
    return Pace(updates=1, update_lag_ns=lag_ns)
