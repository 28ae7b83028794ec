"""Data that moves from the recorder to the exporters, and the anchor between monotonic and Unix time.

The classes are immutable. Durations are differences of a monotonic clock, in integer nanoseconds. Unix time is derived from that
clock through one ``Anchor``, so that setting the system clock changes no duration. ``*_unix_ns`` counts from the Unix epoch,
every other ``*_ns`` is a duration or an instant of the monotonic clock. Exported values are in base units: seconds, bytes, ratios.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field
from typing import TYPE_CHECKING, Any

from otel_train.fast_classes import FastNamedTuple, fast_dataclass

if TYPE_CHECKING:
    import numpy as np

    from otel_train.catalog import Metric

NS_PER_S = 10**9

SUMMARY_SCHEMA = "otel_train.summary/2"
"""Schema id of ``summary.json``."""

Clock = Callable[[], int]
"""Monotonic nanoseconds. Tests pass a ``FakeClock``."""

system_clock: Clock = time.perf_counter_ns
"""The clock of the training thread. On Linux it is one clock for all processes of a host."""


class Anchor(FastNamedTuple):
    """One instant on the monotonic and on the Unix clock.

    Attributes:
        unix_ns: nanoseconds since the Unix epoch.
        clock_ns: the same instant on the monotonic clock.
    """

    unix_ns: int
    clock_ns: int

    @classmethod
    def now(cls) -> Anchor:
        """Reads both clocks, one right after the other."""
        return cls(time.time_ns(), system_clock())

    def unix(self, clock_ns: int) -> int:
        """Returns the Unix time, in nanoseconds, of an instant on the monotonic clock."""
        return self.unix_ns + clock_ns - self.clock_ns

    def renewed(self, clock_ns: int) -> Anchor:
        """Returns this anchor, or a new one at ``clock_ns``, which is now, if the clocks differ by over 1 s: clock set, or suspended."""
        now = Anchor(time.time_ns(), clock_ns)
        return now if abs(now.unix_ns - self.unix(clock_ns)) > NS_PER_S else self


Attributes = tuple[tuple[str, str], ...]
"""Metric attributes: (OpenTelemetry name, value) pairs in the order the catalogue lists them."""

AttributeValue = str | int | float | bool | tuple[str, ...] | tuple[int, ...] | tuple[float, ...]
"""Type of the value of a span or event attribute."""


class Exemplar(FastNamedTuple):
    """An exemplar of a histogram bucket, with the trace it refers to.

    Attributes:
        value: what was observed, in the unit of its metric.
        time_unix_ns: when it was observed.
        trace_id: 128-bit id of a trace that is exported.
        span_id: 64-bit id of the span inside it.
    """

    value: float
    time_unix_ns: int
    trace_id: int
    span_id: int


class Point(FastNamedTuple):
    """Value of one series of a counter, an up-down counter or a gauge."""

    attributes: Attributes
    value: float


class HistogramPoint(FastNamedTuple):
    """Value of one series of a histogram, cumulative since the start of the session.

    The same observations in two forms: base-2 exponential buckets for OTLP, explicit ones for the
    classic Prometheus view.

    Attributes:
        attributes: which series this is.
        count: observations.
        sum: their sum, in the unit of the metric.
        min: the smallest observation; NaN when there is none.
        max: the largest observation; NaN when there is none.
        zero_count: observations that were exactly zero (or below the smallest bucket).
        scale: exponential scale s; bucket i holds values in (b**i, b**(i+1)], b = 2**(2**-s).
        offset: index i of the first entry of ``exponential_counts``.
        exponential_counts: observations per exponential bucket, without gaps; empty if none.
        explicit_counts: observations per explicit bucket, not cumulative; one more than the bounds of
            the metric, the last being the overflow.
        exemplars: at most a few; each points to a sampled step.
    """

    attributes: Attributes
    count: int  # type: ignore[assignment]  # hides tuple.count
    sum: float
    min: float
    max: float
    zero_count: int
    scale: int
    offset: int
    exponential_counts: tuple[int, ...]
    explicit_counts: tuple[int, ...]
    exemplars: tuple[Exemplar, ...] = ()


class MetricFamily(FastNamedTuple):
    """All series of one metric. A metric that was not measured has no family: absent is not zero."""

    metric: Metric
    points: tuple[Point, ...] | tuple[HistogramPoint, ...]


class Snapshot(FastNamedTuple):
    """Every metric of this process at one instant.

    Attributes:
        start_unix_ns: when counting began (the start of the session).
        time_unix_ns: the instant described.
        families: one per metric that has been measured, in catalogue order.
    """

    start_unix_ns: int
    time_unix_ns: int
    families: tuple[MetricFamily, ...]


class SpanLink(FastNamedTuple):
    """A pointer to a span of another trace."""

    trace_id: int
    span_id: int


@fast_dataclass(frozen=True, kw_only=True)
class Span:
    """One finished span, built from recorded events.

    Attributes:
        name: low-cardinality constant from the catalogue, such as ``train.step``.
        trace_id: 128 bits, never zero.
        span_id: 64 bits, never zero.
        parent_id: span id of the parent; 0 for a root.
        start_unix_ns: first instant.
        end_unix_ns: last instant.
        error: exception type when it failed, else "".
    """

    name: str
    trace_id: int
    span_id: int
    start_unix_ns: int
    end_unix_ns: int
    parent_id: int = 0
    attributes: Mapping[str, AttributeValue] = field(default_factory=dict)
    links: Sequence[SpanLink] = ()
    error: str = ""


@fast_dataclass(frozen=True, kw_only=True)
class Event:
    """Something that happened in the run: a line of ``events.jsonl``."""

    name: str
    time_unix_ns: int
    attributes: Mapping[str, AttributeValue] = field(default_factory=dict)


@fast_dataclass(frozen=True, kw_only=True)
class Finding:
    """One finding about training time, with evidence and advice.

    Attributes:
        name: one of the closed set in ``bottleneck/rules.py``, such as ``input_bound``.
        summary: one sentence that names the cause.
        evidence: values behind it, by name; seconds, ratios, counts.
        share: ratio of the time that would be saved, 0 to 1: of the training time in phase ``train``, else of the run.
        seconds: the same in seconds of the analysed window.
        advice: what to change, naming the API to use.
        loader: the loader it is about, or "".
        phase: the phase it is about, or "".
        severity: ``ok``, ``info``, ``warning`` or ``critical``.
    """

    name: str
    summary: str
    evidence: Mapping[str, float]
    share: float
    seconds: float
    advice: str
    loader: str = ""
    phase: str = ""
    severity: str = "info"


@fast_dataclass(frozen=True, kw_only=True)
class ExportBatch:
    """What one round of the export loop hands to every exporter.

    Attributes:
        snapshot: every metric now, or None when it is not yet time to export metrics.
        spans: spans finished since the last poll.
        events: events since the last poll.
        final: this is the last batch of the session.
    """

    snapshot: Snapshot | None = None
    spans: tuple[Span, ...] = ()
    events: tuple[Event, ...] = ()
    final: bool = False


RUN_FILE, CAPTURES_FOLDER = "run.json", "captures"
"""Names in the run directory."""

SUMMARY_FILE, FLIGHT_FILE = "summary.json", "flight.bin"
METRICS_FILE, SPANS_FILE, EVENTS_FILE = "metrics.otlp.jsonl", "spans.otlp.jsonl", "events.jsonl"
"""Names in the folder of each rank."""

RANGE_PREFIX = "otel_train:"
"""Prefix of the profiler ranges of stages in a capture: ``otel_train:forward``; with a loader's name ``otel_train:data:train``."""


