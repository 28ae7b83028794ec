"""Formats numbers, units and untrusted text, and lays out lines for a terminal."""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Iterable, Sequence
from datetime import datetime, timezone
from typing import TextIO

from otel_train.console import COLUMNS_UNKNOWN, terminal_of
from otel_train.fast_classes import FastNamedTuple
from otel_train.safety import escaped, printable

# --- numbers ---------------------------------------------------------------------------------------

ABSENT = "\N{EN DASH}"
"""Text for an unknown value; a zero is printed as zero."""
_UNITS = ((1e-6, 1e-9, "ns"), (1e-3, 1e-6, "µs"), (1.0, 1e-3, "ms"), (120.0, 1.0, "s"), (7200.0, 60.0, "min"))
_TEN, _WHOLE = 10, 100
_SMALLEST = 0.01
"""Least percentage that two decimals can show."""


def duration(seconds: float | None) -> str:
    """Returns a duration with three significant digits, in a unit from ns to h."""
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
    """Returns a ratio as percent; a positive one is never shown as 0 %."""
    if share is None or not math.isfinite(share):
        return ABSENT
    hundredths = share * 100
    if 0 < hundredths < _SMALLEST:
        return "<0.01 %"
    return f"{hundredths:.2f} %" if 0 < hundredths < 1 else f"{hundredths:.1f} %"


def rounded(number: float | None) -> str:
    """Returns a number with three significant digits; integers, and numbers from 100 up, without decimals."""
    if number is None or not math.isfinite(number):
        return ABSENT
    return f"{number:,.0f}" if number == int(number) or abs(number) >= _WHOLE else _three(number)


def bytes_of(size: float | None) -> str:
    """Returns a size with three significant digits, in a unit from B to TB."""
    if size is None or not math.isfinite(size):
        return ABSENT
    shown = abs(float(f"{size:.3g}"))  # 999.9 kB are 1.00 MB
    for unit, bytes_ in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if shown >= bytes_:
            return f"{_three(size / bytes_)} {unit}"
    return f"{size:.0f} B"


def count(number: float | None) -> str:
    """Returns a whole number with thousands separators."""
    return ABSENT if number is None or not math.isfinite(number) else f"{number:,.0f}"


def plural(number: float | None, noun: str) -> str:
    """Returns a count with its noun: ``1 step``, ``1,234 steps``, ``2 batches``."""
    suffix = "" if number == 1 else "es" if noun.endswith(("ch", "ss")) else "s"
    return f"{count(number)} {noun}{suffix}"


def stage_place(stage: str, loader: str = "", *, after: str = "", quote: str = "") -> str:
    """Returns the position of a rank as part of a sentence, such as ``in stage data of loader train``.

    Args:
        stage: the open stage; ``other`` or "" between two stages.
        loader: loader of that stage; "" for none.
        after: the stage that ended last, if none is open; "" if unknown.
        quote: quotation mark around names.
    """
    if stage in ("", "other"):
        return f"after stage {quote}{after}{quote}" if after else "between two stages"
    return f"in stage {quote}{stage}{quote}" + (f" of loader {quote}{loader}{quote}" if loader else "")


def rate(number: float | None, seconds: float | None) -> float | None:
    """Returns ``number`` per second; None if either is unknown or ``seconds`` is zero."""
    return None if number is None or not seconds else number / seconds


def instant(unix_s: float | None, form: str = "%Y-%m-%d %H:%M:%S UTC") -> str:
    """Returns a Unix time as text, in UTC."""
    return ABSENT if unix_s is None else f"{datetime.fromtimestamp(unix_s, timezone.utc):{form}}"


def known(value: object) -> object:
    """Returns the value, or ``ABSENT`` if it is None or empty."""
    return ABSENT if value is None or value == "" else value


def _three(value: float) -> str:
    size = abs(float(f"{value:.3g}"))
    return f"{value:,.{2 if size < _TEN else 1 if size < _WHOLE else 0}f}"


# --- layout ----------------------------------------------------------------------------------------

NARROWEST, WIDEST = 60, 120
"""Least and most columns of a page: tables do not fit into fewer, and rows of more are hard to follow."""
_NARROW = 80

INDENT = "  "

_NAME_CHARACTERS = 400  # a longer name is cut before its width is measured, since it may have megabytes
_PATH_CHARACTERS = 1 << 13  # of a path, which has at most 4,096 and may be quoted

_STYLES = {
    "bold": "1", "dim": "2",
    "red": "31", "green": "32", "yellow": "33", "blue": "34", "magenta": "35", "cyan": "36",
}  # fmt: skip

