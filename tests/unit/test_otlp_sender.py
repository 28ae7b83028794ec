"""The thread between the export loop and the collector."""

from __future__ import annotations

import logging
import os
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from otel_train.exporters.otlp import LONGEST_PAUSE_S, Backoff, OtlpExporter
from otel_train.exporters.otlp_json import OtlpLines, metrics_line, spans_line
from otel_train.exporters.otlp_response import ACCEPTED, LONGEST_ASKED_S, ExportResponse, refused, retry
from otel_train.exporters.otlp_settings import OtlpSettings
from otel_train.exporters.spool import SpoolQueue
from tests.support.snapshots import RESOURCE, snapshot, spans
from tests.support.waiting import until

Make = Callable[..., OtlpExporter]

POINTS = sum(len(family.points) for family in snapshot().families)
SPANS = spans_line(spans(), RESOURCE).encode()
SETTINGS = OtlpSettings.read({}, endpoint="http://collector:4318")


def metrics(steps: float = 7.0) -> bytes:
    return metrics_line(snapshot(steps), RESOURCE).encode()


class Collector:
    """A transport: gives the answers that the test sets, or hangs."""

    def __init__(self, answer: ExportResponse = ACCEPTED, *, held: bool = False) -> None:
        self.answer = answer
        self.answers: dict[str, ExportResponse] = {}
        self.asked: list[tuple[str, bytes]] = []
        self.got: list[bytes] = []
        self.released = threading.Event()
        self.entered = threading.Event()
        if not held:
            self.released.set()

    def send(self, signal: str, line: bytes, timeout_s: float) -> ExportResponse:
        self.asked.append((signal, line))
        self.entered.set()
        if not self.released.wait(timeout_s):
            return retry("does not answer")
        answer = self.answers.get(signal, self.answer)
        if answer.accepted:
            self.got.append(line)
        return answer

    def close(self) -> None:
        self.released.set()
        self.answer = retry("is gone")
        self.answers.clear()


