"""Views of the current state of runs and ranks, read from their files."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from otel_train.datamodel import FLIGHT_FILE, NS_PER_S, RUN_FILE, SUMMARY_FILE
from otel_train.errors import RunDirectoryError
from otel_train.files import JsonFileCache, Mark, folders_in, mark_of, rank_folders
from otel_train.recording.flight_recorder import Heartbeat, heartbeat_of, read_flight
from otel_train.rundata.alerts import Notice, events_of, notices
from otel_train.rundata.files import (
    FOREIGN,
    has_postmortem,
    is_run,
    known_summary,
    mapping,
    number,
    rows,
    summary_of,
    text,
    whole,
)
from otel_train.rundata.flight import FlightHistory, Timeline
from otel_train.rundata.liveness import Liveness, liveness, state_of_run, written_until
from otel_train.rundata.metrics_history import MetricsHistory, in_order
from otel_train.rundata.run import record_cache, records_below
from otel_train.rundata.schemas import message_of, wrong_values

if TYPE_CHECKING:
    from pathlib import Path


STEPS_SHOWN = 200
_NOW_STEPS = 50  # last steps over which the current speed is averaged

_LATE_STEPS, _LEAST_LATE_S = 5, 3.0
"""Times the median step, and least seconds, after which a step counts as late: the file is written once a second."""

_MOST_EDGES = 1 << 14
"""Last events of a thread that are accounted for at each read: a tenth of a second of computing, once a second."""

_MOST_BYTES = 128 << 20
"""Largest flight file that is read repeatedly: a larger one, read twice a second, would evict the training's data from caches."""


