"""``otel-train doctor``: finds out why metrics are not measured or not exported."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterable, Mapping
from functools import partial
from itertools import groupby
from pathlib import Path

from otel_train.cli import print_json
from otel_train.cli.arguments import amount
from otel_train.config.sources import resolve
from otel_train.console.text import TextLayout, hang
from otel_train.doctor import checks, end_to_end, endpoint, environment
from otel_train.doctor.checks import NOTE, OK, PROBLEM, WARNING, Check, CheckResult, worst_state
from otel_train.errors import ConfigError
from otel_train.stack import configuration

SCHEMA = "otel_train.doctor/1"
DESCRIPTION = """\
Check what a run needs, and name a remedy for each fault: installed packages, settings and their sources, run directory
and disk, shared memory, ports, the OTLP endpoint with TLS, token and clock. Then send one test metric and one test
span, and look for them in Prometheus, the trace store and Grafana.
"""
EPILOG = """\
Run it on the machine and in the environment of the training. Except for the test metric and span it changes nothing.

examples:
  otel-train doctor
  OTEL_EXPORTER_OTLP_ENDPOINT=http://collector:4318 otel-train doctor --prometheus http://prometheus:9090
  otel-train doctor --wait 0                 send nothing
  otel-train doctor --json | jq '.findings[] | select(.state == "problem")'

Exit codes: 0 no faults, 1 warnings, 2 problems.
"""
CODES = {OK: 0, NOTE: 0, WARNING: 1, PROBLEM: 2}
MARKS = {OK: ("✓", "green"), NOTE: ("·", "dim"), WARNING: ("▲", "yellow"), PROBLEM: ("✖", "red")}
SAYS = {
    OK: "No problems were found.",
    NOTE: "No problems were found.",
    WARNING: "There are warnings: see ▲.",
    PROBLEM: "There are problems: see ✖.",
}
INDENT = 4
LONGEST_WAIT_S = 600.0
LOCAL_WITHIN_S = 10.0
ENDPOINT_WITHIN_S = 30.0
SENDING_WITHIN_S = 30.0
"""Time limit of the end-to-end check without the wait for arrival: two requests of at most 5 s, and three queries."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of this command."""
    add = parser.add_argument
    endpoint = "OTLP endpoint (default: from the OTEL_EXPORTER_OTLP_* variables)"
    add("--endpoint", default="", metavar="URL", help=endpoint)
    add("--prometheus", metavar="URL", help="address of Prometheus (default: that of the stack)")
    add("--traces", metavar="URL", help="address of Jaeger or Tempo (default: that of the stack)")
    add("--grafana", metavar="URL", help="address of Grafana (default: that of the stack)")
    account = "file with the token of a Grafana service account"
    add("--grafana-token-file", type=Path, metavar="FILE", help=account)
    wait = "seconds to wait for arrival (default: 30); 0: send nothing"
    add("--wait", type=amount("seconds", LONGEST_WAIT_S), default=30.0, metavar="S", help=wait)
    document = "print one JSON object: schema, exit_code and findings (area, state, what, remedy)"
    add("--json", action="store_true", help=document)
    state = configuration.state_folder()
    folder = "state folder of a local stack (default: %(default)s)"
    add("--state", type=Path, default=state, metavar="DIR", help=folder)


def run(args: argparse.Namespace) -> int:
    """Runs the checks and prints the results; returns the exit code for the worst result."""
    findings = run_all_checks(os.environ, _targets(args), endpoint_url=args.endpoint, wait_s=args.wait)
    code = CODES[worst_state(findings)]
    if args.json:
        listed = [{"area": each.area, **each._asdict(), "remedy": each.remedy or None} for each in findings]
        print_json({"schema": SCHEMA, "exit_code": code, "findings": listed})
    else:
        print("\n".join(lines(findings, TextLayout.of(sys.stdout))))
    return code


def run_all_checks(
    environ: Mapping[str, str], places: end_to_end.ProbeTargets, *, endpoint_url: str = "", wait_s: float
) -> list[CheckResult]:
    """Runs all checks in order of dependency, local ones first; ``wait_s=0`` leaves out the end-to-end check, which sends data."""
    config = resolve(environ=environ).config
    wanted = config.otlp == "on"
    machine = environment.Machine()
    run_directory = partial(environment.check_run_directory, config, machine)
    check_machine = partial(environment.check_machine, config, environ, machine)
    check_endpoint = partial(endpoint.check_endpoint, environ, endpoint_url, wanted=wanted)
    found = checks.run(
        [
            Check(environment.PACKAGES, partial(environment.check_packages, machine), LOCAL_WITHIN_S),
            Check(environment.SETTINGS, partial(environment.check_settings, environ), LOCAL_WITHIN_S),
            Check(environment.RUNS, run_directory, LOCAL_WITHIN_S),
            Check(environment.MACHINE, check_machine, LOCAL_WITHIN_S),
            Check(endpoint.AREA, check_endpoint, ENDPOINT_WITHIN_S),
        ]
    )
    if wait_s <= 0:
        return found
    if any(finding.area == endpoint.AREA and finding.state == PROBLEM for finding in found):
        what = "nothing is sent: the endpoint does not accept an empty request (see above)"
        return [*found, CheckResult(NOTE, what, area=end_to_end.AREA)]
    send = partial(
        end_to_end.check_end_to_end, environ, places, endpoint=endpoint_url, wanted=wanted, wait_s=wait_s
    )
    return [*found, *checks.run([Check(end_to_end.AREA, send, SENDING_WITHIN_S + wait_s)])]


def lines(findings: Iterable[CheckResult], page: TextLayout) -> list[str]:
    """Returns the results as text: a heading per area, a mark and a sentence per result, its remedy below."""
    listed = list(findings)
    text: list[str] = []
    for area, of_area in groupby(listed, lambda finding: finding.area):
        text += ["", page.paint(area, "bold")]
        for finding in of_area:
            mark, style = MARKS[finding.state]
            head = f"  {page.paint(page.safe(mark), style)} "
            text += hang(head, INDENT, page.prose(finding.what, indent=INDENT) or [""])
            if finding.remedy:
                text += hang(" " * INDENT, INDENT + 2, page.prose(f"→ {finding.remedy}", indent=INDENT))
    return [*text[1:], "", page.safe(SAYS[worst_state(listed)])]


def _targets(args: argparse.Namespace) -> end_to_end.ProbeTargets:
    given = {
        end_to_end.PROMETHEUS: args.prometheus,
        end_to_end.TRACES: args.traces,
        end_to_end.GRAFANA: args.grafana,
    }
    named = {place: url.rstrip("/") for place, url in given.items() if url}
    path = args.grafana_token_file
    try:
        token = path.read_text(encoding="utf-8").strip() if path else ""
    except (OSError, ValueError) as error:
        why, remedy = getattr(error, "strerror", error), "Name a file that holds the token alone"
        raise ConfigError(f"--grafana-token-file {path}: {why}. {remedy}") from None
    urls = {**end_to_end.usual_places(args.state, os.environ), **named}
    return end_to_end.ProbeTargets(urls=urls, named=frozenset(named), grafana_token=token)
