"""Workers of a DataLoader are our guests: they record nothing and send nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.receiver import Received
from tests.support.zero_code import environment, printed_by

ROOT = Path(__file__).parents[2]
PROGRAM = "tests.integration.workers.program"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def said_by(how: str, folder: Path, receiver: Received) -> dict[str, Any]:
    """What the program says, run in a process of its own: autograd's threads of another test forbid forks."""
    environ = environment(OTEL_EXPORTER_OTLP_ENDPOINT=receiver.endpoint)
    lines = printed_by("-m", PROGRAM, how, folder, environ=environ, folder=ROOT).splitlines()
    said: dict[str, Any] = json.loads(lines[-1])
    return said


def senders(received: Received) -> set[tuple[str, int]]:
    """Identity and process of every sender."""
    resources = [group.resource for request in received.metrics for group in request.resource_metrics]
    resources += [group.resource for request in received.traces for group in request.resource_spans]
    found = set()
    for resource in resources:
        values = {attribute.key: attribute.value for attribute in resource.attributes}
        found.add((values["service.instance.id"].string_value, values["process.pid"].int_value))
    return found


@pytest.mark.parametrize("context", ["fork", "spawn", "forkserver"])
def test_workers_neither_send_nor_record(context: str, receiver: Received, tmp_path: Path) -> None:
    """Each worker of each epoch would be one more phantom process, with metrics frozen at the fork."""
    said = said_by(context, tmp_path, receiver)
    summary = said["summary"]

    assert len(said["workers"]) == said["expected_workers"]
    assert said["pid"] not in said["workers"]
    assert len(receiver.metrics) >= 2
    assert [pid for _, pid in senders(receiver)] == [said["pid"]]
    assert receiver.traces
    assert [summary[name] for name in ("batches", "steps", "updates")] == [
        said[name] for name in ("batches", "steps", "updates")
    ]
    stages = {row["stage"]: row["count"] for row in summary["stages"] if row["count"]}
    assert stages == {"data": 9, "forward": 9, "backward": 9, "optimizer": 9}
    assert summary["telemetry"]["records_lost"] == 0
    assert [path.name for path in tmp_path.glob("*/*") if path.is_dir()] == ["rank0"]


def test_a_forked_child_that_trains_leaves_its_parent_exact(receiver: Received, tmp_path: Path) -> None:
    """``os.fork`` in mid-run: the child's edges must not land in the parent's map, nor its metrics be sent."""
    said = said_by("child", tmp_path, receiver)
    summary = said["summary"]

    assert said["status"] == 0
    assert [pid for _, pid in senders(receiver)] == [said["pid"]]
    forwards = sum(row["count"] for row in summary["stages"] if row["stage"] == "forward")
    assert forwards == said["forwards"] == 2
    assert summary["updates"] >= said["inner"] + said["updates"]
