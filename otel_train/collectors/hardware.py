"""Utilisation, memory, power and temperature of the devices in use, from NVML, unless a DCGM exporter has them."""

from __future__ import annotations

import http.client
import time
from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

from otel_train import catalog as c
from otel_train.config.validation import split_address
from otel_train.safety import Guard

if TYPE_CHECKING:
    from otel_train.aggregation.metrics import MetricBuilder
    from otel_train.config import Config
    from otel_train.datamodel import DeviceMemory

PEAK_FLOPS: Final = {
    "NVIDIA H200": 989e12,
    "NVIDIA H100 80GB HBM3": 989e12,
    "NVIDIA H100 NVL": 835e12,
    "NVIDIA H100 PCIe": 756e12,
    "NVIDIA A100-SXM4-40GB": 312e12,
    "NVIDIA A100-SXM4-80GB": 312e12,
    "NVIDIA A100-PCIE-40GB": 312e12,
    "NVIDIA A100 80GB PCIe": 312e12,
    "NVIDIA L40S": 362e12,
    "NVIDIA A10": 125e12,
    "NVIDIA L4": 121e12,
}
"""Dense BF16 with FP32 accumulation, in FLOP/s, by the name that the driver reports.

Source: NVIDIA's data sheet of each model, as quoted in tables. For H200, H100 and L4 these give the rate with sparsity (1979,
1671, 1513, 242 TFLOP/s), which is twice the value here. The peak of other models is not guessed.
"""


def peak_flops(model: str) -> float:
    """Returns the peak FLOP/s of a device of exactly this model; 0 if that is unknown, as for a MIG instance."""
    return PEAK_FLOPS.get(model, 0.0)


PROBE_TIMEOUT_S = 0.25
"""Longest time, in seconds, that the export loop waits for a local exporter, once. A running one answers in milliseconds."""

DCGM_ENDPOINT = "127.0.0.1:9400"
"""Address that is probed for a DCGM exporter if the setting ``hardware`` has no address."""

_PAGE_START_BYTES = 1 << 16  # enough to recognise a DCGM exporter
_WHOLE, _INSTANCE = "GPU-", "MIG-"  # prefixes of the UUID of a device, and of a MIG instance
_DCGM_MARK = b"DCGM_FI_"


class HardwareReader:
    """Writes NVML's values of the devices in use to a MetricBuilder. Without the ``nvml`` extra there are no rows.

    Args:
        devices: name and UUID of every device in use; none before the program computes on one.
        mode: ``auto`` (only where no DCGM exporter answers), ``on`` or ``off``.
        exporter_answers: returns whether a DCGM exporter answers; called once.
        load: returns the ``pynvml`` module, or raises ImportError.
    """

    def __init__(
        self,
        devices: Callable[[], Mapping[str, str]],
        *,
        mode: str,
        exporter_answers: Callable[[], bool],
        load: Callable[[], Any] = lambda: import_module("pynvml"),
    ) -> None:
        self.guard = Guard("hardware")
        self._devices = devices
        self._mode = mode
        self._exporter_answers = exporter_answers
        self._load = load
        self._nvml: Any = None
        self._over = mode == "off"
        self._handles: dict[str, Any] = {}
        self._instances: list[Any] = []

    @classmethod
    def of(cls, config: Config, devices: Callable[[], Mapping[str, str]]) -> HardwareReader:
        """Returns the reader that the settings select."""
        given = split_address(config.hardware) is not None
        mode, endpoint = ("auto", config.hardware) if given else (config.hardware, DCGM_ENDPOINT)
        return cls(devices, mode=mode, exporter_answers=lambda: dcgm_answers(endpoint, PROBE_TIMEOUT_S))

    def write(self, builder: MetricBuilder) -> None:
        """Writes the current values. A value that a device does not provide has no row."""
        if self._over or self.guard.closed:
            return
        with self.guard:
            devices = self._devices()
            if devices and self._ready():
                for name, uuid in devices.items():
                    self._write(builder, name, uuid)

    def close(self) -> None:
        """Shuts NVML down."""
        self._over = True
        if self._nvml is not None:
            with self.guard:
                self._nvml.nvmlShutdown()
            self._nvml = None

    def _ready(self) -> bool:
        """Initialises NVML with the first device. If that fails, it is not tried again."""
        if self._nvml is not None:
            return True
        self._over = True
        try:
            nvml = self._load()
        except ImportError:
            return False
        if self._mode == "auto" and self._exporter_answers():
            return False
        try:
            nvml.nvmlInit()
        except nvml.NVMLError:  # no driver, or a container without access to it
            return False
        self._nvml, self._over = nvml, False
        return True

    def _write(self, builder: MetricBuilder, name: str, uuid: str) -> None:
        nvml = self._nvml
        handle = self._asked(lambda: self._handle(uuid))
        if handle is None:
            return
        memory = self._asked(lambda: nvml.nvmlDeviceGetMemoryInfo(handle))
        if memory is not None:
            builder.put(c.HW_GPU_MEMORY_USAGE, memory.used, name)
            builder.put(c.HW_GPU_MEMORY_LIMIT, memory.total, name)
        if handle in self._instances:  # utilisation and temperature exist for whole devices only
            return
        for metric, ask in (
            (c.HW_GPU_UTILIZATION, lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100),
            (c.HW_POWER, lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1000),
            (c.HW_TEMPERATURE, lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)),
        ):
            value = self._asked(ask)
            if value is not None:
                builder.put(metric, value, name)

    def _handle(self, uuid: str) -> Any:
        if uuid not in self._handles:
            self._handles[uuid] = self._found(uuid)
        return self._handles[uuid]

    def _found(self, uuid: str) -> Any:
        """Returns the device, or the MIG instance that this rank uses; None if it cannot be identified.

        CUDA may report the UUID of the instance, which has another prefix in NVML, or that of the whole device.
        """
        nvml = self._nvml
        if not uuid.startswith(_INSTANCE):
            whole = self._asked(lambda: nvml.nvmlDeviceGetHandleByUUID(uuid))
            if whole is not None:
                mode = self._asked(lambda: nvml.nvmlDeviceGetMigMode(whole))
                if mode is None or not mode[0]:
                    return whole
                count = nvml.nvmlDeviceGetMaxMigDeviceCount(whole)
                parts = [part for n in range(count) if (part := self._instance(whole, n)) is not None]
                self._instances += parts
                return parts[0] if len(parts) == 1 else None
            uuid = _INSTANCE + uuid.removeprefix(_WHOLE)
        part = nvml.nvmlDeviceGetHandleByUUID(uuid)
        self._instances.append(part)
        return part

    def _instance(self, whole: Any, index: int) -> Any:
        return self._asked(lambda: self._nvml.nvmlDeviceGetMigDeviceHandleByIndex(whole, index))

    def _asked(self, ask: Callable[[], Any]) -> Any:
        """Returns a value of the device; None if it has none: laptops have no power meter, MIG slices no utilisation."""
        try:
            return ask()
        except self._nvml.NVMLError:
            return None


