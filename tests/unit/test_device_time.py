"""Device time is taken by events at the edges, read later, and never waited for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

from otel_train.instrumentation.cuda_events import FIRST_ONE_IN, MOST_EVENTS, QUEUED_NS, WORTH, DeviceTimer
from otel_train.recording.events import Flag, Op, SourceKind, code
from otel_train.recording.recorder import Recorder
from otel_train.testing import FakeClock
from tests.support.device import AgentSide, FakeDriver, FakeEvent
from tests.support.flight import PrivateMemory
from tests.support.waiting import in_threads

MS = 10**6


class Reading(NamedTuple):
    """One occurrence, timed by the device."""

    name: str
    begun_ns: int
    ended_ns: int
    device_ns: int


class RunningClock(FakeClock):
    """No two readings are the same."""

    def __call__(self) -> int:
        return self.tick(1)


class Bench:
    """A recorder, a device and its timer, all on one clock."""

    def __init__(
        self, *devices: int, mode: str = "events", clock: FakeClock | None = None, one_in: int = 1
    ) -> None:
        self.clock = clock or FakeClock(1000 * MS)
        self.driver = FakeDriver(self.clock)
        self.driver.used = list(devices)
        self.recorder = Recorder(PrivateMemory(1 << 16), clock=self.clock)
        self.timer = DeviceTimer(self.recorder, self.driver, mode=mode, clock=self.clock)
        self.agent = AgentSide(self.timer, self.recorder)
        self.edge = self.timer.edge
        self.sources = {kind: self.recorder.source(kind, kind.name.lower()) for kind in (*SourceKind,)}
        self.seen = self.sampled = self.written = 0
        if devices:
            self.timer.poll()
        self.timer.steps.one_in = one_in

    def begin(self, kind: SourceKind, op: Op = Op.BEGIN, flags: int = 0) -> Bench:
        self.edge(code(op, self.sources[kind], flags))
        self.written += 1
        return self

    def end(self, kind: SourceKind, op: Op = Op.END, flags: int = 0) -> Bench:
        return self.begin(kind, op, flags)

    def stage(self, kind: SourceKind, *, host_ms: float = 0, device_ms: float = 0, device: int = 0) -> Bench:
        """The host takes its time, then queues a kernel."""
        self.begin(kind).spend(host_ms)
        return self.work(device_ms, device).end(kind)

    def spend(self, ms: float) -> Bench:
        """Time of the host."""
        self.clock.tick(ms=ms)
        return self

    def work(self, ms: float, device: int = 0) -> Bench:
        """A kernel in the queue of a device."""
        if ms:
            self.driver.work(int(ms * MS), device)
        return self

    def now(self, **state: Any) -> Bench:
        """The driver is in another state."""
        for name, value in state.items():
            setattr(self.driver, name, value)
        self.timer.poll()
        return self

    def step(self, *, device_ms: float) -> None:
        """10 ms, by the end of which the device has got through three stages."""
        self.stage(DATA, host_ms=1)
        for kind in (FORWARD, BACKWARD, OPTIMIZER):
            self.stage(kind, host_ms=0, device_ms=device_ms)
        self.clock.tick(ms=9)

    def take(self) -> list[Reading]:
        times = self.agent.take()
        if times is None:
            return []
        self.seen, self.sampled = self.seen + times.pace.seen, self.sampled + times.pace.sampled
        names = {number: kind.name.lower() for kind, number in self.sources.items()}
        columns = (times.source, times.begun_ns, times.ended_ns, times.device_ns)
        return [Reading(names[s], *rest) for s, *rest in zip(*(c.tolist() for c in columns), strict=True)]

    def measured(self) -> list[tuple[str, float]]:
        """Stage and milliseconds of everything the device got to."""
        return [(reading.name, reading.device_ns / MS) for reading in self.take()]

    def edges(self) -> list[tuple[int, int]]:
        """(time, code) of all that was written."""
        piece = self.recorder.main.ring.read(1 << 16)
        return list(zip(piece.times.tolist(), piece.codes.tolist(), strict=True))

    @property
    def free(self) -> int:
        """Events that are not in use, the one included that the next is counted from."""
        held = sum(map(len, self.timer._recorded))
        return sum(len(lane.free) for lane in self.timer._lanes) + held


DATA, FORWARD, BACKWARD, OPTIMIZER = (
    SourceKind.DATA, SourceKind.FORWARD, SourceKind.BACKWARD, SourceKind.OPTIMIZER,
)  # fmt: skip


STAGE = SourceKind.STAGE


@pytest.mark.parametrize(("devices", "program", "measured"), [
    # The host queues 5 ms of work in 1 ms and goes on: the stage took the device 5 ms.
    pytest.param([0], lambda b: b.stage(FORWARD, device_ms=5).spend(5), [("forward", 5.0)],
                 id="a stage gets the time of the device and not of the host"),
    # The host waits 4 ms for a batch, but the device is busy for 3 of them: 1 ms is exposed.
    pytest.param([0], lambda b: b.work(3).stage(DATA, host_ms=4).work(20).stage(DATA, host_ms=4).spend(20),
                 [("data", 1.0), ("data", 0.0)],
                 id="the device waits for data only when it has nothing left to do"),
    # An optimizer that raises fires no hook: its time is unknown, that of the others is not.
    pytest.param([0], lambda b: b.begin(STAGE).begin(OPTIMIZER).work(2).end(STAGE).spend(2), [("stage", 2.0)],
                 id="an end that never came is thrown away with the outer one"),
    # Such as of the stage that was open when the device came into use.
    pytest.param([0], lambda b: b.end(FORWARD).stage(BACKWARD, host_ms=1), [("backward", 1.0)],
                 id="an end without a begin is nothing"),
    # The update inside a scaler's step; a forward inside a user stage.
    pytest.param([0], lambda b: b.begin(STAGE).work(1).stage(FORWARD, device_ms=5).end(STAGE).spend(6),
                 [("forward", 5.0), ("stage", 6.0)], id="stages inside stages have their own time"),
    # An event inside a CUDA graph would be replayed with it, and reading it would be an error.
    pytest.param([0], lambda b: b.begin(STAGE).now(captures=True).stage(FORWARD, host_ms=1, device_ms=1)
                 .now(captures=False).end(STAGE).spend(1), [("stage", 2.0)], id="nothing is recorded into a graph"),
    # A model cut in two works as long as either half does, and starves only when both do.
    pytest.param([0, 1], lambda b: b.begin(FORWARD).work(2).work(5, 1).end(FORWARD).stage(DATA, host_ms=9),
                 [("forward", 5.0), ("data", 4.0)],
                 id="of several devices the last to finish counts, and for data the first to wait"),
    # Also when it does so in the middle of a stage.
    pytest.param([0], lambda b: b.begin(FORWARD).now(used=[0, 1]).work(2).work(9, 1).end(FORWARD)
                 .stage(BACKWARD, device_ms=1, device=1).spend(10), [("forward", 2.0), ("backward", 1.0)],
                 id="a device that comes into use later is timed from then on"),
    # Work on another stream neither hides nor lengthens it.
    pytest.param([0], lambda b: b.work(50).now(stream=7).stage(FORWARD, device_ms=3).spend(3), [("forward", 3.0)],
                 id="a stage is timed on the stream that is current"),
    # Less than nothing is no duration; zero would be a lie.
    pytest.param([0], lambda b: b.work(50).begin(FORWARD).now(stream=7).end(FORWARD).spend(50), [],
                 id="a stage that ends on a stream which is ahead is not measured"),
    # Between two pieces the device worked for others; one piece alone is not the stage.
    pytest.param([0], lambda b: b.begin(STAGE).end(STAGE, Op.SUSPEND).begin(STAGE, Op.RESUME).end(STAGE), [],
                 id="a stage that was suspended is not measured"),
    # The end of a loader is an ask and nothing more.
    pytest.param([0], lambda b: b.begin(DATA, flags=Flag.START).end(DATA, flags=Flag.START).begin(DATA)
                 .end(DATA, Op.STOP), [], id="an ask without a batch and a loader that starts are no occurrences"),
    pytest.param([0], lambda b: b.begin(FORWARD).spend(2).end(FORWARD, Op.FAIL), [("forward", 2.0)],
                 id="a stage that failed is measured like any other"),
])  # fmt: skip
def test_every_occurrence_has_its_own_device_time(
    devices: list[int], program: Callable[[Bench], Bench], measured: list[tuple[str, float]]
) -> None:
    """Neither less than the device took nor that of another stage; and no event is lost by it."""
    bench = program(Bench(*devices))

    assert bench.measured() == measured
    assert bench.free == len(bench.driver.made)
    assert len(bench.edges()) == bench.written


def test_what_the_device_has_not_done_yet_is_left_for_later() -> None:
    """A read that waited would be a synchronisation in disguise."""
    bench = Bench(0)
    bench.stage(FORWARD, host_ms=0, device_ms=5)
    bench.stage(BACKWARD, host_ms=0, device_ms=7)

    bench.clock.tick(ms=4)
    early = bench.measured()
    bench.clock.tick(ms=1)
    then = bench.measured()
    bench.clock.tick(ms=7)

    assert (early, then, bench.measured()) == ([], [("forward", 5.0)], [("backward", 7.0)])


def test_nothing_more_comes_of_what_ended_before_the_first_event_that_is_still_out() -> None:
    """The account may forget occurrences up to there; forgetting one too early would lose its time."""
    bench = Bench(0)
    bench.stage(FORWARD, host_ms=1, device_ms=5)
    out_since_ns = bench.clock()
    bench.clock.tick(ms=2)

    waiting = bench.agent.take()
    bench.clock.tick(ms=3)
    done = bench.agent.take()

    assert waiting is not None
    assert done is not None
    assert waiting.until_ns == out_since_ns
    assert done.until_ns == bench.clock() - QUEUED_NS  # the program may be queueing an event


def test_a_session_that_closes_while_an_event_is_recorded_leaves_no_entry_without_events() -> None:
    """An entry without events stands for a stamp."""

    class ClosingClock(FakeClock):
        """Another thread closes the session while the recording one reads the clock."""

        def __call__(self) -> int:
            if benches:
                benches[0].timer._active.clear()
            return super().__call__()

    benches: list[Bench] = []
    bench = Bench(0, clock=ClosingClock(1000 * MS))
    benches.append(bench)
    bench.begin(FORWARD)
    assert not bench.timer._reader._entries  # type: ignore[union-attr]  # of a driver without C
    assert len(bench.edges()) == 1


def test_host_times_lie_within_the_occurrence() -> None:
    """That is how a reading finds the occurrence that it belongs to."""
    bench = Bench(0, clock=RunningClock())
    bench.stage(FORWARD, host_ms=3, device_ms=1)
    bench.clock.tick(ms=5)

    (started, _), (ended, _) = bench.edges()
    [reading] = bench.take()

    assert started < reading.begun_ns < reading.ended_ns < ended


def test_ends_that_never_come_do_not_pile_up() -> None:
    """A loop that catches and goes on may lose one at every step, for days."""
    bench = Bench(0)

    for _ in range(1000):
        bench.begin(OPTIMIZER)
        bench.stage(FORWARD, host_ms=1)
        bench.take()

    assert len(bench.driver.made) < 100
    assert bench.timer.dropped == 0


def test_events_are_used_again() -> None:
    """A million steps must not make a million events."""
    bench = Bench(0)

    for _ in range(500):
        bench.stage(FORWARD, host_ms=1, device_ms=0.5)
        bench.stage(BACKWARD, host_ms=1, device_ms=0.5)
        bench.clock.tick(ms=1)
        assert len(bench.take()) == 2

    assert len(bench.driver.made) == 4 + 1  # one is held to count the next from


def test_when_all_events_are_in_use_edges_are_written_all_the_same() -> None:
    """A device that hangs, or steps of microseconds, must cost neither memory nor a record of the host's."""
    bench = Bench(0)
    bench.driver.hung = True
    stages = MOST_EVENTS

    for _ in range(stages):
        bench.stage(FORWARD, host_ms=0.001)

    assert len(bench.driver.made) == MOST_EVENTS
    assert bench.timer.dropped == 2 * stages - MOST_EVENTS
    assert len(bench.edges()) == 2 * stages
    assert bench.measured() == []


