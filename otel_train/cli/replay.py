"""``otel-train replay``: sends or converts the requests in the spool of a run, and verifies their arrival."""

from __future__ import annotations

import argparse
import math
import os
import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

from otel_train import catalog as c
from otel_train.cli import complain
from otel_train.cli.arguments import FormerOption, add_run_dir, amount, chosen_run
from otel_train.console.text import instant
from otel_train.doctor import checks
from otel_train.doctor.end_to_end import PROMETHEUS, usual_places
from otel_train.errors import ConfigError, RunDirectoryError, StackError
from otel_train.exporters.openmetrics import identity, quoted, resources_of, time_ms_of, write_text
from otel_train.exporters.otlp import Backoff, Delivery, deliver
from otel_train.exporters.otlp_response import ExportResponse, ExportResult
from otel_train.exporters.otlp_settings import SIGNALS, OtlpSettings, otlp_configured
from otel_train.exporters.otlp_transport import OtlpTransport
from otel_train.exporters.spool import MOST_LINE_BYTES, NAMES, SpoolQueue, parts_of, rejected_in, send_again
from otel_train.files import lines_of, make_folder, open_binary, rank_folders, rank_problems
from otel_train.safety import printable
from otel_train.stack import configuration

RECORDED, WAITS, REJECTED = "recorded", "waits", "rejected"
"""Location of a stored request: the recording, the spool, or ``spool/rejected/``."""


def stored_requests(rank: Path) -> Iterator[tuple[str, bytes]]:
    """Yields every metrics request of a rank on disk, with its location. Most are in several files and come several times."""
    yield from ((RECORDED, line) for line in _recorded(rank, "metrics") if line is not None)
    queue = SpoolQueue(rank, "metrics", on_error=_raised)
    yield from ((WAITS, line) for line in queue.waiting())
    if queue.rejected_file is not None:
        for entry in rejected_in(queue.rejected_file):
            if entry.request is not None:
                yield REJECTED, entry.request


def _recorded(rank: Path, signal: str) -> Iterator[bytes | None]:
    """Yields the requests in a recording; None for a line cut by a crash."""
    for part in parts_of(rank / f"{NAMES[signal]}.otlp.jsonl"):
        with _named(part), open_binary(part) as file:
            for line in lines_of(file, MOST_LINE_BYTES):
                yield line[:-1] if line.endswith(b"\n") else None


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """Adds the path of the file to an error of reading it."""
    try:
        yield
    except OSError as error:
        raise RunDirectoryError(f"{path}: cannot be read: {error.strerror or error}") from error


def blocks(run_directory: Path, folder: Path, *, older_than_s: float) -> int:
    """Writes metrics older than ``older_than_s`` as OpenMetrics text, prints the promtool command, and returns the exit code."""
    make_folder(folder)
    path = folder / f"{run_directory.name}.openmetrics.txt"
    until_ms = (time.time() - older_than_s) * 1000
    written = write_text(path, (_older(rank, until_ms) for rank in rank_folders(run_directory).values()))
    print(f"{printable(path)}: {written.points} data points of {written.exports} exports")
    if written.foreign:
        complain(f"{written.foreign} metrics that otel_train does not publish are left out.")
    if written.unreadable:
        complain(f"{written.unreadable} lines are not metrics requests and are left out.")
    if written.points:
        print(
            "Make blocks of it in the data folder of Prometheus, which takes them within a minute, or at its start:\n"
            f"  promtool tsdb create-blocks-from openmetrics {printable(path)} DATA\n"
            "Histograms have buckets there (_bucket, _count, _sum), since the text format has no native ones."
        )
    return 0


def _older(rank: Path, until_ms: float) -> Iterator[bytes]:
    seen: set[int] = set()
    for _, line in stored_requests(rank):
        time_ms = time_ms_of(line)
        if time_ms is None or (time_ms < until_ms and time_ms not in seen):
            yield line
            seen.add(time_ms or 0)


