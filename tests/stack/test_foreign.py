"""What other programs send through the Collector arrives, as what trainers send does."""

from __future__ import annotations

import json
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from otel_train.stack.local import LocalStack
from tests.support.stack import get, stack, value, wait_for

pytestmark = [pytest.mark.stack, pytest.mark.timeout(200)]

TRACE = "0af7651916cd43dd8448eb211c80319c"
RESOURCE = {"attributes": [{"key": "service.name", "value": {"stringValue": "checkout"}}]}
DELTA, CUMULATIVE = 1, 2


def metric(name: str, temporality: int) -> dict[str, Any]:
    now_ns = time.time_ns()
    point = {"asInt": "3", "startTimeUnixNano": str(now_ns - 10**9), "timeUnixNano": str(now_ns)}
    return {
        "name": name,
        "sum": {"isMonotonic": True, "aggregationTemporality": temporality, "dataPoints": [point]},
    }


def send(made: LocalStack, path: str, document: dict[str, Any]) -> None:
    request = urllib.request.Request(
        f"http://127.0.0.1:{made.ports.otlp_http}/v1/{path}",
        data=json.dumps(document).encode(),
        headers={"content-type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=10) as answer:
        assert answer.status == 200


def test_metrics_spans_and_logs_of_other_programs_arrive(tmp_path: Path) -> None:
    """A list of names dropped their metrics, nine of ten of their traces were left out, and logs had no pipeline."""
    now_ns = time.time_ns()
    metrics = [metric("shop.orders", CUMULATIVE), metric("shop.visits", DELTA)]
    span = {
        "traceId": TRACE,
        "spanId": "b7ad6b7169203331",
        "name": "pay",
        "startTimeUnixNano": str(now_ns - 10**6),
        "endTimeUnixNano": str(now_ns),
    }
    record = {"timeUnixNano": str(now_ns), "body": {"stringValue": "a log line of theirs"}}
    with stack(tmp_path / "state", "prometheus", "collector", "jaeger") as made:
        scopes = [{"metrics": metrics}]
        send(made, "metrics", {"resourceMetrics": [{"resource": RESOURCE, "scopeMetrics": scopes}]})
        send(made, "traces", {"resourceSpans": [{"resource": RESOURCE, "scopeSpans": [{"spans": [span]}]}]})
        send(
            made,
            "logs",
            {"resourceLogs": [{"resource": RESOURCE, "scopeLogs": [{"logRecords": [record]}]}]},
        )

        for name in ("shop_orders_total", "shop_visits_total"):
            wait_for(lambda name=name: value(made, f'{name}{{job="checkout"}}') == 3, what=name)
        jaeger = f"http://127.0.0.1:{made.ports.jaeger}/api/traces/{TRACE}"
        wait_for(lambda: get(jaeger)["data"], what="the trace")
        logs = made.state / "data" / "collector" / "logs" / "logs.otlp.jsonl"
        wait_for(
            lambda: logs.exists() and "a log line of theirs" in logs.read_text(), what="the line of the log"
        )


def test_a_run_carries_the_name_of_its_collector_as_the_target_of_that_does(tmp_path: Path) -> None:
    """An alert on the Collector mutes those on the runs with the same name; an agent before it has said its own."""
    with stack(tmp_path / "state", "prometheus", "collector") as made:
        for run, agent in (("direct", ""), ("by-agent", "node-7")):
            labels = {
                "service.name": run,
                "train.run.id": run,
                **({"train.collector": agent} if agent else {}),
            }
            resource = {
                "attributes": [{"key": key, "value": {"stringValue": text}} for key, text in labels.items()]
            }
            scopes = [{"metrics": [metric("train.steps", CUMULATIVE)]}]
            send(made, "metrics", {"resourceMetrics": [{"resource": resource, "scopeMetrics": scopes}]})
        scopes = [{"metrics": [metric("shop.orders", CUMULATIVE)]}]
        send(made, "metrics", {"resourceMetrics": [{"resource": RESOURCE, "scopeMetrics": scopes}]})

        for series in (
            'train_steps_total{train_run_id="direct",train_collector="collector"}',
            'train_steps_total{train_run_id="by-agent",train_collector="node-7"}',
            'shop_orders_total{train_collector=""}',
        ):
            wait_for(lambda series=series: value(made, series) == 3, what=series)
        up = 'up{job="otel-collector",train_collector="collector"}'
        wait_for(lambda: value(made, up) == 1, what="the target")
