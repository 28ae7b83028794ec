"""Everything the page knows of one rank of a run, read anew each time it is asked."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from otel_train.artifacts.run_reader import FLIGHT, SUMMARY
from otel_train.files import Documents, mark_of, rank_folders
from otel_train.ui.history import History
from otel_train.ui.live_progress import LiveProgress, Pulses
from otel_train.ui.liveness import Liveness, beat_of, liveness
from otel_train.ui.notices import Notice, events_of, notices
from otel_train.ui.run_list import ABOUT, summary_of, whole

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

_HISTORIES = 32


@dataclass(frozen=True, kw_only=True)
class RankView:
    """One rank of a run.

    Attributes:
        run: the run directory.
        rank: which rank; None for a run that no rank has a folder of.
        ranks: all that have a folder.
        about: ``run.json``; empty if it cannot be read.
        summary: of the rank; empty if it cannot be read.
        written_unix_s: when the summary was written.
        state: whether the rank goes on.
        pulse: the end of its flight file.
        series: of its lines of metrics; empty if there are none.
        histograms: of its last line of metrics.
        events: the last ones.
        notices: what a reader must know.
        others: the summary of every rank that has one.
    """

    run: Path
    rank: int | None
    ranks: Sequence[int]
    about: Mapping[str, Any]
    summary: Mapping[str, Any]
    written_unix_s: float | None
    state: Liveness
    pulse: LiveProgress
    series: Mapping[str, Any]
    histograms: Sequence[Mapping[str, Any]]
    events: Sequence[Mapping[str, Any]]
    notices: Sequence[Notice]
    others: Mapping[int, Mapping[str, Any]]

    @property
    def steps(self) -> int | None:
        """Training steps: as written at its end; while there is none, as the flight file has them."""
        written = self.summary.get("steps")
        counted = whole(written.get("train")) if isinstance(written, dict) else None
        ended = self.state.quiet_s is None and counted is not None
        return counted if ended or self.pulse.steps is None else self.pulse.steps


class Viewer:
    """Reads ranks, and keeps what it has read of files that have not changed.

    Args:
        documents: JSON files that have been read.
        now: Unix seconds.
    """

    def __init__(self, *, documents: Documents, now: Callable[[], float] = time.time) -> None:
        self._documents = documents
        self._now = now
        self._pulses = Pulses()
        self._histories: dict[Path, History] = {}

    def view(self, run: Path, rank: int | None) -> RankView:
        """What is known now.

        Args:
            run: the run directory.
            rank: which rank; the first that has a folder if None, or if this one has none.
        """
        folders = rank_folders(run)
        shown = rank if rank in folders else next(iter(folders), None)
        folder = folders[shown] if shown is not None else run / "rank0"
        notes: list[str] = []
        about = self._documents.get_or_empty(run / ABOUT, notes)
        summary = summary_of(self._documents, folder, notes)
        mark = mark_of(folder / SUMMARY)
        written_s = mark.changed_ns / 1e9 if mark else None
        state = liveness(summary, about, beat_of(folder / FLIGHT), written_s=written_s, now_s=self._now())
        pulse = self._pulses.get(folder, summary, still=not state.live)
        if pulse.problem and mark_of(folder / FLIGHT):
            notes.append(pulse.problem)
        series, histograms = self._history(folder).turn()
        events = events_of(folder)
        return RankView(
            run=run,
            rank=shown,
            ranks=list(folders),
            about=about,
            summary=summary,
            written_unix_s=written_s,
            state=state,
            pulse=pulse,
            series=series,
            histograms=histograms,
            events=events,
            notices=notices(state, summary, events, notes),
            others={
                number: found
                for number, other in folders.items()
                if (found := summary_of(self._documents, other, []))
            },
        )

    def _history(self, folder: Path) -> History:
        history = self._histories.pop(folder, None) or History(folder)
        while len(self._histories) >= _HISTORIES:
            self._histories.pop(next(iter(self._histories)))
        self._histories[folder] = history
        return history
