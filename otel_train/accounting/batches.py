"""Batches: the time of a thread between two boundaries, and which passes over loaders each belongs to.

Time waits in the open batch until the next boundary: a request that begins a batch, the end of a pass, a checkpoint, a manual
mark, the close; and, where no request comes, an update by the optimizer that updated first or last in the open step.
``phases`` then decides what the batch was for. docs/explanation/how-time-is-accounted.md has the rules.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import IntEnum
from operator import itemgetter
from typing import TYPE_CHECKING, Final

from otel_train.accounting.nesting import FORWARD, GRADIENTS, OpenStage
from otel_train.accounting.steps import (
    BEGUN_NS,
    CALL,
    FORWARDS,
    GRADIENTS_MADE,
    NS,
    SHOWS,
    STACK,
    UPDATED,
    Item,
    Step,
    StepBook,
    StepSourceDecision,
)
from otel_train.accounting.types import TRAIN, Activity, SourceTable, StepSource
from otel_train.recording.events import Flag

if TYPE_CHECKING:
    from otel_train.accounting.phases import BatchPhases

LOOKS_AHEAD: Final = 8
"""Batches that a loop may fetch before the first is used. After that, the name of the loader decides."""

MOST_CACHED: Final = 64
"""Batches of a pass that may be forwarded without gradients before one trains. After that, they are evaluation."""

MOST_ITEMS: Final = 32768
"""Items that wait at most; beyond that they are booked by the evidence so far, so that memory stays bounded."""

_BEGUN: Final = itemgetter(BEGUN_NS)


class Boundary(IntEnum):
    """What ends a batch, or a step inside it. ``SAID``: a manual epoch or report; ``MARK``: a manual step."""

    ASK, PASS_END, CHECKPOINT, SAID, MARK, CLOSE = range(6)


# Read as names of the module: see ``steps``.
_ASK, _PASS_END, _, _SAID, _MARK, _CLOSE = Boundary
_BY_BACKWARD, _BY_BATCH = StepSource.BACKWARD, StepSource.BATCH


@dataclass(slots=True, eq=False)
class Pass:
    """One pass over a loader: an iterator.

    Attributes:
        source: the loader.
        phase: what its batches have shown; -1 for nothing yet.
        batches: asks so far.
        ahead: batches that the loop fetched before it used the first; below 0 once it has drawn several in a row again.
        unused: number of the last batch that was not used when the pass was asked again.
        computed: a stage that computes has run in one of its batches.
        ended: it has no further batch, or its iterator is gone.
        drawn_again: it gave one batch, as the pass of its loader before: ``next(iter(loader))`` in a loop.
        is_behind: an evaluation looks one batch ahead in it: the step of its last batch is to come.
        caches: batches of it that were forwarded without gradients were of the step of a later one.
        is_of_model: its last request was inside a forward, of a model that draws its own batches.
        making: time in which its iterator was made.
        making_ns: how long that took; -1 once its first batch is there.
    """

    source: int
    phase: int = -1
    batches: int = 0
    ahead: int = 0
    unused: int = 0
    computed: bool = False
    ended: bool = False
    drawn_again: bool = False
    is_behind: bool = False
    caches: bool = False
    is_of_model: bool = False
    making: list[Item] = field(default_factory=list)
    making_ns: int = -1


@dataclass(slots=True, eq=False)
class Batch:
    """Time since a boundary, of one batch.

    Attributes:
        passes: those that were asked for it; none where no ask came.
        loader: the one fetched last, else the first asked; -1 for none.
        items: its time. Always the same list: ``Batches.place`` adds to it.
        shows: a stage that computes has run in it.
        fetched: it has a batch that a loader gave, and is no step yet.
        row: batches before it that may be one with it: their loaders and its own were asked in a row for the first time.
        left_over: the pass before whose end it was fetched, and after which it is used.
        asked_in: the training step that was open when it was asked for.
        between: it was not asked for, and follows the end of a pass.
        in_hand: where it was not asked for: the pass whose batch another loader, as of an evaluation, has interrupted.
        fresh: it waits since this boundary.
        trained: it was trained on before its last boundary.
        dropped: it was in hand, and no model had used it, when the loop left its pass or ended.
        cached: models ran in it in training mode, all without gradients: it may be for a later batch of its pass, which trains.
    """

    passes: list[Pass] = field(default_factory=list)
    loader: int = -1
    items: list[Item] = field(default_factory=list)
    shows: bool = False
    fetched: bool = False
    row: list[Batch] = field(default_factory=list)
    left_over: Pass | None = None
    asked_in: Step | None = None
    between: bool = False
    in_hand: Pass | None = None
    fresh: bool = True
    trained: bool = False
    dropped: bool = False
    cached: bool = False

    def add(self, asked: Pass) -> None:
        """Adds a pass that is asked for the batch."""
        self.passes.append(asked)
        self.add_part(asked)

    def add_part(self, asked: Pass) -> None:
        """Adds a request to a pass that gives a part of the batch."""
        asked.batches += 1
        asked.ended = False
        if asked.making:  # the making of an iterator is a wait for its first batch
            self.add_items(asked.making)
            asked.making_ns = sum(item[NS] for item in asked.making)
            asked.making = []

    def add_items(self, items: list[Item]) -> None:
        """Adds time that may lie before its own."""
        self.items += items
        self.items.sort(key=_BEGUN)

    def take_items(self) -> list[Item]:
        """Returns its time, and keeps none of it."""
        items = self.items.copy()
        self.items.clear()
        return items

    def take_items_from(self, ns: int) -> list[Item]:
        """Returns its time from ``ns`` on, and keeps what lies before."""
        late = [item for item in self.items if item[BEGUN_NS] >= ns]
        self.items[:] = [item for item in self.items if item[BEGUN_NS] < ns]
        return late

    def part(self, items: list[Item]) -> Batch:
        """Returns some of its time, as a batch that waits."""
        return Batch(
            self.passes, self.loader, items,
            fetched=self.fetched, left_over=self.left_over, asked_in=self.asked_in, in_hand=self.in_hand, dropped=self.dropped,
        )  # fmt: skip

    @property
    def has_forward(self) -> bool:
        """A forward began in it."""
        return any(item[SHOWS] in FORWARDS for item in self.items)

    @property
    def has_gradients(self) -> bool:
        """A backward has ended in it."""
        return any(item[SHOWS] == GRADIENTS_MADE for item in self.items)

    @property
    def has_raised(self) -> bool:
        """A call in it ended by an exception."""
        return any((call := item[CALL]) is not None and call[3] for item in self.items)

    @property
    def is_given(self) -> bool:
        """The program asked for it, not a model in its forward."""
        return any(
            not each.is_of_model for each in (*self.origins, *((self.in_hand,) if self.in_hand else ()))
        )

    @property
    def is_over(self) -> bool:
        """All its passes have ended."""
        return all(each.ended for each in self.passes) and (self.in_hand is None or self.in_hand.ended)

    @property
    def shown(self) -> int:
        """Phase that its passes have shown, or the one that it is of otherwise; -1 for none yet."""
        origins = self.origins if self.in_hand is None else [*self.origins, self.in_hand]
        return next((each.phase for each in origins if each.phase >= 0), -1)

    @property
    def origins(self) -> list[Pass]:
        """Passes that were asked for it, and the one before whose end it was fetched."""
        return self.passes if self.left_over is None else [*self.passes, self.left_over]

    @property
    def loaders(self) -> list[int]:
        """Every loader that was asked for it; -1 for none."""
        return [each.source for each in self.passes] or [self.loader]


class Batches:
    """Collects the time of a thread in batches, and has each judged at its boundaries.

    Args:
        sources: what is known of every source.
        book: has the open step.
        decision: what steps are counted by.
        phases: judges batches, and books their time.

    Attributes:
        open: the open one; None where no batch is open.
        stopped: the loader that had no further batch, right after an end inside a row of asks; else None.
        place: takes time, and what happened at its end. The list of an open batch takes it without a function of this class, at every edge.
    """

    def __init__(
        self, sources: SourceTable, book: StepBook, decision: StepSourceDecision, phases: BatchPhases
    ) -> None:
        self.open: Batch | None = None
        self.stopped: int | None = None
        self.place: Callable[[Item], object] = phases.place_in_none
        self._sources = sources
        self._book = book
        self._decision = decision
        self._phases = phases
        self._drawn: set[int] = set()
        """Loaders whose last pass gave one batch: ``next(iter(loader))``."""
        self._mates: dict[int, list[int]] = {}
        """By loader: those that were asked together with it last, as by ``zip``."""
        self._interrupted: tuple[Pass, Step] | None = None
        """The pass whose batch was open when another loader was asked, and the step that has not closed since."""

    @property
    def pending(self) -> list[list[Item]]:
        """Items of all batches that wait, of the open one, and those of a step that has shown nothing yet."""
        open_too = [] if self.open is None else [*self.open.row, self.open]
        return [
            self._phases.lead,
            *(batch.items for batch in (*self._phases.waiting, *self._phases.pair, *open_too)),
        ]

    # -- what opens a batch ------------------------------------------------------------------------

    def ask_inside(self, asked: Pass, call: OpenStage) -> None:
        """Handles a request inside a forward, a backward or a gradient.

        It is for a part of the batch that the call was given, as from a memory bank. A forward without one begins the
        batch that it draws. Its further requests are those of a loop inside it.
        """
        batch, loops = self.open, call.asks
        if loops and batch is not None and not batch.passes and batch.has_forward:
            loops = False  # its first request has found the end of a pass
        if batch is not None and not loops and (call.kind != FORWARD or batch.is_given):
            batch.add_part(asked)
        else:
            self.ask(asked, since_ns=-1 if loops else call.begun_ns)
            call.asks = asked.is_of_model = call.kind == FORWARD

    def ask(self, asked: Pass, *, since_ns: int = -1) -> None:
        """Handles a request to a loader for a batch. ``since_ns``: the batch begins before it, with a call that is open."""
        self._phases.begin()
        asked.is_of_model = False
        self._join_or_part(asked)
        batch, row = self.open, []
        if batch is not None and batch.passes and not batch.shows:
            if asked in batch.passes:
                asked.ahead = asked.ahead + 1 if asked.batches == asked.ahead + 1 else -MOST_ITEMS
                asked.unused = asked.batches
            elif asked.source in self._mates.get(batch.passes[0].source, ()):
                batch.add(asked)
                return
            elif not asked.batches and all(each.batches <= 1 for each in batch.passes):
                row = [*batch.row, batch] if len(batch.row) < LOOKS_AHEAD else []
        if batch is None:
            self._drop_left_over()
        self._phases.left_over = None
        call = [] if batch is None or since_ns < 0 else batch.take_items_from(since_ns)
        if not row:
            self.boundary(_ASK, asked)
        self._interrupt(batch, asked)
        opened = Batch(loader=asked.source, items=call, row=row, asked_in=self._book.open)
        self._open(opened)
        opened.add(asked)

    def _interrupt(self, batch: Batch | None, asked: Pass) -> None:
        """Remembers a batch of training whose step has not closed when another loader is asked."""
        if self._interrupted is not None and asked is self._interrupted[0]:
            self._interrupted = None
        elif batch is not None and batch.passes and asked not in batch.passes:
            trains = batch.shown <= TRAIN and not self._phases.is_named_evaluation(batch)
            if trains and batch.asked_in is self._book.open:
                self._interrupted = batch.passes[-1], self._book.open

    def compute(self, source: int = -1, flags: int = 0) -> None:
        """Handles the start of a stage that only training and evaluation have; -1: of one that goes on after a pass."""
        batch = self.open
        if batch is None:
            if source >= 0 and not self._completes(source, flags):
                self._phases.book_waiting(ended_too=True, unused_too=False)
            began = self._phases.began
            self._phases.begin()
            self._open(batch := self._batch_in_hand(between=began))
        batch.shows = True
        for each in batch.passes if batch.in_hand is None else [batch.in_hand]:
            each.computed = True
        if len(batch.items) > MOST_ITEMS:
            self.boundary(_SAID)

    def _completes(self, source: int, flags: int) -> bool:
        """Returns whether what begins may go on with forwards of passes before it: their backward or update, or another model on what they gave."""
        kinds = self._sources.kinds
        if kinds[source] != FORWARD:
            has_gradients = any(batch.has_gradients for batch in self._phases.waiting)
            return has_gradients or bool(GRADIENTS >> kinds[source] & 1)
        items = (item for batch in self._phases.waiting for item in batch.items if item[SHOWS] in FORWARDS)
        return bool(flags & Flag.GRAD) and all(item[STACK][-1] != source for item in items)

    def _batch_in_hand(self, *, between: bool = True) -> Batch:
        """Returns a batch that is not asked for: the one that was fetched before the end of its pass, if there is one."""
        left_over = self._phases.left_over
        if left_over is None:
            in_hand = self._interrupted_pass()
            if in_hand is None or in_hand.ended:
                return Batch(between=between)
            return Batch(in_hand=in_hand)
        return Batch(loader=left_over.source, left_over=left_over, between=not left_over.drawn_again)

    def _has_another(self) -> bool:
        """Returns whether a batch of training is in hand, or a part of its step, that another loader has interrupted."""
        return self._interrupted_pass() is not None or self._phases.in_hand >= 0

    def _interrupted_pass(self) -> Pass | None:
        """Returns the pass whose batch another loader has interrupted in the open step; None if none has."""
        if self._interrupted is None or self._interrupted[1] is not self._book.open:
            return None
        return self._interrupted[0]

    def _drop_left_over(self) -> None:
        """Counts no step for a batch that was in hand when its pass was left, and is not used: others of the pass were."""
        left_over = self._phases.left_over
        if left_over is not None and left_over.computed:
            for batch in self._phases.waiting:
                batch.fetched = batch.fetched and left_over not in batch.passes

    def fetched(self, asked: Pass) -> None:
        """Handles a batch that a loader returned, unless it is a part of one."""
        if self.open is not None and asked in self.open.passes:
            self.open.loader, self.open.fetched = asked.source, True

    def epoch(self) -> None:
        """Handles the start or the end of an epoch, as the program says it: a batch that was asked for and used is over."""
        self.boundary(_SAID)
        if self.open is not None and self.open.passes and self.open.shows:
            self._open(None)

    def limit_items(self) -> None:
        """Judges the open batch before its end if it has too many items."""
        if self.open is not None and len(self.open.items) > MOST_ITEMS:
            self.boundary(_SAID)

    def _open(self, batch: Batch | None) -> None:
        self.open = batch
        self.place = self._phases.place_in_none if batch is None else batch.items.append

    def _join_or_part(self, asked: Pass | None) -> None:
        """Decides whether loaders that were asked in a row for the first time are asked together.

        They are if the first of them is asked next; if another one is, it goes on alone. ``asked`` None: nothing
        more is asked, and they were together.
        """
        batch = self.open
        if batch is None or not batch.row:
            return
        whole = batch.row[0]
        if asked in batch.passes or not (asked is None or asked in whole.passes or batch.shows):
            return  # or the row grows: a third loader
        for part in (*batch.row[1:], batch):
            whole.passes += part.passes
            whole.add_items(part.items)  # iterators may be made before the first ask
            whole.fetched |= part.fetched
        whole.loader, whole.shows = batch.loader, batch.shows
        self._mates.update(dict.fromkeys(whole.loaders, whole.loaders))
        self._open(whole)

    # -- what ends a batch -------------------------------------------------------------------------

    def stop(self, stopped: Pass) -> None:
        """Handles the end, or the failure, of a loader that was asked for a batch."""
        stopped.ended = True
        batch = self.open
        if batch is not None and stopped in batch.passes:
            if batch.fetched and not batch.shows:  # as ``zip`` at its end; or it is begun anew at once
                self.stopped = stopped.source
            else:
                self._end_of_pass(batch, stopped)

    def after_stop(self, source: int) -> None:
        """Handles what comes first after an end inside a row of asks, before its time; ``source``: what begins, or -1.

        Where the loader that had ended is asked anew, the batch goes on. Else it is over: what was fetched for it
        was for nothing.
        """
        if self.stopped != source and self.open is not None:
            self._end_of_pass(self.open, self.open.passes[-1])
        self.stopped = None

    def dispose(self, gone: Pass) -> None:
        """Handles the disposal of the iterator of a pass."""
        gone.ended = True
        if gone.batches == 1:
            gone.drawn_again = gone.source in self._drawn
            self._drawn.add(gone.source)
        else:
            self._drawn.discard(gone.source)
        batch = self.open
        if batch is not None and (
            gone in batch.passes
            or (batch.shows and gone in (batch.left_over, batch.in_hand))
            or self._phases.ends_with(batch, gone)
        ):
            self._leave_open(batch)
        if self.open is None and any(map(self._ends_waiting, self._phases.waiting)):
            self._phases.book_waiting(ended_too=True, unused_too=False)

    def _ends_waiting(self, before: Batch) -> bool:
        """Returns whether the next backward is of this batch, whose pass goes on, or a name says that it is evaluation."""
        return before.has_forward and (not before.is_over or self._phases.is_named_evaluation(before))

    def _leave_open(self, batch: Batch) -> None:
        if batch.fetched and not batch.shows:
            whole = batch.row[0] if batch.row else batch
            self._join_or_part(None)
            if all(each.ended for each in whole.passes):  # as after next(iter(loader)): it may be used yet
                self._phases.waiting.append(whole)
                whole.dropped, last = True, whole.passes[-1]
                whole.fetched = not (last.computed and self._has_another())
                self._phases.left_over = last if whole.fetched else None
                self._open(self._batch_in_hand() if whole.fetched and last.drawn_again else None)
            return  # or it was drawn for a batch of another loader, which goes on
        self.boundary(_PASS_END)
        self._phases.left_over = None
        rest = [each for each in batch.passes if not each.ended]
        if rest:
            self._interrupted = rest[-1], self._book.open
        self._open(None)

    def _end_of_pass(self, batch: Batch, ended: Pass) -> None:
        # Where none was used of several that were fetched ahead, the pass is over, but for an evaluation of all of them.
        looks_ahead = 0 < ended.ahead < max(2, ended.batches - 1)
        evaluates = 0 < ended.unused == ended.batches - 1 and self._phases.phase_of(ended) > TRAIN
        self._phases.left_over = ended if looks_ahead else None
        self._phases.split_row(batch)
        self._phases.book_waiting(ended_too=False, unused_too=False)
        if evaluates:  # what its batches are for is known without their use
            self._phases.left_over = ended
        phase = self._phases.phase_of(ended)
        if ended.ahead and phase == TRAIN:  # a batch that was fetched ahead may be trained on next
            self._book.open.asked = True
        begun: list[Item] = []
        if ended.is_of_model and not batch.fetched:  # the forward that has asked goes on, and may ask again
            begun = [item for item in batch.items if item[SHOWS] in FORWARDS]
            batch.items[:] = [item for item in batch.items if item not in begun]
        if self._phases.is_unused(ended):
            self._book.apart(batch.items, Activity.OUTSIDE)
        else:  # it is of no batch, or between loaders that are asked together, for one that did not come
            self._book.waits_alone(batch.items, phase, batch.loader)
        following = self._batch_in_hand() if looks_ahead or begun else None
        if following is not None:
            following.items += begun
        self._open(following)

    def boundary(self, why: Boundary, asked: Pass | None = None) -> None:
        """Judges the open batch up to here. ``asked``: the pass that is asked next."""
        if asked is None:
            self._join_or_part(None)
        by_batch = self._decision.source is _BY_BATCH
        raised = by_batch and self.open is not None and self.open.has_raised
        if self.open is not None:
            self._phases.judge(self.open, why, asked)
            self.open.fetched = False  # the batch goes on, if its pass does
        else:
            self._drop_left_over()
        if raised:  # what is left of the batch is no step: it is of the next one
            self._book.open.fetched = False
        if self._decision.manual:
            over = why is _MARK
        elif by_batch:
            over = self._book.open.fetched and (why is _ASK or why is _CLOSE)
        else:
            over = bool(self._book.open.updated)
        if over:
            self._phases.flush_lead()
            self._book.close_step()
        if self._phases.waiting:
            self._phases.book_waiting(ended_too=why is not _PASS_END, unused_too=why is not _PASS_END)

    def happened(self, source: int, shows: int, *, asking: bool) -> None:
        """Handles the end of a backward or an outermost update that is not in the open batch yet.

        If steps are counted by it, and no ask comes, it may belong to the next step. ``asking``: it is inside an ask, and
        so of the batch that is asked for.
        """
        closing = GRADIENTS_MADE if self._decision.source is _BY_BACKWARD else UPDATED
        if shows != closing or self._phases.is_certain:
            return
        if shows == GRADIENTS_MADE and self.open is not None and self._phases.needs_update(self.open):
            return
        if source in self._book.open.updated and self.open is not None and not asking:
            self._phases.train_up_to(shows, self.open)
            self._book.close_step()
        self._book.open.updated = (*self._book.open.updated[:1], source)

    def close(self) -> None:
        """Closes everything that is open: nothing more comes. What is left of a step is partial, but for a wait alone."""
        if self.open is not None:
            self.open.dropped = self.open.fetched and not self.open.shows
        self.boundary(_CLOSE)
        self._phases.close()
        # Time of the phase beside its steps is no more than all waits for data: a law of every summary.
        left = self._book.open
        own_ns = left.duration_ns - left.wait_ns
        waits_alone = left.training_from_ns < 0 and own_ns <= min(left.wait_ns, self._book.waited_ns)
        if left.duration_ns and not (waits_alone and self._phases.trained):
            self._book.close_step(counted=False)
