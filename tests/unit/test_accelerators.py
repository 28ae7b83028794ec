"""Intel's, Apple's and AMD's devices by way of torch: what its module for them has is measured, what it lacks is said."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from otel_train import catalog as c
from otel_train.aggregation.metrics import MetricBuilder
from otel_train.collectors.hardware import AcceleratorReader
from otel_train.datamodel import DeviceMemory
from otel_train.instrumentation.accelerator import DeviceDriver, HipDriver, _loaded_library
from otel_train.instrumentation.cuda_events import DeviceTimer
from otel_train.instrumentation.manager import (
    APPLE_UNTIMED,
    find_driver,
    hip_driver,
    torch_driver,
)
from otel_train.recording.events import Op, SourceKind, code
from otel_train.recording.recorder import Recorder
from otel_train.testing import FakeClock
from tests.support.device import AgentSide
from tests.support.fake_cuda import compiled
from tests.support.flight import PrivateMemory

torch = pytest.importorskip("torch")
MS = 10**6


class Intel:
    """A torch with ``torch.xpu``, whose one stream works through a queue."""

    def __init__(self, clock: FakeClock, *peaks: int) -> None:
        self.started = True
        self.peaks = peaks
        self.clock = clock
        self.done_ns = 0
        self.streams: list[object] = []
        self.xpu = SimpleNamespace(
            is_initialized=lambda: self.started,
            device_count=lambda: len(peaks),
            current_device=lambda: 1,
            current_stream=lambda device: f"stream of {device}",
            Event=lambda enable_timing=False: IntelEvent(self, timed=enable_timing),
            Stream=lambda device, priority: "idle stream",
            memory_stats_as_nested_dict=self._stats,
            mem_get_info=lambda device: (300, 1000),
            get_device_properties=lambda _: SimpleNamespace(total_memory=1000, name="Intel Max 1550"),
        )

    def work(self, ns: int) -> None:
        self.done_ns = max(self.clock(), self.done_ns) + ns

    def _stats(self, device: int) -> dict[str, Any]:
        peak = self.peaks[device]
        of = {"all": {"current": peak // 2, "peak": peak}}
        return {"allocated_bytes": of, "reserved_bytes": of}


class IntelEvent:
    """Reached when what was queued before it is done; on the idle stream at once."""

    def __init__(self, torch: Intel, *, timed: bool) -> None:
        self._torch, self._timed = torch, timed
        self.at_ns = 0

    def record(self, stream: object) -> None:
        self._torch.streams.append(stream)
        now_ns = self._torch.clock()
        self.at_ns = now_ns if stream == "idle stream" else max(now_ns, self._torch.done_ns)

    def query(self) -> bool:
        return self.at_ns <= self._torch.clock()

    def elapsed_time(self, end: IntelEvent) -> float:
        assert self._timed
        assert self.query()
        assert end.query()
        return (end.at_ns - self.at_ns) / 1e6


def apple(allocated: int) -> Any:
    """A torch with ``torch.mps``, which counts no peaks."""
    module = SimpleNamespace(
        current_allocated_memory=lambda: allocated,
        driver_allocated_memory=lambda: 500,
        recommended_max_memory=lambda: 900,
    )
    return SimpleNamespace(mps=module)


def test_a_stage_on_intels_device_has_its_time() -> None:
    """By events of ``torch.xpu``, read later and never waited for."""
    clock = FakeClock(1000 * MS)
    intel = Intel(clock, 400)
    recorder = Recorder(PrivateMemory(1 << 10), clock=clock)
    timer = DeviceTimer(recorder, DeviceDriver("xpu", lambda: intel), mode="events", clock=clock)
    agent, source = AgentSide(timer, recorder), recorder.source(SourceKind.FORWARD, "model")
    timer.poll()
    timer.edge(code(Op.BEGIN, source))
    intel.work(5 * MS)
    timer.edge(code(Op.END, source))
    early = agent.take()
    clock.tick(ms=5)
    times = agent.take()

    assert early is not None
    assert times is not None
    assert (early.device_ns.tolist(), times.device_ns.tolist()) == ([], [5 * MS])
    assert intel.streams == ["stream of 0", "stream of 0", "idle stream"]


def test_intels_memory_is_read_and_a_device_with_next_to_nothing_on_it_is_not_computed_on() -> None:
    """Its allocator counts no failures: that is absent, and not zero."""
    driver = DeviceDriver("xpu", lambda: Intel(FakeClock(0), 10, 4000))

    assert driver.devices() == (1,)
    assert driver.memory() == [
        DeviceMemory("xpu:1", 2000, 2000, 1000, 4000, 4000, None, None, "Intel Max 1550")
    ]
    assert driver.taken() == {"xpu:1": 700}
    assert driver.hardware_ids() == {}


def test_a_torch_without_metrics_of_intels_memory_leaves_the_device_timed() -> None:
    """Torch 2.4 has none; an allocator of the program's own refuses."""
    for lacking in ("absent", "refused"):
        intel = Intel(FakeClock(0), 400, 400)
        if lacking == "absent":
            del intel.xpu.memory_stats_as_nested_dict, intel.xpu.mem_get_info
        else:
            intel.xpu.memory_stats_as_nested_dict = _refuse
        driver = DeviceDriver("xpu", lambda intel=intel: intel)  # type: ignore[misc]  # its default is the point

        assert driver.devices() == (1,)
        assert driver.memory() == []


