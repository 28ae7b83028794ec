"""The agent's work for one rank: reads the rings, accounts the events, exports metrics."""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.ma  # np.unique and np.median import it at their first call, which would be in the middle of a step

from otel_train.accounting.nesting import COMPUTES, OWN_WORK, TRAINS, takes_gradients
from otel_train.agent.coverage import CoverageReporter, instrumentation_gaps
from otel_train.agent.messages import LOGGED_VALUES, Hello
from otel_train.agent.metric_reader import LoggedValueReader, MetricReader, MetricSources, SelfMetrics
from otel_train.agent.remote import RemoteCaptures, RemoteExchange, RemoteRecording, RemoteTrackers, drained
from otel_train.agent.summary import WindowStart, summary_document
from otel_train.aggregation.metrics import LoggedSignals
from otel_train.aggregation.run_state import SLICE_EDGES, RunState
from otel_train.aggregation.spans import Ids
from otel_train.catalog import RUN_STATES
from otel_train.collectors.dataloader import LoaderWatch
from otel_train.collectors.hardware import AcceleratorReader, HardwareReader
from otel_train.collectors.process import CpuWait, MemoryMonitor, ProcessReader, ProcessTreeReader
from otel_train.config.validation import words_of
from otel_train.console.summary import stalled_at
from otel_train.console.text import duration
from otel_train.datamodel import NS_PER_S, Clock, ExportBatch, Snapshot, system_clock
from otel_train.distributed.coordinator import Job, RankCoordinator
from otel_train.distributed.export_profile import profile_of, sampling_rules
from otel_train.recording.events import SOURCE_MASK, SOURCE_SHIFT
from otel_train.resource import about_run, resource_attributes
from otel_train.safety import Guard, daemon_thread
from otel_train.trackers.metrics import EpochWindow
from otel_train.trackers.schedule import RowScheduler, operation_calls

if TYPE_CHECKING:
    from otel_train.agent.ring_reader import SharedRings, SharedThread
    from otel_train.exporters import ExportRoute
    from otel_train.exporters.manager import ExportManager
    from otel_train.recording.ring_buffer import EdgeBatch

READ_INTERVAL_S = 2.0
"""Interval at which events are accounted if fewer than ``READ_EDGES`` wait: the numpy calls cost the same for few events as for many."""

READ_EDGES = 2048
"""Waiting events of one thread that are accounted at the next poll: the end of the program waits for the events that are left."""

AHEAD_EDGES = 4096
"""Events between two polls of the rings at a high rate of events: accounting so many takes some 10 ms."""

LEAST_PAUSE_S = 0.1
"""Shortest pause between two polls of the rings, at any rate of events."""

_RATE_OVER_S = 0.05
"""Shortest time over which the rate of events is measured."""

_SNAPSHOT_WAIT_S = 0.25
"""Longest wait of a client of ``/metrics`` for the lock of the export loop. After that the page shows the previous snapshot."""

MAX_GIL_HOLD_NS = 150_000
GIL_RELEASE_S = 50e-6
"""Sleep of an agent in a thread of the training process each time that it has run for ``MAX_GIL_HOLD_NS``, so that a waiting thread
gets the GIL. Python itself switches threads only every 5 ms."""


def gil_release(clock: Clock) -> Callable[[], None]:
    """Returns a function that sleeps for ``GIL_RELEASE_S`` if ``MAX_GIL_HOLD_NS`` have passed since its last sleep."""
    since_ns = clock()

    def release() -> None:
        nonlocal since_ns
        if clock() - since_ns > MAX_GIL_HOLD_NS:
            time.sleep(GIL_RELEASE_S)
            since_ns = clock()

    return release


class PeriodicTask(NamedTuple):
    """A function that the export loop calls periodically.

    Attributes:
        every_s: seconds between two calls; 0: at every poll.
    """

    do: Callable[[], None]
    guard: Guard
    every_s: float


