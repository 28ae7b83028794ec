"""``otel-train export``: writes the data of a run as JSON, CSV and trace files."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path

from otel_train.artifacts.writer import WrittenArtifacts, write
from otel_train.cli import arguments, print_json
from otel_train.console.text import TextLayout, plural
from otel_train.safety import printable

DESCRIPTION = "Write the data of a run as files (artifacts). The run may be live, finished or killed."
EPILOG = """\
Files: config.json, metrics.json, profiler_summary.json, stage_times.json, op_stats.csv, trace.json (for Perfetto),
profiler_context/stage_times.json and torch_profiler/. Other files of the run directory are not changed. With the
setting artifacts=True a run writes them at its end. docs/reference/artifacts.md has the schemas.

examples:
  otel-train export                                  the newest run, to artifacts/ in its run directory
  otel-train export runs/20260131-x7 --output-dir /tmp/x7
  otel-train export 20260131-x7 --rank 3
  otel-train validate runs/20260131-x7               check what was written

Exit codes: 0 written; 2 no such run, no data in it, or DIR holds files of these names that otel-train did not write.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of this command."""
    documents = "print JSON: what was written, what is absent and why"
    arguments.add_run_arguments(parser, rank="the rank to export (default: the lowest)", documents=documents)
    where = "folder to write to (default: artifacts in the run directory)"
    parser.add_argument("--output-dir", metavar="DIR", help=where)


def run(args: argparse.Namespace) -> int:
    """Writes the artifacts and prints what was written."""
    rank, folder = arguments.one_rank(args.run, args)
    home, target = folder.parent, Path(args.output_dir) if args.output_dir else None
    say(write(home, rank, target), as_json=args.json)
    arguments.print_earlier_trainings(home)
    return 0


def say(written: WrittenArtifacts, *, as_json: bool = False) -> None:
    """Prints what was written, what is absent and why."""
    if as_json:
        folder = str(written.folder)
        print_json({"folder": folder, "artifacts": written.files, "warnings": written.warnings})
        return
    page = TextLayout.of(sys.stdout)
    print(printable(written.folder))
    for name, entry in sorted(written.files.items()):
        print(f"  {name:<35}{page.safe(_entry_text(entry))}")
    for warning in written.warnings:
        print(f"  note: {page.safe(warning)}")


def _entry_text(entry: Mapping[str, object]) -> str:
    if "absent" in entry:
        return f"absent: {entry['absent']}"
    files = entry.get("files")
    if isinstance(files, list):
        return plural(len(files), "capture")
    return f"{entry['bytes']:>12,} bytes"
