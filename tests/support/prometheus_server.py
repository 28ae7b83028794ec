"""Starts a Prometheus with the shipped rules, fed by a real run and by synthetic metrics."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple

from tests.support.synthetic_metrics import Exposition

ROOT: Final = Path(__file__).parents[2]
RULES: Final = ROOT / "deploy" / "prometheus" / "rules"
REAL_RUN: Final = "real"
PROMOTED: Final = (
    *("service.name", "service.namespace", "deployment.environment.name"),
    *("host.name", "train.run.id", "train.rank"),
)


class Ways(NamedTuple):
    """How the real run gets in.

    Attributes:
        program: Prometheus' own.
        push: by OTLP, as native histograms; otherwise scraped, as classic ones.
    """

    program: Path
    push: bool


class Store(NamedTuple):
    """A running Prometheus.

    Attributes:
        url: where it answers.
    """

    url: str

    def ask(self, what: str, **parameters: str) -> Any:
        """An answer of its API.

        Raises:
            ValueError: it does not understand the question; with its own words.
        """
        url = f"{self.url}/api/v1/{what}?{urllib.parse.urlencode(parameters)}"
        try:
            with urllib.request.urlopen(url, timeout=30) as response:
                return json.load(response)["data"]
        except urllib.error.HTTPError as error:
            raise ValueError(f"{json.load(error).get('error')}: {parameters}") from error


def config(folder: Path, target: str, *, push: bool) -> str:
    """Of Prometheus: the shipped rules, the synthetic metrics, and the real run by one way."""
    files = (
        ""
        if push
        else f"""
  - job_name: train
    file_sd_configs: [{{files: ["{folder}/{REAL_RUN}/rank0/prometheus_target.json"], refresh_interval: 2s}}]"""
    )
    otlp = f"otlp:\n  promote_resource_attributes: {json.dumps(PROMOTED)}\n" if push else ""
    return f"""\
global: {{scrape_interval: 3s, evaluation_interval: 15s}}
rule_files: ["{RULES}/*.yml"]
{otlp}scrape_configs:
  - {{job_name: synthetic, honor_labels: true, static_configs: [{{targets: ["{target}"]}}]}}
  - {{job_name: prometheus, static_configs: [{{targets: ["SELF"]}}]}}{files}
"""


@contextmanager
def filled(folder: Path, ways: Ways, seconds: float) -> Iterator[Store]:
    """A Prometheus while the run still trains, ``seconds`` after it began to."""
    folder.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        madeup = Exposition()
        stack.callback(madeup.close)
        store = stack.enter_context(running(folder, ways, config(folder, madeup.target, push=ways.push)))
        stack.enter_context(trained(folder, store, ways, seconds + 600))
        until(lambda: seen(store), 300)
        time.sleep(seconds)
        yield store


def seen(store: Store) -> bool:
    """Whether the real run has arrived."""
    return bool(store.ask("query", query=f'train_steps_total{{train_run_id="{REAL_RUN}"}}')["result"])


@contextmanager
def running(folder: Path, ways: Ways, text: str) -> Iterator[Store]:
    """Prometheus itself, on a free port."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    path = folder / "prometheus.yml"
    path.write_text(text.replace("SELF", address), encoding="utf-8")
    command = [
        str(ways.program),
        f"--config.file={path}",
        f"--storage.tsdb.path={folder / 'tsdb'}",
        f"--web.listen-address={address}",
        "--enable-feature=exemplar-storage",
        "--log.level=warn",
        *(["--web.enable-otlp-receiver"] if ways.push else []),
    ]
    store = Store(f"http://{address}")
    with (folder / "prometheus.log").open("w") as log, stopped(subprocess.Popen(command, stderr=log)):
        until(lambda: urllib.request.urlopen(f"{store.url}/-/ready", timeout=2).status, 120)
        yield store


@contextmanager
def trained(folder: Path, store: Store, ways: Ways, seconds: float) -> Iterator[None]:
    """The real run, in a process of its own."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("OTEL_")}
    if ways.push:
        environ["OTEL_EXPORTER_OTLP_METRICS_ENDPOINT"] = f"{store.url}/api/v1/otlp/v1/metrics"
        environ["OTEL_TRACES_EXPORTER"] = "none"
    command = [sys.executable, "-m", "tests.support.dashboard_run", str(seconds), str(folder)]
    with (folder / "run.log").open("w") as log:
        process = subprocess.Popen(command, cwd=ROOT, env=environ, stdout=log, stderr=log)
        with stopped(process):
            yield


@contextmanager
def stopped(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """The process is gone afterwards."""
    try:
        yield
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def until(question: Callable[[], object], timeout_s: float) -> None:
    """Wait for a true answer; a connection that fails counts as not yet.

    Raises:
        TimeoutError: it never came.
    """
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        try:
            if question():
                return
        except (OSError, ValueError):
            pass
        time.sleep(0.5)
    raise TimeoutError(f"no answer in {timeout_s} s")
