"""The ring of one thread."""

from __future__ import annotations

import gc
import importlib
import sys
import weakref
from _thread import get_ident
from collections.abc import Callable

import pytest

from otel_train.agent.ring_reader import SharedRing
from otel_train.recording import events, ring_buffer
from otel_train.recording.events import Flag, Op
from otel_train.recording.ring_buffer import (
    COST_OF_SAMPLE,
    COST_OF_SAMPLE_IN_PYTHON,
    MOST_OF_FASTEST,
    SAMPLED,
    Ring,
)
from otel_train.testing import FakeClock
from tests.support.zero_code import printed_by

pytestmark = pytest.mark.usefixtures("both_writers")


def ring_of(edges: int, on_other_thread: list[int]) -> tuple[Ring, FakeClock]:
    """A ring of the calling thread."""
    clock = FakeClock(100)
    words = memoryview(bytearray(edges * 16)).cast("q")
    return Ring(words, clock=clock, owner=get_ident(), on_other_thread=on_other_thread.append), clock


def test_a_lap_too_late_counts_what_was_overwritten() -> None:
    """Ten edges into four slots: the oldest of the last four may be half overwritten, so three are whole."""
    ring, _ = ring_of(4, [])
    for code in range(10):
        ring.edge(code)

    part = ring.read(100)

    assert (part.codes.tolist(), part.missed) == ([7, 8, 9], 7)
    assert ring.pending == 0


def test_what_was_read_stays_when_the_ring_goes_on() -> None:
    """The agent works on a slice while training writes."""
    ring, _ = ring_of(4, [])
    ring.edge(1)
    part = ring.read(4)
    for code in range(20):
        ring.edge(code)

    assert part.codes.tolist() == [1]


def test_what_has_begun_since_an_edge_is_known_over_the_end_of_the_ring() -> None:
    """The end of the process asks whether the loop went on after a call of ``sys.exit``; without memory nothing has."""
    ring, _ = ring_of(4, [])
    begin, end = events.code(Op.BEGIN, 3), events.code(Op.END, 3)
    making = events.code(Op.BEGIN, 3, Flag.START)
    for word in (begin, end, begin, end, making, end):
        ring.edge(word)

    assert [ring.begun_since(since) for since in range(7)] == [True, True, True, False, False, False, False]
    ring.release_memory()
    assert not ring.begun_since(0)
    assert ring.read(4).codes.tolist() == []


def test_a_ring_disowned_while_writes_are_diverted_takes_nothing(both_writers: None) -> None:
    """Another thread closes the session during a capture, while the loop is in the middle of an edge."""
    on_other_thread: list[int] = []
    ring, _ = ring_of(4, on_other_thread)

    def see(code: int, write: Callable[[int], None]) -> None:
        ring.detach()
        write(code)

    ring.intercept(see)
    ring.edge(5)
    ring.edge(6)
    ring.intercept(None)
    ring.edge(7)

    assert (on_other_thread, ring.written) == ([5, 6, 7], 0)


@pytest.mark.parametrize("words", [0, 1, 6, 12])
def test_a_ring_whose_size_is_no_power_of_two_is_refused(words: int) -> None:
    """The slot is found by a mask."""
    with pytest.raises(ValueError, match="power of two"):
        Ring(memoryview(bytearray(words * 8)).cast("q"), clock=FakeClock(), owner=1, on_other_thread=print)


def test_the_cost_of_writing_is_sampled_in_place(request: pytest.FixtureRequest) -> None:
    """What a tight loop costs says little about a loop that trains in between; a wait in the middle is none of it."""
    readings, now_ns = [], 0
    for lasts_ns in (
        40,
        90,
        5_000_000,
    ):  # the clock is read before a timed edge, in it and after it; else once
        readings += [now_ns, now_ns, now_ns + lasts_ns, *[now_ns + lasts_ns] * (SAMPLED - 1)]
        now_ns += lasts_ns
    clock = iter(readings).__next__
    words, progress = (memoryview(bytearray(size)).cast("q") for size in (1024 * 16, 16))
    ring = Ring(words, clock=clock, owner=get_ident(), on_other_thread=print, progress=progress)
    for _ in range(3 * SAMPLED):
        ring.edge(1)

    in_c = request.node.callspec.params["both_writers"]
    factor = COST_OF_SAMPLE if in_c else COST_OF_SAMPLE_IN_PYTHON
    assert SharedRing(words, progress).spent_ns == (40 + 90 + MOST_OF_FASTEST * 40) * factor * SAMPLED


class _Owner:
    """Holds a ring that holds it."""

    def __init__(self) -> None:
        words = memoryview(bytearray(64 * 16)).cast("q")
        self.ring = Ring(words, clock=FakeClock(), owner=get_ident(), on_other_thread=self.other)
        self.ring.intercept(self.see)

    def other(self, code: int) -> None:
        """Takes nothing."""

    def see(self, code: int, write: Callable[[int], None]) -> None:
        """Stands between, and holds nothing up."""
        write(code)


def test_a_ring_that_is_part_of_a_cycle_is_collected() -> None:
    """The collector clears what lies in the cycle in any order, its memory among it."""
    gone = []
    for number in range(100):
        owner = _Owner()
        owner.ring.edge(1)
        if number % 2:
            owner.ring.intercept(None)
        gone.append(weakref.ref(owner))
        del owner
    gc.collect()

    assert [each for each in gone if each() is not None] == []


@pytest.mark.parametrize("both_writers", [True], indirect=True)
def test_a_hook_goes_on_when_the_module_in_c_is_imported_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A notebook that reloads modules must not make training raise: the hooks of the session before are still in place."""
    ring, _ = ring_of(8, [])
    made = ring_buffer.EXTENSION.hook(
        "timed",
        (ring.edge, lambda **_: "called", "when", None, ring_buffer.packed(2, 3, 1)),
    )
    assert made(when=True) == "called"

    monkeypatch.delitem(sys.modules, "otel_train._edges")
    again = importlib.import_module("otel_train._edges")
    assert made(when=True) == "called"

    assert again.Writer is not ring_buffer.EXTENSION.Writer
    assert ring.read(8).codes.tolist() == [1, 2, 1, 2]


def test_a_module_in_c_that_was_built_from_other_sources_is_not_used() -> None:
    """A checkout that was updated and not built again must not crash training."""
    program = (
        "import sys, types; sys.modules['otel_train._edges'] = types.ModuleType('otel_train._edges');"
        "from otel_train.recording import ring_buffer; print(ring_buffer.EXTENSION)"
    )

    assert printed_by("-c", program) == "None\n"


@pytest.mark.parametrize("both_writers", [True], indirect=True)
def test_threads_may_update_new_optimizers_at_once() -> None:
    """A hook gives up the interpreter while it asks for the codes of an optimizer: another thread meets it half-way."""
    known: dict[int, bytes] = {}
    edges: list[int] = []

    class Optimizer:
        """One that can be referred to weakly."""

    first, outer, inner = Optimizer(), Optimizer(), Optimizer()

    def join(optimizer: Optimizer) -> bytes:
        number = [first, outer, inner].index(optimizer)
        if optimizer is outer:
            hook(inner, (), {})
        return known.setdefault(id(optimizer), ring_buffer.packed(number, 10 + number, 20 + number))

    hook = ring_buffer.EXTENSION.hook("update", (edges.append, known, join))
    hook(first, (), {})
    reference = weakref.ref(first)
    before = sys.getrefcount(reference)
    hook(outer, (), {})
    hook(outer, (), {})

    assert before - sys.getrefcount(reference) == 1
    assert edges == [0, 2, 1, 1]
