"""The promises of ``tests/unit/test_device_time.py``, on a real device."""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Callable, Iterator
from statistics import median
from typing import Any

import pytest

from otel_train.datamodel import system_clock
from otel_train.instrumentation.cuda_events import MOST_EVENTS, DeviceTimer
from otel_train.instrumentation.manager import NVIDIA_FILES, cuda_driver
from otel_train.recording.events import Op, SourceKind, code
from otel_train.recording.recorder import Recorder
from tests.support.device import AgentSide
from tests.support.flight import PrivateMemory

torch = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("default"),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

KINDS = (SourceKind.DATA, SourceKind.FORWARD, SourceKind.BACKWARD, SourceKind.OPTIMIZER)
BUDGET_US = 30.0
"""Per step of four stages. The budget is in docs/reference/overhead.md."""


class Bench:
    """A timer on the real driver, and work of a known kind for the device."""

    def __init__(self, mode: str = "events") -> None:
        self.held = [torch.randn(256, 256, device=f"cuda:{n}") for n in range(torch.cuda.device_count())]
        driver = cuda_driver(os.environ, NVIDIA_FILES)
        assert driver is not None
        self.driver = driver
        self.recorder = Recorder(PrivateMemory(1 << 16), clock=system_clock)
        self.sources = {kind: self.recorder.source(kind, kind.name.lower()) for kind in SourceKind}
        self.timer = DeviceTimer(self.recorder, driver, mode=mode, clock=system_clock)
        self.agent = AgentSide(self.timer, self.recorder)
        self.timer.poll()
        self.timer.steps.one_in = 1
        self.cycles_per_ms = _cycles_per_ms()

    def sleep(self, ms: float) -> None:
        """Keep the current stream busy without the host."""
        torch.cuda._sleep(int(ms * self.cycles_per_ms))

    def stage(self, kind: SourceKind, work: Callable[[], Any]) -> None:
        self.timer.edge(code(Op.BEGIN, self.sources[kind]))
        work()
        self.timer.edge(code(Op.END, self.sources[kind]))

    def measured(self) -> list[tuple[str, float]]:
        """Stage and milliseconds of everything the device got to."""
        times = self.agent.take()
        assert times is not None
        kinds = {number: kind.name.lower() for kind, number in self.sources.items()}
        return [
            (kinds[s], ns / 1e6)
            for s, ns in zip(times.source.tolist(), times.device_ns.tolist(), strict=True)
        ]

    def edges(self) -> list[int]:
        """Times of all edges written."""
        found: list[int] = self.recorder.main.ring.read(1 << 16).times.tolist()
        return found

    @property
    def made(self) -> int:
        """Events made on the first device and not in use."""
        return len(self.timer._lanes[0].free)


def _cycles_per_ms() -> float:
    torch.cuda._sleep(1_000_000)
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    torch.cuda._sleep(50_000_000)
    end.record()
    torch.cuda.synchronize()
    elapsed_ms: float = begin.elapsed_time(end)
    return 50_000_000 / elapsed_ms


@pytest.fixture(autouse=True)
def quiet_device() -> Iterator[None]:
    """Nothing of one test is still running in the next."""
    torch.cuda.synchronize()
    yield
    torch.cuda.synchronize()


def test_a_stage_gets_the_time_of_the_device_and_not_of_the_host() -> None:
    """The host queues 20 ms of work in microseconds and goes on."""
    bench = Bench()

    bench.stage(SourceKind.FORWARD, lambda: bench.sleep(20))
    torch.cuda.synchronize()

    [(stage, device_ms)] = bench.measured()
    begun_ns, ended_ns = bench.edges()
    assert stage == "forward"
    assert device_ms == pytest.approx(20, rel=0.1)
    assert (ended_ns - begun_ns) / 1e6 < 10


def test_what_the_device_has_not_done_yet_is_left_for_later() -> None:
    """A read that waited would be a synchronisation in disguise."""
    bench = Bench()
    bench.stage(SourceKind.FORWARD, lambda: bench.sleep(1))
    torch.cuda.synchronize()
    bench.stage(SourceKind.BACKWARD, lambda: bench.sleep(300))

    begun_s = time.perf_counter()
    early = [stage for stage, _ in bench.measured()]
    read_s = time.perf_counter() - begun_s
    torch.cuda.synchronize()

    assert (early, [stage for stage, _ in bench.measured()]) == (["forward"], ["backward"])
    assert read_s < 0.1


def test_events_are_read_while_a_call_holds_the_interpreter_lock() -> None:
    """A rank that hangs in a collective must still say what its device did."""
    bench = Bench()
    bench.stage(SourceKind.FORWARD, lambda: bench.sleep(20))
    ctypes.PyDLL(None).usleep(990_000)

    times = bench.agent.pairs.take()

    assert times is not None
    assert times.device_ns.tolist() == pytest.approx([20e6], rel=0.1)


def test_the_device_waits_for_data_only_when_it_has_nothing_left_to_do() -> None:
    """A wait of 30 ms behind 20 ms of queued work leaves the device idle for 10 ms."""
    bench = Bench()

    bench.sleep(20)
    bench.stage(SourceKind.DATA, lambda: time.sleep(0.03))
    bench.sleep(50)
    bench.stage(SourceKind.DATA, lambda: time.sleep(0.01))
    torch.cuda.synchronize()

    (_, exposed_ms), (_, hidden_ms) = bench.measured()
    assert exposed_ms == pytest.approx(10, abs=3)
    assert hidden_ms < 0.1


