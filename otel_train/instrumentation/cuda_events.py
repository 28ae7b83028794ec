"""Records device events at the start and end of stages in a sample of the steps, and reads them later."""

from __future__ import annotations

import ctypes
import math
import mmap
import os
import time
from _thread import get_ident
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from enum import IntEnum
from random import Random
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

from otel_train.datamodel import Clock, system_clock
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
from otel_train.recording.ring_buffer import EXTENSION
from otel_train.recording.shared_memory import HEAD_WORDS, MOST_DEVICES, RECORD_WORDS, DeviceRing, Record
from otel_train.safety import Guard

if TYPE_CHECKING:
    from otel_train.instrumentation.accelerator import DeviceDriver, NativeDriver
    from otel_train.recording.recorder import Recorder

    Edge: TypeAlias = Callable[[int], None]


WORTH = 0.003
"""Largest share of training time that recording may take."""

FIRST_ONE_IN = 8
"""One step in so many is timed until the cost of recording is known."""

_PREEMPTED_NS = 100_000  # a recording that took longer is not counted: the thread was preempted
_MOST_ONE_IN = 1000
_COST_KNOWN_AFTER = 2  # timed steps, with about ten events each
_MOST_BEGINS = 64  # a step ends after this many begins: the loop may have neither a loader nor a backward
_RAN, _PASSED, _NEVER = 1, 2, 3  # a step's progress: forward begun; backward or update ended; never reached


class EdgeAction(IntEnum):
    """What ``DeviceTimer`` does at an event code. Actions below ``OPENS`` are of ends of stages, the others of begins."""

    NOTHING = 1  # the event has no device time
    CLOSES = 2  # end of another stage
    PASSES = 3  # end of a backward or an update
    OPENS = 4  # begin of another stage
    STAGES = 5  # begin of a user-defined stage
    RUNS = 6  # begin of a forward
    ASKS = 7  # begin of a wait for data


ASKS, RUNS = int(EdgeAction.ASKS), int(EdgeAction.RUNS)


class StepSampling:
    """Selects the steps in which device events are recorded.

    A step begins at the first wait for data after a forward, backward or update; in a loop without waits for data, at the
    first forward after a backward or update.

    Attributes:
        one_in: one step in so many is timed: a random one of each such block. A fixed stride could always meet the same
            part of a cycle.
        number: steps begun.
        timed: steps begun that are timed.
        sampled: whether the running step is timed.
    """

    __slots__ = (
        "_begun", "_enough", "_left", "_random", "_rest", "_work", "number", "one_in", "sampled", "timed",
    )  # fmt: skip

    def __init__(self) -> None:
        self.one_in = FIRST_ONE_IN
        self.sampled = True
        self.number = self.timed = 1
        # Begins in this step, steps until the next timed one, steps of its block behind it, progress of this step.
        self._begun = self._left = self._rest = self._work = 0
        self._enough = _PASSED
        self._random = Random().random  # noqa: S311 - not the program's: it would have other weights

    def passed(self) -> None:
        """Records that a backward or an update has ended."""
        self._work = _PASSED

    def begin(self, does: int) -> bool:
        """Records that a stage is about to begin. Returns whether that ends a timed step before an untimed one."""
        self._begun += 1
        ends = bool(self._work) if does == ASKS else does == RUNS and self._work >= self._enough
        is_last = (ends or self._begun > _MOST_BEGINS) and self._next(_NEVER if does == ASKS else _PASSED)
        if does == RUNS and not self._work:
            self._work = _RAN
        return is_last

    def choose(self, cost_ns: int, lasted_ns: int, steps: int) -> None:
        """Sets ``one_in`` for the share ``WORTH``: all timed steps cost ``cost_ns``; ``steps`` of any kind lasted ``lasted_ns``."""
        if self.timed >= _COST_KNOWN_AFTER and steps > 0 and lasted_ns > 0:
            share = cost_ns / self.timed * steps / lasted_ns
            self.one_in = min(_MOST_ONE_IN, max(1, math.ceil(share / WORTH)))

    def _next(self, enough: int) -> bool:
        self.number += 1
        self._begun = self._work = 0
        self._enough = enough
        was_sampled = self.sampled
        self.sampled = not self._left
        if self._left:
            self._left -= 1
        else:
            self.timed += 1
            position = int(self._random() * self.one_in)  # of the timed step in the next block
            self._left, self._rest = self._rest + position, self.one_in - 1 - position
        return was_sampled and not self.sampled


