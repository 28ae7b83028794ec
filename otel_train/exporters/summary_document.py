"""The summary of a session, put together from everything that knows a part of it."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, NamedTuple

from otel_train.clock import NS_PER_S, system_clock
from otel_train.exporters.summary import SCHEMA, figures, with_straggler

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from otel_train.aggregation.counters import Totals
    from otel_train.aggregation.run_state import RunState
    from otel_train.bottleneck.dataloader import LoaderFacts
    from otel_train.exporters.manager import Routes
    from otel_train.exporters.metric_reader import SelfMetrics
    from otel_train.exporters.pump import Pump
    from otel_train.exporters.rank_coordinator import RankCoordinator
    from otel_train.runinfo import RunInfo


def _processors() -> int | None:
    """Those that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count()


class Cost(NamedTuple):
    """What the telemetry has done and cost so far."""

    overhead_s: float
    pump_cpu_s: float
    records: int
    lost: int


class Window(NamedTuple):
    """Where a window of figures begins."""

    totals: Totals
    begun_ns: int
    telemetry: Cost


class Documents:
    """Writes ``summary()`` and ``summary.json``; docs/reference/summary.md has the schema.

    Args:
        run: the account.
        info: who we are.
        pump: reads the records.
        routes: where things are.
        health: what the telemetry costs and loses.
        loaders: the loaders known now.
        ranks: what is known of all ranks.
    """

    def __init__(  # noqa: PLR0913 - all but two by keyword
        self,
        run: RunState,
        info: RunInfo,
        *,
        pump: Pump,
        routes: Routes,
        health: SelfMetrics,
        loaders: Callable[[], Mapping[str, LoaderFacts]],
        ranks: RankCoordinator,
    ) -> None:
        self._run = run
        self._info = info
        self._pump = pump
        self._routes = routes
        self._health = health
        self._loaders = loaders
        self._ranks = ranks

    def window(self) -> Window:
        """A window that begins now."""
        return Window(self._run.totals.copy(), self._run.settled_ns, self._cost())

    def write(self, state: str, window: Window | None = None) -> dict[str, Any]:
        """The document.

        Args:
            state: how the run is, or how it ended.
            window: from where on figures count; None for the whole session.
        """
        run, info, loaders = self._run, self._info, dict(self._loaders())
        totals, since_ns = run.totals, run.started_ns
        if window is not None:
            totals, since_ns = run.totals.since(window.totals), window.begun_ns
        things = self._health.unobserved()
        edges = figures(
            totals,
            wall_s=(run.ended_by(system_clock()) - since_ns) / NS_PER_S,
            source=run.step_source,
            loaders=loaders,
            processors=_processors(),
            unobserved=things,
        )
        if (slow := self._ranks.finding(totals.phase_s("train"))) is not None:
            edges["verdicts"] = with_straggler(edges["verdicts"], slow)
        return {
            "schema": SCHEMA,
            "run_id": info.run_id,
            "run_name": info.run_name,
            "training": info.training,
            "attempt": info.attempt,
            "rank": info.rank,
            "world_size": info.world_size,
            "pid": info.pid,
            "host": info.host,
            "state": state,
            "started_unix_s": info.started_unix_ns / NS_PER_S,
            "restart_seconds": run.down_s,
            "training_threads": run.training_threads,
            **edges,
            "ranks": self._ranks.summary(),
            "captures": run.captures.documents(),
            "tokens": {name: facts.tokens for name, facts in loaders.items() if facts.tokens},
            "unobserved": [{key: thing[key] for key in ("what", "name", "reason")} for thing in things],
            "telemetry": self._telemetry(sum(edges["steps"].values()), window),
            **self._routes.document(),
        }

    def _cost(self) -> Cost:
        pump = self._pump
        return Cost(self._health.overhead_s(), pump.cpu_s, pump.edges, pump.missed)

    def _telemetry(self, steps: int, window: Window | None) -> dict[str, Any]:
        before = window.telemetry if window else Cost(0.0, 0.0, 0, 0)
        now = self._cost()
        cost = Cost(
            now.overhead_s - before.overhead_s,
            now.pump_cpu_s - before.pump_cpu_s,
            now.records - before.records,
            now.lost - before.lost,
        )
        overhead_s = cost.overhead_s
        drops: dict[str, int] = {}
        for (_, reason), number in self._health.drops().items():
            drops[reason] = drops.get(reason, 0) + number
        return {
            "overhead_seconds": overhead_s,
            "overhead_us_per_step": overhead_s / steps * 1e6 if steps else None,
            "pump_cpu_seconds": cost.pump_cpu_s,
            "records": cost.records,
            "records_lost": cost.lost,
            "drops": {reason: number for reason, number in drops.items() if number},
            "faults": {part: faults for part, faults in self._health.faults().items() if faults},
        }
