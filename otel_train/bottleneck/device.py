"""Findings about device and compiler: launch-bound, sync-bound, dispatch-bound, recompiling."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from otel_train.aggregation.counters import Recompiled, StageTotals
from otel_train.bottleneck.dataloader import WARNING_SHARE, milliseconds
from otel_train.datamodel import NS_PER_S, Finding, Pace
from otel_train.recording.events import WAIT

MIN_RECOMPILES = 3
"""Recompilations from which they are reported: a short last batch and an evaluation batch cause one each."""

SHORT_CALL_S = 2e-3
"""Median call duration below which dispatch may dominate. A CPU backend may compute inside the dispatch, so the split of
longer calls is not conclusive."""

DISPATCH_SHARE = 0.5
"""Share of dispatch in a call from which a larger batch is nearly free."""

MIN_MEASURED_STEPS = 10
"""Fewest steps with a measured device lag for a finding."""

IN_STEP_SHARE = 0.05
"""Largest lag, as a share of a step, at which the device keeps up with the host: a queue of a few kernels."""

QUEUED_SHARE = 0.25
"""Lag, as a share of a step, from which the device has work queued."""

LAUNCH_IDLE_SHARE = 0.5
"""Share of a step during which the device may wait for launches, from which launches are the limit."""

_LOSS = "loss"


class Compiled(NamedTuple):
    """Facts about compiled code."""

    recompiled: Recompiled = Recompiled()
    calls: frozenset[str] = frozenset()  # stages whose calls are whole updates


def training_finding(name: str, text: str, **facts: Any) -> Finding:  # Any: the other fields of Finding
    """Returns a finding about training, with defaults for the fields that are not given."""
    usual: dict[str, Any] = {"share": 0.0, "seconds": 0.0, "phase": "train"}
    return Finding(name=name, summary=text, **{**usual, **facts})


def is_jax(training: Iterable[StageTotals], compiled: Compiled) -> bool:
    """Returns whether JAX updates or waits are timed."""
    return bool(compiled.calls) or any(row.key.stage == WAIT for row in training)


def recompiling(recompiled: Recompiled, total_s: float) -> Finding | None:
    """Reports repeated recompilation; ``total_s`` is the training time."""
    seconds = recompiled.total_ns / NS_PER_S
    share = min(1.0, seconds / total_s)
    if recompiled.count < MIN_RECOMPILES or share < WARNING_SHARE:
        return None
    text = f"Code was recompiled {recompiled.count} times: {share:.0%} of training time."
    if recompiled.by_jax:
        advice = (
            "Shapes, dtypes or static arguments change from call to call: drop or pad the short last batch, pad "
            "sequences to a few lengths, pass numbers as arrays (jnp.asarray) and not as static arguments, and wrap "
            'with jit once, outside the loop. jax.config.update("jax_explain_cache_misses", True) names what changed.'
        )
    else:
        advice = (
            "Shapes or Python values change from call to call: drop or pad the short last batch, "
            "torch.compile(..., dynamic=True), torch._dynamo.mark_dynamic. TORCH_LOGS=recompiles names what changed."
        )
    evidence = {"recompiles": recompiled.count, "recompile_seconds": seconds, "recompile_ratio": share}
    return training_finding(
        "recompiling",
        text,
        evidence=evidence,
        share=share,
        seconds=seconds,
        advice=advice,
        severity="warning",
    )


def dispatch_bound(training: Sequence[StageTotals], compiled: Compiled, total_s: float) -> Finding | None:
    """Reports JAX steps so short that dispatch is most of them."""
    step = _longest(row for row in training if row.key.stage in compiled.calls)
    waits = (row for row in training if row.key.stage == WAIT and step and row.key.loader == step.key.loader)
    wait = _longest(waits)
    if step is None or wait is None or step.quantiles is None or wait.quantiles is None:
        return None
    call_s, wait_s = step.quantiles[1], wait.quantiles[1]
    if not 0 < call_s < SHORT_CALL_S or 1 - wait_s / call_s < DISPATCH_SHARE:
        return None
    host_s = call_s - wait_s
    share = min(1.0, host_s * step.count / total_s)
    if share < WARNING_SHARE:
        return None
    text = (
        f"A call of `{step.key.stage}` takes {milliseconds(call_s)}, of which {host_s / call_s:.0%} is what the host "
        "takes to dispatch it: there is little to compute in one call."
    )
    advice = (
        "Give each call more to do: a larger batch costs little more here, and jax.lax.scan makes several steps in "
        "one call."
    )
    evidence = {"call_p50_seconds": call_s, "dispatch_p50_seconds": host_s, "dispatch_ratio": host_s / call_s}
    return training_finding(
        "dispatch_bound",
        text,
        evidence=evidence,
        share=share,
        seconds=share * total_s,
        advice=advice,
        severity="warning",
    )


def jax_advice(stage: str, share: float, training: Sequence[StageTotals], compiled: Compiled) -> str:
    """Returns advice for a JAX program whose time is mostly in ``stage``; "" for any other program."""
    if not is_jax(training, compiled):
        return ""
    further = "jax.profiler.trace shows what XLA spends it on; bfloat16, where the model bears it, halves much of it."
    if stage == _LOSS:
        return (
            f"The loss and its gradients take {share:.0%}, as a call of their own: one jax.jit around loss, gradients and "
            f"update, with donated buffers, lets XLA fuse them. {further}"
        )
    if stage in (*compiled.calls, WAIT):
        return f"Nothing to do about the input: the step itself is the time. {further}"
    where = "What is in no stage" if stage == "other" else f"`{stage}`"
    return f"{where} runs outside the compiled step: move it into it, or compile it as well."


def _longest(rows: Iterable[StageTotals]) -> StageTotals | None:
    return max(rows, key=lambda row: row.inclusive_s, default=None)


def host_bound(pace: Pace, *, total_s: float) -> Finding | None:
    """Reports a device that waits for the host; None if it has work queued or too few steps were measured.

    If the device reaches every event of a step as soon as it is issued, nothing is ever queued: the host launches too
    slowly. If it reaches some late and others at once, without a data wait between them, the host synchronised.
    """
    if pace.steps < MIN_MEASURED_STEPS:
        return None
    evidence = lags(pace)
    least, most = pace.least_lag_ns / pace.lasted_ns, pace.most_lag_ns / pace.lasted_ns
    lag_ms = evidence["most_lag_seconds"] * 1e3
    if most <= IN_STEP_SHARE and pace.launch_idle_ns >= LAUNCH_IDLE_SHARE * pace.lasted_ns:
        name, share = "launch_bound", evidence["launch_idle_ratio"]
        text = (
            f"The device keeps up with the host: it is at most {lag_ms:.2g} ms behind, and nothing is queued. For up to "
            f"{share:.0%} of training it waits for the next launch."
        )
        advice = (
            'Launch less: torch.compile(model, mode="reduce-overhead"), torch.optim.AdamW(..., fused=True), or a larger '
            "batch, which gives each launch more to do."
        )
    elif least <= IN_STEP_SHARE and most >= QUEUED_SHARE:
        name, share = "sync_bound", evidence["device_idle_ratio"]
        text = (
            f"The host waits for the device in every step: up to {lag_ms:.3g} ms of work are queued, and then none. For up "
            f"to {share:.0%} of training the device waits for the next launch."
        )
        advice = (
            'Look for .item(), .cpu(), print(tensor) and boolean masks: torch.cuda.set_sync_debug_mode("warn") names '
            "the line. otel_train.log(loss=loss) reads the tensor later."
        )
    else:
        return None
    seconds = share * total_s
    return training_finding(
        name, text, evidence=evidence, share=share, seconds=seconds, advice=advice, severity="warning"
    )


def lags(pace: Pace) -> dict[str, float]:
    """Returns mean lag and idle shares of the device as evidence."""
    return {
        "device_steps": pace.steps,
        "least_lag_seconds": pace.least_lag_ns / pace.steps / NS_PER_S,
        "most_lag_seconds": pace.most_lag_ns / pace.steps / NS_PER_S,
        "device_idle_ratio": pace.idle_ns / pace.lasted_ns,
        "launch_idle_ratio": pace.launch_idle_ns / pace.lasted_ns,
    }
