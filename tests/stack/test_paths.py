"""One real run, pushed to one Prometheus and scraped by another."""

from __future__ import annotations

import bisect
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest

from otel_train import catalog
from otel_train.stack.local import LocalStack
from tests.support.stack import ask, configured, environ_of, free_ports, get, running, stack, value, wait_for

pytestmark = [pytest.mark.stack, pytest.mark.timeout(600)]

STAGES = [("code", "data"), ("code", "forward"), ("prose", "backward"), ("prose", "optimizer")]


class Paths:
    """The stack that is pushed to, the Prometheus that scrapes, and a moment at which both knew the run well."""

    def __init__(self, pushed: LocalStack, pulled: LocalStack, at_s: float) -> None:
        self.pushed = pushed
        self.pulled = pulled
        self.at_s = at_s


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Paths]:
    folder = tmp_path_factory.mktemp("paths")
    page = free_ports().prometheus
    pulled = LocalStack(folder / "pulled", free_ports())
    with (
        stack(folder / "pushed", "collector", "prometheus", "jaeger") as pushed,
        configured(pulled, "prometheus", scrape=(f"127.0.0.1:{page}",)),
    ):
        environ = environ_of(pushed, folder / "runs", run_id="demo", prometheus_address=f"127.0.0.1:{page}")
        with running(folder / "runs", ["-m", "otel_train", "demo", "--minutes", "15"], environ) as process:
            for made in (pushed, pulled):
                wait_for(
                    lambda made=made: (value(made, "max(train_steps_total)") or 0) > 30,
                    timeout_s=240,
                    what="30 steps",
                )
            time.sleep(12)  # the window of the recorded metrics, hurried, has to fill
            at_s = time.time()
            time.sleep(3)
            yield Paths(pushed, pulled, at_s)
            process.send_signal(signal.SIGINT)
            process.communicate(timeout=120)
            assert process.returncode == 0


def bucket(seconds: float | None) -> int:
    """Which classic bucket a duration falls into."""
    assert seconds is not None
    return bisect.bisect_left(catalog.STAGE_DURATION.bounds, seconds)


@pytest.mark.parametrize(("loader", "stage"), STAGES)
@pytest.mark.parametrize("metric", ["p50_5m", "p95_5m"])
def test_both_paths_record_the_same_answer(paths: Paths, loader: str, stage: str, metric: str) -> None:
    """Native histograms by push, classic buckets by pull: dashboards read one name and must not care."""
    query = (
        f"run_loader_stage:train_stage_duration_seconds:{metric}"
        f'{{train_loader="{loader}",train_stage="{stage}",train_phase="train"}}'
    )
    pushed, pulled = (value(made, query, paths.at_s) for made in (paths.pushed, paths.pulled))

    assert abs(bucket(pushed) - bucket(pulled)) <= 1, (pushed, pulled)


def test_both_paths_count_the_same_steps(paths: Paths) -> None:
    """Exactly, up to what happened between two exports."""
    query = 'sum(train_steps_total{train_run_id="demo",train_phase="train"})'
    pushed, pulled = (value(made, query, paths.at_s) for made in (paths.pushed, paths.pulled))

    assert pushed is not None
    assert pulled is not None
    assert abs(pushed - pulled) <= 0.2 * max(pushed, pulled)


def test_a_pushed_run_is_found_by_its_labels(paths: Paths) -> None:
    """Dashboards select by run, rank and host."""
    [series] = ask(paths.pushed, "query", query='train_heartbeat_step{train_run_id="demo"}')["result"]

    assert series["metric"]["train_rank"] == "0"
    assert series["metric"]["host_name"]
    assert series["metric"]["job"] == "otel-train"


def test_what_is_pushed_carries_no_command_line(paths: Paths) -> None:
    """Command lines carry secrets, and target_info is shown to every user."""
    [info] = ask(paths.pushed, "query", query='target_info{train_run_id="demo"}')["result"]

    assert [name for name in info["metric"] if name.startswith("process_command")] == []


def test_an_exemplar_leads_to_the_trace_of_its_step(paths: Paths) -> None:
    """From the slow bucket to the slow step, as one click in Grafana does it."""
    found = wait_for(
        lambda: ask(
            paths.pushed,
            "query_exemplars",
            query="train_step_duration_seconds",
            start=str(paths.at_s - 600),
            end=str(paths.at_s + 600),
        ),
        what="exemplars",
    )
    exemplars = [exemplar for series in found for exemplar in series["exemplars"]]
    traces = {exemplar["labels"]["trace_id"]: float(exemplar["value"]) for exemplar in exemplars}
    trace_id, seconds = max(traces.items(), key=lambda item: item[1])
    spans = wait_for(lambda: spans_of(paths.pushed, trace_id), what=f"trace {trace_id}")

    names = {span["operationName"] for span in spans}
    assert {"train.step", "train.forward", "train.backward"} <= names
    longest_s = max(span["duration"] for span in spans) / 1e6
    assert longest_s == pytest.approx(seconds, rel=0.05, abs=0.002)


def spans_of(made: LocalStack, trace_id: str) -> list[dict[str, Any]]:
    """The spans of a trace, as Jaeger has them."""
    answer = get(f"http://127.0.0.1:{made.ports.jaeger}/api/traces/{trace_id}")
    spans: list[dict[str, Any]] = answer["data"][0]["spans"]
    return spans


def test_the_stack_is_monitored_as_well(paths: Paths) -> None:
    """A stack that is not scraped fails unseen: every part of it that runs is scraped."""
    states = wait_for(
        lambda: {
            target["labels"]["job"]: target["health"]
            for target in ask(paths.pushed, "targets")["activeTargets"]
        },
        what="targets",
    )

    assert states == {"prometheus": "up", "otel-collector": "up", "traces": "up", "alertmanager": "down"}


def test_every_rule_is_evaluated_without_an_error(paths: Paths) -> None:
    """A rule that fails at run time never fires."""
    groups = ask(paths.pushed, "rules")["groups"]
    rules = [rule for group in groups for rule in group["rules"]]

    assert len(rules) > 50
    assert [(rule["name"], rule["lastError"]) for rule in rules if rule["health"] == "err"] == []