MOST_EVENTS = 2048
"""Most events per device: bounds the memory if the device hangs, so that no event is free again."""

_TIMED = frozenset(SourceKind) - {SourceKind.CHECKPOINT, SourceKind.MARK}
_MASK = (1 << FLAG_SHIFT) - 1  # bits of a code that select its action: operation and source
_BEGUN = {
    SourceKind.DATA: EdgeAction.ASKS, SourceKind.FORWARD: EdgeAction.RUNS, SourceKind.WHOLE: EdgeAction.RUNS,
    SourceKind.STAGE: EdgeAction.STAGES,
}  # fmt: skip
_PASSES = (SourceKind.BACKWARD, SourceKind.GRAD, SourceKind.OPTIMIZER, SourceKind.WHOLE)


class _Lane(NamedTuple):
    """The events of one device.

    Attributes:
        free: unused events. The training thread pops them, the service thread appends them again.
        make: returns a new event, or None after ``MOST_EVENTS``.
        record: records an event on the device's current stream.
    """

    free: list[Any]
    make: Callable[[], Any]
    record: Callable[[Any], None]
    device: int


def time_devices(recorder: Recorder, driver: DeviceDriver, mode: str) -> DeviceTimer:
    """Returns a timer whose ``edge`` has replaced ``recorder.edge``. Called before any probe reads ``recorder.edge``."""
    timer = DeviceTimer(recorder, driver, mode=mode, clock=system_clock)
    recorder.edge = timer.edge
    with Guard("devices"):
        timer.poll()  # most programs have put their model on a device by now
    return timer


