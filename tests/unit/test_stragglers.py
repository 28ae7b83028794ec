"""Which rank is slow: known by its own work, and only when it is the same one again and again."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

import numpy as np
import pytest

from otel_train.distributed.rank_report import NAMED, RankReport
from otel_train.distributed.straggler import (
    Straggler,
    Stragglers,
    straggler_finding,
    window_between,
    windows_needed,
)
from tests.support.rank_reports import later, report, world

FAIR = {"data": 0.001, "forward": 0.010, "backward": 0.020, "optimizer": 0.001, "other": 0.001}


def slow_in(stage: str, by_s: float) -> dict[str, float]:
    return FAIR | {stage: FAIR.get(stage, 0.0) + by_s}


def waits_in(stage: str, for_s: float) -> dict[str, float]:
    return slow_in(stage, for_s)


class Job:
    """Ranks that run window after window."""

    def __init__(self, size: int, **facts: Any) -> None:
        self.stragglers = Stragglers()
        self.now = world(size, **facts)
        self.stragglers.take(self.now)

    def window(
        self,
        *per_step: dict[str, float],
        steps: int = 10,
        on_device: Sequence[dict[str, float] | None] = (),
        **facts: Any,
    ) -> Straggler | None:
        self.now = {
            rank: later(before, steps, spent, device, **facts)
            for (rank, before), spent, device in zip_longest(self.now.items(), per_step, on_device)
        }
        self.stragglers.take(self.now)
        return self.stragglers.slow


def windows(job: Job, number: int, *per_step: dict[str, float]) -> list[Straggler | None]:
    return [job.window(*per_step) for _ in range(number)]


@pytest.mark.parametrize("stage", ["data", "h2d", "forward", "other", NAMED])
def test_the_rank_whose_own_work_takes_longer_is_named_with_its_stage(stage: str) -> None:
    """All-reduce makes all steps equally long: only the work before it tells the ranks apart."""
    job = Job(4)
    victim = waits_in("backward", 0.03)
    found = windows(job, windows_needed(4), victim, victim, slow_in(stage, 0.03), victim)[-1]

    assert found is not None
    assert (found.rank, found.host, found.stage) == (2, "node-2", stage)
    assert found.excess_s == pytest.approx(0.03)
    assert found.waits_s == pytest.approx(0.03)
    assert found.step_s == pytest.approx(0.063)


@pytest.mark.parametrize(("barrier", "spent", "named"), [
    # The victims look slow: their backward is twice as long. Naming one sends people to a healthy machine.
    pytest.param("backward", [waits_in("backward", 0.03), slow_in("data", 0.03)], (1, "data"),
                 id="the rank that waits in backward is not slow in backward"),
    # One rank is always last; that alone is no finding.
    pytest.param("backward", [FAIR, FAIR, FAIR, slow_in("data", 0.0005)], None, id="equal ranks are left alone"),
    # Ranks that do not synchronise go on: the run loses nothing that a finding could win back.
    pytest.param("backward", [FAIR, FAIR, FAIR, slow_in("data", 0.03)], None,
                 id="a slow rank that no rank waits for is not named"),
    # A loop that calls all_reduce itself waits in ``other``: without DDP that stage proves nothing.
    pytest.param("", [slow_in("backward", 0.05), waits_in("other", 0.05)], None,
                 id="waiting in a manual reduction is not work"),
    # A request to a loader does not wait for other ranks.
    pytest.param("", [slow_in("data", 0.05), waits_in("other", 0.05)], (0, "data"),
                 id="a slow loader is seen also where the barrier is not known"),
    # It gathers weights, so it waits for the others: the victims' forward is the long one.
    pytest.param("forward", [slow_in("data", 0.05), waits_in("forward", 0.05)], (0, "data"),
                 id="the forward of a sharded model is not rank local"),
])  # fmt: skip
def test_who_waits_is_not_slow(
    barrier: str, spent: list[dict[str, float]], named: tuple[int, str] | None
) -> None:
    """Nor is a rank that costs no other one any time."""
    found = windows(Job(len(spent), barrier=barrier), 20, *spent)[-1]

    assert (found and (found.rank, found.stage)) == named


BUSY = {"h2d": 0.001, "forward": 0.020, "backward": 0.040}
"""What a device takes for a step of 65 ms. The host launches it in 3 ms and waits for it in ``.item()``."""
LAUNCHED = {"data": 0.001, "forward": 0.001, "backward": 0.001, "other": 0.062}


@pytest.mark.parametrize(("barrier", "spent", "on_device", "named"), [
    # All hosts wait in ``other``: the others for their devices, which wait for rank 1.
    pytest.param("backward", [LAUNCHED | {"other": 0.092}] * 3,
                 [BUSY | {"backward": 0.070}, BUSY | {"forward": 0.050}, BUSY | {"backward": 0.070}], (1, "forward"),
                 id="a device that is throttled"),
    # The batch came late, so this host waits less for its device.
    pytest.param("backward", [LAUNCHED | {"other": 0.092}, LAUNCHED | {"data": 0.031}, LAUNCHED | {"other": 0.092}],
                 [BUSY | {"backward": 0.070}, BUSY, BUSY | {"backward": 0.070}], (1, "data"),
                 id="a loader that holds the device up"),
    # The next batches are fetched while the device works.
    pytest.param("backward", [LAUNCHED, LAUNCHED | {"data": 0.031, "other": 0.032}, LAUNCHED], [BUSY] * 3, None,
                 id="a slow loader that no device waits for"),
    pytest.param("backward", [LAUNCHED] * 3, [BUSY] * 3, None, id="equal devices"),
    # It logs for 30 ms before it begins the next step, and has them less to wait.
    pytest.param("backward", [LAUNCHED | {"other": 0.092}] * 3,
                 [BUSY | {"backward": 0.070}, BUSY, BUSY | {"backward": 0.070}], (1, "other"),
                 id="a host that begins late"),
    # A sharded model waits for weights in forward as well.
    pytest.param("forward", [LAUNCHED | {"other": 0.092}, LAUNCHED | {"data": 0.031}, LAUNCHED | {"other": 0.092}],
                 [BUSY | {"forward": 0.050}, BUSY, BUSY | {"forward": 0.050}], (1, "data"),
                 id="a loader that holds a sharded model up"),
    # On that rank `cuda_timing` is off: the hosts are compared, as on the CPU.
    pytest.param("backward", [LAUNCHED | {"data": 0.031}, LAUNCHED | {"backward": 0.031}, LAUNCHED | {"backward": 0.031}],
                 [BUSY, None, BUSY], (0, "data"), id="a loader, while the device time of a rank is not known"),
])  # fmt: skip
def test_ranks_are_compared_by_the_clocks_of_their_devices(
    barrier: str,
    spent: list[dict[str, float]],
    on_device: list[dict[str, float] | None],
    named: tuple[int, str] | None,
) -> None:
    """The host only begins the work, and waits for it in any stage."""
    job = Job(3, barrier=barrier)
    found = [job.window(*spent, on_device=on_device) for _ in range(20)][-1]

    assert (found and (found.rank, found.stage)) == named
    assert [(each.rank, each.stage) for each in job.stragglers.top] == ([named] if named else [])


def test_the_window_in_which_the_first_device_time_comes_is_left_out() -> None:
    """Its device time would be that of all steps before, of one rank."""
    job = Job(2, barrier="backward")
    job.window(LAUNCHED, LAUNCHED, on_device=[BUSY, None])
    assert (
        window_between(job.now, {rank: later(each, 10, LAUNCHED, BUSY) for rank, each in job.now.items()})
        is None
    )


def test_a_rank_is_named_only_when_luck_would_not_have_picked_it_so_often() -> None:
    """One slow window is a hiccup; a page a minute teaches people to look away."""
    job, found = Job(2), []
    for number in range(windows_needed(2)):
        excess_s = 0.03 if number % 2 else 0.01
        found.append(job.window(waits_in("backward", excess_s), slow_in("data", excess_s)))

    assert found[:-1] == [None] * (windows_needed(2) - 1)
    assert found[-1] is not None
    assert (windows_needed(2), windows_needed(4), windows_needed(10_000)) == (11, 6, 3)


def test_a_rank_that_is_always_slower_by_about_as_much_is_named_sooner() -> None:
    """What varies little between windows is no chance, also between two ranks."""
    job, excess_s = Job(2), (0.030, 0.026, 0.034, 0.028, 0.032, 0.030)
    found = [job.window(waits_in("backward", each), slow_in("data", each)) for each in excess_s]

    assert [each is not None for each in found] == [False, False, False, False, True, True]


def test_ranks_that_take_turns_are_not_named() -> None:
    """Uneven batches slow another rank in every step: that is noise, not a straggler."""
    job = Job(2)
    for number in range(20):
        spent = (waits_in("backward", 0.03), slow_in("data", 0.03))
        assert job.window(*(spent if number % 2 else spent[::-1])) is None


@pytest.mark.parametrize("size", [2, 8, 64])
def test_ranks_with_batches_of_random_length_are_not_named(size: int) -> None:
    """Some rank is the slowest in every window; a finding in one of fifty windows is one every few minutes."""
    numbers, job, named = np.random.default_rng(1), Job(size), 0
    for _ in range(1000):
        own_s = 0.010 * numbers.lognormal(0.0, 0.5, (8, size)).mean(axis=0)
        rest_s = own_s.max() + 0.02 - own_s
        spent = (FAIR | {"forward": f, "backward": b} for f, b in zip(own_s, rest_s, strict=True))
        named += job.window(*spent, steps=8) is not None

    assert named <= 4


def test_a_node_whose_ranks_take_turns_as_the_slowest_is_named() -> None:
    """Eight ranks share a throttled host: each is slow, and which one is last is chance."""
    numbers, job = np.random.default_rng(2), Job(24)
    job.now = {rank: each._replace(host=f"gpu-{rank // 8}") for rank, each in job.now.items()}
    slow = np.where(np.arange(24) // 8 == 1, 0.03, 0.0)
    for _ in range(20):
        own_s = 0.010 + slow + numbers.uniform(0, 0.001, 24)
        rest_s = own_s.max() + 0.02 - own_s
        job.window(*(FAIR | {"forward": f, "backward": b} for f, b in zip(own_s, rest_s, strict=True)))
    found = job.stragglers.slow

    assert found is not None
    assert (found.host, found.stage) == ("gpu-1", "forward")
    assert found.ranks > 1
    assert (
        f"{found.ranks} ranks on gpu-1 are slow" in straggler_finding(found, others=23, train_s=1.0).summary
    )
    # All eight are published, window by window: each is 20 % above the median all the time.
    assert {excess.rank for excess in job.stragglers.top} == set(range(8, 16))


def test_a_node_with_most_of_the_ranks_is_named_when_enough_windows_exclude_chance() -> None:
    """Nine of ten ranks are on one node: chance picks that node 64 times in a row more often than once in a thousand."""
    job = Job(10)
    job.now = {rank: each._replace(host=f"gpu-{rank // 9}") for rank, each in job.now.items()}
    needed = windows_needed(10 / 9)
    for window in range(needed + 1):
        own_s = np.where(np.arange(10) == window % 9, 0.04, 0.01)
        spent = (FAIR | {"forward": f, "backward": 0.06 - f} for f in own_s.tolist())
        found = job.window(*spent)
        assert (found is None) == (window + 1 < needed)

    assert needed > 64
    assert found is not None
    assert (found.host, found.ranks, found.windows) == ("gpu-0", 9, needed)


def test_a_rank_that_has_recovered_is_named_no_longer() -> None:
    """The finding is about now."""
    job = Job(2)
    windows(job, 12, waits_in("backward", 0.03), slow_in("data", 0.03))

    assert job.window(FAIR, FAIR) is None


@pytest.mark.parametrize("steps", [0, 50], ids=["never began", "stopped"])
def test_a_rank_that_makes_no_training_steps_does_not_end_the_comparison_of_the_others(steps: int) -> None:
    """It evaluates, or its loop has ended: the others do not wait for it. When it trains again, it is compared again."""
    job = Job(3)
    job.now[2] = report(2, steps=steps, sequence=1)
    pair = waits_in("backward", 0.03), slow_in("data", 0.03)

    def beside(number: int, *per_step: dict[str, float]) -> Straggler | None:
        for _ in range(number):
            trained = {rank: later(job.now[rank], 10, per_step[rank]) for rank in (0, 1)}
            job.now = trained | {2: job.now[2]._replace(sequence=job.now[2].sequence + 1)}
            job.stragglers.take(job.now)
        return job.stragglers.slow

    found = beside(20, *pair)
    assert found is not None
    assert found.rank == 1
    assert beside(3, FAIR, FAIR) is None
    assert not job.stragglers.top

    windows(job, 20, waits_in("backward", 0.03), waits_in("backward", 0.03), slow_in("data", 0.03))
    assert [excess.rank for excess in job.stragglers.top] == [2]


def test_a_hiccup_does_not_hide_a_slow_rank() -> None:
    """A window in which steps were unequal says nothing; several in a row say that the ranks do not wait."""
    job = Job(2)
    pair = waits_in("backward", 0.03), slow_in("data", 0.03)
    unequal = waits_in("backward", 0.06), slow_in("data", 0.03)
    windows(job, 6, *pair)
    job.window(*unequal)
    assert windows(job, 5, *pair)[-1] is not None
    assert windows(job, 3, *unequal)[-1] is None


def test_a_rank_that_evaluates_while_the_others_wait_is_not_slow() -> None:
    """It is busy; nor do the others become slow by waiting. Their steps are longer, and the window says nothing."""
    job = Job(2)
    for _ in range(20):
        found = job.window(FAIR, waits_in("backward", 0.1), away_s=job.now[0].away_s + 1.0)
        assert found is None
    assert job.stragglers.spread == {}


def test_a_slow_rank_is_named_though_all_ranks_evaluate_in_every_window() -> None:
    """Where each window has an evaluation of all ranks, their steps are as equal as elsewhere."""
    job = Job(2)
    for _ in range(windows_needed(2)):
        found = job.window(slow_in("data", 0.03), waits_in("backward", 0.03), away_s=job.now[0].away_s + 1.0)
    assert found is not None
    assert (found.rank, found.stage) == (0, "data")


def test_windows_are_long_enough_to_mean_something() -> None:
    """A mean over two steps is a roll of the dice."""
    job = Job(2)
    for _ in range(3):
        job.window(waits_in("backward", 0.03), slow_in("data", 0.03), steps=2)
        assert job.stragglers.spread == {}
    job.window(waits_in("backward", 0.03), slow_in("data", 0.03), steps=2)

    assert job.stragglers.spread["data"].rank == 1


def test_the_first_steps_are_not_looked_at() -> None:
    """The first step compiles: the rank that compiles last is not slow."""
    stragglers = Stragglers()
    start = world(2, steps=0, step=0)
    stragglers.take(start)
    stragglers.take({0: later(start[0], 20, FAIR), 1: later(start[1], 20, slow_in("forward", 9.0))})

    assert stragglers.spread == {}


def test_a_rank_that_starts_anew_is_compared_from_its_new_start() -> None:
    """Its counts begin at 0 again: a difference to the old ones would be negative time."""
    job = Job(2)
    job.window(FAIR, FAIR)
    again = {0: job.now[0], 1: report(1, sequence=0, steps=50)}
    job.stragglers.take(again)
    job.stragglers.take({0: later(again[0], 10, FAIR), 1: later(again[1], 10, FAIR)})

    assert job.stragglers.spread["forward"].most == pytest.approx(0.010)


def test_the_spread_is_over_ranks_per_step() -> None:
    """0.001, 0.002, 0.003 and 0.010 s of data per step: median 0.0025. What no rank has measured is absent, never zero."""
    job = Job(4)
    job.window(*(FAIR | {"data": data} for data in (0.001, 0.002, 0.003, 0.010)))
    data = job.stragglers.spread["data"]

    assert (data.least, data.median, data.most) == pytest.approx((0.001, 0.0025, 0.010))
    assert data.median < data.p95 < data.most
    assert data.rank == 3
    assert "h2d" not in job.stragglers.spread


def test_the_finding_says_who_where_what_and_how_much() -> None:
    """A person on call must know which machine to look at, and at what."""
    slow = Straggler(rank=5, host="gpu-17", stage="data", excess_s=0.05, step_s=0.2, waits_s=0.048, windows=7)
    found = straggler_finding(slow, others=7, train_s=1000.0)

    assert found.name == "straggler_bound"
    assert "Rank 5 on gpu-17 is slow in `data`: 50 ms more per step" in found.summary
    assert "than the median rank; the 7 other ranks wait for it: 25% of each step" in found.summary
    assert (found.share, found.seconds, found.severity) == (0.25, 250.0, "critical")
    assert found.evidence["rank"] == 5
    assert "rank 5" in found.advice


def test_every_stage_that_can_be_slow_has_advice() -> None:
    """A finding without advice is a complaint."""
    for stage in ("data", "h2d", "forward", "other", NAMED):
        slow = Straggler(1, "node", stage, 0.05, 0.2, 0.048, 7)
        assert "rank 1" in straggler_finding(slow, others=1, train_s=1.0).advice


def test_without_time_there_is_no_window() -> None:
    """Ranks that count steps and show no stage cannot be compared."""
    begun: dict[int, RankReport] = world(2)

    assert window_between(begun, {rank: later(before, 10, {}) for rank, before in begun.items()}) is None
