"""The hooks that every torch program needs, put in and taken out together."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from otel_train.instrumentation.backward import BackwardProbe
from otel_train.instrumentation.compile_events import CompilerProbe
from otel_train.instrumentation.module import codes_of_wrappers
from otel_train.instrumentation.optimizer import OptimizerProbe

if TYPE_CHECKING:
    from collections.abc import Callable

    from otel_train.clock import Clock
    from otel_train.instrumentation.grad_scaler import ScaledUpdates
    from otel_train.recording.recorder import Recorder


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
        self._edge = recorder.edge
        self._stepped_aside = False
        self.step_aside_for_compiler()

    def step_aside_for_compiler(self) -> None:
        """Tell the compiler, once it is loaded, not to trace our wrappers: no graph break of ours."""
        self.compiler.listen()
        if self._stepped_aside or "torch._dynamo.eval_frame" not in sys.modules:
            return
        compiler: Any = sys.modules["torch._dynamo.eval_frame"]
        skip = getattr(compiler, "skip_code", None)
        if skip is None:
            return
        self._stepped_aside = True
        for code in (*self._backward.codes, *codes_of_wrappers()):
            skip(code)
        whole = _skipper_of_whole_calls(compiler) or skip
        for code in (*self._optimizers.codes, getattr(self._edge, "__code__", None)):
            if code is not None:
                whole(code)

    def remove(self) -> None:
        """Take everything out."""
        self._backward.remove()
        self._optimizers.remove()
        self.compiler.remove()


def _skipper_of_whole_calls(compiler: Any) -> Callable[[Any], None] | None:  # Any: torch._dynamo.eval_frame
    """What keeps a compiler out of a function and of everything that it calls, where torch has that.

    Not for the wrapper of backward: what runs below that one is the user's.
    """
    strategy = getattr(compiler, "FrameExecStrategy", None)
    set_strategy = getattr(compiler, "set_code_exec_strategy", None)
    action = getattr(sys.modules.get("torch._dynamo.types"), "FrameAction", None)
    if strategy is None or set_strategy is None or action is None:
        return None
    never = strategy(action.SKIP, action.SKIP)
    return lambda code: set_strategy(code, never)


def in_backward() -> bool:
    """Whether the calling thread runs a node of autograd's graph right now."""
    torch: Any = sys.modules.get("torch")
    return torch is not None and torch._C._current_graph_task_id() != -1  # noqa: SLF001  # the only way to ask
