"""``otel-train report``: writes a run as one self-contained HTML file."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from otel_train.cli import arguments, complain, print_json
from otel_train.datamodel import SUMMARY_FILE
from otel_train.errors import RunDirectoryError
from otel_train.files import replace_named
from otel_train.profiler.storage import captures_of, taken_together
from otel_train.rundata.live_view import RankReader, RankView
from otel_train.rundata.metrics_history import series_of
from otel_train.rundata.run import openable, read_summary, trace_of
from otel_train.safety import printable
from otel_train.ui.captures import analysis_of
from otel_train.ui.pages import report_page


def gather(run: Path, folders: Mapping[int, Path], *, rank: int) -> tuple[RankView, dict[str, Any]]:
    """Returns the view of one rank for the HTML report, and the document of ``--json``, with the newest capture of the run."""
    ranks = _summaries(folders)
    taken = openable(captures_of(run), complain)
    newest = taken_together(taken, taken[-1]) if taken else []
    traces = filter(None, [trace_of(path, arguments.read_trace, complain) for path in newest])
    view = RankReader().view(run, rank)
    return view, {
        "summary": view.summary,
        "ranks": ranks,
        "series": view.series or series_of([]),
        "histograms": view.histograms,
        "records": view.records,
        "captures": [{"name": trace.path.name, **analysis_of(trace)} for trace in traces],
    }


def _summaries(folders: Mapping[int, Path]) -> list[Mapping[str, Any]]:
    """Returns the summaries that can be read; reports the others on standard error, and raises if there are no others."""
    read = [arguments.read_or_problem(_summary, folder) for folder in folders.values()]
    problems = [each for each in read if isinstance(each, RunDirectoryError)]
    found = [each for each in read if not isinstance(each, RunDirectoryError)]
    if problems and not found:
        raise problems[0]
    for problem in problems:
        complain(str(problem))
    return found


def _summary(folder: Path) -> Mapping[str, Any]:
    return read_summary(folder / SUMMARY_FILE)


def page_of_run(run: Path) -> str:
    """Returns the HTML report of a run, with the pages of its lowest rank."""
    folders = arguments.ranks_with(run, SUMMARY_FILE)
    view, document = gather(run, folders, rank=min(folders))
    return report_page(view, document["captures"])


FILE_NAME = "report.html"
DESCRIPTION = "Write a run, live or finished, as one HTML file."
EPILOG = """\
The file has the pages of 'otel-train ui' and the newest capture with its flame graph, from each rank that took part. It
loads nothing from a network.

examples:
  otel-train report runs/20260131-x7
  otel-train report 20260131-x7 --output /tmp/report.html
  otel-train report 20260131-x7 --json | jq '.histograms[0].name'

Exit codes: 0 written, 1 written, but the summary of a rank cannot be read, 2 error.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of this command."""
    documents = "print the data of the report as one JSON object"
    arguments.add_run_arguments(
        parser, rank="the rank of the pages (default: the lowest)", documents=documents
    )
    where = f"file to write (default: {FILE_NAME} in the run directory)"
    parser.add_argument("--output", metavar="FILE", help=where)


def run(args: argparse.Namespace) -> int:
    """Writes the file and prints its path."""
    chosen = arguments.chosen_ranks(args, SUMMARY_FILE)
    rank, folder = next(iter(chosen.items()))
    home = folder.parent
    view, document = gather(home, chosen, rank=rank)
    code = 0 if len(document["ranks"]) == len(chosen) else 1
    if args.json:
        print_json(document)
        return code
    path = Path(args.output) if args.output else home / FILE_NAME
    try:
        replace_named(path, report_page(view, document["captures"]))
    except OSError as error:
        raise RunDirectoryError(f"{path}: cannot be written: {error.strerror or error}") from error
    print(printable(path))
    arguments.print_earlier_trainings(home)
    return code
