"""Terminal output: run summary, trace analysis, formatting of numbers and names."""

from __future__ import annotations

import os
import select
import shutil
from collections.abc import Iterator
from typing import TextIO

from otel_train.safety import PRINT_S, takes_text

COLUMNS_UNKNOWN = 100


def terminal_of(stream: TextIO) -> tuple[int, bool, bool]:
    """Returns the fields of a ``text.TextLayout`` for a stream: its columns, whether it shows colours, and non-ASCII characters.

    ``NO_COLOR``, ``FORCE_COLOR``, ``TERM`` and ``COLUMNS`` are honoured.
    """
    environ = os.environ
    try:
        terminal = stream.isatty()
    except (AttributeError, OSError, ValueError):
        terminal = False  # the stream is closed, or the program has replaced it by another object
    color = terminal and environ.get("TERM") != "dumb"
    if environ.get("FORCE_COLOR"):
        color = True
    if environ.get("NO_COLOR"):
        color = False
    columns = shutil.get_terminal_size((COLUMNS_UNKNOWN, 24)).columns if terminal else COLUMNS_UNKNOWN
    if environ.get("COLUMNS", "").isdecimal():
        columns = int(environ["COLUMNS"])
    return columns, color, _writes_unicode(stream)


def _writes_unicode(stream: TextIO) -> bool:
    try:
        "█▏━µ–✖".encode(getattr(stream, "encoding", None) or "ascii")  # noqa: RUF001 - what we draw with
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def print_while_taken(text: str, stream: TextIO) -> None:
    """Prints text until the stream blocks for longer than ``PRINT_S``: the reader of a pipe, or a terminal, may have stopped."""
    for part in _parts(text):
        if not takes_text(stream, PRINT_S):
            break
        stream.write(part)
        stream.flush()


def _parts(text: str) -> Iterator[str]:
    """Yields the text in parts of whole lines, of at most PIPE_BUF bytes but for longer lines: a writable pipe takes so many."""
    part = ""
    for line in text.splitlines(keepends=True):
        if part and len((part + line).encode(errors="replace")) > select.PIPE_BUF:
            yield part
            part = ""
        part += line
    if part:
        yield part
