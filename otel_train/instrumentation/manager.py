"""Installs and removes all instrumentation of a session."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from otel_train.datamodel import Anchor, Compile, DeviceMemory, system_clock
from otel_train.errors import imported
from otel_train.instrumentation.checkpoints import CheckpointProbe
from otel_train.instrumentation.logged_values import ValueQueue
from otel_train.instrumentation.module import kind_of_device
from otel_train.instrumentation.optimizer import ScaledUpdates, in_backward
from otel_train.instrumentation.registry import ProbeRegistry, TorchProbes
from otel_train.instrumentation.stages import StageRecorder, active_session
from otel_train.instrumentation.timers import Timers
from otel_train.recording.recorder import Recorder
from otel_train.recording.shared_memory import FlightMemory, PendingEntries
from otel_train.resource import RunInfo, namespace_of, process_mark
from otel_train.safety import Guard, Handle, free_in_forks

if TYPE_CHECKING:
    from otel_train.config import Config
    from otel_train.instrumentation.accelerator import CudaDriver, DeviceDriver, HipDriver
    from otel_train.instrumentation.callbacks import LastBatch, StageCallbacks
    from otel_train.instrumentation.compile_events import CompilerProbe, JaxCompilerProbe
    from otel_train.instrumentation.cuda_events import DeviceTimer
    from otel_train.instrumentation.device_copy import TransferProbe


_COMPILERS = ("torch._dynamo.callback", "jax._src.monitoring")
"""Modules with which compilers announce compilations; a program that compiles nothing has imported neither."""


class InstrumentationManager:
    """The recording side of a session.

    Args:
        job: returns rank and world size of the process group, once there is one.

    Attributes:
        scaled: outcomes of updates under a gradient scaler, which only the device knows.
    """

    def __init__(
        self,
        config: Config,
        info: RunInfo,
        *,
        anchor: Anchor,
        environ: Mapping[str, str],
        job: Callable[[], object],
    ) -> None:
        self._job = job
        self.memory = FlightMemory(config.flight_recorder_events, anchor)
        self.recorder = Recorder(self.memory, clock=system_clock, in_backward=in_backward)
        self.recorder.set_identity(_identity(info, anchor))
        driver = find_driver(environ)
        self._driver = driver
        self._wants_times = config.cuda_timing != "off"
        self.devices, self.transfers = _device_probes(self.recorder, driver, config.cuda_timing)
        changed = self.recorder.changed
        self.scaled = ScaledUpdates(driver, changed)
        values, operations = (PendingEntries(self.memory.pending(index)) for index in (0, 1))
        self.recorder.when_silenced += [values.release_memory, operations.release_memory]
        self.values = ValueQueue(system_clock, values, changed)
        self.probes = ProbeRegistry(self.recorder, compiled=self.follow_compiler, passes=self._check_imports)
        self._surroundings: tuple[int, object] = (len(sys.modules), None)
        self._compilers: tuple[CompilerProbe, JaxCompilerProbe] | None = None
        self._since_ns = anchor.clock_ns
        self._following = free_in_forks(threading.Lock())
        self._guard = Guard("instrumentation of imported modules", limit=sys.maxsize)
        self.stages = StageRecorder(self.recorder, self._follow_imports_in_training)
        self.timers = Timers(self.recorder, system_clock, operations)
        self._checkpoints = CheckpointProbe()
        self.hooks: StageCallbacks | None = None
        self._torch: TorchProbes | None = None

    @property
    def dropped(self) -> int:
        """Logged values, device events and operations that did not fit into a queue."""
        return self.values.dropped + self.devices.dropped + self.timers.dropped

    def begin(self) -> None:
        """Activates the public functions, and instruments torch and JAX if they are loaded."""
        active_session.stages, active_session.timers = self.stages, self.timers
        self.watch_torch()
        self._follow_imports_in_training()
        with Guard("devices"):  # most programs have put their model on a device by now
            self.transfers.poll()

    def watch_torch(self) -> None:
        """Instruments torch once the program has imported it."""
        if self._torch is None and imported("torch") is not None:
            self._torch = TorchProbes(self.recorder, self.scaled)
            self.probes.watch_torch()
            self._follow_imports_in_training()

    def follow_compiler(self) -> None:
        """Instruments models that have been compiled since, and excludes wrappers from compilation.

        It iterates over the submodules of every model: tens of microseconds with the GIL held.
        """
        if active_session.stages is self.stages:
            self.probes.attach_again()
        self.follow_imports()

    def follow_imports(self) -> None:
        """Registers with compilers and frameworks that have been loaded since, and excludes wrappers from compilation.

        Does nothing while another thread does it: training must not wait.
        """
        if active_session.stages is not self.stages:  # the session has ended: nothing is instrumented again
            return
        if not self._following.acquire(blocking=False):
            return
        try:
            self._listen()
            self._checkpoints.watch()
            if self._torch is not None:
                self._torch.step_aside_for_compiler()
        finally:
            self._following.release()

    def _follow_imports_in_training(self) -> None:
        with self._guard:
            self.follow_imports()

    def _listen(self) -> None:
        if self._compilers is None:
            if not any(map(imported, _COMPILERS)):
                return
            from otel_train.instrumentation.compile_events import CompilerProbe, JaxCompilerProbe

            changed = self.recorder.changed
            self._compilers = (
                CompilerProbe(system_clock, changed=changed),
                JaxCompilerProbe(system_clock, changed=changed, since_ns=self._since_ns),
            )
        for probe in self._compilers:
            probe.listen()

    def on(
        self, stage: str, before: Callable[[], object] | None, after: Callable[[], object] | None
    ) -> Handle:
        """See ``Session.on``."""
        from otel_train.instrumentation.callbacks import StageCallbacks

        if self.hooks is None:
            self.hooks = StageCallbacks(self.recorder)
        return self.hooks.add(stage, before, after)

    @cached_property
    def last_batch(self) -> LastBatch:
        """The batch that the calling thread fetched last. Imported on demand: few programs use it, and it takes milliseconds."""
        from otel_train.instrumentation.callbacks import LastBatch

        return LastBatch(self.recorder)

    @property
    def polled(self) -> bool:
        """Whether the agent must poll, because there are device times: they change all the time without ``Recorder.changed``."""
        return self._driver is not None

    def _check_imports(self) -> None:
        """Checks, when a pass begins, for newly imported trackers and compilers, and for a process group."""
        surroundings = len(sys.modules), self._job()
        if surroundings != self._surroundings:
            self._surroundings = surroundings
            self.recorder.changed()

    def untimed(self) -> dict[str, str]:
        """Returns device types of models whose device time is not measured although it is switched on, with the reason."""
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
        return [each for probe in self._compilers or () for each in probe.take()]

    def end(self) -> None:
        """Removes all instrumentation; nothing is written afterwards."""
        if active_session.stages is self.stages:
            active_session.stages = active_session.timers = None
        self.probes.remove()
        if self._torch is not None:
            self._torch.remove()
        for probe in self._compilers or ():
            probe.remove()
        self._checkpoints.remove()
        self.transfers.remove()
        self.recorder.silence()

    def close(self) -> None:
        """Releases the shared memory."""
        if self.hooks is not None:
            self.hooks.log_absent()
        self.devices.close()
        self.recorder.release_memory()
        self.memory.close()


def _identity(info: RunInfo, anchor: Anchor) -> dict[str, object]:
    """Returns the identity of this rank and its process, for the flight file."""
    return {
        "run_id": info.run_id,
        "rank": info.rank,
        "attempt": info.attempt,
        "world_size": info.world_size,
        "host": info.host,
        "pid_namespace": namespace_of("pid"),
        "process": process_mark(info.pid),
        "started_unix_ns": anchor.unix_ns,
    }


def _device_probes(
    recorder: Recorder, driver: DeviceDriver | None, mode: str
) -> tuple[DeviceTimer | NoDevices, TransferProbe | NoDevices]:
    """Returns probes for device time and copies. Without a device their modules are not imported, which would take 2 ms."""
    if driver is None:
        nothing = NoDevices()
        return nothing, nothing
    from otel_train.instrumentation.cuda_events import time_devices
    from otel_train.instrumentation.device_copy import TransferProbe

    return time_devices(recorder, driver, mode), TransferProbe(recorder, driver)


NVIDIA_FILES = ("/dev/nvidiactl", "/dev/nvidia0", "/dev/dxg", "/dev/nvhost-gpu", "/dev/nvgpu")
"""One of them exists where CUDA can run: Linux, WSL, Jetson. A call into CUDA would initialise it."""

_AMD_FILE = "/dev/kfd"
_DISPLAYS = "/sys/class/drm"
_INTEL = "0x8086"
_HIDDEN = ("", "-1")
_MACHINE = (os.uname().sysname, os.uname().machine)

UNTIMED = (
    "device time and device memory are read on Linux through torch.cuda (NVIDIA, AMD) and torch.xpu (Intel), device memory "
    "also through torch.mps (Apple), and this machine has no driver of that kind"
)
APPLE_UNTIMED = (
    "device time is not read: torch.mps waits until the device is done before it tells the time between two events. "
    "Device memory is read"
)


def find_driver(environ: Mapping[str, str]) -> DeviceDriver | None:
    """Returns the driver of this machine's accelerator; None if it has none that torch can use. Initialises no device."""
    return (
        cuda_driver(environ, NVIDIA_FILES)
        or hip_driver(environ, _AMD_FILE)
        or torch_driver(_MACHINE, _DISPLAYS, lambda: imported("torch"))
    )


