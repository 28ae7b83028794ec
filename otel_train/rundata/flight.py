"""Reconstructs the steps and the state at the end of a rank from its flight file."""

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
    """Events of one thread, and their account.

    Attributes:
        thread: events on file.
        open: stages open at the end, outermost first.
        closed: steps, calls and times of the events that were accounted for.
        started_ns: start of the partial step at the end, which is not counted; -1 for none.
        by_end: counted steps that were closed by the end of the file rather than by an event: the loop was still in them.
        accounted: number of events that were accounted for, the last ones of the thread.
    """

    thread: ThreadEdges
    open: list[OpenStage]
    closed: ClosedSteps
    started_ns: int
    by_end: int
    accounted: int

    @property
    def is_on_file(self) -> bool:
        """Whether the file has all events of the thread since its first one."""
        return self.thread.entry.written <= len(self.thread.times) + 1

    @property
    def whole(self) -> bool:
        """Whether all events since the first one of the thread were accounted for."""
        return self.is_on_file and self.accounted == len(self.thread.times)

    @property
    def steps(self) -> int:
        """Training steps that closed."""
        return int(np.count_nonzero(trained(self.closed)))


def thread_history(thread: ThreadEdges, sources: SourceTable, most_edges: int = 0) -> ThreadHistory:
    """Accounts for a thread's events, with the stages of every step; ``most_edges``: number of last events, 0 for all."""
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
    """Returns the indices of the events that began the stages open at index ``place``, outermost first."""
    ops, numbers = (thread.codes & OP_MASK)[:place], _source_numbers(thread)[:place]
    change = np.isin(ops, _BEGINS).astype(np.int64) - np.isin(ops, _ENDS)
    depth = np.cumsum(change)
    least_later = np.minimum.accumulate(depth[::-1])[::-1]
    begun = np.flatnonzero((change > 0) & (depth == least_later))[:DEEPEST].tolist()
    # If an exception left a stage without an end, the end of the enclosing stage lowers the depth in its place.
    return [at for at in begun if change[at:][numbers[at:] == numbers[at]].sum() > 0]


def _source_numbers(thread: ThreadEdges) -> Ints:
    numbers: Ints = (thread.codes >> SOURCE_SHIFT) & SOURCE_MASK
    return numbers


def trained(part: ClosedSteps) -> np.ndarray:
    """Returns bool[step]: whether a step is a counted training step."""
    is_trained: np.ndarray = (part.steps.phase == TRAIN) & (part.steps.counted > 0)
    return is_trained


RECENT_STEPS = 20
"""Most closed steps in a post-mortem."""

_TAIL_EDGES = 1 << 12
"""Last events of a thread that a post-mortem accounts for; eight times as many if they do not contain the last steps."""

_NORMAL_ENDS, _MARKS = (Op.END, Op.STOP, Op.SUSPEND), (Op.MARK, Op.EPOCH)
_BEGINS, _ENDS = (Op.BEGIN, Op.RESUME), (*_NORMAL_ENDS, Op.FAIL)
_STAGE_OPS = (*_BEGINS, *_NORMAL_ENDS)
_HANDLER_KINDS = (SourceKind.CHECKPOINT, SourceKind.STAGE)
"""Kinds of stages that an exception handler of the program may run."""


