"""Edges of one thread to nested calls: who owns each instant, and which calls count.

At every instant the innermost open stage owns the time. An edge whose counterpart was lost (an optimizer that raised
fires no hook) is repaired here, so that what follows sees calls that nest.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

from otel_train.codes import (
    FLAG_MASK,
    FLAG_SHIFT,
    OP_MASK,
    PAYLOAD_SHIFT,
    SOURCE_MASK,
    SOURCE_SHIFT,
    Op,
    SourceKind,
)

if TYPE_CHECKING:
    from collections.abc import Callable

BEGIN: Final = int(Op.BEGIN)
RESUME: Final = int(Op.RESUME)
END: Final = int(Op.END)
FAIL: Final = int(Op.FAIL)
STOP: Final = int(Op.STOP)
SUSPEND: Final = int(Op.SUSPEND)
PASS_END: Final = int(Op.PASS_END)

DATA: Final = int(SourceKind.DATA)
H2D: Final = int(SourceKind.H2D)
FORWARD: Final = int(SourceKind.FORWARD)
BACKWARD: Final = int(SourceKind.BACKWARD)
GRAD: Final = int(SourceKind.GRAD)
OPTIMIZER: Final = int(SourceKind.OPTIMIZER)
SCALER: Final = int(SourceKind.SCALER)
STAGE: Final = int(SourceKind.STAGE)
CHECKPOINT: Final = int(SourceKind.CHECKPOINT)
WHOLE: Final = int(SourceKind.WHOLE)

DEEPEST: Final = 64
"""Stages inside each other that are told apart; what lies deeper belongs to the innermost of them."""

UPDATES: Final = 1 << OPTIMIZER | 1 << WHOLE
_GRADIENTS: Final = 1 << BACKWARD | 1 << GRAD
_HIDDEN_IN: Final = [0] * 16
"""By kind: kinds of the open stages inside which a call is a part of theirs."""
_HIDDEN_IN[DATA] = 1 << DATA
_HIDDEN_IN[H2D] = 1 << DATA | 1 << H2D | _GRADIENTS
_HIDDEN_IN[FORWARD] = 1 << FORWARD | _GRADIENTS
_HIDDEN_IN[BACKWARD] = _HIDDEN_IN[GRAD] = _GRADIENTS
_HIDDEN_IN[OPTIMIZER] = _HIDDEN_IN[SCALER] = 1 << OPTIMIZER | 1 << SCALER
_HIDDEN_IN[CHECKPOINT] = 1 << CHECKPOINT
_HIDDEN_IN[WHOLE] = 1 << WHOLE


@dataclass(slots=True)
class OpenStage:
    """A stage that has begun and not ended.

    Attributes:
        source: who was called.
        kind: its ``SourceKind``.
        begun_ns: when.
        flags: ``Flag`` of its begin edge.
        payload: of its begin edge.
        counts: it is an occurrence of its own, not a part of an outer one.
        has_inner: other stages began inside it.
    """

    source: int
    kind: int
    begun_ns: int
    flags: int
    payload: int
    counts: bool
    has_inner: bool = False


class Event(NamedTuple):
    """One edge that nests.

    Attributes:
        ns: when.
        op: ``Op``; for a stage that an outer edge closed, ``Op.FAIL``.
        source: who.
        kind: its ``SourceKind``.
        flags: of the begin edge.
        payload: of this edge.
        begin_payload: of the begin edge.
        begun_ns: when the stage began.
        counts: the call is an occurrence of its own.
        outermost: no other update is around it (of a transfer: no other transfer), counted or not.
        stack: sources of the calls that count and were open up to now, outermost first; the last owns the time
            since the event before.
    """

    ns: int
    op: int
    source: int
    kind: int
    flags: int
    payload: int
    begin_payload: int
    begun_ns: int
    counts: bool
    outermost: bool
    stack: tuple[int, ...]


class Nesting:
    """Follows the open stages of one thread.

    Args:
        kinds: ``SourceKind`` of every source; grows while it is in use.
        emit: takes each event.

    Attributes:
        open: what is open, outermost first.
        ignored: ends without a begin so far.
        backward_seen: a backward has run, so ``autograd.grad`` is none.
    """

    def __init__(self, kinds: list[int], emit: Callable[[Event], None]) -> None:
        self.open: list[OpenStage] = []
        self.ignored = 0
        self.backward_seen = False
        self.emit = emit
        self._kinds = kinds
        self._stack: tuple[int, ...] = ()
        self._last_ns = 0
        self._too_deep = 0

    def edge(self, ns: int, code: int) -> None:
        """Take the next edge. Time never goes back: an earlier instant counts as the last one."""
        if ns < self._last_ns:
            ns = self._last_ns
        else:
            self._last_ns = ns
        op, source = code & OP_MASK, code >> SOURCE_SHIFT & SOURCE_MASK
        if op <= RESUME:
            self._begin(ns, op, source, code)
        elif op <= SUSPEND:
            self._end(ns, op, source, code)
        else:
            # A mark by hand inside an optimizer: it has raised. An iterator may be disposed of anywhere.
            if op != PASS_END and self.open and self.open[-1].kind == OPTIMIZER:
                self._close_down_to(len(self.open) - 1, ns)
            payload = code >> PAYLOAD_SHIFT
            kind = self._kinds[source]
            self.emit(Event(ns, op, source, kind, 0, payload, 0, ns, False, False, self._stack))

    def _begin(self, ns: int, op: int, source: int, code: int) -> None:
        kind, stages = self._kinds[source], self.open
        if stages and kind in (DATA, OPTIMIZER):
            self._close_down_to(self._height_kept(source, kind), ns)
        if self._too_deep or len(stages) == DEEPEST:
            self._too_deep += 1
            return
        if kind == BACKWARD:
            self.backward_seen = True
        counts, before = self._counts(source, kind), self._stack
        if stages:
            stages[-1].has_inner = True
        flags, payload = code >> FLAG_SHIFT & FLAG_MASK, code >> PAYLOAD_SHIFT
        stages.append(OpenStage(source, kind, ns, flags, payload, counts))
        if counts:
            self._stack = (*before, source)
        self.emit(Event(ns, op, source, kind, flags, payload, payload, ns, counts, False, before))

    def _end(self, ns: int, op: int, source: int, code: int) -> None:
        stages = self.open
        height = len(stages) - 1
        while height >= 0 and stages[height].source != source:
            height -= 1
        innermost = height == len(stages) - 1
        if self._too_deep and (height < 0 or innermost):
            self._too_deep -= 1
            return
        if height < 0:
            self.ignored += 1
            return
        if not innermost:
            self._close_down_to(height + 1, ns)
        self._pop(ns, op, code >> PAYLOAD_SHIFT)

    def _pop(self, ns: int, op: int, payload: int) -> None:
        stages, before = self.open, self._stack
        done = stages.pop()
        if done.counts:
            self._stack = before[:-1]
        self._too_deep = 0
        outermost = True
        if stages:
            alike = UPDATES if UPDATES >> done.kind & 1 else 1 << done.kind
            outermost = not any(alike >> stage.kind & 1 for stage in stages)
        self.emit(
            Event(
                ns, op, done.source, done.kind, done.flags, payload, done.payload, done.begun_ns, done.counts,
                outermost, before,
            )
        )  # fmt: skip

    def _close_down_to(self, height: int, ns: int) -> None:
        """An outer edge ends whatever an exception left open inside."""
        while len(self.open) > height:
            self._pop(ns, FAIL, 0)

    def _height_kept(self, source: int, kind: int) -> int:
        """How many stages stay open when ``source`` begins.

        An ask ends an optimizer that raised. So does its own next step, when other stages lie between the two;
        right after it, it is a subclass that calls ``super().step()``.
        """
        if kind == DATA:
            optimizers = (height for height, stage in enumerate(self.open) if stage.kind == OPTIMIZER)
            return next(optimizers, len(self.open))
        for height in range(len(self.open) - 1, -1, -1):
            if self.open[height].source == source:
                return height if self.open[height].has_inner else len(self.open)
        return len(self.open)

    def _counts(self, source: int, kind: int) -> bool:
        """Whether a call is an occurrence of its own.

        Forward, backward and transfers inside backward stay in backward, transfers inside data in data, a call inside
        a call of the same kind (a stage by hand: of the same name) in that; ``autograd.grad`` counts in a run
        without a backward.
        """
        if kind == GRAD and self.backward_seen:
            return False
        hidden_in = _HIDDEN_IN[kind]
        for stage in self.open:
            if stage.counts and (hidden_in >> stage.kind & 1 or (kind == STAGE and stage.source == source)):
                return False
        return True
