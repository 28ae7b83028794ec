"""``otel-train doctor``: what prevents metrics from being measured or exported."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from otel_train.console.text import TextLayout
from otel_train.doctor import end_to_end
from otel_train.doctor.checks import NOTE, OK, PROBLEM, WARNING, worst
from otel_train.doctor.runner import examine, usual_places
from otel_train.errors import ConfigError
from otel_train.stack import configuration

if TYPE_CHECKING:
    from collections.abc import Iterable

    from otel_train.doctor.checks import CheckResult

SCHEMA = "otel_train.doctor/1"
DESCRIPTION = """\
Looks at what a run needs and says what is wrong, with a remedy: installed packages, settings and where they come
from, the run directory and its disk, shared memory, ports, the OTLP endpoint with TLS, token and clock. Then it sends
one marked metric and one marked span, and looks for them in Prometheus, the trace store and Grafana.

Run it where the training runs, with the same environment. It changes nothing, and ends in bounded time.
"""
EPILOG = """\
examples:
  otel-train doctor
  OTEL_EXPORTER_OTLP_ENDPOINT=http://collector:4318 otel-train doctor --prometheus http://prometheus:9090
  otel-train doctor --wait 0                 send nothing
  otel-train doctor --json | jq '.findings[] | select(.state == "problem")'

exit codes: 0 nothing is wrong, 1 something may hurt, 2 something does
"""
CODES = {OK: 0, NOTE: 0, WARNING: 1, PROBLEM: 2}
MARKS = {OK: ("✓", "green"), NOTE: ("·", "dim"), WARNING: ("▲", "yellow"), PROBLEM: ("✖", "red")}
SAYS = {
    OK: "Nothing is wrong.",
    NOTE: "Nothing is wrong.",
    WARNING: "Something may hurt: see ▲.",
    PROBLEM: "Something is wrong: see ✖.",
}
INDENT = 4
LONGEST_WAIT_S = 600.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this command."""
    parser.add_argument("--endpoint", default="", metavar="URL", help="collector, in place of the variables'")
    parser.add_argument(
        "--prometheus", metavar="URL", help="where to look for the metric (default: the stack's)"
    )
    parser.add_argument(
        "--traces", metavar="URL", help="Jaeger or Tempo, to look for the span (default: the stack's)"
    )
    parser.add_argument("--grafana", metavar="URL", help="Grafana (default: the stack's)")
    parser.add_argument(
        "--grafana-token-file",
        type=Path,
        metavar="FILE",
        help="token of a service account, to ask through Grafana",
    )
    parser.add_argument(
        "--wait",
        type=_seconds,
        default=30.0,
        metavar="S",
        help="longest wait for arrival; 0: send nothing (30)",
    )
    parser.add_argument("--json", action="store_true", help="one document, for scripts")
    parser.add_argument(
        "--state",
        type=Path,
        default=configuration.state_folder(),
        metavar="DIR",
        help="of a local stack (%(default)s)",
    )


def run(args: argparse.Namespace) -> int:
    """Examine, print, and say by the exit code how it stands."""
    places = _places(args)
    findings = examine(os.environ, places, endpoint_url=args.endpoint, wait_s=args.wait)
    code = CODES[worst(findings)]
    if args.json:
        listed = [
            {"area": each.area, "state": each.state, "what": each.what, "remedy": each.remedy or None}
            for each in findings
        ]
        print(json.dumps({"schema": SCHEMA, "exit_code": code, "findings": listed}))
    else:
        print("\n".join(lines(findings, TextLayout.of(sys.stdout))))
    return code


def lines(findings: Iterable[CheckResult], page: TextLayout) -> list[str]:
    """The diagnosis for people: a heading per area, a mark per finding, the remedy below it."""
    listed = list(findings)
    text: list[str] = []
    area = ""
    for finding in listed:
        if finding.area != area:
            area = finding.area
            text += ["", page.paint(area, "bold")] if text else [page.paint(area, "bold")]
        mark, style = MARKS[finding.state]
        first, *rest = page.prose(finding.what, indent=INDENT) or [""]
        text.append(f"  {page.paint(page.safe(mark), style)} {first}")
        text += [" " * INDENT + line for line in rest]
        if finding.remedy:
            arrow, *more = page.prose(f"→ {finding.remedy}", indent=INDENT)
            text.append(" " * INDENT + arrow)
            text += [" " * (INDENT + 2) + line for line in more]
    return [*text, "", page.safe(SAYS[worst(listed)])]


def _places(args: argparse.Namespace) -> end_to_end.ProbeTargets:
    given = {
        end_to_end.PROMETHEUS: args.prometheus,
        end_to_end.TRACES: args.traces,
        end_to_end.GRAFANA: args.grafana,
    }
    named = {place: url.rstrip("/") for place, url in given.items() if url}
    token = ""
    if args.grafana_token_file:
        try:
            token = args.grafana_token_file.read_text(encoding="utf-8").strip()
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"--grafana-token-file {args.grafana_token_file}: {error}. Name a file that holds the token alone"
            ) from None
    return end_to_end.ProbeTargets(
        urls={**usual_places(args.state, os.environ), **named}, named=frozenset(named), grafana_token=token
    )


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= LONGEST_WAIT_S:
        raise argparse.ArgumentTypeError(f"{text!r}: expected seconds from 0 to {LONGEST_WAIT_S:g}")
    return value
