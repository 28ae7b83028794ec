"""Passes over loaders, derived from edges: what it costs to begin one, and why it ended."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from otel_train.accounting.types import PHASES
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


def test_a_start_is_the_iterator_and_its_first_batch() -> None:
    """The first batch of an epoch waits for the workers to start: no sign that they cannot keep up."""
    assert sorted(starts(account_for(epochs()))) == sorted(EXPECTED_STARTS)


def test_every_pass_ends_once_and_for_one_reason() -> None:
    """A shard that is missing shows as a pass that is short."""
    assert sorted(endings(account_for(epochs()))) == sorted(EXPECTED_ENDINGS)


@given(st.sets(st.integers(1, len(epochs().times) - 1)))
def test_how_the_edges_were_sliced_does_not_matter(cuts: set[int]) -> None:
    """The agent reads when it can."""
    book = account_for(epochs(), sorted(cuts))

    assert sorted(starts(book)) == sorted(EXPECTED_STARTS)
    assert sorted(endings(book)) == sorted(EXPECTED_ENDINGS)


def test_a_loop_that_is_left_ends_no_pass() -> None:
    """``break`` after enough batches is no sign of a short loader."""
    tape = Tape().start().step().step().start().step().step().stop()

    assert endings(account_for(tape)) == [("code", Ending.EPOCH_END)]


def test_an_exception_after_which_the_loader_goes_on_ends_no_pass() -> None:
    """A loop that skips bad samples."""
    tape = Tape().start().step().ask(op=Op.FAIL).step().stop()

    assert endings(account_for(tape)) == [("code", Ending.EPOCH_END)]


def test_an_exception_that_ends_the_run_ends_the_pass() -> None:
    """Nothing follows it that could tell."""
    assert endings(account_for(Tape().start().step().ask(op=Op.FAIL))) == [("code", Ending.ERROR)]


def test_a_loader_asked_again_at_its_end_has_ended_once() -> None:
    """Some loops ask until two loaders are at their end."""
    assert endings(account_for(Tape().start().step().stop().stop().stop())) == [("code", Ending.EPOCH_END)]


def test_what_interrupts_an_ask_is_not_the_loaders_end() -> None:
    """Ctrl-C mostly comes while a loop waits."""
    tape = Tape().start().step().begin(SourceKind.DATA, "code").end(SourceKind.DATA, "code", op=Op.FAIL)

    assert endings(account_for(tape)) == []


@pytest.mark.parametrize("why", [Ending.EPOCH_END, Ending.SHORT, Ending.STREAMING_END])
def test_an_empty_pass_has_an_end_and_no_start(why: Ending) -> None:
    """There is no first batch to wait for."""
    book = account_for(Tape().start("other").step("other").start().stop(why=why).step("other"))

    assert endings(book) == [("code", why)]
    assert [start[0] for start in starts(book)] == ["other"]