class Capture(FastNamedTuple):
    """One finished profiler capture, made by the rank and counted by the agent.

    Attributes:
        trigger: one of ``catalog.PROFILER_TRIGGER.values``.
        within_ns: first and last instant, on the monotonic clock.
        steps: numbers of its first and last step; -1 without steps.
        file: path of the trace; "" without a trace.
        bytes: size of the trace.
        error: ``refused``, ``short``, ``profiler``, ``disk`` or ``size``; "" if it succeeded.
        problem: the error as a sentence.
        seconds: from its first step until the file was written.
        finding: summary of its first finding; "" without one.
        metadata: its metadata document.
    """

    trigger: str
    within_ns: tuple[int, int]
    steps: tuple[int, int]
    file: str
    bytes: int
    error: str
    problem: str
    seconds: float
    finding: str
    metadata: Mapping[str, Any] = {}

    @property
    def rule(self) -> str:
        """Name of the rule behind the finding; "" without a finding."""
        finding = self.metadata.get("finding")
        return str(finding.get("name", "")) if isinstance(finding, dict) else ""

    @property
    def alert(self) -> str:
        """Name of the alert that triggered it; "" for other triggers."""
        return str(self.metadata.get("alert") or "")

    @property
    def ended_s(self) -> float:
        """Unix time of its end, in seconds."""
        return float(self.metadata.get("ended_unix_ns") or 0) / NS_PER_S


