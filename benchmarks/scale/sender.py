"""Sends the exports of all simulated ranks when they are due, on a few threads."""

from __future__ import annotations

import heapq
import queue
import threading
import time
from typing import TYPE_CHECKING, Final, NamedTuple

from benchmarks.scale.results import Counts, Sizes, sizes_of
from otel_train.datamodel import NS_PER_S, Snapshot, system_clock
from otel_train.errors import StackError
from otel_train.exporters.otlp_json import metrics_line, spans_line
from otel_train.exporters.otlp_transport import OtlpTransport
from otel_train.safety import Guard

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from benchmarks.scale.rank import Reading
    from benchmarks.scale.ranks import Rank, SimulatedRanks
    from otel_train.datamodel import AttributeValue
    from otel_train.exporters.otlp_settings import OtlpSettings

SENDERS: Final = 8
"""Threads that send. Most of the time they wait for an answer."""
_SAY_EVERY_S: Final = 5.0

FRESH_S: Final = 0.5
"""Maximum age of a reading that ranks with the same account share."""

PATIENCE: Final = 5
"""Failed requests after which, if none was accepted, the run ends because there is no receiver."""

GOLDEN: Final = 0.618033988749895
"""Golden ratio less 1: the fractional parts of its multiples are spread evenly, for any number of multiples."""


class _EncodedReading(NamedTuple):
    """A reading, encoded for all ranks that share it."""

    reading: Reading
    metrics: str  # a request without a resource
    sizes: Sizes


class _Turn(NamedTuple):
    rank: Rank
    due_ns: int
    final: bool