def test_with_one_device_out_of_events_the_others_keep_theirs() -> None:
    """An edge has an event on every device or on none."""
    bench = Bench(0, 1)
    bench.driver.hung = True
    for _ in range(MOST_EVENTS // 2):
        bench.stage(FORWARD, host_ms=0.001)
    first, second = bench.timer._lanes
    first.free.append(FakeEvent(0))

    bench.stage(FORWARD, host_ms=0.001)

    assert bench.timer.dropped == 2
    assert (len(first.free), len(second.free)) == (1, 0)


def test_nothing_is_read_by_a_thread_that_captures_a_graph() -> None:
    """``summary()`` in mid-capture: one look at an event would break the capture."""
    bench = Bench(0)
    bench.stage(FORWARD, host_ms=1)

    bench.driver.captures = True
    during = bench.measured()
    bench.driver.captures = False

    assert (during, bench.measured()) == ([], [("forward", 1.0)])


def test_events_are_read_on_a_device_that_is_in_use() -> None:
    """Asked on any other, CUDA would start a context there: half a gigabyte of device 0, for each rank."""
    bench = Bench(3)

    bench.stage(FORWARD, host_ms=1, device=3)
    bench.take()

    assert set(bench.driver.readings) == {3}


def in_another_thread(bench: Bench) -> None:
    in_threads(lambda: bench.stage(FORWARD, host_ms=1))


def mark(bench: Bench) -> None:
    bench.stage(SourceKind.CHECKPOINT, host_ms=1).edge(code(Op.MARK, bench.sources[SourceKind.MARK]))


def silence(bench: Bench) -> None:
    bench.recorder.silence()
    bench.stage(FORWARD, host_ms=1)


@pytest.mark.parametrize(("devices", "program", "written"), [
    # A program that never touches its GPU must not pay for it, nor have CUDA started.
    pytest.param([], lambda b: b.stage(FORWARD, host_ms=1).now(), [2], id="before a device is in use"),
    # What autograd's own threads do belongs to the backward that waits for it.
    pytest.param([0], in_another_thread, [0, 2], id="in other threads"),
    # Their device time is not published.
    pytest.param([0], mark, [3], id="for checkpoints and marks"),
    # A forked child has the parent's events and no CUDA.
    pytest.param([0], silence, [0], id="once the recorder has fallen silent"),
])  # fmt: skip
def test_no_event_is_recorded(
    devices: list[int], program: Callable[[Bench], Any], written: list[int]
) -> None:
    """The host's edges are written all the same."""
    bench = Bench(*devices)
    program(bench)

    assert bench.driver.records == 0
    assert [ring.ring.written for ring in bench.recorder.threads] == written
    assert devices or bench.agent.take() is None


@pytest.mark.parametrize("mode", ["events", "sync"])
def test_a_fault_of_the_driver_stops_at_the_timer(mode: str) -> None:
    """A dead device raises at the user's next call, not at ours; the host's records go on."""
    bench = Bench(0, mode=mode)
    bench.driver.fault = RuntimeError("device-side assert")

    bench.stage(FORWARD, host_ms=1)
    with pytest.raises(RuntimeError, match="device-side assert"):
        bench.timer.poll()
    bench.driver.fault = None
    bench.timer.poll()
    bench.stage(FORWARD, host_ms=1)

    assert (bench.driver.records, bench.driver.syncs) == (0, [])
    assert len(bench.edges()) == 4


def test_a_fault_while_reading_is_raised_once_and_ends_the_recording() -> None:
    """The agent counts it; training must not go on feeding a broken driver."""
    bench = Bench(0)
    bench.stage(FORWARD, host_ms=1)
    bench.driver.fault = RuntimeError("illegal address")

    with pytest.raises(RuntimeError, match="illegal address"):
        bench.agent.take()
    bench.stage(FORWARD, host_ms=1)

    assert bench.measured() == []
    assert bench.driver.records == 2


def test_after_the_stop_nothing_is_recorded_and_what_is_can_be_taken() -> None:
    """The last turn of a run takes what the device has done by then."""
    bench = Bench(0)
    bench.stage(FORWARD, host_ms=1)

    bench.timer.stop()
    bench.stage(BACKWARD, host_ms=1)
    bench.timer.poll()
    bench.stage(BACKWARD, host_ms=1)

    assert bench.measured() == [("forward", 1.0)]


def test_in_sync_mode_host_time_is_device_time() -> None:
    """Exact and slow: every edge waits until the device has done everything."""
    bench = Bench(0, 1, mode="sync")

    bench.stage(FORWARD, host_ms=1, device_ms=5)
    bench.stage(BACKWARD, host_ms=1, device_ms=7, device=1)

    times = [time for time, _ in bench.edges()]
    assert [(b - a) / MS for a, b in zip(times[::2], times[1::2], strict=True)] == [6.0, 8.0]
    assert bench.agent.take() is None


def test_sync_mode_waits_neither_in_a_graph_nor_for_an_idle_program() -> None:
    """A synchronisation during capture is an error; before CUDA is used it would start it."""
    idle, capturing = Bench(mode="sync"), Bench(0, mode="sync")
    capturing.driver.captures = True

    for bench in (idle, capturing):
        bench.stage(FORWARD, host_ms=1)

    assert idle.driver.syncs == capturing.driver.syncs == []


def test_where_it_is_off_the_recorder_keeps_its_own_edge() -> None:
    """Nothing is added to the hot path; without a device there is no timer."""
    clock = FakeClock()
    recorder = Recorder(PrivateMemory(64), clock=clock)

    timer = DeviceTimer(recorder, FakeDriver(clock), mode="off", clock=clock)
    timer.poll()

    assert timer.edge is recorder.edge
    assert AgentSide(timer, recorder).take() is None


def test_its_own_cost_is_known() -> None:
    """What the telemetry costs is a metric of the run, device events included."""
    bench = Bench(0)
    bench.driver.record_takes_ns = 2000

    for _ in range(1000):
        bench.stage(FORWARD, host_ms=0.001)
        bench.take()

    assert bench.timer.spent_ns == 2 * 1000 * 2000


def test_whole_steps_are_timed_or_none_of_their_stages() -> None:
    """Of every eight steps one; a stage of a step without the others would say nothing about the step."""
    bench = Bench(0, one_in=8)

    for _ in range(8 * 50):
        bench.step(device_ms=1)
        found = Counter(name for name, _ in bench.measured())
        assert set(found) in (set(), {"data", "forward", "backward", "optimizer"})
        assert len(set(found.values())) <= 1

    assert bench.seen == 400
    assert bench.sampled == pytest.approx(50, abs=2)
    assert len(bench.driver.made) < 40


def test_a_step_that_is_not_timed_is_no_loss() -> None:
    """A loss is what was wanted and is not there."""
    bench = Bench(0, one_in=8)

    for _ in range(100):
        bench.step(device_ms=1)

    assert bench.timer.dropped == 0
    assert len(bench.edges()) == 800


@pytest.mark.parametrize(("record_ns", "one_in"), [(1_000, 1), (30_000, 9), (90_000, 27)])
def test_recording_costs_three_thousandths_of_training_at_most(record_ns: int, one_in: int) -> None:
    """Steps of 10 ms with eight edges, and one to close a sample: as many of them are timed as that allows."""
    bench = Bench(0, one_in=FIRST_ONE_IN)
    bench.driver.record_takes_ns = record_ns
    begun_ns = bench.clock()

    for number in range(10_000):
        bench.step(device_ms=1)
        if number % 50 == 49:
            bench.take()
            bench.timer.poll()

    assert bench.timer.steps.one_in == pytest.approx(one_in, abs=1)
    assert bench.timer.spent_ns / (bench.clock() - begun_ns) <= 1.05 * WORTH
    assert bench.sampled >= 10_000 / (1.3 * one_in + 1)


def test_a_sample_is_of_all_kinds_of_steps() -> None:
    """A loop in which every second step takes three times as long: a fixed stride of two would see one kind alone."""
    bench = Bench(0, one_in=2)

    found = []
    for number in range(4000):
        bench.step(device_ms=1 if number % 2 else 3)
        found += [ms for name, ms in bench.measured() if name == "forward"]

    assert len(found) == pytest.approx(2000, abs=2)
    assert sum(found) / len(found) == pytest.approx(2, rel=0.1)


def test_a_loop_without_a_loader_has_steps_too() -> None:
    """From a forward after a backward or an update to the next."""
    bench = Bench(0)

    for _ in range(20):
        bench.stage(FORWARD, host_ms=1)
        bench.stage(FORWARD, host_ms=1)
        bench.stage(BACKWARD, host_ms=1)
        bench.stage(OPTIMIZER, host_ms=1)
    bench.measured()

    assert bench.seen == 20


def test_user_stages_alone_are_sampled_too() -> None:
    """Nothing tells where their steps begin, and they must not all be timed for that."""
    bench = Bench(0, one_in=10)

    for _ in range(10_000):
        bench.stage(SourceKind.STAGE, host_ms=1)
        bench.measured()

    assert bench.sampled / bench.seen == pytest.approx(0.1, abs=0.02)
    assert bench.driver.records < 0.2 * 20_000


def test_a_stage_that_ends_in_a_step_that_is_not_timed_has_no_time() -> None:
    """Nor does its begin meet the end of a later one of its kind."""
    bench = Bench(0)
    bench.step(device_ms=1)
    bench.begin(SourceKind.STAGE)
    bench.timer.steps.one_in = 1000
    for _ in range(3):
        bench.step(device_ms=1)
    bench.end(SourceKind.STAGE)
    bench.timer.steps.one_in = 1
    for _ in range(2000):
        bench.step(device_ms=1)
        bench.measured()
    bench.end(SourceKind.STAGE)
    bench.clock.tick(ms=10)

    assert "stage" not in [name for name, _ in bench.measured()]
    assert bench.free == len(bench.driver.made)
