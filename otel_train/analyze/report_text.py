"""Figures as the card, the report and the local page write them: one figure looks the same on all of them."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

ABSENT = "\N{EN DASH}"
"""Stands for what is not known. Never zero."""
_UNITS = ((1e-6, 1e-9, "ns"), (1e-3, 1e-6, "µs"), (1.0, 1e-3, "ms"), (120.0, 1.0, "s"), (7200.0, 60.0, "min"))
_TEN, _WHOLE = 10, 100
_SMALLEST = 0.01
"""Percent: the least that two decimals show."""


def duration(seconds: float | None) -> str:
    """Seconds as three figures with the unit that suits them."""
    if seconds is None or not math.isfinite(seconds):
        return ABSENT
    if not seconds:
        return "0 s"
    size = abs(float(f"{seconds:.3g}"))  # 999.9 ms are 1.00 s
    for below, unit_s, unit in _UNITS:
        if size < below:
            return f"{_three(seconds / unit_s)} {unit}"
    return f"{_three(seconds / 3600)} h"


def percent(share: float | None) -> str:
    """A ratio as percent; what is not nothing is not shown as nothing."""
    if share is None or not math.isfinite(share):
        return ABSENT
    hundredths = share * 100
    if 0 < hundredths < _SMALLEST:
        return "<0.01 %"
    return f"{hundredths:.2f} %" if 0 < hundredths < 1 else f"{hundredths:.1f} %"


def figure(number: float | None) -> str:
    """A number in three figures; whole and large ones in full."""
    if number is None or not math.isfinite(number):
        return ABSENT
    return f"{number:,.0f}" if number == int(number) or abs(number) >= _WHOLE else _three(number)


def bytes_of(size: float) -> str:
    """Bytes with the unit that suits them."""
    for unit, bytes_ in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if abs(size) >= bytes_:
            return f"{_three(size / bytes_)} {unit}"
    return f"{size:.0f} B"


def data_wait_s(summary: Mapping[str, Any]) -> float | None:
    """Seconds that training waited for its loaders; None where the summary knows of no loader."""
    waited: float | None = (summary.get("activities") or {}).get("data_wait")
    return waited if waited or summary.get("batches") else None


def activity_shares(summary: Mapping[str, Any]) -> dict[str, float]:
    """Each activity's share of the wall time: they sum to one. Waiting is absent where no loader is known."""
    spent: Mapping[str, float] = summary.get("activities") or {}
    whole_s = sum(spent.values())
    known = {name: s for name, s in spent.items() if name != "data_wait" or data_wait_s(summary) is not None}
    return {name: seconds / whole_s for name, seconds in known.items()} if whole_s else {}


def steps_per_second(summary: Mapping[str, Any]) -> float | None:
    """Training steps over the wall time; None in a summary that has no throughput."""
    found: float | None = (summary.get("throughput") or {}).get("steps_per_second")
    return found


def _three(value: float) -> str:
    size = abs(float(f"{value:.3g}"))
    return f"{value:,.{2 if size < _TEN else 1 if size < _WHOLE else 0}f}"
