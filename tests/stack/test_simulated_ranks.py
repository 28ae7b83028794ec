"""Ranks that do not exist, in a real Collector and a real Prometheus."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.scale.cli import main
from tests.support.stack import stack, value, wait_for

pytestmark = [pytest.mark.stack, pytest.mark.timeout(300)]

OF_THE_RUN = '{train_run_id="synthetic", __name__!~".*:.*|ALERTS.*|target_info"}'
"""What the ranks sent, without what Prometheus and its rules have made of it."""


def test_every_series_of_every_rank_arrives(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The page about scale counts what simulated ranks sent: it must be what is stored."""
    with stack(tmp_path, "collector", "prometheus") as made:
        endpoint = f"http://127.0.0.1:{made.ports.otlp_http}"
        words = ["--ranks", "32", "--profile", "reduced", "--duration", "8", "--export-every", "3"]
        # On a busy machine an export may be left out, which is 1.
        assert main(["--json", "--run-id", "synthetic", *words, "--endpoint", endpoint]) in {0, 1}
        values = json.loads(capsys.readouterr().out)

        count = wait_for(
            lambda: (value(made, f"count({OF_THE_RUN})") or 0) == values["series"] > 0, what="the series"
        )
        ranks = value(made, f"count(count by (train_rank) ({OF_THE_RUN}))")
        finished = value(
            made, 'count(train_run_status{train_run_id="synthetic", train_run_state="finished"} == 1)'
        )

    assert count
    assert ranks == 32
    assert finished == 32
    assert values["failures"] == 0
