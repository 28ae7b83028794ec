"""Which steps get a trace: few enough to be cheap, and the slow and failed ones."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from otel_train.accounting.types import StepRows
from otel_train.aggregation.spans import ENOUGH_STEPS, MEDIAN_STEPS, SamplingRules, SpanSampler

NS_PER_MS = 10**6
NS_PER_S = 10**9
NEVER = 1 << 40

QUIET = SamplingRules(warmup_steps=0, every_steps=NEVER, slow_factor=2.0, per_s=1000.0, burst=1000)
"""Nothing is kept but for a reason the test gives."""


def steps(durations_ns: list[int], *, started_ns: int = 0, failed: tuple[int, ...] = ()) -> StepRows:
    """Closed training steps, one right after the other."""
    durations = np.array(durations_ns, dtype=np.int64)
    ends = started_ns + np.cumsum(durations)
    nothing = np.zeros(len(durations), dtype=np.int64)
    broken = nothing.copy()
    broken[list(failed)] = 1
    columns = [nothing, nothing - 1, ends - durations, ends, durations, nothing + 1, broken]
    return StepRows._make([*columns, *[nothing] * 5, nothing - 1])


class Loop:
    """A loop whose steps go to one sampler, slice by slice."""

    def __init__(self, rules: SamplingRules = QUIET) -> None:
        self.sampler = SpanSampler(rules, started_ns=0)
        self.now_ns = 0
        self.number = 1

    def run(self, *durations_ms: float, failed: tuple[int, ...] = ()) -> list[tuple[int, str]]:
        """(number, reason) of what is kept among steps of these durations."""
        rows = steps([int(ms * NS_PER_MS) for ms in durations_ms], started_ns=self.now_ns, failed=failed)
        numbers = self.number + np.arange(len(durations_ms))
        kept = self.sampler.choose(rows, numbers, np.arange(len(durations_ms)))
        self.now_ns, self.number = int(rows.ended_ns[-1]), self.number + len(durations_ms)
        return [(step.number, step.reason) for step in kept]


def test_nothing_is_slow_before_the_run_has_a_pace() -> None:
    """The first steps compile, cache and warm up: their median says nothing."""
    loop = Loop()
    loop.run(*[1] * (ENOUGH_STEPS - 1))

    assert loop.sampler.median_ns == 0
    assert loop.run(500) == []


@pytest.mark.parametrize(("rules", "before_ms", "steps_ms", "kept"), [
    # Where a run goes wrong it mostly does so at once.
    pytest.param({"warmup_steps": 3}, [1, 1], [1, 1], [(3, "warmup")], id="the first ones"),
    # The question "why was that one slow" needs the step, not an average.
    pytest.param({}, [10] * ENOUGH_STEPS, [19.9, 20.1, 10], [(ENOUGH_STEPS + 2, "slow")], id="one slower than its run"),
    # Batches of text differ in length: twice the median is nothing special. Median 10, deviation 5: the limit is 10 + 5 * 5.
    pytest.param({}, [5, 15] * ENOUGH_STEPS, [34, 36], [(2 * ENOUGH_STEPS + 2, "slow")], id="where steps differ, one beyond noise"),
    # A slow step means something beside an ordinary one.
    pytest.param({"every_steps": 4}, [1], [1] * 8, [(4, "baseline"), (8, "baseline")], id="every nth one"),
])  # fmt: skip
def test_a_step_is_kept_that_answers_a_question(
    rules: dict[str, int], before_ms: list[int], steps_ms: list[float], kept: list[tuple[int, str]]
) -> None:
    """The others are in the averages."""
    loop = Loop(QUIET._replace(**rules))
    loop.run(*before_ms)

    assert loop.run(*steps_ms) == kept


def test_ranks_that_run_at_about_the_same_speed_keep_the_same_baselines() -> None:
    """A trace with one rank in it shows no straggler."""
    kept = []
    for ms in (10.0, 10.4, 9.7):
        loop = Loop(QUIET._replace(every_steps=0, slow_factor=100.0))
        loop.run(*[ms] * 100)
        kept.append(loop.run(*[ms] * 8000))

    assert kept[0]
    assert kept[0] == kept[1] == kept[2]


def test_a_failed_step_is_kept_before_any_other_reason() -> None:
    """The step that killed the run is the one to look at."""
    loop = Loop(QUIET._replace(warmup_steps=2))

    assert loop.run(1, 1, 1, failed=(1, 2)) == [(1, "warmup"), (2, "error"), (3, "error")]


def test_the_step_of_a_value_that_was_not_finite_is_kept() -> None:
    """The batch that made the loss NaN is what one wants to see."""
    loop = Loop()
    loop.sampler.nonfinite(int(1.5 * NS_PER_MS))

    assert loop.run(1, 1, 1) == [(2, "nonfinite")]


def test_what_is_limited_is_counted() -> None:
    """A run of failures must neither flood the back end nor pass for a few."""
    loop = Loop(QUIET._replace(warmup_steps=100, per_s=1.0, burst=3))

    assert len(loop.run(*[1] * 10)) == 3
    assert loop.sampler.limited == 7


def test_ranks_keep_the_baselines_that_rank_0_keeps() -> None:
    """A power of two of one's own pace is twice that of a rank just beyond the edge: half of its traces are alone."""
    slower, faster = Loop(), Loop()
    slower.sampler = SpanSampler(QUIET._replace(every_steps=0), started_ns=0)
    faster.sampler = SpanSampler(QUIET._replace(every_steps=0), started_ns=0)
    slower.run(*[480] * ENOUGH_STEPS)
    faster.run(*[460] * ENOUGH_STEPS)
    assert (slower.sampler.every, faster.sampler.every) == (64, 128)

    faster.sampler.agree(slower.sampler.every)
    assert faster.sampler.every == 64
    assert slower.run(*[480] * 200) == faster.run(*[460] * 200)