def cuda_driver(environ: Mapping[str, str], files: Sequence[str]) -> CudaDriver | None:
    """Returns the driver for NVIDIA devices, or None on a machine without CUDA, where none of ``files`` exists."""
    if environ.get("CUDA_VISIBLE_DEVICES", "all").strip() in _HIDDEN or sys.platform != "linux":
        return None
    if not any(map(os.path.exists, files)):
        return None
    import ctypes

    from otel_train.instrumentation.accelerator import CudaDriver

    try:
        library = ctypes.CDLL("libcuda.so.1")
        exchange = library.cuThreadExchangeStreamCaptureMode
    except (OSError, AttributeError):  # without it, querying an event could end another thread's capture
        return None
    return CudaDriver(exchange, library=library, instance=instance_of(environ))


def hip_driver(environ: Mapping[str, str], file: str) -> HipDriver | None:
    """Returns the driver for AMD devices, or None on a machine without any, where ``file`` is missing."""
    names = ("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")
    hidden = any(environ.get(name, "all").strip() in _HIDDEN for name in names)
    if hidden or sys.platform != "linux" or not Path(file).exists():
        return None
    from otel_train.instrumentation.accelerator import HipDriver

    return HipDriver()


def torch_driver(
    machine: tuple[str, str], displays: str, find_torch: Callable[[], Any]
) -> DeviceDriver | None:
    """Returns the driver for Intel and Apple devices, or None on a machine without any, or if torch was built without support.

    Args:
        machine: system and architecture, as ``os.uname`` names them.
        displays: folder of the kernel's graphics devices.
        find_torch: returns torch if the program has imported it, else None.
    """
    if machine == ("Darwin", "arm64"):
        from otel_train.instrumentation.accelerator import DeviceDriver

        return DeviceDriver("mps", find_torch, why_untimed=APPLE_UNTIMED)
    torch = find_torch()
    if torch is not None and not getattr(getattr(torch, "_C", None), "_has_xpu", False):
        return None  # an Intel device here would be integrated graphics
    with suppress(OSError):
        vendors = Path(displays).glob("renderD*/device/vendor")
        if any(vendor.read_text().strip() == _INTEL for vendor in vendors):
            from otel_train.instrumentation.accelerator import DeviceDriver

            return DeviceDriver("xpu", find_torch)
    return None


def instance_of(environ: Mapping[str, str]) -> str:
    """Returns the MIG instance that the program may use; "" if it may use whole devices."""
    first = environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0].strip()
    return first if first.startswith("MIG-") else ""


class NoDevices:
    """Replaces ``DeviceTimer`` and ``TransferProbe`` on a machine without an accelerator: records nothing."""

    dropped = spent_ns = 0
    failure = ""

    def __init__(self) -> None:
        self._steps = (1, 1)  # as ``DeviceTimer`` counts the first step

    def poll(self) -> None:
        """Does nothing."""

    read = remove = close = poll

    def take_steps(self) -> tuple[int, int]:
        """See ``DeviceTimer.take_steps``."""
        steps, self._steps = self._steps, (0, 0)
        return steps

    def memory(self) -> list[DeviceMemory]:
        """Returns none."""
        return []

    def taken(self) -> dict[str, Any]:
        """Returns none."""
        return {}

    hardware_ids = copied_to_host = taken

    def ooms(self) -> int:
        """Returns none."""
        return 0
