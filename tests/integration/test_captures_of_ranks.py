"""Captures of two ranks hold the same steps, and show together which rank waits for which."""

from __future__ import annotations

import gzip
import json
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from tests.support import ranks
from tests.support.ranks import Job, job
from tests.support.zero_code import printed_by

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]
SLOW: dict[str, Any] = {"slow_s": {"forward": 0.03}, "steps": 2000}
SERVED = {"prometheus": True, "prometheus_address": "127.0.0.1:0"}


def records(runs: Path) -> dict[int, dict[str, Any]]:
    """The newest record of each rank."""
    found = (json.loads(path.read_text()) for path in (runs / "job" / "captures").glob("*.record.json"))
    return {record["rank"]: record for record in sorted(found, key=lambda record: record["ended_unix_ns"])}


def steps_in(runs: Path, record: dict[str, Any]) -> list[int]:
    """Numbers of the steps that a trace says it holds."""
    with gzip.open(runs / "job" / "captures" / record["file"]) as file:
        events = json.load(file)["traceEvents"]
    names = {event["name"] for event in events if event.get("cat") == "user_annotation"}
    return sorted(int(name.removeprefix("ProfilerStep#")) for name in names if "ProfilerStep#" in name)


def both(started: Job, runs: Path) -> dict[int, dict[str, Any]]:
    """The records, once each rank has one."""
    started.until(lambda: len(records(runs)) == 2)
    return records(runs)


def command(*words: str) -> str:
    """What the command prints."""
    return printed_by("-m", "otel_train", *words, environ=ranks.environment())


def test_a_schedule_takes_the_same_steps_and_the_analysis_names_the_late_rank(tmp_path: Path) -> None:
    """Rank 1 sleeps in forward: in the trace of rank 0 that is a long all-reduce, which explains nothing alone."""
    settings = {"profiler_every": "steps=40", "profiler_schedule": "active=3,repeat=1"}
    with job(tmp_path, 2, **SLOW, settings=settings) as started:
        found = both(started, tmp_path)

    assert found[0]["steps"] == found[1]["steps"] == [40, 42]
    assert [steps_in(tmp_path, record) for record in found.values()] == [[40, 41, 42]] * 2
    lines = command("analyze", str(tmp_path / "job"), "--json").splitlines()
    first = json.loads(lines[0])
    (late,) = [finding for finding in first["findings"] if finding["name"] == "straggler"]
    assert len(lines) == 2
    assert late["evidence"]["rank"] == 1


def test_the_command_and_http_take_the_same_steps_of_both_ranks(tmp_path: Path) -> None:
    """Each rank is somewhere else when it hears of it."""
    with job(tmp_path, 2, **SLOW, settings=SERVED) as started:
        home = tmp_path / "job"
        started.until(lambda: len(list(home.glob("rank*/prometheus_target.json"))) == 2)
        command("profile", "job", "--run-dir", str(tmp_path), "--ranks", "0,1", "--steps", "2")
        by_command = records(tmp_path)
        token = (home / "rank1" / "capture-token").read_text().strip()
        target = json.loads((home / "rank1" / "prometheus_target.json").read_text())[0]["targets"][0]
        request = urllib.request.Request(
            f"http://{target}/capture", data=b'{"steps": 2, "ranks": [0, 1]}', method="POST",
            headers={"Authorization": f"Bearer {token}"},
        )  # fmt: skip
        with urllib.request.urlopen(request, timeout=20) as answer:
            at_step = json.load(answer)["at_step"]
        started.until(lambda: all(record["steps"][:1] == [at_step] for record in records(tmp_path).values()))

    assert by_command[0]["steps"] == by_command[1]["steps"]
    assert [record["problem"] for record in by_command.values()] == ["", ""]
