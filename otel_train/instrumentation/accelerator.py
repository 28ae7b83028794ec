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
    """What a C thread needs to read events without the GIL.

    Attributes:
        words: addresses of the driver's functions that make a context current, exchange the mode of captures, query an event,
            tell the time between two, and record one; then the context, an event for stamps and the stream that it is for.
    """

    words: tuple[int, ...]
    handle: Callable[[Any], int]


_CUDA = (
    "cuCtxSetCurrent", "cuThreadExchangeStreamCaptureMode", "cuEventQuery", "cuEventElapsedTime", "cuEventRecord",
)  # fmt: skip
_HIP = (
    "hipSetDevice", "hipThreadExchangeStreamCaptureMode", "hipEventQuery", "hipEventElapsedTime", "hipEventRecord",
)  # fmt: skip
"""Of the same signatures. A device takes the place of its context, which is the only one."""

_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED, cuda.h; hipStreamCaptureModeRelaxed
_STRAY_SHARE = 0.05
"""A device on which less was ever allocated than this share of the busiest one's is not computed on: many
programs leave a context and a few tensors on device 0 by mistake."""


class DeviceDriver:
    """An accelerator: devices of one kind, by way of the torch module that has its name. Events are the driver's own.

    Torch is imported by the program, never by us. What its module for these devices lacks is not measured.

    Args:
        device_type: what torch calls devices of this kind, and its module for them, such as ``cuda``.
        why_untimed: why there are no events to time with; "" where there are. Then only memory and copies are measured.
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
        """Returns the device that the calling thread uses where it names none; 0 before the program has started the devices."""
        return self._current()

    def devices(self) -> Sequence[int]:
        """Returns the devices on which this process has tensors; none before the program has started them. Starts nothing.

        A custom allocator has no statistics: then the devices that the program has started.
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
        """Returns whether the calling thread's stream is being captured into a graph: its work is not run now."""
        return self._is_capturing()

    def new_event(self, device: int) -> Any:
        """Returns an event that can be recorded on ``device`` any number of times."""
        del device
        return _kept(self._module.Event(enable_timing=True))

    def spare(self, device: int) -> list[Any]:
        """Returns the unused events of ``device``, to take from and to give back to, of all drivers of this process."""
        return _spare.setdefault((self.device_type, device), [])

    def recorder(self, device: int) -> Callable[[Any], None]:
        """Returns the function that has the current stream of ``device`` write its clock into an event when it gets there."""
        current_stream = self._module.current_stream

        def record(event: Any) -> None:
            event.record(current_stream(device))

        return record

    def stamp(self, device: int) -> Any:
        """Records an event on an idle stream of high priority, which the device reaches at once.

        It is free again once the next but one has been asked for.
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
        """Queues a copy of a number to pinned memory; returns what gives it once it has arrived, and None before."""
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
        """Lets the calling thread read events until the block ends, whatever other threads capture."""
        del device
        yield

    def query(self, event: Any) -> bool:
        """Returns whether the stream got to ``event``."""
        return bool(event.query())

    def elapsed_ns(self, begin: Any, end: Any) -> int:
        """Returns the nanoseconds on the device clock between two events that it got to, to half a microsecond."""
        return round(float(begin.elapsed_time(end)) * 1e6)

    def synchronize(self, device: int) -> None:
        """Waits until ``device`` has done everything."""
        self._module.synchronize(device)

    def hardware_ids(self) -> dict[str, str]:
        """Returns NVML UUID of every device in use."""
        return {}

    def memory(self) -> list[DeviceMemory]:
        """Returns the allocator values of every device in use. Nothing is reset: the peaks belong to the program.

        Nothing where the allocator is the program's own.
        """
        if self._started() is None:
            return []
        if hasattr(self._module, "driver_allocated_memory"):
            return self._memory_of_apple()
        known = [(device, self._stats(device)) for device in self.devices()]
        return [self._memory(device, stats) for device, stats in known if stats is not None]

    def taken(self) -> dict[str, int]:
        """Returns the bytes of every device in use that are taken, also by contexts, libraries and other processes."""
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
        """Counters of the allocator; None if it has none, as ``CUDAPluggableAllocator``."""
        read: Any = getattr(self._module, "memory_stats_as_nested_dict", None)
        with suppress(RuntimeError):
            return dict(read(device)) if read is not None else None
        return None

    def _in_use(self, every: Sequence[int]) -> tuple[int, ...]:
        del every
        return (self._current(),)

    def _started(self) -> Any:
        """Returns ``torch``, once the program has started these devices with it."""
        if self._torch is None:
            torch = self._find_torch()
            module = getattr(torch, self.device_type, None)  # half imported, it has no answer yet
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
        with suppress(AttributeError, RuntimeError):  # of a torch that was built without it
            return module is not None and module.current_allocated_memory() > 0  # Apple's has no other sign
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

    What is asked here on the training thread is what ``torch.cuda`` asks itself, past the objects that it makes on each call.

    Args:
        exchange: ``cuThreadExchangeStreamCaptureMode``. In any other mode than relaxed, a look at an event
            breaks a capture that goes on in another thread (CUDA programming guide, "prohibited and
            unhandled operations").
        library: the driver itself; None where events are read in Python.
        instance: name of the part of a device (MIG) that is this process's device 0; "" where none is set.
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
        """Returns what records an event on the current stream of ``device``."""
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
        """Returns how to read events from C. The context is torch's own, and lasts as long as the process."""
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
        """Exchanges the mode for relaxed, on a device that has a context: the service thread must not start one on device 0."""
        mode = ctypes.c_int(_RELAXED)
        self._exchange(ctypes.byref(mode))
        try:
            with self._torch.cuda.device(device):
                yield
        finally:
            self._exchange(ctypes.byref(mode))

    def hardware_ids(self) -> dict[str, str]:
        """Names as in ``memory``, and UUIDs as NVML has them; a torch that does not tell them has none.

        CUDA shows one part of a device (MIG) to a process at most, and nothing beside it.
        """
        torch = self._started()
        if torch is None:
            return {}
        if self._instance:
            return {f"cuda:{device}": self._instance for device in self.devices()}
        properties = {device: torch.cuda.get_device_properties(device) for device in self.devices()}
        return {f"cuda:{n}": f"GPU-{one.uuid}" for n, one in properties.items() if hasattr(one, "uuid")}

    def _context(self, device: int) -> int:
        """Returns the first argument of driver functions: the current context of ``device``."""
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
    """AMD's devices. Torch calls them ``cuda`` and has the same functions for them.

    Args:
        find_library: path of a library that torch has loaded, by the beginning of its name; "" for none.
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
        if path and not usable:  # reading an event could break a capture elsewhere
            self.why_untimed = f"device time and device memory are not read: {path} has no {_HIP[1]}"
        return usable


def _loaded_library(name: str) -> str:
    """Returns the path of a library that this process has loaded: a second copy would be another runtime."""
    with suppress(OSError), Path("/proc/self/maps").open() as maps:
        for line in maps:
            path = line.rstrip("\n").partition("/")[2]
            if Path(path).name.startswith(name):
                return f"/{path}"
    return ""


_spare: dict[tuple[str, int], list[Any]] = {}
"""By kind and number of the device. A forked child has no use for its parent's."""

os.register_at_fork(after_in_child=_spare.clear)


def _kept(event: Any) -> Any:
    """Keeps an event from being destroyed before the end of the process.

    Its destructor calls the driver with the lock let go, on whichever thread drops it last: in a forked child, where it
    must not be called; at the end of the interpreter; in a thread on another device, which gets a context by it. The
    one reference that is never given back keeps it from all of them. Those that are free are used again.
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(event))
    return event


def _internal(torch: Any, name: str) -> Any:
    """Returns an internal function of ``torch.cuda``: the public one creates objects, which costs the training thread time."""
    return getattr(torch._C, name)  # noqa: SLF001 - see above
