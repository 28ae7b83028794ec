"""What a capture leaves on the console: where it lies, what was found, what took longest."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from otel_train.aggregate.captures import Capture

_NAME_COLUMNS = 44
_MS = 1e3


def tell(capture: Capture, top: int) -> None:
    """Show a capture that has a file on standard error: what the program prints itself stays as it is.

    Args:
        capture: one that is over.
        top: operators, and kernels, to name.
    """
    if capture.file and sys.stderr is not None:
        sys.stderr.write("".join(f"otel_train: {line}\n" for line in lines(capture, top)))
        sys.stderr.flush()


def lines(capture: Capture, top: int) -> Iterator[str]:
    """The same as lines, without anything that a terminal would obey."""
    first, last = capture.steps
    steps = f"steps {first} to {last}" if last > first else f"step {first}"
    yield f"captured {steps}: {_plain(capture.file)}"
    if not capture.finding:
        yield "  what is in it: otel-train analyze, with that path"
        return
    yield f"  {_plain(capture.finding)}"
    for key, what in (("top_cpu_ops", "on the host"), ("top_cuda_ops", "on the device")):
        rows = (capture.record.get(key) or ())[:top]
        if rows:
            yield f"  {f'the longest {what}':{_NAME_COLUMNS}}       time   share"
        for row in rows:
            yield f"  {_row(row)}"


def _row(row: Mapping[str, Any]) -> str:
    name = _plain(str(row["name"]))[:_NAME_COLUMNS]
    return f"{name:{_NAME_COLUMNS}} {row['seconds'] * _MS:7.2f} ms {row['share'] or 0.0:7.1%}"


def _plain(text: str) -> str:
    return "".join(letter if letter.isprintable() else "?" for letter in text)