class Time:
    """Seconds that pass when the test advances them."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    """Senders with a spool in ``tmp_path``, closed after the test."""
    made: list[tuple[OtlpExporter, Collector]] = []

    def build(
        collector: Collector,
        monotonic_s: Callable[[], float] = time.monotonic,
        *,
        directory: Path | None = tmp_path,
        max_bytes: int = 1 << 20,
        settings: OtlpSettings = SETTINGS,
    ) -> OtlpExporter:
        sender = OtlpExporter(
            settings, OtlpLines(RESOURCE), directory=directory,
            transport=collector, max_bytes=max_bytes, monotonic_s=monotonic_s,
        )  # fmt: skip
        made.append((sender, collector))
        return sender

    yield build
    for sender, collector in made:
        collector.released.set()
        sender.close(1)


def sending(make: Make, line: bytes = metrics(), **settings: Any) -> tuple[OtlpExporter, Collector]:
    """A sender in the middle of a request, and its collector that hangs."""
    collector = Collector(held=True)
    sender = make(collector, **settings)
    sender.put("metrics", line)
    assert collector.entered.wait(5)
    return sender, collector


def left(folder: Path, signal: str = "metrics") -> list[bytes]:
    return list(SpoolQueue(folder, signal).waiting())


def test_a_request_that_gets_no_answer_is_said_to_wait(make: Make) -> None:
    """A run that ended within the timeout of a Collector that hangs said nothing of what had not arrived."""
    clock = Time()
    sender, collector = sending(make, monotonic_s=clock)
    said = [sender.failing]
    clock.now_s = 1.1
    said.append(sender.failing)
    assert said == [False, True]

    collector.released.set()
    until(lambda: not sender.failing)


def test_a_resolver_that_hangs_is_said_while_it_hangs(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    """A look-up cannot be limited: nothing was logged for the two minutes and a half until it failed."""
    clock = Time()
    sender, _ = sending(make, monotonic_s=clock)
    for seconds in (19.0, 31.0, 120.0):
        clock.now_s = seconds
        sender.put("metrics", metrics())

    [line] = caplog.messages
    assert line.startswith(
        "OTLP: http://collector:4318 has been asked for 31 s, longer than a request may take: its name does not resolve yet; "
        "correct the host name, or the resolver of this machine; requests wait in "
    )


def test_what_is_put_is_on_disk_before_it_is_sent(make: Make, tmp_path: Path) -> None:
    """SIGKILL in the middle of a request must lose nothing."""
    sender, _ = sending(make, metrics(1))
    for steps in (2, 3):
        sender.put("metrics", metrics(steps))

    assert left(tmp_path) == [metrics(1), metrics(2), metrics(3)]


def test_putting_never_waits_for_a_collector_that_hangs(make: Make) -> None:
    """The export loop also feeds the heartbeat and /metrics: those must go on."""
    sender, collector = sending(make)
    for _ in range(500):
        sender.put("metrics", metrics())
    assert len(collector.asked) == 1, "it is still in the request that hangs"


def test_one_signal_does_not_wait_for_the_other(make: Make) -> None:
    """Traces and metrics may have collectors of their own."""
    collector = Collector()
    collector.answers["metrics"] = retry("answers 503")
    sender = make(collector)
    sender.put("metrics", metrics())
    sender.put("traces", SPANS)
    until(lambda: collector.got == [SPANS])


def test_only_the_rejected_records_of_a_request_are_counted(make: Make) -> None:
    """The rest has arrived."""
    sender = make(Collector(refused("rejects 2 records", 2)))
    sender.put("metrics", metrics())
    until(lambda: sender.drops == {("metrics", "rejected"): 2})


def test_a_fault_in_a_transport_does_not_end_the_thread(make: Make) -> None:
    """A defect in a transport neither stops the sender for good nor loses the request."""
    collector, clock = Collector(), Time()
    usual = collector.send
    collector.send = lambda *_: 1 / 0  # type: ignore[method-assign, assignment]  # breaks
    sender = make(collector, clock)
    sender.put("metrics", metrics())
    until(lambda: sender.failures == 1)
    collector.send = usual  # type: ignore[method-assign]  # works again
    clock.now_s += LONGEST_PAUSE_S
    sender.put("traces", SPANS)
    until(lambda: set(collector.got) == {metrics(), SPANS})


def test_a_fault_in_a_transport_is_logged_once_while_it_lasts(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    """Each of its tries had a traceback of thirty lines, once a second."""

    class Broken(Collector):
        def send(self, signal: str, line: bytes, timeout_s: float) -> ExportResponse:
            raise TypeError("a header")

    clock = Time()
    sender = make(Broken(), clock)
    for count in range(1, 5):
        clock.now_s += 100
        sender.put("metrics", metrics())
        until(lambda count=count: sender.failures == count)  # type: ignore[misc]  # a default binds it

    assert caplog.text.count("Traceback") == 1


def test_a_collector_is_left_alone_as_long_as_it_asks(make: Make) -> None:
    """An overloaded collector that is asked all the same stays overloaded."""
    collector, clock = Collector(retry("answers 429", 40)), Time()
    sender = make(collector, clock)
    sender.put("metrics", metrics())
    until(lambda: sender.failures == 1)
    collector.answer = ACCEPTED
    clock.now_s = 39.0
    sender.put("metrics", metrics())
    time.sleep(0.05)
    assert collector.got == []
    clock.now_s = 81.0
    sender.put("metrics", metrics())
    until(lambda: len(collector.got) == 3)


def test_a_run_that_ends_after_the_wait_that_was_asked_for_sends_its_last_metrics(make: Make) -> None:
    """They say that it has finished. Without them it has vanished, and pages."""
    collector, clock = Collector(retry("answers 429", 40)), Time()
    sender = make(collector, clock)
    sender.put("metrics", metrics())
    until(lambda: sender.failures == 1)
    collector.answer = ACCEPTED
    clock.now_s = 40.5
    sender.close(5)

    assert len(collector.got) == 1


def test_pauses_grow_are_bounded_and_differ() -> None:
    """A thousand ranks that lost one collector must not come back in step."""
    state = random.getstate()
    pauses = [[backoff.pause_s() for _ in range(12)] for backoff in (Backoff(), Backoff())]

    assert pauses[0] != pauses[1]
    for each in pauses:
        assert 0.5 <= each[0] <= 1
        assert LONGEST_PAUSE_S / 2 <= each[-1] <= LONGEST_PAUSE_S
        assert each[4] > each[0]
    assert Backoff().pause_s(7) >= 7
    assert Backoff().pause_s(1e9) <= 2 * LONGEST_ASKED_S
    for asked_s in (0, 1):
        backoff = Backoff()
        pauses_s = [backoff.pause_s(asked_s) for _ in range(12)]
        assert pauses_s[-1] >= LONGEST_PAUSE_S / 2, "asked every second for ever"
    assert random.getstate() == state, "the training program seeds that generator"


def test_a_thousand_ranks_that_are_asked_to_wait_a_minute_do_not_come_back_in_one_second() -> None:
    """A Collector that has just come back falls over again, and asks them to wait as long once more."""
    a_second: Counter[int] = Counter(int(Backoff().pause_s(60)) for _ in range(1000))

    assert min(a_second) >= 60
    assert max(a_second.values()) < 50


def test_closing_on_a_hanging_collector_takes_no_longer_than_it_may(make: Make, tmp_path: Path) -> None:
    """Exit is never held up, and what hangs and what waits is on disk."""
    sender, _ = sending(make, metrics(1))
    sender.put("metrics", metrics(2))
    start_s = time.monotonic()
    sender.close(0.5)

    assert time.monotonic() - start_s < 0.7
    assert left(tmp_path) == [metrics(1), metrics(2)]
    assert not sender.drops
    sender.put("metrics", metrics(3))
    assert sender.drops == {("metrics", "shutdown"): POINTS}


def test_what_waits_at_the_end_is_said_without_a_false_reason(
    make: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The connection was ended by us: a remark about TLS would send people on a wrong track."""
    sender, _ = sending(make)
    sender.close(0.3)
    [line] = caplog.messages

    assert "has not accepted everything in the time to close" in line
    assert str(tmp_path / "spool") in line