class DeviceTimer:
    """Measures device time of each stage of the thread that created the recorder.

    ``edge`` replaces ``recorder.edge``. Until ``poll`` has found a device in use, and on every other thread, it only
    forwards. A device event is recorded after the ring event of a begin and before that of an end, so its host time
    lies within the call that it is of.

    A driver error never reaches training: it switches the timer off, and ``poll`` raises it.

    Args:
        mode: ``events``, ``sync`` (wait for the device at every event: exact and slow) or ``off``.

    Attributes:
        dropped: begins and ends without a device event, because all were in use.
        spent_ns: time that recording took on the training thread.
        steps: which steps are timed.
        failure: the driver error that switched the timer off; "" for none.
    """

    def __init__(self, recorder: Recorder, driver: DeviceDriver, *, mode: str, clock: Clock) -> None:
        self.edge = recorder.edge
        self.dropped = self.spent_ns = 0
        self.failure = ""
        self.steps = StepSampling()
        self._reported = (0, 0)
        self._since: tuple[int, int] | None = None
        self._driver = driver
        self.memory, self.taken, self.hardware_ids = driver.memory, driver.taken, driver.hardware_ids
        self._mode = mode
        self._clock = clock
        self._sources = recorder.sources
        self._ring = recorder.device_ring
        self._reader: PythonReader | NativeReader | None = None
        # Device events that the reader has, one list per begin or end, until they can be used again.
        self._recorded: deque[list[Any]] = deque()
        self._reused = 0  # lists of events that were returned to the lanes, in all
        self._lanes: list[_Lane] = []
        self._active: list[_Lane] = []  # read by the training thread: all lanes, none after ``stop``
        self._table = bytearray(_MASK + 1)
        self._fault: Exception | None = None
        self._stopped = mode == "off" or bool(driver.why_untimed)
        if not self._stopped:
            make = self._recording_edge if mode == "events" else self._waiting_edge
            self.edge = make(recorder.edge)
            recorder.when_silenced.append(self.stop)

    @property
    def devices(self) -> tuple[int, ...]:
        """Devices that are measured."""
        return tuple(lane.device for lane in self._lanes)

    def poll(self) -> None:
        """Finds the devices in use. Called by the service thread.

        Raises:
            Exception: the driver error that switched the timer off, once.
        """
        fault, self._fault = self._fault, None
        if fault is not None:
            self.stop()
            raise fault
        if self._stopped:
            return
        new = [device for device in self._driver.devices() if device not in self.devices]
        new = new[: MOST_DEVICES - len(self._lanes)]
        if new:  # lanes are only appended, so those of recorded events keep their positions
            if self._reader is None and self._mode == "events":
                self._reader = reader_of(self._driver, new[0], self._ring, self._clock)
            self._lanes += [self._lane(device) for device in new]
            self._active[:] = self._lanes
        self._adjust_sampling()

    def ooms(self) -> int:
        """Returns how often the devices in use ran out of memory."""
        return sum(device.ooms or 0 for device in self.memory())

    def stop(self) -> None:
        """Stops recording. Recorded events can still be read."""
        self._stopped = True
        self._active.clear()

    def read(self) -> None:
        """Lets the reader query events, and reuses finished ones. Called on the service thread.

        Raises:
            Exception: a driver error, which switches the timer off.
        """
        if self._reader is None:
            return
        try:
            read = self._reader.read()
        except Exception as fault:
            self.stop()
            self.failure = _text_of(fault)
            self._reader.close()
            self._reader = None
            raise
        self._reuse(read - 1)  # not the last ones: the next elapsed times are counted from them

    def take_steps(self) -> tuple[int, int]:
        """Returns the steps since the last call, counted while a device is in use, and how many of them were timed."""
        before, self._reported = self._reported, (self.steps.number, self.steps.timed)
        return self._reported[0] - before[0], self._reported[1] - before[1]

    def close(self) -> None:
        """Stops reading, and releases the memory."""
        self.stop()
        reader, self._reader = self._reader, None
        if reader is not None and reader.close():
            self._reuse(self._reused + 1)
        self._ring = memoryview(b"")

    def _reuse(self, read: int) -> None:
        while self._reused < read and self._recorded:
            self._give_back(self._recorded.popleft())
            self._reused += 1

    def _adjust_sampling(self) -> None:
        if self._lanes:
            now_ns, number = self._clock(), self.steps.number
            self._since = began_ns, before = self._since or (now_ns, number)
            self.steps.choose(self.spent_ns, now_ns - began_ns, number - before)

    def _give_back(self, events: list[Any]) -> None:
        for lane, event in zip(self._lanes, events, strict=False):
            lane.free.append(event)

    def _lane(self, device: int) -> _Lane:
        driver, left = self._driver, MOST_EVENTS

        def make() -> Any:
            nonlocal left
            if not left:
                return None
            left -= 1
            return driver.new_event(device)

        return _Lane(driver.spare(device), make, driver.recorder(device), device)

    def _recording_edge(self, ring_edge: Edge) -> Edge:
        """Makes ``edge`` for the mode ``events``; only events of sampled steps cost more than a table lookup."""
        lanes, table, learn, record = self._active, self._table, self._learn, self._event_recorder()
        owner = get_ident()
        steps, passed, begin = self.steps, self.steps.passed, self.steps.begin
        nothing, passes, opens = int(EdgeAction.NOTHING), int(EdgeAction.PASSES), int(EdgeAction.OPENS)

        def edge(code: int) -> None:
            if not lanes:
                ring_edge(code)
                return
            action = table[code & _MASK] or learn(code)
            if action == nothing or get_ident() != owner:
                ring_edge(code)
                return
            written = code
            if action >= opens:
                if action > opens and begin(action):
                    written = code & ~OP_MASK | MARK  # the end of the timed step: this stage is not timed
                ring_edge(code)
                if not steps.sampled and written == code:
                    return
            else:
                if action == passes:
                    passed()
                if not steps.sampled:
                    ring_edge(code)
                    return
            record(written, steps.number - (written != code))
            if action < opens:
                ring_edge(code)

        return edge

    def _event_recorder(self) -> Callable[[int, int], None]:
        """Makes the function that records an event on every device."""
        lanes, clock, append = self._active, self._clock, self._recorded.append
        capturing = self._driver.capturing

        def record_events(code: int, step: int) -> None:
            reader = self._reader
            try:
                if reader is None or capturing():
                    return
                host_ns = clock()
                events: list[Any] = []
                for free, make, record, _ in lanes:
                    event = free.pop() if free else make()
                    if event is None:
                        break
                    record(event)
                    events.append(event)
                # Without events: the thread that closes the session has emptied ``lanes``.
                if events and len(events) == len(lanes) and reader.push(host_ns, code, step, events):
                    append(events)
                else:
                    self.dropped += 1
                    self._give_back(events)
                took_ns = clock() - host_ns
                if took_ns < _PREEMPTED_NS:
                    self.spent_ns += took_ns
            except Exception as fault:  # it must not reach training; poll() raises it
                self._switch_off(fault)

        return record_events

    def _waiting_edge(self, ring_edge: Edge) -> Edge:
        driver, lanes, table, learn = self._driver, self._active, self._table, self._learn
        owner = get_ident()

        def edge(code: int) -> None:
            if lanes and get_ident() == owner and (table[code & _MASK] or learn(code)) != EdgeAction.NOTHING:
                try:
                    if not driver.capturing():
                        for lane in lanes:
                            driver.synchronize(lane.device)
                except Exception as fault:  # as above; a sticky error meets the user's next call
                    self._switch_off(fault)
            ring_edge(code)

        return edge

    def _learn(self, code: int) -> int:
        """Returns the action of a code, and enters it in the table."""
        op, kind = code & OP_MASK, self._sources[code >> SOURCE_SHIFT & SOURCE_MASK].kind
        if kind not in _TIMED or op > SUSPEND:
            action = EdgeAction.NOTHING
        elif op < END:
            action = _BEGUN.get(kind, EdgeAction.OPENS)
        else:
            action = EdgeAction.PASSES if kind in _PASSES else EdgeAction.CLOSES
        self._table[code & _MASK] = action
        return int(action)

    def _switch_off(self, fault: Exception) -> None:
        self._fault, self.failure = fault, _text_of(fault)
        self._active.clear()


