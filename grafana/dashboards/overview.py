"""Overview: is it alive, does it learn, is it fast, where did the time go, what breaks next?"""

from __future__ import annotations

from typing import Final

from grafana.dashboards.board import Board
from grafana.panels import BLUE, GREEN, NOWHERE, ORANGE, RED, Panel, Row
from grafana.queries import LOST, Query, grown, of_full_hosts, quantile, rate, reporting, run

_TRAIN: Final = 'train_phase="train"'
_PHASE: Final = 'train_phase="$phase"'
_STEP: Final = "train_step_duration_seconds"
_DIED: Final = grown("train_loader_worker_exits_total", 'error_type!=""')
_DROPPED: Final = rate("train_telemetry_drops_total", LOST)
_AGE: Final = run("run:train_heartbeat_age_seconds:min")
_GOAL: Final = ((0.7, ORANGE), (0.9, GREEN))

ALIVE: Final = Row(
    "Is it alive?",
    (
        Panel(
            "State", "stat", "none",
            "State that the run reports.",
            "it reads stalled or failed, or is missing while the job runs",
            [Query(f"max by (train_run_state) ({run('train_run_status')}) == 1", "{{train_run_state}}", instant=True)],
            3, 4, first=BLUE, runbook="TrainRunFailed", leads="distributed",
        ),
        Panel(
            "Last progress", "stat", "percentunit",
            "Time since any rank fetched a batch, finished a step or saved, and its share of the stall threshold. "
            "The threshold is at least the setting `stall_after_s`, and 24 h once the training loops have ended.",
            "the share is over 100 %",
            [
                Query(_AGE, "last", unit="s"),
                Query(f"{_AGE} / on (train_run_id) max by (train_run_id) ({run('train_stall_threshold_seconds')})", "of threshold"),
            ],
            3, 4, ((1, RED),), first=BLUE, runbook="TrainRunStalled", leads="distributed",
        ),
        Panel(
            "Ranks", "stat", "short",
            "Ranks that sent telemetry within two minutes, and those that should.",
            "fewer report than are expected",
            [
                Query(reporting(), "reporting"),
                Query(f"max({run('train_ranks_expected')})", "expected"),
            ],
            3, 4, first=BLUE, runbook="TrainRanksMissing", leads="distributed",
        ),
        Panel(
            "Goodput, 1 h", "gauge", "percentunit",
            "Share of the last hour that was productive: train steps without waiting for data.",
            "it is below 0.9 for long",
            [Query(run("run:train_goodput:ratio1h"))],
            3, 4, _GOAL, first=RED, runbook="TrainGoodputBurnFast", top=1,
        ),
        Panel(
            "Median step", "stat", "s",
            "Time of the median training step over five minutes.",
            "it grows while batch size and model stay the same",
            [Query(run(f"run:{_STEP}:p50_5m", _TRAIN))],
            3, 4, first=BLUE, runbook="TrainStepTimeRegression",
        ),
        Panel(
            "Throughput", "stat", "suffix: samples/s",
            "Samples that all ranks together trained on, per second of wall time: evaluation, saving and gaps are in it.",
            "it falls while the step time stays: batches got smaller, or the run does something else than train",
            [Query(run("run:train_samples:rate5m", _TRAIN))],
            3, 4, first=BLUE,
        ),
        Panel(
            "Checkpoint age", "stat", "s",
            "Time since the last good checkpoint, and the run's own interval; since the start until there is one. A crash now costs that much.",
            "it is over twice the interval",
            [
                Query(f"time() - max({run('train_checkpoint_last_success_time_seconds')})", "age"),
                Query(f"max({run('train_checkpoint_interval_seconds')})", "interval"),
            ],
            3, 4, first=BLUE, runbook="TrainCheckpointStale",
        ),
        Panel(
            "Progress", "bargauge", "percentunit",
            "Steps done of those planned. The plan is the setting `total_steps`.",
            "it stands still",
            [Query(f"max({run('train_run_progress_ratio')})", "done")],
            3, 4, first=BLUE, top=1,
        ),
        Panel(
            "Firing alerts", "stat", "short",
            "Alerts on this run that fire now.",
            "it is not 0; the table names them",
            [Query('count(ALERTS{train_run_id="$run",alertstate="firing"}) or vector(0)')],
            3, 5, ((1, RED),), leads=NOWHERE,
        ),
        Panel(
            "Which alerts", "table", "short",
            "Their names lead to the runbooks in docs/runbooks.",
            "there is a row with severity critical",
            [Query('max by (alertname, severity) (ALERTS{train_run_id="$run",alertstate="firing"})', "firing", instant=True)],
            9, 5, needs="alerts", empty="none fires", leads=NOWHERE,
        ),
        Panel(
            "State over time", "states", "short",
            "Which state the run was in.",
            "stalled or failed is coloured, or nothing is",
            [Query(f"max by (train_run_state) ({run('train_run_status')})", "{{train_run_state}}")],
            12, 5, states=(("0", " ", "transparent"), ("1", "in it", "blue")), leads="distributed",
        ),
    ),
)  # fmt: skip

