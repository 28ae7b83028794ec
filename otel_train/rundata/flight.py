"""Reads steps and end state of a rank from its flight file."""

from __future__ import annotations

import time
from collections.abc import Mapping
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from otel_train.accounting.account import ThreadAccount
from otel_train.accounting.nesting import DEEPEST
from otel_train.accounting.types import NO_PHASE, TRAIN, ClosedSteps, SourceTable
from otel_train.aggregation.run_state import StageEnds
from otel_train.catalog import PHASES
from otel_train.datamodel import FLIGHT_FILE, NS_PER_S, RUN_FILE, SUMMARY_FILE
from otel_train.distributed.hang import LEAST_STALL_S, HangSuspect
from otel_train.files import JsonFileCache
from otel_train.recording.events import OP_MASK, SOURCE_MASK, SOURCE_SHIFT, Op, SourceKind
from otel_train.recording.flight_recorder import Flight, Heartbeat, ThreadEdges, read_flight
from otel_train.rundata.files import has_ended, mapping, number, summary_of
from otel_train.rundata.liveness import is_alive, liveness, written_until
from otel_train.rundata.schemas import checked

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

    from otel_train.accounting.nesting import OpenStage

    Ints = NDArray[np.int64]


class ThreadHistory(NamedTuple):
    """What one thread did.

    Attributes:
        thread: its events.
        open: stages open at the end, outermost first.
        closed: everything that was accounted.
        started_ns: start of a step that is not counted, or -1.
        by_end: counted steps that the end of the file closed, and no event: the loop was still in that step.
        accounted: number of its events that were; the last ones.
    """

    thread: ThreadEdges
    open: list[OpenStage]
    closed: ClosedSteps
    started_ns: int
    by_end: int
    accounted: int

    @property
    def is_on_file(self) -> bool:
        """Whether the file holds everything from its first event."""
        return self.thread.entry.written <= len(self.thread.times) + 1

    @property
    def whole(self) -> bool:
        """Whether everything from its first event was accounted."""
        return self.is_on_file and self.accounted == len(self.thread.times)

    @property
    def steps(self) -> int:
        """Training steps that closed."""
        return int(np.count_nonzero(trained(self.closed)))


def thread_history(thread: ThreadEdges, sources: SourceTable, most_edges: int = 0) -> ThreadHistory:
    """Accounts a thread's events, with the stages of every step; ``most_edges``: only the last ones, 0 for all."""
    first = max(0, len(thread.times) - most_edges) if most_edges else 0
    before = _open_at(thread, first) if first else []
    times, codes = (np.concatenate((each[before], each[first:])) for each in (thread.times, thread.codes))
    known = (codes >> SOURCE_SHIFT) & SOURCE_MASK < len(sources.kinds)
    account = ThreadAccount(int(times[0]), sources, by_step=True)
    account.feed(times[known].tolist(), codes[known].tolist())
    still_open = list(account.open)
    account.release_all()
    by_events = account.steps_closed
    closed = account.close(int(thread.times[-1]))
    left = np.flatnonzero(closed.steps.counted == 0)
    started_ns = int(closed.steps.started_ns[left[-1]]) if len(left) else -1
    by_end = account.steps_closed - by_events
    return ThreadHistory(thread, still_open, closed, started_ns, by_end, len(thread.times) - first)


def _open_at(thread: ThreadEdges, place: int) -> list[int]:
    """Returns which events began the stages that are open before that place, the outermost first."""
    ops, numbers = (thread.codes & OP_MASK)[:place], _source_numbers(thread)[:place]
    change = np.isin(ops, _BEGINS).astype(np.int64) - np.isin(ops, _ENDS)
    depth = np.cumsum(change)
    least_later = np.minimum.accumulate(depth[::-1])[::-1]
    begun = np.flatnonzero((change > 0) & (depth == least_later))[:DEEPEST].tolist()
    # Where an exception left a stage open, the end of the one around it is taken for its own.
    return [at for at in begun if change[at:][numbers[at:] == numbers[at]].sum() > 0]


def _source_numbers(thread: ThreadEdges) -> Ints:
    numbers: Ints = (thread.codes >> SOURCE_SHIFT) & SOURCE_MASK
    return numbers


def trained(part: ClosedSteps) -> np.ndarray:
    """Returns bool[step]: the steps counted as training."""
    mine: np.ndarray = (part.steps.phase == TRAIN) & (part.steps.counted > 0)
    return mine


RECENT_STEPS = 20

