"""All ranks of a run as one of them sees them: who reports, who is slow, who holds the run up."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from otel_train import catalog as c
from otel_train.aggregation.metrics import LabelLimiter
from otel_train.distributed.hang import HangSuspect, suspects
from otel_train.distributed.rank_report import NAMED, decode
from otel_train.distributed.straggler import Straggler, Stragglers, finding

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from otel_train.aggregation.metrics import MetricBuilder
    from otel_train.datamodel import Finding
    from otel_train.distributed.rank_report import RankReport

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
        breathe: called between ranks, to let the training thread have the interpreter.

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
        breathe: Callable[[], None] = lambda: None,
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
        self._breathe = breathe
        self._stragglers = Stragglers(breathe)
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
            self._breathe()
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

    def write(self, sheet: MetricBuilder) -> None:
        """Put what is published of it: as many series for ten ranks as for ten thousand."""
        if not self.heard:
            return
        sheet.put(c.RANKS_REPORTING, self.reporting)
        for event in c.RANK_EVENT.values:
            sheet.put(c.RANKS_EVENTS, self._events(event), event)
        for stage, spread in self._stragglers.spread.items():
            if stage == NAMED:  # their names differ from run to run; their sum is in no catalogue
                continue
            for statistic, value in zip(c.STATISTIC.values, spread[:4], strict=True):
                sheet.put(c.RANK_WORK_TIME, value, stage, statistic)
        for excess in self._stragglers.top:
            sheet.put(
                c.STRAGGLER_EXCESS_RATIO,
                excess.ratio,
                str(excess.rank),
                excess.host,
                _stage_label(excess.stage),
            )
        for (rank, host, stage), quiet_s in self._stuck.items():
            sheet.put(c.RANK_STALL_TIME, quiet_s, rank, host, _stage_label(stage))
        if self._speaks:
            self._write_counted(sheet)

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

    def _write_counted(self, sheet: MetricBuilder) -> None:
        for each in self._last.values():
            for (name, loader, phase), number in each.counted.items():
                sheet.put(c.by_name[name], number, self._loaders.fold(loader), phase)
            self._breathe()

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
