"""Builds the analysis document of a trace; of several traces, which rank waits for which."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import numpy as np

from otel_train.datamodel import NS_PER_S
from otel_train.errors import TraceError
from otel_train.trace_analysis.breakdown import allocations, breakdown, critical_path, idle, overlap, temporal
from otel_train.trace_analysis.events import Trace, read
from otel_train.trace_analysis.hot_spots import launches, occupancy, tensor_cores, top_kernels, top_ops
from otel_train.trace_analysis.rules import findings, rank_finding
from otel_train.trace_analysis.timeline import TraceTimeline

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

    Ints = NDArray[np.int64]
    Collective = tuple[str, str]

SCHEMA = "otel_train.analysis/2"


def trace_summary(
    path: str | Path, *, most: int = 10, progress: Callable[[int, int], None] | None = None
) -> dict[str, Any]:
    """Analyzes a trace file.

    Args:
        path: a Chrome trace of ``torch.profiler``, plain or gzip.
        most: entries of the lists of operators and kernels.
        progress: called with (bytes read, bytes in the file) after each piece.

    Returns:
        A document: docs/reference/analysis.md explains each value. ``top_cpu_ops``, ``top_cuda_ops`` and
        ``memory_peaks`` are lists, ``dataloader_time_pct`` is percent of the step time; unknown values are None.

    Raises:
        TraceError: there is no such file, or it is not a trace.
    """
    return summarize(read(path, progress=progress), most=most)


def summarize(trace: Trace, *, most: int = 10) -> dict[str, Any]:
    """Returns the document of ``trace_summary`` for a trace that has been read."""
    timeline = TraceTimeline(trace)
    parts = breakdown(timeline)
    memory = allocations(timeline)
    document: dict[str, Any] = {
        "schema": SCHEMA,
        "path": str(trace.path),
        "rank": trace.rank,
        "world_size": trace.world_size,
        "events": int(trace.kind.size),
        "missing": list(trace.missing),
        "top_cpu_ops": top_ops(timeline, most=most),
        "top_cuda_ops": top_kernels(timeline, most=trace.kind.size),  # all of them for the rules
        "memory_peaks": [{"device": part["device"], **peak} for part in memory for peak in part["peaks"]],
        "dataloader_time_pct": None if parts["data_share"] is None else parts["data_share"] * 100,
        "breakdown": parts,
        "device": temporal(timeline),
        "idle": idle(timeline),
        "overlap": overlap(timeline),
        "launches": launches(timeline),
        "occupancy": occupancy(timeline),
        "tensor_cores": tensor_cores(timeline),
        "memory": memory,
        "critical_path": critical_path(timeline),
    }
    document["findings"] = [asdict(finding) for finding in findings(document)]
    document["top_cuda_ops"] = document["top_cuda_ops"][:most]
    return document


def summarize_ranks(traces: Sequence[Trace], *, most: int = 10) -> list[dict[str, Any]]:
    """Analyzes each trace; with several ranks, the first document also has the waits between them."""
    documents = [summarize(trace, most=most) for trace in traces]
    if len(traces) > 1:
        first = documents[0]
        first["ranks"] = waiting = waits([TraceTimeline(trace) for trace in traces])
        if (late := rank_finding(first, waiting)) is not None:
            others = [finding for finding in first["findings"] if finding["name"] != "no_finding"]
            first["findings"] = sorted([*others, asdict(late)], key=lambda finding: -finding["share"])
    return documents


def waits(timelines: Sequence[TraceTimeline]) -> dict[str, Any]:
    """Returns the wait of each rank in collectives, and the rank it waits for.

    A collective ends on all ranks at the same instant, so the rank that joined it last spends the least time in it, and
    each other rank waited for the difference. No common clock is needed. Collectives are matched by process group, kind and
    order, in the steps that all ranks recorded. Needs one trace each of two ranks or more.
    """
    by_rank, common = _by_rank(timelines), _common_steps(timelines)
    lengths = {rank: _collectives(timeline, common) for rank, timeline in by_rank.items()}
    waited = dict.fromkeys(by_rank, 0)
    caused = dict.fromkeys(by_rank, 0)
    matched = unmatched = 0
    for which in sorted({key for of_rank in lengths.values() for key in of_rank}):
        members = [rank for rank, of_rank in lengths.items() if which in of_rank]
        columns = [lengths[rank][which] for rank in members]
        count = min(column.size for column in columns)
        unmatched += sum(column.size - count for column in columns)
        if len(members) <= 1:
            continue
        table = np.stack([column[:count] for column in columns])
        matched += count
        last = table.argmin(axis=0)
        excess = table - table.min(axis=0)
        for place, rank in enumerate(members):
            waited[rank] += int(excess[place].sum())
            caused[rank] += int(excess.sum(axis=0)[last == place].sum())
    return {
        "collectives": matched,
        "unmatched": unmatched,
        "ranks": [
            {
                "rank": rank,
                "waited_seconds": waited[rank] / NS_PER_S,
                "caused_seconds": caused[rank] / NS_PER_S,
                "step_seconds": _median_step_s(by_rank[rank]),
            }
            for rank in sorted(by_rank)
        ],
    }


def _by_rank(timelines: Sequence[TraceTimeline]) -> Mapping[int, TraceTimeline]:
    by_rank: dict[int, TraceTimeline] = {}
    for timeline in timelines:
        path, rank = timeline.trace.path, timeline.trace.rank
        if rank is None:
            raise TraceError(f"{path}: does not say which rank it is, so it cannot be put beside others")
        if rank in by_rank:
            raise TraceError(f"{path} and {by_rank[rank].trace.path}: both are of rank {rank}")
        by_rank[rank] = timeline
    if len(by_rank) <= 1:
        raise TraceError("waits between ranks need the traces of at least two ranks")
    return by_rank


def _common_steps(timelines: Sequence[TraceTimeline]) -> Ints | None:
    """Returns the steps that all ranks recorded; None if one has no step numbers."""
    if not all(timeline.steps.counted for timeline in timelines):
        return None
    common = timelines[0].steps.number
    for timeline in timelines[1:]:
        common = np.intersect1d(common, timeline.steps.number)
    return common


def _collectives(timeline: TraceTimeline, steps: Ints | None) -> dict[Collective, Ints]:
    """Returns the length of each collective, in order, by group and kind. int64[collective], nanoseconds."""
    spans, names = timeline.trace.spans, timeline.trace.names
    rows = timeline.collectives
    if steps is not None:
        rows = rows[np.isin(timeline.step_of(spans.start_ns[rows]), steps)]
    found: dict[Collective, Ints] = {}
    kinds = np.where(spans.collective[rows] > 0, spans.collective[rows], spans.name[rows])
    for group, kind in sorted({*zip(spans.group[rows].tolist(), kinds.tolist(), strict=True)}):
        here = rows[(spans.group[rows] == group) & (kinds == kind)]
        found[names[group], names[kind]] = spans.dur_ns[here]
    return found


def _median_step_s(timeline: TraceTimeline) -> float | None:
    if not timeline.steps.counted:
        return None
    return float(np.median(timeline.steps.end_ns - timeline.steps.start_ns)) / NS_PER_S
