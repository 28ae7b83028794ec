"""Accelerator drivers: NVIDIA and AMD through ``torch.cuda``, Intel and Apple through their torch modules."""

from __future__ import annotations

import ctypes
import os
from contextlib import contextmanager, suppress
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from otel_train.datamodel import DeviceMemory
from otel_train.errors import imported

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence


class NativeDriver(NamedTuple):
    """Addresses and handles with which a C thread reads events without the GIL.

    Attributes:
        words: addresses of the functions named in ``_CUDA`` or ``_HIP``, in that order; then the context, and the event and the
            stream of ``DeviceDriver.stamp``.
        handle: returns the driver's handle of a torch event.
    """

    words: tuple[int, ...]
    handle: Callable[[Any], int]


_CUDA = (
    "cuCtxSetCurrent", "cuThreadExchangeStreamCaptureMode", "cuEventQuery", "cuEventElapsedTime", "cuEventRecord",
)  # fmt: skip
_HIP = (
    "hipSetDevice", "hipThreadExchangeStreamCaptureMode", "hipEventQuery", "hipEventElapsedTime", "hipEventRecord",
)  # fmt: skip
"""The same functions of HIP, with the same signatures, except that ``hipSetDevice`` takes a device number instead of a context."""

_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED, cuda.h; hipStreamCaptureModeRelaxed
_STRAY_SHARE = 0.05
"""Least peak of allocated memory of a device in use, as a share of the busiest device's peak: many programs leave a
context and a few tensors on device 0 by mistake."""


