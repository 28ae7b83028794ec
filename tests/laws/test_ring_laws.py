"""Reading the ring, or its file, while it is written never yields a torn edge; what was missed is counted."""

from __future__ import annotations

import sys
import threading
from _thread import get_ident
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from otel_train.datamodel import Anchor
from otel_train.recording.flight_recorder import read_flight
from otel_train.recording.recorder import Recorder
from otel_train.recording.ring_buffer import Ring
from otel_train.testing import FakeClock
from tests.support.flight import PrivateMemory

pytestmark = pytest.mark.usefixtures("both_writers")


@pytest.fixture
def hectic() -> Iterator[None]:
    """Threads take turns every few bytecodes."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def writer_of(edge: Callable[[int], None], dial: FakeClock) -> Callable[[int], None]:
    """Writes edges whose time is their code."""

    def write(number: int) -> None:
        dial.now_ns = number
        edge(number)

    return write


def ring_of(edges: int, owner: int) -> tuple[Ring, Callable[[int], None]]:
    """A ring, and what writes edges whose time is their code."""
    words, dial = memoryview(bytearray(edges * 16)).cast("q"), FakeClock()
    ring = Ring(words, clock=dial, owner=owner, on_other_thread=lambda _: None)
    return ring, writer_of(ring.edge, dial)


@settings(deadline=None)
@given(
    st.sampled_from([1, 2, 4, 16]),
    st.lists(
        st.one_of(
            st.integers(0, 40).map(lambda n: ("write", n)), st.integers(0, 20).map(lambda n: ("read", n))
        )
    ),
)
def test_every_edge_is_read_once_or_missed_once(capacity: int, turns: list[tuple[str, int]]) -> None:
    """A count that is off by one is a step that never was."""
    ring, write = ring_of(capacity, get_ident())
    written = seen = 0
    for what, count in turns:
        if what == "write":
            for _ in range(count):
                written += 1
                write(written)
            continue
        pending = ring.pending
        part = ring.read(count)
        assert part.codes.tolist() == part.times.tolist()
        assert part.codes.tolist() == list(
            range(seen + part.missed + 1, seen + part.missed + len(part.codes) + 1)
        )
        assert len(part.codes) <= count
        assert part.missed + len(part.codes) <= pending
        seen += part.missed + len(part.codes)
    rest = ring.read(capacity)
    assert seen + rest.missed + len(rest.codes) == written


@settings(deadline=None)
@given(
    st.sampled_from([1, 2, 64, 128]),
    st.lists(
        st.one_of(
            st.tuples(st.just("edge"), st.integers(0, 2**63 - 1)),
            st.tuples(
                st.sampled_from(["set_owner", "keep", "give", "detach", "tick"]), st.integers(0, 200_000)
            ),
        )
    ),
)
def test_whatever_happens_to_a_ring_its_memory_is_what_it_should_be(
    capacity: int, turns: list[tuple[str, int]]
) -> None:
    """Against a ring that is a list: edges, other owners, and a fork in between."""
    dial = FakeClock()
    sent: list[int] = []
    lent: list[int] = []
    words = memoryview(bytearray(capacity * 16)).cast("q")
    ring = Ring(words, clock=dial, owner=get_ident(), on_other_thread=sent.append)
    expected, kept, on_other_thread, mine, over = [0] * len(words), 0, sent, True, False
    routed: list[tuple[list[int], int]] = []
    for what, number in turns:
        if what == "edge":
            ring.edge(number)
            if not mine:
                routed.append((on_other_thread, number))
            else:
                slot = kept % capacity * 2
                expected[slot : slot + 2] = number, dial.now_ns
                kept += 1
        elif what == "tick":
            dial.now_ns += number
        elif what == "detach":
            ring.detach()
            mine, over = False, True
        elif not over:
            on_other_thread, mine = (lent if what == "set_owner" else sent), what != "give"
            ring._set_owner(get_ident() if mine else 0, on_other_thread.append)

    assert ring.written == kept
    assert list(words) == expected
    assert [number for where, number in routed if where is sent] == sent
    assert [number for where, number in routed if where is lent] == lent


@pytest.mark.parametrize("capacity", [2, 8, 64])
def test_a_reader_beside_the_writer_sees_whole_edges_in_order(capacity: int, hectic: None) -> None:
    """The training thread never waits for the reader, so the reader must find out itself."""
    total = 30_000
    rings: list[Ring] = []
    made = threading.Event()

    def write() -> None:
        ring, write_edge = ring_of(capacity, get_ident())
        rings.append(ring)
        made.set()
        for number in range(1, total + 1):
            write_edge(number)

    writer = threading.Thread(target=write)
    writer.start()
    made.wait()
    ring = rings[0]
    expected = 1
    while writer.is_alive() or ring.pending:
        part = ring.read(capacity)
        expected += part.missed
        assert part.codes.tolist() == part.times.tolist() == list(range(expected, expected + len(part.codes)))
        expected += len(part.codes)
    writer.join()
    assert expected == total + 1


def test_a_flight_file_read_while_it_is_written_has_no_torn_edge(tmp_path: Path, hectic: None) -> None:
    """Another process may follow a live run."""
    path = tmp_path / "flight.bin"
    memory = PrivateMemory(64, Anchor(0, 0), path)
    dial = FakeClock()
    recorder = Recorder(memory, clock=dial)
    write = writer_of(recorder.edge, dial)
    stop = threading.Event()
    problems: list[str] = []

    def follow() -> None:
        while not stop.is_set():
            for thread in read_flight(path).threads:
                if not np.array_equal(thread.codes, thread.times):
                    problems.append(f"torn: {thread}")
                if (np.diff(thread.times) < 0).any():
                    problems.append(f"falls: {thread}")

    memory.poll(1)
    reader = threading.Thread(target=follow)
    reader.start()
    for number in range(1, 40_001):
        write(number)
        if number % 1000 == 0:
            memory.poll(number)
    stop.set()
    reader.join()
    assert problems == []
    memory.poll(2)
    assert read_flight(path).threads[0].codes.tolist() == list(range(40_000 - 62, 40_001))
    memory.close()
