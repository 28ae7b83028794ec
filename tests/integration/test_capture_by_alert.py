"""An alert that fires in an Alertmanager has the run captured that it is about."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import otel_train
from tests.integration.loops.truth import QUIET
from tests.support.alertmanager import alert, alertmanager
from tests.support.json_lines import points_of, read_jsonl
from tests.support.receiver import http_receiver

pytestmark = pytest.mark.timeout(300)
AGENTS = ("process", "thread")


def train(folder: Path, enough: Callable[[], bool], most_s: float = 120, **settings: Any) -> dict[str, Any]:
    """Train until there is enough; the summary."""
    model = torch.nn.Linear(8, 1)
    loader = DataLoader(TensorDataset(torch.randn(64, 8)), batch_size=8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    known: dict[str, Any] = {
        **QUIET,
        "tuning": {"poll_interval_s": 0.05},
        "export_interval_s": 0.2,
        "profiler_schedule": "active=2",
        **settings,
    }
    with otel_train.instrument(model, {"train": loader}, run_dir=str(folder), run_id="r", **known) as session:
        deadline = time.monotonic() + most_s
        while not enough() and time.monotonic() < deadline:
            for (batch,) in loader:
                model(batch).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
                time.sleep(0.001)
    summary: dict[str, Any] = json.loads((folder / "r" / "rank0" / "summary.json").read_text())
    assert session is not None
    return summary


def records(folder: Path) -> list[dict[str, Any]]:
    """Of the captures, the first one first."""
    found = [json.loads(path.read_text()) for path in (folder / "r" / "captures").glob("*.record.json")]
    return sorted(found, key=lambda record: record["begun_unix_ns"])


def last_point(folder: Path, name: str, **wanted: str) -> dict[str, Any]:
    """The labels of the last point of a metric that has these, and its value."""
    for export in reversed(read_jsonl(folder / "r" / "rank0" / "metrics.otlp.jsonl")):
        for point in points_of(export).get(name, ()):
            if wanted.items() <= point["labels"].items():
                return {**point["labels"], "value": point["value"]}
    return {}


@pytest.mark.parametrize("agent", AGENTS)
def test_an_alert_has_its_run_captured_and_the_finding_comes_back_under_its_name(
    agent: str, tmp_path: Path
) -> None:
    """What else fires is about another run, or another rank of this one."""
    with alertmanager() as server:
        server.alerts = [
            alert("TrainMFUDrop", fingerprint="2", train_run_id="other"),
            alert("TrainStraggler", fingerprint="3", train_peer_rank="1"),
            alert(),
        ]
        events = tmp_path / "r" / "rank0" / "events.jsonl"

        def enough() -> bool:
            reported = events.exists() and "train.profiler.capture" in events.read_text()
            return bool(reported and last_point(tmp_path, "train.profiler.capture.time"))

        train(tmp_path, enough, agent=agent, alertmanager_url=server.url)

    (record,) = records(tmp_path)
    assert (record["trigger"], record["alert"], record["problem"]) == ("alert", "TrainInputBound", "")
    assert record["finding"]["summary"]
    point = last_point(tmp_path, "train.profiler.capture.time")
    assert point["train.profiler.alert"] == "TrainInputBound"
    assert point["train.profiler.file"] == f"captures/{record['file']}"
    assert point["train.profiler.finding.name"] == record["finding"]["name"]
    (event,) = [line for line in events.read_text().splitlines() if "train.profiler.capture" in line]
    assert "TrainInputBound" in event
    assert json.dumps(record["finding"]["summary"])[1:-1] in event


@pytest.mark.parametrize("agent", AGENTS)
@pytest.mark.parametrize("mode", ["hang", "huge"])
def test_an_alertmanager_that_does_not_answer_as_it_should_costs_a_counted_fault(
    mode: str, agent: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exports go on in time, the run ends in time, and nothing is captured."""
    with alertmanager() as server, http_receiver() as received:
        server.mode, server.alerts = mode, [alert()]
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", received.endpoint)

        def enough() -> bool:
            return bool(counted())

        def counted() -> float:
            known = last_point(
                tmp_path, "train.telemetry.faults", **{"train.telemetry.component": "alertmanager"}
            )
            return float(known.get("value", 0.0))

        began_s = time.monotonic()
        train(tmp_path, enough, agent=agent, alertmanager_url=server.url, otlp="on")
        took_s = time.monotonic() - began_s

    assert counted() == 1
    assert records(tmp_path) == []
    assert len(received.metrics) > 5 * (mode == "hang")
    assert took_s < 60
