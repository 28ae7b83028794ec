"""Alerts on speed, correctness, data and memory of a run."""

from __future__ import annotations

from typing import Final

from deploy.prometheus.alert import CAPTURED, CRITICAL, RATIO_KEEP, WARNING, Alert, AlertGroup, grown

_ACTIVE: Final = "and on (train_run_id) run:train_active:bool == 1"
_NO_CAPTURE: Final = "unless on (train_run_id) (max by (train_run_id) (train_profiler_active) > 0)"
_STEP: Final = "run:train_step_duration_seconds"
_MEAN_STEP: Final = f'{_STEP}:mean5m{{train_phase="train"}}'


def _before(part: str) -> str:
    return f'avg_over_time({_STEP}_{part}:rate5m{{train_phase="train"}}[6h] offset 15m)'


SPEED: Final = AlertGroup(
    "otel_train.alerts.speed",
    (
        Alert(
            "TrainInputBound",
            'run:train_data_wait:ratio5m{train_phase="train"} > 0.20',
            "15m",
            WARNING,
            "Run {{ $labels.train_run_id }}: {{ $value | humanizePercentage }} of step time is spent waiting for batches.",
            "The devices starve. The dashboard of stages names the loader.",
            CAPTURED,
            keep=RATIO_KEEP,
        ),
        Alert(
            "TrainStepTimeRegression",
            # The mean over all steps of six hours: where there were none they weigh nothing.
            f"{_MEAN_STEP}\n  > 1.3 * ({_before('sum')} / ({_before('count')} > 0))\n"
            f"and on (train_run_id) (count_over_time({_MEAN_STEP}[6h] offset 15m) > 60)\n{_NO_CAPTURE}\n",
            "10m",
            WARNING,
            "Run {{ $labels.train_run_id }}: a step takes {{ $value | humanizeDuration }} on average, more than 1.3 times its own mean of 6 hours.",
            "The run is compared with itself, by means, which are exact however histograms are kept. Quiet while a profiler captures, and in the first 45 minutes.",
            CAPTURED,
            keep=RATIO_KEEP,
        ),
        Alert(
            "TrainStraggler",
            "max by (train_run_id, train_peer_rank, train_peer_host, train_stage) (train_straggler_excess_ratio) > 0.20\n"
            f"{_ACTIVE}\n",
            "15m",
            WARNING,
            "Run {{ $labels.train_run_id }}: rank {{ $labels.train_peer_rank }} on {{ $labels.train_peer_host }} has {{ $value | humanizePercentage }} more work of its own per step than the median rank, most of it in {{ $labels.train_stage }}.",
            "Own work is what no other rank can prolong. Step times are equal on all ranks, because they wait for each other. Rank 0 names up to three ranks from the records of all.",
            CAPTURED,
            keep=RATIO_KEEP,
        ),
        Alert(
            "TrainMFUDrop",
            f"run:train_mfu:ratio5m < 0.7 * quantile_over_time(0.9, run:train_mfu:ratio5m[6h] offset 15m)\n{_NO_CAPTURE}\n",
            "20m",
            WARNING,
            "Run {{ $labels.train_run_id }}: model FLOP utilisation {{ $value | humanizePercentage }} is 30% below its own best of 6 hours.",
            "The devices do less arithmetic per second than they did in this run before.",
            CAPTURED,
            keep=RATIO_KEEP,
        ),
        Alert(
            "TrainRecompileStorm",
            # All ranks compile the same: the most of any, never the sum.
            "max by (train_run_id) (sum by (train_run_id, train_rank) (increase(train_compile_recompiles_total[15m]))) > 10",
            "5m",
            WARNING,
            "Run {{ $labels.train_run_id }}: {{ $value | humanize }} recompilations in 15 minutes.",
            "Shapes or values that the compiler took for constant keep changing.",
            keep=RATIO_KEEP,
        ),
    ),
)

CORRECTNESS: Final = AlertGroup(
    "otel_train.alerts.correctness",
    (
        Alert(
            "TrainNonFinite",
            grown(
                "train_nonfinite_detections_total",
                "train_run_id, train_nonfinite_kind",
                "10m",
                'train_nonfinite_kind=~"loss|parameter"',
            ),
            "0m",
            CRITICAL,
            "Run {{ $labels.train_run_id }}: non-finite {{ $labels.train_nonfinite_kind }}.",
            "What is trained from here on is worth nothing. Gradients alone do not count: gradient scalers make them on purpose.",
        ),
        Alert(
            "TrainAmpSkipRatioHigh",
            # All ranks skip and make the same updates: of one rank each, never the sum.
            'max by (train_run_id) (sum by (train_run_id, train_rank) (rate(train_step_skips_total{train_step_skip_reason="amp_overflow"}[15m])))\n'
            '  / (max by (train_run_id) (sum by (train_run_id, train_rank) (rate(train_steps_total{train_phase="train"}[15m]))) > 0) > 0.10\n',
            "10m",
            WARNING,
            "Run {{ $labels.train_run_id }}: {{ $value | humanizePercentage }} of updates were skipped by the gradient scaler.",
            "Now and then is how a scaler finds its scale; every tenth means that it finds none.",
            keep=RATIO_KEEP,
        ),
        Alert(
            "TrainGradientNormSpike",
            "max by (train_run_id) (train_gradient_norm)\n"
            "  > 10 * max by (train_run_id) (quantile_over_time(0.5, train_gradient_norm[1h]))\n"
            "and on (train_run_id) (max by (train_run_id) (count_over_time(train_gradient_norm[1h])) > 20)\n",
            "2m",
            WARNING,
            "Run {{ $labels.train_run_id }}: gradient norm {{ $value | humanize }} is over 10 times its median of an hour.",
            "Often the first sign of divergence.",
            keep=RATIO_KEEP,
        ),
    ),
)

