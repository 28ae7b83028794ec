"""A session: the parts of the telemetry of one process, built, wired, and undone."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any

from otel_train.aggregate.run import RunAccount
from otel_train.aggregate.signals import Signals
from otel_train.aggregate.traces import Ids, Tracer
from otel_train.capturing.build import Capturing
from otel_train.children import deaths_held_back
from otel_train.chores import before_reading, looking_after
from otel_train.clock import Anchor, system_clock
from otel_train.errors import ConfigError
from otel_train.export.document import Documents, Window
from otel_train.export.estate import Estate, Known, known_loaders
from otel_train.export.live import Health, Reporter
from otel_train.export.notes import NoteReader
from otel_train.export.profile import keep_rules, profile_of
from otel_train.export.pump import Breath, Chore, Pump, Route
from otel_train.export.ranks import Ranks
from otel_train.export.routes import Routes
from otel_train.guard import Guard
from otel_train.outcome import Outcome
from otel_train.record.given import Loader, named_loaders, named_models
from otel_train.recording import Recording
from otel_train.records import Batch
from otel_train.runinfo import detect, resource_attributes
from otel_train.unobserved import Missing, unobserved
from otel_train.wiring import job_of, readings_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path
    from types import TracebackType

    from otel_train.config import Config
    from otel_train.record.roots import RootFinder

NS_PER_S = 10**9


class Session:
    """The telemetry of this process, from ``instrument`` to ``close``.

    Made by ``otel_train.instrument``. Also a context manager: leaving the block closes it.

    Args:
        config: how the run is observed.
        environ: the process environment.
    """

    def __init__(self, config: Config, environ: Mapping[str, str] = os.environ) -> None:
        self.config = config
        self.closed = False
        self._pid = os.getpid()
        self._window: Window | None = None
        self._printed_step = 0
        anchor = self._anchor = Anchor.now()
        info = detect(config, environ)
        self._routes = Routes.open(config, info, environ)
        self.info = info.with_attempt(self._routes.attempt)
        self._profile = profile_of(config, self.info)
        # What the launcher counts is the same on all ranks; what lies in a rank's folder need not be.
        self._key_prefix = f"otel_train/{info.attempt}"
        self._recording = Recording(
            config, self.info, anchor=anchor, environ=environ, flight_path=self._routes.flight_path
        )
        self._recorder = self._recording.recorder
        self._aggregate(anchor)
        try:
            self._capturing = Capturing(
                config, self.info, run=self._run, recorder=self._recorder,
                rank_folder=self._routes.rank_folder, ooms=self._recording.devices.ooms,
            )  # fmt: skip
            self._resource = {
                **resource_attributes(self.info, environ),
                "train.export.profile": self._profile.name,
            }
            self._routes.connect(self._pump.routes, self._resource, self._profile)
        except ConfigError:
            self._recording.end()
            self._routes.close(0)
            self._recording.close()
            raise
        self._start(anchor)

    def _aggregate(self, anchor: Anchor) -> None:
        """The pump's side."""
        config, breath = self.config, Breath(system_clock)
        self._tracer = Tracer(Ids(self.info.run_id, self.info.attempt, self.info.rank), anchor)
        self._run = RunAccount(
            anchor.clock_ns, anchor=anchor, tracer=self._tracer, rules=keep_rules(config, self._profile),
            stall_after_s=config.stall_after_s, breathe=breath,
        )  # fmt: skip
        self._run.down_s = self._routes.down_s(anchor.unix_ns)
        signals = self._signals = Signals()
        health = Health(self._drops, self._faults, self._overhead_s, self.unobserved)
        readings = readings_of(self._recording, self._run, signals, health, config=config, anchor=anchor)
        self._hardware, self._watch = readings.hardware, readings.watch
        self._reporter = Reporter(self._run, readings, info=self.info, config=config, breathe=breath)
        job = job_of(self._recording, self._reporter, prefix=self._key_prefix)
        self._ranks = Ranks(self._run, self.info, config=config, job=job, clock=system_clock, breathe=breath)
        self._reporter.more.append(self._ranks.write)
        self._notes_reader = NoteReader(self._recording.notes, signals, self._run)
        self._pump = Pump(
            self._recorder, self._run, snapshot=self._reporter.snapshot, clock=system_clock,
            breath=breath, every_s=config.turn_every_s,
        )  # fmt: skip
        self._pump.first += before_reading(
            self._recording, self._run, watch=self._watch, signals=signals, breath=breath
        )
        self._documents = Documents(
            self._run, self.info, pump=self._pump, routes=self._routes, health=health, ranks=self._ranks,
            loaders=self._watch.facts,
        )  # fmt: skip
        self._missing = Missing(self._run, self._recording.probes)
        self._outcome = Outcome(self.close)

    def _start(self, anchor: Anchor) -> None:
        notes_guard = Guard("logged values")
        # A step is judged when it is read: what was logged in it must be known by then.
        self._pump.first.append(Chore(self._notes_reader.read, notes_guard, 0.0))
        self._pump.chores += [
            *looking_after(self._recording, self._watch),
            Chore(self._notes_reader.tell, notes_guard, 0.0),
            Chore(self._write_summary, Guard("summary"), self.config.summary_every_s),
            Chore(lambda: self._capturing.turn(self._pump.settle), Guard("captures"), 0.0),
            Chore(self._ranks.turn, Guard("ranks"), 0.0),
            Chore(self._print_progress, Guard("console"), 0.0),
            Chore(self._missing.tell, Guard("unobserved"), 2.0),
        ]
        self._run.teller.span(self._tracer.run_start(anchor.clock_ns, system_clock()))
        self._recording.begin()
        with Guard("captures"):
            self._capturing.open(self._routes.on_post)
        self._outcome.watch()
        self._pump.start()

    # -- what the user calls ---------------------------------------------------------------------

    def add(self, model: Any = None, loaders: Any = None) -> None:  # Any: see ``instrument``
        """Watch more models and loaders. What is watched already is not watched twice.

        Raises:
            ConfigError: a model is no Module, a loader cannot be iterated, a name is used twice.
        """
        models, entries = named_models(model), named_loaders(loaders)
        self._recording.watch_torch()
        for entry in entries:
            self._recording.probes.add_loader(entry)
        for name, one in models.items():
            self._recording.probes.add_model(name, one)

    def find_models(self, finder: RootFinder) -> None:
        """Watch every model that ``finder`` meets, until the session closes."""
        self._recording.probes.find_models(finder)

    def add_route(self, route: Route) -> None:
        """Export to somebody else as well: an empty batch at once, while nothing moves."""
        with self._pump.lock:
            route.exporter.export(Batch())
            self._pump.routes.append(route)

    def estate(self) -> Estate | None:
        """What is known now; None without a run directory. Called by an exporter: nothing moves meanwhile."""
        if self.run_directory is None:
            return None
        pump, loaders = self._pump, known_loaders(self._recording.probes.loaders)
        known = Known(
            pump.edges, pump.missed, pump.cpu_s, self._overhead_s(), self._drops(), pump.faults(),
            self.unobserved(), dict(self._watch.worker_exits),
        )  # fmt: skip
        return Estate(
            self.config, self.info, self._resource, self._anchor, self._run, self._signals, loaders, known,
            pump.positions(), pump.waiting, self.run_directory,
        )  # fmt: skip

    def let_go_in_fork(self) -> None:
        """In a forked child: take out the hooks, and leave files, threads and sockets to the parent."""
        if os.getpid() != self._pid:
            self._recording.end()

    def watch(self, iterable: Any, *, name: str, phase: str = "") -> Any:  # Any: any iterable
        """Watch one more iterable; what to iterate."""
        self.add(loaders=Loader(iterable, name=name, phase=phase))
        return self.loaders[name]

    @property
    def loaders(self) -> dict[str, Any]:
        """What to iterate, by name: a DataLoader itself, any other iterable wrapped."""
        return self._recording.probes.iterables

    @property
    def run_directory(self) -> Path | None:
        """Folder of this run; None when it could not be made."""
        return self._routes.run_directory

    @property
    def metrics_url(self) -> str | None:
        """Address of ``/metrics``; None when it is not served."""
        return self._routes.metrics_url

    def log(self, values: Mapping[str, Any]) -> None:
        """Keep values; tensors are read later, by another thread."""
        self._recording.notes.log(values)

    def event(self, name: str, attributes: Mapping[str, Any]) -> None:
        """Note that something happened."""
        self._recording.notes.event(name, attributes)

    def capture(self, **request: Any) -> str:
        """Capture the next steps with ``torch.profiler``; see ``otel_train.capture``."""
        return self._capturing.ask(request)

    def summary(self) -> dict[str, Any]:
        """The figures up to now, or since ``reset_window``: what ``summary.json`` holds. Empty in a fork."""
        if os.getpid() != self._pid:
            return {}
        with self._pump.settled():
            return self._documents.write(self._outcome.state, self._window)

    def reset_window(self) -> None:
        """Let ``summary()`` start from now. Metrics and ``summary.json`` go on from the start."""
        if os.getpid() == self._pid:
            with self._pump.settled():
                self._window = self._documents.window()

    def unobserved(self) -> list[dict[str, str]]:
        """What could not be seen, with the reason and what to do."""
        return unobserved(self._run, self._recording.probes)

    def close(self, state: str = "") -> None:
        """Undo everything: hooks, patches, threads, sockets, files. The program goes on as if bare.

        Args:
            state: how the run ended; found out when empty.
        """
        if self.closed or os.getpid() != self._pid:
            return
        self.closed = True
        timeout_s, guard = self.config.exit_timeout_s, Guard("close")
        deadline = time.monotonic() + timeout_s
        parts: tuple[Callable[[], object], ...] = (
            lambda: self._outcome.settle(state),
            self._outcome.stop_watching,
            self._capturing.stop,
            self._recording.end,
            lambda: self._pump.stop(timeout_s / 2),
            self._last_turn,
            self._hardware.close,
            lambda: self._ranks.close(max(0.1, (deadline - time.monotonic()) / 2)),
            lambda: self._routes.close(max(0.1, deadline - time.monotonic())),
            self._recording.close,
        )
        with deaths_held_back():
            for part in parts:
                with guard:
                    part()

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self.close("" if kind is None else self._outcome.of(error))

    # -- inside ----------------------------------------------------------------------------------

    def _last_turn(self) -> None:
        now = system_clock()
        taken = self._pump.lock.acquire(timeout=self.config.exit_timeout_s / 2)
        try:
            self._pump.settle()
            self._run.close(now)
            with Guard("captures"):
                self._capturing.end(self.config.exit_timeout_s / 2)
            self._run.teller.span(self._tracer.run_end(now, self._run.step_number))
            self._reporter.state = "finished" if self._outcome.state == "finished" else "failed"
            self._pump.turn(final=True)
        finally:
            if taken:
                self._pump.lock.release()
        self._missing.tell(final=True)
        document = self._documents.write(self._outcome.state)
        self._routes.write_summary(document)
        if self.config.console:
            self._routes.print_card(document)

    def _overhead_s(self) -> float:
        """On the training thread, as sampled there."""
        return self._recording.spent_ns / NS_PER_S

    def _drops(self) -> dict[tuple[str, str], int]:
        return {
            **self._routes.drops(),
            ("spans", "sampled_out"): self._run.keeper.limited,
            ("records", "overrun"): self._pump.missed,
            ("records", "queue_full"): self._recording.notes.dropped + self._recording.devices.dropped,
            ("records", "serialization"): self._recording.notes.refused,
        }

    def _faults(self) -> dict[str, int]:
        hardware, faults = self._hardware.guard, self._pump.faults()
        return {
            hardware.part: hardware.faults,
            **faults,
            "ranks": faults.get("ranks", 0) + self._ranks.faults,
        }

    def _print_progress(self) -> None:
        every = self.config.log_every_steps
        if every and self.config.console and self._run.step_number // every > self._printed_step // every:
            self._printed_step = self._run.step_number
            self._routes.print_card(self._documents.write("running"))

    def _write_summary(self) -> None:
        self._routes.write_summary(self._documents.write("running"))
