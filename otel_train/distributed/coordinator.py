"""Exchanges rank reports with the other ranks of the job; on rank 0, turns them into metrics, events and findings."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from otel_train import catalog as c
from otel_train.aggregation.metrics import LabelLimiter, MetricBuilder
from otel_train.datamodel import NS_PER_S, AttributeValue, Clock, Finding
from otel_train.distributed.export_profile import profile_of
from otel_train.distributed.hang import HangSuspect, suspects
from otel_train.distributed.rank_report import NAMED, RankReport, decode, encode, rank_report
from otel_train.distributed.store import Exchange, ExchangeRequest
from otel_train.distributed.straggler import (
    LONG_WINDOW_STEPS,
    MOST_SHOWN,
    Straggler,
    Stragglers,
    straggler_finding,
)

if TYPE_CHECKING:
    from otel_train.aggregation.run_state import RunState
    from otel_train.config import Config
    from otel_train.resource import RunInfo

    _ByRank = dict[tuple[str, str, str], float]  # by the labels rank, host and stage

DEPUTY: Final = 1
"""Rank that also reads every report, to report a hang of rank 0."""

RECORDS_PER_S: Final = 200
"""Most reports per second that all ranks together write to the store. In larger jobs each rank writes less often."""

EARLY_S: Final = 1.0
"""Seconds between the first reports if the job is small enough, so that a run of ten seconds can name a slow rank."""

EARLY_REPORTS: Final = 15
"""Reports with training that are sent at that rate. Of two ranks, a slow one is named after ``windows_needed(2)`` windows."""

MOST_EARLY_REPORTS: Final = 60
"""Most reports that are sent at that rate if training has not begun: loading data and compiling may take minutes."""

UNREAD_S: Final = 60.0
"""Seconds without an answer of the store after which what rank 0 knows of the others is not published any more."""

_log = logging.getLogger("otel_train")


class Job(NamedTuple):
    """Access to the job that this process belongs to.

    Attributes:
        find: returns rank and world size of the process group; None while there is none.
        barrier: returns the stage in which the model waits for the other ranks; "" if unknown.
        events: returns counts by ``train.rank.event``.
        counted: returns what this rank counts for its model replica.
        exchange: makes the exchange, called with ``rank`` and ``world_size``.
    """

    find: Callable[[], tuple[int, int] | None]
    barrier: Callable[[], str]
    events: Callable[[], Mapping[str, int]]
    counted: Callable[[], Mapping[tuple[str, str, str], int]]
    exchange: Callable[..., Any]


class RankCoordinator:
    """Sends this rank's reports and, on rank 0, evaluates those of all ranks. Runs on the agent's service thread."""

    def __init__(self, run: RunState, info: RunInfo, *, config: Config, job: Job, clock: Clock) -> None:
        self._run = run
        self._info = info
        self._config = config
        self._interval_s = config.tuned().rank_report_interval_s
        self._job = job
        self._clock = clock
        self._exchange: Exchange | None = None
        self._monitor: RankMonitor | None = None
        self._rank = info.rank
        self._world_size = 0
        self._sequence = 0
        self._with_training = 0  # number of reports sent with training in them
        self._due_ns = 0
        self._slow: Straggler | None = None  # found from the reports of all ranks
        self._named: tuple[object, ...] = ()  # the straggler of the last event
        self._read_ns: int | None = None  # when reports were last read; None if that is too long ago
        self._unanswered = 0  # requests to the store since then
        self._unread = 0  # how often the store has stopped answering

    @property
    def faults(self) -> int:
        """Faults of the exchange, reports that could not be decoded, and, on rank 0, times that the store stopped answering."""
        refused = self._monitor.refused if self._monitor else 0
        return refused + self._unread + (self._exchange.faults if self._exchange else 0)

    def poll(self) -> None:
        """Starts the exchange that is due and reads the result of the last one. Does not block."""
        if not self._interval_s or not (self._exchange or self._connect()):
            return
        assert self._exchange is not None
        if self._exchange.off:
            return
        records, now_ns = self._exchange.take(), self._clock()
        if records is not None:
            self._read_ns, self._unanswered = now_ns, 0
            self._read(records)
        elif self._rank == 0 and self._is_stale(now_ns) and self._job.find() is not None:
            self._unread += 1
            self._read_ns = None
            _log.warning(
                "The job's store does not answer: metrics about all ranks are left out until it does"
            )
        if now_ns >= self._due_ns:
            self._due_ns = now_ns + int(self._pause_s * NS_PER_S)
            wanted = range(self._world_size if self._monitor is not None else 1)
            self._exchange.send(ExchangeRequest(self._record(), wanted))
            self._unanswered += 1

    def write(self, builder: MetricBuilder) -> None:
        """Adds the metrics about all ranks, unless the reports were read too long ago."""
        if self._monitor is not None and self._read_ns is not None and not self._is_stale(self._clock()):
            self._monitor.write(builder)

    def finding(self, train_s: float) -> Finding | None:
        """Returns the finding about the slow rank that rank 0 has found; ``train_s``: training time of this rank."""
        return (
            straggler_finding(self._slow, others=self._world_size - 1, train_s=train_s)
            if self._slow
            else None
        )

    @property
    def longest_stall(self) -> list[HangSuspect]:
        """Ranks of the longest stall so far; known on ranks that read every report."""
        return self._monitor.longest_stall if self._monitor else []

    def summary(self) -> dict[str, Any] | None:
        """Returns the ``ranks`` part of ``summary.json``, on ranks that read every report."""
        return self._monitor.summary() if self._monitor else None

    def _is_stale(self, now_ns: int) -> bool:
        if self._read_ns is None or self._unanswered <= MISSED_RECORDS:  # this process may have been stopped
            return False
        return now_ns - self._read_ns > max(UNREAD_S, MISSED_RECORDS * self._every_s) * NS_PER_S

    @property
    def _every_s(self) -> float:
        return max(self._interval_s, self._world_size / RECORDS_PER_S)

    @property
    def _pause_s(self) -> float:
        early = self._with_training < EARLY_REPORTS and self._sequence < MOST_EARLY_REPORTS
        return min(self._every_s, max(EARLY_S, self._world_size / RECORDS_PER_S)) if early else self._every_s

    def _connect(self) -> bool:
        job = self._job.find()
        if job is None:
            return False
        self._rank, self._world_size = job
        if self._rank != self._info.rank:
            _log.warning(
                "This process is rank %d of its process group, and its metrics say rank %d: instrument() was called "
                "before init_process_group(), and the environment names no rank. Set RANK and WORLD_SIZE, or call "
                "init_process_group() first",
                self._rank,
                self._info.rank,
            )
        self._exchange = self._job.exchange(rank=self._rank, world_size=self._world_size)
        if self._rank in (0, DEPUTY):
            self._monitor = RankMonitor(
                self._world_size, every_s=self._every_s, stall_after_s=self._config.stall_after_s,
                speaks=profile_of(self._config, self._info).speaks
            )  # fmt: skip
        return True

    def _record(self) -> str:
        self._sequence += 1
        report = rank_report(
            self._run,
            rank=self._rank,
            host=self._info.host,
            barrier=self._job.barrier(),
            events=self._job.events(),
            counted=self._job.counted(),
        )
        self._with_training += report.steps > 0
        if self._rank == 0:  # passes on the largest stall threshold of any rank, and the slow rank
            others_s = self._run.stalls.others_ns / NS_PER_S
            slow = tuple(self._slow) if self._slow else ()
            report = report._replace(patience_s=max(report.patience_s, others_s), slow=slow)
        return encode(report._replace(sequence=self._sequence))

    def _read(self, records: Mapping[int, str]) -> None:
        leader = None
        if self._monitor is not None:
            named = self._monitor.take(records, self._clock() / NS_PER_S)
            leader = self._monitor.of(0)
            if self._rank == 0 or any(suspect.rank == 0 and suspect.silent for suspect in named):
                for suspect in named:
                    self._record_stall(suspect)
            if self._rank == 0:
                self._slow = self._monitor.slow
                self._record_straggler(self._slow)
        elif 0 in records:
            with suppress(ValueError):  # written by another version
                leader = decode(records[0])
        others_s = self._monitor.patience_s(self._rank) if self._monitor is not None else 0.0
        if leader is not None and self._rank:
            others_s = max(others_s, leader.patience_s)
            self._slow = Straggler(*leader.slow) if leader.slow else None
            if leader.every:
                self._run.sampler.agree(leader.every)
        self._run.stalls.others_ns = int(others_s * NS_PER_S)

    def _record_stall(self, suspect: HangSuspect) -> None:
        now_ns = self._clock()
        within = (now_ns - int(suspect.quiet_s * NS_PER_S), now_ns)
        self._run.spans.stall(within, suspect.step, suspect.stage, suspect.loader, suspect=suspect.rank)
        _log.warning(
            "Rank %d on %s holds the run up: %s of step %d, %s for %.0f s",
            suspect.rank, suspect.host, suspect.place(), suspect.step,
            "silent" if suspect.silent else "without progress", suspect.quiet_s
        )  # fmt: skip

    def _record_straggler(self, slow: Straggler | None) -> None:
        named = () if slow is None else (slow.host,) if slow.ranks > 1 else (slow.host, slow.rank)
        if slow is not None and named != self._named:
            attributes: dict[str, AttributeValue] = {
                c.SPAN_RANK.name: slow.rank,
                c.SPAN_STAGE.name: slow.stage,
                c.STRAGGLER_EXCESS.name: slow.excess_s,
                c.STEP_NUMBER.name: self._run.step_number,
            }
            self._run.spans.event(c.STRAGGLER_EVENT.name, self._clock(), attributes)
        self._named = named


MISSED_RECORDS = 3
"""Consecutive reports that a rank may miss before it counts as silent."""

MOST_NAMED = 8
"""Suspects named per hang. More of them point to a node or a network switch."""

MOST_STUCK = 3
"""Hang suspects that are published by rank number."""


class RankMonitor:
    """Aggregates the reports of all ranks.

    Args:
        every_s: seconds between two reports of a rank.
        stall_after_s: seconds without a report that count as a hang.
        speaks: whether this rank publishes the counts of all ranks.

    Attributes:
        suspects: ranks that hold the run up now.
        longest_stall: ranks that have held it up the longest, as of the last report of that stall.
    """

    def __init__(
        self, world_size: int, *, every_s: float, stall_after_s: float, speaks: bool = False
    ) -> None:
        self.refused = 0
        self.suspects: list[HangSuspect] = []
        self.longest_stall: list[HangSuspect] = []
        self._world_size = world_size
        self._every_s = every_s
        # In large jobs reports come less often.
        self._stall_after_s = max(stall_after_s, MISSED_RECORDS * every_s)
        self._known: dict[int, RankReport] = {}
        self._received_s: dict[int, float] = {}
        self._last: dict[int, RankReport] = {}  # including ranks that have ended
        self._stuck: _ByRank = {}
        self._excess: _ByRank = {}
        self._speaks = speaks
        self._loaders = LabelLimiter(c.LOADER.bound)
        self._stragglers = Stragglers()
        self._long_windows = Stragglers(LONG_WINDOW_STEPS)
        self._now_s = 0.0
        self._hang_reported = False

    def take(self, records: Mapping[int, str], now_s: float) -> list[HangSuspect]:
        """Processes the reports that are in the store.

        Returns:
            Hang suspects to report now: each hang is reported once.
        """
        self._now_s = now_s
        for rank in set(self._known) - set(records):  # a rank removes its own report at a clean end
            del self._known[rank]
        for rank, text in records.items():
            self._receive(rank, text)
        silent = self._silent_s(self._stall_after_s)
        audible = {rank: each for rank, each in self._known.items() if rank not in silent}
        self._stragglers.take(audible)
        self._long_windows.take(audible)
        excess = {
            (str(one.rank), one.host, _stage_label(one.stage)): one.ratio for one in self._stragglers.top
        }
        self._excess = _with_vanished(self._excess, excess, MOST_SHOWN)
        self.suspects = self._suspects(audible, silent)[:MOST_NAMED]
        self.longest_stall = max(
            self.suspects,
            self.longest_stall,
            key=lambda named: max((each.quiet_s for each in named), default=0.0),
        )
        stuck = {
            (str(one.rank), one.host, _stage_label(one.stage)): one.quiet_s
            for one in self.suspects[:MOST_STUCK]
        }
        self._stuck = _with_vanished(self._stuck, stuck, MOST_STUCK)
        before, self._hang_reported = self._hang_reported, bool(self.suspects)
        return [] if before else self.suspects

    @property
    def reporting(self) -> int:
        """Number of ranks with a recent report, including those that ended cleanly."""
        return len(self._last) - len(self.silent)

    @property
    def silent(self) -> list[int]:
        """Ranks whose reports stopped without a clean end."""
        return sorted(self._silent_s(MISSED_RECORDS * self._every_s))

    @property
    def slow(self) -> Straggler | None:
        """The current straggler, if there is one."""
        return self._stragglers.slow or self._long_windows.slow

    def of(self, rank: int) -> RankReport | None:
        """Returns the last report of a rank."""
        return self._known.get(rank)

    def write(self, builder: MetricBuilder) -> None:
        """Adds the metrics about all ranks. The number of series does not depend on the number of ranks."""
        if not self._received_s:
            return
        builder.put(c.RANKS_REPORTING, self.reporting)
        for event in c.RANK_EVENT.values:
            builder.put(c.RANKS_EVENTS, self._events(event), event)
        for stage, spread in self._stragglers.spread.items():
            if stage == NAMED:  # the sum of user-defined stages has no metric
                continue
            for statistic, value in zip(c.STATISTIC.values, spread[:4], strict=True):
                builder.put(c.RANK_WORK_TIME, value, stage, statistic)
        for labels, ratio in self._excess.items():
            builder.put(c.STRAGGLER_EXCESS_RATIO, ratio, *labels)
        for labels, quiet_s in self._stuck.items():
            builder.put(c.RANK_STALL_TIME, quiet_s, *labels)
        if self._speaks:
            self._write_counted(builder)

    def summary(self) -> dict[str, Any] | None:
        """Returns the ``ranks`` part of ``summary.json``; None before the first report."""
        if not self._received_s:
            return None
        slow = self.slow
        return {
            "world_size": self._world_size,
            "reporting": self.reporting,
            "silent": self.silent,
            "events": {
                event: total
                for event in c.RANK_EVENT.values
                if (total := self._events(event))
            },
            "work": {
                stage: {
                    "min": spread.least, "median": spread.median, "p95": spread.p95, "max": spread.most,
                    "slowest_rank": spread.rank
                }
                for stage, spread in self._stragglers.spread.items()
            },
            "straggler": slow._asdict() if slow else None,
            "suspects": [suspect._asdict() for suspect in self.suspects],
            "longest_stall": [suspect._asdict() for suspect in self.longest_stall]
        }  # fmt: skip

    def patience_s(self, rank: int) -> float:
        """Returns the largest stall threshold of the other ranks."""
        return max((each.patience_s for each in self._known.values() if each.rank != rank), default=0.0)

    def _suspects(self, heard: Mapping[int, RankReport], silent: Mapping[int, float]) -> list[HangSuspect]:
        quiet_s = min((each.quiet_s for each in heard.values() if not each.over), default=math.inf)
        # If the others made progress for most of that time, they do not wait for it: only its reports are missing.
        only_reports_missing = bool(silent) and 2 * quiet_s < max(silent.values())
        return suspects(heard, {}) if only_reports_missing else suspects(self._known, silent)

    def _events(self, event: str) -> int:
        return sum(each.events.get(event, 0) for each in self._last.values())

    def _write_counted(self, builder: MetricBuilder) -> None:
        for each in self._last.values():
            for (name, loader, phase), number in each.counted.items():
                builder.put(c.by_name[name], number, self._loaders.limit(loader), phase)

    def _receive(self, rank: int, text: str) -> None:
        try:
            report = decode(text)
        except ValueError:
            self.refused += 1
            return
        if report.rank != rank:
            self.refused += 1
            return
        before = self._known.get(rank)
        self._known[rank] = report
        if before is None or report.sequence != before.sequence:
            self._received_s[rank] = self._now_s
            self._last[rank] = report

    def _silent_s(self, after_s: float) -> dict[int, float]:
        ages = {rank: self._now_s - self._received_s[rank] for rank in self._known}
        return {rank: age for rank, age in ages.items() if age > after_s}


def _with_vanished(before: _ByRank, now: _ByRank, most: int) -> _ByRank:
    """Returns the gauges with the last ``most`` vanished ones at 0: Prometheus would keep their last value for five minutes."""
    gone = [labels for labels in before if labels not in now][-most:]
    return {**dict.fromkeys(gone, 0.0), **now}


def _stage_label(stage: str) -> str:
    return stage if stage in c.STAGES else "other"  # names of user-defined stages are not bounded