def _text_of(fault: Exception) -> str:
    return f"{type(fault).__name__}: {fault}"


# --- reading --------------------------------------------------------------------------------------
# A reader queries events and writes the results to memory that the agent reads: in C if the driver supports it, else in Python.

STAMP_TRIES = 20  # queries, of a few microseconds each, until the device has reached a stamp
PASS_MS = 250
"""Milliseconds between two passes of the C thread over the queued events, if none is requested."""

QUEUED_NS = 10_000_000
"""Nanoseconds after which an event that was recorded has been queued; as in ``_device_events.c``."""

PASS_S = 0.05
"""Longest wait in seconds for a requested pass."""

STOP_S = 0.1
"""Longest wait in seconds for the end of the C thread: a driver call may hang."""

_Entry = tuple[int, int, int, list[Any]]
"""Host time, code, number of the step, device events (one per device). A plain tuple: naming its fields costs 0.2 us."""


class PythonReader:
    """Queries events of a driver in the order of their recording."""

    def __init__(self, driver: DeviceDriver, device: int, words: memoryview, clock: Clock) -> None:
        self._driver = driver
        self._device = device
        self._ring = DeviceRing(words)
        self._clock = clock
        self._entries: deque[_Entry] = deque()
        self._last: Sequence[Any] = ()
        self._missed_ns = self._read = 0

    def push(self, host_ns: int, code: int, step: int, events: list[Any]) -> bool:
        """Queues the device events of a begin or end. Called by the training thread. Returns whether there was space."""
        self._entries.append((host_ns, code, step, events))
        return True

    def read(self) -> int:
        """Queries events and writes finished ones. Returns how many entries were finished in all.

        It stops at the first entry that a device has not reached; a later call goes on there.

        Raises:
            Exception: a driver error. Nothing more is read then.
        """
        until_ns = self._clock() - QUEUED_NS
        if self._entries:
            with self._driver.reading(self._device):
                if not self._driver.capturing():  # a user's thread may request a summary during a capture
                    self._read_entries()
        if self._entries:
            until_ns = self._entries[0][0]
        self._ring.complete(until_ns)
        return self._read

    def close(self) -> bool:
        """Stops reading. Returns whether events and memory are free now."""
        self._entries.clear()
        return True

    def _read_entries(self) -> None:
        driver, clock, entries = self._driver, self._clock, self._entries
        if self._last:
            self._read_stamp()
        for _ in range(len(entries)):  # not those that are recorded meanwhile
            host_ns, code, step, events = entries[0]
            queried_ns = clock()
            if not all(driver.query(event) for event in events):
                self._missed_ns = queried_ns
                return
            entries.popleft()
            elapsed_ns = [driver.elapsed_ns(*pair) for pair in zip(self._last, events, strict=False)]
            # A device that came into use since the last entry has no earlier event: its elapsed time is 0.
            elapsed_ns += [0] * (len(events) - len(elapsed_ns))
            since_ns, self._missed_ns = max(host_ns, self._missed_ns), 0
            self._last, self._read = events, self._read + 1
            self._ring.write(Record(len(events), host_ns, code, step, since_ns, clock(), tuple(elapsed_ns)))

    def _read_stamp(self) -> None:
        driver, since_ns = self._driver, self._clock()
        stamp = driver.stamp(self._device)
        for _ in range(STAMP_TRIES if stamp is not None else 0):
            if driver.query(stamp):
                elapsed_ns = driver.elapsed_ns(self._last[0], stamp)
                self._ring.write(Record(0, 0, 0, 0, since_ns, self._clock(), (elapsed_ns,)))
                return


