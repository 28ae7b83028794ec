"""Decides the phase of each batch (train, eval, test, predict) from the evidence at its boundaries.

Everything up to the last backward or update before a boundary is training. What follows is judged by its forwards; a batch whose
forwards are not conclusive waits for later ones. docs/explanation/how-time-is-accounted.md has the rules.
"""

from __future__ import annotations

from operator import itemgetter
from typing import Final

from otel_train.accounting.batches import LOOKS_AHEAD, MOST_CACHED, MOST_ITEMS, Batch, Boundary, Pass
from otel_train.accounting.nesting import FORWARD
from otel_train.accounting.steps import (
    BATCH,
    CALL,
    FORWARD_CACHED,
    FORWARD_FROZEN,
    FORWARD_GRAD,
    FORWARD_NO_GRAD,
    FORWARDS,
    GRADIENTS_MADE,
    LIKELY_TRAINING,
    NOTHING,
    PART,
    SHOWS,
    STACK,
    TRAINING,
    UPDATED,
    Item,
    StepBook,
    StepSourceDecision,
)
from otel_train.accounting.types import EVAL, TRAIN, Activity, SourceTable, StepSource

_SHOWN: Final = itemgetter(SHOWS)

# Names of the module, because reading a name of a class takes ten times as long.
_, _, _, _SAID, _MARK, _CLOSE = Boundary
_BY_UPDATE, _BY_BATCH = StepSource.UPDATE, StepSource.BATCH
_BY_TRAINING = (StepSource.UPDATE, StepSource.BACKWARD)
_WITHOUT_GRADIENTS = (NOTHING, FORWARD_CACHED, FORWARD_NO_GRAD)


