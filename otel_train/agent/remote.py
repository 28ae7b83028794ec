"""A rank as its agent sees it: in place of what records, and of what lives in the training process."""

from __future__ import annotations

import threading
import time
from collections import deque
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np

from otel_train.accounting.device_times import DevicePairs
from otel_train.accounting.types import TRAIN, StepSource
from otel_train.agent.messages import LoaderReport, LoopProgress, State
from otel_train.collectors.memory import MemoryMonitor, ProcessTreeReader
from otel_train.datamodel import Compile, DeviceTimes, Outcomes, Pace, system_clock
from otel_train.distributed.coordinator import Job
from otel_train.instrumentation.dataloader_workers import BatchBuildTimes
from otel_train.recording.events import SourceKind, StepRule
from otel_train.safety import Guard

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from otel_train.agent.alertmanager import AlertPoller
    from otel_train.agent.messages import Report
    from otel_train.agent.ring_reader import SharedRings
    from otel_train.aggregation.run_state import RunState
    from otel_train.datamodel import AttributeValue, DeviceMemory, ExportBatch
    from otel_train.distributed.store import ExchangeRequest
    from otel_train.instrumentation.dataloader import LoaderState
    from otel_train.instrumentation.dataloader_workers import WorkerExit
    from otel_train.instrumentation.logged_values import UserEvent, Value
    from otel_train.trackers.metrics import FlatRow

    Send = Callable[..., None]
    """``send(what, *args)``: have the rank do something; no answer is wanted."""

_WORK = {
    StepSource.UPDATE: SourceKind.OPTIMIZER,
    StepSource.BACKWARD: SourceKind.BACKWARD,
    StepSource.BATCH: SourceKind.DATA,
    StepSource.MANUAL: SourceKind.MARK,
}
"""What work of a step is in events, by what the account takes for a step."""

ALERTS_END_S = 0.2
"""Longest that the end waits for a question to an Alertmanager."""


class RemoteRecording:
    """In place of a ``InstrumentationManager``, for the export loop. One thread takes reports in, the export loop's takes them out.

    Args:
        rings: of the rank.

    Attributes:
        ask: asks the rank for a report.
        asked_s: when that was, seconds of the monotonic clock; 0 once the report has come.
    """

    def __init__(self, rings: SharedRings) -> None:
        self.recorder = rings
        self.state = State()
        self.records: deque[dict[int, str]] = deque(maxlen=1)
        self.exchange = (False, 0)
        self.devices = _Devices(self)
        self.transfers = SimpleNamespace(copied_to_host=lambda: dict(self.state.copied_to_host))
        self.scaled = _Scaled()
        self.values = _LoggedValues()
        self.timers = _Timers()
        self.hooks = SimpleNamespace(faults=0)
        self.stages = SimpleNamespace(reports=0)
        self.probes = _Probes()
        self._compiles: deque[Compile] = deque()
        self.ask: Callable[[], None] = _nothing
        self.asked_s = 0.0
        self._asking = threading.Lock()

    def advance(self) -> None:
        """Let the export loop read what is there now. Where the rank has to report first, ask it for that."""
        if (
            self.state.follows
        ):  # it reports by itself; whether a step was captured is known with the report behind it
            return
        self.recorder.advance()
        if not self.recorder.covered:
            with self._asking:
                if self.asked_s:
                    return
                self.asked_s = time.monotonic()
            self.ask()

    def take_in(self, report: Report) -> None:
        """A report of the rank has come."""
        self.asked_s = 0.0
        if report.state is not None:
            self.state = report.state
            self.probes.know(report.state)
        if any(report.device_steps):
            self.devices.steps.append(report.device_steps)
        if report.outcomes is not None:
            self.scaled.outcomes.append(report.outcomes)
        if report.scale is not None:
            self.scaled.scale = report.scale
        self._compiles.extend(report.compiles)
        self.values.held.extend(report.logged_values)
        if report.operations is not None and len(report.operations):
            self.timers.ended.append(report.operations)
        for name, builds in report.builds:
            self.probes.pool(name).times.held.append(builds)
        for name, exit_ in report.exits:
            self.probes.pool(name).held.append(exit_)
        self.stages.reports = report.reports
        if report.records is not None:
            self.records.append(report.records)
        self.exchange = report.exchange
        self.recorder.limit(report.positions, report.changes)

    def take_in_unreported(self) -> None:
        """The rank is gone: take in what it had not reported."""
        values, operations = self.recorder.unreported()
        self.values.held.extend(values)
        if len(operations):
            self.timers.ended.append(operations)

    def compiles(self) -> list[Compile]:
        """What compilers have done since the last call."""
        return list(_drained(self._compiles))

    @property
    def spent_ns(self) -> int:
        """Nanoseconds that otel_train took on the training thread, as sampled there."""
        return self.recorder.spent_ns + self.state.spent_ns

    def step_flops(self) -> int:
        """Model FLOP of one step of the rank, counted; 0 if that is not known."""
        return self.state.step_flops

    @property
    def loaded(self) -> frozenset[str]:
        """Modules that the program has imported, as far as they matter."""
        return self.state.modules

    @property
    def untimed(self) -> Mapping[str, str]:
        """Kinds of devices in use whose time is not taken."""
        return self.state.untimed

    def faults(self) -> Mapping[str, int]:
        """otel_train's faults in the rank and in the copy of its last steps, by component."""
        copy = self.recorder.guard
        return {**self.state.faults, copy.part: copy.faults}


