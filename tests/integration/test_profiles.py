"""What a rank of a large run really publishes."""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import parser

from otel_train.distributed.export_profile import REDUCED_METRICS
from tests.integration.loops.truth import QUIET, Net, Watch, loader, loss_of, sgd
from tests.support.inside import inside

classic: Any = parser.text_string_to_metric_families  # it publishes no types


def published(watch: Watch, **settings: Any) -> tuple[str, Any]:
    """A short run; its ``/metrics``, or "", and the session."""
    model, batches, validation = Net(), loader(12), loader(2)
    session = watch(model, {"train": batches, "val": validation}, **settings)
    optimizer = sgd(model)
    for batch in batches:
        loss_of(model, batch).backward()
        optimizer.step()
    for x, _ in validation:
        model(x)
    session.summary()  # accounts all events
    page = ""
    if session.metrics_url:
        with inside(session).loop.lock:
            inside(session).loop.run_once(final=True)
        with urllib.request.urlopen(session.metrics_url, timeout=20) as answer:
            page = answer.read().decode()
    return page, session


@pytest.fixture
def watch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """``instrument`` as one rank of 100."""
    monkeypatch.setenv("RANK", "5")
    monkeypatch.setenv("WORLD_SIZE", "100")
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    monkeypatch.setenv("GROUP_RANK", "1")
    return Watch(tmp_path / "runs")


def test_a_reduced_rank_publishes_a_handful_of_series(watch: Watch) -> None:
    """A shared Prometheus holds 50,000 series per run: 100 full ranks are 12,000, and 2,000 of them 240,000."""
    page, session = published(watch, prometheus=True, prometheus_address="127.0.0.1:0")
    samples = [sample for family in classic(page) for sample in family.samples]
    series = {
        (sample.name, tuple(sorted(sample.labels.items())))
        for sample in samples
        if sample.name.startswith(("train_", "process_memory"))
        and not sample.name.endswith(("_bucket", "_sum", "_created"))
    }
    steps = [sample for sample in samples if sample.name == "train_steps_total"]
    stages = {
        sample.labels["train_stage"]
        for sample in samples
        if sample.name == "train_stage_duration_seconds_count"
    }

    assert session.summary()["steps"] == {"train": 12, "eval": 2}
    assert [sample.value for sample in steps] == [12]
    assert stages == {"data", "forward", "backward", "optimizer"}
    assert len(series) <= 24
    assert len(REDUCED_METRICS) == 14


def test_an_aggregated_rank_serves_nothing_and_still_keeps_its_own_files(watch: Watch) -> None:
    """Rank 0 speaks for it; after a crash its own folder does."""
    page, session = published(
        watch, prometheus=True, prometheus_address="127.0.0.1:0", export_profile="rank0_aggregate"
    )
    folder = session.run_directory / "rank5"
    session.close()

    assert (page, session.metrics_url) == ("", None)
    assert (folder / "flight.bin").exists()
    assert json.loads((folder / "summary.json").read_text())["steps"] == {"train": 12, "eval": 2}
    assert "train.loader.exhausted" in (folder / "events.jsonl").read_text()
    assert not (folder / "metrics.otlp.jsonl").exists() or not (folder / "metrics.otlp.jsonl").read_text()


def test_the_resource_says_which_profile_it_is(watch: Watch) -> None:
    """Whoever misses a series finds out why."""
    _, session = published(watch, **QUIET)
    session.close()
    lines = (session.run_directory / "rank5" / "metrics.otlp.jsonl").read_text().splitlines()
    resource = json.loads(lines[-1])["resourceMetrics"][0]["resource"]["attributes"]

    assert {"key": "train.export.profile", "value": {"stringValue": "reduced"}} in resource
