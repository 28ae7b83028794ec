"""Events as numpy columns, with names told apart by number."""

from __future__ import annotations

from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

    from otel_train.analyze.decode import Arguments, Event

    Ints = NDArray[np.int64]
    Floats = NDArray[np.float64]
    Codes = NDArray[np.int32]

MOST_NAMES = 1_000_000
"""Different names kept; a trace has thousands. Those beyond share one."""

OTHER = "(other)"
NS_PER_US = 1000
LONGEST_US = 366 * 86400 * 1e6
"""A trace is shorter than a year: events further than that from the median one carry no instant."""

_LARGEST_CODE = 2**31 - 1
_TIMES = attrgetter("ts", "dur")
_ASSOCIATIONS = attrgetter("external", "correlation", "stream")
_DEVICE = attrgetter("device", "size", "occupancy", "warps", "group", "collective")
_ON_DEVICE: tuple[tuple[float, type[np.generic]], ...] = (
    (-1, np.int32), (-1, np.int64), (np.nan, np.float32), (np.nan, np.float32), (0, np.int32), (0, np.int32),
)  # fmt: skip
"""What stands for "not said" in each column of ``_DEVICE``, and its type. Name 0 is the empty one."""
_MEMORY = attrgetter("change", "allocated", "reserved", "device_type", "device_id")


class Names(dict[Any, int]):
    """Numbers things in the order in which they are first seen; those beyond ``MOST_NAMES`` share a number."""

    def __missing__(self, thing: Any) -> int:  # Any: what is numbered
        if len(self) >= MOST_NAMES:
            return self.setdefault(OTHER, MOST_NAMES)
        number = self[thing] = len(self)
        return number

    def codes(self, things: Iterable[Any], count: int) -> Codes:
        """The number of each of ``count`` things."""
        return np.fromiter(map(self.__getitem__, things), np.int32, count)


class Spans(NamedTuple):
    """Complete events (``ph`` X) in the order of the file.

    Attributes:
        name: int32, number of the name.
        category: int32, number of the category.
        lane: int32, number of the (pid, tid) pair.
        start_ns: int64, since the first event.
        dur_ns: int64, 0 or more.
        external: int64, the operator that something on the device belongs to; -1 where not said.
        correlation: int64, the same on a launch and on what it launched; -1 where not said.
        stream: int32; -1 on the host.
        device: int32; -1 on the host.
        size: int64, bytes a copy moved; -1 where not said.
        occupancy: float32, estimated occupancy, percent; NaN where not said.
        warps: float32, warps per multiprocessor; NaN where not said.
        group: int32, number of the process group's name; "" where not said.
        collective: int32, number of the collective's name; "" where not said.
    """

    name: Codes
    category: Codes
    lane: Codes
    start_ns: Ints
    dur_ns: Ints
    external: Ints
    correlation: Ints
    stream: Codes
    device: Codes
    size: Ints
    occupancy: NDArray[np.float32]
    warps: NDArray[np.float32]
    group: Codes
    collective: Codes

    @property
    def end_ns(self) -> Ints:
        """int64, since the first event."""
        ends: Ints = self.start_ns + self.dur_ns
        return ends

    def take(self, rows: Any) -> Spans:  # Any: whatever indexes an array
        """The same columns for some rows."""
        return Spans(*(column[rows] for column in self))


class Memory(NamedTuple):
    """What the allocators said, in the order of the file.

    Attributes:
        at_ns: int64, since the first event.
        change: int64, bytes; below zero for a release.
        allocated: int64, bytes in live tensors from then on; -1 where not said.
        reserved: int64, bytes taken from the driver; -1 where not said.
        device_type: int64; 0 is the host.
        device_id: int64; -1 on the host.
    """

    at_ns: Ints
    change: Ints
    allocated: Ints
    reserved: Ints
    device_type: Ints
    device_id: Ints


