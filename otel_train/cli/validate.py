"""``otel-train validate``: checks that the files of a run are complete and consistent."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from otel_train.artifacts.validate import Fault, check_artifacts, check_run
from otel_train.artifacts.writer import MARK, SUMMARY
from otel_train.cli import complain, print_json
from otel_train.cli.arguments import add_run_dir, chosen_run, in_processes, kind_of, print_earlier_trainings
from otel_train.cli.report import FILE_NAME as REPORT
from otel_train.cli.report import page_of_run
from otel_train.console.text import TextLayout, plural
from otel_train.datamodel import RUN_FILE
from otel_train.errors import OtelTrainError, RunDirectoryError
from otel_train.files import folder_problem, rank_folders, read_json, replace_named
from otel_train.rundata.files import FOREIGN, current_document
from otel_train.rundata.live_view import RankView
from otel_train.rundata.run import read_run
from otel_train.safety import printable
from otel_train.ui.pages import report_page

Document = Mapping[str, Any]

DESCRIPTION = (
    "Check that the artifacts of a run, or the files of its run directory, are complete and consistent."
)
EPILOG = """\
DIR is a folder written by 'otel-train export', a run directory or a run id.

Artifacts: each file listed in profiler_summary.json exists, can be read, and its totals agree.
Run directory: each file of each rank is whole, no records were lost, and the values of summary.json agree:
activities add up to the wall time, which has passed since the start; stages of a phase to its activities, steps
to their phase; self time is at most inclusive time; rate times time is the count; the share of a finding is its
seconds of the time it is about.
A file that is absent for a known reason, such as op_stats.csv without a capture, is not a fault.

examples:
  otel-train validate runs/20260131-x7
  otel-train validate /tmp/x7 --analysis --report
  otel-train validate /tmp/x7 --json | jq '.faults[].file'

Exit codes: 0 no faults, 1 faults, 2 no such folder, or the report cannot be written.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of this command."""
    where = "folder of artifacts, or a run (default: the newest run)"
    parser.add_argument("dir", nargs="?", metavar="DIR", help=where)
    analysis = "also print the run summary and the analysis of the newest capture"
    parser.add_argument("--analysis", action="store_true", help=analysis)
    parser.add_argument(
        "--report", action="store_true", help=f"also write {REPORT} into DIR, as 'otel-train report' does"
    )
    document = "print one JSON object: ok, and faults (file, what)"
    parser.add_argument("--json", action="store_true", help=document)
    add_run_dir(parser)


def run(args: argparse.Namespace) -> int:
    """Checks the files and prints faults by file."""
    folder, made = _chosen(args)
    faults = check_artifacts(folder) if made else check_run(folder, in_processes)
    if args.json:
        listed = [fault._asdict() for fault in faults]
        print_json({"folder": str(folder), "ok": not faults, "faults": listed})
    else:
        _say(folder, faults)
        print_earlier_trainings(folder)
    if args.analysis or args.report:
        try:
            report = _show(args, folder, made=made)
        except (OtelTrainError, OSError, *FOREIGN) as error:
            complain(f"{folder} cannot be shown: {error}")
            return 1
        if report:
            _write(folder / REPORT, report, sys.stderr if args.json else sys.stdout)
    return 1 if faults else 0


def _chosen(args: argparse.Namespace) -> tuple[Path, bool]:
    """Returns the folder, and whether it holds artifacts, which 'otel-train export' made, rather than a run."""
    if args.dir:
        folder = Path(args.dir)
        if kind_of(folder) == "folder" and (problem := folder_problem(folder, links=True)):
            raise RunDirectoryError(f"{folder}: cannot be read: {problem}")
        if any(os.path.lexists(folder / name) for name in (SUMMARY, MARK)):
            return folder, True
        if (
            kind_of(folder) == "folder"
            and not os.path.lexists(folder / RUN_FILE)
            and not rank_folders(folder)
        ):
            remedy = "Give a run, or a folder that 'otel-train export' wrote"
            raise RunDirectoryError(
                f"{folder}: is neither a run directory nor a folder of artifacts. {remedy}"
            )
    return chosen_run(args.dir, args.run_dir), False


def _say(folder: Path, faults: Sequence[Fault]) -> None:
    page = TextLayout.of(sys.stdout)
    for fault in faults:
        print(page.path(f"{fault.file}: {fault.what}"))
    result = plural(len(faults), "fault") if faults else "complete and consistent"
    print(f"{printable(folder)}: {page.paint(result, 'red' if faults else 'green')}")


def _read(folder: Path, *, made: bool) -> tuple[Document, Document]:
    """Returns the summary, and the analysis of the newest capture: without one, the key ``absent`` with the reason."""
    if made:
        summary = current_document(read_json(folder / SUMMARY, root=folder))
        return summary, summary["capture"]
    reader = read_run(folder, min(rank_folders(folder), default=0))
    found = reader.newest_trace()
    if found is None:
        return reader.summary, {"absent": " ".join(["no readable capture.", *reader.warnings])}
    from otel_train.trace_analysis.summary import summarize

    return reader.summary, {**summarize(found[1]), "file": found[0].name}


def _show(args: argparse.Namespace, folder: Path, *, made: bool) -> str:
    """Prints the analysis; returns the report. Each only if it is asked for."""
    summary, capture = _read(folder, made=made)
    stream = sys.stderr if args.json else sys.stdout
    page = TextLayout.of(stream)
    if args.analysis:
        from otel_train.console.summary import render_run_summary
        from otel_train.console.trace_summary import render_trace_summary

        text = render_run_summary(page, summary)
        none = page.safe(f"No operations: {capture.get('absent')}") + "\n"
        print(
            text + (none if "absent" in capture else render_trace_summary(page, capture)), end="", file=stream
        )
    if not args.report:
        return ""
    return _artifact_report(folder, summary, capture) if made else page_of_run(folder)


def _write(path: Path, report: str, stream: TextIO) -> None:
    try:
        replace_named(path, report)
    except OSError as error:
        raise RunDirectoryError(f"{path}: cannot be written: {error.strerror or error}") from error
    print(printable(path), file=stream)


def _artifact_report(folder: Path, summary: Document, capture: Document) -> str:
    found = [] if "absent" in capture else [{"name": capture["file"], "analysis": capture, "flame": []}]
    return report_page(RankView.of_summary(folder, summary), found)
