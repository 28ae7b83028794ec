"""Starts a session in a program below ``otel-train run`` once it imports torch or JAX and trains."""

from __future__ import annotations

import os
import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

from otel_train import api
from otel_train.autoinstrument.training_detector import JaxTrainingDetector, TrainingDetector
from otel_train.instrumentation.stages import active_session
from otel_train.safety import Guard

if TYPE_CHECKING:
    from otel_train.session import Session

_NEEDED = ("otel_train.config.sources", "otel_train.session")

_attachments: list[Attachment] = []


def begin(package: str) -> None:
    """Waits for the first sign of training in this process, and in its forks."""
    if not _attachments:
        _attachments.append(Attachment())
    _attachments[0].wait(package)


class Attachment:
    """Starts the session of this process when it trains, or joins the one that the program starts."""

    def __init__(self) -> None:
        self._packages: list[str] = []
        self._torch: TrainingDetector | None = None
        self._jax: JaxTrainingDetector | None = None
        self._over = False
        # A failure is not retried: the program continues without instrumentation.
        self._guard = Guard("observing this program", limit=1)
        api.when_started.append(self._end_wait)
        os.register_at_fork(after_in_child=self._in_fork)

    def wait(self, package: str) -> None:
        """Starts waiting for a sign of this package."""
        self._packages.append(package)
        if not self._over:
            active_session.wanted = self._wanted
            self._wait(package)
        elif package == "torch" and (session := api.current()) is not None:
            session.add()  # it began with JAX
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
        waiting = self._jax or self._torch
        if waiting is not None:
            waiting.sign()

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
        """Stops waiting; the finder of models stays."""
        self._over = True
        active_session.wanted = None
        for waiting in (self._torch, self._jax):
            if waiting is not None:
                waiting.stop()

    def _give_up(self) -> None:
        """Stops waiting and looking for models."""
        if self._torch is not None:
            self._torch.finder.remove()
        self._stop()

    def _in_fork(self) -> None:
        """Waits again in a forked child, which inherits no session."""
        with self._guard:
            api.forget_in_fork()
            self._give_up()
            self._over, active_session.wanted = False, self._wanted
            for package in self._packages:
                self._wait(package)


def _is_loader_worker() -> bool:
    worker: Any = sys.modules.get("torch.utils.data._utils.worker")
    return worker is not None and worker.get_worker_info() is not None
