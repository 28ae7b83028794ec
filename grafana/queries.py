"""PromQL queries of panels, with the dashboard's variables."""

from __future__ import annotations

from typing import Final, NamedTuple

RATE: Final = "[$__rate_interval]"
"""Range of raw counters. Grafana sets it to max(``$__interval`` + scrape interval, 4 x scrape interval)."""


LOST: Final = 'train_telemetry_drop_reason!~"sampled_out|export_failed"'
"""Selects lost records: those that were not sampled out, and do not wait in the spool. As in the alert TrainTelemetryDropping."""


class Query(NamedTuple):
    """A PromQL query of a panel."""

    expr: str  # PromQL; may use dashboard variables such as ``$run`` and ``$loader``
    legend: str = ""  # name of each series; ``{{label}}`` is replaced
    instant: bool = False  # evaluated only at the end of the time range
    exemplar: bool = False  # shows exemplars, which link to traces
    heatmap: bool = False  # the result is histogram buckets
    right: str = ""  # unit of the right axis, if drawn against it
    dashed: bool = False  # a bound, not a measurement
    unit: str = ""  # of this value or table column, if not the panel's


def run(metric: str, *matchers: str) -> str:
    """Returns the selector of a metric in the chosen run."""
    inside = ",".join(('train_run_id="$run"', *matchers))
    return f"{metric}{{{inside}}}"


def reporting() -> str:
    """Returns the number of ranks that report: 0 while none does and the run still has a heartbeat age."""
    return f"max by (train_run_id) ({run('run:train_ranks_reporting:count')}) or 0 * {run('run:train_heartbeat_age_seconds:min')}"


def grown(metric: str, *matchers: str) -> str:
    """Returns the increase of a counter in the rate interval."""
    return f"increase({run(metric, *matchers)}{RATE})"


def rate(metric: str, *matchers: str) -> str:
    """Returns the rate of a counter per second."""
    return f"rate({run(metric, *matchers)}{RATE})"


LINES: Final = 20
"""Most lines of a graph by rank: more are unreadable, and a run may have thousands of ranks."""


def mean(metric: str, *matchers: str) -> str:
    """Returns the mean of a metric over the displayed time range."""
    return f"avg_over_time({run(metric, *matchers)}[$__range] @ end())"


def highest(metric: str, *matchers: str, by: str = "train_rank") -> str:
    """Returns the ranks with the highest mean over the displayed time range: the same ranks at every point of the graph."""
    return f"topk({LINES}, max by ({by}) ({mean(metric, *matchers)}))"


def lowest(metric: str, *matchers: str) -> str:
    """Returns the ranks with the lowest mean over the displayed time range."""
    return f"bottomk({LINES}, min by (train_rank) ({mean(metric, *matchers)}))"


def most_grown(metric: str, *matchers: str) -> str:
    """Returns the ranks whose counter increased most over the displayed time range."""
    return f"topk({LINES}, sum by (train_rank) (increase({run(metric, *matchers)}[$__range] @ end())))"


def of(expr: str, ranks: str, by: str = "train_rank") -> str:
    """Limits a query to the series whose labels ``by`` are in ``ranks``."""
    return f"{expr} and on ({by}) {ranks}"


def of_full_hosts(expr: str) -> str:
    """Limits a query to the hosts whose memory is fullest."""
    return of(expr, highest("host:train_host_memory:ratio", by="host_name"), "host_name")


def either(metric: str, function: str, *matchers: str) -> str:
    """Returns the classic buckets of a histogram, or the native histogram where there are none."""
    classic = f"sum by (le) ({function}({run(metric + '_bucket', *matchers)}{RATE}))"
    return f"{classic} or sum({function}({run(metric, *matchers)}{RATE}))"


def quantile(share: float, metric: str, *matchers: str) -> str:
    """Returns a quantile of a classic or native histogram. Recorded quantiles have no exemplars; raw histograms do."""
    classic = f"sum by (le) (rate({run(metric + '_bucket', *matchers)}{RATE}))"
    native = f"sum(rate({run(metric, *matchers)}{RATE}))"
    return f"histogram_quantile({share}, {classic}) or histogram_quantile({share}, {native})"


_HOSTS: Final = (
    f"max by (host_name) (0 * last_over_time({run('train_heartbeat_time_seconds')}[$__range] @ end()) + 1)"
)
"""Hosts of the run, each with value 1. Metrics of other exporters must have the host in ``host_name``."""


def devices_of_the_run(metric: str, drawn: str) -> str:
    """Returns a DCGM exporter metric for the devices on the run's hosts with the highest (``topk``) or lowest mean (``bottomk``)."""
    mean = f"avg by (host_name, gpu) (avg_over_time({metric}[$__range] @ end()))"
    return of(metric, f"{drawn}({LINES}, {mean} and on (host_name) {_HOSTS})", "host_name, gpu")


def hosts_of_the_run(counter: str) -> str:
    """Returns the rate of a node exporter counter on the hosts of the run where it increased most."""
    most = f"sum by (host_name) (increase({counter}[$__range] @ end())) and on (host_name) {_HOSTS}"
    return of(f"sum by (host_name) (rate({counter}{RATE}))", f"topk({LINES}, {most})", "host_name")
