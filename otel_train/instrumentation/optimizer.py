"""Updates, seen by torch's own global optimizer hooks."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from otel_train.instrumentation.grad_scaler import ScalerPatch
from otel_train.recording.events import SOURCE_SHIFT, Op, SourceKind

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from otel_train.instrumentation.grad_scaler import ScaledUpdates
    from otel_train.recording.recorder import Recorder


class OptimizerProbe:
    """Times ``step`` of every ``torch.optim.Optimizer`` and ``GradScaler`` until ``remove``.

    ``Optimizer.step`` is never wrapped: subclasses override it, and schedulers patch it. A step that raises
    fires no post hook; the pump closes it at the next outer edge.

    Args:
        recorder: takes the edges.
        scaled: is told of updates under a scaler.
    """

    def __init__(self, recorder: Recorder, scaled: ScaledUpdates) -> None:
        from torch.optim import optimizer as hooks

        self._recorder = recorder
        self._numbers: dict[int, int] = {}
        self._names: dict[str, int] = {}
        self._held: dict[int, weakref.ref[Any]] = {}
        before, after = self._hooks()
        self._hooks_made = (before, after)
        self._handles = [
            hooks.register_optimizer_step_pre_hook(before),
            hooks.register_optimizer_step_post_hook(after),
        ]
        self._scaler = ScalerPatch(recorder, scaled)

    @property
    def codes(self) -> tuple[Any, ...]:
        """Code objects that a compiler should step over."""
        return tuple(hook.__code__ for hook in self._hooks_made)

    def remove(self) -> None:
        """Take the hooks out."""
        for handle in self._handles:
            handle.remove()
        self._scaler.remove()

    def _hooks(self) -> tuple[Callable[..., None], Callable[..., None]]:
        edge, numbers, join = self._recorder.edge, self._numbers, self._join
        begin_op, end_op = int(Op.BEGIN), int(Op.END)

        def before(optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
            number = numbers.get(id(optimizer))
            if number is None:
                number = join(optimizer)
            edge(begin_op | number)

        def after(optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
            number = numbers.get(id(optimizer))
            if number is not None:
                edge(end_op | number)

        return before, after

    def _join(self, optimizer: torch.optim.Optimizer) -> int:
        """First step of an optimizer: give it a bounded name, and forget it when it is gone."""
        key, kind = id(optimizer), type(optimizer).__name__
        count = self._names[kind] = self._names.get(kind, 0) + 1
        name = kind if count == 1 else f"{kind}_{min(count, _MOST_OF_A_KIND)}"
        number = self._recorder.source(SourceKind.OPTIMIZER, name) << SOURCE_SHIFT
        self._numbers[key] = number
        self._held[key] = weakref.ref(optimizer, lambda _: self._forget(key))
        return number

    def _forget(self, key: int) -> None:
        self._numbers.pop(key, None)
        self._held.pop(key, None)


_MOST_OF_A_KIND = 16
"""Names per optimizer class: enough to tell a GAN's two apart, bounded for sweeps."""
