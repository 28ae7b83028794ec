"""Alerts on whether what one reads is true."""

from __future__ import annotations

from typing import Final

from deploy.prometheus.alert import CRITICAL, NONE, RATIO_KEEP, WARNING, Alert, AlertGroup, grown

_DROPS: Final = "sum by (train_run_id, train_telemetry_signal, train_telemetry_drop_reason) (rate(train_telemetry_drops_total{%s}[5m])) > 0"

# Each name by itself: rate() takes the names off, and what differs in nothing else cannot be told apart.
# The Collector writes them with or without _total, depending on how its own metrics are read.
_LOST: Final = "\nor ".join(
    f"sum by (instance, exporter, train_collector) (rate(otelcol_exporter_{step}_failed_{kind}{total}[5m])) > 0"
    for step in ("send", "enqueue")
    for kind in ("spans", "metric_points", "log_records")
    for total in ("", "_total")
)

_QUEUE_S: Final = 1800
"""Time enough to look after the store before the queue is full."""

# How long until the queue of an exporter is full, at the growth of the last ten minutes. What grows slower than a
# twentieth of the queue in _QUEUE_S counts as that, so that a queue that is full and stands still has no time left.
_QUEUE_LEFT: Final = f"""\
min by (instance, exporter, data_type) (
  (otelcol_exporter_queue_capacity - otelcol_exporter_queue_size)
    / ((deriv(otelcol_exporter_queue_size[10m]) > otelcol_exporter_queue_capacity / {20 * _QUEUE_S}) or otelcol_exporter_queue_capacity / {20 * _QUEUE_S})
) < {_QUEUE_S}
"""

TELEMETRY: Final = AlertGroup(
    "otel_train.alerts.telemetry",
    (
        Alert(
            "TrainTelemetryDropping",
            _DROPS % 'train_telemetry_drop_reason!~"sampled_out|export_failed"',
            "10m",
            WARNING,
            "Run {{ $labels.train_run_id }}: {{ $labels.train_telemetry_signal }} are dropped ({{ $labels.train_telemetry_drop_reason }}).",
            "Dashboards of this run are incomplete. Traces left out by design do not count. What was rejected lies in spool/rejected of the run.",
            keep=RATIO_KEEP,
        ),
        Alert(
            "TrainTelemetryExportFailing",
            _DROPS % 'train_telemetry_drop_reason="export_failed"',
            "10m",
            WARNING,
            "Run {{ $labels.train_run_id }}: {{ $labels.train_telemetry_signal }} cannot be sent.",
            "Requests wait in the spool of the run and are sent when the endpoint accepts them. Seen on /metrics while the OTLP endpoint is dead.",
            keep=RATIO_KEEP,
        ),
        Alert(
            "TrainTelemetryOverheadHigh",
            "max by (train_run_id) (sum by (train_run_id, train_rank) (rate(train_telemetry_overhead_time_seconds_total[15m])))\n"
            "  / (sum by (train_run_id) (rate(train_run_time_seconds_total[15m])) > 0) > 0.01\n",
            "15m",
            WARNING,
            "Run {{ $labels.train_run_id }}: watching costs {{ $value | humanizePercentage }} of the training thread's time.",
            "The aim is below 1 %.",
            keep=RATIO_KEEP,
        ),
        Alert(
            "TrainTelemetryFault",
            grown("train_telemetry_faults_total", "train_run_id, train_telemetry_part", "15m"),
            "0m",
            WARNING,
            "Run {{ $labels.train_run_id }}: otel_train failed in part {{ $labels.train_telemetry_part }}.",
            "Training is untouched. After three faults the part is off, and what it measured is missing.",
        ),
        Alert(
            "TrainUnobserved",
            "sum by (train_run_id, train_unobserved_what, train_unobserved_reason) (train_unobserved) > 0",
            "10m",
            WARNING,
            "Run {{ $labels.train_run_id }}: a {{ $labels.train_unobserved_what }} is not seen ({{ $labels.train_unobserved_reason }}).",
            "Its time is in other rows. summary.json of the run says which one and what to do.",
        ),
        Alert(
            "TrainCardinalityOverflow",
            grown(
                "train_telemetry_attribute_overflows_total", "train_run_id, train_telemetry_attribute", "15m"
            ),
            "0m",
            WARNING,
            "Run {{ $labels.train_run_id }}: {{ $labels.train_telemetry_attribute }} has more values than it may; the rest is _OTHER.",
            "Figures under _OTHER are sums of things that have nothing to do with each other.",
        ),
        Alert(
            "TrainDuplicateMetricPath",
            "count by (train_run_id, train_rank) (train_heartbeat_time_seconds) > 1",
            "10m",
            WARNING,
            "Run {{ $labels.train_run_id }} rank {{ $labels.train_rank }} arrives {{ $value }} times: sums are wrong.",
            "It is pushed and scraped, or scraped twice, or two processes claim the same rank.",
        ),
        Alert(
            "Watchdog",
            "vector(1)",
            "0m",
            NONE,
            "Always firing, to prove that alerts arrive.",
            "Route it to a receiver that calls when it hears nothing.",
        ),
    ),
)

COLLECTOR: Final = AlertGroup(
    "otel_train.alerts.collector",
    (
        Alert(
            "OtelCollectorExportFailing",
            f"{_LOST}\n",
            "5m",
            CRITICAL,
            "Collector {{ $labels.instance }}: exporter {{ $labels.exporter }} loses data.",
            "It gave up on sending, or its queue is full.",
            keep=RATIO_KEEP,
        ),
        Alert(
            "OtelCollectorQueueNearFull",
            _QUEUE_LEFT,
            "5m",
            WARNING,
            "Collector {{ $labels.instance }}: the queue of {{ $labels.exporter }} is full in {{ $value | humanizeDuration }}.",
            "Once it is full, what runs send waits in their spools, and what other programs send is lost.",
            keep=RATIO_KEEP,
        ),
        Alert(
            "OtelCollectorDown",
            # Where no run ever came by a Collector there is none to be missed.
            'up{job="otel-collector"} == 0\nor\n'
            '(count by (job, train_collector) (last_over_time(up{job="otel-collector"}[1d]))\n'
            '  and on () absent(up{job="otel-collector"}))\n',
            "2m",
            CRITICAL,
            "The Collector cannot be reached: runs that push are not seen.",
            "Alerts on those runs are blind. It mutes TrainRunVanished and TrainRanksMissing of the runs that it carried, and of no other.",
        ),
    ),
)
