"""Backward, seen at the one place where every way of asking for gradients enters the engine."""

from __future__ import annotations

import functools
import sys
from typing import TYPE_CHECKING, Any

from otel_train.instrumentation.patching import replace
from otel_train.recording import ring_buffer
from otel_train.recording.events import Op, SourceKind, begin_end_fail, code

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FunctionType

    from otel_train.recording.recorder import Recorder

_ENTRY = "_engine_run_backward"


class BackwardProbe:
    """Times every call into autograd's engine until ``remove``.

    ``torch.autograd.backward`` and ``torch.autograd.grad`` both look this module global up on each call, so
    ``from torch.autograd import backward`` made earlier is seen as well. ``accumulate_grad`` tells them apart.

    Attributes:
        codes: code objects that a compiler should step over.
        remove: puts the original back, unless other code has wrapped ours.

    Args:
        recorder: takes the edges.
    """

    def __init__(self, recorder: Recorder) -> None:
        import torch

        self.codes: tuple[Any, ...] = ()
        backward = recorder.source(SourceKind.BACKWARD, "backward")
        grad = recorder.source(SourceKind.GRAD, "autograd.grad")

        def timed(original: Callable[..., Any]) -> Callable[..., Any]:
            made = _timed(original, backward, grad, recorder.edge)
            self.codes = (made.__code__,)
            if ring_buffer.EXTENSION is None:
                return made
            begin, end, fail = begin_end_fail(backward)
            words = ring_buffer.packed(end, fail, begin)
            state = (recorder.edge, original, "accumulate_grad", made, words)
            return functools.partial(ring_buffer.EXTENSION.hook("timed", state))  # which has a __dict__

        self.remove = replace(torch.autograd, _ENTRY, timed)


def _timed(
    original: Callable[..., Any], backward: int, grad: int, edge: Callable[[int], None]
) -> FunctionType:
    from torch._guards import TracingContext

    tracing = TracingContext.try_get
    begins = (code(Op.BEGIN, grad), code(Op.BEGIN, backward))
    ends = (code(Op.END, grad), code(Op.END, backward))
    fails = (code(Op.FAIL, grad), code(Op.FAIL, backward))

    def run_backward(*args: Any, accumulate_grad: bool = True, **kwargs: Any) -> Any:
        if not accumulate_grad and tracing() is not None:  # a compiler builds a graph: no gradients
            return original(*args, accumulate_grad=False, **kwargs)
        edge(begins[accumulate_grad])
        try:
            result = original(*args, accumulate_grad=accumulate_grad, **kwargs)
        except BaseException:
            edge(fails[accumulate_grad])
            raise
        edge(ends[accumulate_grad])
        return result

    return run_backward  # type: ignore[return-value]  # a def is a FunctionType


def in_backward() -> bool:
    """Whether the calling thread runs a node of autograd's graph right now."""
    torch: Any = sys.modules.get("torch")
    return torch is not None and torch._C._current_graph_task_id() != -1  # noqa: SLF001  # the only way to ask
