"""Installs and removes all instrumentation of a session."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from otel_train.datamodel import system_clock
from otel_train.instrumentation.accelerator_discovery import UNTIMED, NoDevices, find_driver
from otel_train.instrumentation.backward import in_backward
from otel_train.instrumentation.callbacks import StageCallbacks
from otel_train.instrumentation.compile_events import JaxCompilerProbe
from otel_train.instrumentation.dataloader import LastBatch
from otel_train.instrumentation.logged_values import ValueQueue
from otel_train.instrumentation.module import kind_of_device
from otel_train.instrumentation.optimizer import ScaledUpdates
from otel_train.instrumentation.registry import Probes, TorchProbes
from otel_train.instrumentation.stages import StageRecorder, active_session
from otel_train.instrumentation.timers import Timers
from otel_train.recording.pending_entries import PendingEntries
from otel_train.recording.recorder import Recorder
from otel_train.recording.shared_memory import FlightMemory
from otel_train.safety import Guard

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from otel_train.config import Config
    from otel_train.datamodel import Anchor, Compile
    from otel_train.instrumentation.accelerator import DeviceDriver
    from otel_train.instrumentation.cuda_events import DeviceTimer
    from otel_train.instrumentation.device_copy import TransferProbe
    from otel_train.resource import RunInfo


class InstrumentationManager:
    """The recording side of a session.

    Args:
        job: rank and world size of the process group, once there is one.

    Attributes:
        scaled: outcomes of updates under a gradient scaler, known to the device only.
        last_batch: the batch that the calling thread fetched last.
    """

    def __init__(
        self,
        config: Config,
        info: RunInfo,
        *,
        anchor: Anchor,
        environ: Mapping[str, str],
        job: Callable[[], object] = lambda: None,
    ) -> None:
        self._job = job
        self.memory = FlightMemory(config.flight_recorder_events, anchor, shared=True)
        self.recorder = Recorder(self.memory, clock=system_clock, in_backward=in_backward)
        self.recorder.identify(
            {
                "run_id": info.run_id,
                "rank": info.rank,
                "attempt": info.attempt,
                "world_size": info.world_size,
                "host": info.host,
                "started_unix_ns": anchor.unix_ns,
            }
        )
        driver = find_driver(environ)
        self._driver = driver
        self._wants_times = config.cuda_timing != "off"
        self.devices, self.transfers = _device_probes(self.recorder, driver, config.cuda_timing)
        changed = self.recorder.changed
        self.scaled = ScaledUpdates(driver, changed)
        values, operations = (PendingEntries(self.memory.pending(index)) for index in (0, 1))
        self.recorder.when_silenced += [values.let_go, operations.let_go]
        self.values = ValueQueue(system_clock, values, changed)
        self.probes = Probes(self.recorder, compiled=self.follow_compiler, passes=self._look_around)
        self._surroundings: tuple[int, object] = (len(sys.modules), None)
        self._jax = JaxCompilerProbe(system_clock, changed=changed)
        self.stages = StageRecorder(self.recorder, self._jax.listen)
        self.timers = Timers(self.recorder, system_clock, operations)
        self.hooks = StageCallbacks(self.recorder)
        self.last_batch = LastBatch(self.recorder)
        self._torch: TorchProbes | None = None

    @property
    def spent_ns(self) -> int:
        """Sampled overhead on the training thread, in nanoseconds."""
        return self.recorder.spent_ns + self.devices.spent_ns

    def begin(self) -> None:
        """Activates the public functions, and instruments torch and JAX if they are loaded."""
        active_session.stages, active_session.timers = self.stages, self.timers
        self.watch_torch()
        self._jax.listen()
        with Guard("devices"):  # most programs have put their model on a device by now
            self.transfers.look()

    def watch_torch(self) -> None:
        """Instruments torch once the program has imported it."""
        if self._torch is None and "torch" in sys.modules:
            self._torch = TorchProbes(self.recorder, self.scaled, clock=system_clock)
            self.probes.watch_torch()

    def follow_compiler(self) -> None:
        """Instruments models that have been compiled since, and excludes wrappers from compilation.

        It goes through the submodules of every model: tens of microseconds with the interpreter lock held.
        """
        if active_session.stages is self.stages:
            self.probes.attach_again()
        self.listen_to_compilers()

    def listen_to_compilers(self) -> None:
        """Registers with compilers that have been loaded since, and excludes wrappers from compilation."""
        if active_session.stages is not self.stages:  # what has been given back stays so
            return
        self._jax.listen()
        if self._torch is not None:
            self._torch.step_aside_for_compiler()

    @property
    def polled(self) -> bool:
        """Whether there is something here that is new all the time, and that nothing announces: times of a device."""
        return self._driver is not None

    def _look_around(self) -> None:
        """A pass begins: trackers and compilers may have been imported since the last one, or a process group made."""
        surroundings = len(sys.modules), self._job()
        if surroundings != self._surroundings:
            self._surroundings = surroundings
            self.recorder.changed()

    def untimed(self) -> dict[str, str]:
        """Returns device types of models whose time is not measured although it is not switched off, with the reason."""
        kinds = {kind_of_device(probe.model()) for probe in list(self.probes.models)} - {"", "cpu", "meta"}
        return {kind: why for kind in sorted(kinds) if (why := self._why_untimed(kind))}

    def _why_untimed(self, kind: str) -> str:
        driver = self._driver
        if not self._wants_times:
            return ""
        if driver is None or driver.device_type != kind:
            return UNTIMED
        if self.devices.failure:
            return f"device time is no longer read: the driver failed ({self.devices.failure})"
        return driver.why_untimed

    def compiles(self) -> list[Compile]:
        """Returns the compilations since the last call."""
        return [*(self._torch.compiler.take() if self._torch is not None else ()), *self._jax.take()]

    def end(self) -> None:
        """Removes all instrumentation; nothing is written afterwards."""
        if active_session.stages is self.stages:
            active_session.stages = active_session.timers = None
        self.probes.remove()
        if self._torch is not None:
            self._torch.remove()
        self._jax.remove()
        self.transfers.remove()
        self.recorder.silence()

    def close(self) -> None:
        """Releases the shared memory."""
        self.devices.close()
        self.recorder.let_go()
        self.memory.close()


def _device_probes(
    recorder: Recorder, driver: DeviceDriver | None, mode: str
) -> tuple[DeviceTimer | NoDevices, TransferProbe | NoDevices]:
    """What records device time, and copies. Without a device their modules are not imported, which takes 2 ms."""
    if driver is None:
        nothing = NoDevices()
        return nothing, nothing
    from otel_train.instrumentation.cuda_events import time_devices
    from otel_train.instrumentation.device_copy import TransferProbe

    return time_devices(recorder, driver, mode), TransferProbe(recorder, driver)
