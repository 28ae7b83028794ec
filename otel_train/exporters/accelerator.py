"""Memory of the accelerators in use, as their allocator tells it, with the bytes on their way there."""

from __future__ import annotations

from typing import TYPE_CHECKING

from otel_train import catalog as c
from otel_train.exporters.peak_flops import peak_flops
from otel_train.guard import Guard

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from otel_train.aggregation.metrics import MetricBuilder
    from otel_train.records import DeviceMemory


class AcceleratorReader:
    """Writes device memory and transfers into a sheet.

    Args:
        read: the present readings, one per device in use; none where there is no device.
        sent: bytes sent there so far, by device.
        brought: bytes brought back so far, by device.
        device_flops: peak FLOP/s of one device; 0 for what is known of its model.
    """

    def __init__(
        self,
        read: Callable[[], Iterable[DeviceMemory]],
        sent: Callable[[], Mapping[str, int]] = dict,
        brought: Callable[[], Mapping[str, int]] = dict,
        *,
        device_flops: float = 0.0,
    ) -> None:
        self._device_flops = device_flops
        self._read = read
        self._moved = {"h2d": sent, "d2h": brought}
        self._guard = Guard("device memory")

    def write(self, sheet: MetricBuilder) -> None:
        """Put the present readings. Without a device in use there is no row: not measured is not zero."""
        if self._guard.closed:
            return
        with self._guard:  # a device that fails takes no other reading with it
            self._write(sheet)

    def ooms(self) -> int:
        """Times that the devices in use ran out of memory, all together."""
        if not self._guard.closed:
            with self._guard:
                return sum(memory.ooms for memory in self._read())
        return 0

    def _write(self, sheet: MetricBuilder) -> None:
        for direction, by_device in self._moved.items():
            for device, moved in by_device().items():
                sheet.put(c.ACCELERATOR_IO, moved, direction, device)
        memories = list(self._read())
        if self._device_flops and not memories:
            sheet.put(c.ACCELERATOR_FLOPS_LIMIT, self._device_flops, "cpu")
        for memory in memories:
            device = memory.device
            peak = self._device_flops or peak_flops(memory.model)
            if peak:
                sheet.put(c.ACCELERATOR_FLOPS_LIMIT, peak, device)
            sheet.put(c.ACCELERATOR_MEMORY_ALLOCATED, memory.allocated, device)
            sheet.put(c.ACCELERATOR_MEMORY_RESERVED, memory.reserved, device)
            sheet.put(c.ACCELERATOR_MEMORY_LIMIT, memory.limit, device)
            sheet.put(c.ACCELERATOR_MEMORY_ALLOCATED_PEAK, memory.allocated_peak, device)
            sheet.put(c.ACCELERATOR_MEMORY_RESERVED_PEAK, memory.reserved_peak, device)
            sheet.put(c.ACCELERATOR_MEMORY_OOMS, memory.ooms, device)
            sheet.put(c.ACCELERATOR_MEMORY_ALLOC_RETRIES, memory.alloc_retries, device)
