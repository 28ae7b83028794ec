"""Runs whose attempts differ in ranks and hosts, and programs that only evaluate: what pages, and what the dashboards show."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from grafana.build import BOARDS
from otel_train.datamodel import NS_PER_S
from otel_train.recording.events import Ending, Flag, Op
from tests.rules.promtool import answers, check
from tests.rules.wire import FORWARD, VAL, Loop, Run, scenario
from tests.support.dashboard_queries import filled_in

pytestmark = pytest.mark.stack

QUERIES = {
    (board.file, panel.title): filled_in(panel.queries[0].expr, "r")
    for board in BOARDS
    for row in board.rows
    for panel in row.panels
    if panel.queries
}
STATE = f"group by (train_run_state) ({QUERIES['fleet', 'Runs']})"
REPORTING = f"max({QUERIES['distributed', 'Ranks']})"


def fired(at_min: int, within_min: int) -> str:
    """What fired in the minutes before."""
    series = f'ALERTS{{alertstate="firing",alertname!="Watchdog"}}[{within_min}m]'
    return f"{at_min} count by (alertname) (count_over_time({series}))"


def loops(number: int) -> list[Loop]:
    return [Loop(rank) for rank in range(number)]


def test_a_run_that_lost_a_node_and_finished_with_the_others_is_not_gone(tmp_path: Path) -> None:
    """Ranks of the lost node never said how they ended; the run did."""
    first = Run("full", loops(8)).until(10).end("failed", 4)
    second = Run("full", loops(4), begin_min=12, after=first).until(16, end=True)
    asks = {
        fired(12, 12): {'{alertname="TrainRunFailed"}': 1.0},
        fired(45, 32): {},
        f"14 {REPORTING}": {"{}": 4.0},
        f"20 {REPORTING}": {"{}": 0.0},
        f"15 {STATE}": {'{train_run_state="training"}': 1.0},
        f"20 {STATE}": {'{train_run_state="finished"}': 1.0},
        f"40 {STATE}": {'{train_run_state="finished"}': 1.0},
    }

    check(tmp_path, "native", [scenario(second, "native", asks)])


def test_a_run_that_moved_to_other_hosts_with_fewer_ranks_is_whole(tmp_path: Path) -> None:
    """What its former hosts sent last stays in sight for minutes; killed there as well, it is gone."""
    first = Run("full", loops(8)).until(10)
    second = Run("full", loops(4), begin_min=11, after=first, hosts="other").until(24)
    asks = {
        fired(24, 24): {},
        fired(28, 4): {'{alertname="TrainRunVanished"}': 1.0},
        f"22 {STATE}": {'{train_run_state="training"}': 1.0},
        f"31 {STATE}": {'{train_run_state="silent"}': 1.0},
    }

    check(tmp_path, "native", [scenario(second, "native", asks)])


def test_an_alert_has_the_job_of_the_newest_attempt(tmp_path: Path) -> None:
    """The same run in another job of the scheduler: who looks after the alert must not look at the former one."""
    first = about(Run("full", loops(1)), job="4711").until(3)
    second = about(Run("full", loops(1), begin_min=4, after=first), job="42").until(8)
    whose = "count by (train_job) (run:train_info:last1h)"
    vanished = 'count by (train_job) (count_over_time(ALERTS{alertname="TrainRunVanished",alertstate="firing"}[30m]))'
    asks = {
        f"3 {whose}": {'{train_job="4711"}': 1.0},
        f"5 {whose}": {'{train_job="42"}': 1.0},
        f"66 {whose}": {'{train_job="42"}': 1.0},
        f"35 {vanished}": {'{train_job="42"}': 1.0},
    }

    check(tmp_path, "native", [scenario(second, "native", asks)])


def seen(every: int, first: int) -> dict[str, str]:
    """Samples of half an hour, every so many ticks of 5 s: the Unix time, and 1."""
    ticks = range(0, 1800, 5)
    return {
        kind: " ".join(value.format(s) if s // 5 % every == first else "_" for s in ticks)
        for kind, value in (("time", "{}"), ("one", "1"))
    }


@pytest.mark.parametrize("hosts", [("w-0", "w-0"), ("a", "b")], ids=["pods of one name", "two hosts"])
def test_two_jobs_of_one_run_id_are_reported_with_the_labels_of_one_of_them(
    tmp_path: Path, hosts: tuple[str, str]
) -> None:
    """Where the newest sample was now of one, now of the other, no alert was there long enough to fire."""
    series: dict[str, str] = {}
    for host, namespace, samples in zip(hosts, ("dev", "prod"), (seen(4, 0), seen(3, 2)), strict=True):
        series[f'train_run_info{{train_run_id="r",train_rank="0",train_namespace="{namespace}"}}'] = samples[
            "one"
        ]
        for metric in ("train_heartbeat_time_seconds", "train_rank_time_seconds_total"):
            series[f'{metric}{{train_run_id="r",train_rank="0",host_name="{host}"}}'] = samples["time"]
    asks = {
        fired(29, 29): {'{alertname="TrainDuplicateMetricPath"}': 1.0},
        "29 count(count_over_time(run:train_info:last1h[20m]))": {"{}": 1.0},
    }
    test = {**scenario(Run("full", []), "native", asks), "interval": "5s"}
    test["input_series"] = [{"series": name, "values": values} for name, values in series.items()]

    check(tmp_path, "native", [test])


def about(run: Run, *, job: str) -> Run:
    """The same, which says in which job it is."""
    run.account(0).reporter.about = ("gpt", "speech", "ann", job, "berlin", "gpu")
    return run


def test_a_run_that_grows_does_not_page(tmp_path: Path) -> None:
    """Elastic training starts again with more ranks."""
    first = Run("full", loops(4)).until(10)
    second = Run("full", loops(8), begin_min=11, after=first).until(20, end=True)

    check(tmp_path, "native", [scenario(second, "native", {fired(40, 40): {}})])


class OnlyEvaluates(Loop):
    """Passes over the validation loader, and no others."""

    def _all_steps(self) -> Iterator[None]:
        while True:
            self._call(VAL, 0.01 * NS_PER_S, flags=Flag.START)
            for _ in range(100):
                self._call(VAL, 0.01 * NS_PER_S, payload=9)
                self._call(FORWARD, 0.3 * NS_PER_S)
                yield
            self._edge(Op.BEGIN, VAL)
            self._edge(Op.STOP, VAL, payload=Ending.EPOCH_END)


def test_a_program_that_only_evaluates_loses_no_time(tmp_path: Path) -> None:
    """Nothing of it is productive, and nothing else was wanted."""
    run = Run("full", [OnlyEvaluates(0), OnlyEvaluates(1)]).until(60, end=True)

    check(tmp_path, "native", [scenario(run, "native", {fired(75, 75): {}})])


OTHER_EXPORTERS = {
    query: metric for query in QUERIES.values() for metric in re.findall(r"\b((?:DCGM|node)_\w+)", query)
}


@pytest.mark.parametrize(("query", "metric"), OTHER_EXPORTERS.items(), ids=OTHER_EXPORTERS.values())
def test_of_a_thousand_devices_a_graph_has_twenty_lines(tmp_path: Path, query: str, metric: str) -> None:
    """More cannot be read, and hosts of other runs are not shown."""
    series = {}
    for number in range(30):
        host, run = f"host{number}", "r" if number < 25 else "other"
        series[f'{metric}{{host_name="{host}",gpu="0"}}'] = f"0+{number + 1}x80"
        series[
            f'train_heartbeat_time_seconds{{train_run_id="{run}",train_rank="{number}",host_name="{host}"}}'
        ] = "0+15x80"

    [found] = answers(tmp_path, "native", series, [query], at_min=20)

    assert len(found) == 20
    assert {int(host) for host in re.findall(r'host(\d+)"', str(found))} in (
        set(range(20)),
        set(range(5, 25)),
    )
