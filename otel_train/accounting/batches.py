"""Batches: the time of a thread between two boundaries, and the passes over loaders to which each belongs.

An item is an interval of time with one innermost stage (see ``steps``). Items wait in the open batch until the next boundary: a
request that begins a batch, the end of a pass, a checkpoint, a manual mark, the close; without requests, also an update by the
optimizer that updated first or last in the open step. ``phases`` then decides what the batch was for, by the rules in
docs/explanation/how-time-is-accounted.md.
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
"""Batches that a loop may fetch before it uses the first one. Beyond that, the name of the loader decides their phase."""

MOST_CACHED: Final = 64
"""Batches of a pass that may run without gradients before one trains. Beyond that they are evaluation."""

MOST_ITEMS: Final = 32768
"""Most items that wait. Beyond that they are booked by the evidence so far, so that memory stays bounded."""

_BEGUN: Final = itemgetter(BEGUN_NS)


class Boundary(IntEnum):
    """What ends a batch, or a step inside it. ``ASK``: a request; ``SAID``: a manual epoch or report; ``MARK``: a manual step."""

    ASK, PASS_END, CHECKPOINT, SAID, MARK, CLOSE = range(6)


# Names of the module, because reading a name of a class takes ten times as long.
_ASK, _PASS_END, _, _SAID, _MARK, _CLOSE = Boundary
_BY_BACKWARD, _BY_BATCH = StepSource.BACKWARD, StepSource.BATCH


@dataclass(slots=True, eq=False)
class Pass:
    """One pass over a loader, with one iterator.

    Attributes:
        source: source number of the loader.
        phase: phase that its batches have shown; -1 for none yet.
        batches: number of requests.
        ahead: batches that the loop fetched before it used the first one; below 0 once it fetches several in a row later.
        unused: number of the last request whose batch had not been used at the next request.
        computed: whether a computing stage has run in one of its batches.
        ended: whether it has no further batch, or its iterator is deleted.
        drawn_again: whether it and the pass before it gave one batch each: ``next(iter(loader))`` in a loop.
        is_behind: whether an evaluation looks one batch ahead in it, and the step of its last batch is still to come.
        caches: whether batches that ran without gradients were of the step of a later batch of the pass.
        is_of_model: whether its last request was inside the forward of a model, which requests its own batches.
        making: items of the creation of its iterator, until they are booked. Always the same list: its ``append`` is in use.
        making_ns: duration of that creation; -1 once the first batch is fetched.
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

    def take_making(self) -> list[Item]:
        """Removes and returns the items of the creation of its iterator."""
        items = self.making.copy()
        self.making.clear()
        if items:
            self.making_ns = sum(item[NS] for item in items)
        return items


