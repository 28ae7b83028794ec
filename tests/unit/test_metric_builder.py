"""Series in the catalogue's words."""

from __future__ import annotations

import math

import pytest

from otel_train import catalog as c
from otel_train.aggregation.histogram import Histograms
from otel_train.aggregation.metrics import MOST_OVERFLOWN, LabelLimiter, LoggedSignals, MetricBuilder
from otel_train.catalog import Emit


def values(builder: MetricBuilder) -> dict[str, dict[tuple[str, ...], float]]:
    return {
        family.metric.name: {tuple(v for _, v in point.attributes): getattr(point, "value", 0.0) for point in family.points}
        for family in builder.families()
    }  # fmt: skip


def test_a_label_without_a_value_is_left_out() -> None:
    """An empty label is no label, on either path."""
    builder = MetricBuilder()
    builder.put(c.BATCHES, 3, "", "train")

    assert builder.families()[0].points[0].attributes == (("train.phase", "train"),)


def test_the_last_reading_of_a_gauge_counts() -> None:
    """Readings do not add up."""
    builder = MetricBuilder()
    builder.put(c.EPOCH_INDEX, 3, "_OTHER")
    builder.put(c.EPOCH_INDEX, 4, "_OTHER")

    assert values(builder) == {"train.epoch.index": {("_OTHER",): 4}}


def test_every_kind_of_a_counter_starts_at_zero() -> None:
    """A counter born at 1 shows no increase, and its alert never fires."""
    builder, signals = MetricBuilder(), LoggedSignals()
    signals.take("loss", math.nan)
    signals.write(builder)

    assert values(builder)["train.nonfinite.detections"] == {("loss",): 1, ("gradient",): 0}


def test_an_empty_histogram_is_left_out() -> None:
    """Nothing measured is absent, never zero."""
    builder = MetricBuilder()
    builder.histograms(c.STEP_DURATION, Histograms(size=1), [("code", "train")])

    assert builder.families() == ()


def test_families_come_in_catalogue_order() -> None:
    """Two pages of one run can be compared line by line."""
    builder = MetricBuilder()
    for metric in reversed(c.ALL):
        builder.put(metric, 1)

    assert [family.metric.name for family in builder.families()] == [metric.name for metric in c.ALL]


@pytest.mark.parametrize("emit", list(Emit))
def test_what_this_rank_does_not_publish_is_left_out(emit: Emit) -> None:
    """A thousand ranks that all publish the run's status are a thousand runs."""
    builder = MetricBuilder(lambda wanted: wanted is not emit)
    for metric in c.ALL:
        builder.put(metric, 1)

    assert {family.metric.emit for family in builder.families()} == set(Emit) - {emit}


def test_names_beyond_the_bound_fold_first_come_first_served() -> None:
    """A name that has its series keeps it."""
    bounded = LabelLimiter(2)

    assert [bounded.limit(name) for name in ("a", "b", "c", "a", "", "d")] == [
        "a", "b", "_OTHER", "a", "", "_OTHER",
    ]  # fmt: skip
    assert bounded.overflown == 2


def test_the_number_of_names_beyond_a_bound_is_bounded() -> None:
    """The program may log a new name in each step, and each name was kept in memory to count it once."""
    bounded = LabelLimiter(1)
    for name in range(2 * MOST_OVERFLOWN):
        bounded.limit(str(name))

    assert bounded.overflown == MOST_OVERFLOWN


def test_a_reduced_builder_adds_up_devices_and_takes_events_once_they_have_happened() -> None:
    """Of two thousand ranks most have nothing to report; what is reported keeps its labels, because alerts pick by them."""
    builder = MetricBuilder(
        only={c.ACCELERATOR_MEMORY_RESERVED.name, c.SAMPLES.name}, events={c.NONFINITE_DETECTIONS.name}
    )
    builder.put(c.ACCELERATOR_MEMORY_RESERVED, 3, "cuda:0")
    builder.put(c.ACCELERATOR_MEMORY_RESERVED, 4, "cuda:1")
    builder.put(c.SAMPLES, 80, "main", "train")
    builder.put(c.NONFINITE_DETECTIONS, 0, "gradient")
    builder.put(c.NONFINITE_DETECTIONS, 1, "loss")
    builder.put(c.BATCHES, 9, "main", "train")

    assert values(builder) == {
        "train.samples": {("main", "train"): 80},
        "train.nonfinite.detections": {("loss",): 1},
        "train.accelerator.memory.reserved": {(): 7},
    }
