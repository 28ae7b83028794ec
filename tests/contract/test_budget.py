"""How many series a rank may cost whoever stores them."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.scale.fakes import PARTS
from benchmarks.scale.ranks import SimulatedRanks
from benchmarks.scale.results import Sizes, sizes_of
from otel_train.config import Config
from otel_train.datamodel import Anchor, Snapshot
from otel_train.exporters.prometheus import PageCollector, RankPage
from otel_train.session import Session
from tests.support.receiver import http_receiver

NATIVE, CLASSIC = 131, 565
"""Series of one rank in profile ``full``: a loader with workers, one without, one device, everything it can tell."""

OF_NODE = 2
"""Exported once per node, on top: memory of the host and its limit."""

OF_RUN, OF_RUN_CLASSIC = 35, 72
"""Exported once per run, by rank 0, on top."""

REDUCED_METRICS = 24
"""Times 2,048 ranks these are the 50,000 series that a run may have in a shared Prometheus."""
TEN_MINUTES_NS = 600 * 10**9


def played(profile: str, ranks: int = 16) -> tuple[SimulatedRanks, list[Snapshot]]:
    """A run of ten minutes, with evaluations and checkpoints in it, and what each account came to."""
    anchor = Anchor.now()
    config = Config(run_id="r", export_profile=profile)
    simulated = SimulatedRanks(ranks, per_node=8, config=config, anchor=anchor, steps_per_s=2)
    now_ns = anchor.clock_ns + TEN_MINUTES_NS
    for account in simulated.accounts:
        account.read(now_ns)
    simulated.exchange(now_ns)
    return simulated, [account.read(now_ns + 1).snapshot for account in simulated.accounts]


def sizes(profile: str) -> dict[int, Sizes]:
    simulated, snapshots = played(profile)
    return {rank.info.rank: sizes_of(snapshots[rank.account].families) for rank in simulated.ranks}


def test_a_rank_that_exports_everything_stays_within_its_budget() -> None:
    """Sixty-four of them in a shared Prometheus must not be what breaks it."""
    ranks = sizes("full")

    followers = [ranks[rank] for rank in range(16) if rank % 8]
    assert max(each.native for each in followers) <= NATIVE
    assert max(each.classic for each in followers) <= CLASSIC
    assert ranks[8].native <= NATIVE + OF_NODE
    assert ranks[0].native <= NATIVE + OF_NODE + OF_RUN
    assert ranks[0].classic <= CLASSIC + OF_NODE + OF_RUN_CLASSIC


def test_a_rank_of_the_reduced_profile_sends_twenty_four_series_at_most() -> None:
    """Two thousand of them go into one Prometheus."""
    ranks = sizes("reduced")

    assert max(ranks[rank].native for rank in range(1, 16)) <= REDUCED_METRICS


def test_a_simulated_rank_counts_faults_of_the_parts_that_a_session_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the budget is measured on a rank that does not exist in practice."""
    with http_receiver() as received:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", received.endpoint)
        with Session(Config(run_dir=str(tmp_path), prometheus_address="127.0.0.1:0", console=False)):
            pass
        assert received.wait(metrics=1)
        points = received.points()["train.telemetry.faults"].sum.data_points
        parts = {attribute.value.string_value for point in points for attribute in point.attributes}

    assert parts == set(PARTS)


def test_series_are_counted_as_a_page_has_them() -> None:
    """The count is by formula; the page is what is scraped."""
    _, snapshots = played("full", ranks=1)
    page = PageCollector([RankPage({}, {}, lambda: snapshots[0])]).collect()
    samples = sum(len(family.samples) for family in page if family.name != "target")

    assert sizes_of(snapshots[0].families).classic == samples
