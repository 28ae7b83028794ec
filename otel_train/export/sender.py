"""One thread that carries payloads to a collector, so that nobody else ever waits for a network."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import Counter, deque
from typing import TYPE_CHECKING, NamedTuple, Protocol

from otel_train.export.quiet import CallerLogs
from otel_train.export.reasons import why
from otel_train.records import Snapshot

if TYPE_CHECKING:
    from collections.abc import Callable

    from otel_train.export.spool import Payload
    from otel_train.records import Span

_log = logging.getLogger("otel_train")

_MAX_SPANS = 4096
"""Spans that may wait. At the cap of two kept steps a second with six spans each: over five minutes."""

_SPANS_PER_REQUEST = 512  # the batch size that the SDK's own span processor uses by default

_LINE_INTERVAL_S = 60.0  # at most one line a minute about a collector that comes and goes

_SPOOL_SHARE_S = 0.2
"""What of the time to close is kept back for writing the rest to the spool."""

_LAST_TRY_S = 0.5  # what a collector that was away a moment ago gets at close


class Transport(Protocol):
    """Where payloads go."""

    def send(self, payload: Payload, timeout_s: float) -> bool:
        """Deliver one payload within ``timeout_s`` seconds; whether it was accepted."""

    def close(self) -> None:
        """Drop connections; a send that is waiting to retry gives up."""


class Keeper(Protocol):
    """Where payloads that were not accepted go."""

    def put(self, payload: Payload) -> bool:
        """Keep one payload; whether it is safe."""


class Places(NamedTuple):
    """What the log says about where figures go.

    Attributes:
        endpoint: the collector's address.
        spool: where unsent figures are kept, or "" when nowhere.
    """

    endpoint: str
    spool: str


class Sender:
    """A daemon thread with a small queue in front of it: the newest snapshot, and some spans.

    Metrics are cumulative, so a newer snapshot makes an unsent older one superfluous: it is dropped and
    counted. Whatever is not accepted goes to the keeper. In a forked child every call does nothing.

    Args:
        transport: where payloads go. Used from the sender's thread only, until it is closed.
        keeper: takes what was not accepted.
        places: what the log calls them.
        timeout_s: longest one request may take.
        monotonic_s: seconds of a monotonic clock.
        log: where lines for people go.

    Attributes:
        failures: requests that were not accepted.
    """

    def __init__(
        self,
        transport: Transport,
        keeper: Keeper,
        *,
        places: Places,
        timeout_s: float,
        monotonic_s: Callable[[], float] = time.monotonic,
        log: logging.Logger = _log,
    ) -> None:
        self.failures = 0
        self._drops: Counter[tuple[str, str]] = Counter()
        self._transport = transport
        self._keeper = keeper
        self._timeout_s = timeout_s
        self._monotonic_s = monotonic_s
        self._reachability = _Reachability(places, monotonic_s, log)
        self._pid = os.getpid()
        self._changed = threading.Condition()
        self._snapshot: Snapshot | None = None
        self._spans: deque[Span] = deque()
        self._in_flight: Payload | None = None
        self._keeping = False
        self._deadline_s: float | None = None
        self._abandoned = False
        self._logs = CallerLogs()
        self._thread = threading.Thread(target=self._run, name="otel_train-sender", daemon=True)
        self._thread.start()

    @property
    def drops(self) -> dict[tuple[str, str], int]:
        """Records not exported, by (signal, reason).

        Signals are ``metrics`` (data points) and ``traces`` (spans); reasons ``queue_full``,
        ``export_failed``, ``serialization`` and ``shutdown``. What was spooled counts too: until it is
        replayed it is not where people look.
        """
        with self._changed:
            return dict(self._drops)

    def put(self, snapshot: Snapshot | None, spans: tuple[Span, ...]) -> None:
        """Queue figures and return at once."""
        if os.getpid() != self._pid:
            return
        with self._changed:
            if self._deadline_s is not None:
                self._count_loss(snapshot, spans, "shutdown")
                return
            if snapshot is not None:
                self._count_loss(self._snapshot, (), "queue_full")
                self._snapshot = snapshot
            self._spans.extend(spans)
            while len(self._spans) > _MAX_SPANS:
                self._count_loss(None, (self._spans.popleft(),), "queue_full")
            self._changed.notify()

    def close(self, timeout_s: float) -> None:
        """Send what is queued within ``timeout_s`` seconds; the rest goes to the keeper. Idempotent."""
        if os.getpid() != self._pid or self._deadline_s is not None:
            return
        network_s = max(timeout_s - _SPOOL_SHARE_S, timeout_s / 2)
        with self._changed:
            self._deadline_s = self._monotonic_s() + network_s
            self._changed.notify()
        self._thread.join(network_s)
        with self._changed:
            self._abandoned = self._thread.is_alive()
            rest = self._take_all() if self._abandoned else []
            keeping = self._keeping
        self._transport.close()
        if keeping:  # what has been refused is on its way to the keeper, which is closed after us
            self._thread.join(_SPOOL_SHARE_S)
        for payload in rest:
            self._keep(payload, "shutdown")

    def _run(self) -> None:
        with self._logs:
            while True:
                payload = self._next()
                if payload is None:
                    return
                accepted, reason = self._attempt(payload)
                with self._changed:
                    if self._abandoned:
                        return
                    self._in_flight = None
                    self._keeping = not accepted
                if not accepted:
                    self._keep(payload, reason)
                    self._keeping = False

    def _next(self) -> Payload | None:
        with self._changed:
            while self._snapshot is None and not self._spans:
                if self._deadline_s is not None:
                    return None
                self._changed.wait()
            self._in_flight = self._take()
            return self._in_flight

    def _take(self) -> Payload:
        snapshot, self._snapshot = self._snapshot, None
        if snapshot is not None:
            return snapshot
        count = min(len(self._spans), _SPANS_PER_REQUEST)
        return tuple(self._spans.popleft() for _ in range(count))

    def _take_all(self) -> list[Payload]:
        rest: list[Payload] = [] if self._in_flight is None else [self._in_flight]
        self._in_flight = None
        while self._snapshot is not None or self._spans:
            rest.append(self._take())
        return rest

    def _attempt(self, payload: Payload) -> tuple[bool, str]:
        timeout_s, reason = self._limit()
        if timeout_s <= 0:
            return False, reason
        self._logs.clear()
        try:
            accepted = self._transport.send(payload, timeout_s)
        except Exception as error:  # noqa: BLE001  # a fault in an exporter must not end the thread
            self.failures += 1
            self._reachability.lost(f"{type(error).__name__}: {error}")
            return False, "serialization"
        if accepted:
            self._reachability.found()
            return True, ""
        self.failures += 1
        self._reachability.lost(self._logs.said())
        return False, reason

    def _limit(self) -> tuple[float, str]:
        deadline_s = self._deadline_s
        if deadline_s is None:
            return self._timeout_s, "export_failed"
        left_s = min(deadline_s - self._monotonic_s(), self._timeout_s)
        if self._reachability.away:
            # One short chance for a collector that is away, none for the payloads after that.
            left_s = 0.0 if self._reachability.gave_last_chance() else min(left_s, _LAST_TRY_S)
        return left_s, "shutdown"

    def _keep(self, payload: Payload, reason: str) -> None:
        if isinstance(payload, Snapshot):
            self._count_loss(payload, (), reason)
        else:
            self._count_loss(None, payload, reason)
        try:
            self._keeper.put(payload)
        except Exception:  # noqa: BLE001  # as above
            _log.exception("OTLP: unsent figures could not be spooled; training is not affected")

    def _count_loss(self, snapshot: Snapshot | None, spans: tuple[Span, ...], reason: str) -> None:
        with self._changed:
            if snapshot is not None:
                points = sum(len(family.points) for family in snapshot.families)
                self._drops["metrics", reason] += points
            if spans:
                self._drops["traces", reason] += len(spans)


class _Reachability:
    """Whether the collector answers, told to people once when it changes and at most once a minute."""

    def __init__(self, places: Places, monotonic_s: Callable[[], float], log: logging.Logger) -> None:
        self.away = False
        self._places = places
        self._monotonic_s = monotonic_s
        self._log = log
        self._told_away = False
        self._last_line_s: float | None = None
        self._last_chance_given = False

    def gave_last_chance(self) -> bool:
        """Whether the one try at close was already used; marks it as used."""
        given, self._last_chance_given = self._last_chance_given, True
        return given

    def lost(self, said: str) -> None:
        """A request was not accepted."""
        self.away = True
        if self._told_away or not self._may_speak():
            return
        self._told_away = True
        place = self._places.spool
        kept = f"figures are spooled in {place}" if place else "figures are dropped"
        self._log.warning("OTLP: %s %s; %s, training is not affected", self._places.endpoint, why(said), kept)

    def found(self) -> None:
        """A request was accepted."""
        self.away = False
        if self._told_away and self._may_speak():
            self._told_away = False
            self._log.warning("OTLP: %s accepts figures again", self._places.endpoint)

    def _may_speak(self) -> bool:
        now_s = self._monotonic_s()
        if self._last_line_s is not None and now_s - self._last_line_s < _LINE_INTERVAL_S:
            return False
        self._last_line_s = now_s
        return True
