"""Spans made after the fact, with ids that every rank can work out by itself."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any, NamedTuple

from otel_train import catalog
from otel_train.records import Span, SpanLink

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from otel_train.clock import Anchor
    from otel_train.records import AttributeValue


class Child(NamedTuple):
    """One occurrence inside a kept step."""

    stage: str
    loader: str
    model: str
    started_ns: int
    ended_ns: int
    failed: bool
    device_ns: int | None = None


class StepFacts(NamedTuple):
    """A kept step, by name."""

    number: int
    reason: str
    phase: str
    loader: str
    started_ns: int
    ended_ns: int
    duration_ns: int
    baseline_ns: int
    samples: int
    children: Sequence[Child]


class Ids(NamedTuple):
    """Trace and span ids, a hash of what they name.

    No random numbers: equally seeded ranks would draw equal ids, and a draw would move the user's seed.

    Attributes:
        run_id: the run.
        attempt: its start.
        rank: this process.
    """

    run_id: str
    attempt: int
    rank: int

    def trace(self, *what: object) -> int:
        """128 bits, the same on every rank."""
        return self._hash(16, *what)

    def span(self, *what: object) -> int:
        """64 bits, the same on every rank."""
        return self._hash(8, *what)

    def own(self, *what: object) -> int:
        """64 bits, of this rank alone."""
        return self._hash(8, "rank", self.rank, *what)

    def _hash(self, size: int, *what: object) -> int:
        text = "\0".join(map(str, (self.run_id, self.attempt, *what)))
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=size).digest(), "big") or 1


class _Place(NamedTuple):
    """Where a span stands."""

    trace: int
    span: int
    parent: int = 0


class Tracer:
    """Turns facts into spans.

    Args:
        ids: of this process.
        anchor: turns the monotonic clock into wall time.
    """

    def __init__(self, ids: Ids, anchor: Anchor) -> None:
        self.ids = ids
        self._unix = anchor.unix
        self._run = SpanLink(ids.trace("run"), ids.own("run"))
        self._made = 0

    def run_start(self, started_ns: int, ended_ns: int) -> Span:
        """The root of everything, over in milliseconds: nothing is lost with a crash."""
        place = _Place(self._run.trace_id, self._run.span_id)
        attributes = {**self._who(), catalog.TRACE_CLASS.name: "run"}
        return self._span(catalog.RUN_SPAN.name, place, (started_ns, ended_ns), attributes, links=())

    def run_end(self, at_ns: int, step: int, *, error: str = "") -> Span:
        """The end; ``error``: what ended it, when it did not end by itself."""
        place = _Place(self.ids.trace("run end"), self.ids.own("run end"))
        attributes = {**self._who(), catalog.STEP_NUMBER.name: step, catalog.TRACE_CLASS.name: "run"}
        return self._span(catalog.RUN_END_SPAN.name, place, (at_ns, at_ns), attributes, error=error)

    def step(
        self, step: StepFacts, thread: str = ""
    ) -> tuple[tuple[Span, ...], tuple[int, tuple[int, ...], int]]:
        """Spans of a kept step.

        Args:
            step: which.
            thread: tells the steps of further training threads, which have numbers of their own, apart.

        Returns:
            The spans, and where exemplars point to: trace id, span ids of the children, span id of the step.
        """
        what = ("step", step.number, *([thread] if thread else []))
        trace, root, mine = self.ids.trace(*what), self.ids.span(*what), self.ids.own(*what)
        within = (step.started_ns, step.ended_ns)
        attributes = _step_attributes(step)
        spans = []
        if self.ids.rank == 0:
            spans.append(self._span(catalog.STEP_SPAN.name, _Place(trace, root), within, attributes))
        error = next((f"{child.stage} failed" for child in step.children if child.failed), "")
        attributes = {**attributes, catalog.SPAN_RANK.name: self.ids.rank}
        place = _Place(trace, mine, root)
        spans.append(self._span(catalog.RANK_STEP_SPAN.name, place, within, attributes, error=error))
        ids = [self.ids.own(*what, number) for number in range(len(step.children))]
        for child, span in zip(step.children, ids, strict=True):
            spans.append(self._child(child, _Place(trace, span, mine)))
        return tuple(spans), (trace, tuple(ids), mine)

    def pass_over(
        self,
        kind: catalog.SpanType,
        within: tuple[int, int],
        attributes: Mapping[str, AttributeValue],
        *,
        trace_class: str,
        error: str = "",
        links: Sequence[SpanLink] = (),
    ) -> Span:
        """A span in a trace of its own: an evaluation, a checkpoint, a stall, a capture."""
        self._made += 1
        what = (kind.name, self.ids.rank, self._made)
        place = _Place(self.ids.trace(*what), self.ids.own(*what))
        own = {**attributes, catalog.TRACE_CLASS.name: trace_class}
        return self._span(kind.name, place, within, own, error=error, links=(self._run, *links))

    def step_link(self, number: int) -> SpanLink:
        """To this rank's part of a step, kept or not."""
        return SpanLink(self.ids.trace("step", number), self.ids.own("step", number))

    def _child(self, child: Child, place: _Place) -> Span:
        kind = catalog.STAGE_SPANS.get(child.stage, catalog.STAGE_SPAN)
        attributes: dict[str, AttributeValue] = {catalog.SPAN_STAGE.name: child.stage}
        if child.loader:
            attributes[catalog.SPAN_LOADER.name] = child.loader
        if child.model:
            attributes[catalog.MODEL_NAME.name] = child.model
        if child.device_ns is not None:
            attributes[catalog.STAGE_DEVICE_TIME.name] = child.device_ns / 1e9
        error = f"{child.stage} failed" if child.failed else ""
        return self._span(
            kind.name, place, (child.started_ns, child.ended_ns), attributes, links=(), error=error
        )

    def _who(self) -> dict[str, AttributeValue]:
        return {
            catalog.RUN_ID.name: self.ids.run_id,
            catalog.RUN_ATTEMPT.name: self.ids.attempt,
            catalog.SPAN_RANK.name: self.ids.rank,
        }

    def _span(
        self,
        name: str,
        place: _Place,
        within: tuple[int, int],
        attributes: Mapping[str, AttributeValue],
        **rest: Any,  # links and error, as in Span
    ) -> Span:
        return Span(
            name=name,
            trace_id=place.trace,
            span_id=place.span,
            parent_id=place.parent,
            start_unix_ns=self._unix(within[0]),
            end_unix_ns=self._unix(within[1]),
            attributes=attributes,
            **{"links": (self._run,), **rest},
        )


def _step_attributes(step: StepFacts) -> dict[str, AttributeValue]:
    attributes: dict[str, AttributeValue] = {
        catalog.STEP_NUMBER.name: step.number,
        catalog.SPAN_PHASE.name: step.phase,
        catalog.KEEP_REASON.name: step.reason,
        catalog.TRACE_CLASS.name: "step",
    }
    if step.loader:
        attributes[catalog.SPAN_LOADER.name] = step.loader
    if step.samples:
        attributes[catalog.BATCH_SIZE.name] = step.samples
    if step.baseline_ns:
        attributes[catalog.STEP_BASELINE.name] = step.baseline_ns / 1e9
    return attributes
