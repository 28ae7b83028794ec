"""How panels ask: PromQL with the dashboard's variables in it."""

from __future__ import annotations

from typing import Final, NamedTuple

RATE: Final = "[$__rate_interval]"
"""The window for raw counters: no shorter than what Prometheus can answer, no longer than a pixel needs."""


class Query(NamedTuple):
    """One question to Prometheus."""

    expr: str  # PromQL; ``$run``, ``$loader`` and the like stand for what the reader picked
    legend: str = ""  # how each answer is called; ``{{label}}`` is replaced
    instant: bool = False  # only the last value is wanted
    exemplar: bool = False  # show traces beside it
    heatmap: bool = False  # buckets, not lines
    right: str = ""  # drawn against the axis on the right, in this unit
    dashed: bool = False  # a bound, not a measurement
    unit: str = ""  # of this column of a table, where it is not that of the panel


def run(metric: str, *matchers: str) -> str:
    """Returns the metric in the run that the reader picked."""
    inside = ",".join(('train_run_id="$run"', *matchers))
    return f"{metric}{{{inside}}}"


def reporting() -> str:
    """Ranks that report: none, and not the last number, while the run is silent and still known."""
    return f"max by (train_run_id) ({run('run:train_ranks_reporting:count')}) or 0 * {run('run:train_heartbeat_age_seconds:min')}"


def grown(metric: str, *matchers: str) -> str:
    """Returns by how much a counter grew within one point of the graph."""
    return f"increase({run(metric, *matchers)}{RATE})"


def rate(metric: str, *matchers: str) -> str:
    """Returns how fast a counter grows, per second."""
    return f"rate({run(metric, *matchers)}{RATE})"


LINES: Final = 20
"""Lines of a graph by rank: more cannot be read, and a run may have thousands of ranks."""


def highest(metric: str, *matchers: str, by: str = "train_rank") -> str:
    """Returns the ranks to draw: with the highest mean over the time that is shown, so the same at every point of the graph."""
    return f"topk({LINES}, max by ({by}) (avg_over_time({run(metric, *matchers)}[$__range] @ end())))"


def lowest(metric: str, *matchers: str) -> str:
    """Returns the ranks with the lowest mean."""
    return (
        f"bottomk({LINES}, min by (train_rank) (avg_over_time({run(metric, *matchers)}[$__range] @ end())))"
    )


def most_grown(metric: str, *matchers: str) -> str:
    """Returns the ranks whose counter grew most over the time that is shown."""
    return f"topk({LINES}, sum by (train_rank) (increase({run(metric, *matchers)}[$__range] @ end())))"


def of(expr: str, ranks: str, by: str = "train_rank") -> str:
    """Limits a query to these ranks."""
    return f"{expr} and on ({by}) {ranks}"


def of_full_hosts(expr: str) -> str:
    """Limits a query to the hosts whose memory is fullest."""
    return of(expr, highest("host:train_host_memory:ratio", by="host_name"), "host_name")


def either(metric: str, function: str, *matchers: str) -> str:
    """Buckets of a histogram, however it is kept: classic buckets, else the native histogram."""
    classic = f"sum by (le) ({function}({run(metric + '_bucket', *matchers)}{RATE}))"
    return f"{classic} or sum({function}({run(metric, *matchers)}{RATE}))"


def quantile(share: float, metric: str, *matchers: str) -> str:
    """Returns what that share of occurrences did not exceed, from raw histograms: for exemplars."""
    classic = f"sum by (le) (rate({run(metric + '_bucket', *matchers)}{RATE}))"
    native = f"sum(rate({run(metric, *matchers)}{RATE}))"
    return f"histogram_quantile({share}, {classic}) or histogram_quantile({share}, {native})"


_HOSTS: Final = (
    f"max by (host_name) (0 * last_over_time({run('train_heartbeat_time_seconds')}[$__range] @ end()) + 1)"
)
"""The hosts of the run. Metrics of other exporters must have theirs in ``host_name``."""


def devices_of_the_run(metric: str, drawn: str) -> str:
    """Returns a metric of the DCGM exporter, of the devices of the run with the highest (``topk``) or lowest mean (``bottomk``)."""
    mean = f"avg by (host_name, gpu) (avg_over_time({metric}[$__range] @ end()))"
    return of(metric, f"{drawn}({LINES}, {mean} and on (host_name) {_HOSTS})", "host_name, gpu")


def hosts_of_the_run(counter: str) -> str:
    """Returns how fast a counter of the node exporter grows, on the hosts of the run where it grew most."""
    most = f"sum by (host_name) (increase({counter}[$__range] @ end())) and on (host_name) {_HOSTS}"
    return of(f"sum by (host_name) (rate({counter}{RATE}))", f"topk({LINES}, {most})", "host_name")
