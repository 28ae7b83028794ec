"""The hooks that every torch program needs, put in and taken out together."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from otel_train.record.autograd import BackwardProbe
from otel_train.record.compiler import CompilerProbe
from otel_train.record.optimizer import OptimizerProbe

if TYPE_CHECKING:
    from otel_train.clock import Clock
    from otel_train.record.recorder import Recorder
    from otel_train.record.scaler import ScaledUpdates


class TorchProbes:
    """Backward, every optimizer, the compiler.

    Attributes:
        compiler: when it ran.

    Args:
        recorder: takes the edges.
        scaled: is told of updates under a gradient scaler.
        clock: nanoseconds, monotonic.
    """

    def __init__(self, recorder: Recorder, scaled: ScaledUpdates, *, clock: Clock) -> None:
        self._backward = BackwardProbe(recorder)
        self._optimizers = OptimizerProbe(recorder, scaled)
        self.compiler = CompilerProbe(clock)
        self._stepped_aside = False
        self.step_aside_for_compiler()

    def step_aside_for_compiler(self) -> None:
        """Tell the compiler, once it is loaded, not to trace our wrappers: no graph break of ours."""
        self.compiler.listen()
        if self._stepped_aside or "torch._dynamo.eval_frame" not in sys.modules:
            return
        skip: Any = getattr(sys.modules["torch._dynamo.eval_frame"], "skip_code", None)
        if skip is not None:
            self._stepped_aside = True
            for code in (*self._backward.codes, *self._optimizers.codes):
                skip(code)

    def remove(self) -> None:
        """Take everything out."""
        self._backward.remove()
        self._optimizers.remove()
        self.compiler.remove()


def in_backward() -> bool:
    """Whether the calling thread runs a node of autograd's graph right now."""
    torch: Any = sys.modules.get("torch")
    return torch is not None and torch._C._current_graph_task_id() != -1  # noqa: SLF001  # the only way to ask
