"""Which kernels the device spends its time in, and how they are launched."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import numpy as np

from otel_train.analyze.tables import by_name
from otel_train.clock import NS_PER_S

if TYPE_CHECKING:
    from otel_train.analyze.scene import Scene

SHORT_NS = 10_000
"""A kernel below 10 us costs the host about as much to launch as the device to run: a launch takes 2 to 10 us."""

TENSOR_CORES = re.compile(
    r"[hsci]\d*(?:884|1688|16816|8816)|16816|hmma|imma|wgmma|gmma|tensorop|warpgroup|xmma_(?:gemm|implicit_gemm|sparse)"
    r"|flash_(?:fwd|bwd)|fmha|cutlass_\d+_wmma"
)
"""Names of kernels that use tensor cores. Source: ``TC_Allowlist`` of Kineto's tb_plugin, with Hopper's names added."""

MATRIX = re.compile(r"gemm|gemv|conv|xmma|cutlass|fmha|flash|attention|wgrad|dgrad|nvjet", re.IGNORECASE)
"""Names of kernels whose work tensor cores can do."""


def top_kernels(scene: Scene, *, most: int = 10) -> list[dict[str, Any]]:
    """What ran on the device, by time. ``share`` is of the time of all of it, stream by stream."""
    spans, rows = scene.trace.spans, scene.device
    found = by_name(spans.name[rows], spans.dur_ns[rows], most=most, more={})
    for row in found:
        here = rows[spans.name[rows] == row["name"]]
        row["name"] = scene.trace.names[row["name"]]
        row["mean_seconds"] = row["seconds"] / row["count"]
        row["occupancy"] = _weighted(spans.occupancy[here] / 100, spans.dur_ns[here])
        row["tensor_cores"] = TENSOR_CORES.search(row["name"]) is not None
    return found


def launches(scene: Scene) -> dict[str, Any] | None:
    """How kernels get to the device; None where the trace has no kernel with its launch.

    ``queue_seconds`` is how long a kernel waits between the end of its launch and its start: near zero, the
    device waits for the host. ``outrun_share`` is the share of kernels shorter than their own launch.
    """
    spans, rows, launched = scene.trace.spans, scene.device, scene.launches
    known = (launched.row >= 0) & ~scene.copies
    if not known.any():
        return None
    call_ns = launched.end_ns[known] - launched.start_ns[known]
    dur_ns = spans.dur_ns[rows[known]]
    queue_ns = np.maximum(spans.start_ns[rows[known]] - launched.end_ns[known], 0)
    return {
        "count": int(known.sum()),
        "per_step": float(known.sum()) / scene.steps.number.size if scene.steps.counted else None,
        "call_seconds": float(call_ns.mean()) / NS_PER_S,
        "kernel_seconds": float(np.median(dur_ns)) / NS_PER_S,
        "short_share": float((dur_ns < SHORT_NS).mean()),
        "outrun_share": float((dur_ns < call_ns).mean()),
        "queue_seconds": {
            name: float(np.quantile(queue_ns, q)) / NS_PER_S for name, q in (("p50", 0.5), ("p95", 0.95))
        },
    }


def occupancy(scene: Scene) -> float | None:
    """Estimated occupancy of the multiprocessors, 0 to 1, over the time of the kernels that say; None if none does."""
    spans, rows = scene.trace.spans, scene.device[~(scene.communicates | scene.copies)]
    return _weighted(spans.occupancy[rows] / 100, spans.dur_ns[rows])


def tensor_cores(scene: Scene) -> dict[str, float] | None:
    """Which part of kernel time is spent in kernels that use tensor cores; None without kernels.

    ``share`` is of all kernels that compute, ``matrix_share`` how much of them could use tensor cores,
    ``used_share`` how much of those do. All by the names of the kernels.
    """
    spans, rows = scene.trace.spans, scene.device[~(scene.communicates | scene.copies)]
    if not rows.size:
        return None
    code, dur_ns = spans.name[rows], spans.dur_ns[rows]
    uses = np.array([TENSOR_CORES.search(name) is not None for name in scene.trace.names])[code]
    matrix = np.array([MATRIX.search(name) is not None for name in scene.trace.names])[code] | uses
    whole, able_ns, used_ns = int(dur_ns.sum()), int(dur_ns[matrix].sum()), int(dur_ns[uses].sum())
    return {
        "share": used_ns / whole if whole else 0.0,
        "matrix_share": able_ns / whole if whole else 0.0,
        "used_share": used_ns / able_ns if able_ns else 0.0,
    }


def _weighted(values: Any, weight_ns: Any) -> float | None:  # Any: float32[event] and int64[event]
    known = np.isfinite(values)
    weight = float(weight_ns[known].sum())
    return float((values[known] * weight_ns[known]).sum()) / weight if weight else None
