"""Events of begins and ends brought together: how long the device took from one to the other."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from otel_train.instrumentation.device_pace import PaceReader
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
    from collections import deque
    from collections.abc import Callable, Sequence

    from otel_train.clock import Clock
    from otel_train.instrumentation.accelerator import DeviceDriver
    from otel_train.recording.events import Instrumented

Entry = tuple[int, int, list[Any], int]
"""An edge: host time, code, events, one per device, number of the step. A plain tuple: naming its fields costs 0.2 us.

With op ``MARK`` it is the first of a step that is not timed: the last of the one before, and nothing else."""

_DEEPEST = 64
"""Stages open at once that are remembered; one whose end never came must not be remembered for ever."""

_BREATHE_EVERY = 32  # readings, of 2 to 3 us each
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

    def read(
        self, entries: deque[Entry], driver: DeviceDriver, device: int, breathe: Callable[[], None]
    ) -> None:
        """Take what the device got to from the left of ``entries``; at the first other one, leave the rest.

        Args:
            entries: the training thread appends to it meanwhile.
            driver: reads their events.
            device: of which the first of their events are.
            breathe: called now and then, to let the training thread have the interpreter.
        """
        query, clock, pace = driver.query, self._clock, self.pace
        pace.look(driver, device, clock)
        for number in range(len(entries)):  # what is recorded meanwhile is for the next call
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
            if number % _BREATHE_EVERY == _BREATHE_EVERY - 1:
                breathe()

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
