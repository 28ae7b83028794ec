"""The command line: parses arguments, calls one function, prints, sets the exit code."""

from __future__ import annotations

import sys
from contextlib import suppress

from otel_train.files import dump_json
from otel_train.safety import printable


def complain(text: str) -> None:
    """Prints one line on standard error: standard output is for the data that other programs read."""
    if sys.stderr is not None:  # None where it was closed: print(file=None) writes to standard output
        with suppress(OSError):
            print(f"otel-train: {printable(' '.join(text.split()))}", file=sys.stderr)


def print_json(document: object, indent: int | None = None) -> None:
    """Prints JSON as ASCII text: every output encoding has it, and no name in it can control the terminal."""
    print(dump_json(document, indent, ascii_only=True))
