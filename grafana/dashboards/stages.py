"""Stages: which stage of which loader takes the time, and why data is late."""

from __future__ import annotations

from typing import Final

from grafana.dashboards.board import Board
from grafana.panels import BLUE, ORANGE, RED, Panel, Row
from grafana.queries import Query, either, grown, rate, run

_HERE: Final = 'train_loader=~"$loader"'
_PHASE: Final = 'train_phase="$phase"'
_STAGE: Final = "run_loader_stage:train_stage_duration_seconds"
_DEVICE: Final = "run_loader_stage:train_stage_device_duration_seconds"
_WORKERS: Final = "train_loader_worker_count"
_BUILD: Final = "train_loader_batch_build_duration_seconds"
_BEGIN: Final = "train_loader_start_duration_seconds"


def _by(labels: str, metric: str) -> str:
    """Returns the rate of a counter or a histogram over an hour."""
    return f"sum by ({labels}) (rate({run(metric, _HERE)}[1h]))"


_FIRST_BATCH: Final = (
    f"{_by('train_loader', f'{_BEGIN}_sum')} / ({_by('train_loader', f'{_BEGIN}_count')} > 0)"
    f" or histogram_avg({_by('train_loader', _BEGIN)})"
)
"""Mean time to the first batch, from a classic or a native histogram."""

_RANKS: Final = "train_loader, train_rank"
_PASS: Final = (
    f"{_by('train_loader', 'train_batch_time_seconds_total')} / (max by (train_loader) ("
    f"{_by(_RANKS, f'{_BEGIN}_count')} or histogram_count({_by(_RANKS, _BEGIN)})) > 0)"
)
"""Mean time of a pass: batch time, which rank 0 alone exports, over the passes of one rank; all ranks begin the same ones."""


