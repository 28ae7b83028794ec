"""A rank's part in the exchange: what it sends, what it makes of what it reads, and when it keeps quiet."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest

from otel_train import catalog as c
from otel_train.aggregation.metrics import MetricBuilder
from otel_train.aggregation.spans import SamplingRules
from otel_train.config import Config
from otel_train.distributed.coordinator import RECORDS_PER_S, Job, RankCoordinator
from otel_train.distributed.rank_report import decode, encode
from otel_train.distributed.store import Exchange
from otel_train.distributed.straggler import Straggler, straggler_finding
from otel_train.resource import Process, detect
from otel_train.testing import FakeClock
from tests.support.edges import Tape
from tests.support.rank_reports import report
from tests.support.runs import run_state
from tests.support.store import FakeStore
from tests.support.waiting import until

ALONE = detect(Config(run_id="r"), {}, process=Process(live_ranks=lambda: None))
STILL: dict[str, Any] = {"stalled": True, "quiet_s": 400.0}


class Member:
    """One rank of a job whose store is in memory."""

    def __init__(self, store: FakeStore, rank: int, world_size: int, **settings: Any) -> None:
        self.clock = FakeClock()
        self.group: tuple[int, int] | None = (rank, world_size)
        self.run = run_state(rank=rank, rules=SamplingRules(0, 0, 2.0, 1.0, 1))
        self.store = store
        info = replace(ALONE, rank=settings.pop("known_as", rank), world_size=world_size)
        exchange = partial(Exchange, store.connect, prefix="p")
        job = Job(lambda: self.group, lambda: "backward", lambda: {"oom": rank}, dict, exchange)
        config = Config(tuning=f"rank_report_interval_s={settings.pop('every_s', 5.0)}")
        self.ranks = RankCoordinator(self.run, info, config=config, job=job, clock=self.clock)

    def turns(self, seconds: float = 5.0) -> None:
        """One exchange, seen through to its end."""
        self.clock.tick(s=seconds)
        self.ranks.poll()
        exchange = self.ranks._exchange
        assert exchange is not None
        until(lambda: exchange._found is not None)
        self.ranks.poll()

    def polled_each_second(self, seconds: int) -> None:
        """As the agent does, without looking at the answers."""
        for _ in range(seconds):
            self.ranks.poll()
            self.clock.tick(s=1)

    def events(self, name: str) -> list[dict[str, Any]]:
        """Events of this name since the last call."""
        return [dict(event.attributes) for event in self.run.spans.drain()[1] if event.name == name]


@pytest.fixture
def store() -> FakeStore:
    return FakeStore()


@pytest.fixture
def members(store: FakeStore) -> Iterator[list[Member]]:
    joined: list[Member] = []
    yield joined
    store.released.set()
    for member in joined:
        if member.ranks._exchange is not None:
            member.ranks._exchange.close(5)


def join(members: list[Member], store: FakeStore, rank: int, world_size: int, **settings: Any) -> Member:
    members.append(Member(store, rank, world_size, **settings))
    return members[-1]


def test_a_rank_leaves_its_record_and_rank_0_reads_all(members: list[Member], store: FakeStore) -> None:
    """Two ranks, two records, one metric."""
    first, second = join(members, store, 0, 2), join(members, store, 1, 2)
    second.turns()
    first.turns()
    builder = MetricBuilder()
    first.ranks.write(builder)
    values = {family.metric.name: family.points[0] for family in builder.families()}

    assert decode(store.held["p/1"]).events["oom"] == 1
    assert values["train.ranks.reporting"].value == 2  # type: ignore[union-attr]  # no histogram


def test_without_a_process_group_nothing_is_started(members: list[Member], store: FakeStore) -> None:
    """A run of one rank has no thread, no connection and no metric of ranks."""
    alone = join(members, store, 0, 1)
    alone.group = None
    alone.ranks.poll()

    assert alone.ranks._exchange is None
    assert (alone.ranks.summary(), alone.ranks.finding(1.0), alone.ranks.faults) == (None, None, 0)


def test_the_exchange_can_be_turned_off(members: list[Member], store: FakeStore) -> None:
    """Whoever wants nothing in the job's store gets nothing there."""
    member = join(members, store, 0, 2, every_s=0.0)
    member.clock.tick(s=100)
    member.ranks.poll()

    assert member.ranks._exchange is None


