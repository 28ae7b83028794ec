"""What an accelerator's driver must do, and the driver for CUDA."""

from __future__ import annotations

import ctypes
import os
import sys
from contextlib import contextmanager
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from otel_train.datamodel import DeviceMemory
from otel_train.errors import imported

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager


class NativeDriver(NamedTuple):
    """What a thread in C needs to read events without the interpreter lock.

    Attributes:
        words: addresses of the driver's functions that make a context current, exchange the mode of captures, query an event,
            tell the time between two, and record one; then the context, an event for stamps and the stream that it is for.
        handle: gives the driver's own handle of an event.
    """

    words: tuple[int, ...]
    handle: Callable[[Any], int]


class DeviceDriver(Protocol):
    """An accelerator: ``CudaDriver``, or a made-up one with a clock of its own. Events are its own affair.

    Attributes:
        device_type: what torch calls devices of this kind, such as ``cuda``.
    """

    device_type: str

    def current(self) -> int:
        """Device that the calling thread uses where it names none."""

    def devices(self) -> Sequence[int]:
        """Devices that this process computes on; none before it does. Starts nothing."""

    def capturing(self) -> bool:
        """Whether the calling thread is capturing a graph: its work is not run now."""

    def new_event(self, device: int) -> Any:
        """An event that can be recorded on ``device`` any number of times."""

    def spare(self, device: int) -> list[Any]:
        """Events of ``device`` that nobody uses, to take from and to give back to: the next session has them again."""

    def recorder(self, device: int) -> Callable[[Any], None]:
        """What lets the current stream of ``device`` write its clock into an event when it gets there."""

    def stamp(self, device: int) -> Any:
        """An event on a stream where nothing else is: the device gets to it at once. None where it cannot be.

        It is free again once the next but one has been asked for.
        """

    def native(self, device: int) -> NativeDriver | None:
        """How to read events whose first is of ``device`` without Python; None where that cannot be."""

    def fetch(self, tensor: Any) -> Callable[[], float | None]:
        """Queue a copy of a number to the host; what gives it once it has arrived, and None before."""

    def reading(self, device: int) -> AbstractContextManager[None]:
        """A block in which the calling thread may read events, whatever other threads capture."""

    def query(self, event: Any) -> bool:
        """Whether the stream got there."""

    def elapsed_ns(self, begin: Any, end: Any) -> int:
        """Nanoseconds on the device clock between two events that it got to."""

    def synchronize(self, device: int) -> None:
        """Wait until ``device`` has done everything."""

    def hardware_ids(self) -> dict[str, str]:
        """Name and UUID of every device in use."""

    def memory(self) -> list[DeviceMemory]:
        """What the allocator of every device in use says."""

    def taken(self) -> dict[str, int]:
        """Bytes of every device in use that are taken, by whomever, as its driver says."""


_DEVICE_FILES = ("/dev/nvidiactl", "/dev/nvidia0", "/dev/dxg", "/dev/nvhost-gpu", "/dev/nvgpu")
"""Any of them is there where CUDA can run: Linux, WSL, Jetson. Asking CUDA itself would start it."""

_HIDDEN = ("", "-1")
_NATIVE = (
    "cuCtxSetCurrent",
    "cuThreadExchangeStreamCaptureMode",
    "cuEventQuery",
    "cuEventElapsedTime",
    "cuEventRecord",
)
_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED, cuda.h
_STRAY_SHARE = 0.05
"""A device on which less was ever allocated than this share of the busiest one's is not computed on: many
programs leave a context and a few tensors on device 0 by mistake."""


def cuda_driver(environ: Mapping[str, str], files: Sequence[str] = _DEVICE_FILES) -> CudaDriver | None:
    """The driver, or None on a machine where CUDA cannot be used.

    Args:
        environ: the process environment.
        files: paths of which at least one exists where there is a device.
    """
    if environ.get("CUDA_VISIBLE_DEVICES", "all").strip() in _HIDDEN or sys.platform != "linux":
        return None
    if not any(Path(file).exists() for file in files):
        return None
    try:
        library = ctypes.CDLL("libcuda.so.1")
        exchange = library.cuThreadExchangeStreamCaptureMode
    except (OSError, AttributeError):  # without it, reading an event could break a capture elsewhere
        return None
    return CudaDriver(exchange, library=library, instance=instance_of(environ))


