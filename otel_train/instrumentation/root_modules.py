"""Models that nobody named: the outermost module calls of a loop, looked at for a while."""

from __future__ import annotations

import inspect
import threading
import weakref
from typing import TYPE_CHECKING, Any

import torch

from otel_train.instrumentation.backward import in_backward
from otel_train.instrumentation.naming import variables_of
from otel_train.instrumentation.registry import FIRST_CALLS
from otel_train.safety import Guard

if TYPE_CHECKING:
    from collections.abc import Callable

MOST_ROOTS = 64
"""Models found at most; a program that calls ever new modules by themselves is no training loop."""

_FRAMES_OF_A_CONSTRUCTOR = 16


class RootFinder:
    """Stands in ``Module.__call__`` while it looks, and is taken out again: no global hook stays.

    A root is a module with parameters that is called while no other such module runs in its thread. Losses,
    metrics and transforms have none. Not a root: what is recomputed in a backward, a replica of
    ``DataParallel``, and what a module's own constructor tries out.

    Args:
        tell: told of every module that is called as a root and was not known before.

    Attributes:
        tell: as given; may be replaced.
    """

    def __init__(self, tell: Callable[[torch.nn.Module], None] = lambda _: None) -> None:
        self.tell = tell
        self._guard = Guard("finding models")
        self._known: set[int] = set()
        self._left = 0.0
        self._over = False

    def look(self, calls: float) -> None:
        """Look at the next ``calls`` outermost calls, at least."""
        if self._over or self._guard.closed or calls <= self._left:
            return
        self._left = calls
        _finders[:] = [self]
        if torch.nn.Module.__call__ is _CALL:
            torch.nn.Module.__call__ = _looked_at

    def settle_for(self, calls: float) -> None:
        """Look at this many more calls, not at as many as before."""
        self._left = 0
        self.look(calls)

    def remove(self) -> None:
        """Look no more."""
        self._over = True
        self._rest()

    @property
    def looking(self) -> bool:
        """Whether calls are looked at."""
        return self._left > 0

    def leads(self, model: torch.nn.Module) -> bool:
        """Whether this call, which no other surrounds, is one of a root; if so its inner calls are none."""
        if (
            next(torch.nn.Module.parameters(model), None) is None
            or model.__dict__.get("_is_replica")
            or in_backward()
        ):
            return False
        if id(model) not in self._known and not _is_being_tried():
            self._meet(model)
        self._left -= 1
        if self._left <= 0:
            self._rest()
        return True

    def _meet(self, model: torch.nn.Module) -> None:
        if len(self._known) == MOST_ROOTS:
            self._left = 0
            return
        # Known by id: a later module at the same address, of a sweep, say, is met by the forgetting below.
        self._known.add(id(model))
        weakref.finalize(model, self._known.discard, id(model)).atexit = False
        with self._guard:
            self.tell(model)
        self._left = max(self._left, FIRST_CALLS)

    def _rest(self) -> None:
        self._left = 0
        # What somebody put over ours stays theirs: ours passes through.
        if torch.nn.Module.__call__ is _looked_at:
            torch.nn.Module.__call__ = _CALL


def _looked_at(self: Any, *args: Any, **kwargs: Any) -> Any:
    # First, so that a compiler that traces this sees nothing but the call. It has no closure, because a compiler
    # guards one, and would compile again when this has gone.
    if torch.compiler.is_dynamo_compiling():
        # Past the slot, as the compiler itself goes: it would guard what is in it, and compile again without that.
        return self._call_impl(*args, **kwargs)
    if torch.compiler.is_compiling():
        return _CALL(self, *args, **kwargs)
    finder = _finders[-1] if _finders else None
    if finder is None or not finder.looking or getattr(_inside, "root", False) or not finder.leads(self):
        return _CALL(self, *args, **kwargs)
    _inside.root = True
    try:
        return _CALL(self, *args, **kwargs)
    finally:
        _inside.root = False


_CALL: Any = torch.nn.Module.__call__
_inside = threading.local()
_finders: list[RootFinder] = []
"""The one that looks, if any."""


def _is_being_tried() -> bool:
    """Whether a module's constructor makes this call, to learn the shape of what comes out."""
    frame: Any = inspect.currentframe()
    for _ in range(_FRAMES_OF_A_CONSTRUCTOR):
        if frame is None:
            return False
        if frame.f_code.co_name == "__init__" and hasattr(variables_of(frame).get("self"), "_modules"):
            return True
        frame = frame.f_back
    return False
