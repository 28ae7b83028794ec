"""Matches the start and end events of one thread to nested calls: which stage owns each instant, and which calls count.

At every instant the innermost open stage owns the time. A missing end event (an optimizer that raises calls no post hook) is
repaired here, so that all other modules see calls that nest.
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
"""Most nested stages that are tracked; a deeper one belongs to the innermost of them."""

MOST_CODES: Final = 1024
"""Size of the cache of decoded event codes."""

UPDATES: Final = 1 << OPTIMIZER | 1 << WHOLE
COMPUTES: Final = 1 << FORWARD | 1 << BACKWARD | 1 << GRAD | 1 << OPTIMIZER | 1 << SCALER | 1 << WHOLE
"""Kinds that occur only on a thread that runs models, as bits."""
COMPUTES_BY_KIND: Final = [COMPUTES >> kind & 1 for kind in range(16)]
"""The same as a list: shift and mask take four times as long."""
GRADIENTS: Final = 1 << BACKWARD | 1 << GRAD
TRAINS: Final = GRADIENTS | UPDATES | 1 << SCALER
"""Kinds that occur only on a thread that trains."""
OWN_WORK: Final = 1 << FORWARD | 1 << DATA | 1 << WHOLE
"""Kinds that show that a thread has steps of its own, not only parts of another thread's."""
MAY_SPREAD: Final = 1 << STAGE | UPDATES | 1 << SCALER
"""Kinds whose calls may span several batches: the program, a closure or a hook requests batches inside them."""
_HIDDEN_IN: Final = [0] * 16
"""By kind: kinds of open stages of which a call inside them is a part, so that it does not count as a call of its own."""
_HIDDEN_IN[DATA] = 1 << DATA
_HIDDEN_IN[H2D] = 1 << DATA | 1 << H2D | GRADIENTS
_HIDDEN_IN[FORWARD] = 1 << FORWARD | GRADIENTS
_HIDDEN_IN[BACKWARD] = _HIDDEN_IN[GRAD] = GRADIENTS
_HIDDEN_IN[OPTIMIZER] = _HIDDEN_IN[SCALER] = 1 << OPTIMIZER | 1 << SCALER
_HIDDEN_IN[CHECKPOINT] = 1 << CHECKPOINT
_HIDDEN_IN[WHOLE] = 1 << WHOLE


def takes_gradients(met: int) -> bool:
    """Returns whether a thread on which these kinds occur gets batches and makes updates, and other threads make the gradients."""
    return bool(met >> OPTIMIZER & met >> DATA & 1) and not met & (GRADIENTS | 1 << WHOLE)


class NotKnownYetError(Exception):
    """Raised for an event whose meaning depends on later events: whether an optimizer in which a loader is requested has raised."""


@dataclass(slots=True)
class OpenStage:
    """A stage that has begun and not ended.

    Attributes:
        source: number of the source that was called.
        kind: its ``SourceKind``.
        begun_ns: when it began.
        flags: ``Flag`` of its start event.
        payload: payload of its start event.
        outer: ``Nesting.stack`` when it began.
        counts: whether it is a call of its own, not a part of an outer one.
        has_inner: whether other stages began inside it.
        again: of a user stage: number of open blocks of the same name that began after it. They are a part of it.
        asks: of an optimizer: requests inside it come from its closure or hooks; of a forward: it has requested its batch itself.
        home: row of a call that has several intervals.
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
    """Tracks the open stages of one thread. A subclass handles times and calls.

    Args:
        kinds: ``SourceKind`` of every source; grows while it is in use.

    Attributes:
        stages: open stages, outermost first.
        stack: sources of the open stages that count, outermost first; the last owns the time.
        met: kinds that have begun, as bits. Creating an iterator does not count: another thread may read the iterator.
        now_ns: time of the last event.
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
        """Processes the next event. Time never goes back: an earlier time is replaced by that of the last event.

        Raises:
            NotKnownYetError: see ``has_raised``.
        """
        if ns < self.now_ns:  # a comparison takes half the time of max(), at every event
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
            # A mark inside an optimizer shows that the optimizer has raised. An iterator may be deleted anywhere.
            if op != PASS_END and self.stages and self.stages[-1].kind == OPTIMIZER:
                self._close_down_to(len(self.stages) - 1, ns)
            self.mark(ns, op, source, payload)

    def _decode(self, code: int) -> tuple[int, int, int, int]:
        """Decodes a code and caches the result: a loop repeats few codes, and a lookup takes a third of the time."""
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
        """Handles the start of a stage, before it is added to ``stages``."""

    def end(self, ns: int, stage: OpenStage, op: int, payload: int) -> None:
        """Handles the end of a stage, after it was removed from ``stages``; ``stack`` still contains it.

        Args:
            ns: time of the end.
            stage: the stage.
            op: how it ended. If the end of an outer stage closed it: ``Op.END`` for a user stage, else ``Op.FAIL``.
            payload: payload of the end event.
        """

    def goes_on(self, stage: OpenStage) -> None:
        """Handles that an open stage has an interval up to the next event and is not over."""

    def mark(self, ns: int, op: int, source: int, payload: int) -> None:
        """Handles an event that neither opens nor closes a stage."""

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
        """Ends a stage that is not the innermost; ignores the end of one that is not open."""
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
        """Ends a user stage, and keeps those open that began after it: coroutines may take turns."""
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
        """Ends the stages above a height. An exception has left them open; a user stage may be in a suspended generator."""
        while len(self.stages) > height:
            self._pop(ns, END if self.stages[-1].kind == STAGE else FAIL, 0)

    def is_outermost(self, kind: int) -> bool:
        """Returns whether no stage of that kind (for an update: no update) is open, counted or not."""
        alike = UPDATES if UPDATES >> kind & 1 else 1 << kind
        return not self.stages or not any(alike >> stage.kind & 1 for stage in self.stages)

    def has_raised(self, optimizer: OpenStage) -> bool:  # noqa: ARG002 - a subclass looks at it
        """Returns whether an open optimizer in which a loader is requested has raised, for which there is no event.

        Otherwise its closure or one of its hooks makes the request.

        Raises:
            NotKnownYetError: only later events show it. Nothing was changed.
        """
        return False

    def _height_kept(self, source: int, kind: int) -> int:
        """Returns how many stages stay open when ``source`` begins.

        A request ends an optimizer that raised. So does the next step of the same optimizer if other stages began in
        between; otherwise it is a subclass that calls ``super().step()``.
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
        """Returns whether a call is a call of its own, not a part of an open one.

        Parts: forward, backward and transfers inside backward; transfers inside data; a call inside a call of the same
        kind (a user stage: of the same name); ``autograd.grad`` in a run with a backward.
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
"""Events, and nanoseconds, after which an optimizer that has not ended counts as raised, unless it was given a closure."""


class Lookahead(Nesting):
    """Processes the events after a request inside an open optimizer as if the optimizer were still running.

    Its own end proves that it is. Its next start, or the end of an enclosing stage, proves that it has raised.
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
        """Processes the next event; returns whether the optimizer has raised, None while that is not known."""
        self.edge(ns, code)
        if all(stage is not self._optimizer for stage in self.stages):
            return code & OP_MASK != END or code >> SOURCE_SHIFT & SOURCE_MASK != self._optimizer.source
        self._seen += 1
        self._until_ns = ns + MOST_AHEAD_NS if self._until_ns < 0 else self._until_ns
        if self._seen >= MOST_AHEAD or ns >= self._until_ns:
            return not self._optimizer.flags & _CLOSURE
        return None
