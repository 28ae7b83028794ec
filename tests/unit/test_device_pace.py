"""Whether the device runs behind the host or waits for it is known from events and polls, without a wait."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest

from otel_train.aggregation.counters import Totals
from otel_train.aggregation.series_names import SeriesNames
from otel_train.bottleneck.device import MIN_MEASURED_STEPS, host_bound
from otel_train.datamodel import Finding, Pace
from otel_train.instrumentation.cuda_events import DeviceTimer
from otel_train.recording.events import Flag, Op, SourceKind, code
from otel_train.recording.recorder import Recorder
from otel_train.testing import FakeClock
from tests.support.device import AgentSide, FakeDriver, FakeEvent
from tests.support.flight import PrivateMemory

MS = 10**6
STEPS = 60
KERNELS = 5  # of a stage
COMPUTE = (SourceKind.FORWARD, SourceKind.BACKWARD, SourceKind.OPTIMIZER)
TRAINING = Flag.GRAD | Flag.TRAINING


class Loop:
    """A training loop on a simulated host and device, with an agent that polls now and then."""

    def __init__(self, *, one_in: int = 1) -> None:
        self.clock = FakeClock(1000 * MS)
        self.driver = FakeDriver(self.clock)
        self.driver.used = [0]
        self.recorder = Recorder(PrivateMemory(1 << 14), clock=self.clock)
        self.timer = DeviceTimer(self.recorder, self.driver, mode="events", clock=self.clock)
        self.agent = AgentSide(self.timer, self.recorder)
        self.timer.poll()
        self.timer.steps.one_in = one_in
        self.sources = {kind: self.recorder.source(kind, kind.name) for kind in SourceKind}
        self.pace = Pace()
        self.launches = 0

    def look(self) -> None:
        times = self.agent.take()
        assert times is not None
        self.pace = self.pace.plus(times.pace)

    def launch(self, host_us: int, device_us: int) -> None:
        """One kernel; at every seventh the agent polls."""
        self.clock.tick(host_us * 1000)
        self.driver.work(device_us * 1000)
        self.launches += 1
        if self.launches % 7 == 0:
            self.look()

    def stage(self, kind: SourceKind, work: Callable[[], None], flags: int = TRAINING) -> None:
        self.timer.edge(code(Op.BEGIN, self.sources[kind], flags if kind is SourceKind.FORWARD else 0))
        work()
        self.timer.edge(code(Op.END, self.sources[kind]))

    def step(self, host_us: int, device_us: int, *, after: Callable[[], None] = lambda: None) -> None:
        """Each stage launches kernels; ``after`` each stage the host does something else."""
        for kind in COMPUTE:
            self.stage(kind, partial(self._launch_all, host_us, device_us))
            after()

    def _launch_all(self, host_us: int, device_us: int) -> None:
        for _ in range(KERNELS):
            self.launch(host_us, device_us)

    def data(self, ms: float) -> None:
        self.stage(SourceKind.DATA, lambda: self.idle(ms))

    def idle(self, ms: float) -> None:
        """The host is busy with something that the device is not needed for; the agent goes on meanwhile."""
        for _ in range(int(ms)):
            self.clock.tick(ms=1)
            self.look()

    def wait(self, queued_ms: float = 0) -> None:
        """The host goes on when no more than so much is queued; the agent goes on meanwhile."""
        while (left_ns := self.driver.queued_ns() - queued_ms * MS) > 0:
            self.clock.tick(int(min(left_ns, 0.5 * MS)))
            self.look()

    @property
    def lasted_ns(self) -> int:
        return self.clock() - 1000 * MS

    @property
    def idle_ratio(self) -> float:
        """The truth, which events do not tell: the share of time in which the device did nothing."""
        return 1 - self.driver.worked_ns / self.lasted_ns

    def limit(self) -> Finding | None:
        self.look()
        return host_bound(self.pace, total_s=self.lasted_ns / 1e9)


def launches(*, device_us: int = 100, one_in: int = 1) -> Loop:
    """The host takes 1 ms for each launch, and is never waited for."""
    loop = Loop(one_in=one_in)
    for _ in range(STEPS * one_in):
        loop.step(1000, device_us)
    return loop


def waits() -> Loop:
    """The host is quick, and asks for the loss at the end of every step."""
    loop = Loop()
    for _ in range(STEPS):
        loop.step(50, 1000)
        loop.wait()
    return loop


def waits_after_each_stage() -> Loop:
    """The host is quick, and waits until the device has done each stage: every stage begins with nothing queued."""
    loop = Loop()
    for _ in range(STEPS):
        loop.step(50, 1000, after=loop.wait)
    return loop


def runs_ahead() -> Loop:
    """The host only waits when two steps are queued."""
    loop = Loop()
    for _ in range(STEPS):
        loop.step(50, 1000)
        loop.wait(queued_ms=30)
    return loop


def starves() -> Loop:
    """As quick, but each batch is 30 ms late."""
    loop = Loop()
    for _ in range(STEPS):
        loop.data(30)
        loop.step(50, 1000)
    return loop


def test_a_device_that_gets_each_kernel_as_it_is_launched_is_launch_bound() -> None:
    """The remedy is fewer launches, not a faster device."""
    loop = launches(device_us=400)
    found = loop.limit()

    assert loop.idle_ratio == pytest.approx(0.6)
    assert found is not None
    assert found.name == "launch_bound"
    assert found.evidence["most_lag_seconds"] < 0.0006
    assert found.evidence["device_steps"] >= STEPS - 5
    assert loop.idle_ratio <= found.share <= 1
    assert found.seconds == pytest.approx(found.share * loop.lasted_ns / 1e9)


def test_a_device_that_is_96_percent_busy_is_not_launch_bound() -> None:
    """It begins every stage as the host issues it, because the host waits after each; it ends them late."""
    loop = waits_after_each_stage()
    found = loop.limit()

    assert loop.idle_ratio == pytest.approx(0.01, abs=0.01)
    assert found is not None
    assert found.name == "sync_bound"
    assert loop.idle_ratio <= found.share <= 0.06
    assert found.seconds == pytest.approx(found.share * loop.lasted_ns / 1e9)


def test_a_sample_of_the_steps_tells_the_same() -> None:
    """Steps that are not timed are in no mean and in no share."""
    all_steps, sample = launches().limit(), launches(one_in=7).limit()

    assert all_steps is not None
    assert sample is not None
    assert sample.name == "launch_bound"
    assert sample.share == pytest.approx(all_steps.share, abs=0.01)
    assert sample.evidence["device_steps"] == pytest.approx(STEPS, abs=5)
    assert sample.seconds == pytest.approx(7 * all_steps.seconds, rel=0.01)


def test_a_host_that_waits_in_every_step_is_sync_bound() -> None:
    """The remedy is to take the ``.item()`` out."""
    loop = waits()
    found = loop.limit()

    assert found is not None
    assert found.name == "sync_bound"
    assert found.evidence["most_lag_seconds"] == pytest.approx(0.0143, rel=0.05)
    assert found.evidence["least_lag_seconds"] < 0.0005
    assert loop.idle_ratio <= found.share <= 0.05


def test_a_device_with_work_queued_is_limited_by_itself() -> None:
    """That is how it should be, and no finding about the host."""
    loop = runs_ahead()

    assert loop.limit() is None
    assert loop.pace.steps >= STEPS - 10
    assert loop.pace.least_lag_ns / loop.pace.steps > 20 * MS
    assert loop.pace.idle_ns < 0.01 * loop.pace.lasted_ns


def test_a_device_that_waits_for_data_waits_neither_for_launches_nor_does_the_host_wait_for_it() -> None:
    """The finding about it is another one."""
    loop = starves()

    assert loop.limit() is None
    assert loop.pace.steps >= STEPS - 5
    assert loop.idle_ratio > 0.4
    assert loop.pace.idle_ns < 0.02 * loop.pace.lasted_ns


def test_a_host_that_is_busy_elsewhere_is_not_said_to_launch_slowly() -> None:
    """Its time is in ``other``, which is a finding of its own."""
    loop = Loop()
    for _ in range(STEPS):
        loop.step(1000, 100)
        loop.idle(60)

    assert loop.limit() is None
    assert loop.pace.launch_idle_ns == pytest.approx(0.2 * loop.pace.lasted_ns, rel=0.05)
    assert loop.pace.idle_ns == pytest.approx(loop.pace.lasted_ns, rel=0.05)


def test_clocks_that_drift_apart_are_still_distinguished() -> None:
    """Two crystals differ by some 50 us in a second; after a minute a fixed offset is 4 ms off."""
    loop = Loop()
    honest = loop.driver.elapsed_ns
    loop.driver.elapsed_ns = lambda begin, end: round(honest(begin, end) * (1 + 5e-5))  # type: ignore[method-assign]
    for _ in range(STEPS * 20):
        loop.step(1000, 100)
        loop.clock.tick(ms=50)

    loop.look()

    assert loop.pace.steps >= STEPS * 19
    assert loop.pace.most_lag_ns / loop.pace.steps < MS


def test_evaluation_says_nothing_about_training() -> None:
    """A step without a forward with gradients is not one of training."""
    loop = Loop()
    for _ in range(STEPS):
        loop.data(1)
        loop.stage(SourceKind.FORWARD, lambda: loop.launch(1000, 100), flags=0)
    loop.look()

    assert loop.pace.seen == STEPS
    assert loop.pace.steps == 0


def test_a_stamp_tells_where_the_clocks_stand_however_long_ago_the_last_look_was() -> None:
    """One look after a long silence: the device got to everything at some time within the last second."""
    stamped, silent = Loop(), Loop()
    silent.driver.stamp = FakeEvent  # type: ignore[method-assign]  # never reached
    for loop in (stamped, silent):
        loop.data(1)
        loop.look()
        loop.clock.tick(s=20)  # two clocks may be 2 ms apart by now
        for _ in range(4):
            for kind in COMPUTE:
                loop.stage(kind, lambda: loop.driver.work(5 * MS))  # noqa: B023 - called at once
        loop.clock.tick(ms=1000)
        loop.look()

    assert stamped.pace.steps == 3
    assert stamped.pace.most_lag_ns == pytest.approx((15 + 30 + 45) * MS, rel=0.02)
    assert silent.pace.steps == 1  # that of 20 s: of it, 2 ms are nothing


def test_a_few_steps_are_no_evidence() -> None:
    """A finding that changes with every turn is worth nothing."""
    enough = Pace(MIN_MEASURED_STEPS, 10 * MS, 0, 0, 9 * MS, 9 * MS)

    assert host_bound(enough, total_s=1.0) is not None
    assert host_bound(enough._replace(steps=MIN_MEASURED_STEPS - 1), total_s=1.0) is None


def test_a_window_has_its_own_pace() -> None:
    """``reset_window`` forgets warm-up here, too."""
    totals = Totals(SeriesNames())
    totals.pace = Pace(steps=3, most_lag_ns=30)
    before = totals.copy()
    totals.pace = totals.pace.plus(Pace(steps=1, most_lag_ns=5))

    assert totals.since(before).pace == Pace(steps=1, most_lag_ns=5)
