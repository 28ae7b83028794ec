"""Device time finds the occurrence it belongs to, and nothing is said of what was not measured."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from otel_train import catalog as c
from otel_train.accounting.types import TRAIN, StageCalls
from otel_train.aggregation.counters import MOST_HELD, DeviceAccount, DeviceTotals, StageTotals, Totals
from otel_train.aggregation.metrics import MetricBuilder, RunMetrics
from otel_train.aggregation.run_state import RunState
from otel_train.aggregation.series_names import Key, SeriesNames
from otel_train.bottleneck.rules import RuleInput, findings
from otel_train.collectors.hardware import AcceleratorReader
from otel_train.datamodel import DeviceTimes, Point
from otel_train.recording.events import Instrumented, SourceKind
from otel_train.testing import FakeClock
from tests.support.device import FakeDriver
from tests.support.edges import Tape
from tests.support.runs import KEEP_ALL, run_state

SOURCES = [
    Instrumented(SourceKind.DATA, "code"),
    Instrumented(SourceKind.FORWARD, "model"),
    Instrumented(SourceKind.BACKWARD, "backward"),
]
DATA, FORWARD, BACKWARD = range(3)
FOREVER = 2**60


def times_of(readings: Sequence[tuple[int, int, int, int]], until_ns: int = 0) -> DeviceTimes:
    """Readings as columns."""
    source, begun, ended, device = np.array(readings, dtype=np.int64).reshape(-1, 4).T
    return DeviceTimes(source, begun, ended, device, until_ns)


class Account:
    """An account and what it has counted."""

    def __init__(self) -> None:
        names = SeriesNames()
        names.learn(SOURCES)
        self.totals = Totals(names)
        self.account = DeviceAccount(self.totals)

    def add_calls(self, *calls: tuple[int, int, int], until_ns: int = 0) -> None:
        """Occurrences: source, start, end."""
        source, start, end = (np.array(column, dtype=np.int64) for column in zip(*calls, strict=True))
        zeros = np.zeros(len(calls), dtype=np.int64)
        ended = StageCalls(source, start, end - start, zeros, zeros, zeros + TRAIN, zeros)
        self.account.add_calls(ended, until_ns or int(end.max()))

    def add(self, *readings: tuple[int, int, int, int], until_ns: int = 0) -> None:
        """Readings: source, begin, end, device time."""
        self.account.add(times_of(readings, until_ns))

    def counted(self) -> dict[str, tuple[int, int]]:
        """Occurrences measured and their device time in ns, by stage."""
        return {
            row.stage: (count, round(self.totals.device.point(series).sum * 1e9))
            for series, row in enumerate(self.totals.names.keys)
            if series < len(self.totals.device) and (count := self.totals.device.count(series))
        }


@pytest.mark.parametrize("final_first", [True, False])
def test_a_reading_finds_its_occurrence_whichever_comes_first(*, final_first: bool) -> None:
    """The device may lag behind the host's account, and the account may be held back."""
    account = Account()
    account.add()

    def add_calls() -> None:
        account.add_calls((FORWARD, 100, 120), (BACKWARD, 120, 160))

    def add() -> None:
        account.add((FORWARD, 101, 119, 500), (BACKWARD, 121, 159, 900), until_ns=200)

    for act in (add_calls, add) if final_first else (add, add_calls):
        act()

    assert account.counted() == {"forward": (1, 500), "backward": (1, 900)}


@pytest.mark.parametrize(
    "reading", [(BACKWARD, 101, 119, 7), (FORWARD, 101, 219, 118)], ids=["other stage", "later end"]
)
def test_a_reading_that_is_of_no_one_occurrence_does_not_count(reading: tuple[int, int, int, int]) -> None:
    """A forward in a user stage lies within both; where events ran out, the next end closes the wrong one."""
    account = Account()
    account.add()

    account.add_calls((FORWARD, 100, 120), (FORWARD, 200, 220))
    account.add(reading, until_ns=300)

    assert account.counted() == {}