LEARNING: Final = Row(
    "Does it learn?",
    (
        Panel(
            "Loss", "lines", "short",
            "The losses and metrics that the program logged.",
            "it rises, jumps, or ends (not a number is not drawn)",
            [
                Query(run("train_loss"), "{{train_loss_name}} {{train_phase}}"),
                Query(run("train_metric_value"), "{{train_metric_name}} {{train_phase}}"),
            ],
            runbook="TrainNonFinite", leads=NOWHERE,
        ),
        Panel(
            "Gradient norm, learning rate", "lines", "short",
            "The global gradient norm; on the right the learning rate of each group.",
            "the norm is ten times its median of an hour",
            [
                Query(run("train_gradient_norm"), "gradient norm"),
                Query(run("train_learning_rate"), "learning rate {{train_optimizer_group}}", right="sci"),
            ],
            runbook="TrainGradientNormSpike", leads=NOWHERE,
        ),
        Panel(
            "Not finite, skipped", "bars", "short",
            "Values that were not finite, and updates that were skipped; on the right the scale of the loss.",
            "there is any loss or parameter, or more than a tenth of the updates is skipped",
            [
                Query(f"sum by (train_nonfinite_kind) ({grown('train_nonfinite_detections_total')})", "{{train_nonfinite_kind}} not finite"),
                Query(f"sum by (train_step_skip_reason) ({grown('train_step_skips_total')})", "skipped: {{train_step_skip_reason}}"),
                Query(run("train_amp_scale"), "loss scale", right="sci"),
            ],
            runbook="TrainAmpSkipRatioHigh", leads=NOWHERE,
        ),
    ),
)  # fmt: skip

FAST: Final = Row(
    "Is it fast?",
    (
        Panel(
            "Step time, with traces", "lines", "s",
            "Mean, median, 95th and 99th percentile of steps. The points are slow steps: each leads to its trace.",
            "the percentiles part from the median: some steps wait for something",
            [
                Query(run(f"run:{_STEP}:mean5m", _PHASE), "mean"),
                Query(run(f"run:{_STEP}:p50_5m", _PHASE), "p50"),
                Query(run(f"run:{_STEP}:p95_5m", _PHASE), "p95"),
                Query(run(f"run:{_STEP}:p99_5m", _PHASE), "p99"),
                Query(quantile(0.95, _STEP, _PHASE), "p95, short window", exemplar=True),
            ],
            9, runbook="TrainStepTimeRegression",
        ),
        Panel(
            "Samples per second and what it could be", "lines", "short",
            "Samples of each loader over the time of its own batches; dashed what the slower of loader and compute alone would allow.",
            "it is far below its bound: loader and compute wait for each other",
            [
                Query(f"sum by (train_loader) ({run('run_loader:train_samples_per_batch_time:ratio5m', _PHASE)})", "{{train_loader}}"),
                Query(f"sum by (train_loader) ({run('train_throughput_theoretical_per_second')})", "{{train_loader}} could", dashed=True),
            ],
            9,
        ),
        Panel(
            "Model FLOP utilisation", "lines", "percentunit",
            "Arithmetic of the model over what the devices can do.",
            "it is 30 % below the best of this run",
            [Query(run("run:train_mfu:ratio5m"), "utilisation")],
            6, runbook="TrainMFUDrop", needs="device peak",
        ),
        Panel(
            "Share of the step per stage and loader", "area", "percentunit",
            "Which part of the step each stage takes. What is missing to 100 % is in no stage.",
            "`data` takes over 20 %",
            [
                Query(run("run_loader_stage:train_stage_share:ratio5m", _PHASE), "{{train_stage}} {{train_loader}}"),
                Query(run("run:train_unattributed:ratio5m", _PHASE), "in no stage"),
            ],
            12, runbook="TrainInputBound", top=1,
        ),
        Panel(
            "Waiting for data", "lines", "percentunit",
            "Share of step time in which the loop waited for a batch.",
            "it is over 10 %; from 20 % on there is an alert",
            [Query(run("run:train_data_wait:ratio5m"), "{{train_phase}}")],
            12, limits=((0.1, ORANGE), (0.2, RED)), runbook="TrainInputBound",
        ),
    ),
)  # fmt: skip

