"""What happens in a program below ``otel-train run`` once it has torch or JAX."""

from __future__ import annotations

import os
import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

from otel_train import api
from otel_train.instrumentation.stages import active_session
from otel_train.safety import Guard

if TYPE_CHECKING:
    from otel_train.autoinstrument.jax_detector import JaxEvidence
    from otel_train.autoinstrument.training_detector import TrainingDetector
    from otel_train.session import Session

_NEEDED = ("otel_train.config.sources", "otel_train.session")

_attachments: list[Attachment] = []


def begin(package: str) -> None:
    """Wait for the first sign of training in this process, and in its forks.

    Args:
        package: what has been imported: ``torch`` or ``jax``.
    """
    if not _attachments:
        _attachments.append(Attachment())
    _attachments[0].wait(package)


class Attachment:
    """Starts the session of this process when it trains, or joins the one that the program starts itself."""

    def __init__(self) -> None:
        self._packages: list[str] = []
        self._torch: TrainingDetector | None = None
        self._jax: JaxEvidence | None = None
        self._over = False
        # What fails here is not tried again: the program runs on unobserved.
        self._guard = Guard("observing this program", limit=1)
        api.when_started.append(self._join)
        os.register_at_fork(after_in_child=self._in_fork)

    def wait(self, package: str) -> None:
        """Begin to wait for a sign by this package."""
        self._packages.append(package)
        if not self._over:
            active_session.wanted = self._wanted
            self._wait(package)
        elif package == "torch" and (session := api.current()) is not None:
            session.add()  # it began with JAX
            session.find_models()

    def _wait(self, package: str) -> None:
        if package == "jax":
            from otel_train.autoinstrument.jax_detector import JaxEvidence

            self._jax = JaxEvidence(self._start)
            self._jax.wait()
        else:
            from otel_train.autoinstrument.training_detector import TrainingDetector

            self._torch = TrainingDetector(self._start, self._prepare)
            self._torch.wait()

    def _wanted(self) -> None:
        """The program calls a function of ours that needs a session."""
        waiting = self._jax or self._torch
        if waiting is not None:
            waiting.sign()

    def _start(self) -> None:
        """The first sign of training, and the program has not asked for anything itself."""
        if _is_loader_worker():
            self._give_up()
            return
        with self._guard:
            api.instrument()
        if self._guard.faults:
            self._give_up()

    def _prepare(self) -> None:
        """Import what a session needs: at the first sign of training that would be a part of the first wait."""
        if not _is_loader_worker():
            with self._guard:
                for name in _NEEDED:
                    import_module(name)

    def _join(self, session: Session | None) -> None:
        """A session has started, ours or the program's own; None: the program wants none."""
        if session is None:
            self._give_up()
            return
        if self._torch is not None:
            # First, so that a model of another thread is told to it.
            session.find_models(self._torch.finder)
        self._stop()

    def _stop(self) -> None:
        """Wait no longer; the finder of models goes on."""
        self._over = True
        active_session.wanted = None
        for waiting in (self._torch, self._jax):
            if waiting is not None:
                waiting.stop()

    def _give_up(self) -> None:
        """Wait no longer, and look for no models."""
        if self._torch is not None:
            self._torch.finder.remove()
        self._stop()

    def _in_fork(self) -> None:
        """A forked child has a session of its own, or none: what it inherited belongs to its parent."""
        with self._guard:
            api.forget_in_fork()
            self._give_up()
            self._over, active_session.wanted = False, self._wanted
            for package in self._packages:
                self._wait(package)


def _is_loader_worker() -> bool:
    """Whether this process makes batches for another one."""
    worker: Any = sys.modules.get("torch.utils.data._utils.worker")
    return worker is not None and worker.get_worker_info() is not None
