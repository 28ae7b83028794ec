"""Spans and events: which steps are traced (the first, slow and failed ones, every Nth as a baseline), ids, attributes."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from otel_train import catalog
from otel_train.accounting.types import ClosedSteps, StageCalls, StepRows
from otel_train.catalog import PHASES
from otel_train.datamodel import NS_PER_S, AttributeValue, Capture, Event, Exemplar, Span, SpanLink
from otel_train.recording.events import SourceKind

if TYPE_CHECKING:
    from otel_train.aggregation.run_events import EvalPass
    from otel_train.aggregation.series_names import SeriesNames


MEDIAN_STEPS = 512
"""Most recent step durations, of which the rolling median is taken."""

ENOUGH_STEPS = 20
"""Least number of steps for a rolling median."""

DEVIATIONS = 5.0
"""A slow step also exceeds the median by this many median absolute deviations, so that in a noisy run not every step is slow."""

BASELINE_S = 30.0
"""Intended seconds between baseline traces, if ``trace_every_steps`` is not set."""

UNDECIDED = 1 << 62
"""Steps between baseline traces while the step duration is unknown: more than a run has."""


class SamplingRules(NamedTuple):
    """Settings of ``SpanSampler``; see ``Config``."""

    warmup_steps: int
    every_steps: int
    slow_factor: float
    per_s: float
    burst: int


class SampledStep(NamedTuple):
    """A sampled step.

    Attributes:
        row: its row in the ``StepRows`` it came in.
        number: its step number.
        reason: ``warmup``, ``slow``, ``nonfinite``, ``error``, ``profiler`` or ``baseline``.
        baseline_ns: the rolling median at the time; 0 while there is none.
    """

    row: int
    number: int
    reason: str
    baseline_ns: int


class SpanSampler:
    """Samples closed training steps, limited by a token bucket of ``per_s`` and ``burst``."""

    def __init__(self, rules: SamplingRules, started_ns: int) -> None:
        self.limited = 0
        self.slow = 0
        """Slow steps so far."""
        self.captured_ns: Callable[[], tuple[int, int]] = lambda: (0, 0)
        """Returns start and end of the last capture. Polled, because a short capture may be over before a notification."""
        self._rules = rules
        self._recent = np.zeros(0, dtype=np.int64)
        self._seen = 0
        self._tokens = float(rules.burst)
        self._filled_ns = started_ns
        self._nonfinite_ns: list[int] = []
        self._agreed = 0

    @property
    def every(self) -> int:
        """Steps between baseline traces; 0 while undecided."""
        every = self._every(self.median_ns)
        return 0 if every == UNDECIDED else every

    def agree(self, every: int) -> None:
        """Uses the baseline interval of rank 0, so that all ranks of a step are in one trace."""
        self._agreed = every

    @property
    def median_ns(self) -> int:
        """Rolling median of step durations; 0 while there are too few."""
        return int(np.median(self._recent)) if len(self._recent) >= ENOUGH_STEPS else 0

    def nonfinite(self, at_ns: int) -> None:
        """Marks the step at ``at_ns`` as one with a value that is not finite."""
        self._nonfinite_ns = [*self._nonfinite_ns[-63:], at_ns]

    def choose(self, steps: StepRows, numbers: np.ndarray, rows: np.ndarray) -> list[SampledStep]:
        """Samples newly closed training steps."""
        durations = steps.duration_ns[rows]
        median = self.median_ns
        reasons = self._reasons(steps, numbers, rows, median)
        self._recent = np.concatenate((self._recent, durations[-MEDIAN_STEPS:]))[-MEDIAN_STEPS:]
        self._seen += len(rows)
        chosen = []
        for place in np.flatnonzero(reasons != "").tolist():
            free = reasons[place] == "profiler"  # as many as the capture has: its span links to these steps
            if free or self._take(int(steps.ended_ns[rows[place]])):
                chosen.append(SampledStep(int(rows[place]), int(numbers[place]), str(reasons[place]), median))
            else:
                self.limited += 1
        return chosen

    def _reasons(self, steps: StepRows, numbers: np.ndarray, rows: np.ndarray, median: int) -> np.ndarray:
        """Returns the highest-priority reason of each step; "" for none."""
        durations = steps.duration_ns[rows]
        reasons = np.full(len(rows), "", dtype="<U9")
        reasons[numbers % self._every(median) == 0] = "baseline"
        if median:
            deviation = float(np.median(np.abs(self._recent - median)))
            limit = max(self._rules.slow_factor * median, median + DEVIATIONS * deviation)
            reasons[durations > limit] = "slow"
            self.slow += int(np.count_nonzero(durations > limit))
        first = self._rules.warmup_steps - self._seen
        if first > 0:
            reasons[:first] = "warmup"
        for at_ns in self._nonfinite_ns:
            reasons[(steps.started_ns[rows] <= at_ns) & (at_ns < steps.ended_ns[rows])] = "nonfinite"
        reasons[steps.failed[rows] > 0] = "error"
        begun_ns, ended_ns = self.captured_ns()
        reasons[(steps.started_ns[rows] < ended_ns) & (steps.ended_ns[rows] > begun_ns)] = "profiler"
        return reasons

    def _every(self, median: int) -> int:
        """Returns the steps between baseline traces: unless configured a power of two, so that slower ranks sample a subset."""
        if self._rules.every_steps or self._agreed:
            return self._rules.every_steps or self._agreed
        if not median:
            return UNDECIDED
        return int(1 << int(np.ceil(np.log2(max(1.0, BASELINE_S * NS_PER_S / median)))))

    def _take(self, now_ns: int) -> bool:
        """Takes a token of the bucket; returns False if it is empty."""
        refill = max(0, now_ns - self._filled_ns) / NS_PER_S * self._rules.per_s
        self._tokens = min(float(self._rules.burst), self._tokens + refill)
        self._filled_ns = max(now_ns, self._filled_ns)
        if self._tokens < 1:
            return False
        self._tokens -= 1
        return True


class Ids(NamedTuple):
    """Trace and span ids, hashed from what they identify.

    Random numbers would be equal on equally seeded ranks, and would advance the program's generator.
    """

    run_id: str
    attempt: int
    rank: int

    def trace(self, *what: object) -> int:
        """Returns 128 bits, equal on every rank."""
        return self._hash(16, *what)

    def span(self, *what: object) -> int:
        """Returns 64 bits, equal on every rank."""
        return self._hash(8, *what)

    def own(self, *what: object) -> int:
        """Returns 64 bits that differ by rank."""
        return self._hash(8, "rank", self.rank, *what)

    def _hash(self, size: int, *what: object) -> int:
        text = "\0".join(map(str, (self.run_id, self.attempt, *what)))
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=size).digest(), "big") or 1


MOST_CHILDREN = 64
"""Most stage spans per step: those of its first calls."""

EXEMPLARS_PER_SERIES = 8


class SpanBuilder:
    """Builds spans and events, holds them until they are drained, and keeps exemplars."""

    def __init__(
        self,
        ids: Ids,
        unix: Callable[[int], int],
        names: SeriesNames,
        *,
        device_ns: Callable[[int, int], int | None],
    ) -> None:
        self.exemplars: dict[str, dict[tuple[str, ...], deque[Exemplar]]] = {"stage": {}, "step": {}}
        """By what was timed, and by its labels."""
        self._ids = ids
        self._unix = unix
        self._names = names
        self._device_ns = device_ns
        self._run = SpanLink(ids.trace("run"), ids.own("run"))
        self._passes = 0  # spans so far in traces of their own: hashed into their ids
        self._spans: list[Span] = []
        self._events: list[Event] = []

    def drain(self) -> tuple[tuple[Span, ...], tuple[Event, ...]]:
        """Returns and removes all spans and events."""
        spans, events = tuple(self._spans), tuple(self._events)
        self._spans, self._events = [], []
        return spans, events

    def event(self, name: str, at_ns: int, attributes: Mapping[str, AttributeValue]) -> None:
        """Adds an event."""
        self._events.append(Event(name=name, time_unix_ns=self._unix(at_ns), attributes=attributes))

    def start(self, started_ns: int, ended_ns: int) -> None:
        """Adds the root span of the run. It covers only the start, some milliseconds, so that a crash cannot lose it."""
        attributes = {**self._of_run(), catalog.TRACE_CLASS.name: "run"}
        self._add(catalog.RUN_SPAN, self._run, (started_ns, ended_ns), attributes, links=())

    def end(self, at_ns: int, step: int, *, error: str = "") -> None:
        """Adds the end of the run; ``error``: the cause if it did not end normally."""
        span_ids = SpanLink(self._ids.trace("run end"), self._ids.own("run end"))
        attributes = {**self._of_run(), catalog.STEP_NUMBER.name: step, catalog.TRACE_CLASS.name: "run"}
        self._add(catalog.RUN_END_SPAN, span_ids, (at_ns, at_ns), attributes, error=error)

    def step(
        self, closed: ClosedSteps, kept: SampledStep, before: Sequence[StageCalls], *, thread: str = ""
    ) -> None:
        """Adds the spans of a step sampled from ``closed``, calls that ended ``before`` included, and exemplars with their ids.

        The root span has the same ids on all ranks, and rank 0 adds it. Its child is the step of this rank, with a child per call.
        """
        ids, steps, row = self._ids, closed.steps, kept.row
        what = ("step", kept.number, *([thread] if thread else []))
        trace, root, mine = ids.trace(*what), ids.span(*what), ids.own(*what)
        within = int(steps.started_ns[row]), int(steps.ended_ns[row])
        attributes = self._of_step(steps, kept)
        if ids.rank == 0:
            self._add(catalog.STEP_SPAN, SpanLink(trace, root), within, attributes)
        calls = _calls_of(closed.occurrences, row, before)
        failed = next((self._names.sources[source].stage for source, _, _, failed, *_ in calls if failed), "")
        attributes, error = {**attributes, catalog.SPAN_RANK.name: ids.rank}, failed and f"{failed} failed"
        self._add(
            catalog.RANK_STEP_SPAN, SpanLink(trace, mine), within, attributes, parent_id=root, error=error
        )
        phase = PHASES[int(steps.phase[row])]
        for number, call in enumerate(calls):
            self._add_call(call, SpanLink(trace, ids.own(*what, number)), phase, parent_id=mine)
        exemplar = Exemplar(int(steps.duration_ns[row]) / NS_PER_S, self._unix(within[1]), trace, mine)
        self._exemplify("step", (self._loader(int(steps.loader[row])), phase), exemplar)

    def checkpoint(self, within: tuple[int, int], step: int, *, failed: bool) -> None:
        """Adds a checkpoint."""
        attributes: dict[str, AttributeValue] = {catalog.STEP_NUMBER.name: step}
        error = "checkpoint failed" if failed else ""
        self._add_alone(catalog.CHECKPOINT_SAVE_SPAN, within, attributes, "checkpoint", error=error)

    def evaluation(self, over: EvalPass, step: int) -> None:
        """Adds an evaluation pass."""
        attributes: dict[str, AttributeValue] = {
            catalog.STEP_NUMBER.name: step,
            catalog.SPAN_PHASE.name: over.phase,
            catalog.SPAN_LOADER.name: over.loader,
            catalog.BATCH_COUNT.name: over.batches,
        }
        self._add_alone(catalog.EVAL_SPAN, (over.started_ns, over.ended_ns), attributes, "eval")

    def stall(
        self, within: tuple[int, int], step: int, stage: str, loader: str, *, suspect: int | None = None
    ) -> None:
        """Adds a stall when it is detected, not when it ends: a run that never recovers could not export it later.

        ``suspect`` is the rank that all others wait for; None for a stall of this rank.
        """
        attributes: dict[str, AttributeValue] = {
            catalog.SPAN_RANK.name: self._ids.rank if suspect is None else suspect,
            **({} if suspect is None else {catalog.STALL_SUSPECT.name: True}),
            catalog.STEP_NUMBER.name: step,
            catalog.SPAN_STAGE.name: stage,
            catalog.SPAN_LOADER.name: loader,
            catalog.STALL_AGE.name: (within[1] - within[0]) / NS_PER_S,
        }
        self._add_alone(catalog.STALL_SPAN, within, attributes, "stall")
        self.event(catalog.STALL_SPAN.name, within[1], attributes)

    def capture(self, capture: Capture) -> None:
        """Adds a finished capture: a span that links to its steps, sampled or not, and an event."""
        first, last = capture.steps
        attributes: dict[str, AttributeValue] = {catalog.SPAN_PROFILER_TRIGGER.name: capture.trigger}
        if capture.alert:
            attributes[catalog.SPAN_PROFILER_ALERT.name] = capture.alert
        if first >= 0:
            attributes |= {catalog.STEP_FIRST.name: first, catalog.STEP_LAST.name: last}
        if capture.file:
            attributes |= {
                catalog.PROFILER_FILE.name: capture.file,
                catalog.PROFILER_SIZE.name: capture.bytes,
            }
        if capture.finding:
            attributes[catalog.PROFILER_FINDING.name] = capture.finding
        if capture.problem:
            attributes[catalog.PROFILER_PROBLEM.name] = capture.problem
        steps = range(first, min(last, first + MOST_CHILDREN) + 1) if first >= 0 else ()
        links = [SpanLink(self._ids.trace("step", n), self._ids.own("step", n)) for n in steps]
        kind = catalog.PROFILER_CAPTURE_SPAN
        self._add_alone(kind, capture.within_ns, attributes, "profiler", error=capture.error, links=links)
        self.event(kind.name, capture.within_ns[1], attributes)

    def exhausted(self, loader: str, reason: str, at_ns: int, *, step: int) -> None:
        """Adds the end of a pass over a loader."""
        attributes: dict[str, AttributeValue] = {
            catalog.SPAN_LOADER.name: loader,
            catalog.SPAN_EXHAUSTION_REASON.name: reason,
            catalog.STEP_NUMBER.name: step,
        }
        self.event(catalog.LOADER_EXHAUSTED_EVENT.name, at_ns, attributes)

    def _of_run(self) -> dict[str, AttributeValue]:
        return {
            catalog.RUN_ID.name: self._ids.run_id,
            catalog.RUN_ATTEMPT.name: self._ids.attempt,
            catalog.SPAN_RANK.name: self._ids.rank,
        }

    def _of_step(self, steps: StepRows, kept: SampledStep) -> dict[str, AttributeValue]:
        attributes: dict[str, AttributeValue] = {
            catalog.STEP_NUMBER.name: kept.number,
            catalog.SPAN_PHASE.name: PHASES[int(steps.phase[kept.row])],
            catalog.KEEP_REASON.name: kept.reason,
            catalog.TRACE_CLASS.name: "step",
        }
        if loader := self._loader(int(steps.loader[kept.row])):
            attributes[catalog.SPAN_LOADER.name] = loader
        if samples := int(steps.samples[kept.row]):
            attributes[catalog.BATCH_SIZE.name] = samples
        if kept.baseline_ns:
            attributes[catalog.STEP_BASELINE.name] = kept.baseline_ns / NS_PER_S
        return attributes

    def _add_call(self, call: tuple[int, ...], place: SpanLink, phase: str, *, parent_id: int) -> None:
        """Adds one call of a step, a row of ``StageCalls``, and its exemplar."""
        number, begun_ns, lasted_ns, failed, loader_number, *_ = call
        source, loader = self._names.sources[number], self._loader(loader_number)
        attributes: dict[str, AttributeValue] = {catalog.SPAN_STAGE.name: source.stage}
        if loader:
            attributes[catalog.SPAN_LOADER.name] = loader
        if source.kind is SourceKind.FORWARD:
            attributes[catalog.MODEL_NAME.name] = source.name
        if (device_ns := self._device_ns(number, begun_ns)) is not None:
            attributes[catalog.STAGE_DEVICE_TIME.name] = device_ns / NS_PER_S
        kind = catalog.STAGE_SPANS.get(source.stage, catalog.STAGE_SPAN)
        within, error = (begun_ns, begun_ns + lasted_ns), f"{source.stage} failed" if failed else ""
        self._add(kind, place, within, attributes, parent_id=parent_id, links=(), error=error)
        exemplar = Exemplar(
            lasted_ns / NS_PER_S, self._unix(begun_ns + lasted_ns), place.trace_id, place.span_id
        )
        self._exemplify("stage", (source.stage, loader, phase), exemplar)

    def _add_alone(
        self, kind: catalog.SpanType, within: tuple[int, int], attributes: Mapping[str, AttributeValue],
        trace_class: str, *, error: str = "", links: Sequence[SpanLink] = (),
    ) -> None:  # fmt: skip
        """Adds a span in a trace of its own."""
        self._passes += 1
        what = (kind.name, self._ids.rank, self._passes)
        span_ids = SpanLink(self._ids.trace(*what), self._ids.own(*what))
        own = {**attributes, catalog.TRACE_CLASS.name: trace_class}
        self._add(kind, span_ids, within, own, links=(self._run, *links), error=error)

    def _add(  # noqa: PLR0913  # as a span has
        self, kind: catalog.SpanType, place: SpanLink, within: tuple[int, int], attributes: Mapping[str, AttributeValue],
        *, parent_id: int = 0, links: tuple[SpanLink, ...] | None = None, error: str = "",
    ) -> None:  # fmt: skip
        """Adds a span with its ids in ``place``; by default with a link to the start of the run."""
        self._spans.append(
            Span(
                name=kind.name,
                trace_id=place.trace_id,
                span_id=place.span_id,
                parent_id=parent_id,
                start_unix_ns=self._unix(within[0]),
                end_unix_ns=self._unix(within[1]),
                attributes=attributes,
                links=(self._run,) if links is None else links,
                error=error,
            )
        )

    def _exemplify(self, what: str, labels: tuple[str, ...], exemplar: Exemplar) -> None:
        self.exemplars[what].setdefault(labels, deque(maxlen=EXEMPLARS_PER_SERIES)).append(exemplar)

    def _loader(self, source: int) -> str:
        return self._names.sources[source].name if source >= 0 else ""


def _calls_of(ended: StageCalls, row: int, before: Sequence[StageCalls]) -> list[tuple[int, ...]]:
    """Returns the first calls of the step in ``row``: those that ended in ``before``, then those in ``ended``."""
    inside = np.flatnonzero(ended.step == row)[:MOST_CHILDREN]
    parts = [*before, StageCalls(*(column[inside] for column in ended))]
    calls = [call for part in parts for call in zip(*(column.tolist() for column in part), strict=True)]
    return calls[:MOST_CHILDREN]
