"""Synthetic inputs for the collectors of a simulated rank: a device, loaders, components without faults."""

from __future__ import annotations

import os
from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from benchmarks.scale.workload import BATCH_BYTES, BATCH_SAMPLES, DEVICE, TRAIN, VAL
from otel_train.agent.messages import LOGGED_VALUES
from otel_train.agent.metric_reader import MetricSources, SelfMetrics
from otel_train.aggregation.metrics import LoggedSignals
from otel_train.collectors.dataloader import LoaderWatch
from otel_train.collectors.hardware import AcceleratorReader, HardwareReader
from otel_train.collectors.process import ProcessReader
from otel_train.datamodel import Anchor, DeviceMemory, system_clock
from otel_train.exporters.manager import LOSSES
from otel_train.instrumentation.dataloader_workers import LoaderState
from otel_train.instrumentation.loader_probe import LoaderProbe, LoaderReport
from otel_train.instrumentation.naming import Loader
from otel_train.recording.recorder import Recorder
from otel_train.recording.shared_memory import FlightMemory

if TYPE_CHECKING:
    from otel_train.aggregation.run_state import RunState

WORKERS = 4
PREFETCH = 2
PARTS = (
    "hardware", "export loop", "/metrics", "OTLP export", "run directory", "device time", "gradient scaler", "compiler",
    "build times", LOGGED_VALUES, "devices", "transfers", "compiled models", "loader workers", "flight file",
    "summary", "captures", "ranks", "console", "instrumentation gaps",
    "trackers",
)  # fmt: skip
"""Components of a session that count their faults."""

_GIB = 1 << 30


def readings_of(run: RunState) -> MetricSources:
    """Returns the metric sources of a simulated rank other than its edges. Process metrics are those of this process."""
    signals = LoggedSignals()
    for name, value in {"loss": 2.5, "lr": 3e-4, "grad_norm": 1.2, "amp_scale": 65536.0}.items():
        signals.take(name, value)
    loaders = _loaders()
    watch = LoaderWatch(run, lambda: loaders, clock=system_clock)
    accelerators = AcceleratorReader(
        lambda: [_memory()], lambda: run.transfers.to_devices(run.names.sources), lambda: {DEVICE: 4096}
    )
    hardware = HardwareReader(
        lambda: {DEVICE: "GPU-simulated"}, mode="on", exporter_answers=lambda: False, load=_Nvml
    )
    drops = {(signal, reason): 0 for signal in ("metrics", "spans") for reason in LOSSES} | {
        ("spans", "sampled_out"): 0,
        ("records", "overrun"): 0,
        ("records", "queue_full"): 0,
        ("records", "serialization"): 0,
    }
    health = SelfMetrics(lambda: drops, lambda: dict.fromkeys(PARTS, 0), lambda: 0.0, list)
    return MetricSources(signals, ProcessReader(), accelerators, hardware, health, watch)


@cache
def _loaders() -> dict[str, LoaderReport]:
    recorder = Recorder(FlightMemory(1 << 10, Anchor.now()), clock=system_clock)
    probes = {
        name: LoaderProbe(Loader(_loader(workers), name, phase), recorder)
        for name, phase, workers in ((TRAIN, "", WORKERS), (VAL, "eval", 0))
    }
    for probe in probes.values():
        probe.weights.add(BATCH_BYTES)
    return {name: replace(probe.report(), state=_state_of(probe)) for name, probe in probes.items()}


def _loader(workers: int) -> SimpleNamespace:
    prefetch = PREFETCH if workers else None
    return SimpleNamespace(
        batch_size=BATCH_SAMPLES, num_workers=workers, prefetch_factor=prefetch, persistent_workers=bool(workers),
        _dataset_kind=0,
    )  # fmt: skip


def _state_of(probe: LoaderProbe) -> LoaderState | None:
    if not probe.workers:
        return None
    return LoaderState(
        expected=WORKERS,
        alive=WORKERS,
        dead=0,
        pids=(os.getpid(),),
        queued=WORKERS,
        pinned=1,
        limit=WORKERS * PREFETCH,
    )


def _memory() -> DeviceMemory:
    return DeviceMemory(
        device=DEVICE, allocated=40 * _GIB, reserved=60 * _GIB, limit=80 * _GIB, allocated_peak=58 * _GIB,
        reserved_peak=60 * _GIB, ooms=0, alloc_retries=0,
    )  # fmt: skip


class _Nvml:
    """The part of ``pynvml`` that ``HardwareReader`` uses."""

    NVML_TEMPERATURE_GPU = 0
    NVMLError = RuntimeError

    def __getattr__(self, name: str) -> Any:
        answers: dict[str, Any] = {
            "nvmlDeviceGetUtilizationRates": SimpleNamespace(gpu=93),
            "nvmlDeviceGetMemoryInfo": SimpleNamespace(used=62 * _GIB, total=80 * _GIB),
            "nvmlDeviceGetHandleByUUID": "GPU-simulated",
            "nvmlDeviceGetPowerUsage": 640_000,
            "nvmlDeviceGetTemperature": 61,
        }
        return lambda *_: answers.get(name)
