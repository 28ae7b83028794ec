"""What a run is doing now, from its flight file: the last steps, and the stages that are open."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from otel_train.aggregation.postmortem import told_by
from otel_train.artifacts.run_reader import FLIGHT
from otel_train.artifacts.timeline import timeline_in
from otel_train.errors import RunDirectoryError
from otel_train.exporters.series import in_order
from otel_train.files import mark_of
from otel_train.recording.flight_recorder import read_flight
from otel_train.ui.liveness import beat_of

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from otel_train.artifacts.timeline import Timeline
    from otel_train.files import Mark
    from otel_train.recording.flight_recorder import Flight, ThreadEdges
    from otel_train.ui.liveness import Heartbeat

STEPS_SHOWN = 200
_NOW_STEPS = 50
"""Steps that say how fast the run is now."""

_MOST_EDGES = 1 << 18
"""Edges of a thread that are worked out: a tenth of a second, once a second."""

_MOST_BYTES = 128 << 20
"""A larger flight file is not followed: reading it twice a second would cost the training its caches."""

_NS = 1e9
_BROKEN = (RunDirectoryError, LookupError, ValueError, TypeError, AttributeError, ArithmeticError)


@dataclass(frozen=True, kw_only=True)
class LiveProgress:
    """The end of a flight file.

    Attributes:
        beat: of the pump.
        steps: training steps so far; None if nobody knows.
        exact: all of them are on file, so ``steps`` is no estimate.
        open: stages that are open, the outermost first, as ``postmortem`` tells them.
        times_s: when the last steps ended, in seconds after the first of them.
        stages_s: self time of each stage in those steps, seconds.
        step_s: duration of those steps, seconds.
        last_edge_unix_s: when the last edge was written.
        problem: why there is nothing; "" if there is.
    """

    beat: Heartbeat | None = None
    steps: int | None = None
    exact: bool = False
    open: list[dict[str, Any]] = field(default_factory=list)
    times_s: list[float] = field(default_factory=list)
    stages_s: dict[str, list[float]] = field(default_factory=dict)
    step_s: list[float] = field(default_factory=list)
    last_edge_unix_s: float | None = None
    problem: str = ""

    @property
    def now_step_s(self) -> float | None:
        """Mean duration of the last steps, seconds."""
        last = self.step_s[-_NOW_STEPS:]
        return sum(last) / len(last) if last else None

    def now_share(self, stage: str) -> float | None:
        """A stage's share of the last steps; None where no step has that stage."""
        last, whole_s = self.stages_s.get(stage, [])[-_NOW_STEPS:], sum(self.step_s[-_NOW_STEPS:])
        return sum(last) / whole_s if whole_s and last else None


class Pulses:
    """The pulse of each rank looked at; that of a file nobody writes any more is worked out once."""

    def __init__(self, most: int = 64) -> None:
        self._most = most
        self._kept: dict[Path, tuple[tuple[Mark, Heartbeat | None, float | None], LiveProgress]] = {}

    def get(self, folder: Path, summary: Mapping[str, Any], *, still: bool) -> LiveProgress:
        """The pulse of a rank.

        Args:
            folder: of the rank.
            summary: what it wrote last; empty if nothing.
            still: nobody writes the file any more.
        """
        path = folder / FLIGHT
        mark = mark_of(path)
        if mark is None:
            return LiveProgress(problem="there is no flight file")
        written_s = summary.get("wall_seconds")
        version = (mark, beat_of(path), written_s if isinstance(written_s, float) else None)
        kept = self._kept.get(path)
        if still and kept is not None and kept[0] == version:
            return kept[1]
        pulse = pulse_of(path, mark, summary)
        while len(self._kept) >= self._most:
            self._kept.pop(next(iter(self._kept)))
        self._kept[path] = (version, pulse)
        return pulse


def pulse_of(path: Path, mark: Mark, summary: Mapping[str, Any]) -> LiveProgress:
    """What the end of a flight file says; a broken one says why it is."""
    if mark.size_bytes > _MOST_BYTES:
        return LiveProgress(problem=f"{path.name} has {mark.size_bytes:,} bytes: too many to follow")
    try:
        flight = read_flight(path)
        recent = flight._replace(threads=tuple(map(_end_of, flight.threads)))
        told = told_by(recent, summary)
        timeline = timeline_in(recent)
    except _BROKEN as error:
        return LiveProgress(problem=f"{path.name} cannot be read: {error}")
    beat = beat_of(path)
    if timeline is None:
        return LiveProgress(beat=beat, problem="no thread has written an edge yet")
    steps, exact = _counted(timeline, flight, recent, summary)
    shown = slice(-STEPS_SHOWN, None)
    ended = timeline.ended_ns[shown]
    selves = timeline.selves_ns[shown] / _NS
    return LiveProgress(
        beat=beat,
        steps=steps,
        exact=exact,
        open=told["open"],
        times_s=((ended - ended[0]) / _NS).tolist() if len(ended) else [],
        stages_s={
            name: selves[:, timeline.stages.index(name)].tolist()
            for name in in_order(timeline.stages)
            if selves[:, timeline.stages.index(name)].any()
        },
        step_s=(timeline.duration_ns[shown] / _NS).tolist(),
        last_edge_unix_s=told["last_edge_unix_s"],
    )


def _end_of(thread: ThreadEdges) -> ThreadEdges:
    return thread._replace(times=thread.times[-_MOST_EDGES:], codes=thread.codes[-_MOST_EDGES:])


def _counted(
    timeline: Timeline, flight: Flight, recent: Flight, summary: Mapping[str, Any]
) -> tuple[int | None, bool]:
    """Training steps so far: those on file, or those written down and what has ended since."""
    cut = any(len(a.times) != len(b.times) for a, b in zip(flight.threads, recent.threads, strict=True))
    if timeline.whole and not cut:
        return len(timeline), True
    steps, started_s, wall_s = (
        summary.get("steps"),
        summary.get("started_unix_s"),
        summary.get("wall_seconds"),
    )
    counted = steps.get("train") if isinstance(steps, dict) else None
    if (
        not isinstance(counted, int)
        or not isinstance(started_s, (int, float))
        or not isinstance(wall_s, (int, float))
    ):
        return None, False
    ended_s = (timeline.ended_ns + flight.anchor_unix_ns - flight.anchor_clock_ns) / _NS
    return counted + int(np.count_nonzero(ended_s > started_s + wall_s)), False
