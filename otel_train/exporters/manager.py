"""Opens the exporters selected by the settings, and closes them in bounded time."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from otel_train.config.settings import CODE, ENVIRONMENT, SECRETS, Config, Origins, in_force, warn
from otel_train.config.validation import IgnoredSetting, address_of
from otel_train.console.summary import StepWindow, progress_line, render_run_summary
from otel_train.console.text import TextLayout
from otel_train.errors import ConfigError
from otel_train.exporters import Exporter, ExportRoute
from otel_train.exporters.background_queue import DiskQueue
from otel_train.exporters.otlp import OtlpExporter
from otel_train.exporters.otlp_json import OtlpLines
from otel_train.exporters.otlp_settings import OtlpSettings
from otel_train.exporters.otlp_transport import Connections, OtlpTransport
from otel_train.exporters.plugins import PluginExporter, load_plugins
from otel_train.exporters.prometheus import MetricsServers, PrometheusExporter
from otel_train.exporters.run_directory import RunDirectory, down_s, folder_name, total_down_s
from otel_train.exporters.spool import NAMES
from otel_train.files import dump_json
from otel_train.resource import VERSION, RunInfo, wrong_resource
from otel_train.safety import Guard

if TYPE_CHECKING:
    from otel_train.datamodel import AttributeValue, ExportBatch, Snapshot
    from otel_train.distributed.export_profile import Profile

_T = TypeVar("_T")

PROVIDED_EVERY_S = 5.0
"""Longest time between two snapshots for the program's own meter provider, whose readers collect at any time."""

LOSSES = ("queue_full", "shutdown", "export_failed", "rejected")
"""Reasons of losses that are exported from the start, with 0: a counter that first appears with 1 shows no increase to an alert.

Not ``serialization``, for a request that cannot be encoded: the next snapshot has the same counters.
"""

_log = logging.getLogger("otel_train")

_OTHER_RUN = "run_id=%r: another process has rank 0 of this run and goes on. This one is run %r; give each an id of its own"


class SharedExporters:
    """Exporters shared by all ranks of one agent; ``alone``: it serves one rank."""

    def __init__(self, *, alone: bool) -> None:
        self.alone = alone
        self.connections = Connections()
        self.servers = MetricsServers()


