"""How far apart the checkpoints of a run are, as the alert on missing ones compares."""

from __future__ import annotations

import numpy as np
import pytest

from otel_train.accounting.types import StageCalls
from otel_train.aggregation.run_events import Checkpoints
from otel_train.recording.events import SourceKind

KINDS = np.array([SourceKind.CHECKPOINT])


def save(checkpoints: Checkpoints, at_s: float, step: int, *, failed: bool = False) -> float:
    """One save of a second that ends then; the interval after it."""
    columns = (0, int((at_s - 1) * 1e9), int(1e9), int(failed), -1, 0, -1)
    ended = StageCalls(*(np.array([column]) for column in columns))
    assert len(list(checkpoints.take(ended, KINDS, lambda _at_ns: step))) == 1
    return checkpoints.interval_s


def test_the_interval_is_from_the_end_of_one_save_to_the_end_of_the_next() -> None:
    """None before the second."""
    checkpoints = Checkpoints()

    assert save(checkpoints, 100, 10) == 0
    assert save(checkpoints, 400, 20) == pytest.approx(300)
    assert save(checkpoints, 500, 25, failed=True) == pytest.approx(300)
    assert checkpoints.failures == 1


def test_the_last_and_the_best_model_are_one_checkpoint() -> None:
    """Two files a second apart, once an hour: the alert would page two seconds after each."""
    checkpoints = Checkpoints()
    for epoch in range(1, 4):
        save(checkpoints, 3600 * epoch, 100 * epoch)
        save(checkpoints, 3600 * epoch + 2, 100 * epoch)

    assert checkpoints.interval_s == pytest.approx(3598)
    assert checkpoints.last_ns == 10_802 * 10**9


def test_a_save_on_demand_is_no_new_rhythm() -> None:
    """One a minute after the regular one: the next comes an hour later."""
    checkpoints = Checkpoints()
    save(checkpoints, 3600, 100)
    save(checkpoints, 7200, 200)

    assert save(checkpoints, 7260, 202) == pytest.approx(3600)


def test_a_new_rhythm_is_learned() -> None:
    """A pause of hours is forgotten after three more."""
    checkpoints = Checkpoints()
    for number, at_s in enumerate((100, 9100, 9200, 9300, 9400)):
        save(checkpoints, at_s, number)

    assert checkpoints.interval_s == pytest.approx(100)