def test_without_a_disk_sending_works_from_memory_and_losses_are_counted_and_said(
    make: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A read-only run directory must not cost the dashboard. What is counted at the end nothing exports any more."""
    sender, collector = sending(make, metrics(1), directory=None)
    sender.put("metrics", metrics(2))
    collector.released.set()
    until(lambda: collector.got == [metrics(1), metrics(2)])

    collector.answer = retry("answers 503")
    sender.put("metrics", metrics(3))
    sender.close(0.5)
    assert sender.drops == {("metrics", "shutdown"): POINTS}
    assert f"{POINTS} records of metrics were in memory alone and are lost" in caplog.text
    assert list(tmp_path.iterdir()) == []


def test_records_made_during_a_long_outage_are_counted(make: Make) -> None:
    """An alert says that a run cannot be seen; a short interruption is not worth one."""
    clock = Time()
    sender = make(Collector(retry("answers 503")), clock)
    sender.put("metrics", metrics())
    until(lambda: sender.failures == 1)
    clock.now_s = 59
    sender.put("metrics", metrics())
    assert sender.drops == {}
    clock.now_s = 62
    sender.put("metrics", metrics())
    assert sender.drops == {("metrics", "export_failed"): POINTS}


def test_people_are_notified_once_when_the_collector_goes_and_once_when_it_is_back(
    make: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A console full of retries hides the loss curve."""
    collector, clock = Collector(retry("refuses connections")), Time()
    sender = make(collector, clock)
    for count in range(1, 6):
        clock.now_s += 100
        sender.put("metrics", metrics())
        until(lambda count=count: sender.failures == count)  # type: ignore[misc]  # a default binds it
    assert len(caplog.messages) == 1
    assert "http://collector:4318 refuses connections" in caplog.text
    assert f"{tmp_path / 'spool'}" in caplog.text
    assert (
        "when it accepts them, after the end by `otel-train replay`; training is not affected" in caplog.text
    )
    collector.answer = ACCEPTED
    clock.now_s += 100
    sender.put("metrics", metrics())
    until(lambda: len(collector.got) == 6)
    sender.close(1)
    assert "accepts requests again" in caplog.messages[-1]
    assert len(caplog.messages) == 2


def test_of_two_addresses_the_one_that_does_not_accept_is_named(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    """Metrics go to one Collector, spans to another, which is away: both were said to refuse connections."""
    collector = Collector()
    collector.answers["traces"] = retry("refuses connections")
    own = {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://tempo:4318/v1/traces"}
    settings = OtlpSettings.read({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://collector:4318", **own})
    sender = make(collector, settings=settings)
    sender.put("metrics", metrics())
    sender.put("traces", SPANS)
    until(lambda: sender.failures == 1)
    until(lambda: bool(caplog.messages))

    assert caplog.messages[0].startswith("OTLP: http://tempo:4318/v1/traces refuses connections; ")


def test_people_are_notified_of_refusals_once_a_minute(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    """What is moved aside must be known, and with it where it lies."""
    sender = make(Collector(refused("refuses a request (400, bad name)")))
    for _ in range(5):
        sender.put("metrics", metrics())
    until(lambda: sender.failures == 5)
    [line] = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]

    assert "refuses a request (400, bad name)" in line
    assert "spool/rejected/metrics.jsonl" in line


def test_a_forked_child_sends_nothing_and_holds_no_lock(make: Make, tmp_path: Path) -> None:
    """DataLoader workers are forks: their metrics would be counted twice, and they may outlive their parent."""
    sender, collector = sending(make)
    out, into = os.pipe()
    pid = os.fork()
    if pid == 0:
        sender.put("metrics", metrics())
        sender.close(1)
        os.read(out, 1)
        os._exit(0)
    collector.released.set()
    until(lambda: len(collector.got) == 1)
    sender.close(1)
    with SpoolQueue(tmp_path, "metrics").sending() as granted:
        assert granted
    os.write(into, b"x")
    assert os.waitpid(pid, 0)[1] == 0
    assert collector.got == [metrics()]


def test_two_never_send_at_once(make: Make, tmp_path: Path) -> None:
    """Else both send the head, and it arrives twice."""
    _, first = sending(make)

    with SpoolQueue(tmp_path, "metrics").sending() as granted:
        assert not granted
    second = Collector()
    make(second)
    time.sleep(0.1)
    assert second.asked == []
    first.released.set()
    until(lambda: first.got == [metrics()])
    time.sleep(0.1)
    assert second.asked == []
