"""Where one step ends and the next begins, as the training thread sees it."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from otel_train.recording.events import FLAG_SHIFT, OP_MASK, SOURCE_MASK, SOURCE_SHIFT, Flag, Op, SourceKind

if TYPE_CHECKING:
    from collections.abc import Sequence

    from otel_train.recording.events import Instrumented

_START = int(Flag.START) << FLAG_SHIFT


class Rule(NamedTuple):
    """What the pump has found out about the loop.

    Attributes:
        work: what makes a step: an update, a backward, a batch, or a mark set by hand.
        asks: the loop asks a loader for batches, and a step ends at the ask.
        aside: names of loaders that were never trained on: what begins with an ask of theirs is no step.
    """

    work: SourceKind
    asks: bool
    aside: frozenset[str] = frozenset()


class StepBoundary:
    """Says of every edge, before it is written, whether a step ended just before it.

    The pump decides later, and finally, what a step was. Here, with nothing but the edges so far, a step
    ends at the first ask after an update; making a loader's iterator is one. Where no ask comes it ends after
    the update that was, one round earlier, the last before the first optimizer came again: so that round
    passes unused.

    Args:
        rule: see ``Rule``.
        sources: by number; may grow.
    """

    def __init__(self, rule: Rule, sources: Sequence[Instrumented]) -> None:
        self._rule = rule
        self._sources = sources
        self._worked = False
        self._first = self._closing = self._latest = -1

    def before(self, code: int) -> bool:
        """Whether a step ended just before this edge."""
        op, number = code & OP_MASK, code >> SOURCE_SHIFT & SOURCE_MASK
        kind = self._kind(number)
        if self._rule.work is SourceKind.MARK:
            return op == Op.MARK
        if self._rule.asks:
            return self._at_ask(op, kind, code)
        return self._after_work(op, kind, number)

    @property
    def ended(self) -> bool:
        """Whether a step will have ended before the next edge that can end one."""
        return self._worked

    def begins(self, code: int) -> bool:
        """Whether the next step, if none is running, begins with this edge. An evaluation is not part of it."""
        if not self._rule.asks or self._rule.work is SourceKind.MARK:
            return True
        number = code >> SOURCE_SHIFT & SOURCE_MASK
        asked = self._kind(number) is SourceKind.DATA and code & OP_MASK == Op.BEGIN
        return (asked and not self._is_aside(number)) or self.inside(code)

    def inside(self, code: int) -> bool:
        """Whether, just before this edge, a step was running beyond doubt.

        Between the end of one and the work of the next lies what may be of neither: an evaluation, a checkpoint.
        """
        number = code >> SOURCE_SHIFT & SOURCE_MASK
        if self._rule.work is SourceKind.MARK:
            return True  # marks lie side by side
        worked = self._kind(number) is self._rule.work and code & OP_MASK == Op.END and not code & _START
        return worked and not self._is_aside(number)

    def _kind(self, number: int) -> SourceKind:
        kind = self._sources[number].kind
        return SourceKind.OPTIMIZER if kind is SourceKind.WHOLE else kind  # an update is an update

    def _is_aside(self, number: int) -> bool:
        source = self._sources[number]
        return source.kind is SourceKind.DATA and source.name in self._rule.aside

    def _at_ask(self, op: int, kind: SourceKind, code: int) -> bool:
        if self.inside(code):
            self._worked = True
        if kind is not SourceKind.DATA or op != Op.BEGIN:
            return False
        ended, self._worked = self._worked, False
        return ended

    def _after_work(self, op: int, kind: SourceKind, number: int) -> bool:
        ended, self._worked = self._worked, False
        if kind is not self._rule.work:
            return ended
        if op == Op.BEGIN:
            if number == self._first:
                self._closing = self._latest
            elif self._first < 0:
                self._first = number
        elif op == Op.END:
            self._latest = number
            self._worked = number == self._closing
        return ended
