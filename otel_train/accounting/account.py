"""The account of one thread: takes one edge at a time, and gives what is settled."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np

from otel_train.accounting.nesting import (
    BACKWARD,
    BEGIN,
    CHECKPOINT,
    DATA,
    END,
    FAIL,
    FORWARD,
    GRAD,
    H2D,
    PASS_END,
    RESUME,
    SCALER,
    STAGE,
    STOP,
    SUSPEND,
    UPDATES,
    Event,
    Nesting,
    OpenStage,
)
from otel_train.accounting.phases import BatchPhases, Boundary, Pass
from otel_train.accounting.steps import (
    COMPUTES,
    FORWARD_FROZEN,
    FORWARD_GRAD,
    FORWARD_NO_GRAD,
    TRAINED,
    UPDATE,
    Item,
    StepBook,
    StepSourceDecision,
)
from otel_train.accounting.types import NOTHING, Activity, EpochMark, Settled, SourceTable, StepSource, table
from otel_train.codes import Ending, Flag, Op

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from otel_train.accounting.steps import Reclaims

_MARK: Final = int(Op.MARK)
_EPOCH: Final = int(Op.EPOCH)
_EPOCH_END: Final = int(Op.EPOCH_END)
_REPORT: Final = int(Op.REPORT)
_START: Final = int(Flag.START)
_WITH_GRAD: Final = int(Flag.GRAD)
_IN_TRAINING: Final = int(Flag.TRAINING)
_ERROR: Final = int(Ending.ERROR)
_DISPOSED: Final = int(Ending.DISPOSED)

MOST_PASSES: Final = 512
"""Passes that are remembered; one that is never ended or disposed of must not be remembered for ever."""

MOST_PIECES: Final = 4096
"""Suspended stages whose time is remembered; for the same reason."""


def _nothing_reclaimed(_: int, __: int) -> Iterable[tuple[Activity, int]]:
    return ()


class ThreadAccount:
    """Settles the time of one thread. The result does not depend on when it is asked for.

    Args:
        started_ns: from when on time is accounted for.
        sources: what is known of every source; grows while it is in use.
        reclaimed: activities that own a part of an interval, whatever stage was open.
        by_step: keep the stages of every step.

    Attributes:
        settling_ns: up to when edges have been worked through.
        computes: the thread runs models, not only a loader.
        asks: it gets batches from a loader itself.
    """

    def __init__(
        self,
        started_ns: int,
        sources: SourceTable,
        reclaimed: Reclaims = _nothing_reclaimed,
        *,
        by_step: bool = False,
    ) -> None:
        self.settling_ns = started_ns
        self._sources = sources
        self._decision = StepSourceDecision()
        self._book = StepBook(sources, reclaimed, by_step=by_step)
        self._phases = BatchPhases(sources, self._book, self._decision)
        self._nesting = Nesting(sources.kinds, self._see)
        self._held: list[Event] = []
        self.computes = False
        self.asks = False
        self._began = False
        self._prelude: list[Item] = []
        self._passes: dict[int, Pass] = {}
        self._starting: Pass | None = None
        self._saving = 0
        self._failed_passes: dict[int, int] = {}
        self._stopped: set[int] = set()
        self._pieces: dict[int, int] = {}
        self._updates_at_scaler = 0
        self._all_updates = 0
        self._clear()

    def _clear(self) -> None:
        self._endings: list[tuple[int, int, int]] = []
        self._failed_asks: list[int] = []
        self._updates = self._skipped = 0
        self._epochs: list[tuple[int, int, int]] = []
        self._reports: list[tuple[int, int]] = []
        self._moved: list[tuple[int, int]] = []

    # -- what is asked of it -----------------------------------------------------------------------

    @property
    def open(self) -> list[OpenStage]:
        """Stages that are open, outermost first."""
        return self._nesting.open

    @property
    def source(self) -> StepSource:
        """What steps are counted by."""
        return self._decision.source

    @property
    def number(self) -> int:
        """Number of the open step, where it was set by hand; else -1."""
        return self._book.open.number

    @property
    def ignored(self) -> int:
        """Ends without a begin."""
        return self._nesting.ignored

    @property
    def held(self) -> int:
        """Edges and items that are not settled yet."""
        return sum(map(len, self._phases.unsettled)) + len(self._prelude) + len(self._held)

    @property
    def settled_ns(self) -> int:
        """Up to when all time has been settled."""
        waiting = [*self._phases.unsettled, self._prelude, *(each.making for each in self._passes.values())]
        return min((items[0].begun_ns for items in waiting if items), default=self.settling_ns)

    def feed(self, times: Sequence[int], codes: Sequence[int]) -> None:
        """Take the next edges: nanoseconds, never falling, and codes."""
        edge = self._nesting.edge
        for ns, code in zip(times, codes, strict=True):
            edge(ns, code)

    def pass_time(self, now_ns: int) -> None:
        """Settle time that no batch claims, up to now: nothing was written since the last edge."""
        if self._held or self._nesting.open or not self._began or self._phases.batch is not None:
            return
        if now_ns > self.settling_ns:
            self._spend(now_ns, ())

    def take(self) -> Settled:
        """Everything settled since the last call."""
        booked: dict[str, Any] = self._book.take()
        settled = NOTHING._replace(
            **booked,
            endings=table(self._endings, 3),
            failed_asks=np.array(self._failed_asks, dtype=np.int64),
            updates=self._updates,
            skipped_updates=self._skipped,
            epochs=table(self._epochs, 3),
            reports=table(self._reports, 2),
            moved=table(self._moved, 2),
        )
        self._clear()
        return settled

    def close(self, at_ns: int) -> Settled:
        """Settle everything up to ``at_ns``. What is left of a step is partial."""
        self._decision.give_up_waiting()
        self._release()
        at_ns = max(at_ns, self.settling_ns)
        self._spend(at_ns, tuple(stage.source for stage in self._nesting.open if stage.counts))
        self._phases.after_stop(-1)
        self._phases.close()
        for item in self._prelude:
            self._book.apart((item,), Activity.INIT)
        for each in self._passes.values():
            self._book.wait(each.making, self._phases.phase_of(each), each.source)
            each.making = []
        self._prelude = []
        self._endings += [(source, _ERROR, at) for source, at in self._failed_passes.items()]
        self._failed_passes = {}
        return self.take()

    # -- one event at a time -----------------------------------------------------------------------

    def _see(self, event: Event) -> None:
        """Hold events back until it is known what steps are counted by."""
        self.computes = self.computes or bool(COMPUTES >> event.kind & 1)
        self.asks = self.asks or event.kind == DATA
        self._decision.see(event)
        if not self._decision.decided:
            self._held.append(event)
            if self._decision.shows_nothing:
                self._release()
            return
        if self._held:
            self._release()
        self._take(event)

    def _release(self) -> None:
        held, self._held = self._held, []
        for event in held:
            self._take(event)

    def _take(self, event: Event) -> None:
        self._book.backward_seen = self._book.backward_seen or (event.kind == BACKWARD and event.op == BEGIN)
        self._spend(event.ns, event.stack)
        op = event.op
        if op <= RESUME:
            self._begin(event)
        elif op <= SUSPEND:
            self._end(event)
        else:
            self._mark(event)

    def _spend(self, ns: int, stack: tuple[int, ...]) -> None:
        """Give the time since the event before to whom it belongs."""
        item = Item(stack, self.settling_ns, max(0, ns - self.settling_ns))
        self.settling_ns = self._book.now_ns = max(ns, self.settling_ns)
        if self._starting is not None and not self._saving:
            self._starting.making.append(item)
        else:
            self._happens(item)

    def _happens(self, item: Item) -> None:
        """Put time, or what happened at an instant, where it belongs."""
        batch = self._phases.batch
        if self._saving:
            self._book.apart((item,), Activity.CHECKPOINT)
        elif batch is not None:
            batch.items.append(item)
        elif self._began:
            self._book.apart((item,), Activity.OUTSIDE)
        else:
            self._prelude.append(item)
            if len(self._prelude) > MOST_PASSES:
                self._book.apart((self._prelude.pop(0),), Activity.INIT)

    def _begin(self, event: Event) -> None:
        kind, phases = event.kind, self._phases
        if kind == DATA:
            if event.counts:
                self._begin_data(event)
            return
        phases.after_stop(-1)
        if COMPUTES >> kind & 1 and not self._saving:
            if event.counts or not event.stack:
                self._begin_training()
                phases.compute()
            if event.counts and kind == FORWARD:
                shows = FORWARD_NO_GRAD
                if event.flags & _WITH_GRAD:
                    shows = FORWARD_GRAD if event.flags & _IN_TRAINING else FORWARD_FROZEN
                self._happens(Item((), event.ns, 0, shows, event.source))
            elif kind == SCALER:
                self._updates_at_scaler = self._all_updates
        elif kind == STAGE and self._decision.source is StepSource.MANUAL and not self._saving:
            self._begin_training()
            if phases.batch is None:
                phases.compute()
        elif kind == CHECKPOINT and event.counts:
            phases.boundary(Boundary.CHECKPOINT)
            self._saving += 1

    def _begin_data(self, event: Event) -> None:
        asked = self._pass_of(event)
        self._phases.after_stop(event.source)
        if event.flags & _START:
            self._starting = asked
            self._end_failed_pass(event.source)
        elif not self._saving:
            self._begin_training()
            self._phases.ask(asked)

    def _end(self, event: Event) -> None:
        if event.kind == DATA:
            self._end_data(event)
            return
        kind, op = event.kind, event.op
        if kind == H2D and op == END and event.payload and event.outermost:
            self._moved.append((event.source, event.payload - 1))
        call = self._call(event)
        shows = 0
        if UPDATES >> kind & 1 and event.outermost and op == END:
            self._updates += 1
            self._all_updates += 1
            shows = UPDATE
            self._phases.update(event.source)
        elif kind == BACKWARD or (kind == GRAD and not self._book.backward_seen):
            if event.counts:
                shows = TRAINED
                if self._decision.source is StepSource.BACKWARD:
                    self._phases.closer(event.source)
        elif kind == SCALER and op == END and self._updates_at_scaler == self._all_updates:
            self._skipped += 1
        if call is not None or shows:
            self._happens(Item((), event.ns, 0, shows, event.source, call))
        if kind == CHECKPOINT and event.counts and self._saving:
            self._saving -= 1

    def _call(self, event: Event) -> tuple[int, int, int, int] | None:
        """The call that has ended; None where it goes on later, or is a part of another."""
        if not event.counts:
            return None
        ns = event.ns - event.begun_ns
        if event.payload and event.kind == STAGE and event.op != STOP:
            if event.op == SUSPEND:
                self._pieces[event.payload] = self._pieces.pop(event.payload, 0) + ns
                if len(self._pieces) > MOST_PIECES:
                    del self._pieces[next(iter(self._pieces))]
            else:
                ns += self._pieces.pop(event.payload, 0)
        if event.op in (STOP, SUSPEND):
            return None
        return event.source, event.begun_ns, ns, int(event.op == FAIL)

    def _end_data(self, event: Event) -> None:
        source, asked = event.source, self._passes.get(self._key(event))
        lasted_ns = event.ns - event.begun_ns
        if event.flags & _START:
            if event.counts:
                self._starting = None
                if asked is not None and event.op == END:
                    asked.making_ns = max(0, asked.making_ns) + lasted_ns
            return
        if event.op == END:
            self._got(event, asked, lasted_ns)
        elif event.op in (STOP, FAIL) and event.counts:
            self._gave_none(event, asked, source)

    def _got(self, event: Event, asked: Pass | None, lasted_ns: int) -> None:
        source = event.source
        self._failed_passes.pop(source, None)
        self._stopped.discard(source)
        making_ns, waiting_ns = -1, -1
        if asked is not None and asked.making_ns >= 0:
            making_ns, waiting_ns, asked.making_ns = asked.making_ns, lasted_ns, -1
        call = (source, event.begun_ns, lasted_ns, 0) if event.counts else None
        fetched = (source, event.payload - 1, making_ns, waiting_ns)
        if event.counts:
            self._phases.fetched(source)
        self._happens(Item((), event.ns, 0, source=source, call=call, batch=fetched))

    def _gave_none(self, event: Event, asked: Pass | None, source: int) -> None:
        if event.op == STOP:
            if source not in self._stopped:  # a loader at its end ends once, however often it is asked
                self._stopped.add(source)
                self._endings.append((source, event.payload, event.ns))
            self._failed_passes.pop(source, None)
        else:
            self._failed_asks.append(source)
            if event.payload == _ERROR:
                self._failed_passes[source] = event.ns
        if asked is not None:
            self._phases.stop(asked)
            if event.op == STOP and (
                not event.begin_payload or asked is not self._phases.left_over
            ):  # nothing of it is left
                self._passes.pop(self._key(event), None)

    def _end_failed_pass(self, source: int) -> None:
        """An exception ended a pass if the loader is then begun anew."""
        at = self._failed_passes.pop(source, None)
        self._stopped.discard(source)
        if at is not None:
            self._endings.append((source, _ERROR, at))

    def _mark(self, event: Event) -> None:
        op, phases = event.op, self._phases
        if op == PASS_END:
            gone = self._passes.pop(event.payload or -1 - event.source, None)
            phases.after_stop(-1)
            if gone is not None and gone.batches and not gone.ended:
                self._endings.append((event.source, _DISPOSED, event.ns))
            phases.dispose(gone)
            if gone is not None and gone.making:
                self._book.wait(gone.making, phases.phase_of(gone), gone.source)
            return
        phases.after_stop(-1)
        if op == _MARK:
            self._mark_step(event)
        elif op == _REPORT:
            phases.boundary(Boundary.SAID)
            self._reports.append((event.ns, event.payload))
        else:
            phases.boundary(Boundary.SAID)
            ended = EpochMark.BROKEN if event.payload else EpochMark.ENDED
            what = EpochMark.BEGUN if op == _EPOCH else ended
            self._epochs.append((event.ns, int(what), event.payload if op == _EPOCH else -1))

    def _mark_step(self, event: Event) -> None:
        if event.payload:
            self._book.open.number = event.payload - 1
            return
        if not self._began:  # nothing before it was a sign of training: all of it was the step
            prelude, self._prelude, self._began = self._prelude, [], True
            self._book.train(prelude, -1, ())
        self._phases.boundary(Boundary.MARK)

    def _begin_training(self) -> None:
        """What came before the first ask or computation was preparation."""
        if not self._began:
            self._began = True
            self._book.apart(self._prelude, Activity.INIT)
            self._prelude = []

    def _key(self, event: Event) -> int:
        return event.begin_payload or -1 - event.source

    def _pass_of(self, event: Event) -> Pass:
        """The pass that an ask belongs to; loaders that do not number their passes have one at a time."""
        key = self._key(event)
        found = self._passes.get(key)
        if found is None:
            while len(self._passes) >= MOST_PASSES:
                over = (number for number, each in self._passes.items() if each.ended)
                gone = self._passes.pop(next(over, next(iter(self._passes))))
                self._book.wait(gone.making, self._phases.phase_of(gone), gone.source)
            found = self._passes[key] = Pass(event.source)
        return found
