"""Device time of stages: pairs of events around them, and how far the device is behind the host."""

from __future__ import annotations

import math
from _thread import get_ident
from collections import deque
from dataclasses import dataclass
from enum import IntEnum
from random import Random
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from otel_train.datamodel import DeviceTimes, Pace, system_clock
from otel_train.recording.events import (
    BEGIN,
    END,
    FAIL,
    FLAG_SHIFT,
    MARK,
    OP_MASK,
    SOURCE_MASK,
    SOURCE_SHIFT,
    SUSPEND,
    Flag,
    SourceKind,
)
from otel_train.recording.ring_buffer import PREEMPTED_NS
from otel_train.safety import Guard

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import TypeAlias

    from otel_train.datamodel import Clock, DeviceMemory
    from otel_train.instrumentation.accelerator import DeviceDriver
    from otel_train.recording.events import Instrumented
    from otel_train.recording.recorder import Recorder

    Edge: TypeAlias = Callable[[int], None]


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


Entry = tuple[int, int, list[Any], int]
"""An edge: host time, code, events, one per device, number of the step. A plain tuple: naming its fields costs 0.2 us.

With op ``MARK`` it is the first of a step that is not timed: the last of the one before, and nothing else."""

_DEEPEST = 64
"""Stages open at once that are remembered; one whose end never came must not be remembered for ever."""

# A piece of a suspended stage is no occurrence, and neither is a loader that starts.
_WHOLE = OP_MASK | Flag.START << FLAG_SHIFT


