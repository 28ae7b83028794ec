"""Where time is booked once it is known what it was for: rows, the open step, and what steps are counted by."""

from __future__ import annotations

from array import array
from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from otel_train.accounting.nesting import (
    BACKWARD,
    BEGIN,
    DATA,
    END,
    FORWARD,
    GRAD,
    OPTIMIZER,
    SCALER,
    STOP,
    UPDATES,
    WHOLE,
    Event,
)
from otel_train.accounting.types import (
    NO_PHASE,
    TRAIN,
    Activity,
    Occurrences,
    SourceTable,
    StageTimes,
    StepRows,
    StepSource,
    columns,
    table,
)
from otel_train.codes import Flag, Op

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    Reclaims = Callable[[int, int], Iterable[tuple[Activity, int]]]

_MARK: Final = int(Op.MARK)
_PASS_END: Final = int(Op.PASS_END)
_TRAINS: Final = int(Flag.GRAD | Flag.TRAINING)

COMPUTES: Final = 1 << FORWARD | 1 << BACKWARD | 1 << GRAD | 1 << OPTIMIZER | 1 << SCALER | 1 << WHOLE
"""Kinds that only a thread that runs models has."""

_STEP_ENDED: Final = 4
"""Column of a closed step's end, after its serial."""

NOT_SHOWN, FORWARD_GRAD, FORWARD_FROZEN, FORWARD_NO_GRAD, TRAINED, UPDATE = range(6)
"""What an item shows: nothing; that a forward begins, with gradients in training mode, with gradients in evaluation
mode, without gradients; that gradients were made; that an optimizer has updated."""

BACKWARDS_WITHOUT_UPDATE: Final = 64
"""After so many, the run is taken to have no optimizer that can be seen."""

UPDATES_TO_BE_SURE: Final = 8
SURE_AFTER_NS: Final = 5 * 10**9
"""Updates, or time since the first sign, after which the loop is taken to be what it looks like. (The end of an inner
loader is a pass without an update, and the first mark by hand comes after the first update.)"""

MOST_OWNERS: Final = 4096
"""Stacks of open calls that are looked up; beyond that they are worked out anew, so that memory stays bounded."""

MOST_HELD: Final = 16384
"""Events held back at most while it is not known what steps are counted by."""


@dataclass(slots=True)
class Item:
    """Time of one owner, and what happened at its end.

    Attributes:
        stack: calls that count and were open, outermost first.
        begun_ns: when the time began.
        ns: how long it is.
        shows: evidence of what the batch is for.
        source: whose evidence.
        call: of a call that ended here: source, begin, nanoseconds, 1 if it failed.
        batch: of a batch fetched here: source, samples (-1 unknown), nanoseconds to make the iterator and to wait for
            this batch where it is the first of its pass, else -1 and -1.
    """

    stack: tuple[int, ...]
    begun_ns: int
    ns: int
    shows: int = NOT_SHOWN
    source: int = -1
    call: tuple[int, int, int, int] | None = None
    batch: tuple[int, int, int, int] | None = None


@dataclass(slots=True)
class Step:
    """Sums of a step that has not closed."""

    serial: int
    phase: int = TRAIN
    loader: int = -1
    started_ns: int = -1
    ended_ns: int = 0
    duration_ns: int = 0
    failed: int = 0
    samples: int = 0
    wait_ns: int = 0
    loss_ns: int = 0
    losses: int = 0
    training_ns: int = 0
    number: int = -1
    fetched: bool = False
    trained: bool = False
    times: dict[int, int] = field(default_factory=dict)
    loss_from_ns: int = -1
    """Of its time without waits: where the forward began of the loss that is being computed; -1 for none."""
    training_from_ns: int = -1
    """Of its time: where the last update or backward ended, else the first forward began; -1 before that."""

    def row(self, counted: int) -> tuple[int, ...]:
        """As a row of ``StepRows``."""
        return (
            self.phase, self.loader, self.started_ns, self.ended_ns, self.duration_ns, counted, self.failed,
            self.samples, self.wait_ns, self.loss_ns, self.losses, self.training_ns, self.number,
        )  # fmt: skip


