"""Everything that an agent does, in a thread of the training process: ``agent="thread"``."""

from __future__ import annotations

import time
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from otel_train.artifacts.ending import write_at_the_end
from otel_train.export.routes import Routes
from otel_train.guard import Guard
from otel_train.pumping import Pumping
from otel_train.recording import Recording
from otel_train.records import Batch
from otel_train.runinfo import detect

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from otel_train.cache_sizes import CacheSizes
    from otel_train.capturing.epochs import EpochCaptures
    from otel_train.clock import Anchor
    from otel_train.config import Config
    from otel_train.export.document import Window
    from otel_train.export.estate import Estate
    from otel_train.export.pump import Route


class ThreadService:
    """The account of this process, its exports and its files.

    Args:
        config: how the run is observed.
        environ: the process environment.
        origins: where settings come from.
        anchor: one instant on both clocks.

    Attributes:
        info: who we are.
        recording: what writes.
        pumping: what reads.

    Raises:
        ConfigError: a setting cannot be honoured.
        OSError: no descriptor is left.
        RuntimeError: no thread can be started.
    """

    def __init__(
        self, config: Config, environ: Mapping[str, str], *, origins: Mapping[str, str], anchor: Anchor
    ) -> None:
        self._config = config
        self._window: Window | None = None
        info = detect(config, environ)
        with ExitStack() as undo:  # what has been set up when a part fails
            self._routes = Routes.open(config, info, environ, origins=origins)
            undo.callback(self._routes.close, 0)
            self.info = self._routes.info
            self.recording = Recording(
                config, self.info, anchor=anchor, environ=environ, flight_path=self._routes.flight_path
            )
            undo.callback(self.recording.close)
            undo.callback(self.recording.end)
            # What the launcher counts is the same on all ranks; what lies in a rank's folder need not be.
            self.pumping = Pumping(
                config, self.info, recording=self.recording, routes=self._routes, anchor=anchor,
                key_prefix=f"otel_train/{info.attempt}",
            )  # fmt: skip
            undo.callback(self.pumping.undo)
            self.pumping.connect(environ)
            self.pump = self.pumping.pump
            self._undo = undo.pop_all()

    def start(self) -> None:
        """Begin to record, and start the thread.

        Raises:
            RuntimeError: no thread can be started.
        """
        with self._undo:
            self.pumping.start()
            self._undo.pop_all()

    @property
    def caches(self) -> CacheSizes:
        """The program's own."""
        return self.pumping.caches

    @property
    def run_directory(self) -> Path | None:
        """Folder of this run; None when it could not be made."""
        return self._routes.run_directory

    @property
    def metrics_url(self) -> str | None:
        """Address of ``/metrics``; None when it is not served."""
        return self._routes.metrics_url

    def track(self, given: Mapping[str, Any]) -> None:
        """See ``Session.track``."""
        self.pumping.trackers.attach(given)

    def provide(self, providers: Mapping[str, Any]) -> None:
        """See ``Session.provide``."""
        with self.pump.lock:
            self._routes.through(providers)

    def show_blocks(self, blocks: frozenset[str]) -> None:
        """See ``Session.show_blocks``."""
        self.pumping.show_blocks(blocks)

    def epoch_captures(self) -> EpochCaptures:
        """See ``Session.epoch_captures``."""
        captures: EpochCaptures = self.pumping.capturing.of_epochs(self.pump.settled)
        return captures

    def capture(self, request: dict[str, Any]) -> str:
        """See ``Session.capture``."""
        refusal: str = self.pumping.capturing.ask(request)
        return refusal

    def add_route(self, route: Route) -> None:
        """See ``Session.add_route``."""
        with self.pump.lock:
            route.exporter.export(Batch())
            self.pump.routes.append(route)

    def estate(self) -> Estate | None:
        """See ``Session.estate``."""
        return self.pumping.estate()

    def summary(self, state: str) -> dict[str, Any]:
        """The figures up to now, or since ``reset_window``."""
        with self.pump.settled():
            return self.pumping.document(state, self._window)

    def reset_window(self) -> None:
        """Let ``summary`` start from now."""
        with self.pump.settled():
            self._window = self.pumping.window()

    def unobserved(self) -> list[dict[str, str]]:
        """What could not be seen."""
        return self.pumping.unobserved()

    def close(self, state: str) -> None:
        """Count to the end, export, and give everything back. Never raises.

        Args:
            state: how the run ended.
        """
        timeout_s, guard = self._config.exit_timeout_s, Guard("close")
        deadline = time.monotonic() + timeout_s
        parts: tuple[Callable[[], object], ...] = (
            self.pumping.capturing.stop,
            self.recording.end,
            lambda: self.pump.stop(timeout_s / 2),
            lambda: self.pumping.last_turn(state),
            lambda: self.pumping.close(max(0.1, (deadline - time.monotonic()) * 0.75)),
            lambda: self._routes.close(max(0.1, deadline - time.monotonic())),
            self.recording.close,
        )
        for part in parts:
            with guard:
                part()
        write_at_the_end(self._config, self.info.rank, self.run_directory)
