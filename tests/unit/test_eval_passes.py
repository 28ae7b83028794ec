"""Evaluation passes: neighbouring evaluation steps of one loader."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from otel_train.accounting.types import EVAL, TEST, TRAIN, StepRows
from otel_train.aggregation.run_events import EvalPass, EvalPasses
from otel_train.aggregation.series_names import SeriesNames
from otel_train.catalog import PHASES
from otel_train.recording.events import Instrumented, SourceKind

LOADERS = ("train", "val", "test")


def names() -> SeriesNames:
    made = SeriesNames()
    made.learn([Instrumented(SourceKind.DATA, name) for name in LOADERS])
    return made


def rows(kinds: list[tuple[int, int]], *, started_ns: int = 0, wait_ns: int = 1) -> StepRows:
    """Steps of 10 ns each, (phase, loader source), one right after the other; in ``wait_ns`` of it they ask."""
    number = len(kinds)
    starts = started_ns + 10 * np.arange(number)
    phase, loader = (np.array([kind[i] for kind in kinds], dtype=np.int64) for i in (0, 1))
    ones = np.ones(number, dtype=np.int64)
    columns = [phase, loader, starts, starts + 10, 10 * ones, ones, 0 * ones, 4 * ones]
    return StepRows._make([*columns, wait_ns * ones, *[0 * ones] * 3, -ones])


T, V, E = (TRAIN, 0), (EVAL, 1), (TEST, 2)


def test_a_pass_ends_when_training_goes_on() -> None:
    """The duration of an evaluation is from its first batch to its last."""
    passes = EvalPasses()

    assert passes.feed(rows([T, V, V, V, T]), names()) == [EvalPass("eval", "val", 10, 40, 3)]
    assert passes.loaders == {"val": 0}
    assert passes.durations.point(0).sum == pytest.approx(30e-9)


def test_another_loader_is_another_pass() -> None:
    """Validation and test, one after the other, are two."""
    passes = EvalPasses()

    assert passes.feed(rows([V, V, E, T]), names()) == [
        EvalPass("eval", "val", 0, 20, 2),
        EvalPass("test", "test", 20, 30, 1),
    ]


def test_two_passes_of_one_loader_are_two() -> None:
    """A teacher and its student, one after the other. The request that reaches the end of the loader is of no step."""
    passes = EvalPasses()

    assert passes.feed(rows([V, V]), names()) == []
    assert passes.feed(rows([V, V, V], started_ns=1000), names()) == [EvalPass("eval", "val", 0, 20, 2)]
    assert passes.close() == [EvalPass("eval", "val", 1000, 1030, 3)]
    assert passes.durations.point(0).sum == pytest.approx(50e-9)


def test_two_evaluations_without_a_loader_are_two() -> None:
    """Rollouts before each step: their row comes before that of the step that they suspend."""
    passes, alone = EvalPasses(), (EVAL, -1)

    passes.feed(rows([alone, alone], wait_ns=0), names())

    passes.feed(rows([alone], started_ns=50, wait_ns=0), names())
    assert passes.durations.count(0) == 1


def test_the_last_batch_of_a_pass_that_looks_ahead_is_of_the_pass() -> None:
    """It is used after the end of the loader, and nothing is requested in its step."""
    passes = EvalPasses()

    passes.feed(rows([V, V]), names())

    assert passes.feed(rows([V], started_ns=25, wait_ns=0), names()) == []
    assert passes.close() == [EvalPass("eval", "val", 0, 35, 3)]


def test_a_pass_begins_with_its_first_request() -> None:
    """The iterators of training and validation are made before the loop: the first batch begins there."""
    passes = EvalPasses()
    early = rows([V], started_ns=990)._replace(started_ns=np.array([5]))

    passes.feed(early, names())

    assert passes.close() == [EvalPass("eval", "val", 990, 1000, 1)]


def test_a_partial_step_that_the_end_of_the_run_closes_is_in_no_pass() -> None:
    """Accumulated gradients without an update, and then an evaluation up to the end of the run."""
    passes, last = EvalPasses(), rows([T, V], started_ns=10)

    passes.feed(rows([V, V]), names())

    assert passes.feed(last._replace(counted=np.array([0, 1])), names()) == []
    assert passes.close() == [EvalPass("eval", "val", 0, 30, 3)]


def test_the_last_pass_is_over_at_the_end_of_the_run() -> None:
    """A run that ends with its evaluation has evaluated."""
    passes = EvalPasses()

    assert passes.feed(rows([T, V]), names()) == []
    assert passes.close() == [EvalPass("eval", "val", 10, 20, 1)]
    assert passes.close() == []


def test_passes_of_threads_are_their_own_and_end_with_a_gap_where_no_training_follows() -> None:
    """A thread evaluates while another one trains."""
    passes = EvalPasses()

    assert passes.feed(rows([V, V]), names(), "eval", gaps=True) == []
    assert passes.feed(rows([T, V]), names(), "train") == []
    assert passes.feed(rows([V], started_ns=20), names(), "eval", gaps=True) == []
    assert passes.feed(rows([V], started_ns=50), names(), "eval", gaps=True) == [
        EvalPass("eval", "val", 0, 30, 3)
    ]
    assert passes.close("train") == [EvalPass("eval", "val", 10, 20, 1)]
    assert passes.close() == [EvalPass("eval", "val", 50, 60, 1)]


@given(st.lists(st.sampled_from([T, V, E]), max_size=40), st.integers(0, 40))
def test_it_does_not_matter_where_slices_end(kinds: list[tuple[int, int]], cut: int) -> None:
    """A pass is not two because the agent polled in between."""
    whole, parts = EvalPasses(), EvalPasses()
    expected = [*whole.feed(rows(kinds), names()), *whole.close()]
    found = parts.feed(rows(kinds[:cut]), names())
    found += parts.feed(rows(kinds[cut:], started_ns=10 * len(kinds[:cut])), names())

    assert [*found, *parts.close()] == expected
    assert sum(over.batches for over in expected) == sum(kind != T for kind in kinds)
    assert {over.phase for over in expected} <= set(PHASES) - {"train"}
