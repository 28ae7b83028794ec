"""A real Prometheus scrapes us and answers questions."""

from __future__ import annotations

import bisect
import json
import math
import socket
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from otel_train.catalog import Kind, Metric
from otel_train.datamodel import Exemplar, ExportBatch, MetricFamily, Point, Snapshot
from otel_train.exporters.prometheus import PrometheusExporter
from tests.support.snapshots import LOADER, RESOURCE, STEPS, step_durations
from tests.support.stack import program, wait_for

pytestmark = pytest.mark.stack

BOUNDS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0)
STEP = Metric(
    name="train.step.duration",
    unit="s",
    kind=Kind.HISTOGRAM,
    meaning="Wall time of one step.",
    labels=(LOADER,),
    bounds=BOUNDS,
)
LABELS = {"train_run_id": "run-1", "train_rank": "0", "host_name": "here"}
TRACE_ID = 0xABCDEF0123456789ABCDEF0123456789
DURATIONS_S = np.random.default_rng(7).lognormal(mean=-3, sigma=0.8, size=20_000)


def metrics(durations_s: Any) -> Snapshot:
    """What an honest aggregator makes of these durations."""
    now_ns = time.time_ns()
    exemplar = Exemplar(float(max(durations_s)), now_ns, TRACE_ID, 0x1234)
    point = step_durations(map(float, durations_s), bounds=BOUNDS, exemplars=[exemplar])
    steps = Point((("train.loader", "code"),), float(len(durations_s)))
    return Snapshot(now_ns - 10**9, now_ns, (MetricFamily(STEP, (point,)), MetricFamily(STEPS, (steps,))))


@pytest.fixture(scope="module")
def exporter() -> Iterator[PrometheusExporter]:
    made = PrometheusExporter("127.0.0.1", 0, LABELS, RESOURCE)
    made.export(ExportBatch(snapshot=metrics(DURATIONS_S)))
    yield made
    made.close(2)


@contextmanager
def prometheus(folder: Path, targets: Path) -> Iterator[str]:
    """A Prometheus of its own on a free port; its base address."""
    config = folder / "prometheus.yml"
    config.write_text(
        "global: {scrape_interval: 1s}\n"
        "scrape_configs:\n"
        f"  - {{job_name: train, file_sd_configs: [{{files: ['{targets}']}}]}}\n"
    )
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [
        program("prometheus"),
        f"--config.file={config}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
        "--enable-feature=exemplar-storage",
        "--log.level=error",
    ]
    with subprocess.Popen(command) as process:
        try:
            base = f"http://127.0.0.1:{port}"
            wait_for(lambda: urllib.request.urlopen(f"{base}/-/ready", timeout=1).status == 200)
            yield base
        finally:
            process.terminate()


def ask(base: str, what: str, **parameters: str) -> Any:
    url = f"{base}/api/v1/{what}?{urllib.parse.urlencode(parameters)}"
    with urllib.request.urlopen(url, timeout=5) as response:
        answer = json.load(response)
    assert answer["status"] == "success"
    return answer["data"]


def value(base: str, query: str) -> float | None:
    result = ask(base, "query", query=query)["result"]
    return float(result[0]["value"][1]) if result else None


@pytest.fixture(scope="module")
def base(exporter: PrometheusExporter, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A Prometheus that found us by our target file and has scraped us."""
    folder = tmp_path_factory.mktemp("prometheus")
    with prometheus(folder, exporter.write_target(folder)) as address:
        wait_for(lambda: value(address, "train_steps_total"))
        yield address


@pytest.mark.parametrize("quantile", [0.1, 0.5, 0.9, 0.95, 0.99])
def test_a_quantile_is_within_one_bucket_of_the_truth(base: str, quantile: float) -> None:
    """The metric people act on."""
    answer = value(base, f"histogram_quantile({quantile}, sum by (le) (train_step_duration_seconds_bucket))")
    assert answer is not None
    truth = float(np.quantile(DURATIONS_S, quantile))
    assert abs(bisect.bisect_left(BOUNDS, answer) - bisect.bisect_left(BOUNDS, truth)) <= 1
    low = (0.0, *BOUNDS)[bisect.bisect_left(BOUNDS, truth)]
    high = (*BOUNDS, math.inf)[bisect.bisect_left(BOUNDS, truth)]
    assert low <= answer <= high


def test_counts_and_labels_arrive(base: str) -> None:
    """Dashboards select by run, rank and host; a clash would rename them to exported_*."""
    [series] = ask(base, "query", query="train_steps_total")["result"]
    assert float(series["value"][1]) == len(DURATIONS_S)
    assert {name: series["metric"][name] for name in LABELS} == LABELS
    assert series["metric"]["train_loader"] == "code"
    assert not [name for name in series["metric"] if name.startswith("exported_")]
    assert value(base, "train_step_duration_seconds_count") == len(DURATIONS_S)
    [target] = ask(base, "query", query="target_info")["result"]
    assert target["metric"]["service_name"] == "otel-train"


def test_an_exemplar_leads_from_a_quantile_to_its_trace(base: str) -> None:
    """One click from the slow bucket to the slow step."""
    now_s = time.time()
    found = wait_for(
        lambda: ask(
            base,
            "query_exemplars",
            query="train_step_duration_seconds_bucket",
            start=str(now_s - 600),
            end=str(now_s + 600),
        )
    )
    exemplars = [exemplar for series in found for exemplar in series["exemplars"]]
    assert exemplars[0]["labels"] == {"trace_id": f"{TRACE_ID:032x}", "span_id": f"{0x1234:016x}"}
    assert float(exemplars[0]["value"]) == pytest.approx(float(DURATIONS_S.max()))


def test_units_and_help_are_known_to_prometheus(base: str) -> None:
    """The query editor shows them."""
    [entry] = wait_for(lambda: ask(base, "metadata", metric="train_step_duration_seconds")).popitem()[1]
    assert entry["type"] == "histogram"
    assert entry["help"] == STEP.meaning
    assert entry["unit"] == "seconds"


def test_promtool_finds_nothing_to_object_to(exporter: PrometheusExporter) -> None:
    """Names, units and help follow Prometheus' own rules."""
    with urllib.request.urlopen(exporter.url, timeout=5) as response:
        text = response.read()
    checked = subprocess.run(
        [program("promtool"), "check", "metrics"], input=text, capture_output=True, timeout=60, check=False
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert not checked.stdout + checked.stderr
