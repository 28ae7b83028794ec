"""Parts of a session that know both what records and what exports, put together."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from otel_train.clock import system_clock
from otel_train.collectors.dataloader import LoaderWatch
from otel_train.collectors.hardware import AcceleratorReader, HardwareReader
from otel_train.collectors.process import ProcessReader
from otel_train.exporters.metric_reader import MetricSources, SelfMetrics

if TYPE_CHECKING:
    from collections.abc import Callable

    from otel_train.aggregation.metrics import Signals
    from otel_train.aggregation.run_state import RunState
    from otel_train.clock import Anchor
    from otel_train.config import Config
    from otel_train.instrumentation.dataloader import LoaderState
    from otel_train.instrumentation.manager import InstrumentationManager


def readings_of(  # noqa: PLR0913 - half of them by keyword
    recording: InstrumentationManager,
    run: RunState,
    signals: Signals,
    health: SelfMetrics,
    *,
    config: Config,
    anchor: Anchor,
    pid: int,
    look: Callable[[Any], LoaderState | None],
) -> MetricSources:
    """Where a reporter reads what no edge tells. ``look`` sees the workers of a loader; ``pid`` is the rank's."""
    watch = LoaderWatch(run, lambda: recording.probes.loaders, look=look, clock=system_clock)
    accelerators = AcceleratorReader(
        recording.devices.memory,
        lambda: run.transfers.to_devices(run.names.sources),
        recording.transfers.brought_back,
        device_flops=config.device_flops,
    )
    return MetricSources(
        signals, ProcessReader(pid=pid), accelerators, HardwareReader.of(config, recording.devices.hardware_ids), health,
        lambda: recording.probes.loaders, watch, anchor,
    )  # fmt: skip
