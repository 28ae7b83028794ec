"""What a dead Collector mutes: the runs that it carried, and no other. What a cause mutes, and what is one page. Asked of a real Alertmanager."""

from __future__ import annotations

import json
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.stack import ROOT, program, wait_for

pytestmark = pytest.mark.stack

DOWN = {"alertname": "OtelCollectorDown", "severity": "critical"}
VANISHED = {"alertname": "TrainRunVanished", "severity": "critical"}


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    folder: Path = tmp_path_factory.mktemp("alertmanager")
    command = [
        program("alertmanager"),
        f"--config.file={ROOT / 'deploy' / 'alertmanager' / 'alertmanager.yml'}",
        f"--storage.path={folder}",
        f"--web.listen-address=127.0.0.1:{port}",
        "--cluster.listen-address=",
    ]
    with (folder / "log").open("w") as log, subprocess.Popen(command, stdout=log, stderr=log) as running:
        try:
            address = f"http://127.0.0.1:{port}/api/v2/alerts"
            wait_for(lambda: answered(address), timeout_s=30, what="Alertmanager")
            yield address
        finally:
            running.terminate()


def answered(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5):
            return True
    except OSError:
        return False


def muted(url: str, source: dict[str, str], *targets: dict[str, str]) -> set[str]:
    """Runs whose alert is muted while the source fires."""
    return {labels["train_run_id"] for labels in inhibited(url, source, *targets)}


def inhibited(url: str, *firing: dict[str, str]) -> list[dict[str, str]]:
    """Labels of the alerts that are muted while all of them fire."""
    known: list[dict[str, Any]] = asked(url, "", *firing)
    assert len(known) == len(firing)
    return [alert["labels"] for alert in known if alert["status"]["inhibitedBy"]]


def asked(url: str, what: str, *firing: dict[str, str]) -> Any:
    """What Alertmanager says of alerts, or of their groups, while all of them fire."""
    scenario = f"{time.monotonic_ns()}"
    ends = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() + 60))
    alerts = [{"labels": {**labels, "scenario": scenario}, "endsAt": ends} for labels in firing]
    request = urllib.request.Request(
        url, json.dumps(alerts).encode(), {"Content-Type": "application/json"}, method="POST"
    )
    with urllib.request.urlopen(request, timeout=5):
        pass
    time.sleep(1.0)  # Alertmanager works out what is muted after it has answered
    with urllib.request.urlopen(f"{url}{what}?filter=scenario%3D%22{scenario}%22", timeout=5) as answer:
        known = json.load(answer)
    ended = [
        {**alert, "endsAt": "2020-01-01T00:00:00Z", "startsAt": "2019-01-01T00:00:00Z"} for alert in alerts
    ]
    request = urllib.request.Request(
        url, json.dumps(ended).encode(), {"Content-Type": "application/json"}, method="POST"
    )
    with urllib.request.urlopen(request, timeout=5):
        pass
    return known


def run(name: str, **labels: str) -> dict[str, str]:
    return {**VANISHED, "train_run_id": name, **labels}


RUNS = (run("of-n1", train_collector="n1"), run("of-n2", train_collector="n2"), run("scraped"))


def test_the_collector_of_one_node_mutes_the_runs_that_it_carried_and_no_other(url: str) -> None:
    """A thousand runs train on; the one that was really killed meanwhile must page."""
    assert muted(url, {**DOWN, "train_collector": "n1"}, *RUNS) == {"of-n1"}


def test_a_collector_that_loses_data_mutes_nothing(url: str) -> None:
    """Of a thousand ranks it may be one whose clock is wrong, or traces that are too large: a run that is killed must page."""
    losing = {**DOWN, "alertname": "OtelCollectorExportFailing", "train_collector": "n2"}

    assert muted(url, losing, *RUNS) == set()


def test_a_collector_without_a_name_mutes_nothing(url: str) -> None:
    """Two labels that are missing are equal for Alertmanager."""
    assert muted(url, DOWN, *RUNS) == set()


def test_the_gateway_behind_all_agents_mutes_what_came_by_an_agent(url: str) -> None:
    """All of them are unheard of for one reason."""
    assert muted(url, {**DOWN, "train_collector": "gateway"}, *RUNS) == {"of-n1", "of-n2"}


def test_what_says_that_a_run_failed_is_never_muted(url: str) -> None:
    """A run that was heard saying so came through."""
    failed = {**run("of-n1", train_collector="n1"), "alertname": "TrainRunFailed"}

    assert muted(url, {**DOWN, "train_collector": "n1"}, failed) == set()


def test_the_rank_that_holds_a_run_up_mutes_that_the_run_stands_still(url: str) -> None:
    """The page has to name the rank, its host and its stage."""
    stalled = {**run("hangs"), "alertname": "TrainRunStalled"}
    rank = {**run("hangs"), "alertname": "TrainRankStalled", "train_peer_rank": "3"}
    gone = {**run("gone"), "alertname": "TrainRunStalled"}

    muted_alerts = inhibited(url, stalled, rank, gone)

    assert [(labels["train_run_id"], labels["alertname"]) for labels in muted_alerts] == [
        ("hangs", "TrainRunStalled")
    ]


def test_runs_that_go_silent_together_are_one_page(url: str) -> None:
    """A network that fails is one cause. A run that fails has its own, and a page for it."""
    failed = [{**run(name), "alertname": "TrainRunFailed"} for name in ("x", "y")]

    groups = asked(url, "/groups", *(run(f"{number}") for number in range(40)), *failed)

    assert sorted((group["receiver"]["name"], len(group["alerts"])) for group in groups) == [
        ("page", 1),
        ("page", 1),
        ("page", 40),
    ]