class Columns:
    """Collects events piece by piece.

    Attributes:
        names: names of events, groups and collectives.
        categories: what kind of event.
        lanes: (pid, tid) pairs.
        unpaired: events that begin (``ph`` B) and are not complete; Kineto writes none.
        untimed: complete events left out because they have no instant or length.
    """

    def __init__(self) -> None:
        self.names, self.categories, self.lanes = Names({"": 0}), Names(), Names()
        self.unpaired = 0
        self.untimed = 0
        self._spans: list[list[NDArray[Any]]] = []
        self._memory: list[NDArray[Any]] = []

    def add(self, events: Sequence[Event]) -> None:
        """The events of one piece."""
        spans = [event for event in events if event.ph == "X"]
        others = [event for event in events if event.ph != "X"]
        told = [event for event in others if event.ph == "i" and event.name == "[memory]"]
        self.unpaired += sum(event.ph == "B" for event in others)
        if told:
            figures = np.array([(event.ts, *_MEMORY(event.args)) for event in told], np.float64)
            self._memory.append(figures[np.isfinite(figures[:, 0])])
        if spans:
            self._add_spans(spans)

    def _add_spans(self, spans: list[Event]) -> None:
        count = len(spans)
        arguments = [event.args for event in spans]
        start, dur = (np.array(column, np.float64) for column in zip(*map(_TIMES, spans), strict=True))
        external, correlation, stream = zip(*map(_ASSOCIATIONS, arguments), strict=True)
        columns: list[NDArray[Any]] = [
            self.names.codes([event.name for event in spans], count),
            self.categories.codes([event.cat for event in spans], count),
            self.lanes.codes([(event.pid, event.tid) for event in spans], count),
            start,
            dur,
            np.array(external, np.int64),
            np.array(correlation, np.int64),
            _codes(stream),
            *self._of_device([args if args.stream >= 0 else None for args in arguments]),
        ]
        timed = np.isfinite(start) & np.isfinite(dur) & (dur >= 0)
        if not timed.all():
            columns = [column[timed] for column in columns]
            self.untimed += count - int(timed.sum())
        self._spans.append(columns)

    def _of_device(self, arguments: list[Arguments | None]) -> list[NDArray[Any]]:
        """Columns that only what ran on a device fills: asking every event for them would take half of the time."""
        rows = [row for row, args in enumerate(arguments) if args is not None]
        columns: list[NDArray[Any]] = [np.full(len(arguments), nothing, kind) for nothing, kind in _ON_DEVICE]
        if rows:
            told = zip(*(_DEVICE(args) for args in arguments if args is not None), strict=True)
            for column, values in zip(columns, told, strict=True):
                if isinstance(values[0], str):
                    column[rows] = self.names.codes(values, len(rows))
                else:
                    column[rows] = (
                        _codes(values) if column.dtype == np.int32 else np.array(values, column.dtype)
                    )
        return columns

    def spans(self) -> tuple[Spans, Memory, float]:
        """Everything, and the instant of the first event in microseconds of the trace's clock. To be called once."""
        parts, self._spans = self._spans, []
        columns: list[NDArray[Any]] = []
        for number, kind in enumerate(_TYPES):
            columns.append(np.concatenate([part[number] for part in parts]) if parts else np.zeros(0, kind))
            for part in parts:
                part[number] = _EMPTY  # what is joined is let go: the peak is one column more than the result
        memory = np.concatenate(self._memory) if self._memory else np.zeros((0, 6))
        columns, first_us = self._dated(columns)
        at_ns = np.clip(np.rint((memory[:, 0] - first_us) * NS_PER_US), -(2.0**62), 2.0**62).astype(np.int64)
        figures = [np.clip(memory[:, index], -(2.0**62), 2.0**62).astype(np.int64) for index in range(1, 6)]
        return Spans(*columns), Memory(at_ns, *figures), first_us

    def _dated(self, columns: list[NDArray[Any]]) -> tuple[list[NDArray[Any]], float]:
        start, dur = columns[3], columns[4]
        if not start.size:
            return [*columns[:3], start.astype(np.int64), dur.astype(np.int64), *columns[5:]], 0.0
        near = (np.abs(start - np.median(start)) < LONGEST_US) & (dur < LONGEST_US)
        if not near.all():
            self.untimed += int((~near).sum())
            columns = [column[near] for column in columns]
            start, dur = columns[3], columns[4]
        first_us = float(start.min()) if start.size else 0.0
        columns[3] = np.rint((start - first_us) * NS_PER_US).astype(np.int64)
        columns[4] = np.rint(dur * NS_PER_US).astype(np.int64)
        return columns, first_us


_EMPTY: NDArray[Any] = np.zeros(0)
_TYPES: tuple[type[np.generic], ...] = (
    np.int32, np.int32, np.int32, np.float64, np.float64, np.int64, np.int64, np.int32, np.int32, np.int64,
    np.float32, np.float32, np.int32, np.int32,
)  # fmt: skip
"""Of the columns of ``Spans``, while times are still microseconds."""


def _codes(values: Sequence[int]) -> Codes:
    """Small numbers; what is no such number counts as not said."""
    wide = np.array(values, np.int64)
    return np.where(np.abs(wide) > _LARGEST_CODE, -1, wide).astype(np.int32)
