"""Counts the FLOP of one training step with ``torch.utils.flop_counter``."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

from otel_train.datamodel import system_clock
from otel_train.profiler.requests import CaptureRequest
from otel_train.profiler.step_schedule import CapturePhase, StepBoundary, StepScheduler
from otel_train.profiler.torch_profiler import Profiler
from otel_train.resource import shares_replica

if TYPE_CHECKING:
    from otel_train.profiler.controller import TrainingState
    from otel_train.recording.events import StepRule

COUNTER: Final = "torch.utils.flop_counter"
EVENT: Final = "train.flops.count"
FIRST_STEP: Final = 8
"""Steps before the count: by then the program has compiled and the step rule is known."""

MOST_TRIES: Final = 3  # counts that end without a whole step

COMPILED: Final = (
    "torch.compile is in use: operations could be counted only in eager mode, and one step in eager mode computes other "
    "bits. Set flops_per_sample"
)
SHARED: Final = (
    "ranks share a model replica by tensor, context or pipeline parallelism, and each computes a part. "
    "Set flops_per_sample"
)
UNKNOWN: Final = (
    "no operation of a step has a known number of FLOP: it replays a CUDA graph, or runs kernels of its own. "
    "Set flops_per_sample"
)

_log = logging.getLogger("otel_train")


class FlopCounter(Profiler):
    """Counts FLOP by ``FlopCounterMode``. Several may be active at once, so it never gives way; stages are not separated."""

    def __init__(self, give_way: Callable[[], None]) -> None:
        del give_way
        self._mode: Any = None

    def start(self) -> None:
        """Starts counting."""
        mode = sys.modules[COUNTER].FlopCounterMode(display=False)
        mode.__enter__()
        self._mode = mode

    def stop(self) -> int:
        """Stops counting; returns the FLOP."""
        mode, self._mode = self._mode, None
        mode.__exit__(None, None, None)
        return int(mode.get_total_flops())


class FlopCount:
    """Counts the FLOP of one step once the step rule is known. Runs on the service thread.

    ``event`` records an event: name, attributes, an instant in the step. ``shared``: ranks share a model replica.
    """

    def __init__(
        self,
        training: TrainingState,
        *,
        event: Callable[[str, Mapping[str, Any], int], None],
        max_s: float,
        shared: bool,
    ) -> None:
        self.flops = 0  # of one step of this rank; 0 until known
        self.refusal = ""  # why they cannot be counted
        self._training = training
        self._event = event
        self._shared = shared
        self._scheduler = StepScheduler(FlopCounter, clock=system_clock, max_s=max_s)
        self._tries = 0

    @property
    def busy(self) -> bool:
        """Whether a step is being counted or awaited."""
        return self._scheduler.phase is not CapturePhase.IDLE

    @property
    def within_ns(self) -> tuple[int, int]:
        """Start and end of the counted step; (0, 0) without one."""
        return self._scheduler.within_ns

    def poll(self, *, free: bool) -> None:
        """Starts or finishes the count. ``free``: no capture runs."""
        if self.busy:
            self._take()
        elif free and not self.flops and not self.refusal and "torch" in sys.modules:
            loop = self._training.loop
            if loop.rule is not None and loop.step >= FIRST_STEP:
                self._begin(loop.rule)

    def end(self) -> None:
        """Ends the count for a capture; it begins again later. Called by the training thread while the service thread is paused."""
        if self._scheduler.running:
            self._tries -= 1  # it is not the count that failed
            self._scheduler.abort("a capture began")
        self._take()

    def stop(self, timeout_s: float) -> None:
        """Ends the count when the session closes."""
        self._scheduler.abort("the session ended")
        self._scheduler.wait(timeout_s)

    def _begin(self, rule: StepRule) -> None:
        compiled = _dynamo_has_run()
        if compiled or self._shared or shares_replica():
            self._refuse(COMPILED if compiled else SHARED)
            return
        try:
            import_module(COUNTER)
        except ImportError as error:
            self._refuse(f"{COUNTER} cannot be imported ({error}). Set flops_per_sample")
            return
        self._tries += 1
        self._training.active(active=True)
        thread = self._training.thread()
        boundary = StepBoundary(rule, thread.sources)
        self._scheduler.arm(CaptureRequest("flops", 1, warmup=0), boundary, thread)

    def _take(self) -> None:
        recorded = self._scheduler.take()
        if recorded is None:
            return
        self._training.active(active=False)
        complete = recorded.steps and not recorded.problem
        if complete and _dynamo_has_run():
            self._refuse(COMPILED)
        elif complete and recorded.trace:
            self.flops = recorded.trace
            self._event(EVENT, {"train.step.flops": self.flops}, recorded.within_ns or recorded.begun_ns)
        elif complete:
            self._refuse(UNKNOWN)
        elif self._tries >= MOST_TRIES:
            self._refuse(f"{recorded.problem or 'no step ended'}. Set flops_per_sample")

    def _refuse(self, why: str) -> None:
        self.refusal = why
        _log.warning("FLOP of a step are not counted: %s", why)


def _dynamo_has_run() -> bool:
    """Returns whether TorchDynamo has compiled anything in this process. Imports nothing."""
    counters = getattr(sys.modules.get("torch._dynamo.utils"), "counters", {})
    return bool(counters and counters["frames"]["total"])
