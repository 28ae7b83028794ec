"""Edges paired, nested and tiled."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from otel_train.aggregate.mending import DEEPEST
from otel_train.aggregate.pairing import Edges, Pairing
from otel_train.aggregate.steps import columns_of
from otel_train.codes import Op, SourceKind
from tests.support.edges import Tape

if TYPE_CHECKING:
    from collections.abc import Sequence


def pair(tape: Tape, pairing: Pairing, cuts: Sequence[int] = ()) -> list[Edges]:
    """Work a tape out, slice by slice."""
    kinds = columns_of(tape.sources).kinds
    times, codes = np.array(tape.times, dtype=np.int64), np.array(tape.codes, dtype=np.int64)
    bounds = [0, *cuts, len(times)]
    return [pairing.feed(times[a:b], codes[a:b], kinds) for a, b in pairwise(bounds)]


def test_the_innermost_open_stage_owns_the_time() -> None:
    """At any instant exactly one."""
    tape = Tape().begin(SourceKind.STAGE, "outer").spend(1).forward(2).spend(3).end(SourceKind.STAGE, "outer")

    (edges,) = pair(tape, Pairing())

    assert edges.owner.tolist() == [0, 1, 0, -1]
    assert edges.begun_ns.tolist() == [0, 1, 1, 0]
    assert edges.counted.all()


def test_flags_of_the_begin_are_known_at_the_end() -> None:
    """What a forward was is asked when it ends."""
    (edges,) = pair(Tape().forward(flags=3).backward(), Pairing())

    assert edges.flags.tolist() == [3, 3, 0, 0]


def test_a_stage_left_open_is_carried_to_the_next_slice() -> None:
    """A slice may end anywhere."""
    pairing = Pairing()
    tape = Tape().begin(SourceKind.STAGE, "outer").spend(4).forward(2).end(SourceKind.STAGE, "outer")

    first, second = pair(tape, pairing, [1])

    assert (first.owner.tolist(), second.owner.tolist()) == ([0], [1, 0, -1])
    assert second.begun_ns.tolist() == [4, 4, 0]
    assert pairing.open == []


def test_an_end_without_a_begin_is_dropped_and_counted() -> None:
    """The begin was overwritten, or came before we looked."""
    pairing = Pairing()

    (edges,) = pair(Tape().end(SourceKind.FORWARD, "model").backward(), pairing)

    assert (len(edges.times), pairing.ignored) == (2, 1)


def test_an_optimizer_may_step_inside_itself_and_inside_another() -> None:
    """``super().step()``, SAM, Lookahead: none of these raised."""
    tape = Tape().begin(SourceKind.OPTIMIZER, "SGD").update(3).end(SourceKind.OPTIMIZER, "SGD")
    tape.begin(SourceKind.OPTIMIZER, "SAM").forward().update(3).end(SourceKind.OPTIMIZER, "SAM")

    (edges,) = pair(tape, Pairing())

    assert (edges.ops == Op.FAIL).sum() == 0
    assert len(edges.times) == len(tape.times)


def test_a_mark_belongs_to_whoever_is_open() -> None:
    """Setting a boundary takes no time."""
    tape = Tape().mark().begin(SourceKind.STAGE, "fit").mark().spend(5).end(SourceKind.STAGE, "fit").mark()

    (edges,) = pair(tape, Pairing())

    assert edges.owner.tolist() == [-1, 1, 1, -1, -1]


def test_a_recursion_without_bottom_is_cut() -> None:
    """A decorated function that calls itself must not make every slice slower."""
    tape = Tape()
    for _ in range(1000):
        tape.begin(SourceKind.STAGE, "deep").spend(1)
    for _ in range(1000):
        tape.end(SourceKind.STAGE, "deep").spend(1)
    tape.forward()
    pairing = Pairing()

    parts = pair(tape, pairing, [300, 900, 1500])

    assert pairing.open == []
    assert pairing.ignored == 0
    assert max(len(part.times) for part in parts) <= 500 + DEEPEST
    assert parts[-1].owner.tolist()[-2:] == [1, -1]


def test_it_breathes_while_it_mends() -> None:
    """The slow path is Python, so the training thread must get its turn."""
    tape = Tape()
    for _ in range(1000):
        tape.end(SourceKind.FORWARD, "model")
    breaths: list[int] = []
    times, codes = np.array(tape.times, dtype=np.int64), np.array(tape.codes, dtype=np.int64)

    Pairing().feed(times, codes, columns_of(tape.sources).kinds, breathe=lambda: breaths.append(1))

    assert len(breaths) >= 8