class _Devices:
    def __init__(self, remote: RemoteRecording) -> None:
        self.steps: deque[tuple[int, int]] = deque()
        self._remote = remote
        self._pairs = DevicePairs(remote.recorder.device_ring, lambda: remote.recorder.sources)

    @property
    def dropped(self) -> int:
        return self._remote.state.dropped + self._pairs.missed

    def take(self) -> DeviceTimes | None:
        """What the devices did since the last call, as far as the rank or its memory tell."""
        times = self._pairs.take()
        if times is None:
            return None
        seen, sampled = map(sum, zip((0, 0), *_drained(self.steps), strict=True))
        return times._replace(pace=times.pace.plus(Pace(seen=seen, sampled=sampled)))

    def memory(self) -> list[DeviceMemory]:
        return list(self._remote.state.memory)

    def taken(self) -> Mapping[str, int]:
        return self._remote.state.taken

    def hardware_ids(self) -> Mapping[str, str]:
        return self._remote.state.hardware

    def ooms(self) -> int:
        return sum(device.ooms or 0 for device in self._remote.state.memory)


class _Scaled:
    def __init__(self) -> None:
        self.scale: float | None = None
        self.outcomes: deque[Outcomes] = deque()

    def take(self) -> Outcomes:
        parts = list(_drained(self.outcomes))
        return Outcomes(*map(sum, zip(*parts, strict=True))) if parts else Outcomes(0, 0, 0)


class _LoggedValues:
    dropped = 0

    def __init__(self) -> None:
        self.refused = 0
        self.held: deque[Value | UserEvent] = deque()

    def drain(self) -> Iterator[Value | UserEvent]:
        return _drained(self.held)


class _Timers:
    dropped = faults = 0

    def __init__(self) -> None:
        self.ended: deque[np.ndarray] = deque()

    def take(self) -> np.ndarray:
        return np.concatenate([np.zeros((0, 3), dtype=np.int64), *_drained(self.ended)])


class _Times:
    def __init__(self) -> None:
        self.held: deque[BatchBuildTimes] = deque()

    def read(self) -> BatchBuildTimes:
        parts = list(_drained(self.held))
        none = np.zeros(0, dtype=np.int64)
        return BatchBuildTimes(
            np.concatenate([none, *(part.build_ns for part in parts)]), sum(part.missed for part in parts)
        )


class _RemotePool:
    done = False

    def __init__(self) -> None:
        self.times = _Times()
        self.held: deque[WorkerExit] = deque()

    def exits(self) -> list[WorkerExit]:
        return list(_drained(self.held))


class RemoteLoader:
    """In place of a ``LoaderProbe``: report as they were reported last."""

    def __init__(self, report: LoaderReport, pool: _RemotePool) -> None:
        self.report = report
        self.pools = [pool]

    def __getattr__(self, name: str) -> Any:
        if name == "report":
            raise AttributeError(name)
        return getattr(self.report, name)

    def weigh_next(self) -> None:
        """The rank does."""


