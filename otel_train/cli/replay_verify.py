"""``otel-train replay --verify``: which exports of a run are in the store, and where those are that are not."""

from __future__ import annotations

import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote

from otel_train import catalog as c
from otel_train.cli.replay_blocks import RECORDED, REJECTED, WAITS, stored_requests
from otel_train.doctor import checks
from otel_train.errors import ConfigError, StackError
from otel_train.exporters.openmetrics import identity, resources_of, time_ms_of
from otel_train.exporters.run_directory import rank_directories

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

LONGEST_WAIT_S: Final = 600.0
ASK_EVERY_S: Final = 1.0

_SLICE_S: Final = 6 * 3600
"""Asked for at once: some hundred kB at one export a second."""

_WHY: Final = {
    RECORDED: "are in the recording alone: on the way they were accepted, and then refused. Prometheus refuses what is older "
    "than its out_of_order_time_window: otel-train replay --blocks DIR writes that for promtool. What is younger may "
    "still be in the queue of a Collector, or was never sent: otel-train replay --all",
    WAITS: "wait in the spool: otel-train replay sends them",
    REJECTED: "were refused and lie in spool/rejected/: otel-train replay --rejected sends them again",
}


@dataclass(slots=True)
class RankExports:
    """What a rank has exported.

    Attributes:
        labels: that its series have in the store.
        places: time of each export in Unix milliseconds, to where it lies.
        missing: times that the store does not have.
    """

    labels: dict[str, str]
    places: dict[int, str] = field(default_factory=dict)
    missing: set[int] = field(default_factory=set)


def verify(run_directory: Path, url: str, *, wait_s: float) -> int:
    """Ask Prometheus for every export of a run, say which it does not have, and return the exit status.

    An export counts as there if the heartbeat of its rank has a sample of its time: every profile has that metric, and a
    request is stored as a whole or, where it is too old, not at all.

    Args:
        run_directory: ``<root>/<run id>``.
        url: of Prometheus.
        wait_s: how long it may take to arrive.

    Raises:
        ConfigError: no store is named.
        StackError: it does not answer.
        OSError: a recording or a spool cannot be read.
    """
    if not url:
        raise ConfigError("No store is named. Give --prometheus http://127.0.0.1:9090")
    ranks = [found for rank in rank_directories(run_directory) for found in _exports(rank)]
    began_s = time.monotonic()
    while True:
        for each in ranks:
            each.missing = each.missing and _missing(each, url)
        if not any(each.missing for each in ranks) or time.monotonic() - began_s > wait_s:
            break
        time.sleep(ASK_EVERY_S)
    return _say(run_directory, ranks, url)


def _exports(rank: Path) -> Iterable[RankExports]:
    """By identity: after a restart elsewhere the labels may be others."""
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
            one.places[time_ms] = place  # the last one says most: it waits, or was refused
            one.missing.add(time_ms)
    return found.values()


def _missing(rank: RankExports, url: str) -> set[int]:
    matchers = ",".join(f"{name}={_quoted(text)}" for name, text in rank.labels.items())
    missing = set(rank.missing)
    first_s, last_s = min(missing) // 1000, max(missing) // 1000 + 1
    for end_s in range(last_s, first_s - 1, -_SLICE_S):
        query = f"{c.HEARTBEAT_TIME.prometheus}{{{matchers}}}[{min(_SLICE_S, end_s - first_s + 1)}s]"
        answer = checks.get(f"{url}/api/v1/query?query={quote(query)}&time={end_s}")
        missing -= _times_ms(answer, url)
    return missing


def _times_ms(answer: checks.Answer, url: str) -> set[int]:
    document: Any = answer.json()
    try:
        return {
            round(float(at_s) * 1000)
            for series in document["data"]["result"]
            for at_s, _ in series.get("values", ())
        }
    except (TypeError, KeyError, ValueError, AttributeError) as error:
        said = answer.reason or f"status {answer.status}"
        raise StackError(
            f"{url} does not answer as Prometheus does ({said}): correct --prometheus"
        ) from error


def _say(run_directory: Path, ranks: list[RankExports], url: str) -> int:
    total = sum(len(rank.places) for rank in ranks)
    missing = sum(len(rank.missing) for rank in ranks)
    if not total:
        print(
            f"{run_directory}: no export is recorded or waits, so there is nothing to ask for",
            file=sys.stderr,
        )
        return 1
    print(f"{run_directory}: {total - missing} of {total} exports are in {url}, {missing} are not")
    for rank in ranks:
        if rank.missing:
            name = rank.labels.get("train_rank", "?")
            print(
                f"rank {name}: {len(rank.missing)} of {len(rank.places)} are not there, between "
                f"{_when(min(rank.missing))} and {_when(max(rank.missing))}",
                file=sys.stderr,
            )
    why = Counter(rank.places[each] for rank in ranks for each in rank.missing)
    for place, number in why.most_common():
        print(f"{number} {_WHY[place]}.", file=sys.stderr)
    return 1 if missing else 0


def _when(time_ms: int) -> str:
    return datetime.fromtimestamp(time_ms / 1000, tz=timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC")


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'
