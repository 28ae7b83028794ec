"""Whether the device waits for the host's launches, or the host for the device in every step."""

from __future__ import annotations

from typing import TYPE_CHECKING

from otel_train.records import Finding

if TYPE_CHECKING:
    from otel_train.records import Pace

NS_PER_S = 10**9

ENOUGH = 10
"""Beginnings of each stage whose lag must be known."""

KEEPS_UP = 0.05
"""Share of a step that the device may lag and still be said to keep up: a queue of a few kernels."""

BEHIND = 0.25
"""Share of a step that the device must lag before the update to have had work queued."""

LAUNCHING = 0.5
"""Share of training time that forward, backward and optimizer take on a host whose launches are the limit."""


def host_limits(pace: Pace, *, step_s: float, total_s: float, compute_share: float) -> Finding | None:
    """What the host does to the device; None where the device has work queued, or too little is known.

    Where forward begins the device has got through the step before, or it has not. If it has, it stood idle:
    all the time, because it gets each kernel when the host launches it and not before, or at the end of
    the step, because the host waited until it was done.

    Args:
        pace: how far the device ran behind.
        step_s: mean duration of a training step.
        total_s: training time.
        compute_share: share of it that the host spent in forward, backward and optimizer.
    """
    if min(pace.forwards, pace.backwards, pace.updates) < ENOUGH or not step_s:
        return None
    forward_s = pace.forward_lag_ns / pace.forwards / NS_PER_S
    backward_s = pace.backward_lag_ns / pace.backwards / NS_PER_S
    update_s = pace.update_lag_ns / pace.updates / NS_PER_S
    most_s = max(backward_s, update_s)
    if forward_s > KEEPS_UP * step_s:
        return None
    evidence = {
        "forward_lag_seconds": forward_s,
        "backward_lag_seconds": backward_s,
        "update_lag_seconds": update_s,
        "beginnings": pace.forwards,
    }
    share = 0.0
    if pace.gaps:
        share = min(1.0, pace.gap_ns / pace.gaps / NS_PER_S / step_s)
        evidence["device_between_steps_ratio"] = share
    if most_s <= KEEPS_UP * step_s and compute_share >= LAUNCHING:
        return _launch_bound(most_s, evidence, share=share, total_s=total_s)
    if most_s >= BEHIND * step_s:
        return _sync_bound(most_s, evidence, share=share, total_s=total_s)
    return None


def _launch_bound(most_s: float, evidence: dict[str, float], *, share: float, total_s: float) -> Finding:
    return Finding(
        name="launch_bound",
        claim=f"The device keeps up with the host: work begins at most {most_s * 1e3:.2g} ms after its launch, and "
        "nothing is queued. How fast the host launches is the limit.",
        evidence=evidence,
        share=share,
        seconds=share * total_s,
        advice='Launch less: torch.compile(model, mode="reduce-overhead"), torch.optim.AdamW(..., fused=True), or a '
        "larger batch, which gives each launch more to do.",
        phase="train",
        severity="warning",
    )


def _sync_bound(most_s: float, evidence: dict[str, float], *, share: float, total_s: float) -> Finding:
    return Finding(
        name="sync_bound",
        claim=f"The host waits for the device in every step: {most_s * 1e3:.3g} ms of work are queued at the update, "
        "and none when the next forward begins.",
        evidence=evidence,
        share=share,
        seconds=share * total_s,
        advice='Look for .item(), .cpu(), print(tensor) and boolean masks: torch.cuda.set_sync_debug_mode("warn") names '
        "the line. otel_train.log(loss=loss) reads the tensor later.",
        phase="train",
        severity="warning",
    )
