"""``otel-train report``: a run as one page that opens in any browser, without a network."""

from __future__ import annotations

import argparse
from pathlib import Path

from otel_train.analyze.report import render
from otel_train.atomic import dump_json, replace_text
from otel_train.cli import ranks, summary
from otel_train.cli.report_data import gather
from otel_train.errors import RunDirectoryError
from otel_train.text import printable

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
    ranks.add_arguments(parser)
    parser.add_argument(
        "--output", metavar="FILE", help=f"where to write it (default: {FILE_NAME} in the run directory)"
    )


def run(args: argparse.Namespace) -> int:
    """Write the page, and say where it is."""
    chosen = ranks.chosen_ranks(args, summary.FILE_NAME)
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
    ranks.tell_earlier(home)
    return 0