DATA: Final = AlertGroup(
    "otel_train.alerts.data",
    (
        Alert(
            "TrainLoaderWorkerDied",
            grown(
                "train_loader_worker_exits_total",
                "train_run_id, train_loader, train_rank, error_type",
                "10m",
                'error_type!=""',
            ),
            "0m",
            CRITICAL,
            "Run {{ $labels.train_run_id }} rank {{ $labels.train_rank }}: a worker of loader {{ $labels.train_loader }} died ({{ $labels.error_type }}).",
            "Its loader stops, or hangs where the worker took a lock with it.",
        ),
        Alert(
            "TrainLoaderExhausted",
            grown(
                "train_loader_exhaustions_total",
                "train_run_id, train_loader",
                "15m",
                'train_loader_exhaustion_reason=~"short|error"',
            ),
            "0m",
            WARNING,
            "Run {{ $labels.train_run_id }}: loader {{ $labels.train_loader }} ended before its expected length.",
            "Data is missing, and training goes on without it.",
        ),
        Alert(
            "TrainLoaderErrors",
            grown("train_loader_errors_total", "train_run_id, train_loader", "15m"),
            "0m",
            WARNING,
            "Run {{ $labels.train_run_id }}: {{ $value | humanize }} exceptions left loader {{ $labels.train_loader }} in 15 minutes.",
            "The run that goes on nevertheless leaves out data.",
        ),
        Alert(
            "TrainCheckpointStale",
            "time() - max by (train_run_id) (train_checkpoint_last_success_time_seconds)\n"
            f"  > 2 * max by (train_run_id) (train_checkpoint_interval_seconds)\n{_ACTIVE}\n",
            "5m",
            CRITICAL,
            "Run {{ $labels.train_run_id }}: the last good checkpoint is {{ $value | humanizeDuration }} old, over twice the interval.",
            "A crash now costs that much work. The interval is the run's own, declared or learned.",
        ),
        Alert(
            "TrainCheckpointFailed",
            grown("train_checkpoint_failures_total", "train_run_id, train_checkpoint_operation", "30m"),
            "0m",
            WARNING,
            "Run {{ $labels.train_run_id }}: checkpoint {{ $labels.train_checkpoint_operation }} failed.",
            "The next crash costs more work than planned.",
        ),
    ),
)

MEMORY: Final = AlertGroup(
    "otel_train.alerts.memory",
    (
        Alert(
            "TrainAcceleratorOOM",
            grown("train_accelerator_memory_ooms_total", "train_run_id, train_rank, host_name", "10m"),
            "0m",
            WARNING,
            "Run {{ $labels.train_run_id }} rank {{ $labels.train_rank }}: the device ran out of memory.",
            "The program caught it: what it does not catch ends the run, and TrainRunFailed tells. A trainer that tries again can do so for ever.",
        ),
        Alert(
            "TrainAcceleratorMemoryHigh",
            "run_rank:train_accelerator_memory_reserved:ratio > 0.95\nand on (train_run_id, train_rank) (\n"
            + grown("train_accelerator_memory_alloc_retries_total", "train_run_id, train_rank", "15m")
            + "\n)\n",
            "5m",
            WARNING,
            "Run {{ $labels.train_run_id }} rank {{ $labels.train_rank }}: {{ $value | humanizePercentage }} of device memory is reserved, and allocations are retried.",
            "A full cache alone is usual; retries say that it does not suffice.",
            keep=RATIO_KEEP,
        ),
        Alert(
            "TrainHostMemoryLeak",
            "predict_linear(host:train_host_memory:ratio[1h], 4 * 3600) > 1\nand host:train_host_memory:ratio > 0.5\n",
            "30m",
            WARNING,
            "Run {{ $labels.train_run_id }} on {{ $labels.host_name }}: host memory reaches its limit within 4 hours.",
            "At the limit the kernel kills a process, often a loader's worker.",
            keep=RATIO_KEEP,
        ),
    ),
)
