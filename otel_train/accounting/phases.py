"""What each batch is for, decided from evidence at its boundaries.

Up to the last backward or update before a boundary is training. What comes after it is judged by its forwards, and a batch whose
forwards say nothing yet waits until a later one does. docs/explanation/how-time-is-accounted.md has the rules.
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

# Read as names of the module: see ``steps``.
_, _, _, _SAID, _MARK, _CLOSE = Boundary
_BY_UPDATE, _BY_BATCH = StepSource.UPDATE, StepSource.BATCH
_BY_TRAINING = (StepSource.UPDATE, StepSource.BACKWARD)


class BatchPhases:
    """Decides what each batch is for, and books its time.

    The numbers of rules are those of docs/explanation/how-time-is-accounted.md, "Phases".

    Args:
        sources: what is known of every source.
        book: takes items whose phase is known.
        decision: what steps are counted by.

    Attributes:
        waiting: batches before the open one that have not shown what they are for.
        left_over: a pass that has ended with a batch fetched and not used.
        pair: the first two batches of an evaluation, of which the model ran in the second: one step if the loop looks
            one batch ahead, two if it draws them in groups.
        began: there was a request, a computation or a manual mark; what came before was preparation.
        lead: time at the start of a step that has neither a batch nor a model's work yet: it may be of none.
        trained: there were gradients or updates.
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
        """By loader: what its last pass was for."""
        self._trainable: set[tuple[int, int]] = set()
        """Models, and parts of them, that have run with gradients to train."""
        self._inside: set[tuple[int, int]] = set()
        """Models, each with one that has run inside it with gradients to train."""
        self.in_hand = -1
        """Loader of a batch that no model has used when another loader was asked."""
        self._trained_last: list[Pass] = []
        """Passes of the batch that trained last."""

    # -- what is known of a pass -------------------------------------------------------------------

    def phase_of(self, asked: Pass) -> int:
        """Returns what batches of a pass are for that show nothing: what the pass or its loader was used for; else its name."""
        source, sources = asked.source, self._sources
        known = (sources.declared[source], asked.phase, self._phases.get(source, -1), sources.named[source])
        return next((phase for phase in known if phase >= 0), TRAIN)

    def _purpose(self, loader: int) -> int:
        """Returns the phase that the program, else the name, says of a loader; -1 for none."""
        declared = self._sources.declared[loader]
        return declared if declared >= 0 else self._sources.named[loader]

    def _declared(self, batch: Batch) -> int:
        """Returns the phase that the program declared for the loader of a batch; -1 for none."""
        return self._sources.declared[batch.loader] if batch.passes else -1

    def _eval_phase(self, batch: Batch) -> int:
        """Returns which phase outside training: what the loader's name says, else evaluation."""
        phase = self._purpose(batch.loader) if batch.loader >= 0 else -1
        return phase if phase >= 0 else EVAL

    def is_named_evaluation(self, batch: Batch) -> bool:
        """Returns whether the program, or a name, says of a loader of the batch that it does not train."""
        return any(self._purpose(each.source) > TRAIN for each in batch.origins)

    def is_unused(self, asked: Pass) -> bool:
        """Returns whether no model ran in it, in a loop that trains, and no name or earlier use says that its loader evaluates: rule 6."""
        return (
            self.trained
            and not self._decision.manual
            and asked is not self.left_over
            and not asked.computed
            and self._sources.declared[asked.source] < 0
            and self.phase_of(asked) == TRAIN
        )

    def _only_unused(self, batch: Batch) -> bool:
        """Returns whether a batch was asked for, of such passes alone."""
        return bool(batch.passes) and all(map(self.is_unused, batch.passes))

    def _set_phase(self, batch: Batch, phase: int) -> None:
        """Records what the passes of a batch, and their loaders, are for."""
        for each in batch.passes:
            each.phase = self._phases[each.source] = phase
        if phase == TRAIN and batch.passes:
            self._trained_last = batch.passes

    def ends_with(self, batch: Batch, gone: Pass) -> bool:
        """Returns whether a batch of an evaluation ends with the pass of training in which it was drawn."""
        if gone not in self._trained_last or not (batch.shows and batch.passes):
            return False
        trains = TRAINING if self.is_named_evaluation(batch) else LIKELY_TRAINING
        return not any(item[SHOWS] in trains for item in batch.items)

    def _set_training(self, batch: Batch) -> None:
        """Records that the passes of a batch train, before those of their batches are booked that wait."""
        left_over = batch.left_over
        if left_over is not None and left_over.phase < 0 and self._purpose(left_over.source) <= TRAIN:
            left_over.phase = self._phases[left_over.source] = TRAIN
        elif left_over is not None and left_over.phase != TRAIN:  # an evaluation: it does not use its batches
            batch.left_over, batch.loader = None, -1
        for each in batch.passes:
            each.phase = TRAIN

    def trains_inside(self, model: int, stack: tuple[int, ...]) -> None:
        """Records that a model has run with gradients to train inside those of a stack: it is trained with them."""
        self._inside |= {(outer, model) for outer in stack if self._sources.kinds[outer] == FORWARD}

    # -- a boundary --------------------------------------------------------------------------------

    def judge(self, batch: Batch, why: Boundary, asked: Pass | None) -> None:
        """Judges a batch up to a boundary.

        Args:
            batch: the open one. It keeps none of its time.
            why: the boundary.
            asked: the pass that is asked next; None where none is.
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
            self._train(head + tail, batch)  # to book both at once costs less
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
        """Judges gradients that no update has followed: evaluation, unless one comes that may use them (rule 7)."""
        may_train = batch.shown < 0 and min(map(self._purpose, batch.loaders)) <= TRAIN
        if may_train and sum(before.has_gradients for before in self.waiting) < MOST_CACHED:
            self.waiting.append(batch)
        else:
            self._judge_batch(batch, asked)

    def _is_cached(self, batch: Batch, tail: list[Item], asked: Pass | None) -> bool:
        """Returns whether a batch without gradients may be for a later one of its pass: rule 2."""
        return (
            asked in batch.passes
            and all(shows in (NOTHING, FORWARD_CACHED) for shows in map(_SHOWN, tail))
            and all(each.ahead <= 0 for each in batch.passes)
            and batch.shown <= TRAIN
            and not self.is_named_evaluation(batch)
            and sum(before.cached for before in self.waiting) < MOST_CACHED
        )

    def _is_in_hand(self, batch: Batch, asked: Pass | None) -> bool:
        """Returns whether no model has used a batch of training when another loader is asked: at most its step was finished."""
        is_other = asked is not None and batch.fetched and asked not in batch.passes
        return is_other and self._purpose(batch.loader) <= TRAIN and not batch.has_forward

    def _goes_on(self, batch: Batch) -> bool:
        """Returns whether a batch was trained on before a checkpoint or a report, which has ended its step."""
        used = batch.shows and not batch.fetched and batch.shown == TRAIN
        return used and not (self._book.open.trained or self._book.open.fetched or self._decision.manual)

    def _is_left(self, batch: Batch, phase: int, asked: Pass | None) -> bool:
        """Returns whether the loop has left an evaluation with a batch in hand: other batches of the pass were used."""
        leaves = phase > TRAIN and asked is not None and asked not in batch.passes
        return leaves and all(each.computed for each in batch.passes)

    def _judge_batch(self, batch: Batch, asked: Pass | None = None) -> None:
        """Books a batch that was asked for, whose forwards no backward followed, as evaluation: rules 2 to 4."""
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
        """Books the first two batches of an evaluation by what follows.

        If the loop looks one batch ahead, each step works on the batch before its own, and the last comes after the pass.
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
            batch: theirs.
            tail: its time since the last backward or update.
            asked: the pass that is asked next; None where none is.
            of_step: what comes after them is the step's.
            trained: there was a backward or an update in the batch.
        """
        by_marks = bool(batch.passes) and self._trains_by_marks(batch)
        cached = not (by_marks or trained) and self._is_cached(batch, tail, asked)
        if by_marks or cached:
            self.waiting.append(waits := batch.part(tail))
            waits.cached = cached
            return
        left_over, (ahead, evaluated) = batch.left_over, self._early_forwards(tail)
        if not (batch.passes or batch.in_hand) or ahead == len(tail):
            evaluated = [n for n in range(ahead) if tail[n][SHOWS] in FORWARDS]
        elif not trained:  # a teacher's, while the student's backward is to come
            evaluated = []
        behind = tail[ahead:] if evaluated else tail
        if evaluated:
            if batch.passes and not trained:
                self._judge_batch(batch.part(tail))
            elif left_over is not None and left_over.phase != TRAIN:  # fetched before the end of its pass
                if left_over.phase < 0:  # as after next(iter(loader))
                    left_over.phase = self._eval_phase(batch)
                    self._phases.setdefault(left_over.source, left_over.phase)
                end = self._end_of_forward(tail[:ahead], evaluated[-1])
                before, is_step = self._take_last(left_over)
                book = self._book.evaluate if is_step else self._book.beside
                book(before + tail[:end], self._eval_phase(batch), batch.loader, batch.loaders)
                self._book.apart(tail[end:ahead], Activity.OUTSIDE)
            else:  # in no batch of its own it lasts to the end of its last forward
                before, after = self._evaluate_forwards(tail[:ahead], evaluated)
                trains = self._book.open.trained and not self._book.open.updated
                self._book_own_code(before, batch, of_step=trains)
                self._book_own_code(after, batch, of_step=of_step or bool(behind))
            batch = Batch(loader=self._book.train_loader)  # what comes then uses one that was fetched before
        if behind:  # their backward may come after the boundary
            self.waiting.append(batch.part(behind))

    def _take_last(self, ended: Pass) -> tuple[list[Item], bool]:
        """Returns the time, if any waits, of the batch of a pass that is used after its end, and whether it is a step yet to be booked."""
        last, is_behind = self._take_fetched(ended), ended.is_behind
        ended.is_behind = False
        return ([], is_behind) if last is None else (last.items, True)

    def _take_fetched(self, asked: Pass) -> Batch | None:
        """Returns the one batch of a pass that was fetched and is not used yet; None where there are several."""
        found = [batch for batch in self.waiting if asked in batch.passes]
        if len(found) != 1 or not found[0].fetched:
            return None
        self.waiting.remove(found[0])
        return found[0]

    @property
    def is_certain(self) -> bool:
        """A forward with gradients in training mode is training, whatever comes, and no backward or update closes a step."""
        return self._decision.manual or self._decision.source is _BY_BATCH

    def needs_update(self, batch: Batch) -> bool:
        """Returns whether its gradients, made in evaluation mode, are those of an attack or of an analysis unless an update follows: rule 7."""
        named = [self._sources.named[each.source] for each in batch.origins]
        if not named or batch.shown == TRAIN:
            return False
        if min(named) <= TRAIN and self._decision.source is not _BY_UPDATE:
            return False
        shown = {item[SHOWS] for item in batch.items}
        return FORWARD_FROZEN in shown and FORWARD_GRAD not in shown

    def _trains_by_marks(self, batch: Batch) -> bool:
        """Returns whether a mark alone says that it trains, because there are no gradients and no updates: rule 2."""
        return self._decision.manual and not self.trained and not self.is_named_evaluation(batch)

    def _end_marked_step(self, batch: Batch, items: list[Item]) -> list[Item]:
        """Returns the last time of a step that a mark ends, after the batches before it are booked."""
        waiting, self.waiting = self.waiting, []
        for before in waiting:
            self._train(before.items, before)
        self._set_phase(batch, TRAIN)
        return items

    def _is_own_code(self, tail: list[Item]) -> bool:
        """Returns whether an update ends the step, and what follows is the loop's own code: nearly always."""
        return bool(self._book.open.updated) and not any(map(_SHOWN, tail))

    def _is_of_step(self, batch: Batch, why: Boundary, asked: Pass | None) -> bool:
        """Returns whether the loop's own code after an update is the step's: it goes on with the pass, or with another that trains."""
        left_over, step = batch.left_over, self._book.open
        if (
            asked is not None
            and left_over is not None
            and left_over.drawn_again
            and left_over.source == asked.source
        ):
            return True
        if left_over is not None and left_over.phase > TRAIN:
            return False  # an evaluation, of no pass any more
        if not step.updated and not self._goes_on(batch):
            # With manual steps, time without a loader belongs to the step, but for the time between two passes.
            paused = batch.between and (asked is not None or why is _SAID)
            manual = self._decision.manual and not batch.passes and why is not _CLOSE and not paused
            return manual or (not batch.between and (step.trained or step.fetched))
        if asked is not None:
            return asked.phase == TRAIN
        return why is _MARK or (why is _SAID and any(not each.ended for each in batch.passes))

    def train_up_to(self, shows: int, batch: Batch) -> None:
        """Books a batch as training up to the last item that shows this; the rest stays in it."""
        head, tail = self._split_training((shows,), batch)
        batch.items += tail
        if head:
            self._train(head, batch)

    # -- training, and evaluation inside a step ----------------------------------------------------

    def _split_training(self, ends: tuple[int, ...], batch: Batch) -> tuple[list[Item], list[Item]]:
        """Splits a batch after the last item that shows one of ``ends``: rule 1.

        Batches that wait are training with it. A forward with gradients in evaluation mode becomes one of training or of
        evaluation (rule 4).

        Returns:
            What is training, and is to be booked, and the rest.
        """
        self.split_row(batch)
        items = batch.take_items()
        last, following, shown = -1, NOTHING, list(map(_SHOWN, items))
        frozen = FORWARD_FROZEN in shown
        for place in range(len(items) - 1, -1, -1):
            shows = shown[place]
            if not shows:
                continue
            if shows == FORWARD_FROZEN:  # a backward right after it makes it training
                trains = following == GRADIENTS_MADE and not self.is_certain
                shows = FORWARD_GRAD if trains else FORWARD_NO_GRAD
                items[place] = (*items[place][:SHOWS], shows, *items[place][CALL:])
            following = shows
            if last < 0 and following in ends:
                last = place
                if not frozen:
                    break
        if last >= 0:
            waiting, self.waiting = self.waiting, []
            self._set_training(batch)
            waiting = self._take_looks(waiting, batch, items[:last])
            caches = next(filter(None, shown)) == FORWARD_CACHED
            for before in waiting:  # all of it is training, but for batches of a loader with another purpose
                evaluates = self._evaluates_before(before, batch) or (before.cached and not caches)
                before.dropped = False  # it was fetched before the end of its pass, and is used now
                if evaluates or not any(map(_SHOWN, before.items)):
                    self._book_rest(before, evaluates=before.cached)
                else:
                    self._book_batch(before, TRAIN)
                    for each in before.passes:
                        each.caches |= before.cached
            self.trained, self.in_hand = True, -1
            step = self._book.open
            asked = step.asked or step is batch.asked_in
            head = items[: last + 1] if asked else self._take_evaluation(items[: last + 1], batch)
            self._set_phase(batch, TRAIN)
            return head, items[last + 1 :]
        return [], items

    def _take_looks(self, waiting: list[Batch], batch: Batch, head: list[Item]) -> list[Batch]:
        """Books forwards by which the model was tried before anything trained as evaluation; returns the other batches: rule 3.

        The batch that trains has a forward of that model of its own.
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
        """Books forwards with gradients as evaluation: no backward comes."""
        items = [
            (*item[:SHOWS], FORWARD_NO_GRAD, *item[CALL:]) if item[SHOWS] in FORWARDS else item
            for item in batch.items
        ]
        self._judge_rest(batch, items, None, of_step=False, trained=False)

    def _evaluates_before(self, before: Batch, batch: Batch) -> bool:
        """Returns whether a batch evaluates by its name, or has no gradients, and what trains after it is of another pass: rules 2 and 3."""
        evaluates = before.cached or self.is_named_evaluation(before)
        return evaluates and set(before.passes).isdisjoint(batch.passes)

    def _book_rest(self, batch: Batch, *, evaluates: bool) -> None:
        """Books a batch that waited and does not train: as evaluation, else by what is known of its loader."""
        phase = self._eval_phase(batch) if evaluates else -1
        if evaluates and batch.cached:
            self._set_phase(batch, phase)
        self._book_batch(batch, phase)

    def _take_evaluation_ahead(self, batch: Batch) -> Batch:
        """Books evaluation on a batch that was asked for while another one was in hand; returns the rest, which trains: rule 5.

        So it is between a backward and the update of its step.
        """
        asked = batch.passes or ([] if batch.left_over is None else [batch.left_over])
        apart = [each for each in asked if max(self._purpose(each.source), each.phase) > TRAIN]
        if not apart:
            return batch
        passes = [each for each in asked if each not in apart]
        in_hand = passes[-1].source if passes else self.in_hand
        first, looks = self._early_forwards(batch.items)
        updates = first < len(batch.items) and batch.items[first][SHOWS] == UPDATED
        follows_backward = updates and self._book.open.trained and not passes
        if follows_backward:
            in_hand = self._book.open.loader
        if follows_backward or (passes and first == len(batch.items)):  # or nothing has trained yet
            looks = [n for n in range(first) if batch.items[n][SHOWS] in FORWARDS]
        if not looks or (in_hand < 0 and batch.passes):
            return batch
        ahead = batch.items[:first]
        begin, end = self._first_wait(ahead, apart), self._end_of_forward(ahead, looks[-1])
        before, is_step = ([], False) if batch.left_over is None else self._take_last(batch.left_over)
        is_new = batch.fetched or is_step
        self._judge_batch(Batch(apart, apart[-1].source, before + ahead[begin:end], fetched=is_new))
        items = batch.take_items()
        del items[begin:end]
        return Batch(passes, in_hand, items, fetched=batch.fetched and bool(passes), asked_in=batch.asked_in)

    def _take_evaluation(self, head: list[Item], batch: Batch) -> list[Item]:
        """Books evaluation at the start of a step that has no batch; returns the rest: rule 5.

        With a batch in hand a generator's forwards are for the critic, which trains first.
        """
        first, looks = self._early_forwards(head, several=not batch.passes and batch.left_over is None)
        if not looks:
            return head
        before, after = self._evaluate_forwards(head[:first], looks)
        if any(item[SHOWS] for item in before):
            return before + after + head[first:]
        self._book.apart(before, Activity.OUTSIDE)  # the loop's own code between an update and an evaluation
        return after + head[first:]

    def _early_forwards(self, items: list[Item], *, several: bool = False) -> tuple[int, list[int]]:
        """Returns where training begins, and the forwards before it, without gradients, of the model that begins it.

        Those of a part that has never trained, as of a frozen encoder, are none of them. ``several``: of any model that
        then trains.
        """
        first = next((n for n, item in enumerate(items) if item[SHOWS] in LIKELY_TRAINING), len(items))
        then = items[first:] if several else items[first : first + 1]
        trains = {(item[STACK][-1], item[PART]) for item in then if item[SHOWS] == FORWARD_GRAD}
        models, looks = {model for model, _ in trains}, []
        inside = {inner for outer, inner in self._inside if outer in models}
        models |= inside
        self._trainable |= trains | {(model, 0) for model in inside}
        for place in range(first):
            if items[place][SHOWS] in FORWARDS and (model := items[place][STACK][-1]) in models:
                part = items[place][PART]
                if not part or not self._trainable.isdisjoint({(model, part), (model, 0)}):
                    looks.append(place)
        return first, looks

    def _evaluate_forwards(self, items: list[Item], forwards: list[int]) -> tuple[list[Item], list[Item]]:
        """Books evaluation without a loader, from the first forward to the end of the last; returns what is before and after it.

        Every forward is a step of its own, up to the next.
        """
        first, end = forwards[0], self._end_of_forward(items, forwards[-1])
        begins = [n for n in range(first, end) if items[n][SHOWS] in FORWARDS]
        for begin, following in zip(begins, [*begins[1:], end], strict=True):
            self._book.evaluate(items[begin:following], EVAL, -1, ())
        return items[:first], items[end:]

    def _first_wait(self, items: list[Item], passes: list[Pass]) -> int:
        """Returns the place of the first wait for one of the passes; 0 where there is none."""
        loaders = {each.source for each in passes}
        return next((n for n, item in enumerate(items) if not loaders.isdisjoint(item[STACK])), 0)

    def _end_of_forward(self, items: list[Item], begin: int) -> int:
        """Returns the place after the end of the forward that begins there; the end of all if it has not ended."""
        kinds, calls = self._sources.kinds, ((n, items[n][CALL]) for n in range(begin, len(items)))
        return next((n + 1 for n, call in calls if call and kinds[call[0]] == FORWARD), len(items))

    # -- what waits --------------------------------------------------------------------------------

    def split_row(self, batch: Batch) -> None:
        """Splits what may have been one batch into several."""
        if batch.row and self._purpose(batch.row[-1].loader) <= TRAIN:
            self.in_hand = batch.row[-1].loader
        self.waiting += batch.row
        batch.row = []

    def _wait(self, batch: Batch) -> None:
        """Lets a batch wait in which no model ran.

        Of a long pass of such batches all but the first few are one, so that few wait.
        """
        last = self.waiting[-1] if len(self.waiting) > LOOKS_AHEAD else batch
        if last is not batch and last.passes == batch.passes and all(map(self.is_unused, batch.passes)):
            last.items += batch.items
        else:
            self.waiting.append(batch)

    def book_waiting(self, *, ended_too: bool, unused_too: bool) -> None:
        """Books waiting batches whose phase is known by now.

        Args:
            ended_too: forwards of passes that have ended as well, although a backward may come yet.
            unused_too: batches of such passes that no model has used, although what follows may use them.
        """
        kept: list[Batch] = []
        full = sum(len(batch.items) for batch in self.waiting) > MOST_ITEMS
        overdue = len(self.waiting) - LOOKS_AHEAD
        trains = self.trained or self._decision.source in _BY_TRAINING
        for place, batch in enumerate(self.waiting):
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
        self.waiting = kept

    def _awaits_backward(self, batch: Batch) -> bool:
        """Returns whether it trains with a batch that an evaluation has interrupted, and whose pass may end before its backward."""
        is_of_other = self.in_hand >= 0 and not batch.passes
        return is_of_other and any(item[SHOWS] == FORWARD_GRAD for item in batch.items)

    def _is_given_up(self, batch: Batch) -> bool:
        """Returns whether the loop has given up a step before its backward: of a pass that has trained, or where the model raised."""
        if batch.cached:
            return all(each.caches for each in batch.passes)
        return batch.shown == TRAIN or batch.has_raised

    def close(self) -> None:
        """Books the batches that wait: nothing more comes."""
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
        """Takes time while no batch is open."""
        if self.began:
            self._book.apart((item,), Activity.OUTSIDE)
        else:
            self.lead.append(item)
            if len(self.lead) > MOST_ITEMS:
                self._drop_lead()

    def begin(self) -> None:
        """Ends the preparation, if this is the first request or computation."""
        if not self.began:
            self._drop_lead()
            self.began = True

    def _book_batch(self, batch: Batch, phase: int) -> None:
        """Books a batch under a phase; -1: by what is known of its loader."""
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
            book = self._book.evaluate if batch.fetched else self._book.beside  # a batch is a step once
            book(batch.items, phase, batch.loader, batch.loaders)

    def _book_own_code(self, items: list[Item], batch: Batch, *, of_step: bool) -> None:
        """Counts time in which no model ran: as the step's, or as outside of all steps."""
        if of_step:
            self._train(items, batch)
        else:
            self._book.apart(items, Activity.OUTSIDE)

    def _train(self, items: list[Item], batch: Batch) -> None:
        """Books training time. It waits while the step has neither a batch nor a model's work: it may be of none."""
        self._book.open.asked |= batch.asked_in is self._book.open
        if self._book.open.duration_ns or len(self.lead) > MOST_ITEMS or any(map(self._is_evidence, items)):
            self.flush_lead()
            self._book.train(items, batch.loader, batch.loaders)
        else:
            self.lead += items

    def _is_evidence(self, item: Item) -> bool:
        return bool(item[SHOWS]) or item[BATCH] is not None or self._book.waits(item)

    def flush_lead(self) -> None:
        """Books what waited: it was of the step."""
        lead, self.lead = self.lead, []
        if lead:
            self._book.train(lead, -1, (-1,))

    def _drop_lead(self) -> None:
        """Books what waited: it was of no step."""
        lead, self.lead = self.lead, []
        self._book.apart(lead, Activity.OUTSIDE if self.began else Activity.INIT)
