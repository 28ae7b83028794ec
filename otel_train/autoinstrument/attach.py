"""Starts a session in a process below ``otel-train run`` once it has imported torch or JAX and trains.

A process that does not train may be a launcher, a worker or a tool.
"""

from __future__ import annotations

import atexit
import functools
import logging
import math
import os
import sys
import threading
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any

from otel_train import api
from otel_train.datamodel import Clock, system_clock
from otel_train.instrumentation.compile_events import (
    COMPILED,
    PARTS,
    compiled_name,
    events,
    listen,
    retire,
    unlisten,
)
from otel_train.instrumentation.stages import active_session
from otel_train.safety import Guard, free_in_forks, is_of_signal_handler, replace, successor

if TYPE_CHECKING:
    from otel_train.session import Session

_TABLE = "_global_optimizer_pre_hooks"
_HOOKS = "_optimizer_step_pre_hooks"
"""Attribute of an optimizer."""

_DIFFERENTIATE = ("grad", "value_and_grad", "vjp", "linearize")
"""Functions of JAX that compute gradients."""

_log = logging.getLogger("otel_train")


class FirstSign:
    """Calls ``found`` at the first sign of training. Other threads with a sign wait until that call returns."""

    def __init__(self, found: Callable[[], None]) -> None:
        self._found = found
        self._lock = free_in_forks(threading.RLock())
        self._begun = self._over = False
        self._undo: list[Callable[[], None]] = []
        self._undoing = Guard("removing the detection of training", limit=sys.maxsize)

    def sign(self) -> None:
        """Reports that this process trains."""
        if self._over:
            return
        with self._lock:
            if self._begun:
                return
            self._begun = True
            try:
                self._found()
            except BaseException as error:
                if is_of_signal_handler(
                    error
                ):  # the program's, such as a watchdog: the next sign tries again
                    self._begun = False
                else:
                    self.stop()
                raise
            self.stop()

    def stop(self) -> None:
        """Removes the detection."""
        self._begun = self._over = True
        undo, self._undo = self._undo, []
        for each in undo:
            with self._undoing:  # a metaclass of the program may raise
                each()


