"""Edges of one thread to nested calls."""

from __future__ import annotations

from typing import NamedTuple

from otel_train.accounting.nesting import DEEPEST, Nesting, OpenStage
from otel_train.accounting.types import SourceTable
from otel_train.recording.events import Op, SourceKind
from tests.support.edges import Tape


class Event(NamedTuple):
    """What a nesting tells."""

    ns: int
    op: int
    kind: int
    flags: int
    begun_ns: int
    counts: bool
    outermost: bool
    stack: tuple[int, ...]


class Recorded(Nesting):
    """Keeps what it receives."""

    def __init__(self, kinds: list[int]) -> None:
        super().__init__(kinds)
        self.events: list[Event] = []

    def begin(self, ns: int, stage: OpenStage) -> None:
        self._keep(ns, Op.BEGIN, stage, outermost=False)

    def end(self, ns: int, stage: OpenStage, op: int, payload: int) -> None:
        self._keep(ns, op, stage, outermost=self.is_outermost(stage.kind))

    def mark(self, ns: int, op: int, source: int, payload: int) -> None:
        self.events.append(Event(ns, op, SourceKind.MARK, 0, ns, False, False, self.stack))

    def _keep(self, ns: int, op: int, stage: OpenStage, *, outermost: bool) -> None:
        self.events.append(
            Event(ns, op, stage.kind, stage.flags, stage.begun_ns, stage.counts, outermost, self.stack)
        )


def nest(tape: Tape) -> tuple[Nesting, list[Event]]:
    """Work a tape out."""
    nesting = Recorded(SourceTable().extend(tape.sources).kinds)
    for ns, word in zip(tape.times, tape.codes, strict=True):
        nesting.edge(ns, word)
    return nesting, nesting.events


def owners(events: list[Event]) -> list[int]:
    """Who owned the time before each event; -1 for none."""
    return [event.stack[-1] if event.stack else -1 for event in events]


def test_an_update_inside_a_scaler_inside_itself_is_one_update() -> None:
    """A fused optimizer of the program's own that calls ``super().step()``, under a gradient scaler."""
    tape = Tape().begin(SourceKind.SCALER, "scaler").begin(SourceKind.OPTIMIZER, "SGD").update(3)
    tape.end(SourceKind.OPTIMIZER, "SGD").end(SourceKind.SCALER, "scaler")

    _, events = nest(tape)

    assert sum(event.outermost for event in events if event.kind == SourceKind.OPTIMIZER) == 1


def test_a_recursion_without_bottom_is_one_call() -> None:
    """A decorated function that calls itself must not make everything slower."""
    tape = Tape().repeat(1000, lambda t: t.begin(SourceKind.STAGE, "deep").spend(1))
    tape.repeat(1000, lambda t: t.end(SourceKind.STAGE, "deep").spend(1)).forward()

    nesting, events = nest(tape)

    assert nesting.stages == []
    assert [(event.ns, event.op) for event in events[:2]] == [(0, Op.BEGIN), (1999, Op.END)]
    assert owners(events)[-2:] == [-1, 1]


def test_stages_too_deep_belong_to_the_innermost_that_is_kept() -> None:
    """Memory is bounded, whatever the program nests."""
    names = [f"deep {n}" for n in range(1000)]
    tape = Tape()
    for name in names:
        tape.begin(SourceKind.STAGE, name).spend(1)
    for name in reversed(names):
        tape.end(SourceKind.STAGE, name).spend(1)
    tape.forward()

    nesting, events = nest(tape)

    assert nesting.stages == []
    assert len(events) == 2 * DEEPEST + 2
    assert owners(events)[-2:] == [-1, len(names)]


def test_an_iterator_that_is_disposed_of_inside_an_optimizer_ends_nothing() -> None:
    """The garbage collector runs when it wants to; a step of the optimizer must not be lost for it."""
    tape = Tape().begin(SourceKind.OPTIMIZER, "SGD").spend(2).dispose("code", 3)
    tape.end(SourceKind.OPTIMIZER, "SGD")

    _, events = nest(tape)

    assert [event.op for event in events] == [Op.BEGIN, Op.PASS_END, Op.END]


def test_time_that_goes_back_stands_still() -> None:
    """Clocks of two processors may differ by a little; a negative duration would poison every sum."""
    tape = Tape(started_ns=100).begin(SourceKind.STAGE, "work").spend(-30).end(SourceKind.STAGE, "work")

    _, events = nest(tape)

    assert [event.ns for event in events] == [100, 100]
