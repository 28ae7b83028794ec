"""The one daemon thread that reads what was recorded."""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.ma  # numpy imports it with the first np.unique: 30 ms that would fall into a step

from otel_train.aggregation.run_state import SLICE_EDGES
from otel_train.datamodel import NS_PER_S, ExportBatch
from otel_train.safety import Guard, daemon_thread

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from otel_train.aggregation.run_state import RunState
    from otel_train.datamodel import Clock, Snapshot
    from otel_train.exporters import Exporter
    from otel_train.recording.recorder import Recorder, ThreadRing

SETTLE_EVERY_S = 2.0
"""Edges are worked out this often, or when a slice is full: the numpy calls cost the same for few as for many."""

MAX_GIL_HOLD_NS = 150_000
"""The pump lets the training thread have the interpreter after holding it this long (budget: 0.2 ms)."""

GIL_YIELD_S = 50e-6
"""Long enough for a thread that waits for the interpreter to wake up."""

_SETTLE = -1


class GilYielder:
    """Gives the interpreter away when it has been held for long.

    Args:
        clock: monotonic nanoseconds.
        after_ns: how long it may be held.
    """

    def __init__(self, clock: Clock, after_ns: int = MAX_GIL_HOLD_NS) -> None:
        self._clock = clock
        self._after_ns = after_ns
        self._since_ns = 0

    def begin(self) -> None:
        """A turn begins."""
        self._since_ns = self._clock()

    def __call__(self) -> None:
        """Let others run, if it is time."""
        if self._clock() - self._since_ns > self._after_ns:
            time.sleep(GIL_YIELD_S)
            self._since_ns = self._clock()


class ExportRoute(NamedTuple):
    """An exporter and how it is driven.

    Attributes:
        exporter: takes batches.
        guard: contains its faults.
        every_s: least seconds between two snapshots.
    """

    exporter: Exporter
    guard: Guard
    every_s: float


class PeriodicTask(NamedTuple):
    """Something the pump does now and then.

    Attributes:
        do: called on the pump thread.
        guard: contains its faults.
        every_s: seconds between two calls; 0 on every turn.
    """

    do: Callable[[], None]
    guard: Guard
    every_s: float