def read_postmortem(rank_dir: Path) -> dict[str, Any]:
    """Returns the post-mortem of a rank: its open stages and last steps when its process was last active.

    Raises:
        RunDirectoryError: the flight file is missing or unreadable.
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
    if report["alive"] is None:  # the process is on another host or in another container: see its heartbeat
        last = Heartbeat(flight.pid, flight.polled_unix_ns / NS_PER_S, flight.identity)
        about = documents.get_or_empty(rank_dir.parent / RUN_FILE, [])
        state = liveness(summary, about, last, written_s=None, now_s=time.time())
        report["alive"] = True if state.running else None
    return report


def _last_steps(flight: Flight, summary: Mapping[str, Any]) -> FlightHistory:
    """Accounts for as many of the last events as are needed for the last steps and their numbers."""
    longest, most_edges = max((len(thread.times) for thread in flight.threads), default=0), _TAIL_EDGES
    while most_edges < longest:
        history = FlightHistory(flight, most_edges)
        if history.timeline is not None and history.timeline.ends_as_all(summary):
            return history
        most_edges *= 8
    return FlightHistory(flight)


def _before_end(flight: Flight, summary: Mapping[str, Any]) -> Flight:
    """Removes the events that threads wrote while their rank was ending.

    A propagating exception ends the open stages: with these events, a rank that failed or hung would have none open.
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
    """Removes those events of one thread: after its last ordinary event, from the first failed stage or the last pause on."""
    ops = thread.codes & OP_MASK
    of_step = ~np.isin(kinds[np.minimum(_source_numbers(thread), len(kinds) - 1)], _HANDLER_KINDS)
    ordinary = np.flatnonzero(of_step & np.isin(ops, _STAGE_OPS) | np.isin(ops, _MARKS))
    first = int(ordinary[-1]) + 1 if len(ordinary) else 0
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
    """Histories of the threads in a flight file, with the names of their sources and Unix time.

    Args:
        most_edges: number of last events of each thread to account for; 0 for all.

    Attributes:
        timeline: timeline of the training thread; None if no thread has written an event.
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
        """Returns the document of ``read_postmortem``; ``summary``: the last one of the rank, which may be empty."""
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
            warnings.append("No thread has written an event yet.")
        else:
            self._add_steps_to(report, main, self.timeline, _first_step(self.timeline, summary, warnings))
        return report

    def _add_steps_to(
        self, report: dict[str, Any], main: ThreadHistory, timeline: Timeline, first: int
    ) -> None:
        """Adds the last closed steps, and the last step: the open one, else the last closed."""
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
            started_s, until_s = timeline.unix_s(main.started_ns), report["last_edge_unix_s"]
            index, lasted_s = first + main.steps, max(0.0, until_s - started_s)
        elif recent:
            started_s = timeline.unix_s(int(timeline.started_ns[-1]))
            index, lasted_s = recent[-1]["index"], recent[-1]["duration_s"]
        else:
            return
        report["last_step"] = {"index": index, "started_unix_s": started_s, "duration_s": lasted_s}

    def _unix_s(self, clock_ns: int | None) -> float | None:
        return None if clock_ns is None else (clock_ns + self._offset_ns) / NS_PER_S

    def _steps_in_file(self, history: ThreadHistory) -> int | None:
        """Returns the number of training steps on file; None if not all events were accounted for and step numbers are unknown."""
        if history.accounted == len(history.thread.times):
            return history.steps
        first = self.timeline.first if self.timeline is not None and history.is_on_file else None
        return None if first is None else first + history.steps

    def _started_unix_ns(self) -> int:
        """Returns the Unix time at which the run began; at most that of the first event, as the clock may have been set back."""
        recorded_ns = self._flight.identity.get("started_unix_ns") or self._flight.anchor_unix_ns
        first_edges = (int(each.thread.times[0]) + self._offset_ns for each in self._threads)
        return int(min([recorded_ns, *first_edges]))

    def _quiet_s(self, history: ThreadHistory) -> float:
        """Returns for how many seconds the process lived after the thread's last event."""
        return (self._last_sign_ns(history) - int(history.thread.times[-1])) / NS_PER_S

    def _last_sign_ns(self, history: ThreadHistory) -> int:
        """Returns the last instant at which the process lived: of the thread's last event or the agent's last poll, monotonic."""
        return max(self._flight.polled_unix_ns - self._offset_ns, int(history.thread.times[-1]))

    def _open_stages(self, history: ThreadHistory) -> list[dict[str, Any]]:
        """Returns the stages that had not ended, outermost first."""
        begun = [self._sources[entry.source] for entry in history.open]
        last_sign_ns = self._last_sign_ns(history)
        batches = history.closed.batches
        loader = self._sources[int(batches[-1, 0])].name if len(batches) else None  # of the current batch
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
        """Returns the stage that ended last in the last step, and the backwards in it: see ``StepPosition``."""
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
    """Returns the training steps of a thread, extrapolated if only its last events were accounted for, and its events."""
    edges = len(history.thread.times)
    return history.steps * edges / max(1, history.accounted), edges


def _first_step(timeline: Timeline, summary: Mapping[str, Any], warnings: list[str]) -> int:
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
    """One call of a stage. ``about``: name of its source, such as the loader."""

    stage: str
    about: str
    started_ns: int
    lasted_ns: int


