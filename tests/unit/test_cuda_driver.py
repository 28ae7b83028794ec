"""CUDA is asked by torch's own means, and never started by us."""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from otel_train.datamodel import DeviceMemory
from otel_train.instrumentation.accelerator import CudaDriver
from otel_train.instrumentation.manager import cuda_driver, instance_of
from tests.support.fake_cuda import CONTEXT, compiled
from tests.support.zero_code import launched

torch = pytest.importorskip("torch")
needs_cuda_build = pytest.mark.skipif(not torch.version.cuda, reason="torch was built without CUDA")


class StandIn:
    """A torch of several devices, as far as the driver asks."""

    def __init__(self, *peaks: int) -> None:
        self.mode = 0
        self.device_now = 0
        self.started = True
        self.peaks = peaks
        self.stream = 0
        self.reached = True
        self.float32: Any = None
        self.empty: Any = None
        self.written: list[tuple[str, object]] = []
        self.contexts: tuple[int, ...] = ()
        self.counts = True
        self.version = SimpleNamespace(cuda="13.0")
        self.cuda = SimpleNamespace(
            is_initialized=lambda: self.started,
            device_count=lambda: len(peaks),
            current_stream=lambda device: f"stream {self.stream} of {device}",
            device=self._Device,
            memory_stats_as_nested_dict=self._stats,
            get_device_properties=lambda _: SimpleNamespace(
                total_memory=1000, uuid="1234-5678", name="NVIDIA H200"
            ),
            get_per_process_memory_fraction=lambda _: 0.5,
        )
        self._C = SimpleNamespace(
            _cuda_isCurrentStreamCapturing=lambda: False,
            _cuda_getDevice=lambda: self.device_now,
            _cuda_hasPrimaryContext=lambda device: device in self.contexts,
            _cuda_getCurrentRawStream=lambda _: self.stream,
            _CudaEventBase=SimpleNamespace(record=lambda event, stream: self.written.append((event, stream))),
        )

    def exchange(self, mode: Any) -> int:
        """As ``cuThreadExchangeStreamCaptureMode``: the old mode comes back in place of the new."""
        pointed = ctypes.cast(mode, ctypes.POINTER(ctypes.c_int))
        self.mode, pointed.contents.value = pointed.contents.value, self.mode
        return 0

    def _stats(self, device: int) -> dict[str, Any]:
        if not self.counts:
            raise RuntimeError("CUDAPluggableAllocator does not yet support getDeviceStats.")
        peak = self.peaks[device]
        of = {"all": {"current": peak // 2, "peak": peak}}
        return {"allocated_bytes": of, "reserved_bytes": of, "num_ooms": 1, "num_alloc_retries": 2}

    class _Device:
        entered: list[int] = []  # noqa: RUF012 - one list for all of them is the point

        def __init__(self, device: int) -> None:
            self._device = device

        def __enter__(self) -> None:
            self.entered.append(self._device)

        def __exit__(self, *_: object) -> None:
            self.entered.pop()


def driver_of(stand_in: StandIn) -> CudaDriver:
    return CudaDriver(stand_in.exchange, lambda: stand_in)


def test_the_device_of_a_call_that_names_none_is_the_current_one() -> None:
    """``x.cuda()`` goes there; a look at a program that has not started CUDA starts nothing."""
    stand_in = StandIn(400, 400)
    stand_in.started = False
    driver = driver_of(stand_in)

    assert driver.current() == 0
    stand_in.started, stand_in.device_now = True, 1
    assert driver.devices() == (0, 1)
    assert driver.current() == 1


@pytest.mark.parametrize("hidden", ["", "-1", " "])
def test_hidden_devices_are_no_devices(hidden: str, tmp_path: Path) -> None:
    """``CUDA_VISIBLE_DEVICES=`` is how people say: not the GPU."""
    assert cuda_driver({"CUDA_VISIBLE_DEVICES": hidden}, [str(tmp_path)]) is None


def test_a_machine_without_a_device_file_has_no_driver() -> None:
    """Asking CUDA whether there is a GPU would start it, and break a later fork."""
    assert cuda_driver({}, ["/dev/there/is/none"]) is None


def test_a_program_that_has_not_started_cuda_has_no_devices() -> None:
    """Starting it takes seconds and half a gigabyte, and belongs to the program."""
    driver = CudaDriver(lambda _: 0)

    assert driver.devices() == ()
    assert driver.memory() == []
    assert not driver.capturing()
    assert not torch.cuda.is_initialized()


@pytest.mark.parametrize("half_imported", [None, SimpleNamespace(), SimpleNamespace(cuda=SimpleNamespace())])
def test_a_torch_that_is_not_there_yet_is_no_fault(half_imported: object) -> None:
    """The service thread may look while the program is still importing it."""
    assert CudaDriver(lambda _: 0, lambda: half_imported).devices() == ()


@needs_cuda_build
@pytest.mark.parametrize(
    "name",
    [
        "_cuda_isCurrentStreamCapturing",
        "_cuda_getDevice",
        "_cuda_getCurrentRawStream",
        "_CudaEventBase.record",
    ],
)
def test_what_the_driver_asks_of_torch_is_there(name: str) -> None:
    """They are not public: a torch without them must be noticed here and not on a user's cluster."""
    found: Any = torch._C
    for part in name.split("."):
        found = getattr(found, part)

    assert callable(found)


@needs_cuda_build
def test_an_event_can_be_made_before_it_is_recorded() -> None:
    """CUDA makes it when it is first recorded, on the device of that stream."""
    event = CudaDriver(lambda _: 0, lambda: torch)
    event._module = torch.cuda

    assert event.query(event.new_event(0))
    assert not torch.cuda.is_initialized()


def test_devices_with_next_to_nothing_on_them_are_not_computed_on() -> None:
    """Many programs leave a context and a few tensors on device 0 by mistake."""
    assert driver_of(StandIn(10, 0, 4000, 3000)).devices() == (2, 3)
    assert driver_of(StandIn(0, 0)).devices() == ()


def test_events_go_to_the_stream_that_is_current() -> None:
    """Also after the program has changed it, and back."""
    stand_in = StandIn(1)
    driver = driver_of(stand_in)
    driver.devices()
    record = driver.recorder(0)

    for stream in (0, 7, 0):
        stand_in.stream = stream
        record(f"event {stream}")

    assert stand_in.written == [
        ("event 0", "stream 0 of 0"), ("event 7", "stream 7 of 0"), ("event 0", "stream 0 of 0"),
    ]  # fmt: skip


def test_reading_is_relaxed_and_leaves_the_thread_as_it_was() -> None:
    """In any other mode a look at an event breaks a capture of another thread."""
    stand_in = StandIn(1, 1, 1)
    driver = driver_of(stand_in)
    driver.devices()

    def read() -> None:
        with driver.reading(2):
            assert (stand_in.mode, stand_in._Device.entered) == (2, [2])
            raise KeyError

    with pytest.raises(KeyError):
        read()
    assert (stand_in.mode, stand_in._Device.entered) == (0, [])


def test_events_can_be_read_without_python(tmp_path: Path) -> None:
    """A thread in C needs the driver's functions, torch's context, and a stream where nothing else is."""
    stand_in = StandIn(1)
    stand_in.cuda.Event = lambda enable_timing: SimpleNamespace(cuda_event=77, record=stand_in.written.append)
    stand_in.cuda.Stream = lambda device, priority: SimpleNamespace(cuda_stream=88)
    library = ctypes.CDLL(str(compiled(tmp_path)))
    driver = CudaDriver(stand_in.exchange, lambda: stand_in, library=library)
    driver.devices()

    native = driver.native(0)

    assert native is not None
    assert native.words[3] == ctypes.c_void_p.from_buffer(library.cuEventElapsedTime).value
    assert native.words[5:] == (CONTEXT, 77, 88)
    assert native.handle(SimpleNamespace(cuda_event=99)) == 99
    assert CudaDriver(stand_in.exchange, lambda: stand_in, library=ctypes.CDLL(None)).native(0) is None


def test_memory_is_read_and_nothing_is_reset() -> None:
    """The peaks are the program's own: ``torch.cuda.max_memory_allocated()`` must still be right."""
    [memory] = driver_of(StandIn(400)).memory()

    assert memory == DeviceMemory("cuda:0", 200, 200, 500, 400, 400, 1, 2, "NVIDIA H200")


def test_a_number_is_fetched_by_way_of_pinned_memory_that_is_used_again() -> None:
    """Any other copy to the host waits for the device; pinning memory for each would, too."""
    stand_in = StandIn(400)
    slots: list[Slot] = []
    event = SimpleNamespace(record=lambda _: None, query=lambda: stand_in.reached)
    stand_in.reached = False
    stand_in.cuda.Event = lambda: event

    def empty(*_: Any, pin_memory: bool, **__: Any) -> Slot:
        slots.append(Slot(pinned=pin_memory))
        return slots[-1]

    stand_in.empty = empty
    driver = driver_of(stand_in)
    driver.devices()
    number = SimpleNamespace(value=2.5, device=SimpleNamespace(index=0))

    fetched = driver.fetch(number)
    early = fetched()
    stand_in.reached = True
    late = fetched()
    again = driver.fetch(SimpleNamespace(value=7.0, device=number.device))

    assert (early, late, fetched(), again()) == (None, 2.5, 2.5, 7.0)
    assert [(slot.pinned, slot.waited) for slot in slots] == [(True, False)]


class Slot:
    """Pinned memory for one number."""

    def __init__(self, *, pinned: bool) -> None:
        self.pinned, self.waited, self.value = pinned, False, 0.0

    def copy_(self, tensor: Any, *, non_blocking: bool = False) -> None:
        self.value, self.waited = tensor.value, self.waited or not non_blocking

    def __float__(self) -> float:
        return self.value


def test_an_allocator_of_the_programs_own_leaves_the_devices_timed() -> None:
    """``CUDAPluggableAllocator`` (RAPIDS, unified memory) counts nothing: only the metrics of memory are missing."""
    stand_in = StandIn(400, 400, 400)
    stand_in.counts, stand_in.contexts = False, (0, 2)
    driver = driver_of(stand_in)

    assert driver.devices() == (0, 2)
    assert driver.memory() == []


def test_a_part_of_a_device_has_the_name_that_the_program_was_given() -> None:
    """CUDA shows no other device to such a process."""
    stand_in = StandIn(100)
    whole = CudaDriver(stand_in.exchange, lambda: stand_in)
    part = CudaDriver(stand_in.exchange, lambda: stand_in, instance="MIG-1234")

    assert whole.hardware_ids() == {"cuda:0": "GPU-1234-5678"}
    assert part.hardware_ids() == {"cuda:0": "MIG-1234"}


@pytest.mark.parametrize(
    ("visible", "instance"), [("MIG-12,MIG-34", "MIG-12"), ("0,1", ""), ("GPU-12", ""), (None, "")]
)
def test_the_part_of_a_device_is_known_from_the_environment(visible: str | None, instance: str) -> None:
    """CUDA enumerates the first one alone."""
    environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}

    assert instance_of(environ) == instance


_ENDS = """
import gc, os, sys
from types import SimpleNamespace
from otel_train.instrumentation.accelerator import CudaDriver

class Event:
    def __init__(self, enable_timing=False):
        self.word = "ours"
    def __del__(self, write=os.write):  # the module may be gone
        write(1, f"destroyed {self.word}\\n".encode())

def use():
    driver = CudaDriver(lambda _: 0)
    driver._module = SimpleNamespace(Event=Event)
    spare = driver.spare(0)
    made = len(spare)
    events = [spare.pop() if spare else driver.new_event(0) for _ in range(3)]
    in_use, given_back = events[:1], events[1:]
    spare += given_back
    return made

theirs = Event()
theirs.word = "theirs"
os.write(1, f"{use()} spare\\n".encode())
gc.collect()
os.write(1, f"{use()} spare\\n".encode())
gc.collect()
if sys.argv[1] == "fork" and os.fork():
    os.wait()
    os._exit(0)
os.write(1, f"{use()} spare at the end\\n".encode())
del theirs
"""


@pytest.mark.parametrize(("how", "spare_at_the_end"), [("exit", 2), ("fork", 0)])
def test_our_events_are_never_destroyed_and_the_next_session_has_them(
    how: str, spare_at_the_end: int
) -> None:
    """Not with the driver, nor at the end of the interpreter, nor in a forked child: a destructor calls CUDA."""
    ended = launched([sys.executable, "-c", _ENDS, how])

    assert ended.stdout.splitlines() == [
        "0 spare", "2 spare", f"{spare_at_the_end} spare at the end", "destroyed theirs",
    ]  # fmt: skip
    assert (ended.returncode, ended.stderr) == (0, "")