LOADER: Final = Row(
    "Loader $loader",
    (
        Panel(
            "Mean time per occurrence, stacked", "area", "s",
            "Host time of each stage.",
            "one stage grows, or `data` is among the high ones",
            [Query(run(f"{_STAGE}:mean5m", _HERE, _PHASE), "{{train_stage}} {{train_loader}}")],
            runbook="TrainInputBound",
        ),
        Panel(
            "Median, 95th and 99th percentile", "lines", "s",
            "How long an ordinary and a slow occurrence of each stage takes.",
            "the 99th percentile of a stage is many times its mean: something makes it wait now and then",
            [
                Query(run(f"{_STAGE}:p50_5m", _HERE, _PHASE), "{{train_stage}} {{train_loader}} p50"),
                Query(run(f"{_STAGE}:p95_5m", _HERE, _PHASE), "{{train_stage}} {{train_loader}} p95"),
                Query(run(f"{_STAGE}:p99_5m", _HERE, _PHASE), "{{train_stage}} {{train_loader}} p99"),
            ],
        ),
        Panel(
            "Share of the step", "area", "percentunit",
            "Part of the time of all steps that each stage of this loader takes.",
            "`data` takes over 20 %",
            [Query(run("run_loader_stage:train_stage_share:ratio5m", _HERE, _PHASE), "{{train_stage}} {{train_loader}}")],
            runbook="TrainInputBound", top=1,
        ),
        Panel(
            "Waiting for data, as a heatmap", "heatmap", "s",
            "How many waits took how long.",
            "a second band appears far above the first: a cold cache, a slow disk, a worker that restarts",
            [Query(either("train_stage_duration_seconds", "increase", 'train_stage="data"', _HERE), "{{le}}", heatmap=True)],
            runbook="TrainInputBound",
        ),
        Panel(
            "Prefetch queue", "lines", "short",
            "Batches that were ready when the loop asked, and how many there can be.",
            "it is near zero: the workers cannot keep up",
            [
                Query(f"avg by (train_loader) ({run('train_loader_queue_size', _HERE)})", "{{train_loader}} ready"),
                Query(f"max by (train_loader) ({run('train_loader_queue_limit', _HERE)})", "{{train_loader}} at most", dashed=True),
            ],
        ),
        Panel(
            "Workers", "lines", "short",
            "Worker processes of a rank, by state: of the rank with the most.",
            "any is dead, or fewer live than are expected",
            [Query(f"max by (train_loader, train_loader_worker_state) ({run(_WORKERS, _HERE)})", "{{train_loader}} {{train_loader_worker_state}}")],
            runbook="TrainLoaderWorkerDied",
        ),
        Panel(
            "Time a worker takes for a batch", "lines", "s",
            "Measured in the workers: the 95th percentile of fetching and collating one batch.",
            "divided by the number of workers it is longer than a step: add workers",
            [Query(
                f"histogram_quantile(0.95, sum by (train_loader, le) (rate({run(_BUILD + '_bucket', _HERE)}[5m])))"
                f" or histogram_quantile(0.95, sum by (train_loader) (rate({run(_BUILD, _HERE)}[5m])))",
                "{{train_loader}}",
            )],
        ),
        Panel(
            "Samples per second", "lines", "short",
            "Samples of this loader over the time of its own batches, from the ask to the end of the work on them; on the right its batches per second of wall time.",
            "it falls while the step time stays",
            [Query(f"max by (train_loader) (sum by (train_loader, train_rank) ({rate('train_batches_total', _HERE, _PHASE)}))", "{{train_loader}} batches", right="suffix: /s"),
             Query(f"sum by (train_loader) ({run('run_loader:train_samples_per_batch_time:ratio5m', _HERE, _PHASE)})", "{{train_loader}}")],
        ),
        Panel(
            "Efficiency", "lines", "percentunit",
            "Samples per second, divided by what the slower of loader and compute alone would allow. Known for loaders without workers.",
            "it is far below 100 %: loader and compute take turns instead of working at the same time",
            [Query(run("run_loader:train_efficiency:ratio5m", _HERE), "{{train_loader}}")],
        ),
        Panel(
            "Ends and errors", "bars", "short",
            "How often the loader came to its end, by reason, and exceptions that left it.",
            "the reason is short or error, or there are exceptions",
            [
                Query(f"sum by (train_loader, train_loader_exhaustion_reason) ({grown('train_loader_exhaustions_total', _HERE)})", "{{train_loader}} {{train_loader_exhaustion_reason}}"),
                Query(f"sum by (train_loader) ({grown('train_loader_errors_total', _HERE)})", "{{train_loader}} exceptions"),
            ],
            8, runbook="TrainLoaderExhausted",
        ),
        Panel(
            "Host and device time", "lines", "s",
            "Mean time of each stage by the clock of the host, and of the device. Never add the two.",
            "the host takes longer than the device: it launches too slowly, or waits for the device",
            [
                Query(run(f"{_STAGE}:mean5m", _HERE, _PHASE), "{{train_stage}} {{train_loader}} host"),
                Query(run(f"{_DEVICE}:mean5m", _HERE, _PHASE), "{{train_stage}} {{train_loader}} device"),
            ],
            8, needs="device",
        ),
        Panel(
            "Device time, percentiles", "lines", "s",
            "How long an ordinary and a slow occurrence of each stage takes on the device.",
            "the 99th percentile is many times the median: kernels wait for memory, or for other ranks",
            [
                Query(run(f"{_DEVICE}:{p}_5m", _HERE, _PHASE), f"{{{{train_stage}}}} {{{{train_loader}}}} {p}")
                for p in ("p50", "p95", "p99")
            ],
            8, needs="device",
        ),
        Panel(
            "Steps of this loader", "lines", "s",
            "Mean, median, 95th and 99th percentile of the steps that took their batch from this loader.",
            "steps of one loader take longer than those of the others: its batches are larger or slower",
            [
                Query(run(f"run_loader:train_step_duration_seconds:{which}", _HERE, _PHASE), f"{{{{train_loader}}}} {shown}")
                for which, shown in (("mean5m", "mean"), ("p50_5m", "p50"), ("p95_5m", "p95"), ("p99_5m", "p99"))
            ],
        ),
        Panel(
            "Start of a pass", "lines", "s",
            "Mean time from the ask for a new pass to its first batch, and of a whole pass; over an hour.",
            "the start is a large part of the pass: keep the workers (`persistent_workers`)",
            [Query(_FIRST_BATCH, "{{train_loader}} first batch"), Query(_PASS, "{{train_loader}} pass")],
        ),
    ),
    repeat="loader",
)  # fmt: skip

