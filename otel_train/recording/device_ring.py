"""What a device did, as the training process tells its agent: records in memory that both have.

The memory is int64 words: a head (records written in all, the instant until which it is complete, six unused), then
``RECORDS`` records of ``RECORD_WORDS``. One writer: ``DeviceRing``, or the reader of device events in ``_device_events.c``.
"""

from __future__ import annotations

from otel_train.fast_classes import FastNamedTuple

MOST_DEVICES = 16
"""Devices of one process whose time is taken, at most."""

HEAD_WORDS = 8
_FIXED_WORDS = 6
RECORD_WORDS = _FIXED_WORDS + MOST_DEVICES
RECORDS = 4096
DEVICE_RING_WORDS = HEAD_WORDS + RECORDS * RECORD_WORDS


class Record(FastNamedTuple):
    """An edge that the devices got to, or a stamp: an event that a device got to as soon as it was recorded.

    Attributes:
        devices: that the edge was recorded on; 0 for a stamp, which is of the first device.
        host_ns: when the host recorded the edge.
        code: of the edge. With op ``MARK`` it is the first of a step that is not timed: the last of the one before, and
            nothing else.
        since_ns: the first device had not got there before; on the host's clock.
        reached_ns: it had by then.
        elapsed_ns: by device, from the edge before to this one, on the device's clock; 0 for a device that the edge before
            was not recorded on.
    """

    devices: int
    host_ns: int
    code: int
    step: int
    since_ns: int
    reached_ns: int
    elapsed_ns: tuple[int, ...]


class DeviceRing:
    """Writes records. See ``_device_events.c`` for the same in C."""

    def __init__(self, words: memoryview) -> None:
        self._words = words

    def write(self, record: Record) -> None:
        """Write one record. The number of records moves last: what lies before it is whole."""
        words, written = self._words, self._words[0]
        at = HEAD_WORDS + written % RECORDS * RECORD_WORDS
        for place, word in enumerate((*record[:-1], *record.elapsed_ns), at):
            words[place] = word
        words[0] = written + 1

    def complete(self, until_ns: int) -> None:
        """Of all edges before ``until_ns``, nothing more will come."""
        self._words[1] = until_ns


class DeviceRingReader:
    """Reads records without making their writer wait.

    Attributes:
        missed: records that were overwritten before they could be read.
    """

    def __init__(self, words: memoryview) -> None:
        self.missed = 0
        self._words = words
        self._taken = 0

    def read(self) -> tuple[list[Record], int]:
        """Every record since the last call, and the instant until which they are complete; 0 while no device is timed."""
        until_ns, written = self._words[1], self._words[0]
        first = max(self._taken, written - RECORDS)
        records = [self._record(number) for number in range(first, written)]
        # The slot after the published number may be half written: it held the record one lap earlier.
        whole = max(first, min(written, self._words[0] + 1 - RECORDS))
        self.missed += whole - self._taken
        self._taken = written
        return records[whole - first :], until_ns

    def _record(self, number: int) -> Record:
        at = HEAD_WORDS + number % RECORDS * RECORD_WORDS
        devices, host_ns, code, step, since_ns, reached_ns = self._words[at : at + _FIXED_WORDS]
        elapsed_ns = self._words[at + _FIXED_WORDS : at + _FIXED_WORDS + max(1, devices)]
        return Record(devices, host_ns, code, step, since_ns, reached_ns, tuple(elapsed_ns))
