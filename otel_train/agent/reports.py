"""Builds the reports of a rank: everything that the agent needs except events."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from otel_train.agent.messages import LOGGED_VALUES, RankState, Report
from otel_train.config.settings import TRACKER_MODULES, TRACKERS
from otel_train.instrumentation.logged_values import CacheSizes, UserEvent, Value, plain
from otel_train.instrumentation.module import barrier_of
from otel_train.resource import find_job
from otel_train.safety import Guard

if TYPE_CHECKING:
    from otel_train.agent.lazy_components import LazyComponents
    from otel_train.config import Config
    from otel_train.instrumentation.dataloader_workers import BatchBuildTimes, WorkerExit
    from otel_train.instrumentation.manager import InstrumentationManager

IDLE_INTERVALS = 60
"""Poll intervals after which a rank sends a report without a request, for changes that are not announced, such as a fault of a
hook. Not more often, because each time that a Python thread wakes, the training thread waits for the GIL."""

MOST_UNSENT = 64
"""Reports that are kept for an agent that receives nothing, for example because it is stopped (SIGSTOP)."""

PAUSE_S = 100e-6
"""Pause between two parts of a report that no thread waits for. The training thread gets the GIL meanwhile: it waits as long
as one part takes, some 50 µs, and not as long as a report, up to 1 ms."""

_ENDING_S = 0.02
"""Time that a worker may take to exit after its loader has failed."""

_STATE_EVERY_S = 2.0
"""Interval of the reports with a ``RankState``."""

_FIRST_REPORTS = 4
"""Number of first reports that all have the state: loaders and models are new in these, and would need another report."""

_DEVICES_EVERY_S = 5.0
"""Interval at which device memory is read."""

_DATASETS_EVERY_S = 10.0
"""Interval at which the sizes of datasets are computed."""


class ReportBuilder:
    """Builds and sends reports, one at a time. ``make`` never raises.

    Args:
        caches: cache sizes that the program has set.
        ranks: number of ranks in the run.
    """

    def __init__(
        self,
        recording: InstrumentationManager,
        components: LazyComponents,
        caches: CacheSizes,
        ranks: int = 1,
    ) -> None:
        self._ranks = ranks
        self._components = components
        self._recording = recording
        self._caches = caches
        self._guards = {
            part: Guard(part)
            for part in (
                "device time", "gradient scaler", "compiler", "build times", "devices", "transfers",
                "compiled models", "loader workers", LOGGED_VALUES, "ranks"
            )
        }  # fmt: skip
        self._seen: tuple[int, int, bool, bool, tuple[int, int] | None] = (0, 0, False, False, None)
        """As in the last report: number of loaders, of models, whether a capture waits for step numbers, ``follows``, rank and world
        size of the process group."""
        self._sized: frozenset[str] = frozenset()
        self._due_s: dict[str, float] = {}
        self._pause_s = 0.0
        self._made = 0
        self._unsent: deque[Report] = deque()
        self._dropped = 0
        self._changes = self._state_changes = -1
        self._memory: tuple[Any, ...] = ()
        self._taken: dict[str, int] = {}
        self._hardware: dict[str, str] = {}
        self._datasets: dict[str, tuple[int, int]] = {}

    def send(self, send: Callable[[Report], None], *, fresh: bool = False, pause_s: float = 0.0) -> None:
        """Makes a report, and sends it after those that could not be sent before.

        Args:
            send: sends one report; raises OSError if it cannot.
            fresh: see ``make``.
            pause_s: see ``PAUSE_S``; 0: no pause.

        Raises:
            OSError: not all reports could be sent; the next call sends the rest.
        """
        values, timers = self._recording.values, self._recording.timers
        if len(self._unsent) == MOST_UNSENT:
            lost = self._unsent.popleft()
            values.dropped += len(lost.logged_values)
            timers.dropped += 0 if lost.operations is None else len(lost.operations) // 3
            self._dropped += len(lost.compiles) + len(lost.builds) + len(lost.exits)
            self._dropped += lost.outcomes is not None
        self._pause_s = pause_s
        self._unsent.append(self.make(fresh=fresh))
        self._pause()
        while self._unsent:
            send(self._unsent[0])
            self._unsent.popleft()
        values.reported()
        timers.reported()

    def make(self, *, fresh: bool = False) -> Report:
        """Makes a report of everything since the last one. ``fresh``: include the state even if ``_STATE_EVERY_S`` is not over."""
        recording, exchange, scaled = self._recording, self._components.exchange, self._recording.scaled
        # `reports` is read before the positions, so that these include the events of its calls; all else after: events need it.
        reports = recording.stages.reports
        self._changes = changes = recording.recorder.changes
        positions = recording.recorder.positions()
        captures = self._components.made_captures
        needs_numbers = captures is not None and captures.needs_step_numbers
        job = self._do("ranks", find_job, None)
        seen = len(recording.probes.loaders), len(recording.probes.models), needs_numbers, self.follows, job
        fresh = fresh or seen != self._seen
        self._seen = seen
        exits: list[tuple[str, WorkerExit]] = []
        with_state = self._state_is_due() or fresh
        if with_state:
            exits = self._exits(fresh=fresh)
            self._state_changes = changes
        self._do("device time", recording.devices.read, None)
        report = Report(
            changes=changes,
            positions=positions,
            device_steps=recording.devices.take_steps(),
            outcomes=self._do("gradient scaler", scaled.take, None),
            scale=scaled.scale,
            compiles=self._do("compiler", recording.compiles, []),
            logged_values=self._do(LOGGED_VALUES, self._logged_values, []),
            operations=self._do(LOGGED_VALUES, recording.timers.take, None),
            reported=(recording.values.drained, recording.timers.taken),
            builds=self._do("build times", self._builds, []),
            exits=exits,
            reports=reports,
            records=exchange.take() if exchange is not None else None,
            exchange=(exchange.off, exchange.faults) if exchange is not None else (False, 0),
            state=self._do("loader workers", self._state, None) if with_state else None,
        )
        self._do("devices", recording.devices.poll, None)
        self._do("transfers", recording.transfers.poll, None)
        follow = recording.follow_compiler if with_state else recording.follow_imports
        self._do("compiled models", follow, None)
        return report

    @property
    def follows(self) -> bool:
        """See ``RankCaptures``."""
        captures = self._components.made_captures
        return captures is not None and captures.follows

    def pause_s(self, interval_s: float) -> float:
        """Returns the seconds until the next report without a request; the poll interval ``interval_s`` if changes are not announced."""
        recording, loaders = self._recording, list(self._recording.probes.loaders.values())
        *_, reported_follows, job = self._seen
        follows = self.follows or reported_follows
        if recording.polled or self._components.trackers is not None or follows:
            return interval_s
        idle_s = IDLE_INTERVALS * interval_s
        without_state = self._state_changes != self._changes
        # Trackers are looked for when a pass over a loader begins; without a loader, at each report.
        without_passes = self._components.may_use_trackers and not loaders
        awaits_job = job is None and self._ranks > 1
        of_state = without_state or without_passes or awaits_job or any(probe.polled for probe in loaders)
        return min(_STATE_EVERY_S, idle_s) if of_state else idle_s

    def _do(self, part: str, do: Callable[[], Any], otherwise: Any) -> Any:
        self._pause()
        guard = self._guards[part]
        if not guard.closed:
            with guard:
                return do()
        return otherwise

    def _pause(self) -> None:
        if self._pause_s:
            time.sleep(self._pause_s)

    def _is_due(self, what: str, every_s: float) -> bool:
        now_s = time.monotonic()
        if now_s < self._due_s.get(what, 0.0):
            return False
        self._due_s[what] = now_s + every_s
        return True

    def _state_is_due(self) -> bool:
        self._made += 1
        return self._is_due("state", _STATE_EVERY_S if self._made > _FIRST_REPORTS else 0.0)

    def _logged_values(self) -> list[Value | UserEvent]:
        return [plain(entry) for entry in self._recording.values.drain()]

    def _builds(self) -> list[tuple[str, BatchBuildTimes]]:
        found = []
        for name, probe in list(self._recording.probes.loaders.items()):
            for pool in list(probe.pools):
                if pool.times is not None:
                    builds = pool.times.read()
                    if len(builds.build_ns) or builds.missed:
                        found.append((name, builds))
        return found

    def _exits(self, *, fresh: bool) -> list[tuple[str, WorkerExit]]:
        collect = partial(self._worker_exits, fresh=fresh)
        found: list[tuple[str, WorkerExit]] | None = self._do("loader workers", collect, None)
        if found is None:
            # Torch's SIGCHLD handler raises in the main thread, also here, when a worker has died.
            found = self._do("loader workers", collect, [])
        return found or []

    def _worker_exits(self, *, fresh: bool) -> list[tuple[str, WorkerExit]]:
        found = []
        for name, probe in list(self._recording.probes.loaders.items()):
            probe.weigh_next()
            for pool in list(probe.pools):
                # A pool that has ended is removed one report later, after its last build times have been read.
                if pool.done and pool.reported:
                    probe.pools.remove(pool)
                    continue
                patience_s = _ENDING_S if fresh and probe.failures else 0.0
                found += [(name, exit_) for exit_ in pool.exits(patience_s)]
                pool.reported = pool.done
        return found

    def _state(self) -> RankState:
        recording = self._recording
        if self._is_due("device memory", _DEVICES_EVERY_S):
            self._memory = tuple(self._do("devices", recording.devices.memory, ()))
            self._taken = self._do("devices", recording.devices.taken, {})
            self._hardware = self._do("devices", recording.devices.hardware_ids, {})
        trackers, captures = self._components.trackers, self._components.made_captures
        flops = captures.flops if captures is not None else None
        listened = trackers is not None and trackers.listened()
        names = frozenset(recording.probes.loaders)
        if listened and (names != self._sized or self._is_due("datasets", _DATASETS_EVERY_S)):
            self._datasets, self._sized = self._sizes(), names
        return RankState(
            loaders={name: probe.report() for name, probe in list(recording.probes.loaders.items())},
            models=tuple(probe.name for probe in recording.probes.models),
            barrier=self._do("ranks", lambda: barrier_of(recording.probes.models), ""),
            job=self._seen[-1],
            modules=frozenset(name for name in ("torch", "jax") if name in sys.modules),
            memory=self._memory,
            taken=self._taken,
            hardware=self._hardware,
            copied_to_host=recording.transfers.copied_to_host(),
            spent_ns=recording.devices.spent_ns,
            dropped=recording.dropped + self._dropped,
            unread=recording.recorder.unread,
            faults=self._faults(),
            datasets=self._datasets,
            caches=self._caches.read() if listened else {},
            trackers=self._components.may_use_trackers or (trackers is not None and trackers.any),
            listened=listened,
            captured_ns=captures.within_ns if captures is not None else (0, 0),
            needs_step_numbers=captures is not None and captures.needs_step_numbers,
            follows=self.follows,
            untimed=self._do("devices", recording.untimed, {}),
            step_flops=flops.flops if flops is not None else 0,
            uncounted=flops.refusal if flops is not None else "",
        )

    def _sizes(self) -> dict[str, tuple[int, int]]:
        """Returns identity and bytes of the dataset by loader. Reads ``__dict__``, so that no property of the program runs."""
        from otel_train.instrumentation.dataset_size import dataset_bytes  # imported with the trackers

        found, known = {}, dict[int, int]()
        for name, probe in list(self._recording.probes.loaders.items()):
            dataset = getattr(probe.loader(), "__dict__", {}).get("dataset")
            if dataset is not None:
                if id(dataset) not in known:
                    known[id(dataset)] = dataset_bytes([dataset])
                found[name] = id(dataset), known[id(dataset)]
        return found

    def _faults(self) -> dict[str, int]:
        by_part = {part: guard.faults for part, guard in self._guards.items()}
        hooks = self._recording.hooks
        by_part[LOGGED_VALUES] += self._caches.faults + self._recording.timers.faults
        by_part[LOGGED_VALUES] += hooks.faults if hooks else 0
        if self._components.trackers is not None:
            by_part["trackers"] = self._components.trackers.faults()
        faults = [(part, guard.faults) for part, guard in self._components.guards.items()]
        if self._components.made_captures is not None:
            faults.append(("captures", self._components.made_captures.snapshot_faults))
        for part, number in faults:
            if number:
                by_part[part] = by_part.get(part, 0) + number
        return by_part


def may_use_trackers(config: Config) -> bool:
    """Returns whether the settings allow a tracker to be used, now or later."""
    return any(getattr(config, name) != "off" for name in TRACKERS) or bool(config.console_metrics)


def uses_trackers(config: Config) -> bool:
    """Returns whether a tracker is in use: requested by a setting, or imported by the program."""
    settings = {name: getattr(config, name) for name in TRACKERS}
    imported = any(
        setting == "auto" and any(module in sys.modules for module in TRACKER_MODULES[name])
        for name, setting in settings.items()
    )
    return imported or "on" in settings.values() or bool(config.console_metrics)


def has_automatic_captures(config: Config) -> bool:
    """Returns whether captures start without a request: by schedule, or for slow steps."""
    return config.profiler == "auto" or (config.profiler != "off" and bool(config.profiler_every))
