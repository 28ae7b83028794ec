"""Trouble in a real run reaches whoever is called, through every part of the stack."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.support.stack import ROOT, Alerts, stack, troubled, value, wait_for, webhook

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [pytest.mark.stack, pytest.mark.timeout(600)]

RUNS = {
    "input-bound": ["--wait-ms=20", "--work-ms=1"],
    "stalled": ["--trouble=stall"],
    "killed": [],
    "nan": ["--trouble=nan"],
    "healthy": [],
}


class Watched:
    """A webhook, and the process ids of runs with one trouble each."""

    def __init__(self, alerts: Alerts, pids: dict[str, int]) -> None:
        self.alerts = alerts
        self.pids = pids


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    folder = tmp_path_factory.mktemp("alerts")
    with (
        webhook() as alerts,
        stack(folder / "state", url=alerts.url) as made,
        troubled(made, folder / "runs", RUNS, stall_after_s="4") as pids,
    ):
        # Killed first, so that every alert has its time while the others have theirs.
        wait_for(
            lambda: value(made, 'train_run_status{train_run_id="killed",train_run_state="training"}'),
            timeout_s=240,
            what="a run to kill",
        )
        os.kill(pids["killed"], signal.SIGKILL)
        yield Watched(alerts, pids)


def reached(watched: Watched, name: str, **labels: str) -> None:
    """The alert came, says something, and its runbook is a page of ours."""
    alert = wait_for(lambda: watched.alerts.find(name, **labels), timeout_s=240, what=f"{name} {labels}")
    assert alert["annotations"]["summary"]
    runbook = alert["annotations"]["runbook_url"]
    assert runbook.endswith(f"docs/runbooks/{Path(runbook).name}")
    assert (ROOT / "docs" / "runbooks" / Path(runbook).name).is_file()


def test_that_the_chain_works_is_said_all_the_time(watched: Watched) -> None:
    """Silence of the Watchdog is the alert about alerting."""
    reached(watched, "Watchdog")


def test_a_loss_that_is_not_a_number_pages(watched: Watched) -> None:
    """From here on the run trains on nothing."""
    reached(watched, "TrainNonFinite", train_run_id="nan", severity="critical")


def test_a_run_that_stands_still_pages(watched: Watched) -> None:
    """It holds its machines and nobody would look before morning."""
    reached(watched, "TrainRunStalled", train_run_id="stalled", severity="critical")


def test_a_run_that_waits_for_data_is_reported(watched: Watched) -> None:
    """The commonest waste there is."""
    reached(watched, "TrainInputBound", train_run_id="input-bound")


def test_a_run_that_was_killed_pages(watched: Watched) -> None:
    """SIGKILL leaves it no last word, and a push has no target that is down."""
    reached(watched, "TrainRunVanished", train_run_id="killed", severity="critical")


def test_a_healthy_run_is_left_alone(watched: Watched) -> None:
    """All this time it trained beside the others; an alert that cries wolf is switched off."""
    os.kill(watched.pids["healthy"], 0)  # raises when it is gone
    about = [
        alert["labels"]
        for alert in watched.alerts.received
        if alert["labels"].get("train_run_id") == "healthy"
    ]
    assert about == []