class CudaDriver:
    """The CUDA devices of this process; see ``DeviceDriver``.

    Torch is imported by the program, never by us, and what is asked here on the training thread is what
    ``torch.cuda`` asks itself, past the objects that it makes on each call.

    Args:
        exchange: ``cuThreadExchangeStreamCaptureMode``. In any other mode than relaxed, a look at an event
            breaks a capture that goes on in another thread (CUDA programming guide, "prohibited and
            unhandled operations").
        find_torch: gives torch once the program has imported it.
        library: the driver itself; None where events are read in Python.
        instance: name of the part of a device (MIG) that is this process's device 0; "" where it is told none.
    """

    device_type = "cuda"

    def __init__(
        self,
        exchange: Callable[[Any], int],
        find_torch: Callable[[], Any] = lambda: imported("torch"),
        *,
        library: Any = None,
        instance: str = "",
    ) -> None:
        self._exchange = exchange
        self._library = library
        self._instance = instance
        self._find_torch = find_torch
        self._torch: Any = None
        self._is_capturing: Callable[[], bool] = bool
        self._current: Callable[[], int] = int
        self._slots: list[tuple[Any, Any]] = []
        self._stamps: dict[int, tuple[Any, list[Any]]] = {}

    def current(self) -> int:
        """What ``torch.cuda.current_device`` says; 0 before the program has started CUDA."""
        return self._current()

    def devices(self) -> tuple[int, ...]:
        """Devices with memory of ours in tensors; none before the program has started CUDA.

        An allocator of the program's own keeps no figures: then the devices are those that CUDA has been started on.
        """
        torch = self._started()
        if torch is None:
            return ()
        every = range(torch.cuda.device_count())
        stats = [_stats(torch, device) for device in every]
        if None in stats:
            has_context = _internal(torch, "_cuda_hasPrimaryContext")
            return tuple(device for device in every if has_context(device))
        peaks = [each["allocated_bytes"]["all"]["peak"] for each in stats if each is not None]
        least = max(1, max(peaks, default=0) * _STRAY_SHARE)
        return tuple(device for device, peak in enumerate(peaks) if peak >= least)

    def capturing(self) -> bool:
        """Whether the calling thread's stream is being captured into a graph."""
        return self._is_capturing()

    def new_event(self, device: int) -> Any:
        """An event with a clock. CUDA makes it on the device on which it is first recorded."""
        del device
        return _kept(self._torch.cuda.Event(enable_timing=True))

    def spare(self, device: int) -> list[Any]:
        """Of all drivers of this process: what they have given back."""
        return _spare.setdefault(device, [])

    def recorder(self, device: int) -> Callable[[Any], None]:
        """Recording on the current stream of ``device``."""
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

    def stamp(self, device: int) -> Any:
        """On a stream of high priority: work that is queued on others does not hold it up."""
        cuda = self._torch.cuda
        if device not in self._stamps:
            events = [self.new_event(device) for _ in range(2)]
            self._stamps[device] = cuda.Stream(device, priority=-1), events
        stream, events = self._stamps[device]
        events.reverse()
        events[0].record(stream)
        return events[0]

    def native(self, device: int) -> NativeDriver | None:
        """The context is torch's own, and lasts as long as the process."""
        library = self._library
        if not all(hasattr(library, name) for name in (*_NATIVE, "cuCtxGetCurrent")):
            return None
        context = ctypes.c_void_p()
        with self.reading(device):
            library.cuCtxGetCurrent(ctypes.byref(context))
            stamp = self.stamp(device)
        addresses = [ctypes.c_void_p.from_buffer(library[name]).value or 0 for name in _NATIVE]
        stream = self._stamps[device][0].cuda_stream
        return NativeDriver(
            (*addresses, context.value or 0, stamp.cuda_event, stream), attrgetter("cuda_event")
        )

    def fetch(self, tensor: Any) -> Callable[[], float | None]:
        """By way of pinned memory, which is used again: a copy to any other waits for the device."""
        torch = self._torch or self._started()
        if self._slots:
            slot, event = self._slots.pop()
        else:
            slot, event = torch.empty((), dtype=torch.float32, pin_memory=True), _kept(torch.cuda.Event())
        slot.copy_(tensor, non_blocking=True)
        event.record(torch.cuda.current_stream(tensor.device))
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
        """Relaxed, and on a device that has a context: the pump must not start one on device 0."""
        mode = ctypes.c_int(_RELAXED)
        self._exchange(ctypes.byref(mode))
        try:
            with self._torch.cuda.device(device):
                yield
        finally:
            self._exchange(ctypes.byref(mode))

    def query(self, event: Any) -> bool:
        """Whether the device got to ``event``."""
        return bool(event.query())

    def elapsed_ns(self, begin: Any, end: Any) -> int:
        """Nanoseconds between two events, to half a microsecond."""
        elapsed_ms: float = begin.elapsed_time(end)
        return round(elapsed_ms * 1e6)

    def synchronize(self, device: int) -> None:
        """Wait for everything on ``device``."""
        self._torch.cuda.synchronize(device)

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

    def memory(self) -> list[DeviceMemory]:
        """What the allocator says of every device in use. Nothing is reset: the peaks are the program's.

        Nothing where the allocator is the program's own.
        """
        torch = self._started()
        if torch is None:
            return []
        known = [(device, _stats(torch, device)) for device in self.devices()]
        return [self._memory(torch, device, stats) for device, stats in known if stats is not None]

    def taken(self) -> dict[str, int]:
        """What ``nvidia-smi`` shows: contexts, libraries and other processes are in it."""
        torch, found = self._started(), {}
        for device in self.devices() if torch is not None else ():
            with self.reading(device):
                free, total = torch.cuda.mem_get_info(device)
            found[f"cuda:{device}"] = total - free
        return found

    @staticmethod
    def _memory(torch: Any, device: int, stats: dict[str, Any]) -> DeviceMemory:
        allocated, reserved = stats["allocated_bytes"]["all"], stats["reserved_bytes"]["all"]
        share = getattr(torch.cuda, "get_per_process_memory_fraction", lambda _: 1.0)(device)
        properties = torch.cuda.get_device_properties(device)
        return DeviceMemory(
            f"cuda:{device}",
            allocated["current"],
            reserved["current"],
            int(properties.total_memory * share),
            allocated["peak"],
            reserved["peak"],
            stats["num_ooms"],
            stats["num_alloc_retries"],
            str(getattr(properties, "name", "")),
        )

    def _started(self) -> Any:
        """``torch``, once the program has started CUDA with it."""
        if self._torch is None:
            torch = self._find_torch()
            # Half imported, it has no answer yet.
            started = getattr(getattr(torch, "cuda", None), "is_initialized", bool)
            if not started() or not torch.version.cuda:
                return None
            self._is_capturing = _internal(torch, "_cuda_isCurrentStreamCapturing")
            self._current = _internal(torch, "_cuda_getDevice")
            self._torch = torch
        return self._torch


_spare: dict[int, list[Any]] = {}
"""By device. A forked child has no use for its parent's."""

if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_spare.clear)


def _kept(event: Any) -> Any:
    """An event that is never destroyed, but by the end of the process.

    Its destructor calls CUDA with the lock let go, on whichever thread drops it last: in a forked child, where CUDA
    must not be called; at the end of the interpreter; in a thread on another device, which gets a context by it. The
    one reference that nobody gives back keeps it from all of them. Those that are free are used again.
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(event))
    return event


def instance_of(environ: Mapping[str, str]) -> str:
    """The part of a device that the program may use; "" where it has whole ones, or is not told."""
    first = environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0].strip()
    return first if first.startswith("MIG-") else ""


def _stats(torch: Any, device: int) -> dict[str, Any] | None:
    """What the allocator has counted; None where ``CUDAPluggableAllocator`` has taken its place."""
    try:
        found: dict[str, Any] = torch.cuda.memory_stats_as_nested_dict(device)
    except RuntimeError:
        return None
    return found


def _internal(torch: Any, name: str) -> Any:
    """What ``torch.cuda`` itself calls: on the training thread the objects that it makes around count."""
    return getattr(torch._C, name)  # noqa: SLF001 - see above
