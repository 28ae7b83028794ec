"""Epochs that the program marks: what is written, and what becomes of it."""

from __future__ import annotations

import numpy as np
import pytest

import otel_train
from otel_train.accounting.types import NOTHING
from otel_train.aggregation.epochs import EpochTracker
from otel_train.aggregation.series_names import SeriesNames
from otel_train.instrumentation.stages import active_session
from otel_train.recording.events import Op
from tests.support.written import Writer


def test_a_block_is_an_epoch(writer: Writer) -> None:
    """Evaluation after it belongs to none."""
    for _ in range(2):
        with otel_train.epoch():
            pass

    assert writer.payloads == [("EPOCH", 1), ("EPOCH_END", 0), ("EPOCH", 2), ("EPOCH_END", 0)]


def test_a_call_at_the_top_of_the_loop_is_enough(writer: Writer) -> None:
    """The next one ends the one before."""
    for _ in range(3):
        otel_train.epoch()

    assert writer.payloads == [("EPOCH", 1), ("EPOCH", 2), ("EPOCH", 3)]


def test_a_number_of_epochs_in_place_of_a_range_is_refused() -> None:
    """``epoch(3)`` marks the epoch with that number."""
    with pytest.raises(otel_train.ConfigError, match=r"Write 'for n in epoch\(range\(N\)\)'"):
        list(otel_train.epoch(3))


def test_what_a_loop_goes_over_has_an_epoch_an_item(writer: Writer) -> None:
    """``tqdm(epoch(range(3)))`` shows how far it is."""
    over = otel_train.epoch(range(5, 7))

    assert len(over) == 2
    assert list(over) == [5, 6]
    assert writer.payloads == [("EPOCH", 1), ("EPOCH", 2), ("EPOCH_END", 0)]


def test_a_trainers_own_number_is_kept_and_counting_goes_on_from_it(writer: Writer) -> None:
    """After a resume the first epoch is not the first; numbers of numpy are numbers."""
    otel_train.epoch(np.int64(0))  # an index, too
    otel_train.epoch(12)
    otel_train.epoch()

    assert writer.payloads == [("EPOCH", 0), ("EPOCH", 12), ("EPOCH", 13)]


def test_an_epoch_that_raises_is_marked_as_broken(writer: Writer) -> None:
    """Its rates are those of no epoch; the exception is the user's."""
    with pytest.raises(KeyError), otel_train.epoch():
        raise KeyError

    assert writer.payloads == [("EPOCH", 1), ("EPOCH_END", 1)]


def test_an_epoch_that_is_over_does_not_end_the_next(writer: Writer) -> None:
    """A trainer's callbacks may say it twice, or late."""
    first = otel_train.epoch()
    second = otel_train.epoch()
    first.end()
    second.end()
    second.end()

    assert writer.payloads == [("EPOCH", 1), ("EPOCH", 2), ("EPOCH_END", 0)]


def test_without_a_session_the_loop_is_as_it_was() -> None:
    """The call stays in the program when telemetry goes."""
    assert active_session.stages is None

    with otel_train.epoch(3) as epoch:
        epoch.end()

    assert list(otel_train.epoch([7])) == [7]


@pytest.mark.parametrize("given", [-1, 1.5, object()])
def test_what_is_no_epoch_says_what_would_be_one(given: object) -> None:
    """A trainer's epoch that is a float would be cut without a word."""
    with pytest.raises(otel_train.ConfigError, match="whole number"):
        otel_train.epoch(given)  # type: ignore[call-overload]  # on purpose


MARKS = [[10, Op.EPOCH, 4], [20, Op.EPOCH_END, 0], [30, Op.EPOCH, 5]]


def test_an_instant_lies_in_the_epoch_that_began_last() -> None:
    """A capture is named after it."""
    epochs = EpochTracker(SeriesNames())
    assert epochs.at(5) == 1
    epochs.take(NOTHING._replace(said=np.array(MARKS)))

    assert [epochs.at(at) for at in (5, 10, 25, 30)] == [4, 4, 4, 5]
