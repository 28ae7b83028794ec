"""Instruments backward at the entry of autograd's engine, and updates: global optimizer hooks and ``GradScaler.step``."""

from __future__ import annotations

import functools
import sys
import weakref
from collections import defaultdict, deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from otel_train.datamodel import Outcomes
from otel_train.recording import ring_buffer
from otel_train.recording.events import CLOSURE_BITS, SourceKind, begin_end_fail
from otel_train.safety import Guard, replace

if TYPE_CHECKING:
    from types import FunctionType

    import torch

    from otel_train.instrumentation.accelerator import DeviceDriver
    from otel_train.recording.recorder import Recorder

_ENTRY = "_engine_run_backward"


class BackwardProbe:
    """Times every call into autograd's engine until ``remove``.

    ``torch.autograd.backward`` and ``torch.autograd.grad`` both look this module global up on each call, so
    ``from torch.autograd import backward`` made earlier is seen as well. ``accumulate_grad`` tells them apart.

    Attributes:
        codes: code objects that a compiler must not trace.
        remove: restores the original function, unless other code has wrapped the replacement.
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
            return functools.partial(ring_buffer.EXTENSION.hook("timed", state))  # for its ``__dict__``

        self.remove = replace(torch.autograd, _ENTRY, timed)


def _timed(
    original: Callable[..., Any], backward: int, grad: int, edge: Callable[[int], None]
) -> FunctionType:
    from torch._guards import TracingContext

    tracing = TracingContext.try_get
    begins, ends, fails = zip(begin_end_fail(grad), begin_end_fail(backward), strict=True)

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
    """Returns whether the calling thread is running a node of autograd's graph."""
    engine: Any = sys.modules.get("torch._C")
    return engine is not None and engine._current_graph_task_id() != -1  # noqa: SLF001  # the only way to ask


MOST_HELD = 1024
"""Most updates whose outcome is awaited; if the device lags further behind, the outcomes of the oldest stay unknown."""


class ScaledUpdates:
    """Copies from the device whether scaled updates were skipped. The training thread queues, the service thread reads.

    An optimizer with a fused kernel gets ``found_inf``, a tensor on its device, and skips the update itself: the
    host does not know the outcome. A copy is queued behind the kernels that compute it, and read once it has arrived.

    Args:
        driver: fetches numbers from its devices; None if there is none.
        changed: called when there is something to read.
    """

    def __init__(self, driver: DeviceDriver | None, changed: Callable[[], None] = lambda: None) -> None:
        self._changed = changed
        self.scale: float | None = None
        """The last loss scale read; one in each poll of the service thread."""
        self._driver = driver
        self._made = 0
        self._taken = 0
        self._held: deque[list[Any]] = deque(maxlen=MOST_HELD)
        self._scales: deque[Any] = deque(maxlen=1)
        self._wants_scale = True
        self._fault: Exception | None = None

    def note(self, scaler: Any, optimizer: Any) -> None:
        """Records an update under a scaler. Called by the training thread; a fault waits for ``take``."""
        try:
            self._note(scaler, optimizer)
        except Exception as fault:  # a scaler of another make must not reach training
            self._fault = fault
            self._changed()

    def take(self) -> Outcomes:
        """Returns the outcomes since the last call, in order, up to the first that has not arrived. Called by the service thread.

        Raises:
            Exception: the fault that ``note`` caught, once.
        """
        fault, self._fault = self._fault, None
        if fault is not None:
            raise fault
        made, known, skipped = self._made, 0, 0
        while self._held:
            values = [fetched() for fetched in self._held[0]]
            if None in values:
                break
            self._held.popleft()
            known += 1
            skipped += any(values)
        scale = self._scales[0]() if self._scales else None
        if scale is not None:
            self.scale = scale
            self._scales.clear()
        self._wants_scale = not self._scales
        new, self._taken = made - self._taken, made
        return Outcomes(new, known, skipped)

    def _note(self, scaler: Any, optimizer: Any) -> None:
        if not scaler.is_enabled():
            return
        if self._wants_scale:
            self._wants_scale = False
            scale = self._copied(scaler._get_scale_async())  # noqa: SLF001  # get_scale() would wait
            if scale is not None:
                self._scales.append(scale)
                self._changed()
        if not getattr(optimizer, "_step_supports_amp_scaling", False):
            return
        self._made += 1
        self._changed()
        found = scaler._found_inf_per_device(optimizer)  # noqa: SLF001  # gone from the optimizer by now
        copies = [self._copied(tensor) for tensor in found.values()]
        whole = [copy for copy in copies if copy is not None]
        if whole and len(whole) == len(copies):
            self._held.append(whole)

    def _copied(self, tensor: Any) -> Callable[[], float | None] | None:
        if tensor is None:
            return None
        if tensor.is_cpu:  # the scale is changed in place
            mine = tensor.clone()
            return lambda: float(mine)
        driver = self._driver
        if driver is None or driver.why_untimed or tensor.device.type != driver.device_type:
            return None
        if driver.capturing():
            return None
        return driver.fetch(tensor)