_TAIL_EDGES = 1 << 12
"""Events of a thread that are accounted for a post-mortem, eight times as many where those do not hold the last steps."""

_NORMAL_ENDS, _MARKS = (Op.END, Op.STOP, Op.SUSPEND), (Op.MARK, Op.EPOCH)
_BEGINS, _ENDS = (Op.BEGIN, Op.RESUME), (*_NORMAL_ENDS, Op.FAIL)
_STAGE_OPS = (*_BEGINS, *_NORMAL_ENDS)
_OF_AN_END = (SourceKind.CHECKPOINT, SourceKind.STAGE)
"""What an exception handler may run."""


def read_postmortem(rank_dir: Path) -> dict[str, Any]:
    """Returns what the process of a rank was doing when it was last active.

    Raises:
        RunDirectoryError: the flight recorder file is missing or unreadable.
    """
    flight, documents = read_flight(rank_dir / FLIGHT_FILE), JsonFileCache()
    warnings: list[str] = []
    summary = summary_of(documents, rank_dir, warnings)
    summary = checked(summary, "summary", rank_dir / SUMMARY_FILE, warnings, complete=False)
    report = _last_steps(_before_end(flight, summary), summary).postmortem(summary)
    report["world_size"] = summary.get("world_size")
    suspects = mapping(summary.get("ranks")).get("suspects") or ()
    report["reported_suspects"] = [
        {name: each[name] for name in HangSuspect._fields}
        for each in suspects
        if each.keys() >= set(HangSuspect._fields)
    ]
    report["warnings"] += warnings
    if report["alive"] is None:  # its process cannot be seen from here, its heartbeat can
        last = Heartbeat(flight.pid, flight.polled_unix_ns / NS_PER_S, flight.identity)
        about = documents.get_or_empty(rank_dir.parent / RUN_FILE, [])
        state = liveness(summary, about, last, written_s=None, now_s=time.time())
        report["alive"] = True if state.running else None
    return report


def _last_steps(flight: Flight, summary: Mapping[str, Any]) -> FlightHistory:
    """Accounts as many events as hold the last steps and tell their numbers."""
    longest, most_edges = max((len(thread.times) for thread in flight.threads), default=0), _TAIL_EDGES
    while most_edges < longest:
        history = FlightHistory(flight, most_edges)
        if history.timeline is not None and history.timeline.ends_as_all(summary):
            return history
        most_edges *= 8
    return FlightHistory(flight)


def _before_end(flight: Flight, summary: Mapping[str, Any]) -> Flight:
    """Leaves out what came after the end of a rank, and what its threads wrote while it ended.

    An exception ends the stages that are open: without this, a rank that failed or hung would be in none.
    """
    goes_on = not has_ended(summary) and is_alive(flight.pid, flight.identity) is not False
    if goes_on or summary.get("state") == "finished":
        return flight
    polled_ns, ended_s = flight.polled_unix_ns, _ended_unix_s(summary)
    if ended_s is not None and 0 <= ended_s < polled_ns / NS_PER_S:
        polled_ns = int(ended_s * NS_PER_S)
    kinds = np.array([source.kind for source in flight.sources] or [SourceKind.MARK])
    threads = tuple(_thread_before_end(thread, kinds) for thread in flight.threads if len(thread.times))
    return flight._replace(threads=threads, polled_unix_ns=polled_ns)


def _thread_before_end(thread: ThreadEdges, kinds: Ints) -> ThreadEdges:
    """Does so for one thread: from the first stage that failed after all others, or from its last pause after them."""
    ops = thread.codes & OP_MASK
    of_step = ~np.isin(kinds[np.minimum(_source_numbers(thread), len(kinds) - 1)], _OF_AN_END)
    goes_on = np.flatnonzero(of_step & np.isin(ops, _STAGE_OPS) | np.isin(ops, _MARKS))
    first = int(goes_on[-1]) + 1 if len(goes_on) else 0
    failed = first + np.flatnonzero(ops[first:] == Op.FAIL)
    pauses = 1 + np.flatnonzero(np.diff(thread.times) >= LEAST_STALL_S * NS_PER_S)
    pauses = pauses[(pauses >= first) & ~np.isin(ops[pauses], _NORMAL_ENDS)]
    kept = min([*failed[:1].tolist(), *pauses[-1:].tolist()], default=0)
    if not kept:
        return thread
    entry = thread.entry._replace(written=thread.entry.written - len(ops) + kept)
    return thread._replace(entry=entry, times=thread.times[:kept], codes=thread.codes[:kept])