class Pump:
    """Reads the rings, settles them, and hands batches to the exporters.

    Args:
        recorder: where the edges are.
        run: takes them.
        snapshot: makes a snapshot of every metric.
        clock: monotonic nanoseconds.
        every_s: seconds between two turns.
    """

    def __init__(
        self,
        recorder: Recorder,
        run: RunState,
        *,
        snapshot: Callable[[], Snapshot],
        clock: Clock,
        yield_gil: GilYielder,
        every_s: float,
    ) -> None:
        self.routes: list[ExportRoute] = []
        self.chores: list[PeriodicTask] = []
        self.first: list[PeriodicTask] = []
        """Done once it is known how far to read, before anything is read."""
        self.between: Callable[[], float | None] = lambda: None
        """Done in the pauses between turns; says in how many seconds again, None for not in this pause. Never raises."""
        self.edges = 0
        self.missed = 0
        self.cpu_s = 0.0
        self.lock = threading.Lock()
        self.guard = Guard("pump")
        self._recorder = recorder
        self._run = run
        self._snapshot = snapshot
        self._clock = clock
        self._yield_gil = yield_gil
        self._every_s = every_s
        self._due: dict[int, int] = {}
        self._engine: list[tuple[np.ndarray, np.ndarray]] = []
        self._stop = threading.Event()
        self._thread = daemon_thread(self._loop, "otel-train-pump")

    def faults(self) -> dict[str, int]:
        """Faults of ours on this side, by part."""
        faults: dict[str, int] = {}
        driven: list[ExportRoute | PeriodicTask] = [*self.routes, *self.first, *self.chores]
        for guard in dict.fromkeys((self.guard, *(each.guard for each in driven))):  # some share one
            faults[guard.part] = faults.get(guard.part, 0) + guard.faults
        return faults

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self, timeout_s: float) -> None:
        """End the thread; the last turn is the caller's."""
        self._stop.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(timeout_s)

    def turn(self, *, final: bool = False) -> None:
        """One round: read, settle, export. Tests call it directly."""
        self._yield_gil.begin()
        self._recorder.publish(time.time_ns())
        full = any(thread.ring.pending >= SLICE_EDGES for thread in self._recorder.threads)
        if full or self._is_due(_SETTLE, SETTLE_EVERY_S):
            self.settle()
        for number, chore in enumerate(self.chores):
            if (final or self._is_due(_SETTLE - 1 - number, chore.every_s)) and not chore.guard.closed:
                with chore.guard:
                    chore.do()
        self._export(final=final)

    @contextmanager
    def settled(self) -> Iterator[None]:
        """Inside the block everything recorded before it is settled, and nothing moves."""
        with self.lock:
            if not self._run.closed:
                with self.guard:
                    self.settle()
            yield

    def settle_within(self, patience_s: float) -> bool:
        """Settle what was recorded until now, unless the run is over or a turn takes longer. Whether it was done."""
        if not self.lock.acquire(timeout=patience_s):
            return False
        try:
            if not self._run.closed:
                with self.guard:
                    self.settle()
            return not self._run.closed
        finally:
            self.lock.release()

    def settle(self) -> None:
        """Read every ring up to now and settle what can be settled."""
        now_ns = self._clock()
        threads = list(self._recorder.threads)
        ended = [thread for thread in threads if thread.ended]
        self._run.learn(self._recorder.sources)
        # How far the others are is read before autograd's own threads are: what those did until then is there.
        waiting = [(thread, thread.ring.pending) for thread in threads if not thread.engine]
        for chore in self.first:
            if not chore.guard.closed:
                with chore.guard:
                    chore.do()
        for thread in threads:
            if thread.engine:
                self._read_engine(thread)
        for thread, pending in waiting:
            for first in range(0, pending, SLICE_EDGES):
                self._read(thread, min(SLICE_EDGES, pending - first))
        for thread in ended:
            self._recorder.release(thread)
            self._run.end_thread(id(thread))
        # Of edges that may not be read yet, nobody knows what they say of the time until now.
        behind = {id(thread) for thread in threads if thread.ring.written > thread.ring.taken}
        self._run.look(now_ns, behind)

    def _read(self, thread: ThreadRing, most: int) -> None:
        piece = thread.ring.read(most)
        self.edges += len(piece.times)
        self.missed += piece.missed
        # A source is registered before its first edge, so its name is known by now.
        self._run.learn(self._recorder.sources)
        main = thread is self._recorder.main
        times, codes = self._with_engine(piece.times, piece.codes) if main else (piece.times, piece.codes)
        self._run.feed(id(thread), times, codes, name=thread.name, main=main)
        self._yield_gil()

    def _read_engine(self, thread: ThreadRing) -> None:
        piece = thread.ring.read(thread.ring.capacity)
        self.edges += len(piece.times)
        self.missed += piece.missed
        self._engine.append((piece.times, piece.codes))

    def _with_engine(self, times: np.ndarray, codes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Edges of autograd's own threads, put where they belong: into the backward that waits for them."""
        if not self._engine or not len(times):
            return times, codes
        engine_times = np.concatenate([part[0] for part in self._engine])
        engine_codes = np.concatenate([part[1] for part in self._engine])
        ripe = engine_times <= times[-1]
        self._engine = [(engine_times[~ripe], engine_codes[~ripe])] if not ripe.all() else []
        all_times = np.concatenate((times, engine_times[ripe]))
        order = np.argsort(all_times, kind="stable")
        return all_times[order], np.concatenate((codes, engine_codes[ripe]))[order]

    def _is_due(self, what: int, every_s: float) -> bool:
        now_ns = self._clock()
        if now_ns < self._due.get(what, 0):
            return False
        self._due[what] = now_ns + int(every_s * NS_PER_S)
        return True

    def _export(self, *, final: bool) -> None:
        spans, events = self._run.spans.drain()
        routes = list(self.routes)
        due = [final or self._is_due(number, route.every_s) for number, route in enumerate(routes)]
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
            self._yield_gil()

    def _rested(self) -> bool:
        """Pause until the next turn is due. Whether it was the last pause."""
        until_s = time.monotonic() + self._every_s
        left_s: float = self._every_s
        while left_s > 0:
            again_s = self.between()
            if self._stop.wait(left_s if again_s is None else min(left_s, again_s)):
                return True
            left_s = until_s - time.monotonic()
        return self._stop.is_set()

    def _loop(self) -> None:
        while not self._rested() and not self.guard.closed:
            with self.lock, self.guard:
                self.turn()
            self.cpu_s = time.thread_time()