class Timeline:
    """Calls and steps of the training thread, as far back as the file goes.

    Attributes:
        whole: whether all events since the first one of the thread were accounted for.
        first: number of the first step on file; None if unknown.
        stages: names of the columns of ``selves_ns``.
        ended_ns: int64[step], on the monotonic clock.
        started_ns: int64[step], as above.
        duration_ns: int64[step], time that belongs to the step.
        selves_ns: int64[step, stage], self time.
        marked: whether the program marks its epochs.
        epoch: int64[step], the epoch's number if epochs are marked; else the number of passes over the training loader
            that had ended before the step did, as far as the file goes back.
        loader: the loader whose passes are the epochs; "" for none.
        passes: number of its passes on file that had a step and have ended.
    """

    def __init__(self, history: ThreadHistory, flight: Flight) -> None:
        self._history, self._sources = history, flight.sources
        self._offset_ns = flight.anchor_unix_ns - flight.anchor_clock_ns
        self.whole = history.whole
        self.stages = sorted({source.stage for source in flight.sources if source.stage} | {OTHER})
        steps, is_training = history.closed.steps, trained(history.closed)
        self.started_ns, self.ended_ns = steps.started_ns[is_training], steps.ended_ns[is_training]
        self.duration_ns = steps.duration_ns[is_training]
        self.first = 0 if self.whole else self._first_by_end_of(flight.steps - 1, flight.step_ended_ns)
        self.selves_ns = self._self_times(is_training)
        marks = history.closed.said
        epochs = marks[marks[:, 1] == Op.EPOCH]
        self.marked = len(epochs) > 0
        loaders = steps.loader[is_training]
        self.loader, self.epoch = ("", self._marked(epochs)) if self.marked else self._passes(loaders)
        self.passes = int(self.epoch[-1]) if len(self.epoch) else 0

    def __len__(self) -> int:
        return len(self.duration_ns)

    def unix_s(self, clock_ns: int) -> float:
        """Returns an instant of the monotonic clock as Unix time."""
        return (clock_ns + self._offset_ns) / NS_PER_S

    def first_step(self, summary: Mapping[str, Any]) -> int | None:
        """Returns the number of the first step on file; None if unknown, and ``summary`` does not count as many steps either."""
        if self.first is not None:
            return self.first
        counted = number(mapping(summary.get("steps")).get("train"))
        return int(counted) - len(self) if counted is not None and counted >= len(self) else None

    def ends_as_all(self, summary: Mapping[str, Any]) -> bool:
        """Returns whether accounting for all events of the thread would give the same last steps with the same numbers."""
        knows = self.first is not None or has_ended(summary) or not self._history.is_on_file
        return knows and len(self) > RECENT_STEPS and self.first_step(summary) is not None

    def _first_by_end_of(self, step: int, ended_ns: int) -> int | None:
        """Returns the number of the first step, given that step ``step`` ended at ``ended_ns``; None if that is not on file."""
        row = int(np.searchsorted(self.ended_ns, ended_ns))
        is_on_file = row < len(self) and self.ended_ns[row] == ended_ns
        return step - row if is_on_file and row <= step else None

    def stages_s(self, selves_ns: Ints) -> dict[str, float]:
        """Returns a row of ``selves_ns``, or a sum of rows, in seconds by stage."""
        return {name: ns / NS_PER_S for name, ns in zip(self.stages, selves_ns.tolist(), strict=True) if ns}

    def totals(self) -> list[dict[str, Any]]:
        """Returns one row per phase, loader, model and stage, summed over all events on file."""
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
        """Returns the calls that began at ``since_ns`` or later, in order of their beginning."""
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

    def _self_times(self, mine: NDArray[np.bool_]) -> Ints:
        column = {name: place for place, name in enumerate(self.stages)}
        table = np.zeros((len(mine), len(self.stages)), dtype=np.int64)
        times = self._history.closed.times
        for row, owner, ns in np.transpose((times.step, times.source, times.self_ns)).tolist():
            if 0 <= row < len(mine):  # else the time is of no step, or of a step that has not closed
                stage = self._sources[owner].stage if owner >= 0 else OTHER
                table[row, column[stage or OTHER]] += ns
        return table[mine]

    def _marked(self, begun: Ints) -> Ints:
        """Returns the epoch of each step; a step that closes at the mark of an epoch belongs to the one before."""
        numbers = np.concatenate((np.maximum(begun[:1, 2] - 1, 0), begun[:, 2]))
        marked: Ints = numbers[np.searchsorted(begun[:, 0], self.ended_ns, side="left")]
        return marked

    def _passes(self, loaders: Ints) -> tuple[str, Ints]:
        if not len(loaders) or loaders.max() < 0:
            return "", np.zeros(len(loaders), dtype=np.int64)
        training = int(np.bincount(loaders[loaders >= 0]).argmax())
        thread = self._history.thread
        numbers = _source_numbers(thread)
        is_stop = (numbers == training) & ((thread.codes & OP_MASK) == int(Op.STOP))
        stops = thread.times[is_stop] if self._sources[training].kind is SourceKind.DATA else thread.times[:0]
        passes = np.searchsorted(stops, self.ended_ns, side="left")
        # An exhausted iterator raises StopIteration again if it is called again: passes without a step do not count.
        _, epoch = np.unique(passes, return_inverse=True)
        return self._sources[training].name, epoch.astype(np.int64)
