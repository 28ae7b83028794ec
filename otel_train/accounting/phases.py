"""Batches and their boundaries, and what each batch is for, decided from evidence.

Time waits in the open batch until the next boundary: an ask that begins a batch, the end of a pass, a checkpoint, a manual
mark, the close; and, where no ask comes, an update by the optimizer that updated first or last in the open step. What
is up to the last backward or update before a boundary is training. What comes after it is judged by its forwards, and
a batch whose forwards say nothing yet waits until a later one does. docs/explanation/how-time-is-accounted.md has the rules.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from operator import itemgetter
from typing import TYPE_CHECKING, Final

from otel_train.accounting.nesting import DATA, FORWARD, GRADIENTS
from otel_train.accounting.steps import (
    BATCH,
    BEGUN_NS,
    CALL,
    FORWARD_FROZEN,
    FORWARD_GRAD,
    FORWARD_NO_GRAD,
    FORWARDS,
    GRADIENTS_MADE,
    LIKELY_TRAINING,
    NOTHING,
    NS,
    SHOWS,
    STACK,
    TRAINING,
    UPDATED,
    Item,
    Step,
    StepBook,
    StepSourceDecision,
)
from otel_train.accounting.types import EVAL, TRAIN, Activity, SourceTable, StepSource
from otel_train.recording.events import Flag

if TYPE_CHECKING:
    from collections.abc import Callable

LOOKS_AHEAD: Final = 8
"""Batches that a loop may fetch before the first is used. After that, the name of the loader decides."""

MOST_ITEMS: Final = 32768
"""Items that wait at most; beyond that they are booked by the evidence so far, so that memory stays bounded."""


_BEGUN: Final = itemgetter(BEGUN_NS)
_SHOWN: Final = itemgetter(SHOWS)


class Boundary(IntEnum):
    """What ends a batch, or a step inside it. ``SAID``: a manual epoch or report; ``MARK``: a manual step."""

    ASK, PASS_END, CHECKPOINT, SAID, MARK, CLOSE = range(6)


# Read as names of the module: see ``steps``.
_ASK, _PASS_END, _, _SAID, _MARK, _CLOSE = Boundary
_BY_BACKWARD, _BY_BATCH = StepSource.BACKWARD, StepSource.BATCH
_BY_TRAINING = (StepSource.UPDATE, StepSource.BACKWARD)


@dataclass(slots=True, eq=False)
class Pass:
    """One pass over a loader: an iterator.

    Attributes:
        source: the loader.
        phase: what its batches have shown; -1 for nothing yet.
        batches: asks so far.
        ahead: batches that the loop fetched before it used the first; below 0 once it has drawn several in a row again.
        computed: a stage that computes has run in one of its batches.
        ended: it has no further batch, or its iterator is gone.
        drawn_again: it gave one batch, as the pass of its loader before: ``next(iter(loader))`` in a loop.
        making: time in which its iterator was made.
        making_ns: how long that took; -1 once its first batch is there.
    """

    source: int
    phase: int = -1
    batches: int = 0
    ahead: int = 0
    computed: bool = False
    ended: bool = False
    drawn_again: bool = False
    making: list[Item] = field(default_factory=list)
    making_ns: int = -1


@dataclass(slots=True, eq=False)
class Batch:
    """Time since a boundary, of one batch.

    Attributes:
        passes: those that were asked for it; none where no ask came.
        loader: the one fetched last, else the first asked; -1 for none.
        items: its time. Always the same list: ``BatchPhases.place`` adds to it.
        shows: a stage that computes has run in it.
        fetched: it has a batch that a loader gave, and is no step yet.
        row: batches before it that may be one with it: their loaders and its own were asked in a row for the first time.
        left_over: the pass before whose end it was fetched, and after which it is used.
        asked_in: the training step that was open when it was asked for.
        between: it was not asked for, and follows the end of a pass.
        fresh: it waits since this boundary.
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
    fresh: bool = True

    def add(self, asked: Pass) -> None:
        """Adds a pass that is asked for the batch."""
        self.passes.append(asked)
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

    def part(self, items: list[Item]) -> Batch:
        """Returns some of its time, as a batch that waits."""
        return Batch(
            self.passes, self.loader, items,
            fetched=self.fetched, left_over=self.left_over, asked_in=self.asked_in,
        )  # fmt: skip

    @property
    def has_forward(self) -> bool:
        """A forward began in it."""
        return any(item[SHOWS] in FORWARDS for item in self.items)

    @property
    def is_over(self) -> bool:
        """All its passes have ended."""
        return all(each.ended for each in self.passes)

    @property
    def shown(self) -> int:
        """Phase that its passes have shown, or the one before whose end it was fetched; -1 for none yet."""
        passes = self.passes if self.left_over is None else (*self.passes, self.left_over)
        return next((each.phase for each in passes if each.phase >= 0), -1)

    @property
    def loaders(self) -> list[int]:
        """Every loader that was asked for it; -1 for none."""
        return [each.source for each in self.passes] or [self.loader]


