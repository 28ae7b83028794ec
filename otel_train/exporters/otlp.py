"""The OTLP exporter: writes requests to the spool, from which one thread sends them."""

from __future__ import annotations

import logging
import math
import os
import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple

from otel_train.exporters.otlp_json import OtlpLines, records_in
from otel_train.exporters.otlp_response import (
    ACCEPTED,
    LONGEST_ASKED_S,
    ExportResponse,
    ExportResult,
    refused,
    retry,
)
from otel_train.exporters.otlp_transport import OtlpTransport, Transport
from otel_train.exporters.spool import DEFAULT_MAX_BYTES, SpoolQueue
from otel_train.safety import daemon_thread, free_in_forks

if TYPE_CHECKING:
    from pathlib import Path

    from otel_train.datamodel import ExportBatch
    from otel_train.exporters.otlp_settings import OtlpSettings

_log = logging.getLogger("otel_train")

_SPANS_PER_REQUEST = 512  # the batch size that the SDK's own span processor uses by default

_LINE_INTERVAL_S: Final = 60.0
"""Shortest time between two log lines of one kind: Collector away or back, a rejection, a warning of the Collector."""

_CLOSE_SHARE_S: Final = 0.1
"""Part of the time to close that is kept for aborting a request without a response."""

_LAST_TRY_S: Final = 0.5
"""Timeout of the last request at close if the one before it failed."""

_SLOW_S: Final = 1.0
"""A request that takes longer counts as failing: the run summary says that requests wait."""

_LOOK_UP_S: Final = 10.0
"""Time beyond two request timeouts before the log says that a look-up of the host name hangs; DNS look-ups have no timeout."""

_UNRESOLVED: Final = (
    "has been asked for {:.0f} s, longer than a request may take: its name does not resolve yet; correct the host name, "
    "or the resolver of this machine"
)

_BUSY_S: Final = 1.0
"""Pause before the next try of a queue that another process is sending from."""

OUTAGE_S: Final = 60.0
"""Time without an accepted request after which new records count as ``export_failed``."""

SUSPECT_AFTER: Final = 2
"""Server errors in a row to the same request after which the request behind it is sent, too."""

FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0
"""Longest pause after the first failure, and after many; the shortest is half of it."""


class Delivery(NamedTuple):
    """Result of sending the oldest request of a queue."""

    answer: ExportResponse | None = None  # None if nothing was sent
    busy: bool = False  # whether another process is sending from this queue
    records: int = 0
    behind: int = 0  # requests behind it that were accepted in the same call


class Backoff:
    """Exponential backoff with a limit and jitter.

    The jitter comes from a generator of its own, because the training program seeds Python's.
    """

    def __init__(self) -> None:
        self._numbers = random.Random()  # noqa: S311 - spreads load, keeps no secret
        self._failures = 0

    def reset(self) -> None:
        """Starts again with the shortest pause."""
        self._failures = 0

    def pause_s(self, asked_s: float | None = None) -> float:
        """Returns the seconds until the next attempt: at least ``asked_s`` (``Retry-After``), of which up to 10 minutes count."""
        own_s = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0 ** min(self._failures, 16)) / 2
        self._failures += 1
        # All ranks get the same ``Retry-After``: jitter in proportion to it keeps them from coming back together.
        return max(own_s, min(asked_s or 0.0, LONGEST_ASKED_S)) * self._numbers.uniform(1.0, 2.0)


def deliver(
    queue: SpoolQueue, signal: str, transport: Transport, timeout_s: float, *, suspect: bool = False
) -> Delivery:
    """Sends the oldest request of a queue, then removes, keeps or rejects it according to the response.

    ``suspect``: the request has failed with server errors before. If it does so again and the request behind it is accepted,
    it is the cause, and is rejected for good: a Collector may answer 500 to a request that it cannot read.
    """
    with queue.sending() as granted:
        if not granted:
            return Delivery(busy=True)
        head = queue.head()
        if head is None:
            return Delivery()
        if head.problem:
            answer = refused(head.problem)
        elif not head.line.strip():
            answer = ACCEPTED
        else:
            answer = transport.send(signal, head.line, timeout_s)
        behind = queue.after(head) if suspect and answer.poison else None
        if behind is not None and transport.send(signal, behind.line, timeout_s).accepted:
            reason = f"{answer.reason} to this request again and again, and accepts the one behind it"
            answer = refused(reason)
            queue.reject(head, reason)
            queue.remove(behind)
            return Delivery(answer, records=records_in(head.line), behind=1)
        if answer.result is ExportResult.ACCEPTED:
            queue.remove(head)
        elif answer.result is ExportResult.REFUSED:
            queue.reject(head, answer.reason)
        records = records_in(head.line)
    return Delivery(answer, records=records if answer.rejected is None else min(answer.rejected, records))


