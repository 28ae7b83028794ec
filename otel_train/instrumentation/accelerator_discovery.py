"""Discovers which accelerator this machine has. What is only needed where there is one is imported then."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from otel_train.errors import imported

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from otel_train.datamodel import DeviceMemory
    from otel_train.instrumentation.accelerator import CudaDriver, DeviceDriver, HipDriver

_NVIDIA_FILES = ("/dev/nvidiactl", "/dev/nvidia0", "/dev/dxg", "/dev/nvhost-gpu", "/dev/nvgpu")
"""Any of them is there where CUDA can run: Linux, WSL, Jetson. Asking CUDA itself would start it."""

_AMD_FILE = "/dev/kfd"
_DISPLAYS = "/sys/class/drm"
_INTEL = "0x8086"
_HIDDEN = ("", "-1")
_MACHINE = (os.uname().sysname, os.uname().machine) if hasattr(os, "uname") else ("", "")

UNTIMED = (
    "device time and device memory are read on Linux by way of torch.cuda (NVIDIA, AMD) and torch.xpu (Intel), device memory "
    "also by way of torch.mps (Apple), and this machine has no driver of that kind"
)
APPLE_UNTIMED = (
    "device time is not read: torch.mps waits until the device is done before it tells the time between two events. "
    "Device memory is read"
)


def find_driver(environ: Mapping[str, str]) -> DeviceDriver | None:
    """The driver of this machine's accelerator; None where it has none that torch can use. Starts nothing."""
    return cuda_driver(environ) or hip_driver(environ) or torch_driver()


def cuda_driver(environ: Mapping[str, str], files: Sequence[str] = _NVIDIA_FILES) -> CudaDriver | None:
    """The driver for NVIDIA's devices, or None on a machine where CUDA cannot be used.

    Args:
        environ: the process environment.
        files: paths of which at least one exists where there is a device.
    """
    if environ.get("CUDA_VISIBLE_DEVICES", "all").strip() in _HIDDEN or sys.platform != "linux":
        return None
    if not any(map(os.path.exists, files)):
        return None
    import ctypes

    from otel_train.instrumentation.accelerator import CudaDriver

    try:
        library = ctypes.CDLL("libcuda.so.1")
        exchange = library.cuThreadExchangeStreamCaptureMode
    except (OSError, AttributeError):  # without it, reading an event could break a capture elsewhere
        return None
    return CudaDriver(exchange, library=library, instance=instance_of(environ))


def hip_driver(environ: Mapping[str, str], file: str = _AMD_FILE) -> HipDriver | None:
    """The driver for AMD's devices, or None on a machine without any.

    Args:
        environ: the process environment.
        file: exists where there is a device.
    """
    names = ("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")
    hidden = any(environ.get(name, "all").strip() in _HIDDEN for name in names)
    if hidden or sys.platform != "linux" or not Path(file).exists():
        return None
    from otel_train.instrumentation.accelerator import HipDriver

    return HipDriver()


def torch_driver(
    machine: tuple[str, str] = _MACHINE,
    displays: str = _DISPLAYS,
    find_torch: Callable[[], Any] = lambda: imported("torch"),
) -> DeviceDriver | None:
    """The driver for Intel's and Apple's devices, or None on a machine without any, or where torch is built for none.

    Args:
        machine: system and architecture, as ``os.uname`` names them.
        displays: folder of the devices that compute or show.
        find_torch: gives torch, where the program has imported it by now.
    """
    if machine == ("Darwin", "arm64"):
        from otel_train.instrumentation.accelerator import DeviceDriver

        return DeviceDriver("mps", find_torch, why_untimed=APPLE_UNTIMED)
    torch = find_torch()
    if torch is not None and not getattr(getattr(torch, "_C", None), "_has_xpu", False):
        return None  # a processor with graphics of its own
    with suppress(OSError):
        vendors = Path(displays).glob("renderD*/device/vendor")
        if any(vendor.read_text().strip() == _INTEL for vendor in vendors):
            from otel_train.instrumentation.accelerator import DeviceDriver

            return DeviceDriver("xpu", find_torch)
    return None


def instance_of(environ: Mapping[str, str]) -> str:
    """The part of a device that the program may use; "" where it has whole ones, or none is set."""
    first = environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0].strip()
    return first if first.startswith("MIG-") else ""


class NoDevices:
    """In the place of ``DeviceTimer`` and ``TransferProbe`` where this machine has no accelerator: nothing is recorded."""

    dropped = spent_ns = 0
    failure = ""

    def __init__(self) -> None:
        self._steps = (1, 1)  # as ``DeviceTimer`` counts the first step

    def look(self) -> None:
        """Does nothing."""

    read = remove = close = look

    def take_steps(self) -> tuple[int, int]:
        """See ``DeviceTimer.take_steps``."""
        steps, self._steps = self._steps, (0, 0)
        return steps

    def memory(self) -> list[DeviceMemory]:
        """None."""
        return []

    def taken(self) -> dict[str, Any]:
        """None."""
        return {}

    hardware_ids = copied_to_host = taken

    def ooms(self) -> int:
        """None."""
        return 0
