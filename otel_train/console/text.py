"""Formats numbers, units and untrusted text, and lays out lines for a terminal."""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timezone
from typing import TextIO

from otel_train.console import COLUMNS_UNKNOWN, terminal_of
from otel_train.fast_classes import FastNamedTuple
from otel_train.safety import escaped, printable

# --- numbers ---------------------------------------------------------------------------------------

ABSENT = "\N{EN DASH}"
"""Stands for what is not known. Never zero."""
_UNITS = ((1e-6, 1e-9, "ns"), (1e-3, 1e-6, "µs"), (1.0, 1e-3, "ms"), (120.0, 1.0, "s"), (7200.0, 60.0, "min"))
_TEN, _WHOLE = 10, 100
_SMALLEST = 0.01
"""Percent: the least that two decimals show."""


def duration(seconds: float | None) -> str:
    """Returns the seconds with three significant digits, in the unit that suits them."""
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
    """Returns a ratio as percent; what is not nothing is not shown as nothing."""
    if share is None or not math.isfinite(share):
        return ABSENT
    hundredths = share * 100
    if 0 < hundredths < _SMALLEST:
        return "<0.01 %"
    return f"{hundredths:.2f} %" if 0 < hundredths < 1 else f"{hundredths:.1f} %"


def rounded(number: float | None) -> str:
    """Returns a number with three significant digits; whole and large ones in full."""
    if number is None or not math.isfinite(number):
        return ABSENT
    return f"{number:,.0f}" if number == int(number) or abs(number) >= _WHOLE else _three(number)


def bytes_of(size: float | None) -> str:
    """Returns the bytes with the unit that suits them."""
    if size is None or not math.isfinite(size):
        return ABSENT
    shown = abs(float(f"{size:.3g}"))  # 999.9 kB are 1.00 MB
    for unit, bytes_ in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if shown >= bytes_:
            return f"{_three(size / bytes_)} {unit}"
    return f"{size:.0f} B"


def count(number: float | None) -> str:
    """Returns a whole number with its thousands marked."""
    return ABSENT if number is None or not math.isfinite(number) else f"{number:,.0f}"


def plural(number: float | None, noun: str) -> str:
    """Returns a count with its noun: ``1 step``, ``1,234 steps``, ``2 batches``."""
    suffix = "" if number == 1 else "es" if noun.endswith(("ch", "ss")) else "s"
    return f"{count(number)} {noun}{suffix}"


def stage_place(stage: str, loader: str = "", *, after: str = "", quote: str = "") -> str:
    """Returns where a rank is, as part of a sentence: ``in stage data of loader train``.

    Args:
        stage: that is open; ``other`` or "" between two stages.
        loader: whose stage it is; "" for none.
        after: the stage before, where none is open; "" if unknown.
        quote: around names.
    """
    if stage in ("", "other"):
        return f"after stage {quote}{after}{quote}" if after else "between two stages"
    return f"in stage {quote}{stage}{quote}" + (f" of loader {quote}{loader}{quote}" if loader else "")


def rate(number: float | None, seconds: float | None) -> float | None:
    """Returns so many per second; None where either is unknown or no time has passed."""
    return None if number is None or not seconds else number / seconds


def instant(unix_s: float | None, form: str = "%Y-%m-%d %H:%M:%S UTC") -> str:
    """Returns a time in UTC."""
    return ABSENT if unix_s is None else f"{datetime.fromtimestamp(unix_s, timezone.utc):{form}}"


def known(value: object) -> object:
    """Returns the value, or the sign for a missing one."""
    return ABSENT if value is None or value == "" else value


def _three(value: float) -> str:
    size = abs(float(f"{value:.3g}"))
    return f"{value:,.{2 if size < _TEN else 1 if size < _WHOLE else 0}f}"


# --- layout ----------------------------------------------------------------------------------------

NARROWEST, WIDEST = 60, 120
"""Columns a page is laid out for. Narrower breaks the tables, wider tears the eye away from the row."""
_NARROW = 80

INDENT = "  "

_NAME_CHARACTERS = 400  # beyond this a name is cut before it is measured, so a megabyte of name costs nothing

_STYLES = {
    "bold": "1", "dim": "2",
    "red": "31", "green": "32", "yellow": "33", "blue": "34", "magenta": "35", "cyan": "36",
}  # fmt: skip

# One character for one character, so that columns stay where they are.
_ASCII = str.maketrans(
    {
        **dict(zip("█▓▒░▚◆╌↻■□", "#+=.%o-^!_", strict=True)),
        **dict(zip("▉▊▋▌▍▎▏", "###:::.", strict=True)),
        **dict(zip("━─–—µ·…×±≤≥→“”‘’", "=---u|~x~<>>\"\"''", strict=True)),  # noqa: RUF001 - these very characters
        **dict(zip("✓•▲✖●", "+*!X*", strict=True)),
        "\N{NO-BREAK SPACE}": " ",
    }
)
_EIGHTHS = " ▏▎▍▌▋▊▉"


