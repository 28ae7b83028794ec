"""Prints a finished capture: trace file, findings, longest operations."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, NamedTuple

from otel_train.config.validation import MIB

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from otel_train.datamodel import Capture

BLOCK = "profiler"
"""Its name in ``console_metrics``."""

_NAME_COLUMNS = 44
_MS = 1e3


class Console(NamedTuple):
    """Prints captures on standard error, so that the program's own output is unchanged.

    Attributes:
        lines: print lines with the prefix ``otel_train:``, unless printed as a block.
        block: print the block ``[Profiler]``.
        top: operators, and kernels, to list; with 0 no lines are printed.
    """

    lines: bool
    block: bool
    top: int

    def show(self, capture: Capture) -> None:
        """Prints a capture that has a file, in one write."""
        shown: Iterable[str] = ()
        if self.block:
            shown = block(capture, self.top)
        elif self.lines and self.top:
            shown = (f"otel_train: {line}" for line in lines(capture, self.top))
        if capture.file and sys.stderr is not None:
            sys.stderr.write("".join(f"{line}\n" for line in shown))
            sys.stderr.flush()


def block(capture: Capture, top: int) -> Iterator[str]:
    """Yields the trace file, the longest operations, the shares of the stages, memory, and findings."""
    record = capture.metadata
    yield f"[Profiler] Epoch {record.get('epoch')}: {_plain(capture.file)}"
    if not capture.finding:
        yield "  not analysed: otel-train analyze, with that path"
        return
    for key, what in (("top_cpu_ops", "CPU operations"), ("top_cuda_ops", "CUDA kernels")):
        rows = (record.get(key) or ())[:top]
        if rows:
            yield f"  Top {len(rows)} {what}:"
        for number, row in enumerate(rows, 1):
            yield f"    {number}. {_plain(str(row['name']))}: {row['seconds'] * _MS:.2f} ms ({row['share'] or 0.0:.1%})"
    stages = [f"{_plain(str(row['stage']))} {row['share']:.1%}" for row in record.get("stages") or ()]
    if stages:
        yield f"  Shares: {', '.join(stages)}"
    for peak in (record.get("memory_peaks") or ())[:1]:
        yield f"  Memory peak: {peak['bytes'] / MIB:.1f} MB on {_plain(str(peak['device']))} at {peak['time_seconds']:.3f} s"
    yield "  Bottlenecks:"
    for finding in record.get("findings") or ():
        yield f"    {_plain(str(finding['claim']))} {_plain(str(finding['advice']))}"


def lines(capture: Capture, top: int) -> Iterator[str]:
    """Yields the same as lines, without control characters."""
    first, last = capture.steps
    steps = f"steps {first} to {last}" if last > first else f"step {first}"
    yield f"captured {steps}: {_plain(capture.file)}"
    if not capture.finding:
        yield "  what is in it: otel-train analyze, with that path"
        return
    yield f"  {_plain(capture.finding)}"
    for key, what in (("top_cpu_ops", "on the host"), ("top_cuda_ops", "on the device")):
        rows = (capture.metadata.get(key) or ())[:top]
        if rows:
            yield f"  {f'the longest {what}':{_NAME_COLUMNS}}       time   share"
        for row in rows:
            yield f"  {_row(row)}"


def _row(row: Mapping[str, Any]) -> str:
    name = _plain(str(row["name"]))[:_NAME_COLUMNS]
    return f"{name:{_NAME_COLUMNS}} {row['seconds'] * _MS:7.2f} ms {row['share'] or 0.0:7.1%}"


def _plain(text: str) -> str:
    return "".join(letter if letter.isprintable() else "?" for letter in text)
