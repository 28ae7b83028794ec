"""The chain of work that makes a step as long as it is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from otel_train.datamodel import NS_PER_S
from otel_train.trace_analysis import intervals
from otel_train.trace_analysis.breakdown import OTHER

if TYPE_CHECKING:
    from collections.abc import Iterator

    from otel_train.trace_analysis.timeline import Scene

HOST, LAUNCH, SYNC, GAP = "host", "launch", "sync", "kernel_gap"
COMPUTE, COMMUNICATION, COPY = "compute", "communication", "copy"

_TOP = 10


class PathSegment(NamedTuple):
    """A part of the chain.

    Attributes:
        what: ``host``, ``launch`` (from the end of a launch to the start of its kernel), ``compute``,
            ``communication``, ``copy``, ``kernel_gap`` (from one kernel to the next, both launched), or ``sync``
            (from the end of the last kernel to the return of the call that waits for it).
        start_ns: first instant.
        end_ns: last instant.
        row: what ran, for work on the device; else -1.
    """

    what: str
    start_ns: int
    end_ns: int
    row: int = -1


def critical_path(scene: Scene) -> dict[str, Any] | None:
    """The critical path of the median step: shorten nothing on it, and the step stays as long as it is.

    It is walked backwards from the end of the step. The host is followed to the last call that waited for the
    device; from there the device, kernel by kernel: to what ended last before it began, or to its launch if that
    came later. What waits for what between streams is taken from the times, since traces do not say. The links
    add up to the step.
    """
    steps = scene.steps
    if not scene.trace.spans.name.size:
        return None
    length = steps.end_ns - steps.start_ns
    place = int(np.argsort(length, kind="stable")[(length.size - 1) // 2])
    start, end = int(steps.start_ns[place]), int(steps.end_ns[place])
    links = list(_Walk(scene, start).back_from(end))
    sums: dict[str, int] = {}
    for link in links:
        sums[link.what] = sums.get(link.what, 0) + link.end_ns - link.start_ns
    return {
        "step": int(steps.number[place]) if steps.counted else None,
        "seconds": (end - start) / NS_PER_S,
        "parts": {what: ns / NS_PER_S for what, ns in sorted(sums.items(), key=lambda item: -item[1]) if ns},
        "kernels": _kernels(scene, links),
        "host_stages": _host_stages(scene, links),
    }


class _Walk:
    """Follows the chain backwards within one step."""

    def __init__(self, scene: Scene, start: int) -> None:
        spans, device = scene.trace.spans, scene.device
        self._start = start
        ends = spans.end_ns[device]
        order = np.argsort(ends, kind="stable")
        self._rows, self._ends = device[order], ends[order]
        self._begins = spans.start_ns[self._rows]
        self._launched = scene.launches.end_ns[order]
        what = np.where(scene.communicates, 1, np.where(scene.copies, 2, 0))
        self._what = what[order]
        self._sync_start = spans.start_ns[scene.synchronizing]
        self._sync_end = np.maximum.accumulate(spans.end_ns[scene.synchronizing])

    def back_from(self, end: int) -> Iterator[PathSegment]:
        """Links from ``end`` to the start of the step, the last one first."""
        at, sync, kernel = end, self._sync_end.size, self._rows.size
        while at > self._start:
            sync = min(sync, int(np.searchsorted(self._sync_end, at, side="right"))) - 1
            if sync < 0 or self._sync_end[sync] <= self._start:
                yield PathSegment(HOST, self._start, at)
                return
            called, returned = int(self._sync_start[sync]), int(self._sync_end[sync])
            last = min(kernel, int(np.searchsorted(self._ends, returned, side="right"))) - 1
            if last < 0 or self._ends[last] <= max(called, self._start):
                began = max(called, self._start)
                yield PathSegment(HOST, began, at)
                at = began
                continue
            yield PathSegment(HOST, returned, at)
            yield PathSegment(SYNC, int(self._ends[last]), returned)
            for link in self._on_device(last):
                yield link
                at = link.start_ns
            kernel = last

    def _on_device(self, place: int) -> Iterator[PathSegment]:
        """Links on the device, back to a launch or to the start of the step."""
        while True:
            begun, ended = int(self._begins[place]), int(self._ends[place])
            what = (COMPUTE, COMMUNICATION, COPY)[self._what[place]]
            yield PathSegment(what, max(begun, self._start), ended, int(self._rows[place]))
            if begun <= self._start:
                return
            before = min(place, int(np.searchsorted(self._ends, begun, side="right"))) - 1
            free = int(self._ends[before]) if before >= 0 else -1
            launched = min(int(self._launched[place]), begun)
            if max(free, launched) <= self._start:
                yield PathSegment(GAP, self._start, begun)
                return
            if launched > free:
                yield PathSegment(LAUNCH, launched, begun)
                return
            yield PathSegment(GAP, free, begun)
            place = before


def _kernels(scene: Scene, links: list[PathSegment]) -> list[dict[str, Any]]:
    sums: dict[str, list[int]] = {}
    for link in links:
        if link.row >= 0:
            entry = sums.setdefault(scene.name(link.row), [0, 0])
            entry[0] += 1
            entry[1] += link.end_ns - link.start_ns
    ranked = sorted(sums.items(), key=lambda item: -item[1][1])[:_TOP]
    return [{"name": name, "count": count, "seconds": ns / NS_PER_S} for name, (count, ns) in ranked]


def _host_stages(scene: Scene, links: list[PathSegment]) -> dict[str, float]:
    """Seconds of the host's links by the stage that was open."""
    host = intervals.union(
        [link.start_ns for link in links if link.what == HOST],
        [link.end_ns for link in links if link.what == HOST],
    )
    found = {name: intervals.intersect(host, parts).total_ns for name, parts in scene.stages.own.items()}
    found[OTHER] = host.total_ns - sum(found.values())
    return {name: ns / NS_PER_S for name, ns in found.items() if ns}
