"""Pipeline health: can the other dashboards be trusted?"""

from __future__ import annotations

from typing import Final

from grafana.dashboards.board import Board
from grafana.panels import BLUE, ORANGE, RED, Panel, Row
from grafana.queries import LINES, RATE, Query, grown, most_grown, of, rate, run

_COLLECTOR: Final = "Collector"
_OVERHEAD: Final = "train_telemetry_overhead_time_seconds_total"
_SERIES: Final = '{__name__=~"train_.+",train_run_id="$run"}'


def _otelcol(name: str, by: str) -> str:
    """Returns the rate of a Collector counter. How its metrics are read decides whether the name ends in ``_total``."""
    return " or ".join(f"sum by ({by}) (rate(otelcol_{name}{total}{RATE}))" for total in ("", "_total"))


def _each(name: str, by: str, legend: str) -> list[Query]:
    """Returns one query for spans and one for metrics."""
    kinds = (("spans", "spans"), ("metric_points", "metrics"))
    return [Query(_otelcol(f"{name}_{kind}", by), f"{legend}, {shown}") for kind, shown in kinds]


SDK: Final = Row(
    "In the trainer",
    (
        Panel(
            "Dropped records", "lines", "suffix: /s",
            "Records that were not sent at once, by reason. `sampled_out` is intended. `export_failed` records wait in the spool and are sent later; all others are lost.",
            "a reason other than sampled_out is above zero",
            [Query(f"sum by (train_telemetry_signal, train_telemetry_drop_reason) ({rate('train_telemetry_drops_total')})", "{{train_telemetry_signal}} {{train_telemetry_drop_reason}}")],
            runbook="TrainTelemetryDropping",
        ),
        Panel(
            "Instrumentation overhead", "lines", "percentunit",
            f"Share of the training thread's time that otel_train takes: the {LINES} ranks with the most.",
            "it is over 1 %",
            [Query(of(f"sum by (train_rank) ({rate(_OVERHEAD)})", most_grown(_OVERHEAD)), "rank {{train_rank}}")],
            limits=((0.01, RED),), runbook="TrainTelemetryOverheadHigh",
        ),
        Panel(
            "Age of the newest sample", "lines", "s",
            "Time since Prometheus received the newest sample of this run.",
            "it grows: the run has ended, or its telemetry does not reach Prometheus",
            [Query(run("run:train_telemetry_age_seconds:min"), "age")],
            limits=((120, RED),), runbook="TrainRunVanished",
        ),
        Panel(
            "Telemetry faults", "bars", "short",
            "Faults of otel_train, caught and logged, by component. After three faults the component is off.",
            "there is any",
            [Query(f"sum by (train_telemetry_component) ({grown('train_telemetry_faults_total')})", "{{train_telemetry_component}}")],
            runbook="TrainTelemetryFault",
        ),
        Panel(
            "Label values over the limit", "bars", "short",
            "Attribute values that were replaced by _OTHER, because the attribute has reached its limit of values.",
            "there is any",
            [Query(f"sum by (train_telemetry_attribute) ({grown('train_telemetry_attribute_overflows_total')})", "{{train_telemetry_attribute}}")],
            runbook="TrainCardinalityOverflow",
        ),
        Panel(
            "Sources of one rank", "stat", "short",
            "Number of series that Prometheus has for the same metric of one rank; of the rank with the most.",
            "it is over 1: the rank is pushed and scraped, and every sum is too high",
            [Query(f"max(count by (train_rank) ({run('train_heartbeat_time_seconds')}))")],
            4, 8, ((2, RED),), runbook="TrainDuplicateMetricPath",
        ),
        Panel(
            "Series of this run", "stat", "short",
            "How many series the run has in Prometheus.",
            "it grows without end: the values of a label have no limit",
            [Query(f"count({_SERIES})", instant=True)],
            4, 8, first=BLUE, runbook="TrainCardinalityOverflow",
        ),
    ),
)  # fmt: skip