def _refuse(device: int) -> dict[str, Any]:
    raise RuntimeError("XPUPluggableAllocator does not support getDeviceStats")


@pytest.mark.parametrize("kind", ["xpu", "mps"])
def test_a_program_that_computes_on_its_processor_has_no_devices(kind: str) -> None:
    """Starting one belongs to the program; a torch that is half imported, or built without it, is no fault."""
    intel = Intel(FakeClock(0), 400)
    intel.started = False

    for found in (intel, apple(0), None, SimpleNamespace(), torch):
        driver = DeviceDriver(kind, lambda found=found: found)  # type: ignore[misc]  # its default is the point

        assert driver.devices() == ()
        assert driver.memory() == []
        assert driver.taken() == {}
        assert driver.current() == 0


def test_apples_memory_is_read_and_its_time_is_not() -> None:
    """``torch.mps`` waits for the device before it tells the time between two events: that would change the run."""
    driver = DeviceDriver("mps", lambda: apple(300), why_untimed=APPLE_UNTIMED)
    clock = FakeClock(0)
    recorder = Recorder(PrivateMemory(64), clock=clock)
    timer = DeviceTimer(recorder, driver, mode="events", clock=clock)
    timer.poll()

    assert timer.edge is recorder.edge
    assert AgentSide(timer, recorder).take() is None
    assert timer.memory() == [DeviceMemory("mps:0", 300, 500, 900, None, None, None, None)]
    assert timer.ooms() == 0


def test_what_an_allocator_does_not_count_has_no_row() -> None:
    """Zero would say that it never failed."""
    memory = DeviceMemory("mps:0", 300, 500, 900, None, None, None, None)
    builder = MetricBuilder()
    AcceleratorReader(lambda: [memory], dict, dict).write(builder)
    names = {family.metric.name for family in builder.families()}

    assert {c.ACCELERATOR_MEMORY_ALLOCATED.name, c.ACCELERATOR_MEMORY_LIMIT.name} <= names
    assert names.isdisjoint({c.ACCELERATOR_MEMORY_ALLOCATED_PEAK.name, c.ACCELERATOR_MEMORY_OOMS.name})


@pytest.mark.parametrize(
    ("vendor", "built", "found"),
    [("0x8086", True, True), ("0x8086", None, True), ("0x8086", False, False), ("0x1002", True, False)],
)
def test_a_driver_for_intel_is_made_where_torch_may_use_one(
    tmp_path: Path, vendor: str, *, built: bool | None, found: bool
) -> None:
    """On others, and on processors with graphics of their own, nothing is added to the hot path."""
    device = tmp_path / "renderD128" / "device"
    device.mkdir(parents=True)
    (device / "vendor").write_text(f"{vendor}\n")
    imported = None if built is None else SimpleNamespace(_C=SimpleNamespace(_has_xpu=built))

    driver = torch_driver(("Linux", "x86_64"), str(tmp_path), lambda: imported)

    assert (driver is not None) == found
    assert driver is None or driver.device_type == "xpu"


def test_a_driver_for_apple_is_made_on_its_own_processors() -> None:
    """Older ones have no device that ``torch.mps`` is built for."""
    driver = torch_driver(("Darwin", "arm64"), "/no/such/folder", lambda: None)

    assert driver is not None
    assert (driver.device_type, driver.why_untimed) == ("mps", APPLE_UNTIMED)
    assert torch_driver(("Darwin", "x86_64"), "/no/such/folder", lambda: None) is None


