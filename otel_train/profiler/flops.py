"""Counts the FLOP of one training step with ``torch.utils.flop_counter``."""

from __future__ import annotations

import logging
import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

from otel_train.datamodel import system_clock
from otel_train.profiler.requests import CaptureRequest
from otel_train.profiler.step_schedule import CapturePhase, StepBoundary, StepScheduler
from otel_train.resource import shares_replica

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from otel_train.profiler.controller import LoopState
    from otel_train.profiler.requests import Options
    from otel_train.profiler.torch_profiler import Range

COUNTER: Final = "torch.utils.flop_counter"
EVENT: Final = "train.flops.count"
FIRST_STEP: Final = 8
"""Steps before the count: by then the program has compiled and the step rule is known."""

MOST_TRIES: Final = 3

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


class FlopCounter:
    """Implements ``Profiler`` with a FLOP counter. All but ``save`` runs on the training thread.

    Args:
        give_way: unused: several counters may be active at once.
    """

    def __init__(self, give_way: Callable[[], None]) -> None:
        del give_way
        self._mode: Any = None

    def unavailable(self) -> str:
        """Returns ""."""
        return ""

    def busy(self) -> bool:
        """Returns False: other counters do not interfere."""
        return False

    def prepare(self, options: Options) -> list[str]:
        """Does nothing: there is no warm-up."""
        del options
        return []

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

    def range(self, name: str) -> Range:
        """Does nothing: stages are not counted separately."""
        del name
        return _NOTHING

    def save(self, trace: Any, path: Path) -> None:
        """Writes nothing."""


class _Nothing:
    def close(self) -> None: ...


_NOTHING: Final = _Nothing()


class FlopCount:
    """Counts the FLOP of one step once the step rule is known. Runs on the service thread.

    Args:
        loop: returns the current state of the loop.
        active: called with True before the counted step and with False after it.
        event: takes an event: its name, its attributes, an instant in the step.
        max_s: longest step that is counted.
        shared: whether ranks share a model replica.

    Attributes:
        flops: FLOP of one step of this rank; 0 until known.
        refusal: why they are not counted; "" if they are, or will be.
    """

    def __init__(
        self, loop: Callable[[], LoopState], *, active: Callable[..., None],
        event: Callable[[str, Mapping[str, Any], int], None], max_s: float,
        shared: Callable[[], bool] = shares_replica,
    ) -> None:  # fmt: skip
        self.flops = 0
        self.refusal = ""
        self._loop = loop
        self._active = active
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
        """Begin and end of the counted step; (0, 0) without one."""
        return self._scheduler.within_ns

    def turn(self, *, free: bool) -> None:
        """Starts or finishes the count. ``free``: no capture is under way."""
        if self.busy:
            self._take()
        elif free and not self.flops and not self.refusal and "torch" in sys.modules:
            loop = self._loop()
            if loop.rule is not None and loop.step >= FIRST_STEP:
                self._begin(loop)

    def stop(self, timeout_s: float) -> None:
        """Ends the count when the session closes."""
        self._scheduler.abort("the session ended")
        self._scheduler.wait(timeout_s)

    def _begin(self, loop: LoopState) -> None:
        if dynamo_has_run() or self._shared():
            self._refuse(COMPILED if dynamo_has_run() else SHARED)
            return
        try:
            import_module(COUNTER)
        except ImportError as error:
            self._refuse(f"{COUNTER} cannot be imported ({error}). Set flops_per_sample")
            return
        self._tries += 1
        self._active(active=True)
        sources = loop.thread.sources
        assert loop.rule is not None
        self._scheduler.arm(
            CaptureRequest("flops", 1, warmup=0), StepBoundary(loop.rule, sources), loop.thread
        )

    def _take(self) -> None:
        recorded = self._scheduler.take()
        if recorded is None:
            return
        self._active(active=False)
        whole = recorded.steps and not recorded.problem
        if whole and dynamo_has_run():
            self._refuse(COMPILED)
        elif whole and recorded.trace:
            self.flops = recorded.trace
            self._event(EVENT, {"train.step.flops": self.flops}, recorded.within_ns or recorded.begun_ns)
        elif whole:
            self._refuse(UNKNOWN)
        elif self._tries >= MOST_TRIES:
            self._refuse(f"{recorded.problem or 'no step ended'}. Set flops_per_sample")

    def _refuse(self, why: str) -> None:
        self.refusal = why
        _log.warning("FLOP of a step are not counted: %s", why)


def dynamo_has_run() -> bool:
    """Returns whether TorchDynamo has compiled anything in this process. Imports nothing."""
    counters = getattr(sys.modules.get("torch._dynamo.utils"), "counters", {})
    return bool(counters and counters["frames"]["total"])
