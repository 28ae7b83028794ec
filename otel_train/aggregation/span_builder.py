"""What of a run is told as spans and events: kept steps, evaluations, checkpoints, stalls."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import numpy as np

from otel_train import catalog
from otel_train.accounting.types import PHASES
from otel_train.aggregation.spans import Child, StepFacts, Tracer
from otel_train.clock import NS_PER_S
from otel_train.recording.events import SourceKind
from otel_train.records import Event, Exemplar, Span

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from otel_train.accounting.types import ClosedSteps, StageCalls
    from otel_train.aggregation.captures import Capture
    from otel_train.aggregation.eval_passes import Pass
    from otel_train.aggregation.series_names import Names
    from otel_train.aggregation.span_sampler import SampledStep
    from otel_train.clock import Anchor
    from otel_train.records import AttributeValue

MOST_CHILDREN = 64
"""Stage spans per step; a step of more is shown by its first ones."""

EXEMPLARS_PER_SERIES = 8


class SpanBuilder:
    """Makes spans and events, holds them until they are fetched, and remembers exemplars.

    Args:
        tracer: makes spans.
        anchor: turns the monotonic clock into wall time.
        names: of sources and loaders.
        device_ns: device time of an occurrence, by source and start; None where it is not known.
    """

    def __init__(
        self,
        tracer: Tracer,
        anchor: Anchor,
        names: Names,
        *,
        device_ns: Callable[[int, int], int | None] = lambda *_: None,
    ) -> None:
        self.exemplars: dict[tuple[str, ...], deque[Exemplar]] = {}
        self._tracer = tracer
        self.unix = anchor.unix
        self._anchor = anchor
        self._names = names
        self._device_ns = device_ns
        self._spans: list[Span] = []
        self._events: list[Event] = []

    def drain(self) -> tuple[tuple[Span, ...], tuple[Event, ...]]:
        """Everything since the last call."""
        spans, events = tuple(self._spans), tuple(self._events)
        self._spans, self._events = [], []
        return spans, events

    def span(self, span: Span) -> None:
        """A span made elsewhere."""
        self._spans.append(span)

    def event(self, name: str, at_ns: int, attributes: Mapping[str, AttributeValue]) -> None:
        """Something happened."""
        self._events.append(Event(name=name, time_unix_ns=self._anchor.unix(at_ns), attributes=attributes))

    def step(
        self, settled: ClosedSteps, kept: SampledStep, before: Sequence[StageCalls], *, thread: str = ""
    ) -> None:
        """A kept step, with its stages; exemplars point to it.

        Args:
            settled: the slice in which it closed.
            kept: which step.
            before: its occurrences from slices before.
            thread: which thread's step, if not the leading one's.
        """
        steps, row = settled.steps, kept.row
        inside = np.flatnonzero(settled.occurrences.step == row)
        children = [self._child(part, place) for part in before for place in range(len(part.step))]
        children += [self._child(settled.occurrences, place) for place in inside[:MOST_CHILDREN].tolist()]
        facts = StepFacts(
            kept.number,
            kept.reason,
            PHASES[int(steps.phase[row])],
            self._loader(int(steps.loader[row])),
            int(steps.started_ns[row]),
            int(steps.ended_ns[row]),
            int(steps.duration_ns[row]),
            kept.baseline_ns,
            int(steps.samples[row]),
            children[:MOST_CHILDREN],
        )
        spans, (trace, ids, mine) = self._tracer.step(facts, thread)
        self._spans += spans
        for child, span in zip(facts.children, ids, strict=True):
            lasted_ns = child.ended_ns - child.started_ns
            series = ("stage", child.stage, child.loader, facts.phase)
            self._exemplify(series, lasted_ns, child.ended_ns, (trace, span))
        self._exemplify(("step", facts.loader, facts.phase), facts.duration_ns, facts.ended_ns, (trace, mine))

    def checkpoint(self, within: tuple[int, int], step: int, *, failed: bool) -> None:
        """A checkpoint was saved, or was not."""
        attributes = {catalog.STEP_NUMBER.name: step}
        error = "checkpoint failed" if failed else ""
        kind = catalog.CHECKPOINT_SAVE_SPAN
        self._spans.append(
            self._tracer.pass_over(kind, within, attributes, trace_class="checkpoint", error=error)
        )

    def end(self, at_ns: int, step: int, *, error: str = "") -> None:
        """The run is over; ``error``: what ended it, when it did not end by itself."""
        self._spans.append(self._tracer.run_end(at_ns, step, error=error))

    def evaluation(self, over: Pass, step: int) -> None:
        """An evaluation pass is over."""
        attributes: dict[str, AttributeValue] = {
            catalog.STEP_NUMBER.name: step,
            catalog.SPAN_PHASE.name: over.phase,
            catalog.SPAN_LOADER.name: over.loader,
            catalog.BATCH_COUNT.name: over.batches,
        }
        within = (over.started_ns, over.ended_ns)
        self._spans.append(self._tracer.pass_over(catalog.EVAL_SPAN, within, attributes, trace_class="eval"))

    def stall(
        self, within: tuple[int, int], step: int, stage: str, loader: str, *, suspect: int | None = None
    ) -> None:
        """Said while it hangs: the last span that a run which never comes back can send.

        Args:
            within: since when, and now.
            step: the step that does not end.
            stage: what hangs.
            loader: the loader that is waited for, or "".
            suspect: the rank that all others wait for, where that is known; else it is about this rank.
        """
        attributes: dict[str, AttributeValue] = {
            catalog.SPAN_RANK.name: self._tracer.ids.rank if suspect is None else suspect,
            **({} if suspect is None else {catalog.STALL_SUSPECT.name: True}),
            catalog.STEP_NUMBER.name: step,
            catalog.SPAN_STAGE.name: stage,
            catalog.SPAN_LOADER.name: loader,
            catalog.STALL_AGE.name: (within[1] - within[0]) / NS_PER_S,
        }
        self._spans.append(
            self._tracer.pass_over(catalog.STALL_SPAN, within, attributes, trace_class="stall")
        )
        self.event(catalog.STALL_SPAN.name, within[1], attributes)

    def capture(self, capture: Capture) -> None:
        """A capture is over: a span that links to its steps, and an event."""
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
        span = self._tracer.pass_over(
            catalog.PROFILER_CAPTURE_SPAN, capture.within_ns, attributes, trace_class="profiler",
            error=capture.error, links=[self._tracer.step_link(number) for number in steps],
        )  # fmt: skip
        self._spans.append(span)
        self.event(catalog.PROFILER_CAPTURE_SPAN.name, capture.within_ns[1], attributes)

    def exhausted(self, loader: str, reason: str, at_ns: int, *, step: int) -> None:
        """A loader came to its end."""
        attributes: dict[str, AttributeValue] = {
            catalog.SPAN_LOADER.name: loader,
            catalog.SPAN_EXHAUSTION_REASON.name: reason,
            catalog.STEP_NUMBER.name: step,
        }
        self.event(catalog.LOADER_EXHAUSTED_EVENT.name, at_ns, attributes)

    def _exemplify(self, series: tuple[str, ...], value_ns: int, at_ns: int, where: tuple[int, int]) -> None:
        held = self.exemplars.setdefault(series, deque(maxlen=EXEMPLARS_PER_SERIES))
        held.append(Exemplar(value_ns / NS_PER_S, self._anchor.unix(at_ns), *where))

    def _child(self, part: StageCalls, place: int) -> Child:
        source = self._names.sources[int(part.source[place])]
        begun = int(part.started_ns[place])
        return Child(
            source.stage,
            self._loader(int(part.loader[place])),
            source.name if source.kind is SourceKind.FORWARD else "",
            begun,
            begun + int(part.inclusive_ns[place]),
            bool(part.failed[place]),
            self._device_ns(int(part.source[place]), begun),
        )

    def _loader(self, source: int) -> str:
        return self._names.sources[source].name if source >= 0 else ""