@pytest.mark.parametrize(
    ("module", "names"),
    [
        ("xpu", "is_initialized device_count current_device current_stream Event Stream synchronize"),
        ("xpu", "memory_stats_as_nested_dict mem_get_info get_device_properties"),
        ("mps", "current_allocated_memory driver_allocated_memory recommended_max_memory"),
    ],
)
def test_what_the_driver_asks_of_torch_is_there(module: str, names: str) -> None:
    """A torch without one must be noticed here and not on a cluster."""
    found = getattr(torch, module)

    assert [name for name in names.split() if not hasattr(found, name)] == []


class Amd:
    """A torch that was built for AMD, as far as the driver asks before it uses events."""

    def __init__(self, hip: str | None = "6.4") -> None:
        self.version = SimpleNamespace(hip=hip, cuda=None)
        self.stamped: list[object] = []
        of = {"all": {"current": 200, "peak": 400}}
        stats = {"allocated_bytes": of, "reserved_bytes": of, "num_ooms": 1, "num_alloc_retries": 2}
        event = SimpleNamespace(cuda_event=77, record=self.stamped.append)
        self.cuda = SimpleNamespace(
            is_initialized=lambda: True,
            device_count=lambda: 1,
            memory_stats_as_nested_dict=lambda _: stats,
            get_device_properties=lambda _: SimpleNamespace(total_memory=1000, name="AMD Instinct MI300X"),
            Event=lambda enable_timing: event,
            Stream=lambda device, priority: SimpleNamespace(cuda_stream=88),
            device=lambda _: SimpleNamespace(__enter__=None),
        )
        self._C = SimpleNamespace(_cuda_isCurrentStreamCapturing=bool, _cuda_getDevice=int)


@pytest.fixture(scope="module")
def hip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fake runtime of AMD's."""
    return compiled(tmp_path_factory.mktemp("hip"), hip=True)


def test_amds_devices_are_timed_and_read_without_python_by_their_own_runtime(hip: Path) -> None:
    """The one that torch has loaded; a device is its own context there."""
    amd = Amd()
    driver = HipDriver(lambda: amd, lambda name: str(hip) if name == "libamdhip64.so" else "")
    amd.cuda.device = _Entered

    assert driver.devices() == (0,)
    assert (driver.device_type, driver.why_untimed, driver.hardware_ids()) == ("cuda", "", {})
    assert driver.memory() == [DeviceMemory("cuda:0", 200, 200, 1000, 400, 400, 1, 2, "AMD Instinct MI300X")]
    native = driver.native(3)
    assert native is not None
    query = ctypes.c_void_p.from_buffer(ctypes.CDLL(str(hip)).hipEventQuery).value
    assert (native.words[2], native.words[5:]) == (query, (3, 77, 88))


class _Entered:
    def __init__(self, device: int) -> None:
        self._device = device

    def __enter__(self) -> None:
        return

    def __exit__(self, *_: object) -> None:
        return


def test_a_runtime_that_lacks_a_function_is_said_and_not_used(library: Callable[[], str]) -> None:
    """Without it a look at an event could break a capture of the program's."""
    path = library()
    driver = HipDriver(Amd, lambda _: path)

    assert driver.devices() == ()
    assert path in driver.why_untimed
    assert HipDriver(lambda: Amd(hip=None), lambda _: path).devices() == ()


@pytest.fixture
def library() -> Callable[[], str]:
    """Path of a library that is no driver."""
    return lambda: _loaded_library("libc.so") or _loaded_library("ld-")


def test_a_library_is_found_where_this_process_has_loaded_it(library: Callable[[], str]) -> None:
    """A second copy of a runtime would have devices of its own."""
    assert Path(library()).exists()
    assert _loaded_library("libno_such_thing.so") == ""


def test_amds_driver_is_made_where_there_is_a_device_that_is_not_hidden(tmp_path: Path) -> None:
    """As people hide NVIDIA's."""
    assert hip_driver({}, str(tmp_path)) is not None
    assert hip_driver({"HIP_VISIBLE_DEVICES": ""}, str(tmp_path)) is None
    assert hip_driver({"ROCR_VISIBLE_DEVICES": "-1"}, str(tmp_path)) is None
    assert hip_driver({}, str(tmp_path / "none")) is None


def test_a_machine_without_any_of_them_has_no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is added to the hot path there."""
    for maker in ("cuda_driver", "hip_driver", "torch_driver"):
        monkeypatch.setattr(f"otel_train.instrumentation.manager.{maker}", lambda *_: None)

    assert find_driver({}) is None
