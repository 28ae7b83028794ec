"""A trace with what every analysis of it needs: steps, stages, what ran on the device and who launched it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from otel_train.analyze import intervals, stages
from otel_train.analyze.calls import Calls, calls
from otel_train.analyze.trace import Kind

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from otel_train.analyze.intervals import Intervals
    from otel_train.analyze.stages import Stages, Steps
    from otel_train.analyze.trace import Trace

    Ints = NDArray[np.int64]
    Rows = NDArray[np.intp]

COMMUNICATION = re.compile(r"(?:nccl|rccl).*Kernel|ncclDevKernel")
GLOO = "gloo:"
"""Ranges of this prefix are collectives on the host, from the start on one rank until all have come."""

COPY = re.compile(r"Memcpy|Memset|dma")
"""What a kernel is by the beginning of its name. Source: ``hta/utils/utils.py`` of HolisticTraceAnalysis 0.5."""

SYNCHRONIZE = re.compile(r"(?:cuda|hip)(?:\w*Synchronize|Memcpy)\Z|cuStreamSynchronize\Z|cuCtxSynchronize\Z")
"""Calls of the runtime that return when the device is done."""


class Launches(NamedTuple):
    """Who launched what ran on the device. All columns are int64[device row] or intp[device row].

    Attributes:
        row: the row of the launch; -1 where the trace does not have it.
        start_ns: when the launch was called; -1 where not known.
        end_ns: when that call returned; -1 where not known.
    """

    row: Rows
    start_ns: Ints
    end_ns: Ints


@dataclass(frozen=True)
class Scene:
    """One trace, looked at once.

    Attributes:
        trace: what was read.
    """

    trace: Trace

    @cached_property
    def steps(self) -> Steps:
        """The steps, or the whole as one."""
        return stages.steps(self.trace)

    @cached_property
    def stages(self) -> Stages:
        """What the training thread was doing."""
        return stages.stages(self.trace)

    @cached_property
    def window(self) -> tuple[int, int]:
        """First and last instant that figures are about: those of the steps."""
        return self.steps.window

    @cached_property
    def calls(self) -> Calls:
        """Who calls whom on the host."""
        return calls(self.trace)

    @cached_property
    def device(self) -> Rows:
        """Rows of what ran on the device, in order of their start."""
        return self.trace.device_rows

    @cached_property
    def communicates(self) -> NDArray[np.bool_]:
        """bool[device row]: a collective."""
        return self._is(COMMUNICATION)

    @cached_property
    def collectives(self) -> Rows:
        """Rows of collectives, in order of their start: a device's; where it has none, those of gloo's threads."""
        rows = self.device[self.communicates]
        if rows.size:
            return rows
        gloo = np.array([name.startswith(GLOO) for name in self.trace.names], np.bool_)
        notes = self.trace.rows(Kind.NOTE)
        notes = notes[gloo[self.trace.spans.name[notes]]]
        return notes[np.argsort(self.trace.spans.start_ns[notes], kind="stable")]

    @cached_property
    def copies(self) -> NDArray[np.bool_]:
        """bool[device row]: a copy or a fill."""
        either: NDArray[np.bool_] = self._is(COPY) | (self.trace.kind[self.device] == Kind.COPY)
        return either

    @cached_property
    def busy(self) -> Intervals:
        """When anything ran on the device."""
        return self._union(np.ones(self.device.size, np.bool_))

    @cached_property
    def compute(self) -> Intervals:
        """When a kernel ran that is neither a collective nor a copy."""
        return self._union(~(self.communicates | self.copies))

    @cached_property
    def communication(self) -> Intervals:
        """When a collective ran."""
        return self._union(self.communicates)

    @cached_property
    def launches(self) -> Launches:
        """Who launched each device row."""
        spans, calls_ = self.trace.spans, self.trace.rows(Kind.RUNTIME)
        calls_ = calls_[spans.correlation[calls_] >= 0]
        order = np.argsort(spans.correlation[calls_], kind="stable")
        ids = spans.correlation[calls_][order]
        asked = spans.correlation[self.device]
        place = np.minimum(np.searchsorted(ids, asked), max(ids.size - 1, 0))
        known = (ids[place] == asked) & (asked >= 0) if ids.size else np.zeros(asked.shape, np.bool_)
        row = np.where(known, calls_[order][place], -1) if ids.size else np.full(asked.shape, -1, np.intp)
        start, end = spans.start_ns[np.maximum(row, 0)], spans.end_ns[np.maximum(row, 0)]
        return Launches(row, np.where(known, start, -1), np.where(known, end, -1))

    @cached_property
    def synchronizing(self) -> Rows:
        """Rows of calls that wait for the device, in order of their start."""
        waits = np.array([SYNCHRONIZE.match(name) is not None for name in self.trace.names], np.bool_)
        rows = self.trace.rows(Kind.RUNTIME)
        return rows[waits[self.trace.spans.name[rows]]]

    def intervals_of(self, rows: Rows) -> Intervals:
        """When any of some rows was going on."""
        return intervals.union(self.trace.spans.start_ns[rows], self.trace.spans.end_ns[rows])

    def name(self, row: int) -> str:
        """The name of an event."""
        return self.trace.names[int(self.trace.spans.name[row])]

    def step_of(self, at_ns: Ints) -> Ints:
        """The number of the step at each instant; -1 between steps."""
        place = np.searchsorted(self.steps.start_ns, at_ns, side="right") - 1
        inside = (place >= 0) & (at_ns <= self.steps.end_ns[np.maximum(place, 0)])
        return np.where(inside, self.steps.number[np.maximum(place, 0)], -1)

    def _is(self, pattern: re.Pattern[str]) -> NDArray[np.bool_]:
        named = np.array([pattern.match(name) is not None for name in self.trace.names], np.bool_)
        return named[self.trace.spans.name[self.device]] if named.size else np.zeros(0, np.bool_)

    def _union(self, chosen: NDArray[np.bool_]) -> Intervals:
        return self.intervals_of(self.device[chosen])