@pytest.mark.parametrize(("world_size", "seconds"), [(2, 60 + 8 * 5), (400, 2 * 60 + 8 * 5), (1000, 68 * 5)])
def test_the_first_reports_follow_each_other_faster(
    world_size: int, seconds: int, members: list[Member], store: FakeStore
) -> None:
    """A run of ten seconds ended before a slow rank was named. In large jobs the store allows for no more."""
    member = join(members, store, 2, world_size)
    member.polled_each_second(seconds)

    until(lambda: "p/2" in store.held and decode(store.held["p/2"]).sequence == 60 + 8)


def test_the_reports_of_a_rank_that_trains_soon_follow_each_other_as_usual(
    members: list[Member], store: FakeStore
) -> None:
    """Every report wakes a thread beside training."""
    member = join(members, store, 2, 2)
    steps = Tape().repeat(20, Tape.step)
    member.run.learn(steps.sources)
    member.run.feed(1, np.array(steps.times), np.array(steps.codes), name="MainThread", main=True)
    member.polled_each_second(15 + 8 * 5)

    until(lambda: "p/2" in store.held and decode(store.held["p/2"]).sequence == 15 + 8)


def test_a_rank_is_as_patient_as_the_most_patient_that_it_may_wait_for(
    members: list[Member], store: FakeStore
) -> None:
    """While rank 5 saves, the others sit in a collective; rank 0 learns it from its record, the others from rank 0."""
    first, last = join(members, store, 0, 8), join(members, store, 7, 8)
    store.held["p/5"] = encode(report(5, doing="checkpointing", patience_s=1800.0))
    for _ in range(2):
        first.turns()
        last.turns()

    assert first.run.stalls.threshold_ns == last.run.stalls.threshold_ns == 1800 * 10**9
    assert last.run.stalls.own_ns == 300 * 10**9


def test_every_rank_knows_the_slow_rank_that_rank_0_has_found(
    members: list[Member], store: FakeStore
) -> None:
    """The others were compute-bound, by the time that they waited for it in backward."""
    first, last = join(members, store, 0, 4), join(members, store, 3, 4)
    slow = Straggler(3, "node-3", "other", excess_s=0.02, step_s=0.04, waits_s=0.019, windows=7)
    first.ranks._slow = slow
    first.turns()
    last.turns()

    assert last.ranks.finding(10.0) == straggler_finding(slow, others=3, train_s=10.0)
    store.held["p/0"] = encode(report(0))
    last.turns()
    assert last.ranks.finding(10.0) is None


def hung(**rank_0: Any) -> dict[int, str]:
    """Four ranks, of which the last never got its batch."""
    stuck = report(3, stage="data", loader="train", after="optimizer", **STILL)
    return {
        rank: encode(d)
        for rank, d in enumerate([report(0, **STILL | rank_0), *(report(r, **STILL) for r in (1, 2)), stuck])
    }


def test_a_hang_is_reported_by_rank_0_alone(
    members: list[Member], store: FakeStore, caplog: pytest.LogCaptureFixture
) -> None:
    """Every rank could find the culprit; one message is enough."""
    first, deputy = join(members, store, 0, 4), join(members, store, 1, 4)
    first.turns()
    deputy.turns()
    with caplog.at_level(logging.WARNING, logger="otel_train"):
        first.ranks._read(hung())
        deputy.ranks._read(hung())

    (stall,) = first.events("train.stall")
    assert (stall["train.rank"], stall["train.stage"], stall["train.loader"]) == (3, "data", "train")
    assert stall["train.stall.suspect"] is True
    assert deputy.events("train.stall") == []
    assert "Rank 3 on node-3 holds the run up: in stage data of loader train" in caplog.text


