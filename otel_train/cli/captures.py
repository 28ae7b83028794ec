"""Traces named on the command line: files, or the captures of a run."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from otel_train.analyze.trace import Trace, read
from otel_train.errors import RunDirectoryError, TraceError
from otel_train.exporters.run_directory import find_run
from otel_train.profiler.storage import OF_A_RANK, captures_of, together
from otel_train.text import printable

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

LARGE_BYTES = 100 << 20
"""From here on reading takes long enough to show how far it is."""

_EVERY_S = 0.2


def chosen(targets: Sequence[str], root: Path) -> list[Path]:
    """The traces that are meant.

    Args:
        targets: trace files, or one run or run id; nothing for the newest run.
        root: folder that holds the run directories.

    Returns:
        The files; of a run, its newest capture, of every rank.

    Raises:
        RunDirectoryError: there is neither such a file nor such a run, or the run has no capture.
    """
    files = [Path(target) for target in targets]
    if files and all(file.is_file() for file in files):
        return files
    if len(targets) > 1:
        missing = next(file for file in files if not file.is_file())
        raise RunDirectoryError(f"{missing}: is no file. Give trace files, or one run")
    run = find_run(targets[0] if targets else None, root)
    captures = captures_of(run)
    if not captures:
        raise RunDirectoryError(
            f"{run}: has no captures. A trace of torch.profiler can be given by its path, too"
        )
    return together(captures, captures[-1])


def read_all(paths: Sequence[Path]) -> list[Trace]:
    """The traces, with a line on a terminal that says how far a large one is.

    Raises:
        TraceError: one of them is no trace.
    """
    return [_numbered(read(path, progress=progress(path, sys.stderr))) for path in paths]


def _numbered(trace: Trace) -> Trace:
    """The trace, with the rank that its file's name says where it does not say so itself."""
    told = OF_A_RANK.search(trace.path.name)
    if trace.rank is not None or told is None:
        return trace
    import dataclasses

    unsaid = tuple(sentence for sentence in trace.missing if "which rank" not in sentence)
    return dataclasses.replace(trace, rank=int(told[1]), missing=unsaid)


def progress(path: Path, stream: TextIO) -> Callable[[int, int], None] | None:
    """What shows on a terminal how far a large file is; None where nothing should.

    Raises:
        TraceError: there is no such file.
    """
    try:
        large = path.stat().st_size >= LARGE_BYTES
    except OSError as error:
        raise TraceError(f"{path}: cannot be read: {error.strerror or error}") from error
    if not large or not stream.isatty():
        return None
    begun, shown = time.monotonic(), [0.0]

    def show(done: int, size: int) -> None:
        now = time.monotonic()
        if done < size and now - shown[0] < _EVERY_S:
            return
        shown[0] = now
        rate = done / 1e6 / max(now - begun, 1e-9)
        text = f"reading {printable(path.name)}  {done / size:4.0%}  {rate:,.0f} MB/s"
        print(f"\r\x1b[K{text}" if done < size else "\r\x1b[K", end="", file=stream, flush=True)

    return show
