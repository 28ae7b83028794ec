"""Counts the model FLOP of one step of the run, by ``torch.utils.flop_counter``, on the training thread."""

from __future__ import annotations

import logging
import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

from otel_train.datamodel import system_clock
from otel_train.profiler.requests import CaptureRequest
from otel_train.profiler.step_schedule import Phase, StepBoundary, StepScheduler
from otel_train.resource import shares_replica

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from otel_train.profiler.controller import Loop
    from otel_train.profiler.requests import Options
    from otel_train.profiler.torch_profiler import Range

COUNTER: Final = "torch.utils.flop_counter"
EVENT: Final = "train.flops.count"
FIRST_STEP: Final = 8
"""Steps that pass before: by then a compiler has run, and where steps end is known."""

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
    """Counts in place of a profiler; see ``capturing.profiler.Profiler``. All but ``save`` on the training thread.

    Args:
        give_way: not needed: several counters may be active at once.
    """

    def __init__(self, give_way: Callable[[], None]) -> None:
        del give_way
        self._mode: Any = None

    def lacking(self) -> str:
        """Nothing, once it is armed."""
        return ""

    def busy(self) -> bool:
        """Others that count do no harm."""
        return False

    def prepare(self, options: Options) -> list[str]:
        """Nothing is thrown away."""
        del options
        return []

    def start(self) -> None:
        """Count from now on."""
        mode = sys.modules[COUNTER].FlopCounterMode(display=False)
        mode.__enter__()
        self._mode = mode

    def stop(self) -> int:
        """Count no more; the FLOP since then."""
        mode, self._mode = self._mode, None
        mode.__exit__(None, None, None)
        return int(mode.get_total_flops())

    def range(self, name: str) -> Range:
        """Stages are not told apart."""
        del name
        return _NOTHING

    def save(self, trace: Any, path: Path) -> None:
        """Nothing is written."""


class _Nothing:
    def close(self) -> None:
        """Nothing is open."""


_NOTHING: Final = _Nothing()


class FlopCount:
    """Has one step counted, once the loop is known. Driven by the service thread.

    Args:
        loop: looks at the loop.
        active: told when the step is counted, and when that is over.
        event: takes an event: its name, its attributes, an instant in the step.
        max_s: longest step that is counted.
        shared: whether ranks share a model replica.

    Attributes:
        flops: of one step of this rank; 0 until it is known.
        refusal: why it is not counted, for people; "" if it is, or will be.
    """

    def __init__(
        self, loop: Callable[[], Loop], *, active: Callable[..., None],
        event: Callable[[str, Mapping[str, Any], int], None], max_s: float,
        shared: Callable[[], bool] = shares_replica,
    ) -> None:  # fmt: skip
        self.flops = 0
        self.refusal = ""
        self._loop = loop
        self._active = active
        self._event = event
        self._shared = shared
        self._gate = StepScheduler(FlopCounter, clock=system_clock, max_s=max_s)
        self._tries = 0

    @property
    def busy(self) -> bool:
        """Whether a step is being counted, or waited for."""
        return self._gate.phase is not Phase.IDLE

    @property
    def within_ns(self) -> tuple[int, int]:
        """When the counted step began and ended; (0, 0) if there was none."""
        return self._gate.within_ns

    def turn(self, *, free: bool) -> None:
        """Do what is due. ``free``: no capture is under way."""
        if self.busy:
            self._take()
        elif free and not self.flops and not self.refusal and "torch" in sys.modules:
            loop = self._loop()
            if loop.rule is not None and loop.step >= FIRST_STEP:
                self._begin(loop)

    def stop(self, timeout_s: float) -> None:
        """The session closes."""
        self._gate.abort("the session ended")
        self._gate.wait(timeout_s)

    def _begin(self, loop: Loop) -> None:
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
        self._gate.arm(CaptureRequest("flops", 1, warmup=0), StepBoundary(loop.rule, sources), loop.thread)

    def _take(self) -> None:
        recorded = self._gate.take()
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
    """Whether TorchDynamo has compiled anything in this process. Imports nothing."""
    counters = getattr(sys.modules.get("torch._dynamo.utils"), "counters", {})
    return bool(counters and counters["frames"]["total"])
