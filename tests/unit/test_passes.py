"""Passes over loaders, derived from edges: what it costs to begin one, and why it ended."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from otel_train.catalog import PHASES
from otel_train.recording.events import Ending, Op, SourceKind
from tests.support.edges import Book, Tape, account_for

Start = tuple[str, str, int, int]


def starts(book: Book) -> list[Start]:
    return [
        (book.name(source), PHASES[phase], making, waiting)
        for part in book.closed
        for source, phase, _, _, making, waiting in part.batches.tolist()
        if making >= 0
    ]


def endings(book: Book) -> list[tuple[str, Ending]]:
    return [
        (book.name(source), Ending(ending))
        for part in book.closed
        for source, ending, _ in part.endings.tolist()
    ]


def epochs() -> Tape:
    """Two passes of a loader with a validation between, an exception in a third that is begun anew."""
    tape = Tape()
    for first_ns in (40, 50):
        tape.start(ns=7).ask(ns=first_ns).forward().backward().update().step().stop()
        tape.start("val", ns=2).validate()
    tape.start(ns=7).ask(ns=60).forward().backward().update().ask(op=Op.FAIL)
    tape.start(ns=7).ask(ns=70).forward().backward().update().stop(why=Ending.SHORT)
    return tape


EXPECTED_STARTS = [
    *[("code", "train", 7, 40), ("val", "eval", 2, 5), ("code", "train", 7, 50), ("val", "eval", 2, 5)],
    *[("code", "train", 7, 60), ("code", "train", 7, 70)],
]
EXPECTED_ENDINGS = [
    *[("code", Ending.EPOCH_END), ("val", Ending.EPOCH_END)] * 2,
    *[("code", Ending.ERROR), ("code", Ending.SHORT)],
]


@given(st.sets(st.integers(1, len(epochs().times) - 1)))
@example(set())
def test_starts_and_endings_are_found_however_the_edges_were_sliced(cuts: set[int]) -> None:
    """The first batch of an epoch waits for workers to start; every pass ends once, and for one reason."""
    book = account_for(epochs(), sorted(cuts))

    assert sorted(starts(book)) == sorted(EXPECTED_STARTS)
    assert sorted(endings(book)) == sorted(EXPECTED_ENDINGS)


@pytest.mark.parametrize(("tape", "expected"), [
    # ``break`` after enough batches is no sign of a short loader.
    pytest.param(Tape().start().step().step().start().step().step().stop(), [Ending.EPOCH_END],
                 id="a loop that is left ends no pass"),
    # A loop that skips bad samples.
    pytest.param(Tape().start().step().ask(op=Op.FAIL).step().stop(), [Ending.EPOCH_END],
                 id="an exception after which the loader goes on ends no pass"),
    # Nothing follows it that could tell.
    pytest.param(Tape().start().step().ask(op=Op.FAIL), [Ending.ERROR], id="an exception that ends the run ends the pass"),
    # Some loops ask until two loaders are at their end.
    pytest.param(Tape().start().step().stop().stop().stop(), [Ending.EPOCH_END],
                 id="a loader asked again at its end has ended once"),
    # Ctrl-C mostly comes while a loop waits.
    pytest.param(Tape().start().step().begin(SourceKind.DATA, "code").end(SourceKind.DATA, "code", op=Op.FAIL), [],
                 id="what interrupts an ask is not the loader's end"),
])  # fmt: skip
def test_a_pass_ends_where_its_loader_has_ended(tape: Tape, expected: list[Ending]) -> None:
    """A shard that is missing shows as a pass that is short."""
    assert endings(account_for(tape)) == [("code", ending) for ending in expected]


@pytest.mark.parametrize("why", [Ending.EPOCH_END, Ending.SHORT, Ending.STREAMING_END])
def test_an_empty_pass_has_an_end_and_no_start(why: Ending) -> None:
    """There is no first batch to wait for."""
    book = account_for(Tape().start("other").step("other").start().stop(why=why).step("other"))

    assert endings(book) == [("code", why)]
    assert [start[0] for start in starts(book)] == ["other"]
