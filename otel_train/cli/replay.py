"""``otel-train replay``: send what a run could not send."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from otel_train.cli.ranks import default_run_dir
from otel_train.errors import ConfigError, OtelTrainError
from otel_train.export.jsonl import parse_line, predecessor
from otel_train.export.otlp_read import unreadable
from otel_train.export.quiet import CallerLogs
from otel_train.export.reasons import why
from otel_train.export.rundir import find_run, rank_directories
from otel_train.export.settings import OtlpSettings, otlp_configured
from otel_train.export.spool import FOLDER, METRICS_FILE, SPANS_FILE

if TYPE_CHECKING:
    from collections.abc import Mapping

_REQUEST_TIMEOUT_S = 10.0
"""The default time limit of the OpenTelemetry exporters. Nobody is waiting for a training step here."""

_PATIENCE = 3
"""Refusals in a row after which the collector is taken to be away, and the rest kept untried."""

_HELP = """\
Send what the spool of a run holds to a collector, oldest first.

While a run's collector was away, its figures went to RUN/rank*/spool. This sends them, from every rank
of the run, and removes what was accepted. What was not stays for the next time, so calling it again never
sends a figure twice. A line that a crash tore off is skipped and counted.

The address comes from --endpoint or from the standard OTEL_EXPORTER_OTLP_* variables, which also name
protocol, headers, compression and certificates.

examples:
  otel-train replay --endpoint http://127.0.0.1:4318        the newest run below runs/
  otel-train replay runs/my-run --dry-run                   only say what there is
  otel-train replay runs/my-run --all                       the whole recording, to an empty back end

exit status: 0 everything was accepted, 1 something was kept, 2 bad input.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """What became of the lines of a run.

    Attributes:
        sent: accepted by the collector; in a dry run, what would be sent.
        kept: refused, still on disk.
        torn: unreadable, skipped.
        reason: why something was kept, as the rest of a sentence about the collector; "" when nothing was.
    """

    sent: int = 0
    kept: int = 0
    torn: int = 0
    reason: str = field(default="", compare=False)

    def __add__(self, other: Counts) -> Counts:
        return Counts(sent=self.sent + other.sent, kept=self.kept + other.kept, torn=self.torn + other.torn)


Send = Callable[[dict[str, Any]], bool]
"""Sends one OTLP/JSON object; whether it was accepted."""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``replay`` to the command line."""
    parser = subparsers.add_parser(
        "replay",
        help="send what a run could not send while its collector was away",
        description=_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "run", nargs="?", metavar="RUN", help="run directory or run id (default: the newest run)"
    )
    parser.add_argument(
        "--root",
        type=Path,
        default=Path(default_run_dir()),
        help="parent of all runs (default: the setting run_dir, else runs)",
    )
    parser.add_argument(
        "--endpoint", default="", help="base address of the collector, such as http://127.0.0.1:4318"
    )
    parser.add_argument("--all", action="store_true", help="also send the recording itself; it stays on disk")
    parser.add_argument("--dry-run", action="store_true", help="send nothing, say what there is")
    parser.set_defaults(run_command=run)


def run(args: argparse.Namespace) -> int:
    """Run the command; the exit status."""
    try:
        directory = find_run(args.run, args.root)
        counts = replay(directory, endpoint=args.endpoint, recorded=args.all, dry_run=args.dry_run)
    except OtelTrainError as error:
        print(error, file=sys.stderr)
        return 2
    except OSError as error:
        print(f"{error.filename}: {error.strerror}", file=sys.stderr)
        return 2
    verb = "to send" if args.dry_run else "sent"
    print(f"{directory}: {counts.sent} {verb}, {counts.kept} kept, {counts.torn} unreadable (requests)")
    if counts.reason:
        print(f"The collector {counts.reason}. What was kept can be sent later.", file=sys.stderr)
    return 1 if counts.kept else 0


def replay(
    run_directory: Path,
    *,
    endpoint: str = "",
    recorded: bool = False,
    dry_run: bool = False,
    environ: Mapping[str, str] = os.environ,
) -> Counts:
    """Send what the spools of all ranks of a run hold, oldest first.

    Args:
        run_directory: ``<root>/<run id>``.
        endpoint: base address; "" takes the standard variables'.
        recorded: also send the recorded metrics and spans, which stay on disk.
        dry_run: send nothing.
        environ: where the standard variables are read.

    Returns:
        What became of the lines; each is one request.

    Raises:
        ConfigError: no endpoint is named, or a setting is wrong.
        OSError: a spool cannot be read or rewritten.
    """
    if dry_run:
        return _count_all(run_directory, recorded=recorded)
    if not endpoint and not otlp_configured(environ):
        raise ConfigError(
            "No collector is named. Give --endpoint http://host:4318, or set OTEL_EXPORTER_OTLP_ENDPOINT."
        )
    settings = OtlpSettings.read(environ, endpoint=endpoint)
    collector = _Collector(settings)
    try:
        with CallerLogs() as logs:
            counts = _send_all(run_directory, collector, recorded=recorded)
            return replace(counts, reason=why(logs.said())) if counts.kept else counts
    finally:
        collector.close()


def _send_all(run_directory: Path, collector: _Collector, *, recorded: bool) -> Counts:
    counts = Counts()
    for rank in rank_directories(run_directory):
        for name in collector.files:
            if recorded:
                for part in _parts(rank / name):
                    counts += _send_lines(part, collector.send, keep_file=True)
            counts += _send_spool(rank / FOLDER / name, collector.send)
    return counts


class _Collector:
    """Sends lines with the SDK's exporters."""

    def __init__(self, settings: OtlpSettings) -> None:
        from otel_train.export.otlp_sdk import SdkTransport

        self.files = [
            name
            for name, signal in ((METRICS_FILE, "metrics"), (SPANS_FILE, "traces"))
            if signal in settings.protocols
        ]
        self._transport = SdkTransport(settings, {}, version="")

    def close(self) -> None:
        self._transport.close()

    def send(self, line: dict[str, Any]) -> bool:
        from otel_train.export.otlp_read import read_metrics, read_spans

        if "resourceSpans" in line:
            return self._transport.send_readable_spans(read_spans(line), _REQUEST_TIMEOUT_S)
        groups = list(read_metrics(line))
        return all(self._transport.send_metrics_data(data, _REQUEST_TIMEOUT_S) for data in groups)


