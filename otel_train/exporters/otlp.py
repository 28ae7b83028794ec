"""The OTLP exporter: writes requests to the spool; one thread sends them."""

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
"""At most one line a minute about a collector that comes and goes, and one about refusals."""

_CLOSE_SHARE_S: Final = 0.1
"""What of the time to close is kept back for ending a request that gets no answer."""

_LAST_TRY_S: Final = 0.5
"""What a collector that was away a moment ago gets at close."""

_SLOW_S: Final = 1.0
"""An answer that takes longer may not come: the run summary says that requests wait."""

_LOOK_UP_S: Final = 10.0
"""What the look-up of a name may add to two requests, of which each is limited, before the log says that it hangs."""

_UNRESOLVED: Final = (
    "has been asked for {:.0f} s, longer than a request may take: its name does not resolve yet; correct the host name, "
    "or the resolver of this machine"
)

_BUSY_S: Final = 1.0
"""Until the next look at a queue that another process is sending from."""

OUTAGE_S: Final = 60.0
"""A collector that has accepted nothing for so long is an outage: what is made then counts as ``export_failed``."""

SUSPECT_AFTER: Final = 2
"""Server errors in a row to the same request after which the one behind it is tried, too."""

FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0


class Delivery(NamedTuple):
    """Result of sending the oldest request of a queue."""

    answer: ExportResponse | None = None  # None when the collector was not asked
    busy: bool = False  # another process is sending from this queue
    records: int = 0
    behind: int = 0  # requests behind it that were accepted with it


class Backoff:
    """Exponential backoff with a limit and jitter.

    The jitter comes from a generator of its own, because the training program seeds Python's.
    """

    def __init__(self) -> None:
        self._numbers = random.Random()  # noqa: S311 - spreads load, keeps no secret
        self._failures = 0

    def reset(self) -> None:
        """Records that a request was answered well."""
        self._failures = 0

    def pause_s(self, asked_s: float | None = None) -> float:
        """Returns the seconds until the next attempt. ``Retry-After``, up to 10 minutes, is the least of them."""
        own_s = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0 ** min(self._failures, 16)) / 2
        self._failures += 1
        # All senders were asked to wait as long: the longer that is, the further apart they come back.
        return max(own_s, min(asked_s or 0.0, LONGEST_ASKED_S)) * self._numbers.uniform(1.0, 2.0)


def deliver(
    queue: SpoolQueue, signal: str, transport: Transport, timeout_s: float, *, suspect: bool = False
) -> Delivery:
    """Sends the oldest request of a queue, then removes, keeps or rejects it according to the response.

    ``suspect``: it has failed with server errors before. If it does so again and the request behind it is accepted,
    it is the cause, and is refused for good: a collector may answer 500 to what it cannot read.
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
        self.pending = True  # an earlier process may have left something
        self.due_s = 0.0
        self.failing_since_s: float | None = None
        self.asking_since_s = math.inf  # the request under way
        self.asked_at_last_put_s = math.inf  # the one that was under way then
        self.asked_until_s = 0.0  # the collector wants to be left alone
        self.given_up = False  # at close
        self.server_errors = 0  # in a row


class OtlpExporter:
    """Appends every batch to the spool; a daemon thread sends from it, the oldest request first.

    Nothing waits for a network, and what is on disk survives this process. A request that gets no good answer stays
    where it is, and so does all behind it, until its next try. In a forked child every call does nothing.

    Args:
        settings: what to send, and how; ``OtlpSettings.read(os.environ)``.
        lines: makes the requests; each repeats the resource attributes.
        directory: of the rank, where the spool lies; None keeps what waits in memory.
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
        self.rejected = 0  # those of them that were refused for good
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
        the oldest went; ``rejected``, refused for good and moved to ``spool/rejected/``; ``serialization``, could not
        be written as a request; ``shutdown``, was in memory when the time to close was up; ``export_failed``, made
        during an outage of more than a minute: it waits in the spool.
        """
        with self._counting:
            return dict(self._drops)

    @property
    def failing(self) -> bool:
        """Whether the Collector has not accepted the last request of a signal, or takes its time to answer: requests wait."""
        slow_s = self._monotonic_s() - _SLOW_S
        lanes = self._queues.values()
        return any(lane.failing_since_s is not None or lane.asking_since_s < slow_s for lane in lanes)

    @property
    def unsaved(self) -> int:
        """How many requests are in memory alone, as the disk does not take them."""
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
        """Counts records that do not arrive."""
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
                    # One short chance for a collector that is away, none while it wants to be left alone.
                    ready = [lane for lane in waiting if not lane.given_up and lane.asked_until_s <= now_s]
                if ready:
                    lane = min(ready, key=lambda lane: lane.due_s)
                    lane.pending = False  # before it is looked at: what is appended meanwhile sets it again
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
            if not self._abandoned:  # else the sender closed the connection itself
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