def _ended_unix_s(summary: Mapping[str, Any]) -> float | None:
    return written_until(summary) if has_ended(summary) else None


class FlightHistory:
    """What the threads in a flight file did, with the names of sources and Unix time.

    Args:
        most_edges: events of each thread that are accounted, the last ones; 0 for all.

    Attributes:
        timeline: of the thread that trains; None if no thread has written anything.
    """

    def __init__(self, flight: Flight, most_edges: int = 0) -> None:
        self._flight, self._sources = flight, flight.sources
        known = SourceTable().extend(flight.sources)
        threads = [thread for thread in flight.threads if len(thread.times)]
        self._threads = [thread_history(thread, known, most_edges) for thread in threads]
        self._main = max(self._threads, key=_steps_on_file, default=None)
        self._offset_ns = flight.anchor_unix_ns - flight.anchor_clock_ns
        self.timeline = None if self._main is None else Timeline(self._main, flight)

    def postmortem(self, summary: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the result of ``read_postmortem``, with the last summary, which may be empty."""
        flight, main, identity = self._flight, self._main, self._flight.identity
        warnings: list[str] = []
        report = {
            "run_id": identity.get("run_id") or summary.get("run_id"),
            "rank": identity.get("rank", summary.get("rank")),
            "attempt": identity.get("attempt", summary.get("attempt")),
            "pid": flight.pid,
            "alive": is_alive(flight.pid, identity),
            "state": summary.get("state"),
            "end_cause": summary.get("end_cause"),
            "ended_unix_s": _ended_unix_s(summary),
            "started_unix_s": self._started_unix_ns() / NS_PER_S,
            "last_edge_unix_s": self._unix_s(
                max((int(s.thread.times[-1]) for s in self._threads), default=None)
            ),
            "last_sign_unix_s": self._unix_s(None if main is None else self._last_sign_ns(main)),
            "step": None,
            "last_step": None,
            "open": [] if main is None else self._open_stages(main),
            **({"after": "", "backwards": 0} if main is None else self._since_the_last_step(main)),
            "host": identity.get("host"),
            "quiet_seconds": None if main is None else self._quiet_s(main),
            "steps_in_file": 0 if main is None else self._steps_in_file(main),
            "recent_steps": [],
            "edges_in_file": sum(len(thread.times) for thread in flight.threads),
            "threads": [self._thread(history) for history in self._threads],
            "warnings": warnings,
        }
        if main is None or self.timeline is None:
            warnings.append("No thread has written an edge yet.")
        else:
            self._add_steps_to(report, main, self.timeline, _closed_before(self.timeline, summary, warnings))
        return report

    def _add_steps_to(
        self, report: dict[str, Any], main: ThreadHistory, timeline: Timeline, first: int
    ) -> None:
        """Adds the last closed steps and the step at the end: the open one, else the last closed."""
        report["step"] = first + main.steps - main.by_end
        recent = report["recent_steps"] = [
            {
                "index": first + row,
                "duration_s": int(timeline.duration_ns[row]) / NS_PER_S,
                "stages": timeline.stages_s(timeline.selves_ns[row]),
            }
            for row in range(max(0, main.steps - RECENT_STEPS), main.steps)
        ]
        if main.started_ns >= 0:
            begun, until = timeline.unix_s(main.started_ns), report["last_edge_unix_s"]
            index, lasted_s = first + main.steps, max(0.0, until - begun)
        elif recent:
            begun = timeline.unix_s(int(timeline.started_ns[-1]))
            index, lasted_s = recent[-1]["index"], recent[-1]["duration_s"]
        else:
            return
        report["last_step"] = {"index": index, "started_unix_s": begun, "duration_s": lasted_s}

    def _unix_s(self, clock_ns: int | None) -> float | None:
        return None if clock_ns is None else (clock_ns + self._offset_ns) / NS_PER_S

    def _steps_in_file(self, history: ThreadHistory) -> int | None:
        """Returns the training steps on file; None where only the end of it was accounted, and it does not begin with the first."""
        if history.accounted == len(history.thread.times):
            return history.steps
        first = self.timeline.first if self.timeline is not None and history.is_on_file else None
        return None if first is None else first + history.steps

    def _started_unix_ns(self) -> int:
        """Returns when the run began; where the clock was set back since, not after the first event on file."""
        said_ns = self._flight.identity.get("started_unix_ns") or self._flight.anchor_unix_ns
        edges = (int(each.thread.times[0]) + self._offset_ns for each in self._threads)
        return int(min([said_ns, *edges]))

    def _quiet_s(self, history: ThreadHistory) -> float:
        """Returns for how long the process lived after the thread's last event, in seconds."""
        return (self._last_sign_ns(history) - int(history.thread.times[-1])) / NS_PER_S

    def _last_sign_ns(self, history: ThreadHistory) -> int:
        """Returns when the thread or the agent last showed that the process lived, on the monotonic clock."""
        return max(self._flight.polled_unix_ns - self._offset_ns, int(history.thread.times[-1]))

    def _open_stages(self, history: ThreadHistory) -> list[dict[str, Any]]:
        """Returns the stages that had not ended, outermost first."""
        begun = [self._sources[entry.source] for entry in history.open]
        last_sign_ns = self._last_sign_ns(history)
        batches = history.closed.batches
        loader = self._sources[int(batches[-1, 0])].name if len(batches) else None  # of the batch in work
        return [
            {
                "stage": source.stage,
                "loader": source.name if source.kind is SourceKind.DATA else loader,
                "model": source.name if source.kind is SourceKind.FORWARD else None,
                "thread": history.thread.entry.thread,
                "for_seconds": max(0, last_sign_ns - entry.begun_ns) / NS_PER_S,
            }
            for entry, source in zip(history.open, begun, strict=True)
        ]

    def _since_the_last_step(self, history: ThreadHistory) -> dict[str, Any]:
        """Returns what ended in the step at the end: see ``StepPosition``."""
        thread, ends = history.thread, StageEnds()
        ends.add(thread.times, thread.codes, self._sources)
        ended_ns = history.closed.steps.ended_ns[trained(history.closed)][: history.steps - history.by_end]
        return dict(zip(("after", "backwards"), ends.since(max(ended_ns[-1:], default=-1)), strict=True))

    def _thread(self, history: ThreadHistory) -> dict[str, Any]:
        return {
            "name": history.thread.entry.thread,
            "edges": len(history.thread.times),
            "last_edge_unix_s": self._unix_s(int(history.thread.times[-1])),
            "open": self._open_stages(history),
        }


def _steps_on_file(history: ThreadHistory) -> tuple[float, int]:
    """Returns the training steps of a thread, estimated where only its last events were accounted, and its events."""
    edges = len(history.thread.times)
    return history.steps * edges / max(1, history.accounted), edges


def _closed_before(timeline: Timeline, summary: Mapping[str, Any], warnings: list[str]) -> int:
    first = timeline.first_step(summary)
    if timeline.first is None:
        how = (
            "step 0 is the first that it holds"
            if first is None
            else "steps are numbered back from summary.json"
        )
        warnings.append(f"The file no longer holds the first steps: {how}.")
    return first or 0


OTHER = "other"


class StageCall(NamedTuple):
    """One call of a stage: source, begin, duration."""

    stage: str
    about: str
    started_ns: int
    lasted_ns: int


class Timeline:
    """Calls and steps of the training thread, as far back as the file goes.

    Attributes:
        whole: everything from the first edge on was accounted.
        first: number of its first step; None if it is not known.
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

    def __init__(self, history: ThreadHistory, flight: Flight) -> None:
        self._history, self._sources = history, flight.sources
        self._offset_ns = flight.anchor_unix_ns - flight.anchor_clock_ns
        self.whole = history.whole
        self.stages = sorted({source.stage for source in flight.sources if source.stage} | {OTHER})
        steps, mine = history.closed.steps, trained(history.closed)
        self.started_ns, self.ended_ns = steps.started_ns[mine], steps.ended_ns[mine]
        self.duration_ns = steps.duration_ns[mine]
        self.first = 0 if self.whole else self._first_by_end_of(flight.steps - 1, flight.step_ended_ns)
        self.selves_ns = self._selves(mine)
        said = history.closed.said
        begun = said[said[:, 1] == Op.EPOCH]
        self.marked = len(begun) > 0
        loaders = steps.loader[mine]
        self.loader, self.epoch = ("", self._marked(begun)) if self.marked else self._passes(loaders)
        self.passes = int(self.epoch[-1]) if len(self.epoch) else 0

    def __len__(self) -> int:
        return len(self.duration_ns)

    def unix_s(self, clock_ns: int) -> float:
        """Returns an instant of the monotonic clock as Unix time."""
        return (clock_ns + self._offset_ns) / NS_PER_S

    def first_step(self, summary: Mapping[str, Any]) -> int | None:
        """Returns the number of the first step on file; None where the file begins later, and the summary counts no more steps."""
        if self.first is not None:
            return self.first
        counted = number(mapping(summary.get("steps")).get("train"))
        return int(counted) - len(self) if counted is not None and counted >= len(self) else None

    def ends_as_all(self, summary: Mapping[str, Any]) -> bool:
        """Returns whether the last steps, and their numbers, are those that all events of the thread would give."""
        knows = self.first is not None or has_ended(summary) or not self._history.is_on_file
        return knows and len(self) > RECENT_STEPS and self.first_step(summary) is not None

    def _first_by_end_of(self, step: int, ended_ns: int) -> int | None:
        """Returns the number of the first step from that of another one and when it ended; None if that is not among them."""
        row = int(np.searchsorted(self.ended_ns, ended_ns))
        found = row < len(self) and self.ended_ns[row] == ended_ns
        return step - row if found and row <= step else None

    def stages_s(self, selves_ns: Ints) -> dict[str, float]:
        """Returns a row of ``selves_ns``, or a sum of rows, in seconds by stage."""
        return {name: ns / NS_PER_S for name, ns in zip(self.stages, selves_ns.tolist(), strict=True) if ns}

    def totals(self) -> list[dict[str, Any]]:
        """Returns one row per phase, loader, model and stage, over everything on file."""
        rows: dict[tuple[str, str, str, str], dict[str, Any]] = {}
        times, calls = self._history.closed.times, self._history.closed.occurrences
        for source, loader, phase, self_ns, inclusive_ns, _ in zip(
            *(column.tolist() for column in times), strict=True
        ):
            row = self._row(rows, source, loader, phase)
            row["self_seconds"] += self_ns
            row["inclusive_seconds"] += inclusive_ns
        called = (calls.source, calls.loader, calls.phase, calls.failed)
        for source, loader, phase, failed in zip(*(column.tolist() for column in called), strict=True):
            row = self._row(rows, source, loader, phase)
            row["count"] += 1
            row["failed"] += failed
        for row in rows.values():
            row["self_seconds"] /= NS_PER_S
            row["inclusive_seconds"] /= NS_PER_S
            row["avg"] = row["inclusive_seconds"] / row["count"] if row["count"] else None
            if row["stage"] == OTHER:
                row["count"] = row["inclusive_seconds"] = None
        return sorted(rows.values(), key=itemgetter("phase", "loader", "stage", "model"))

    def calls(self, since_ns: int) -> list[StageCall]:
        """Calls that began at ``since_ns`` or later, in order."""
        calls = self._history.closed.occurrences
        found = []
        for row in np.flatnonzero(calls.started_ns >= since_ns).tolist():
            source = self._sources[int(calls.source[row])]
            started_ns, lasted_ns = int(calls.started_ns[row]), int(calls.inclusive_ns[row])
            found.append(StageCall(source.stage, source.name, started_ns, lasted_ns))
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
        column = {name: place for place, name in enumerate(self.stages)}
        table = np.zeros((len(mine), len(self.stages)), dtype=np.int64)
        times = self._history.closed.times
        for row, owner, ns in np.transpose((times.step, times.source, times.self_ns)).tolist():
            if 0 <= row < len(mine):  # or of a step that has not closed
                stage = self._sources[owner].stage if owner >= 0 else OTHER
                table[row, column[stage or OTHER]] += ns
        return table[mine]

    def _marked(self, begun: Ints) -> Ints:
        """Assigns a step that closes at a mark to the epoch before it."""
        numbers = np.concatenate((np.maximum(begun[:1, 2] - 1, 0), begun[:, 2]))
        marked: Ints = numbers[np.searchsorted(begun[:, 0], self.ended_ns, side="left")]
        return marked

    def _passes(self, loaders: Ints) -> tuple[str, Ints]:
        if not len(loaders) or loaders.max() < 0:
            return "", np.zeros(len(loaders), dtype=np.int64)
        training = int(np.bincount(loaders[loaders >= 0]).argmax())
        thread = self._history.thread
        numbers = _source_numbers(thread)
        mine = (numbers == training) & ((thread.codes & OP_MASK) == int(Op.STOP))
        stops = thread.times[mine] if self._sources[training].kind is SourceKind.DATA else thread.times[:0]
        passes = np.searchsorted(stops, self.ended_ns, side="left")
        # A loader that is asked again at its end says so again: a pass without a step is none.
        _, epoch = np.unique(passes, return_inverse=True)
        return self._sources[training].name, epoch.astype(np.int64)
