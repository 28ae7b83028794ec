"""The memory that survives the process."""

from __future__ import annotations

import json
import os
import shutil
import sys
import threading
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from otel_train.agent.ring_reader import SharedRings
from otel_train.datamodel import Anchor
from otel_train.errors import RunDirectoryError
from otel_train.exporters.background_queue import DiskQueue
from otel_train.files import file_system
from otel_train.recording.events import EDGE_WORDS, Instrumented, SourceKind
from otel_train.recording.flight_recorder import flight_in, read_flight
from otel_train.recording.recorder import Recorder
from otel_train.recording.shared_memory import SIDE_RINGS, RingEntry
from otel_train.testing import FakeClock
from tests.support.flight import PrivateMemory
from tests.support.waiting import in_threads

ANCHOR = Anchor(5_000, 100)


def write(memory: PrivateMemory, codes: range) -> Recorder:
    """Edges with these codes, 1 ns apart; what recorded them."""
    clock = FakeClock(100)
    recorder = Recorder(memory, clock=clock)
    for code in codes:
        recorder.edge(code)
        clock.tick(1)
    return recorder


def test_a_file_says_who_wrote_what_and_when(tmp_path: Path) -> None:
    """It is all that is left after SIGKILL."""
    path = tmp_path / "flight.bin"
    memory = PrivateMemory(16, ANCHOR, path)
    recorder = write(memory, range(1, 41))
    recorder.set_identity({"run_id": "r1"})
    recorder.source(SourceKind.DATA, "code", "train")
    memory.poll(7_000)

    flight = read_flight(path)

    assert (flight.pid, flight.anchor_unix_ns, flight.anchor_clock_ns, flight.polled_unix_ns) == (
        os.getpid(), 5_000, 100, 7_000
    )  # fmt: skip
    assert flight.identity == {"run_id": "r1"}
    assert flight.sources == (Instrumented(SourceKind.DATA, "code", "train"),)
    (thread,) = flight.threads
    assert thread.codes.tolist() == list(range(26, 41))
    assert thread.times.tolist() == list(range(125, 140))
    assert thread.entry.written == 40
    memory.close()


def test_edges_that_the_agent_never_read_are_found_by_their_times(tmp_path: Path) -> None:
    """The agent died before it wrote how far it had come, 20 of 23 edges."""
    path = tmp_path / "flight.bin"
    memory = PrivateMemory(16, ANCHOR, path)
    write(memory, range(1, 24))
    memory.progress(0)[0] = 20 * EDGE_WORDS

    assert read_flight(path).threads[0].codes.tolist() == list(range(9, 24))
    memory.close()


def test_what_was_written_while_the_file_was_read_is_no_gap(tmp_path: Path) -> None:
    """Of 16 edges 6 came between the two readings, and the agent read them: the 10 before are all there are, none is missing."""
    path = tmp_path / "flight.bin"
    clock = FakeClock(100)
    memory = PrivateMemory(64, ANCHOR, path)
    recorder = Recorder(memory, clock=clock)
    contents = []
    for code in range(1, 17):
        recorder.edge(code)
        clock.tick(1)
        if code in {10, 16}:
            memory.poll(7_000)
            contents.append(path.read_bytes())
    memory.close()

    (thread,) = flight_in(*contents).threads

    assert thread.codes.tolist() == list(range(1, 11))
    assert thread.entry.written == 10


@pytest.mark.parametrize("edges", [0, 3, 16, 17, 40])
def test_a_process_that_died_before_the_first_poll_of_the_agent_is_readable(
    tmp_path: Path, edges: int
) -> None:
    """The first second of a run is when most of them die."""
    memory = PrivateMemory(16, ANCHOR, tmp_path / "flight.bin")
    write(memory, range(1, edges + 1))
    memory.progress(0)[0] = 0

    found = [
        code for thread in read_flight(tmp_path / "flight.bin").threads for code in thread.codes.tolist()
    ]

    assert found == list(range(max(1, edges - 14), edges + 1))
    memory.close()


def test_names_are_whole_after_every_change(tmp_path: Path) -> None:
    """The two halves are written in turn."""
    memory = PrivateMemory(16, ANCHOR, tmp_path / "flight.bin")
    recorder = Recorder(memory, clock=FakeClock(1))
    for number in range(5):
        recorder.source(SourceKind.STAGE, f"stage {number}")

        sources = read_flight(tmp_path / "flight.bin").sources

        assert [source.name for source in sources] == [f"stage {n}" for n in range(number + 1)]
    memory.close()


def test_names_that_do_not_fit_leave_the_older_ones(tmp_path: Path) -> None:
    """Half a table is worse than an older one."""
    memory = PrivateMemory(16, ANCHOR, tmp_path / "flight.bin")
    memory.write_names(json.dumps({"sources": [[0, "code", ""]]}))
    memory.write_names(json.dumps({"sources": [[0, "x" * 200_000, ""]]}))

    assert read_flight(tmp_path / "flight.bin").sources == (Instrumented(SourceKind.DATA, "code"),)
    memory.close()