WAIT_S: Final = 15.0
LONGEST_WAIT_S: Final = 600.0
ASK_EVERY_S: Final = 1.0

_SLICE_S: Final = 6 * 3600
"""Time range of one query: its answer has some hundred kB at one export a second."""

_WHY: Final = {
    RECORDED: "are only in the recording: Prometheus refused them as older than its out_of_order_time_window (otel-train "
    "replay --blocks DIR writes them for promtool), or they are in the queue of a Collector, or were never sent (otel-train "
    "replay --all)",
    WAITS: "wait in the spool: otel-train replay sends them",
    REJECTED: "were refused and are in spool/rejected/: otel-train replay --rejected sends them again",
}


@dataclass(slots=True)
class RankExports:
    """Exports of a rank whose series have the same labels in Prometheus."""

    labels: dict[str, str]
    places: dict[int, str] = field(default_factory=dict)  # location of each export, by its Unix time in ms
    missing: set[int] = field(default_factory=set)  # times of exports that Prometheus does not have


def verify(run_directory: Path, url: str, *, wait_s: float) -> int:
    """Queries Prometheus for every export of a run, prints the missing ones, and returns the exit code.

    An export counts as arrived if the heartbeat metric of its rank has a sample at its time: every export profile has
    that metric, and Prometheus stores a request as a whole or, if it is too old, not at all.
    """
    if not url:
        raise ConfigError("No Prometheus is named. Give --prometheus http://127.0.0.1:9090")
    ranks = [found for rank in rank_folders(run_directory).values() for found in _exports(rank)]
    until_s, limit_s = time.monotonic() + wait_s, math.inf  # the first time every export is asked for
    while True:
        for each in ranks:
            each.missing = _missing(each, url, limit_s)
        limit_s = until_s
        if not any(each.missing for each in ranks) or time.monotonic() > until_s:
            break
        time.sleep(ASK_EVERY_S)
    return _print_missing(run_directory, ranks, url)


def _exports(rank: Path) -> Iterable[RankExports]:
    """Returns the exports of a rank by their labels, which may differ after a restart on another host."""
    found: dict[tuple[tuple[str, str], ...], RankExports] = {}
    for place, line in stored_requests(rank):
        time_ms = time_ms_of(line)
        try:
            resources = list(resources_of(line))
        except ValueError:
            continue
        for resource, metrics in resources:
            if time_ms is None or not any(each.get("name") == c.HEARTBEAT_TIME.name for each in metrics):
                continue
            labels = identity(resource)
            one = found.setdefault(tuple(sorted(labels.items())), RankExports(labels))
            one.places[time_ms] = place  # spool and rejected/ come after the recording, and say more
            one.missing.add(time_ms)
    return found.values()