def test_of_several_readings_in_one_occurrence_the_first_is_its_own() -> None:
    """A model that calls itself is one occurrence; the inner call's time is part of the outer one's."""
    account = Account()
    account.add()

    account.add((FORWARD, 105, 110, 3), (FORWARD, 101, 119, 9))
    account.add_calls((FORWARD, 100, 120))

    assert account.counted() == {"forward": (1, 9)}


def test_what_will_never_be_matched_is_forgotten() -> None:
    """A run of weeks loses a reading now and then; none may be kept for ever."""
    account = Account()
    account.add()

    for turn in range(50):
        at = turn * 1000
        account.add((BACKWARD, at + 1, at + 2, 3), until_ns=at + 900)
        account.add_calls((FORWARD, at, at + 20), until_ns=at + 900)
    account.add(until_ns=10**9)

    assert len(account.account._calls.source) == 0
    assert len(account.account._times.source) <= 2


def test_memory_is_bounded_whatever_comes() -> None:
    """A hung device never tells; the account must not wait with everything in its hands."""
    account = Account()
    account.add()
    many = [(FORWARD, at, at + 1) for at in range(1000)]

    for _ in range(20):
        account.add_calls(*many)
        account.add(*[(BACKWARD, FOREVER + at, FOREVER + at, 1) for at in range(1000)])

    assert len(account.account._calls.source) <= MOST_HELD
    assert len(account.account._times.source) <= MOST_HELD


def test_without_a_device_nothing_is_held() -> None:
    """A run on the CPU pays nothing for what it does not have."""
    account = Account()

    account.account.add(None)
    account.add_calls((FORWARD, 100, 120))

    assert len(account.account._calls.source) == 0
    assert not account.account.measured


def test_a_window_has_its_own_device_time() -> None:
    """``reset_window`` starts every value of the summary anew."""
    account = Account()
    account.add()
    account.add_calls((FORWARD, 100, 120))
    account.add((FORWARD, 101, 119, 500))
    before = account.totals.copy()

    account.add_calls((FORWARD, 200, 220))
    account.add((FORWARD, 201, 219, 70))
    window = account.totals.since(before)

    assert window.device.count(0) == 1
    assert round(window.device.point(0).sum * 1e9) == 70
    assert before.device.count(0) == 1


def run_of(tape: Tape, readings: Sequence[tuple[int, int, int, int]], *, main: bool = True) -> RunState:
    """The account of a tape whose thread has been timed on a device."""
    run = run_state(rules=KEEP_ALL)
    run.learn(tape.sources)
    run.device.add(times_of(readings))
    run.feed(1, np.array(tape.times), np.array(tape.codes), name="main", main=main)
    run.close(tape.now_ns)
    return run


def three_steps() -> tuple[Tape, list[tuple[int, int, int, int]]]:
    """Steps of 62: ask 5, forward 20, backward 30, update 7. The device took 50 for each forward."""
    tape = Tape()
    for _ in range(3):
        tape.step()
    tape.stop()
    forward = tape.source(SourceKind.FORWARD, "model")
    return tape, [(forward, 62 * step + 6, 62 * step + 24, 50) for step in range(3)]


def test_another_thread_does_not_get_the_device_time_of_this_one() -> None:
    """Two threads call one model at the same time; only one of them is timed."""
    run = run_of(*three_steps(), main=False)

    assert [row.device for row in run.totals.rows()] == [None] * len(run.totals.rows())
    assert any(row.count for row in run.totals.rows())


def test_device_time_is_a_metric_of_its_own() -> None:
    """By stage, loader and phase, like host time; only of what was measured."""
    run = run_of(*three_steps())
    builder = MetricBuilder()

    RunMetrics(run, max_loaders=16, max_stages=8).write(builder)

    families = {family.metric.name: family for family in builder.families()}
    [point] = families[c.STAGE_DEVICE_DURATION.name].points
    assert dict(point.attributes) == {
        "train.stage": "forward", "train.loader": "code", "train.phase": "train",
    }  # fmt: skip
    assert point.count == 3
    assert point.sum == pytest.approx(150e-9)
    assert len(families[c.STAGE_DURATION.name].points) == 4


