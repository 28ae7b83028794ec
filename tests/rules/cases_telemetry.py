"""Telemetry that is lost, doubled or too dear."""

from __future__ import annotations

from tests.rules.promtool import Case, Expectation, fires, quiet

R = 'train_run_id="r"'
QUEUE = 'instance="c",exporter="otlp_http/prometheus",data_type="metrics"'
DRAINING = 'instance="d",exporter="otlp_http/prometheus",data_type="metrics"'
QUEUED = {"instance": "c", "exporter": "otlp_http/prometheus", "data_type": "metrics"}

FULL = {"train_telemetry_signal": "metrics", "train_telemetry_drop_reason": "queue_full"}

EVENTS = {
    "TrainLoaderExhausted": ("train_loader_exhaustions_total", {"train_loader": "main"}),
    "TrainLoaderErrors": ("train_loader_errors_total", {"train_loader": "main"}),
    "TrainLoaderWorkerDied": (
        "train_loader_worker_exits_total",
        {"train_rank": "3", "train_loader": "main", "host_name": "n", "error_type": "SIGKILL"},
    ),
    "TrainCheckpointFailed": ("train_checkpoint_failures_total", {"train_checkpoint_operation": "save"}),
    "TrainAcceleratorOOM": (
        "train_accelerator_memory_ooms_total",
        {"train_rank": "3", "host_name": "n"},
    ),
    "TrainTelemetryDropping": ("train_telemetry_drops_total", FULL),
    "TrainTelemetryFault": ("train_telemetry_faults_total", {"train_telemetry_component": "/metrics"}),
    "TrainCardinalityOverflow": (
        "train_telemetry_attribute_overflows_total",
        {"train_telemetry_attribute": "train.loader"},
    ),
}
"""Alerts on a counter of events that may never happen: its metric and labels."""

LOSSES = [
    f"otelcol_exporter_{what}_failed_{records}{total}"
    for what in ("send", "enqueue")
    for records in ("spans", "metric_points", "log_records")
    for total in ("", "_total")
]


def drops(signal: str, reason: str) -> str:
    labels = f'{R},train_telemetry_signal="{signal}",train_telemetry_drop_reason="{reason}"'
    return f"train_telemetry_drops_total{{{labels}}}"


def dropped(alert: str, signal: str, reason: str) -> tuple[Expectation, ...]:
    """Expects the alert from before minute 20 until after minute 43."""
    labels = {"train_telemetry_signal": signal, "train_telemetry_drop_reason": reason}
    fired = (fires(alert, minute, train_run_id="r", **labels) for minute in (20, 43))
    return quiet(alert, 5), *fired, quiet(alert, 47)


def overhead(run: str, rank: int) -> str:
    return f'train_telemetry_overhead_time_seconds_total{{train_run_id="{run}",train_rank="{rank}"}}'


def spent(run: str) -> str:
    return f'train_run_time_seconds_total{{train_run_id="{run}",train_run_activity="productive"}}'


def counter(alert: str) -> str:
    """Returns the series that an alert of ``EVENTS`` watches."""
    metric, labels = EVENTS[alert]
    written = ",".join(f'{name}="{value}"' for name, value in labels.items())
    reason = ',train_loader_exhaustion_reason="short"' * (alert == "TrainLoaderExhausted")
    return f"{metric}{{{R},{written}{reason}}}"