class Pairs:
    """Pairs the entries of one thread, the oldest first, and forgets those whose other half never came.

    Args:
        sources: who the codes are about.
        give_back: takes every entry whose events are free again.
        clock: monotonic nanoseconds.
    """

    def __init__(
        self, sources: Sequence[Instrumented], give_back: Callable[[Entry], None], *, clock: Clock
    ) -> None:
        self.pace = PaceReader()
        self._sources = sources
        self._give_back_now = give_back
        self._clock = clock
        self._last: Entry | None = None
        self.held: list[Entry] = []
        """The last entry read, if it is of no other use: the next one is counted from its event."""
        self._open: list[Entry] = []
        self._rows: list[tuple[int, int, int, int]] = []

    def take(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Source, host time of the begin, of the end, and device time of every pair since the last call."""
        rows, self._rows = self._rows, []
        source, begun_ns, ended_ns, device_ns = np.array(rows, dtype=np.int64).reshape(-1, 4).T
        return source, begun_ns, ended_ns, device_ns

    def read(self, entries: deque[Entry], driver: DeviceDriver, device: int) -> None:
        """Take what the device got to from the left of ``entries``; at the first other one, leave the rest.

        Args:
            entries: the training thread appends to it meanwhile.
            driver: reads their events.
            device: of which the first of their events are.
        """
        query, clock, pace = driver.query, self._clock, self.pace
        pace.look(driver, device, clock)
        for _ in range(len(entries)):  # what is recorded meanwhile is for the next call
            entry = entries[0]
            asked_ns = clock()
            if not all(query(event) for event in entry[2]):
                pace.miss(entry, asked_ns)
                return
            entries.popleft()
            pace.reach(entry, driver, clock())
            if (
                self._last is not None and entry[3] - self._last[3] > 1
            ):  # the ends are in steps that are not timed
                for lost in self._open:
                    self._give_back(lost)
                self._open.clear()
            pace.count(entry, self._kind(entry), frozenset(map(self._kind, self._open)))
            self._last, held, self.held = entry, self.held, []
            for before in held:
                self._give_back_now(before)
            op = entry[1] & OP_MASK
            if op < END:
                self._begin(entry)
            elif op < MARK:
                self._end(driver, entry)
            else:
                self._give_back(entry)

    def _give_back(self, entry: Entry) -> None:
        if entry is self._last:
            self.held.append(entry)
        else:
            self._give_back_now(entry)

    def _kind(self, entry: Entry) -> SourceKind:
        return self._sources[_source(entry)].kind

    def _begin(self, entry: Entry) -> None:
        self._open.append(entry)
        if len(self._open) > _DEEPEST:
            self._give_back(self._open.pop(0))

    def _end(self, driver: DeviceDriver, end: Entry) -> None:
        source = _source(end)
        places = [place for place, begin in enumerate(self._open) if _source(begin) == source]
        if places:
            begin = self._open[places[-1]]
            whole = begin[1] & _WHOLE == BEGIN and end[1] & OP_MASK in (END, FAIL)
            device_ns = self._device_ns(driver, begin, end) if whole else -1
            if device_ns >= 0:
                self._rows.append((source, begin[0], end[0], device_ns))
            for lost in self._open[places[-1] :]:  # an outer end also ends what an exception left open
                self._give_back(lost)
            del self._open[places[-1] :]
        self._give_back(end)

    def _device_ns(self, driver: DeviceDriver, begin: Entry, end: Entry) -> int:
        """Negative where it cannot be told: the stage ended on another stream, which was ahead."""
        elapsed = [driver.elapsed_ns(*pair) for pair in zip(begin[2], end[2], strict=False)]
        if not elapsed:
            return -1
        # A wait for data is exposed while no device works; work is over when the last one has done its part.
        return min(elapsed) if self._kind(begin) is SourceKind.DATA else max(elapsed)


def _source(entry: Entry) -> int:
    return entry[1] >> SOURCE_SHIFT & SOURCE_MASK


WORTH = 0.003
"""Share of training time that recording may take."""

FIRST_ONE_IN = 8
"""Before it is known what recording costs."""

_MOST_ONE_IN = 1000
_KNOWN_BY = 2  # steps that were timed: of some ten edges each
_LONGEST = 64  # beginnings in a step, at most: a loop may show us neither a loader nor passes
_RAN, _PASSED, _NEVER = 1, 2, 3  # what a step has come to


class Does(IntEnum):
    """What an edge does. Those up to ``PASSES`` close a stage, those above open one."""

    NOTHING = 1
    """Nothing that a device has time for."""
    CLOSES = 2
    PASSES = 3
    """It closes a backward or an update."""
    OPENS = 4
    STAGES = 5
    """It opens a stage by hand."""
    RUNS = 6
    """A forward."""
    ASKS = 7
    """A wait for data."""


ASKS, RUNS = int(Does.ASKS), int(Does.RUNS)


class Steps:
    """Steps of the thread that is timed, as it goes through them.

    A step begins where a loader is asked after work, and in a loop that asks none, at the forward after a pass.

    Attributes:
        one_in: one step in so many is timed. A fixed stride could meet the same half of a cycle each time, so it is a
            random one of so many in a row.
        sampled: whether the present one is.
        number: of the present one.
        timed: how many have been timed.
    """

    __slots__ = (
        "_begun",
        "_enough",
        "_left",
        "_random",
        "_rest",
        "_work",
        "number",
        "one_in",
        "sampled",
        "timed",
    )

    def __init__(self) -> None:
        self.one_in = FIRST_ONE_IN
        self.sampled = True
        self.number = self.timed = 1
        self._begun = self._left = self._rest = self._work = 0
        self._enough = _PASSED
        self._random = Random().random  # noqa: S311 - not the program's: it would have other weights

    def passed(self) -> None:
        """A backward or an update is over."""
        self._work = _PASSED

    def begin(self, does: int) -> bool:
        """A stage is about to begin. Whether that is the end of a step that is timed, and the next is not."""
        self._begun += 1
        ends = bool(self._work) if does == ASKS else does == RUNS and self._work >= self._enough
        last = (ends or self._begun > _LONGEST) and self._next(_NEVER if does == ASKS else _PASSED)
        if does == RUNS and not self._work:
            self._work = _RAN
        return last

    def choose(self, cost_ns: int, lasted_ns: int, steps: int) -> None:
        """Let recording cost its share.

        Args:
            cost_ns: of all steps that were timed.
            lasted_ns: that ``steps`` steps lasted.
            steps: of any kind.
        """
        if self.timed >= _KNOWN_BY and steps > 0 and lasted_ns > 0:
            share = cost_ns / self.timed * steps / lasted_ns
            self.one_in = min(_MOST_ONE_IN, max(1, math.ceil(share / WORTH)))

    def _next(self, enough: int) -> bool:
        self.number += 1
        self._begun = self._work = 0
        self._enough = enough
        was = self.sampled
        self.sampled = not self._left
        if self._left:
            self._left -= 1
        else:
            self.timed += 1
            place = int(self._random() * self.one_in)
            self._left, self._rest = self._rest + place, self.one_in - 1 - place
        return was and not self.sampled


MOST_EVENTS = 2048
"""Events per device, at most: what a device that hangs can cost in memory."""

_TIMED = frozenset(SourceKind) - {SourceKind.CHECKPOINT, SourceKind.MARK}
_LOW = (1 << FLAG_SHIFT) - 1  # the bits of a code that say who and what
_BEGUN = {
    SourceKind.DATA: Does.ASKS, SourceKind.FORWARD: Does.RUNS, SourceKind.WHOLE: Does.RUNS,
    SourceKind.STAGE: Does.STAGES,
}  # fmt: skip
_PASSES = (SourceKind.BACKWARD, SourceKind.GRAD, SourceKind.OPTIMIZER, SourceKind.WHOLE)


class _Lane(NamedTuple):
    """The events of one device.

    Attributes:
        free: the training thread takes from it, the pump gives back.
        make: makes one more, or gives None when there are enough.
        record: records one on the device's current stream.
        device: its number.
    """

    free: list[Any]
    make: Callable[[], Any]
    record: Callable[[Any], None]
    device: int


def time_devices(recorder: Recorder, driver: DeviceDriver | None, mode: str) -> DeviceTimer:
    """A timer in the place of ``recorder.edge``, to be made before any probe takes that."""
    timer = DeviceTimer(recorder, driver, mode=mode, clock=system_clock)
    recorder.edge = timer.edge
    with Guard("devices"):
        timer.look()  # most programs have put their model on a device by now
    return timer


class DeviceTimer:
    """Times what the device does for each stage of the thread that made the recorder.

    ``edge`` takes the place of ``recorder.edge``. Until ``look`` has seen that a device is in use, and in
    every other thread, it does nothing of its own. The event of an end is recorded before the edge and that
    of a begin after it, so the host times of a reading lie within its occurrence.

    A fault of the driver never reaches training: it switches the timer off, and ``look`` raises it.

    Args:
        recorder: takes the edges.
        driver: the accelerator; None where there is none.
        mode: ``events``, ``sync`` (wait for the device at every edge: exact and slow) or ``off``.
        clock: monotonic nanoseconds.
    """

    def __init__(self, recorder: Recorder, driver: DeviceDriver | None, *, mode: str, clock: Clock) -> None:
        self.edge = recorder.edge
        self.dropped = 0
        """Edges that got no event, because all were in use."""
        self.spent_ns = 0
        """Time that recording cost the training thread."""
        self.steps = Steps()
        """Those that are timed among them."""
        self._told = (0, 0)
        self._since: tuple[int, int] | None = None
        self._driver = driver
        self._mode = mode
        self._clock = clock
        self._sources = recorder.sources
        self._entries: deque[Entry] = deque()
        self._lanes: list[_Lane] = []
        self._active: list[_Lane] = []
        """The lanes, or none: what the training thread looks at."""
        self._pairs = Pairs(recorder.sources, self._give_back, clock=clock)
        self._table = bytearray(_LOW + 1)
        self._fault: Exception | None = None
        self._stopped = driver is None or mode == "off"
        if driver is not None and not self._stopped:
            make = self._recording_edge if mode == "events" else self._waiting_edge
            self.edge = make(driver, recorder.edge)
            recorder.when_silenced.append(self.stop)

    @property
    def devices(self) -> tuple[int, ...]:
        """Devices whose time is taken."""
        return tuple(lane.device for lane in self._lanes)

    def look(self) -> None:
        """See which devices are in use. Called by the pump.

        Raises:
            Exception: the fault of the driver that switched the timer off, once.
        """
        fault, self._fault = self._fault, None
        if fault is not None:
            self.stop()
            raise fault
        if self._driver is None or self._stopped:
            return
        new = [device for device in self._driver.devices() if device not in self.devices]
        if new:  # lanes are only ever added, at the end: what is open keeps its place
            self._lanes += [self._lane(self._driver, device) for device in new]
            self._active[:] = self._lanes
        self._choose()

    def memory(self) -> list[DeviceMemory]:
        """What the allocator of every device in use says; nothing where there is none."""
        return [] if self._driver is None else self._driver.memory()

    def taken(self) -> dict[str, int]:
        """Bytes of every device in use that are taken, by whomever, as its driver says."""
        return {} if self._driver is None else self._driver.taken()

    def hardware_ids(self) -> dict[str, str]:
        """Name and UUID of every device in use."""
        return {} if self._driver is None else self._driver.hardware_ids()

    def ooms(self) -> int:
        """Times that the devices in use ran out of memory."""
        return sum(device.ooms for device in self.memory())

    def stop(self) -> None:
        """Record nothing more. What is recorded can still be taken."""
        self._stopped = True
        self._active.clear()

    def take(self) -> DeviceTimes | None:
        """Every occurrence whose events the device got to since the last call; None where none are recorded.

        Events are read in order. At the first that the device has not got to, the rest is left for a later
        call. Called by the service thread.
        """
        if self._driver is None or self._mode != "events" or not self._lanes:
            return None
        until_ns = self._clock()
        if self._entries:
            try:
                with self._driver.reading(self._lanes[0].device):
                    if not self._driver.capturing():  # the user's thread asks for a summary in mid-capture
                        self._pairs.read(self._entries, self._driver, self._lanes[0].device)
            except Exception:
                self.stop()
                self._entries.clear()
                raise
        if self._entries:
            until_ns = self._entries[0][0]
        told, self._told = self._told, (self.steps.number, self.steps.timed)
        pace = Pace(seen=self._told[0] - told[0], sampled=self._told[1] - told[1])
        return DeviceTimes(*self._pairs.take(), until_ns, self._pairs.pace.take().plus(pace))

    def _choose(self) -> None:
        if self._lanes:
            now_ns, number = self._clock(), self.steps.number
            self._since = began_ns, before = self._since or (now_ns, number)
            self.steps.choose(self.spent_ns, now_ns - began_ns, number - before)

    def _give_back(self, entry: Entry) -> None:
        for lane, event in zip(self._lanes, entry[2], strict=False):
            lane.free.append(event)

    def _lane(self, driver: DeviceDriver, device: int) -> _Lane:
        left = MOST_EVENTS

        def make() -> Any:
            nonlocal left
            if not left:
                return None
            left -= 1
            return driver.new_event(device)

        return _Lane(driver.spare(device), make, driver.recorder(device), device)

    def _recording_edge(self, driver: DeviceDriver, ring_edge: Edge) -> Edge:
        """What runs for each edge; only the edges of steps that are timed cost more than a look at a table."""
        lanes, table, learn, record = self._active, self._table, self._learn, self._recorder_of(driver)
        owner = get_ident()
        steps, passed, begin = self.steps, self.steps.passed, self.steps.begin
        nothing, passes, opens = int(Does.NOTHING), int(Does.PASSES), int(Does.OPENS)

        def edge(code: int) -> None:
            if not lanes:
                ring_edge(code)
                return
            how = table[code & _LOW] or learn(code)
            if how == nothing or get_ident() != owner:
                ring_edge(code)
                return
            written = code
            if how >= opens:
                if how > opens and begin(how):
                    written = code & ~OP_MASK | MARK
                ring_edge(code)
                if not steps.sampled and written == code:
                    return
            else:
                if how == passes:
                    passed()
                if not steps.sampled:
                    ring_edge(code)
                    return
            record(written, steps.number - (written != code))
            if how < opens:
                ring_edge(code)

        return edge

    def _recorder_of(self, driver: DeviceDriver) -> Callable[[int, int], None]:
        """What records an event on every lane, for an edge of a step."""
        lanes, clock, append, capturing = self._active, self._clock, self._entries.append, driver.capturing

        def record_events(code: int, step: int) -> None:
            try:
                if capturing():
                    return
                host_ns = clock()
                events: list[Any] = []
                for free, make, record, _ in lanes:
                    event = free.pop() if free else make()
                    if event is None:
                        self.dropped += 1
                        self._give_back((host_ns, code, events, 0))
                        break
                    record(event)
                    events.append(event)
                else:
                    append((host_ns, code, events, step))
                took_ns = clock() - host_ns
                if took_ns < PREEMPTED_NS:
                    self.spent_ns += took_ns
            except Exception as fault:  # noqa: BLE001 - it must not reach training; look() raises it
                self._switch_off(fault)

        return record_events

    def _waiting_edge(self, driver: DeviceDriver, ring_edge: Edge) -> Edge:
        lanes, table, learn = self._active, self._table, self._learn
        owner = get_ident()

        def edge(code: int) -> None:
            if lanes and get_ident() == owner and (table[code & _LOW] or learn(code)) != Does.NOTHING:
                try:
                    if not driver.capturing():
                        for lane in lanes:
                            driver.synchronize(lane.device)
                except Exception as fault:  # noqa: BLE001 - as above; a sticky error meets the user's next call
                    self._switch_off(fault)
            ring_edge(code)

        return edge

    def _learn(self, code: int) -> int:
        op, kind = code & OP_MASK, self._sources[code >> SOURCE_SHIFT & SOURCE_MASK].kind
        if kind not in _TIMED or op > SUSPEND:
            how = Does.NOTHING
        elif op < END:
            how = _BEGUN.get(kind, Does.OPENS)
        else:
            how = Does.PASSES if kind in _PASSES else Does.CLOSES
        self._table[code & _LOW] = how
        return int(how)

    def _switch_off(self, fault: Exception) -> None:
        self._fault = fault
        self._active.clear()