class DeviceDriver:
    """Devices of one type, read through the torch module of that name. To callers, events are opaque objects.

    torch is imported by the program, never here. A value for which its module has no function is not measured.

    Args:
        device_type: torch's name for devices of this type and for their module, such as ``cuda``.
        find_torch: returns torch if the program has imported it, else None.
        why_untimed: why device time cannot be measured, so that only memory and copies are; "" if it can.
    """

    def __init__(
        self,
        device_type: str,
        find_torch: Callable[[], Any] = lambda: imported("torch"),
        *,
        why_untimed: str = "",
    ) -> None:
        self.device_type = device_type
        self.why_untimed = why_untimed
        self._find_torch = find_torch
        self._torch: Any = None
        self._module: Any = None
        self._is_capturing: Callable[[], bool] = bool
        self._current: Callable[[], int] = int
        self._slots: list[tuple[Any, Any]] = []
        self._stamps: dict[int, tuple[Any, list[Any]]] = {}

    def current(self) -> int:
        """Returns the current device of the calling thread; 0 before the program has initialised the devices."""
        return self._current()

    def devices(self) -> Sequence[int]:
        """Returns the devices in use: those where this process has allocated tensors. Initialises no device.

        There are none before the program has initialised the devices. A custom allocator has no statistics: with one, the devices
        that have a context count as in use.
        """
        if self._started() is None:
            return ()
        every = range(getattr(self._module, "device_count", lambda: 1)())
        stats = [each for each in map(self._stats, every) if each is not None]
        if len(stats) < len(every):
            return self._in_use(every)
        peaks = [each["allocated_bytes"]["all"]["peak"] for each in stats]
        least = max(1, max(peaks, default=0) * _STRAY_SHARE)
        return tuple(device for device, peak in enumerate(peaks) if peak >= least)

    def capturing(self) -> bool:
        """Returns whether the current stream is being captured into a graph: its work runs when the graph is replayed, not now."""
        return self._is_capturing()

    def new_event(self, device: int) -> Any:
        """Returns an event that can be recorded on ``device`` any number of times."""
        del device
        return _kept(self._module.Event(enable_timing=True))

    def spare(self, device: int) -> list[Any]:
        """Returns the list of unused events of ``device``, shared by all drivers of this process, to pop from and append to."""
        return _spare.setdefault((self.device_type, device), [])

    def recorder(self, device: int) -> Callable[[Any], None]:
        """Returns a function that records an event on the current stream of ``device``."""
        current_stream = self._module.current_stream

        def record(event: Any) -> None:
            event.record(current_stream(device))

        return record

    def stamp(self, device: int) -> Any:
        """Returns an event just recorded on an otherwise idle high-priority stream, so that the device reaches it at once.

        Two events alternate: the next call but one records the same event again.
        """
        if device not in self._stamps:
            events = [self.new_event(device) for _ in range(2)]
            self._stamps[device] = self._module.Stream(device, priority=-1), events
        stream, events = self._stamps[device]
        events.reverse()
        events[0].record(stream)
        return events[0]

    def native(self, device: int) -> NativeDriver | None:
        """Returns how to read events of ``device`` from C; None if not possible."""
        del device
        return None

    def fetch(self, tensor: Any) -> Callable[[], float | None]:
        """Queues a copy of a one-element tensor to pinned memory. Returns a function: the number, or None while it is on its way."""
        torch = self._started()
        if self._slots:
            slot, event = self._slots.pop()
        else:
            slot = torch.empty((), dtype=torch.float32, pin_memory=True)
            event = _kept(self._module.Event())
        slot.copy_(tensor, non_blocking=True)
        event.record(self._module.current_stream(tensor.device))
        arrived: list[float] = []

        def fetched() -> float | None:
            if arrived:
                return arrived[0]
            with self.reading(tensor.device.index):
                if not event.query():
                    return None
            arrived.append(float(slot))
            self._slots.append((slot, event))
            return arrived[0]

        return fetched

    @contextmanager
    def reading(self, device: int) -> Iterator[None]:
        """Makes it safe, within the block, to query events while other threads capture graphs."""
        del device
        yield

    def query(self, event: Any) -> bool:
        """Returns whether the stream has reached ``event``."""
        return bool(event.query())

    def elapsed_ns(self, begin: Any, end: Any) -> int:
        """Returns the nanoseconds on the device clock between two events that it has reached; the resolution is 500 ns."""
        return round(float(begin.elapsed_time(end)) * 1e6)

    def synchronize(self, device: int) -> None:
        """Waits until ``device`` has finished all queued work."""
        self._module.synchronize(device)

    def hardware_ids(self) -> dict[str, str]:
        """Returns the NVML UUID of every device in use, by device name."""
        return {}

    def memory(self) -> list[DeviceMemory]:
        """Returns the allocator statistics of every device in use, without those that have a custom allocator.

        The peaks are not reset: the program may use them.
        """
        if self._started() is None:
            return []
        if hasattr(self._module, "driver_allocated_memory"):
            return self._memory_of_apple()
        known = [(device, self._stats(device)) for device in self.devices()]
        return [self._memory(device, stats) for device, stats in known if stats is not None]

    def taken(self) -> dict[str, int]:
        """Returns the used bytes of every device in use, by device name, including contexts, libraries and other processes."""
        found: dict[str, int] = {}
        if self._started() is None or not hasattr(self._module, "mem_get_info"):
            return found
        for device in self.devices():
            with self.reading(device):
                free, total = self._module.mem_get_info(device)
            found[f"{self.device_type}:{device}"] = total - free
        return found

    def _memory(self, device: int, stats: dict[str, Any]) -> DeviceMemory:
        allocated, reserved = stats["allocated_bytes"]["all"], stats["reserved_bytes"]["all"]
        share = getattr(self._module, "get_per_process_memory_fraction", lambda _: 1.0)(device)
        properties = self._module.get_device_properties(device)
        return DeviceMemory(
            f"{self.device_type}:{device}", allocated["current"], reserved["current"],
            int(properties.total_memory * share), allocated["peak"], reserved["peak"],
            stats.get("num_ooms"), stats.get("num_alloc_retries"), str(getattr(properties, "name", "")),
        )  # fmt: skip

    def _memory_of_apple(self) -> list[DeviceMemory]:
        """Returns the memory of the one Apple device; its allocator has no peaks and no failure counts."""
        module = self._module
        allocated, reserved = module.current_allocated_memory(), module.driver_allocated_memory()
        limit = module.recommended_max_memory()
        return [DeviceMemory("mps:0", allocated, reserved, limit, None, None, None, None)]

    def _stats(self, device: int) -> dict[str, Any] | None:
        """Returns the counters of the allocator; None if it has none, such as ``CUDAPluggableAllocator``."""
        read: Any = getattr(self._module, "memory_stats_as_nested_dict", None)
        with suppress(RuntimeError):
            return dict(read(device)) if read is not None else None
        return None

    def _in_use(self, every: Sequence[int]) -> tuple[int, ...]:
        del every
        return (self._current(),)

    def _started(self) -> Any:
        """Returns ``torch`` once the program has initialised these devices, None before."""
        if self._torch is None:
            torch = self._find_torch()
            module = getattr(torch, self.device_type, None)  # missing while torch is being imported
            if not self._is_started(module) or not self._is_usable(torch):
                return None
            self._module = module
            self._look_up(torch)
            self._torch = torch
        return self._torch

    @staticmethod
    def _is_started(module: Any) -> bool:
        if hasattr(module, "is_initialized"):
            return bool(module.is_initialized())
        with suppress(AttributeError, RuntimeError):  # torch was built without this backend
            return module is not None and module.current_allocated_memory() > 0  # torch.mps cannot tell
        return False

    def _is_usable(self, torch: Any) -> bool:
        del torch
        return True

    def _look_up(self, torch: Any) -> None:
        del torch
        self._current = getattr(self._module, "current_device", int)
        self._is_capturing = getattr(self._module, "is_current_stream_capturing", bool)


