"""The thread between the pump and the collector."""

from __future__ import annotations

import logging
import os
import threading
import time
from typing import TYPE_CHECKING

import pytest

from otel_train.export.quiet import CallerLogs
from otel_train.export.sender import Places, Sender
from otel_train.records import Snapshot
from tests.support.figures import snapshot, spans

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from otel_train.export.spool import Payload

POINTS = sum(len(family.points) for family in snapshot().families)


class Collector:
    """A transport: accepts, refuses, hangs or breaks, as told."""

    def __init__(self, *, accepts: bool = True, held: bool = False) -> None:
        self.accepts = accepts
        self.breaks = False
        self.got: list[Payload] = []
        self.gate = threading.Event()
        self.entered = threading.Event()
        self.closed = threading.Event()
        if not held:
            self.gate.set()

    def send(self, payload: Payload, timeout_s: float) -> bool:
        self.entered.set()
        self.gate.wait()
        if self.breaks:
            raise TypeError("cannot encode")
        if self.accepts:
            self.got.append(payload)
        return self.accepts

    def close(self) -> None:
        self.closed.set()


class Kept:
    """A keeper in memory."""

    def __init__(self) -> None:
        self.payloads: list[Payload] = []

    def put(self, payload: Payload) -> bool:
        self.payloads.append(payload)
        return True


class Time:
    """Seconds that pass when told."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class SlowKept(Kept):
    """A full disk's cousin: still writing when the time to close is up."""

    def __init__(self, collector: Collector) -> None:
        super().__init__()
        self._collector = collector

    def put(self, payload: Payload) -> bool:
        self._collector.closed.wait(10)  # which is when close has given up waiting for us
        time.sleep(0.05)
        return super().put(payload)


@pytest.fixture
def make() -> Iterator[Callable[..., tuple[Sender, Kept]]]:
    """Senders that are closed after the test."""
    made: list[tuple[Sender, Collector]] = []

    def build(collector: Collector, monotonic_s: Callable[[], float] = time.monotonic) -> tuple[Sender, Kept]:
        kept = Kept()
        places = Places("http://collector:4318", "runs/r/rank0/spool")
        sender = Sender(collector, kept, places=places, timeout_s=5, monotonic_s=monotonic_s)
        made.append((sender, collector))
        return sender, kept

    yield build
    for sender, collector in made:
        collector.gate.set()
        sender.close(1)


