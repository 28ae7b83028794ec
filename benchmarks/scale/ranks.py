"""The ranks of a simulated run: their identities, and the accounts that they share."""

from __future__ import annotations

import hashlib
import os
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

from benchmarks.scale.rank import SimulatedRank
from benchmarks.scale.workload import Workload
from otel_train.catalog import SPAN_RANK
from otel_train.datamodel import NS_PER_S
from otel_train.distributed.coordinator import RECORDS_PER_S, RankMonitor
from otel_train.distributed.export_profile import Profile, profile_of
from otel_train.distributed.rank_report import encode, rank_report
from otel_train.resource import RunInfo, instance_id, resource_attributes

if TYPE_CHECKING:
    from collections.abc import Mapping

    from otel_train.config import Config
    from otel_train.datamodel import Anchor, AttributeValue, Span
    from otel_train.distributed.rank_report import RankReport

MOST_ACCOUNTS = 16
"""Accounts per kind of rank. An account takes about 2 MB: thousands of ranks share theirs, each under its own name."""

FIRST_PID = 1000


class Rank(NamedTuple):
    """One rank of the simulated run.

    Attributes:
        info: its identity.
        profile: what it exports.
        account: index of the account that it sends: its own, or that of another rank of its kind.
    """

    info: RunInfo
    profile: Profile
    account: int


class SimulatedRanks:
    """All ranks of a simulated run.

    Args:
        ranks: how many.
        per_node: how many share a host.
        config: as of a real run; names the run and the export profile.
        anchor: when the run began, on both clocks.
        steps_per_s: updates per second.
    """

    def __init__(
        self, ranks: int, *, per_node: int, config: Config, anchor: Anchor, steps_per_s: float
    ) -> None:
        self.accounts: list[SimulatedRank] = []
        self.ranks: list[Rank] = []
        self._config = config
        self._report_due_ns = 0
        self._every_s = max(config.tuned().rank_report_interval_s, ranks / RECORDS_PER_S)
        speaks = profile_of(config, _info(0, ranks, per_node, run_id=config.run_id, started_unix_ns=0)).speaks
        self._monitor = RankMonitor(
            ranks, every_s=self._every_s, stall_after_s=config.stall_after_s, speaks=speaks
        )
        kinds: dict[tuple[bool, bool, Profile], list[int]] = {}
        for number in range(ranks):
            info = _info(number, ranks, per_node, run_id=config.run_id, started_unix_ns=anchor.unix_ns)
            profile = profile_of(config, info)
            mine = kinds.setdefault((number == 0, info.local_rank == 0, profile), [])
            if len(mine) < MOST_ACCOUNTS:
                mine.append(len(self.accounts))
                workload = Workload(steps_per_s, number, anchor.clock_ns)
                self.accounts.append(SimulatedRank(info, config, anchor=anchor, workload=workload))
                account = mine[-1]
            else:
                account = mine[number % MOST_ACCOUNTS]
            self.ranks.append(Rank(info, profile, account))
        self.accounts[0].reporter.more.append(self._monitor.write)

    @property
    def senders(self) -> list[Rank]:
        """The ranks that send metrics or spans."""
        return [rank for rank in self.ranks if rank.profile.metrics or rank.profile.spans]

    def resource(self, rank: Rank) -> Mapping[str, AttributeValue]:
        """Returns the resource of a sender, with the attributes of a real rank."""
        return {
            **_shared_resource(self.ranks[0].info),
            "service.instance.id": rank.info.instance_id,
            "host.name": rank.info.host,
            "process.pid": rank.info.pid,
            "train.rank": rank.info.rank,
            "train.local_rank": rank.info.local_rank,
            "train.node_rank": rank.info.node_rank,
            "train.export.profile": rank.profile.name,
        }

    def exchange(self, now_ns: int) -> None:
        """Gives the reports of all ranks to rank 0, when that is due."""
        if not self._config.tuned().rank_report_interval_s or now_ns < self._report_due_ns:
            return
        self._report_due_ns = now_ns + int(self._every_s * NS_PER_S)
        reports = [_report_of(account)._replace(sequence=now_ns) for account in self.accounts]
        records = {
            rank.info.rank: encode(reports[rank.account]._replace(rank=rank.info.rank, host=rank.info.host))
            for rank in self.ranks
        }
        with self.accounts[0].lock:
            self._monitor.take(records, now_ns / NS_PER_S)

    def spans_of(self, rank: Rank, begin: int, end: int) -> list[Span]:
        """Returns the spans that a rank makes between two numbers of its account."""
        account = self.accounts[rank.account]
        spans = account.spans(begin, end) if rank.profile.spans else []
        return spans if rank.info.rank == account.info.rank else as_rank(spans, rank.info.rank)


def as_rank(spans: list[Span], rank: int) -> list[Span]:
    """Returns the same spans as another rank would make them: in the same traces, with ids of its own."""
    own = {span.span_id: _own_id(span.span_id, rank) for span in spans}
    return [
        replace(
            span,
            span_id=own[span.span_id],
            parent_id=own.get(span.parent_id, span.parent_id),
            attributes={
                **span.attributes,
                **({SPAN_RANK.name: rank} if SPAN_RANK.name in span.attributes else {}),
            },
        )
        for span in spans
    ]


def _report_of(account: SimulatedRank) -> RankReport:
    with account.lock:
        return rank_report(
            account.run, rank=0, host="", barrier="backward", events=account.reporter.events(),
            counted=account.reporter.counted(),
        )  # fmt: skip


def _own_id(span_id: int, rank: int) -> int:
    text = f"{span_id}/{rank}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") or 1


@cache
def _shared_resource(info: RunInfo) -> dict[str, str | int]:
    return resource_attributes(info, os.environ, modules={})


def _info(rank: int, ranks: int, per_node: int, *, run_id: str, started_unix_ns: int) -> RunInfo:
    node, local_rank = divmod(rank, per_node)
    return RunInfo(
        run_id=run_id,
        run_name=run_id,
        attempt=0,
        rank=rank,
        local_rank=local_rank,
        node_rank=node,
        world_size=ranks,
        local_world_size=min(per_node, ranks - node * per_node),
        host=f"node{node:05d}",
        pid=FIRST_PID + local_rank,
        instance_id=instance_id(run_id, rank),
        started_unix_ns=started_unix_ns,
    )