def test_a_thread_name_that_is_no_utf8_does_not_raise_in_its_thread(tmp_path: Path) -> None:
    """The name of a file with other bytes, for example, which a thread reads."""
    memory = PrivateMemory(16, ANCHOR, tmp_path / "flight.bin")
    memory.write_entry(0, RingEntry(1, 42, 0, "read \udcff"))

    assert [name for *_, name, _ in memory.entries()] == ["read ?"]
    memory.close()


def test_a_long_thread_name_is_cut(tmp_path: Path) -> None:
    """The place in the directory is fixed."""
    memory = PrivateMemory(16, ANCHOR, tmp_path / "flight.bin")
    memory.write_entry(0, RingEntry(1, 42, 0, "é" * 100))

    (thread,) = read_flight(tmp_path / "flight.bin").threads

    assert thread.entry.thread.startswith("é" * 40)
    assert thread.entry.ident == 42
    memory.close()


def test_a_disk_that_was_full_gets_all_of_the_last_steps_once_it_accepts_writes(
    small_disk: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Readers take the heartbeat from that file: the run would be silent for them, and its last steps old ones."""
    memory, clock = PrivateMemory(1 << 12, ANCHOR), FakeClock(100)
    recorder = Recorder(memory, clock=clock)
    rings = SharedRings(memory.map, small_disk / "flight.bin")
    fill = small_disk / "fill"
    with suppress(OSError), fill.open("wb", buffering=0) as file:
        while file.write(bytes(1 << 16)):
            pass

    for number in range(1, 1001):
        recorder.edge(number)
        clock.tick(1)
        if number % 100 == 0:
            rings.copy_now(number)
    assert rings.guard.faults == 10
    [line] = caplog.messages
    assert (
        "No space left on device; until it can be written, which is tried every second, live progress" in line
    )
    assert "are missing: free space for the run directory, or raise ulimit -f, or " in line

    fill.unlink()
    rings.steps = lambda: (12, 1050)
    rings.copy_now(7_000)
    flight = read_flight(small_disk / "flight.bin")
    assert flight.polled_unix_ns == 7_000
    assert (flight.steps, flight.step_ended_ns) == (12, 1050)
    assert flight.threads[0].codes.tolist() == list(range(1, 1001))
    rings.close()


def test_a_flight_file_that_was_removed_is_written_again_as_a_whole(tmp_path: Path) -> None:
    """Scratch disks are cleaned while jobs run; a kill after that must still show the last steps."""
    memory, clock = PrivateMemory(1 << 12, ANCHOR), FakeClock(100)
    recorder = Recorder(memory, clock=clock)
    path = tmp_path / "run" / "rank0" / "flight.bin"
    path.parent.mkdir(parents=True)
    rings = SharedRings(memory.map, path)
    recorder.edge(1)
    rings.copy_now(6_000)

    shutil.rmtree(tmp_path / "run")
    clock.tick(1)
    recorder.edge(2)
    rings.copy_now(7_000)

    assert read_flight(path).threads[0].codes.tolist() == [1, 2]
    assert rings.guard.faults == 0
    rings.close()


def test_a_run_directory_that_is_removed_again_and_again_is_no_fault(tmp_path: Path) -> None:
    """The log said that training goes on without the flight file, which the next second had made again."""
    memory = PrivateMemory(1 << 12, ANCHOR)
    recorder = Recorder(memory, clock=FakeClock(100))
    path = tmp_path / "run" / "rank0" / "flight.bin"
    disk = DiskQueue()
    rings = SharedRings(memory.map, path, disk)
    over = threading.Event()

    def remove() -> None:
        while not over.is_set():
            shutil.rmtree(tmp_path / "run", ignore_errors=True)

    cleaner = threading.Thread(target=remove)
    cleaner.start()
    for number in range(1, 301):
        recorder.edge(number)
        rings.copy_now(number)
    over.set()
    cleaner.join()
    assert disk.written(60.0)
    rings.copy_now(301)
    assert disk.written(60.0)

    assert read_flight(path).threads[0].codes.tolist() == list(range(1, 301))
    assert rings.guard.faults == 0
    rings.close()


def test_the_file_system_of_a_folder_is_known(small_disk: Path) -> None:
    """The longest mount point above it counts."""
    assert file_system(small_disk) == "tmpfs"


@pytest.mark.parametrize(
    ("offset", "value", "said"),
    [
        (8, 0, "pid is 0, expected 1 to 2147483647"),
        (8, -1, "pid is -1"),
        (16, -5, "anchor_unix_ns is -5"),
        (24, 1 << 62, "anchor_clock_ns is 4611686018427387904"),
        (32, 1 << 40, "main_edges is 1099511627776, expected 1 to 16777216"),
        (40, 0, "side_edges is 0"),
        (48, 99, "side_rings is 99, expected 1 to 15"),
        (56, 2, "names_half is 2"),
        (64, -1, "names_bytes is -1"),
        (72, -1, "polled_unix_ns is -1"),
        (4096, 7, "entry of ring 0 cannot be right: used is 7"),
        (4096 + 16, -1, "written -1"),
    ],
)
def test_a_number_out_of_its_range_is_refused_by_name(
    tmp_path: Path, offset: int, value: int, said: str
) -> None:
    """A file may come from anywhere; what reads it computes with every one of these."""
    memory = PrivateMemory(16, ANCHOR, tmp_path / "flight.bin")
    memory.close()
    with (tmp_path / "flight.bin").open("r+b") as file:
        file.seek(offset)
        file.write(value.to_bytes(8, "little", signed=True))

    with pytest.raises(RunDirectoryError, match=said):
        read_flight(tmp_path / "flight.bin")


@pytest.mark.parametrize(
    "names",
    [
        [],
        {"sources": {}},
        {"sources": [[99, "x", ""]]},
        {"sources": [[0, 7, ""]]},
        {"sources": [[0, "x"]]},
        {"sources": [[True, "x", ""]]},
        {"sources": [["0", "x", ""]] * 2},
    ],
)
def test_a_table_of_names_that_is_none_is_refused(tmp_path: Path, names: Any) -> None:
    """Codes that point into it would name the wrong stage."""
    memory = PrivateMemory(16, ANCHOR, tmp_path / "flight.bin")
    memory.write_names(json.dumps(names))
    memory.close()

    with pytest.raises(RunDirectoryError, match="its table of"):
        read_flight(tmp_path / "flight.bin")


def test_an_identity_with_something_else_in_it_loses_that_alone(tmp_path: Path) -> None:
    """Who wrote a file is for people; it hides no step."""
    memory = PrivateMemory(16, ANCHOR, tmp_path / "flight.bin")
    identity = {"run_id": "r1", "rank": "0", "attempt": -1, "host": ["h"], "world_size": 2}
    memory.write_names(json.dumps({"identity": identity}))
    memory.close()

    assert read_flight(tmp_path / "flight.bin").identity == {"run_id": "r1", "world_size": 2}


def test_a_thread_that_ended_between_two_copies_is_in_the_file_to_its_last_edge(tmp_path: Path) -> None:
    """It may be the one that trained: a pool runs the loop, which raises, and the postmortem knew no edge of it."""
    memory, clock = PrivateMemory(1 << 12, ANCHOR), FakeClock(100)
    recorder = Recorder(memory, clock=clock)
    rings = SharedRings(memory.map, tmp_path / "flight.bin")

    def work() -> None:
        for number in range(1, 41):
            recorder.edge(number)
            clock.tick(1)

    in_threads(work)
    memory.free(recorder.threads[-1].slot)  # as the agent does, which has read it
    rings.copy_now(7_000)

    flight = read_flight(tmp_path / "flight.bin")
    assert [each.codes.tolist() for each in flight.threads] == [[], list(range(1, 41))]
    rings.close()


def test_a_ring_that_another_thread_got_between_two_copies_has_the_edges_of_that_one_alone(
    tmp_path: Path,
) -> None:
    """The copy went on where the thread before had ended, and the file had the first edges of that one before the new ones."""
    memory, clock = PrivateMemory(1 << 12, ANCHOR), FakeClock(100)
    recorder = Recorder(memory, clock=clock)
    rings = SharedRings(memory.map, tmp_path / "flight.bin")

    def write(numbers: range) -> None:
        for number in numbers:
            recorder.edge(number)
            clock.tick(1)

    for numbers in (*[range(1, 11)] * SIDE_RINGS, range(21, 61)):
        in_threads(partial(write, numbers))
        rings.copy_now(7_000)
        rings.release(rings.threads[-1])  # as the agent does, which has read it

    flight = read_flight(tmp_path / "flight.bin")
    assert [each.codes.tolist() for each in flight.threads][:2] == [[], list(range(21, 61))]
    rings.close()


def test_threads_of_a_rank_come_and_go_while_its_reports_are_read() -> None:
    """The connection and the export loop read the same rings: an error in either ends the work for the rank."""
    interval_s = sys.getswitchinterval()
    memory = PrivateMemory(16, ANCHOR)
    memory.write_entry(0, RingEntry(1, 1, 0, "main"))
    rings = SharedRings(memory.map)
    until_s, problems, found_twice = time.monotonic() + 1.0, list[Exception](), 0

    def take_reports() -> None:
        try:
            while time.monotonic() < until_s:
                rings.limit([(0, 0)], 0)
        except RuntimeError as error:
            problems.append(error)

    reports = threading.Thread(target=take_reports)
    sys.setswitchinterval(1e-6)
    try:
        reports.start()
        while time.monotonic() < until_s:
            for slot in range(1, 4):
                memory.write_entry(slot, RingEntry(1, slot, 0, "side"))
            threads = rings.threads
            found_twice += any(one is not two for one, two in zip(threads, rings.threads, strict=True))
            for thread in threads[1:]:
                memory.end_entry(thread.slot)
                rings.release(thread)
    finally:
        reports.join()
        sys.setswitchinterval(interval_s)
        memory.close()

    assert (problems, found_twice) == ([], 0)