def dcgm_answers(endpoint: str, timeout_s: float) -> bool:
    """Returns whether a DCGM exporter publishes at ``endpoint`` (host:port). Takes no longer than ``timeout_s``, about."""
    deadline = time.monotonic() + timeout_s
    try:
        connection = http.client.HTTPConnection(endpoint, timeout=timeout_s)
        try:
            connection.request("GET", "/metrics")
            page = connection.getresponse()
            start = b""
            while len(start) < _PAGE_START_BYTES and time.monotonic() < deadline:
                piece = page.read1(4096)
                start += piece
                if not piece or _DCGM_MARK in start:
                    break
            return _DCGM_MARK in start
        finally:
            connection.close()
    except (OSError, http.client.HTTPException, ValueError):  # no server, or no DCGM exporter
        return False


class AcceleratorReader:
    """Writes device memory and transfers into a MetricBuilder.

    ``read`` returns the current readings, one per device in use; ``sent`` and ``to_host`` the bytes copied so far, by device.
    ``device_flops``: peak FLOP/s of one device; 0 to use ``peak_flops`` of its model.
    """

    def __init__(
        self,
        read: Callable[[], Iterable[DeviceMemory]],
        sent: Callable[[], Mapping[str, int]] = dict,
        to_host: Callable[[], Mapping[str, int]] = dict,
        *,
        device_flops: float = 0.0,
    ) -> None:
        self._device_flops = device_flops
        self._read = read
        self._moved = {"h2d": sent, "d2h": to_host}
        self._guard = Guard("device memory")

    def write(self, builder: MetricBuilder) -> None:
        """Writes the current readings. Without a device in use there is no row: a value that is not measured is not zero."""
        if self._guard.closed:
            return
        with self._guard:  # a device that fails does not prevent other readings
            self._write(builder)

    def ooms(self) -> int:
        """Returns how often the devices in use ran out of memory, added up."""
        if not self._guard.closed:
            with self._guard:
                return sum(memory.ooms or 0 for memory in self._read())
        return 0

    def _write(self, builder: MetricBuilder) -> None:
        for direction, by_device in self._moved.items():
            for device, moved in by_device().items():
                builder.put(c.ACCELERATOR_IO, moved, direction, device)
        memories = list(self._read())
        if self._device_flops and not memories:
            builder.put(c.ACCELERATOR_FLOPS_LIMIT, self._device_flops, "cpu")
        for memory in memories:
            device = memory.device
            peak = self._device_flops or peak_flops(memory.model)
            if peak:
                builder.put(c.ACCELERATOR_FLOPS_LIMIT, peak, device)
            for metric, value in (
                (c.ACCELERATOR_MEMORY_ALLOCATED, memory.allocated),
                (c.ACCELERATOR_MEMORY_RESERVED, memory.reserved),
                (c.ACCELERATOR_MEMORY_LIMIT, memory.limit),
                (c.ACCELERATOR_MEMORY_ALLOCATED_PEAK, memory.allocated_peak),
                (c.ACCELERATOR_MEMORY_RESERVED_PEAK, memory.reserved_peak),
                (c.ACCELERATOR_MEMORY_OOMS, memory.ooms),
                (c.ACCELERATOR_MEMORY_ALLOC_RETRIES, memory.alloc_retries),
            ):
                if value is not None:
                    builder.put(metric, value, device)
