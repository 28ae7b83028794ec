"""``otel-train report``: a run as one page that opens in any browser, without a network."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from otel_train.cli import arguments, summary
from otel_train.cli.compare import METRICS
from otel_train.errors import RunDirectoryError
from otel_train.files import dump_json, lines_of, mark_of, open_binary, parse_json, replace_text
from otel_train.profiler.storage import captures_of, together
from otel_train.rundata.metrics_history import histograms_of, moment_of, series_of
from otel_train.rundata.run import read_summary, records_below
from otel_train.safety import printable
from otel_train.trace_analysis.hot_spots import flame
from otel_train.trace_analysis.timeline import Scene
from otel_train.ui.report import render

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

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
    summaries = {number: read_summary(folder / summary.FILE_NAME) for number, folder in folders.items()}
    lines = list(_lines(folders[rank]))
    taken = captures_of(run)
    newest = together(taken, taken[-1]) if taken else []
    return {
        "summary": summaries[rank],
        "ranks": list(summaries.values()),
        "series": series_of([moment_of(line) for line in lines]),
        "histograms": histograms_of(lines[-1]) if lines else [],
        "records": records_below(run),
        "captures": [_capture(trace.path.name, Scene(trace)) for trace in arguments.read_all(newest)],
    }


def _capture(name: str, scene: Scene) -> dict[str, Any]:
    from otel_train.trace_analysis.summary import summarize

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


FILE_NAME = "report.html"
EPILOG = """\
One file: findings, timeline, stages, histograms, loaders, memory, ranks, and the newest capture with its flame graph.
It asks no server for anything, follows the browser's light or dark scheme, and can be used with the keys alone.

examples:
  otel-train report runs/20260131-x7
  otel-train report 20260131-x7 --output /tmp/report.html
  otel-train report 20260131-x7 --json | jq '.histograms[0].name'
"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Tell argparse about this command."""
    parser = subparsers.add_parser(
        "report",
        help="write a run as one page of HTML that needs nothing else",
        description="Write the report of a run, finished or running.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    arguments.add_arguments(parser)
    parser.add_argument(
        "--output", metavar="FILE", help=f"where to write it (default: {FILE_NAME} in the run directory)"
    )


def run(args: argparse.Namespace) -> int:
    """Write the page, and say where it is."""
    chosen = arguments.chosen_ranks(args, summary.FILE_NAME)
    rank, folder = next(iter(chosen.items()))
    home = folder.parent
    document = gather(home, chosen, rank=rank)
    if args.json:
        print(dump_json(document))
        return 0
    path = Path(args.output) if args.output else home / FILE_NAME
    try:
        replace_text(path, render(document))
    except OSError as error:
        raise RunDirectoryError(f"{path}: cannot be written: {error.strerror or error}") from error
    print(printable(path))
    arguments.tell_earlier(home)
    return 0
