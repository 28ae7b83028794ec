"""The checks of summaries notice what they are there for: a check that passes everything protects nothing."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.integration.loops.truth import Attribution, Truth, Watch
from tests.support.summary_laws import laws_of
from tests.support.times_of_loops import times_of

QUANTILES = {"min": 0.1, "p50": 0.1, "p95": 0.1, "p99": 0.1, "max": 0.1, "avg": 0.1}


def row(phase: str, loader: str, stage: str, *, count: int, self_s: float) -> dict[str, Any]:
    return {
        "phase": phase, "loader": loader, "stage": stage, "model": "", "count": count, "failed": 0,
        "inclusive_seconds": self_s, "self_seconds": self_s, **QUANTILES,
    }  # fmt: skip


def summary() -> dict[str, Any]:
    """Ten training steps of 0.2 s, two batches of evaluation of 0.1 s, and 0.8 s in which nothing was open."""
    return {
        "state": "finished",
        "wall_seconds": 4.0,
        "training_threads": 1,
        "model_stages": ["forward", "backward", "optimizer"],
        "recompiles": 0,
        "recompile_seconds": 0.0,
        "device_pace": None,
        "ranks": None,
        "step_source": "update",
        "steps": {"train": 10, "eval": 2},
        "partial_steps": {},
        "batches": {"train": 10, "val": 2},
        "samples": {"train": 40},
        "activities": {"init": 1.0, "outside": 0.8, "data_wait": 1.0, "productive": 1.0, "eval": 0.2},
        "stages": [
            row("train", "train", "data", count=10, self_s=1.0),
            row("train", "train", "forward", count=10, self_s=1.0),
            row("eval", "val", "data", count=2, self_s=0.2),
        ],
        "step_durations": [
            {"phase": "train", "loader": "train", "count": 10, "total_seconds": 2.0, **QUANTILES},
            {"phase": "eval", "loader": "val", "count": 2, "total_seconds": 0.2, **QUANTILES},
        ],
        "loaders": [
            {"loader": "train", "wait": {"count": 10, "total_seconds": 1.0},
             "start": {"count": 1, "making_seconds": 0.1, "first_batch_seconds": 0.1}},
            {"loader": "val", "wait": {"count": 2, "total_seconds": 0.2}, "start": None},
        ],
        "rates": [
            {"phase": "train", "loader": "train", "seconds": 2.0, "batches": 10, "samples": 40, "tokens": None,
             "batches_per_second": 5.0, "samples_per_second": 20.0, "tokens_per_second": None},
            {"phase": "eval", "loader": "val", "seconds": 0.2, "batches": 2, "samples": None, "tokens": None,
             "batches_per_second": 10.0, "samples_per_second": None, "tokens_per_second": None},
        ],
        "throughput": {"wall_seconds": 4.0, "steps_per_second": 2.5, "batches_per_second": 2.5,
                       "samples_per_second": 10.0},
        "findings": [
            {"name": "input_bound", "share": 0.4, "seconds": 0.8, "loader": "train", "phase": "train",
             "evidence": {"data_wait_seconds": 1.0, "data_wait_ratio": 0.5, "steady_wait_ratio": 0.4,
                          "pass_start_seconds": 0.2, "training_seconds": 2.0, "batches": 10,
                          "wait_per_batch_seconds": 0.8 / 9}},
            {"name": "idle_between_passes", "share": 0.2, "seconds": 0.8, "loader": "", "phase": "",
             "evidence": {"outside_seconds": 0.8, "outside_ratio": 0.2, "wall_seconds": 4.0}},
        ],
    }  # fmt: skip


def change(path: str, value: Any) -> Callable[[dict[str, Any]], None]:
    """Sets the value at ``path``."""

    def apply(of: Any) -> None:
        *way, last = path.split(".")
        for part in way:
            of = of[int(part) if part.isdigit() else part]
        of[last] = value

    return apply


WRONG = {
    "activities.outside": (0.5, "activities add up to 3.7 s, wall_seconds is 4.0 s"),
    "activities.init": (-1.0, "activities.init is -1.0 s: less than nothing"),
    "activities.data_wait": (1.2, "activities.data_wait is 1.2 s, self_seconds of its rows (phase train, stage data) are 1.0 s"),
    "activities.eval": (0.4, "activities.eval is 0.4 s, self_seconds of its rows"),
    "stages.1.inclusive_seconds": (0.9, "self_seconds of train train forward is 1.0 s, its inclusive_seconds 0.9 s"),
    "stages.1.p95": (0.05, "stages: quantiles of train train forward are out of order"),
    "stages.1.avg": (0.3, "avg of train train forward is 0.3 s, min 0.1 s and max 0.1 s"),
    "stages.1.count": (0, "train train forward has count 0 and quantiles"),
    "steps.train": (9, "steps are {'train': 9, 'eval': 2}, the counts of step_durations {'train': 10, 'eval': 2}"),
    "step_durations.0.total_seconds": (2.5, "step_durations.total_seconds of phase train is 2.5 s, self_seconds of its stages 2.0 s"),
    "step_durations.1.total_seconds": (0.3, "of phase eval is 0.3 s, self_seconds of its stages 0.2 s"),
    "loaders.0.wait.total_seconds": (0.6, "wait of train has count 10 and total_seconds 0.6 s"),
    "loaders.1.wait.count": (3, "wait of val has count 3"),
    "loaders.1.wait": (None, "val has no wait; its rows of stage data have count 2"),
    "rates.0.seconds": (3.0, "rates: seconds of train train is 3.0 s, self_seconds of its stages 2.0 s"),
    "rates.0.batches_per_second": (7.0, "batches_per_second of train train is 7.0 over seconds 2.0 s, batches is 10"),
    "rates.0.batches": (11, "batches_per_second of train train is 5.0 over seconds 2.0 s, batches is 11"),
    "rates.0.samples_per_second": (None, "train train has 40 samples in 2.0 s, and no samples_per_second"),
    "rates.1.tokens_per_second": (5.0, "tokens_per_second of eval val is 5.0 over seconds 0.2 s, tokens is None"),
    "batches.train": (8, "batches of train are 10 in all phases, batches.train is 8"),
    "throughput.wall_seconds": (2.0, "throughput.wall_seconds is 2.0 s, wall_seconds is 4.0 s"),
    "throughput.steps_per_second": (5.0, "steps_per_second is 5.0 over 4.0 s, training has 10 steps"),
    "throughput.samples_per_second": (5.0, "samples_per_second is 5.0 over 4.0 s, training has 40 samples"),
    "findings.0.share": (1.5, "share 1.5 of input_bound is not between 0 and 1"),
    "findings.0.seconds": (1.9, "share 0.4 of input_bound is of training_seconds 2.0 s, its seconds are 1.9 s"),
    "findings.1.seconds": (9.0, "share 0.2 of idle_between_passes is of wall_seconds 4.0 s, its seconds are 9.0 s"),
    "findings.0.loader": ("unknown", "input_bound is about loader unknown: no value is of it"),
    "findings.0.evidence.data_wait_seconds": (0.7, "data_wait_seconds of input_bound is 0.7; by the keys that it follows from it is 1.0"),
    "findings.0.evidence.steady_wait_ratio": (0.5, "steady_wait_ratio of input_bound is 0.5; by the keys"),
    "findings.0.evidence.hunch": (0.7, "hunch of input_bound is 0.7: no key has it, and it follows from none"),
    "findings.1.evidence.outside_ratio": (0.3, "outside_ratio of idle_between_passes is 0.3; by the keys"),
}  # fmt: skip
"""By key: a wrong value, and the reported fault."""


def test_a_summary_that_is_right_breaks_no_law() -> None:
    """A law that every run breaks is no law."""
    assert laws_of(summary()) == []


@pytest.mark.parametrize("key", WRONG)
def test_a_wrong_value_breaks_a_law(key: str) -> None:
    """Each law is there for a value that was wrong once."""
    value, said = WRONG[key]
    wrong = copy.deepcopy(summary())
    change(key, value)(wrong)

    assert said in " | ".join(laws_of(wrong))


def test_a_user_stage_may_have_its_own_time_in_other_rows_than_its_calls() -> None:
    """``with stage("fit")`` around several phases: a call is in one row, its self time in all of them."""
    fit = summary()
    fit["stages"][1]["stage"] = "fit"
    fit["stages"].append({**row("eval", "val", "fit", count=1, self_s=0.0), "inclusive_seconds": 1.0})
    fit["stages"][1]["inclusive_seconds"] = 0.0
    said = "self_seconds of all rows of fit are 1.0 s, inclusive_seconds 0.9 s"
    assert not [broken for broken in laws_of(fit) if "self_seconds of" in broken and "fit" in broken]

    fit["stages"][-1]["inclusive_seconds"] = 0.9
    assert said in " | ".join(laws_of(fit))
    fit["state"] = "running"  # the call has not ended
    assert said not in " | ".join(laws_of(fit))


def test_training_may_lie_in_user_stages_alone() -> None:
    """A stage around the whole loop: nothing is left in stage `other`."""
    document = summary()
    document["stages"][1]["stage"] = "epoch"
    evidence = {"other_seconds": 0.0, "other_ratio": 0.0, "epoch_ratio": 0.5, "training_seconds": 2.0}
    document["findings"] = [
        {"name": "unattributed", "share": 0.0, "seconds": 0.0, "loader": "", "phase": "train", "evidence": evidence}
    ]  # fmt: skip

    assert list(laws_of(document)) == []


def test_the_rows_of_several_training_threads_overlap() -> None:
    """Activities are of the thread that trained first: rows that are more than they say are no fault then."""
    two = summary()
    for row in two["stages"][:2]:
        row["self_seconds"] = row["inclusive_seconds"] = 2.0
    change("loaders.0.wait.total_seconds", 2.0)(two)
    two["findings"] = []
    assert "activities.data_wait is 1.0 s" in " | ".join(laws_of(two))

    two["training_threads"] = 2
    assert laws_of(two) == []


def test_a_run_that_goes_on_may_have_an_open_step() -> None:
    """What was waited for the next batch is in no step yet, and the clock is read a moment after the last record."""
    running = summary()
    change("activities.data_wait", 1.3)(running)
    change("wall_seconds", 4.3005)(running)
    change("throughput", {**running["throughput"], "wall_seconds": 4.3005, "steps_per_second": 10 / 4.3005,
                          "batches_per_second": 10 / 4.3005, "samples_per_second": 40 / 4.3005})(running)  # fmt: skip
    change("stages.0.self_seconds", 1.3)(running)
    change("stages.0.inclusive_seconds", 1.3)(running)
    change("stages.0.avg", 0.1)(running)
    change("loaders.0.wait.total_seconds", 1.3)(running)
    running["findings"] = []

    assert laws_of({**running, "state": "running"}) == []
    assert laws_of(running) == ["activities add up to 4.3 s, wall_seconds is 4.3005 s"]


def test_compiling_is_taken_out_of_the_activity_in_which_it_happened() -> None:
    """The rows keep it: a forward that compiles lasts that long."""
    compiled = summary()
    change("activities.compile", 0.6)(compiled)
    change("activities.productive", 0.4)(compiled)
    assert laws_of(compiled) == []

    change("activities.productive", 0.2)(compiled)
    change("activities.outside", 1.0)(compiled)
    compiled["findings"] = []
    assert "activities.productive is 0.2 s" in " | ".join(laws_of(compiled))


def truth_of_it() -> tuple[Truth, Watch]:
    truth = Truth(rated={"train": "train"})
    truth.seconds.update(
        {
            Attribution("init"): 1.0,
            Attribution("outside"): 0.8,
            Attribution("data_wait", "data", "train"): 1.0,
            Attribution("productive", "forward", "train"): 1.0,
            Attribution("eval", "data", "val"): 0.2,
        }
    )
    truth.batches.update(train=10, val=2)
    truth.steps.update(train=10, eval=2)
    assert truth.samples is not None
    truth.samples.update(train=40, val=8)
    return truth, cast("Watch", SimpleNamespace(opening=(0.0, 0.0), closing=(4.0, 4.0)))


def test_times_that_are_right_are_left_alone() -> None:
    """Within 15 % of what was slept is right."""
    truth, watch = truth_of_it()
    assert times_of(summary(), truth, watch) == []

    near = summary()
    change("activities.outside", 0.75)(near)
    change("stages.1.self_seconds", 1.1)(near)
    assert times_of(near, truth, watch) == []


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("wall_seconds", 4.5, "the run lasts 4.500 s"),
        ("activities.outside", 0.6, "activity outside is 0.600 s, not 0.800 s"),
        ("activities.outside", None, "activity outside is not known; it lasts 0.800 s"),
        ("activities.eval", 0.8, "activity eval is 0.800 s"),
        ("activities.other", 0.3, "other activities is 0.300 s"),
        ("stages.0.self_seconds", 1.5, "self_seconds of train train data is 1.500 s"),
        ("stages.1.inclusive_seconds", 0.5, "inclusive_seconds of train train forward is 0.500 s"),
        ("loaders.0.wait.total_seconds", 0.5, "wait for loader train is 0.500 s"),
        ("step_durations.0.total_seconds", 2.8, "sum of all training steps is 2.800 s"),
        ("rates.0.seconds", 3.0, "time of the batches of train train is 3.000 s"),
        ("rates.0.batches_per_second", 2.5, "batches_per_second of train train is 2.5"),
        ("rates", [], "0 rates of train train"),
        ("throughput.steps_per_second", 5.0, "throughput is of 20.0 steps, not 10"),
    ],
)
def test_a_wrong_time_is_noticed(key: str, value: Any, said: str) -> None:
    """Each of them was seen in a run whose counts were right."""
    truth, watch = truth_of_it()
    wrong = copy.deepcopy(summary())
    change(key, value)(wrong)

    assert said in " | ".join(times_of(wrong, truth, watch))