class ExportManager:
    """The run directory, OTLP, ``/metrics`` and the console of one session."""

    def __init__(
        self, config: Config, info: RunInfo, environ: Mapping[str, str], directory: RunDirectory,
        *, origins: Mapping[str, str], shared: SharedExporters,
    ) -> None:  # fmt: skip
        self._shared = shared
        known = directory.run_id  # "" in the folder that an agent before this one opened
        self.info = info.placed(known, directory.training, directory.attempt) if known else info
        self.origins = origins
        # Settings from the environment or a file that are wrong, and not used.
        self.ignored = list(origins.ignored) if isinstance(origins, Origins) else []
        self._ignore(*wrong_resource(environ))
        self._config = config
        self._environ = environ
        self._directory = directory
        self.disk = DiskQueue()  # writes everything once the run directory is open
        self._summary_guard = Guard("summary")
        # The layout of the training process's terminal, and a function that prints there; None for standard error.
        self.terminal: tuple[TextLayout, Callable[[str], object]] | None = None
        self._routes: list[ExportRoute] = []
        self._otlp: OtlpExporter | None = None
        self._prometheus: PrometheusExporter | None = None
        self._plugins: list[PluginExporter] = []

    @classmethod
    def make(
        cls, config: Config, info: RunInfo, environ: Mapping[str, str],
        *, origins: Mapping[str, str], shared: SharedExporters, again: bool = False,
    ) -> ExportManager:  # fmt: skip
        """Opens the run directory, or with ``again`` the one that an agent before this one opened; no exporters yet."""
        if again:
            directory = RunDirectory.again(
                Path(config.run_dir) / folder_name(info.run_id), info.rank, attempt=info.attempt,
                max_bytes=config.max_run_dir_bytes, owner=info.pid,
            )  # fmt: skip
        else:
            directory = RunDirectory.open(
                Path(config.run_dir), info.run_id, rank=info.rank, attempt=config.attempt if config.attempt >= 0 else None,
                restarts=info.attempt,
                run=_run_document(config, info, origins), max_bytes=config.max_run_dir_bytes, owner=info.pid,
            )  # fmt: skip
            if config.run_id and directory.run_id != info.run_id and info.rank == 0:
                _log.warning(_OTHER_RUN, info.run_id, directory.run_id)
        return cls(config, info, environ, directory, origins=origins, shared=shared)

    @property
    def flight_path(self) -> Path | None:
        """Path of the flight file; None if there is to be none."""
        return self._directory.flight_path if self._config.flight_recorder and self.rank_folder else None

    @property
    def run_directory(self) -> Path | None:
        """Folder of the run; None when it cannot be written."""
        return self._directory.path if self._directory.writable else None

    def down_s(self, started_unix_ns: int) -> float | None:
        """Returns the seconds between the previous attempt of the run and this one; None if that is not known."""
        rank = self.rank_folder
        return down_s(rank, self._directory.previous_attempt, started_unix_ns) if rank else None

    def total_down_s(self, down_s: float | None) -> float:
        """Returns the seconds between all attempts so far; ``down_s``: those between the previous one and this one."""
        rank = self.rank_folder
        return total_down_s(rank, self._directory.attempt, down_s) if rank else down_s or 0.0

    @property
    def metrics_url(self) -> str | None:
        """Address of ``/metrics``."""
        return self._prometheus.url if self._prometheus else None

    def document(self) -> dict[str, object]:
        """Entries of ``summary.json`` about paths, addresses and settings."""
        return {
            "metrics_url": self.metrics_url,
            "run_dir": str(self.run_directory) if self.run_directory else None,
            "settings_from": dict(self.origins),
            "settings_ignored": [setting.document() for setting in self.ignored],
        }

    def connect(
        self, routes: list[ExportRoute], resource: Mapping[str, AttributeValue], profile: Profile,
        snapshot: Callable[[], Snapshot | None],
    ) -> None:  # fmt: skip
        """Opens the exporters; for ``snapshot`` see ``PrometheusExporter``. ConfigError if an argument of the program is wrong."""
        every = profile.interval_s(self._config.export_interval_s)
        self._routes, self._profile, lines = routes, profile, OtlpLines(resource)
        settings = None  # read first: wrong variables are reported before a port is opened
        wish = self._config.otlp
        if wish != "off" and (profile.metrics or profile.spans):
            settings = OtlpSettings.read(
                self._environ, wanted=wish == "on",
                on_wrong=lambda *wrong: self._ignore(IgnoredSetting(wrong[0], ENVIRONMENT, *wrong[1:])),
            )  # fmt: skip
        self._plugins = self._or_default(
            "exporters", lambda wish: load_plugins(wish, resource, timeout_s=self._config.exit_timeout_s)
        )
        if self._config.prometheus and profile.metrics:
            with _or_without("/metrics"):
                self._prometheus = self._open_prometheus(resource, snapshot)
                self._add(self._prometheus, Guard("/metrics"), every)
        if settings is not None and settings.targets:
            with _or_without("OTLP export"):
                self._otlp = OtlpExporter(
                    settings, lines, directory=self.rank_folder,
                    transport=OtlpTransport(settings.targets, self._shared.connections), on_error=self._directory.note,
                )  # fmt: skip
                self._add(self._otlp, Guard("OTLP export"), every, self.disk)
        self._directory.describe(lines)
        self._add(self._directory, Guard("run directory"), every, self.disk)
        # Last, because exporters close in this order: plugins close on their own threads, while OTLP still sends.
        for plugin in self._plugins:
            self._add(plugin, plugin.guard, every)

    def _add(self, exporter: Exporter, guard: Guard, every_s: float, disk: DiskQueue | None = None) -> None:
        filtered = ProfileFilter(exporter, self._profile, guard, disk)
        self._routes.append(ExportRoute(filtered, guard, every_s))

    def _or_default(self, name: str, do: Callable[[Any], _T]) -> _T:  # Any: the value of a setting
        """Calls ``do`` with a setting, or with its default if the value is refused; raises if the program set it and waits."""
        try:
            return do(getattr(self._config, name))
        except ConfigError as error:
            origin = self.origins.get(name, CODE)
            if origin == CODE and self._is_awaited:
                raise
            default = Config()
            ignored = IgnoredSetting(name, origin, str(error))
            self._ignore(*in_force([ignored], default))
            return do(getattr(default, name))

    @property
    def _is_awaited(self) -> bool:
        """Whether ``instrument()`` waits for this, and can raise: the agent is a thread of the training process."""
        return self.info.pid == os.getpid()

    def _ignore(self, *ignored: IgnoredSetting) -> None:
        self.ignored += ignored
        warn(ignored)

    def add_elsewhere(self, exporter: Exporter) -> None:
        """Adds an exporter that lives in the training process."""
        self._add(exporter, Guard("your providers"), min(self._config.export_interval_s, PROVIDED_EVERY_S))

    def answer_captures(self, take: Callable[[bytes, str], tuple[int, object]]) -> None:
        """Lets ``take(body, token)`` answer ``POST /capture``, where ``/metrics`` is served."""
        if self._prometheus is not None:
            self._prometheus.answer_captures(take)

    @property
    def rank_folder(self) -> Path | None:
        """Folder of this rank; None when it cannot be written."""
        return self._directory.rank_path if self._directory.writable else None

    def drops(self) -> Mapping[tuple[str, str], int]:
        """Records not exported, by (signal, reason)."""
        if self._otlp is None:
            return {}
        lost = {(signal, reason): 0 for signal in ("metrics", "spans") for reason in LOSSES}
        lost.update({(NAMES[signal], why): number for (signal, why), number in self._otlp.drops.items()})
        return lost

    def lost(self) -> Mapping[str, int]:
        """Returns the number of batches and writes that plugins or the disk did not take, by component."""
        plugins = {one.guard.part: one.dropped for one in self._plugins}
        return {**plugins, "run directory": self.disk.dropped + self._directory.faults}

    def write_summary(self, summary: Mapping[str, Any], *, final: bool = False) -> None:
        """Replaces ``summary.json``; ``final``: no other follows."""
        text = dump_json(summary, indent=2)
        write = self.disk.do if final else self.disk.refresh
        write(self._summary_guard, lambda: self._directory.write_summary(text))

    def print_summary(self, summary: Mapping[str, Any]) -> None:
        """Prints the run summary on standard error, on rank 0: standard output is left to the program."""
        if (otlp := self._otlp) is not None:
            # Waiting requests are not counted: the disk may hang, and some may still be delivered before the end.
            waiting = None if otlp.failing else 0
            run = str(self.run_directory) if self.run_directory is not None else None
            left = {"waiting": waiting, "rejected": otlp.rejected, "unsaved": otlp.unsaved, "run": run}
            summary = {**summary, "undelivered": left}
        self._show(lambda page: render_run_summary(page, summary))

    def print_progress(self, summary: Mapping[str, Any], windows: Iterable[StepWindow]) -> None:
        """Prints one line per window of steps, in the same place."""
        self._show(lambda page: "".join(progress_line(page, window, summary) for window in windows))

    def _show(self, render: Callable[[TextLayout], str]) -> None:
        if self.info.rank != 0:
            return
        if self.terminal is not None:
            page, write = self.terminal
            write(render(page))
        elif sys.stderr is not None:
            sys.stderr.write(render(TextLayout.of(sys.stderr)))
            sys.stderr.flush()

    def close_files(self) -> None:
        """Closes the run directory and ``/metrics``; only sending continues."""
        closed = ("/metrics", "run directory")
        self._routes = [route for route in self._routes if route.guard.part not in closed]
        if (prometheus := self._prometheus) is not None:  # on the disk thread, because it removes a file
            self.disk.do(Guard("/metrics"), lambda: prometheus.close(0.05))
        self.disk.do(Guard("run directory"), self._directory.close)

    def close(self, timeout_s: float) -> None:
        """Closes everything, in at most ``timeout_s`` seconds in all."""
        deadline = time.monotonic() + timeout_s
        for route in self._routes:
            with route.guard:
                route.exporter.close(max(0.05, deadline - time.monotonic()))
        self.disk.do(Guard("run directory"), self._directory.close)
        self.disk.close(max(0.05, deadline - time.monotonic()))

    def _open_prometheus(
        self, resource: Mapping[str, AttributeValue], snapshot: Callable[[], Snapshot | None]
    ) -> PrometheusExporter:
        labels = {
            "train_run_id": self.info.run_id,
            "train_rank": str(self.info.rank),
            "host_name": self.info.host,
        }
        for name in ("service.name", "service.namespace", "deployment.environment.name"):
            if name in resource:
                labels[name.replace(".", "_")] = str(resource[name])

        def served(address: str) -> PrometheusExporter:
            host, port = address_of(address)
            port += self.info.local_rank if port and self._shared.alone else 0
            return PrometheusExporter(
                host, port, labels, resource, servers=self._shared.servers, snapshot=snapshot
            )

        try:
            exporter = self._or_default("prometheus_address", served)
        except ConfigError as error:
            by_program = self.origins.get("prometheus_address", CODE) == CODE
            is_default = self._config.prometheus_address == Config().prometheus_address
            if by_program and not is_default and self._is_awaited:
                raise
            raise OSError(str(error).rstrip(".")) from error  # not an argument of the program: no ConfigError
        if self.rank_folder is not None:
            try:
                exporter.write_target(self.rank_folder)
            except OSError as error:
                self._directory.note(error)
        return exporter


