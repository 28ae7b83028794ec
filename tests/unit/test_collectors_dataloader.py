"""Loaders as metrics: what is asked of them beside the edges."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from otel_train import catalog as c
from otel_train.aggregation.metrics import LabelLimiter, MetricBuilder
from otel_train.collectors.dataloader import LoaderWatch
from otel_train.instrumentation.dataloader_workers import BatchBuildTimes, LoaderState, WorkerExit
from otel_train.instrumentation.loader_probe import LoaderProbe
from otel_train.instrumentation.naming import Loader
from otel_train.recording.events import Op
from otel_train.recording.recorder import Recorder
from tests.support.edges import Tape
from tests.support.flight import PrivateMemory
from tests.support.runs import Run

MS = 10**6


def ns(*milliseconds: float) -> np.ndarray:
    return np.array([x * MS for x in milliseconds], dtype=np.int64)


class TraceTimeline:
    """One loader named ``code`` in a run."""

    def __init__(self, tape: Tape, *, state: LoaderState | None = None, sized: bool = True) -> None:
        self.run = Run().feed(tape).close(tape.now_ns)
        recorder = Recorder(PrivateMemory(256), clock=lambda: 0)
        self.probe = LoaderProbe(Loader([1] if sized else iter(()), "code"), recorder)
        self.watch = LoaderWatch(
            self.run.account, lambda: {"code": replace(self.probe.report(), state=state)}, clock=lambda: 7
        )

    def published(self) -> dict[str, dict[tuple[str, ...], Any]]:
        builder = MetricBuilder()
        self.watch.write(builder, LabelLimiter(16), lambda pid: pid)
        return {
            family.metric.name: {tuple(v for _, v in point.attributes): point for point in family.points}
            for family in builder.families()
        }

    def values(self, metric: c.Metric) -> dict[tuple[str, ...], float]:
        return {labels: point.value for labels, point in self.published().get(metric.name, {}).items()}


def test_build_times_of_all_workers_are_one_histogram() -> None:
    """The question is how fast the loader builds, not how fast worker 3 does."""
    scene = TraceTimeline(Tape().step())
    scene.watch.add_builds([("code", BatchBuildTimes(ns(40, 40), 1)), ("code", BatchBuildTimes(ns(60), 2))])
    scene.watch.add_builds([("code", BatchBuildTimes(ns(50), 0))])
    found = scene.published()[c.LOADER_BATCH_BUILD_DURATION.name]["code",]

    assert (found.count, found.sum, found.max) == (4, 0.19, 0.06)
    assert scene.run.account.totals.loaders.lost == {"code": 3}


def test_a_worker_that_dies_is_a_count_and_an_event() -> None:
    """The alert fires on the count; the event says which worker, and what to look for in the kernel's log."""
    scene = TraceTimeline(Tape().step())
    scene.watch.add_exits([("code", WorkerExit(1, 77, "SIGKILL"))])
    (event,) = (e for e in scene.run.account.spans.drain()[1] if e.name == c.LOADER_WORKER_EXIT_EVENT.name)

    assert scene.values(c.LOADER_WORKER_EXITS) == {("code", "SIGKILL"): 1}
    assert event.attributes == {
        c.STEP_NUMBER.name: 1,
        c.SPAN_LOADER.name: "code",
        c.SPAN_ERROR_TYPE.name: "SIGKILL",
        c.WORKER_NUMBER.name: 1,
        c.WORKER_PID.name: 77,
    }


def test_errors_are_counted_by_class() -> None:
    """FileNotFoundError is for the storage, ValueError for the data."""
    scene = TraceTimeline(Tape().step().ask(op=Op.FAIL).ask(op=Op.FAIL).start().step())
    assert scene.values(c.LOADER_ERRORS) == {("code",): 2}  # their classes are not known
    for error in (ValueError(), ValueError(), KeyboardInterrupt()):
        scene.probe.failed(error)

    assert scene.values(c.LOADER_ERRORS) == {("code",): 0, ("code", "ValueError"): 2}


def test_what_waits_in_the_queue_is_memory() -> None:
    """Bytes per batch times batches; pinned ones apart, so that components add up."""
    state = LoaderState(2, 2, 0, (100, 200), 6, 4, 16)
    scene = TraceTimeline(Tape().step(), state=state)
    assert scene.values(c.MEMORY_USAGE) == {("code", "workers"): 300}  # no batch weighed, no bytes
    scene.probe.payload([np.zeros(8, dtype=np.uint8)])

    assert scene.values(c.MEMORY_USAGE) == {
        ("code", "workers"): 300,
        ("code", "prefetch_queue"): 16,
        ("code", "pinned"): 32,
    }
    assert scene.values(c.LOADER_QUEUE_SIZE) == {("code",): 6}
    assert scene.values(c.LOADER_QUEUE_LIMIT) == {("code",): 16}


def test_one_batch_is_weighed_per_look() -> None:
    """Weighing takes microseconds; not for every batch."""
    scene = TraceTimeline(Tape().step())
    for number in (1, 2, 3):
        scene.probe.payload([np.zeros(number, dtype=np.uint8)])
    assert scene.probe.weights.row() == {"sampled": 1, "min": 1, "avg": 1, "max": 1}
    scene.probe.weigh_next()
    for number in (4, 5):
        scene.probe.payload([np.zeros(number, dtype=np.uint8)])

    assert scene.probe.weights.row() == {"sampled": 2, "min": 1, "avg": 2.5, "max": 4}
