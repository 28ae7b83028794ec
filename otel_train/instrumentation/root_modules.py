"""Finds models that the program has not passed to ``instrument``, by the outermost module calls of the loop, and records them."""

from __future__ import annotations

import functools
import inspect
import threading
import time
import weakref
from _thread import get_ident
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from otel_train.instrumentation.module import ModuleProbe, is_compiled, is_or_wraps
from otel_train.instrumentation.module_parts import modules_of, parameters_of
from otel_train.instrumentation.naming import class_name, variables_of
from otel_train.instrumentation.optimizer import in_backward
from otel_train.safety import Guard, free_in_forks, replace

if TYPE_CHECKING:
    from otel_train.instrumentation.registry import ProbeRegistry

FIRST_CALLS = 64
"""Outermost calls of a thread that are inspected at the start, and again after a new loader, optimizer or model on it."""

CALLS_OF_OTHERS = 256
"""Outermost calls of other threads after which the search ends: the thread that began it may call no model."""

MOST_ROOTS = 64
"""Most models found. A program that keeps calling new modules is no training loop."""

_FRAMES_OF_A_CONSTRUCTOR = 16


class RootFinder:
    """Replaces ``Module.__call__`` while it inspects calls for root modules; no global hook stays.

    A root is a module with parameters that is called while no other such module runs on its thread. Losses, metrics and
    transforms have no parameters. Not roots: recomputation in a backward, replicas of ``DataParallel``, and calls from a
    module's constructor.
    """

    def __init__(self, tell: Callable[[torch.nn.Module], None] = lambda _: None) -> None:
        self.notify = tell
        self._guard = Guard("finding models")
        self._known: set[int] = set()
        self._lock = free_in_forks(threading.RLock())
        self._left: dict[int, float] = {}  # calls to inspect, by thread
        self._left_to_others = 0.0
        self._over = False

    def inspect(self, calls: float = FIRST_CALLS) -> None:
        """Inspects at least the next ``calls`` outermost calls of this thread, and those of other threads until then."""
        if self._over or self._guard.closed:
            return
        with self._lock:
            here = get_ident()
            self._left[here] = max(calls, self._left.get(here, 0))
            self._left_to_others = max(CALLS_OF_OTHERS, calls)
            _finders[:] = [self]
            if torch.nn.Module.__call__ is _CALL:
                torch.nn.Module.__call__ = _observed_call

    def inspect_only(self) -> None:
        """Inspects ``FIRST_CALLS`` further calls of this thread, and no more."""
        with self._lock:
            self._left.clear()
            self.inspect()

    def remove(self) -> None:
        """Stops inspecting."""
        self._over = True
        self._stop_inspecting()

    @property
    def inspecting(self) -> bool:
        """Whether calls are inspected."""
        return bool(self._left)

    def leads(self, model: torch.nn.Module) -> bool:
        """Returns whether this outermost call is one of a root module; False if that could not be found out."""
        leads = False
        with self._guard:
            leads = self._inspect_call(model)
        if self._guard.closed:
            self._stop_inspecting()
        return leads

    def _inspect_call(self, model: torch.nn.Module) -> bool:
        if next(parameters_of(model), None) is None or model.__dict__.get("_is_replica") or in_backward():
            return False
        if id(model) not in self._known and not _in_constructor():
            self._report_model(model)
        self._count_call()
        return True

    def _count_call(self) -> None:
        with self._lock:
            here = get_ident()
            if here not in self._left:
                self._left_to_others -= 1
            elif self._left[here] > 1:
                self._left[here] -= 1
            else:
                del self._left[here]
            if not self._left or self._left_to_others <= 0:
                self._stop_inspecting()

    def _report_model(self, model: torch.nn.Module) -> None:
        if len(self._known) == MOST_ROOTS:
            self._stop_inspecting()
            return
        with self._guard:
            self.notify(model)
        # Only now: a thread that has called the model meanwhile has waited in ``notify`` for its recording. The id is discarded
        # when the model is deleted, because a later module may have the same address.
        self._known.add(id(model))
        weakref.finalize(model, self._known.discard, id(model)).atexit = False
        self.inspect()

    def _stop_inspecting(self) -> None:
        with self._lock:
            self._left.clear()
            # If another library has wrapped this function, its wrapper stays and this one only forwards calls.
            if torch.nn.Module.__call__ is _observed_call:
                torch.nn.Module.__call__ = _CALL