def _missing(rank: RankExports, url: str, until_s: float) -> set[int]:
    """Returns the times without a sample, asked for in slices that contain one, until ``until_s``: a clock may have been decades off."""
    matchers = ",".join(f"{name}={quoted(text)}" for name, text in rank.labels.items())
    missing, unasked = set(rank.missing), sorted(rank.missing)
    while unasked and time.monotonic() <= until_s:
        end_s = unasked[-1] // 1000 + 1
        first = bisect_right(unasked, (end_s - _SLICE_S) * 1000)
        length_s = min(_SLICE_S, end_s - unasked[first] // 1000 + 1)
        del unasked[first:]
        query = f"{c.HEARTBEAT_TIME.prometheus}{{{matchers}}}[{length_s}s]"
        answer = checks.get(f"{url}/api/v1/query?query={quote(query)}&time={end_s}")
        missing -= _times_ms(answer, url)
    return missing


def _times_ms(answer: checks.HttpResult, url: str) -> set[int]:
    document: Any = answer.json()
    try:
        samples = (each for series in document["data"]["result"] for each in series.get("values", ()))
        return {round(float(at_s) * 1000) for at_s, _ in samples}
    except (TypeError, KeyError, ValueError, AttributeError, OverflowError) as error:
        why = answer.reason or f"status {answer.status}"
        raise StackError(f"{url} does not answer as Prometheus does ({why}): correct --prometheus") from error


def _print_missing(run_directory: Path, ranks: list[RankExports], url: str) -> int:
    total = sum(len(rank.places) for rank in ranks)
    missing = sum(len(rank.missing) for rank in ranks)
    if not total:
        complain(f"{run_directory}: no export is recorded or waiting, so there is nothing to verify")
        return 1
    print(printable(f"{run_directory}: {total - missing} of {total} exports are in {url}, {missing} are not"))
    for rank in ranks:
        if rank.missing:
            name, count = rank.labels.get("train_rank", "?"), f"{len(rank.missing)} of {len(rank.places)}"
            between = f"between {instant(min(rank.missing) / 1000)} and {instant(max(rank.missing) / 1000)}"
            complain(f"rank {name}: {count} are missing, {between}")
    why = Counter(rank.places[each] for rank in ranks for each in rank.missing)
    for place, number in why.most_common():
        complain(f"{number} {_WHY[place]}.")
    return 1 if missing else 0


_REQUEST_TIMEOUT_S = 10.0
"""The default time limit of the OpenTelemetry exporters. No training step waits here."""

_PATIENCE = 3
"""Consecutive failed tries after which the Collector is taken to be unavailable; the other requests are kept untried."""

_BUSY_S = 0.2
_BUSY_TRIES = 75
"""Interval and number of tries to lock a spool from which another process is sending: 15 s in all."""

WINDOW_S = 24 * 3600.0
"""``out_of_order_time_window`` in the configuration of Prometheus in deploy/, in seconds."""

MOST_HOURS: Final = 24.0 * 36_600

_BUSY = "is asked by another process, which holds the lock of this spool"
_NOT_SENT = "is not asked: the variables name no endpoint for {0}, or OTEL_{1}_EXPORTER switches them off"
_NO_REQUEST = "is not asked: the line in spool/rejected/ cannot be read"

DESCRIPTION = "Send the requests that are left in the spool of a run to an OTLP endpoint, oldest first."
EPILOG = """\
A run keeps each OTLP request in RUN/rank*/spool until the Collector accepts it. If the Collector was unreachable at
the end, this command sends the rest, for all ranks. Only one process sends from a spool at a time. Refused requests,
and lines that are not OTLP, are moved to spool/rejected/ with the reason; --rejected sends them again. Requests
without an answer stay in the spool, and are sent again: one that was accepted then arrives twice. A line that a crash
cut off is skipped and counted.

A request that a Collector accepted may still be in its queue. --verify asks Prometheus which exports of the run have
arrived. Prometheus refuses samples older than its out_of_order_time_window (24 hours in the stack); --blocks writes
them as OpenMetrics text, from which promtool makes blocks. Both read recording and spool of all ranks, and send
nothing.

The address comes from --endpoint or from the standard OTEL_EXPORTER_OTLP_* variables, which also set protocol,
headers, compression and certificates.

examples:
  otel-train replay --endpoint http://127.0.0.1:4318        the newest run
  otel-train replay runs/my-run --dry-run                   count what would be sent
  otel-train replay runs/my-run --all                       the whole recording, to an empty back end
  otel-train replay runs/my-run --verify                    which exports are in Prometheus, and which are not
  otel-train replay runs/my-run --blocks blocks             samples older than 24 hours, for promtool

Exit codes: 0 all accepted (--verify: all in Prometheus), 1 some kept or refused (--verify: missing), 2 bad input.
"""


@dataclass(slots=True, kw_only=True)
class RequestCounts:
    """Numbers of requests of a run by result."""

    accepted: int = 0  # by the Collector; in a dry run, those that would be sent
    kept: int = 0  # not sent: still in the spool or the recording
    rejected: int = 0  # refused for good, or not OTLP; moved to ``spool/rejected/``
    torn: int = 0  # lines cut off by a crash, skipped
    old: int = field(default=0, compare=False)  # requests of metrics in the spool, older than ``WINDOW_S``
    kept_because: Counter[str] = field(default_factory=Counter, compare=False)
    rejected_because: Counter[str] = field(default_factory=Counter, compare=False)

    def take(self, answer: ExportResponse) -> None:
        """Counts an accepted or refused request; one without an answer stays stored, and ``keep`` counts it."""
        if answer.result is ExportResult.ACCEPTED:
            self.accepted += 1
        elif answer.result is ExportResult.REFUSED:
            self.rejected += 1
            self.rejected_because[answer.reason] += 1

    def keep(self, number: int, reason: str) -> None:
        """Counts requests that are kept."""
        if number:
            self.kept += number
            self.kept_because[reason] += number


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of this command."""
    add, hidden = parser.add_argument, argparse.SUPPRESS
    add("run", nargs="?", metavar="RUN", help="run directory or run id (default: the newest run)")
    add_run_dir(parser)
    add("--root", dest="run_dir", action=FormerOption, default=hidden, help=hidden)
    add("--endpoint", default="", metavar="URL", help="OTLP endpoint, such as http://127.0.0.1:4318")
    recording = "also send the recording (metrics and spans of the whole run); it stays on disk"
    add("--all", action="store_true", help=recording)
    add("--rejected", action="store_true", help="also send refused requests again")
    way = parser.add_mutually_exclusive_group()
    way.add_argument("--dry-run", action="store_true", help="send nothing; count the requests")
    way.add_argument("--verify", action="store_true", help="send nothing; ask Prometheus what arrived")
    text = "send nothing; write OpenMetrics text for promtool to DIR"
    way.add_argument("--blocks", type=Path, metavar="DIR", help=text)
    older = "with --blocks: only samples older than this (default: 24); 0: all"
    add("--older-than", type=amount("hours", MOST_HOURS), metavar="HOURS", help=older)
    prometheus = "with --verify: its address (default: that of the stack)"
    add("--prometheus", default="", metavar="URL", help=prometheus)
    wait = "with --verify: seconds to wait for arrival (default: 15)"
    add("--wait", type=amount("seconds", LONGEST_WAIT_S), metavar="S", help=wait)


def run(args: argparse.Namespace) -> int:
    """Runs the command; returns the exit code."""
    _refuse_ignored(args)
    try:
        directory = chosen_run(args.run, args.run_dir)
        for rank, problem in rank_problems(directory).items():
            raise RunDirectoryError(f"{directory}/rank{rank}: cannot be read: {problem}")
        if args.blocks:
            older_than_s = WINDOW_S if args.older_than is None else args.older_than * 3600
            return blocks(directory, args.blocks, older_than_s=older_than_s)
        if args.verify:
            usual = usual_places(configuration.state_folder(), os.environ)
            url = args.prometheus or usual.get(PROMETHEUS, "")
            return verify(directory, url.rstrip("/"), wait_s=WAIT_S if args.wait is None else args.wait)
        counts = replay(
            directory, endpoint=args.endpoint, recorded=args.all, rejected=args.rejected, dry_run=args.dry_run
        )
    except OSError as error:
        raise RunDirectoryError(
            f"{error.filename or args.blocks or 'the spool'}: {error.strerror or error}"
        ) from error
    _say(directory, counts, verb="to send" if args.dry_run else "accepted")
    return 1 if counts.kept or counts.rejected else 0


def _refuse_ignored(args: argparse.Namespace) -> None:
    """Raises ConfigError for an option that has no effect in the chosen mode."""
    mode = "--verify" if args.verify else "--blocks" if args.blocks else ""
    options = {
        "--older-than": (args.older_than is not None, ("--blocks",)),
        "--prometheus": (bool(args.prometheus), ("--verify",)),
        "--wait": (args.wait is not None, ("--verify",)),
        "--endpoint": (bool(args.endpoint), ("",)),
        "--all": (args.all, ("",)),
        "--rejected": (args.rejected, ("",)),
    }
    for name, (given, modes) in options.items():
        if given and mode not in modes:
            where = f"with {mode}" if mode else f"without {modes[0]}"
            raise ConfigError(f"{name}: has no effect {where}. Leave it out")


def _say(directory: Path, counts: RequestCounts, *, verb: str) -> None:
    left = f"{counts.kept} kept, {counts.rejected} rejected, {counts.torn} cut off by a crash (requests)"
    print(printable(f"{directory}: {counts.accepted} {verb}, {left}"))
    for reason, number in counts.kept_because.most_common():
        complain(f"{number} kept: the collector {reason}. What was kept can be sent later.")
    for reason, number in counts.rejected_because.most_common():
        complain(f"{number} rejected: the collector {reason}.")
    if earlier := ", ".join(map(str, _rejected_files(directory))):
        complain(f"Rejected requests are in {earlier}, each with its reason. --rejected sends them again.")
    if counts.old:
        complain(
            f"{counts.old} of metrics are older than 24 h, which a store may refuse behind a Collector: "
            "otel-train replay --verify says what arrived, --blocks writes the rest for promtool."
        )


def replay(
    run_directory: Path,
    *,
    endpoint: str = "",
    recorded: bool = False,
    rejected: bool = False,
    dry_run: bool = False,
) -> RequestCounts:
    """Sends the requests in the spools of all ranks of a run, oldest first; with ``dry_run`` only counts them."""
    is_configured = endpoint or otlp_configured(os.environ)
    if not is_configured and not dry_run:
        remedy = "Give --endpoint http://host:4318, or set OTEL_EXPORTER_OTLP_ENDPOINT."
        raise ConfigError(f"No collector is named. {remedy}")
    settings = OtlpSettings.read(os.environ, endpoint=endpoint, wanted=not is_configured)
    counts = _without_endpoint(run_directory, settings.targets)
    if dry_run:
        _count_all(run_directory, settings.targets, counts, recorded=recorded, rejected=rejected)
        return counts
    transport = OtlpTransport(settings.targets)
    try:
        for signal in settings.targets:
            sender = _SignalSender(signal, transport, counts)
            for rank in rank_folders(run_directory).values():
                if recorded:
                    sender.send_recorded(rank)
                # Before the spool, whose refused requests are added to the file of rejected ones.
                if rejected:
                    sender.send_rejected(SpoolQueue(rank, signal, on_error=_raised))
                sender.send_spool(SpoolQueue(rank, signal, on_error=_raised))
    finally:
        transport.close()
    return counts


class _SignalSender:
    """Sends the requests of one signal until its Collector is unavailable."""

    def __init__(self, signal: str, transport: OtlpTransport, counts: RequestCounts) -> None:
        self._signal = signal
        self._transport = transport
        self._counts = counts
        self._unavailable = ""
        """Why no further request is tried, as the predicate of a sentence; "" if requests are tried."""

    def send_spool(self, queue: SpoolQueue) -> None:
        """Sends the requests in a rank's queue, and removes the accepted ones from it."""
        counts = self._counts
        counts.old += sum(map(_is_old, queue.waiting())) if self._signal == "metrics" else 0
        while not self._unavailable:
            delivery = self._retry(lambda suspect: self._deliver_when_unlocked(queue, suspect=suspect))
            if delivery.busy:
                counts.keep(sum(1 for _ in queue.waiting()), _BUSY)
                return
            if delivery.answer is None:
                break
            counts.take(delivery.answer)
            counts.accepted += delivery.behind
        counts.keep(sum(1 for _ in queue.waiting()), self._unavailable)
        counts.torn += queue.torn
        queue.close()

    def send_rejected(self, queue: SpoolQueue) -> None:
        """Sends the rejected requests of a rank's queue again, and removes those that are accepted now."""
        path = queue.rejected_file
        waiting = len(rejected_in(path)) if path is not None else 0
        if path is None or not waiting:
            return
        for _ in range(_BUSY_TRIES):
            with queue.sending() as granted:
                if granted:
                    answers = send_again(path, self._answer)
                    for answer in answers:
                        self._counts.take(answer)
                    self._counts.keep(waiting - len(answers), self._unavailable or _NO_REQUEST)
                    return
            time.sleep(_BUSY_S)
        self._counts.keep(waiting, _BUSY)

    def _answer(self, request: bytes) -> ExportResponse | None:
        """Returns the response that accepts or refuses a request; None if the Collector is unavailable."""
        if self._unavailable:
            return None
        send = self._transport.send
        answer = self._retry(lambda _: Delivery(send(self._signal, request, _REQUEST_TIMEOUT_S))).answer
        return None if answer is None or answer.result is ExportResult.RETRY else answer

    def send_recorded(self, rank: Path) -> None:
        """Sends every request of a recording, which is not changed."""
        for line in _recorded(rank, self._signal):
            if line is None:
                self._counts.torn += 1
            elif answer := self._answer(line):
                self._counts.take(answer)
            else:
                self._counts.keep(1, self._unavailable)

    def _deliver_when_unlocked(self, queue: SpoolQueue, *, suspect: bool) -> Delivery:
        for _ in range(_BUSY_TRIES):
            delivery = deliver(queue, self._signal, self._transport, _REQUEST_TIMEOUT_S, suspect=suspect)
            if not delivery.busy:
                break
            time.sleep(_BUSY_S)
        return delivery

    def _retry(self, send: Callable[[bool], Delivery]) -> Delivery:
        """Retries a request until it is accepted, a few times at most; ``send`` receives whether it is the last attempt."""
        backoff = Backoff()
        for attempt in range(1, _PATIENCE + 1):
            delivery = send(attempt == _PATIENCE)
            answer = delivery.answer
            if answer is None or answer.result is not ExportResult.RETRY:
                break
            if attempt == _PATIENCE or (answer.retry_after_s or 0.0) > _REQUEST_TIMEOUT_S:
                self._unavailable = answer.reason
                break
            time.sleep(backoff.pause_s(answer.retry_after_s))
        return delivery


def _raised(error: OSError) -> None:
    raise error  # a spool that cannot be read or changed ends the command


def _is_old(line: bytes) -> bool:
    time_ms = time_ms_of(line)
    return time_ms is not None and time_ms < (time.time() - WINDOW_S) * 1000


def _without_endpoint(run_directory: Path, targets: Iterable[str]) -> RequestCounts:
    """Returns counts in which the waiting requests of signals without an endpoint are kept."""
    counts, signals = RequestCounts(), set(SIGNALS).difference(targets)
    for rank, signal in product(rank_folders(run_directory).values(), signals):
        waiting = SpoolQueue(rank, signal, on_error=_raised).waiting()
        counts.keep(sum(1 for _ in waiting), _NOT_SENT.format(signal, signal.upper()))
    return counts


def _count_all(
    run_directory: Path, signals: Iterable[str], counts: RequestCounts, *, recorded: bool, rejected: bool
) -> None:
    for rank, signal in product(rank_folders(run_directory).values(), signals):
        queue = SpoolQueue(rank, signal, on_error=_raised)
        counts.accepted += sum(1 for _ in queue.waiting())
        for line in _recorded(rank, signal) if recorded else ():
            counts.accepted += line is not None
            counts.torn += line is None
        if rejected and queue.rejected_file is not None:
            counts.accepted += len(rejected_in(queue.rejected_file))


def _rejected_files(run_directory: Path) -> Iterator[Path]:
    for rank, signal in product(rank_folders(run_directory).values(), SIGNALS):
        path = SpoolQueue(rank, signal).rejected_file
        if path is not None:
            yield from parts_of(path)