class CudaDriver(DeviceDriver):
    """The CUDA devices of this process.

    On the training thread it calls the internal functions of ``torch.cuda``, see ``_internal``.

    Args:
        exchange: ``cuThreadExchangeStreamCaptureMode``. In any other mode than relaxed, querying an event
            invalidates a capture in another thread (CUDA programming guide, "prohibited and
            unhandled operations").
        library: the loaded ``libcuda``; None if events are read in Python.
        instance: UUID of the MIG instance that is this process's device 0; "" if none is set.
    """

    def __init__(
        self,
        exchange: Callable[[Any], int],
        find_torch: Callable[[], Any] = lambda: imported("torch"),
        *,
        library: Any = None,
        instance: str = "",
    ) -> None:
        super().__init__("cuda", find_torch)
        self._exchange = exchange
        self._library = library
        self._functions = _CUDA
        self._instance = instance

    def recorder(self, device: int) -> Callable[[Any], None]:
        """Returns a function that records an event on the current stream of ``device``."""
        torch = self._torch
        raw_stream = _internal(torch, "_cuda_getCurrentRawStream")
        write = _internal(torch, "_CudaEventBase").record
        streams: dict[int, Any] = {}

        def record(event: Any) -> None:
            raw = raw_stream(device)
            if raw not in streams:
                streams[raw] = torch.cuda.current_stream(device)
            write(event, streams[raw])

        return record

    def native(self, device: int) -> NativeDriver | None:
        """Returns how to read events from C. The context is the one that torch uses; it lasts as long as the process."""
        library = self._library
        if not all(hasattr(library, name) for name in self._functions):
            return None
        with self.reading(device):
            context, stamp = self._context(device), self.stamp(device)
        addresses = [ctypes.c_void_p.from_buffer(library[name]).value or 0 for name in self._functions]
        stream = self._stamps[device][0].cuda_stream
        return NativeDriver((*addresses, context, stamp.cuda_event, stream), attrgetter("cuda_event"))

    @contextmanager
    def reading(self, device: int) -> Iterator[None]:
        """Sets the calling thread to relaxed capture mode, and to ``device``, so that it creates no context on device 0."""
        mode = ctypes.c_int(_RELAXED)
        self._exchange(ctypes.byref(mode))
        try:
            with self._torch.cuda.device(device):
                yield
        finally:
            self._exchange(ctypes.byref(mode))

    def hardware_ids(self) -> dict[str, str]:
        """Returns NVML UUIDs by device name; none if torch's device properties have no ``uuid``.

        CUDA shows a process at most one MIG instance, and no other device beside it.
        """
        torch = self._started()
        if torch is None:
            return {}
        if self._instance:
            return {f"cuda:{device}": self._instance for device in self.devices()}
        properties = {device: torch.cuda.get_device_properties(device) for device in self.devices()}
        return {f"cuda:{n}": f"GPU-{one.uuid}" for n, one in properties.items() if hasattr(one, "uuid")}

    def _context(self, device: int) -> int:
        """Returns the argument of the first function in ``_CUDA`` or ``_HIP``: the current context."""
        del device
        context = ctypes.c_void_p()
        self._library.cuCtxGetCurrent(ctypes.byref(context))
        return context.value or 0

    def _in_use(self, every: Sequence[int]) -> tuple[int, ...]:
        has_context = _internal(self._torch, "_cuda_hasPrimaryContext")
        return tuple(device for device in every if has_context(device))

    def _is_usable(self, torch: Any) -> bool:
        return bool(torch.version.cuda)

    def _look_up(self, torch: Any) -> None:
        self._is_capturing = _internal(torch, "_cuda_isCurrentStreamCapturing")
        self._current = _internal(torch, "_cuda_getDevice")