TIME: Final = Row(
    "Where did the time go?",
    (
        Panel(
            "Time by activity", "area", "percentunit",
            "What the run was doing, from afar. `outside` is time in no batch: saving, logging, sleeping between passes. "
            "The activities add up to the whole.",
            "`productive` is below 90 %",
            [Query(run("run_activity:train_run_time:ratio5m"), "{{train_run_activity}}")],
            24, runbook="TrainGoodputBurnSlow", top=1,
        ),
    ),
)  # fmt: skip

NEXT: Final = Row(
    "What breaks next?",
    (
        Panel(
            "Device memory left, worst rank", "lines", "percentunit",
            "Device memory that is not reserved.",
            "it is below 5 % and allocations are retried",
            [Query(f"1 - max({run('run_rank:train_accelerator_memory_reserved:ratio')})", "not reserved")],
            6, runbook="TrainAcceleratorMemoryHigh", needs="device", leads="hardware",
        ),
        Panel(
            "Host memory", "lines", "percentunit",
            "Memory in use on each host, or in its container.",
            "it climbs towards 100 %",
            [Query(of_full_hosts(f"max by (host_name) ({run('host:train_host_memory:ratio')})"), "{{host_name}}")],
            6, limits=((0.9, ORANGE), (1, RED)), runbook="TrainHostMemoryLeak", top=1, leads="hardware",
        ),
        Panel(
            "Deaths, lack of memory, restarts", "bars", "short",
            "Workers that died, devices that ran out of memory, restarts, checkpoints that failed.",
            "there is any",
            [
                Query(f"sum by (error_type) ({_DIED})", "worker: {{error_type}}"),
                Query(f"sum({grown('train_accelerator_memory_ooms_total')}) or vector(0)", "out of memory"),
                Query(f"sum({grown('train_run_restarts_total')}) or vector(0)", "restarts"),
                Query(f"sum by (train_checkpoint_operation) ({grown('train_checkpoint_failures_total')})", "failed: {{train_checkpoint_operation}}"),
            ],
            6, runbook="TrainLoaderWorkerDied", leads="distributed",
        ),
        Panel(
            "Can these metrics be trusted?", "stat", "short",
            "Records that were lost per second, the cost of instrumentation as a share of the training thread's time, and the age of the newest sample in seconds. "
            "Records in the spool are not lost: they are sent later.",
            "records are lost, the cost is over 0.01, or the age is over 120 s",
            [
                Query(f"sum({_DROPPED})", "lost/s"),
                Query(f"max(sum by (train_rank) ({rate('train_telemetry_overhead_time_seconds_total')}))", "cost"),
                Query(run("run:train_telemetry_age_seconds:min"), "age in s"),
            ],
            6, first=BLUE, runbook="TrainTelemetryDropping", leads="pipeline",
        ),
    ),
)  # fmt: skip

OVERVIEW: Final = Board(
    "otel-train-overview",
    "Training: overview",
    "One run, top to bottom: alive, learning, fast, where the time goes, what breaks next.",
    (ALIVE, LEARNING, FAST, TIME, NEXT),
    leads="stages",
)
