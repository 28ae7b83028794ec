"""Where the time of a transfer belongs, and what it moved."""

from __future__ import annotations

import pytest

from otel_train.aggregation.counters import Transfers
from otel_train.recording.events import Op, SourceKind
from tests.support.edges import Tape, account_for

H2D, DEVICE = SourceKind.H2D, "cuda:0"


def move(tape: Tape, ns: int, moved: int = 100, name: str = DEVICE) -> Tape:
    tape.begin(H2D, name).spend(ns)
    tape.edge(Op.END, tape.source(H2D, name), payload=moved + 1)
    return tape


def bytes_of(tape: Tape) -> dict[str, int]:
    transfers = Transfers()
    for part in account_for(tape).closed:
        transfers.add(part.moved)
    return transfers.to_devices(tape.sources)


def test_a_transfer_between_fetch_and_forward_is_a_stage_of_its_own() -> None:
    """It is neither the loader's time nor the loop's."""
    tape = Tape()
    for _ in range(3):
        move(tape.ask(), 4).forward().backward().update()

    book = account_for(tape.stop())

    assert book.durations() == [66] * 3
    assert book.self_ns("owner")[DEVICE] == 12
    assert book.count()[DEVICE] == 3


@pytest.mark.parametrize("kind", [SourceKind.DATA, SourceKind.BACKWARD])
def test_inside_data_and_backward_it_stays_there(kind: SourceKind) -> None:
    """A loader that gives batches on the device is slow as a loader; offloaded activations are backward."""
    tape = Tape()
    for _ in range(2):
        tape.step()
        tape.begin(kind, "code" if kind is SourceKind.DATA else "backward")
        move(tape, 4)
        tape.end(kind, "code" if kind is SourceKind.DATA else "backward")
        tape.update()

    book = account_for(tape.stop())

    assert DEVICE not in book.count()
    assert bytes_of(tape) == {DEVICE: 200}


def test_inside_forward_it_is_cut_out_of_forward() -> None:
    """Forward lasts as long as it lasts, and its own time is what is left."""
    tape = Tape()
    for _ in range(2):
        tape.ask().begin(SourceKind.FORWARD, "model", flags=3).spend(6)
        move(tape, 4).end(SourceKind.FORWARD, "model")
        tape.backward().update()

    book = account_for(tape.stop())

    assert book.self_ns("owner")["model"] == 12
    assert book.self_ns("owner")[DEVICE] == 8
    assert [call.inclusive_ns for call in book.calls("model")] == [10, 10]


def test_a_transfer_inside_a_transfer_is_one() -> None:
    """A batch object of a library moves its tensors inside a user stage ``h2d``."""
    tape = Tape()
    for _ in range(2):
        tape.ask().begin(H2D, "h2d").spend(1)
        move(tape, 4).end(H2D, "h2d")
        tape.forward().backward().update()

    book = account_for(tape.stop())

    assert book.count()["h2d"] == 2
    assert DEVICE not in book.count()
    assert book.self_ns("owner")["h2d"] == 10


def test_bytes_are_those_of_devices_and_those_that_are_known() -> None:
    """Pinned copies stay on the host; an unknown size is not zero."""
    tape = Tape()
    move(tape, 1, 100)
    move(tape, 1, 50, "cuda:1")
    move(tape, 1, 1000, "pin_memory")
    move(tape, 1, -1, "cuda:2")

    assert bytes_of(tape) == {DEVICE: 100, "cuda:1": 50}
