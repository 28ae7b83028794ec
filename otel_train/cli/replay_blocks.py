"""``otel-train replay --blocks``: what is too old to be sent, as text that promtool makes blocks of."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Final

from otel_train.exporters.openmetrics import time_ms_of, write_text
from otel_train.exporters.run_directory import rank_directories
from otel_train.exporters.spool import MOST_LINE_BYTES, SpoolQueue, parts_of, rejected_in
from otel_train.files import lines_of, make_folder, open_binary

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

RECORDING: Final = "metrics.otlp.jsonl"

RECORDED, WAITS, REJECTED = "recorded", "waits", "rejected"
"""Where a request lies: in the recording, in the spool, in ``spool/rejected/``."""


def stored_requests(rank: Path) -> Iterator[tuple[str, bytes]]:
    """Every request of metrics that a rank has on disk, with where it lies. Most lie in several places.

    Raises:
        OSError: a file is there but cannot be read.
    """
    for part in parts_of(rank / RECORDING):
        with open_binary(part) as file:
            yield from (
                (RECORDED, line[:-1]) for line in lines_of(file, MOST_LINE_BYTES) if line.endswith(b"\n")
            )
    queue = SpoolQueue(rank, "metrics")
    yield from ((WAITS, line) for line in queue.waiting())
    if queue.rejected_file is not None:
        for entry in rejected_in(queue.rejected_file):
            if entry.request is not None:
                yield REJECTED, entry.request


def blocks(run_directory: Path, folder: Path, *, older_than_s: float) -> int:
    """Write the metrics of a run that are older than so many seconds, and say what to do with them; the exit status.

    Raises:
        OSError: something cannot be read or written.
    """
    make_folder(folder)
    path = folder / f"{run_directory.name}.openmetrics.txt"
    until_ms = (time.time() - older_than_s) * 1000
    ranks = rank_directories(run_directory)
    written = write_text(path, (_older(rank, until_ms) for rank in ranks))
    print(f"{path}: {written.points} data points of {written.exports} exports")
    if written.foreign:
        print(f"{written.foreign} metrics that otel_train does not publish are left out.", file=sys.stderr)
    if written.unreadable:
        print(f"{written.unreadable} lines are no request of metrics, and left out.", file=sys.stderr)
    if written.points:
        print(
            "Make blocks of it in the data folder of Prometheus, which takes them within a minute, or at its start:\n"
            f"  promtool tsdb create-blocks-from openmetrics {path} DATA\n"
            "Histograms have buckets there (_bucket, _count, _sum), since the text format has no native ones."
        )
    return 0


def _older(rank: Path, until_ms: float) -> Iterator[bytes]:
    seen: set[int] = set()
    for _, line in stored_requests(rank):
        time_ms = time_ms_of(line)
        if time_ms is None or (time_ms < until_ms and time_ms not in seen):
            yield line
            seen.add(time_ms or 0)
