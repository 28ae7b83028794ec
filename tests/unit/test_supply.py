"""Whether workers keep up, and what to change when they do not."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from otel_train.aggregate.names import Key
from otel_train.aggregate.supply import Supply, needed
from otel_train.aggregate.totals import StageTotals
from otel_train.aggregate.verdict import findings

if TYPE_CHECKING:
    from otel_train.records import Finding

BATCHES = 100
FOUR = Supply(4, 0.040, 0.040, 0.045, 2, persistent=True, processors=16)


def judged(
    supply: Supply, *, wait_s: float = 0.5, ask_s: float = 0.008, steps: int = BATCHES
) -> list[Finding]:
    """A training in which the loop would ask every ``ask_s`` and waits ``wait_s`` in all."""
    rows = [
        StageTotals(Key("data", "code", "train", ""), BATCHES, 0, wait_s, wait_s, None),
        StageTotals(Key("forward", "code", "train", "m"), BATCHES, 0, ask_s * BATCHES, ask_s * BATCHES, None),
    ]
    return findings(rows, steps=steps, activities={"productive": 1.0}, supplies={"code": supply})


@pytest.mark.parametrize(
    ("build_s", "ask_s", "workers"),
    [(0.040, 0.008, 6), (0.040, 0.0101, 5), (0.036, 0.01, 4), (0.001, 0.1, 1)],
)
def test_as_many_workers_are_needed_as_leave_some_room(build_s: float, ask_s: float, workers: int) -> None:
    """Five that are busy all the time keep up only with batches that all take the same."""
    assert needed(build_s, ask_s) == workers


def test_too_few_workers_are_told_the_right_number() -> None:
    """What to type, and the figures it comes from."""
    first = judged(FOUR)[0]

    assert (first.name, first.loader) == ("input_bound", "code")
    assert "4 workers take 40 ms per batch, one every 10 ms; the loop asks every 8 ms." in first.claim
    assert first.advice == "`code` keeps up with num_workers=6 (it has 4)."
    assert first.evidence["build_p50_seconds"] == 0.040
    assert first.evidence["ask_interval_seconds"] == pytest.approx(0.008)


def test_more_workers_than_processors_are_no_advice() -> None:
    """They would take turns."""
    first = judged(FOUR._replace(processors=2))[0]

    assert "num_workers=6" in first.advice
    assert "2 processors" in first.advice
    assert "cheaper to build" in first.advice


def test_workers_that_keep_up_but_are_uneven_need_a_longer_queue() -> None:
    """One batch in a hundred that takes a second is waited for by everybody behind it."""
    first = judged(FOUR._replace(build_s=0.020, build_p99_s=0.5))[0]

    assert "prefetch_factor=4" in first.advice


def test_workers_that_keep_up_evenly_are_not_the_cause() -> None:
    """Megabytes through shared memory, or fewer processors than workers: more workers make it worse."""
    first = judged(FOUR._replace(build_s=0.020))[0]
    crowded = judged(FOUR._replace(build_s=0.020, processors=4))[0]

    assert "handed over" in first.advice
    assert "share 4 processors" in crowded.advice


def test_a_loader_without_workers_is_told_how_many() -> None:
    """There the wait is the building."""
    first = judged(Supply(0, processors=8), wait_s=2.4)[0]  # 24 ms against 8 ms

    assert "num_workers=4" in first.advice
    few = judged(Supply(0, processors=2), wait_s=2.4)[0]
    assert "num_workers=2" in few.advice
    assert "4 workers" in few.advice


def test_what_beginning_a_pass_costs_does_not_make_training_input_bound() -> None:
    """Three passes that wait for workers to start, and never again: another cause, another cure."""
    supply = FOUR._replace(persistent=False, passes=3, making_s=0.1, first_s=0.38)
    first, second = judged(supply)

    assert first.name == "compute_bound"
    assert (second.name, second.severity, second.loader) == ("slow_start", "warning", "code")
    assert "160 ms, 3 times" in second.claim
    assert "persistent_workers=True" in second.advice
    assert second.seconds == pytest.approx(0.48)
    assert first.evidence["data_wait_ratio"] == pytest.approx(0.02 / 1.3)


@pytest.mark.parametrize(
    ("supply", "advice"),
    [(FOUR, "first batch of `code` is built while"), (Supply(0), "once, when its dataset is made")],
)
def test_a_slow_start_of_another_kind_gets_another_advice(supply: Supply, advice: str) -> None:
    """Workers that persist cannot persist more."""
    found = judged(supply._replace(passes=3, first_s=0.4))

    assert advice in found[-1].advice


def test_one_slow_start_is_preparation() -> None:
    """Every run has one."""
    found = judged(FOUR._replace(passes=1, first_s=0.5))

    assert [finding.name for finding in found] == ["compute_bound"]


def test_the_steady_wait_is_counted_without_the_first_batches() -> None:
    """The wait per batch is what a batch in mid-pass waits for."""
    first = judged(FOUR._replace(passes=10, first_s=0.2))[0]

    assert first.seconds == pytest.approx(0.3)
    assert "3.33 ms per batch" in first.claim
