"""Builds ``summary.json``; docs/reference/summary.md describes it."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, NamedTuple

from otel_train.accounting.types import TRAIN, Activity, StepSource
from otel_train.aggregation.series_names import CHECKPOINT
from otel_train.bottleneck.dataloader import LoaderFacts, loader_rows, throughputs
from otel_train.bottleneck.device import Compiled, lags
from otel_train.bottleneck.rules import MODEL_SHARE, RuleInput, findings, model_stages
from otel_train.catalog import ACTIVITIES, PHASES
from otel_train.console.text import plural
from otel_train.datamodel import NS_PER_S, SUMMARY_SCHEMA, Finding, Pace, system_clock
from otel_train.recording.events import SourceKind

if TYPE_CHECKING:
    from otel_train.agent.service import AgentService
    from otel_train.aggregation.counters import StageTotals, Totals
    from otel_train.distributed.hang import HangSuspect

LEAST_S = 1e-6
"""Smaller differences between sums of seconds are rounding errors."""


def summary_values(
    totals: Totals,
    *,
    wall_s: float,
    source: StepSource,
    loaders: Mapping[str, LoaderFacts],
    gaps: Sequence[Mapping[str, str]] = (),
    stalled_s: float = 0.0,
) -> dict[str, Any]:
    """Returns the values computed from events, over ``wall_s`` seconds. A loader that was never read has 0 batches.

    ``stalled_s``: duration so far of a stall that has not ended.
    """
    rows = totals.rows()
    activities = _activities(totals, wall_s, stalled_s)
    steps = totals.steps_by_phase()
    known = throughputs(totals, loaders, _processors())
    compiled = _compiled(totals)
    after = _other_after(totals)
    cpu_wait_s = (totals.cpu_wait_ns or 0) / NS_PER_S
    run = RuleInput(
        rows, steps.get("train", 0), activities, known, totals.pace, compiled, gaps, after, cpu_wait_s
    )
    return {
        "wall_seconds": wall_s,
        "step_source": "none" if source is StepSource.UNDECIDED else source.name.lower(),
        "steps": steps,
        "partial_steps": {
            phase: int(count) for phase, count in zip(PHASES, totals.partial_steps, strict=False) if count
        },
        "updates": _updates(totals, steps.get("train", 0)),
        "skipped_updates": totals.skips,
        "batches": {**dict.fromkeys(loaders, 0), **totals.by_loader(totals.batches)},
        "samples": totals.by_loader(totals.samples),
        "stages": [_stage(row) for row in rows],
        "loaders": loader_rows(totals, loaders),
        "rates": _rates(totals, loaders),
        "throughput": _throughput(totals, wall_s),
        "step_durations": _step_durations(totals),
        "activities": activities,
        **_rule_inputs(rows, compiled, totals, after),
        "checkpoints": _checkpoints(rows),
        "findings": [asdict(finding) for finding in findings(run)],
    }


def _updates(totals: Totals, trained: int) -> int | None:
    """Returns the number of updates; None if there were training steps, but no update was seen."""
    if trained and not totals.updates and not totals.skipped_updates:
        return None
    return max(0, totals.updates - totals.on_device.skipped)


def _activities(totals: Totals, wall_s: float, stalled_s: float) -> dict[str, float]:
    """Returns the seconds by activity; they add up to ``wall_s``. Time that is not accounted yet is ``other``, or of a stall."""
    activities = dict.fromkeys(ACTIVITIES, 0.0)
    activities.update({a.name.lower(): float(totals.activity_ns[a]) / NS_PER_S for a in Activity})
    pending_s = wall_s - sum(activities.values())
    if pending_s > LEAST_S:
        lasting_s = min(stalled_s, pending_s)
        activities["stalled"] += lasting_s
        activities["other"] += pending_s - lasting_s
    return activities


def _other_after(totals: Totals) -> dict[str, float]:
    """Returns the seconds of training outside all stages, by the stage before them ("" for none), the longest first."""
    found: Counter[str] = Counter()
    for source, ns in totals.other_after.items():
        found[totals.names.sources[source].stage if source >= 0 else ""] += ns
    return {stage: ns / NS_PER_S for stage, ns in found.most_common() if ns}


def _checkpoints(rows: list[StageTotals]) -> dict[str, Any]:
    saved = [row for row in rows if row.key.stage == CHECKPOINT]
    return {"count": sum(row.count for row in saved), "seconds": sum(row.inclusive_s for row in saved)}


def _compiled(totals: Totals) -> Compiled:
    calls = frozenset(source.stage for source in totals.names.sources if source.kind is SourceKind.WHOLE)
    return Compiled(totals.recompiled, calls)


def _rule_inputs(
    rows: list[StageTotals], compiled: Compiled, totals: Totals, other_after: dict[str, float]
) -> dict[str, Any]:
    """Returns the inputs of the bottleneck rules that no other part of the summary has."""
    waited_ns = totals.cpu_wait_ns
    return {
        "cpu_wait_seconds": None if waited_ns is None else waited_ns / NS_PER_S,
        "other_after": other_after,
        "model_stages": model_stages(rows, compiled),
        "recompiles": compiled.recompiled.count,
        "recompile_seconds": compiled.recompiled.total_ns / NS_PER_S,
        "device_pace": _pace(totals.pace),
    }


def _pace(pace: Pace) -> dict[str, Any] | None:
    """Returns the share of steps timed on the device, its lag and its idle time; None if no step was timed."""
    if not pace.sampled:
        return None
    return {
        "sampled_ratio": pace.sampled / pace.seen,
        "device_steps": pace.steps,
        **dict.fromkeys(("least_lag_seconds", "most_lag_seconds", "device_idle_ratio", "launch_idle_ratio")),
        **(lags(pace) if pace.steps else {}),
    }


def with_straggler(found: list[dict[str, Any]], slow: Finding, *, rank: int) -> list[dict[str, Any]]:
    """Inserts the finding about a slow rank into the findings of ``rank``.

    Only warnings with a larger share stay before it, because a rank that waits for a slow one looks busy. For the same reason
    ``compute_bound`` stays only if the model takes more than ``MODEL_SHARE`` of training time without that wait in backward.
    """
    wait = 0.0 if slow.evidence["rank"] == rank else slow.share
    found = [
        one
        for one in found
        if one["name"] != "compute_bound" or one["evidence"]["model_ratio"] - wait > MODEL_SHARE
    ]
    place = sum(one["severity"] in ("warning", "critical") and one["share"] > slow.share for one in found)
    return [*found[:place], asdict(slow), *found[place:]]


def with_suspects(found: list[dict[str, Any]], held_up: Sequence[HangSuspect]) -> list[dict[str, Any]]:
    """Adds to the finding ``stalled`` the first of the ranks that held the others up the longest."""
    if not held_up:
        return found
    first, *others = held_up
    more = f" and {plural(len(others), 'more rank')}" if others else ""
    who = f"Rank {first.rank} on {first.host}{more} held the others up the longest"
    where = f"{first.place('`')} of step {first.step}"
    return [
        {**one, "summary": f"{one['summary']} {who}, {where}."} if one["name"] == "stalled" else one
        for one in found
    ]


def _stage(row: StageTotals) -> dict[str, Any]:
    timed = row.key.stage != "other"  # time outside all stages has no calls
    least, p50, p95, p99, most = (row.quantiles if timed else None) or (None,) * 5
    return {
        **row.key._asdict(),
        "count": row.count if timed else None,
        "failed": row.failed,
        "inclusive_seconds": row.inclusive_s if timed else None,
        "self_seconds": row.self_s,
        "min": least,
        "avg": row.called_s / row.count if row.count and timed else None,
        "p50": p50,
        "p95": p95,
        "p99": p99,
        "max": most,
        "device_count": row.device.measured if row.device else None,
        "device_seconds": row.device.seconds if row.device else None,
        "device_p50": row.device.p50 if row.device else None,
        "device_p99": row.device.p99 if row.device else None,
    }


def per_second(count: float | None, seconds: float) -> float | None:
    """Returns a rate; None if the count is not known or there are no seconds."""
    return count / seconds if count is not None and seconds > 0 else None


def _rates(totals: Totals, loaders: Mapping[str, LoaderFacts]) -> list[dict[str, Any]]:
    """Returns the rates of each loader: batches, samples and tokens over the time of these batches."""
    rated = totals.rated()
    phases = Counter(loader for loader, _ in rated)
    rows = []
    for loader, phase in rated:
        if not loader:
            continue
        batches = totals.batches[loader, phase]
        name = totals.names.loaders.names[loader]
        seconds = totals.loader_ns.get((loader, phase), 0) / NS_PER_S
        samples = totals.samples.get((loader, phase))
        tokens = loaders[name].tokens if name in loaders and phases[loader] == 1 else 0
        rows.append(
            {
                "phase": PHASES[phase], "loader": name, "seconds": seconds, "batches": batches, "samples": samples,
                "tokens": tokens or None, "batches_per_second": per_second(batches, seconds),
                "samples_per_second": per_second(samples, seconds),
                "tokens_per_second": per_second(tokens or None, seconds)
            }
        )  # fmt: skip
    return sorted(rows, key=lambda row: (PHASES.index(row["phase"]), row["loader"]))


def _throughput(totals: Totals, wall_s: float) -> dict[str, Any]:
    """Returns the throughput of training over the wall time of the run, which includes all that was not training."""
    trained = [pair for pair in totals.rated() if pair[1] == TRAIN]
    batches = sum(totals.batches[pair] for pair in trained)
    samples = [totals.samples[pair] for pair in trained if pair in totals.samples]
    steps = totals.steps_by_phase().get(PHASES[TRAIN], 0)
    return {
        "wall_seconds": wall_s,
        "steps_per_second": per_second(steps, wall_s),
        "batches_per_second": per_second(batches, wall_s) if batches else None,
        "samples_per_second": per_second(sum(samples), wall_s) if samples else None,
    }


def _step_durations(totals: Totals) -> list[dict[str, Any]]:
    rows = []
    for (loader, phase), series in totals.step_pairs.items():
        if not totals.step_counts[series]:
            continue
        point = totals.steps.point(series)
        p50, p95, p99 = (totals.steps.quantile(series, q) for q in (0.5, 0.95, 0.99))
        rows.append(
            {
                "loader": totals.names.loaders.names[loader], "phase": PHASES[phase], "count": point.count,
                "total_seconds": point.sum, "min": point.min, "avg": point.sum / point.count,
                "p50": p50, "p95": p95, "p99": p99, "max": point.max
            }
        )  # fmt: skip
    return sorted(rows, key=lambda row: (PHASES.index(row["phase"]), row["loader"]))


def _processors() -> int | None:
    try:
        return len(os.sched_getaffinity(0))
    except (AttributeError, OSError):  # a system without it, or a sandbox that refuses it
        return os.cpu_count()


def _cost(service: AgentService) -> tuple[float, float, int, int]:
    """Returns the overhead in the rank and the processor time of the agent, in seconds; events read, and events lost."""
    loop = service.loop
    return service.health.overhead_s(), loop.cpu_s, loop.edges, service.lost


class WindowStart(NamedTuple):
    """Totals, time and cost at the start of a window of ``summary()``."""

    totals: Totals
    begun_ns: int
    cost: tuple[float, float, int, int]

    @classmethod
    def now(cls, service: AgentService) -> WindowStart:
        """Returns the start of a window that begins here."""
        return cls(service.run.totals.copy(), service.run.final_ns, _cost(service))


def summary_document(service: AgentService, state: str, window: WindowStart | None = None) -> dict[str, Any]:
    """Returns the document of ``summary()`` and ``summary.json``; if ``window`` is None, of the whole session."""
    run, info, loaders = service.run, service.info, service.watch.facts()
    totals, since_ns = run.totals, run.started_ns
    if window is not None:
        totals, since_ns = run.totals.since(window.totals), window.begun_ns
    gaps, now_ns = service.health.gaps(), system_clock()
    stall = run.stall(now_ns)
    edges = summary_values(
        totals, wall_s=(run.ended_by(now_ns) - since_ns) / NS_PER_S, source=run.step_source,
        loaders=loaders, gaps=gaps, stalled_s=stall["seconds"] if stall else 0.0
    )  # fmt: skip
    if (slow := service.ranks.finding(totals.phase_s("train"))) is not None:
        edges["findings"] = with_straggler(edges["findings"], slow, rank=info.rank)
    edges["findings"] = with_suspects(edges["findings"], service.ranks.longest_stall)
    return {
        "schema": SUMMARY_SCHEMA,
        "run_id": info.run_id,
        "run_name": info.run_name,
        "training": info.training,
        "attempt": info.attempt,
        "rank": info.rank,
        "world_size": info.world_size,
        "pid": info.pid,
        "host": info.host,
        "state": state,
        "end_cause": service.end_cause or None,
        "stall": stall,
        "started_unix_s": run.began_unix(info.started_unix_ns) / NS_PER_S,
        "until_unix_s": run.unix(run.ended_by(now_ns)) / NS_PER_S,
        "restart_seconds": run.down_s,
        "training_threads": run.training_threads,
        **edges,
        "ranks": service.ranks.summary(),
        "captures": run.captures.documents(),
        "tokens": {name: facts.tokens for name, facts in loaders.items() if facts.tokens},
        "instrumentation_gaps": [{key: gap[key] for key in ("what", "name", "reason")} for gap in gaps],
        "telemetry": _telemetry(service, sum(edges["steps"].values()), window),
        **service.exporters.document(),
    }


def _telemetry(service: AgentService, steps: int, window: WindowStart | None) -> dict[str, Any]:
    before = window.cost if window else (0.0, 0.0, 0, 0)
    overhead_s, cpu_s, records, lost = (a - b for a, b in zip(_cost(service), before, strict=True))
    drops: Counter[str] = Counter()
    for (_, reason), number in service.health.drops().items():
        drops[reason] += number
    return {
        "overhead_seconds": overhead_s,
        "overhead_us_per_step": overhead_s / steps * 1e6 if steps else None,
        "agent_cpu_seconds": cpu_s or None,  # of the iterations of the export loop that have ended
        "records": records,
        "records_lost": lost,
        "drops": {reason: number for reason, number in drops.items() if number},
        "faults": {part: faults for part, faults in service.health.faults().items() if faults},
    }
