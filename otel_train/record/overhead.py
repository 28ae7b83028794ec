"""What one edge costs here, measured on a ring of its own."""

from __future__ import annotations

from _thread import get_ident
from typing import TYPE_CHECKING

from otel_train.codes import EDGE_WORDS
from otel_train.record.ring import Ring

if TYPE_CHECKING:
    from otel_train.clock import Clock

_EDGES = 256
_ROUNDS = 5


def ns_per_edge(clock: Clock) -> float:
    """Nanoseconds of one edge in a tight loop, the best of a few rounds.

    In a real loop caches are cold and it costs more: ``make bench`` has that figure.
    """
    words = memoryview(bytearray(_EDGES * EDGE_WORDS * 8)).cast("q")
    edge = Ring(words, clock=clock, owner=get_ident(), elsewhere=lambda _: None).edge
    best = float("inf")
    for _ in range(_ROUNDS):
        begun = clock()
        for _ in range(_EDGES):
            edge(0)
        best = min(best, (clock() - begun) / _EDGES)
    return best
