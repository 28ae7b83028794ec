"""A real stack for tests: the shipped files, hurried; a webhook; questions to Prometheus and Jaeger."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import fields
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest

from otel_train.errors import StackError
from otel_train.stack import local
from otel_train.stack.configuration import HOST, Ports
from otel_train.stack.local import LocalStack
from tests.support.http_server import http_server

ROOT = Path(__file__).parents[2]
SCALE = 30
"""How much faster time passes in the rules of a hurried stack: five minutes take ten seconds."""

UNIT_MS = {"ms": 1, "s": 1000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}
DURATION = r"(?P<number>\d+)(?P<unit>ms|s|m|h|d)\b"
WAITS = "for|interval|keep_firing_for|scrape_interval|evaluation_interval|rule_query_offset|group_wait|group_interval|repeat_interval"
HURRIED = re.compile(rf"(?P<before>\b(?:{WAITS}): |\[|\boffset ){DURATION}")
"""A duration of a rule file, prometheus.yml or alertmanager.yml: waits, windows, offsets."""

LEAST_MS, LEAST_SCRAPE_MS = 100, 2000
"""A scrape may take as long as the interval, and a busy machine is slow to answer."""

AGE = re.compile(
    r"(?P<before>_age_seconds:min\[\w+\]\) > |timestamp\(train_heartbeat_time_seconds\)\) < )(?P<number>\d+)\b"
)
"""A number of seconds that a rule compares an age with."""


def free_ports() -> Ports:
    """Ports that are free at the moment."""
    with ExitStack() as opened:
        sockets = {each.name: opened.enter_context(socket.create_server((HOST, 0))) for each in fields(Ports)}
        return Ports(**{name: each.getsockname()[1] for name, each in sockets.items()})


def hurry(text: str) -> str:
    """The same configuration with every duration divided by SCALE, down to a least one."""

    def shorter(found: re.Match[str]) -> str:
        ms = int(found["number"]) * UNIT_MS[found["unit"]] // SCALE
        least = LEAST_SCRAPE_MS if found["before"] == "scrape_interval: " else LEAST_MS
        return f"{found['before']}{max(ms, least)}ms"

    text = HURRIED.sub(shorter, text)
    return AGE.sub(lambda found: f"{found['before']}{int(found['number']) / SCALE:g}", text)


def hurry_files(state: Path) -> None:
    """Hurry the rendered configuration of a stack."""
    conf = state / "conf"
    for path in [conf / "prometheus.yml", conf / "alertmanager.yml", *(conf / "rules").glob("*.yml")]:
        path.write_text(hurry(path.read_text(encoding="utf-8")), encoding="utf-8")


def program(name: str) -> str:
    """A program of the stack; a missing one fails the test and says how to get it."""
    try:
        return str(local.find(name))
    except StackError as error:
        pytest.fail(str(error))


class Alerts:
    """A webhook, and what Alertmanager sent it.

    Attributes:
        url: where it listens.
        received: every alert of every notification, in order.
    """

    def __init__(self) -> None:
        self.url = ""
        self.received: list[dict[str, Any]] = []

    def find(self, name: str, **labels: str) -> dict[str, Any] | None:
        """The first alert of this name that fires with these labels."""
        for alert in list(self.received):
            known = alert["labels"]
            if known["alertname"] == name and alert["status"] == "firing" and labels.items() <= known.items():
                return alert
        return None

    def resolved(self, name: str, **labels: str) -> bool:
        """Whether the end was reported."""
        return any(
            alert["labels"]["alertname"] == name
            and alert["status"] == "resolved"
            and labels.items() <= alert["labels"].items()
            for alert in list(self.received)
        )


@contextmanager
def webhook() -> Iterator[Alerts]:
    """Listen for alerts."""
    alerts = Alerts()

    def take(_: BaseHTTPRequestHandler, body: bytes) -> tuple[int, bytes]:
        alerts.received += json.loads(body)["alerts"]
        return 200, b""

    with http_server(take) as url:
        alerts.url = f"{url}/alerts"
        yield alerts


@contextmanager
def stack(
    state: Path, *names: str, url: str = "", environ: Mapping[str, str] = os.environ
) -> Iterator[LocalStack]:
    """A hurried stack on free ports, or some parts of one."""
    made = LocalStack(state, free_ports(), environ)
    with configured(made, *names, url=url):
        yield made


@contextmanager
def configured(made: LocalStack, *names: str, url: str = "", scrape: tuple[str, ...] = ()) -> Iterator[None]:
    """Run a stack; whatever happens, it stops."""
    try:
        made.configure(webhook=url, scrape=scrape)
    except StackError as error:
        pytest.fail(str(error))
    hurry_files(made.state)
    try:
        made.start(*names)
        yield
    finally:
        made.stop()


def kill(made: LocalStack, name: str) -> None:
    """End a part without a chance to tidy up."""
    process = local.running(made.state, name)
    assert process is not None
    process.kill()
    process.wait(20)
    made.stop(name)


def wait_for(question: Any, timeout_s: float = 60, what: str = "an answer") -> Any:
    """The first true answer; an error counts as not yet."""
    deadline_s = time.monotonic() + timeout_s
    last: object = None
    while time.monotonic() < deadline_s:
        try:
            last = question()
        except OSError as error:
            last = error
        else:
            if last:
                return last
        time.sleep(0.25)
    raise AssertionError(f"waited {timeout_s} s for {what}; the last answer was {last!r}")


def get(url: str, **parameters: str) -> Any:
    """What an address answers, as JSON."""
    with urllib.request.urlopen(f"{url}?{urllib.parse.urlencode(parameters)}", timeout=10) as response:
        return json.load(response)


def ask(made: LocalStack, what: str, **parameters: str) -> Any:
    """A question to Prometheus' API."""
    answer = get(f"http://127.0.0.1:{made.ports.prometheus}/api/v1/{what}", **parameters)
    assert answer["status"] == "success"
    return answer["data"]