class _Owner(NamedTuple):
    """What a stack of open calls comes to: whose time it is, and what is around that."""

    source: int
    waits: bool
    computes: bool
    around: tuple[int, ...]


class _Rows:
    """Rows of integers, kept flat: they become a table without a look at each.

    Args:
        width: integers in a row.

    Attributes:
        add: puts a row.
    """

    def __init__(self, width: int) -> None:
        self._flat = array("q")
        self._width = width
        self.add = self._flat.extend

    def table(self) -> np.ndarray:
        """int64[rows, width]."""
        return np.array(self._flat, dtype=np.int64).reshape(-1, self._width)

    def sorted(self, column: int) -> np.ndarray:
        """The same, by one column; equal rows in the order they came."""
        rows = self.table()
        return rows[np.argsort(rows[:, column], kind="stable")]


def _no_time() -> dict[int, list[int]]:
    return defaultdict(lambda: [0, 0])


def _places(serials: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Where in ``serials`` each of those wanted stands; -1 where it does not."""
    order = np.argsort(serials, kind="stable")
    at = order[np.searchsorted(serials[order], wanted).clip(max=len(serials) - 1)]
    return np.where(serials[at] == wanted, at, -1)


class StepBook:
    """Books items under phase, loader, stage and step.

    Args:
        sources: what is known of every source.
        reclaimed: activities that own a part of an interval, whatever stage was open (compiling, a stall): pairs of
            activity and nanoseconds.
        by_step: keep the stages of every step.

    Attributes:
        open: the training step that has not closed.
        backward_seen: a backward has run, so ``autograd.grad`` is none.
        train_loader: loader of the last training batch; -1 for none.
        now_ns: up to when edges have been worked through.
    """

    def __init__(self, sources: SourceTable, reclaimed: Reclaims, *, by_step: bool) -> None:
        self._by_step = by_step
        self.open = Step(0)
        self.backward_seen = False
        self.train_loader = -1
        self.now_ns = 0
        self._serial = 0
        self._sources = sources
        self._reclaimed = reclaimed
        self._owners: dict[tuple[int, ...], _Owner] = {}
        self._owners_with_backward = False
        self._clear()

    def _clear(self) -> None:
        self._steps = _Rows(14)  # serial, and a row of ``StepRows``
        self._step_times: list[tuple[int, dict[int, int]]] = []
        self._calls = _Rows(7)
        self._times: dict[tuple[int, int], dict[int, list[int]]] = defaultdict(_no_time)
        """By loader and phase, and by source: time as the innermost, and time around that of others."""
        self._activity_ns = [0] * len(Activity)
        self._loader_ns, self._batches, self._starts = _Rows(4), _Rows(4), _Rows(4)

    def train(self, items: Sequence[Item], loader: int, loaders: Iterable[int]) -> None:
        """Book training time, which belongs to the open step."""
        if loader >= 0:
            self.train_loader = loader
        ns = self._book(items, TRAIN, self.train_loader, self.open)
        self._of_loaders(items, ns, TRAIN, loaders or (self.train_loader,))

    def evaluate(
        self, items: Sequence[Item], phase: int, loader: int, loaders: Iterable[int], *, step: bool
    ) -> None:
        """Book time outside training. ``step``: it is a step of its own."""
        own = self._next_step(phase, loader) if step else None
        ns = self._book(items, phase, loader, own)
        self._of_loaders(items, ns, phase, loaders)
        if own is not None:
            self._end_step(own, 1)

    def wait(self, items: Sequence[Item], phase: int, loader: int) -> None:
        """Book asks that gave no batch: of no step."""
        self._book(items, phase, loader, None)

    def apart(self, items: Sequence[Item], activity: Activity) -> None:
        """Book time in no batch: before the first, outside, in checkpoints."""
        self._book(items, NO_PHASE, -1, None, activity=activity)

    def close_step(self, *, counted: bool = True) -> None:
        """The open training step ends with what has been booked."""
        step = self.open
        if step.started_ns < 0:  # marks by hand with nothing between
            step.started_ns = step.ended_ns = self.now_ns
        self._end_step(step, int(counted))
        self.open = self._next_step(TRAIN, -1)

    def take(self) -> dict[str, object]:
        """Everything booked since the last call, as fields of ``Settled``."""
        steps, calls = self._steps.sorted(_STEP_ENDED), self._calls.table()
        calls = calls[np.argsort(calls[:, 3] + calls[:, 4], kind="stable")]
        serials = np.append(steps[:, 0], self.open.serial)
        calls[:, 6] = _places(serials, calls[:, 6])
        times = [
            (source, loader, phase, self_ns, self_ns + around_ns if source >= 0 else 0)
            for (loader, phase), by_source in self._times.items()
            for source, (self_ns, around_ns) in by_source.items()
        ]
        row_of = {serial: row for row, serial in enumerate(serials.tolist())} if self._step_times else {}
        found: dict[str, object] = {
            "steps": StepRows(*np.ascontiguousarray(steps[:, 1:].T)),
            "occurrences": Occurrences(*np.ascontiguousarray(calls.T)),
            "times": StageTimes(*columns(times, 5)),
            "activity_ns": np.array(self._activity_ns, dtype=np.int64),
            "loader_ns": self._loader_ns.sorted(3),
            "batches": self._batches.sorted(3),
            "starts": self._starts.table(),
            "step_times": table(
                [(row_of[serial], *time) for serial, times in self._step_times for time in times.items()], 3
            ),
        }
        self._clear()
        return found

    def _end_step(self, step: Step, counted: int) -> None:
        self._steps.add((step.serial, *step.row(counted)))
        if self._by_step:
            self._step_times.append((step.serial, step.times))

    def _next_step(self, phase: int, loader: int) -> Step:
        self._serial += 1
        return Step(self._serial, phase, loader)

    def _known_owners(self) -> dict[tuple[int, ...], _Owner]:
        if self._owners_with_backward != self.backward_seen or len(self._owners) > MOST_OWNERS:
            self._owners, self._owners_with_backward = {}, self.backward_seen
        return self._owners

    def _owner(self, stack: tuple[int, ...]) -> _Owner:
        kinds = self._sources.kinds
        counted = tuple(s for s in stack if kinds[s] != GRAD) if self.backward_seen else stack
        last = counted[-1] if counted else -1
        computes = any(COMPUTES >> kinds[s] & 1 or self._sources.losses[s] for s in counted)
        found = self._owners[stack] = _Owner(last, last >= 0 and kinds[last] == DATA, computes, counted[:-1])
        return found

    def _book(
        self,
        items: Sequence[Item],
        phase: int,
        loader: int,
        step: Step | None,
        *,
        activity: Activity | None = None,
    ) -> int:
        """Book items; the nanoseconds of all."""
        owners, times = self._known_owners(), self._times[loader, phase]
        spent_ns = waited_ns = 0
        for item in items:
            owner = owners.get(item.stack) or self._owner(item.stack)
            if step is not None and owner.computes and step.training_from_ns < 0:
                step.training_from_ns = step.duration_ns + spent_ns
            ns = item.ns
            if ns:
                spent_ns += ns
                if owner.waits:
                    waited_ns += ns
                times[owner.source][0] += ns
                for source in owner.around:
                    times[source][1] += ns
            if item.shows or item.call is not None or item.batch is not None:
                if step is not None:
                    self._happened_in(step, item, spent_ns, waited_ns)
                self._happened(item, phase, loader, step)
        if step is not None and loader >= 0:
            step.loader = loader
        if items:
            self._sum_up(items, (spent_ns, waited_ns), phase, step=step, activity=activity)
        return spent_ns

    def _sum_up(
        self,
        items: Sequence[Item],
        spent: tuple[int, int],
        phase: int,
        *,
        step: Step | None,
        activity: Activity | None,
    ) -> None:
        """Book the nanoseconds of items, and those of them that were waits, under activities and under their step."""
        spent_ns, waited_ns = spent
        within = min([item.begun_ns for item in items]), max([item.begun_ns + item.ns for item in items])
        if step is not None:
            self._add_to_step(step, items, within, spent)
        if activity is None and phase == TRAIN:
            self._activity_ns[Activity.DATA_WAIT] += waited_ns
            self._activity_ns[Activity.PRODUCTIVE] += spent_ns - waited_ns
        else:
            self._activity_ns[Activity.EVAL if activity is None else activity] += spent_ns
        if tuple(self._reclaimed(*within)):
            self._reclaim(items, phase, activity)

    def _of_loaders(self, items: Sequence[Item], ns: int, phase: int, loaders: Iterable[int]) -> None:
        for loader in set(loaders) if ns else ():  # two passes of one loader, asked together, are one loader
            if loader >= 0:
                self._loader_ns.add((loader, phase, ns, items[-1].begun_ns + items[-1].ns))

    def _reclaim(self, items: Sequence[Item], phase: int, activity: Activity | None) -> None:
        """Take from the activities what belongs to others, whatever stage was open."""
        for item in items:
            lost = activity
            if lost is None and phase != TRAIN:
                lost = Activity.EVAL
            elif lost is None:
                lost = Activity.DATA_WAIT if self._owner(item.stack).waits else Activity.PRODUCTIVE
            for reclaimed, ns in self._reclaimed(item.begun_ns, item.begun_ns + item.ns) if item.ns else ():
                self._activity_ns[reclaimed] += ns
                self._activity_ns[lost] -= ns

    def _add_to_step(
        self, step: Step, items: Sequence[Item], within: tuple[int, int], spent: tuple[int, int]
    ) -> None:
        begun_ns, ended_ns = within
        if step.started_ns < 0 or begun_ns < step.started_ns:
            step.started_ns = begun_ns
        step.ended_ns = max(step.ended_ns, ended_ns)
        step.duration_ns += spent[0]
        step.wait_ns += spent[1]
        for item in items if self._by_step else ():
            source = self._owner(item.stack).source
            step.times[source] = step.times.get(source, 0) + item.ns

    def _happened(self, item: Item, phase: int, loader: int, step: Step | None) -> None:
        if item.call is not None:
            self._call(item.call, loader, phase, step)
        if item.batch is not None:
            source, samples, making_ns, waiting_ns = item.batch
            self._batches.add((source, phase, samples, item.begun_ns + item.ns))
            if waiting_ns >= 0:
                self._starts.add((source, phase, making_ns, waiting_ns))

    def _call(self, call: tuple[int, int, int, int], loader: int, phase: int, step: Step | None) -> None:
        source, begun_ns, ns, failed = call
        kind = self._sources.kinds[source]
        if kind == GRAD and self.backward_seen:
            return
        of = source if kind == DATA else loader
        serial = -1 if step is None else step.serial
        self._calls.add((source, of, phase, begun_ns, ns, failed, serial))

    def _happened_in(self, step: Step, item: Item, spent_ns: int, waited_ns: int) -> None:
        """What has happened in a step, after so much of the time that is being booked."""
        if item.call is not None:
            step.failed += item.call[3]
        if item.batch is not None:
            step.fetched = True
            step.samples += max(0, item.batch[1])
        if item.shows >= TRAINED:
            step.trained = True
        if step is self.open:
            now_ns = step.duration_ns + spent_ns
            self._training(step, item, now_ns, now_ns - step.wait_ns - waited_ns)

    def _training(self, step: Step, item: Item, now_ns: int, worked_ns: int) -> None:
        """See ``StepRows.training_ns`` and ``StepRows.loss_ns``; the step's time up to now, and without waits."""
        shows, call = item.shows, item.call
        if FORWARD_GRAD <= shows <= FORWARD_NO_GRAD:
            step.training_from_ns = now_ns if step.training_from_ns < 0 else step.training_from_ns
            step.loss_from_ns = worked_ns if step.loss_from_ns < 0 else step.loss_from_ns
            return
        loss_ns = call[2] if call is not None and self._sources.losses[call[0]] else -1
        if shows >= TRAINED or loss_ns >= 0:
            if step.training_from_ns >= 0:
                step.training_ns += now_ns - step.training_from_ns
            step.training_from_ns = now_ns
        if shows == TRAINED:
            alone_ns = call[2] if call is not None else 0
            step.loss_ns += worked_ns - step.loss_from_ns if step.loss_from_ns >= 0 else alone_ns
            step.losses += 1
            step.loss_from_ns = -1
        elif shows == UPDATE:
            step.loss_from_ns = -1
        elif loss_ns >= 0 and not self.backward_seen:
            step.loss_ns += loss_ns
            step.losses += 1


class StepSourceDecision:
    """Finds what steps are counted by: marks by hand, else updates, else backwards, else batches.

    It needs to see more than the first update, because the first mark by hand comes after it: events are held back
    until ``decided``.
    """

    def __init__(self) -> None:
        self.source = StepSource.UNDECIDED
        self.decided = False
        self._first_ns: dict[StepSource, int] = {}
        self._counts = dict.fromkeys(StepSource, 0)
        self._events = 0
        self._began_ns = -1
        self._pass_over = False

    def see(self, event: Event) -> None:
        """Take in the next event."""
        source = self.source
        if source is StepSource.MANUAL or (source is StepSource.UPDATE and event.op != _MARK):
            return  # by updates it stays, unless a mark by hand comes
        sign = self._sign(event)
        if sign is StepSource.MANUAL:
            self.source, self.decided = StepSource.MANUAL, True
            return
        if sign is not StepSource.UNDECIDED:
            self._counts[sign] += 1
            self._first_ns.setdefault(sign, event.ns)
        if event.kind == DATA and event.op in (STOP, _PASS_END):
            self._pass_over = True
        if self._began_ns < 0 and event.op == BEGIN:
            self._began_ns = event.ns
        self._events += 1
        if source is not StepSource.UPDATE:
            self._weigh(event.ns)

    @property
    def shows_nothing(self) -> bool:
        """A pass is over in which nothing was trained: what was held back so far is in no training step."""
        return self._pass_over and not any(self._counts.values())

    def give_up_waiting(self) -> None:
        """Nothing more comes: decide by what there is."""
        self._pass_over = True
        self._weigh(None)
        self.decided = True

    def _sign(self, event: Event) -> StepSource:
        if event.op == _MARK:
            return StepSource.UNDECIDED if event.payload else StepSource.MANUAL
        if event.op == END and event.outermost and UPDATES >> event.kind & 1:
            return StepSource.UPDATE
        if event.op != BEGIN or not event.counts:
            return StepSource.UNDECIDED
        if event.kind in (BACKWARD, GRAD):
            return StepSource.BACKWARD
        trains = event.kind == FORWARD and event.flags & _TRAINS == _TRAINS
        return StepSource.BATCH if trains else StepSource.UNDECIDED

    def _weigh(self, now_ns: int | None) -> None:
        if self.source is StepSource.MANUAL:
            return
        full = self._events >= MOST_HELD
        for source, enough, needs_pass in (
            (StepSource.UPDATE, UPDATES_TO_BE_SURE, False),
            (StepSource.BACKWARD, BACKWARDS_WITHOUT_UPDATE, True),
            (StepSource.BATCH, MOST_HELD, True),
        ):
            count = self._counts[source]
            if not count:
                continue
            if needs_pass and count < enough and not self._pass_over and not full:
                return
            later = (
                self.decided and source is StepSource.UPDATE
            )  # an update that comes late overrules the rest
            sure = count >= enough or full or later or now_ns is None
            if not sure and now_ns is not None:
                sure = now_ns - self._first_ns[source] >= SURE_AFTER_NS
            if sure:
                self.source, self.decided = source, True
            return
        if full or (now_ns is not None and 0 <= self._began_ns <= now_ns - SURE_AFTER_NS):
            self.decided = True