def _time_scaler(recorder: Recorder, note: Callable[[Any, Any], None]) -> Callable[[], None]:
    """Times ``GradScaler.step``: without an optimizer step inside, the update was skipped. Returns a function that undoes this."""
    import torch

    edge = recorder.edge
    begin, end, fail = begin_end_fail(recorder.source(SourceKind.SCALER, "GradScaler"))

    def timed(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def step(self: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            edge(begin)
            try:
                result = original(self, optimizer, *args, **kwargs)
            except BaseException:
                edge(fail)
                raise
            edge(end)
            note(self, optimizer)
            return result

        return step

    return replace(torch.amp.GradScaler, "step", timed)


class OptimizerProbe:
    """Times ``step`` of every ``torch.optim.Optimizer`` and ``GradScaler`` until ``remove``.

    ``Optimizer.step`` is never wrapped: subclasses override it, and schedulers patch it. torch calls no post hook
    if a step raises; the agent closes it at the next outer event.

    Attributes:
        codes: code objects that a compiler must not trace.
    """

    def __init__(self, recorder: Recorder, scaled: ScaledUpdates) -> None:
        from torch.optim import optimizer as hooks

        self._recorder = recorder
        self._in_c = ring_buffer.EXTENSION is not None
        self._words: dict[int, Any] = {}
        self._numbers: defaultdict[str, set[int]] = defaultdict(set)
        self._held: dict[int, weakref.ref[Any]] = {}
        self._guard = Guard("names of optimizers", limit=sys.maxsize)
        before, after = self._hooks()
        self.codes = tuple(hook.__code__ for hook in (before, after) if hasattr(hook, "__code__"))
        self._handles = [
            hooks.register_optimizer_step_pre_hook(before),
            hooks.register_optimizer_step_post_hook(after),
        ]
        self._undo_scaler = _time_scaler(recorder, scaled.note)

    def remove(self) -> None:
        """Removes the hooks."""
        for handle in self._handles:
            handle.remove()
        self._undo_scaler()

    def _hooks(self) -> tuple[Any, Any]:
        edge, known, register = self._recorder.edge, self._words, self._register
        if self._in_c:
            hook = ring_buffer.EXTENSION.hook
            return hook("update", (edge, known, register)), hook("update", (edge, known, None))

        def before(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
            words = known.get(id(optimizer)) or register(optimizer)
            if words is not None:
                edge(words[0] | CLOSURE_BITS if len(args) > 1 or "closure" in kwargs else words[0])

        def after(optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
            words = known.get(id(optimizer))
            if words is not None:
                edge(words[1])

        return before, after

    def _register(self, optimizer: torch.optim.Optimizer) -> Any:
        """Gives an optimizer a name at its first step; returns its event words, or None if that raises."""
        with self._guard:
            return self._name(optimizer)
        return None

    def _name(self, optimizer: torch.optim.Optimizer) -> Any:
        """Gives an optimizer a name. When it is deleted, the next one of its class gets the name."""
        key, kind = id(optimizer), type(optimizer).__name__
        used = self._numbers[kind]
        number = next((n for n in range(1, _MOST_OF_A_KIND) if n not in used), _MOST_OF_A_KIND)
        used.add(number)
        name = kind if number == 1 else f"{kind}_{number}"
        words = begin_end_fail(self._recorder.source(SourceKind.OPTIMIZER, name))
        self._words[key] = ring_buffer.packed(*words) if self._in_c else words
        self._held[key] = weakref.ref(optimizer, lambda _: self._forget(key, used, number))
        return self._words[key]

    def _forget(self, key: int, used: set[int], number: int) -> None:
        used.discard(number)
        self._words.pop(key, None)
        self._held.pop(key, None)


_MOST_OF_A_KIND = 16
"""Names per optimizer class: enough to tell a GAN's two apart, bounded for sweeps."""
