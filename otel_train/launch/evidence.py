"""The first sign that a process trains: until then it may be a launcher, a worker or a tool."""

from __future__ import annotations

import math
import threading
from typing import TYPE_CHECKING, Any

from otel_train.record.roots import RootFinder

if TYPE_CHECKING:
    from collections.abc import Callable

_TABLE = "_global_optimizer_pre_hooks"


class Evidence:
    """Waits for an iterator of a DataLoader, a forward, a backward or an update, whichever comes first.

    Everything that waits is taken out before ``found`` is called, so that whoever is called can put its own
    hooks in; the call that was the sign then goes through those.

    Args:
        found: called once, in the thread that trains, before what it does is done.

    Attributes:
        finder: looks for models; it stays in place, for a session to go on with.
    """

    def __init__(self, found: Callable[[], None]) -> None:
        self.finder = RootFinder(self._called)
        self._found = found
        self._lock = threading.RLock()
        self._over = False
        self._undo: list[Callable[[], None]] = []

    def wait(self) -> None:
        """Put the hooks in."""
        import torch
        from torch.utils.data import dataloader

        self.finder.look(math.inf)
        # The base class is for iterators that somebody else has made.
        for kind in ("_BaseDataLoaderIter", "_SingleProcessDataLoaderIter", "_MultiProcessingDataLoaderIter"):
            self._before(getattr(dataloader, kind), "__init__")
        self._before(torch.autograd, "_engine_run_backward")
        self._before_updates()

    def sign(self) -> None:
        """This process trains."""
        with self._lock:
            if self._over:
                return
            self._over = True
            self.stop()
            self._found()

    def _called(self, model: Any) -> None:
        """A root module is called: whoever takes the finder over gets this one too."""
        mine = self.finder.tell
        self.sign()
        if self.finder.tell is not mine:
            self.finder.tell(model)

    def stop(self) -> None:
        """Take the hooks out; the finder stays."""
        self._over = True
        undo, self._undo = self._undo, []
        for each in undo:
            each()

    def _before(self, owner: Any, name: str) -> None:
        original = getattr(owner, name)

        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if self._over:
                return original(*args, **kwargs)
            self.sign()
            now = getattr(owner, name)
            return (original if now is wrapper else now)(*args, **kwargs)

        wrapper.__name__, wrapper.__qualname__ = original.__name__, getattr(original, "__qualname__", name)
        setattr(owner, name, wrapper)

        def undo() -> None:
            if getattr(owner, name) is wrapper:
                setattr(owner, name, original)

        self._undo.append(undo)

    def _before_updates(self) -> None:
        from torch.optim import optimizer as hooks

        handles: list[Any] = []

        def own(optimizer: Any, args: Any, kwargs: Any) -> None:
            if self._over:
                return
            self.sign()
            for late in list(getattr(hooks, _TABLE).values())[len(before) :]:
                late(optimizer, args, kwargs)

        before: list[Any] = []

        def first(optimizer: Any, _args: Any, _kwargs: Any) -> None:
            # The table of global hooks is being gone through and must not change now; the optimizer's own
            # hooks come after it, and from there on it may.
            if not self._over and not handles[1:]:
                before[:] = [h for h in getattr(hooks, _TABLE).values() if h is not first]
                handles.append(optimizer.register_step_pre_hook(own))

        handles.append(hooks.register_optimizer_step_pre_hook(first))
        self._undo.append(handles[0].remove)
