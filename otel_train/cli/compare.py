"""``otel-train compare``: compares two traces or two runs."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from otel_train.cli import complain, print_json
from otel_train.cli.arguments import (
    add_run_dir,
    at_least,
    names_a_file,
    one_rank,
    print_earlier_trainings,
    read_trace,
)
from otel_train.compare import Side, compare, is_slower, side_of_run, side_of_trace
from otel_train.console.text import ABSENT, INDENT, TextLayout, count, duration, hang, pad, percent, right
from otel_train.trace_analysis.summary import summarize

SLOWER = 1
DESCRIPTION = "Compare two runs or two profiler traces."
EPILOG = """\
Traces are compared step by step, runs by their exported histograms. Each ratio has a 95 % confidence interval.
Exit code 2 if the two cannot be compared: different numbers of ranks, or too few steps.

examples:
  otel-train compare before.json.gz after.json.gz
  otel-train compare runs/a runs/b
  otel-train compare runs/main runs/mine --fail-if-slower 5%    exit code 1 if steps are more than 5 % longer
"""
_ROWS, _VALUE, _RATIO, _INTERVAL = 14, 10, 9, 18
_LEAST_DIFFERENCE = 0.01  # of two shares, to be printed: one percentage point
_NO_LIMIT = 1.0
"""Share from which ``--fail-if-slower`` is refused: a limit of 100 % or more is taken for a typing error, 5 for 5 %."""
_STYLES = {"slower": "red", "faster": "green"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of this command."""
    add = parser.add_argument
    add("before", metavar="A", help="trace file, run directory, one of its rank folders, or run id")
    add("after", metavar="B", help="the same kind as A")
    limit = "exit code 1 if steps are longer by more than P, such as 5%% or 0.05, with 95 %% confidence"
    add("--fail-if-slower", type=_share, metavar="P", help=limit)
    add(
        "--rank",
        type=at_least(0),
        metavar="N",
        help="with two runs: the rank to compare (default: the lowest)",
    )
    add("--json", action="store_true", help="print one JSON object")
    add_run_dir(parser)


def run(args: argparse.Namespace) -> int:
    """Prints the comparison; returns 1 if steps are slower than ``--fail-if-slower`` allows."""
    document = compare(*(_side(target, args) for target in (args.before, args.after)))
    slower = None if args.fail_if_slower is None else is_slower(document, args.fail_if_slower)
    if args.json:
        print_json(document)
    else:
        page = TextLayout.of(sys.stdout)
        print(page.finish(_lines(page, document)), end="")
    if args.fail_if_slower is not None and slower is not False:
        change = f"slower by more than {percent(args.fail_if_slower)}"
        change = f"is {change}" if slower else f"may be {change}: there are too few steps to tell"
        complain(f"{document['after']} {change}")
    return SLOWER if slower else 0


def _side(target: str, args: argparse.Namespace) -> Side:
    if names_a_file(target):
        trace = read_trace(Path(target))
        return side_of_trace(summarize(trace, most=50), name=target)
    _, folder = one_rank(target, args)
    print_earlier_trainings(folder.parent)
    return side_of_run(folder, name=target)


def _lines(page: TextLayout, document: Mapping[str, Any]) -> Iterator[str]:
    step, rows = document["rows"][0], document["rows"]
    name = page.safe(f"{document['before']} → {document['after']}")
    badge = (step["conclusion"], _STYLES.get(step["conclusion"], "bold"))
    yield page.rule([("otel_train", "bold"), (name, "cyan")], badge)
    yield from (page.line(line, "bold") for line in page.prose(_change(step), indent=2))
    if step["low"] is not None and document["kind"] == "run":
        yield from _dim(
            page, "The interval is about these two runs. Other load on the machine is not in it: repeat both."
        )
    for difference in document["differences"]:
        yield from _dim(page, f"differs: {difference}")
    yield ""
    interval = 0 if page.is_narrow else _INTERVAL
    column = page.columns - len(INDENT) - 2 * _VALUE - _RATIO - interval - 2
    heads = right("before", _VALUE) + right("after", _VALUE) + right("ratio", _RATIO)
    heads += right("95 %", interval) if interval else ""
    yield page.line(pad("mean of", column) + heads, "dim")
    for row in rows[:_ROWS]:
        yield page.line(_row(page, row, column, interval), _STYLES.get(row["conclusion"], ""))
    if len(rows) > _ROWS:
        yield page.line(f"and {len(rows) - _ROWS} more with --json", "dim")
    yield ""
    yield from _quantiles(page, step)
    for row in document["shares"]:
        if abs(row["before"] - row["after"]) >= _LEAST_DIFFERENCE:
            values = right(percent(row["before"]), _VALUE) + right(percent(row["after"]), _VALUE)
            yield INDENT + pad(page.safe(row["name"].replace("_", " ")), column) + values
    for key, heading in (("only_before", "only in the first"), ("only_after", "only in the second")):
        if document[key]:
            yield from _dim(page, f"{heading}: {', '.join(document[key][:8])}")


def _dim(page: TextLayout, text: str) -> Iterator[str]:
    return (page.line(line, "dim") for line in page.prose(text, indent=2))


def _row(page: TextLayout, row: Mapping[str, Any], column: int, interval: int) -> str:
    before, after = (row[key]["mean"] for key in ("before", "after"))
    ratio = ABSENT if row["ratio"] is None else f"{row['ratio']:.3f}"
    values = right(duration(before), _VALUE) + right(duration(after), _VALUE) + right(ratio, _RATIO)
    if interval:
        values += right(ABSENT if row["low"] is None else f"{row['low']:.3f} to {row['high']:.3f}", interval)
    return pad(page.safe(row["name"]), column) + values


def _quantiles(page: TextLayout, step: Mapping[str, Any]) -> Iterator[str]:
    for name in ("p50", "p95", "p99"):
        texts = []
        for key in ("before", "after"):
            value, low, high = step[key][name]
            between = "" if low is None or high is None else f" ({duration(low)} to {duration(high)})"
            texts.append(f"{duration(value)}{between}")
        head = INDENT + pad(f"step {name}", 10)
        yield from hang(head, len(head), page.prose(" → ".join(texts), indent=len(head)))
    counts = " and ".join(count(step[key]["count"]) for key in ("before", "after"))
    yield page.line(f"of {counts} steps", "dim")
    yield ""


def _change(step: Mapping[str, Any]) -> str:
    if step["ratio"] is None:
        return "There is no ratio: the steps of the first took no time."
    text = f"A step takes {step['ratio']:.3f} times as long"
    if step["low"] is None:
        return f"{text}, from too few steps to be sure."
    text += f" ({step['low']:.3f} to {step['high']:.3f})"
    return f"{text}." if step["conclusion"] != "no difference shown" else f"{text}: no difference is shown."


def _share(text: str) -> float:
    try:
        share = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        share = -1.0
    if not 0 <= share < _NO_LIMIT:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a share such as 5% or 0.05")
    return share