@dataclass(frozen=True, kw_only=True)
class LiveProgress:
    """Progress from the end of a flight file.

    Attributes:
        steps: training steps so far; None if unknown.
        exact: whether ``steps`` is exact rather than an estimate.
        open: open stages, outermost first, as in ``read_postmortem``.
        spans_s: begin and end of the last steps, in seconds after the first of them began.
        stages_s: self time of each stage in each of those steps.
        step_s: durations of those steps.
        quiet_s: seconds from the last event to the last poll of the agent.
        since_step_s: seconds from the end of the last step to that poll.
        problem: why there is no progress; "" if there is.
    """

    steps: int | None = None
    exact: bool = False
    open: list[dict[str, Any]] = field(default_factory=list)
    spans_s: list[tuple[float, float]] = field(default_factory=list)
    stages_s: dict[str, list[float]] = field(default_factory=dict)
    step_s: list[float] = field(default_factory=list)
    last_edge_unix_s: float | None = None
    quiet_s: float = 0.0
    since_step_s: float = 0.0
    problem: str = ""

    @property
    def now_step_s(self) -> float | None:
        """Mean duration of the last steps, seconds."""
        last = self.step_s[-_NOW_STEPS:]
        return sum(last) / len(last) if last else None

    @property
    def without_step_s(self) -> float | None:
        """Seconds since the last step ended, if that is longer than several steps take; else None."""
        if not self.step_s:
            return None
        last = sorted(self.step_s[-_NOW_STEPS:])
        usual_s = _LATE_STEPS * last[len(last) // 2]
        return self.since_step_s if self.since_step_s > max(_LEAST_LATE_S, usual_s) else None

    @property
    def now_data_share(self) -> float | None:
        """Share of the last steps that was spent waiting for data; None if no step has waited."""
        waits_s, whole_s = self.stages_s.get("data", [])[-_NOW_STEPS:], sum(self.step_s[-_NOW_STEPS:])
        return sum(waits_s) / whole_s if whole_s and waits_s else None


def progress_of(path: Path, mark: Mark, summary: Mapping[str, Any]) -> LiveProgress:
    """Reads progress from the end of a flight file; if it is unreadable, only ``problem`` is set."""
    if mark.size_bytes > _MOST_BYTES:
        return LiveProgress(problem=f"{path.name} has {mark.size_bytes:,} bytes: too many to follow")
    try:
        flight = read_flight(path)
        history = FlightHistory(flight, _MOST_EDGES)
        postmortem, timeline = history.postmortem(summary), history.timeline
    except (RunDirectoryError, *FOREIGN) as error:
        return LiveProgress(problem=f"{path.name} cannot be read: {error}")
    if timeline is None:
        return LiveProgress(problem="no thread has written an event yet")
    steps, exact = _steps_so_far(timeline, summary)
    shown = slice(-STEPS_SHOWN, None)
    ended, own = timeline.ended_ns[shown], timeline.duration_ns[shown]
    begun = ended - own
    first = begun[0] if len(begun) else 0
    selves_s = dict(zip(timeline.stages, (timeline.selves_ns[shown] / NS_PER_S).T.tolist(), strict=True))
    return LiveProgress(
        steps=steps,
        exact=exact,
        open=postmortem["open"],
        spans_s=list(zip(*(((each - first) / NS_PER_S).tolist() for each in (begun, ended)), strict=True)),
        stages_s={name: selves_s[name] for name in in_order(selves_s) if any(selves_s[name])},
        step_s=(own / NS_PER_S).tolist(),
        last_edge_unix_s=postmortem["last_edge_unix_s"],
        quiet_s=postmortem["quiet_seconds"] or 0.0,
        since_step_s=flight.polled_unix_ns / NS_PER_S - timeline.unix_s(int(ended[-1]))
        if len(ended)
        else 0.0,
    )


def _steps_so_far(timeline: Timeline, summary: Mapping[str, Any]) -> tuple[int | None, bool]:
    """Returns the training steps so far, and whether that is exact: from the file, else the summary's and those ended since.

    If the file begins after the summary was written, the steps between them are extrapolated from the pace on file.
    """
    if timeline.first is not None:
        return timeline.first + len(timeline), True
    counted, written_s = mapping(summary.get("steps")).get("train"), written_until(summary)
    if not isinstance(counted, int) or written_s is None:
        return None, False
    ended_s = [timeline.unix_s(ended_ns) for ended_ns in timeline.ended_ns.tolist()]
    since = sum(each_s > written_s for each_s in ended_s)
    if since == len(ended_s) > 1 and ended_s[-1] > ended_s[0]:
        since = round((ended_s[-1] - written_s) * (since - 1) / (ended_s[-1] - ended_s[0]))
    return counted + since, False


_MOST_KEPT = 64
"""Most ranks whose summary, metrics history and progress are cached."""


@dataclass(frozen=True, kw_only=True)
class RankView:
    """Data of one rank, as the pages show it. Missing values are empty.

    Attributes:
        rank: number of the rank; None if the run has no rank folder.
        ranks: ranks that have a folder.
        about: content of ``run.json``.
        written_unix_s: Unix time at which the summary was written.
        series: metrics over time, as ``metrics_history.series_of`` returns them.
        histograms: histograms of the last line of metrics.
        others: summaries of all ranks that have one, this one included.
        records: metadata of the run's captures, oldest first.
    """

    run: Path
    rank: int | None
    summary: Mapping[str, Any]
    state: Liveness
    notices: Sequence[Notice]
    ranks: Sequence[int] = ()
    about: Mapping[str, Any] = field(default_factory=dict)
    written_unix_s: float | None = None
    progress: LiveProgress = LiveProgress()
    series: Mapping[str, Any] = field(default_factory=dict)
    histograms: Sequence[Mapping[str, Any]] = ()
    events: Sequence[Mapping[str, Any]] = ()
    others: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)
    records: Sequence[Mapping[str, Any]] = ()

    @classmethod
    def of_summary(cls, run: Path, summary: Mapping[str, Any]) -> RankView:
        """Builds the view from a summary alone; ``run`` is its folder."""
        state = liveness(summary, {}, None, written_s=None, now_s=0.0)
        found = notices(state, summary, (), (), others={}, postmortem=False)
        return cls(run=run, rank=whole(summary.get("rank")), summary=summary, state=state, notices=found)

    @property
    def steps(self) -> int | None:
        """Training steps: from the summary after the end of the rank, before from the flight file if it has them."""
        counted = whole(mapping(self.summary.get("steps")).get("train"))
        ended = self.state.quiet_s is None and counted is not None
        return counted if ended or self.progress.steps is None else self.progress.steps


def state_of(
    folder: Path, summary: Mapping[str, Any], about: Mapping[str, Any], now_s: float
) -> tuple[Liveness, float | None]:
    """Returns the state of a rank, and the Unix time at which its summary was written."""
    mark = mark_of(folder / SUMMARY_FILE)
    written_s = mark.changed_ns / NS_PER_S if mark else None
    if folder.name != f"rank{about.get('rank')}":
        about = {**about, "pid": None}
    return liveness(
        summary, about, heartbeat_of(folder / FLIGHT_FILE), written_s=written_s, now_s=now_s
    ), written_s


def _wrong(document: Mapping[str, Any], schema: str, path: Path) -> list[str]:
    """Returns a warning about the wrong values of a document; no warning about an empty one, which could not be read."""
    found = wrong_values(document, schema, complete=False) if document else []
    return [message_of(found, path.name)] if found else []