def until(true: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 5
    while not true():
        assert time.monotonic() < deadline_s, "this never became true"
        time.sleep(0.005)


def test_what_is_put_is_sent(make: Callable[..., tuple[Sender, Kept]]) -> None:
    """The whole point."""
    collector = Collector()
    sender, kept = make(collector)
    sender.put(snapshot(), spans())
    until(lambda: len(collector.got) == 2)
    assert collector.got == [snapshot(), spans()]
    assert not kept.payloads
    assert not sender.drops


def test_putting_never_waits_for_a_collector_that_hangs(make: Callable[..., tuple[Sender, Kept]]) -> None:
    """The pump also feeds the heartbeat and /metrics: those must go on."""
    collector = Collector(held=True)
    sender, _ = make(collector)
    sender.put(snapshot(), ())
    assert collector.entered.wait(5)
    start_s = time.monotonic()
    for _ in range(1000):
        sender.put(snapshot(), spans())
    assert time.monotonic() - start_s < 1


def test_only_the_newest_unsent_snapshot_waits(make: Callable[..., tuple[Sender, Kept]]) -> None:
    """Metrics are cumulative: the newest says all, and the queue stays small."""
    collector = Collector(held=True)
    sender, _ = make(collector)
    sender.put(snapshot(1), ())
    assert collector.entered.wait(5)
    for steps in (2, 3, 4):
        sender.put(snapshot(steps), ())
    collector.gate.set()
    until(lambda: len(collector.got) == 2)
    assert collector.got == [snapshot(1), snapshot(4)]
    assert sender.drops == {("metrics", "queue_full"): 2 * POINTS}


def test_spans_beyond_the_bound_are_dropped_and_counted(make: Callable[..., tuple[Sender, Kept]]) -> None:
    """Memory stays flat while a collector is away for hours."""
    collector = Collector(held=True)
    sender, _ = make(collector)
    sender.put(snapshot(), ())
    assert collector.entered.wait(5)
    sender.put(None, spans() * 2050)
    assert sender.drops == {("traces", "queue_full"): 4}


def test_what_is_refused_is_kept_and_counted(make: Callable[..., tuple[Sender, Kept]]) -> None:
    """Nothing is lost because a collector restarts."""
    sender, kept = make(Collector(accepts=False))
    sender.put(snapshot(), spans())
    until(lambda: len(kept.payloads) == 2)
    assert kept.payloads == [snapshot(), spans()]
    assert sender.drops == {("metrics", "export_failed"): POINTS, ("traces", "export_failed"): 2}
    assert sender.failures == 2


def test_a_fault_in_an_exporter_does_not_end_the_thread(make: Callable[..., tuple[Sender, Kept]]) -> None:
    """One odd attribute must not silence a run for good."""
    collector = Collector()
    collector.breaks = True
    sender, kept = make(collector)
    sender.put(None, spans())
    until(lambda: len(kept.payloads) == 1)
    collector.breaks = False
    sender.put(snapshot(), ())
    until(lambda: collector.got == [snapshot()])
    assert sender.drops == {("traces", "serialization"): 2}


def test_closing_sends_what_is_queued(make: Callable[..., tuple[Sender, Kept]]) -> None:
    """The last figures of a run matter most."""
    collector = Collector()
    sender, kept = make(collector)
    sender.put(snapshot(9), spans())
    sender.close(2)
    assert collector.got == [snapshot(9), spans()]
    assert not kept.payloads


def test_closing_on_a_hanging_collector_takes_no_longer_than_it_may(
    make: Callable[..., tuple[Sender, Kept]],
) -> None:
    """Exit is never held up, and what hangs and what waits is on disk."""
    collector = Collector(held=True)
    sender, kept = make(collector)
    sender.put(snapshot(1), ())
    assert collector.entered.wait(5)
    sender.put(snapshot(2), spans())
    start_s = time.monotonic()
    sender.close(0.5)
    assert time.monotonic() - start_s < 0.7
    assert kept.payloads == [snapshot(1), snapshot(2), spans()]
    assert sender.drops == {("metrics", "shutdown"): 2 * POINTS, ("traces", "shutdown"): 2}
    collector.gate.set()
    sender.put(snapshot(3), ())
    assert sender.drops["metrics", "shutdown"] == 3 * POINTS


def test_closing_waits_for_what_is_just_being_kept() -> None:
    """Else the process ends, or the spool is closed, under the last figures of a run."""
    collector = Collector(accepts=False)
    kept = SlowKept(collector)
    sender = Sender(collector, kept, places=Places("here", "there"), timeout_s=10)

    sender.put(snapshot(), ())
    until(lambda: sender.failures == 1)
    sender.close(0.5)

    assert kept.payloads == [snapshot()]


def test_people_are_told_once_when_the_collector_goes_and_once_when_it_is_back(
    make: Callable[..., tuple[Sender, Kept]], caplog: pytest.LogCaptureFixture
) -> None:
    """A console full of retries hides the loss curve."""
    collector, clock = Collector(accepts=False), Time()
    sender, kept = make(collector, clock)
    for count in range(1, 6):
        clock.now_s += 50
        sender.put(snapshot(), ())
        until(lambda count=count: len(kept.payloads) == count)  # type: ignore[misc]  # a default binds it
    assert len(caplog.messages) == 1
    assert "http://collector:4318" in caplog.text
    assert "runs/r/rank0/spool, training is not affected" in caplog.text
    collector.accepts = True
    clock.now_s += 100
    sender.put(snapshot(), ())
    until(lambda: len(collector.got) == 1)
    sender.close(1)
    assert "accepts figures again" in caplog.messages[-1]
    assert len(caplog.messages) == 2


def test_a_forked_child_sends_nothing(make: Callable[..., tuple[Sender, Kept]]) -> None:
    """DataLoader workers are forks: their figures would be counted twice."""
    collector = Collector(held=True)
    sender, _ = make(collector)
    pid = os.fork()
    if pid == 0:
        sender.put(snapshot(), spans())
        sender.close(1)
        os._exit(0 if sender._snapshot is None and not sender._spans else 1)
    assert os.waitpid(pid, 0)[1] == 0


def test_only_our_own_thread_is_kept_quiet(caplog: pytest.LogCaptureFixture) -> None:
    """The user's own exporters go on saying what they have to say."""
    logger = logging.getLogger("opentelemetry.exporter.otlp.common.http")
    logs = CallerLogs()
    with logs:
        logger.error("ours %s", 1)
        theirs = threading.Thread(target=logger.error, args=("theirs",))
        theirs.start()
        theirs.join()
    logger.error("after")
    assert logs.said() == "ours 1"
    assert caplog.messages == ["theirs", "after"]
    assert logs not in logger.filters


def test_a_snapshot_is_told_from_spans() -> None:
    """Both are tuples; mixing them up would write one into the other's file."""
    assert isinstance(snapshot(), Snapshot)
    assert not isinstance(spans(), Snapshot)
