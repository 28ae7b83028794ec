"""Whether the device runs behind the host or waits for it is told from events and looks, without a wait."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import pytest

from otel_train.aggregate.names import Names
from otel_train.aggregate.totals import Totals
from otel_train.bottleneck.device import ENOUGH, host_limits
from otel_train.clock import Anchor
from otel_train.codes import Flag, Op, SourceKind, code
from otel_train.flight import FlightMemory
from otel_train.record.device_time import DeviceTimer
from otel_train.record.recorder import Recorder
from otel_train.records import Pace
from otel_train.testing import FakeClock
from tests.support.device import FakeDriver

if TYPE_CHECKING:
    from collections.abc import Callable

    from otel_train.records import Finding

MS = 10**6
STEPS = 60
COMPUTE = (SourceKind.FORWARD, SourceKind.BACKWARD, SourceKind.OPTIMIZER)
TRAINING = Flag.GRAD | Flag.TRAINING


class Loop:
    """A training loop on a made-up host and device, with a pump that looks now and then."""

    def __init__(self) -> None:
        self.clock = FakeClock(1000 * MS)
        self.driver = FakeDriver(self.clock)
        self.driver.used = [0]
        self.recorder = Recorder(FlightMemory(1 << 14, Anchor(0, 0)), clock=self.clock)
        self.timer = DeviceTimer(self.recorder, self.driver, mode="events", clock=self.clock)
        self.timer.look()
        self.sources = {kind: self.recorder.source(kind, kind.name) for kind in SourceKind}
        self.pace = Pace()
        self.launches = 0

    def look(self) -> None:
        times = self.timer.take()
        assert times is not None
        self.pace = self.pace.plus(times.pace)

    def launch(self, host_us: int, device_us: int) -> None:
        """One kernel; at every seventh the pump has its turn."""
        self.clock.tick(host_us * 1000)
        self.driver.work(device_us * 1000)
        self.launches += 1
        if self.launches % 7 == 0:
            self.look()

    def stage(self, kind: SourceKind, work: Callable[[], None], flags: int = TRAINING) -> None:
        self.timer.edge(code(Op.BEGIN, self.sources[kind], flags if kind is SourceKind.FORWARD else 0))
        work()
        self.timer.edge(code(Op.END, self.sources[kind]))

    def step(self, host_us: int, device_us: int) -> None:
        for kind in COMPUTE:
            self.stage(kind, partial(self._launch_all, host_us, device_us))

    def _launch_all(self, host_us: int, device_us: int) -> None:
        for _ in range(5):
            self.launch(host_us, device_us)

    def wait(self, queued_ms: float = 0) -> None:
        """The host goes on when no more than so much is queued; the pump goes on meanwhile."""
        while self.driver.queued_ns() > queued_ms * MS:
            self.clock.tick(int(0.5 * MS))
            self.look()

    def limit(self, compute_share: float = 0.9) -> Finding | None:
        self.look()
        lasted_s = (self.clock() - 1000 * MS) / 1e9
        return host_limits(self.pace, step_s=lasted_s / STEPS, total_s=lasted_s, compute_share=compute_share)


def launches() -> Loop:
    """The host takes 1 ms for each launch, the device 0.1 ms for what is launched."""
    loop = Loop()
    for _ in range(STEPS):
        loop.step(1000, 100)
    return loop


def waits() -> Loop:
    """The host is quick, and asks for the loss at the end of every step."""
    loop = Loop()
    for _ in range(STEPS):
        loop.step(50, 1000)
        loop.wait()
    return loop


def runs_ahead() -> Loop:
    """As above, but it only waits when two steps are queued."""
    loop = Loop()
    for _ in range(STEPS):
        loop.step(50, 1000)
        loop.wait(queued_ms=30)
    return loop


def test_a_device_that_gets_each_kernel_as_it_is_launched_is_launch_bound() -> None:
    """The remedy is fewer launches, not a faster device."""
    found = launches().limit()

    assert found is not None
    assert found.name == "launch_bound"
    assert found.evidence["update_lag_seconds"] < 0.001
    assert found.evidence["beginnings"] >= STEPS - 5


def test_a_host_that_waits_in_every_step_is_sync_bound() -> None:
    """The remedy is to take the ``.item()`` out."""
    found = waits().limit()

    assert found is not None
    assert found.name == "sync_bound"
    assert found.evidence["update_lag_seconds"] == pytest.approx(0.0095, rel=0.1)
    assert found.evidence["forward_lag_seconds"] < 0.0005
    assert found.share == pytest.approx(found.evidence["device_between_steps_ratio"])


def test_a_device_with_work_queued_is_limited_by_itself() -> None:
    """That is how it should be, and no finding about the host."""
    loop = runs_ahead()

    assert loop.limit() is None
    assert loop.pace.forwards >= STEPS - 10
    assert loop.pace.forward_lag_ns / loop.pace.forwards > 20 * MS


def test_a_host_that_is_busy_elsewhere_is_not_said_to_launch_slowly() -> None:
    """Its time is in ``other``, which is a finding of its own."""
    assert launches().limit(compute_share=0.2) is None


def test_clocks_that_drift_apart_are_still_told_apart() -> None:
    """Two crystals differ by some 50 us in a second; after a minute a fixed offset is 4 ms off."""
    loop = Loop()
    honest = loop.driver.elapsed_ns
    loop.driver.elapsed_ns = lambda begin, end: round(honest(begin, end) * (1 + 5e-5))  # type: ignore[method-assign]
    for _ in range(STEPS * 20):
        loop.step(1000, 100)
        loop.clock.tick(ms=50)

    loop.look()

    assert loop.pace.updates >= STEPS * 19
    assert loop.pace.update_lag_ns / loop.pace.updates < MS


def test_evaluation_says_nothing_about_training() -> None:
    """A forward without grad is no beginning of a step, and what lies before it is no gap."""
    loop = Loop()
    for _ in range(STEPS):
        loop.stage(SourceKind.FORWARD, lambda: loop.launch(1000, 100), flags=0)
    loop.look()

    assert loop.pace == Pace()


def test_where_it_is_not_known_where_the_clocks_stand_nothing_is_said() -> None:
    """One look after a long silence bounds a lag of 15 ms to within 1000."""
    loop = Loop()
    for kind in COMPUTE:
        loop.stage(kind, lambda: loop.driver.work(5 * MS))
    loop.clock.tick(ms=1000)
    loop.look()

    assert loop.pace == Pace()


@pytest.mark.parametrize("few", ["forwards", "backwards", "updates"])
def test_a_few_beginnings_are_no_evidence(few: str) -> None:
    """A verdict that changes with every turn is worth nothing."""
    enough = Pace(forwards=ENOUGH, backwards=ENOUGH, updates=ENOUGH)

    assert host_limits(enough, step_s=0.01, total_s=1.0, compute_share=1.0) is not None
    assert (
        host_limits(enough._replace(**{few: ENOUGH - 1}), step_s=0.01, total_s=1.0, compute_share=1.0) is None
    )


def test_a_window_has_its_own_pace() -> None:
    """``reset_window`` forgets warm-up here, too."""
    totals = Totals(Names())
    totals.pace = Pace(forwards=3, forward_lag_ns=30)
    before = totals.copy()
    totals.pace = totals.pace.plus(Pace(forwards=1, forward_lag_ns=5))

    assert totals.since(before).pace == Pace(forwards=1, forward_lag_ns=5)
