"""What works in the training process besides recording: captures, trackers, providers, the exchange between ranks."""

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


class LazyComponents:
    """Captures, trackers, providers and the exchange between ranks, each imported and made when something first needs it.

    Args:
        client: the connection to the agent, which the components ask.
        config: which of them may be made.
        anchor: of the clock.

    Attributes:
        trackers: what is logged to; None for none yet.
        may_use_trackers: there may be a tracker to log to, now or later.
        made_captures: profiler captures and the FLOP count; None until something needs them.
        exchange: of records between ranks, once there is a process group.
        providers: exports to the program's own OpenTelemetry providers.
        signal: SIGUSR2.
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

    def preload(self, ranks: int) -> None:
        """Imports what the service thread needs: an import during training would hold the GIL."""
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
        """Makes what is wanted from the start, where ``makes``."""
        self.may_use_trackers = opened.info.rank == 0 and may_use_trackers(self._config)
        if not makes:
            return
        with Guard("trackers"):
            if uses_trackers(self._config):
                self.make_trackers()
        with Guard("captures"):
            if has_automatic_captures(self._config):
                self.captures.set_up()
        with Guard("flops"):
            if self._counts_flops:
                self.captures.count_flops()

    @property
    def _counts_flops(self) -> bool:
        return self._config.flops == "auto" and not self._config.flops_per_sample

    @property
    def needs_program(self) -> bool:
        """Whether one of them has something that only this process can finish."""
        trackers, captures = self.trackers, self.made_captures
        return (
            self.providers is not None
            or (trackers is not None and trackers.listened())
            or (captures is not None and captures.recording)
        )

    # -- each of them ------------------------------------------------------------------------------

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
        """Makes what is logged to, on rank 0 and once the run directory is open."""
        opened = self._client.opened
        if opened is None or opened.info.rank != 0:
            return
        from otel_train.trackers.manager import Trackers

        import_module("otel_train.instrumentation.dataset_size")  # of what is logged to them
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
        if self._config.profiler == "off":
            return False
        captures = self.made_captures
        asked = self.signal.received or (captures is not None and captures.account.request is not None)
        none_yet = captures is None or captures.capturing is None
        return bool(asked or (none_yet and self._client.recording.devices.ooms()))

    def poll(self) -> None:
        """Runs one iteration: trackers of packages imported since, and captures."""
        if self.trackers is None and uses_trackers(self._config):
            with Guard("trackers"):
                self.make_trackers()
        asked = self.capture_is_requested
        if asked or self.made_captures is not None:
            self.captures.poll(asked=asked)

    # -- the end -----------------------------------------------------------------------------------

    def stop_captures(self) -> None:
        """Ends what is recorded now."""
        if self.made_captures is not None:
            self.made_captures.stop()

    def end_captures(self, timeout_s: float) -> None:
        """Writes what was recorded."""
        if self.made_captures is not None:
            self.made_captures.end(timeout_s)

    def close(self, timeout_s: float) -> None:
        """Closes all others, each within the limit."""
        for component in (self.providers, self.trackers, self.exchange):
            if component is not None:
                component.close(timeout_s)


class CaptureSignal:
    """Requests of captures by SIGUSR2.

    Attributes:
        received: signals that no capture has answered yet.
        in_use: the session of this process has not ended.
    """

    def __init__(self, recorder: Recorder) -> None:
        self.received = 0
        self._recorder = recorder
        self.in_use = True

    def install(self) -> None:
        """Handles SIGUSR2 if the program does not: its default action ends the process."""
        if threading.current_thread() is not threading.main_thread():
            return
        handler: Callable[..., Any] | int | None = signal.getsignal(signal.SIGUSR2)
        # A session that another thread closed could not remove its own handler.
        before = getattr(handler, "__self__", None)
        if handler is signal.SIG_DFL or (isinstance(before, CaptureSignal) and not before.in_use):
            signal.signal(signal.SIGUSR2, self._receive)

    def _receive(self, *_: object) -> None:
        self.received += 1
        self._recorder.changed()

    def remove(self) -> None:
        """Leaves the signal to the program; only the main thread can."""
        self.in_use = False
        on_main = threading.current_thread() is threading.main_thread()
        if on_main and signal.getsignal(signal.SIGUSR2) == self._receive:
            signal.signal(signal.SIGUSR2, signal.SIG_DFL)
