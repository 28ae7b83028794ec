"""Edges of one thread to nested calls: the stage that owns each instant, and which calls count.

At every instant the innermost open stage owns the time. An edge whose counterpart was lost (an optimizer that raised
fires no hook) is repaired here, so that what follows sees calls that nest.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from otel_train.recording.events import (
    END,
    FAIL,
    FLAG_MASK,
    FLAG_SHIFT,
    OP_MASK,
    PASS_END,
    PAYLOAD_SHIFT,
    RESUME,
    SOURCE_MASK,
    SOURCE_SHIFT,
    SUSPEND,
    Flag,
    SourceKind,
)

if TYPE_CHECKING:
    from otel_train.accounting.types import Home

DATA, H2D, FORWARD, BACKWARD, GRAD, OPTIMIZER, SCALER, STAGE, CHECKPOINT, _, WHOLE, *_OTHERS = map(
    int, SourceKind
)
"""As integers, for speed."""

_CLOSURE: Final = int(Flag.CLOSURE)
_START: Final = int(Flag.START)

DEEPEST: Final = 64
"""Nested stages that are distinguished; a deeper one belongs to the innermost of them."""

MOST_CODES: Final = 1024
"""Codes that are kept taken apart."""

UPDATES: Final = 1 << OPTIMIZER | 1 << WHOLE
COMPUTES: Final = 1 << FORWARD | 1 << BACKWARD | 1 << GRAD | 1 << OPTIMIZER | 1 << SCALER | 1 << WHOLE
"""Kinds that only a thread that runs models has."""
COMPUTES_BY_KIND: Final = [COMPUTES >> kind & 1 for kind in range(16)]
"""The same as a list: to shift and mask takes four times as long."""
GRADIENTS: Final = 1 << BACKWARD | 1 << GRAD
TRAINS: Final = GRADIENTS | UPDATES | 1 << SCALER
"""Kinds that only a thread that trains has."""
OWN_WORK: Final = 1 << FORWARD | 1 << DATA | 1 << WHOLE
"""Kinds that a thread has which runs more than parts of the steps of another."""
MAY_SPREAD: Final = 1 << STAGE | UPDATES | 1 << SCALER
"""Kinds whose calls may lie in several batches: loaders are asked inside them, by the program or by closures and hooks."""
_HIDDEN_IN: Final = [0] * 16
"""By kind: kinds of the open stages inside which a call is a part of theirs."""
_HIDDEN_IN[DATA] = 1 << DATA
_HIDDEN_IN[H2D] = 1 << DATA | 1 << H2D | GRADIENTS
_HIDDEN_IN[FORWARD] = 1 << FORWARD | GRADIENTS
_HIDDEN_IN[BACKWARD] = _HIDDEN_IN[GRAD] = GRADIENTS
_HIDDEN_IN[OPTIMIZER] = _HIDDEN_IN[SCALER] = 1 << OPTIMIZER | 1 << SCALER
_HIDDEN_IN[CHECKPOINT] = 1 << CHECKPOINT
_HIDDEN_IN[WHOLE] = 1 << WHOLE


def takes_gradients(met: int) -> bool:
    """Returns whether a thread of these kinds gets batches and updates, and others make the gradients."""
    return bool(met >> OPTIMIZER & met >> DATA & 1) and not met & (GRADIENTS | 1 << WHOLE)


class NotKnownYetError(Exception):
    """What an edge means depends on edges that have not come: whether an optimizer in which a loader is asked has raised."""


@dataclass(slots=True)
class OpenStage:
    """A stage that has begun and not ended.

    Attributes:
        source: number of the source that was called.
        kind: its ``SourceKind``.
        begun_ns: when.
        flags: ``Flag`` of its begin edge.
        payload: of its begin edge.
        outer: ``Nesting.stack`` when it began.
        counts: it is an occurrence of its own, not a part of an outer one.
        has_inner: other stages began inside it.
        again: of a user stage: blocks of its name that have begun since, and not ended. They are a part of it.
        asks: of an optimizer: it is known that loaders are asked inside it; of a forward: it has drawn its batch itself.
        home: of a user stage that has several intervals: see ``Home``.
    """

    source: int
    kind: int
    begun_ns: int
    flags: int
    payload: int
    outer: tuple[int, ...]
    counts: bool
    has_inner: bool = False
    again: int = 0
    asks: bool = False
    home: Home | None = None


class Nesting:
    """Follows the open stages of one thread. A subclass receives times and calls.

    Args:
        kinds: ``SourceKind`` of every source; grows while it is in use.

    Attributes:
        stages: what is open, outermost first.
        stack: sources of the open stages that count, outermost first; the last owns the time.
        met: kinds that have begun, as bits. The making of an iterator is not one: another thread may ask it.
        now_ns: time of the last edge.
    """

    def __init__(self, kinds: list[int]) -> None:
        self.stages: list[OpenStage] = []
        self.stack: tuple[int, ...] = ()
        self.met = 0
        self._kinds = kinds
        self._decoded: dict[int, tuple[int, int, int, int]] = {}
        self.now_ns = 0
        self._too_deep = 0

    def edge(self, ns: int, code: int) -> None:
        """Takes the next edge. Time never goes back: an earlier instant counts as the last one.

        Raises:
            NotKnownYetError: see ``has_raised``.
        """
        if ns < self.now_ns:  # a comparison takes half the time of max(), at every edge
            ns = self.now_ns
        else:
            self.now_ns = ns
        try:
            op, source, flags, payload = self._decoded[code]
        except KeyError:
            op, source, flags, payload = self._decode(code)
        if op <= RESUME:
            self._begin(ns, source, flags, payload)
        elif op <= SUSPEND:
            stages = self.stages
            if (
                stages and (last := stages[-1]).source == source and not (last.again or self._too_deep)
            ):  # nearly always
                stages.pop()
                self.end(ns, last, op, payload)
                self.stack = last.outer
            else:
                self._end_outer(ns, op, source, payload)
        else:
            # A manual mark inside an optimizer: it has raised. An iterator may be deleted anywhere.
            if op != PASS_END and self.stages and self.stages[-1].kind == OPTIMIZER:
                self._close_down_to(len(self.stages) - 1, ns)
            self.mark(ns, op, source, payload)

    def _decode(self, code: int) -> tuple[int, int, int, int]:
        """Takes a code apart, and keeps the result: a loop repeats few codes, and a look-up takes a third of the time."""
        if len(self._decoded) >= MOST_CODES:
            self._decoded.clear()
        parts = (
            code & OP_MASK,
            code >> SOURCE_SHIFT & SOURCE_MASK,
            code >> FLAG_SHIFT & FLAG_MASK,
            code >> PAYLOAD_SHIFT,
        )
        self._decoded[code] = parts
        if parts[0] <= RESUME and not parts[2] & _START:
            self.met |= 1 << self._kinds[parts[1]]
        return parts

    def begin(self, ns: int, stage: OpenStage) -> None:
        """Handles the start of a stage, which is not yet among those that are open."""

    def end(self, ns: int, stage: OpenStage, op: int, payload: int) -> None:
        """Handles the end of a stage, which is no longer among those that are open; ``stack`` still holds it.

        Args:
            ns: when.
            stage: which.
            op: how; of a stage that the end of an outer one closed ``Op.FAIL``, of a user stage ``Op.END``.
            payload: of the edge that ended it.
        """

    def goes_on(self, stage: OpenStage) -> None:
        """Handles that the time of a stage up to the next end is a part of its time."""

    def mark(self, ns: int, op: int, source: int, payload: int) -> None:
        """Handles a mark at an instant."""

    def _begin(self, ns: int, source: int, flags: int, payload: int) -> None:
        kind, stages, counts = self._kinds[source], self.stages, True
        if stages:
            if kind in (DATA, OPTIMIZER):
                self._close_down_to(self._height_kept(source, kind), ns)
            if kind == STAGE and not payload and source in self.stack:
                next(stage for stage in stages if stage.source == source and stage.counts).again += 1
                stages[-1].has_inner = True
                return
            if len(stages) == DEEPEST:
                self._too_deep += 1
                return
            counts = self._counts(source, kind)
            if stages:
                stages[-1].has_inner = True
        elif kind == GRAD:
            counts = self._counts(source, kind)
        outer = self.stack
        stage = OpenStage(source, kind, ns, flags, payload, outer, counts)
        self.begin(ns, stage)
        stages.append(stage)
        if counts:
            self.stack = (*outer, source) if outer else (source,)

    def _end_outer(self, ns: int, op: int, source: int, payload: int) -> None:
        """Ends a stage that is not the innermost, or is not open at all."""
        stages = self.stages
        height = len(stages) - 1
        while height >= 0 and stages[height].source != source:
            height -= 1
        if self._too_deep and (height < 0 or height == len(stages) - 1):
            self._too_deep -= 1
        elif height < 0:
            return
        elif stages[height].again and not payload:
            stages[height].again -= 1
        elif all(stage.kind == STAGE for stage in stages[height:]):
            self._end_around(height, ns, op, payload)
        else:
            self._close_down_to(height + 1, ns)
            self._pop(ns, op, payload)

    def _end_around(self, height: int, ns: int, op: int, payload: int) -> None:
        """Ends a user stage; those that began later go on, as where coroutines take turns."""
        later = self.stages[height + 1 :]
        for stage in later:
            self.goes_on(stage)
        done = self.stages.pop(height)
        self.end(ns, done, op, payload)
        if done.counts:
            place = len(done.outer)
            self.stack = _without(self.stack, place)
            for stage in later:
                stage.outer = _without(stage.outer, place)

    def _pop(self, ns: int, op: int, payload: int) -> None:
        done = self.stages.pop()
        self._too_deep = 0
        self.end(ns, done, op, payload)
        self.stack = done.outer

    def _close_down_to(self, height: int, ns: int) -> None:
        """Ends what is open inside the stage that ends: an exception has left it open, or, of a user stage, a suspended generator."""
        while len(self.stages) > height:
            self._pop(ns, END if self.stages[-1].kind == STAGE else FAIL, 0)

    def is_outermost(self, kind: int) -> bool:
        """Returns whether no stage of that kind (of an update: no other update) is open, counted or not."""
        alike = UPDATES if UPDATES >> kind & 1 else 1 << kind
        return not self.stages or not any(alike >> stage.kind & 1 for stage in self.stages)

    def has_raised(self, optimizer: OpenStage) -> bool:  # noqa: ARG002 - a subclass looks at it
        """Returns whether an open optimizer in which a loader is asked has raised, which no edge says.

        Else its closure or one of its hooks asks.

        Raises:
            NotKnownYetError: later edges say it. Nothing was changed by this one.
        """
        return False

    def _height_kept(self, source: int, kind: int) -> int:
        """Returns how many stages stay open when ``source`` begins.

        An ask ends an optimizer that raised. So does its own next step, when other stages lie between the two; right
        after it, it is a subclass that calls ``super().step()``.
        """
        if kind == DATA:
            for height, stage in enumerate(self.stages):
                if stage.kind == OPTIMIZER:
                    return height if self.has_raised(stage) else len(self.stages)
            return len(self.stages)
        for height in range(len(self.stages) - 1, -1, -1):
            if self.stages[height].source == source:
                return height if self.stages[height].has_inner else len(self.stages)
        return len(self.stages)

    def _counts(self, source: int, kind: int) -> bool:
        """Returns whether a call is an occurrence of its own.

        Forward, backward and transfers inside backward stay in backward, transfers inside data in data, a call inside
        a call of the same kind (a user stage: of the same name) in that; ``autograd.grad`` counts in a run
        without a backward.
        """
        if kind == GRAD and self.met >> BACKWARD & 1:
            return False
        if kind == STAGE:
            return source not in self.stack
        hidden_in = _HIDDEN_IN[kind]
        for stage in self.stages:  # noqa: SIM110  # a generator takes twice as long
            if stage.counts and hidden_in >> stage.kind & 1:
                return False
        return True


def _without(stack: tuple[int, ...], place: int) -> tuple[int, ...]:
    return stack[:place] + stack[place + 1 :]


MOST_AHEAD: Final = 16384
MOST_AHEAD_NS: Final = 5 * 10**9
"""Edges, and time, that are looked at to see whether an optimizer has raised. Without an answer it has, unless it has a closure."""


class Lookahead(Nesting):
    """What follows an ask in an open optimizer, as if the optimizer were still running.

    Its own end proves that. Its next begin, or the end of a stage around it, proves that it has raised.
    """

    def __init__(self, kinds: list[int], before: Nesting, optimizer: OpenStage) -> None:
        super().__init__(kinds)
        self.stages = [replace(stage) for stage in before.stages]
        self.stack, self.met = before.stack, before.met
        self._too_deep = before._too_deep  # noqa: SLF001 - of this class
        self._optimizer = self.stages[next(n for n, stage in enumerate(before.stages) if stage is optimizer)]
        self._seen = 0
        self._until_ns = -1

    def raised(self, ns: int, code: int) -> bool | None:
        """Takes the next edge; returns whether the optimizer has raised, None while that is not known."""
        self.edge(ns, code)
        if all(stage is not self._optimizer for stage in self.stages):
            return code & OP_MASK != END or code >> SOURCE_SHIFT & SOURCE_MASK != self._optimizer.source
        self._seen += 1
        self._until_ns = ns + MOST_AHEAD_NS if self._until_ns < 0 else self._until_ns
        if self._seen >= MOST_AHEAD or ns >= self._until_ns:
            return not self._optimizer.flags & _CLOSURE
        return None
