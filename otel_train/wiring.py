"""Parts of a session that know both what records and what exports, put together."""

from __future__ import annotations

from typing import TYPE_CHECKING

from otel_train.clock import system_clock
from otel_train.export.accelerator import AcceleratorReader
from otel_train.export.hardware import HardwareReader
from otel_train.export.live import Health, Readings, Reporter
from otel_train.export.loaders import LoaderWatch
from otel_train.export.process import ProcessReader
from otel_train.export.ranks import Job
from otel_train.record.job_store import connect, find_job
from otel_train.record.loader_state import look
from otel_train.record.module import barrier_of

if TYPE_CHECKING:
    from otel_train.aggregate.run import RunAccount
    from otel_train.aggregate.signals import Signals
    from otel_train.clock import Anchor
    from otel_train.config import Config
    from otel_train.recording import Recording


def readings_of(
    recording: Recording,
    run: RunAccount,
    signals: Signals,
    health: Health,
    *,
    config: Config,
    anchor: Anchor,
) -> Readings:
    """Where a reporter reads what no edge tells."""
    watch = LoaderWatch(run, lambda: recording.probes.loaders, look=look, clock=system_clock)
    accelerators = AcceleratorReader(
        recording.devices.memory,
        lambda: run.transfers.to_devices(run.names.sources),
        recording.transfers.brought_back,
    )
    return Readings(
        signals, ProcessReader(), accelerators, HardwareReader.of(config, recording.devices.hardware_ids), health,
        lambda: recording.probes.loaders, watch, anchor,
    )  # fmt: skip


def job_of(recording: Recording, reporter: Reporter, *, prefix: str) -> Job:
    """The job that this process belongs to, once there is one. ``prefix`` is that of keys in its store."""
    return Job(find_job, connect, lambda: barrier_of(recording.probes.models), reporter.events, prefix)
