"""Books time whose phase is known: rows, the open step. Decides how the steps of a thread are counted."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING, Final, TypeAlias

from otel_train.accounting.nesting import BACKWARD, COMPUTES_BY_KIND, DATA, FORWARD, GRAD, GRADIENTS, UPDATES
from otel_train.accounting.types import NO_PHASE, TRAIN, Activity, Gathered, SourceTable, StepRows, StepSource
from otel_train.recording.events import (
    BEGIN,
    FLAG_SHIFT,
    MARK,
    OP_MASK,
    PASS_END,
    PAYLOAD_SHIFT,
    SOURCE_MASK,
    SOURCE_SHIFT,
    STOP,
    Flag,
)

if TYPE_CHECKING:
    from otel_train.accounting.types import ClosedSteps, Home

    Reclaims = Callable[[int, int], Iterable[tuple[Activity, int]]] | None

_TRAINS: Final = int(Flag.GRAD | Flag.TRAINING) << FLAG_SHIFT


# Evidence that an item gives. Integers of the module: items are many, and reading a name of a class takes ten times as long.
NOTHING, FORWARD_GRAD, FORWARD_FROZEN, FORWARD_NO_GRAD, FORWARD_CACHED, GRADIENTS_MADE, UPDATED = range(7)
"""None; the start of a forward with gradients in training mode, with gradients in evaluation mode, without gradients in
evaluation mode, without gradients in training mode; the end of a backward; the end of an update."""

FORWARDS: Final = (FORWARD_NO_GRAD, FORWARD_FROZEN, FORWARD_CACHED, FORWARD_GRAD)
"""Evidence of the start of a forward, indexed by its flags ``Flag.GRAD`` and ``Flag.TRAINING``."""

TRAINING: Final = (GRADIENTS_MADE, UPDATED)
LIKELY_TRAINING: Final = (GRADIENTS_MADE, UPDATED, FORWARD_GRAD)

_GOES_ON: Final = 1 << DATA | 1 << FORWARD | GRADIENTS
"""Kinds whose start may show that the next batch has begun."""
SURE_AFTER: Final = {StepSource.UPDATE: 8, StepSource.BACKWARD: 300}
SURE_AFTER_NS: Final = 5 * 10**9
"""Updates or backwards, and nanoseconds since the first of them, after which steps are counted by them. Not earlier: an inner
loader has passes without an update, and the first manual mark comes after the first update."""

MOST_HELD: Final = 16384
"""Most events that are held while it is not known how steps are counted."""

_PRODUCTIVE: Final = Activity.PRODUCTIVE
_IN_TRAINING: Final = (int(_PRODUCTIVE), int(Activity.DATA_WAIT))
"""Activities of training time outside of stage ``data``, and in it."""


Call: TypeAlias = "tuple[int, int, int, int] | None"
"""A call that ended: source, begin, nanoseconds, 1 if it failed."""

Fetched: TypeAlias = "tuple[int, int, int, int] | None"
"""A batch that a loader returned: source, samples (-1 unknown), nanoseconds to make the iterator (-1 unless it is the first batch
of its pass), nanoseconds of the request."""

Item: TypeAlias = "tuple[tuple[int, ...], int, int, int, Call, Fetched, tuple[Home, ...], int]"
"""An interval with one innermost stage, and what happened at its end. Field 6: homes of the open calls with several intervals,
outermost first; the other fields are named below. A tuple: every event makes one, and an object takes eight times as long."""

STACK: Final = 0
"""Sources of the open calls that count, outermost first; at the start of a forward including that forward."""
BEGUN_NS: Final = 1
"""Start of the interval."""
NS: Final = 2
"""Length of the interval."""
SHOWS: Final = 3
"""Evidence of the phase, from ``NOTHING`` to ``UPDATED``."""
CALL: Final = 4
"""The call that ended at its end."""
BATCH: Final = 5
"""The batch that was fetched at its end."""
PART: Final = 7
"""At the start of a forward: number of the part of the model that is called; 0 for the model itself."""


@dataclass(slots=True)
class Step:
    """Sums of the items that are booked together; for a step they become its row of ``StepRows``.

    Attributes:
        serial: serial number of the step; -1 for time in no step.
        asked: whether a loader was requested in it, for training.
        updated: the optimizers that updated first and last in it, where steps may end without a request.
        fetched: whether a loader has returned a batch for it.
        trained: whether a backward or an update has ended in it.
        loss_from_ns: start of the current loss's first forward, in time of the step without data waits; -1 for none.
        training_from_ns: start of its first computation, in time of the step; -1 before.
    """

    serial: int
    phase: int
    loader: int = -1
    started_ns: int = -1
    ended_ns: int = 0
    duration_ns: int = 0
    counted: int = 1
    failed: int = 0
    samples: int = 0
    wait_ns: int = 0
    loss_ns: int = 0
    losses: int = 0
    training_ns: int = 0
    number: int = -1
    asked: bool = False
    updated: tuple[int, ...] = ()
    fetched: bool = False
    trained: bool = False
    loss_from_ns: int = -1
    training_from_ns: int = -1


_ROW: Final = attrgetter(*StepRows._fields, "serial")


class StepBook:
    """Books items under phase, loader, stage and step.

    Args:
        sources: properties of every source.
        reclaimed: returns the activities that own a part of an interval, whatever stage was open (compiling, a stall), as
            pairs of activity and nanoseconds.
        by_step: keep the stage times of every step.

    Attributes:
        open: the open training step.
        gathered: what was booked since the last ``take``.
        backward_seen: whether a backward has run: losses are then derived from backwards, not from user stages.
        train_loader: loader of the last training batch; -1 for none.
        now_ns: time of the last manual mark of a step.
        closed: number of training steps that have closed and are counted.
        waited_ns: waits for data in these steps.
        closed_from_ns: start of the step of any phase that closed last; 0 before.
    """

    def __init__(self, sources: SourceTable, reclaimed: Reclaims, *, by_step: bool) -> None:
        self.open = Step(0, TRAIN)
        self.gathered = Gathered()
        self.backward_seen = False
        self.train_loader = -1
        self.now_ns = self.closed = self.waited_ns = self.closed_from_ns = 0
        self._serial = 0
        self._stage = -1
        """Outermost stage of the last item that was in a stage; -1 before."""
        self._sources = sources
        self._reclaimed = reclaimed
        self._by_step = by_step

    def train(self, items: Sequence[Item], loader: int, loaders: Iterable[int]) -> None:
        """Books training time, to the open step."""
        self.train_loader = self.open.loader = loader if loader >= 0 else self.train_loader
        self._book(items, self.open, loaders if loader >= 0 else (self.train_loader,), _PRODUCTIVE)

    def evaluate(self, items: Sequence[Item], phase: int, loader: int, loaders: Iterable[int]) -> None:
        """Books a step outside training."""
        self._serial += 1
        step = Step(self._serial, phase, loader)
        self._book(items, step, loaders, Activity.EVAL)
        self.closed_from_ns = step.started_ns
        self.gathered.rows["steps"].extend(_ROW(step))

    def beside(self, items: Sequence[Item], phase: int, loader: int, loaders: Iterable[int] = ()) -> None:
        """Books time of a phase in no step, as of requests that gave no batch."""
        activity = Activity.DATA_WAIT if phase == TRAIN else Activity.EVAL
        self._book_in_none(items, Step(-1, phase, loader), loaders, activity)

    def apart(self, items: Sequence[Item], activity: Activity) -> None:
        """Books time in no batch: before the first one, outside, in checkpoints."""
        self._book_in_none(items, Step(-1, NO_PHASE), (), activity)

    def waits_alone(
        self, items: Iterable[Item], phase: int, loader: int, loaders: Iterable[int] = ()
    ) -> None:
        """Books time of a batch that did not come or was not used: data waits to the phase, other time as outside."""
        kinds = self._sources.kinds
        for item in items:
            if any(kinds[source] == DATA for source in item[STACK]):
                self.beside((item,), phase, loader, loaders)
            else:
                self.apart((item,), Activity.OUTSIDE)

    def close_step(self, *, counted: bool = True) -> None:
        """Closes the open training step."""
        if self.open.started_ns < 0:  # two manual marks without time between them
            self.open.started_ns = self.open.ended_ns = self.now_ns
        self.open.counted = int(counted)
        self.closed += int(counted)
        self.waited_ns += self.open.wait_ns if counted else 0
        self.closed_from_ns = self.open.started_ns
        self.gathered.rows["steps"].extend(_ROW(self.open))
        self._serial += 1
        self.open = Step(self._serial, TRAIN)

    def take(self) -> ClosedSteps:
        """Returns everything booked since the last call."""
        closed, self.gathered = self.gathered.close(self.open.serial), Gathered()
        return closed

    def book_home(self, home: Home, *, over: bool = False) -> None:
        """Books the time, and the end, of a call to its row once that is final. ``over``: nothing further is booked for it."""
        home.known = home.known or over or bool(home.ended and not home.waiting)
        if not home.known:
            return
        phase, loader, serial = home.row
        self.gathered.around[phase, loader, serial if self._by_step else -1][home.source] += home.open_ns
        home.open_ns = 0
        if home.ended:
            begun_ns, ns, failed, ended_in = home.ended
            step = serial if ended_in == serial else -1
            self.gathered.rows["occurrences"].extend((home.source, begun_ns, ns, failed, loader, phase, step))
            home.ended = None

    def waits(self, item: Item) -> bool:
        """Returns whether the item is a wait for data."""
        stack = item[STACK]
        return bool(stack) and self._sources.kinds[stack[-1]] == DATA

    def _book(self, items: Sequence[Item], step: Step, loaders: Iterable[int], activity: Activity) -> None:
        """Books items, in the order of time, in all sums. ``activity``: activity of phases other than train."""
        if not items:
            return
        had_ns, had_waited_ns = step.duration_ns, step.wait_ns
        if step.phase == TRAIN and step.training_from_ns < 0:
            self._find_training(items, step)
        self._book_items(items, step)
        spent_ns, waited_ns = step.duration_ns - had_ns, step.wait_ns - had_waited_ns
        begun_ns, ended_ns = items[0][BEGUN_NS], items[-1][BEGUN_NS] + items[-1][NS]
        if not 0 <= step.started_ns <= begun_ns:
            step.started_ns = begun_ns
        step.ended_ns = max(step.ended_ns, ended_ns)
        if spent_ns:
            for loader in set(loaders):  # two passes of one loader may be requested together
                if loader >= 0:
                    self.gathered.rows["loader_ns"] += loader, step.phase, spent_ns, ended_ns
        working, waiting = _IN_TRAINING if step.phase == TRAIN else (activity, activity)
        activity_ns = self.gathered.activity_ns
        activity_ns[working] += spent_ns - waited_ns
        activity_ns[waiting] += waited_ns
        if self._reclaimed is not None and any(self._reclaimed(begun_ns, ended_ns)):
            for item in items:
                owner = waiting if self.waits(item) else working
                for reclaimed, ns in self._reclaimed(item[BEGUN_NS], item[BEGUN_NS] + item[NS]):
                    activity_ns[reclaimed] += ns
                    activity_ns[owner] -= ns

    def _book_in_none(
        self, items: Sequence[Item], step: Step, loaders: Iterable[int], activity: Activity
    ) -> None:
        """Books items in no step."""
        before_ns = self.gathered.activity_ns[activity]
        self._book(items, step, loaders, activity)
        spent_ns = self.gathered.activity_ns[activity] - before_ns
        if spent_ns:
            self.gathered.rows["apart"] += step.started_ns, step.ended_ns, activity, spent_ns

    def _book_items(self, items: Sequence[Item], step: Step) -> None:
        row = step.phase, step.loader, step.serial if self._by_step else -1
        times, calls = self.gathered.times[row], self.gathered.rows["occurrences"]
        kinds, losses = self._sources.kinds, self._sources.losses
        duration_ns, stage, after = step.duration_ns, self._stage, self.gathered.other_after[step.phase]
        for stack, begun_ns, ns, shows, call, batch, homes, _ in items:
            if ns:
                duration_ns += ns
                times[stack] += ns
                if not stack:
                    after[stage] += ns
                else:
                    stage = stack[0]
                    if kinds[stack[-1]] == DATA:
                        step.wait_ns += ns
            if batch is not None:
                # If it was fetched inside a request to another loader, it is a part of that loader's batch.
                phase = step.phase if call is not None else NO_PHASE
                self._book_fetched(batch, begun_ns + ns, phase, step)
            if call is not None:
                if not homes or homes[-1].source != call[0]:
                    calls += call
                    calls += step.loader if batch is None else batch[0], step.phase, step.serial
                step.failed += call[3]
            if shows or (call is not None and losses[call[0]]):
                step.duration_ns = duration_ns
                self._follow(shows, 0 if call is None else call[2], step)
            for home in homes:
                self.gathered.around[row][home.source] -= ns
                self._book_at_home(home, ns, call, step)
        step.duration_ns, self._stage = duration_ns, stage

    def _find_training(self, items: Sequence[Item], step: Step) -> None:
        """Records where the first computation of a step begins, if it is in these items."""
        kinds, losses, at_ns = self._sources.kinds, self._sources.losses, step.duration_ns
        for stack, _, ns, *_ in items:
            if stack and (COMPUTES_BY_KIND[kinds[stack[-1]]] or losses[stack[-1]]):
                step.training_from_ns = at_ns
                return
            at_ns += ns

    def _book_at_home(self, home: Home, ns: int, call: Call, step: Step) -> None:
        if call is not None and call[0] == home.source:
            home.ended = (*call[1:], step.serial)
        home.waiting -= 1
        home.open_ns += ns
        known, named = home.row[0], step.loader >= 0
        if (
            not home.known
            and step.phase != NO_PHASE
            and (known == NO_PHASE or (known == step.phase and named))
        ):
            home.row, home.known = (step.phase, step.loader, step.serial), named
        self.book_home(home)

    def _book_fetched(self, batch: tuple[int, int, int, int], got_ns: int, phase: int, step: Step) -> None:
        source, samples, making_ns, waiting_ns = batch
        self.gathered.rows["batches"] += source, phase, samples, got_ns, making_ns, waiting_ns
        if phase != NO_PHASE:
            step.fetched = True
            step.samples += max(0, samples)

    def _follow(self, shows: int, lasted_ns: int, step: Step) -> None:
        """Follows training time and losses of a step by the evidence of an item, or by the end of a user stage ``loss``."""
        if step.phase != TRAIN:
            return
        now_ns, worked_ns = step.duration_ns, step.duration_ns - step.wait_ns
        if step.training_from_ns < 0:
            step.training_from_ns = now_ns
        if NOTHING < shows < GRADIENTS_MADE:  # a forward begins
            if step.loss_from_ns < 0:
                step.loss_from_ns = worked_ns
            return
        step.training_ns = now_ns - step.training_from_ns
        if shows == GRADIENTS_MADE or (not shows and not self.backward_seen):
            derived = shows and step.loss_from_ns >= 0
            step.loss_ns += worked_ns - step.loss_from_ns if derived else lasted_ns
            step.losses += 1
        if shows:
            step.loss_from_ns, step.trained = -1, True


class StepSourceDecision:
    """Decides how steps are counted: by manual marks, else updates, else backwards, else batches.

    The first manual mark comes after the first update, so more events are needed than that update: they are held until
    ``decided``.

    Attributes:
        source: how steps are counted, as far as it is known.
        decided: enough events were seen. Stronger evidence can still change ``source``.
        final: only a manual mark can still change ``source``.
        manual: steps are marked manually.
    """

    def __init__(self) -> None:
        self.source = StepSource.UNDECIDED
        self.decided = self.final = self.manual = False
        self._counts = dict.fromkeys(StepSource, 0)
        self._first_ns: dict[StepSource, int] = {}
        self._began_ns = self._asked = -1
        self._pass_over = self._training_pass_over = False
        self._training: set[int] = set()
        """Loaders whose last batch was trained on."""

    def observe(self, ns: int, code: int, kind: int) -> None:
        """Processes the next event."""
        op, source = code & OP_MASK, code >> SOURCE_SHIFT & SOURCE_MASK
        if op == MARK and not code >> PAYLOAD_SHIFT:
            self.mark()
        elif op == BEGIN:
            self._began_ns = ns if self._began_ns < 0 else self._began_ns
            if kind == DATA:
                self._asked = source
            elif UPDATES >> kind & 1:  # at its start, because its closure may run many backwards
                self._count(StepSource.UPDATE, ns)
            elif kind in (BACKWARD, GRAD):
                self._count(StepSource.BACKWARD, ns)
            elif kind == FORWARD and code & _TRAINS == _TRAINS:
                self._count(StepSource.BATCH, ns)
            if not self.decided and _GOES_ON >> kind & 1:  # not an update: it may follow the end of a pass
                self._weigh(ns, asks=kind == DATA)
        elif kind == DATA and op in (STOP, PASS_END):
            self._pass_over = True
            self._training_pass_over |= source in self._training
        elif kind == DATA:  # its training may follow the end of its pass: ``next(iter(loader))``
            self._training.discard(source)

    def mark(self) -> None:
        """Records that a step was marked manually."""
        self.source, self.decided, self.final, self.manual = StepSource.MANUAL, True, True, True

    def decide(self) -> None:
        """Decides by the evidence so far: it suffices, or no more can come."""
        self.decided = True
        if not self.final:
            self.source = self._strongest
            self.final = self.source is StepSource.UPDATE

    @property
    def shows_nothing(self) -> bool:
        """Whether a pass has ended without any training: the events held so far are in no training step."""
        return self._pass_over and not self._first_ns

    @property
    def _strongest(self) -> StepSource:
        return min(self._first_ns, default=StepSource.UNDECIDED)

    def _count(self, sign: StepSource, ns: int) -> None:
        self._counts[sign] += 1
        self._training.add(self._asked)
        self._first_ns.setdefault(sign, ns)
        self._weigh(ns)

    def _weigh(self, now_ns: int, *, asks: bool = False) -> None:
        """Decides if the evidence suffices. Without updates it does after many backwards, or at a request after a training pass.

        Before that request the loop may use a batch that was fetched ahead, and update.
        """
        sign = self._strongest
        long_ago = 0 <= self._first_ns.get(sign, self._began_ns) <= now_ns - SURE_AFTER_NS
        if sign is StepSource.UPDATE:
            due = long_ago or self.decided  # a late update overrules the rest
        else:
            due = long_ago and (sign is StepSource.UNDECIDED or (asks and self._training_pass_over))
        if due or self._counts[sign] >= SURE_AFTER.get(sign, MOST_HELD):
            self.decide()
