"""Whatever the device's delay, its time is counted once and where it belongs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from otel_train.instrumentation.cuda_events import DeviceTimer
from otel_train.recording.events import Op, SourceKind, code
from otel_train.recording.recorder import Recorder
from otel_train.testing import FakeClock
from tests.support.device import AgentSide, FakeDriver
from tests.support.flight import PrivateMemory
from tests.support.runs import run_state

KINDS = (SourceKind.DATA, SourceKind.FORWARD, SourceKind.BACKWARD, SourceKind.OPTIMIZER)
STAGE_OF = ("data", "forward", "backward", "optimizer")

calls = st.tuples(
    st.integers(1, 50),  # the host's time
    st.integers(0, 200),  # work queued for the device
    st.sampled_from(["done", "raises", "captured"]),
)
steps = st.lists(
    st.tuples(calls, calls, calls, calls, st.sampled_from(["", "feed", "take", "both"])), max_size=30
)


class Loop:
    """A training loop on a simulated device, and what its account says of it."""

    def __init__(self) -> None:
        self.clock = FakeClock(1)
        self.driver = FakeDriver(self.clock)
        self.driver.used = [0]
        self.recorder = Recorder(PrivateMemory(1 << 10), clock=self.clock)
        self.sources = [self.recorder.source(kind, kind.name) for kind in KINDS]
        self.timer = DeviceTimer(self.recorder, self.driver, mode="events", clock=self.clock)
        self.agent = AgentSide(self.timer, self.recorder)
        self.timer.poll()
        self.timer.steps.one_in = 1
        self.run = run_state(stall_after_s=1e6)
        self.expected: dict[str, list[int]] = {stage: [] for stage in STAGE_OF}
        self.run.device.add(self.agent.take())

    def call(self, which: int, host_ns: int, device_ns: int, how: str) -> None:
        """One stage; an optimizer that raises fires no hook for its end."""
        self.driver.captures = how == "captured"
        self.timer.edge(code(Op.BEGIN, self.sources[which]))
        begun_ns = self.reached_ns()
        self.clock.tick(host_ns)
        if how != "captured":
            self.driver.work(device_ns)
        silent = how == "raises" and KINDS[which] is SourceKind.OPTIMIZER
        if not silent:
            failed_ask = how == "raises" and KINDS[which] is SourceKind.DATA
            if how != "captured" and not failed_ask:
                self.expected[STAGE_OF[which]].append(self.reached_ns() - begun_ns)
            self.timer.edge(code(Op.FAIL if how == "raises" else Op.END, self.sources[which]))
        self.driver.captures = False

    def reached_ns(self) -> int:
        return self.driver._reached_ns(0)

    def turn(self, what: str) -> None:
        """Part of a turn of the export loop, in any order."""
        if what in ("take", "both"):
            self.run.device.add(self.agent.take())
        if what in ("feed", "both"):
            self.run.learn(self.recorder.sources)
            piece = self.recorder.main.ring.read(1 << 10)
            self.run.feed(1, piece.times, piece.codes, name="main", main=True)

    def counted(self) -> dict[str, tuple[int, int]]:
        """Occurrences measured, and the device's time for them, by stage."""
        totals = self.run.totals
        found = dict.fromkeys(STAGE_OF, (0, 0))
        for series, key in enumerate(totals.names.keys[: len(totals.device)]):
            count, device_ns = found.get(key.stage, (0, 0))
            point = totals.device.point(series)
            if point.count:
                found[key.stage] = (count + point.count, device_ns + round(point.sum * 1e9))
        return found


@settings(max_examples=60)
@given(steps)
def test_every_reading_is_counted_once_and_for_its_own_stage(loop: Sequence[tuple[object, ...]]) -> None:
    """Late or early, with graphs, errors and lost hooks: none twice, none lost, none for another stage."""
    train = Loop()
    for *stages, turn in loop:
        for which, stage in enumerate(stages):
            train.call(which, *stage)  # type: ignore[misc]
        train.turn(str(turn))
    train.clock.tick(s=1)
    train.turn("both")
    train.run.close(train.clock())

    expected = {stage: (len(times), int(np.sum(times))) for stage, times in train.expected.items()}
    assert train.counted() == expected