class HipDriver(CudaDriver):
    """AMD devices, which torch names ``cuda`` and serves with the same functions.

    Args:
        find_library: returns the path of a loaded library by the first characters of its file name; "" for none.
    """

    def __init__(
        self,
        find_torch: Callable[[], Any] = lambda: imported("torch"),
        find_library: Callable[[str], str] | None = None,
    ) -> None:
        super().__init__(int, find_torch)
        self._functions = _HIP
        self._find_library = find_library or _loaded_library

    def hardware_ids(self) -> dict[str, str]:
        """Returns none: NVML does not know these devices."""
        return {}

    def _context(self, device: int) -> int:
        return device

    def _is_usable(self, torch: Any) -> bool:
        path = self._find_library("libamdhip64.so") if getattr(torch.version, "hip", None) else ""
        library = ctypes.CDLL(path) if path else None
        self._exchange = getattr(library, _HIP[1], self._exchange)
        self._library = library
        usable = hasattr(library, _HIP[1])
        if path and not usable:  # querying an event could invalidate a capture in another thread
            self.why_untimed = f"device time and device memory are not read: {path} has no {_HIP[1]}"
        return usable


def _loaded_library(name: str) -> str:
    """Returns the path of a library that this process has loaded: another file would start a second runtime."""
    with suppress(OSError), Path("/proc/self/maps").open() as maps:
        for line in maps:
            path = line.rstrip("\n").partition("/")[2]
            if Path(path).name.startswith(name):
                return f"/{path}"
    return ""


_spare: dict[tuple[str, int], list[Any]] = {}
"""Unused events by device type and number. A forked child cannot use those of its parent."""

os.register_at_fork(after_in_child=_spare.clear)


def _kept(event: Any) -> Any:
    """Returns an event after leaking one reference to it, so that it is never destroyed.

    Its destructor releases the GIL and calls the driver, on whichever thread drops the last reference. That must not happen in a
    forked child or at the end of the interpreter, and on a thread whose current device is another one it would create a
    context. Unused events are used again.
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(event))
    return event


def _internal(torch: Any, name: str) -> Any:
    """Returns an internal function of ``torch.cuda``: the public one creates objects, which costs the training thread time."""
    return getattr(torch._C, name)  # noqa: SLF001 - see above
