"""The session: creates, connects and closes the components of telemetry in a process."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType, TracebackType
from typing import TYPE_CHECKING, Any

from otel_train.agent.client import AgentClient
from otel_train.config.settings import BLOCKS
from otel_train.config.validation import words_of
from otel_train.datamodel import Anchor
from otel_train.errors import one_of, text
from otel_train.exit_hook import ENDS, ExitHook, Terminated, cause_of, end_by_sigterm
from otel_train.instrumentation.naming import Loader, named_loaders, named_models
from otel_train.recording.ring_buffer import EXTENSION
from otel_train.safety import Handle, sigchld_deferred

if TYPE_CHECKING:
    from pathlib import Path

    from otel_train.config import Config
    from otel_train.instrumentation.root_modules import RootFinder
    from otel_train.instrumentation.timers import Token
    from otel_train.profiler.endpoint import EpochCaptures, NoEpochCaptures
    from otel_train.resource import RunInfo


class Session:
    """The telemetry of this process, from ``instrument`` to ``close``.

    Made by ``otel_train.instrument``. Also a context manager: leaving the block closes it.

    Args:
        config: how the run is observed.
        environ: the process environment.
        origins: where settings come from; see ``otel_train.config.sources``.

    Raises:
        ConfigError: a setting cannot be honoured.
        OSError: no descriptor is left.
        RuntimeError: no thread can be started.
    """

    def __init__(
        self,
        config: Config,
        environ: Mapping[str, str] | None = None,
        *,
        origins: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        environ = os.environ if environ is None else environ
        self.config = config
        self.closed = False
        self._pid = os.getpid()
        self._service = AgentClient(config, environ, origins=origins, anchor=Anchor.now())
        self._recording = self._service.recording
        self._exit_hook = ExitHook(
            self.close,
            lambda: self._recording.recorder.main.ring,
            self._recording.memory.signal_word,
            EXTENSION,
        )
        self._service.when_needed_at_end = self._exit_hook.close_first
        self._exit_hook.install()
        try:
            with self._exit_hook.starting():
                self._service.start()
        except BaseException as error:
            self._exit_hook.remove()
            if isinstance(error, Terminated):
                end_by_sigterm()
            raise

    def __repr__(self) -> str:
        here = "recording" if os.getpid() == self._pid else f"recording in process {self._pid} only"
        state = "closed" if self.closed else here
        return f"<otel_train.Session: rank {self.info.rank} of run {self.info.run_id!r}, {state}>"

    @property
    def info(self) -> RunInfo:
        """Identity of the run and the rank."""
        return self._service.info

    # -- public methods --------------------------------------------------------------------------

    def add(self, model: Any = None, loaders: Any = None) -> None:  # Any: see ``instrument``
        """Instruments more models and loaders. What is instrumented already is not instrumented twice.

        Raises:
            ConfigError: a model is no Module, a loader cannot be iterated, a name is used twice.
        """
        models, entries = named_models(model), named_loaders(loaders)
        self._recording.watch_torch()
        for entry in entries:
            self._recording.probes.add_loader(entry)
        for name, module in models.items():
            self._recording.probes.add_model(name, module)
        if models:
            self._recording.probes.follow_compiled()

    def track(self, given: Mapping[str, Any]) -> None:
        """Logs to runs and writers that the program has, by the name of the setting.

        Raises:
            ConfigError: one of them cannot be logged to.
        """
        self._service.track(given)

    def provide(self, meters: Any = None, tracers: Any = None) -> None:  # Any: providers of the SDK
        """Exports by way of OpenTelemetry providers of the program's own as well.

        Raises:
            ConfigError: one of them is none of the SDK's.
        """
        self._service.provide({"meters": meters, "tracers": tracers})

    def find_models(self, finder: RootFinder | None = None) -> None:
        """Watches every model that ``finder`` meets, until the session closes; None: unless models were given, or that is done already."""
        self._recording.probes.find_models(finder)

    def show_blocks(self, blocks: Iterable[str]) -> None:
        """Prints these blocks on the console, in addition to ``console_metrics``.

        Raises:
            ConfigError: one of them does not exist.
        """
        names = words_of(blocks) if isinstance(blocks, str) else list(blocks)
        self._service.show_blocks(frozenset(one_of("show_blocks([{}])", block, BLOCKS) for block in names))

    def epoch_captures(self) -> EpochCaptures | NoEpochCaptures:
        """Captures that begin and end with epochs, for callbacks of frameworks."""
        return self._service.captures.of_epochs()

    def let_go_in_fork(self) -> None:
        """Takes out the hooks in a forked child, and leaves files, threads and sockets to the parent."""
        if os.getpid() != self._pid:
            self._recording.end()

    def watch(self, iterable: Any, *, name: str, phase: str = "") -> Any:  # Any: any iterable
        """Watches one more iterable; returns what to iterate.

        Raises:
            ConfigError: it cannot be iterated, or name or phase is none.
        """
        text("watch(..., name={})", name, "Give the name that metrics show")
        (entry,) = named_loaders(Loader(iterable, name=name, phase=phase))
        self._recording.watch_torch()
        return self._recording.probes.watch(entry)

    @property
    def loaders(self) -> dict[str, Any]:
        """What to iterate, by name: a DataLoader itself, any other iterable wrapped. Only the program keeps alive what ``watch`` returns."""
        return self._recording.probes.iterables

    @property
    def run_directory(self) -> Path | None:
        """Folder of this run; None when it could not be made."""
        return self._service.run_directory

    @property
    def metrics_url(self) -> str | None:
        """Address of ``/metrics``; None when it is not served."""
        return self._service.metrics_url

    def log(self, values: Mapping[str, Any] | None = None, /, **named: Any) -> None:
        """Hands over values; see ``otel_train.log``."""
        if values is not None:
            self._recording.values.log(values)
        if named:
            self._recording.values.log(named)

    def event(self, name: str, attributes: Mapping[str, Any] | None = None, **named: Any) -> None:
        """Records an event with attributes; see ``otel_train.event``."""
        given = named if attributes is None else {**attributes, **named} if named else attributes
        self._recording.values.event(name, given)

    def capture(self, **request: Any) -> str:
        """Captures the next steps with ``torch.profiler``; see ``otel_train.capture``."""
        return self._service.captures.capture(request)

    def begin(self, name: str) -> Token:
        """Begins to time an operation; see ``otel_train.begin``."""
        return self._recording.timers.begin(name)

    def end(self, token: Token) -> None:
        """Ends what ``begin`` began."""
        self._recording.timers.end(token)

    def report(self) -> None:
        """Logs now: rows of trackers, blocks on the console, the run summary. Does not wait."""
        self._recording.stages.report()

    def on(
        self,
        stage: str,
        *,
        before: Callable[[], object] | None = None,
        after: Callable[[], object] | None = None,
    ) -> Handle:
        """Registers callbacks before and after each call of a stage, on the calling thread.

        (From a thread that runs no stages: on the thread that started the session.) Their time is not part of
        the stage. A callback that fails is logged once, counted, and switched off after three failures.
        A stage inside itself, and a forward that backward repeats, are not runs of their own. Without callbacks this costs nothing.

        Args:
            stage: ``data``, ``h2d``, ``forward``, ``backward``, ``optimizer``, ``checkpoint``, or a user-defined one.
            before: called without arguments.
            after: called without arguments, also when the stage raised.

        Returns:
            What takes it back: ``remove()``.

        Raises:
            ConfigError: there is nothing to call, or the stage is none.
        """
        return self._recording.on(stage, before, after)

    @property
    def last_loader_name(self) -> str | None:
        """Loader of the batch that the calling thread fetched last; None if it has fetched none."""
        return self._recording.last_batch.loader

    @property
    def last_batch_fetch_ms(self) -> float | None:
        """Milliseconds that the calling thread waited for that batch, inside ``next()``; None if not known."""
        return self._recording.last_batch.fetch_ms

    def cache(self, name: str, *, size: Callable[[], int]) -> Handle:
        """Counts a cache of the program's own as memory: ``size()`` gives its bytes, called on a thread of otel_train.

        Raises:
            ConfigError: it cannot be called, or has no name.
        """
        return self._service.caches.add(name, size)

    def summary(self) -> dict[str, Any]:
        """Returns the summary up to now, or since ``reset_window``, as in ``summary.json``.

        It has no steps before the eighth update, or before 5 s have passed since the first: what they are counted by is not known.
        After ``close`` it is that of the end; waits for an agent that has not answered yet. Empty in a fork, and without an agent.
        """
        if os.getpid() != self._pid:
            return {}
        return self._service.summary(self._exit_hook.state)

    def reset_window(self) -> None:
        """Lets ``summary()`` start from now. Metrics and ``summary.json`` still count from the start."""
        if os.getpid() == self._pid:
            self._service.reset_window()

    def instrumentation_gaps(self) -> list[dict[str, str]]:
        """Returns what could not be instrumented, with reason and remedy."""
        return self._service.instrumentation_gaps()

    unobserved = instrumentation_gaps  # the former name, for one release

    def close(self, state: str = "") -> None:
        """Exports the remaining data and removes all instrumentation: hooks, patches, threads, sockets, files.

        Args:
            state: how the run ended; determined when empty.

        Raises:
            ConfigError: ``state`` is not an end state.
        """
        one_of("close({})", state, ("", *ENDS))
        if self.closed or os.getpid() != self._pid:
            return
        self.closed = True
        try:
            with sigchld_deferred():
                self._exit_hook.hold()
                self._exit_hook.set_state(state)
                self._service.close(
                    self._exit_hook.state, cause=self._exit_hook.cause, assumed=self._exit_hook.assumed
                )
        finally:  # also where Ctrl-C ends this
            self._exit_hook.remove()

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        # Not from ``sys.exc_info()``: if the block is in an except clause, that is the exception handled there.
        self._exit_hook.cause = cause_of(error)
        self.close("finished" if kind is None else self._exit_hook.of(error))
