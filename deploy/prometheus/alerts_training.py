"""Alerts on speed, correctness, data and memory of a run."""

from __future__ import annotations

from typing import Final

from deploy.prometheus.alert import CRITICAL, WARNING, Alert, AlertGroup

_ACTIVE: Final = "and on (train_run_id) run:train_active:bool == 1"
_NO_CAPTURE: Final = "unless on (train_run_id) (max by (train_run_id) (train_profiler_active) > 0)"
_MEDIAN_STEP: Final = 'run:train_step_duration_seconds:p50_5m{train_phase="train"}'

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
        ),
        Alert(
            "TrainStepTimeRegression",
            f"{_MEDIAN_STEP}\n  > 1.3 * avg_over_time({_MEDIAN_STEP}[6h] offset 15m)\n"
            f"and on (train_run_id) (count_over_time({_MEDIAN_STEP}[6h] offset 15m) > 60)\n{_NO_CAPTURE}\n",
            "10m",
            WARNING,
            "Run {{ $labels.train_run_id }}: the median step takes {{ $value | humanizeDuration }}, more than 1.3 times its own mean of 6 hours.",
            "The run is compared with itself. Quiet while a profiler captures, and in the first 45 minutes.",
        ),
        Alert(
            "TrainStraggler",
            "(run_rank:train_local_work_seconds:mean5m\n"
            "  > on (train_run_id) group_left () (1.2 * run:train_local_work_seconds:median5m))\n"
            "and on (train_run_id) (run:train_ranks_reporting:count > 1)\n",
            "15m",
            WARNING,
            "Run {{ $labels.train_run_id }}: rank {{ $labels.train_rank }} does {{ $value | humanizeDuration }} of its own work per step, over 20% more than the median rank.",
            "Own work is data, transfer and forward. Step times are equal on all ranks, because they wait for each other.",
        ),
        Alert(
            "TrainStragglerDigest",
            "max by (train_run_id, train_stage) (train_straggler_excess_ratio) > 0.20",
            "15m",
            WARNING,
            "Run {{ $labels.train_run_id }}: the slowest rank takes {{ $value | humanizePercentage }} longer than the median rank in {{ $labels.train_stage }}.",
            "From the digest that rank 0 publishes; train_straggler_rank has the number of the rank.",
        ),
        Alert(
            "TrainMFUDrop",
            f"run:train_mfu:ratio5m < 0.7 * quantile_over_time(0.9, run:train_mfu:ratio5m[6h] offset 15m)\n{_NO_CAPTURE}\n",
            "20m",
            WARNING,
            "Run {{ $labels.train_run_id }}: model FLOP utilisation {{ $value | humanizePercentage }} is 30% below its own best of 6 hours.",
            "The devices do less arithmetic per second than they did in this run before.",
        ),
        Alert(
            "TrainRecompileStorm",
            "sum by (train_run_id) (increase(train_compile_recompiles_total[15m])) > 10",
            "5m",
            WARNING,
            "Run {{ $labels.train_run_id }}: {{ $value | humanize }} recompilations in 15 minutes.",
            "Shapes or values that the compiler took for constant keep changing.",
        ),
    ),
)

CORRECTNESS: Final = AlertGroup(
    "otel_train.alerts.correctness",
    (
        Alert(
            "TrainNonFinite",
            'sum by (train_run_id, train_nonfinite_kind) (increase(train_nonfinite_detections_total{train_nonfinite_kind=~"loss|parameter"}[10m])) > 0',
            "0m",
            CRITICAL,
            "Run {{ $labels.train_run_id }}: non-finite {{ $labels.train_nonfinite_kind }}.",
            "What is trained from here on is worth nothing. Gradients alone do not count: gradient scalers make them on purpose.",
        ),
        Alert(
            "TrainAmpSkipRatioHigh",
            'sum by (train_run_id) (rate(train_step_skips_total{train_step_skip_reason="amp_overflow"}[15m]))\n'
            '  / (sum by (train_run_id) (rate(train_steps_total{train_phase="train"}[15m])) > 0) > 0.10\n',
            "10m",
            WARNING,
            "Run {{ $labels.train_run_id }}: {{ $value | humanizePercentage }} of updates were skipped by the gradient scaler.",
            "Now and then is how a scaler finds its scale; every tenth means that it finds none.",
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
        ),
    ),
)

DATA: Final = AlertGroup(
    "otel_train.alerts.data",
    (
        Alert(
            "TrainLoaderWorkerDied",
            'sum by (train_run_id, train_loader, train_rank, error_type) (increase(train_loader_worker_exits_total{error_type!=""}[10m])) > 0',
            "0m",
            CRITICAL,
            "Run {{ $labels.train_run_id }} rank {{ $labels.train_rank }}: a worker of loader {{ $labels.train_loader }} died ({{ $labels.error_type }}).",
            "Its loader stops, or hangs where the worker took a lock with it.",
        ),
        Alert(
            "TrainLoaderExhausted",
            'sum by (train_run_id, train_loader) (increase(train_loader_exhaustions_total{train_loader_exhaustion_reason=~"short|error"}[15m])) > 0',
            "0m",
            WARNING,
            "Run {{ $labels.train_run_id }}: loader {{ $labels.train_loader }} ended before its expected length.",
            "Data is missing, and training goes on without it.",
        ),
        Alert(
            "TrainLoaderErrors",
            "sum by (train_run_id, train_loader) (increase(train_loader_errors_total[15m])) > 0",
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
            "sum by (train_run_id, train_checkpoint_operation) (increase(train_checkpoint_failures_total[30m])) > 0",
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
            "sum by (train_run_id, train_rank, host_name) (increase(train_accelerator_memory_ooms_total[10m])) > 0",
            "0m",
            CRITICAL,
            "Run {{ $labels.train_run_id }} rank {{ $labels.train_rank }}: the device ran out of memory.",
            "A trainer that catches this and tries again can do so for ever.",
        ),
        Alert(
            "TrainAcceleratorMemoryHigh",
            "run_rank:train_accelerator_memory_reserved_peak:ratio > 0.95\n"
            "and on (train_run_id, train_rank) (sum by (train_run_id, train_rank) (increase(train_accelerator_memory_alloc_retries_total[15m])) > 0)\n",
            "5m",
            WARNING,
            "Run {{ $labels.train_run_id }} rank {{ $labels.train_rank }}: {{ $value | humanizePercentage }} of device memory was reserved, and allocations are retried.",
            "A full cache alone is usual; retries say that it does not suffice.",
        ),
        Alert(
            "TrainHostMemoryLeak",
            "predict_linear(host:train_host_memory:ratio[1h], 4 * 3600) > 1\nand host:train_host_memory:ratio > 0.5\n",
            "30m",
            WARNING,
            "Run {{ $labels.train_run_id }} on {{ $labels.host_name }}: host memory reaches its limit within 4 hours.",
            "At the limit the kernel kills a process, often a loader's worker.",
        ),
    ),
)