def _observed_call(self: Any, *args: Any, **kwargs: Any) -> Any:
    # These checks come first, so that a compiler that traces this function sees only the call. The function has no closure:
    # TorchDynamo would guard the closure, and compile again when the function has been removed.
    if torch.compiler.is_dynamo_compiling():
        # Past the slot, as TorchDynamo traces it: else it would guard what is in the slot, and compile again without that.
        return self._call_impl(*args, **kwargs)
    if torch.compiler.is_compiling():
        return _CALL(self, *args, **kwargs)
    finder = _finders[-1] if _finders else None
    if finder is None or not finder.inspecting or getattr(_inside, "root", False) or not finder.leads(self):
        return _CALL(self, *args, **kwargs)
    _inside.root = True
    try:
        return _CALL(self, *args, **kwargs)
    finally:
        _inside.root = False


_CALL: Any = torch.nn.Module.__call__
_inside = threading.local()
_finders: list[RootFinder] = []
"""The active finder, if any."""


def _in_constructor() -> bool:
    """Returns whether the constructor of a module makes this call, as is done to infer a shape."""
    frame: Any = inspect.currentframe()
    for _ in range(_FRAMES_OF_A_CONSTRUCTOR):
        if frame is None:
            return False
        if frame.f_code.co_name == "__init__":
            owner = variables_of(frame).get("self")
            if issubclass(
                type(owner), torch.nn.Module
            ):  # not ``isinstance``, which may call code of the program
                return True
        frame = frame.f_back
    return False


SHORT_INSPECTION = 2
"""Outermost calls inspected when a known loader starts again: a sweep may use another model."""

SHORT_INSPECTION_EVERY_S = 1.0
"""Least seconds between two short inspections."""


class FoundModels:
    """Records the models that ``finder`` finds, except submodules of recorded models.

    It searches at the start, after a new loader or optimizer, and briefly when a known loader starts again.
    """

    def __init__(self, finder: RootFinder, probes: ProbeRegistry) -> None:
        self._finder = finder
        self._probes = probes
        self._next_s = 0.0
        self._found: list[ModuleProbe] = []
        self._lock = free_in_forks(threading.Lock())
        self._undo_optimizers = replace(torch.optim.Optimizer, "__init__", self._observe_optimizers)
        if probes.models:  # the program has given its models
            self.remove()
            return
        finder.notify = self._take
        finder.inspect_only()

    def loader_starts(self, *, new: bool) -> None:
        """Starts a search when an iterator of a loader is created."""
        if new:
            self._finder.inspect()
        elif not self._finder.inspecting and time.monotonic() >= self._next_s:
            self._next_s = time.monotonic() + SHORT_INSPECTION_EVERY_S
            self._finder.inspect(SHORT_INSPECTION)

    def give_way(self) -> None:
        """Stops the search and drops found models, because the program has given its models."""
        self.remove()
        self._probes.drop_models(self._found)
        self._found = []

    def remove(self) -> None:
        """Stops the search."""
        self._finder.remove()
        self._undo_optimizers()

    def _take(self, model: torch.nn.Module) -> None:
        with self._lock:  # two threads may begin at once
            self._record(model)

    def _record(self, model: torch.nn.Module) -> None:
        known = [recorded for probe in self._probes.models if (recorded := probe.model()) is not None]
        if is_compiled(model) and any(is_or_wraps(model, recorded) for recorded in known):
            self._probes.follow(model, model)
            return
        if any(id(model) in _parts(recorded) for recorded in known):
            return
        parts = _parts(model)
        inside = [probe for probe in self._found if id(probe.model()) in parts]
        self._probes.drop_models(inside)
        made = self._probes.record_model(class_name(model), model)
        self._found = [probe for probe in self._found if probe.model() is not None and probe not in inside]
        self._found += [made] if made else []

    def _observe_optimizers(self, original: Callable[..., None]) -> Callable[..., None]:
        finder = self._finder

        @functools.wraps(original)
        def init(optimizer: Any, /, *args: Any, **kwargs: Any) -> None:
            finder.inspect()
            original(optimizer, *args, **kwargs)

        return init


def _parts(model: torch.nn.Module) -> set[int]:
    """Returns the ids of a module and all its submodules."""
    return {id(module) for module in modules_of(model)}