class TextLayout(FastNamedTuple):
    """What a text is laid out for."""

    width: int = COLUMNS_UNKNOWN  # that no line exceeds but addresses and paths, which are pasted as a whole
    color: bool = False  # ANSI colours may be used
    unicode: bool = True  # characters outside ASCII may be used

    @classmethod
    def of(cls, stream: TextIO, environ: Mapping[str, str] | None = None) -> TextLayout:
        """Returns the page that suits ``stream``."""
        return cls(*terminal_of(stream, environ))

    @property
    def columns(self) -> int:
        """Columns to lay out for: the width, within what tables can be read at."""
        return max(NARROWEST, min(self.width, WIDEST))

    @property
    def is_narrow(self) -> bool:
        """Returns whether tables leave out their widest columns: bars and intervals."""
        return self.columns < _NARROW

    def paint(self, text: str, *styles: str) -> str:
        """Returns ``text`` in the given styles, or as it is where there are no colours or nothing to colour."""
        codes = ";".join(_STYLES[style] for style in styles if style)
        return f"\x1b[{codes}m{text}\x1b[0m" if self.color and codes and text.strip() else text

    def line(self, text: str, *styles: str) -> str:
        """Returns a painted line, indented."""
        return INDENT + self.paint(text, *styles)

    def safe(self, value: object) -> str:
        """Returns a stranger's text, such as a loader's name, with nothing in it that could move the cursor."""
        text = str(value)[:_NAME_CHARACTERS]
        if self.unicode:
            return printable(text)
        text = printable(text.translate(_ASCII))
        return "".join(letter if letter.isascii() else escaped(letter) for letter in text)

    def prose(self, value: object, *, indent: int) -> list[str]:
        """Returns a sentence, from us or from the program, wrapped to what the indent leaves of the page."""
        words = [self.safe(word) for word in str(value).split()]
        return wrap(words, self.columns - indent)

    def rule(self, left: Sequence[tuple[str, str]], right: tuple[str, str]) -> str:
        """Returns a line across the page with (text, style) titles in it. The last title on the left is cut to fit."""
        used = sum(display_width(text) + 4 for text, _ in left[:-1]) + display_width(right[0]) + 8
        titles = [*left[:-1], (cut(left[-1][0], max(8, self.columns - used - 4)), left[-1][1])]
        edge = self.paint("━" * 2, "dim")
        text = "".join(f"{edge} {self.paint(title, style)} " for title, style in titles)
        filled = sum(display_width(title) + 4 for title, _ in titles) + display_width(right[0]) + 4
        fill = self.paint("━" * max(1, self.columns - filled), "dim")
        return f"{text}{fill} {self.paint(*right)} {edge}"

    def finish(self, lines: Iterable[str]) -> str:
        """Returns the lines as one text, trailing blanks gone, in ASCII where nothing else can be shown."""
        text = "\n".join(line.rstrip() for line in lines) + "\n"
        return text if self.unicode else text.translate(_ASCII)


def display_width(text: str) -> int:
    """Returns the columns a text takes: two for wide East Asian characters, none for combining ones."""
    if text.isascii():
        return len(text)
    return sum(_columns(character) for character in text)


def cut(text: str, columns: int) -> str:
    """Shortens ``text`` to at most ``columns`` columns by removing its middle: both ends distinguish names."""
    if display_width(text) <= columns:
        return text
    if columns <= 1:
        return "…"[:columns]
    head = _prefix(text, columns // 2)
    tail = _prefix(text[::-1], columns - 1 - display_width(head))[::-1]
    return f"{head}…{tail}"


def pad(text: str, columns: int) -> str:
    """Returns ``text`` cut or filled up on the right to exactly ``columns`` columns."""
    text = cut(text, columns)
    return text + " " * (columns - display_width(text))


def right(text: str, columns: int) -> str:
    """Right-aligns a number. Never cuts: a wrong number is worse than a wide column."""
    return " " * (columns - display_width(text)) + text


def wrap(words: Iterable[str], columns: int) -> list[str]:
    """Wraps words into lines of at most ``columns`` columns. A word longer than a line is broken."""
    lines: list[str] = []
    for whole in words:
        word = whole
        if lines and display_width(lines[-1]) + 1 + display_width(word) <= columns:
            lines[-1] += f" {word}"
            continue
        while display_width(word) > columns:
            piece = _prefix(word, columns)
            lines.append(piece)
            word = word[len(piece) :]
        if word:
            lines.append(word)
    return lines


def flow(items: Iterable[str], columns: int) -> list[str]:
    """Puts short facts side by side with a dot between them, as many per line as fit."""
    lines: list[str] = []
    for whole in items:
        item = cut(whole, columns)
        if lines and display_width(lines[-1]) + 3 + display_width(item) <= columns:
            lines[-1] += f" · {item}"
        else:
            lines.append(item)
    return lines


def hang(head: str, columns: int, lines: Iterable[str]) -> list[str]:
    """Puts a head of so many columns before the first line, and as many blanks before the others."""
    return [(" " * columns if number else head) + line for number, line in enumerate(lines)]


def bar(share: float | None, columns: int) -> str:
    """Returns a bar as long as ``share`` (0 to 1) of ``columns``, to an eighth of a column. Anything at all shows."""
    if share is None or not share > 0:
        return ""
    eighths = max(1, min(columns * 8, round(share * columns * 8)))
    return "█" * (eighths // 8) + _EIGHTHS[eighths % 8].strip()


def stacked(weights: Sequence[float], columns: int) -> list[int]:
    """Returns the columns for each weight in a bar of ``columns``: they add up to it, by largest remainder."""
    total = sum(weights)
    if not total > 0:
        return [0] * len(weights)
    exact = [weight / total * columns for weight in weights]
    cells = [int(value) for value in exact]
    by_remainder = sorted(range(len(weights)), key=lambda index: cells[index] - exact[index])
    for index in by_remainder[: columns - sum(cells)]:
        cells[index] += 1
    return cells


def _columns(character: str) -> int:
    if unicodedata.category(character) in {"Mn", "Me"}:
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1


def _prefix(text: str, columns: int) -> str:
    used = 0
    for index, character in enumerate(text):
        used += _columns(character)
        if used > columns:
            return text[:index]
    return text
