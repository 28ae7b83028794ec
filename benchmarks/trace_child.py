"""Analyses one trace in a process of its own, with this library or with HolisticTraceAnalysis; prints numbers as JSON.

Runs in an environment that has only one of the two: nothing of this project is imported for the other.
"""

from __future__ import annotations

import json
import logging
import resource
import sys
import time
from pathlib import Path
from typing import Any

MIB = 1 << 20


def ours(path: str) -> dict[str, Any]:
    """Returns everything that ``trace_summary`` computes."""
    from otel_train.trace_analysis import trace_summary

    document = trace_summary(path)
    device, overlap = document["device"], document["overlap"]
    if device is None:
        return {}
    return {
        "idle": device["idle_share"],
        "compute": device["compute_share"],
        "other": device["other_share"],
        "overlap": overlap["overlap_share"],
    }


def theirs(path: str) -> dict[str, Any]:
    """Returns the shares that ``ours`` returns, from HolisticTraceAnalysis; the last profiler step is included."""
    logging.disable(logging.CRITICAL)
    from hta.trace_analysis import TraceAnalysis

    trace = TraceAnalysis(trace_files={0: path}, trace_dir="/", include_last_profiler_step=True)
    times = trace.get_temporal_breakdown(visualize=False).iloc[0]
    whole = float(times["kernel_time(us)"])
    overlap = trace.get_comm_comp_overlap(visualize=False).iloc[0]["comp_comm_overlap_pctg"]
    trace.get_gpu_kernel_breakdown(visualize=False)
    return {
        "idle": float(times["idle_time(us)"]) / whole,
        "compute": float(times["compute_time(us)"]) / whole,
        "other": float(times["non_compute_time(us)"]) / whole,
        "overlap": float(overlap) / 100,
    }


def main() -> None:
    """Measures one analysis, without the time of its imports."""
    which, path = sys.argv[1:]
    if which == "ours":
        import msgspec.json
        import numpy as np

        import otel_train.trace_analysis.summary

        del msgspec, np, otel_train
    else:
        import hta.trace_analysis

        del hta
    base_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    begun, cpu = time.perf_counter(), time.process_time()
    shares = {"ours": ours, "theirs": theirs}[which](path)
    numbers = {
        "shares": shares,
        "wall_s": time.perf_counter() - begun,
        "cpu_s": time.process_time() - cpu,
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "base_mib": base_mib,
        "file_mib": Path(path).stat().st_size / MIB,
    }
    print(json.dumps(numbers))


if __name__ == "__main__":
    main()
