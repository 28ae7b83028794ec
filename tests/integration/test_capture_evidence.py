"""What was captured is found again: in the event, the span, the record, the summary, the report, on the console."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import otel_train
from otel_train.cli.main import main
from tests.integration.loops.truth import QUIET
from tests.support.json_lines import last_points

BATCHES = 8
"""Of an epoch."""


def train(folder: Path, **more: Any) -> None:
    """Train until the finding of the first capture has been exported, at the default export interval."""
    model = torch.nn.Linear(8, 1)
    loader = DataLoader(TensorDataset(torch.randn(8 * BATCHES, 8)), batch_size=8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    settings: dict[str, Any] = {
        **QUIET, "console": True, "profiler_output_dir": str(folder / "plain"), "profiler_options": "profile_memory", **more
    }  # fmt: skip
    with otel_train.instrument(model, {"train": loader}, run_dir=str(folder), run_id="seen", **settings):
        otel_train.capture(steps=3)
        events, deadline = folder / "seen" / "rank0" / "events.jsonl", time.monotonic() + 120
        while time.monotonic() < deadline:
            for (batch,) in loader:
                model(batch).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
                time.sleep(0.001)
            if events.exists() and "train.profiler.capture" in events.read_text():
                return


def spans(folder: Path) -> dict[tuple[str, str], dict[str, Any]]:
    """Every span that was kept, by its ids."""
    lines = (folder / "seen" / "rank0" / "spans.otlp.jsonl").read_text().splitlines()
    found = (
        span
        for line in lines
        for resource in json.loads(line)["resourceSpans"]
        for scope in resource["scopeSpans"]
        for span in scope["spans"]
    )
    return {(span["traceId"], span["spanId"]): span for span in found}


def attributes_of(span: dict[str, Any]) -> dict[str, Any]:
    """Its attributes."""
    return {each["key"]: next(iter(each["value"].values())) for each in span["attributes"]}


def newest(folder: Path) -> dict[str, Any]:
    """What the metric of the newest capture carries."""
    (point,) = last_points(folder / "seen" / "rank0")["train.profiler.capture.time"]
    assert 0 < time.time() - point["value"] < 600
    labels: dict[str, Any] = point["labels"]
    return labels


def test_a_capture_leaves_its_evidence_everywhere(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every output has the path and the finding; three steps pass between two polls."""
    train(tmp_path)
    console = capsys.readouterr().err
    (path,) = (tmp_path / "seen" / "captures").glob("*.record.json")
    record = json.loads(path.read_text())
    sentence, steps = record["finding"]["summary"], record["steps"]

    everything = spans(tmp_path)
    (capture,) = [span for span in everything.values() if span["name"] == "train.profiler.capture"]
    linked = [everything[link["traceId"], link["spanId"]] for link in capture["links"]]
    kept = [attributes_of(span) for span in linked if span["name"] != "train.run"]
    assert [int(step["train.step.index"]) for step in kept] == list(range(steps[0], steps[1] + 1))
    assert {step["train.keep.reason"] for step in kept} == {"profiler"}
    assert attributes_of(capture)["train.profiler.finding"] == sentence
    trace = attributes_of(capture)["train.profiler.file"]

    assert newest(tmp_path) == {
        "train.profiler.file": f"captures/{record['file']}",
        "train.profiler.finding.name": record["finding"]["name"],
        "train.profiler.trigger": "on_demand",
    }
    events = (tmp_path / "seen" / "rank0" / "events.jsonl").read_text()
    assert json.dumps(sentence)[1:-1] in events
    assert record["epoch"] == steps[0] // BATCHES + 1
    assert [each.name for each in (tmp_path / "plain").glob("*.json")] == [f"epoch_{record['epoch']}.json"]
    assert f"captured steps {steps[0]} to {steps[1]}: {trace}" in console
    assert f"otel_train:   {sentence}" in console
    assert record["top_cpu_ops"][0]["name"][:12] in console  # a long one is shortened in the middle
    summary = json.loads((tmp_path / "seen" / "rank0" / "summary.json").read_text())
    assert [(row["file"], row["finding"]) for row in summary["captures"]] == [(trace, sentence)]
    for command in ("summary", "postmortem", "report"):
        assert main([command, "seen", "--run-dir", str(tmp_path)]) == 0
        said = " ".join(capsys.readouterr().out.split())
        if command == "report":
            said = (tmp_path / "seen" / "report.html").read_text()
            assert "Memory allocated on cpu" in said
        assert trace.rpartition("/")[2] in said


def test_as_many_operations_are_named_as_were_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Fifteen became ten, and nothing said so: the analysis beside training had listed no more."""
    train(tmp_path, profiler_top=15)
    console = capsys.readouterr().err
    (path,) = (tmp_path / "seen" / "captures").glob("*.record.json")
    operators = json.loads(path.read_text())["top_cpu_ops"]

    assert len(operators) == 15
    assert all(row["name"][:44] in console for row in operators)


def test_two_captures_of_a_run_can_be_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An early epoch and a late one."""
    train(tmp_path / "a")
    train(tmp_path / "b")
    (first,) = (tmp_path / "a" / "seen" / "captures").glob("*.json.gz")
    (second,) = (tmp_path / "b" / "seen" / "captures").glob("*.json.gz")
    capsys.readouterr()

    assert main(["compare", str(first), str(second), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["rows"]
