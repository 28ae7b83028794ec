"""A simulated accelerator: streams that work through a queue on a clock that the test moves."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from otel_train.accounting.device_times import DevicePairs
from otel_train.datamodel import DeviceMemory, DeviceTimes, Pace
from otel_train.instrumentation.accelerator import DeviceDriver
from otel_train.instrumentation.cuda_events import DeviceTimer
from otel_train.recording.recorder import Recorder
from otel_train.recording.shared_memory import DeviceRingReader
from otel_train.testing import FakeClock

NEVER_NS = 2**62


class AgentSide:
    """What an agent reads of a timer's devices, out of the memory of its recorder."""

    def __init__(self, timer: DeviceTimer, recorder: Recorder) -> None:
        self.pairs = DevicePairs(DeviceRingReader(recorder.device_ring), lambda: recorder.sources)
        self._timer = timer

    def take(self) -> DeviceTimes | None:
        """As ``RemoteRecording.device_times`` takes it, after a report."""
        self._timer.read()
        times = self.pairs.take()
        if times is None:
            return None
        seen, sampled = self._timer.take_steps()
        return times._replace(pace=times.pace.plus(Pace(seen=seen, sampled=sampled)))


class FakeEvent:
    """Holds the instant at which its stream got to it."""

    def __init__(self, device: int) -> None:
        self.device = device
        self.at_ns = NEVER_NS


class FakeDriver(DeviceDriver):
    """Devices that run behind the host, as real ones do.

    Work and events are queued on the current stream of a device; an event is reached when everything that
    was queued before it on that stream is done.
    """

    def __init__(self, clock: FakeClock) -> None:
        super().__init__("meta")  # torch moves tensors there on any machine, so that transfers can be real
        self.used: list[int] = []
        self.captures = False
        self.stream = 0
        self.hung = False
        self.record_takes_ns = 0
        self.taken_bytes = 0
        self.worked_ns = 0
        self.fault: Exception | None = None
        self.made: list[FakeEvent] = []
        self.records = 0
        self.syncs: list[int] = []
        self.readings: list[int] = []
        self._clock = clock
        self._busy_until_ns: dict[tuple[int, int], int] = {}

    def work(self, ns: int, device: int = 0) -> None:
        """Queue a kernel; the host goes on at once."""
        self._busy_until_ns[device, self.stream] = self._reached_ns(device) + ns
        self.worked_ns += ns

    def queued_ns(self, device: int = 0) -> int:
        """How long the current stream will be busy from now."""
        return self._reached_ns(device) - self._clock()

    def devices(self) -> list[int]:
        return self.used

    def capturing(self) -> bool:
        return self.captures

    def new_event(self, device: int) -> FakeEvent:
        self.made.append(FakeEvent(device))
        return self.made[-1]

    def spare(self, device: int) -> list[FakeEvent]:
        return []

    def recorder(self, device: int) -> Callable[[FakeEvent], None]:
        def record(event: FakeEvent) -> None:
            if self.fault is not None:
                raise self.fault
            assert event.device == device
            assert not self.captures, "recorded into a graph"
            event.at_ns = NEVER_NS if self.hung else self._reached_ns(device)
            self.records += 1
            self._clock.tick(self.record_takes_ns)

        return record

    def native(self, device: int) -> None:
        return

    def stamp(self, device: int) -> FakeEvent:
        event = FakeEvent(device)
        event.at_ns = NEVER_NS if self.hung else self._clock()
        return event

    def fetch(self, tensor: Any) -> Callable[[], float | None]:
        reached_ns = NEVER_NS if self.hung else self._reached_ns(0)
        return lambda: tensor.value if reached_ns <= self._clock() else None

    @contextmanager
    def reading(self, device: int) -> Iterator[None]:
        self.readings.append(device)
        yield

    def query(self, event: FakeEvent) -> bool:
        if self.fault is not None:
            raise self.fault
        assert self.readings, "read without being allowed to"
        return event.at_ns <= self._clock()

    def elapsed_ns(self, begin: FakeEvent, end: FakeEvent) -> int:
        assert self.query(begin)
        assert self.query(end)
        assert begin.device == end.device, "two devices have two clocks"
        return end.at_ns - begin.at_ns

    def synchronize(self, device: int) -> None:
        if self.fault is not None:
            raise self.fault
        self.syncs.append(device)
        done_ns = max((at for (of, _), at in self._busy_until_ns.items() if of == device), default=0)
        self._clock.now_ns = max(self._clock.now_ns, done_ns)

    def taken(self) -> dict[str, int]:
        if self.fault is not None:
            raise self.fault
        return {f"cuda:{device}": self.taken_bytes for device in self.used}

    def hardware_ids(self) -> dict[str, str]:
        return {f"cuda:{device}": f"GPU-{device}" for device in self.used}

    def memory(self) -> list[DeviceMemory]:
        if self.fault is not None:
            raise self.fault
        return [DeviceMemory(f"cuda:{device}", 3, 5, 80, 4, 6, 0, 1) for device in self.used]

    def _reached_ns(self, device: int) -> int:
        return max(self._clock(), self._busy_until_ns.get((device, self.stream), 0))
