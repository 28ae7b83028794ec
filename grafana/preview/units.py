"""Values as people read them, the way Grafana writes its units."""

from __future__ import annotations

import math
from typing import Final

_THOUSANDS: Final = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "K"))
_BYTES: Final = ((2.0**40, "TiB"), (2.0**30, "GiB"), (2.0**20, "MiB"), (2.0**10, "KiB"))
_TIMES: Final = ((86400.0, "d"), (3600.0, "h"), (60.0, "min"), (1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))
_SUFFIXES: Final = {"celsius": " °C", "watt": " W", "percent": " %"}
_PLAIN_BELOW: Final = 100_000


def shown(value: float, unit: str) -> str:
    """A value with its unit."""
    if math.isnan(value):
        return "NaN"
    if unit == "s":
        return _scaled(value, _TIMES, " ") or f"{_figure(value)} s"
    if unit in {"bytes", "Bps"}:
        per = "/s" if unit == "Bps" else ""
        return (_scaled(value, _BYTES, " ") or f"{_figure(value)} B") + per
    if unit == "percentunit":
        return f"{_figure(value * 100)} %"
    if unit == "sci":
        return f"{value:.3g}"
    suffix = unit.partition(":")[2] if unit.startswith("suffix:") else _SUFFIXES.get(unit, "")
    large = abs(value) >= _PLAIN_BELOW and _scaled(value, _THOUSANDS, " ")
    return (large or _figure(value)) + suffix


def _scaled(value: float, scale: tuple[tuple[float, str], ...], space: str) -> str:
    for factor, name in scale:
        if abs(value) >= factor:
            return f"{_figure(value / factor)}{space}{name}"
    return ""


def _figure(value: float) -> str:
    """Three figures, without trailing zeros."""
    if value == 0:
        return "0"
    digits = max(0, 2 - math.floor(math.log10(abs(value))))
    text = f"{value:.{min(digits, 4)}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def ticks(low: float, high: float, unit: str, wanted: int = 4) -> list[float]:
    """Round values between two others."""
    base = 1024 if unit in {"bytes", "Bps"} else 10
    span = max(high - low, 1e-12)
    power = base ** math.floor(math.log(span / wanted, base))
    factors = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024) if base == 1024 else (1, 2, 2.5, 5, 10)
    step = next((power * factor for factor in factors if span / (power * factor) <= wanted), power * base)
    first = math.ceil(low / step - 1e-9)
    return [step * n for n in range(first, math.floor(high / step + 1e-9) + 1)]
