"""What a capture is asked to record, and what came of it."""

from __future__ import annotations

from typing import Any, NamedTuple

from otel_train.values import LISTS

ACTIVITIES = LISTS["capture_activities"]
"""What ``torch.profiler`` can look at, in our settings' words."""

NEXT = -1
"""In the place of a step number: as soon as a step ends."""


class Options(NamedTuple):
    """What of each operation is recorded; the names are those of ``torch.profiler``.

    Attributes:
        activities: of ``ACTIVITIES``; what this machine lacks is left out, and the record says so.
        record_shapes: shapes of the operations' inputs.
        with_stack: where in the program they were called; 20 to 30 % slower.
        profile_memory: every allocation.
        with_flops: floating point operations of those that are known.
    """

    activities: tuple[str, ...] = ("cpu", "cuda")
    record_shapes: bool = False
    with_stack: bool = False
    profile_memory: bool = False
    with_flops: bool = False


class CaptureRequest(NamedTuple):
    """One capture that is wanted.

    Attributes:
        trigger: who wants it, one of the catalogue's ``train.profiler.trigger``.
        steps: steps to record, at least 1.
        warmup: steps before them in which the profiler runs and its output is thrown away.
        wait: steps to let pass before that.
        at_step: number of the first step recorded; ``NEXT`` for as soon as possible.
        options: what to record of each operation.
        reason: why, for people.
        pinned: it is never removed to make room.
        at_once: the training thread asks for it, between two steps: the next step is the first.
        epoch: the epoch it is to show; 0 for whichever it turns out to lie in.
        output_dir: folder that gets the trace as plain ``epoch_N.json`` as well; "" for the setting's.
        alert: name of the alert that wants it; "" where none does.
    """

    trigger: str
    steps: int
    warmup: int = 1
    wait: int = 0
    at_step: int = NEXT
    options: Options = Options()
    reason: str = ""
    pinned: bool = False
    at_once: bool = False
    epoch: int = 0
    output_dir: str = ""
    alert: str = ""

    @property
    def cause(self) -> str:
        """What a cooldown counts for."""
        return self.alert or self.trigger


class Recorded(NamedTuple):
    """What the training thread recorded.

    Attributes:
        plan: what was wanted.
        trace: for ``Profiler.save``; None where there is none.
        steps: whole steps recorded.
        begun_ns: when recording began, on the monotonic clock; 0 if it never did.
        ended_ns: when it ended.
        problem: why it is not what was wanted; "" when it is.
        notes: what is missing in it.
        within_ns: an instant in its first step; 0 if that had not come to its work.
    """

    plan: CaptureRequest
    trace: Any
    steps: int
    begun_ns: int
    ended_ns: int
    problem: str = ""
    notes: tuple[str, ...] = ()
    within_ns: int = 0