class LoadGenerator:
    """Sends what the ranks of a simulated run would send.

    Args:
        simulated: the ranks.
        settings: OTLP endpoints and timeout.
        every_s: seconds between two exports of a rank that is not reduced.
    """

    def __init__(
        self,
        simulated: SimulatedRanks,
        settings: OtlpSettings,
        *,
        every_s: float,
    ) -> None:
        self._simulated = simulated
        self._settings = settings
        self._every_s = every_s
        self._ranks = simulated.senders
        self.counts = Counts(len(simulated.ranks), len(self._ranks))
        self._turns: queue.Queue[_Turn | None] = queue.Queue(2 * SENDERS)
        self._busy: set[int] = set()
        self._encoded: dict[int, _EncodedReading] = {}
        self._sent_spans: dict[int, int] = {}
        self._started_ns = system_clock()
        # Made before the start: the first one imports modules, which must not delay a rank.
        transports = [OtlpTransport(settings.targets) for _ in range(SENDERS)]
        self._threads = [
            threading.Thread(target=self._send_all, args=(transport,), daemon=True)
            for transport in transports
        ]

    def run(self, duration_s: float, say: Callable[[], None]) -> None:
        """Sends for ``duration_s`` seconds.

        Args:
            duration_s: how long; ``inf`` until interrupted.
            say: prints progress, every ``_SAY_EVERY_S`` seconds.

        Raises:
            StackError: no request is accepted.
        """
        for thread in self._threads:
            thread.start()
        self._started_ns = system_clock()
        until_ns = self._started_ns + min(duration_s, 1e8) * NS_PER_S
        due = [
            (self._started_ns + int(self._phase_s(rank) * NS_PER_S), i) for i, rank in enumerate(self._ranks)
        ]
        heapq.heapify(due)
        reported_ns = self._started_ns
        while (now_ns := system_clock()) < until_ns:
            self._check_receiver()
            if now_ns - reported_ns >= _SAY_EVERY_S * NS_PER_S:
                reported_ns = now_ns
                self._look()
                say()
            self._simulated.exchange(now_ns)
            while due and due[0][0] <= now_ns:
                due_ns, index = heapq.heappop(due)
                self._put(self._ranks[index], due_ns)
                every_ns = int(self._interval_s(self._ranks[index]) * NS_PER_S)
                behind = max(0, (system_clock() - due_ns) // every_ns)
                self.counts.result.skipped += behind
                heapq.heappush(due, (due_ns + (behind + 1) * every_ns, index))
            wait_ns = min(due[0][0] if due else until_ns, until_ns) - system_clock()
            time.sleep(min(0.2, max(0.0, wait_ns / NS_PER_S)))
        self._look()
        self._check_receiver()

    def end(self) -> None:
        """Sends the last report of every rank, as real ranks do, and waits until all of them are sent."""
        self._turns.join()
        now_ns = system_clock()
        for index, account in enumerate(self._simulated.accounts):
            self._encoded[index] = self._encode(index, account.end(now_ns))
        for rank in self._ranks:
            self._turns.put(_Turn(rank, system_clock(), final=True))
        self.stop()

    def stop(self) -> None:
        """Sends what is queued and ends the threads."""
        alive = [thread for thread in self._threads if thread.is_alive()]
        for _ in alive:
            self._turns.put(None)
        for thread in alive:
            thread.join()

    def _look(self) -> None:
        result = self.counts.result
        result.seconds = (system_clock() - self._started_ns) / NS_PER_S
        result.steps = self._simulated.accounts[0].run.step_number

    def _interval_s(self, rank: Rank) -> float:
        return rank.profile.interval_s(self._every_s)

    def _phase_s(self, rank: Rank) -> float:
        """Returns the delay of the first export: real ranks drift apart, these are spread out from the start."""
        return (rank.info.rank * GOLDEN % 1.0) * self._interval_s(rank)

    def _put(self, rank: Rank, due_ns: int) -> None:
        if rank.info.rank in self._busy:
            self.counts.skip()
            return
        self._busy.add(rank.info.rank)
        self._turns.put(_Turn(rank, due_ns, final=False))

    def _check_receiver(self) -> None:
        result = self.counts.result
        if not result.requests and result.failures >= PATIENCE:
            where = self._settings.addresses
            raise StackError(
                f"{where} accepted none of {result.failures} requests. Is a Collector there? `otel-train stack up` "
                "starts one; --endpoint and the OTEL_EXPORTER_OTLP_* variables say where it is"
            )

    def _send_all(self, transport: OtlpTransport) -> None:
        guard = Guard("sending for a simulated rank")
        while (turn := self._turns.get()) is not None:
            self.counts.late(max(0, system_clock() - turn.due_ns) / NS_PER_S)
            faults = guard.faults
            with guard:
                self._send(transport, turn)
            self.counts.fault(guard.faults - faults)
            self._busy.discard(turn.rank.info.rank)
            self._turns.task_done()
        transport.close()

    def _send(self, transport: OtlpTransport, turn: _Turn) -> None:
        rank, limit_s = turn.rank, self._settings.timeout_s
        encoded = self._encoded_for(rank, final=turn.final)
        resource = self._simulated.resource(rank)
        if rank.profile.metrics and "metrics" in self._settings.targets:
            line = _with_resource(encoded.metrics, resource).encode()
            answer = transport.send("metrics", line, limit_s)
            self.counts.metrics(rank.info.rank, encoded.sizes, accepted=answer.accepted)
        before = self._sent_spans.get(rank.info.rank, 0)
        self._sent_spans[rank.info.rank] = encoded.reading.spans_until
        spans = self._simulated.spans_of(rank, before, encoded.reading.spans_until)
        if spans and "traces" in self._settings.targets:
            line = spans_line(spans, resource).encode()
            answer = transport.send("traces", line, limit_s)
            self.counts.spans(len(spans), len(line), accepted=answer.accepted)

    def _encoded_for(self, rank: Rank, *, final: bool) -> _EncodedReading:
        with self._simulated.accounts[rank.account].lock:
            now_ns = system_clock()
            encoded = self._encoded.get(rank.account)
            if not final and (encoded is None or now_ns - encoded.reading.at_ns > FRESH_S * NS_PER_S):
                encoded = self._encode(rank.account, self._simulated.accounts[rank.account].read(now_ns))
                self._encoded[rank.account] = encoded
            assert encoded is not None
            return encoded

    def _encode(self, account: int, reading: Reading) -> _EncodedReading:
        resource = self._simulated.resource(
            self._simulated.ranks[self._simulated.accounts[account].info.rank]
        )
        line = metrics_line(reading.snapshot, {})
        sizes = sizes_of(reading.snapshot.families, len(_with_resource(line, resource)))
        return _EncodedReading(reading, line, sizes)


def _with_resource(line: str, resource: Mapping[str, AttributeValue]) -> str:
    """Returns a line that was encoded with an empty resource, with ``resource`` in its place."""
    head, key, _ = metrics_line(Snapshot(0, 0, ()), resource).partition('"scopeMetrics"')
    return head + key + line.partition(key)[2]
