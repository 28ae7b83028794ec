"""The training thread's side of a session: rings, hooks, patches, put in and taken out together."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from otel_train.datamodel import system_clock
from otel_train.instrumentation.accelerator import cuda_driver
from otel_train.instrumentation.backward import in_backward
from otel_train.instrumentation.callbacks import Hooks
from otel_train.instrumentation.compile_events import JaxCompilerProbe
from otel_train.instrumentation.cuda_events import time_devices
from otel_train.instrumentation.dataloader import LastBatch
from otel_train.instrumentation.device_copy import TransferProbe
from otel_train.instrumentation.logged_values import ValueQueue
from otel_train.instrumentation.module import kind_of_device
from otel_train.instrumentation.optimizer import ScaledUpdates
from otel_train.instrumentation.registry import Probes, TorchProbes
from otel_train.instrumentation.stages import StageRecorder, switch
from otel_train.instrumentation.timers import Timers
from otel_train.recording.flight_recorder import FlightMemory
from otel_train.recording.recorder import Recorder
from otel_train.safety import Guard

if TYPE_CHECKING:
    from collections.abc import Mapping

    from otel_train.config import Config
    from otel_train.datamodel import Anchor, Compile
    from otel_train.resource import RunInfo


class InstrumentationManager:
    """Everything that writes.

    Args:
        config: how the run is observed.
        info: who we are.
        anchor: one instant on both clocks.
        environ: the process environment.

    Attributes:
        recorder: rings and sources.
        devices: device time.
        transfers: batches on their way to a device.
        scaled: what only the device knows of updates under a gradient scaler.
        notes: what the user logs.
        probes: loaders and models.
        hand: stages by hand.
        timers: operations timed by token.
        memory: that it writes to.
        hooks: the program's own code around stages.
        last_batch: which batch the calling thread fetched last.
    """

    def __init__(
        self,
        config: Config,
        info: RunInfo,
        *,
        anchor: Anchor,
        environ: Mapping[str, str],
    ) -> None:
        self.memory = FlightMemory(config.flight_edges, anchor, shared=True)
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
        driver = cuda_driver(environ)
        self._timed = (
            None
            if config.cuda_timing == "off"
            else {"cpu", "meta", *([driver.device_type] if driver else [])}
        )
        self.devices = time_devices(self.recorder, driver, config.cuda_timing)
        self.transfers = TransferProbe(self.recorder, driver)
        self.scaled = ScaledUpdates(driver)
        self.notes = ValueQueue(system_clock)
        self.probes = Probes(self.recorder, compiled=self.follow_compiler)
        self._jax = JaxCompilerProbe(system_clock)
        self.hand = StageRecorder(self.recorder, self._jax.listen)
        self.timers = Timers(self.recorder, system_clock)
        self.hooks = Hooks(self.recorder)
        self.last_batch = LastBatch(self.recorder)
        self._torch: TorchProbes | None = None

    @property
    def spent_ns(self) -> int:
        """Nanoseconds of ours on the training thread, as sampled there."""
        return self.recorder.spent_ns + self.devices.spent_ns

    def begin(self) -> None:
        """Listen to the functions at the top of the package, and to torch and JAX if they are there."""
        switch.hand, switch.timers = self.hand, self.timers
        self.watch_torch()
        self._jax.listen()
        with Guard("devices"):  # most programs have put their model on a device by now
            self.transfers.look()

    def watch_torch(self) -> None:
        """Hook torch once it is there: a program without it is none of its business."""
        if self._torch is None and "torch" in sys.modules:
            self._torch = TorchProbes(self.recorder, self.scaled, clock=system_clock)
            self.probes.watch_torch()

    def follow_compiler(self) -> None:
        """Keep up with models that compile themselves, and keep the compiler out of our wrappers."""
        if switch.hand is not self.hand:  # what has been given back stays so
            return
        self._jax.listen()
        self.probes.attach_again()
        if self._torch is not None:
            self._torch.step_aside_for_compiler()

    def untimed(self) -> tuple[str, ...]:
        """Kinds of devices that models are on and whose time is not taken, though nobody switched that off."""
        if self._timed is None:
            return ()
        kinds = {kind_of_device(probe.model()) for probe in list(self.probes.models)}
        return tuple(sorted(kind for kind in kinds if kind and kind not in self._timed))

    def compiles(self) -> list[Compile]:
        """What compilers have done since the last call."""
        return [*(self._torch.compiler.take() if self._torch is not None else ()), *self._jax.take()]

    def end(self) -> None:
        """Take every hook and patch out; nothing is written from now on."""
        if switch.hand is self.hand:
            switch.hand = switch.timers = None
        self.probes.remove()
        if self._torch is not None:
            self._torch.remove()
        self._jax.remove()
        self.transfers.remove()
        self.recorder.silence()

    def close(self) -> None:
        """Give the memory back."""
        self.devices.close()
        self.recorder.let_go()
        self.memory.close()
