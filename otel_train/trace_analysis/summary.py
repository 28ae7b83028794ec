"""Everything a trace says, as one document."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from otel_train.datamodel import finding_document
from otel_train.trace_analysis.breakdown import allocations, breakdown, idle, overlap, temporal
from otel_train.trace_analysis.critical_path import critical_path
from otel_train.trace_analysis.events import Trace, read
from otel_train.trace_analysis.hot_spots import launches, occupancy, tensor_cores, top_kernels, top_ops
from otel_train.trace_analysis.rules import findings
from otel_train.trace_analysis.timeline import Scene

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

SCHEMA = "otel_train.analysis/1"


def trace_summary(
    path: str | Path, *, most: int = 10, progress: Callable[[int, int], None] | None = None
) -> dict[str, Any]:
    """Where the time of a trace goes.

    Args:
        path: a Chrome trace of ``torch.profiler``, plain or gzip.
        most: entries of the lists of operators and kernels.
        progress: called with (bytes read, bytes in the file) now and then.

    Returns:
        A document: docs/reference/analysis.md explains each value. ``top_cpu_ops``, ``top_cuda_ops`` and
        ``memory_peaks`` are lists, ``dataloader_time_pct`` is percent of the steps; None stands for not known.

    Raises:
        TraceError: it is no trace, or there is none.
    """
    return summarize(read(path, progress=progress), most=most)


def summarize(trace: Trace, *, most: int = 10) -> dict[str, Any]:
    """As ``trace_summary``, of a trace that was read."""
    scene = Scene(trace)
    parts = breakdown(scene)
    memory = allocations(scene)
    document: dict[str, Any] = {
        "schema": SCHEMA,
        "path": str(trace.path),
        "rank": trace.rank,
        "world_size": trace.world_size,
        "events": int(trace.kind.size),
        "missing": list(trace.missing),
        "top_cpu_ops": top_ops(scene, most=most),
        "top_cuda_ops": top_kernels(scene, most=most),
        "memory_peaks": [{"device": part["device"], **peak} for part in memory for peak in part["peaks"]],
        "dataloader_time_pct": None if parts["data_share"] is None else parts["data_share"] * 100,
        "breakdown": parts,
        "device": temporal(scene),
        "idle": idle(scene),
        "overlap": overlap(scene),
        "launches": launches(scene),
        "occupancy": occupancy(scene),
        "tensor_cores": tensor_cores(scene),
        "memory": memory,
        "critical_path": critical_path(scene),
    }
    document["findings"] = [finding_document(finding) for finding in findings(document)]
    return document
