"""What the compiler took from training."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from otel_train.aggregate.histogram import Histograms
from otel_train.aggregate.steps import Activity

if TYPE_CHECKING:
    from collections.abc import Iterable

    from otel_train.aggregate.reclaimed import Reclaimed


class Compile(NamedTuple):
    """One outermost run of the compiler.

    Attributes:
        begun_ns: on the monotonic clock.
        ended_ns: on the same.
        again: it had compiled this code before.
    """

    begun_ns: int
    ended_ns: int
    again: bool


class Compiles:
    """Counts them, and gives their time to the ledger.

    Args:
        reclaimed: told of their time.
    """

    def __init__(self, reclaimed: Reclaimed) -> None:
        self.durations = Histograms(size=1)
        self.again = 0
        self._reclaimed = reclaimed

    def tell(self, compiles: Iterable[tuple[int, int, bool]]) -> list[Compile]:
        """Take in what the compiler has done; which of it had been done before."""
        told = [Compile(*each) for each in compiles]
        for each in told:
            self.durations.add([0], [each.ended_ns - each.begun_ns])
            self._reclaimed.add(Activity.COMPILE, each.begun_ns, each.ended_ns)
        again = [each for each in told if each.again]
        self.again += len(again)
        return again
