"""The Collector's queue: how long an outage it holds, and that all of it arrives afterwards."""

from __future__ import annotations

import re
import sys
import urllib.request
from pathlib import Path

import pytest

from benchmarks.scale.cli import main
from otel_train.stack.local import LocalStack
from tests.support.stack import ask, kill, stack, value, wait_for

pytestmark = [pytest.mark.stack, pytest.mark.timeout(300)]

PROMISED_RANKS, PROMISED_S, REDUCED_EVERY_S = 1024, 3600, 30
RANKS = 128
SPARE = 1.3
"""A reduced rank may come to send some more series."""


OF_THE_RUN = '{train_run_id="waited", __name__!~".*:.*|ALERTS.*|target_info"}'


def own_metric(made: LocalStack, metric: str) -> float:
    """What the Collector says of itself."""
    with urllib.request.urlopen(f"http://127.0.0.1:{made.ports.collector_metrics}/metrics") as answer:
        text = answer.read().decode()
    [found] = re.findall(rf"(?m)^otelcol_{metric}.*\}} (\S+)$", text)
    return float(found)


def stored(made: LocalStack) -> int:
    """Samples of the run in Prometheus."""
    series = ask(made, "query", query=f"{OF_THE_RUN}[1h]")["result"]
    return sum(len(each.get("values", ())) + len(each.get("histograms", ())) for each in series)


def test_an_hour_of_1024_reduced_ranks_fits_survives_a_kill_and_arrives(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It held 58 seconds of them: 2,000 requests."""
    size, capacity = (f'exporter_queue_{what}{{data_type="metrics"' for what in ("size", "capacity"))
    with stack(tmp_path / "state", "collector") as made:
        words = ["--ranks", str(RANKS), "--profile", "reduced", "--export-every", "2", "--duration", "9"]
        words += ["--run-id", "waited", "--endpoint", f"http://127.0.0.1:{made.ports.otlp_http}"]
        assert main(["--json", *words]) in {0, 1}
        points = own_metric(made, "receiver_accepted_metric_points")
        waiting, size_limit = own_metric(made, size), own_metric(made, capacity)

        kill(made, "collector")
        made.start("collector")
        assert own_metric(made, size) == pytest.approx(waiting, rel=0.05)
        made.start("prometheus")
        wait_for(lambda: stored(made) == points, what=f"{points:.0f} data points")
        wait_for(lambda: own_metric(made, size) == 0, what="an empty queue")
        requests = value(
            made, 'sum(count_over_time(train_heartbeat_time_seconds{train_run_id="waited"}[1h]))'
        )
    assert requests
    needed = waiting / requests * PROMISED_RANKS * PROMISED_S / REDUCED_EVERY_S
    with capsys.disabled():
        sys.stdout.write(f"\n{waiting / requests:.0f} bytes a request; an hour {needed / 1e6:.0f} MB\n")
    assert needed * SPARE < size_limit
