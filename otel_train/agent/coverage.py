"""Lists instrumentation gaps: stages, models and loops that could not be instrumented, with the reason."""

from __future__ import annotations

import logging
import sys
from typing import TYPE_CHECKING

from otel_train.accounting.types import StepSource
from otel_train.aggregation.counters import JAX_STEP, missing_step_reason
from otel_train.datamodel import NS_PER_S, system_clock
from otel_train.recording.events import WAIT, SourceKind

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Mapping

    from otel_train.aggregation.run_state import RunState
    from otel_train.datamodel import Clock
    from otel_train.instrumentation.registry import Probes

UPDATES_WITHOUT_FORWARD = 10
"""Updates after which a model that was given and never seen is worth a word."""

_READS_BESIDE = (
    "it reads a loader beside the training thread: how long training waits for it is in `other`. "
    "otel_train.watch(...) around what the loop itself iterates shows it"
)
_NO_LOADER = (
    "no loader was seen: time to get batches is in `other`. Give it to instrument(model, loaders), or wrap what "
    "the loop iterates in otel_train.watch(...)"
)
_NO_BACKWARD = (
    "updates were seen and no backward: it runs inside a compiled function, or gradients are made without autograd. "
    "Its time is in the stage around it; where that can be divided, "
    '`with otel_train.stage("backward")` shows it'
)
_HOST_TIME = "Host time is measured as everywhere: a call that only queues work is short, and one that waits for the device is long"
STEPLESS_S = 60.0
"""Seconds after which a program of JAX in which no step was seen is described so, while it runs."""

_OF_JAX = (SourceKind.WHOLE, SourceKind.OPTIMIZER)

_log = logging.getLogger("otel_train")


def instrumentation_gaps(
    run: RunState,
    probes: Probes,
    *,
    now_ns: int | None = None,
    loaded: Container[str] = sys.modules,
    untimed: Mapping[str, str] | None = None,
) -> list[dict[str, str]]:
    """Returns one entry per gap.

    The keys are ``what``, ``name``, ``reason`` (a sentence) and ``cause`` (the label value; "" without a remedy).

    Args:
        run: the metrics so far.
        probes: loaders and models that are instrumented.
        now_ns: on the run's clock; the present time when not given.
        loaded: modules that the program has imported.
        untimed: kinds of devices that models are on and whose time is not taken; why.
    """
    totals = run.totals
    seen = {
        (key.stage, key.model)
        for n, key in enumerate(totals.names.keys)
        if n < len(totals.stages) and totals.stages.count(n)
    }
    stages = {stage for stage, _ in seen}
    # In a program of JAX, forward and backward are inside what is timed.
    whole = WAIT in stages or any(source.kind is SourceKind.WHOLE for source in totals.names.sources)
    listed = any(source.kind is SourceKind.DATA for source in totals.names.sources)
    busy = totals.updates >= UPDATES_WITHOUT_FORWARD or "backward" in stages
    found: list[dict[str, str]] = []
    if busy and not whole:
        found += _models(probes, seen, stages)
    for thread in run.loader_threads:
        found.append(_gap("loop", thread, _READS_BESIDE, "ambiguous"))
    if busy and not listed:
        found.append(_gap("stage", "data", _NO_LOADER, "unhooked"))
    if totals.updates >= UPDATES_WITHOUT_FORWARD and "backward" not in stages and not whole:
        found.append(_gap("stage", "backward", _NO_BACKWARD, "never_seen"))
    if _is_jax(run, stages, loaded) and _has_no_step(run, stages):
        described = run.compiles.jax.describe(system_clock() if now_ns is None else now_ns)
        reason = missing_step_reason(described, loader=not listed)
        found.append(_gap(*JAX_STEP, reason, "unhooked"))
    if run.step_source is StepSource.BACKWARD:
        reason = (
            "no update was seen: parameters are changed by hand, by an optimizer that is not torch.optim, or inside "
            "a compiled function. Steps are counted by backward; otel_train.step() marks them"
        )
        found.append(_gap("stage", "optimizer", reason, "never_seen"))
    return found + _devices(untimed or {})


class CoverageReporter:
    """Logs each instrumentation gap once.

    Args:
        run: the metrics so far.
        probes: loaders and models that are instrumented.
        loaded: modules that the program has imported.
        log: takes one line per gap.
        clock: nanoseconds, that of the run.
    """

    def __init__(
        self,
        run: RunState,
        probes: Probes,
        *,
        loaded: Callable[[], Container[str]] = lambda: sys.modules,
        untimed: Callable[[], Mapping[str, str]] = dict,
        log: Callable[[str, str, str, str], None] = _log.warning,
        clock: Clock = system_clock,
    ) -> None:
        self._run = run
        self._probes = probes
        self._loaded = loaded
        self._untimed = untimed
        self._log = log
        self._clock = clock
        self._logged: set[tuple[str, str]] = set()

    def tell(self, *, final: bool = False) -> None:
        """Log what has not been logged before. Early in a run it may yet come, unless this is the end."""
        early = not final and self._run.totals.updates < UPDATES_WITHOUT_FORWARD
        if early and (self._clock() - self._run.started_ns) / NS_PER_S < STEPLESS_S:
            return
        for gap in instrumentation_gaps(
            self._run, self._probes, now_ns=self._clock(), loaded=self._loaded(), untimed=self._untimed()
        ):
            key = gap["what"], gap["name"]
            if key not in self._logged and not (early and key != JAX_STEP):
                self._logged.add(key)
                self._log("not observed: %s %s: %s", gap["what"], gap["name"], gap["reason"])


def _is_jax(run: RunState, stages: set[str], loaded: Container[str]) -> bool:
    """Whether JAX computes, as far as can be seen."""
    return bool(run.compiles.jax.functions) or WAIT in stages or ("jax" in loaded and "torch" not in loaded)


def _has_no_step(run: RunState, stages: set[str]) -> bool:
    """Whether neither JAX nor torch has made a step that could be seen."""
    if run.totals.updates or stages & {"forward", "backward"}:
        return False
    updating = any(source.kind in _OF_JAX for source in run.totals.names.sources)
    return not updating and run.step_source in (StepSource.UNDECIDED, StepSource.BATCH)


def _models(probes: Probes, seen: set[tuple[str, str]], stages: set[str]) -> list[dict[str, str]]:
    reason = (
        "its forward was never observed: another object is called in the loop (a copy, a wrapper, a compiled "
        "function around it), or a method other than __call__ that calls no part of the model. Give instrument() "
        "the object that the loop calls"
    )
    names = dict.fromkeys(probe.name for probe in probes.models)  # a model and its compiled form share one
    found = [_gap("model", name, reason, "never_seen") for name in names if ("forward", name) not in seen]
    if not names and "forward" not in stages:
        reason = "no model was given to instrument(): its time is in `other`. Give it the model that the loop calls"
        found.append(_gap("stage", "forward", reason, "unhooked"))
    return found


def _devices(untimed: Mapping[str, str]) -> list[dict[str, str]]:
    return [_gap("device", kind, f"{why}. {_HOST_TIME}", "") for kind, why in untimed.items()]


def _gap(what: str, name: str, reason: str, cause: str) -> dict[str, str]:
    return {"what": what, "name": name, "reason": reason, "cause": cause}
