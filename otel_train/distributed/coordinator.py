"""This rank's part in the exchange of records between the ranks of a job."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from otel_train import catalog as c
from otel_train.aggregation.metrics import LabelLimiter
from otel_train.datamodel import NS_PER_S
from otel_train.distributed.export_profile import profile_of
from otel_train.distributed.hang import HangSuspect, suspects
from otel_train.distributed.rank_report import NAMED, decode, encode, rank_report
from otel_train.distributed.store import Exchange, ExchangeRequest
from otel_train.distributed.straggler import Straggler, Stragglers, finding

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from otel_train.aggregation.metrics import MetricBuilder
    from otel_train.aggregation.run_state import RunState
    from otel_train.config import Config
    from otel_train.datamodel import AttributeValue, Clock, Finding
    from otel_train.distributed.hang import HangSuspect
    from otel_train.distributed.rank_report import RankReport
    from otel_train.distributed.store import Store
    from otel_train.resource import RunInfo

DEPUTY: Final = 1
"""The rank that also reads every record, and speaks when rank 0 has fallen silent."""

RECORDS_PER_S: Final = 200
"""What the store is asked to take from all ranks together; in larger worlds each writes less often."""


_log = logging.getLogger("otel_train")


class Job(NamedTuple):
    """How to find the job that this process belongs to. Tests pass their own.

    Attributes:
        find: rank and world size of the process group; None while there is none.
        connect: a connection to its store; None if that cannot be used.
        barrier: stage in which the models wait for the other ranks; "" if that is not known.
        events: counts by ``train.rank.event``.
        prefix: of keys in the store: the same on all ranks, and not that of an earlier start.
        exchange: makes what carries records; called like ``Exchange``, without ``connect``, where it is given.
    """

    find: Callable[[], tuple[int, int] | None]
    connect: Callable[[], Store | None]
    barrier: Callable[[], str]
    events: Callable[[], Mapping[str, int]]
    prefix: str
    exchange: Callable[..., Any] | None = None


class RankCoordinator:
    """Sends this rank's records, and on rank 0 makes something of everybody's. Lives on the pump thread.

    Args:
        run: the account of this process.
        info: who we are.
        config: how often, and what is a stall.
        job: how to find the others.
        clock: monotonic nanoseconds.
        yield_gil: called between ranks, so that the training thread can take the GIL.
    """

    def __init__(
        self,
        run: RunState,
        info: RunInfo,
        *,
        config: Config,
        job: Job,
        clock: Clock,
        yield_gil: Callable[[], None] = lambda: None,
    ) -> None:
        self.counted: Callable[[], Mapping[tuple[str, str, str], int]] = dict
        """What this rank counts for its model replica."""
        self._run = run
        self._info = info
        self._config = config
        self._job = job
        self._clock = clock
        self._yield_gil = yield_gil
        self._exchange: Exchange | None = None
        self._peers: RankMonitor | None = None
        self._rank = info.rank
        self._world_size = 0
        self._sequence = 0
        self._due_ns = 0
        self._named = -1

    @property
    def faults(self) -> int:
        """Faults of the exchange, and records that made no sense."""
        refused = self._peers.refused if self._peers else 0
        return refused + (self._exchange.guard.faults if self._exchange else 0)

    def turn(self) -> None:
        """Send and fetch what is due. Never waits."""
        if not self._config.digest_every_s or not (self._exchange or self._join()):
            return
        assert self._exchange is not None
        if self._exchange.off:
            return
        records = self._exchange.take()
        if records is not None:
            self._read(records)
        now_ns = self._clock()
        if now_ns >= self._due_ns:
            self._due_ns = now_ns + int(self._every_s * NS_PER_S)
            self._exchange.send(ExchangeRequest(self._record(), self._wanted()))

    def close(self, timeout_s: float) -> None:
        """Take this rank's record away and end the thread."""
        if self._exchange is not None:
            self._exchange.close(timeout_s)

    def write(self, builder: MetricBuilder) -> None:
        """Put what is published of all ranks."""
        if self._peers is not None:
            self._peers.write(builder)

    def finding(self, train_s: float) -> Finding | None:
        """The verdict about a slow rank, on rank 0; of ``train_s`` seconds of training."""
        return self._peers.finding(train_s) if self._peers and self._rank == 0 else None

    def summary(self) -> dict[str, Any] | None:
        """What ``summary.json`` says of all ranks, on the ranks that read every record."""
        return self._peers.summary() if self._peers else None

    @property
    def _every_s(self) -> float:
        return max(self._config.digest_every_s, self._world_size / RECORDS_PER_S)

    def _join(self) -> bool:
        job = self._job.find()
        if job is None:
            return False
        self._rank, self._world_size = job
        if self._rank != self._info.rank:
            _log.warning(
                "This process is rank %d of its process group, and its metrics say rank %d: instrument() came "
                "before init_process_group(), and nothing in the environment tells the rank. Set RANK and "
                "WORLD_SIZE, or call init_process_group() first",
                self._rank,
                self._info.rank,
            )
        which: dict[str, Any] = {
            "prefix": self._job.prefix,
            "rank": self._rank,
            "world_size": self._world_size,
        }
        make = self._job.exchange
        self._exchange = Exchange(self._job.connect, **which) if make is None else make(**which)
        if self._rank in (0, DEPUTY):
            self._peers = RankMonitor(
                self._world_size, every_s=self._every_s, stall_after_s=self._config.stall_after_s,
                speaks=profile_of(self._config, self._info).speaks, yield_gil=self._yield_gil,
            )  # fmt: skip
        return True

    def _record(self) -> str:
        self._sequence += 1
        digest = rank_report(
            self._run,
            rank=self._rank,
            host=self._info.host,
            barrier=self._job.barrier(),
            events=self._job.events(),
            counted=self.counted(),
        )
        if self._rank == 0:  # the others learn from it how long any rank may take
            others_s = self._run.stalls.others_ns / NS_PER_S
            digest = digest._replace(patience_s=max(digest.patience_s, others_s))
        return encode(digest._replace(sequence=self._sequence))

    def _wanted(self) -> range:
        return range(self._world_size if self._peers is not None else 1)

    def _read(self, records: Mapping[int, str]) -> None:
        leader = None
        if self._peers is not None:
            named = self._peers.take(records, self._clock() / NS_PER_S)
            leader = self._peers.of(0)
            if self._rank == 0 or any(suspect.rank == 0 and suspect.silent for suspect in named):
                for suspect in named:
                    self._tell_stall(suspect)
            self._tell_straggler()
        elif 0 in records:
            leader = self._first(records[0])
        others_s = self._peers.patience_s(self._rank) if self._peers is not None else 0.0
        if leader is not None and self._rank:
            others_s = max(others_s, leader.patience_s)
            if leader.every:
                self._run.sampler.agree(leader.every)
        self._run.stalls.others_ns = int(others_s * NS_PER_S)

    def _first(self, text: str) -> RankReport | None:
        try:
            return decode(text)
        except ValueError:
            return None

    def _tell_stall(self, suspect: HangSuspect) -> None:
        now_ns = self._clock()
        within = (now_ns - int(suspect.quiet_s * NS_PER_S), now_ns)
        self._run.spans.stall(within, suspect.step, suspect.stage, suspect.loader, suspect=suspect.rank)
        _log.warning(
            "Rank %d on %s holds the run up: in stage %s%s of step %d, %s for %.0f s",
            suspect.rank, suspect.host, suspect.stage,
            f" of loader {suspect.loader}" if suspect.loader else "", suspect.step,
            "silent" if suspect.silent else "without progress", suspect.quiet_s,
        )  # fmt: skip

    def _tell_straggler(self) -> None:
        slow = self._peers.slow if self._peers and self._rank == 0 else None
        if slow is not None and slow.rank != self._named:
            attributes: dict[str, AttributeValue] = {
                c.SPAN_RANK.name: slow.rank,
                c.SPAN_STAGE.name: slow.stage,
                c.STRAGGLER_EXCESS.name: slow.excess_s,
                c.STEP_NUMBER.name: self._run.step_number,
            }
            self._run.spans.event(c.STRAGGLER_EVENT.name, self._clock(), attributes)
        self._named = slow.rank if slow else -1