@contextmanager
def _or_without(part: str) -> Iterator[None]:
    """Logs that the block could not open a socket, file or thread, and continues without it."""
    try:
        yield
    except (OSError, RuntimeError, MemoryError) as error:
        _log.warning("%s could not start: %s. The session continues without it", part, error)


def _run_document(config: Config, info: RunInfo, origins: Mapping[str, str]) -> dict[str, object]:
    ignored = origins.ignored if isinstance(origins, Origins) else ()
    secrets = {name: "(set)" if getattr(config, name) else "" for name in SECRETS}
    return {
        **asdict(info),
        "settings": {**asdict(config), **secrets},
        "settings_from": dict(origins),
        "settings_ignored": [each.document() for each in ignored],
        "version": VERSION,
    }


class ProfileFilter:
    """Passes to an exporter what a rank exports by its export profile, and all events. ``disk``: runs the exporter, if given."""

    def __init__(
        self, exporter: Exporter, profile: Profile, guard: Guard, disk: DiskQueue | None = None
    ) -> None:
        self._exporter = exporter
        self._profile = profile
        self._guard = guard
        self._disk = disk

    def export(self, batch: ExportBatch) -> None:
        """Exports what the profile leaves of a batch, if anything."""
        snapshot = batch.snapshot if self._profile.metrics else None
        spans = batch.spans if self._profile.spans else ()
        if not (snapshot or spans or batch.events or batch.final):
            return
        batch = replace(batch, snapshot=snapshot, spans=spans)
        if self._disk is None:
            self._exporter.export(batch)
        else:
            self._disk.do(self._guard, lambda: self._exporter.export(batch))

    def close(self, timeout_s: float) -> None:
        """Closes the exporter once everything is written. If the disk hangs, it stays open."""
        until_s = time.monotonic() + timeout_s
        if self._disk is None or self._disk.written(timeout_s):
            self._exporter.close(max(0.05, until_s - time.monotonic()))