class Compile(FastNamedTuple):
    """One run of a compiler, without nested runs.

    ``again``: it had compiled this code before; None if unknown. ``function``: the compiled function; "" if unknown.
    """

    begun_ns: int
    ended_ns: int
    again: bool | None
    compiler: str = "torch"
    function: str = ""


class Pace(FastNamedTuple):
    """How far a device lags behind the host at the events of training steps, and how long it may have been idle.

    All but the counts are sums over those steps. The lag at an event is the time from the host's event to the device's.

    Attributes:
        steps: training steps with a known lag at all their events; a count.
        lasted_ns: duration of these steps.
        least_lag_ns: smallest lag in each step, without lags that a wait for data explains.
        most_lag_ns: largest lag in each step.
        launch_idle_ns: upper bound of the device's idle time in forward, backward and optimizer.
        idle_ns: upper bound of the device's idle time, without waits for data.
        seen: steps of any kind since a device was in use; a count.
        sampled: those of them whose device time was measured; a count.
    """

    steps: int = 0
    lasted_ns: int = 0
    least_lag_ns: int = 0
    most_lag_ns: int = 0
    launch_idle_ns: int = 0
    idle_ns: int = 0
    seen: int = 0
    sampled: int = 0

    def plus(self, other: Pace) -> Pace:
        """Returns the sum of both."""
        return Pace(*(a + b for a, b in zip(self, other, strict=True)))

    def minus(self, earlier: Pace) -> Pace:
        """Returns the difference to an earlier value."""
        return Pace(*(a - b for a, b in zip(self, earlier, strict=True)))


class DeviceTimes(FastNamedTuple):
    """Device times of stage calls of the training thread. All columns are int64[calls].

    Attributes:
        source: number of the source that was called.
        begun_ns: an instant after the call began and before any call nested in it.
        ended_ns: an instant before the call ended.
        device_ns: duration on the device's clock.
        until_ns: no later batch has calls that ended before this instant.
        pace: lag of the device behind the host.
    """

    source: np.ndarray
    begun_ns: np.ndarray
    ended_ns: np.ndarray
    device_ns: np.ndarray
    until_ns: int
    pace: Pace = Pace()


class Outcomes(FastNamedTuple):
    """Results of updates under a gradient scaler, of optimizers that decide on the device whether to skip an update.

    Attributes:
        made: number of updates, applied or skipped.
        known: number of updates whose result has been read from the device.
        skipped: number of known updates that changed nothing.
    """

    made: int = 0
    known: int = 0
    skipped: int = 0


class DeviceMemory(FastNamedTuple):
    """Allocator values of one device: bytes, and counts since process start. None if not available.

    Attributes:
        device: its name, such as ``cuda:0``.
        allocated: bytes in live tensors.
        reserved: bytes reserved from the driver, including those in tensors.
        limit: bytes that this process may use.
        allocated_peak: most bytes allocated since the program last reset its peaks.
        reserved_peak: most bytes reserved since then.
        ooms: out-of-memory errors.
        alloc_retries: allocations that had to free cached memory first.
        model: model name from the driver; "" if it has none.
    """

    device: str
    allocated: int
    reserved: int
    limit: int
    allocated_peak: int | None
    reserved_peak: int | None
    ooms: int | None
    alloc_retries: int | None
    model: str = ""
