"""What compilers took from training."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from otel_train.accounting.types import Activity
from otel_train.aggregation.histogram import Histograms
from otel_train.aggregation.jax_compiles import JaxCompiles

if TYPE_CHECKING:
    from collections.abc import Iterable

    from otel_train.aggregation.counters import Totals
    from otel_train.aggregation.reclaimed import Reclaimed
    from otel_train.records import Compile


class Recompiled(NamedTuple):
    """Runs of compilers on code that they had compiled before.

    Attributes:
        count: of them.
        total_ns: what they took together.
        by_jax: how many of them were JAX's.
    """

    count: int = 0  # type: ignore[assignment]  # hides tuple.count, as StageTotals does
    total_ns: int = 0
    by_jax: int = 0

    def plus(self, compiled: Compile) -> Recompiled:
        """One more."""
        lasted_ns, jax = compiled.ended_ns - compiled.begun_ns, compiled.compiler == "jax"
        return Recompiled(self.count + 1, self.total_ns + lasted_ns, self.by_jax + jax)

    def minus(self, earlier: Recompiled) -> Recompiled:
        """What came after ``earlier``."""
        return Recompiled(*(a - b for a, b in zip(self, earlier, strict=True)))


class Compiles:
    """Counts them, and gives their time to the ledger.

    Args:
        reclaimed: told of their time.
        totals: take what was compiled again.

    Attributes:
        judged: of some it is known whether they compiled again.
        jax: those of JAX.
    """

    def __init__(self, reclaimed: Reclaimed, totals: Totals) -> None:
        self.durations = Histograms(size=1)
        self.judged = False
        self.jax = JaxCompiles()
        self._reclaimed = reclaimed
        self._totals = totals

    @property
    def again(self) -> int:
        """Those that compiled again."""
        return self._totals.recompiled.count

    def tell(self, compiles: Iterable[Compile]) -> list[Compile]:
        """Take in what compilers have done; which of it had been done before."""
        told = list(compiles)
        for each in told:
            self.durations.add([0], [each.ended_ns - each.begun_ns])
            self._reclaimed.add(Activity.COMPILE, each.begun_ns, each.ended_ns)
            self.judged |= each.again is not None
            if each.compiler == "jax":
                self.jax = self.jax.plus(each.begun_ns, each.ended_ns, each.function)
        again = [each for each in told if each.again]
        for each in again:
            self._totals.recompiled = self._totals.recompiled.plus(each)
        return again
