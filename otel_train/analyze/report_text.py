"""Figures as the report writes them."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

ABSENT = "\N{EN DASH}"
"""Stands for what is not known. Never zero."""
_UNITS = ((1e-6, 1e-9, "ns"), (1e-3, 1e-6, "µs"), (1.0, 1e-3, "ms"), (120.0, 1.0, "s"), (7200.0, 60.0, "min"))
_TEN, _WHOLE = 10, 100


def duration(seconds: float | None) -> str:
    """Seconds as three figures with the unit that suits them."""
    if seconds is None or not math.isfinite(seconds):
        return ABSENT
    if not seconds:
        return "0 s"
    for below, unit_s, unit in _UNITS:
        if abs(seconds) < below:
            return f"{_three(seconds / unit_s)} {unit}"
    return f"{_three(seconds / 3600)} h"


def percent(share: float | None) -> str:
    """A ratio as percent."""
    return ABSENT if share is None else f"{share * 100:.1f} %"


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


def _three(value: float) -> str:
    size = abs(value)
    return f"{value:,.{2 if size < _TEN else 1 if size < _WHOLE else 0}f}"