class _SignalQueue:
    def __init__(self, signal: str, queue: SpoolQueue) -> None:
        self.signal = signal
        self.queue = queue
        self.backoff = Backoff()
        self.pending = True  # an earlier process may have left requests
        self.due_s = 0.0
        self.failing_since_s: float | None = None
        self.asking_since_s = math.inf  # start of the request in progress; inf for none
        self.asked_at_last_put_s = math.inf  # ``asking_since_s`` at the last ``put``
        self.asked_until_s = 0.0  # end of the time that the Collector asked to wait
        self.given_up = False  # whether no further request is tried at close
        self.server_errors = 0  # in a row


class OtlpExporter:
    """Appends every batch to the spool; a daemon thread sends from it, the oldest request first.

    No call but ``close`` waits for the network, and requests on disk survive this process. A request that is not accepted
    stays, and so do all behind it, until its next try. In a forked child every call does nothing.

    Args:
        settings: what to send, and how; ``OtlpSettings.read(os.environ)``.
        lines: encodes requests, each with the resource attributes.
        directory: folder of the rank, which the spool is in; None keeps waiting requests in memory.
        transport: sends requests; None: a transport with connections of its own.
        max_bytes: bound on the spool.
        on_error: called with every ``OSError`` of the spool.
    """

    def __init__(  # noqa: PLR0913  # all but two by keyword
        self,
        settings: OtlpSettings,
        lines: OtlpLines,
        *,
        directory: Path | None = None,
        transport: Transport | None = None,
        max_bytes: int = DEFAULT_MAX_BYTES,
        on_error: Callable[[OSError], None] = lambda _error: None,
        monotonic_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self.failures = 0  # requests that were not accepted
        self.rejected = 0  # those of them that were rejected for good
        self._lines = lines
        self._failure_logged = False
        self._drops: Counter[tuple[str, str]] = Counter()
        self._transport = transport or OtlpTransport(settings.targets)
        self._timeout_s = settings.timeout_s
        self._monotonic_s = monotonic_s
        self._pid = os.getpid()
        self._changed = free_in_forks(threading.Condition())
        self._counting = free_in_forks(threading.Lock())
        self._queues = {}
        for signal in settings.targets:
            lost = partial(self.count, signal)
            queue = SpoolQueue(directory, signal, max_bytes=max_bytes // 2, on_loss=lost, on_error=on_error)
            self._queues[signal] = _SignalQueue(signal, queue)
        queues = [lane.queue for lane in self._queues.values()]
        self._log_lines = _CollectorLog(settings, queues, monotonic_s)
        self._deadline_s: float | None = None
        self._abandoned = False
        self._thread = daemon_thread(self._run, "otel-train-sender")
        self._thread.start()

    @property
    def drops(self) -> dict[tuple[str, str], int]:
        """Records that did not reach the Collector, by (signal, reason).

        Signals are ``metrics`` (data points) and ``traces`` (spans). Reasons: ``queue_full``, the spool was full and
        dropped its oldest; ``rejected``, refused for good and moved to ``spool/rejected/``; ``serialization``, could not be
        encoded as a request; ``shutdown``, was in memory when the time to close was up; ``export_failed``, appended during
        an outage of more than a minute, and waits in the spool.
        """
        with self._counting:
            return dict(self._drops)

    @property
    def failing(self) -> bool:
        """Whether requests wait: the last one of a signal failed, or one takes longer than ``_SLOW_S``."""
        slow_s = self._monotonic_s() - _SLOW_S
        lanes = self._queues.values()
        return any(lane.failing_since_s is not None or lane.asking_since_s < slow_s for lane in lanes)

    @property
    def unsaved(self) -> int:
        """Number of requests that are only in memory, because the disk does not take them."""
        return sum(lane.queue.unsaved for lane in self._queues.values())

    def export(self, batch: ExportBatch) -> None:
        """Appends one batch to the spool."""
        snapshot = batch.snapshot
        if snapshot is not None and "metrics" in self._queues:
            points = sum(len(family.points) for family in snapshot.families)
            self._write("metrics", points, self._lines.metrics, snapshot)
        if "traces" in self._queues:
            for first in range(0, len(batch.spans), _SPANS_PER_REQUEST):
                spans = batch.spans[first : first + _SPANS_PER_REQUEST]
                self._write("traces", len(spans), self._lines.spans, spans)

    def _write(self, signal: str, records: int, line_of: Callable[..., str], data: object) -> None:
        try:
            request = line_of(data).encode("utf-8", "replace")
        except Exception:  # noqa: BLE001 - whatever is in a label, the export loop goes on
            self.count(signal, records, "serialization")
            if not self._failure_logged:
                self._failure_logged = True
                _log.exception(
                    "OTLP: %d records of %s cannot be written as a request; dropped", records, signal
                )
        else:
            self.put(signal, request)

    def put(self, signal: str, line: bytes) -> None:
        """Appends a request to the spool and returns."""
        if os.getpid() != self._pid:
            return
        if self._deadline_s is not None:
            self.count(signal, records_in(line), "shutdown")
            return
        lane = self._queues[signal]
        since_s = lane.failing_since_s
        if since_s is not None and self._monotonic_s() - since_s > OUTAGE_S:
            self.count(signal, records_in(line), "export_failed")
        lane.queue.append(line)
        before_s, lane.asked_at_last_put_s = lane.asked_at_last_put_s, lane.asking_since_s
        asked_s = self._monotonic_s() - before_s
        if lane.asking_since_s == before_s and asked_s > 2 * self._timeout_s + _LOOK_UP_S:
            self._log_lines.lost(_UNRESOLVED.format(asked_s), signal)
        with self._changed:
            lane.pending = True
            self._changed.notify()

    def count(self, signal: str, records: int, reason: str) -> None:
        """Counts records that do not reach the Collector, by reason (see ``drops``)."""
        with self._counting:
            self._drops[signal, reason] += records

    def close(self, timeout_s: float) -> None:
        """Sends what waits within ``timeout_s`` seconds; the rest stays in the spool."""
        if os.getpid() != self._pid or self._deadline_s is not None:
            return
        network_s = max(timeout_s - _CLOSE_SHARE_S, timeout_s / 2)
        with self._changed:
            self._deadline_s = self._monotonic_s() + network_s
            self._changed.notify()
        self._thread.join(network_s)
        with self._changed:
            self._abandoned = True
        self._transport.close()
        self._thread.join(max(0.0, timeout_s - network_s))
        self._log_lines.closing()
        for lane in self._queues.values():
            lane.queue.close()
            if lost := self.drops.get((lane.signal, "shutdown")):
                _log.warning("OTLP: %d records of %s were in memory alone and are lost", lost, lane.signal)

    def _run(self) -> None:
        while (lane := self._next()) is not None:
            timeout_s = self._limit_s(lane)
            if timeout_s <= 0:
                return
            lane.asking_since_s = self._monotonic_s()
            try:
                suspect = lane.server_errors >= SUSPECT_AFTER
                delivery = deliver(lane.queue, lane.signal, self._transport, timeout_s, suspect=suspect)
            except Exception as error:  # noqa: BLE001 - an error must not end the thread
                if lane.failing_since_s is None:  # once: it is tried again and again
                    _log.exception("OTLP: sending %s failed; the request stays in the spool", lane.signal)
                delivery = Delivery(retry(f"was not asked ({type(error).__name__})"))
            lane.asking_since_s = math.inf
            self._record(lane, delivery)

    def _next(self) -> _SignalQueue | None:
        with self._changed:
            while not self._abandoned:
                now_s = self._monotonic_s()
                waiting = [lane for lane in self._queues.values() if lane.pending]
                if self._deadline_s is None:
                    ready = [lane for lane in waiting if lane.due_s <= now_s]
                else:
                    # One short request to a Collector that is away, none before the end of its ``Retry-After``.
                    ready = [lane for lane in waiting if not lane.given_up and lane.asked_until_s <= now_s]
                if ready:
                    lane = min(ready, key=lambda lane: lane.due_s)
                    lane.pending = False  # before the queue is read: ``put`` may set it again meanwhile
                    return lane
                if self._deadline_s is not None:
                    return None
                self._changed.wait(min((lane.due_s - now_s for lane in waiting), default=None))
        return None

    def _limit_s(self, lane: _SignalQueue) -> float:
        left_s = self._timeout_s
        if self._deadline_s is not None:
            left_s = min(left_s, self._deadline_s - self._monotonic_s())
            if lane.failing_since_s is not None:
                left_s = min(left_s, _LAST_TRY_S)
        return left_s

    def _record(self, lane: _SignalQueue, delivery: Delivery) -> None:
        answer, now_s = delivery.answer, self._monotonic_s()
        lane.due_s = lane.asked_until_s = now_s
        if delivery.busy:
            lane.due_s += _BUSY_S
            lane.given_up = self._deadline_s is not None
        elif answer is None:
            return
        elif answer.result is ExportResult.RETRY:
            self.failures += 1
            lane.asked_until_s += answer.retry_after_s or 0.0
            lane.given_up = self._deadline_s is not None
            lane.server_errors = lane.server_errors + 1 if answer.poison else 0
            lane.due_s += lane.backoff.pause_s(answer.retry_after_s)
            if lane.failing_since_s is None:
                lane.failing_since_s = now_s
            if not self._abandoned:  # else ``close`` has ended the request
                self._log_lines.lost(answer.reason, lane.signal)
        else:
            lane.backoff.reset()
            lane.failing_since_s = None
            lane.server_errors = 0
            if answer.result is ExportResult.REFUSED:
                self.failures += 1
                self.rejected += 1
                self.count(lane.signal, delivery.records, "rejected")
                self._log_lines.refused(answer.reason, lane)
            if all(each.failing_since_s is None for each in self._queues.values()):
                self._log_lines.found(answer, lane.signal)
        with self._changed:
            lane.pending = True


class _CollectorLog:
    """Logs once when the Collector becomes unavailable, once when it is back, and rejections once a minute."""

    def __init__(
        self, settings: OtlpSettings, queues: list[SpoolQueue], monotonic_s: Callable[[], float]
    ) -> None:
        self._settings = settings
        self._queues = queues
        self._monotonic_s = monotonic_s
        self._away_logged = False
        self._last_s: dict[str, float] = {}

    def lost(self, reason: str, signal: str) -> None:
        if self._away_logged or not self._may_speak("away"):
            return
        self._away_logged = True
        folder = next((queue.folder for queue in self._queues if queue.folder), None)
        where = f"in {folder}" if folder else "in memory, up to its bound,"
        later = ", after the end by `otel-train replay`" if folder else ""
        _log.warning(
            "OTLP: %s %s; requests wait %s and are sent when it accepts them%s; training is not affected",
            self._address(signal), reason, where, later,
        )  # fmt: skip

    def found(self, answer: ExportResponse, signal: str) -> None:
        if self._away_logged and self._may_speak("away"):
            self._away_logged = False
            _log.warning("OTLP: %s accepts requests again", self._settings.addresses)
        if answer.accepted and answer.reason and self._may_speak("warning"):
            _log.warning("OTLP: %s %s", self._address(signal), answer.reason)

    def refused(self, reason: str, lane: _SignalQueue) -> None:
        if self._may_speak("refused"):
            file, address = lane.queue.rejected_file, self._address(lane.signal)
            where = f"it is moved to {file}" if file else "it is dropped"
            _log.warning("OTLP: %s %s; %s and counted, training is not affected", address, reason, where)

    def closing(self) -> None:
        left = [queue for queue in self._queues if next(queue.waiting(), None) is not None]
        if left and not self._away_logged:
            _log.warning(
                "OTLP: %s has not accepted everything in the time to close; requests wait in %s, and the next start of "
                "the run or `otel-train replay` sends them",
                self._settings.addresses, left[0].folder,
            )  # fmt: skip

    def _address(self, signal: str) -> str:
        return self._settings.targets[signal].address

    def _may_speak(self, about: str) -> bool:
        now_s = self._monotonic_s()
        if now_s - self._last_s.get(about, -_LINE_INTERVAL_S) < _LINE_INTERVAL_S:
            return False
        self._last_s[about] = now_s
        return True