def test_a_kept_step_shows_device_time_where_it_is_known() -> None:
    """The slow step's trace says whether the host or the device was slow."""
    run = run_of(*three_steps())

    spans, _ = run.spans.drain()

    known = {span.name: span.attributes.get(c.STAGE_DEVICE_TIME.name) for span in spans}
    assert known["train.forward"] == pytest.approx(50e-9)
    assert known["train.backward"] is None


def row(name: str, host_s: float, device: DeviceTotals | None = None, loader: str = "code") -> StageTotals:
    return StageTotals(Key(name, loader, "train", ""), 100, 0, host_s, host_s, None, device)


def main_finding(*rows: StageTotals) -> tuple[str, float]:
    first = findings(RuleInput(rows, 100, {"productive": 1.0}, {}))[0]
    return first.name, round(first.share, 6)


def test_a_wait_that_the_device_does_not_notice_is_no_finding() -> None:
    """The host waits 40 % of the time for batches, but the device always has work queued."""
    hidden = DeviceTotals(100, 0.1, 0.001, 0.001)

    assert main_finding(row("data", 4.0), row("forward", 6.0)) == ("input_bound", 0.4)
    assert main_finding(row("data", 4.0, hidden), row("forward", 6.0))[0] == "compute_bound"


def test_the_exposed_wait_is_scaled_to_all_batches() -> None:
    """Steps are sampled; what was measured stands for the rest, if that is ten batches, and is no more than the wait."""
    sample, too_few = DeviceTotals(10, 0.3, 0.03, 0.03), DeviceTotals(9, 0.27, 0.03, 0.03)
    one_long_wait = DeviceTotals(10, 3.0, 0.03, 3.0)

    assert main_finding(row("data", 4.0, sample), row("forward", 6.0)) == ("input_bound", 0.3)
    assert main_finding(row("data", 4.0, too_few), row("forward", 6.0)) == ("input_bound", 0.4)
    assert main_finding(row("data", 4.0, one_long_wait), row("forward", 6.0)) == ("input_bound", 0.4)


def test_two_loaders_are_judged_by_one_clock() -> None:
    """One measured on the device and one on the host cannot be compared."""
    exposed = DeviceTotals(100, 1.2, 0.012, 0.012)
    measured, unmeasured = row("data", 4.0, exposed), row("data", 2.0, loader="prose")

    assert main_finding(measured, unmeasured, row("forward", 4.0)) == ("input_bound", 0.6)


def memory_of(driver: FakeDriver) -> dict[str, float]:
    builder = MetricBuilder()
    AcceleratorReader(driver.memory).write(builder)
    return {
        family.metric.name: point.value
        for family in builder.families()
        for point in family.points
        if isinstance(point, Point)
    }


def test_device_memory_is_exported_per_device() -> None:
    """What is allocated, reserved, allowed, and how close it came."""
    driver = FakeDriver(FakeClock())
    driver.used = [0]

    assert memory_of(driver) == {
        "train.accelerator.memory.allocated": 3,
        "train.accelerator.memory.reserved": 5,
        "train.accelerator.memory.limit": 80,
        "train.accelerator.memory.allocated_peak": 4,
        "train.accelerator.memory.reserved_peak": 6,
        "train.accelerator.memory.ooms": 0,
        "train.accelerator.memory.alloc_retries": 1,
    }


def test_without_a_device_there_is_no_memory_row() -> None:
    """Zero bytes of no device is not a reading."""
    assert memory_of(FakeDriver(FakeClock())) == {}


def test_a_device_that_fails_takes_no_other_reading_with_it() -> None:
    """The snapshot goes out without these rows, and after three faults they are not asked for again."""
    driver = FakeDriver(FakeClock())
    driver.fault = RuntimeError("lost")
    reader, builder = AcceleratorReader(driver.memory), MetricBuilder()

    for _ in range(5):
        reader.write(builder)

    assert builder.families() == ()
