"""Components of the training process besides recording: captures, trackers, providers, the exchange between ranks."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from otel_train.agent.reports import has_automatic_captures, may_use_trackers, uses_trackers
from otel_train.safety import Guard

if TYPE_CHECKING:
    from otel_train.agent.captures import RankCaptures
    from otel_train.agent.client import AgentClient
    from otel_train.agent.messages import Opened
    from otel_train.config.settings import Config
    from otel_train.datamodel import Anchor
    from otel_train.distributed.store import Exchange
    from otel_train.exporters.plugins import PluginExporter
    from otel_train.recording.recorder import Recorder
    from otel_train.trackers.manager import Trackers


_COMPONENTS = ("trackers", "captures", "flops", "ranks", "console", "your providers", "agent")
"""Components of the training process that the service thread runs; ``agent``: requests that concern none of the others."""


class LazyComponents:
    """Captures, trackers, providers and the exchange between ranks, each imported and made when something first needs it.

    Attributes:
        trackers: the trackers; None until they are made.
        may_use_trackers: whether the settings allow a tracker on this rank, now or later.
        made_captures: profiler captures and the FLOP count; None until they are needed.
        exchange: exchange of reports between ranks; None until there is a process group.
        providers: exports to the program's own OpenTelemetry providers; None without any.
        signal: handler of SIGUSR2.
        guards: by component, for the service thread.
    """

    def __init__(self, client: AgentClient, config: Config, anchor: Anchor) -> None:
        self._client = client
        self._config = config
        self._anchor = anchor
        self._main = threading.get_ident()
        self._making = threading.Lock()
        self.trackers: Trackers | None = None
        self.may_use_trackers = False
        self.made_captures: RankCaptures | None = None
        self.exchange: Exchange | None = None
        self.providers: PluginExporter | None = None
        self.signal = CaptureSignal(client.recording.recorder)
        self.guards = {part: Guard(part) for part in _COMPONENTS}

    def preload(self, ranks: int) -> None:
        """Imports the modules that the service thread will need: an import during training would hold the GIL."""
        wanted = []
        if ranks > 1:
            wanted.append("otel_train.distributed.store")
        if uses_trackers(self._config):
            wanted += ["otel_train.trackers.manager", "otel_train.instrumentation.dataset_size"]
        if has_automatic_captures(self._config):
            wanted += ["otel_train.agent.captures", "otel_train.profiler.endpoint"]
        if self._counts_flops:
            wanted += ["otel_train.agent.captures", "otel_train.profiler.flops"]
        for name in wanted:
            import_module(name)

    def on_opened(self, opened: Opened, *, makes: bool) -> None:
        """Makes the components that the settings request from the start, if ``makes``."""
        self.may_use_trackers = opened.info.rank == 0 and may_use_trackers(self._config)
        if not makes:
            return
        with self.guards["trackers"]:
            if uses_trackers(self._config):
                self.make_trackers()
        with self.guards["captures"]:
            if has_automatic_captures(self._config):
                self.captures.set_up()
        with self.guards["flops"]:
            if self._counts_flops:
                self.captures.count_flops()

    @property
    def _counts_flops(self) -> bool:
        return self._config.flops == "auto" and not self._config.flops_per_sample

    @property
    def needs_program(self) -> bool:
        """Whether a component has work that only this process can finish."""
        trackers, captures = self.trackers, self.made_captures
        return (
            self.providers is not None
            or (trackers is not None and trackers.listened())
            or (captures is not None and captures.recording)
        )

    # -- the components ------------------------------------------------------------------------------

    @property
    def captures(self) -> RankCaptures:
        """Profiler captures and the FLOP count."""
        if self.made_captures is None:
            from otel_train.agent.captures import RankCaptures

            with self._making:
                if self.made_captures is None:
                    self.made_captures = RankCaptures(self._client, self._config, self._anchor)
        return self.made_captures

    def make_trackers(self) -> None:
        """Makes the trackers, on rank 0 and once the run directory is open."""
        opened = self._client.opened
        if opened is None or opened.info.rank != 0:
            return
        from otel_train.trackers.manager import Trackers

        import_module("otel_train.instrumentation.dataset_size")  # trackers log the sizes
        with self._making:
            if self.trackers is None:
                folder = Path(opened.run_directory) if opened.run_directory else None
                self.trackers = Trackers(
                    self._config, folder, thread=self._main, before_finish=self._client.hand_over
                )

    def provide(self, opened: Opened, providers: Mapping[str, Any]) -> None:
        """Makes the export to providers of the program. See ``Session.provide``."""
        from otel_train.exporters.otel_providers import ProviderExporter
        from otel_train.exporters.plugins import PluginExporter

        exporter = ProviderExporter(opened.resource, **providers)
        self.providers = PluginExporter("your providers", exporter, self._config.exit_timeout_s)

    def connect_ranks(self, which: dict[str, Any]) -> None:
        """Makes the exchange with the other ranks. ``which``: see ``Exchange``."""
        from otel_train.distributed.store import Exchange, connect

        self.exchange = Exchange(connect, arrived=self._client.recording.recorder.changed, **which)

    # -- the service thread ------------------------------------------------------------------------

    @property
    def capture_is_requested(self) -> bool:
        """Whether a signal, a file or an out-of-memory error requests a capture."""
        guard, captures = self.guards["captures"], self.made_captures
        if self._config.profiler == "off" or guard.closed:
            return False
        with guard:
            requested = self.signal.received or (
                captures is not None and captures.account.request is not None
            )
            none_yet = captures is None or captures.capturing is None
            return bool(requested or (none_yet and self._client.recording.devices.ooms()))
        return False

    def poll(self) -> None:
        """Runs one iteration: makes trackers if a tracker package was imported meanwhile, and runs captures."""
        guard = self.guards["trackers"]
        if self.trackers is None and uses_trackers(self._config) and not guard.closed:
            with guard:
                self.make_trackers()
        requested = self.capture_is_requested
        if requested or self.made_captures is not None:
            self.captures.poll(asked=requested)

    # -- the end -----------------------------------------------------------------------------------

    def stop_captures(self) -> None:
        """Ends a running capture."""
        if self.made_captures is not None:
            self.made_captures.stop()

    def end_captures(self, timeout_s: float) -> None:
        """Writes the last capture."""
        if self.made_captures is not None:
            self.made_captures.end(timeout_s)

    def close(self, state: str, timeout_s: float) -> None:
        """Closes providers, trackers and exchange, each within ``timeout_s``. ``state``: how the run ended."""
        if self.trackers is not None:
            self.trackers.state = state
        for component in (self.providers, self.trackers, self.exchange):
            if component is not None:
                component.close(timeout_s)


class CaptureSignal:
    """Handler of SIGUSR2, which requests a capture.

    Attributes:
        received: number of signals that were not handled yet.
        in_use: whether the session of this process has not ended.
    """

    def __init__(self, recorder: Recorder) -> None:
        self.received = 0
        self._recorder = recorder
        self.in_use = True

    def install(self) -> None:
        """Sets the handler if the program has none. SIGUSR2 without a handler ends the process."""
        if threading.current_thread() is not threading.main_thread():
            return
        handler: Callable[..., Any] | int | None = signal.getsignal(signal.SIGUSR2)
        # A previous session that another thread closed could not remove its handler.
        before = getattr(handler, "__self__", None)
        if handler is signal.SIG_DFL or (isinstance(before, CaptureSignal) and not before.in_use):
            signal.signal(signal.SIGUSR2, self._receive)

    def _receive(self, *_: object) -> None:
        self.received += 1
        self._recorder.changed()

    def remove(self) -> None:
        """Removes the handler, which only the main thread can do."""
        self.in_use = False
        on_main = threading.current_thread() is threading.main_thread()
        if on_main and signal.getsignal(signal.SIGUSR2) == self._receive:
            signal.signal(signal.SIGUSR2, signal.SIG_DFL)