def test_events_are_used_again() -> None:
    """A million steps must not make a million events."""
    bench = Bench()

    for _ in range(200):
        for kind in KINDS:
            bench.stage(kind, lambda: bench.held[0] @ bench.held[0])
        torch.cuda.synchronize()
        assert len(bench.measured()) == 4

    assert bench.made == 8


def test_when_all_events_are_in_use_edges_are_written_all_the_same() -> None:
    """A device that lags far behind must cost neither memory nor a record of the host's."""
    bench = Bench()
    bench.sleep(500)

    for _ in range(MOST_EVENTS):
        bench.stage(SourceKind.FORWARD, lambda: None)

    torch.cuda.synchronize()
    assert len(bench.measured()) == MOST_EVENTS // 2
    assert bench.timer.dropped == MOST_EVENTS
    assert len(bench.edges()) == 2 * MOST_EVENTS


def test_a_graph_can_be_captured_while_events_are_read_and_holds_none_of_them() -> None:
    """In the default capture mode one careless look from another thread breaks the capture."""
    bench = Bench()
    matrix = bench.held[0]
    matrix @ matrix
    torch.cuda.synchronize()
    stop, faults = threading.Event(), []

    def poll() -> None:
        try:
            while not stop.is_set():
                bench.timer.poll()
                bench.agent.take()
                bench.timer.memory()
        except RuntimeError as fault:
            faults.append(fault)

    reader = threading.Thread(target=poll)
    reader.start()
    try:
        for _ in range(20):
            bench.stage(SourceKind.DATA, lambda: matrix @ matrix)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                for _ in range(100):
                    bench.stage(SourceKind.FORWARD, lambda: matrix @ matrix)
            bench.stage(SourceKind.BACKWARD, graph.replay)
        torch.cuda.synchronize()
    finally:
        stop.set()
        reader.join()

    assert faults == []
    assert bench.timer.dropped == 0
    assert len(bench.edges()) == 20 * (2 + 200 + 2)
    assert bench.made <= 4 * 20


def test_a_stage_is_timed_on_the_stream_that_is_current() -> None:
    """Work on another stream neither hides nor lengthens it."""
    bench = Bench()
    side = torch.cuda.Stream()
    bench.sleep(100)

    with torch.cuda.stream(side):
        bench.stage(SourceKind.FORWARD, lambda: bench.sleep(10))
    side.synchronize()
    torch.cuda.synchronize()

    [(_, device_ms)] = bench.measured()
    assert device_ms == pytest.approx(10, rel=0.1)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_of_several_devices_the_last_to_finish_counts() -> None:
    """A model cut in two works as long as either half does."""
    bench = Bench()

    def work() -> None:
        with torch.cuda.device(1):
            bench.sleep(20)

    bench.stage(SourceKind.FORWARD, work)
    for device in range(torch.cuda.device_count()):
        torch.cuda.synchronize(device)

    [(_, device_ms)] = bench.measured()
    assert device_ms == pytest.approx(20, rel=0.1)
    assert bench.timer.devices[:2] == (0, 1)


def test_sync_mode_agrees_with_events_when_nothing_overlaps() -> None:
    """Two clocks, one truth."""
    events, sync = Bench(), Bench("sync")
    for ms in (5, 10, 20):
        events.stage(SourceKind.FORWARD, lambda ms=ms: events.sleep(ms))  # type: ignore[misc]
        torch.cuda.synchronize()
        sync.stage(SourceKind.FORWARD, lambda ms=ms: sync.sleep(ms))  # type: ignore[misc]

    times = sync.edges()
    host_ms = [(b - a) / 1e6 for a, b in zip(times[::2], times[1::2], strict=True)]
    assert [ms for _, ms in events.measured()] == pytest.approx(host_ms, rel=0.02, abs=0.1)


def test_nothing_of_it_synchronises() -> None:
    """By torch's own account."""
    bench = Bench()

    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(50):
            for kind in KINDS:
                bench.stage(kind, lambda: bench.held[0] @ bench.held[0])
            bench.timer.poll()
            bench.agent.take()
            bench.timer.memory()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_device_memory_is_what_torch_says_and_its_peaks_stay_the_programs() -> None:
    """``torch.cuda.max_memory_allocated()`` is printed at the end of many a training script."""
    bench = Bench()
    held = torch.empty(64 << 20, dtype=torch.uint8, device="cuda:0")
    del held
    peak = torch.cuda.max_memory_allocated(0)

    memory = bench.timer.memory()[0]

    assert memory.device == "cuda:0"
    assert memory.allocated == torch.cuda.memory_allocated(0)
    assert memory.reserved == torch.cuda.memory_reserved(0)
    assert memory.limit == torch.cuda.get_device_properties(0).total_memory
    assert memory.allocated_peak == peak == torch.cuda.max_memory_allocated(0)


def test_four_stages_cost_less_than_the_budget() -> None:
    """Events and edges in a tight loop; ``make bench-gpu`` has the value inside a real one."""
    bench = Bench()
    spent_us = []

    for _ in range(500):
        begun_ns = time.perf_counter_ns()
        for kind in KINDS:
            bench.stage(kind, _nothing)
        spent_us.append((time.perf_counter_ns() - begun_ns) / 1e3)
        if len(spent_us) % 50 == 0:
            torch.cuda.synchronize()
            bench.agent.take()

    assert bench.timer.dropped == 0
    assert median(spent_us) < BUDGET_US


def _nothing() -> None:
    return
