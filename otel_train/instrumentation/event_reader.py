"""Reads what a device got to, into memory that the agent reads: in C while there is a driver for that, else in Python."""

from __future__ import annotations

import ctypes
import mmap
import os
import time
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from otel_train.recording.ring_buffer import EXTENSION
from otel_train.recording.shared_memory import HEAD_WORDS, MOST_DEVICES, RECORD_WORDS, DeviceRing, Record

if TYPE_CHECKING:
    from collections.abc import Sequence

    from otel_train.datamodel import Clock
    from otel_train.instrumentation.accelerator import DeviceDriver, NativeDriver

STAMP_TRIES = 20  # of a few microseconds each, to see the device get to a stamp
PASS_MS = 250
"""Time between two looks of the thread in C, where none is asked for."""

PASS_S = 0.05
"""Longest that a look which was asked for is waited for."""

STOP_S = 0.1
"""Longest that the thread in C is waited for at the end. A driver may not answer any more."""

_Entry = tuple[int, int, int, list[Any]]
"""An edge: host time, code, number of the step, events, one per device. A plain tuple: naming its fields costs 0.2 us."""


class PythonReader:
    """Reads events of a driver in the order in which they were recorded, when it is asked to."""

    def __init__(self, driver: DeviceDriver, device: int, words: memoryview, clock: Clock) -> None:
        self._driver = driver
        self._device = device
        self._ring = DeviceRing(words)
        self._clock = clock
        self._entries: deque[_Entry] = deque()
        self._last: Sequence[Any] = ()
        self._missed_ns = self._read = 0

    def push(self, host_ns: int, code: int, step: int, events: list[Any]) -> bool:
        """Queue an edge: see ``Record``. Called by the training thread. Whether there was space."""
        self._entries.append((host_ns, code, step, events))
        return True

    def read(self) -> int:
        """Look what the devices got to, and write that. How many edges they got to, in all.

        At the first edge that a device has not got to, the rest is left for a later call.

        Raises:
            Exception: a fault of the driver. Nothing more is read then.
        """
        until_ns = self._clock()
        if self._entries:
            with self._driver.reading(self._device):
                if not self._driver.capturing():  # the user's thread asks for a summary in mid-capture
                    self._read_entries()
        if self._entries:
            until_ns = self._entries[0][0]
        self._ring.complete(until_ns)
        return self._read

    def close(self) -> bool:
        """Read no more. Whether events and memory are free now."""
        self._entries.clear()
        return True

    def _read_entries(self) -> None:
        driver, clock, entries = self._driver, self._clock, self._entries
        if self._last:
            self._read_stamp()
        for _ in range(len(entries)):  # what is recorded meanwhile is for the next call
            host_ns, code, step, events = entries[0]
            asked_ns = clock()
            if not all(driver.query(event) for event in events):
                self._missed_ns = asked_ns
                return
            entries.popleft()
            elapsed_ns = [driver.elapsed_ns(*pair) for pair in zip(self._last, events, strict=False)]
            # Of a stream that came into use since the last reading, time begins here.
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


# Words of the state that the thread in C and we have in common: ``Events`` in ``_device_events.c``.
_READ, _FAULT, _STOPPING, _ENDED, _WANTED, _PASSES = 1, 2, 3, 4, 5, 6
_SETTINGS: Final = 8
_ENTRY_WORDS = 4 + MOST_DEVICES
QUEUED = 4096
"""Edges that can wait to be read: more than there are events of a device."""

_STATE_WORDS = 20 + (1 + QUEUED) * _ENTRY_WORDS


class NativeReader:
    """Reads as ``PythonReader`` in a thread of C that never takes the interpreter lock, also while training hangs with it.

    Args:
        driver: functions of the driver, and how to find what they take.

    Raises:
        RuntimeError: no thread can be started.
        OSError: no descriptor is left.
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
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._memory))  # the thread writes to it, also at the end
        try:
            EXTENSION.start_events(self._address)
        except RuntimeError:
            self._let_go()
            raise

    def push(self, host_ns: int, code: int, step: int, events: list[Any]) -> bool:
        """See ``PythonReader``."""
        added: bool = self._add(self._address, host_ns, code, step, tuple(map(self._handle, events)))
        return added

    def read(self) -> int:
        """See ``PythonReader``."""
        words = self._words
        words[_WANTED] += 1
        self._wait_for(_PASSES, words[_WANTED], PASS_S)
        if words[_FAULT]:
            raise RuntimeError(f"the driver of the device answered {words[_FAULT]} when an event was read")
        return words[_READ]

    def close(self) -> bool:
        """See ``PythonReader``. A thread that hangs in the driver keeps its memory; a forked child has none."""
        if os.getpid() != self._pid or not self._memory:
            return False
        self._words[_STOPPING] = 1
        ended = self._wait_for(_ENDED, 1, STOP_S)
        if ended:
            self._let_go()
        return ended

    def _wait_for(self, place: int, least: int, timeout_s: float) -> bool:
        with suppress(OSError):
            os.eventfd_write(self._wakes, 1)
        until_s = time.monotonic() + timeout_s
        while self._words[place] < least and time.monotonic() < until_s:
            time.sleep(0.0002)
        return self._words[place] >= least

    def _let_go(self) -> None:
        ctypes.pythonapi.Py_DecRef(ctypes.py_object(self._memory))
        self._memory = ()  # type: ignore[assignment]  # nothing is left of it
        os.close(self._wakes)


EventReader: TypeAlias = "PythonReader | NativeReader"


def reader_of(driver: DeviceDriver, device: int, words: memoryview, clock: Clock) -> EventReader:
    """What reads events whose first is of ``device``: in C where the extension and the driver can."""
    native = driver.native(device) if hasattr(EXTENSION, "start_events") else None
    if native is not None:
        with suppress(RuntimeError, OSError):
            return NativeReader(native, words)
    return PythonReader(driver, device, words, clock)
