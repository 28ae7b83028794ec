"""The command line: parses arguments, calls one function, prints, sets the exit code."""

from __future__ import annotations

import sys
from contextlib import suppress

from otel_train.files import dump_json
from otel_train.safety import printable


def complain(text: str) -> None:
    """Prints one line on standard error, which leaves the output to programs that read it."""
    if sys.stderr is not None:  # it is closed: print would take standard output in its place
        with suppress(OSError):
            print(f"otel-train: {printable(' '.join(text.split()))}", file=sys.stderr)


def print_json(document: object, indent: int | None = None) -> None:
    """Prints JSON in ASCII: any standard output takes it, and no name in it moves the cursor."""
    print(dump_json(document, indent, ascii_only=True))
