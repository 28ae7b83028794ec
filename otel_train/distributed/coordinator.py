"""This rank's part in the exchange of records between the ranks of a job."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from otel_train import catalog as c
from otel_train.datamodel import NS_PER_S
from otel_train.distributed.exchange import Exchange, ExchangeRequest
from otel_train.distributed.export_profile import profile_of
from otel_train.distributed.rank_monitor import RankMonitor
from otel_train.distributed.rank_report import decode, digest_of, encode

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from otel_train.aggregation.metrics import MetricBuilder
    from otel_train.aggregation.run_state import RunState
    from otel_train.config import Config
    from otel_train.datamodel import AttributeValue, Clock, Finding
    from otel_train.distributed.exchange import Store
    from otel_train.distributed.hang import HangSuspect
    from otel_train.distributed.rank_report import RankReport
    from otel_train.runinfo import RunInfo

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
        breathe: called between ranks, to let the training thread have the interpreter.
    """

    def __init__(
        self,
        run: RunState,
        info: RunInfo,
        *,
        config: Config,
        job: Job,
        clock: Clock,
        breathe: Callable[[], None] = lambda: None,
    ) -> None:
        self.counted: Callable[[], Mapping[tuple[str, str, str], int]] = dict
        """What this rank counts for its model replica."""
        self._run = run
        self._info = info
        self._config = config
        self._job = job
        self._clock = clock
        self._breathe = breathe
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

    def write(self, sheet: MetricBuilder) -> None:
        """Put what is published of all ranks."""
        if self._peers is not None:
            self._peers.write(sheet)

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
                speaks=profile_of(self._config, self._info).speaks, breathe=self._breathe,
            )  # fmt: skip
        return True

    def _record(self) -> str:
        self._sequence += 1
        digest = digest_of(
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
                self._run.keeper.agree(leader.every)
        self._run.stalls.others_ns = int(others_s * NS_PER_S)

    def _first(self, text: str) -> RankReport | None:
        try:
            return decode(text)
        except ValueError:
            return None

    def _tell_stall(self, suspect: HangSuspect) -> None:
        now_ns = self._clock()
        within = (now_ns - int(suspect.quiet_s * NS_PER_S), now_ns)
        self._run.teller.stall(within, suspect.step, suspect.stage, suspect.loader, suspect=suspect.rank)
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
            self._run.teller.event(c.STRAGGLER_EVENT.name, self._clock(), attributes)
        self._named = slow.rank if slow else -1