def _count_all(run_directory: Path, *, recorded: bool) -> Counts:
    counts = Counts()
    for rank in rank_directories(run_directory):
        for folder in (rank, rank / FOLDER) if recorded else (rank / FOLDER,):
            for name in (METRICS_FILE, SPANS_FILE):
                for part in _parts(folder / name):
                    counts += _count(part)
    return counts


def _count(path: Path) -> Counts:
    with path.open("rb") as lines:
        readable = [parse_line(line) is not None for line in lines]
    return Counts(sent=sum(readable), torn=len(readable) - sum(readable))


def _parts(path: Path) -> list[Path]:
    """What a bounded file and an earlier replay left, oldest first."""
    return [part for part in (_taken(path), predecessor(path), path) if part.exists()]


def _taken(path: Path) -> Path:
    return path.with_name(path.name + ".replay")


def _send_spool(path: Path, send: Send) -> Counts:
    counts = Counts()
    for part in _parts(path):
        if counts.kept:
            counts += Counts(kept=_count(part).sent)
            continue
        if part != _taken(path):
            # Out of the way of a run that may still be writing.
            part.replace(_taken(path))
        counts += _send_lines(_taken(path), send, keep_file=False)
    return counts


def _send_lines(path: Path, send: Send, *, keep_file: bool) -> Counts:
    counts = Counts()
    kept: list[bytes] = []
    refusals = 0
    with path.open("rb") as lines:
        try:
            for line in lines:
                # Until it is known to be accepted it belongs to what stays, also when we are interrupted.
                kept.append(line)
                outcome = _send_line(line, send) if refusals < _PATIENCE else Counts(kept=1)
                refusals = refusals + 1 if outcome.kept else 0
                if not outcome.kept:
                    kept.pop()
                counts += outcome
        finally:
            if not keep_file:
                _leave(path, [*kept, *lines])
    return counts


def _send_line(line: bytes, send: Send) -> Counts:
    request = parse_line(line)
    if request is None:
        return Counts(torn=1)
    try:
        accepted = send(request)
    except unreadable:
        return Counts(torn=1)
    return Counts(sent=1) if accepted else Counts(kept=1)


def _leave(path: Path, lines: list[bytes]) -> None:
    if not lines:
        path.unlink()
        return
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    fresh.write_bytes(b"".join(lines))
    fresh.replace(path)
