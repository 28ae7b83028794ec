"""The command line: parses arguments, calls one function, prints, sets the exit code."""

from __future__ import annotations

import sys
from contextlib import suppress

from otel_train.safety import printable


def complain(text: str) -> None:
    """Prints one line on standard error, which leaves the output to programs that read it."""
    if sys.stderr is not None:  # it is closed: print would take standard output in its place
        with suppress(OSError):
            print(f"otel-train: {printable(' '.join(text.split()))}", file=sys.stderr)
