"""A row of the results table: measured values, budget, status."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from benchmarks.spread import Spread, spread_of

MOST_WIDTH_BUDGETS = 2.0
"""Distance of the quartiles, in multiples of the budget, above which a median says more about other programs than about its budget."""


class Status(Enum):
    """What a measurement says about its budget."""

    MET = "met"
    MISSED = "missed"
    NO_BUDGET = "no budget"
    TOO_BUSY = "too busy to quote"
    NOT_MEASURED = "not measured"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One value, measured repeatedly.

    Attributes:
        name: stable key in the results, dotted.
        what: what was measured, as the table shows it.
        unit: of the values and the budget.
        values: one per pair or repetition; empty when it could not be measured.
        budget: the median may be at most this; None when the value only explains another.
        most_width: distance of the quartiles above which the median is not compared with the budget; None for
            ``MOST_WIDTH_BUDGETS`` times the budget.
        detail: further numbers of the same measurement, by name.
        reason: why it was not measured, or how to read it.
    """

    name: str
    what: str
    unit: str
    values: tuple[float, ...] = ()
    budget: float | None = None
    most_width: float | None = None
    detail: dict[str, float] = field(default_factory=dict)
    reason: str = ""

    @property
    def spread(self) -> Spread | None:
        """Quartiles of the values; None when there are none."""
        return spread_of(self.values) if self.values else None

    @property
    def status(self) -> Status:
        """Whether the median keeps the budget, if the quartiles are close enough to tell."""
        if self.spread is None:
            return Status.NOT_MEASURED
        if self.budget is None:
            return Status.NO_BUDGET
        most = MOST_WIDTH_BUDGETS * self.budget if self.most_width is None else self.most_width
        if self.spread.width > most:
            return Status.TOO_BUSY
        return Status.MET if self.spread.median <= self.budget else Status.MISSED

    @property
    def excess(self) -> float:
        """How far the median is over the budget, in the row's unit; 0 when it is not."""
        if self.spread is None or self.budget is None:
            return 0.0
        return max(0.0, self.spread.median - self.budget)

    def as_json(self) -> dict[str, Any]:
        """Returns everything, as it is stored in the results file."""
        return {
            "name": self.name,
            "what": self.what,
            "unit": self.unit,
            "budget": self.budget,
            "spread": self.spread._asdict() if self.spread else None,
            "status": self.status.value,
            "excess": self.excess,
            "values": list(self.values),
            "detail": self.detail,
            "reason": self.reason,
        }


def failed(rows: list[Row]) -> bool:
    """Returns whether a budget is missed or not decided, or something was not measured."""
    return any(row.status in (Status.MISSED, Status.TOO_BUSY, Status.NOT_MEASURED) for row in rows)
