"""Lists instrumentation gaps: stages, models and loops that could not be instrumented, with the reason."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from otel_train.accounting.types import TRAIN, StepSource
from otel_train.aggregation.counters import JAX_STEP, Totals, missing_step_reason
from otel_train.datamodel import NS_PER_S, Clock, system_clock
from otel_train.recording.events import WAIT, SourceKind

if TYPE_CHECKING:
    from otel_train.agent.messages import RankState
    from otel_train.aggregation.run_state import RunState
    from otel_train.aggregation.series_names import Key

UPDATES_WITHOUT_FORWARD = 10
"""Updates after which gaps are listed, such as a given model without a forward."""

_READS_BESIDE = (
    "it reads a loader on another thread: the time that training waits for its batches is in `other`. "
    "Wrap the iterator that gives the loop its batches: otel_train.watch(prefetch(loader), name=...)"
)
_NO_LOADER = (
    "no loader was seen: time to get batches is in `other`. Give it to instrument(model, loaders), or wrap what "
    "the loop iterates in otel_train.watch(...)"
)
_NO_BATCH = (
    "no batch of training came from an instrumented loader: time to get batches is in `other`. Give "
    "instrument(model, loaders) the loader that the loop iterates, before a pass over it begins"
)
_NOT_ASKED = (
    "training requested no batch from it: it iterates another object ({}), which was not given. Give instrument() the "
    "object that the loop iterates, such as the DataLoader in place of its dataset"
)
_NO_BACKWARD = (
    "updates were seen, but no backward: it runs inside a compiled function, or gradients are computed without autograd. "
    "Its time is in the enclosing stage. If the two can be separated, put it in "
    '`with otel_train.stage("backward")`'
)
_NO_UPDATE = (
    "no update was seen: parameters are changed by hand, by an optimizer that is not torch.optim, or inside "
    "a compiled function. Steps are counted by backward; otel_train.step() marks them"
)
_NO_FORWARD = (
    "no forward of it was observed: the loop has not called it, or calls it only inside the forward of another model, "
    "which contains its time, or it calls another object (a copy, a wrapper, a compiled function around it), a method "
    "other than __call__ that calls no part of the model, or a __call__ of its class that does not go on to torch's. If "
    "it is in use, give instrument() the object that the loop calls, or put the call in a stage"
)
_NO_FORWARD_IN_TRAINING = (
    "forwards were seen outside training only: training calls an object other than the given model (a copy, a "
    "wrapper, a compiled function around it). Its time is in `other`; give instrument() the object that the loop calls"
)
_TORCH_LATER = (
    "torch was imported after instrument() was called, so it is not measured. Call instrument() after the import, once "
    "the model and the loaders exist"
)
_NO_MODEL = (
    "no model was given to instrument(): its time is in `other`. Give it the model that the loop calls"
)
_HOST_TIME = "Host time is still measured: a call that only queues work is short, one that waits for the device is long"
STEPLESS_S = 60.0
"""Seconds after which a JAX program without any step is logged, while it runs."""

_FOR_TRAINING = ("train", "loader")
"""Beginnings of the phase or name of a loader for training; ``loader`` is the default name of a given loader."""

_OF_JAX = {SourceKind.WHOLE, SourceKind.OPTIMIZER}

_log = logging.getLogger("otel_train")


def instrumentation_gaps(
    run: RunState, state: RankState, *, now_ns: int | None = None
) -> list[dict[str, str]]:
    """Returns one entry per gap.

    The keys are ``what``, ``name``, ``reason`` (a sentence) and ``cause`` (the label value; "" without a remedy).
    """
    totals = run.totals
    keys = [
        key for n, key in enumerate(totals.names.keys) if n < len(totals.stages) and totals.stages.count(n)
    ]
    stages = {key.stage for key in keys}
    trained = any(key.stage == "backward" and key.phase == "train" for key in keys)
    # In a JAX program the timed function contains forward and backward.
    kinds = {source.kind for source in totals.names.sources}
    whole = WAIT in stages or SourceKind.WHOLE in kinds
    listed = SourceKind.DATA in kinds
    read = bool(run.loader_threads) or any(phase == TRAIN for _, phase in totals.batches)
    updated = totals.updates >= UPDATES_WITHOUT_FORWARD
    busy = updated or trained
    models = map(totals.names.models.published, state.models)
    found = _models(models, keys) if busy and not whole else []
    found += [_gap("loop", thread, _READS_BESIDE, "ambiguous") for thread in run.loader_threads]
    if busy and not (listed and read):
        found.append(_gap("stage", "data", _NO_BATCH if listed else _NO_LOADER, "unhooked"))
    found += _loaders(totals, state) if busy else []
    if updated and "backward" not in stages and not whole:
        found.append(_gap("stage", "backward", _NO_BACKWARD, "never_seen"))
    if state.modules == {"torch"} and not (stages or whole or SourceKind.BACKWARD in kinds):
        found.append(_gap("loop", "torch", _TORCH_LATER, "never_seen"))
    jax = run.compiles.jax.functions or WAIT in stages or state.modules == {"jax"}
    if jax and _has_no_step(run, stages, kinds):
        described = run.compiles.jax.describe(system_clock() if now_ns is None else now_ns)
        found.append(_gap(*JAX_STEP, missing_step_reason(described, loader=not listed), "unhooked"))
    # More than one step: a run that fails in its first step has no update.
    several = totals.steps_by_phase().get("train", 0) > 1
    if run.step_source is StepSource.BACKWARD and trained and several and not totals.updates:
        found.append(_gap("stage", "optimizer", _NO_UPDATE, "never_seen"))
    return found + [_gap("device", kind, f"{why}. {_HOST_TIME}", "") for kind, why in state.untimed.items()]


class CoverageReporter:
    """Logs each instrumentation gap once."""

    def __init__(
        self,
        run: RunState,
        state: Callable[[], RankState],
        *,
        log: Callable[[str, str, str, str], None] = _log.warning,
        clock: Clock = system_clock,
    ) -> None:
        self._run = run
        self._state = state
        self._log = log
        self._clock = clock
        self._logged: set[tuple[str, str]] = set()

    def log_gaps(self, *, final: bool = False) -> None:
        """Logs gaps that were not logged before; before the end of the run, only those that can no longer be closed."""
        now_ns, run = self._clock(), self._run
        early = not final and run.totals.updates < UPDATES_WITHOUT_FORWARD
        if early and (now_ns - run.started_ns) / NS_PER_S < STEPLESS_S:
            return
        state = self._state()
        gaps = instrumentation_gaps(run, state, now_ns=now_ns)
        unseen = sum(gap["what"] == "model" for gap in gaps)
        called_later = not final and unseen < len(set(map(run.totals.names.models.published, state.models)))
        for gap in gaps:
            key = gap["what"], gap["name"]
            waits = (early and key != JAX_STEP) or (called_later and gap["what"] == "model")
            if key not in self._logged and not waits:
                self._logged.add(key)
                self._log("not observed: %s %s: %s", gap["what"], gap["name"], gap["reason"])


def _has_no_step(run: RunState, stages: set[str], kinds: set[SourceKind]) -> bool:
    """Returns whether no step of JAX or torch was observed."""
    seen = run.totals.updates or stages & {"forward", "backward"} or kinds & _OF_JAX
    return not seen and run.step_source in (StepSource.UNDECIDED, StepSource.BATCH)


def _models(models: Iterable[str], keys: Sequence[Key]) -> list[dict[str, str]]:
    names = dict.fromkeys(models)  # a model and its compiled form share a name
    seen = {key.model for key in keys if key.stage == "forward"}
    if not names and not seen:
        return [_gap("stage", "forward", _NO_MODEL, "unhooked")]
    found = [_gap("model", name, _NO_FORWARD, "never_seen") for name in names if name not in seen]
    training = {key.stage for key in keys if key.phase == "train"}
    if seen and "backward" in training and "forward" not in training:
        found.append(_gap("stage", "forward", _NO_FORWARD_IN_TRAINING, "never_seen"))
    return found


def _loaders(totals: Totals, state: RankState) -> list[dict[str, str]]:
    """Returns a gap for each given loader for training that was not read while training read only other loaders.

    Loaders with another phase or name are left out: they may be for a later evaluation.
    """
    names = totals.names.loaders.names
    read = {names[loader] for loader, phase in totals.batches if phase == TRAIN} & state.loaders.keys()
    asked = {key.loader for key in totals.names.keys if key.stage == "data"}
    if not read or any(state.loaders[name].given for name in read):
        return []
    reason = _NOT_ASKED.format(", ".join(f"`{name}`" for name in sorted(read)))
    return [
        _gap("loader", name, reason, "never_seen")
        for name, loader in state.loaders.items()
        if loader.given and name not in asked and (loader.phase or name).lower().startswith(_FOR_TRAINING)
    ]


def _gap(what: str, name: str, reason: str, cause: str) -> dict[str, str]:
    return {"what": what, "name": name, "reason": reason, "cause": cause}
