"""``otel-train analyze``: analyzes profiler traces."""

from __future__ import annotations

import argparse
import shlex
import sys

from otel_train.cli import print_json
from otel_train.cli.arguments import add_run_dir, at_least, chosen_traces, read_trace
from otel_train.console.text import TextLayout
from otel_train.console.trace_summary import render_trace_summary
from otel_train.files import problem_of
from otel_train.profiler.storage import metadata_path, note_analysis
from otel_train.safety import printable
from otel_train.trace_analysis.events import shapes
from otel_train.trace_analysis.summary import summarize_ranks

DESCRIPTION = "Analyze a profiler trace, or the newest capture of a run."
EPILOG = """\
A trace is a file of torch.profiler's export_chrome_trace, plain or gzip, up to gigabytes. Traces of several ranks
also show which rank waits for which. The main finding of a capture is added to its metadata.
docs/reference/analysis.md explains each value.

examples:
  otel-train analyze trace.json.gz
  otel-train analyze runs/20260131-x7              the newest capture of a run, all its ranks
  otel-train analyze rank0.json.gz rank1.json.gz
  otel-train analyze trace.json --json | jq '.findings[0].summary'
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of this command."""
    add = parser.add_argument
    add("trace", nargs="*", metavar="TRACE|RUN", help="trace files, or a run (default: the newest run)")
    top = "operators and kernels listed (default: 10)"
    add("--top", type=at_least(1), default=10, metavar="N", help=top)
    shapes = "also list the input shapes of this operator, such as aten::addmm"
    add("--shapes", metavar="OP", help=shapes)
    add("--json", action="store_true", help="print JSON: one object per trace and line")
    add_run_dir(parser)


def run(args: argparse.Namespace) -> int:
    """Analyzes the traces and prints the result."""
    traces = [read_trace(path) for path in chosen_traces(args.trace, args.run_dir)]
    documents = summarize_ranks(traces, most=args.top)
    for trace, document in zip(traces, documents, strict=True):
        if not problem_of(metadata_path(trace.path)):  # the metadata can be read, so that it may be replaced
            note_analysis(trace.path, document)
        if args.shapes:
            document["shapes"] = {args.shapes: shapes(trace.path, args.shapes, most=args.top)}
    if args.json:
        for document in documents:
            print_json(document)
        return 0
    print(render_trace_summary(TextLayout.of(sys.stdout), documents[0]), end="")
    if len(documents) > 1:
        others = shlex.join(str(document["path"]) for document in documents[1:])
        print(f"\nThe same of the other ranks: otel-train analyze {printable(others)}")
    return 0
