"""Series for promtool, recorded from what simulated ranks send: their accounts, records and pages are the real ones."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from benchmarks.scale.rank import SimulatedRank
from benchmarks.scale.workload import BATCH_SAMPLES, SHARES, SOURCES, Workload
from otel_train.config import Config
from otel_train.datamodel import Anchor, HistogramPoint, MetricFamily, Snapshot
from otel_train.distributed.coordinator import Job, RankCoordinator
from otel_train.distributed.store import ExchangeRequest
from otel_train.exporters.prometheus import PageCollector, RankPage
from otel_train.recording.events import Ending, Flag, Op
from otel_train.resource import RunInfo, instance_id
from tests.support.promql import asked
from tools.alerts_pages import ALERT_FILES, groups

TRAIN, VAL, H2D, FORWARD, BACKWARD, OPTIMIZER, CHECKPOINT = range(len(SOURCES))
NS_PER_S = 10**9
EXPORT_S = 15
EXCHANGE_S = 5
STEP_S = 0.5
PROFILES = ("full", "reduced", "rank0_aggregate")


def read_by_rules() -> set[str]:
    """Names of the series that any rule asks for."""
    every = groups("histograms-native", "histograms-classic", "recording", *ALERT_FILES)
    exprs = [rule["expr"] for group in every for rule in group["rules"]]
    return {selector.metric for expr in exprs for selector in asked(expr)}


class Loop(Workload):
    """The loop of one rank. Every step takes half a second, unless something happens.

    Args:
        rank: whose.
        events: what happens, once each: (minute, what is done to the loop).
    """

    def __init__(self, rank: int, events: Sequence[tuple[float, Callable[[Loop], None]]] = ()) -> None:
        self.ended_ns: list[int] = []
        self.late_s = 0.0
        """Seconds of its own that each step takes longer, in data; less than nothing: it waits for another rank."""
        self.longer = 1.0
        """Times that each step takes as long, on all ranks."""
        self._events = sorted(events, key=lambda event: event[0])
        super().__init__(1 / STEP_S, rank, 0)

    def _all_steps(self) -> Iterator[None]:
        self._call(TRAIN, 0.1 * NS_PER_S, flags=Flag.START)
        while True:
            if self._events and self._now_ns >= self._events[0][0] * 60 * NS_PER_S:
                self._events.pop(0)[1](self)
            else:
                self.step(max(0.0, self.late_s), max(0.0, -self.late_s))
            yield

    def step(self, data_s: float = 0.0, backward_s: float = 0.0) -> None:
        """One step, longer by as much in data and in backward."""
        whole_ns = self.longer * STEP_S * NS_PER_S
        lasts = {source: share * whole_ns for source, share in SHARES.items()}
        ends_ns = self._now_ns + int(whole_ns + (data_s + backward_s) * NS_PER_S)
        self._call(TRAIN, lasts[TRAIN] + data_s * NS_PER_S, payload=BATCH_SAMPLES + 1)
        self._call(H2D, lasts[H2D])
        self._call(FORWARD, lasts[FORWARD], flags=Flag.GRAD | Flag.TRAINING)
        self._call(BACKWARD, lasts[BACKWARD] + backward_s * NS_PER_S)
        self._call(OPTIMIZER, lasts[OPTIMIZER])
        self._now_ns = ends_ns
        self.ended_ns.append(self._now_ns)

    def steps(self, begin_s: float, end_s: float) -> int:
        """Steps that ended in between."""
        return sum(begin_s * NS_PER_S < at <= end_s * NS_PER_S for at in self.ended_ns)

    def save(self, seconds: float) -> None:
        """Save a checkpoint, in one call."""
        self._call(CHECKPOINT, seconds * NS_PER_S)

    def evaluate(self, seconds: float, batches: int) -> None:
        """Evaluate. With one batch nothing is heard of it meanwhile."""
        self._stop(TRAIN)
        self._call(VAL, 0.01 * NS_PER_S, flags=Flag.START)
        for _ in range(batches):
            self._call(VAL, 0.01 * NS_PER_S, payload=BATCH_SAMPLES + 1)
            self._call(FORWARD, seconds / batches * NS_PER_S)
        self._stop(VAL)
        self._call(TRAIN, 0.01 * NS_PER_S, flags=Flag.START)

    def pause(self, seconds: float) -> None:
        """Run code that is not seen, after a pass."""
        self._stop(TRAIN)
        self._now_ns += int(seconds * NS_PER_S)
        self._call(TRAIN, 0.01 * NS_PER_S, flags=Flag.START)

    def fail(self) -> None:
        """Raise in a forward, and go on."""
        self._edge(Op.BEGIN, FORWARD, flags=Flag.GRAD | Flag.TRAINING)
        self._now_ns += NS_PER_S // 100
        self._edge(Op.FAIL, FORWARD)

    def hang(self, source: int) -> None:
        """Begin a step, and never leave this call of it."""
        for earlier in range(source):
            if earlier != VAL:
                self._call(earlier, 0.01 * NS_PER_S, payload=(BATCH_SAMPLES + 1) * (earlier == TRAIN))
        self._edge(Op.BEGIN, source)
        self._now_ns = 1 << 61

    def _stop(self, loader: int) -> None:
        self._edge(Op.BEGIN, loader)
        self._edge(Op.STOP, loader, payload=Ending.EPOCH_END)


class Table:
    """The store of a job in memory, as an exchange of one rank."""

    def __init__(self, records: dict[int, str], *, rank: int, **_: object) -> None:
        self.faults = 0
        self.off = False
        self._records = records
        self._rank = rank
        self._wanted: Iterable[int] = ()

    def send(self, request: ExchangeRequest) -> None:
        """Leave a record."""
        self._records[self._rank] = request.record
        self._wanted = request.wanted

    def take(self) -> dict[int, str]:
        """Those that were wanted."""
        return {rank: self._records[rank] for rank in self._wanted if rank in self._records}


class Member(NamedTuple):
    """One rank: its account, and its part in the exchange."""

    account: SimulatedRank
    ranks: RankCoordinator
    labels: dict[str, str]


class Run:
    """A simulated run, recorded from minute 0 on.

    Args:
        profile: what is exported.
        loops: one per rank.
        more: metrics to record beside those that rules read.
        begin_min: when it begins.
        after: the attempt before it, whose series it goes on with.
        hosts: how the names of its hosts begin.

    Attributes:
        logged: called for every rank every five seconds, as if its program had called something.
    """

    def __init__(
        self,
        profile: str,
        loops: Sequence[Loop],
        *,
        more: Iterable[str] = (),
        begin_min: int = 0,
        after: Run | None = None,
        hosts: str = "node",
    ) -> None:
        self.now_s = 0  # since it began
        self._begin_s = begin_min * 60
        self._attempt: int = after._attempt + 1 if after else 0
        self._hosts = hosts
        self.logged: Callable[[SimulatedRank], object] = id
        self.loops = loops
        self._config = Config(
            run_id="r", export_profile=profile, tuning=f"rank_report_interval_s={EXCHANGE_S}"
        )
        self._records: dict[int, str] = {}
        self._members = [self._member(rank, loop) for rank, loop in enumerate(loops)]
        self._kept = read_by_rules() | set(more)
        self._series: dict[str, dict[str, dict[int, str]]] = (
            after._series if after else {"native": {}, "classic": {}}
        )

    def account(self, rank: int) -> SimulatedRank:
        """What plays a rank."""
        return self._members[rank].account

    @property
    def senders(self) -> int:
        """Ranks that send metrics."""
        return sum(member.account.profile.metrics for member in self._members)

    def until(self, minute: float, *, end: bool = False) -> Run:
        """Go on up to that minute; ``end``: finish then."""
        while self._begin_s + self.now_s < minute * 60:
            self.now_s += EXCHANGE_S
            now_ns = self.now_s * NS_PER_S
            for member in self._members:
                member.account.advance(now_ns)
                self.logged(member.account)
                member.ranks.poll()
            for member in self._members:
                every = member.account.profile.interval_s(EXPORT_S)
                if self.now_s % every == 0 and member.account.profile.metrics:
                    self._record(member, member.account.read(now_ns).snapshot)
        return self.end("finished", len(self._members)) if end else self

    def end(self, state: str, ranks: int) -> Run:
        """The first so many ranks say that they have ended so; nothing is heard of the others."""
        now_ns = self.now_s * NS_PER_S
        for member in self._members[:ranks]:
            member.account.end(now_ns)
            member.account.reporter.state = state
            if member.account.profile.metrics:
                self._record(member, member.account.reporter.snapshot(now_ns))
        return self

    def series(self, variant: str) -> dict[str, str]:
        """What has been recorded, in promtool's notation, a sample every 15 s."""
        last = max((max(values) for values in self._series[variant].values()), default=0)
        return {
            name: " ".join(values.get(tick, "_") for tick in range(last + 1))
            for name, values in self._series[variant].items()
        }

    # -- inside ------------------------------------------------------------------------------------

    def _member(self, rank: int, loop: Loop) -> Member:
        size, anchor = len(self.loops), Anchor(self._begin_s * NS_PER_S, 0)
        info = RunInfo(
            run_id="r", run_name="r", attempt=self._attempt, rank=rank, local_rank=rank % 4, node_rank=rank // 4,
            world_size=size, local_world_size=4, host=f"{self._hosts}{rank // 4}", pid=1, started_unix_ns=anchor.unix_ns,
            instance_id=instance_id("r", rank),
        )  # fmt: skip
        account = SimulatedRank(info, self._config, anchor=anchor, workload=loop)
        exchange = partial(Table, self._records)
        reporter = account.reporter
        job = Job(lambda: (rank, size), lambda: "backward", reporter.events, reporter.counted, exchange)
        ranks = RankCoordinator(
            account.run, info, config=self._config, job=job, clock=lambda: self.now_s * NS_PER_S
        )
        reporter.more.append(ranks.write)
        labels = {
            "train_run_id": "r", "train_rank": str(rank), "host_name": info.host, "job": "otel-train",
            "instance": info.instance_id,
        }  # fmt: skip
        return Member(account, ranks, labels)

    def _record(self, member: Member, snapshot: Snapshot) -> None:
        tick = (self._begin_s + self.now_s) // EXPORT_S
        for family in PageCollector([RankPage(member.labels, {}, lambda: snapshot)]).collect():
            for sample in family.samples:
                if sample.name in self._kept:
                    self._put("classic", named(sample.name, sample.labels), tick, f"{sample.value:.12g}")
                    if not sample.name.endswith("_bucket") and sample.name[:-4] not in self._kept:
                        self._put("native", named(sample.name, sample.labels), tick, f"{sample.value:.12g}")
        for native in snapshot.families:
            self._record_native(member, native, tick)

    def _record_native(self, member: Member, family: MetricFamily, tick: int) -> None:
        if family.metric.prometheus not in self._kept:
            return
        for point in family.points:
            if isinstance(point, HistogramPoint):
                labels = {key.replace(".", "_"): value for key, value in point.attributes}
                # A bucket of Prometheus ends where that of OpenTelemetry does, and is numbered one higher.
                buckets = " ".join(map(str, point.exponential_counts))
                text = (
                    f"{{{{schema:{point.scale} sum:{point.sum:.12g} count:{point.count} "
                    f"z_bucket:{point.zero_count} offset:{point.offset + 1} buckets:[{buckets}]}}}}"
                )
                name = named(family.metric.prometheus, {**member.labels, **labels})
                self._put("native", name, tick, text)

    def _put(self, variant: str, name: str, tick: int, text: str) -> None:
        self._series[variant].setdefault(name, {})[tick] = text


def named(metric: str, labels: Mapping[str, str]) -> str:
    """A series as promtool writes it."""
    return metric + "{" + ",".join(f'{key}="{value}"' for key, value in sorted(labels.items())) + "}"


def scenario(run: Run, variant: str, asks: Mapping[str, Mapping[str, float]]) -> dict[str, Any]:
    """A test for promtool: by ``<minute> <expression>`` the values by labels, none where there must be none."""
    return {
        "interval": f"{EXPORT_S}s",
        "input_series": [{"series": name, "values": values} for name, values in run.series(variant).items()],
        "promql_expr_test": [
            {
                "eval_time": f"{math.floor(float(asked.split(' ', 1)[0]) * 60)}s",
                "expr": asked.split(" ", 1)[1],
                "exp_samples": [{"labels": labels, "value": value} for labels, value in values.items()],
            }
            for asked, values in asks.items()
        ],
    }
