"""Where time is booked once it is known what it was for: rows, the open step, and what steps are counted by."""

from __future__ import annotations

from array import array
from collections import defaultdict
from dataclasses import dataclass, field
from functools import partial
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
    PASS_END,
    SCALER,
    STOP,
    UPDATES,
    WHOLE,
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
from otel_train.codes import FLAG_SHIFT, OP_MASK, PAYLOAD_SHIFT, Flag, Op

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    Reclaims = Callable[[int, int], Iterable[tuple[Activity, int]]]

_MARK: Final = int(Op.MARK)
_TRAINS: Final = int(Flag.GRAD | Flag.TRAINING) << FLAG_SHIFT

COMPUTES: Final = 1 << FORWARD | 1 << BACKWARD | 1 << GRAD | 1 << OPTIMIZER | 1 << SCALER | 1 << WHOLE
"""Kinds that only a thread that runs models has."""

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
"""Edges held back at most while it is not known what steps are counted by."""


_SIGNS: Final = (
    (StepSource.UPDATE, UPDATES_TO_BE_SURE),
    (StepSource.BACKWARD, BACKWARDS_WITHOUT_UPDATE),
    (StepSource.BATCH, MOST_HELD),
)
"""From the strongest on, and how many of each make sure of it. All but updates are weighed after the end of a pass."""

_NEVER: Final = 1 << 62

_NO_TIMES: Final[partial[dict[int, list[int]]]] = partial(defaultdict, partial(list, (0, 0)))
"""By source: no time yet. No lambda, because an account is pickled for whoever reports a process that is killed."""


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
    """Rows of ``width`` integers, kept flat: they become a table without a look at each. ``add`` puts a row."""

    def __init__(self, width: int) -> None:
        self._flat = array("q")
        self._width = width
        self.add = self._flat.extend

    def table(self, *by: int) -> np.ndarray:
        """int64[rows, width], sorted by the sum of some columns; equal rows in the order they came."""
        rows = np.array(self._flat, dtype=np.int64).reshape(-1, self._width)
        return rows[np.argsort(rows[:, by].sum(axis=1), kind="stable")] if by else rows