@dataclass(slots=True, eq=False)
class Batch:
    """Time since a boundary that belongs to one batch.

    Attributes:
        passes: passes that were requested for it; empty if there was no request.
        loader: loader fetched last, else the one requested first; -1 for none.
        items: its time. Always the same list, because ``Batches.place`` is its ``append``.
        shows: whether a computing stage has run in it.
        fetched: whether a loader has returned a batch for it that is not counted as a step yet.
        row: batches before it that may be one batch with it: all their loaders were requested in a row for the first time.
        left_over: the pass before whose end it was fetched, if it is used after that end.
        asked_in: training step that was open at its request.
        between: whether it begins without a request after the end of a pass.
        in_hand: the pass whose batch it continues, after a request to another loader (as of an evaluation) had interrupted that.
        fresh: whether it has begun to wait since the last ``BatchPhases.book_waiting``.
        trained: whether it was trained on before its last boundary.
        dropped: whether no model had used it when the loop left its pass or ended.
        cached: whether its forwards ran without gradients: it may be for a later batch of its pass, which trains.
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
        """Adds a pass that is requested for the batch."""
        self.passes.append(asked)
        self.add_part(asked)

    def add_part(self, asked: Pass) -> None:
        """Adds a request to a pass that contributes to the batch."""
        asked.batches += 1
        asked.ended = False
        if asked.making:  # the creation of the iterator is a part of the wait for its first batch
            self.add_items(asked.take_making())

    def add_items(self, items: list[Item]) -> None:
        """Adds items, which may be earlier than its own."""
        self.items += items
        self.items.sort(key=_BEGUN)

    def take_items(self) -> list[Item]:
        """Removes and returns all its items."""
        items = self.items.copy()
        self.items.clear()
        return items

    def take_items_from(self, ns: int) -> list[Item]:
        """Removes and returns its items from ``ns`` on."""
        late = [item for item in self.items if item[BEGUN_NS] >= ns]
        self.items[:] = [item for item in self.items if item[BEGUN_NS] < ns]
        return late

    def part(self, items: list[Item]) -> Batch:
        """Returns a batch of the same passes with some of its items."""
        return Batch(
            self.passes, self.loader, items,
            fetched=self.fetched, left_over=self.left_over, asked_in=self.asked_in, in_hand=self.in_hand, dropped=self.dropped,
        )  # fmt: skip

    @property
    def has_forward(self) -> bool:
        """Whether a forward began in it."""
        return any(item[SHOWS] in FORWARDS for item in self.items)

    def runs(self, model: int) -> bool:
        """Returns whether a forward of a model began in it."""
        return any(item[SHOWS] in FORWARDS and item[STACK][-1] == model for item in self.items)

    @property
    def has_gradients(self) -> bool:
        """Whether a backward has ended in it."""
        return any(item[SHOWS] == GRADIENTS_MADE for item in self.items)

    @property
    def has_raised(self) -> bool:
        """Whether a call in it ended by an exception."""
        return any((call := item[CALL]) is not None and call[3] for item in self.items)

    @property
    def is_given(self) -> bool:
        """Whether the program requested it, and not a model in its forward."""
        return any(
            not each.is_of_model for each in (*self.origins, *((self.in_hand,) if self.in_hand else ()))
        )

    @property
    def is_over(self) -> bool:
        """Whether all its passes have ended."""
        return all(each.ended for each in self.passes) and (self.in_hand is None or self.in_hand.ended)

    @property
    def shown(self) -> int:
        """Phase that its passes, or the pass that it continues, have shown; -1 for none yet."""
        origins = self.origins if self.in_hand is None else [*self.origins, self.in_hand]
        return next((each.phase for each in origins if each.phase >= 0), -1)

    @property
    def origins(self) -> list[Pass]:
        """Passes that were requested for it, and the one before whose end it was fetched."""
        return self.passes if self.left_over is None else [*self.passes, self.left_over]

    @property
    def loaders(self) -> list[int]:
        """Loaders that were requested for it; ``loader`` if there was no request."""
        return [each.source for each in self.passes] or [self.loader]


class Batches:
    """Divides the time of a thread into batches, and has each judged at its boundaries.

    Args:
        sources: properties of every source.
        book: holds the open step.
        decision: how steps are counted.
        phases: decides the phase of batches, and books their time.

    Attributes:
        open: the open batch; None if no batch is open.
        stopped: loader that was exhausted in a series of requests, until the next event shows whether it restarts; else None.
        place: takes an item. It is the ``append`` of the open batch's list, to save a call at every event.
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
        self._created: list[Pass] = []
        """Passes whose iterator was created, and whose creation may not be booked yet."""
        self._gave_one_batch: set[int] = set()
        """Loaders whose last pass gave one batch: ``next(iter(loader))``."""
        self._requested_together: dict[int, list[int]] = {}
        """By loader: the loaders that were last requested together with it, as by ``zip``."""
        self._updated_inside_ns = -1
        """Start of the backward that the last update was inside; -1 for none."""
        self._interrupted: tuple[Pass, Step] | None = None
        """The pass of the batch that a request to another loader interrupted, and the step that was open then."""

    @property
    def pending(self) -> list[list[Item]]:
        """Items of the batches that wait, of the open batch, of created iterators, and of a step without evidence of training."""
        open_too = [] if self.open is None else [*self.open.row, self.open]
        return [
            self._phases.lead,
            *(batch.items for batch in (*self._phases.waiting, *self._phases.pair, *open_too)),
            *(each.making for each in self._created),
        ]

    # -- what opens a batch ------------------------------------------------------------------------

    def ask_inside(self, asked: Pass, call: OpenStage) -> None:
        """Handles a request inside a forward or a backward.

        It contributes to the batch that the call was given, as from a memory bank. A forward that was given none begins
        the batch that it requests; its further requests are those of a loop inside it.
        """
        batch, loops = self.open, call.asks
        if loops and batch is not None and not batch.passes and batch.has_forward:
            loops = False  # the first request found the end of a pass
        if batch is not None and not loops and (call.kind != FORWARD or batch.is_given):
            batch.add_part(asked)
        else:
            self.ask(asked, since_ns=-1 if loops else call.begun_ns)
            call.asks = asked.is_of_model = call.kind == FORWARD

    def ask(self, asked: Pass, *, since_ns: int = -1) -> None:
        """Handles a request for a batch. ``since_ns``: the batch begins earlier, at the start of a call that is open."""
        self._phases.begin()
        asked.is_of_model = False
        self._join_or_split(asked)
        batch, row = self.open, []
        if batch is not None and batch.passes and not batch.shows:
            if asked in batch.passes:
                asked.ahead = asked.ahead + 1 if asked.batches == asked.ahead + 1 else -MOST_ITEMS
                asked.unused = asked.batches
            elif asked.source in self._requested_together.get(batch.passes[0].source, ()):
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
        """Remembers a training batch whose step is open when another loader is requested."""
        if self._interrupted is not None and asked is self._interrupted[0]:
            self._interrupted = None
        elif batch is not None and batch.passes and asked not in batch.passes:
            trains = batch.shown <= TRAIN and not self._phases.is_named_evaluation(batch)
            if trains and batch.asked_in is self._book.open:
                self._interrupted = batch.passes[-1], self._book.open

    def compute(self, source: int = -1, flags: int = 0) -> None:
        """Handles the start of a computing stage; ``source`` -1: of one that goes on after a pass has ended inside it."""
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
        """Returns whether the stage may complete forwards of earlier passes: a backward, an update, a model on their outputs."""
        kinds = self._sources.kinds
        if kinds[source] != FORWARD:
            has_gradients = any(batch.has_gradients for batch in self._phases.waiting)
            return has_gradients or bool(GRADIENTS >> kinds[source] & 1)
        items = (item for batch in self._phases.waiting for item in batch.items if item[SHOWS] in FORWARDS)
        return bool(flags & Flag.GRAD) and all(item[STACK][-1] != source for item in items)

    def _batch_in_hand(self, *, between: bool = True) -> Batch:
        """Returns a batch without a request: the one fetched before the end of its pass, or the interrupted one, if any."""
        left_over = self._phases.left_over
        if left_over is None:
            in_hand = self._interrupted_pass()
            if in_hand is None or in_hand.ended:
                return Batch(between=between)
            return Batch(in_hand=in_hand)
        return Batch(loader=left_over.source, left_over=left_over, between=not left_over.drawn_again)

    def _has_another(self) -> bool:
        """Returns whether another loader has interrupted a training batch, or a part of its step, that is still to be used."""
        return self._interrupted_pass() is not None or self._phases.in_hand >= 0

    def _interrupted_pass(self) -> Pass | None:
        """Returns the pass of the batch that another loader has interrupted in the open step; None if there is none."""
        if self._interrupted is None or self._interrupted[1] is not self._book.open:
            return None
        return self._interrupted[0]

    def _drop_left_over(self) -> None:
        """Counts no step for an unused batch that was fetched before the loop left its pass, if other batches of it were used."""
        left_over = self._phases.left_over
        if left_over is not None and left_over.computed:
            for batch in self._phases.waiting:
                batch.fetched = batch.fetched and left_over not in batch.passes

    def fetched(self, asked: Pass) -> None:
        """Handles a batch that a loader returned, unless it contributes to the batch of another loader."""
        if self.open is not None and asked in self.open.passes:
            self.open.loader, self.open.fetched = asked.source, True

    def epoch(self) -> None:
        """Handles the start or end of a manual epoch: a batch that was requested and used is over."""
        self.boundary(_SAID)
        if self.open is not None and self.open.passes and self.open.shows:
            self._open(None)

    def limit_items(self) -> None:
        """Judges the open batch, and books the creation of an iterator, early if it has too many items."""
        if self.open is not None and len(self.open.items) > MOST_ITEMS:
            self.boundary(_SAID)
        if self._created and len(self._created[-1].making) > MOST_ITEMS:
            self.forget(self._created[-1])

    def _open(self, batch: Batch | None) -> None:
        self.open = batch
        self.place = self._phases.place_in_none if batch is None else batch.items.append

    def _join_or_split(self, asked: Pass | None) -> None:
        """Decides whether loaders that were requested in a row for the first time are requested together.

        They are if the first of them is requested next. If the last of them is, it goes on alone. ``asked`` None: no
        request follows, and they were together.
        """
        batch = self.open
        if batch is None or not batch.row:
            return
        whole = batch.row[0]
        if asked in batch.passes or not (asked is None or asked in whole.passes or batch.shows):
            return  # not known yet: a third loader may join
        for part in (*batch.row[1:], batch):
            whole.passes += part.passes
            whole.add_items(part.items)  # iterators may be created before the first request
            whole.fetched |= part.fetched
        whole.loader, whole.shows = batch.loader, batch.shows
        self._requested_together.update(dict.fromkeys(whole.loaders, whole.loaders))
        self._open(whole)

    # -- iterators that are not requested -----------------------------------------------------------

    def creates(self, asked: Pass) -> None:
        """Handles the start of the creation of an iterator."""
        self.limit_items()
        self._created = [each for each in self._created if each.making and each is not asked]
        self._created.append(asked)

    def forget(self, gone: Pass) -> None:
        """Books the creation of an iterator as a wait that gave no batch: it is not requested any more, or not soon."""
        self._book.beside(gone.take_making(), self._phases.phase_of(gone), gone.source)

    def _forget_created(self) -> None:
        """Books the creation of iterators that were not requested until a step that began later has closed.

        Other time could else not become final before their first request, which may come hours later.
        """
        for each in self._created:
            if each.making and each.making[0][BEGUN_NS] < self._book.closed_from_ns:
                self.forget(each)

    # -- what ends a batch -------------------------------------------------------------------------

    def stop(self, stopped: Pass) -> None:
        """Handles the end or the failure of a loader that was requested."""
        self._phases.end_pass(stopped)
        batch = self.open
        if batch is not None and stopped in batch.passes:
            if batch.fetched and not batch.shows:  # the end of a ``zip``, or the loader restarts at once
                self.stopped = stopped.source
            else:
                self._end_of_pass(batch, stopped)

    def after_stop(self, source: int) -> None:
        """Handles the first event after a loader was exhausted in a series of requests. ``source``: what begins, or -1.

        If the exhausted loader is requested again, the batch goes on. Otherwise the batch is over, and what was fetched
        for it is not used.
        """
        if self.stopped != source and self.open is not None:
            self._end_of_pass(self.open, self.open.passes[-1])
        self.stopped = None

    def dispose(self, gone: Pass) -> None:
        """Handles the deletion of the iterator of a pass."""
        self._phases.end_pass(gone)
        if gone.batches == 1:
            gone.drawn_again = gone.source in self._gave_one_batch
            self._gave_one_batch.add(gone.source)
        else:
            self._gave_one_batch.discard(gone.source)
        batch = self.open
        if batch is not None and (
            gone in batch.passes
            or (batch.shows and gone in (batch.left_over, batch.in_hand))
            or self._phases.ends_with(batch, gone)
        ):
            self._end_open(batch)
        if self.open is None and any(map(self._ends_waiting, self._phases.waiting)):
            self._phases.book_waiting(ended_too=True, unused_too=False)

    def _ends_waiting(self, before: Batch) -> bool:
        """Returns whether the next backward is of this waiting batch, because its pass goes on, or it evaluates by its name."""
        return before.has_forward and (not before.is_over or self._phases.is_named_evaluation(before))

    def _end_open(self, batch: Batch) -> None:
        if batch.fetched and not batch.shows:
            whole = batch.row[0] if batch.row else batch
            self._join_or_split(None)
            if all(each.ended for each in whole.passes):  # as after next(iter(loader)): it may still be used
                self._phases.waiting.append(whole)
                whole.dropped, last = True, whole.passes[-1]
                whole.fetched = not (last.computed and self._has_another())
                self._phases.left_over = last if whole.fetched else None
                self.stopped = None
                self._open(self._batch_in_hand() if whole.fetched and last.drawn_again else None)
            return  # else the batch of another loader goes on, for which it was fetched
        self.boundary(_PASS_END)
        self._phases.left_over = None
        rest = [each for each in batch.passes if not each.ended]
        if rest:
            self._interrupted = rest[-1], self._book.open
        self._open(None)

    def _end_of_pass(self, batch: Batch, ended: Pass) -> None:
        # If several batches were fetched ahead and none was used, the pass is over, except in an evaluation of all of them.
        looks_ahead = 0 < ended.ahead < max(2, ended.batches - 1)
        evaluates = 0 < ended.unused == ended.batches - 1 and self._phases.phase_of(ended) > TRAIN
        self._phases.left_over = ended if looks_ahead else None
        self._phases.split_row(batch)
        self._phases.book_waiting(ended_too=False, unused_too=False)
        if evaluates:  # their phase is known although no model has used them
            self._phases.left_over = ended
        phase = self._phases.phase_of(ended)
        if ended.ahead and phase == TRAIN:  # a batch that was fetched ahead may be used next, to train
            self._book.open.asked = True
        begun: list[Item] = []
        if ended.is_of_model and not batch.fetched:  # the forward goes on, and may make further requests
            begun = [item for item in batch.items if item[SHOWS] in FORWARDS]
            batch.items[:] = [item for item in batch.items if item not in begun]
        if self._phases.is_unused(ended):
            self._book.apart(batch.items, Activity.OUTSIDE)
        else:  # a request that gave no batch, or a batch that misses that of another loader
            self._book.waits_alone(batch.items, phase, batch.loader)
        following = self._batch_in_hand() if looks_ahead or begun else None
        if following is not None:
            following.items += begun
        self._open(following)

    def boundary(self, why: Boundary, asked: Pass | None = None) -> None:
        """Judges the open batch up to here. ``asked``: the pass that is requested next."""
        if asked is None:
            self._join_or_split(None)
        by_batch = self._decision.source is _BY_BATCH
        raised = by_batch and self.open is not None and self.open.has_raised
        if self.open is not None:
            self._phases.judge(self.open, why, asked)
            self.open.fetched = False  # counted as a step by now, if at all; the batch itself may go on
        else:
            self._drop_left_over()
        if raised:  # the rest of the batch is of the next step
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
        self._forget_created()

    def happened(self, source: int, shows: int, *, asking: bool, inside_ns: int = -1) -> None:
        """Handles the end of a backward or of an outermost update, before it is added to the open batch.

        Where steps are counted by such ends, and no request comes, it may belong to the next step.

        Args:
            source: the backward or the optimizer.
            shows: ``GRADIENTS_MADE`` or ``UPDATED``.
            asking: it is inside a request, and so of the batch that is requested.
            inside_ns: start of the backward that it is inside; -1 for none. Updates inside one backward are of one step.
        """
        closing = GRADIENTS_MADE if self._decision.source is _BY_BACKWARD else UPDATED
        if shows != closing or self._phases.is_certain:
            return
        if shows == GRADIENTS_MADE and self.open is not None and self._phases.needs_update(self.open):
            return
        goes_on = asking or -1 < inside_ns == self._updated_inside_ns
        self._updated_inside_ns = inside_ns
        if source in self._book.open.updated and self.open is not None and not goes_on:
            self._phases.train_up_to(shows, self.open)
            self._book.close_step()
            self._forget_created()
        self._book.open.updated = (*self._book.open.updated[:1], source)

    def close(self) -> None:
        """Closes all that is open: no further event comes. The rest of a step is partial, unless it is only a wait."""
        if self.open is not None:
            self.open.dropped = self.open.fetched and not self.open.shows
        self.boundary(_CLOSE)
        self._phases.close()
        # Invariant of every summary: time of phase train outside of steps is at most the waits for data.
        left = self._book.open
        own_ns = left.duration_ns - left.wait_ns
        waits_alone = left.training_from_ns < 0 and own_ns <= min(left.wait_ns, self._book.waited_ns)
        if left.duration_ns and not (waits_alone and self._phases.trained):
            self._book.close_step(counted=False)