# Positions of words in the state that is shared with the C thread: ``Events`` in ``_device_events.c``.
_READ, _FAULT, _STOPPING, _ENDED, _WANTED, _LOOKED = 1, 2, 3, 4, 5, 6
_SETTINGS: Final = 8
_ENTRY_WORDS = 4 + MOST_DEVICES
QUEUED = 4096
"""Entries that can wait to be read: more than there are events of a device."""

_STATE_WORDS = 20 + (1 + QUEUED) * _ENTRY_WORDS


class NativeReader:
    """Does the same as ``PythonReader`` on a C thread that never takes the GIL, so also while the program holds it forever.

    Raises:
        RuntimeError: no thread can be started.
        OSError: no file descriptor is left.
    """

    def __init__(self, driver: NativeDriver, words: memoryview) -> None:
        state = mmap.mmap(-1, _STATE_WORDS * 8, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._words = (ctypes.c_int64 * _STATE_WORDS).from_buffer(state)
        self._memory = self._words, ctypes.c_char.from_buffer(words)
        self._handle = driver.handle
        self._address, ring = map(ctypes.addressof, self._memory)
        self._wakes = os.eventfd(0, os.EFD_CLOEXEC)
        self._pid = os.getpid()
        self._add = EXTENSION.push_events
        records = (len(words) - HEAD_WORDS) // RECORD_WORDS
        settings = (records, self._wakes, PASS_MS, ring, *driver.words)
        for place, word in enumerate(settings, _SETTINGS):
            self._words[place] = word
        # The thread writes to this memory until it ends, also during the end of the interpreter.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._memory))
        try:
            EXTENSION.start_events(self._address)
        except RuntimeError:
            self._release()
            raise

    def push(self, host_ns: int, code: int, step: int, events: list[Any]) -> bool:
        """See ``PythonReader``."""
        added: bool = self._add(self._address, host_ns, code, step, tuple(map(self._handle, events)))
        return added

    def read(self) -> int:
        """See ``PythonReader``."""
        words = self._words
        words[_WANTED] += 1
        self._wait_for(_LOOKED, words[_WANTED], PASS_S)
        if words[_FAULT]:
            raise RuntimeError(f"the driver of the device answered {words[_FAULT]} when an event was read")
        return words[_READ]

    def close(self) -> bool:
        """See ``PythonReader``. If the thread hangs in the driver, its memory is kept. A forked child has no such thread."""
        if os.getpid() != self._pid or not self._memory:
            return False
        self._words[_STOPPING] = 1
        ended = self._wait_for(_ENDED, 1, STOP_S)
        if ended:
            self._release()
        return ended

    def _wait_for(self, place: int, least: int, timeout_s: float) -> bool:
        with suppress(OSError):
            os.eventfd_write(self._wakes, 1)
        until_s = time.monotonic() + timeout_s
        while self._words[place] < least and time.monotonic() < until_s:
            time.sleep(0.0002)
        return self._words[place] >= least

    def _release(self) -> None:
        ctypes.pythonapi.Py_DecRef(ctypes.py_object(self._memory))
        self._memory = ()  # type: ignore[assignment]  # nothing is left of it
        os.close(self._wakes)


def reader_of(
    driver: DeviceDriver, device: int, words: memoryview, clock: Clock
) -> PythonReader | NativeReader:
    """Returns the reader for events of ``device``: in C if extension and driver support it."""
    native = driver.native(device) if EXTENSION is not None else None
    if native is not None:
        with suppress(RuntimeError, OSError):
            return NativeReader(native, words)
    return PythonReader(driver, device, words, clock)
