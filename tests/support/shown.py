"""Values that were shown to people, read back and compared with keys of the summary that they are of."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    Summary = Mapping[str, Any]

UNITS = {
    "": 1.0,
    "%": 1e-2,
    "ns": 1e-9,
    "µs": 1e-6,
    "ms": 1e-3,
    "s": 1.0,
    "min": 60.0,
    "h": 3600.0,
    "B": 1.0,
    "kB": 1e3,
    "MB": 1e6,
}
NUMBER = r"\d[\d,]*(?:\.\d+)?"
SHOWN = rf"<0\.01 %|{NUMBER}(?: ?(?:%|ns|µs|ms|s|min|h|B|kB|MB)(?![\w/]))?|–"  # noqa: RUF001 - the dash of what is not known
"""A value as the run summary writes it."""

DIGITS = re.compile(r"\d")


class Shown(NamedTuple):
    """A value and what it may have been before it was rounded; None for a dash."""

    value: float | None
    rounded_by: float = 0.0

    @classmethod
    def of(cls, text: str) -> Shown:
        """Read ``text``; a value with its unit."""
        if text.startswith("<"):  # the least that is shown
            return cls(0.5e-4, 0.5e-4)
        found = re.fullmatch(rf"({NUMBER}) ?([%µa-zA-Z]*)", text.strip())
        if found is None:
            return cls(None)
        number, unit = found[1].replace(",", ""), UNITS[found[2]]
        decimals = len(number.partition(".")[2])
        return cls(float(number) * unit, 0.5 * 10**-decimals * unit)

    def is_of(self, key: float | None) -> bool:
        """Whether this is what ``key`` looks like, rounded."""
        if self.value is None or key is None or not math.isfinite(key):
            return self.value is None and (key is None or not math.isfinite(key))
        if self.value == 0.0:
            return key == 0.0  # what is something is not shown as nothing
        return abs(self.value - key) <= self.rounded_by * (1 + 1e-6) + 1e-12


class Line(NamedTuple):
    """A form in which values are shown, and the keys they are of.

    Attributes:
        pattern: with a group for each value.
        keys: of those groups, in order, from the match.
    """

    pattern: re.Pattern[str]
    keys: Callable[[re.Match[str]], Sequence[float | None]]


def line(pattern: str, keys: Callable[[re.Match[str]], Sequence[float | None]]) -> Line:
    """A form; ``#`` in it stands for a value."""
    return Line(re.compile(pattern.replace("#", f"(?P<_>{SHOWN})").replace("(?P<_>", "(")), keys)


def differences(text: str, forms: Sequence[Line], *, where: str) -> Iterator[str]:
    """What in ``text`` is not what its key says, and the digits of it that no form reads."""
    rest = text
    for form in forms:
        for found in list(form.pattern.finditer(rest)):
            named = set(form.pattern.groupindex.values())
            values = [value for place, value in enumerate(found.groups(), 1) if place not in named]
            keys = form.keys(found)
            if len(values) != len(keys):
                yield f"{where}: {found[0]!r} shows {len(values)} values, of {len(keys)} keys"
            for value, key in zip(values, keys, strict=False):
                if not Shown.of(value or "").is_of(key):
                    yield f"{where}: {found[0]!r} shows {value}; the key is {key}"
        rest = form.pattern.sub(" ", rest)
    if DIGITS.search(rest):
        yield f"{where}: no key is known of what is left: {' '.join(rest.split())!r}"
