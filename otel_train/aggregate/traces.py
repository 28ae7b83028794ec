"""Spans made after the fact, with ids that every rank can work out by itself."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, NamedTuple

from otel_train import catalog
from otel_train.records import Span, SpanLink

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from otel_train.clock import Anchor
    from otel_train.records import AttributeValue

MOST_CHILDREN = 64
"""Stage spans per step; a step of more is shown by its first ones."""


class Child(NamedTuple):
    """One occurrence inside a kept step."""

    stage: str
    loader: str
    model: str
    started_ns: int
    ended_ns: int
    failed: bool


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
    counted: bool
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
        return self._span(
            catalog.RUN_SPAN.name, self._run.trace_id, self._run.span_id, (started_ns, ended_ns),
            {**self._who(), catalog.TRACE_CLASS.name: "run"}, links=(),
        )  # fmt: skip

    def run_end(self, at_ns: int, step: int) -> Span:
        """A clean end."""
        return self._span(
            catalog.RUN_END_SPAN.name, self.ids.trace("run end"), self.ids.own("run end"), (at_ns, at_ns),
            {**self._who(), catalog.STEP_NUMBER.name: step, catalog.TRACE_CLASS.name: "run"},
        )  # fmt: skip

    def step(self, step: StepFacts) -> tuple[tuple[Span, ...], tuple[int, tuple[int, ...], int]]:
        """Spans of a kept step.

        Returns:
            The spans, and where exemplars point to: trace id, span ids of the children, span id of the step.
        """
        trace, root = self.ids.trace("step", step.number), self.ids.span("step", step.number)
        mine = self.ids.own("step", step.number)
        within = (step.started_ns, step.ended_ns)
        spans = []
        if self.ids.rank == 0:
            spans.append(self._span(catalog.STEP_SPAN.name, trace, root, within, _step_attributes(step)))
        attributes = {**_step_attributes(step), catalog.SPAN_RANK.name: self.ids.rank}
        error = next((f"{child.stage} failed" for child in step.children if child.failed), "")
        spans.append(
            self._span(catalog.RANK_STEP_SPAN.name, trace, mine, within, attributes, parent=root, error=error)
        )
        ids = []
        for place, child in enumerate(step.children[:MOST_CHILDREN]):
            ids.append(self.ids.own("step", step.number, place))
            spans.append(self._child(child, trace, ids[-1], mine))
        return tuple(spans), (trace, tuple(ids), mine)

    def pass_over(
        self, kind: catalog.SpanType, within: tuple[int, int], attributes: Mapping[str, AttributeValue],
        *, trace_class: str, error: str = "",
    ) -> Span:  # fmt: skip
        """A span in a trace of its own: an evaluation, a checkpoint, a stall."""
        self._made += 1
        what = (kind.name, self.ids.rank, self._made)
        own = {**attributes, catalog.TRACE_CLASS.name: trace_class}
        return self._span(kind.name, self.ids.trace(*what), self.ids.own(*what), within, own, error=error)

    def _child(self, child: Child, trace: int, span: int, parent: int) -> Span:
        kind = catalog.STAGE_SPANS.get(child.stage, catalog.STAGE_SPAN)
        attributes: dict[str, AttributeValue] = {catalog.SPAN_STAGE.name: child.stage}
        if child.loader:
            attributes[catalog.SPAN_LOADER.name] = child.loader
        if child.model:
            attributes[catalog.MODEL_NAME.name] = child.model
        error = f"{child.stage} failed" if child.failed else ""
        within = (child.started_ns, child.ended_ns)
        return self._span(kind.name, trace, span, within, attributes, parent=parent, links=(), error=error)

    def _who(self) -> dict[str, AttributeValue]:
        return {
            catalog.RUN_ID.name: self.ids.run_id,
            catalog.RUN_ATTEMPT.name: self.ids.attempt,
            catalog.SPAN_RANK.name: self.ids.rank,
        }

    def _span(
        self, name: str, trace: int, span: int, within: tuple[int, int],
        attributes: Mapping[str, AttributeValue], *, parent: int = 0,
        links: Sequence[SpanLink] | None = None, error: str = "",
    ) -> Span:  # fmt: skip
        return Span(
            name=name, trace_id=trace, span_id=span, parent_id=parent,
            start_unix_ns=self._unix(within[0]), end_unix_ns=self._unix(within[1]),
            attributes=attributes, links=(self._run,) if links is None else links, error=error,
        )  # fmt: skip


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
    if not step.counted:
        attributes[catalog.STEP_PARTIAL.name] = True
    return attributes