class BatchPhases:
    """Decides the phase of each batch, and books its time.

    The numbers of rules are those in docs/explanation/how-time-is-accounted.md, "Phases".

    Args:
        sources: properties of every source.
        book: takes items whose phase is known.
        decision: how steps are counted.

    Attributes:
        waiting: batches before the open one whose phase is not known yet.
        left_over: the pass that has ended after a batch of it was fetched that is still to be used.
        pair: the first two batches of an evaluation, if the model ran in the second only: one step if the loop looks one
            batch ahead, two if it fetches batches in groups.
        began: whether there was a request, a computation or a manual mark. Time before is ``init``.
        lead: time since the last step, without a request or a computation yet: it may be outside of all steps.
        trained: whether there were gradients, updates, or forwards that were booked as training.
    """

    def __init__(self, sources: SourceTable, book: StepBook, decision: StepSourceDecision) -> None:
        self.waiting: list[Batch] = []
        self.left_over: Pass | None = None
        self.pair: tuple[Batch, ...] = ()
        self.began = False
        self.lead: list[Item] = []
        self.trained = False
        self._sources = sources
        self._book = book
        self._decision = decision
        self._phases: dict[int, int] = {}
        """By loader: phase of its last pass."""
        self._trainable: set[tuple[int, int]] = set()
        """Models and parts of models, as (source, part), that have run with gradients in training mode."""
        self._inside: set[tuple[int, int]] = set()
        """Pairs of models: the second has run inside the first with gradients in training mode."""
        self.in_hand = -1
        """Loader of a training batch that no model had used when another loader was requested; -1 for none."""
        self._trained_last: list[Pass] = []
        """Passes of the last batch that trained."""
        self._undecided = self._undecided_items = 0
        """The first of the waiting batches, and their items: their phase is known at the end of their passes, not earlier."""

    # -- what is known of a pass -------------------------------------------------------------------

    def phase_of(self, asked: Pass) -> int:
        """Returns the phase of batches without evidence: as declared, else of their pass, of its loader, or of the name."""
        source, sources = asked.source, self._sources
        known = (sources.declared[source], asked.phase, self._phases.get(source, -1), sources.named[source])
        return next((phase for phase in known if phase >= 0), TRAIN)

    def _purpose(self, loader: int) -> int:
        """Returns the phase that the program declared for a loader, else the one that its name implies; -1 for none."""
        declared = self._sources.declared[loader]
        return declared if declared >= 0 else self._sources.named[loader]

    def _declared(self, batch: Batch) -> int:
        """Returns the phase that the program declared for the loader of a batch; -1 for none."""
        return self._sources.declared[batch.loader] if batch.passes else -1

    def _eval_phase(self, batch: Batch) -> int:
        """Returns the phase of a batch that evaluates: the one declared or implied by the name of its loader, else ``EVAL``."""
        phase = self._purpose(batch.loader) if batch.loader >= 0 else -1
        return phase if phase >= 0 else EVAL

    def is_named_evaluation(self, batch: Batch) -> bool:
        """Returns whether a loader of the batch does not train, by declaration or by name."""
        return any(self._purpose(each.source) > TRAIN for each in batch.origins)

    def is_unused(self, asked: Pass) -> bool:
        """Returns whether no model ran in a pass of a loop that trains, and its loader is not known to evaluate: rule 6."""
        return (
            self.trained
            and not self._decision.manual
            and asked is not self.left_over
            and not asked.computed
            and self._sources.declared[asked.source] < 0
            and self.phase_of(asked) == TRAIN
        )

    def _only_unused(self, batch: Batch) -> bool:
        """Returns whether a batch was requested, of unused passes alone."""
        return bool(batch.passes) and all(map(self.is_unused, batch.passes))

    def _set_phase(self, batch: Batch, phase: int) -> None:
        """Records the phase of the passes of a batch, and of their loaders."""
        for each in batch.passes:
            each.phase = self._phases[each.source] = phase
        if phase == TRAIN and batch.passes:
            self._trained_last = batch.passes

    def ends_with(self, batch: Batch, gone: Pass) -> bool:
        """Returns whether an evaluation batch ends with a training pass, because it was fetched during that pass."""
        if gone not in self._trained_last or not (batch.shows and batch.passes):
            return False
        trains = TRAINING if self.is_named_evaluation(batch) else LIKELY_TRAINING
        return not any(item[SHOWS] in trains for item in batch.items)

    def _set_training(self, batch: Batch) -> None:
        """Records that the passes of a batch train. Called before the waiting batches of these passes are booked."""
        left_over = batch.left_over
        if left_over is not None and left_over.phase < 0 and self._purpose(left_over.source) <= TRAIN:
            left_over.phase = self._phases[left_over.source] = TRAIN
        elif left_over is not None and left_over.phase != TRAIN:  # it evaluates: its batch is not used
            batch.left_over, batch.loader = None, -1
        for each in batch.passes:
            each.phase = TRAIN

    def trains_inside(self, model: int, stack: tuple[int, ...]) -> None:
        """Records that a model has run inside the forwards on a stack with gradients in training mode: it trains where they do."""
        self._inside |= {(outer, model) for outer in stack if self._sources.kinds[outer] == FORWARD}

    # -- a boundary --------------------------------------------------------------------------------

    def judge(self, batch: Batch, why: Boundary, asked: Pass | None) -> None:
        """Judges a batch up to a boundary.

        Args:
            batch: the open batch; all its items are removed.
            why: the boundary.
            asked: the pass that is requested next; None if there is none.
        """
        self._book_pair(batch)
        opened, batch = batch, self._take_evaluation_ahead(batch)
        declared = self._declared(batch) > TRAIN
        is_named = batch.passes and self._sources.named[batch.loader] >= 0
        in_hand = batch.loader if self._is_in_hand(batch, asked) else -1
        ends: tuple[int, ...] = LIKELY_TRAINING if self.is_certain and not is_named else TRAINING
        ends = (UPDATED,) if self.needs_update(batch) else ends
        head, tail = self._split_training(() if declared else ends, batch)
        self.in_hand = in_hand if in_hand >= 0 else self.in_hand
        if why is _MARK and self._trains_by_marks(batch):
            head, tail = self._end_marked_step(batch, tail), []
        trained_before, opened.trained = opened.trained, opened.trained or bool(head)
        if head and self._is_own_code(tail) and self._is_of_step(batch, why, asked):
            self._train(head + tail, batch)  # booking both at once is faster
            return
        if head:
            self._train(head, batch)
        of_step, trained = self._is_of_step(batch, why, asked), bool(head)
        if declared or (not trained and any(item[SHOWS] == GRADIENTS_MADE for item in tail)):
            self._judge_gradients(batch.part(tail), asked)
        elif any(item[SHOWS] in FORWARDS for item in tail):
            trained = trained or trained_before
            self._judge_rest(batch, tail, asked, of_step=of_step, trained=trained)
        elif trained or not batch.passes or self._goes_on(batch):
            self._book_own_code(tail, batch, of_step=of_step)
        else:  # no model ran
            ahead = self.trained and asked in batch.passes  # the model may run in the batches that follow
            known = self.phase_of(batch.passes[0]) if self._decision.manual and not ahead else batch.shown
            if known >= 0:
                batch.fetched = batch.fetched and not self._is_left(batch, known, asked)
                self._book_batch(batch.part(tail), known)
            elif tail or batch.fetched:
                self._wait(batch.part(tail))

    def _judge_gradients(self, batch: Batch, asked: Pass | None) -> None:
        """Judges gradients without an update so far: evaluation, unless an update may still come that uses them (rule 7)."""
        may_train = batch.shown < 0 and min(map(self._purpose, batch.loaders)) <= TRAIN
        if may_train and sum(before.has_gradients for before in self.waiting) < MOST_CACHED:
            self.waiting.append(batch)
        else:
            self._judge_batch(batch, asked)

    def _is_cached(self, batch: Batch, tail: list[Item], asked: Pass | None) -> bool:
        """Returns whether a batch without gradients may be for a later batch of its pass: rule 2."""
        may_be = _WITHOUT_GRADIENTS if batch.shown == TRAIN else (NOTHING, FORWARD_CACHED)
        return (
            asked in batch.passes
            and all(shows in may_be for shows in map(_SHOWN, tail))
            and all(each.ahead <= 0 for each in batch.passes)
            and batch.shown <= TRAIN
            and not self.is_named_evaluation(batch)
            and sum(before.cached for before in self.waiting) < MOST_CACHED
        )

    def _is_in_hand(self, batch: Batch, asked: Pass | None) -> bool:
        """Returns whether no model has used a training batch when another loader is requested; the end of a step may be in it."""
        is_other = asked is not None and batch.fetched and asked not in batch.passes
        return is_other and self._purpose(batch.loader) <= TRAIN and not batch.has_forward

    def _goes_on(self, batch: Batch) -> bool:
        """Returns whether a batch was trained on before a checkpoint or a report that ended its step."""
        used = batch.shows and not batch.fetched and batch.shown == TRAIN
        return used and not (self._book.open.trained or self._book.open.fetched or self._decision.manual)

    def _is_left(self, batch: Batch, phase: int, asked: Pass | None) -> bool:
        """Returns whether the loop has left an evaluation, of which other batches were used, without using this batch."""
        leaves = phase > TRAIN and asked is not None and asked not in batch.passes
        return leaves and all(each.computed for each in batch.passes)

    def _judge_batch(self, batch: Batch, asked: Pass | None = None) -> None:
        """Books a requested batch, whose forwards no backward followed, as evaluation: rules 2 to 4."""
        looks_ahead = any(each is asked and each.ahead == 1 for each in batch.passes)
        if looks_ahead and batch.fetched and not any(map(_SHOWN, batch.items)):
            self._wait(batch)
            return
        phase = self._eval_phase(batch)
        self._set_phase(batch, phase)
        second = batch.fetched and [(each.batches, each.ahead) for each in batch.passes] == [(2, 1)]
        first = self._take_fetched(batch.passes[0]) if second else None
        if first is None:
            self._book_batch(batch, phase)
        else:
            self.pair = first, batch

    def _book_pair(self, following: Batch | None = None) -> None:
        """Books the first two batches of an evaluation, as one step or two depending on the batch that follows.

        If the loop looks one batch ahead, each step uses the batch before its own, and the last step comes after the pass.
        """
        if not self.pair:
            return
        (first, second), self.pair = self.pair, ()
        if following is not None and following.shows and second.passes[0] in following.origins:
            second.items = first.items + second.items
            second.passes[0].is_behind = True
        else:
            self._book_batch(first, -1)
        self._book_batch(second, -1)

    def _judge_rest(
        self, batch: Batch, tail: list[Item], asked: Pass | None, *, of_step: bool, trained: bool
    ) -> None:
        """Judges forwards that no backward followed before the boundary: rules 2 to 4.

        Args:
            batch: the batch that they belong to.
            tail: its items since the last backward or update.
            asked: the pass that is requested next; None if there is none.
            of_step: whether time after them belongs to the step.
            trained: whether there was a backward or an update in the batch.
        """
        by_marks = bool(batch.passes) and self._trains_by_marks(batch)
        cached = not (by_marks or trained) and self._is_cached(batch, tail, asked)
        if by_marks or cached:
            self.waiting.append(waits := batch.part(tail))
            waits.cached = cached
            return
        left_over, (train_from, evaluated) = batch.left_over, self._early_forwards(tail)
        if not (batch.passes or batch.in_hand) or train_from == len(tail):
            evaluated = [n for n in range(train_from) if tail[n][SHOWS] in FORWARDS]
        elif not trained:  # forwards of a teacher; the backward of the student is still to come
            evaluated = []
        undecided = tail[train_from:] if evaluated else tail
        if evaluated:
            if batch.passes and not trained:
                self._judge_batch(batch.part(tail))
            elif left_over is not None and left_over.phase != TRAIN:  # fetched before the end of its pass
                if left_over.phase < 0:  # as after next(iter(loader))
                    left_over.phase = self._eval_phase(batch)
                    self._phases.setdefault(left_over.source, left_over.phase)
                end = self._end_of_forward(tail[:train_from], evaluated[-1])
                before, is_step = self._take_last(left_over)
                book = self._book.evaluate if is_step else self._book.beside
                book(before + tail[:end], self._eval_phase(batch), batch.loader, batch.loaders)
                self._book.apart(tail[end:train_from], Activity.OUTSIDE)
            else:  # without a batch, evaluation lasts to the end of its last forward
                before, after = self._evaluate_forwards(tail[:train_from], evaluated)
                trains = self._book.open.trained and not self._book.open.updated
                self._book_own_code(before, batch, of_step=trains)
                self._book_own_code(after, batch, of_step=of_step or bool(undecided))
            batch = Batch(loader=self._book.train_loader)  # what follows uses a batch that was fetched before
        if undecided:  # the backward may come after the boundary
            self.waiting.append(batch.part(undecided))

    def _take_last(self, ended: Pass) -> tuple[list[Item], bool]:
        """Returns the waiting items of the last batch of an ended pass, which is used only now, and whether it is a step."""
        last, is_behind = self._take_fetched(ended), ended.is_behind
        ended.is_behind = False
        return ([], is_behind) if last is None else (last.items, True)

    def _take_fetched(self, asked: Pass) -> Batch | None:
        """Removes and returns the only waiting batch of a pass if it is fetched and not used yet; None if there are several."""
        found = [batch for batch in self.waiting if asked in batch.passes]
        if len(found) != 1 or not found[0].fetched:
            return None
        self.waiting.remove(found[0])
        self._undecided = self._undecided_items = 0
        return found[0]

    @property
    def is_certain(self) -> bool:
        """Whether forwards with gradients in training mode always train, and backwards and updates close no step."""
        return self._decision.manual or self._decision.source is _BY_BATCH

    def needs_update(self, batch: Batch) -> bool:
        """Returns whether gradients in evaluation mode evaluate (an attack, an analysis) unless an update follows: rule 7."""
        named = [self._sources.named[each.source] for each in batch.origins]
        if not named or batch.shown == TRAIN:
            return False
        if min(named) <= TRAIN and self._decision.source is not _BY_UPDATE:
            return False
        shown = {item[SHOWS] for item in batch.items}
        return FORWARD_FROZEN in shown and FORWARD_GRAD not in shown

    def _trains_by_marks(self, batch: Batch) -> bool:
        """Returns whether a batch trains because a step was marked, in a run without gradients and updates: rule 2."""
        return self._decision.manual and not self.trained and not self.is_named_evaluation(batch)

    def _end_marked_step(self, batch: Batch, items: list[Item]) -> list[Item]:
        """Books the batches before the end of a marked step as training; returns the last items of that step."""
        waiting = self._take_waiting()
        for before in waiting:
            self._train(before.items, before)
        self._set_phase(batch, TRAIN)
        return items

    def _is_own_code(self, tail: list[Item]) -> bool:
        """Returns whether an update ends the step and only the loop's own code follows, which is the usual case."""
        return bool(self._book.open.updated) and not any(map(_SHOWN, tail))

    def _is_of_step(self, batch: Batch, why: Boundary, asked: Pass | None) -> bool:
        """Returns whether the loop's own code after an update is of the step: its pass goes on, or a training pass follows."""
        left_over, step = batch.left_over, self._book.open
        if (
            asked is not None
            and left_over is not None
            and left_over.drawn_again
            and left_over.source == asked.source
        ):
            return True
        if left_over is not None and left_over.phase > TRAIN:
            return False  # an evaluation whose pass has ended
        if not step.updated and not self._goes_on(batch):
            # With manual steps, time without a loader belongs to the step, except between two passes.
            paused = batch.between and (asked is not None or why is _SAID)
            manual = self._decision.manual and not batch.passes and why is not _CLOSE and not paused
            return manual or (not batch.between and (step.trained or step.fetched))
        if asked is not None:
            return asked.phase == TRAIN
        return why is _MARK or (why is _SAID and any(not each.ended for each in batch.passes))

    def train_up_to(self, shows: int, batch: Batch) -> None:
        """Books a batch as training up to the last item with this evidence; the rest stays in it."""
        head, tail = self._split_training((shows,), batch)
        batch.items += tail
        if head:
            self._train(head, batch)

    # -- training, and evaluation inside a step ----------------------------------------------------

    def _split_training(self, ends: tuple[int, ...], batch: Batch) -> tuple[list[Item], list[Item]]:
        """Splits a batch after the last item with evidence in ``ends``: rule 1.

        Waiting batches are training as well, and are booked here. Forwards with gradients in evaluation mode become training
        or evaluation (rule 4).

        Returns:
            The items that train, for the caller to book, and the rest.
        """
        self.split_row(batch)
        items = batch.take_items()
        last, following, shown = -1, NOTHING, list(map(_SHOWN, items))
        frozen = FORWARD_FROZEN in shown
        for place in range(len(items) - 1, -1, -1):
            shows = shown[place]
            if not shows:
                continue
            if shows == FORWARD_FROZEN:  # training if a backward follows directly
                trains = following == GRADIENTS_MADE and not self.is_certain
                shows = FORWARD_GRAD if trains else FORWARD_NO_GRAD
                items[place] = (*items[place][:SHOWS], shows, *items[place][CALL:])
            following = shows
            if last < 0 and following in ends:
                last = place
                if not frozen:
                    break
        if last >= 0:
            waiting = self._take_waiting()
            self._set_training(batch)
            waiting = self._take_trials(waiting, batch, items[:last])
            if waiting:
                self._book_before(waiting, batch, items)
            self.trained, self.in_hand = True, -1
            step = self._book.open
            asked = step.asked or step is batch.asked_in
            head = items[: last + 1] if asked else self._take_evaluation(items[: last + 1], batch)
            self._set_phase(batch, TRAIN)
            return head, items[last + 1 :]
        return [], items

    def _book_before(self, waiting: list[Batch], batch: Batch, items: list[Item]) -> None:
        """Books the batches that wait when a batch with these items trains: they train as well, unless they evaluate."""
        first = next(item for item in items if item[SHOWS])
        caches = first[STACK][-1] if first[SHOWS] in _WITHOUT_GRADIENTS else -1
        for before in waiting:
            evaluates = self._evaluates_before(before, batch) or (before.cached and not before.runs(caches))
            before.dropped = False  # fetched before the end of its pass, and used now
            if evaluates or not any(map(_SHOWN, before.items)):
                self._book_rest(before, evaluates=before.cached)
            else:
                self._book_batch(before, TRAIN)
                for each in before.passes:
                    each.caches |= before.cached

    def _take_trials(self, waiting: list[Batch], batch: Batch, head: list[Item]) -> list[Batch]:
        """Books forwards on a first batch before anything trained as evaluation; returns the other batches: rule 3.

        They are evaluation only if the batch that trains has a forward of the same model.
        """
        if self.trained or self._decision.manual or not batch.passes:
            return waiting
        shows = list(map(_SHOWN, head))
        first = shows.index(GRADIENTS_MADE) if GRADIENTS_MADE in shows else len(head)
        own = {item[STACK][-1] for item in head[:first] if item[SHOWS] == FORWARD_GRAD}
        kept: list[Batch] = []
        for before in waiting:
            tried = {item[STACK][-1] for item in before.items if item[SHOWS] in FORWARDS}
            if tried and tried <= own and before.is_over and not before.has_raised:
                self._book_tried(before)
            else:
                kept.append(before)
        return kept

    def _book_tried(self, batch: Batch) -> None:
        """Books forwards with gradients as evaluation, because no backward follows."""
        items = [
            (*item[:SHOWS], FORWARD_NO_GRAD, *item[CALL:]) if item[SHOWS] in FORWARDS else item
            for item in batch.items
        ]
        self._judge_rest(batch, items, None, of_step=False, trained=False)

    def _evaluates_before(self, before: Batch, batch: Batch) -> bool:
        """Returns whether a batch evaluates, by name or without gradients, and another pass trains next: rules 2 and 3."""
        evaluates = before.cached or self.is_named_evaluation(before)
        return evaluates and set(before.passes).isdisjoint(batch.passes)

    def _book_rest(self, batch: Batch, *, evaluates: bool) -> None:
        """Books a waiting batch that does not train: as evaluation, else by what is known of its loader."""
        phase = self._eval_phase(batch) if evaluates else -1
        if evaluates and batch.cached:
            self._set_phase(batch, phase)
        self._book_batch(batch, phase)

    def _take_evaluation_ahead(self, batch: Batch) -> Batch:
        """Books evaluation on a batch that was requested while another one was in hand; returns the rest, which trains: rule 5.

        The same holds for evaluation between a backward and the update of its step.
        """
        asked = batch.passes or ([] if batch.left_over is None else [batch.left_over])
        evaluating = [each for each in asked if max(self._purpose(each.source), each.phase) > TRAIN]
        if not evaluating:
            return batch
        passes = [each for each in asked if each not in evaluating]
        in_hand = passes[-1].source if passes else self.in_hand
        first, trials = self._early_forwards(batch.items)
        updates = first < len(batch.items) and batch.items[first][SHOWS] == UPDATED
        follows_backward = updates and self._book.open.trained and not passes
        if follows_backward:
            in_hand = self._book.open.loader
        if follows_backward or (passes and first == len(batch.items)):  # or nothing trains in the batch yet
            trials = [n for n in range(first) if batch.items[n][SHOWS] in FORWARDS]
        if not trials or (in_hand < 0 and batch.passes):
            return batch
        ahead = batch.items[:first]
        begin, end = self._first_wait(ahead, evaluating), self._end_of_forward(ahead, trials[-1])
        before, is_step = ([], False) if batch.left_over is None else self._take_last(batch.left_over)
        is_new = batch.fetched or is_step
        self._judge_batch(Batch(evaluating, evaluating[-1].source, before + ahead[begin:end], fetched=is_new))
        items = batch.take_items()
        del items[begin:end]
        return Batch(passes, in_hand, items, fetched=batch.fetched and bool(passes), asked_in=batch.asked_in)

    def _take_evaluation(self, head: list[Item], batch: Batch) -> list[Item]:
        """Books evaluation at the start of a step that has no batch; returns the other items: rule 5.

        With a batch in hand, forwards of a generator are for the critic, which trains first.
        """
        first, trials = self._early_forwards(head, several=not batch.passes and batch.left_over is None)
        if not trials:
            return head
        before, after = self._evaluate_forwards(head[:first], trials)
        if any(item[SHOWS] for item in before):
            return before + after + head[first:]
        self._book.apart(before, Activity.OUTSIDE)  # the loop's own code between an update and an evaluation
        return after + head[first:]

    def _early_forwards(self, items: list[Item], *, several: bool = False) -> tuple[int, list[int]]:
        """Returns the index where training begins, and those of the forwards before it, without gradients, of the same model.

        Forwards of a part that has never trained, as of a frozen encoder, are left out. ``several``: of any model that
        then trains.
        """
        first = next((n for n, item in enumerate(items) if item[SHOWS] in LIKELY_TRAINING), len(items))
        then = items[first:] if several else items[first : first + 1]
        trains = {(item[STACK][-1], item[PART]) for item in then if item[SHOWS] == FORWARD_GRAD}
        models, trials = {model for model, _ in trains}, []
        inside = {inner for outer, inner in self._inside if outer in models}
        models |= inside
        self._trainable |= trains | {(model, 0) for model in inside}
        for place in range(first):
            if items[place][SHOWS] in FORWARDS and (model := items[place][STACK][-1]) in models:
                part = items[place][PART]
                if not part or not self._trainable.isdisjoint({(model, part), (model, 0)}):
                    trials.append(place)
        return first, trials

    def _evaluate_forwards(self, items: list[Item], forwards: list[int]) -> tuple[list[Item], list[Item]]:
        """Books evaluation without a loader, from the first forward to the end of the last; returns the items before and after it.

        Every forward is a step, which lasts until the next one.
        """
        first, end = forwards[0], self._end_of_forward(items, forwards[-1])
        begins = [n for n in range(first, end) if items[n][SHOWS] in FORWARDS]
        for begin, following in zip(begins, [*begins[1:], end], strict=True):
            self._book.evaluate(items[begin:following], EVAL, -1, ())
        return items[:first], items[end:]

    def _first_wait(self, items: list[Item], passes: list[Pass]) -> int:
        """Returns the index of the first wait for one of the passes; 0 if there is none."""
        loaders = {each.source for each in passes}
        return next((n for n, item in enumerate(items) if not loaders.isdisjoint(item[STACK])), 0)

    def _end_of_forward(self, items: list[Item], begin: int) -> int:
        """Returns the index after the end of the forward that begins at an index; the length if it has not ended."""
        kinds, calls = self._sources.kinds, ((n, items[n][CALL]) for n in range(begin, len(items)))
        return next((n + 1 for n, call in calls if call and kinds[call[0]] == FORWARD), len(items))

    # -- batches that wait -------------------------------------------------------------------------

    def split_row(self, batch: Batch) -> None:
        """Splits requests in a row that may have been for one batch into several batches."""
        if batch.row and self._purpose(batch.row[-1].loader) <= TRAIN:
            self.in_hand = batch.row[-1].loader
        self.waiting += batch.row
        batch.row = []

    def _wait(self, batch: Batch) -> None:
        """Lets a batch wait in which no model ran.

        In a long pass of such batches, all but the first few become one batch, so that few wait.
        """
        last = self.waiting[-1] if len(self.waiting) > LOOKS_AHEAD else batch
        if last is not batch and last.passes == batch.passes and all(map(self.is_unused, batch.passes)):
            last.items += batch.items
        else:
            self.waiting.append(batch)

    def end_pass(self, ended: Pass) -> None:
        """Handles the end of a pass: the phase of its waiting batches may be known now."""
        ended.ended = True
        self._undecided = self._undecided_items = 0

    def book_waiting(self, *, ended_too: bool, unused_too: bool) -> None:
        """Books waiting batches whose phase is known now.

        The first ``_undecided`` batches are skipped: a request would else take time proportional to all that wait.

        Args:
            ended_too: also batches with forwards of passes that have ended, although a backward may still come.
            unused_too: also batches of ended passes that no model has used, although a later stage may still use them.
        """
        kept: list[Batch] = []
        full = self._is_full()
        later = self.waiting[self._undecided :]
        overdue = len(self.waiting) - LOOKS_AHEAD
        trains = self.trained or self._decision.source in _BY_TRAINING
        for place, batch in enumerate(later, self._undecided):
            unused = self._only_unused(batch)
            forward = not unused and batch.has_forward
            over = self.left_over not in batch.passes and batch.is_over
            if unused:
                ready = over and unused_too and not batch.fresh
            elif batch.cached or (batch.has_gradients and batch.shown > TRAIN):
                ready = over or batch.shown > TRAIN
            elif forward:
                known = (trains or self._decision.decided) and not self._awaits_backward(batch)
                ready = over and ended_too and not batch.fresh and known
            else:
                ready = over or batch.shown >= 0 or place < overdue
            batch.fresh = False
            if unused and (ready or full):
                self._book.apart(batch.items, Activity.OUTSIDE)
            elif ready or full:
                known = trains or self._decision.manual or batch.cached
                evaluates = forward and known and not self._is_given_up(batch)
                if evaluates and not batch.origins:
                    self._book_tried(batch)
                else:
                    self._book_rest(batch, evaluates=evaluates)
            else:
                kept.append(batch)
        self.waiting[self._undecided :] = kept
        self._skip_undecided(kept)

    def _is_full(self) -> bool:
        """Returns whether too many items wait. No waiting batch is skipped then."""
        later = sum(len(batch.items) for batch in self.waiting[self._undecided :])
        full = self._undecided_items + later > MOST_ITEMS
        if full:
            self._undecided = self._undecided_items = 0
        return full

    def _skip_undecided(self, kept: list[Batch]) -> None:
        """Lets the next calls of ``book_waiting`` skip batches whose forwards only the end of their passes decides."""
        for batch in kept:
            if batch.cached or batch.is_over or batch.has_gradients or not batch.has_forward:
                return
            self._undecided += 1
            self._undecided_items += len(batch.items)

    def _take_waiting(self) -> list[Batch]:
        """Removes and returns all batches that wait."""
        waiting, self.waiting = self.waiting, []
        self._undecided = self._undecided_items = 0
        return waiting

    def _awaits_backward(self, batch: Batch) -> bool:
        """Returns whether a batch continues one that an evaluation interrupted, whose pass may end before its backward."""
        is_of_other = self.in_hand >= 0 and not batch.passes
        return is_of_other and any(item[SHOWS] == FORWARD_GRAD for item in batch.items)

    def _is_given_up(self, batch: Batch) -> bool:
        """Returns whether the loop has given up a step before its backward: its pass has trained before, or a call raised."""
        if batch.cached:
            return all(each.caches for each in batch.passes)
        return batch.shown == TRAIN or batch.has_raised

    def close(self) -> None:
        """Books the waiting batches: no further event comes."""
        self._book_pair()
        self.left_over = None
        several = len(self.waiting) > 1 and self.trained
        for batch in self.waiting:
            if batch.is_over and not batch.dropped and self._only_unused(batch):
                self._book.apart(batch.items, Activity.OUTSIDE)
                continue
            known = several or batch.cached or batch.has_gradients
            self._book_rest(batch, evaluates=known and batch.has_forward and not self._is_given_up(batch))
        self.waiting = []
        self._drop_lead()

    # -- booking -----------------------------------------------------------------------------------

    def place_in_none(self, item: Item) -> None:
        """Takes an item while no batch is open."""
        if self.began:
            self._book.apart((item,), Activity.OUTSIDE)
        else:
            self.lead.append(item)
            if len(self.lead) > MOST_ITEMS:
                self._drop_lead()

    def begin(self) -> None:
        """Ends the time of ``init`` at the first request or computation."""
        if not self.began:
            self._drop_lead()
            self.began = True

    def _book_batch(self, batch: Batch, phase: int) -> None:
        """Books a batch under a phase; -1: the phase that is known of its pass or loader."""
        if phase < 0:
            phase = self.phase_of(batch.origins[0]) if batch.origins else TRAIN
        declared = self._declared(batch)
        phase = declared if declared >= 0 else phase
        if phase == TRAIN:
            for each in batch.passes:
                each.phase = TRAIN if each.phase < 0 else each.phase
            self.trained = self.trained or batch.has_forward
            if batch.dropped and (self.trained or self._decision.source in _BY_TRAINING):
                self._book.waits_alone(batch.items, TRAIN, batch.loader, batch.loaders)
            else:
                self._train(batch.items, batch)
        else:
            book = self._book.evaluate if batch.fetched else self._book.beside  # it is counted as a step once
            book(batch.items, phase, batch.loader, batch.loaders)

    def _book_own_code(self, items: list[Item], batch: Batch, *, of_step: bool) -> None:
        """Books time in which no model ran: to the step, or as outside of all steps."""
        if of_step:
            self._train(items, batch)
        else:
            self._book.apart(items, Activity.OUTSIDE)

    def _train(self, items: list[Item], batch: Batch) -> None:
        """Books training time. It is held in ``lead`` while the step has no batch and no computation: it may be outside."""
        self._book.open.asked |= batch.asked_in is self._book.open
        if self._book.open.duration_ns or len(self.lead) > MOST_ITEMS or any(map(self._is_evidence, items)):
            self.flush_lead()
            self._book.train(items, batch.loader, batch.loaders)
        else:
            self.lead += items

    def _is_evidence(self, item: Item) -> bool:
        return bool(item[SHOWS]) or item[BATCH] is not None or self._book.waits(item)

    def flush_lead(self) -> None:
        """Books the held time to the open step."""
        lead, self.lead = self.lead, []
        if lead:
            self._book.train(lead, -1, (-1,))

    def _drop_lead(self) -> None:
        """Books the held time as outside of all steps, or as ``init``."""
        lead, self.lead = self.lead, []
        self._book.apart(lead, Activity.OUTSIDE if self.began else Activity.INIT)