def test_the_deputy_speaks_when_rank_0_has_fallen_silent(members: list[Member], store: FakeStore) -> None:
    """Its process is stopped or gone: no other rank would say so."""
    deputy = join(members, store, 1, 4)
    deputy.turns()
    records = {rank: encode(report(rank)) for rank in range(4)}
    deputy.ranks._read(records)
    deputy.clock.tick(s=301)
    moving = {rank: encode(report(rank, sequence=2, **STILL)) for rank in range(1, 4)}
    deputy.ranks._read(records | moving)

    assert [stall["train.rank"] for stall in deputy.events("train.stall")] == [0]


def test_the_others_keep_the_baselines_of_rank_0(members: list[Member], store: FakeStore) -> None:
    """So that a kept step has all its ranks in one trace."""
    third = join(members, store, 2, 4)
    store.held["p/0"] = encode(report(0, every=64))
    third.turns()
    assert third.run.sampler.every == 64

    store.held["p/0"] = "of another version"
    third.turns()
    assert third.run.sampler.every == 64
    assert third.ranks.summary() is None


def test_a_rank_that_calls_itself_another_says_so(
    members: list[Member], store: FakeStore, caplog: pytest.LogCaptureFixture
) -> None:
    """Spawned without RANK, and instrumented too early: all would report as rank 0."""
    with caplog.at_level(logging.WARNING, logger="otel_train"):
        join(members, store, 1, 2, known_as=0).turns()

    assert "This process is rank 1 of its process group, and its metrics say rank 0" in caplog.text
    assert "p/1" in store.held


def test_in_a_large_job_each_rank_writes_less_often(members: list[Member], store: FakeStore) -> None:
    """What the store takes from all ranks together stays the same."""
    member = join(members, store, 2, 10_240)
    member.turns()
    before = store.held["p/2"]
    member.clock.tick(s=20)
    member.ranks.poll()
    time.sleep(0.05)
    assert store.held["p/2"] == before

    member.turns(10_240 / RECORDS_PER_S)
    assert decode(store.held["p/2"]).sequence == 2


def test_a_fault_of_the_store_is_counted_and_ends_in_silence(members: list[Member], store: FakeStore) -> None:
    """Telemetry that cannot be exchanged is no reason to stop training."""
    store.fails = True
    member = join(members, store, 0, 2)
    for faults in (1, 2, 3):
        member.clock.tick(s=6)
        member.ranks.poll()
        until(partial(lambda faults: member.ranks.faults == faults, faults))
    member.clock.tick(s=6)
    member.ranks.poll()

    assert member.ranks.faults == 3
    assert member.ranks._exchange is not None
    assert member.ranks._exchange.off


def test_metrics_about_all_ranks_end_with_the_answers_of_the_store(
    members: list[Member], store: FakeStore, caplog: pytest.LogCaptureFixture
) -> None:
    """What was true an hour ago reads as if all was well."""
    member = join(members, store, 0, 2)
    member.turns()
    assert published(member) == {1.0}

    store.there = False
    member.polled_each_second(100)
    assert published(member) == set()
    assert member.ranks.faults == 1
    assert caplog.text.count("store does not answer") == 1

    store.there = True
    member.turns()
    assert published(member) == {1.0}


def test_a_process_that_was_stopped_does_not_blame_the_store(members: list[Member], store: FakeStore) -> None:
    """A laptop sleeps for an hour: nothing was asked meanwhile."""
    member = join(members, store, 0, 2)
    member.turns()
    member.clock.tick(s=3600)
    member.ranks.poll()

    assert published(member) == {1.0}
    assert member.ranks.faults == 0


def test_a_program_that_ends_its_process_group_has_no_fault(members: list[Member], store: FakeStore) -> None:
    """The store has ended with it."""
    member = join(members, store, 0, 2)
    member.turns()
    store.there, member.group = False, None
    member.polled_each_second(100)

    assert published(member) == set()
    assert member.ranks.faults == 0


def published(member: Member) -> set[float]:
    """Returns the number of ranks that report, if it is published."""
    builder = MetricBuilder()
    member.ranks.write(builder)
    return set(builder.values(c.RANKS_REPORTING).values())
