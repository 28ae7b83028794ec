"""Events are read without the interpreter lock where the driver can be called so, and tell the same as with it."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from otel_train.datamodel import system_clock
from otel_train.instrumentation import cuda_events
from otel_train.instrumentation.cuda_events import DeviceTimer, NativeReader, PythonReader
from otel_train.recording.events import Op, SourceKind, code
from otel_train.recording.recorder import Recorder
from otel_train.recording.shared_memory import RECORDS, DeviceRing, DeviceRingReader, Record
from tests.support.device import AgentSide
from tests.support.fake_cuda import CONTEXT, FakeCuda, compiled
from tests.support.flight import PrivateMemory
from tests.support.waiting import until

MS = 10**6
RELAXED = 2
KINDS = (SourceKind.DATA, SourceKind.FORWARD, SourceKind.BACKWARD, SourceKind.OPTIMIZER)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The fake driver."""
    return compiled(tmp_path_factory.mktemp("driver"))


class Loop:
    """Stages on a fake device, and what an agent reads of them."""

    def __init__(self, library: Path, *, native: bool = True) -> None:
        self.driver = FakeCuda(library, native=native)
        self.recorder = Recorder(PrivateMemory(1 << 12), clock=system_clock)
        self.sources = [self.recorder.source(kind, kind.name) for kind in KINDS]
        self.timer = DeviceTimer(self.recorder, self.driver, mode="events", clock=system_clock)
        self.timer.poll()
        self.timer.steps.one_in = 1
        self.agent = AgentSide(self.timer, self.recorder)

    def stage(self, which: int, device_ns: int) -> None:
        self.timer.edge(code(Op.BEGIN, self.sources[which]))
        self.driver.work(device_ns)
        self.timer.edge(code(Op.END, self.sources[which]))

    def take(self) -> list[tuple[int, int]]:
        """Source and device time of every pair."""
        times = self.agent.take()
        assert times is not None
        return list(zip(times.source.tolist(), times.device_ns.tolist(), strict=True))

    def close(self) -> None:
        self.driver.library.set_fault(0)
        self.driver.library.set_hangs(0)
        self.timer.close()


@pytest.fixture
def loop(library: Path) -> Iterator[Loop]:
    """A loop whose events are read in C."""
    made = Loop(library)
    assert isinstance(made.timer._reader, NativeReader)
    yield made
    made.close()


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 5 * MS), st.integers(0, 8 * MS)), max_size=20))
def test_a_thread_in_c_tells_what_python_tells(library: Path, stages: list[tuple[int, int, int]]) -> None:
    """Every pair once, with the same time, whenever the device gets there."""
    taken = []
    for in_c in (True, False):
        loop, found = Loop(library, native=in_c), []
        for which, device_ns, pause_ns in stages:
            loop.stage(which, device_ns)
            loop.driver.go_on(pause_ns)
            found.append(loop.take())
        loop.driver.go_on(200 * MS)
        found.append(loop.take())
        assert not loop.driver.made or len(loop.timer._recorded) <= 1
        loop.close()
        taken.append(found)

    native, python = ([row for part in found for row in part] for found in taken)
    assert [len(part) for part in taken[0]] == [len(part) for part in taken[1]]
    assert [of for of, _ in native] == [of for of, _ in python]
    # CUDA tells float milliseconds.
    assert [ns for _, ns in native] == pytest.approx([ns for _, ns in python], abs=50)
    assert len(native) == len(stages)


def test_events_that_were_read_are_used_again(loop: Loop) -> None:
    """A million steps must not make a million events."""
    for _ in range(50):
        loop.stage(1, MS)
        loop.driver.go_on(MS)
        assert loop.take() == [(1, MS)]

    assert len(loop.driver.made) == 3 + 1  # one is held to count the next from, and one is for stamps


def test_the_thread_reads_in_torchs_context_and_breaks_no_capture(loop: Loop) -> None:
    """In any other mode than relaxed, a look at an event breaks a capture that goes on in another thread."""
    loop.take()

    assert loop.driver.library.mode_of_reader() == RELAXED
    assert loop.driver.library.context_of_reader() == CONTEXT


def test_a_stamp_tells_where_the_devices_clock_stands(loop: Loop) -> None:
    """Read before the edges that wait, once there is an edge to count from."""
    loop.stage(1, MS)
    loop.driver.go_on(MS)
    loop.take()
    reader = DeviceRingReader(loop.recorder.device_ring)
    reader.read()
    loop.stage(1, MS)
    loop.driver.go_on(3 * MS)
    loop.timer.read()
    records, _ = reader.read()

    [stamp, begin, _] = records[-3:]
    assert (stamp.devices, begin.devices) == (0, 1)
    assert stamp.since_ns <= stamp.reached_ns <= begin.reached_ns


