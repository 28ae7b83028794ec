"""What a run directory says, put together for its report."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from otel_train.analyze.flame import flame
from otel_train.analyze.scene import Scene
from otel_train.artifacts.run_reader import records_below
from otel_train.cli import captures, summary
from otel_train.cli.run_side import METRICS
from otel_train.errors import RunDirectoryError
from otel_train.exporters.series import histograms_of, moment_of, series_of
from otel_train.files import lines_of, mark_of, open_binary, parse_json
from otel_train.profiler.storage import captures_of, together

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

MOST_LINES = 300
"""Lines of metrics that are drawn: more than that no screen can show."""


def gather(run: Path, folders: Mapping[int, Path], *, rank: int) -> dict[str, Any]:
    """Everything the report shows.

    Args:
        run: the run directory.
        folders: of the ranks that have a summary.
        rank: whose figures are drawn.

    Raises:
        RunDirectoryError: a summary cannot be read.
        TraceError: a capture cannot be read.
    """
    summaries = {number: summary.read(folder / summary.FILE_NAME) for number, folder in folders.items()}
    lines = list(_lines(folders[rank]))
    taken = captures_of(run)
    newest = together(taken, taken[-1]) if taken else []
    return {
        "summary": summaries[rank],
        "ranks": list(summaries.values()),
        "series": series_of([moment_of(line) for line in lines]),
        "histograms": histograms_of(lines[-1]) if lines else [],
        "records": records_below(run),
        "captures": [_capture(trace.path.name, Scene(trace)) for trace in captures.read_all(newest)],
    }


def _capture(name: str, scene: Scene) -> dict[str, Any]:
    from otel_train.analyze.summary import summarize

    return {"name": name, "analysis": summarize(scene.trace), "flame": flame(scene)}


def _lines(folder: Path) -> Iterator[dict[str, Any]]:
    """Lines of metrics, evenly spaced, the last two included: of those one may be torn, and is skipped."""
    paths = [path for path in (folder / f"{METRICS}.1", folder / METRICS) if mark_of(path) is not None]
    total = sum(1 for path in paths for _ in _read(path))
    every = max(1, total // MOST_LINES)
    for number, line in enumerate((line for path in paths for line in _read(path)), 1):
        if (total - number) % every == 0 or number == total - 1:
            yield from _parsed(line)


def _read(path: Path) -> Iterator[bytes]:
    try:
        with open_binary(path) as file:
            yield from lines_of(file)
    except OSError as error:
        raise RunDirectoryError(f"{path}: cannot be read: {error.strerror or error}") from error


def _parsed(line: bytes) -> Iterator[dict[str, Any]]:
    try:
        value = parse_json(line)
    except ValueError:
        return
    if isinstance(value, dict) and "resourceMetrics" in value:
        yield value
