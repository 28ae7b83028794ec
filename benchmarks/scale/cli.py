"""``python -m benchmarks.scale``: sends what a run of many ranks would send."""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from typing import TYPE_CHECKING

from otel_train.config import Config
from otel_train.datamodel import Anchor
from otel_train.errors import ConfigError, OtelTrainError
from otel_train.exporters.otlp_settings import OtlpSettings

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.scale.results import ScaleResult
    from benchmarks.scale.sender import LoadGenerator

DESCRIPTION = """\
Send what a run of N ranks would send, from this one process, to a Collector: to size a stack before the
job is there, to see dashboards and alerts with that many ranks, to find out which export profile fits.

Nothing is trained. Synthetic edges of training threads go through the account, the reporter and the OTLP
exporters that real ranks use, so names, labels, histograms and spans are real. Every rank has its own
identity and its own moment; beyond 16 of a kind they share result, never series. The run is called
simulated-..., unless --run-id says otherwise.

The address comes from --endpoint or from the standard OTEL_EXPORTER_OTLP_* variables; without either it
is http://localhost:4318.
"""
EPILOG = """\
examples:
  otel-train stack up --local --detach
  python -m benchmarks.scale --ranks 512 --duration 120           the profile that 512 ranks would choose: reduced
  python -m benchmarks.scale --ranks 64 --profile full --steps-per-second 10
  python -m benchmarks.scale --ranks 4096 --profile reduced --json    the result for a script

Ctrl-C ends it early: every rank still says that it has finished, as after the whole time. A second Ctrl-C
leaves at once.

exit codes: 0 everything was accepted, 1 some was refused or left out, 2 not done, 130 the second Ctrl-C
"""
MOST_RANKS = 100_000
PARTLY, FAILED, INTERRUPTED = 1, 2, 130


def main(words: Sequence[str] | None = None) -> int:
    """Runs the command with ``words``, else with the arguments of the process; returns the exit code. An error is one line on stderr."""
    try:
        return run(_parser().parse_args(words))
    except OtelTrainError as error:
        print(f"scale: {' '.join(str(error).split())}", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        return INTERRUPTED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.scale",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--ranks", type=int, default=64, metavar="N", help="ranks of the run (default: 64)")
    parser.add_argument(
        "--steps-per-second", type=float, default=2.0, metavar="R", help="updates per second (default: 2)"
    )
    parser.add_argument(
        "--duration", type=float, default=60.0, metavar="S", help="seconds; 0: until Ctrl-C (default: 60)"
    )
    parser.add_argument(
        "--profile",
        default="auto",
        metavar="P",
        help="auto, full, reduced, rank0_aggregate or rank0 (default: auto)",
    )
    parser.add_argument("--endpoint", default="", metavar="URL", help="base address of the Collector")
    parser.add_argument(
        "--export-every", type=float, default=15.0, metavar="S",
        help="seconds between two exports of a rank; reduced ranks take twice that (default: 15)",
    )  # fmt: skip
    parser.add_argument(
        "--ranks-per-node", type=int, default=8, metavar="N", help="ranks that share a host (default: 8)"
    )
    parser.add_argument("--run-id", default="", metavar="ID", help="name of the run")
    parser.add_argument("--json", action="store_true", help="only the result, as one JSON object")
    return parser


def run(args: argparse.Namespace) -> int:
    """Sends until the time is up; returns the exit status.

    Raises:
        ConfigError: a number or a setting cannot be honoured.
        StackError: no request is accepted.
    """
    _check(args)
    config = Config(
        run_id=args.run_id or time.strftime("simulated-%Y%m%d-%H%M%S", time.gmtime()),
        export_profile=args.profile,
        export_interval_s=args.export_every,
    )
    settings = OtlpSettings.read(os.environ, endpoint=args.endpoint, wanted=True)
    if not settings.targets:
        raise ConfigError(
            "OTEL_SDK_DISABLED or OTEL_*_EXPORTER switches metrics and traces off: nothing would be sent"
        )
    generator = _generator(args, config, settings)
    result = generator.counts.result
    if not args.json:
        where = settings.addresses
        print(f"{config.run_id}: {_several(result.senders)} of {result.ranks} send to {where}", flush=True)
    try:
        generator.run(args.duration or math.inf, (lambda: None) if args.json else (lambda: _say(result)))
    except KeyboardInterrupt:
        if not args.json:
            print("\nEnding the run; Ctrl-C again leaves at once.", flush=True)
    during = result.as_json()
    generator.end()
    # Rates are those of the time before; series and failures are known when all is sent.
    during |= {
        name: value for name, value in result.as_json().items() if "series" in name or name == "failures"
    }
    if args.json:
        print(json.dumps({"run_id": config.run_id, **during}))
    else:
        _show(during)
    return PARTLY if during["failures"] or during["skipped"] else 0


def _generator(args: argparse.Namespace, config: Config, settings: OtlpSettings) -> LoadGenerator:
    from benchmarks.scale.ranks import SimulatedRanks
    from benchmarks.scale.sender import LoadGenerator

    simulated = SimulatedRanks(
        args.ranks, per_node=args.ranks_per_node, config=config, anchor=Anchor.now(),
        steps_per_s=args.steps_per_second,
    )  # fmt: skip
    return LoadGenerator(simulated, settings, every_s=config.export_interval_s)


def _check(args: argparse.Namespace) -> None:
    for name, value, most in (
        ("ranks", args.ranks, MOST_RANKS),
        ("ranks-per-node", args.ranks_per_node, MOST_RANKS),
        ("steps-per-second", args.steps_per_second, 1000),
    ):
        if not 0 < value <= most:
            raise ConfigError(f"--{name} {value:g}: expected more than 0, at most {most}")
    if args.duration < 0 or math.isnan(args.duration):
        raise ConfigError(f"--duration {args.duration:g}: expected seconds, 0 for until Ctrl-C")


def _several(ranks: int) -> str:
    return "1 rank" if ranks == 1 else f"{ranks} ranks"


def _say(result: ScaleResult) -> None:
    seconds = max(result.seconds, 1e-9)
    print(
        f"  {result.seconds:5.0f} s  {result.series:>9,} series  {result.samples / seconds:>8,.0f} samples/s"
        f"  {result.sent_bytes / seconds / 1e3:>8,.0f} kB/s  {result.spans:>6,} spans  {result.failures} failures",
        flush=True,
    )


def _show(during: dict[str, float]) -> None:
    seconds = max(during["seconds"], 1e-9)
    rows = {
        "time": f"{during['seconds']:.0f} s, {during['steps']:.0f} steps",
        "series": f"{during['series']:,.0f} with native histograms, {during['series_classic']:,.0f} with classic ones",
        "of one rank": f"at most {during['most_series']:,.0f} and {during['most_series_classic']:,.0f}",
        "samples": f"{during['samples'] / seconds:,.0f}/s",
        "spans": f"{during['spans'] / seconds:,.1f}/s",
        "bytes": f"{during['sent_bytes'] / seconds / 1e3:,.0f} kB/s before compression",
        "requests": f"{during['requests'] / seconds:,.1f}/s; the latest began {during['latest_s']:.1f} s after it was due",
        "failures": f"{during['failures']:.0f} refused, {during['skipped']:.0f} left out because the one before was not through",
    }
    for name, text in rows.items():
        print(f"  {name:<12} {text}")