def test_what_the_device_has_not_got_to_is_known_not_to_have_been_reached(loop: Loop) -> None:
    """That is what bounds its clock from below."""
    loop.stage(1, 5 * MS)
    loop.take()
    looked_ns = system_clock()
    loop.take()
    loop.driver.go_on(5 * MS)
    loop.take()

    records, until_ns = DeviceRingReader(loop.recorder.device_ring).read()
    [_, end] = [record for record in records if record.devices]
    assert end.host_ns < looked_ns < end.since_ns < end.reached_ns
    assert until_ns < end.reached_ns


def test_a_fault_of_the_driver_ends_the_timing_and_is_said_once(loop: Loop) -> None:
    """Training meets it at its own next call."""
    loop.stage(1, MS)
    loop.driver.library.set_fault(719)
    with pytest.raises(RuntimeError, match="answered 719"):
        loop.timer.read()
    loop.timer.read()
    made = len(loop.driver.made)
    loop.stage(1, MS)

    assert len(loop.driver.made) == made


def threads() -> int:
    """Of this process, those that Python does not know included."""
    return len(list(Path("/proc/self/task").iterdir()))


def test_after_the_close_no_thread_is_left(library: Path) -> None:
    """And its memory is free to go."""
    before = threads()
    loop = Loop(library)
    loop.take()
    during = threads()
    loop.close()

    until(lambda: threads() <= before, seconds=5)
    assert (during, threads()) == (before + 1, before)


def test_a_driver_that_does_not_answer_does_not_delay_the_close(loop: Loop) -> None:
    """The thread keeps its memory, and the events that it may be looking at are not used again."""
    loop.stage(1, MS)
    loop.driver.library.set_hangs(1)
    while not loop.driver.library.has_been_asked():
        loop.timer.read()
    begun_s = time.monotonic()
    reader = loop.timer._reader
    assert reader is not None
    loop.timer.close()

    assert time.monotonic() - begun_s < 5
    assert len(loop.timer._recorded) == 2
    loop.driver.library.set_hangs(0)
    assert reader.close()


def test_a_forked_child_leaves_the_thread_to_its_parent(loop: Loop) -> None:
    """It has the memory and no thread that would ever answer."""
    pid = os.fork()
    if pid == 0:
        begun_s = time.monotonic()
        reader = loop.timer._reader
        os._exit(reader is None or reader.close() or time.monotonic() - begun_s > 1)
    _, status = os.waitpid(pid, 0)
    loop.stage(2, MS)
    loop.driver.go_on(MS)

    assert os.waitstatus_to_exitcode(status) == 0
    assert loop.take() == [(2, MS)]


def test_without_the_extension_or_its_functions_events_are_read_in_python(
    library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then they wait while training hangs with the interpreter lock."""
    assert isinstance(Loop(library, native=False).timer._reader, PythonReader)
    monkeypatch.setattr(cuda_events, "EXTENSION", None)
    loop = Loop(library)
    loop.stage(1, MS)
    loop.driver.go_on(MS)

    assert isinstance(loop.timer._reader, PythonReader)
    assert loop.take() == [(1, MS)]


def test_records_that_are_overwritten_before_they_are_read_are_counted() -> None:
    """An agent that comes back after an hour must not take new records for old ones."""
    memory = PrivateMemory(64).device_ring
    ring, reader = DeviceRing(memory), DeviceRingReader(memory)
    for number in range(RECORDS + 10):
        ring.write(Record(1, number, 0, 0, number, number, (0,)))

    records, _ = reader.read()

    assert reader.missed == 11  # one may be half written
    assert [records[0].host_ns, records[-1].host_ns] == [11, RECORDS + 9]
    assert reader.read()[0] == []


def test_pairs_are_read_while_a_call_holds_the_interpreter_lock(loop: Loop) -> None:
    """Nothing of Python runs meanwhile, and right after it they are there."""
    loop.stage(1, 5 * MS)
    assert loop.take() == []
    loop.driver.holding.hold(1, 5 * MS)
    times = loop.agent.pairs.take()  # what an agent does: the thread is not asked to look

    assert times is not None
    assert times.device_ns.tolist() == [5 * MS]
