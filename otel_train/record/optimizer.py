"""Updates, seen by torch's own global optimizer hooks."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from otel_train.codes import SOURCE_SHIFT, Op, SourceKind, code

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from otel_train.record.recorder import Recorder


class OptimizerProbe:
    """Times ``step`` of every ``torch.optim.Optimizer`` and ``GradScaler`` until ``remove``.

    ``Optimizer.step`` is never wrapped: subclasses override it, and schedulers patch it. A step that raises
    fires no post hook; the pump closes it at the next outer edge.

    Args:
        recorder: takes the edges.
    """

    def __init__(self, recorder: Recorder) -> None:
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
        self._scaler = _ScalerPatch(recorder)

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


class _ScalerPatch:
    """Sees ``GradScaler.step`` from outside: no update inside means that it was skipped."""

    def __init__(self, recorder: Recorder) -> None:
        import torch

        self._class = torch.amp.GradScaler
        self._original = self._class.step
        original, edge = self._original, recorder.edge
        source = recorder.source(SourceKind.SCALER, "GradScaler")
        begin, end, fail = code(Op.BEGIN, source), code(Op.END, source), code(Op.FAIL, source)

        def step(self: Any, *args: Any, **kwargs: Any) -> Any:
            edge(begin)
            try:
                result = original(self, *args, **kwargs)
            except BaseException:
                edge(fail)
                raise
            edge(end)
            return result

        self._wrapper = step
        self._class.step = step

    def remove(self) -> None:
        if self._class.step is self._wrapper:
            self._class.step = self._original
