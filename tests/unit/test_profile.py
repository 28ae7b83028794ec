"""Which rank exports what: a run of ten thousand ranks must not cost ten thousand times a run of one."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest

from otel_train.aggregation.spans import UNDECIDED
from otel_train.config import Config
from otel_train.datamodel import Event, ExportBatch, Snapshot, Span
from otel_train.distributed.export_profile import Profile, profile_of, sampling_rules
from otel_train.exporters.manager import ProfileFilter
from otel_train.resource import Process, RunInfo, detect
from otel_train.safety import Guard
from otel_train.testing import Kept

ALONE: RunInfo = detect(Config(run_id="r"), {}, process=Process(entropy=os.urandom, live_ranks=lambda: None))


def at(rank: int, world_size: int, *, per_node: int = 8, profile: str = "auto") -> Profile:
    info = replace(
        ALONE, rank=rank, world_size=world_size, local_rank=rank % per_node, node_rank=rank // per_node
    )
    return profile_of(Config(export_profile=profile), info)


@pytest.mark.parametrize(
    ("world_size", "name", "expected"),
    [
        (1, "full", 1),
        (64, "full", 64),
        (65, "reduced", 65),
        (2048, "reduced", 2048),
        (2049, "rank0_aggregate", 1),
        (10_240, "rank0_aggregate", 1),
    ],
)
def test_the_size_of_the_run_chooses_the_profile(world_size: int, name: str, expected: int) -> None:
    """The first large run needs no settings."""
    found = at(world_size - 1, world_size)

    assert (found.name, found.expected) == (name, expected)


def test_a_profile_that_is_set_wins_over_the_size() -> None:
    """To find one fault on 100 ranks, full detail is worth its price for an hour."""
    assert at(99, 100, profile="full")[:3] == ("full", True, False)
    assert at(1, 2, profile="rank0_aggregate").metrics is False
    assert at(1, 2, profile="reduced").reduced is True


def test_rank_0_always_exports_everything() -> None:
    """What only it knows, and one complete example of the rest."""
    for profile in ("full", "reduced", "rank0_aggregate", "rank0"):
        found = at(0, 4096, profile=profile)
        assert (found.metrics, found.reduced, found.spans, found.traces) == (True, False, True, True)


def test_rank_0_counts_for_all_where_it_alone_exports() -> None:
    """Elsewhere every rank counts for itself, and a sum over both would be twice as much."""
    assert [
        at(0, 8, profile=profile).speaks for profile in ("full", "reduced", "rank0_aggregate", "rank0")
    ] == [
        False,
        False,
        True,
        True,
    ]
    assert not at(0, 1, profile="rank0_aggregate").speaks
    assert not at(1, 8, profile="rank0_aggregate").speaks


def test_in_rank0_aggregate_one_rank_per_node_traces_and_the_others_only_leave_their_record() -> None:
    """A trace of 64 ranks can still be looked at; one of ten thousand cannot be stored."""
    first_of_node, second, beyond = at(8, 10_240), at(9, 10_240), at(64 * 8, 10_240)

    assert (first_of_node.metrics, first_of_node.spans) == (False, True)
    assert (second.metrics, second.spans, second.traces) == (False, False, False)
    assert beyond.spans is False


def test_in_the_reduced_profile_every_rank_sends_its_slow_steps_and_few_its_ordinary_ones() -> None:
    """A rank that is slow alone must be able to say so."""
    assert (at(8, 128).spans, at(8, 128).traces) == (True, True)
    assert (at(9, 128).spans, at(9, 128).traces) == (True, False)


def test_a_reduced_rank_sends_half_as_often_but_not_so_rarely_that_it_counts_as_silent() -> None:
    """Of 1,000 ranks that send every 120 s some are late at any moment, and TrainRanksMissing would never end."""
    rank, first = at(9, 128), at(0, 128)

    assert [rank.interval_s(every_s) for every_s in (0.1, 15.0, 45.0, 60.0, 300.0)] == [
        0.2,
        30.0,
        60.0,
        60.0,
        300.0,
    ]
    assert first.interval_s(15.0) == 15.0


def test_rank0_leaves_everything_to_rank_0() -> None:
    """For those who want one sender and nothing else."""
    assert at(1, 2, profile="rank0") == Profile(
        "rank0", False, reduced=False, spans=False, traces=False, expected=1
    )


def test_a_rank_that_traces_no_ordinary_steps_still_keeps_slow_ones() -> None:
    """Warm-up and baseline are left out, nothing else."""
    config = Config(tuning="trace_warmup_steps=7,trace_every_steps=3,trace_burst=9", trace_slow_factor=4.0)

    assert sampling_rules(config, at(9, 128)) == (0, UNDECIDED, 4.0, config.trace_rate_per_s, 9)
    assert sampling_rules(config, at(8, 128))[:2] == (7, 3)


SNAPSHOT = Snapshot(0, 1, ())
SPAN = Span(name="train.step", trace_id=1, span_id=2, start_unix_ns=0, end_unix_ns=1)
EVENT = Event(name="train.stall", time_unix_ns=1)


def test_an_exporter_gets_what_its_rank_exports_and_every_event() -> None:
    """Events are the local log: they say why a rank that exports nothing died."""
    kept = Kept()
    part = ProfileFilter(kept, at(9, 10_240), Guard("kept"))
    part.export(ExportBatch(snapshot=SNAPSHOT, spans=(SPAN,)))
    part.export(ExportBatch(snapshot=SNAPSHOT, spans=(SPAN,), events=(EVENT,)))
    part.export(ExportBatch(final=True))
    part.close(1.0)

    assert kept.batches == [ExportBatch(events=(EVENT,)), ExportBatch(final=True)]
    assert kept.closed


def test_a_full_rank_exports_everything() -> None:
    """Nothing is lost on the way."""
    kept = Kept()
    batch = ExportBatch(snapshot=SNAPSHOT, spans=(SPAN,), events=(EVENT,), final=True)
    ProfileFilter(kept, at(1, 2), Guard("kept")).export(batch)

    assert kept.batches == [batch]