MISSED_RECORDS = 3
"""Records that a rank may miss in a row before it no longer counts as reporting."""

MOST_STUCK = 3
"""Ranks that hold the run up and are published by name."""


class RankMonitor:
    """What the records of all ranks add up to.

    Args:
        world_size: ranks there should be.
        every_s: seconds between two records of a rank.
        stall_after_s: seconds without a record that are a standstill.
        speaks: this rank publishes what all ranks have counted.
        yield_gil: called between ranks, so that the training thread can take the GIL.

    Attributes:
        refused: records that could not be read.
        suspects: who holds the run up at the moment.
    """

    def __init__(
        self,
        world_size: int,
        *,
        every_s: float,
        stall_after_s: float,
        speaks: bool = False,
        yield_gil: Callable[[], None] = lambda: None,
    ) -> None:
        self.refused = 0
        self.suspects: list[HangSuspect] = []
        self._world_size = world_size
        self._every_s = every_s
        self._stall_after_s = stall_after_s
        self._known: dict[int, RankReport] = {}
        self._heard_s: dict[int, float] = {}
        self._last: dict[int, RankReport] = {}  # those that have ended included
        self._stuck: dict[tuple[str, str, str], float] = {}
        self._speaks = speaks
        self._loaders = LabelLimiter(c.LOADER.bound)
        self._yield_gil = yield_gil
        self._stragglers = Stragglers(yield_gil)
        self._now_s = 0.0
        self._standing_still = False

    @property
    def heard(self) -> bool:
        """Whether any record has come at all."""
        return bool(self._heard_s)

    def take(self, records: Mapping[int, str], now_s: float) -> list[HangSuspect]:
        """Take in what lies in the store.

        Args:
            records: the present record of every rank that has one.
            now_s: of a monotonic clock.

        Returns:
            Who is to be named now: each standstill is told once.
        """
        self._now_s = now_s
        for rank in set(self._known) - set(records):  # taken away by the rank itself: a clean end
            del self._known[rank]
        for rank, text in records.items():
            self._hear(rank, text)
            self._yield_gil()
        self._stragglers.take(self._known)
        silent = self._silent_s(self._stall_after_s)
        self.suspects = suspects(self._known, silent)
        self._stuck = {
            **dict.fromkeys(list(self._stuck)[-MOST_STUCK:], 0.0),
            **{(str(one.rank), one.host, one.stage): one.quiet_s for one in self.suspects[:MOST_STUCK]},
        }
        before, self._standing_still = self._standing_still, bool(self.suspects)
        return [] if before else self.suspects

    @property
    def reporting(self) -> int:
        """Ranks whose last record is not old."""
        return len(self._known) - len(self._silent_s(MISSED_RECORDS * self._every_s))

    @property
    def silent(self) -> list[int]:
        """Ranks that reported and no longer do, without having ended."""
        return sorted(self._silent_s(MISSED_RECORDS * self._every_s))

    @property
    def slow(self) -> Straggler | None:
        """The rank to name as a straggler, if there is one."""
        return self._stragglers.slow

    def of(self, rank: int) -> RankReport | None:
        """The last record of a rank."""
        return self._known.get(rank)

    def finding(self, train_s: float) -> Finding | None:
        """The verdict about a slow rank, if there is one; of ``train_s`` seconds of training."""
        slow = self._stragglers.slow
        return finding(slow, others=self._world_size - 1, train_s=train_s) if slow else None

    def write(self, builder: MetricBuilder) -> None:
        """Put what is published of it: as many series for ten ranks as for ten thousand."""
        if not self.heard:
            return
        builder.put(c.RANKS_REPORTING, self.reporting)
        for event in c.RANK_EVENT.values:
            builder.put(c.RANKS_EVENTS, self._events(event), event)
        for stage, spread in self._stragglers.spread.items():
            if stage == NAMED:  # their names differ from run to run; their sum is in no catalogue
                continue
            for statistic, value in zip(c.STATISTIC.values, spread[:4], strict=True):
                builder.put(c.RANK_WORK_TIME, value, stage, statistic)
        for excess in self._stragglers.top:
            builder.put(
                c.STRAGGLER_EXCESS_RATIO,
                excess.ratio,
                str(excess.rank),
                excess.host,
                _stage_label(excess.stage),
            )
        for (rank, host, stage), quiet_s in self._stuck.items():
            builder.put(c.RANK_STALL_TIME, quiet_s, rank, host, _stage_label(stage))
        if self._speaks:
            self._write_counted(builder)

    def summary(self) -> dict[str, Any] | None:
        """The part of ``summary.json`` about the ranks; None before any has reported."""
        if not self.heard:
            return None
        slow = self._stragglers.slow
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
                    "slowest_rank": spread.rank,
                }
                for stage, spread in self._stragglers.spread.items()
            },
            "straggler": slow._asdict() if slow else None,
            "suspects": [suspect._asdict() for suspect in self.suspects],
        }  # fmt: skip

    def patience_s(self, rank: int) -> float:
        """The longest silence that is no stall on any rank but this one."""
        return max((each.patience_s for each in self._known.values() if each.rank != rank), default=0.0)

    def _events(self, event: str) -> int:
        return sum(each.events.get(event, 0) for each in self._last.values())

    def _write_counted(self, builder: MetricBuilder) -> None:
        for each in self._last.values():
            for (name, loader, phase), number in each.counted.items():
                builder.put(c.by_name[name], number, self._loaders.limit(loader), phase)
            self._yield_gil()

    def _hear(self, rank: int, text: str) -> None:
        try:
            digest = decode(text)
        except ValueError:
            self.refused += 1
            return
        before = self._known.get(rank)
        self._known[rank] = digest
        if before is None or digest.sequence != before.sequence:
            self._heard_s[rank] = self._now_s
            self._last[rank] = digest

    def _silent_s(self, after_s: float) -> dict[int, float]:
        ages = {rank: self._now_s - self._heard_s[rank] for rank in self._known}
        return {rank: age for rank, age in ages.items() if age > after_s}


def _stage_label(stage: str) -> str:
    """Names of a program's own stages differ from run to run."""
    return stage if stage in c.STAGES else "other"
