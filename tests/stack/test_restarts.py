"""Parts of the stack die while a run goes on."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

import psutil
import pytest

from otel_train.cli.main import main
from otel_train.stack.local import LocalStack
from tests.support.json_lines import points_of, read_jsonl
from tests.support.stack import ask, kill, stack, troubled, value, wait_for, webhook

pytestmark = [pytest.mark.stack, pytest.mark.timeout(600)]

OUTAGE_S = 4
TALKATIVE = {"tuning": "trace_every_steps=1,poll_interval_s=0.1", "trace_rate_per_s": "100"}
"""Every step has its trace."""
SELECTED = 'train_steps_total{train_run_id="steady",train_phase="train"}'


def exports_ms(path: Path) -> set[int]:
    """When the exports in a file of the run directory were made, by their counter of steps."""
    return {
        int(point["timeUnixNano"]) // 1_000_000
        for export in read_jsonl(path)
        for point in points_of(export).get("train.steps", ())
    }


def stored_ms(made: LocalStack) -> set[int]:
    """When Prometheus has samples of that counter."""
    series = ask(made, "query", query=f"{SELECTED}[10m]")["result"]
    return {round(float(at_s) * 1000) for each in series for at_s, _ in each["values"]}


def steps(made: LocalStack) -> float:
    return value(made, SELECTED) or 0.0


def outage(made: LocalStack, name: str) -> tuple[int, int]:
    """Kill a part, start it again, wait until steps come; when it was away, in Unix milliseconds."""
    began_ms = time.time_ns() // 1_000_000
    kill(made, name)
    time.sleep(OUTAGE_S)
    made.start(name)
    ended_ms = time.time_ns() // 1_000_000
    seen = wait_for(lambda: steps(made), what="steps after the outage")
    wait_for(lambda: steps(made) > seen, what="more steps after the outage")
    return began_ms, ended_ms


def test_every_export_is_stored_after_kills(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Prometheus away: the Collector keeps everything on disk. Collector away: the run does, and sends it afterwards."""
    runs = tmp_path / "runs"
    with (
        stack(tmp_path / "state", "prometheus", "collector") as made,
        troubled(made, runs, {"steady": []}) as pids,
    ):
        wait_for(lambda: steps(made), timeout_s=240, what="the first steps")
        outage(made, "prometheus")
        outage(made, "collector")
        rank = runs / "steady" / "rank0"
        metrics = rank / "metrics.otlp.jsonl"
        recorded_ms = exports_ms(metrics)
        wait_for(lambda: recorded_ms <= stored_ms(made), what="every export until now, without any replay")
        os.kill(pids["steady"], signal.SIGTERM)
        wait_for(lambda: not psutil.pid_exists(pids["steady"]), what="the end of the run")
        made_ms = exports_ms(metrics)
        wait_for(lambda: made_ms <= stored_ms(made), what="every export")
        wait_for(lambda: not (rank / "spool").exists(), what="the end of the agent, which outlives the run")

        endpoint = f"http://127.0.0.1:{made.ports.otlp_http}"
        assert main(["replay", str(runs / "steady"), "--endpoint", endpoint]) == 0
        assert "0 accepted, 0 kept, 0 rejected" in capsys.readouterr().out
        summary = json.loads((rank / "summary.json").read_text(encoding="utf-8"))
        assert steps(made) == summary["steps"]["train"]
    with capsys.disabled():
        sys.stdout.write(
            f"\n{len(made_ms)} exports; Prometheus away {OUTAGE_S} s, Collector away {OUTAGE_S} s: all are stored\n"
        )


def test_a_full_queue_is_reported(tmp_path: Path) -> None:
    """The traces have no receiver; an alert fires before spans are lost, and another when they are."""
    environ = {**os.environ, "COLLECTOR_QUEUE_BYTES": "300000"}
    with (
        webhook() as alerts,
        stack(
            tmp_path / "state", "prometheus", "collector", "alertmanager", url=alerts.url, environ=environ
        ) as made,
        troubled(made, tmp_path / "runs", {"talkative": []}, **TALKATIVE),
    ):
        for name in ("OtelCollectorQueueNearFull", "OtelCollectorExportFailing"):
            alert = wait_for(lambda name=name: alerts.find(name), timeout_s=240, what=name)
            assert alert["labels"]["exporter"] == "otlp_grpc/traces"
            assert alert["annotations"]["runbook_url"].endswith(f"docs/runbooks/{name}.md")
        # Metrics have a queue of their own and go on.
        before = value(made, "train_steps_total") or 0
        wait_for(lambda: (value(made, "train_steps_total") or 0) > before, what="metrics all the while")
        made.start("jaeger")
        wait_for(
            lambda: alerts.resolved("OtelCollectorQueueNearFull"), timeout_s=240, what="the end of the alert"
        )
