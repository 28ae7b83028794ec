"""The files for large sites: an agent, a gateway, remote write; with real programs, on loopback."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import yaml

from benchmarks.scale.cli import main
from otel_train.catalog import DURATION_BOUNDS
from otel_train.exporters.openmetrics import PROMOTED
from tests.support.stack import ROOT, free_ports, get, program, wait_for

pytestmark = [pytest.mark.stack, pytest.mark.timeout(200)]

LARGE = ROOT / "deploy" / "large"


@contextmanager
def process(log: Path, words: list[str], environ: Mapping[str, str]) -> Iterator[None]:
    with (
        log.open("ab") as out,
        subprocess.Popen(
            words, env={**os.environ, **environ}, stdout=out, stderr=subprocess.STDOUT
        ) as running,
    ):
        try:
            yield
        finally:
            running.terminate()
            running.wait(20)


@pytest.mark.parametrize("name", ["agent", "gateway"])
def test_the_collector_accepts_the_files_for_large_sites(name: str) -> None:
    """The load-balancing exporter is part of the Collector that the tests use."""
    words = [program("collector"), "validate", f"--config={LARGE / name}.yaml"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


def test_classic_histograms_for_victoriametrics_have_the_bounds_of_the_catalogue() -> None:
    """It drops native histograms by remote write; the classic form of the rules reads these."""
    files = [f"--config={LARGE / name}.yaml" for name in ("gateway", "victoriametrics")]
    words = [program("collector"), "validate", *files]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    overlay = yaml.safe_load((LARGE / "victoriametrics.yaml").read_text())
    [group] = overlay["processors"]["transform/classic"]["metric_statements"]
    [statement] = group["statements"]
    bounds = json.loads(statement[statement.index("[") : statement.index("]") + 1])
    assert tuple(bounds) == DURATION_BOUNDS


def test_an_agent_samples_nothing_and_a_gateway_keeps_nothing() -> None:
    """What sees part of a trace cannot choose; what is accepted is on the agent's disk or in the store."""
    agent, gateway = (yaml.safe_load((LARGE / f"{name}.yaml").read_text()) for name in ("agent", "gateway"))
    assert list(agent["processors"]) == ["memory_limiter", "transform/collector"]
    queues = [each["sending_queue"] for each in agent["exporters"].values()]
    assert all(each["storage"] == "file_storage" and each["sizer"] == "bytes" for each in queues)
    for exporter in gateway["exporters"].values():
        queue = exporter.get("sending_queue", exporter.get("remote_write_queue"))
        assert queue == exporter["retry_on_failure"] == {"enabled": False}
    [labels] = gateway["processors"]["transform/labels"]["metric_statements"]
    assert {each.split('"')[1] for each in labels["statements"]} == set(PROMOTED)


def test_everything_arrives_by_remote_write_after_an_outage_of_the_gateway(tmp_path: Path) -> None:
    """The labels, names and native histograms are those of the way by OTLP."""
    agent, gateway, store = free_ports(), free_ports(), free_ports()
    base = f"http://127.0.0.1:{store.prometheus}"
    prometheus = [
        program("prometheus"), f"--config.file={ROOT / 'deploy' / 'prometheus' / 'prometheus.yml'}",
        f"--storage.tsdb.path={tmp_path / 'store'}", f"--web.listen-address=127.0.0.1:{store.prometheus}",
        "--web.enable-remote-write-receiver",
    ]  # fmt: skip
    collector = program("collector")
    of_agent = {
        "COLLECTOR_HEALTH": f"127.0.0.1:{agent.collector_health}",
        "COLLECTOR_HTTP": f"127.0.0.1:{agent.otlp_http}",
        "COLLECTOR_GRPC": f"127.0.0.1:{agent.otlp_grpc}",
        "COLLECTOR_METRICS_PORT": str(agent.collector_metrics),
        "COLLECTOR_QUEUE_DIR": str(tmp_path / "queue"),
        "COLLECTOR_NAME": "node-7",
        "GATEWAYS": "127.0.0.1",
        "GATEWAYS_PORT": str(gateway.otlp_grpc),
    }
    of_gateway = {
        "COLLECTOR_HEALTH": f"127.0.0.1:{gateway.collector_health}",
        "COLLECTOR_GRPC": f"127.0.0.1:{gateway.otlp_grpc}",
        "COLLECTOR_METRICS_PORT": str(gateway.collector_metrics),
        "METRICS_URL": f"{base}/api/v1/write",
    }
    with ExitStack() as running:
        running.enter_context(process(tmp_path / "store.log", prometheus, {}))
        running.enter_context(
            process(tmp_path / "agent.log", [collector, f"--config={LARGE / 'agent.yaml'}"], of_agent)
        )
        wait_for(lambda: get(f"http://127.0.0.1:{agent.collector_health}/"), what="the agent")
        words = ["--ranks", "8", "--profile", "full", "--duration", "4", "--export-every", "2"]
        words += ["--run-id", "large", "--endpoint", f"http://127.0.0.1:{agent.otlp_http}"]
        assert main(["--json", *words]) in {0, 1}  # the gateway is away: all of it waits
        running.enter_context(
            process(tmp_path / "gateway.log", [collector, f"--config={LARGE / 'gateway.yaml'}"], of_gateway)
        )

        def found(query: str) -> float:
            result = get(f"{base}/api/v1/query", query=query)["data"]["result"]
            return float(result[0]["value"][1]) if result else 0.0

        heartbeats = (
            'train_heartbeat_time_seconds{train_run_id="large",job="otel-train",train_collector="node-7"}'
        )
        wait_for(lambda: found(f"count({heartbeats})") == 8, timeout_s=90, what="every rank")
        ended = 'sum(train_run_status{train_run_id="large",train_run_state="finished"})'
        wait_for(lambda: found(ended) >= 1, timeout_s=90, what="the end of the run")
        assert found('sum(histogram_count(train_step_duration_seconds{train_run_id="large"}))') > 0
        assert found(f"count(count by (train_rank, host_name, service_name) ({heartbeats}))") == 8
        assert found('count(target_info{instance!=""})') >= 8
