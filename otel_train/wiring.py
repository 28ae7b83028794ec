"""Parts of a session that know both what records and what exports, put together."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from otel_train.clock import system_clock
from otel_train.export.accelerator import AcceleratorReader
from otel_train.export.hardware import HardwareReader
from otel_train.export.live import Health, Readings, Reporter
from otel_train.export.loaders import LoaderWatch
from otel_train.export.memories import Memories
from otel_train.export.process import ProcessReader
from otel_train.export.ranks import Job
from otel_train.record.dataset_size import dataset_bytes
from otel_train.record.job_store import connect, find_job
from otel_train.record.module import barrier_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from otel_train.aggregate.run import RunAccount
    from otel_train.aggregate.signals import Signals
    from otel_train.cache_sizes import CacheSizes
    from otel_train.clock import Anchor
    from otel_train.config import Config
    from otel_train.export.pump import Breath
    from otel_train.record.loader_state import LoaderState
    from otel_train.recording import Recording


def readings_of(  # noqa: PLR0913 - half of them by keyword
    recording: Recording,
    run: RunAccount,
    signals: Signals,
    health: Health,
    *,
    config: Config,
    anchor: Anchor,
    pid: int,
    look: Callable[[Any], LoaderState | None],
) -> Readings:
    """Where a reporter reads what no edge tells. ``look`` sees the workers of a loader; ``pid`` is the rank's."""
    watch = LoaderWatch(run, lambda: recording.probes.loaders, look=look, clock=system_clock)
    accelerators = AcceleratorReader(
        recording.devices.memory,
        lambda: run.transfers.to_devices(run.names.sources),
        recording.transfers.brought_back,
    )
    return Readings(
        signals, ProcessReader(pid=pid), accelerators, HardwareReader.of(config, recording.devices.hardware_ids), health,
        lambda: recording.probes.loaders, watch, anchor,
    )  # fmt: skip


def memories_of(recording: Recording, caches: CacheSizes, breath: Breath) -> Memories:
    """What looks at the memory of the process, its devices, its loaders' datasets and the program's caches."""

    def datasets(loaders: Iterable[str]) -> int | None:
        probes = recording.probes.loaders
        # Read past properties: no code of the program's is run for it.
        homes = [getattr(probes[name].loader(), "__dict__", {}) for name in loaders if name in probes]
        there = [home["dataset"] for home in homes if home.get("dataset") is not None]
        return dataset_bytes(there, breath) if there else None

    return Memories(
        datasets=datasets, caches=caches.read, devices=recording.devices.taken, clock=system_clock
    )


def job_of(recording: Recording, reporter: Reporter, *, prefix: str) -> Job:
    """The job that this process belongs to, once there is one. ``prefix`` is that of keys in its store."""
    return Job(find_job, connect, lambda: barrier_of(recording.probes.models), reporter.events, prefix)
