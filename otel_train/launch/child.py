"""What happens in a program below ``otel-train run`` once it has torch."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from otel_train import front
from otel_train.guard import Guard
from otel_train.launch.evidence import Evidence
from otel_train.launch.names import FOLDER

if TYPE_CHECKING:
    from otel_train.session import Session


def begin() -> None:
    """Wait for the first sign of training in this process, and in its forks."""
    Attachment(Path(os.environ[FOLDER])).wait()


class Attachment:
    """Starts the session of this process when it trains, or joins the one that the program starts itself.

    Args:
        folder: of the launcher; see ``otel_train.launch.claims``.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._evidence = Evidence(self._start)
        # What fails here is not tried again: the program runs on unobserved.
        self._guard = Guard("observing this program", limit=1)
        front.when_started.append(self._join)
        os.register_at_fork(after_in_child=self._in_fork)

    def wait(self) -> None:
        """Begin to wait."""
        self._evidence.wait()

    def _start(self) -> None:
        """The first sign of training, and the program has not asked for anything itself."""
        if _is_loader_worker():
            self._evidence.finder.remove()
            return
        with self._guard:
            front.instrument(**self._identity())
        if self._guard.faults:
            self._evidence.finder.remove()

    def _identity(self) -> dict[str, Any]:
        """Which run this is, where another process of this launch has taken the rank already."""
        from otel_train.launch.claims import claim
        from otel_train.runinfo import detect
        from otel_train.sources import settle

        info = detect(settle().config)
        number = claim(self._folder, info.rank)
        return {} if number == 1 else {"run_id": f"{info.run_id}-{number}"}

    def _join(self, session: Session | None) -> None:
        """A session has started, ours or the program's own; None: the program wants none."""
        if session is None:
            self._evidence.finder.remove()
            self._evidence.stop()
            return
        session.find_models(self._evidence.finder)  # first, so that a model of another thread is told to it
        self._evidence.stop()
        from otel_train.launch.will import Will

        Will.deposit(session, self._folder)

    def _in_fork(self) -> None:
        """A forked child has a session of its own, or none: what it inherited belongs to its parent."""
        with self._guard:
            front.forget_in_fork()
            self._evidence.finder.remove()
            self._evidence.stop()
            self._evidence = Evidence(self._start)
            self._evidence.wait()


def _is_loader_worker() -> bool:
    """Whether this process makes batches for another one."""
    worker: Any = sys.modules.get("torch.utils.data._utils.worker")
    return worker is not None and worker.get_worker_info() is not None
