"""``otel-train summary``: prints the run summary."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from otel_train.cli import arguments, complain, print_json
from otel_train.console.summary import activity_shares, render_run_summary, steps_per_second
from otel_train.console.text import ABSENT, TextLayout, count, cut, duration, pad, percent, right, rounded
from otel_train.datamodel import CAPTURES_FOLDER, RUN_FILE, SUMMARY_FILE
from otel_train.exporters.spool import requests_left
from otel_train.files import JsonFileCache
from otel_train.profiler.storage import finding_summary, metadata_path, read_metadata
from otel_train.rundata.files import current_document, has_postmortem
from otel_train.rundata.live_view import state_of
from otel_train.rundata.liveness import written_until
from otel_train.rundata.run import is_of_earlier_attempt, read_summary

DESCRIPTION = "Print the run summary: a table of all ranks, then the summary of the lowest rank."
EPILOG = """\
A live run rewrites its summary.json every 30 s, so its summary can be printed, too, with its age. After a crash the last
one is printed. docs/reference/summary.md explains each value.

examples:
  otel-train summary runs/20260131-x7
  otel-train summary 20260131-x7 --rank 3
  otel-train summary 20260131-x7 --json | jq '.findings[0].summary'
"""
_COLUMNS = {"rank": 5, "state": 12, "wall": 10, "steps": 9, "steps/s": 9, "data wait": 10, "lost": 8}
_WIDE_ONLY = ("wall", "steps/s", "lost")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of this command."""
    arguments.add_run_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Prints the summaries of the selected ranks."""
    found, code = arguments.read_ranks(
        args,
        SUMMARY_FILE,
        lambda folder: _with_capture_findings(read_summary(folder / SUMMARY_FILE), folder.parent),
    )
    summaries = list(found.values())
    earlier = [folder for folder, summary in found.items() if is_of_earlier_attempt(summary, folder)]
    if earlier:
        ranks = arguments.named_ranks([int(folder.name.removeprefix("rank")) for folder in earlier])
        complain(
            f"{earlier[0].parent}: {ranks}: a new attempt has written no summary yet; this is the one before"
        )
    if args.json:
        for summary in summaries:
            print_json(summary)
        return code
    run_directory = next(iter(found)).parent
    arguments.print_earlier_trainings(run_directory)
    about = JsonFileCache().get_or_empty(run_directory / RUN_FILE, [])
    page, now_s = TextLayout.of(sys.stdout), time.time()
    written_s = written_until(summaries[0]) if summaries[0].get("state") == "running" else None
    for number, (folder, summary) in enumerate(found.items()):
        # A summary that was copied from another rank has that one's number, which validate reports.
        summaries[number] = {**summary, "rank": int(folder.name.removeprefix("rank"))}
        if summary.get("state") == "running":
            summaries[number] = {
                **summaries[number],
                "state": state_of(folder, summary, about, now_s)[0].word,
            }
    if len(summaries) > 1:
        print(rank_table(page, summaries))
    print(render_run_summary(page, {**summaries[0], "undelivered": requests_left(run_directory)}), end="")
    if written_s is not None:
        gone = ", and its process is gone" if summaries[0]["state"] == "gone" else ""
        more = " 'otel-train postmortem' has the last steps." if has_postmortem(run_directory) else ""
        print(f"Written {duration(max(0.0, now_s - written_s))} ago{gone}.{more}")
    return code


def _with_capture_findings(summary: Mapping[str, Any], run_directory: Path) -> Mapping[str, Any]:
    """Returns the summary, with the findings of captures that were analysed after it was written."""
    captures = [dict(row) for row in summary.get("captures") or ()]
    for row in captures:
        if row.get("file") and not row.get("finding"):
            # The folder of the path is not used: the run directory may have been moved, and a summary is untrusted.
            path = run_directory / CAPTURES_FOLDER / Path(row["file"]).name
            row["finding"] = finding_summary(current_document(read_metadata(metadata_path(path))))
    return {**summary, "captures": captures} if captures else summary


def rank_table(page: TextLayout, summaries: list[Mapping[str, Any]]) -> str:
    """Returns a table with one row per rank, so that a rank that differs from the others stands out."""
    first = summaries[0]
    name = page.safe(first.get("run_name") or first.get("run_id") or ABSENT)
    heads = "".join(right(head, columns) for head, columns in _columns(page).items())
    lines = [
        page.rule([("otel_train", "bold"), (name, "cyan")], (arguments.ranks_present(summaries), "bold")),
        page.paint(f"{heads}  finding", "dim"),
        *(_row(page, summary) for summary in summaries),
    ]
    return page.finish(lines)


def _columns(page: TextLayout) -> dict[str, int]:
    return {
        head: columns for head, columns in _COLUMNS.items() if not (page.is_narrow and head in _WIDE_ONLY)
    }


def _row(page: TextLayout, summary: Mapping[str, Any]) -> str:
    wall_s, steps = summary.get("wall_seconds"), (summary.get("steps") or {}).get("train")
    finding: Mapping[str, Any] = next(iter(summary.get("findings") or ()), {})
    about = f" ({finding['loader']})" if finding.get("loader") else ""
    values = {
        "rank": str(summary.get("rank")),
        "state": pad(page.safe(summary.get("state")), _COLUMNS["state"] - 1).rstrip(),
        "wall": duration(wall_s),
        "steps": count(steps),
        "steps/s": rounded(steps_per_second(summary)),
        "data wait": percent(activity_shares(summary).get("data_wait")),
        "lost": count((summary.get("telemetry") or {}).get("records_lost")),
    }
    shown = _columns(page)
    cells = "".join(right(values[head], columns) for head, columns in shown.items())
    available = page.columns - sum(shown.values()) - 2
    return f"{cells}  {cut(page.safe(finding.get('name', ABSENT)) + page.safe(about), available)}"