_ROW_KEYS = frozenset(
    (
        "schema", "run_name", "host", "world_size", "rank", "attempt", "pid", "state", "end_cause", "stall",
        "started_unix_s", "until_unix_s", "wall_seconds", "steps", "throughput", "batches", "activities", "step_durations", "telemetry",
    )
)  # fmt: skip
_MOST_ROWS = 1 << 16
"""Most ranks, of all runs, whose part of a summary is cached: some 3 kB each."""


def row_cache() -> JsonFileCache:
    """Returns a cache for the parts of summaries that tables of runs and ranks show; whole summaries take ten times the memory."""
    return JsonFileCache(_row_of, most=_MOST_ROWS)


def _row_of(document: dict[str, Any]) -> dict[str, Any]:
    summary = known_summary(document, [])
    found = {key: value for key, value in summary.items() if key in _ROW_KEYS}
    return {**found, "findings": rows(summary.get("findings"))[:1]} if found else {}


class RankReader:
    """Reads views of ranks; caches files that have not changed. Threads may read different runs at once, not the same one.

    Args:
        cached_rows: a ``row_cache`` to share; None for a new one.
        now: returns the Unix time.
    """

    def __init__(
        self, *, cached_rows: JsonFileCache | None = None, now: Callable[[], float] = time.time
    ) -> None:
        self._documents, self._rows = JsonFileCache(most=_MOST_KEPT), cached_rows or row_cache()
        self._records = record_cache()
        self._now, self._guard = now, threading.Lock()
        self._progress: dict[Path, tuple[tuple[Mark, Heartbeat | None, float | None], LiveProgress]] = {}
        self._history = lru_cache(_MOST_KEPT)(MetricsHistory)

    def view(self, run: Path, rank: int | None) -> RankView:
        """Returns the current view of a rank, or of the lowest one if ``rank`` is None or has no folder."""
        folders = rank_folders(run)
        shown = rank if rank in folders else next(iter(folders), None)
        folder = folders[shown] if shown is not None else run / "rank0"
        warnings: list[str] = []
        about = self._documents.get_or_empty(run / RUN_FILE, warnings)
        summary = summary_of(self._documents, folder, warnings)
        warnings += _wrong(about, "files/run", run / RUN_FILE) + _wrong(
            summary, "summary", folder / SUMMARY_FILE
        )
        state, written_s = state_of(folder, summary, about, self._now())
        progress = self._progress_of(folder, summary, still=not state.live)
        if progress.problem and mark_of(folder / FLIGHT_FILE):
            warnings.append(progress.problem)
        history = self._history(folder)
        series, histograms = history.read()
        warnings += [history.problem] if history.problem else []
        events = events_of(folder)
        others = {
            each: found
            for each, path in folders.items()
            if (found := summary if each == shown else self._rows.get_or_empty(path / SUMMARY_FILE, []))
        }
        return RankView(
            run=run, rank=shown, ranks=list(folders), about=about, summary=summary, written_unix_s=written_s, state=state,
            progress=progress, series=series, histograms=histograms, events=events,
            notices=notices(state, summary, events, warnings, others=others, postmortem=has_postmortem(run)),
            others=others, records=records_below(run, self._records),
        )  # fmt: skip

    def _progress_of(self, folder: Path, summary: Mapping[str, Any], *, still: bool) -> LiveProgress:
        """Returns the progress of a rank; from the cache if it has ended (``still``) and its flight file has not changed."""
        path = folder / FLIGHT_FILE
        mark = mark_of(path)
        if mark is None:
            return LiveProgress(problem="there is no flight file")
        written_s = summary.get("wall_seconds")
        version = (mark, heartbeat_of(path), written_s if isinstance(written_s, float) else None)
        with self._guard:
            known, progress = self._progress.pop(path, (None, None))
        if not still or progress is None or known != version:
            progress = progress_of(path, mark, summary)
        with self._guard:
            while len(self._progress) >= _MOST_KEPT:
                self._progress.pop(next(iter(self._progress)))
            self._progress[path] = (version, progress)
        return progress


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRow:
    """One run in the list, with the values of its lowest rank as last written. Missing values are None, 0 or "".

    Attributes:
        name: name of the folder.
        run_name: display name; that of the folder if the run has none.
        ranks: world size.
        speed: training steps per second of wall time.
        finding: name of the leading finding.
        cause: cause of the end of a rank that failed or was killed.
        state: the worst state of the ranks.
        live: whether a rank may still write data.
    """

    name: str
    run_name: str
    started_unix_s: float
    host: str
    ranks: int | None
    steps: int | None
    speed: float | None
    finding: str
    cause: str
    state: Liveness
    live: bool

    def says(self, words: str) -> bool:
        """Returns whether name, host, state, finding or cause contain every one of the words."""
        searched = f"{self.name} {self.run_name} {self.host} {self.state.word} {self.finding.replace('_', ' ')} {self.cause}".lower()
        return all(word in searched for word in words.lower().split())