class _Probes:
    def __init__(self) -> None:
        self.loaders: dict[str, RemoteLoader] = {}
        self.models: list[Any] = []
        self._pools: dict[str, _RemotePool] = {}

    def pool(self, name: str) -> _RemotePool:
        return self._pools.setdefault(name, _RemotePool())

    def know(self, state: State) -> None:
        self.loaders = {name: RemoteLoader(report, self.pool(name)) for name, report in state.loaders.items()}
        self.models = [SimpleNamespace(name=name, model=_nothing) for name in state.models]


def loader_state(probe: Any) -> LoaderState | None:  # Any: a RemoteLoader
    """Workers and queue of a loader, as reported last."""
    state: LoaderState | None = probe.report.state
    return state


class RemoteTrackers:
    """In place of ``Trackers``: they live in the training process."""

    def __init__(self, remote: RemoteRecording, send: Send) -> None:
        self._remote = remote
        self._send = send

    @property
    def any(self) -> bool:
        """See ``Trackers``."""
        return self._remote.state.trackers

    def listened(self) -> bool:
        """See ``Trackers``."""
        return self._remote.state.listened

    def put(self, rows: Iterable[FlatRow]) -> None:
        """See ``Trackers``."""
        waiting = list(rows)
        if waiting:
            self._send("rows", waiting)

    def emptied(self, timeout_s: float) -> bool:
        """The rank waits for them itself."""
        del timeout_s
        return True

    def faults(self) -> int:
        """They are among the faults that the rank reports."""
        return 0

    def close(self, timeout_s: float) -> None:
        """The rank closes them."""


class RemoteExchange:
    """In place of ``Exchange``: the store of the job is met in the training process alone."""

    def __init__(self, remote: RemoteRecording, send: Send, **which: Any) -> None:
        self._remote = remote
        self._send = send
        send("exchange", which)

    @property
    def guard(self) -> Guard:
        """Has the faults of the rank's."""
        guard = Guard("rank report")
        guard.faults = self._remote.exchange[1]
        return guard

    @property
    def off(self) -> bool:
        """See ``Exchange``."""
        return self._remote.exchange[0]

    def send(self, request: ExchangeRequest) -> None:
        """See ``Exchange``."""
        self._send("exchange_request", request)

    def take(self) -> dict[int, str] | None:
        """See ``Exchange``."""
        return self._remote.records.popleft() if self._remote.records else None

    def close(self, timeout_s: float) -> None:
        """The rank closes its own."""


class RemoteProviders:
    """An exporter that has the rank export by way of the program's own providers."""

    def __init__(self, send: Send) -> None:
        self._send = send

    def export(self, batch: ExportBatch) -> None:
        """Hand over one batch."""
        self._send("batch", batch)

    def close(self, timeout_s: float) -> None:
        """The rank closes them."""


class RemoteCaptures:
    """In place of ``Capturing``: ``torch.profiler`` runs in the training process, and what decides about it."""

    def __init__(
        self,
        remote: RemoteRecording,
        run: RunState,
        send: Send,
        *,
        loop: Callable[[], LoopProgress],
        post: Callable[[bytes, str], tuple[int, object]],
        waiting: Callable[[], object],
    ) -> None:
        self._remote = remote
        self._run = run
        self._send = send
        self.alerts: AlertPoller | None = None
        self._loop = loop
        self._post = post
        self._waiting = waiting
        self._sent_progress: LoopProgress | None = None
        self._asked: object = None
        run.sampler.captured_ns = lambda: remote.state.captured_ns

    def open(self, on_post: Callable[[str, Callable[[bytes, str], tuple[int, object]]], None]) -> None:
        """Let requests over HTTP through to the rank."""
        on_post("/capture", self._post)

    def ask_for_alerts(self) -> None:
        """Begin to. The rank knows its run directory by now, so it can capture."""
        if self.alerts is not None:
            self.alerts.start()

    def faults(self) -> dict[str, int]:
        """Faults in the agent, by component."""
        return self.alerts.counted_faults() if self.alerts is not None else {}

    def turn(self, account: Callable[[], None]) -> None:
        """Tell the rank how the loop goes, where that has changed."""
        if self._remote.state.needs_step_numbers:
            account()
        asked = self._waiting()
        if asked != self._asked:
            self._asked = asked
            if asked is not None:
                self._send("request", asked)
        if not self._remote.state.follows and asked is None:
            return
        loop = self._loop()
        if loop != self._sent_progress:
            self._sent_progress = loop
            self._send("loop", loop)

    def stop(self) -> None:
        """Stop asking for alerts. The rank stops what is recorded."""
        self.end(ALERTS_END_S)

    def end(self, timeout_s: float) -> None:
        """The same. The rank has written what was recorded."""
        if self.alerts is not None:
            self.alerts.close(min(timeout_s, ALERTS_END_S))


