"""Device time of stages: events at their edges, read later by the pump, never waited for."""

from __future__ import annotations

from _thread import get_ident
from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple

from otel_train.clock import system_clock
from otel_train.guard import Guard
from otel_train.instrumentation.device_pairs import Pairs
from otel_train.instrumentation.device_steps import Does, Steps
from otel_train.recording.events import (
    END,
    FLAG_SHIFT,
    MARK,
    OP_MASK,
    SOURCE_MASK,
    SOURCE_SHIFT,
    SUSPEND,
    SourceKind,
)
from otel_train.recording.ring_buffer import PREEMPTED_NS
from otel_train.records import DeviceTimes, Pace

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import TypeAlias

    from otel_train.clock import Clock
    from otel_train.instrumentation.accelerator import DeviceDriver
    from otel_train.instrumentation.device_pairs import Entry
    from otel_train.recording.recorder import Recorder
    from otel_train.records import DeviceMemory

    Edge: TypeAlias = Callable[[int], None]

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

    def take(self, breathe: Callable[[], None] = lambda: None) -> DeviceTimes | None:
        """Every occurrence whose events the device got to since the last call; None where none are recorded.

        Events are read in order. At the first that the device has not got to, the rest is left for a later
        call. Called by the pump.

        Args:
            breathe: called between readings, to let the training thread have the interpreter.
        """
        if self._driver is None or self._mode != "events" or not self._lanes:
            return None
        until_ns = self._clock()
        if self._entries:
            try:
                with self._driver.reading(self._lanes[0].device):
                    if not self._driver.capturing():  # the user's thread asks for a summary in mid-capture
                        self._pairs.read(self._entries, self._driver, self._lanes[0].device, breathe)
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