CASES = (
    Case(
        "a full spool drops its oldest file every 21 minutes",
        60,
        {drops("metrics", "queue_full"): "0x20 100000x20 200000x20 300000x20 300000x60"},
        (
            quiet("TrainTelemetryDropping", 20),
            *(
                fires("TrainTelemetryDropping", minute, train_run_id="r", **FULL)
                for minute in (22, 30, 41, 62, 90)
            ),
            quiet("TrainTelemetryDropping", 105),
        ),
    ),
    Case(
        "metrics cannot be sent, traces are left out by design",
        30,
        {
            drops("metrics", "export_failed"): "0+2x60 120x60",
            drops("spans", "sampled_out"): "0+900x120",
        },
        (
            quiet("TrainTelemetryDropping", 20),
            *dropped("TrainTelemetryExportFailing", "metrics", "export_failed"),
        ),
    ),
    Case(
        "overhead is that of the worst rank, not the sum over ranks",
        60,
        {
            spent("ok"): "0+60x60",
            overhead("ok", 0): "0+0.4x60",
            overhead("ok", 1): "0+0.4x60",
            overhead("ok", 2): "0+0.4x60",
            spent("bad"): "0+60x60",
            overhead("bad", 0): "0+0.9x40 36x20",
        },
        (
            quiet("TrainTelemetryOverheadHigh", 10),
            fires("TrainTelemetryOverheadHigh", 20, "1.5%", train_run_id="bad"),
            fires("TrainTelemetryOverheadHigh", 40, "1.5%", train_run_id="bad"),
            fires("TrainTelemetryOverheadHigh", 53, "1.071%", train_run_id="bad"),
            quiet("TrainTelemetryOverheadHigh", 58),
        ),
    ),
    Case(
        "a component of otel_train fails, and a stage is never seen",
        60,
        {
            f'train_telemetry_faults_total{{{R},train_telemetry_component="/metrics"}}': "0x30 1x30",
            f'train_telemetry_faults_total{{{R},train_telemetry_component="export loop"}}': "0x60",
            f'train_instrumentation_gaps{{{R},train_instrumentation_gaps_kind="model",train_instrumentation_gaps_reason="never_seen"}}': "_x20 1x40",
        },
        (
            quiet("TrainTelemetryFault", 29),
            fires("TrainTelemetryFault", 35, train_run_id="r", train_telemetry_component="/metrics"),
            quiet("TrainInstrumentationGaps", 25),
            fires(
                "TrainInstrumentationGaps",
                35,
                train_run_id="r",
                train_instrumentation_gaps_kind="model",
                train_instrumentation_gaps_reason="never_seen",
            ),
        ),
    ),
    Case(
        "too many loaders",
        60,
        {
            f'train_telemetry_attribute_overflows_total{{{R},train_telemetry_attribute="train.loader"}}': "0x30 4x30"
        },
        (
            quiet("TrainCardinalityOverflow", 29),
            fires("TrainCardinalityOverflow", 35, train_run_id="r", train_telemetry_attribute="train.loader"),
        ),
    ),
    Case(
        "a rank arrives twice",
        30,
        {
            f'train_heartbeat_time_seconds{{{R},train_rank="3",instance="r/3"}}': "0+30x60",
            f'train_heartbeat_time_seconds{{{R},train_rank="3",instance="other"}}': "0+30x60",
            f'train_heartbeat_time_seconds{{{R},train_rank="4",instance="r/4"}}': "0+30x60",
        },
        (
            quiet("TrainDuplicateMetricPath", 5),
            fires("TrainDuplicateMetricPath", 15, "2", train_run_id="r", train_rank="3"),
        ),
    ),
    Case(
        "ranks arrive twice, each time 90 s later; one of them has no heartbeat",
        90,
        {
            f'train_heartbeat_time_seconds{{{R},train_rank="4",instance="r/4"}}': "0+90x20",
            f'train_heartbeat_time_seconds{{{R},train_rank="4",instance="other"}}': "0+90x20",
            f'train_run_info{{{R},train_rank="3",instance="r/3"}}': "1x20",
            f'train_run_info{{{R},train_rank="3",instance="other"}}': "1x20",
        },
        (
            Expectation(
                "TrainDuplicateMetricPath",
                15,
                tuple(({"train_run_id": "r", "train_rank": rank}, "2") for rank in "34"),
            ),
        ),
    ),
    Case(
        "the Collector is started again within a minute, and a program that is none is down",
        30,
        {
            'up{job="otel-collector",instance="c:8888"}': "1x10 0x1 1x20",
            'up{job="app",instance="a:80"}': "0x32",
        },
        (quiet("OtelCollectorDown", 6), quiet("OtelCollectorDown", 12)),
    ),
    Case(
        # A launcher that starts a run again numbers its ranks anew.
        "ranks are on another host every three minutes",
        30,
        {
            f'train_heartbeat_time_seconds{{{R},train_rank="3",host_name="a"}}': "_x6 0+30x5 " * 5,
            f'train_heartbeat_time_seconds{{{R},train_rank="3",host_name="b"}}': "0+30x5 _x6 " * 5,
            f'train_run_info{{{R},train_rank="4",host_name="a"}}': "_x6 1x5 " * 5,
            f'train_run_info{{{R},train_rank="4",host_name="b"}}': "1x5 _x6 " * 5,
        },
        tuple(quiet("TrainDuplicateMetricPath", minute) for minute in (16, 20, 24, 28)),
    ),
    Case(
        # A counter is exported from its first event on.
        "the first samples of counters are above zero",
        60,
        {counter(alert): "_x30 1x30" for alert in EVENTS},
        (
            *(quiet(alert, 29) for alert in EVENTS),
            *(fires(alert, 32, "1", train_run_id="r", **labels) for alert, (_, labels) in EVENTS.items()),
        ),
    ),
    Case(
        "counters come back as they were after a gap",
        60,
        {counter(alert): "0x5 2x15 _x20 2x20" for alert in EVENTS},
        tuple(quiet(alert, minute) for alert in EVENTS for minute in (43, 50)),
    ),
    Case(
        "the Collector loses spans",
        60,
        {
            'otelcol_exporter_send_failed_spans{instance="c:8888",exporter="otlp_grpc/tempo"}': "0+5x60",
            'otelcol_exporter_send_failed_metric_points{instance="c:8888",exporter="otlp_grpc/tempo"}': "0+1x60",
            'otelcol_exporter_send_failed_metric_points_total{instance="c:8888",exporter="fine"}': "0x60",
            'up{job="otel-collector",instance="c:8888"}': "1x50 0x10",
            'up{job="app",instance="a:80"}': "1x80",
        },
        (
            quiet("OtelCollectorExportFailing", 3),
            fires("OtelCollectorExportFailing", 15, instance="c:8888", exporter="otlp_grpc/tempo"),
            quiet("OtelCollectorDown", 45),
            fires("OtelCollectorDown", 55, job="otel-collector", instance="c:8888"),
            fires("OtelCollectorDown", 75, job="otel-collector"),
        ),
    ),
    Case(
        "each exporter of a Collector loses data of its own kind, counted under one name of two, for half an hour",
        60,
        {f'{counter}{{instance="c:8888",exporter="{counter}"}}': "0+5x30 150x30" for counter in LOSSES},
        (
            *(
                Expectation(
                    "OtelCollectorExportFailing",
                    minute,
                    tuple(({"instance": "c:8888", "exporter": counter}, "") for counter in LOSSES),
                )
                for minute in (8, 15, 43)
            ),
            quiet("OtelCollectorExportFailing", 48),
        ),
    ),
    Case(
        # 1,024 reduced ranks for an hour and more: a short outage is no page, a long one is one with time left.
        "a store is away, for two minutes and for good",
        60,
        {
            f"otelcol_exporter_queue_size{{{QUEUE}}}": "0x9 14+14x1 0x19 14+14x60",
            f"otelcol_exporter_queue_capacity{{{QUEUE}}}": "1000x100",
        },
        (
            quiet("OtelCollectorQueueNearFull", 20),
            quiet("OtelCollectorQueueNearFull", 55),
            fires("OtelCollectorQueueNearFull", 80, "22m 25s", **QUEUED),
            fires("OtelCollectorQueueNearFull", 89, "13m 25s", **QUEUED),
        ),
    ),
    Case(
        # Then it neither grows nor drains.
        "a store is away for 25 minutes",
        60,
        {
            f"otelcol_exporter_queue_size{{{QUEUE}}}": "0+28x25 700x60",
            f"otelcol_exporter_queue_capacity{{{QUEUE}}}": "1000x85",
        },
        (
            quiet("OtelCollectorQueueNearFull", 8),
            fires("OtelCollectorQueueNearFull", 20, "15m 42s", **QUEUED),
            fires("OtelCollectorQueueNearFull", 38, "25m 15s", **QUEUED),
            quiet("OtelCollectorQueueNearFull", 45),
        ),
    ),
    Case(
        "a full queue stands still, another drains after an outage",
        60,
        {
            f"otelcol_exporter_queue_size{{{QUEUE}}}": "990x60",
            f"otelcol_exporter_queue_capacity{{{QUEUE}}}": "1000x60",
            f"otelcol_exporter_queue_size{{{DRAINING}}}": "900-15x60",
            f"otelcol_exporter_queue_capacity{{{DRAINING}}}": "1000x60",
        },
        (fires("OtelCollectorQueueNearFull", 20, "6m 0s", **QUEUED),),
    ),
    Case(
        "runs are scraped, and there never was a Collector",
        60,
        {'up{job="otel-train",instance="node:9464"}': "1x60"},
        (quiet("OtelCollectorDown", 5), quiet("OtelCollectorDown", 55)),
    ),
    Case(
        "the watchdog always barks",
        60,
        {'up{job="otel-collector",instance="c:8888"}': "1x10"},
        (fires("Watchdog", 0), fires("Watchdog", 9)),
    ),
)