class TrainingDetector(FirstSign):
    """Detects training by a new DataLoader iterator, a forward, a backward or an optimizer step.

    ``found`` is called once, on the training thread, before the detected call proceeds. The instrumentation that it installs
    replaces the detecting wrappers, and the detected call goes through it. ``near``, which must not raise, is called once
    before the first optimizer is created, unless training has begun: for slow preparation outside of any step. ``finder``
    stays installed for the session.
    """

    def __init__(self, found: Callable[[], None], near: Callable[[], None] = lambda: None) -> None:
        # Imported here because it imports torch, and JAX programs use this module too.
        from otel_train.instrumentation.root_modules import RootFinder

        super().__init__(found)
        self.finder = RootFinder(self._called)
        self._near: Callable[[], None] | None = near

    def wait(self) -> None:
        """Installs the detecting wrappers."""
        import torch
        from torch.utils.data import dataloader

        self.finder.inspect(math.inf)
        self._undo.append(replace(dataloader.DataLoader, "__init__", self._loader_init, waits=True))
        # The base class covers iterator classes of other libraries.
        for kind in ("_BaseDataLoaderIter", "_SingleProcessDataLoaderIter", "_MultiProcessingDataLoaderIter"):
            self._before(getattr(dataloader, kind), "__init__", self.sign)
        self._before(torch.autograd, "_engine_run_backward", self.sign)
        self._before(torch.optim.Optimizer, "__init__", self.prepare)
        self._before_updates()

    def prepare(self) -> None:
        """Calls ``near``, once, if training has not begun."""
        near, self._near = self._near, None
        if near is not None and not self._over:
            near()

    def _called(self, model: Any) -> None:
        """Handles the call of a root module, and passes it to the session's handler."""
        self.sign()
        if self.finder.notify != self._called:
            self.finder.notify(model)

    def _loader_init(self, original: Callable[..., None]) -> Callable[..., None]:
        """Returns a ``DataLoader.__init__`` that wraps ``__iter__`` of subclasses with their own iterator: its call is a sign."""
        from torch.utils.data import dataloader

        from otel_train.instrumentation.dataloader import iterates_itself

        kinds: set[Any] = set()
        guard = Guard("detecting loaders with their own iterators", limit=sys.maxsize)

        @functools.wraps(original)
        def __init__(loader: Any, /, *args: Any, **kwargs: Any) -> None:  # noqa: N807  # in its place
            kind = type(loader)
            with guard:  # a metaclass of the program may raise
                if not self._over and kind not in kinds and iterates_itself(kind):
                    kinds.add(kind)
                    self._before(kind, "__iter__", self.sign)
            successor(dataloader.DataLoader, "__init__", __init__)(loader, *args, **kwargs)

        return __init__

    def _before(self, owner: Any, name: str, act: Callable[[], None]) -> None:
        def make(original: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(original)
            def wrapper(*args: Any, **kwargs: Any) -> Any:
                act()
                return successor(owner, name, wrapper)(*args, **kwargs)

            return wrapper

        self._undo.append(replace(owner, name, make, waits=True))

    def _before_updates(self) -> None:
        from torch.optim import optimizer as hooks

        table = getattr(hooks, _TABLE)
        known: dict[int, list[Any]] = {}

        def own(optimizer: Any, args: Any, kwargs: Any) -> None:
            before = known.pop(id(optimizer), None)
            if before is None:
                return
            with self._undoing:
                _drop_only_hook(optimizer)
            self.sign()
            for late in [hook for hook in table.values() if hook not in before]:
                late(optimizer, args, kwargs)

        def first(optimizer: Any, _args: Any, _kwargs: Any) -> None:
            # torch iterates over the global hooks now, so they must not change. The optimizer's own hooks run after
            # them: ``own`` may change the global hooks.
            if not self._over and id(optimizer) not in known:
                known[id(optimizer)] = list(table.values())
                optimizer.register_step_pre_hook(own)

        self._undo.append(hooks.register_optimizer_step_pre_hook(first).remove)


def _drop_only_hook(optimizer: Any) -> None:
    """Drops the only pre-hook of an optimizer, which is being called.

    torch iterates over the dict of the hooks, so the dict is replaced. Handles of other hooks would refer to the former one.
    """
    own = vars(optimizer)
    if len(own[_HOOKS]) == 1:
        own[_HOOKS] = type(own[_HOOKS])()


class JaxTrainingDetector(FirstSign):
    """Detects training by a compilation in a program that has called a gradient function of JAX.

    Wrappers of the gradient functions record the call and forward it, so that results and traces are those of JAX.
    JAX's monitoring events report compilations.
    """

    def __init__(
        self,
        found: Callable[[], None],
        *,
        clock: Clock = system_clock,
        log: Callable[[str, str], None] = _log.warning,
        modules: Mapping[str, Any] = sys.modules,
    ) -> None:
        # Imported here because programs of torch do not need it.
        from otel_train.aggregation.counters import JaxCompiles

        super().__init__(found)
        self._clock = clock
        self._log = log
        self._modules = modules
        self._guard = Guard("looking for training with JAX", limit=1)
        self._differentiates = self._inside_listener = False
        self._seen = JaxCompiles()
        self._monitoring: Any = None

    def wait(self) -> None:
        """Installs wrappers and listener. JAX must have been imported."""
        jax = self._modules["jax"]
        for name in _DIFFERENTIATE:
            if name in vars(jax):
                self._undo.append(
                    replace(jax, name, functools.partial(self._recording_wrapper, jax, name), waits=True)
                )
        self._monitoring = events(self._modules)
        listen(self._monitoring, self._on_event)
        atexit.register(self._at_exit)

    def stop(self) -> None:
        """Removes wrappers and listener."""
        super().stop()
        monitoring, self._monitoring = self._monitoring, None
        if monitoring is not None:
            (retire if self._inside_listener else unlisten)(monitoring, self._on_event)
        atexit.unregister(self._at_exit)

    def _recording_wrapper(self, jax: Any, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            self._differentiates = True
            return successor(jax, name, wrapper)(*args, **kwargs)

        wrapper.__module__, wrapper.__qualname__ = jax.__name__, name  # pickle refers to the wrapper by these
        return wrapper

    def _on_event(self, event: str, duration_s: float, fun_name: object = "", **_: Any) -> None:
        if event not in PARTS or self._begun or self._guard.closed:
            return
        with self._guard:
            if event == COMPILED:
                now_ns = self._clock()
                self._seen = self._seen.plus(now_ns - int(duration_s * 1e9), now_ns, compiled_name(fun_name))
            if self._differentiates:
                self._inside_listener = True
                self.sign()

    def _at_exit(self) -> None:
        """Logs why nothing was recorded if JAX compiled and no training was detected."""
        processes: Any = sys.modules.get("multiprocessing.process")
        is_child = processes is not None and processes.parent_process() is not None  # of a pool, a loader
        if self._seen.functions and not self._begun and not is_child:
            from otel_train.aggregation.counters import missing_step_reason

            seen = f"{self._seen.describe(self._clock())}; no gradient was asked for"
            self._log("nothing was recorded: %s", missing_step_reason(seen, loader=True))


_NEEDED = ("otel_train.config.sources", "otel_train.session")

_attachments: list[Attachment] = []


def begin(package: str) -> None:
    """Starts waiting for the first sign of training, in this process and in its forks."""
    if not _attachments:
        _attachments.append(Attachment())
    _attachments[0].wait(package)


class Attachment:
    """Starts the session of this process when it trains, or uses the one that the program starts."""

    def __init__(self) -> None:
        self._packages: list[str] = []
        self._torch: TrainingDetector | None = None
        self._jax: JaxTrainingDetector | None = None
        self._over = False
        # After a failure the program continues without instrumentation, and nothing is tried again.
        self._guard = Guard("observing this program", limit=1)
        api.when_started.append(self._end_wait)
        os.register_at_fork(after_in_child=self._in_fork)

    def wait(self, package: str) -> None:
        """Installs the detection for this package, or adds it to the open session."""
        self._packages.append(package)
        if not self._over:
            active_session.wanted = self._wanted
            self._wait(package)
        elif package == "torch" and (session := api.current()) is not None:
            session.add()  # the session began before torch was imported
            session.find_models()

    def _wait(self, package: str) -> None:
        if package == "jax":
            self._jax = JaxTrainingDetector(self._start)
            self._jax.wait()
        else:
            self._torch = TrainingDetector(self._start, self._prepare)
            self._torch.wait()

    def _wanted(self) -> None:
        """Starts the session because a public function needs it."""
        detector = self._jax or self._torch
        if detector is not None:
            detector.sign()

    def _start(self) -> None:
        if _is_loader_worker():
            self._give_up()
            return
        with self._guard:
            api.instrument()
        if self._guard.faults:
            self._give_up()

    def _prepare(self) -> None:
        """Imports what a session needs before training begins, so that the first step does not include the imports."""
        if not _is_loader_worker():
            with self._guard:
                for name in _NEEDED:
                    import_module(name)

    def _end_wait(self, session: Session | None) -> None:
        """Ends the wait when a session has started; None: the program has disabled it."""
        if session is None:
            self._give_up()
            return
        if self._torch is not None:
            # Before _stop, so that models found by another thread reach the session.
            session.find_models(self._torch.finder)
        self._stop()

    def _stop(self) -> None:
        """Removes the detection; the finder of models stays."""
        self._over = True
        active_session.wanted = None
        for detector in (self._torch, self._jax):
            if detector is not None:
                detector.stop()

    def _give_up(self) -> None:
        """Removes the detection and the finder of models."""
        if self._torch is not None:
            self._torch.finder.remove()
        self._stop()

    def _in_fork(self) -> None:
        """Installs the detection again in a forked child, which has no session."""
        with self._guard:
            api.forget_in_fork()
            self._give_up()
            self._over, active_session.wanted = False, self._wanted
            for package in self._packages:
                self._wait(package)


def _is_loader_worker() -> bool:
    worker: Any = sys.modules.get("torch.utils.data._utils.worker")
    return worker is not None and worker.get_worker_info() is not None