def value(made: LocalStack, query: str, at_s: float | None = None) -> float | None:
    """The value of a query that answers with one series, or None."""
    when = {} if at_s is None else {"time": str(at_s)}
    result = ask(made, "query", query=query, **when)["result"]
    return float(result[0]["value"][1]) if result else None


def environ_of(made: LocalStack, folder: Path, **settings: str) -> dict[str, str]:
    """Variables of a run that pushes to this stack, twice a second."""
    return {
        "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{made.ports.otlp_http}",
        "OTEL_TRAIN_RUN_DIR": str(folder),
        "OTEL_TRAIN_EXPORT_INTERVAL_S": "0.5",
        "OTEL_TRAIN_PROMETHEUS_ADDRESS": "127.0.0.1:0",
        "OMP_NUM_THREADS": "1",
        **{f"OTEL_TRAIN_{name.upper()}": text for name, text in settings.items()},
    }


@contextmanager
def running(folder: Path, words: list[str], environ: Mapping[str, str]) -> Iterator[subprocess.Popen[str]]:
    """A Python process with a run, or several, in it; whatever happens, they end."""
    folder.mkdir(parents=True, exist_ok=True)
    inherited = {name: text for name, text in os.environ.items() if not name.startswith("OTEL_")}
    with (
        (folder / "errors.txt").open("wb") as errors,
        subprocess.Popen(
            [sys.executable, *words],
            env={**inherited, **environ},
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            cwd=ROOT,
            start_new_session=True,
        ) as process,
    ):
        try:
            yield process
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


@contextmanager
def troubled(
    made: LocalStack, folder: Path, runs: Mapping[str, list[str]], **settings: str
) -> Iterator[dict[str, int]]:
    """Runs with one trouble each; their process ids by run id."""
    words = [
        json.dumps({"options": options, "environ": environ_of(made, folder, run_id=name, **settings)})
        for name, options in runs.items()
    ]
    with running(folder, [str(ROOT / "tests" / "stack" / "trainers" / "troubled.py"), *words], {}) as process:
        assert process.stdout is not None
        yield json.loads(process.stdout.readline())