def _do(task: PeriodicTask) -> None:
    if not task.guard.closed:
        with task.guard:
            task.do()


class ExportLoop:
    """Polls the rings, accounts their events, and passes batches to the exporters."""

    def __init__(
        self,
        rings: SharedRings,
        run: RunState,
        *,
        snapshot: Callable[[], Snapshot],
        clock: Clock,
        every_s: float,
    ) -> None:
        self.routes: list[ExportRoute] = []
        self.tasks: list[PeriodicTask] = []
        self.early_tasks: list[PeriodicTask] = []
        """Tasks that run once it is known how far to read the rings, before any is read."""
        self.advance: Callable[[], None] = lambda: None
        """Determines how far the rings may be read."""
        self.between: Callable[[], float | None] = lambda: None
        """Called in the pauses between polls; returns the seconds until its next call, None: not in this pause. Never raises."""
        self.edges = 0
        self.missed = 0
        self.cpu_s = 0.0
        self.lock = threading.Lock()
        self.guard = Guard("export loop")
        self._rings = rings
        # If events were lost, such as those that a previous agent had read, the number of steps is not known.
        rings.steps = lambda: (0, 0) if self.missed else run.steps_ended()
        self._run = run
        self._snapshot = snapshot
        self._clock = clock
        self._every_s = every_s
        self._due: dict[int, int] = {}  # monotonic ns, by identity of a task, of a route, or of the rings
        self._engine: list[tuple[np.ndarray, np.ndarray]] = []
        self._counted = time.monotonic(), 0  # time of the last rate measurement, and events written by then
        self._edges_per_s = 0.0
        self._stop = threading.Event()
        self._woken = threading.Event()
        self._thread = daemon_thread(self._loop, "otel-train-export")

    def faults(self) -> dict[str, int]:
        """Faults in the agent, by component."""
        faults: dict[str, int] = {}
        guarded: list[ExportRoute | PeriodicTask] = [*self.routes, *self.early_tasks, *self.tasks]
        for guard in dict.fromkeys((self.guard, *(each.guard for each in guarded))):  # some are shared
            faults[guard.part] = faults.get(guard.part, 0) + guard.faults
        return faults

    @property
    def lost(self) -> int:
        """Number of events that were overwritten before they were read, or that this loop can no longer read."""
        if not self.guard.closed:
            return self.missed
        return self.missed + sum(thread.ring.written - thread.ring.taken for thread in self._rings.threads)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def stop(self, timeout_s: float) -> None:
        """Ends the thread; the last poll is the caller's."""
        self._stop.set()
        self._woken.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(timeout_s)

    def wake(self) -> None:
        """Wakes the loop after a report if many events wait, so that they are accounted before the next poll."""
        if self._is_full():
            self._woken.set()

    def run_once(self, *, final: bool = False) -> None:
        """Runs one iteration: read, account, export. Tests call it directly."""
        self._rings.publish(time.time_ns())
        if self._is_full() or self._is_due(self._rings, READ_INTERVAL_S):
            with self.guard:  # after a fault the final summary is still written
                self.read_rings()
        if self._is_abandoned():
            return
        for task in self.tasks:
            if final or self._is_due(task, task.every_s):
                _do(task)
        self._export(final=final)

    @contextmanager
    def up_to_date(self, patience_s: float = -1.0) -> Iterator[bool]:
        """Accounts all events up to now, and holds the lock of the export loop inside the block.

        Yields whether that was done: not if the run is over, or if the lock was not free within ``patience_s`` (-1: no limit).
        """
        acquired = self.lock.acquire(timeout=patience_s)
        try:
            done = acquired and not self._run.closed
            if done:
                with self.guard:
                    self.read_rings()
            yield done
        finally:
            if acquired:
                self.lock.release()

    def snapshot(self) -> Snapshot | None:
        """Returns the metrics of the events read so far, for another thread; None after the end, or if the lock is not free in time."""
        if not self.lock.acquire(timeout=_SNAPSHOT_WAIT_S):
            return None
        try:
            if not self._run.closed:
                with self.guard:
                    self._run.follow_system_clock()
                    return self._snapshot()
            return None
        finally:
            self.lock.release()

    def read_rings(self) -> None:
        """Reads every ring as far as allowed and accounts its events."""
        self.advance()
        now_ns = self._clock()
        threads = list(self._rings.threads)
        ended = [thread for thread in threads if thread.ended]
        self._run.learn(self._rings.sources)
        # The positions of all other rings are taken before the rings of autograd's threads are read, so that those contain all
        # events up to these positions.
        waiting = [(thread, thread.ring.pending) for thread in threads if not thread.engine]
        for task in self.early_tasks:
            _do(task)
        for thread in threads:
            if thread.engine:
                piece = self._piece(thread, thread.ring.capacity)
                self._engine.append((piece.times, piece.codes))
        if self._run.leading is None:  # the first thread fed with training events becomes the leading one
            waiting.sort(key=lambda each: self._trained_ns(*each))
        for thread, pending in waiting:
            for first in range(0, pending, SLICE_EDGES):
                if self._is_abandoned():
                    return
                self._read(thread, min(SLICE_EDGES, pending - first))
            if thread in ended:  # before the ring of a thread that continues its run is read
                self._run.end_thread(id(thread))
        for thread in ended:
            self._rings.release(thread)
        # No time passes for a thread with events that may not be read yet, nor is it called stalled: they may show progress.
        behind = {id(thread) for thread in threads if thread.ring.written > thread.ring.taken}
        self._run.check_stalls(now_ns, behind)

    def _trained_ns(self, thread: SharedThread, pending: int) -> int:
        """Returns the sort key of a thread: the time of its first training event among those to be read.

        A thread that only reads a loader, or does parts of steps of other threads, comes last: the current time. A thread that
        updates parameters with gradients of other threads comes first: 0.
        """
        unread = thread.ring.peek(thread.ring.taken)
        times, sources = unread.times[:pending], unread.codes[:pending] >> SOURCE_SHIFT & SOURCE_MASK
        # The last mask is for sources whose name is not known yet.
        masks = np.array([*(1 << source.kind for source in self._rings.sources), 0], dtype=np.int64)
        kinds = masks[np.minimum(sources, len(masks) - 1)]
        trained = kinds & TRAINS > 0
        if not (kinds & COMPUTES).any() or (trained.any() and not (kinds & OWN_WORK).any()):
            return self._clock()
        if takes_gradients(int(np.bitwise_or.reduce(kinds))):
            return 0
        return int(times[trained.argmax()])

    def _is_full(self) -> bool:
        return any(thread.ring.pending >= READ_EDGES for thread in self._rings.threads)

    def _is_abandoned(self) -> bool:
        """Returns whether this is the loop's thread after ``stop``, which leaves the remaining events to the last iteration."""
        return self._stop.is_set() and threading.current_thread() is self._thread

    def _read(self, thread: SharedThread, most: int) -> None:
        piece = self._piece(thread, most)
        # A source is registered before its first event, so its name is known by now.
        self._run.learn(self._rings.sources)
        main = thread is self._rings.main
        times, codes = self._with_engine(piece.times, piece.codes) if main else (piece.times, piece.codes)
        times, codes = self._of_known_sources(times, codes)
        self._run.feed(id(thread), times, codes, name=thread.name, main=main)

    def _of_known_sources(self, times: np.ndarray, codes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Leaves out the events of sources whose name could not be read, and counts them as lost."""
        known = (codes >> SOURCE_SHIFT & SOURCE_MASK) < len(self._rings.sources)
        if known.all():
            return times, codes
        self.missed += int((~known).sum())
        return times[known], codes[known]

    def _piece(self, thread: SharedThread, most: int) -> EdgeBatch:
        piece = thread.ring.read(most)
        self.edges += len(piece.times)
        self.missed += piece.missed
        return piece

    def _with_engine(self, times: np.ndarray, codes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Merges the events of autograd's threads, up to the last of ``times``, into those of the training thread by time."""
        if not self._engine or not len(times):
            return times, codes
        engine_times = np.concatenate([part[0] for part in self._engine])
        engine_codes = np.concatenate([part[1] for part in self._engine])
        due = engine_times <= times[-1]
        self._engine = [(engine_times[~due], engine_codes[~due])] if not due.all() else []
        all_times = np.concatenate((times, engine_times[due]))
        order = np.argsort(all_times, kind="stable")
        return all_times[order], np.concatenate((codes, engine_codes[due]))[order]

    def _is_due(self, what: object, every_s: float) -> bool:
        now_ns = self._clock()
        if now_ns < self._due.get(id(what), 0):
            return False
        self._due[id(what)] = now_ns + int(every_s * NS_PER_S)
        return True

    def _export(self, *, final: bool) -> None:
        spans, events = self._run.spans.drain()
        routes = list(self.routes)
        due = [final or self._is_due(route, route.every_s) for route in routes]
        snapshot = None
        if any(due):
            with self.guard:
                snapshot = self._snapshot()
        for route, wanted in zip(routes, due, strict=True):
            batch = ExportBatch(
                snapshot=snapshot if wanted else None, spans=spans, events=events, final=final
            )
            if route.guard.closed or not (batch.snapshot or spans or events or final):
                continue
            with route.guard:
                route.exporter.export(batch)

    def _wait_for_next(self) -> bool:
        """Waits for the next iteration. Returns whether the loop has stopped."""
        until_s = time.monotonic() + self._every_s
        left_s: float = self._every_s
        while left_s > 0:
            again_s = self.between()
            woken = self._woken.wait(min(left_s, self._pause_s(), *(() if again_s is None else (again_s,))))
            self._woken.clear()  # before `_stop` is checked: `stop` sets `_stop`, then `_woken`
            if self._stop.is_set():
                return True
            self.advance()
            if woken or self._is_full():
                with self.lock, self.guard:
                    self.read_rings()
            left_s = until_s - time.monotonic()
        return self._stop.is_set()

    def _pause_s(self) -> float:
        """Returns the seconds until the next poll: fewer than the interval at a high rate of events."""
        (then_s, before), now_s = self._counted, time.monotonic()
        if now_s - then_s >= _RATE_OVER_S:
            written = sum(thread.ring.written for thread in self._rings.threads)
            self._counted = now_s, written
            self._edges_per_s = (written - before) / (now_s - then_s)
        if self._edges_per_s * self._every_s <= AHEAD_EDGES:
            return self._every_s
        return min(self._every_s, max(LEAST_PAUSE_S, AHEAD_EDGES / self._edges_per_s))

    def _loop(self) -> None:
        while not self._wait_for_next() and not self.guard.closed:
            with self.lock, self.guard:
                self.run_once()
            self.cpu_s = time.thread_time()


_EXITS_EVERY_S = 2.0
"""Interval at which exits of DataLoader workers are counted."""

_log = logging.getLogger("otel_train")


class AgentService:
    """Everything behind the rings of one rank: account, metrics, periodic tasks."""

    def __init__(
        self, hello: Hello, *, recording: RemoteRecording, captures: RemoteCaptures, exporters: ExportManager
    ) -> None:
        self.info = exporters.info
        self.exporters = exporters
        self.captures = captures
        self._config = hello.config
        self._recording = recording
        self._anchor = hello.anchor
        self._profile = profile_of(hello.config, self.info)
        self._printed_reports = 0
        self._is_stalled, self._summary_due_s = False, 0.0
        self.cpu_wait = CpuWait(Path(f"/proc/{self.info.pid}/schedstat"))
        self.end_cause = ""
        """Signal or exit code that ended the process, or exception that failed the run; "" for none, or if it is not known."""
        self.run = self._run_state()
        self.health = SelfMetrics(
            self._drops, self._faults, lambda: recording.spent_ns / NS_PER_S, self.instrumentation_gaps
        )
        self._signals = LoggedSignals()
        self._value_reader = LoggedValueReader(recording.logged, self._signals, self.run)
        self._coverage = CoverageReporter(self.run, lambda: recording.state)
        self._reporter = self._metric_reader()
        self.ranks = self._rank_coordinator(hello.info.attempt)
        self.loop = self._export_loop()
        self._track()
        self.resource: dict[str, Any] = {
            **resource_attributes(self.info, hello.environ, modules=sys.modules), **hello.resource,
            "train.export.profile": self._profile.name
        }  # fmt: skip
        self._reporter.about = about_run(self.resource)
        exporters.connect(self.loop.routes, self.resource, self._profile, self.loop.snapshot)

    def _run_state(self) -> RunState:
        anchor, config, recording = self._anchor, self._config, self._recording
        run = RunState(
            anchor.clock_ns, anchor=anchor, ids=Ids(self.info.ids_of, self.info.attempt, self.info.rank),
            rules=sampling_rules(config, self._profile), stall_after_s=config.stall_after_s,
            release_gil=gil_release(system_clock) if self.info.pid == os.getpid() else None
        )  # fmt: skip
        run.down_s = self.exporters.down_s(anchor.unix_ns)
        run.total_down_s = self.exporters.total_down_s(run.down_s)
        run.sampler.captured_ns = lambda: recording.state.captured_ns
        return run

    def _metric_reader(self) -> MetricReader:
        recording, run, config = self._recording, self.run, self._config
        self.watch = LoaderWatch(run, lambda: recording.state.loaders, clock=system_clock)
        self._hardware = HardwareReader.of(config, lambda: recording.state.hardware)
        accelerators = AcceleratorReader(
            lambda: recording.state.memory, lambda: run.transfers.to_devices(run.names.sources),
            lambda: recording.state.copied_to_host, device_flops=config.device_flops
        )  # fmt: skip
        sources = MetricSources(
            self._signals, ProcessReader(pid=self.info.pid), accelerators, self._hardware, self.health,
            self.watch
        )  # fmt: skip
        reader = MetricReader(run, sources, info=self.info, config=config)
        reader.step_flops = lambda: recording.state.step_flops
        return reader

    def _rank_coordinator(self, attempt: int) -> RankCoordinator:
        """Creates the rank coordinator; ``attempt`` is counted by the launcher, so it is equal on all ranks."""
        recording = self._recording
        job = Job(
            lambda: recording.state.job, lambda: recording.state.barrier, self._reporter.events,
            self._reporter.counted, partial(RemoteExchange, recording, prefix=f"otel_train/{attempt}")
        )  # fmt: skip
        ranks = RankCoordinator(self.run, self.info, config=self._config, job=job, clock=system_clock)
        self._reporter.more.append(ranks.write)
        return ranks

    def _export_loop(self) -> ExportLoop:
        run, recording, tuned = self.run, self._recording, self._config.tuned()
        values_guard, summary_guard = Guard(LOGGED_VALUES), Guard("summary")
        loop = ExportLoop(
            recording.rings, run, snapshot=lambda: self._reporter.snapshot(system_clock()),
            clock=recording.rings.run_clock, every_s=tuned.poll_interval_s
        )  # fmt: skip
        loop.advance = self._advance
        # Whether a trace of a step is kept is decided as the step is accounted, so its logged values must be read before.
        loop.early_tasks += [
            PeriodicTask(lambda: run.device.add(recording.device_times()), Guard("device time"), 0.0),
            PeriodicTask(self._read_scaler, Guard("gradient scaler"), 0.0),
            PeriodicTask(lambda: run.compiled(list(drained(recording.compiles))), Guard("compiler"), 0.0),
            PeriodicTask(lambda: self.watch.add_builds(drained(recording.builds)), Guard("build times"), 0.0),
            PeriodicTask(self._value_reader.read, values_guard, 0.0),
            PeriodicTask(self._read_operations, values_guard, 0.0),
        ]
        loop.tasks += [
            PeriodicTask(
                lambda: self.watch.add_exits(drained(recording.exits)),
                Guard("loader workers"),
                _EXITS_EVERY_S,
            ),
            PeriodicTask(self._value_reader.emit_events, values_guard, 0.0),
            PeriodicTask(self._read_cpu_wait, summary_guard, 0.5),
            PeriodicTask(self._report_stall, summary_guard, 0.0),
            PeriodicTask(self._write_summary_if_due, summary_guard, 0.0),
            PeriodicTask(lambda: self.captures.poll(run, loop.read_rings), Guard("captures"), 0.0),
            PeriodicTask(self.ranks.poll, Guard("ranks"), 0.0),
            PeriodicTask(self._log_progress, Guard("console"), 0.0),
            PeriodicTask(self._coverage.log_gaps, Guard("instrumentation gaps"), 2.0),
        ]
        return loop

    def _advance(self) -> None:
        self.run.follow_system_clock()
        self._recording.advance()

    def _track(self) -> None:
        config, recording, pid = self._config, self._recording, self.info.pid
        memory = self._memory_monitor = MemoryMonitor(
            datasets=recording.dataset_bytes, caches=lambda: recording.state.caches,
            devices=lambda: recording.state.taken, clock=system_clock,
            tree=ProcessTreeReader(system_clock, Path(f"/proc/{pid}"), pid=pid)
        )  # fmt: skip
        samples_memory = config.log_every_epochs and "memory" in words_of(config.throughput_metrics)
        self.run.epochs.loaders = self.watch.facts
        epochs = EpochWindow(
            self.run.totals, self.watch.facts, memory=memory.values if samples_memory else None
        )
        self.tracking = RowScheduler(
            config, trackers=RemoteTrackers(recording), run=self.run, epochs=epochs, first=self.info.rank == 0
        )  # fmt: skip
        if samples_memory:
            self.loop.between = lambda: memory.sample() if self.tracking.listened() else None

    def start(self) -> None:
        """Starts the thread."""
        self.run.spans.start(self._anchor.clock_ns, system_clock())
        self.loop.start()

    def last_poll(self, state: str, *, cause: str = "", ended_ns: int = 0) -> None:
        """Accounts and exports everything, and writes the summary, after the loop's thread has stopped.

        ``cause``: the signal that ended the process. ``ended_ns``: the time at which the rank ended its run; 0: now.
        """
        now, timeout_s = ended_ns or system_clock(), self._config.exit_timeout_s / 2
        acquired = self.loop.lock.acquire(timeout=timeout_s)
        try:
            if not self.run.closed:
                with self.loop.guard:
                    self.loop.read_rings()
                self.run.close(now)
            with Guard("captures"):
                self.captures.close(timeout_s)
            if cause or state == "killed":
                self.run.killed(cause or "killed")
            else:
                self.run.spans.end(now, self.run.step_number)
            self._reporter.state = state if state in RUN_STATES else "failed"
            self.loop.run_once(final=True)
        finally:
            if acquired:
                self.loop.lock.release()
        self._coverage.log_gaps(final=True)
        document = self.document(state)
        self.exporters.write_summary(document, final=True)
        if self._config.console:
            self.exporters.print_summary(document)

    def correct(self, state: str, cause: str) -> None:
        """Exports another end state of the run, after the last poll."""
        self._reporter.state, self.end_cause = state, cause
        self.loop.run_once(final=True)
        self.exporters.write_summary(self.document(state), final=True)

    def undo(self) -> None:
        """Stops everything that was started, after an error in starting the session."""
        self.loop.stop(1.0)
        self.captures.close()
        self.close()

    def close(self) -> None:
        """Closes the hardware readers, and passes the last rows to the trackers."""
        self._hardware.close()
        self.tracking.close()

    def document(self, state: str, window: WindowStart | None = None) -> dict[str, Any]:
        """Returns the document ``summary.json``."""
        return summary_document(self, state, window)

    @property
    def lost(self) -> int:
        """Number of lost events: see ``ExportLoop.lost``, and those of a thread without a shared ring."""
        return self.loop.lost + self._recording.state.unread

    def instrumentation_gaps(self) -> list[dict[str, str]]:
        """Returns what could not be instrumented, with reason and remedy."""
        found = instrumentation_gaps(self.run, self._recording.state)
        if why := self._recording.state.uncounted:
            found.append({"what": "flops", "name": "step", "reason": why, "cause": "never_seen"})
        return found

    def _read_scaler(self) -> None:
        self.run.totals.add_outcomes(self._recording.outcomes())
        if self._recording.scale is not None:
            self._signals.take("amp_scale", self._recording.scale)

    def _read_cpu_wait(self) -> None:
        self.run.totals.cpu_wait_ns = self.cpu_wait.read_ns()

    def _read_operations(self) -> None:
        calls = operation_calls(self._recording.operations())
        self.run.learn(self._recording.rings.sources)
        self.run.totals.add_operations(calls)
        self.tracking.hold(calls)

    def _drops(self) -> dict[tuple[str, str], int]:
        return {
            **self.exporters.drops(),
            ("spans", "sampled_out"): self.run.sampler.limited,
            ("records", "overrun"): self.lost,
            ("records", "queue_full"): self._recording.dropped,
            ("records", "serialization"): self._value_reader.refused,
        }

    def _faults(self) -> Counter[str]:
        """Returns the faults by component, in the rank and in the agent together, zeros included."""
        hardware = self._hardware.guard
        faults = Counter({hardware.part: hardware.faults + self._memory_monitor.guard.faults})
        for more in (
            self.loop.faults(), self.exporters.lost(), {"ranks": self.ranks.faults}, self.captures.faults(),
            self.tracking.faults(), self._recording.faults()
        ):  # fmt: skip
            faults.update(more)
        return faults

    def _log_progress(self) -> None:
        reports = self._recording.reports
        if reports > self._printed_reports:
            self.loop.read_rings()
        self.tracking.report(reports)
        if windows := self.tracking.take_windows():
            self.exporters.print_progress(self.document("running"), windows)
        if self._config.console and reports > self._printed_reports:
            self.exporters.print_summary(self.document("running"))
        self._printed_reports = reports

    def _report_stall(self) -> None:
        """Writes the summary as soon as a stall starts and ends; rank 0 also logs the start, for all ranks."""
        stall, was_stalled = self.run.stall(system_clock()), self._is_stalled
        self._is_stalled = stall is not None
        if self._is_stalled == was_stalled:
            return
        if stall is not None and self.info.rank == 0:
            run = self.exporters.run_directory
            hint = f". otel-train postmortem {run} has the last steps of all ranks" if run else ""
            _log.warning("No progress for %s, %s%s", duration(stall["seconds"]), stalled_at(stall), hint)
        self._write_summary()

    def _write_summary_if_due(self) -> None:
        """Writes the summary after 1, 2, 4 seconds and so on, up to its interval: users look at a run that has just begun."""
        age_s = (system_clock() - self._anchor.clock_ns) / NS_PER_S
        if age_s >= self._summary_due_s:
            self._summary_due_s = age_s + min(self._config.tuned().summary_interval_s, max(1.0, age_s))
            self._write_summary()

    def _write_summary(self) -> None:
        if not self.run.closed:  # else `last_poll` writes the final summary
            self.exporters.write_summary(self.document("running"))
