"""Findings about a trace, one function per rule."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import field, replace
from itertools import pairwise
from typing import Any

from otel_train.datamodel import Finding
from otel_train.fast_classes import fast_dataclass

Document = Mapping[str, Any]  # what otel_train.trace_analysis.summary.summarize returns


HOURS_PER_DAY = 24

DATA_SHARE = 0.10
"""Equal to ``bottleneck.dataloader.WARNING_SHARE``: the findings of a run and of its trace must agree."""
HOST_SHARE, SYNC_SHARE, EXPOSED_SHARE, COPY_SHARE = 0.15, 0.05, 0.10, 0.05
"""Smallest shares of step time that give a finding: idle because of the host or after a synchronization, exposed
communication, pageable copies. A healthy step, which begins and ends with some idle time, stays below."""
SHORT_SHARE = 0.5
"""Share of kernels shorter than 10 us from which the finding is ``launch_bound`` and not ``host_bound``."""
MATRIX_SHARE, UNUSED_SHARE = 0.3, 0.7
"""Smallest share of kernel time in matrix kernels, and of that time without tensor cores, that give a finding."""
TENSOR_CORE_GAIN = 0.5
"""Share of its time that a matrix kernel saves at least with tensor cores. TF32 is specified at 8 times the FP32 rate
(A100: 156 against 19.5 TFLOP/s); half is assumed, since memory limits some kernels."""
OPTIMIZER_SHARE, HEAVY_OP_SHARE = 0.10, 0.30  # of the step time; of the time in operators
GROWING_STEPS, GROWTH_BYTES = 4, 1 << 20  # steps in a row, and bytes that each must add
SEVERE = 0.20  # share from which a finding is critical


@fast_dataclass(frozen=True, kw_only=True)
class TraceFinding(Finding):
    """A finding about a trace. A rule sets ``share``, of the step time; ``_finished`` derives seconds, hours and severity."""

    evidence: Mapping[str, float] = field(default_factory=dict)
    share: float = 0.0
    seconds: float = 0.0
    severity: str = ""
    where: tuple[str, ...] = ()  # places in the trace that show it, a sentence each
    hours_per_day: float = 0.0  # that could be saved in a day of training
    confidence: str = "medium"  # ``high``, ``medium`` or ``low``: how well the evidence supports the summary


def waits_for_data(document: Document) -> TraceFinding | None:
    """Finds that the device, or without one the host, waits for batches."""
    idle = document["idle"]
    host_share = document["breakdown"]["data_share"]
    share = host_share if idle is None else idle["causes"]["data"]["share"]
    if share is None or share < DATA_SHARE:
        return None
    subject = "The device stands idle" if idle else "Training waits"
    pinned = ", pin_memory=True" if idle else ""
    return TraceFinding(
        name="input_bound",
        summary=f"{subject} for the next batch during {share:.0%} of the time.",
        share=share,
        evidence={"idle_share": share, "host_wait_share": host_share or 0.0},
        where=_gaps(document, "data"),
        advice=f"DataLoader(..., num_workers=N, persistent_workers=True{pinned}) reads beside the training, with N up to the "
        "number of processors; with workers already, raise num_workers or prefetch_factor, or move decoding out of __getitem__.",
        confidence="high" if idle else "medium",
        phase="train",
    )


def waits_for_host(document: Document) -> TraceFinding | None:
    """Finds that the device waits for launches."""
    idle, launches = document["idle"], document["launches"]
    if not idle or idle["causes"]["host"]["share"] < HOST_SHARE:
        return None
    share, gaps = idle["causes"]["host"]["share"], idle["causes"]["host"]["gaps"]
    evidence = {"idle_share": share, "gaps": gaps}
    if launches and launches["short_share"] >= SHORT_SHARE:
        per_step = f"{launches['per_step']:,.0f} per step, " if launches["per_step"] else ""
        return TraceFinding(
            name="launch_bound",
            summary=f"The device waits for launches during {share:.0%} of the time: {launches['count']:,} kernels, {per_step}"
            f"{launches['short_share']:.0%} of them shorter than 10 µs.",
            share=share,
            evidence={**evidence, "short_share": launches["short_share"], "kernels": launches["count"]},
            where=_gaps(document, "host"),
            advice='torch.compile(model, mode="reduce-overhead") fuses kernels and replays them as a CUDA graph; a '
            "larger batch gives each launch more to do; an optimizer with fused=True launches one kernel.",
            confidence="high",
        )
    top = next(iter(document["top_cpu_ops"]), None)
    most = f" Most host time is in {top['name']} ({top['share']:.0%} of operators)." if top else ""
    return TraceFinding(
        name="host_bound",
        summary=f"The device waits for Python and the operators of the host during {share:.0%} of the time.{most}",
        share=share,
        evidence=evidence,
        where=_gaps(document, "host"),
        advice="Move logging, metrics and checks out of the step; torch.compile(model) takes Python out of it. "
        "with_stack=True in a capture shows which lines run.",
    )


def waits_for_sync(document: Document) -> TraceFinding | None:
    """Finds that the host waits for the device, which then has nothing queued."""
    idle = document["idle"]
    if not idle or idle["causes"]["sync"]["share"] < SYNC_SHARE:
        return None
    share, gaps = idle["causes"]["sync"]["share"], idle["causes"]["sync"]["gaps"]
    return TraceFinding(
        name="sync_bound",
        summary=f"The device is idle for {share:.0%} of the time because the host waited for it and had nothing queued after: "
        f"{gaps:,} times.",
        share=share,
        evidence={"idle_share": share, "gaps": gaps},
        where=_gaps(document, "sync"),
        advice='loss.item(), .cpu(), print(tensor) and tensor.tolist() wait; torch.cuda.set_sync_debug_mode("warn") '
        "names the lines. Keep values on the device and read them every N steps.",
        confidence="high",
    )


def waits_for_ranks(document: Document) -> TraceFinding | None:
    """Finds collectives that no compute kernel overlaps."""
    overlap = document["overlap"]
    if not overlap or overlap["exposed_share_of_steps"] < EXPOSED_SHARE:
        return None
    share = overlap["exposed_share_of_steps"]
    return TraceFinding(
        name="exposed_communication",
        summary=f"During {share:.0%} of the time the device only communicates: {overlap['overlap_share']:.0%} of the "
        "communication hides behind computation.",
        share=share,
        evidence={"exposed_share": share, "overlap_share": overlap["overlap_share"]},
        where=tuple(
            f"{row['name']}: {row['count']:,} times, {row['seconds']:.3g} s"
            for row in overlap["collectives"][:3]
        ),
        advice="DistributedDataParallel(..., bucket_cap_mb=..., gradient_as_bucket_view=True) overlaps more; no_sync() "
        "while accumulating; for FSDP set_modules_to_forward_prefetch. If one rank is late, see which rank waits for which: "
        "give `otel-train analyze` the traces of all ranks.",
        confidence="high",
    )


def copies_block(document: Document) -> TraceFinding | None:
    """Finds copies from memory that is not pinned."""
    if not document["device"]:
        return None
    rows = [row for row in document["top_cuda_ops"] if "Pageable -> Device" in row["name"]]
    seconds, steps_s = sum(row["seconds"] for row in rows), document["breakdown"]["seconds"]
    share = seconds / steps_s if steps_s else 0.0
    if share < COPY_SHARE:
        return None
    return TraceFinding(
        name="pageable_copies",
        summary=f"Copies to the device from memory that is not pinned take {share:.0%} of the time, and the host waits for each.",
        share=share,
        evidence={"copy_share": share, "copies": sum(row["count"] for row in rows)},
        where=tuple(f"{row['name']}: {row['count']:,} times" for row in rows),
        advice="DataLoader(..., pin_memory=True) and tensor.to(device, non_blocking=True).",
        confidence="high",
    )


def spares_tensor_cores(document: Document) -> TraceFinding | None:
    """Finds matrix kernels that do not use tensor cores."""
    used = document["tensor_cores"]
    if not used or used["matrix_share"] < MATRIX_SHARE or 1 - used["used_share"] < UNUSED_SHARE:
        return None
    busy_share = min(1.0, used["seconds"] / document["breakdown"]["seconds"])
    share = busy_share * used["matrix_share"] * (1 - used["used_share"]) * TENSOR_CORE_GAIN
    return TraceFinding(
        name="no_tensor_cores",
        summary=f"{1 - used['used_share']:.0%} of the time in matrix kernels does not use tensor cores; the share counts half of it.",
        share=share,
        evidence=dict(used),
        where=tuple(row["name"] for row in document["top_cuda_ops"] if not row["tensor_cores"])[:3],
        advice='torch.autocast("cuda", dtype=torch.bfloat16), or torch.set_float32_matmul_precision("high") for TF32; '
        "sizes that are multiples of 8.",
        confidence="low",
    )


def steps_slowly(document: Document) -> TraceFinding | None:
    """Finds an optimizer that updates one parameter at a time."""
    row = next((row for row in document["breakdown"]["stages"] if row["stage"] == "optimizer"), None)
    if row is None or row["share"] < OPTIMIZER_SHARE or document["breakdown"]["optimizer"] != "single":
        return None
    return TraceFinding(
        name="unfused_optimizer",
        summary=f"The optimizer takes {row['share']:.0%} of the step and updates one tensor at a time; the share counts half.",
        share=row["share"] / 2,
        evidence={"optimizer_share": row["share"], "updates": row["count"] or 0},
        advice="torch.optim.AdamW(..., fused=True), or foreach=True where there is no fused one.",
        phase="train",
    )


def one_op_weighs(document: Document) -> TraceFinding | None:
    """Finds, without a device, one operator that takes most of the time."""
    top = next(iter(document["top_cpu_ops"]), None)
    if document["device"] or top is None or top["share"] < HEAVY_OP_SHARE:
        return None
    steps_s = document["breakdown"]["seconds"]
    return TraceFinding(
        name="heavy_op",
        summary=f"{top['name']} takes {top['share']:.0%} of the time in operators: {top['count']:,} calls, {top['seconds']:.3g} s.",
        evidence={"op_share": top["share"], "op_seconds": top["seconds"], "steps_seconds": steps_s},
        where=(top["name"],),
        advice=_op_advice(top["name"]),
        severity="info",
    )


def memory_grows(document: Document) -> TraceFinding | None:
    """Finds allocated memory that grows with every step."""
    for part in document["memory"]:
        left = part["step_end_bytes"]
        if len(left) >= GROWING_STEPS and all(b - a >= GROWTH_BYTES for a, b in pairwise(left)):
            per_step = (left[-1] - left[0]) / (len(left) - 1)
            return TraceFinding(
                name="memory_growth",
                summary=f"Every step leaves {per_step / 1e6:,.1f} MB more behind on {part['device']}: {len(left)} steps in a row.",
                evidence={"bytes_per_step": per_step, "steps": len(left)},
                advice="Keep loss.item() or loss.detach(), not loss, in lists and running sums: a tensor with a graph "
                "keeps every activation. torch.cuda.memory._record_memory_history() shows who allocates.",
            )
    return None


RULES = (
    waits_for_data, waits_for_host, waits_for_sync, waits_for_ranks, copies_block, spares_tensor_cores,
    steps_slowly, one_op_weighs, memory_grows,
)  # fmt: skip


def _gaps(document: Document, cause: str) -> tuple[str, ...]:
    longest: Sequence[Mapping[str, Any]] = document["idle"]["longest"] if document["idle"] else ()
    return tuple(
        f"{gap['seconds'] * 1e3:.3g} ms idle at {gap['start_seconds']:.6f} s"
        + (f" in step {gap['step']}" if gap["step"] is not None else "")
        for gap in longest
        if gap["cause"] == cause
    )[:3]


_MOVES = re.compile(r"aten::_?(?:foreach_)?(?:to|to_copy|copy|cat|stack|hstack|vstack|clone|contiguous)_?")


def _op_advice(name: str) -> str:
    if "convolution" in name or name.startswith("aten::conv"):
        return "torch.compile(model), and model.to(memory_format=torch.channels_last): convolutions gain from both."
    if _MOVES.fullmatch(name):
        return "It only moves data: convert and copy once, outside the step; torch.compile(model) fuses what is left."
    return (
        "torch.compile(model); check torch.get_num_threads() against the cores there are, and try bfloat16."
    )


WAITING_SHARE, BLAMED_SHARE = 0.05, 0.5
"""Smallest share of step time that ranks wait on average, and of that wait due to one rank, that give a finding."""


def findings(document: Mapping[str, Any]) -> list[TraceFinding]:
    """Returns the findings about one trace, from its analysis by ``summarize``.

    There is at least one: ``no_finding``, with the shares that were checked, if no rule applies.
    """
    if not document["events"]:
        summary = "Nothing can be said: the trace has no events."
        advice = " ".join(document["missing"])
        return [TraceFinding(name="nothing_recorded", summary=summary, advice=advice, severity="info")]
    applying = [_finished(document, finding) for rule in RULES if (finding := rule(document)) is not None]
    return sorted(applying, key=lambda finding: -finding.share) or [_finished(document, _nothing(document))]


def _finished(document: Document, finding: TraceFinding) -> TraceFinding:
    """Completes a finding from its share of the step time."""
    breakdown, share, confidence = document["breakdown"], finding.share, finding.confidence
    if not breakdown["steps"] and confidence == "high":
        confidence = "medium"  # without steps, start-up may be a large share of the trace
    return replace(
        finding,
        seconds=share * breakdown["seconds"],
        hours_per_day=share * HOURS_PER_DAY,
        severity=finding.severity or ("critical" if share >= SEVERE else "warning"),
        confidence=confidence,
    )


def rank_finding(document: Mapping[str, Any], waiting: Mapping[str, Any]) -> TraceFinding | None:
    """Returns the finding about the rank that the others wait for; None without one. ``waiting``: result of ``summary.waits``."""
    rows = waiting["ranks"]
    waited_s = sum(row["waited_seconds"] for row in rows)
    whole_s = document["breakdown"]["seconds"] * len(rows)
    worst = max(rows, key=lambda row: float(row["caused_seconds"]))
    share = waited_s / whole_s if whole_s else 0.0
    if share < WAITING_SHARE or worst["caused_seconds"] < BLAMED_SHARE * waited_s:
        return None
    part = worst["caused_seconds"] / waited_s
    straggler = TraceFinding(
        name="straggler",
        summary=f"The ranks wait for each other {share:.0%} of the time, and {part:.0%} of that for rank {worst['rank']}.",
        share=share * part,
        evidence={"waiting_share": share, "rank": worst["rank"], "caused_seconds": worst["caused_seconds"]},
        advice=f"Compare rank {worst['rank']} with another: `otel-train compare`. Uneven batches, a slow data path, "
        "a throttled device and work that only one rank does are the usual causes.",
        confidence="high" if waiting["unmatched"] == 0 else "medium",
    )
    return _finished(document, straggler)


def _nothing(document: Mapping[str, Any]) -> TraceFinding:
    data, idle = document["breakdown"]["data_share"], document["idle"]
    measured = [] if data is None else [f"data loading takes {data:.1%} of the time, which is fine"]
    measured += [f"the device is idle {idle['share']:.0%} of it"] if idle else []
    shares = "; ".join(measured) or "there is no range that says what the time is spent on"
    return TraceFinding(
        name="no_finding",
        summary=f"No rule applies: {shares}.",
        evidence={} if data is None else {"data_share": data},
        advice="Look at the operators and kernels that take most of the time.",
        confidence="medium" if document["breakdown"]["steps"] else "low",
        severity="ok",
    )
