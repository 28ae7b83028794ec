"""One loop, from ``instrument`` to ``close``, and everything that it says in public, written to files."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

import torch

import otel_train
from otel_train.cli.main import main
from otel_train.collectors.process import CpuWait
from tests.contract.goldens import files
from tests.contract.goldens.loops import LOOPS
from tests.contract.goldens.machine import UNIX_NS, clock
from tests.support.inside import inside

__all__ = ["LOOPS", "write"]

SETTINGS: dict[str, Any] = {
    "agent": "thread",  # another process has clocks of its own
    "prometheus_address": "127.0.0.1:0",
    "otlp": "off",
    "hardware": "off",
    "exporters": "off",
    "tuning": {
        "poll_interval_s": 10.0
    },  # longer than any loop takes: nothing is read before the loop asks, or closes
    "flight_recorder_events": 1 << 12,
}

KILLED_AFTER = 40
"""How often a loop has spent time when its folder is copied, as if it had been killed in the middle of that."""

QUIET_NS = 600 * 10**9
"""How long after that the post-mortem is made: a rank of another host, which this one is to it, is not live any more."""

OPENMETRICS = {"Accept": "application/openmetrics-text; version=1.0.0"}


class Printed(io.StringIO):
    """Keeps what is printed on a console that shows any character."""

    encoding = "utf-8"


class Console(Printed):
    """Standard error of a program. When the run summary is printed the values are final, and ``/metrics`` is still served."""

    url: str | None = None
    page = ""

    def write(self, text: str) -> int:
        if self.url:
            request = urllib.request.Request(self.url, headers=OPENMETRICS)
            with contextlib.suppress(OSError):  # it is served no longer
                self.page = _opener.open(request, timeout=10).read().decode()
        return super().write(text)


_opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def write(name: str, folder: Path) -> None:
    """Run a loop, and write its files to ``folder/name``."""
    with tempfile.TemporaryDirectory() as home:
        said = _said(name, Path(home))
    target = folder / name
    target.mkdir(parents=True)
    for file, text in said.items():
        (target / file).write_text(files.rounded(text), encoding="utf-8")


def _said(name: str, home: Path) -> dict[str, str]:
    runs, killed = home / "runs", home / "killed"
    console, running = _run(name, runs, killed)
    rank = runs / name / "rank0"
    metrics, spans, events = (
        (rank / f"{each}.jsonl").read_text(encoding="utf-8")
        for each in ("metrics.otlp", "spans.otlp", "events")
    )
    for path in runs.rglob("*"):
        os.utime(path, ns=(UNIX_NS, UNIX_NS))  # pages say when a file was written
    _printed("report", name, "--output", str(home / "report.html"), "--run-dir", str(runs))
    said = {
        "spent.json": json.dumps({on: ns / 10**9 for on, ns in clock.spent_ns.items()}, indent=1) + "\n",
        "summary.json": files.summary(json.loads((rank / "summary.json").read_text(encoding="utf-8")), runs),
        "run_summary.txt": files.plain(console.getvalue(), runs),
        "metrics.txt": files.page(console.page),
        "metrics.otlp.jsonl": files.metrics(metrics),
        "spans.otlp.jsonl": files.spans(spans),
        "events.jsonl": files.lines(events, runs),
        "report.txt": files.report((home / "report.html").read_text(encoding="utf-8"), runs),
        "postmortem.txt": _printed("postmortem", name, "--run-dir", str(runs)),
    }
    clock.now_ns += QUIET_NS
    said["postmortem_killed.txt"] = _printed("postmortem", name, "--run-dir", str(killed))
    return said if running is None else {**said, "summary_running.json": files.summary(running, runs)}


def _run(name: str, runs: Path, killed: Path) -> tuple[Console, dict[str, Any] | None]:
    """What was printed and served at the end, and what the program received in mid-run."""
    console, usual = Console(), sys.stderr
    sessions: list[Any] = []

    def start(model: Any = None, loaders: Any = None, **settings: Any) -> Any:
        sessions.append(
            otel_train.instrument(model, loaders, run_id=name, run_dir=str(runs), **SETTINGS, **settings)
        )
        console.url = sessions[0].metrics_url
        inside(sessions[0]).service.cpu_wait = CpuWait(Path(os.devnull))  # this machine's is left to chance
        return sessions[0]

    def kill() -> None:
        inside(sessions[0]).rings.copy_now(time.time_ns())
        shutil.copytree(runs / name, killed / name)

    torch.manual_seed(0)
    clock.restart(KILLED_AFTER, kill)
    sys.stderr = console
    try:
        running = LOOPS[name](start)
        sessions[0].close()
    finally:
        sys.stderr = usual
    return console, running


def _printed(*words: str) -> str:
    """What a command prints."""
    printed = Printed()
    with contextlib.redirect_stdout(printed):
        code = main(words)
    assert code == 0, printed.getvalue()
    return files.plain(printed.getvalue(), Path(words[-1]))