class StepBook:
    """Books items under phase, loader, stage and step.

    Args:
        sources: what is known of every source.
        reclaimed: activities that own a part of an interval, whatever stage was open (compiling, a stall): pairs of
            activity and nanoseconds.
        by_step: keep the stages of every step.

    Attributes:
        open: the training step that has not closed.
        backward_seen: a backward has run: losses are told from it, not from stages by hand.
        train_loader: loader of the last training batch; -1 for none.
        now_ns: when a step was marked by hand last.
    """

    def __init__(self, sources: SourceTable, reclaimed: Reclaims, *, by_step: bool) -> None:
        self.open = Step(0)
        self.backward_seen = False
        self.train_loader = -1
        self.now_ns = 0
        self._serial = 0
        self._sources = sources
        self._reclaimed = reclaimed
        self._by_step = by_step
        self._owners: dict[tuple[int, ...], _Owner] = {}
        self._clear()

    def _clear(self) -> None:
        self._steps = _Rows(14)  # serial, and a row of ``StepRows``
        self._step_times: list[tuple[int, int, int]] = []
        self._calls = _Rows(7)
        self._times: dict[tuple[int, int], dict[int, list[int]]] = defaultdict(_NO_TIMES)
        """By phase and loader, and by source: time as the innermost, and time around that of others."""
        self._activity_ns = [0] * len(Activity)
        self._loader_ns, self._batches, self._starts = _Rows(4), _Rows(4), _Rows(4)

    def train(self, items: Sequence[Item], loader: int, loaders: Iterable[int]) -> None:
        """Book training time, which belongs to the open step."""
        if loader >= 0:
            self.train_loader = loader
        self._book(items, (TRAIN, self.train_loader), loaders or (self.train_loader,), step=self.open)

    def evaluate(
        self, items: Sequence[Item], phase: int, loader: int, loaders: Iterable[int], *, step: bool
    ) -> None:
        """Book time outside training. ``step``: it is a step of its own."""
        own = self._next_step(phase, loader) if step else None
        self._book(items, (phase, loader), loaders, step=own)
        if own is not None:
            self._end_step(own, 1)

    def wait(self, items: Sequence[Item], phase: int, loader: int) -> None:
        """Book asks that gave no batch: of no step."""
        self._book(items, (phase, loader))

    def apart(self, items: Sequence[Item], activity: Activity) -> None:
        """Book time in no batch: before the first, outside, in checkpoints."""
        self._book(items, (NO_PHASE, -1), activity=activity)

    def close_step(self, *, counted: bool = True) -> None:
        """The open training step ends with what has been booked."""
        if self.open.started_ns < 0:  # marks by hand with nothing between
            self.open.started_ns = self.open.ended_ns = self.now_ns
        self._end_step(self.open, int(counted))
        self.open = self._next_step(TRAIN, -1)

    def take(self) -> dict[str, object]:
        """Everything booked since the last call, as fields of ``Settled``."""
        steps, calls = self._steps.table(4), self._calls.table(3, 4)  # by their ends
        row_of = {serial: row for row, serial in enumerate([*steps[:, 0].tolist(), self.open.serial])}
        calls[:, 6] = [row_of.get(serial, -1) for serial in calls[:, 6].tolist()]
        times = [
            (source, loader, phase, self_ns, self_ns + around_ns if source >= 0 else 0)
            for (phase, loader), by_source in self._times.items()
            for source, (self_ns, around_ns) in by_source.items()
        ]
        found: dict[str, object] = {
            "steps": StepRows(*np.ascontiguousarray(steps[:, 1:].T)),
            "occurrences": Occurrences(*np.ascontiguousarray(calls.T)),
            "times": StageTimes(*columns(times, 5)),
            "activity_ns": np.array(self._activity_ns, dtype=np.int64),
            "loader_ns": self._loader_ns.table(3),
            "batches": self._batches.table(3),
            "starts": self._starts.table(),
            "step_times": table([(row_of[serial], *time) for serial, *time in self._step_times], 3),
        }
        self._clear()
        return found

    def _end_step(self, step: Step, counted: int) -> None:
        self._steps.add((step.serial, *step.row(counted)))
        self._step_times += [(step.serial, source, ns) for source, ns in step.times.items()]

    def _next_step(self, phase: int, loader: int) -> Step:
        self._serial += 1
        return Step(self._serial, phase, loader)

    def _owner(self, stack: tuple[int, ...]) -> _Owner:
        if len(self._owners) > MOST_OWNERS:
            self._owners.clear()
        kinds, losses = self._sources.kinds, self._sources.losses
        last = stack[-1] if stack else -1
        computes = any(COMPUTES >> kinds[source] & 1 or losses[source] for source in stack)
        found = _Owner(last, last >= 0 and kinds[last] == DATA, computes, stack[:-1])
        self._owners[stack] = found
        return found

    def _book(
        self,
        items: Sequence[Item],
        of: tuple[int, int],
        loaders: Iterable[int] = (),
        *,
        step: Step | None = None,
        activity: Activity | None = None,
    ) -> None:
        """Book items, in the order of time, under all that is a sum of them. ``of``: phase, and loader of the batch."""
        if step is not None and of[1] >= 0:
            step.loader = of[1]
        if not items:
            return
        spent_ns, waited_ns = spent = self._book_stages(items, of, step)
        begun_ns, ended_ns = items[0].begun_ns, items[-1].begun_ns + items[-1].ns
        for loader in (
            set(loaders) if spent_ns else ()
        ):  # two passes of one loader, asked together, are one loader
            if loader >= 0:
                self._loader_ns.add((loader, of[0], spent_ns, ended_ns))
        if step is not None:
            self._add_to_step(step, items, (begun_ns, ended_ns), spent)
        if activity is None and of[0] != TRAIN:
            activity = Activity.EVAL
        if activity is None:
            self._activity_ns[Activity.DATA_WAIT] += waited_ns
            self._activity_ns[Activity.PRODUCTIVE] += spent_ns - waited_ns
        else:
            self._activity_ns[activity] += spent_ns
        if tuple(self._reclaimed(begun_ns, ended_ns)):
            self._reclaim(items, activity)

    def _book_stages(self, items: Sequence[Item], of: tuple[int, int], step: Step | None) -> tuple[int, int]:
        """Book items under their stages; the nanoseconds of all, and of waits."""
        owners, times = self._owners, self._times[of]
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
                self._happened(item, of, step)
                if step is not None:
                    self._happened_in(step, item, spent_ns, waited_ns)
        return spent_ns, waited_ns

    def _reclaim(self, items: Sequence[Item], activity: Activity | None) -> None:
        """Take from the activities what belongs to others, whatever stage was open. None: of training."""
        for item in items:
            waits = Activity.DATA_WAIT if self._owner(item.stack).waits else Activity.PRODUCTIVE
            for reclaimed, ns in self._reclaimed(item.begun_ns, item.begun_ns + item.ns) if item.ns else ():
                self._activity_ns[reclaimed] += ns
                self._activity_ns[waits if activity is None else activity] -= ns

    def _add_to_step(
        self, step: Step, items: Sequence[Item], within: tuple[int, int], spent: tuple[int, int]
    ) -> None:
        step.started_ns = within[0] if step.started_ns < 0 else min(step.started_ns, within[0])
        step.ended_ns = max(step.ended_ns, within[1])
        step.duration_ns += spent[0]
        step.wait_ns += spent[1]
        for item in items if self._by_step else ():
            source = item.stack[-1] if item.stack else -1
            step.times[source] = step.times.get(source, 0) + item.ns

    def _happened(self, item: Item, of: tuple[int, int], step: Step | None) -> None:
        if item.call is not None:
            source, begun_ns, ns, failed = item.call
            loader = source if self._sources.kinds[source] == DATA else of[1]
            self._calls.add(
                (source, loader, of[0], begun_ns, ns, failed, -1 if step is None else step.serial)
            )
        if item.batch is not None:
            source, samples, making_ns, waiting_ns = item.batch
            self._batches.add((source, of[0], samples, item.begun_ns + item.ns))
            if waiting_ns >= 0:
                self._starts.add((source, of[0], making_ns, waiting_ns))

    def _happened_in(self, step: Step, item: Item, spent_ns: int, waited_ns: int) -> None:
        """What has happened in a step, after so much of the time that is being booked."""
        shows, call = item.shows, item.call
        if call is not None and call[3]:
            step.failed += 1
        if item.batch is not None:
            step.fetched = True
            step.samples += max(0, item.batch[1])
        if shows >= TRAINED:
            step.trained = True
        if step is self.open and (shows or (call is not None and self._sources.losses[call[0]])):
            now_ns = step.duration_ns + spent_ns
            self._follow_training(step, item, now_ns, now_ns - step.wait_ns - waited_ns)

    def _follow_training(self, step: Step, item: Item, now_ns: int, worked_ns: int) -> None:
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

    It needs to see more than the first update, because the first mark by hand comes after it: edges are held back
    until ``decided``.
    """

    def __init__(self) -> None:
        self.source = StepSource.UNDECIDED
        self.decided = False
        self._first_ns: dict[StepSource, int] = {}
        self._counts = dict.fromkeys(StepSource, 0)
        self._edges = 0
        self._began_ns = -1
        self._pass_over = False

    def see(self, ns: int, code: int, kind: int) -> None:
        """Take in the next edge. Updates are final but for a mark by hand, which is."""
        op = code & OP_MASK
        if op == _MARK and not code >> PAYLOAD_SHIFT:
            self.mark()
        if self.source in (StepSource.MANUAL, StepSource.UPDATE):
            return
        sign = StepSource.UNDECIDED
        if op == END and UPDATES >> kind & 1:
            sign = StepSource.UPDATE
        elif op == BEGIN:
            self._began_ns = ns if self._began_ns < 0 else self._began_ns
            if kind in (BACKWARD, GRAD):
                sign = StepSource.BACKWARD
            elif kind == FORWARD and code & _TRAINS == _TRAINS:
                sign = StepSource.BATCH
        if sign is not StepSource.UNDECIDED:
            self._counts[sign] += 1
            self._first_ns.setdefault(sign, ns)
        if kind == DATA and op in (STOP, PASS_END):
            self._pass_over = True
        self._edges += 1
        self._weigh(ns)

    def mark(self) -> None:
        """A step was marked by hand."""
        self.source, self.decided = StepSource.MANUAL, True

    @property
    def shows_nothing(self) -> bool:
        """A pass is over in which nothing was trained: what was held back so far is in no training step."""
        return self._pass_over and not any(self._counts.values())

    def give_up_waiting(self) -> None:
        """Nothing more comes: decide by what there is."""
        self._pass_over = self.decided = True
        if self.source not in (StepSource.MANUAL, StepSource.UPDATE):
            self._weigh(_NEVER)

    def _weigh(self, now_ns: int) -> None:
        full = self._edges >= MOST_HELD
        for source, enough in _SIGNS:
            count = self._counts[source]
            if not count:
                continue
            update = source is StepSource.UPDATE
            due = (update or self._pass_over) and now_ns - self._first_ns[source] >= SURE_AFTER_NS
            if (
                due or full or count >= enough or (update and self.decided)
            ):  # a late update overrules the rest
                self.source, self.decided = source, True
            return
        if full or 0 <= self._began_ns <= now_ns - SURE_AFTER_NS:
            self.decided = True