COLLECTOR: Final = Row(
    "In the Collector",
    (
        Panel(
            "Accepted and refused", "lines", "suffix: /s",
            "Records that the Collector accepted and refused.",
            "anything is refused: its memory limit is reached",
            [
                *_each("receiver_accepted", "receiver", "{{receiver}} accepted"),
                *_each("receiver_refused", "receiver", "{{receiver}} refused"),
            ],
            needs=_COLLECTOR, runbook="OtelCollectorExportFailing",
        ),
        Panel(
            "Sent and lost", "lines", "suffix: /s",
            "Records that the Collector sent, could not send, and could not queue.",
            "anything is lost",
            [
                *_each("exporter_sent", "exporter", "{{exporter}} sent"),
                *_each("exporter_send_failed", "exporter", "{{exporter}} lost"),
                *_each("exporter_enqueue_failed", "exporter", "{{exporter}} not queued"),
            ],
            needs=_COLLECTOR, runbook="OtelCollectorExportFailing",
        ),
        Panel(
            "Queue", "lines", "percentunit",
            "How full the queue of each exporter is, in bytes on disk.",
            "it grows: the backend does not answer, or accepts less than arrives",
            [Query("max by (exporter, data_type) (otelcol_exporter_queue_size / (otelcol_exporter_queue_capacity > 0))", "{{exporter}} {{data_type}}")],
            needs=_COLLECTOR, runbook="OtelCollectorQueueNearFull", top=1,
        ),
        Panel(
            "Memory of the Collector", "lines", "bytes",
            "Resident memory.",
            "it is near the limit, where the Collector refuses records",
            [Query('max by (instance) ({__name__=~"otelcol_process_memory_rss(_bytes)?"})', "{{instance}}")],
            needs=_COLLECTOR, runbook="OtelCollectorDown",
        ),
        Panel(
            "Spans that Tempo discarded", "lines", "suffix: /s",
            "Spans that Tempo discarded, by reason.",
            "there is any",
            [Query(f"sum by (reason) (rate(tempo_discarded_spans_total{RATE}))", "{{reason}}")],
            needs="Tempo",
        ),
    ),
)  # fmt: skip

STORE: Final = Row(
    "In Prometheus and Alertmanager",
    (
        Panel(
            "Series in memory", "lines", "short",
            "All series that Prometheus holds.",
            "it grows without end",
            [Query("max by (instance) (prometheus_tsdb_head_series)", "{{instance}}")],
            first=BLUE,
        ),
        Panel(
            "New series", "lines", "suffix: /s",
            "Series created per second. A restart of a run creates none, because its labels stay the same.",
            "it stays high: label values change all the time",
            [Query(f"sum by (instance) (rate(prometheus_tsdb_head_series_created_total{RATE}))", "{{instance}}")],
        ),
        Panel(
            "Samples that came too late", "lines", "suffix: /s",
            "Samples that Prometheus refused, because they were too old or out of order.",
            "there is any for long",
            [Query(f"sum by (instance) (rate(prometheus_tsdb_out_of_order_samples_total{RATE}))", "{{instance}} out of order"),
             Query(f"sum by (instance) (rate(prometheus_tsdb_too_old_samples_total{RATE}))", "{{instance}} too old")],
        ),
        Panel(
            "Duration of rule evaluations", "lines", "s",
            "Duration of the last evaluation of each rule group of otel_train.",
            "it comes near the interval of the group, which is 15 s to 1 min",
            [Query('max by (rule_group) (label_replace(prometheus_rule_group_last_duration_seconds{rule_group=~".*otel_train.*"}, "rule_group", "$1", "rule_group", ".*;(.*)"))', "{{rule_group}}")],
            limits=((10, ORANGE),),
        ),
        Panel(
            "Rules that failed", "lines", "suffix: /s",
            "Evaluations of the rules of otel_train that ended with an error.",
            "there is any",
            [Query(f'sum(rate(prometheus_rule_evaluation_failures_total{{rule_group=~".*otel_train.*"}}{RATE}))', "failed")],
            limits=((0.001, RED),),
        ),
        Panel(
            "Notifications that failed", "lines", "suffix: /s",
            "Notifications that Alertmanager could not deliver, by receiver.",
            "there is any: alerts are not delivered",
            [Query(f"sum by (integration) (rate(alertmanager_notifications_failed_total{RATE}))", "{{integration}}")],
            needs="Alertmanager", runbook="Watchdog",
        ),
    ),
)  # fmt: skip

PIPELINE: Final = Board(
    "otel-train-pipeline",
    "Training: pipeline health",
    "Can the other dashboards be trusted? From the trainer to the alert.",
    (SDK, COLLECTOR, STORE),
)
