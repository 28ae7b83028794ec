"""What is known of each loader, whether its workers keep up, and what to change when they do not."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from otel_train.aggregation.counters import StageTotals
from otel_train.aggregation.series_names import Key
from otel_train.bottleneck.dataloader import (
    LoaderFacts,
    LoaderThroughput,
    loader_rows,
    sentence_percent,
    throughputs,
    workers_needed,
)
from otel_train.bottleneck.rules import RuleInput, findings
from otel_train.datamodel import Finding
from otel_train.recording.events import Ending
from tests.support.edges import Tape
from tests.support.runs import Run

MS = 10**6
BATCHES = 100
FOUR = LoaderThroughput(4, 0.040, 0.040, 0.045, 2, persistent=True, processors=16)
FACTS = {"code": LoaderFacts(2, 2, persistent=False), "val": LoaderFacts(0), "never": LoaderFacts()}


def run() -> Run:
    """Two passes of ``code``, 3 + 50 each to begin, and one of ``val``."""
    tape = Tape()
    for _ in range(2):
        tape.start(ns=3 * MS).ask(ns=50 * MS).forward().backward().update()
        for _ in range(9):
            tape.ask(ns=5 * MS).forward().backward().update()
        tape.stop(why=Ending.SHORT)
    tape.start("val").validate(3)
    seen = Run().feed(tape).close(tape.now_ns)
    seen.account.totals.loaders.add_builds("code", np.array([40, 40, 80, 40]) * MS, 2)
    return seen


def row(name: str, facts: dict[str, LoaderFacts] = FACTS) -> dict[str, Any]:
    (found,) = (row for row in loader_rows(run().account.totals, facts) if row["loader"] == name)
    return found


def test_builds_starts_waits_and_endings_stand_together() -> None:
    """The wait alone does not say whose fault it is."""
    code = row("code")

    assert (code["build"]["measured_in"], code["build"]["count"], code["build"]["lost"]) == ("worker", 4, 2)
    assert code["build"]["p50"] == pytest.approx(0.040, rel=0.05)
    assert code["build"]["max"] == 0.080
    assert (code["wait"]["count"], code["wait"]["total_seconds"]) == (20, pytest.approx(0.196))
    assert (code["start"]["count"], code["start"]["avg"]) == (2, pytest.approx(0.053))
    assert code["start"]["making_seconds"] == pytest.approx(0.006)
    assert code["start"]["first_batch_seconds"] == pytest.approx(0.1)
    assert code["endings"] == {"short": 2}


def test_a_loader_without_workers_or_never_read_says_so() -> None:
    """One value under two names must not pass for two measurements, and not measured is not zero."""
    val, never = row("val"), row("never")

    assert val["build"]["measured_in"] == "training_thread"
    assert val["build"]["count"] == val["wait"]["count"] == 3
    assert (never["build"], never["wait"], never["start"], never["batch_bytes"]) == (None,) * 4
    assert (never["endings"], never["errors"], never["worker_exits"]) == ({}, {}, {})


def test_a_window_counts_from_its_beginning() -> None:
    """``reset_window`` before the second epoch."""
    account = run().account
    earlier = account.totals.copy()
    account.totals.loaders.add_builds("code", np.array([70 * MS]), 0)
    account.totals.loaders.endings["code", "epoch_end"] = 1
    (code, *_) = loader_rows(account.totals.since(earlier), FACTS)

    assert (code["build"]["count"], code["build"]["lost"]) == (1, 0)
    assert code["endings"] == {"epoch_end": 1}
    assert code["start"] is None


def test_the_rules_get_what_they_need() -> None:
    """Of training, where it reads the loader; of evaluation, where that alone does."""
    found = throughputs(run().account.totals, FACTS, 8)

    assert found["code"].build_s == pytest.approx(0.050)
    assert (found["code"].workers, found["code"].passes, found["code"].processors) == (2, 2, 8)
    assert found["code"].start_s == pytest.approx(0.106)
    assert (found["val"].passes, found["val"].build_s) == (1, None)


def judged(
    throughput: LoaderThroughput,
    *,
    wait_s: float = 0.5,
    called_s: float | None = None,
    ask_s: float = 0.008,
    steps: int = BATCHES,
) -> list[Finding]:
    """A training in which the loop would ask every ``ask_s`` and waits ``wait_s`` in all."""
    called_s = wait_s - throughput.making_s if called_s is None else called_s
    rows = [
        StageTotals(Key("data", "code", "train", ""), BATCHES, 0, wait_s, wait_s, None, None, called_s),
        StageTotals(Key("forward", "code", "train", "m"), BATCHES, 0, ask_s * BATCHES, ask_s * BATCHES, None),
    ]
    return findings(RuleInput(rows, steps, {"productive": 1.0}, {"code": throughput}))


@pytest.mark.parametrize(
    ("build_s", "ask_s", "workers"),
    [(0.040, 0.008, 6), (0.040, 0.0101, 5), (0.036, 0.01, 4), (0.001, 0.1, 1)],
)
def test_as_many_workers_are_needed_as_leave_a_margin(build_s: float, ask_s: float, workers: int) -> None:
    """Five that are busy all the time keep up only with batches that all take the same."""
    assert workers_needed(build_s, ask_s) == workers


def test_too_few_workers_get_the_right_number() -> None:
    """What to type, and the values it comes from."""
    first = judged(FOUR)[0]

    assert (first.name, first.loader) == ("input_bound", "code")
    assert (
        "4 workers take 40 ms per batch, one every 10 ms; the loop requests one every 8 ms." in first.summary
    )
    assert first.advice == "`code` keeps up with num_workers=6 (it has 4)."
    assert first.evidence["build_p50_seconds"] == 0.040
    assert first.evidence["ask_interval_seconds"] == pytest.approx(0.008)


THREE_STARTS: dict[str, Any] = {"passes": 3, "first_s": 0.4}


@pytest.mark.parametrize(("throughput", "wait_s", "advice"), [
    # Those that compute would take turns.
    pytest.param(FOUR._replace(processors=2), 0.5,
                 ["num_workers=6", "2 processors", "if workers wait for storage or a network, so many help", "cheaper to build"],
                 id="more workers than processors are advice only for those that wait"),
    # One batch in a hundred that takes a second delays all batches behind it.
    pytest.param(FOUR._replace(build_s=0.020, build_p99_s=0.5), 0.5, ["prefetch_factor=4"],
                 id="workers that keep up but are uneven need a longer queue"),
    # Megabytes through shared memory, or fewer processors than workers: more workers make it worse.
    pytest.param(FOUR._replace(build_s=0.020), 0.5, ["handed over"], id="workers that keep up evenly are not the cause"),
    pytest.param(FOUR._replace(build_s=0.020, processors=4), 0.5, ["share 4 processors"], id="nor are those that share processors"),
    # There the wait is the building: 24 ms against 8 ms.
    pytest.param(LoaderThroughput(0, processors=8), 2.4, ["num_workers=4"], id="a loader without workers gets the number to set"),
    pytest.param(LoaderThroughput(0, processors=2), 2.4, ["num_workers=2", "4 workers"], id="as far as there are processors"),
    # Workers that persist cannot persist more.
    pytest.param(FOUR._replace(**THREE_STARTS), 0.5, ["first batch of `code` is built while"],
                 id="a slow start of workers that persist"),
    pytest.param(LoaderThroughput(0, **THREE_STARTS), 0.5, ["once, when its dataset is made"], id="a slow start without workers"),
])  # fmt: skip
def test_the_advice_fits_the_workers(throughput: LoaderThroughput, wait_s: float, advice: list[str]) -> None:
    """What helps one loader makes another one worse."""
    found = judged(throughput, wait_s=wait_s)
    said = found[-1 if throughput.passes else 0].advice

    assert [part for part in advice if part not in said] == []


def test_what_beginning_a_pass_costs_does_not_make_training_input_bound() -> None:
    """Three passes that wait for workers to start, and never again: another cause, another cure."""
    throughput = FOUR._replace(persistent=False, passes=3, making_s=0.1, first_s=0.38)
    first, second = judged(throughput)

    assert first.name == "compute_bound"
    assert (second.name, second.severity, second.loader) == ("slow_start", "warning", "code")
    assert "160 ms, 3 times" in second.summary
    assert "persistent_workers=True" in second.advice
    assert second.seconds == pytest.approx(0.48)
    assert first.evidence["data_wait_ratio"] == pytest.approx(0.5 / 1.3)
    assert first.evidence["steady_wait_ratio"] == pytest.approx(0.02 / 1.3)
    assert "Waits for loaders take 1.5% of training time" in first.summary


@pytest.mark.parametrize(("passes", "first_s"), [(BATCHES, 0.5), (BATCHES // 2, 0.25), (10, 0.09)])
def test_without_workers_the_first_batch_is_waited_for_like_any_other(passes: int, first_s: float) -> None:
    """A pass for every batch, or for every second one: training is input bound, and nothing begins slowly."""
    found = judged(LoaderThroughput(0, passes=passes, first_s=first_s, processors=8), called_s=0.5)

    assert [finding.name for finding in found] == ["input_bound"]
    assert found[0].seconds == pytest.approx(0.5)
    assert "5 ms per batch" in found[0].summary
    assert ("one iterator for many batches" in found[0].advice) == (passes == BATCHES)


def test_a_pass_that_takes_seconds_to_begin_says_seconds() -> None:
    """``1.92e+03 ms`` is hard to read."""
    found = judged(FOUR._replace(persistent=False, passes=2, first_s=3.84), wait_s=4.0)

    assert "takes 1.92 s, 2 times" in found[0].summary


@pytest.mark.parametrize(
    "starts",
    [
        {"passes": 1, "first_s": 0.5},  # every run has one
        # The mean of three starts says 160 ms, which no start but the first takes.
        {"passes": 3, "making_s": 0.1, "first_s": 0.38, "longest_start_s": 0.47},
    ],
)
def test_one_slow_start_is_preparation(starts: dict[str, Any]) -> None:
    """Also of workers that persist."""
    assert [finding.name for finding in judged(FOUR._replace(**starts))] == ["compute_bound"]


def test_a_model_is_the_limit_after_a_long_preparation() -> None:
    """The only pass of a run begins with the tokenising of all its rows: what limits the steps is what comes then."""
    [found] = judged(FOUR._replace(passes=1, first_s=1.98, longest_start_s=1.98), wait_s=2.0)

    assert found.name == "compute_bound"
    assert "the model takes 29%, the beginning of passes 1.98 s; most goes to" in found.summary
    assert found.evidence["model_ratio"] == pytest.approx(0.8 / 2.8)


def test_the_steady_wait_is_counted_without_the_first_batches() -> None:
    """The wait per batch is what a batch in mid-pass waits for."""
    first = judged(FOUR._replace(passes=10, first_s=0.2))[0]

    assert first.seconds == pytest.approx(0.3)
    assert "3.33 ms per batch" in first.summary


@pytest.mark.parametrize(
    ("share", "said"),
    [(0.52, "52%"), (0.004, "0.4%"), (0.0003, "0.03%"), (1e-7, "0.00001%"), (0.0, "0%"), (1.0, "100%")],
)
def test_a_small_share_does_not_read_as_nothing(share: float, said: str) -> None:
    """What is something is not shown as 0 %."""
    assert sentence_percent(share) == said
