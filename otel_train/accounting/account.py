"""Accounting of one thread: processes one event at a time, returns closed steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

from otel_train.accounting.batches import Batches, Boundary, Pass
from otel_train.accounting.nesting import (
    BACKWARD,
    CHECKPOINT,
    COMPUTES,
    COMPUTES_BY_KIND,
    DATA,
    FORWARD,
    GRADIENTS,
    H2D,
    MAY_SPREAD,
    OWN_WORK,
    SCALER,
    STAGE,
    TRAINS,
    UPDATES,
    Lookahead,
    Nesting,
    NotKnownYetError,
    OpenStage,
    takes_gradients,
)
from otel_train.accounting.phases import BatchPhases
from otel_train.accounting.steps import (
    BEGUN_NS,
    FORWARD_GRAD,
    FORWARDS,
    GRADIENTS_MADE,
    MOST_HELD,
    NOTHING,
    UPDATED,
    Call,
    Fetched,
    Item,
    StepBook,
    StepSourceDecision,
)
from otel_train.accounting.types import Activity, ClosedSteps, Home, SourceTable, StepSource
from otel_train.recording.events import (
    END,
    FAIL,
    MARK,
    PASS_END,
    REPORT,
    SOURCE_MASK,
    SOURCE_SHIFT,
    STOP,
    SUSPEND,
    Ending,
    Flag,
)

if TYPE_CHECKING:
    from otel_train.accounting.steps import Reclaims

_START: Final = int(Flag.START)
_HOW: Final = int(Flag.GRAD | Flag.TRAINING)
_HOLDS_BATCH: Final = 1 << FORWARD | GRADIENTS

_COUNTED: Final = [(GRADIENTS | UPDATES | 1 << SCALER | 1 << H2D) >> kind & 1 for kind in range(16)]
"""By kind: whether its end is counted or is evidence of a phase. Shift and mask take four times as long, at every event."""

_REPORTED: Final = -1

MOST_PASSES: Final = 512
"""Passes that are remembered. The end of a pass may never be seen, so older ones are forgotten."""

MOST_PIECES: Final = 4096
"""Suspended user stages that are remembered. The end of a stage may never be seen either."""


class ThreadAccount(Nesting):
    """Accounts the time of one thread. The result does not depend on how its events are divided among calls of ``feed``.

    Args:
        started_ns: start of the accounted time.
        sources: properties of every source; grows while it is in use.
        reclaimed: activities that own a part of an interval (compiling, a stall), whatever stage was open.
        by_step: keep the stage times of every step.
        began: another thread has worked in the run before, so that time before the first request is not ``init``.

    Attributes:
        accounted_ns: end of the time that was placed: the last event that was processed.
    """

    def __init__(
        self,
        started_ns: int,
        sources: SourceTable,
        reclaimed: Reclaims = None,
        *,
        by_step: bool = False,
        began: bool = False,
    ) -> None:
        super().__init__(sources.kinds)
        self.accounted_ns = self.now_ns = started_ns
        self._sources = sources
        self._decision = StepSourceDecision()
        self._book = StepBook(sources, reclaimed, by_step=by_step)
        self._phases = BatchPhases(sources, self._book, self._decision)
        self._batches = Batches(sources, self._book, self._decision, self._phases)
        self._phases.began = began
        self._held: list[tuple[int, int]] = []  # events whose meaning is not known yet
        self._latest = Nesting(sources.kinds)  # open stages after the held events
        self._lookahead: Lookahead | None = None  # set while an optimizer may have raised
        self._raised: bool | None = None  # answer of the lookahead
        self._passes: dict[tuple[int, int], Pass] = {}
        self._starting: Pass | None = None  # the pass whose iterator is being created
        self._in_checkpoint = False
        self._place_instead: Callable[[Item], object] | None = None
        self._ended: dict[int, int] = {}
        """By loader whose pass has ended: ``_REPORTED``, or when a request failed, if the loader may still return a batch."""
        self._suspended: dict[int, tuple[int, Home]] = {}  # by token: time so far, and the row
        self._homes: tuple[Home, ...] = ()  # of open calls with several intervals
        self._updated_in_scaler = False

    # -- state -------------------------------------------------------------------------------------

    @property
    def open(self) -> list[OpenStage]:
        """Open stages, outermost first."""
        return self._latest.stages

    @property
    def computes(self) -> bool:
        """Whether the thread runs models, and does not only read a loader."""
        return bool(self._latest.met & COMPUTES)

    @property
    def marks(self) -> bool:
        """Whether the program marks the ends of steps on the thread."""
        return self._decision.manual

    @property
    def trains(self) -> bool:
        """Whether the thread makes gradients or updates."""
        return bool(self._latest.met & TRAINS)

    @property
    def is_part(self) -> bool:
        """Whether the thread runs a part of another thread's steps: backwards or updates, not both, without forwards or batches.

        So does a thread that marks the ends of steps and computes nothing.
        """
        met = self._latest.met
        if self.marks:
            return not self.computes
        both = bool(met & GRADIENTS) and bool(met & UPDATES)
        return self.trains and not both and not met & OWN_WORK

    @property
    def gives_gradients(self) -> bool:
        """Whether it makes gradients that another thread may apply: it has neither batches nor updates of its own."""
        met = self._latest.met
        return bool(met & GRADIENTS) and not (met & UPDATES or self.asks or self.marks)

    @property
    def takes_gradients(self) -> bool:
        """Whether it gets batches and makes updates, and another thread makes the gradients."""
        return takes_gradients(self._latest.met)

    @property
    def asks(self) -> bool:
        """Whether it requests batches from a loader itself."""
        return bool(self._latest.met >> DATA & 1)

    @property
    def source(self) -> StepSource:
        """The kind of event by which steps are counted."""
        return self._decision.source

    @property
    def number(self) -> int:
        """Number of the open step if it was set manually; else -1."""
        return self._book.open.number

    @property
    def steps_closed(self) -> int:
        """Number of training steps that have closed and are counted."""
        return self._book.closed

    @property
    def final_ns(self) -> int:
        """Instant before which phase and step of all time are known."""
        return min(
            (items[0][BEGUN_NS] for items in self._batches.pending if items), default=self.accounted_ns
        )

    def feed(self, times: Sequence[int], codes: Sequence[int]) -> None:
        """Processes the next events: times in nanoseconds, never falling, and codes.

        Holds events until it is known how steps are counted, and whether an optimizer in which a loader is requested has raised.
        """
        edges, decision, kinds = zip(times, codes, strict=True), self._decision, self._sources.kinds
        if decision.final and self._latest is self:  # nearly always
            edge = self.edge
            try:
                for ns, code in edges:
                    edge(ns, code)
            except NotKnownYetError:
                self._hold(ns, code)
        for ns, code in edges:
            if not decision.final:
                decision.observe(ns, code, kinds[code >> SOURCE_SHIFT & SOURCE_MASK])
            if not (self._latest is self and self._is_accounted(ns, code)):
                self._hold(ns, code)

    def _is_accounted(self, ns: int, code: int) -> bool:
        """Processes an event; returns False if its meaning is not known yet."""
        try:
            self.edge(ns, code)
        except NotKnownYetError:
            return False
        return True

    def _hold(self, ns: int, code: int) -> None:
        """Holds an event, then processes the held ones if their meaning is known now."""
        self._held.append((ns, code))
        if self._lookahead is None:
            self._latest.edge(ns, code)
            if len(self._held) >= MOST_HELD:
                self._decision.decide()
            if self._decision.decided or self._decision.shows_nothing:
                self._release()
        else:
            self._latest = self._lookahead
            self._raised = self._lookahead.raised(ns, code)
            if self._raised is not None:
                self._release()

    def _release(self) -> None:
        """Processes the held events, up to one whose meaning is not known yet."""
        self.met |= self._latest.met
        held, self._held = self._held, []
        for place, (ns, code) in enumerate(held):
            if self._is_accounted(ns, code) or self._lookahead is None:
                continue
            answers = (self._lookahead.raised(*edge) for edge in held[place:])
            self._raised = next((raised for raised in answers if raised is not None), None)
            if self._raised is None:
                self._held, self._latest = held[place:], self._lookahead
                return
            self.edge(ns, code)
        if self._decision.decided:
            self._latest = self

    def has_raised(self, optimizer: OpenStage) -> bool:
        """See ``Nesting.has_raised``."""
        if optimizer.asks:
            return False
        raised, self._raised = self._raised, None
        if raised is None:
            self._lookahead = Lookahead(self._sources.kinds, self, optimizer)
            raise NotKnownYetError
        self._lookahead = None
        optimizer.asks = not raised
        return raised

    def pass_time(self, now_ns: int) -> None:
        """Accounts time outside of batches up to ``now_ns``. No event may have been written since the last one processed."""
        idle = self._phases.began and self._batches.open is None and not self.stages
        if idle and not self._held and now_ns > self.accounted_ns:
            self.now_ns = now_ns
            self._add()

    def take(self) -> ClosedSteps:
        """Returns everything that became final since the last call."""
        return self._book.take()

    def release_all(self) -> None:
        """Processes the held events: no further ones come."""
        self._decision.decide()
        while self._held:
            self._raised = True if self._lookahead is not None else None  # the optimizer will not end
            self._release()

    def close(self, at_ns: int) -> ClosedSteps:
        """Accounts all time up to ``at_ns``. A step that is open then is partial."""
        self.release_all()
        self._latest, self.now_ns = self, max(self.now_ns, at_ns)
        if self._batches.stopped is not None:
            self._go_on_after_stop(-1)
        self._add()
        self._batches.close()
        for each in self._passes.values():
            self._batches.forget(each)
        for source in list(self._ended):
            self._end_failed_pass(source)
        for home in (*self._homes, *(home for _, home in self._suspended.values())):
            self._book.book_home(home, over=True)
        return self.take()

    # -- time --------------------------------------------------------------------------------------

    def _go_on_after_stop(self, begins: int) -> None:
        """Decides whether a series of requests in which a loader was exhausted goes on. ``begins``: source that begins, or -1."""
        self._batches.after_stop(begins)
        self._go_on_computing()

    def goes_on(self, stage: OpenStage) -> None:
        """Gives a call with an interval a ``Home``: it is not over, and further intervals may lie in other batches."""
        if stage.counts and stage.home is None:
            stage.home = Home(stage.source)
            self._homes = (*self._homes, stage.home)

    def _add_inside(self, begins: int = -1) -> None:
        """Places the time since the last event, at whose end all open stages go on. ``begins``: source that begins, or -1."""
        if self._batches.stopped is not None:
            self._go_on_after_stop(begins)
        if self.stages and MAY_SPREAD >> self.stages[-1].kind & 1:
            self.goes_on(self.stages[-1])
        self._add()
        self._batches.limit_items()

    def _add(self, shows: int = NOTHING, call: Call = None, batch: Fetched = None) -> None:
        """Places the time since ``accounted_ns``, and what happened at its end."""
        begun_ns, homes = self.accounted_ns, self._homes
        now_ns = self.accounted_ns = self.now_ns
        for home in homes:
            home.waiting += 1
        (self._place_instead or self._batches.place)(
            (self.stack, begun_ns, now_ns - begun_ns, shows, call, batch, homes, 0)
        )

    def _choose_place(self) -> None:
        """Selects where time goes from here on: to a checkpoint, to the creation of an iterator, or (None) to the open batch."""
        if self._in_checkpoint:
            self._place_instead = lambda item: self._book.apart((item,), Activity.CHECKPOINT)
        else:
            self._place_instead = None if self._starting is None else self._starting.making.append

    # -- a stage begins ----------------------------------------------------------------------------

    def begin(self, ns: int, stage: OpenStage) -> None:
        """See ``Nesting.begin``."""
        kind, batches = stage.kind, self._batches
        if self.stages or batches.stopped is not None:
            self._add_inside(stage.source)
        else:
            self._add()
        if kind == DATA and stage.counts:
            self._begin_data(stage)
        elif kind == CHECKPOINT and stage.counts:
            batches.boundary(Boundary.CHECKPOINT)
            self._in_checkpoint = True
            self._choose_place()
        elif COMPUTES_BY_KIND[kind] and not self._in_checkpoint:
            if stage.counts or not self.stack:
                batches.compute(stage.source, stage.flags)
            if kind == FORWARD:
                self._begin_forward(ns, stage)
            elif kind == SCALER:
                self._updated_in_scaler = False
            elif kind == BACKWARD:
                self._book.backward_seen = True
        else:
            self._begin_other(stage)

    def _begin_forward(self, ns: int, stage: OpenStage) -> None:
        shows = FORWARDS[stage.flags & _HOW]
        if stage.counts:
            item = (*self.stack, stage.source), ns, 0, shows, None, None, (), stage.payload
            (self._place_instead or self._batches.place)(item)
        elif shows == FORWARD_GRAD:
            self._phases.trains_inside(stage.source, self.stack)

    def _begin_data(self, stage: OpenStage) -> None:
        asked = self._pass_of(stage.source, stage.payload)
        if stage.flags & _START:
            self._starting = asked
            self._batches.creates(asked)
            self._choose_place()
            self._end_failed_pass(stage.source)
        elif not self._in_checkpoint:
            call = next((each for each in self.stages if each.counts and _HOLDS_BATCH >> each.kind & 1), None)
            if call is None:
                self._batches.ask(asked)
            else:
                if call.asks:
                    self.goes_on(call)
                self._batches.ask_inside(asked, call)

    def _begin_other(self, stage: OpenStage) -> None:
        self._batches.limit_items()
        if stage.kind != STAGE:
            return
        if stage.counts and stage.payload in self._suspended:
            stage.home = self._suspended[stage.payload][1]
            self._homes = (*self._homes, stage.home)
        if self._decision.manual and not self._in_checkpoint and self._batches.open is None:
            self._batches.compute()

    # -- a stage ends ------------------------------------------------------------------------------

    def end(self, ns: int, stage: OpenStage, op: int, payload: int) -> None:
        """See ``Nesting.end``."""
        if self._batches.stopped is not None:
            self._go_on_after_stop(-1)
        kind, call = stage.kind, None
        if kind == DATA:
            self._end_data(stage, op, payload)
            return
        if kind == STAGE:
            call = self._end_user_stage(stage, op, payload)
        elif stage.counts:
            call = stage.source, stage.begun_ns, ns - stage.begun_ns, 1 if op == FAIL else 0
        shows = self._count_end(stage, op, payload) if _COUNTED[kind] else NOTHING
        home = stage.home
        if home is None:
            self._add(shows, call)
        else:
            later = (each for each in self._homes if each is not home)  # they are still open
            self._homes = (*later, home)
            self._add(shows, call)
            self._homes = self._homes[:-1]
        if stage.asks and kind == FORWARD and self._batches.open is not None:
            self._batches.compute()  # the forward has used the batch that it requested
        elif kind == CHECKPOINT and stage.counts:
            self._in_checkpoint = False
            self._choose_place()

    def _count_end(self, stage: OpenStage, op: int, payload: int) -> int:
        """Counts the end of an update, a ``GradScaler.step`` or a transfer. Returns the evidence of a phase that the end gives."""
        kind, shows = stage.kind, NOTHING
        if GRADIENTS >> kind & 1:
            shows = GRADIENTS_MADE if stage.counts else NOTHING
        elif op == END and kind == SCALER:
            self._book.gathered.skipped_updates += not self._updated_in_scaler
        elif op == END and self.is_outermost(kind):
            if kind != H2D:
                self._book.gathered.updates += 1
                self._updated_in_scaler = True
                shows = UPDATED
            elif payload:
                self._add_row("moved", stage.source, payload - 1)
        if shows and op != FAIL:
            asking = bool(self.stages) and not self.is_outermost(DATA)
            begun = (outer.begun_ns for outer in self.stages if GRADIENTS >> outer.kind & 1)
            self._batches.happened(stage.source, shows, asking=asking, inside_ns=next(begun, -1))
        return shows

    def _end_user_stage(self, stage: OpenStage, op: int, token: int) -> Call:
        """Ends an interval of a user stage; returns the call if it is over. ``token``: payload that links its intervals."""
        ns = self.now_ns - stage.begun_ns
        if op == SUSPEND:
            self.goes_on(stage)
        if token in self._suspended and stage.counts:
            ns += self._suspended.pop(token)[0]
        if op != SUSPEND and stage.counts:
            return stage.source, stage.begun_ns, ns, int(op == FAIL)
        if stage.home is not None:
            self._suspended[token] = ns, stage.home
            if not token or len(self._suspended) > MOST_PIECES:
                _, forgotten = self._suspended.pop(next(iter(self._suspended)) if token else token)
                self._book.book_home(forgotten, over=True)
        return None

    def _end_data(self, stage: OpenStage, op: int, payload: int) -> None:
        source, asked = stage.source, self._pass_of(stage.source, stage.payload)
        starts = stage.flags & _START
        call, batch = None, None
        if op == END and not starts:
            waited_ns = self.now_ns - stage.begun_ns
            batch = source, payload - 1, asked.making_ns, waited_ns
            asked.making_ns = -1
            self._ended.pop(source, None)
            if stage.counts:
                call = source, stage.begun_ns, waited_ns, 0
                self._batches.fetched(asked)
        self._add(NOTHING, call, batch)
        if starts and stage.counts:
            self._starting = None
            self._choose_place()
        elif op in (STOP, FAIL) and stage.counts:
            if payload == Ending.ERROR:
                self._add_row("failed_asks", source)
                self._ended[source] = self.accounted_ns
            elif op == STOP and self._ended.get(source) != _REPORTED:
                # The end of an exhausted loader is reported once, however often it is requested.
                self._ended[source] = _REPORTED
                self._add_row("endings", source, payload, self.accounted_ns)
            self._batches.stop(asked)
            self._go_on_computing()
            used_later = stage.payload and asked is self._phases.left_over
            if op == STOP and not used_later:
                self._batches.forget(self._passes.pop((source, stage.payload)))

    def _go_on_computing(self) -> None:
        """Opens a batch if a pass has ended inside a computing stage (a closure that reads a loader): that time is not outside."""
        if self._batches.open is None and any(COMPUTES >> stage.kind & 1 for stage in self.stages):
            self._batches.compute()

    def _end_failed_pass(self, source: int) -> None:
        """Reports an exception as the end of a pass when its loader is iterated again."""
        failed_ns = self._ended.pop(source, _REPORTED)
        if failed_ns != _REPORTED:
            self._add_row("endings", source, Ending.ERROR, failed_ns)

    def _add_row(self, field: str, *row: int) -> None:
        """Adds a row to a field of ``ClosedSteps``."""
        self._book.gathered.rows[field].extend(row)

    # -- marks, and deleted iterators ---------------------------------------------------------------

    def mark(self, ns: int, op: int, source: int, payload: int) -> None:
        """See ``Nesting.mark``."""
        batches = self._batches
        restarts = op == PASS_END and source == batches.stopped
        self._add_inside(source if restarts else -1)
        if restarts:  # perhaps: the iterator of an exhausted loader is deleted before the next one is created
            batches.stopped = source
        if op == PASS_END:
            gone = self._passes.pop((source, payload), None) or Pass(source, ended=True)
            if gone.batches and not gone.ended:
                self._add_row("endings", source, Ending.DISPOSED, ns)
            batches.dispose(gone)
            self._go_on_computing()
            batches.forget(gone)
        elif op == MARK and payload:
            self._book.open.number = payload - 1
        elif op == MARK:
            self._decision.mark()
            self._book.now_ns = self.accounted_ns
            self._phases.began = True  # time before a first mark is its step, not ``init``
            batches.boundary(Boundary.MARK)
        else:
            if op == REPORT:
                batches.boundary(Boundary.SAID)
            else:
                batches.epoch()
            self._go_on_computing()
            self._add_row("said", ns, op, payload)

    def _pass_of(self, source: int, number: int) -> Pass:
        """Returns the pass of a request. Loaders that do not number their iterators have one pass at a time."""
        found = self._passes.get((source, number))
        if found is None:
            while len(self._passes) >= MOST_PASSES:
                over = (key for key, each in self._passes.items() if each.ended)
                self._batches.forget(self._passes.pop(next(over, next(iter(self._passes)))))
            found = self._passes[source, number] = Pass(source)
        return found