def test_what_the_user_sets_is_not_up_for_agreement() -> None:
    """Every rank has the same setting anyway."""
    loop = Loop(QUIET._replace(every_steps=4))
    loop.sampler.agree(64)

    assert loop.sampler.every == 4
    assert Loop(QUIET).sampler.every == NEVER


def test_a_median_looks_back_on_a_bounded_number_of_steps() -> None:
    """A run that became faster must not be judged by its slow beginning, nor grow in memory."""
    loop = Loop()
    loop.run(*[100] * 1000)
    loop.run(*[10] * MEDIAN_STEPS)

    assert loop.sampler.median_ns == 10 * NS_PER_MS


@given(
    slices=st.lists(st.lists(st.integers(1, 2 * NS_PER_S), min_size=1, max_size=30), min_size=1, max_size=8),
    per_s=st.floats(0.1, 20.0),
    burst=st.integers(1, 10),
)
def test_never_more_than_the_burst_and_the_rate_allow(
    slices: list[list[int]], per_s: float, burst: int
) -> None:
    """In any stretch of any run: the price of traces is known beforehand."""
    sampler = SpanSampler(SamplingRules(NEVER, NEVER, 2.0, per_s, burst), started_ns=0)
    ends: list[int] = []
    now_ns, wanted = 0, 0
    for durations in slices:
        rows = steps(durations, started_ns=now_ns)
        numbers = np.arange(wanted, wanted + len(durations))
        kept = sampler.choose(rows, numbers, np.arange(len(durations)))
        ends += [int(rows.ended_ns[step.row]) for step in kept]
        now_ns, wanted = int(rows.ended_ns[-1]), wanted + len(durations)

    for i, first in enumerate(ends):
        for j in range(i, len(ends)):
            allowed = burst + per_s * (ends[j] - first) / NS_PER_S
            assert j - i + 1 <= allowed + 1e-6
    assert len(ends) + sampler.limited == wanted


@given(st.lists(st.integers(1, 10**7), min_size=1, max_size=80), st.data())
def test_it_does_not_matter_much_how_steps_are_sliced(durations: list[int], data: st.DataObject) -> None:
    """How often the agent polls must not decide about warm-up steps, baselines and failures."""
    cut = data.draw(st.integers(0, len(durations)))
    rules = SamplingRules(3, 7, 1e9, 1e9, 10**6)
    whole, halves = Loop(rules), Loop(rules)
    milliseconds = [ns / NS_PER_MS for ns in durations]
    expected = whole.run(*milliseconds)
    found = [kept for part in (milliseconds[:cut], milliseconds[cut:]) if part for kept in halves.run(*part)]

    assert found == expected
