"""All ranks as rank 0 sees them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from otel_train.aggregation.metrics import MetricBuilder
from otel_train.catalog import RANK_EVENT
from otel_train.datamodel import Point
from otel_train.distributed.coordinator import MOST_NAMED, RankMonitor
from otel_train.distributed.hang import HangSuspect
from otel_train.distributed.rank_report import RankReport, encode
from otel_train.distributed.straggler import Stragglers
from tests.support.rank_reports import later, report, world


class Seen:
    """Two ranks that rank 0 listens to."""

    def __init__(self, size: int = 2, *, speaks: bool = False) -> None:
        self.monitor = RankMonitor(size, every_s=5.0, stall_after_s=300.0, speaks=speaks)

    def take(self, now_s: float, *reports: RankReport) -> list[HangSuspect]:
        return self.monitor.take({d.rank: encode(d) for d in reports}, now_s)

    def metrics(self) -> dict[str, dict[tuple[str, ...], float]]:
        builder = MetricBuilder()
        self.monitor.write(builder)
        return {
            family.metric.name: {
                tuple(value for _, value in point.attributes): point.value
                for point in family.points
                if isinstance(point, Point)
            }
            for family in builder.families()
        }


def events(**counts: int) -> dict[str, int]:
    return dict.fromkeys(RANK_EVENT.values, 0) | counts


def test_before_any_record_there_is_no_metric() -> None:
    """Not measured is absent: a 0 would page for two missing ranks."""
    seen = Seen()

    assert seen.metrics() == {}
    assert seen.monitor.summary() is None


def test_when_a_whole_node_is_gone_its_first_ranks_are_named() -> None:
    """A list of a thousand names is too long to act on."""
    gone = [report(rank, sequence=1) for rank in range(1, 64)]
    seen = Seen(64)
    seen.take(0.0, report(0, sequence=1), *gone)
    found = seen.take(400.0, report(0, sequence=80, stalled=True, quiet_s=400.0), *gone)

    assert [one.rank for one in found] == list(range(1, MOST_NAMED + 1))


def test_a_rank_whose_record_stands_still_no_longer_reports() -> None:
    """It died without a word; the store still holds what it said last."""
    seen = Seen()
    seen.take(0.0, report(0, sequence=1), report(1, sequence=1))
    assert seen.metrics()["train.ranks.reporting"] == {(): 2}

    seen.take(15.1, report(0, sequence=4), report(1, sequence=1))
    assert seen.metrics()["train.ranks.reporting"] == {(): 1}
    assert seen.monitor.silent == [1]


def test_a_rank_that_ended_by_itself_is_not_missed() -> None:
    """It took its record away. Rank 0 often goes on to save and evaluate: that must not page for the others."""
    seen = Seen()
    seen.take(0.0, report(0), report(1))
    assert seen.take(1000.0, report(0, sequence=9)) == []
    assert seen.monitor.silent == []
    assert seen.metrics()["train.ranks.reporting"] == {(): 2}


def test_the_events_of_all_ranks_are_summed_and_never_forgotten() -> None:
    """A counter that falls when a rank ends reads as a restart, and its alert goes off again."""
    seen = Seen()
    seen.take(0.0, report(0, events=events(oom=1)), report(1, events=events(oom=2, stall=1)))
    seen.take(5.0, report(0, sequence=2, events=events(oom=1, drop=4)))
    found = seen.metrics()["train.ranks.events"]

    assert found[("oom",)] == 3
    assert (found[("stall",)], found[("drop",)], found[("nonfinite",)]) == (1, 4, 0)


@pytest.mark.parametrize("record", ["hello", encode(report(1, stages={"data": float("nan")}))])
def test_a_record_that_makes_no_sense_costs_only_itself(record: str) -> None:
    """A rank of another version must not blind us to the others, nor a time that is no number end their comparison."""
    seen = Seen()
    seen.monitor.take({0: encode(report(0)), 1: record}, 0.0)

    assert seen.metrics()["train.ranks.reporting"] == {(): 1}
    assert seen.monitor.refused == 1


def test_a_record_of_another_rank_is_no_record() -> None:
    """It would be counted twice, and named in place of the rank that it came from."""
    seen = Seen()
    seen.monitor.take({0: encode(report(0)), 1: encode(report(0))}, 0.0)

    assert seen.monitor.refused == 1


def test_a_rank_that_cannot_be_heard_holds_nothing_up_while_the_others_go_on() -> None:
    """Its agent died, or its way to the store: the others make steps, so they do not wait for it."""
    seen = Seen(3)
    lost = report(2, stage="data", after="optimizer", stalled=True, quiet_s=301.0)
    assert seen.take(0.0, *(report(rank, quiet_s=300.0) for rank in (0, 1)), lost) != []
    assert seen.take(400.0, report(0, sequence=9), report(1, sequence=9, quiet_s=3.0), lost) == []
    assert seen.metrics()["train.rank.stall.time"] == {("2", "node-2", "data"): 0.0}

    still: dict[str, Any] = {"sequence": 99, "quiet_s": 500.0}
    found = seen.take(900.0, report(0, **still), report(1, **still), lost)
    assert [(suspect.rank, suspect.silent) for suspect in found] == [(2, True)]


def test_a_rank_that_cannot_be_heard_does_not_end_the_comparison_of_the_others() -> None:
    """Of a thousand ranks one always loses its way to the store; what was measured last would stand for ever."""
    seen = Seen(3)
    now = [report(rank) for rank in range(3)]
    lost = now[2]
    for at_s in range(0, 600, 5):
        seen.take(float(at_s), *now[:2], lost)
        now = [later(one, 10, {"data": 0.1 + 0.1 * (one.rank == 1), "backward": 0.2}) for one in now]

    assert ("1", "node-1", "data") in seen.metrics()["train.straggler.excess.ratio"]


def test_a_hang_is_reported_once() -> None:
    """Ten hours of hanging are one event."""
    seen = Seen()
    still: dict[str, Any] = {"stalled": True, "quiet_s": 300.0}
    stuck = report(1, stage="data", loader="train", after="optimizer", **still)

    first = seen.take(300.0, report(0, **still), stuck)
    assert [(s.rank, s.stage) for s in first] == [(1, "data")]
    assert seen.take(305.0, report(0, sequence=2, **still), stuck._replace(sequence=2)) == []
    assert [s["rank"] for s in (seen.monitor.summary() or {})["suspects"]] == [1]

    seen.take(310.0, report(0, sequence=3), report(1, sequence=3))
    assert _longest(seen) == [(1, "data", 300.0)]
    again = seen.take(900.0, report(0, sequence=4, **still), stuck._replace(sequence=4, quiet_s=200.0))
    assert [s.rank for s in again] == [1]
    assert _longest(seen) == [(1, "data", 300.0)]


def _longest(seen: Seen) -> list[tuple[int, str, float]]:
    held_up = (seen.monitor.summary() or {})["longest_stall"]
    return [(suspect["rank"], suspect["stage"], suspect["quiet_s"]) for suspect in held_up]


def test_as_many_series_for_many_ranks_as_for_few() -> None:
    """Ten thousand ranks must not become ten thousand series."""

    def series(size: int) -> int:
        seen = Seen(size)
        begun = [report(rank) for rank in range(size)]
        seen.take(0.0, *begun)
        spent = {"data": 0.001, "forward": 0.01, "backward": 0.02, "optimizer": 0.001, "other": 0.001}
        seen.take(5.0, *(later(one, 10, spent) for one in begun))
        return sum(len(points) for points in seen.metrics().values())

    assert series(2) == series(300) == 1 + 6 + 5 * 4


def test_the_work_of_the_ranks_is_published_by_statistic() -> None:
    """Two ranks with 1 and 3 ms of data per step."""
    seen = Seen()
    begun = [report(0), report(1)]
    seen.take(0.0, *begun)
    seen.take(5.0, later(begun[0], 10, {"data": 0.001}), later(begun[1], 10, {"data": 0.003}))
    found = seen.metrics()

    assert found["train.rank.work.time"][("data", "min")] == 0.001
    assert found["train.rank.work.time"][("data", "max")] == 0.003
    assert found["train.straggler.excess.ratio"] == {("1", "node-1", "data"): pytest.approx(2.0)}


def test_the_three_ranks_with_the_most_work_of_their_own_are_named() -> None:
    """Whoever is called at night needs the number of the rank, not that there is one."""
    seen = Seen(10)
    begun = [report(rank) for rank in range(10)]
    seen.take(0.0, *begun)
    extra = {2: 0.05, 5: 0.03, 7: 0.02, 8: 0.01}
    seen.take(
        5.0,
        *(
            later(one, 10, {"data": 0.1 + extra.get(rank, 0.0), "backward": 0.1 - extra.get(rank, 0.0)})
            for rank, one in enumerate(begun)
        ),
    )
    found = seen.metrics()["train.straggler.excess.ratio"]

    assert found == {
        ("2", "node-2", "data"): pytest.approx(0.5),
        ("5", "node-5", "data"): pytest.approx(0.3),
        ("7", "node-7", "data"): pytest.approx(0.2),
    }


def test_a_rank_that_no_longer_has_more_work_is_published_as_0() -> None:
    """A gauge that vanished would be remembered for five minutes, and chance would keep every rank above the limit."""
    seen = Seen(8)
    now = {rank: report(rank) for rank in range(8)}
    seen.take(0.0, *now.values())
    shown: set[tuple[str, ...]] = set()
    for slow in (3, 5, 3, 1, 6, 7, 2, 0):
        now = {
            rank: later(
                each, 10, {"data": 0.1 + 0.05 * (rank == slow), "backward": 0.1 - 0.05 * (rank == slow)}
            )
            for rank, each in now.items()
        }
        seen.take(5.0 * slow, *now.values())
        found = seen.metrics()["train.straggler.excess.ratio"]
        shown |= set(found)
        assert {labels[0] for labels, ratio in found.items() if ratio} == {str(slow)}
        assert set(found) == shown, "a series ended without a last word"


def test_a_rank_that_holds_the_run_up_is_named_until_it_moves() -> None:
    """A gauge that vanished would be remembered for five minutes; 0 says at once that it is over."""
    seen = Seen()
    still: dict[str, Any] = {"stalled": True, "quiet_s": 310.0}
    stuck = report(1, stage="data", loader="train", after="optimizer", **still)
    seen.take(0.0, report(0, stage="backward", **still), stuck)
    assert seen.metrics()["train.rank.stall.time"] == {("1", "node-1", "data"): 310.0}

    seen.take(5.0, report(0, sequence=2), report(1, sequence=2))
    assert seen.metrics()["train.rank.stall.time"] == {("1", "node-1", "data"): 0.0}


def test_rank_0_counts_samples_for_all_ranks_where_it_alone_exports() -> None:
    """A sum over what is exported is then the global number in every profile; ranks that have ended stay in it."""
    seen = Seen(speaks=True)
    mine = {("train.samples", "main", "train"): 80, ("train.tokens", "", "train"): 5}
    seen.take(0.0, report(0, counted=mine), report(1, counted=mine))
    seen.take(5.0, report(0, sequence=2, counted=mine))

    assert seen.metrics()["train.samples"] == {("main", "train"): 160}
    assert seen.metrics()["train.tokens"] == {("train",): 10}
    assert "train.samples" not in Seen().metrics()


def test_a_slow_rank_is_named_where_single_steps_vary_more_than_it_is_slower() -> None:
    """In every short window the slowest is another rank, whose steps took long by chance; in long ones it is this rank."""
    numbers, size, named = np.random.default_rng(3), 64, []
    for extra_s in (0.0, 0.05):
        monitor = RankMonitor(size, every_s=5.0, stall_after_s=300.0)
        short, now = Stragglers(), world(size)
        for turn in range(60):
            own_s = 0.05 + (0.05 * numbers.pareto(2.5, (10, size)))
            own_s[:, 5] += extra_s
            rest_s = 0.1 + own_s.max(axis=1, keepdims=True) - own_s
            spent = zip(own_s.mean(axis=0).tolist(), rest_s.mean(axis=0).tolist(), strict=True)
            now = {
                rank: later(now[rank], 10, {"forward": forward, "backward": backward})
                for rank, (forward, backward) in enumerate(spent)
            }
            monitor.take({rank: encode(each) for rank, each in now.items()}, 5.0 * turn)
            short.take(now)
            assert short.slow is None
        named.append(monitor.slow.rank if monitor.slow else None)

    assert named == [None, 5]
