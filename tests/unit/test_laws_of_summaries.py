"""The checks of summaries notice what they are there for: a check that passes everything protects nothing."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest

from tests.integration.loops.truth import Claim, Truth, Watch
from tests.support.laws_of_summaries import laws_of
from tests.support.times_of_loops import times_of

if TYPE_CHECKING:
    from collections.abc import Callable

QUANTILES = {"min": 0.1, "p50": 0.1, "p95": 0.1, "p99": 0.1, "max": 0.1, "avg": 0.1}


def row(phase: str, loader: str, stage: str, *, count: int, self_s: float) -> dict[str, Any]:
    return {
        "phase": phase, "loader": loader, "stage": stage, "model": "", "count": count, "failed": 0,
        "inclusive_seconds": self_s, "self_seconds": self_s, **QUANTILES,
    }  # fmt: skip


def summary() -> dict[str, Any]:
    """Ten training steps of 0.2 s, two batches of evaluation of 0.1 s, and 0.8 s in which nothing was open."""
    return {
        "wall_seconds": 4.0,
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
            {"loader": "train", "wait": {"count": 10, "total_seconds": 1.0}},
            {"loader": "val", "wait": {"count": 2, "total_seconds": 0.2}},
        ],
        "rates": [
            {"phase": "train", "loader": "train", "seconds": 2.0, "batches_per_second": 5.0,
             "samples_per_second": 20.0, "tokens_per_second": None},
        ],
        "throughput": {"wall_seconds": 4.0, "steps_per_second": 2.5, "batches_per_second": 2.5,
                       "samples_per_second": 10.0},
        "verdicts": [{"name": "input_bound", "share": 0.5, "seconds": 1.0, "loader": "train"}],
    }  # fmt: skip


def change(path: str, value: Any) -> Callable[[dict[str, Any]], None]:
    """What sets the figure at ``path``."""

    def apply(of: Any) -> None:
        *way, last = path.split(".")
        for part in way:
            of = of[int(part) if part.isdigit() else part]
        of[last] = value

    return apply


WRONG = {
    "activities.outside": (0.5, "activities add up to 3.7 s"),
    "activities.init": (-1.0, "less than nothing"),
    "activities.data_wait": (1.2, "activity data_wait lasts 1.2 s, its rows 1.0 s"),
    "activities.eval": (0.4, "activity eval lasts 0.4 s"),
    "stages.1.inclusive_seconds": (0.9, "train train forward: self 1.0 s is more than inclusive 0.9 s"),
    "stages.1.p95": (0.05, "out of order"),
    "stages.1.avg": (0.3, "average 0.3 s is outside"),
    "steps.train": (9, "steps are"),
    "step_durations.0.total_seconds": (2.5, "training steps last 2.5 s, all of training 2.0 s"),
    "loaders.0.wait.total_seconds": (0.6, "loader train was waited for 10 times, 0.6 s"),
    "loaders.1.wait.count": (3, "loader val was waited for 3 times"),
    "loaders.1.wait": (None, "loader val has 2 waits in the stages and none of its own"),
    "rates.0.seconds": (3.0, "the rate is over 3.0 s"),
    "rates.0.batches_per_second": (7.0, "is not 10"),
    "rates.0.samples_per_second": (7.0, "is not 40"),
    "throughput.wall_seconds": (2.0, "throughput is over 2.0 s"),
    "throughput.steps_per_second": (5.0, "are not 10 steps"),
    "verdicts.0.share": (1.5, "share 1.5"),
    "verdicts.0.seconds": (9.0, "9.0 s in a run of 4.0 s"),
    "verdicts.0.loader": ("nobody's", "no figure is of loader nobody's"),
}
"""By figure: a wrong value, and what is said of it."""


def test_a_summary_that_is_right_breaks_no_law() -> None:
    """A law that every run breaks is no law."""
    assert laws_of(summary()) == []


@pytest.mark.parametrize("figure", WRONG)
def test_a_wrong_figure_breaks_a_law(figure: str) -> None:
    """Each law is there for a figure that was wrong once."""
    value, said = WRONG[figure]
    wrong = copy.deepcopy(summary())
    change(figure, value)(wrong)

    assert said in " | ".join(laws_of(wrong))


def truth_of_it() -> tuple[Truth, Watch]:
    truth = Truth(rated={"train": "train"})
    truth.seconds.update(
        {
            Claim("init"): 1.0,
            Claim("outside"): 0.8,
            Claim("data_wait", "data", "train"): 1.0,
            Claim("productive", "forward", "train"): 1.0,
            Claim("eval", "data", "val"): 0.2,
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
    ("figure", "value", "said"),
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
def test_a_wrong_time_is_noticed(figure: str, value: Any, said: str) -> None:
    """Each of them was seen in a run whose counts were right."""
    truth, watch = truth_of_it()
    wrong = copy.deepcopy(summary())
    change(figure, value)(wrong)

    assert said in " | ".join(times_of(wrong, truth, watch))
