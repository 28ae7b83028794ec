"""Serves synthetic metrics of what a laptop lacks: devices, ranks, captures, a Collector. Real names, invented values.

Names, labels and kinds of otel_train's metrics come from the catalogue; those of other exporters are listed here.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Final, NamedTuple

from otel_train.catalog import ALL, Emit, Kind, Label, Metric
from tests.support.http_server import http_server

RUN: Final = "synthetic"
RANKS: Final = {0: "node-a", 1: "node-a", 2: "node-b", 3: "node-b"}
SLOW_RANK: Final = 2
MUTE_AFTER_S: Final = 60
MUTE_RANK: Final = 3
"""This rank is heard of at first, and then no more."""

_GIB: Final = 2.0**30
_STAGE_S: Final = {
    "data": 0.02,
    "h2d": 0.01,
    "forward": 0.1,
    "backward": 0.2,
    "optimizer": 0.05,
    "other": 0.01,
}
_OPEN_VALUES: Final = {
    "train.loader": ("images", "val"),
    "hw.name": ("cuda:0",),
    "train.loss.name": ("loss",),
    "train.optimizer.group": ("decay", "no_decay"),
    "train.metric.name": ("accuracy",),
    "error.type": ("",),
    "train.telemetry.attribute": ("train.loader",),
    "train.telemetry.component": ("export loop",),
    **{
        f"train.{label}": (value,)
        for label, value in (
            ("run.name", "synthetic"),
            ("team", "speech"),
            ("owner", "ann"),
            ("job", "4711"),
            ("cluster", "berlin"),
            ("namespace", "gpu"),
        )
    },
    "train.peer.rank": (str(SLOW_RANK),),
    "train.peer.host": ("node-0",),
    "train.profiler.file": ("captures/epoch_1-step_200-rank0.json.gz",),
    "train.profiler.finding.name": ("input_bound",),
    "train.profiler.alert": ("TrainInputBound",),
}
_GAUGES: Final = {
    "train.accelerator.memory.limit": 80 * _GIB,
    "train.accelerator.memory.reserved": 72 * _GIB,
    "train.accelerator.memory.allocated": 61 * _GIB,
    "train.accelerator.memory.reserved_peak": 74 * _GIB,
    "train.accelerator.memory.allocated_peak": 66 * _GIB,
    "train.accelerator.flops.limit": 989e12,
    "train.host.memory.limit": 512 * _GIB,
    "train.host.memory.usage": 210 * _GIB,
    "train.memory.usage": 4 * _GIB,
    "process.memory.usage": 6 * _GIB,
    "train.run.info": 1,
    "train.world.size": 4,
    "train.ranks.expected": 4,
    "train.ranks.reporting": 4,
    "train.stall.threshold": 300,
    "train.straggler.excess.ratio": 0.35,
    "train.profiler.capture.size": 0.2 * _GIB,
    "train.learning_rate": 3e-4,
    "train.throughput.theoretical": 4000,
    "train.run.progress.ratio": 0.4,
}
_RATES: Final = {
    "train.model.flops": 400e12,
    "train.accelerator.io": 0.5e9,
    "train.rank.time": 1,
    "train.samples": 640,
    "train.tokens": 80_000,
    "train.steps": 2.5,
    "train.batches": 2.5,
    "train.batch.time": 0.95,
    "process.cpu.time": 0.6,
    "train.telemetry.overhead.time": 1e-4,
    "train.profiler.captures": 1 / 60,
    "train.ranks.events": 1 / 120,
    "train.accelerator.memory.alloc_retries": 1 / 90,
    "train.nonfinite.detections": 1 / 100,
}
_FOREIGN: Final = (
    ('DCGM_FI_DEV_SM_CLOCK{host_name="%(host)s",gpu="%(gpu)s"}', 1755, 0),
    ('DCGM_FI_DEV_GPU_UTIL{host_name="%(host)s",gpu="%(gpu)s"}', 92, 0),
    ('DCGM_FI_DEV_GPU_TEMP{host_name="%(host)s",gpu="%(gpu)s"}', 64, 0),
    ('DCGM_FI_DEV_POWER_USAGE{host_name="%(host)s",gpu="%(gpu)s"}', 610, 0),
    ('DCGM_FI_DEV_XID_ERRORS{host_name="%(host)s",gpu="%(gpu)s"}', 0, 0),
    ('node_disk_read_bytes_total{host_name="%(host)s",device="nvme0n1"}', 0, 0.4e9),
    ('node_network_receive_bytes_total{host_name="%(host)s",device="ib0"}', 0, 2.1e9),
    ('otelcol_receiver_accepted_spans{receiver="otlp"}', 0, 40),
    ('otelcol_receiver_accepted_metric_points{receiver="otlp"}', 0, 900),
    ('otelcol_receiver_refused_spans{receiver="otlp"}', 0, 0.2),
    ('otelcol_exporter_sent_spans{exporter="otlp_grpc/traces"}', 0, 38),
    ('otelcol_exporter_sent_metric_points{exporter="otlp_http/prometheus"}', 0, 890),
    ('otelcol_exporter_send_failed_spans{exporter="otlp_grpc/traces"}', 0, 0.1),
    ('otelcol_exporter_queue_size{exporter="otlp_http/prometheus",data_type="metrics"}', 90e6, 0),
    ('otelcol_exporter_queue_capacity{exporter="otlp_http/prometheus",data_type="metrics"}', 1073741824, 0),
    ("otelcol_process_memory_rss", 180e6, 0),
    ('tempo_discarded_spans_total{reason="trace_too_large"}', 0, 0.05),
    ('alertmanager_notifications_failed_total{integration="webhook"}', 0, 0.02),
)


def page(elapsed_s: float, now_s: float) -> str:
    """The exposition after so many seconds."""
    lines = [line for metric in ALL for line in _family(metric, elapsed_s, now_s)]
    for name, level, per_s in _FOREIGN:
        places = ((host, gpu) for host in ("node-a", "node-b") for gpu in "01") if "%" in name else [("", "")]
        for host, gpu in places:
            wobble = 1 + 0.02 * math.sin(elapsed_s / 20 + len(host + gpu))
            lines.append(f"{name % {'host': host, 'gpu': gpu}} {level * wobble + per_s * elapsed_s}")
    return "\n".join([*dict.fromkeys(lines), ""])


def _family(metric: Metric, elapsed_s: float, now_s: float) -> Iterator[str]:
    for rank, host in RANKS.items():
        if metric.emit is Emit.RANK0 and rank:
            continue
        if metric.emit is Emit.NODE and rank % 2:
            continue
        if rank == MUTE_RANK and elapsed_s > MUTE_AFTER_S:
            continue
        identity = f'train_run_id="{RUN}",train_rank="{rank}",host_name="{host}"'
        for values in itertools.product(*(_values(label) for label in metric.labels)):
            chosen = {label.name: value for label, value in zip(metric.labels, values, strict=True)}
            if chosen.get("train.phase", "train") not in {"train", "eval"}:
                continue
            labels = "".join(f',{name.replace(".", "_")}="{value}"' for name, value in chosen.items())
            if metric.kind is Kind.HISTOGRAM:
                yield from _histogram(metric, identity + labels, _typical_s(metric, chosen, rank), elapsed_s)
            else:
                yield f"{metric.prometheus}{{{identity}{labels}}} {_value(metric, chosen, Moment(elapsed_s, now_s, rank))}"


def _values(label: Label) -> tuple[str, ...]:
    return _OPEN_VALUES.get(label.name, label.values)


def _typical_s(metric: Metric, labels: dict[str, str], rank: int) -> float:
    slow = 1.4 if rank == SLOW_RANK and labels.get("train.stage") in {"data", "h2d", "forward"} else 1.0
    if "stage" in metric.name:
        return _STAGE_S[labels["train.stage"]] * slow
    return {"train.step.duration": 0.4, "train.profiler.capture.duration": 8.0}.get(metric.name, 0.3)


def _histogram(metric: Metric, labels: str, typical_s: float, elapsed_s: float) -> Iterator[str]:
    count = int(2.5 * elapsed_s) if "profiler" not in metric.name else int(elapsed_s / 15)
    seen = 0
    for bound in metric.bounds:
        share = 1 / (1 + math.exp(-4 * math.log(bound / typical_s)))
        seen = max(seen, int(count * share))
        yield f'{metric.prometheus}_bucket{{{labels},le="{bound:g}"}} {seen}'
    yield f'{metric.prometheus}_bucket{{{labels},le="+Inf"}} {count}'
    yield f"{metric.prometheus}_count{{{labels}}} {count}"
    yield f"{metric.prometheus}_sum{{{labels}}} {count * typical_s}"


def _value(metric: Metric, labels: dict[str, str], at: Moment) -> float:
    course = _COURSES.get(metric.name)
    if course is not None:
        return float(course(labels, at))
    if metric.kind is Kind.COUNTER:
        grown = _RATES.get(metric.name, 0.0) * at.elapsed_s
        return grown if metric.unit == "s" else math.floor(grown)
    level = _GAUGES.get(metric.name, 1.0)
    small = level < 10  # counts stay whole
    return level if small else level * (1 + 0.01 * math.sin(at.elapsed_s / 15 + at.rank))


class Moment(NamedTuple):
    """When, and on which rank."""

    elapsed_s: float
    now_s: float
    rank: int


_ACTIVITIES: Final = {"productive": 0.8, "data_wait": 0.1, "checkpoint": 0.05, "eval": 0.05}
_SPREAD: Final = {"min": 0.95, "median": 1.0, "p95": 1.2, "max": 1.4}


def _never(_: dict[str, str], __: Moment) -> float:
    return 0.0


def _step(_: dict[str, str], at: Moment) -> float:
    return math.floor(2.5 * at.elapsed_s) - at.rank


def _hung(labels: dict[str, str], at: Moment) -> float:
    stage = "forward" if at.rank == SLOW_RANK else "backward"
    return at.elapsed_s > MUTE_AFTER_S and labels["train.stage"] == stage


_COURSES: Final[dict[str, Callable[[dict[str, str], Moment], float]]] = {
    "train.run.status": lambda labels, _: labels["train.run.state"] == "training",
    "train.run.time": lambda labels, at: at.elapsed_s * _ACTIVITIES.get(labels["train.run.activity"], 0.0),
    "train.profiler.active": lambda _, at: at.elapsed_s % 60 < 10,
    "train.rank.work.time": lambda labels, _: (
        _STAGE_S[labels["train.stage"]] * _SPREAD[labels["train.statistic"]]
    ),
    "train.straggler.excess.ratio": lambda labels, _: 0.4 if labels["train.stage"] == "forward" else 0.05,
    "train.telemetry.drops": _never,
    "train.telemetry.faults": _never,
    "train.instrumentation.gaps": _never,
    "train.run.restarts": lambda _, at: at.elapsed_s > MUTE_AFTER_S,
    "train.stall.events": _hung,
    "train.heartbeat.time": lambda _, at: at.now_s - 2 * at.rank,
    "train.checkpoint.last_success.time": lambda _, at: at.now_s - at.now_s % 120,
    "train.step.index": _step,
    "train.heartbeat.step": _step,
}
"""Metrics whose value is more than a level or a rate."""


class Exposition:
    """Serves the page on a free port of loopback."""

    def __init__(self) -> None:
        began = time.time()
        self._open = ExitStack()
        shown = http_server(lambda *_: (200, _page_since(began)), "text/plain; version=0.0.4")
        self.target = self._open.enter_context(shown).removeprefix("http://")

    def close(self) -> None:
        """Free the port."""
        self._open.close()


def _page_since(began: float) -> bytes:
    now = time.time()
    return page(now - began, now).encode()
