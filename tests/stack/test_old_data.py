"""Spools that are older than an hour, a quarter of a day, a day: what of them is in a real Prometheus afterwards."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import pytest

from otel_train import catalog as c
from otel_train.cli import replay as command
from otel_train.datamodel import AttributeValue, HistogramPoint, MetricFamily, Point, Snapshot
from otel_train.exporters.otlp_json import metrics_line
from otel_train.exporters.run_directory import RunDirectory
from otel_train.exporters.spool import SpoolQueue
from otel_train.stack.local import LocalStack
from tests.support.stack import ask, program, stack, wait_for
from tests.support.zero_code import ended_well

pytestmark = [pytest.mark.stack, pytest.mark.timeout(300)]

EXPORTS, EVERY_S, HOUR_S = 40, 15, 3600
NS_PER_S = 1_000_000_000


def line(run: str, rank: int, at_ns: int, number: int) -> bytes:
    """An export with a counter, a gauge and a histogram of ``number`` steps of half a second."""
    phase = (("train.phase", "train"),)
    steps = HistogramPoint(phase, number, number / 2, 0.5, 0.5, 0, 4, -17, (number,), ())
    families = (
        MetricFamily(c.HEARTBEAT_TIME, (Point((), at_ns / NS_PER_S),)),
        MetricFamily(c.STEPS, (Point(phase, float(number)),)),
        MetricFamily(c.STEP_DURATION, (steps,)),
    )
    resource: dict[str, AttributeValue] = {
        "service.name": "otel-train",
        "service.instance.id": f"{run}-{rank}",
        "host.name": "node-1",
        "train.run.id": run,
        "train.rank": rank,
        "train.world.size": 2,
    }
    return metrics_line(Snapshot(at_ns - 600 * NS_PER_S, at_ns, families), resource).encode()


def leave(root: Path, run: str, age_s: float) -> Path:
    """A run of two ranks that ended so long ago, with everything in its recordings and its spools."""
    first_ns = time.time_ns() - int(age_s) * NS_PER_S
    for rank in (0, 1):
        directory = RunDirectory.open(root, run, rank=rank)
        directory.close()
        queue = SpoolQueue(directory.rank_path, "metrics")
        lines = [line(run, rank, first_ns + n * EVERY_S * NS_PER_S, n + 1) for n in range(EXPORTS)]
        for each in lines:
            queue.append(each)
        queue.close()
        (directory.rank_path / "metrics.otlp.jsonl").write_bytes(b"\n".join([*lines, b""]))
    return root / run


def replay(*words: str) -> int:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return command.run(parser.parse_args(words))


def verify(made: LocalStack, run: Path, wait_s: int = 20) -> int:
    prometheus = f"http://127.0.0.1:{made.ports.prometheus}"
    return replay(str(run), "--verify", "--prometheus", prometheus, "--wait", str(wait_s))


def test_spools_of_40_minutes_and_6_hours_arrive(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Before: "5 sent, 0 kept", exit 0, and none of them was stored: the window was ten minutes."""
    runs = {name: leave(tmp_path, name, age_s) for name, age_s in (("new", 2400), ("old", 6 * HOUR_S))}
    with stack(tmp_path / "state", "prometheus", "collector") as made:
        endpoint = f"http://127.0.0.1:{made.ports.otlp_http}"
        for run in runs.values():
            assert verify(made, run, wait_s=0) == 1
            assert "wait in the spool" in capsys.readouterr().err
            assert replay(str(run), "--endpoint", endpoint) == 0
            assert f"{2 * EXPORTS} accepted, 0 kept, 0 rejected" in capsys.readouterr().out
            assert verify(made, run) == 0, capsys.readouterr().err
            assert f"{2 * EXPORTS} of {2 * EXPORTS} exports" in capsys.readouterr().out


def test_what_is_older_than_the_window_arrives_as_blocks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The Collector accepts it and Prometheus does not; promtool makes blocks that Prometheus takes."""
    ancient, recent = leave(tmp_path, "ancient", 30 * HOUR_S), leave(tmp_path, "recent", HOUR_S)
    with stack(tmp_path / "state", "prometheus", "collector") as made:
        endpoint = f"http://127.0.0.1:{made.ports.otlp_http}"
        # The window ends at the newest sample that it has, so an empty one takes anything.
        wait_for(lambda: ask(made, "query", query="up")["result"], what="Prometheus' first scrape")
        assert replay(str(ancient), "--endpoint", endpoint) == 0
        assert "are older than 24 h" in capsys.readouterr().err
        # In one batch of the Collector with the ancient ones: those are refused alone.
        assert replay(str(recent), "--endpoint", endpoint) == 0
        assert verify(made, recent) == 0, capsys.readouterr().err
        assert verify(made, ancient, wait_s=5) == 1
        assert f"{2 * EXPORTS} are only in the recording" in capsys.readouterr().err

        text = tmp_path / "blocks" / "ancient.openmetrics.txt"
        assert replay(str(ancient), "--blocks", str(text.parent)) == 0
        assert "promtool tsdb create-blocks-from openmetrics" in capsys.readouterr().out
        data = made.state / "data" / "prometheus"
        ended_well([program("promtool"), "tsdb", "create-blocks-from", "openmetrics", text, data])
        made.stop("prometheus")
        made.start("prometheus")

        assert verify(made, ancient) == 0, capsys.readouterr().err
        same_series_and_values(made)


def same_series_and_values(made: LocalStack) -> None:
    """Old data that came as blocks and new data that came by OTLP look alike.

    But for the kind of histogram, and the name of the Collector, which blocks have not passed.
    """
    series: dict[str, list[dict[str, str]]] = {}
    for run, age_s in (("ancient", 30 * HOUR_S), ("recent", HOUR_S)):
        at_s = time.time() - age_s + (EXPORTS - 1) * EVERY_S
        query = f'{{train_run_id="{run}", __name__!~".*:.*|ALERTS.*"}}'
        found = ask(made, "query", query=query, time=str(at_s))["result"]
        series[run] = [
            {
                name: text.replace(run, "RUN")
                for name, text in each["metric"].items()
                if name != "train_collector"
            }
            for each in found
        ]

        def one(query: str, at_s: float = at_s) -> Any:
            return ask(made, "query", query=query, time=str(at_s))["result"][0]["value"][1]

        classic = run == "ancient"
        steps = f'train_steps_total{{train_run_id="{run}",train_rank="1"}}'
        assert float(one(steps)) == pytest.approx(EXPORTS, abs=2)
        half = (
            f'sum(train_step_duration_seconds_sum{{train_run_id="{run}"}}) / sum(train_step_duration_seconds_count{{train_run_id="{run}"}})'
            if classic
            else f'histogram_avg(sum(train_step_duration_seconds{{train_run_id="{run}"}}))'
        )
        assert float(one(half)) == 0.5
        info = wait_for(
            lambda run=run: one(f'count(target_info{{train_run_id="{run}"}})'), what="target_info"
        )
        assert info == "2"
    plain = {
        run: sorted(
            tuple(sorted(each.items()))
            for each in found
            if not each["__name__"].startswith("train_step_duration")
        )
        for run, found in series.items()
    }
    assert plain["ancient"] == plain["recent"] != []
