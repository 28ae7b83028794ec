"""Every alert fires when it must and keeps quiet when it must."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.rules import cases_progress, cases_telemetry, cases_training
from tests.rules.promtool import VARIANTS, Case, Durations, check, quiet
from tools.alerts_pages import ALERT_FILES, rules

pytestmark = pytest.mark.stack

CASES = (*cases_progress.CASES, *cases_training.CASES, *cases_telemetry.CASES)
NAMES = set(rules(*ALERT_FILES))

SCENARIOS = [
    (case, variant) for case in CASES for variant in VARIANTS if case.durations or variant == "classic"
]
"""Only histograms have variants."""


def words(part: Case | str) -> str:
    return re.sub(r"\W+", "-", part.name if isinstance(part, Case) else part)


@pytest.mark.parametrize(("case", "variant"), SCENARIOS, ids=words)
def test_alerts_fire_keep_quiet_and_resolve(case: Case, variant: str, tmp_path: Path) -> None:
    """People stop reading an alert that cries wolf, and trust one that never spoke."""
    check(tmp_path, variant, [case.document(variant)])


def test_every_alert_is_seen_firing_and_quiet() -> None:
    """An alert without both was never tested."""
    expected = [expectation for case in CASES for expectation in case.expected]
    firing = {expectation.alert for expectation in expected if expectation.instances}
    silent = {expectation.alert for expectation in expected if not expectation.instances}

    assert firing == NAMES
    assert silent == NAMES - {"Watchdog"}


def test_a_wrong_expectation_is_noticed(tmp_path: Path) -> None:
    """The tests above must be able to fail."""
    case = cases_telemetry.CASES[0]
    wrong = case._replace(expected=[quiet("TrainTelemetryDropping", 30)])

    with pytest.raises(AssertionError, match="TrainTelemetryDropping"):
        check(tmp_path, "classic", [wrong.document("classic")])


def test_an_alert_that_does_not_resolve_is_noticed(tmp_path: Path) -> None:
    """So must the part about finished runs."""
    case = cases_training.CASES[0]
    never_ends = case._replace(
        durations=[made._replace(parts=[(s, n, 400) for s, n, _ in made.parts]) for made in case.durations]
    )
    document = never_ends.document("classic")
    document["alert_rule_test"][-1]["eval_time"] = "150m"

    with pytest.raises(AssertionError, match="TrainInputBound"):
        check(tmp_path, "classic", [document])


def metrics() -> dict[str, Any]:
    """One step of a second takes a batch of each of two loaders; the step is booked under `prose`."""
    run = 'train_run_id="r",train_rank="0",train_phase="train"'
    parts = (("code", "data", 0.3), ("prose", "data", 0.1), ("prose", "forward", 0.5))
    durations = [
        Durations(
            "train_stage_duration_seconds",
            f'{run},train_loader="{loader}",train_stage="{stage}"',
            [(seconds, 30, 20)],
        )
        for loader, stage, seconds in parts
    ]
    step = Durations("train_step_duration_seconds", f'{run},train_loader="prose"', [(1.0, 30, 20)])
    steps = {
        f'train_steps_total{{train_run_id="r",train_rank="{rank}",train_phase="train"}}': "0+30x20"
        for rank in "01"
    }
    samples = {
        f'train_samples_total{{train_run_id="r",train_rank="{rank}",train_phase="train",train_loader="code"}}': "0+300x20"
        for rank in "01"
    }
    steps |= {
        f'train_rank_time_seconds_total{{train_run_id="r",train_rank="{rank}"}}': "0+30x20" for rank in "01"
    }
    # The ranks work on batches of this loader for half of the wall time; the other half is evaluation.
    spent = {
        'train_batch_time_seconds_total{train_run_id="r",train_rank="0",train_phase="train",train_loader="code"}': "0+15x20"
    }
    bound = {
        'train_throughput_theoretical_per_second{train_run_id="r",train_rank="0",train_loader="code"}': "50x20"
    }
    return Case("metrics", 30, {**steps, **samples, **spent, **bound}, (), (*durations, step)).document(
        "native"
    )


EXPECTED = {
    'run_loader_stage:train_stage_share:ratio5m{train_loader="code"}': 0.3,
    "sum(run_loader_stage:train_stage_share:ratio5m)": 0.9,
    "run:train_data_wait:ratio5m": 0.4,
    "run:train_unattributed:ratio5m": 0.1,
    "run_loader:train_step_duration_seconds:mean5m": 1.0,
    "run_loader:train_step_duration_seconds:p99_5m": 1.0,
    'run_loader_stage:train_stage_duration_seconds:p50_5m{train_stage="forward"}': 0.5,
    "run:train_steps:rate5m": 1.0,
    "run:train_samples:rate5m": 20.0,
    'run_loader:train_samples_per_batch_time:ratio5m{train_loader="code"}': 40.0,
    'run_loader:train_efficiency:ratio5m{train_loader="code"}': 0.8,
    "run_rank:train_local_work_seconds:mean5m": 0.9,
}


def test_shares_add_up_over_loaders_and_ranks(tmp_path: Path) -> None:
    """Steps are the same on all ranks, samples are not; a batch may belong to a step booked elsewhere.

    A loader's rate is over the time of its own batches, not over wall time.
    """
    document = metrics()
    document["promql_expr_test"] = [
        {
            "expr": f"round(sum({expr}), 0.01)",
            "eval_time": "8m",
            "exp_samples": [{"labels": "{}", "value": value}],
        }
        for expr, value in EXPECTED.items()
    ]

    check(tmp_path, "native", [document])
