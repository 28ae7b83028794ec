"""The training steps that a flight file still holds, as columns."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from otel_train.accounting.types import NO_PHASE, PHASES, SourceTable
from otel_train.aggregation.postmortem import ThreadHistory, thread_history, trained
from otel_train.datamodel import NS_PER_S
from otel_train.recording.events import OP_MASK, SOURCE_MASK, SOURCE_SHIFT, Op, SourceKind
from otel_train.recording.flight_recorder import read_flight

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from otel_train.recording.events import Instrumented
    from otel_train.recording.flight_recorder import Flight

    Ints = NDArray[np.int64]

OTHER = "other"


class Called(NamedTuple):
    """One call of a stage: what it was, when it began, how long it ran."""

    stage: str
    about: str
    started_ns: int
    lasted_ns: int


class Timeline:
    """What the thread that trains did, as far as the file goes back.

    Args:
        history: of that thread.
        sources: by the numbers in the history.
        offset_ns: from the monotonic clock to Unix time.

    Attributes:
        whole: the file holds everything from the first edge.
        stages: names of the columns of ``selves_ns``.
        ended_ns: int64[step], on the monotonic clock.
        started_ns: int64[step], as above.
        duration_ns: int64[step], time that belongs to the step.
        selves_ns: int64[step, stage], self time.
        marked: the program marks its epochs.
        epoch: int64[step], number of its epoch where they are marked; else passes over the training loader that
            had ended before the step did, as far as the file goes back.
        loader: the loader whose passes are the epochs; "" for none.
        passes: those of its passes that ended on file with a step in them.
    """

    def __init__(self, history: ThreadHistory, sources: Sequence[Instrumented], offset_ns: int) -> None:
        self._history, self._sources, self._offset_ns = history, sources, offset_ns
        self.whole = history.thread.entry.written <= len(history.thread.times) + 1
        self.stages = sorted({source.stage for source in sources if source.stage} | {OTHER})
        steps, mine = history.closed.steps, trained(history.closed)
        self.started_ns, self.ended_ns = steps.started_ns[mine], steps.ended_ns[mine]
        self.duration_ns = steps.duration_ns[mine]
        self.selves_ns = self._selves(mine)
        said = history.closed.said
        begun = said[said[:, 1] == Op.EPOCH]
        self.marked = len(begun) > 0
        self.loader, self.epoch = (
            ("", self._marked(begun)) if self.marked else self._passes(steps.loader[mine])
        )
        self.passes = int(self.epoch[-1]) if len(self.epoch) else 0

    def __len__(self) -> int:
        return len(self.duration_ns)

    def unix_s(self, clock_ns: int) -> float:
        """An instant of the monotonic clock as Unix time."""
        return (clock_ns + self._offset_ns) / NS_PER_S

    def totals(self) -> list[dict[str, Any]]:
        """One row per phase, loader, model and stage, over everything on file."""
        rows: dict[tuple[str, str, str, str], dict[str, Any]] = {}
        times, calls = self._history.closed.times, self._history.closed.occurrences
        for source, loader, phase, self_ns, inclusive_ns, _ in zip(
            *(column.tolist() for column in times), strict=True
        ):
            row = self._row(rows, source, loader, phase)
            row["self_seconds"] += self_ns
            row["inclusive_seconds"] += inclusive_ns
        for source, loader, phase, failed in zip(
            calls.source.tolist(),
            calls.loader.tolist(),
            calls.phase.tolist(),
            calls.failed.tolist(),
            strict=True,
        ):
            row = self._row(rows, source, loader, phase)
            row["count"] += 1
            row["failed"] += failed
        for row in rows.values():
            row["self_seconds"] /= NS_PER_S
            row["inclusive_seconds"] /= NS_PER_S
            if row["stage"] == OTHER:
                row["count"] = row["inclusive_seconds"] = None
        return sorted(
            rows.values(), key=lambda row: (row["phase"], row["loader"], row["stage"], row["model"])
        )

    def calls(self, since_ns: int) -> list[Called]:
        """Calls that began at ``since_ns`` or later, in order."""
        calls = self._history.closed.occurrences
        found = []
        for row in np.flatnonzero(calls.started_ns >= since_ns).tolist():
            source = self._sources[int(calls.source[row])]
            found.append(
                Called(source.stage, source.name, int(calls.started_ns[row]), int(calls.inclusive_ns[row]))
            )
        return sorted(found, key=lambda call: (call.started_ns, -call.lasted_ns))

    def _row(
        self, rows: dict[tuple[str, str, str, str], dict[str, Any]], owner: int, loader: int, phase: int
    ) -> dict[str, Any]:
        source = self._sources[owner] if owner >= 0 else None
        key = (
            PHASES[phase] if 0 <= phase < NO_PHASE else "",
            self._sources[loader].name if loader >= 0 else "",
            source.name if source is not None and source.kind is SourceKind.FORWARD else "",
            source.stage if source is not None else OTHER,
        )
        if key not in rows:
            named = dict(zip(("phase", "loader", "model", "stage"), key, strict=True))
            rows[key] = {**named, "count": 0, "failed": 0, "inclusive_seconds": 0.0, "self_seconds": 0.0}
        return rows[key]

    def _selves(self, mine: NDArray[np.bool_]) -> Ints:
        """Self time by step and stage."""
        column = {name: place for place, name in enumerate(self.stages)}
        table = np.zeros((len(mine), len(self.stages)), dtype=np.int64)
        times = self._history.closed.times
        for row, owner, ns in np.transpose((times.step, times.source, times.self_ns)).tolist():
            if row >= 0:
                stage = self._sources[owner].stage if owner >= 0 else OTHER
                table[row, column[stage or OTHER]] += ns
        return table[mine]

    def _marked(self, begun: Ints) -> Ints:
        """A step that closes at a mark belongs to the epoch before it."""
        numbers = np.concatenate((np.maximum(begun[:1, 2] - 1, 0), begun[:, 2]))
        marked: Ints = numbers[np.searchsorted(begun[:, 0], self.ended_ns, side="left")]
        return marked

    def _passes(self, loaders: Ints) -> tuple[str, Ints]:
        if not len(loaders) or loaders.max() < 0:
            return "", np.zeros(len(loaders), dtype=np.int64)
        training = int(np.bincount(loaders[loaders >= 0]).argmax())
        thread = self._history.thread
        numbers = (thread.codes >> SOURCE_SHIFT) & SOURCE_MASK
        mine = (numbers == training) & ((thread.codes & OP_MASK) == int(Op.STOP))
        stops = thread.times[mine] if self._sources[training].kind is SourceKind.DATA else thread.times[:0]
        passes = np.searchsorted(stops, self.ended_ns, side="left")
        # A loader that is asked again at its end says so again: a pass without a step is none.
        _, epoch = np.unique(passes, return_inverse=True)
        return self._sources[training].name, epoch.astype(np.int64)


def timeline_of(path: Path) -> Timeline | None:
    """The timeline in a flight file; None if no thread has written anything.

    Raises:
        RunDirectoryError: the file cannot be read.
    """
    return timeline_in(read_flight(path))


def timeline_in(flight: Flight) -> Timeline | None:
    """The timeline in a flight file that has been read; None if no thread has written anything."""
    sources = flight.sources
    known = SourceTable().extend(sources)
    histories = [thread_history(thread, known) for thread in flight.threads if len(thread.times)]
    main = max(histories, key=lambda history: (history.steps, len(history.thread.times)), default=None)
    if main is None:
        return None
    return Timeline(main, sources, flight.anchor_unix_ns - flight.anchor_clock_ns)
