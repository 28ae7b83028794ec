"""What the figures mean: the sentence a person acts on."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from otel_train.aggregate.names import Key
from otel_train.aggregate.totals import StageTotals
from otel_train.bottleneck.dataloader import LoaderThroughput
from otel_train.bottleneck.rules import CRITICAL_SHARE, ENOUGH_STEPS, LARGE_SHARE, WARNING_SHARE, findings

if TYPE_CHECKING:
    from otel_train.records import Finding

COMPUTE = ("forward", "backward", "optimizer")


def stage(
    name: str, self_s: float, loader: str = "code", phase: str = "train", *, count: int = 10
) -> StageTotals:
    return StageTotals(Key(name, loader, phase, ""), count, 0, self_s, self_s, None)


def verdict(*rows: StageTotals, steps: int = 100, workers: dict[str, int] | None = None) -> list[Finding]:
    return findings(
        rows,
        steps=steps,
        activities={"productive": 1.0},
        supplies={name: LoaderThroughput(number) for name, number in (workers or {}).items()},
    )


def test_a_loader_that_training_waits_for_is_named() -> None:
    """Which loader, how much, and what it costs: the three things to know."""
    [finding] = verdict(stage("data", 3.0), stage("forward", 6.0), stage("data", 1.0, "val", "eval"))

    assert (finding.name, finding.loader, finding.severity) == ("input_bound", "code", "critical")
    assert finding.share == pytest.approx(1 / 3)
    assert finding.seconds == 3.0
    assert "`code`" in finding.claim
    assert "33%" in finding.claim
    assert "300 ms per batch" in finding.claim


@pytest.mark.parametrize(
    ("waiting_s", "name", "severity"),
    [(9.0, "compute_bound", "ok"), (11.0, "input_bound", "warning"), (21.0, "input_bound", "critical")],
)
def test_how_bad_it_is_depends_on_the_share(waiting_s: float, name: str, severity: str) -> None:
    """The thresholds of the alert rules: what the card calls critical also pages."""
    first = verdict(stage("data", waiting_s), stage("forward", 100.0 - waiting_s))[0]

    assert (first.name, first.severity) == (name, severity)
    assert (WARNING_SHARE, CRITICAL_SHARE) == (0.10, 0.20)


def test_a_slow_validation_loader_is_no_reason_to_call_training_slow() -> None:
    """One bucket for all loaders is the mistake that others made."""
    found = verdict(stage("data", 1.0), stage("forward", 99.0), stage("data", 500.0, "val", "eval"))

    assert [finding.name for finding in found] == ["compute_bound"]


def test_the_costliest_of_several_loaders_comes_first() -> None:
    """The first finding is the verdict."""
    found = verdict(stage("data", 2.0, "code"), stage("data", 3.0, "prose"), stage("forward", 5.0))

    assert [(finding.name, finding.loader) for finding in found] == [
        ("input_bound", "prose"),
        ("input_bound", "code"),
    ]


@pytest.mark.parametrize(
    ("workers", "advice"),
    [({"code": 0}, "num_workers=2"), ({"code": 3}, "has 3 workers"), ({}, "ahead of need")],
)
def test_the_advice_fits_the_loader(workers: dict[str, int], advice: str) -> None:
    """More workers are no help to a generator, and no news to a loader that has eight."""
    assert advice in verdict(stage("data", 5.0), stage("forward", 5.0), workers=workers)[0].advice


def test_a_run_that_waits_for_nothing_is_told_what_it_does() -> None:
    """That nothing is wrong is a finding, too."""
    first = verdict(stage("data", 1.0), stage("forward", 20.0), stage("backward", 79.0))[0]

    assert (first.name, first.severity) == ("compute_bound", "ok")
    assert "backward" in first.claim


def test_a_few_steps_are_too_early() -> None:
    """The first batch starts workers and warms caches: a verdict on it would be wrong."""
    [finding] = verdict(stage("data", 9.0), stage("forward", 1.0), steps=ENOUGH_STEPS - 1)

    assert finding.name == "too_early"


def test_nothing_at_all_is_too_early() -> None:
    """An empty window must not divide by zero."""
    assert verdict(steps=0)[0].name == "too_early"
    assert verdict(stage("data", 0.0), steps=50)[0].name == "too_early"


@pytest.mark.parametrize(("activity", "name"), [("eval", "eval_heavy"), ("checkpoint", "checkpoint_heavy")])
def test_time_beside_training_is_worth_a_word_when_there_is_much_of_it(activity: str, name: str) -> None:
    """Half of the night spent evaluating is not seen in any stage of training."""
    rows = (stage("forward", 60.0),)

    much, little = (
        findings(rows, steps=100, activities={"productive": 100 - spent, activity: spent}, supplies={})
        for spent in (40.0, 20.0)
    )
    assert [finding.name for finding in much] == ["compute_bound", name]
    assert [finding.name for finding in little] == ["compute_bound"]


def test_much_time_in_no_stage_is_said() -> None:
    """A loop that calls ``.item()`` every step hides there."""
    found = verdict(stage("other", 4.0), stage("forward", 6.0))

    assert [finding.name for finding in found] == ["compute_bound", "unattributed"]
    assert "otel_train.stage" in found[1].advice


@given(
    rows=st.lists(
        st.tuples(
            st.sampled_from(["data", "other", *COMPUTE]),
            st.floats(0, 1e6),
            st.sampled_from(["code", "prose"]),
        ),
        max_size=12,
        unique_by=lambda row: (row[0], row[2]),
    ),
    steps=st.integers(0, 1000),
    evaluating_s=st.floats(0, 1e6),
)
def test_a_verdict_is_never_missing_and_its_shares_are_shares(
    rows: list[tuple[str, float, str]], steps: int, evaluating_s: float
) -> None:
    """Whatever the figures: one verdict, shares within 0 and 1, advice that is not empty."""
    found = findings(
        [stage(name, self_s, loader) for name, self_s, loader in rows],
        steps=steps, activities={"productive": 1.0, "eval": evaluating_s}, supplies={},
    )  # fmt: skip

    assert found
    assert all(0 <= finding.share <= 1 for finding in found)
    assert all(finding.advice and finding.claim for finding in found)
    assert LARGE_SHARE > CRITICAL_SHARE
