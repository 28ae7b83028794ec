"""A real Alertmanager, asked by runs of several ranks for the alerts that want a capture."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest

from otel_train.agent.alertmanager import EVERY_S, AlertPoller
from tests.support.stack import ROOT, get, stack, wait_for

pytestmark = [pytest.mark.stack, pytest.mark.timeout(400)]

RANK = """
    import os, time
    import torch, otel_train
    torch.set_num_threads(1)
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loader = torch.utils.data.DataLoader(torch.ones(64, 4), batch_size=4)
    session = otel_train.instrument(model, {"train": loader})
    while not os.path.exists(os.environ["OVER"]):
        for batch in loader:
            optimizer.zero_grad()
            model(batch).sum().backward()
            optimizer.step()
            time.sleep(0.002)
    session.close()
"""


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Of an Alertmanager that knows no alert."""
    with stack(tmp_path_factory.mktemp("state"), "alertmanager") as made:
        yield f"http://127.0.0.1:{made.ports.alertmanager}"


def fire(url: str, name: str, *, for_s: float = 600.0, **labels: str) -> None:
    """Tell the Alertmanager of an alert, as Prometheus does."""
    now = datetime.now(timezone.utc)
    alert = {
        "labels": {"alertname": name, "capture": "true", **labels},
        "startsAt": now.isoformat(), "endsAt": (now + timedelta(seconds=for_s)).isoformat(),
    }  # fmt: skip
    body = json.dumps([alert]).encode()
    request = urllib.request.Request(
        f"{url}/api/v2/alerts", body, {"Content-Type": "application/json"}, method="POST"
    )
    urllib.request.urlopen(request, timeout=10).close()


def active(url: str, run: str) -> list[dict[str, Any]]:
    """The alerts of a run that the Alertmanager says are active."""
    return [
        each
        for each in get(f"{url}/api/v2/alerts", filter=f'train_run_id="{run}"')
        if each["status"]["state"] == "active"
    ]


def polled(url: str, run: str, rank: int = 0) -> list[str]:
    """What one question of a rank would arm."""
    armed: list[str] = []

    def arm(name: str) -> str:
        armed.append(name)
        return ""

    poller = AlertPoller(url, run_id=run, rank=rank, arm=arm)
    poller.poll()
    poller.close(5)
    assert poller.faults == 0
    return armed


def test_the_matchers_find_the_alerts_of_one_rank(url: str) -> None:
    """Also where the run has a name that has to be quoted."""
    run = 'a"b\\c ü{}'
    fire(url, "OfTheRun", train_run_id=run)
    fire(url, "OfRank0", train_run_id=run, train_rank="0")
    fire(url, "OfRank3", train_run_id=run, train_rank="3")
    fire(url, "Rank0SaysOfRank3", train_run_id=run, train_rank="0", train_peer_rank="3")
    fire(url, "OfRank30", train_run_id=run, train_rank="30")
    fire(url, "WantsNone", train_run_id=run, train_rank="3", capture="no")
    fire(url, "OfTheRun", train_run_id="a")
    wait_for(
        lambda: (
            len([each for each in get(f"{url}/api/v2/alerts") if each["status"]["state"] == "active"]) == 7
        )
    )

    assert sorted(polled(url, run)) == ["OfRank0", "OfTheRun"]
    assert sorted(polled(url, run, 3)) == ["OfRank3", "Rank0SaysOfRank3"]
    assert polled(url, run, 4) == []


def test_an_alert_that_goes_on_arms_once_and_one_that_comes_back_again(url: str) -> None:
    """Prometheus repeats a firing alert every minute, and gives it a new beginning after it was resolved."""
    armed: list[str] = []

    def arm(name: str) -> str:
        armed.append(name)
        return ""

    poller = AlertPoller(url, run_id="again", rank=0, arm=arm)
    for _ in range(2):
        fire(url, "OnAndOff", train_run_id="again", for_s=2)
        wait_for(lambda: active(url, "again"))
        fire(url, "OnAndOff", train_run_id="again", for_s=2)
        poller.poll()
        poller.poll()
        wait_for(lambda: not active(url, "again"))
        poller.poll()
    poller.close(5)

    assert armed == ["OnAndOff", "OnAndOff"]


def test_a_silenced_alert_captures_nothing(url: str) -> None:
    """A silence says that the alert is being handled."""
    now = datetime.now(timezone.utc)
    silence = {
        "matchers": [{"name": "train_run_id", "value": "silent", "isRegex": False, "isEqual": True}],
        "startsAt": now.isoformat(), "endsAt": (now + timedelta(minutes=5)).isoformat(),
        "createdBy": "ann", "comment": "known",
    }  # fmt: skip
    request = urllib.request.Request(
        f"{url}/api/v2/silences", json.dumps(silence).encode(), {"Content-Type": "application/json"}
    )
    urllib.request.urlopen(request, timeout=10).close()
    fire(url, "Known", train_run_id="silent")
    wait_for(
        lambda: [
            each for each in get(f"{url}/api/v2/alerts", filter='train_run_id="silent"')
            if each["status"]["state"] == "suppressed"
        ]
    )  # fmt: skip

    assert polled(url, "silent") == []


def test_only_the_rank_that_an_alert_names_is_captured_once_for_each_alert(url: str, tmp_path: Path) -> None:
    """Three ranks of two runs train; one alert is about one of them, and goes on firing; another has the same cause."""
    over, program = tmp_path / "over", tmp_path / "rank.py"
    program.write_text("\n".join(line[4:] for line in RANK.splitlines()))
    for host in ("a", "b"):
        fire(url, "TrainStraggler", train_run_id="mine", train_peer_rank="1", train_peer_host=host)
    inherited = {name: text for name, text in os.environ.items() if not name.startswith("OTEL_")}

    def started(run: str, rank: int) -> subprocess.Popen[bytes]:
        environ = {
            **inherited, "PYTHONPATH": str(ROOT), "OVER": str(over), "OMP_NUM_THREADS": "1",
            "RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank), "OTEL_TRAIN_RUN_ID": run,
            "OTEL_TRAIN_RUN_DIR": str(tmp_path / "runs"), "OTEL_TRAIN_ALERTMANAGER_URL": url,
            "OTEL_TRAIN_PROMETHEUS": "false", "OTEL_TRAIN_PROFILER_ACTIVITIES": "cpu",
        }  # fmt: skip
        return subprocess.Popen([sys.executable, str(program)], env=environ, stderr=subprocess.DEVNULL)

    ranks = [started("mine", 0), started("mine", 1), started("other", 1)]
    try:
        wait_for(lambda: list(tmp_path.glob("runs/*/captures/*.record.json")), 200, "a capture")
        time.sleep(2 * EVERY_S + 1)  # each rank asks twice more
        over.touch()
        for process in ranks:
            assert process.wait(100) == 0
    finally:
        for process in ranks:
            process.kill()
            process.wait()

    trained = [
        json.loads(path.read_text())["steps"]["train"] for path in tmp_path.glob("runs/*/rank*/summary.json")
    ]
    assert len(trained) == 3
    records = [json.loads(path.read_text()) for path in tmp_path.glob("runs/*/captures/*.record.json")]
    assert [(each["rank"], each["alert"], each["problem"]) for each in records] == [(1, "TrainStraggler", "")]
    assert list((tmp_path / "runs" / "other").glob("captures/*")) == []
