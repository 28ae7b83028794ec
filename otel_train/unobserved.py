"""What could not be seen, said instead of guessed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from otel_train.codes import SourceKind

if TYPE_CHECKING:
    from otel_train.aggregate.run import RunAccount
    from otel_train.record.discover import Probes

UPDATES_WITHOUT_FORWARD = 10
"""Updates after which a model that was given and never seen is worth a word."""


def unobserved(run: RunAccount, probes: Probes) -> list[dict[str, str]]:
    """One entry per thing: what, name, reason for people, cause for the metric."""
    found: list[dict[str, str]] = []
    totals = run.totals
    seen = {
        (key.stage, key.model)
        for n, key in enumerate(totals.names.keys)
        if n < len(totals.stages) and totals.stages.count(n)
    }
    stages = {stage for stage, _ in seen}
    busy = totals.updates >= UPDATES_WITHOUT_FORWARD or "backward" in stages
    for probe in probes.models:
        if busy and ("forward", probe.name) not in seen:
            reason = (
                "its forward was never observed: another object is called in the loop (a copy, a wrapper, a "
                "method other than __call__). Give instrument() the object that the loop calls"
            )
            found.append(_thing("model", probe.name, reason, "never_seen"))
    if busy and not probes.models and "forward" not in stages:
        reason = "no model was given to instrument(): its time is in `other`"
        found.append(_thing("stage", "forward", reason, "unhooked"))
    for thread in run.helpers:
        reason = "it reads a loader beside the training thread: how long training waits for it is in `other`"
        found.append(_thing("loop", thread, reason, "ambiguous"))
    if busy and not any(source.kind is SourceKind.DATA for source in totals.names.sources):
        reason = "no loader was seen: time to get batches is in `other`. otel_train.watch(iterable) shows it"
        found.append(_thing("stage", "data", reason, "unhooked"))
    return found


def _thing(what: str, name: str, reason: str, cause: str) -> dict[str, str]:
    return {"what": what, "name": name, "reason": reason, "cause": cause}