STEPS: Final = Row(
    "All loaders",
    (
        Panel(
            "Steps, as a heatmap", "heatmap", "s",
            "How many steps took how long.",
            "there are two bands: some steps are of another kind",
            [Query(either("train_step_duration_seconds", "increase", _PHASE), "{{le}}", heatmap=True)],
            7, runbook="TrainStepTimeRegression",
        ),
        Panel(
            "In no stage", "lines", "percentunit",
            "Part of the step that no stage explains: logging, Python between the stages, an unseen sync.",
            "it is over 10 %: add user-defined stages to see what it is",
            [Query(run("run:train_unattributed:ratio5m"), "{{train_phase}}")],
            7, limits=((0.1, ORANGE), (0.5, RED)),
        ),
        Panel(
            "Epoch", "stat", "short",
            "Passes that each loader has begun, from 0.",
            "it stands still, or a loader runs ahead of the others",
            [Query(f"max by (train_loader) ({run('train_epoch_index')})", "{{train_loader}}")],
            4, first=BLUE,
        ),
        Panel(
            "Evaluation", "stat", "s",
            "Mean time of one evaluation pass.",
            "it takes a large part of the time between two passes",
            [Query(
                f"sum by (train_loader) ({run('train_eval_duration_seconds_sum')}) / sum by (train_loader) ({run('train_eval_duration_seconds_count')})"
                f" or histogram_avg(sum by (train_loader) ({run('train_eval_duration_seconds')}))",
                "{{train_loader}}",
            )],
            3, first=BLUE,
        ),
        Panel(
            "Instrumentation gaps", "stat", "short",
            "Stages, models and loops that could not be observed or distinguished.",
            "it is not 0: their time is in other rows; `summary.json` says which",
            [Query(f"sum({run('train_instrumentation_gaps')}) or vector(0)")],
            3, 8, ((1, ORANGE),), runbook="TrainInstrumentationGaps",
        ),
        Panel(
            "Checkpoints", "lines", "s",
            "95th percentile of saving and loading over an hour; on the right the share of the time.",
            "saving takes a large part of the time: save less often, or in the background",
            [
                Query(run("run_op:train_checkpoint_duration_seconds:p95_1h"), "{{train_checkpoint_operation}} p95"),
                Query(run("run_op:train_checkpoint_duration_seconds_sum:rate1h"), "{{train_checkpoint_operation}} share", right="percentunit"),
            ],
            12, runbook="TrainCheckpointStale",
        ),
        Panel(
            "Compiler", "bars", "short",
            "Recompilations of the ranks; on the right the seconds that the compiler of rank 0 took.",
            "it goes on after the first steps: shapes keep changing",
            [
                Query(f"max({grown('train_compile_recompiles_total')})", "recompilations"),
                Query(f"sum({grown('train_compile_duration_seconds_sum')}) or histogram_sum(sum({grown('train_compile_duration_seconds')}))", "time", right="s"),
            ],
            12, runbook="TrainRecompileStorm", needs="compiler",
        ),
    ),
)  # fmt: skip

STAGES: Final = Board(
    "otel-train-stages",
    "Training: stages per loader",
    "Which stage of which loader takes the time, and why data is late.",
    (LOADER, STEPS),
    leads="captures",
)
