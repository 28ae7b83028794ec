"""After a program was killed: what its processes left behind is counted to the end, and exported."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from otel_train.artifacts.ending import write_at_the_end
from otel_train.clock import system_clock
from otel_train.export.document import Documents
from otel_train.export.live import Health, Readings, Reporter
from otel_train.export.loaders import LoaderWatch
from otel_train.export.profile import profile_of
from otel_train.export.routes import Routes
from otel_train.export.rundir import RunDirectory, earlier_trainings
from otel_train.files import read_word
from otel_train.launch.rest import Rest, count_the_rest
from otel_train.launch.untold import untold_events, untold_spans
from otel_train.launch.will import read_wills
from otel_train.records import Batch

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from otel_train.export.estate import Estate
    from otel_train.export.pump import Route
    from otel_train.launch.parent import Ended
    from otel_train.records import Snapshot

PATIENCE_S = 3.0
"""How long processes that the program left behind may take to end by themselves."""

_POLL_S = 0.05


class Settled(NamedTuple):
    """A rank whose end was written by its launcher.

    Attributes:
        rank_path: its folder.
        rank: which.
        steps: training steps counted, up to the end.
        lost: edges that had been overwritten before anybody counted them.
    """

    rank_path: Path
    rank: int
    steps: int
    lost: int


def settle(folder: Path, ended: Ended, environ: Mapping[str, str]) -> list[Settled]:
    """Bring every session below a launcher to its end that did not come to one by itself.

    Args:
        folder: of the launcher.
        ended: how the program ended.
        environ: the program's environment: where figures go.
    """
    deadline = time.monotonic() + PATIENCE_S
    estates = read_wills(folder)
    while any(_lives(estate.info.pid) for estate in estates) and time.monotonic() < deadline:
        time.sleep(_POLL_S)
        estates = read_wills(folder)
    return [
        _Executor(estate, _cause(estate, ended), environ).execute()
        for estate in estates
        if not _lives(estate.info.pid) and not _is_superseded(estate)
    ]


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    import psutil

    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False


def _is_superseded(estate: Estate) -> bool:
    """Whether a later training or start of the same rank goes on in its folder."""
    try:
        text = read_word(estate.path / f"rank{estate.info.rank}" / "attempt")
    except OSError:
        return True
    later = len(earlier_trainings(estate.path, estate.info.rank)) >= estate.info.training
    return later or text.strip() != str(estate.info.attempt)


def _cause(estate: Estate, ended: Ended) -> str:
    """What ended a process, as far as it is known: only of our own child are we told."""
    if estate.info.pid != ended.pid:
        return "killed"
    return ended.signal_name or f"exit code {ended.code}"


class _Executor:
    """Goes on where the account in an estate stops, with the edges that the flight file has kept.

    Args:
        estate: of a process that is gone.
        cause: what ended it.
        environ: its environment.
    """

    def __init__(self, estate: Estate, cause: str, environ: Mapping[str, str]) -> None:
        self._estate = estate
        self._cause = cause
        self._known_unix_ns = estate.anchor.unix(estate.run.settled_ns)
        self._rest = Rest(estate.run.settled_ns, 0, 0)
        info, run = estate.info, estate.run
        self._directory = RunDirectory.again(
            estate.path, info.rank, attempt=info.attempt, max_bytes=estate.config.max_run_dir_bytes
        )
        self._routes = Routes(
            replace(estate.config, prometheus=False), info, environ, self._directory, origins=estate.origins
        )
        known = estate.known
        health = Health(
            lambda: known.drops, lambda: known.faults, lambda: known.overhead_s, lambda: known.unobserved
        )
        gone: Any = _Gone()
        known_loaders: Any = estate.loaders
        watch = LoaderWatch(run, lambda: known_loaders, look=lambda _: None, clock=system_clock)
        watch.worker_exits.update(known.worker_exits)
        readings = Readings(
            estate.signals,
            gone,
            gone,
            gone,
            health,
            lambda: known_loaders,
            watch,
            estate.anchor,
        )
        self._reporter = Reporter(run, readings, info=info, config=estate.config, breathe=lambda: None)
        self._reporter.state = "failed"
        self._documents = Documents(
            run, info, pump=cast("Any", self), routes=self._routes, health=health,
            ranks=gone, loaders=watch.facts,
        )  # fmt: skip

    @property
    def edges(self) -> int:
        """Edges counted, those that the process itself had counted included."""
        return self._estate.known.edges + self._rest.edges

    @property
    def missed(self) -> int:
        """Edges that nobody has seen."""
        return self._estate.known.missed + self._rest.lost

    @property
    def cpu_s(self) -> float:
        """CPU time of the process's pump."""
        return self._estate.known.cpu_s

    def execute(self) -> Settled:
        """Count, export, write the summary."""
        run, info = self._estate.run, self._estate.info
        self._rest = count_the_rest(self._estate, self._directory.flight_path)
        run.close(self._rest.last_ns)
        run.killed(self._cause)
        routes: list[Route] = []
        self._routes.connect(routes, self._estate.resource, profile_of(self._estate.config, info))
        batch = self._batch(self._reporter.snapshot())
        for route in routes:
            with route.guard:
                route.exporter.export(batch)
        self._routes.write_summary(
            self._documents.write("failed" if self._cause.startswith("exit") else "killed")
        )
        self._routes.close(self._estate.config.exit_timeout_s)
        write_at_the_end(self._estate.config, info.rank, self._directory.path)
        steps = run.totals.steps_by_phase().get("train", 0)
        return Settled(self._directory.rank_path, info.rank, steps, self._rest.lost)

    def _batch(self, snapshot: Snapshot) -> Batch:
        """What has not been told before: counting again makes the same spans and events again."""
        spans, events = self._estate.run.teller.drain()
        folder = self._directory.rank_path
        return Batch(
            snapshot=snapshot,
            spans=untold_spans(spans, folder / "spans.otlp.jsonl"),
            events=untold_events(events, folder / "events.jsonl", since_unix_ns=self._known_unix_ns),
            final=True,
        )


class _Gone:
    """Readings of a process that is gone: there are none."""

    def write(self, sheet: object) -> None:
        """Put nothing: not measured is absent."""

    def finding(self, train_s: float) -> None:
        """No rank is compared with a dead one."""
        del train_s

    def summary(self) -> None:
        """As above."""

    def rss_of(self, pid: int) -> int:
        """Resident bytes of a process below it: none is left."""
        del pid
        return 0