class BatchPhases:
    """Judges batches at boundaries, and books their time.

    Args:
        sources: what is known of every source.
        book: takes items whose phase is known.
        decision: what steps are counted by.

    Attributes:
        batch: the open one; None where no batch is open.
        waiting: batches before it that have not shown what they are for.
        left_over: a pass that has ended with a batch fetched and not used.
        began: there was an ask, a computation or a manual mark; what came before was preparation.
        stopped: the loader that had no further batch, right after an end inside a row of asks; else None.
        place: takes time, and what happened at its end. The list of an open batch takes it without a function of this class, at every edge.
    """

    def __init__(self, sources: SourceTable, book: StepBook, decision: StepSourceDecision) -> None:
        self.batch: Batch | None = None
        self.waiting: list[Batch] = []
        self.left_over: Pass | None = None
        self.began = False
        self.stopped: int | None = None
        self.place: Callable[[Item], object] = self._place_in_none
        self._sources = sources
        self._book = book
        self._decision = decision
        self._phases: dict[int, int] = {}
        self._drawn: set[int] = set()
        self._mates: dict[int, list[int]] = {}
        """By loader: those that were asked together with it last, as by ``zip``."""
        self._trained = False
        self._in_hand = -1
        """Loader of a batch that no model has used when another loader was asked."""
        self._lead: list[Item] = []

    @property
    def pending(self) -> list[list[Item]]:
        """Items of all batches that wait, of the open one, and those of a step that has shown nothing yet."""
        open_too = [] if self.batch is None else [*self.batch.row, self.batch]
        return [self._lead, *(batch.items for batch in (*self.waiting, *open_too))]

    # -- what opens a batch ------------------------------------------------------------------------

    def ask(self, asked: Pass) -> None:
        """Handles a request to a loader for a batch."""
        self._begin()
        self._join_or_part(asked)
        batch, row = self.batch, []
        if batch is not None and batch.passes and not batch.shows:
            if asked in batch.passes:
                asked.ahead = asked.ahead + 1 if asked.batches == asked.ahead + 1 else -MOST_ITEMS
            elif asked.source in self._mates.get(batch.passes[0].source, ()):
                batch.add(asked)
                return
            elif not asked.batches and all(each.batches <= 1 for each in batch.passes):
                row = [*batch.row, batch] if len(batch.row) < LOOKS_AHEAD else []
        self.left_over = None
        if not row:
            self.boundary(_ASK, asked)
        self._open(opened := Batch(loader=asked.source, row=row, asked_in=self._book.open))
        opened.add(asked)

    def compute(self, source: int = -1, flags: int = 0) -> None:
        """Handles the begin of a stage that only training and evaluation have; -1: of one that goes on after a pass."""
        batch = self.batch
        if batch is None:
            if source >= 0 and not self._completes(source, flags):
                self._book_waiting(ended_too=True, unused_too=False)
            began = self.began
            self._begin()
            self._open(batch := self._batch_in_hand(between=began))
        batch.shows = True
        for each in batch.passes:
            each.computed = True
        if len(batch.items) > MOST_ITEMS:
            self.boundary(_SAID)

    def _completes(self, source: int, flags: int) -> bool:
        """Returns whether what begins may go on with forwards of passes before it: their backward, or another model on what they gave."""
        kinds = self._sources.kinds
        if kinds[source] != FORWARD:
            return bool(GRADIENTS >> kinds[source] & 1)
        items = (item for batch in self.waiting for item in batch.items if item[SHOWS] in FORWARDS)
        return bool(flags & Flag.GRAD) and all(item[STACK][-1] != source for item in items)

    def _batch_in_hand(self, *, between: bool = True) -> Batch:
        """Returns a batch that is not asked for: the one that was fetched before the end of its pass, if there is one."""
        drawn = self.left_over
        if drawn is None:
            return Batch(between=between)
        return Batch(loader=drawn.source, left_over=drawn, between=not drawn.drawn_again)

    def fetched(self, source: int) -> None:
        """Handles a batch that a loader returned."""
        if self.batch is not None:
            self.batch.loader, self.batch.fetched = source, True

    def epoch(self) -> None:
        """Handles the begin or the end of an epoch, as the program says it: a batch that was asked for and used is over."""
        self.boundary(_SAID)
        if self.batch is not None and self.batch.passes and self.batch.shows:
            self._open(None)

    def limit_items(self) -> None:
        """Judges the open batch before its end if it has too many items."""
        if self.batch is not None and len(self.batch.items) > MOST_ITEMS:
            self.boundary(_SAID)

    def _open(self, batch: Batch | None) -> None:
        self.batch = batch
        self.place = self._place_in_none if batch is None else batch.items.append

    def _place_in_none(self, item: Item) -> None:
        if self.began:
            self._book.apart((item,), Activity.OUTSIDE)
        else:
            self._lead.append(item)
            if len(self._lead) > MOST_ITEMS:
                self._drop_lead()

    def _begin(self) -> None:
        if not self.began:
            self._drop_lead()
            self.began = True

    def _join_or_part(self, asked: Pass | None) -> None:
        """Decides whether loaders that were asked in a row for the first time are asked together.

        They are if the first of them is asked next; if another one is, it goes on alone. ``asked`` None: nothing
        more is asked, and they were together.
        """
        batch = self.batch
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

    def _part(self, batch: Batch) -> None:
        """Splits what may have been one batch into several."""
        self.waiting += batch.row
        batch.row = []

    # -- what ends a batch -------------------------------------------------------------------------

    def stop(self, stopped: Pass) -> None:
        """Handles the end, or the failure, of a loader that was asked for a batch."""
        stopped.ended = True
        batch = self.batch
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
        if self.stopped != source and self.batch is not None:
            self._end_of_pass(self.batch, self.batch.passes[-1])
        self.stopped = None

    def dispose(self, gone: Pass) -> None:
        """Handles the disposal of the iterator of a pass."""
        gone.ended = True
        if gone.batches == 1:
            gone.drawn_again = gone.source in self._drawn
            self._drawn.add(gone.source)
        else:
            self._drawn.discard(gone.source)
        batch = self.batch
        if batch is not None and (gone in batch.passes or (batch.shows and gone is batch.left_over)):
            self._leave_open(batch)
        if self.batch is None and any(map(self._ends_waiting, self.waiting)):
            self._book_waiting(ended_too=True, unused_too=False)

    def _ends_waiting(self, before: Batch) -> bool:
        """Returns whether the next backward is of this batch, whose pass goes on, or a name says that it is evaluation."""
        return before.has_forward and (not before.is_over or self._is_apart(before))

    def _leave_open(self, batch: Batch) -> None:
        if batch.fetched and not batch.shows:
            whole = batch.row[0] if batch.row else batch
            self._join_or_part(None)
            if all(each.ended for each in whole.passes):  # as after next(iter(loader)): it may be used yet
                self.left_over = whole.passes[-1]
                self.waiting.append(whole)
                self._open(self._batch_in_hand() if self.left_over.drawn_again else None)
            return  # or it was drawn for a batch of another loader, which goes on
        self.boundary(_PASS_END)
        self.left_over = None
        self._open(None)

    def _end_of_pass(self, batch: Batch, ended: Pass) -> None:
        # Where none was used of several that were fetched ahead, the pass is over.
        self.left_over = ended if 0 < ended.ahead < max(2, ended.batches - 1) else None
        self._part(batch)
        self._book_waiting(ended_too=False, unused_too=False)
        phase, kinds, for_nothing = self.phase_of(ended), self._sources.kinds, self._is_for_nothing(ended)
        if ended.ahead and phase == TRAIN:  # a batch that was fetched ahead may be trained on next
            self._book.open.asked = True
        for item in batch.items:
            if any(kinds[source] == DATA for source in item[STACK]) and not for_nothing:
                self._book.beside((item,), phase, batch.loader)
            else:  # between loaders that are asked together, for a batch that did not come
                self._book.apart((item,), Activity.OUTSIDE)
        self._open(None if self.left_over is None else self._batch_in_hand())

    def boundary(self, why: Boundary, asked: Pass | None = None) -> None:
        """Judges the open batch up to here. ``asked``: the pass that is asked next."""
        if asked is None:
            self._join_or_part(None)
        if self.batch is not None:
            self._judge(self.batch, why, asked)
            self.batch.fetched = False  # the batch goes on, if its pass does
        if self._decision.manual:
            over = why is _MARK
        elif self._decision.source is _BY_BATCH:
            over = self._book.open.fetched and (why is _ASK or why is _CLOSE)
        else:
            over = bool(self._book.open.updated)
        if over:
            self._flush_lead()
            self._book.close_step()
        if self.waiting:
            self._book_waiting(ended_too=why is not _PASS_END, unused_too=why is not _PASS_END)

    def happened(self, source: int, shows: int, *, asking: bool) -> None:
        """Handles the end of a backward or an outermost update that is not in the open batch yet.

        If steps are counted by it, and no ask comes, it may belong to the next step. ``asking``: it is inside an ask, and
        so of the batch that is asked for.
        """
        closing = GRADIENTS_MADE if self._decision.source is _BY_BACKWARD else UPDATED
        if shows != closing or self._certain:
            return
        if shows == GRADIENTS_MADE and self.batch is not None and self._attacks(self.batch):
            return
        if source in self._book.open.updated and self.batch is not None and not asking:
            head, tail = self._split_training((shows,), self.batch)
            self.batch.items += tail
            if head:
                self._train(head, self.batch)
            self._book.close_step()
        self._book.open.updated = (*self._book.open.updated[:1], source)

    def close(self) -> None:
        """Closes everything that is open: nothing more comes. What is left of a step is partial."""
        self.boundary(_CLOSE)
        several = len(self.waiting) > 1 and self._trained
        for batch in self.waiting:
            evaluates = several and batch.has_forward and not self._is_given_up(batch)
            self._book_batch(batch, self._eval_phase(batch) if evaluates else -1)
        self.waiting = []
        self._drop_lead()
        if self._book.open.duration_ns:
            self._book.close_step(counted=False)

    # -- judging -----------------------------------------------------------------------------------

    def phase_of(self, asked: Pass) -> int:
        """Returns what batches of a pass are for that show nothing: what the pass or its loader was used for; else its name."""
        source, sources = asked.source, self._sources
        known = (sources.declared[source], asked.phase, self._phases.get(source, -1), sources.named[source])
        return next((phase for phase in known if phase >= 0), TRAIN)

    def _is_for_nothing(self, asked: Pass) -> bool:
        """Returns whether no model ran in it, in a loop that trains, and no name or earlier use says that its loader evaluates."""
        return (
            self._trained
            and not self._decision.manual
            and asked is not self.left_over
            and not asked.computed
            and self._sources.declared[asked.source] < 0
            and self.phase_of(asked) == TRAIN
        )

    def _declared(self, batch: Batch) -> int:
        """Returns the phase that the program declared for the loader of a batch; -1 for none."""
        return self._sources.declared[batch.loader] if batch.passes else -1

    def _eval_phase(self, batch: Batch) -> int:
        """Returns which phase outside training: what the loader's name says, else evaluation."""
        phase = self._purpose(batch.loader) if batch.loader >= 0 else -1
        return phase if phase >= 0 else EVAL

    def _show(self, batch: Batch, phase: int) -> None:
        for each in batch.passes:
            each.phase = self._phases[each.source] = phase

    def _show_training(self, batch: Batch) -> None:
        """Records that the passes of a batch train, before those of their batches are booked that wait."""
        drawn = batch.left_over
        if drawn is not None and drawn.phase < 0 and self._purpose(drawn.source) <= TRAIN:
            drawn.phase = self._phases[drawn.source] = TRAIN
        for each in batch.passes:
            each.phase = TRAIN

    def _attacks(self, batch: Batch) -> bool:
        """Returns whether its gradients are those of an attack, unless an update follows: names and the model's mode say evaluation."""
        named = [self._sources.named[each.source] for each in batch.passes]
        if not named or min(named) <= TRAIN or batch.shown == TRAIN:
            return False
        shown = {item[SHOWS] for item in batch.items}
        return FORWARD_FROZEN in shown and FORWARD_GRAD not in shown

    @property
    def _certain(self) -> bool:
        """A forward with gradients in training mode is training, whatever comes, and no backward or update closes a step."""
        return self._decision.manual or self._decision.source is _BY_BATCH

    def _judge(self, batch: Batch, why: Boundary, asked: Pass | None) -> None:
        """Judges a batch up to here."""
        batch = self._after_evaluation(batch)
        declared = self._declared(batch) > TRAIN
        named_apart = batch.passes and self._sources.named[batch.loader] >= 0
        ends: tuple[int, ...] = LIKELY_TRAINING if self._certain and not named_apart else TRAINING
        ends = (UPDATED,) if self._attacks(batch) else ends
        head, tail = self._split_training(() if declared else ends, batch)
        if why is _MARK and self._trains_by_marks(batch):
            head, tail = self._marked(batch, tail), []
        if head and self._is_own_code(tail) and self._is_of_step(batch, why, asked):
            self._train(head + tail, batch)  # to book both at once costs less
            return
        if head:
            self._train(head, batch)
        of_step, trained = self._is_of_step(batch, why, asked), bool(head)
        if declared or (not trained and any(item[SHOWS] == GRADIENTS_MADE for item in tail)):
            self._judge_batch(batch.part(tail))
        elif any(item[SHOWS] in FORWARDS for item in tail):
            self._judge_tail(batch, tail, of_step=of_step, trained=trained)
        elif trained or not batch.passes:
            self._train_if(of_step, tail, batch)
        else:  # no model ran
            if asked is not None and batch.fetched and self._purpose(batch.loader) <= TRAIN:
                self._in_hand = batch.loader
            known = self.phase_of(batch.passes[0]) if self._decision.manual else batch.shown
            if known >= 0:
                self._book_batch(batch.part(tail), known)
            elif tail or batch.fetched:
                self._wait(batch.part(tail))

    def _after_evaluation(self, batch: Batch) -> Batch:
        """Judges evaluation on a batch that was asked for while another one was in hand, which is trained on next; returns the rest.

        The name of its loader says that it evaluates, and what runs is a forward without gradients of the model that then trains.
        """
        asked = batch.passes or ([] if batch.left_over is None else [batch.left_over])
        apart = [each for each in asked if self._purpose(each.source) > TRAIN]
        if not apart:
            return batch
        passes = [each for each in asked if each not in apart]
        in_hand = passes[-1].source if passes else self._in_hand
        first, looks = self._looks(batch.items)
        if in_hand < 0 or not looks:
            return batch
        ahead = batch.items[:first]
        begin, end = self._asked_at(ahead, apart), self._end_of_forward(ahead, looks[-1])
        self._judge_batch(Batch(apart, apart[-1].source, ahead[begin:end], fetched=batch.fetched))
        items = batch.take_items()
        del items[begin:end]
        fetched = batch.fetched and bool(passes)
        return Batch(passes, in_hand, items, fetched=fetched, asked_in=batch.asked_in)

    def _asked_at(self, items: list[Item], passes: list[Pass]) -> int:
        """Returns the place of the first wait for one of the passes; 0 where there is none."""
        loaders = {each.source for each in passes}
        return next((n for n, item in enumerate(items) if not loaders.isdisjoint(item[STACK])), 0)

    def _marked(self, batch: Batch, items: list[Item]) -> list[Item]:
        """Returns the last time of a step that a mark ends, after the batches before it are booked."""
        waiting, self.waiting = self.waiting, []
        for before in waiting:
            self._train(before.items, before)
        self._show(batch, TRAIN)
        return items

    def _trains_by_marks(self, batch: Batch) -> bool:
        """Returns whether a mark alone says that it trains: there are no gradients and no updates."""
        return self._decision.manual and not self._trained and not self._is_apart(batch)

    def _is_apart(self, batch: Batch) -> bool:
        """Returns whether the program, or a name, says of a loader of the batch that it does not train."""
        return any(self._purpose(each.source) > TRAIN for each in batch.passes)

    def _purpose(self, loader: int) -> int:
        """Returns the phase that the program, else the name, says of a loader; -1 for none."""
        declared = self._sources.declared[loader]
        return declared if declared >= 0 else self._sources.named[loader]

    def _is_own_code(self, tail: list[Item]) -> bool:
        """Returns whether an update ends the step, and what follows is the loop's own code: nearly always."""
        return bool(self._book.open.updated) and not any(map(_SHOWN, tail))

    def _split_training(self, ends: tuple[int, ...], batch: Batch) -> tuple[list[Item], list[Item]]:
        """Splits a batch after the last item that shows one of these: what is training, and is to be booked, and the rest.

        But where no ask came in this step, forwards without gradients of a model that then trains in it (with a batch in
        hand: that trains first), before its first forward with them, are evaluation.
        """
        self._part(batch)
        items = batch.take_items()
        last, following, shown = -1, NOTHING, list(map(_SHOWN, items))
        frozen = FORWARD_FROZEN in shown
        for place in range(len(items) - 1, -1, -1):
            shows = shown[place]
            if not shows:
                continue
            if shows == FORWARD_FROZEN:  # a backward right after it makes it training
                trains = following == GRADIENTS_MADE and not self._certain
                shows = FORWARD_GRAD if trains else FORWARD_NO_GRAD
                items[place] = (*items[place][:SHOWS], shows, *items[place][CALL:])
            following = shows
            if last < 0 and following in ends:
                last = place
                if not frozen:
                    break
        if last >= 0:
            waiting, self.waiting = self.waiting, []
            self._show_training(batch)
            for before in waiting:  # all of it is training, but for batches of a loader with another purpose
                self._book_batch(before, TRAIN if any(item[SHOWS] for item in before.items) else -1)
            self._trained, self._in_hand = True, -1
            step = self._book.open
            asked = step.asked or step is batch.asked_in
            head = items[: last + 1] if asked else self._without_evaluation(items[: last + 1], batch)
            self._show(batch, TRAIN)
            return head, items[last + 1 :]
        return [], items

    def _looks(self, items: list[Item], *, several: bool = False) -> tuple[int, list[int]]:
        """Returns where training begins, and the forwards before it, without gradients, of the model that begins it.

        ``several``: of any model that then trains.
        """
        first = next((n for n, item in enumerate(items) if item[SHOWS] in LIKELY_TRAINING), len(items))
        then = items[first:] if several else items[first : first + 1]
        trains = {item[STACK][-1] for item in then if item[SHOWS] == FORWARD_GRAD}
        return first, [
            n for n in range(first) if items[n][SHOWS] in FORWARDS and items[n][STACK][-1] in trains
        ]

    def _without_evaluation(self, head: list[Item], batch: Batch) -> list[Item]:
        # With a batch in hand a generator's are for the critic, which trains first.
        first, looks = self._looks(head, several=not batch.passes and batch.left_over is None)
        if not looks:
            return head
        before, after = self._cut_out(head[:first], looks)
        if any(item[SHOWS] for item in before):
            return before + after + head[first:]
        self._book.apart(before, Activity.OUTSIDE)  # the loop's own code between an update and an evaluation
        return after + head[first:]

    def _cut_out(self, items: list[Item], forwards: list[int]) -> tuple[list[Item], list[Item]]:
        """Books evaluation without a loader, from the first forward to the end of the last; returns what is before and after it.

        Every forward is a step of its own, up to the next.
        """
        first, end = forwards[0], self._end_of_forward(items, forwards[-1])
        begins = [n for n in range(first, end) if items[n][SHOWS] in FORWARDS]
        for begin, following in zip(begins, [*begins[1:], end], strict=True):
            self._book.evaluate(items[begin:following], EVAL, -1, ())
        return items[:first], items[end:]

    def _end_of_forward(self, items: list[Item], begin: int) -> int:
        """Returns the place after the end of the forward that begins there; the end of all if it has not ended."""
        kinds, calls = self._sources.kinds, ((n, items[n][CALL]) for n in range(begin, len(items)))
        return next((n + 1 for n, call in calls if call and kinds[call[0]] == FORWARD), len(items))

    def _judge_tail(self, batch: Batch, tail: list[Item], *, of_step: bool, trained: bool) -> None:
        """Forwards that no backward followed before the boundary. ``of_step``: what comes after them is the step's."""
        if batch.passes and self._trains_by_marks(batch):
            self.waiting.append(batch.part(tail))
            return
        drawn, (ahead, evaluated) = batch.left_over, self._looks(tail)
        if not batch.passes or ahead == len(tail):
            evaluated = [n for n in range(ahead) if tail[n][SHOWS] in FORWARDS]
        elif not trained:  # a teacher's, while the student's backward is to come
            evaluated = []
        behind = tail[ahead:] if evaluated else tail
        if evaluated:
            if batch.passes and not trained:
                self._judge_batch(batch.part(tail))
            elif drawn is not None and drawn.phase != TRAIN:  # fetched before the end of its pass
                if drawn.phase < 0:  # as after next(iter(loader))
                    drawn.phase = self._eval_phase(batch)
                end = self._end_of_forward(tail[:ahead], evaluated[-1])
                self._book.beside(tail[:end], self._eval_phase(batch), batch.loader, batch.loaders)
                self._book.apart(tail[end:ahead], Activity.OUTSIDE)
            else:  # in no batch of its own it lasts to the end of its last forward
                before, after = self._cut_out(tail[:ahead], evaluated)
                self._train_if(self._book.open.trained and not self._book.open.updated, before, batch)
                self._train_if(of_step or bool(behind), after, batch)
            batch = Batch(loader=self._book.train_loader)  # what comes then uses one that was fetched before
        if behind:  # their backward may come after the boundary
            self.waiting.append(batch.part(behind))

    def _judge_batch(self, batch: Batch) -> None:
        """Judges a batch that was asked for, whose forwards no backward followed."""
        phase = self._eval_phase(batch)
        self._show(batch, phase)
        self._book_batch(batch, phase)

    def _is_of_step(self, batch: Batch, why: Boundary, asked: Pass | None) -> bool:
        """Returns whether the loop's own code after an update is the step's: it goes on with the pass, or with another that trains."""
        drawn, step = batch.left_over, self._book.open
        if asked is not None and drawn is not None and drawn.drawn_again and drawn.source == asked.source:
            return True
        if not step.updated:  # with manual steps, time without a loader belongs to the step
            manual = self._decision.manual and not batch.passes and why is not _CLOSE
            return manual or (not batch.between and (step.trained or step.fetched))
        if asked is not None:
            return asked.phase == TRAIN
        return why is _MARK or (why is _SAID and any(not each.ended for each in batch.passes))

    def _train_if(self, of_step: bool, items: list[Item], batch: Batch) -> None:  # noqa: FBT001 - its question
        """Counts time in which no model ran: as the step's, or as outside of all steps."""
        if of_step:
            self._train(items, batch)
        else:
            self._book.apart(items, Activity.OUTSIDE)

    def _train(self, items: list[Item], batch: Batch) -> None:
        """Books training time. It waits while the step has neither a batch nor a model's work: it may be of none."""
        self._book.open.asked |= batch.asked_in is self._book.open
        if self._book.open.duration_ns or len(self._lead) > MOST_ITEMS or any(map(self._is_evidence, items)):
            self._flush_lead()
            self._book.train(items, batch.loader, batch.loaders)
        else:
            self._lead += items

    def _is_evidence(self, item: Item) -> bool:
        return bool(item[SHOWS]) or item[BATCH] is not None or self._book.waits(item)

    def _flush_lead(self) -> None:
        lead, self._lead = self._lead, []
        if lead:
            self._book.train(lead, -1, (-1,))

    def _drop_lead(self) -> None:
        """Books what waited: it was of no step."""
        lead, self._lead = self._lead, []
        self._book.apart(lead, Activity.OUTSIDE if self.began else Activity.INIT)

    # -- what waits --------------------------------------------------------------------------------

    def _wait(self, batch: Batch) -> None:
        """Lets a batch wait in which no model ran.

        Of a long pass of such batches all but the first few are one, so that few wait.
        """
        last = self.waiting[-1] if len(self.waiting) > LOOKS_AHEAD else batch
        if last is not batch and last.passes == batch.passes and all(map(self._is_for_nothing, batch.passes)):
            last.items += batch.items
        else:
            self.waiting.append(batch)

    def _book_waiting(self, *, ended_too: bool, unused_too: bool) -> None:
        """Books waiting batches whose phase is known by now.

        Args:
            ended_too: forwards of passes that have ended as well, although a backward may come yet.
            unused_too: batches of such passes that no model has used, although what follows may use them.
        """
        kept: list[Batch] = []
        full = sum(len(batch.items) for batch in self.waiting) > MOST_ITEMS
        overdue = len(self.waiting) - LOOKS_AHEAD
        trains = self._trained or self._decision.source in _BY_TRAINING
        for place, batch in enumerate(self.waiting):
            for_nothing = bool(batch.passes) and all(map(self._is_for_nothing, batch.passes))
            forward = not for_nothing and batch.has_forward
            over = self.left_over not in batch.passes and batch.is_over
            if for_nothing:
                ready = over and unused_too and not batch.fresh
            elif forward:
                ready = over and ended_too and not batch.fresh and (trains or self._decision.decided)
            else:
                ready = over or batch.shown >= 0 or place < overdue
            batch.fresh = False
            if for_nothing and (ready or full):
                self._book.apart(batch.items, Activity.OUTSIDE)
            elif ready or full:
                evaluates = forward and (trains or self._decision.manual) and not self._is_given_up(batch)
                self._book_batch(batch, self._eval_phase(batch) if evaluates else -1)
            else:
                kept.append(batch)
        self.waiting = kept

    def _is_given_up(self, batch: Batch) -> bool:
        """Returns whether the loop has given up a step before its backward: of a pass that has trained, or where the model raised."""
        return batch.shown == TRAIN or any((call := item[CALL]) and call[3] for item in batch.items)

    def _book_batch(self, batch: Batch, phase: int) -> None:
        """Books a batch under a phase; -1: by what is known of its loader."""
        if phase < 0:
            phase = self.phase_of(batch.passes[0]) if batch.passes else TRAIN
        declared = self._declared(batch)
        phase = declared if declared >= 0 else phase
        if phase == TRAIN:
            for each in batch.passes:
                each.phase = TRAIN if each.phase < 0 else each.phase
            self._trained = self._trained or batch.has_forward
            self._train(batch.items, batch)
        else:
            book = self._book.evaluate if batch.fetched else self._book.beside  # a batch is a step once
            book(batch.items, phase, batch.loader, batch.loaders)