# ASCII replacement of each character that is drawn: of the same width, so that columns stay aligned.
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
    """Properties of the terminal for which a text is laid out."""

    width: int = COLUMNS_UNKNOWN  # columns; only addresses and paths, which one copies as a whole, are wider
    color: bool = False  # whether ANSI colours may be used
    unicode: bool = True  # whether characters outside ASCII may be used

    @classmethod
    def of(cls, stream: TextIO) -> TextLayout:
        """Returns the layout for a stream."""
        return cls(*terminal_of(stream))

    @property
    def columns(self) -> int:
        """Columns of a page: the width of the terminal, between ``NARROWEST`` and ``WIDEST``."""
        return max(NARROWEST, min(self.width, WIDEST))

    @property
    def is_narrow(self) -> bool:
        """Whether tables leave out their widest columns: bars and intervals."""
        return self.columns < _NARROW

    def paint(self, text: str, *styles: str) -> str:
        """Returns ``text`` with ANSI codes for the styles; unchanged without colours, or if it is blank."""
        codes = ";".join(_STYLES[style] for style in styles if style)
        return f"\x1b[{codes}m{text}\x1b[0m" if self.color and codes and text.strip() else text

    def line(self, text: str, *styles: str) -> str:
        """Returns an indented line in the given styles."""
        return INDENT + self.paint(text, *styles)

    def safe(self, value: object, *, most: int = _NAME_CHARACTERS) -> str:
        """Returns untrusted text, such as a loader's name, cut, and with escapes in place of control characters."""
        text = str(value)
        text = text if len(text) <= most else f"{text[: most - 1]}…"
        if self.unicode:
            return printable(text)
        text = printable(text.translate(_ASCII))
        return "".join(letter if letter.isascii() else escaped(letter) for letter in text)

    def path(self, value: object) -> str:
        """Returns a path, or a command or sentence with one, as ``safe`` does, but not cut: it is copied as a whole."""
        return self.safe(value, most=_PATH_CHARACTERS)

    def prose(self, value: object, *, indent: int) -> list[str]:
        """Returns a text, which may be untrusted, wrapped to the columns that ``indent`` leaves of the page."""
        words = [self.safe(word) for word in str(value).split()]
        return wrap(words, self.columns - indent)

    def rule(self, left: Sequence[tuple[str, str]], right: tuple[str, str]) -> str:
        """Returns a rule across the page with (text, style) titles in it; the last title on the left is cut to fit."""
        used = sum(display_width(text) + 4 for text, _ in left[:-1]) + display_width(right[0]) + 8
        titles = [*left[:-1], (cut(left[-1][0], max(8, self.columns - used - 4)), left[-1][1])]
        edge = self.paint("━" * 2, "dim")
        text = "".join(f"{edge} {self.paint(title, style)} " for title, style in titles)
        filled = sum(display_width(title) + 4 for title, _ in titles) + display_width(right[0]) + 4
        fill = self.paint("━" * max(1, self.columns - filled), "dim")
        return f"{text}{fill} {self.paint(*right)} {edge}"

    def finish(self, lines: Iterable[str]) -> str:
        """Returns the lines as one text without trailing blanks, in ASCII unless other characters can be shown."""
        text = "\n".join(line.rstrip() for line in lines) + "\n"
        return text if self.unicode else text.translate(_ASCII)


def display_width(text: str) -> int:
    """Returns the columns of a text on a terminal: two for wide East Asian characters, none for combining ones."""
    if text.isascii():
        return len(text)
    return sum(_columns(character) for character in text)


def cut(text: str, columns: int) -> str:
    """Shortens ``text`` to at most ``columns`` columns by removing its middle: names differ at either end."""
    if display_width(text) <= columns:
        return text
    if columns <= 1:
        return "…"[:columns]
    head = _prefix(text, columns // 2)
    tail = _prefix(text[::-1], columns - 1 - display_width(head))[::-1]
    return f"{head}…{tail}"


def pad(text: str, columns: int) -> str:
    """Returns ``text`` cut, or padded on the right, to exactly ``columns`` columns."""
    text = cut(text, columns)
    return text + " " * (columns - display_width(text))


def right(text: str, columns: int) -> str:
    """Right-aligns a number without ever cutting it: a wrong number is worse than a wide column."""
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
    """Joins short texts with dots to lines, as many per line as fit into ``columns``."""
    lines: list[str] = []
    for whole in items:
        item = cut(whole, columns)
        if lines and display_width(lines[-1]) + 3 + display_width(item) <= columns:
            lines[-1] += f" · {item}"
        else:
            lines.append(item)
    return lines


def hang(head: str, columns: int, lines: Iterable[str]) -> list[str]:
    """Puts ``head``, which is ``columns`` wide, before the first line, and as many blanks before the others."""
    return [(" " * columns if number else head) + line for number, line in enumerate(lines)]


def bar(share: float | None, columns: int) -> str:
    """Returns a bar as long as ``share`` (0 to 1) of ``columns``, to an eighth of a column: the least for any positive share."""
    if share is None or not share > 0:
        return ""
    eighths = max(1, min(columns * 8, round(share * columns * 8)))
    return "█" * (eighths // 8) + _EIGHTHS[eighths % 8].strip()


def stacked(weights: Sequence[float], columns: int) -> list[int]:
    """Divides the ``columns`` of a bar in proportion to the weights, by the largest remainder method; returns columns per weight."""
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