class RunList:
    """The run directories below a folder. Links are skipped: their targets must not be shown.

    Of ten thousand runs few are live: the row of one that has ended is cached until run.json, the summary of a rank, or the
    flight file of the lowest rank changes.

    Args:
        only: name of the one run to show; None for all.
        cached_rows: a ``row_cache`` to share; None for a new one.
    """

    def __init__(
        self, root: Path, *, only: str | None = None, cached_rows: JsonFileCache | None = None
    ) -> None:
        self.root, self.only = root, only
        self._documents, self._rows = JsonFileCache(), cached_rows or row_cache()
        self._ended: dict[str, tuple[tuple[Mark | None, ...], RunRow]] = {}

    def rows(self) -> list[RunRow]:
        """Returns all runs, the newest first."""
        names = folders_in(self.root) if self.only is None else [self.only]
        self._ended = {name: self._ended[name] for name in names if name in self._ended}
        found = [row for name in names if (row := self._row(name)) is not None]
        return sorted(found, key=lambda row: (row.started_unix_s, row.name), reverse=True)

    def find(self, name: str) -> Path | None:
        """Returns the folder of a run in the list; None if there is none. A path, as in ``../x``, is no name in the list."""
        if self.only is not None and name != self.only:
            return None
        if name not in folders_in(self.root):
            return None
        run = self.root / name
        return run if is_run(run) else None

    def _row(self, name: str) -> RunRow | None:
        run = self.root / name
        folders = list(rank_folders(run).values()) or [run / "rank0"]
        paths = [run / RUN_FILE, folders[0] / FLIGHT_FILE, *(folder / SUMMARY_FILE for folder in folders)]
        marks = tuple(map(mark_of, paths))
        kept = self._ended.get(name)
        if kept is not None and kept[0] == marks:
            return kept[1]
        row = self._read(name, run, folders)
        if row is not None and not row.live:
            self._ended[name] = marks, row
        return row

    def _read(self, name: str, run: Path, folders: Sequence[Path]) -> RunRow | None:
        about = self._documents.get_or_empty(run / RUN_FILE, [])
        summaries = [self._rows.get_or_empty(folder / SUMMARY_FILE, []) for folder in folders]
        summary, states = summaries[0], _states(folders, summaries, about)
        state = state_of_run(states)
        if not about and not summary and not is_run(run):
            return None
        known = {**about, **summary}
        leading = next(iter(rows(summary.get("findings"))), {})
        return RunRow(
            name=name,
            run_name=text(known.get("run_name")) or name,
            started_unix_s=number(summary.get("started_unix_s"))
            or (number(about.get("started_unix_ns")) or 0.0) / NS_PER_S,
            host=text(known.get("host")),
            ranks=whole(known.get("world_size")),
            steps=whole(mapping(summary.get("steps")).get("train")),
            speed=number(mapping(summary.get("throughput")).get("steps_per_second")),
            finding=text(leading.get("name")),
            cause=_cause(summaries, state),
            state=state,
            live=any(state.live for state in states),
        )


def _cause(summaries: Sequence[Mapping[str, Any]], state: Liveness) -> str:
    """Returns the cause of the end of the first rank that is in the state of the run, if that is failed or killed; else ""."""
    ended = (summary for summary in summaries if summary.get("state") == state.word and not state.live)
    return next((text(summary.get("end_cause")) for summary in ended if state.severity == "critical"), "")


def _states(
    folders: Sequence[Path], summaries: Sequence[Mapping[str, Any]], about: Mapping[str, Any]
) -> list[Liveness]:
    """Returns the states of the ranks of the last attempt: one with fewer ranks leaves folders of the others behind."""
    now_s, attempts = time.time(), [whole(summary.get("attempt")) for summary in summaries]
    last = max((attempt for attempt in attempts if attempt is not None), default=None)
    return [
        state_of(folder, summary, about, now_s)[0]
        for folder, summary, attempt in zip(folders, summaries, attempts, strict=True)
        if attempt in (None, last)
    ]
