"""Text for terminals: the run summary, what a trace says, and how numbers and names are written."""

from __future__ import annotations

import os
import shutil
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from collections.abc import Mapping

COLUMNS_UNKNOWN = 100


def terminal_of(stream: TextIO, environ: Mapping[str, str] = os.environ) -> tuple[int, bool, bool]:
    """Columns of a stream, whether it shows colours, and whether characters outside ASCII: a ``text.TextLayout``.

    ``NO_COLOR``, ``FORCE_COLOR``, ``TERM`` and ``COLUMNS`` are honoured.
    """
    terminal = stream.isatty()
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
