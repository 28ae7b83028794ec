"""Text that somebody else wrote, made fit for a terminal and a log."""

from __future__ import annotations

import logging
import unicodedata
from typing import Final

MOST_CHARACTERS: Final = 4000
"""Of one text: a file may hold megabytes of name."""

_UNPRINTABLE: Final = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})
"""Unicode categories of what moves the cursor, changes the direction of text, or cannot be encoded."""


def printable(value: object, *, most: int = MOST_CHARACTERS, lines: bool = False) -> str:
    """Text in which nothing moves the cursor, colours, hides or reorders: such characters read as their escapes.

    Args:
        value: anything with a text, such as the name of a folder or what a server answered.
        most: characters that are kept.
        lines: keep ends of lines.
    """
    text = str(value)[:most]
    if text.isascii() and text.isprintable():
        return text
    return "".join(
        letter if is_printable(letter) or (lines and letter == "\n") else escaped(letter) for letter in text
    )


def is_printable(letter: str) -> bool:
    """Whether a character shows as itself and does nothing else."""
    return unicodedata.category(letter) not in _UNPRINTABLE


def escaped(letter: str) -> str:
    """How a character reads that may not be shown."""
    return letter.encode("unicode_escape", "surrogatepass").decode("ascii")


class PrintableRecords(logging.Filter):
    """Makes every record of a logger printable: reasons of servers, paths and exceptions are somebody else's text."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Change the record; keep it."""
        try:
            said = record.getMessage()
        except (TypeError, ValueError):  # its arguments do not fit; who formats it says so
            return True
        shown = printable(said, lines=True)
        if shown != said:
            record.msg, record.args = shown, None
        if record.exc_info and not record.exc_text:
            # Formatters take the text that is there.
            told = logging.Formatter().formatException(record.exc_info)
            record.exc_text = printable(told, most=len(told), lines=True)
        return True
