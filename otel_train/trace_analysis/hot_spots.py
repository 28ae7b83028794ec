"""Kernels, operators and stacks that take most of the time."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from otel_train.datamodel import NS_PER_S
from otel_train.trace_analysis import intervals
from otel_train.trace_analysis.events import EventKind

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from otel_train.trace_analysis.timeline import TraceTimeline

LEAST_SHARE = 0.002
"""Smallest share of the total time of a call in the flame graph: a narrower box cannot be seen."""
MOST_CALLS = 1500  # boxes of a flame graph


def flame(timeline: TraceTimeline) -> list[dict[str, Any]]:
    """Returns the calls of the host merged by call stack, parents before children.

    ``parent`` is an index of this list, -1 for an outermost call; ``start_share`` and ``share`` are start and width of the
    box of a call, as shares of the total time. Stacks of all threads and steps are merged; ranges of steps are left out.
    """
    calls = timeline.calls
    name = timeline.trace.spans.name[calls.row]
    length = calls.end_ns - timeline.trace.spans.start_ns[calls.row]
    steps = timeline.trace.named(calls.row, re.compile("ProfilerStep#").match)
    parent = _without(calls.parent, steps)
    group, paths = _grouped(parent, name, ~steps)
    if not paths:
        return []
    count = np.bincount(group[group >= 0], minlength=len(paths))
    total_ns = np.bincount(group[group >= 0], length[group >= 0], len(paths))
    return _flame_boxes(paths, total_ns, count, timeline.trace.names)


def _without(parent: Any, dropped: Any) -> Any:  # Any: intp[call], bool[call]
    """Returns the parents after removing calls: children of a removed call get its parent."""
    found = parent.copy()
    for _ in range(8):  # levels: ranges of steps do not nest deeper
        through = (found >= 0) & dropped[np.maximum(found, 0)]
        if not through.any():
            break
        found[through] = parent[found[through]]
    return found


def _grouped(parent: Any, name: Any, kept: Any) -> tuple[Any, list[tuple[int, int]]]:  # Any: columns of calls
    """Returns for each call the number of its call path; each path as (number of the parent's path, name)."""
    group = np.full(parent.size, -1, np.int64)
    rows: list[tuple[int, int]] = []
    here = np.flatnonzero(kept & (parent < 0))
    while here.size and len(rows) < 100 * MOST_CALLS:
        outer = np.where(parent[here] < 0, -1, group[np.maximum(parent[here], 0)])
        paths, index = np.unique(np.stack([outer, name[here]]), axis=1, return_inverse=True)
        group[here] = len(rows) + index.reshape(-1)
        rows += [(int(above), int(code)) for above, code in paths.T]
        below = np.zeros(parent.size, np.bool_)
        below[here] = True
        here = np.flatnonzero(kept & (parent >= 0) & below[np.maximum(parent, 0)])
    return group, rows


def _flame_boxes(
    paths: list[tuple[int, int]], total_ns: NDArray[Any], count: NDArray[Any], names: Sequence[str]
) -> list[dict[str, Any]]:
    whole = float(sum(total_ns[place] for place, (outer, _) in enumerate(paths) if outer < 0)) or 1.0
    share = total_ns / whole
    found: list[dict[str, Any]] = []
    place_of: dict[int, int] = {-1: -1}
    filled: dict[int, float] = {}
    # Paths are numbered level by level: a parent comes before its children.
    for path in sorted(range(len(paths)), key=lambda path: (paths[path][0], -share[path])):
        outer, code = paths[path]
        if outer not in place_of or share[path] < LEAST_SHARE or len(found) >= MOST_CALLS:
            continue
        above = found[place_of[outer]] if outer >= 0 else {"start_share": 0.0, "depth": -1}
        start = filled.get(outer, above["start_share"])
        filled[outer] = start + float(share[path])
        place_of[path] = len(found)
        found.append(
            {
                "name": names[code],
                "parent": place_of[outer],
                "depth": above["depth"] + 1,
                "start_share": start,
                "share": float(share[path]),
                "seconds": float(total_ns[path] / NS_PER_S),
                "count": int(count[path]),
            }
        )
    return found


def by_name(
    name: NDArray[np.int32], weight_ns: NDArray[np.int64], *, most: int = 10, **more: NDArray[np.int64]
) -> list[dict[str, Any]]:
    """Returns an entry per name, those with the most time first; ``name`` is its code. ``more`` are further columns to sum."""
    if not name.size:
        return []
    seen, index, count = np.unique(name, return_inverse=True, return_counts=True)
    total = np.bincount(index, weight_ns, seen.size)
    sums = {key: np.bincount(index, column, seen.size) for key, column in more.items()}
    whole = float(total.sum())
    return [
        {
            "name": int(seen[place]),
            "count": int(count[place]),
            "seconds": float(total[place]) / NS_PER_S,
            "share": float(total[place]) / whole if whole else 0.0,
            **{key: float(column[place]) / NS_PER_S for key, column in sums.items()},
        }
        for place in np.argsort(-total, kind="stable")[:most]
    ]


SHORT_NS = 10_000
"""A shorter kernel takes the host about as long to launch as the device to run: a launch takes 2 to 10 us."""

TENSOR_CORES = re.compile(
    r"^(?!.*_ffma).*(?:[hsci]\d*(?:884|1688|16816|8816)|16816|hmma|imma|wgmma|gmma|tensor(?:op|\d+x\d+x\d+)|warpgroup"
    r"|xmma_(?:gemm|implicit_gemm|sparse)|flash_(?:fwd|bwd)|fmha|cutlass_\d+_wmma|nvjet)"
)
"""Names of kernels that use tensor cores. Source: ``TC_Allowlist`` of Kineto's tb_plugin, with the names of Hopper's matrix
kernels (nvjet) and of cuDNN's (``_tensor16x8x16_``; ``_ffma_`` are those without)."""

MATRIX = re.compile(r"gemm|gemv|conv|xmma|cutlass|fmha|flash|attention|wgrad|dgrad|nvjet", re.IGNORECASE)
"""Names of kernels whose work tensor cores can do."""


def top_kernels(timeline: TraceTimeline, *, most: int = 10) -> list[dict[str, Any]]:
    """Returns the kernels and copies of the steps, those with the most time first. ``share`` is of the sum over all streams."""
    spans, rows = timeline.trace.spans, timeline.device[timeline.in_steps]
    found = by_name(spans.name[rows], spans.dur_ns[rows], most=most)
    for row in found:
        here = rows[spans.name[rows] == row["name"]]
        row["name"] = timeline.trace.names[row["name"]]
        row["mean_seconds"] = row["seconds"] / row["count"]
        row["occupancy"] = _weighted(spans.occupancy[here] / 100, spans.dur_ns[here])
        row["tensor_cores"] = TENSOR_CORES.search(row["name"]) is not None
    return found


def launches(timeline: TraceTimeline) -> dict[str, Any] | None:
    """Returns how the kernels of the steps are launched; None if the trace has no kernel with its launch.

    ``queue_seconds`` is how long a kernel waits between the end of its launch and its start: near zero, the
    device waits for the host. ``outrun_share`` is the share of kernels shorter than their own launch.
    """
    spans, rows, launched = timeline.trace.spans, timeline.device, timeline.launches
    known = (launched.row >= 0) & ~timeline.copies & timeline.in_steps
    if not known.any():
        return None
    call_ns = launched.end_ns[known] - launched.start_ns[known]
    dur_ns = spans.dur_ns[rows[known]]
    queue_ns = np.maximum(spans.start_ns[rows[known]] - launched.end_ns[known], 0)
    return {
        "count": int(known.sum()),
        "per_step": float(known.sum()) / timeline.steps.number.size if timeline.steps.counted else None,
        "call_seconds": float(call_ns.mean()) / NS_PER_S,
        "kernel_seconds": float(np.median(dur_ns)) / NS_PER_S,
        "short_share": float((dur_ns < SHORT_NS).mean()),
        "outrun_share": float((dur_ns < call_ns).mean()),
        "queue_seconds": {f"p{p}": float(np.quantile(queue_ns, p / 100)) / NS_PER_S for p in (50, 95)},
    }


def occupancy(timeline: TraceTimeline) -> float | None:
    """Returns the mean estimated occupancy in the steps, 0 to 1, weighted by kernel time; None if no kernel has it."""
    spans, rows = timeline.trace.spans, timeline.device[timeline.computes & timeline.in_steps]
    return _weighted(spans.occupancy[rows] / 100, spans.dur_ns[rows])


def tensor_cores(timeline: TraceTimeline) -> dict[str, float] | None:
    """Returns how much of the kernel time of the steps uses tensor cores; None without kernels of an NVIDIA device.

    ``seconds`` is the time in which a compute kernel runs. ``share`` is the share of compute kernel time in kernels that use
    tensor cores, ``matrix_share`` that in kernels that could; ``used_share`` is their quotient. Kernel names decide.
    """
    spans, rows = timeline.trace.spans, timeline.device[timeline.computes & timeline.in_steps]
    calls = timeline.trace.rows(EventKind.RUNTIME)
    if not rows.size or (calls.size and not timeline.trace.named(calls, re.compile("cu").match).any()):
        return None
    dur_ns = spans.dur_ns[rows]
    uses = timeline.trace.named(rows, TENSOR_CORES.search)
    matrix = timeline.trace.named(rows, MATRIX.search) | uses
    whole, able_ns, used_ns = int(dur_ns.sum()), int(dur_ns[matrix].sum()), int(dur_ns[uses].sum())
    return {
        "seconds": timeline.intervals_of(rows).total_ns / NS_PER_S,
        "share": used_ns / whole if whole else 0.0,
        "matrix_share": able_ns / whole if whole else 0.0,
        "used_share": used_ns / able_ns if able_ns else 0.0,
    }


def _weighted(values: Any, weight_ns: Any) -> float | None:  # Any: float32[event] and int64[event]
    known = np.isfinite(values)
    weight = float(weight_ns[known].sum())
    return float((values[known] * weight_ns[known]).sum()) / weight if weight else None


def top_ops(timeline: TraceTimeline, *, most: int = 10) -> list[dict[str, Any]]:
    """Returns the operators of the host in the steps, those with the most self time first.

    Calls of the CUDA runtime count as self time of the operator that makes them, unless they wait for the device.
    ``seconds`` is self time, ``total_seconds`` the time from start to end, in which an operator that calls itself
    directly counts once. ``share`` is of the self time of all operators.
    """
    calls, spans = timeline.calls, timeline.trace.spans
    kind = timeline.trace.kind[calls.row]
    self_ns = calls.self_ns.copy()
    launching = (
        (kind == EventKind.RUNTIME) & (calls.parent >= 0) & ~np.isin(calls.row, timeline.synchronizing)
    )
    np.add.at(self_ns, calls.parent[launching], calls.self_ns[launching])
    within = intervals.contains(timeline.within, spans.start_ns[calls.row])
    ops = np.flatnonzero((kind == EventKind.OP) & within)
    name = spans.name[calls.row]
    outer = calls.parent[ops]
    again = (outer >= 0) & (name[np.maximum(outer, 0)] == name[ops])
    total_ns = np.where(again, 0, (calls.end_ns - spans.start_ns[calls.row])[ops])
    rows = by_name(name[ops], self_ns[ops], most=most, total_seconds=total_ns)
    return [{**row, "name": timeline.trace.names[row["name"]]} for row in rows]
