"""Captures: what the profiler was asked to record."""

from __future__ import annotations

from typing import Final

from grafana.dashboards.board import Board
from grafana.panels import BLUE, RED, Panel, Row
from grafana.queries import Query, grown, quantile, run

_STEP: Final = "train_step_duration_seconds"
_FAILED: Final = run("train_profiler_captures_total", 'error_type!=""')
_TOOK: Final = "train_profiler_capture_duration_seconds"

CAPTURED: Final = Row(
    "Captures",
    (
        Panel(
            "Capturing now", "stat", "short",
            "Ranks on which the profiler runs. Alerts on speed keep quiet meanwhile.",
            "it does not go back to 0",
            [Query(f"sum({run('train_profiler_active')})")],
            4, 6, first=BLUE,
        ),
        Panel(
            "In the last day, by trigger", "bargauge", "short",
            "Finished captures, by what requested them.",
            "slow steps trigger them all the time",
            [Query(f"sum by (train_profiler_trigger) (increase({run('train_profiler_captures_total')}[1d]))", "{{train_profiler_trigger}}")],
            8, 6, first=BLUE,
        ),
        Panel(
            "Failed in the last day", "stat", "short",
            "Captures that ended with an error.",
            "it is not 0",
            [Query(f"sum(increase({_FAILED}[1d])) or vector(0)")],
            4, 6, ((1, RED),),
        ),
        Panel(
            "Request a capture", "text", "none",
            "`otel-train profile $run --ranks 0 --steps 5`\n\n"
            "Or from the program, by a schedule, by slow steps, by an alert. The files lie in `captures/` of the run"
            " directory; the annotations on the graphs show when they ran.",
            "a capture is missing: the panel of failures counts those that ended with an error",
            [],
            8, 6,
        ),
    ),
)  # fmt: skip

FOUND: Final = Row(
    "What was found",
    (
        Panel(
            "Traces", "table", "s",
            "Captures in the displayed time range: file in the run directory, its first finding, its trigger and the name of the alert that requested it, and the time since it ended.",
            "a finding other than no_finding keeps coming back",
            [Query(
                "sort(time() - max by (train_rank, train_profiler_file, train_profiler_finding_name, train_profiler_trigger, train_profiler_alert)"
                f" (last_over_time({run('train_profiler_capture_time_seconds')}[$__range])))",
                "ago", instant=True,
            )],
            24, 7, empty="no captures",
        ),
    ),
)  # fmt: skip

COST: Final = Row(
    "What a capture costs",
    (
        Panel(
            "Step time, and when captures ran", "lines", "s",
            "The violet regions are captures: steps inside them are longer.",
            "steps stay longer after the region",
            [
                Query(run(f"run:{_STEP}:p50_5m", 'train_phase="train"'), "p50"),
                Query(quantile(0.95, _STEP, 'train_phase="train"'), "p95, short window", exemplar=True),
            ],
            12, runbook="TrainStepTimeRegression",
        ),
        Panel(
            "Captures by trigger", "bars", "short",
            "Finished captures.",
            "there are more than can be read",
            [Query(f"sum by (train_profiler_trigger) ({grown('train_profiler_captures_total')})", "{{train_profiler_trigger}}")],
            12,
        ),
        Panel(
            "Time to capture and write", "lines", "s",
            "95th percentile over an hour, by trigger.",
            "writing takes longer than the steps that were captured",
            [Query(
                f"histogram_quantile(0.95, sum by (train_profiler_trigger, le) (rate({run(_TOOK + '_bucket')}[1h])))"
                f" or histogram_quantile(0.95, sum by (train_profiler_trigger) (rate({run(_TOOK)}[1h])))",
                "{{train_profiler_trigger}}",
            )],
            12,
        ),
        Panel(
            "Size of the last capture", "lines", "bytes",
            "Bytes of the last file on each rank.",
            "it is over a gigabyte: capture fewer steps",
            [Query(f"max by (train_rank) ({run('train_profiler_capture_size_bytes')})", "rank {{train_rank}}")],
            12,
        ),
    ),
)  # fmt: skip

CAPTURES: Final = Board(
    "otel-train-captures",
    "Training: profiler captures",
    "What the profiler was asked to record, and what that cost.",
    (CAPTURED, FOUND, COST),
    start="now-6h",
)
