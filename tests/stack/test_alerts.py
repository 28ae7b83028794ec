"""Trouble in a real run reaches whoever is called, through every part of the stack."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from otel_train.stack.local import LocalStack
from tests.support.stack import ROOT, Alerts, get, stack, troubled, value, wait_for, webhook

pytestmark = [pytest.mark.stack, pytest.mark.timeout(600)]

RUNS = {
    "input-bound": ["--wait-ms=20", "--work-ms=1"],
    "stalled": ["--trouble=stall"],
    "killed": [],
    "lost": ["--setting=AGENT=thread"],  # with the process the agent is gone, as with a machine
    "nan": ["--trouble=nan"],
    "healthy": [],
}
SCHEDULED_STEP = 150
"""The run that is captured has a capture behind it when its alert comes: as with ``profiler="auto"``."""

CAPTURED = {
    "CAPTURE_EVERY_STEPS": SCHEDULED_STEP, "CAPTURE_REPEAT": 1, "CAPTURE_ACTIVITIES": "cpu",
}  # fmt: skip


class AlertChain:
    """A webhook, Prometheus, the folder of runs with one trouble each, and their process ids."""

    def __init__(self, alerts: Alerts, made: LocalStack, runs: Path, pids: dict[str, int]) -> None:
        self.alerts = alerts
        self.made = made
        self.runs = runs
        self.pids = pids


@pytest.fixture(scope="module")
def chain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AlertChain]:
    folder = tmp_path_factory.mktemp("alerts")
    captured = [f"--setting={name}={setting}" for name, setting in CAPTURED.items()]
    runs = {**RUNS, "captured": [*RUNS["input-bound"], *captured]}
    with ExitStack() as open_until_the_end:
        alerts = open_until_the_end.enter_context(webhook())
        made = open_until_the_end.enter_context(stack(folder / "state", url=alerts.url))
        address = f"http://127.0.0.1:{made.ports.alertmanager}"
        runs["captured"].append(f"--setting=ALERTMANAGER_URL={address}")
        # It is asked as well, and none of its alerts wants a capture.
        runs["nan"] = [*runs["nan"], f"--setting=ALERTMANAGER_URL={address}"]
        pids = open_until_the_end.enter_context(troubled(made, folder / "runs", runs, stall_after_s="4"))
        # Killed first, so that every alert has its time while the others have theirs.
        for name in ("killed", "lost"):
            wait_for(
                lambda: value(made, f'train_run_status{{train_run_id="{name}",train_run_state="training"}}'),  # noqa: B023 - called at once
                timeout_s=240,
                what=f"the run {name}",
            )
            os.kill(pids[name], signal.SIGKILL)
        yield AlertChain(alerts, made, folder / "runs", pids)


def reached(chain: AlertChain, name: str, **labels: str) -> None:
    """The alert came, says something, and its runbook is a page of this documentation."""
    alert = wait_for(lambda: chain.alerts.find(name, **labels), timeout_s=240, what=f"{name} {labels}")
    assert alert["annotations"]["summary"]
    runbook = alert["annotations"]["runbook_url"]
    assert runbook.endswith(f"docs/runbooks/{Path(runbook).name}")
    assert (ROOT / "docs" / "runbooks" / Path(runbook).name).is_file()


def test_that_the_chain_works_is_said_all_the_time(chain: AlertChain) -> None:
    """Silence of the Watchdog is the alert about alerting."""
    reached(chain, "Watchdog")


def test_a_loss_that_is_not_a_number_pages(chain: AlertChain) -> None:
    """From here on the run trains on nothing."""
    reached(chain, "TrainNonFinite", train_run_id="nan", severity="critical")


def test_a_run_that_stands_still_pages(chain: AlertChain) -> None:
    """It holds its machines without making progress."""
    reached(chain, "TrainRunStalled", train_run_id="stalled", severity="critical")


def test_a_run_that_waits_for_data_is_reported(chain: AlertChain) -> None:
    """The commonest waste there is."""
    reached(chain, "TrainInputBound", train_run_id="input-bound")


def test_a_run_that_was_killed_pages(chain: AlertChain) -> None:
    """SIGKILL leaves it no last word; its agent has one."""
    reached(chain, "TrainRunFailed", train_run_id="killed", severity="critical")


def test_a_run_whose_machine_is_gone_pages(chain: AlertChain) -> None:
    """No process is left to report it, and a push has no target that is down."""
    reached(chain, "TrainRunVanished", train_run_id="lost", severity="critical")


def test_an_alert_carries_the_newest_trace_of_its_run_and_what_that_shows(chain: AlertChain) -> None:
    """Who is called at night wants to know where to look, and what will be found there."""
    capture = wait_for(lambda: _capture_named(chain), timeout_s=240, what="a capture in the alert")
    file, _, finding = capture.partition(": ")

    assert finding == "input_bound"
    assert (chain.runs / "captured" / file).is_file()


def _capture_named(chain: AlertChain) -> str:
    """The capture that the alert about the run names in Alertmanager now. It may come before the first one was written."""
    asked = f"http://127.0.0.1:{chain.made.ports.alertmanager}/api/v2/alerts"
    found = get(asked, filter='alertname="TrainInputBound"')
    named = [each["annotations"]["capture"] for each in found if each["labels"]["train_run_id"] == "captured"]
    return "".join(name for name in named if name.startswith("captures/"))


def test_an_alert_about_a_run_without_captures_says_that_there_is_none(chain: AlertChain) -> None:
    """An empty line would read as a fault of the alert."""
    alert = wait_for(
        lambda: chain.alerts.find("TrainInputBound", train_run_id="input-bound"), timeout_s=240, what="it"
    )

    assert alert["annotations"]["capture"] == "none in the last hour"


def test_an_alert_that_fires_has_its_run_captured(chain: AlertChain) -> None:
    """By the time the page has been read the trace of the trouble is there, and the alert names that one."""
    captures = chain.runs / "captured" / "captures"

    def asked_by_alert() -> dict[str, Any] | None:
        records = [json.loads(path.read_text()) for path in captures.glob("*.record.json")]
        return next((one for one in records if one["trigger"] == "alert" and one["finding"]), None)

    record = wait_for(asked_by_alert, timeout_s=240, what="a capture that the alert asked for")
    assert record["reason"] == "TrainInputBound"
    assert record["problem"] == ""

    def named() -> bool:
        return _capture_named(chain) == f"captures/{record['file']}: {record['finding']['name']}"

    assert wait_for(named, timeout_s=60, what="the alert in Alertmanager to name it")


def test_a_run_without_the_address_and_one_without_such_an_alert_are_not_captured(chain: AlertChain) -> None:
    """TrainNonFinite has no label that asks for a capture."""
    for name in ("input-bound", "nan"):
        assert list((chain.runs / name).glob("captures/*")) == []


def test_a_healthy_run_is_left_alone(chain: AlertChain) -> None:
    """All this time it trained beside the others; an alert that cries wolf is switched off."""
    os.kill(chain.pids["healthy"], 0)  # raises when it is gone
    about = [
        alert["labels"] for alert in chain.alerts.received if alert["labels"].get("train_run_id") == "healthy"
    ]
    assert about == []