class RemoteRank:
    """What lives in the training process, as an ``AgentService`` asks for it.

    Args:
        remote: what the rank reports.
        tell: sends it a message that wants no answer.
        resource: attributes that only the rank knows.
        pid: of the rank.
        post: passes a request over HTTP on to it.
        waiting: what was left in its folder.
        alerts: asks an Alertmanager; None without one.
    """

    def __init__(  # noqa: PLR0913 - most by keyword
        self,
        remote: RemoteRecording,
        tell: Callable[..., None],
        *,
        resource: Mapping[str, AttributeValue],
        pid: int,
        post: Callable[[bytes, str], tuple[int, object]],
        waiting: Callable[[], object],
        alerts: AlertPoller | None,
    ) -> None:
        self._waiting = waiting
        self._alerts = alerts
        self.resource = resource
        self.trackers = RemoteTrackers(remote, tell)
        self._remote = remote
        self._tell = tell
        self._pid = pid
        self._post = post

    def look(self, probe: Any, /) -> LoaderState | None:  # Any: a RemoteLoader
        """Workers and queue of a loader."""
        return loader_state(probe)

    def capturing(self, run: RunState) -> RemoteCaptures:
        """Its profiler captures."""
        rings = self._remote.recorder
        made = RemoteCaptures(
            self._remote, run, self._tell, loop=lambda: loop_of(run, rings), post=self._post,
            waiting=self._waiting,
        )  # fmt: skip
        made.alerts = self._alerts
        return made

    def job(self, events: Callable[[], Mapping[str, int]], prefix: str) -> Job:
        """The job that it belongs to."""
        state = self._remote
        return Job(
            lambda: state.state.job, lambda: None, lambda: state.state.barrier, events, prefix,
            lambda **which: RemoteExchange(state, self._tell, **which),
        )  # fmt: skip

    def memory_monitor(self) -> MemoryMonitor:
        """Reads its memory."""
        remote = self._remote

        def datasets(loaders: Iterable[str]) -> int | None:
            found = dict(remote.state.datasets[name] for name in loaders if name in remote.state.datasets)
            return sum(found.values()) if found else None

        return MemoryMonitor(
            datasets=datasets, caches=lambda: remote.state.caches, devices=remote.devices.taken,
            clock=system_clock, tree=ProcessTreeReader(system_clock, Path(f"/proc/{self._pid}"), pid=self._pid),
        )  # fmt: skip


def rule_of(run: RunState) -> StepRule | None:
    """Returns how steps are recognised from events alone; None if unknown."""
    work, leading = _WORK.get(run.step_source), run.leading
    if work is None or leading is None:
        return None
    names = run.totals.names.loaders.names
    trained = {names[loader] for loader, phase in run.totals.batches if phase == TRAIN}
    return StepRule(
        work, leading.account.asks, frozenset(names[loader] for loader, _ in run.totals.batches) - trained
    )


def loop_of(run: RunState, rings: SharedRings) -> LoopProgress:
    """What the rank must know of its loop."""
    leading = run.leading
    slots = {id(thread): thread.slot for thread in rings.threads}
    ring = slots.get(leading.key, 0) if leading else 0
    return LoopProgress(
        rule_of(run), ring, run.step_number, run.sampler.median_ns, run.epochs.at(run.final_ns),
        run.final_ns, run.sampler.slow,
    )  # fmt: skip


def _drained(box: deque[Any]) -> Iterator[Any]:
    while box:
        yield box.popleft()


def _nothing() -> None:
    """Nothing: the rank does it."""
