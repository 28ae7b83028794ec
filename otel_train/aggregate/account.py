"""The account of one thread: every instant of it belongs to one owner, one phase and at most one step.

docs/reference/loop.md defines the step. Here it is a run of training units; which unit is the last of its
step is known once the next ask, or the next update, has been seen.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from otel_train.aggregate.closing import Closing
from otel_train.aggregate.epochs import epoch_marks, report_marks
from otel_train.aggregate.marks import Marks, marks
from otel_train.aggregate.pairing import Edges, origin
from otel_train.aggregate.passes import Passes
from otel_train.aggregate.phases import Labels, advance, label
from otel_train.aggregate.settling import (
    OpenStep,
    StepColumns,
    batches,
    occurrences,
    settle_steps,
    skipped,
    sums_of,
    tiles,
)
from otel_train.aggregate.steps import EVAL, TRAIN, Settled, SourceColumns, StepRows, StepSource
from otel_train.aggregate.units import Context, Pieces, cut
from otel_train.aggregate.words import (
    FLAG_GRAD,
    FLAG_TRAINING,
    KIND_STAGE,
    OP_MARK,
    OP_STOP,
    OP_SUSPEND,
)

if TYPE_CHECKING:
    from collections.abc import Callable

BACKWARDS_WITHOUT_UPDATE = 64
"""After so many, the run is taken to have no optimizer that can be seen."""

UPDATES_TO_BE_SURE = 8
SURE_AFTER_NS = 5 * 10**9
"""Updates, or time since the first sign, after which the loop is taken to be what it looks like. (The end of
an inner loader is a pass without an update, and the first mark comes after the first update.)"""

MOST_HELD = 16384
"""Edges held back at most while it is not known what steps are counted by."""

_MOST_PIECES = 4096
"""Suspended stages whose time is remembered; one that never ends must not be remembered for ever."""


class ThreadAccount:
    """Settles the time of one thread, slice by slice. The result does not depend on how it was sliced.

    Args:
        started_ns: from when on time is accounted for.
        breathe: called between heavy columns, to let the training thread have the interpreter.
    """

    def __init__(self, started_ns: int, *, breathe: Callable[[], None] = lambda: None) -> None:
        self.source = StepSource.UNDECIDED
        self.settled_ns = started_ns
        self._held = origin(started_ns)
        self._context = Context(breathe=breathe)
        self._open = OpenStep()
        self._closing = Closing(breathe)
        self._passes = Passes()
        self._updated_ns = started_ns
        self._pieces: dict[int, int] = {}
        self._breathe = breathe

    @property
    def held(self) -> int:
        """Edges not settled yet."""
        return len(self._held.times)

    def feed(self, edges: Edges, columns: SourceColumns) -> Settled | None:
        """Take the next slice; what it settles, or None when it must wait for more."""
        held = self._held.followed_by(edges)
        found = marks(held)
        self._breathe()
        if not self._decide(held, found, final=False):
            self._held = held
            return None
        settled = self._settle(held, found, columns, final=False)
        if settled is None:
            self._held = held
        return settled

    def close(self, at_ns: int, columns: SourceColumns) -> Settled:
        """Settle everything up to ``at_ns``. What is left of a step is partial."""
        held = self._held.followed_by(origin(max(at_ns, int(self._held.times[-1]))))
        found = marks(held)
        self._decide(held, found, final=True)
        settled = self._settle(held, found, columns, final=True)
        assert settled is not None  # at the end nothing more is waited for
        return settled._replace(endings=np.concatenate((settled.endings, self._passes.close(at_ns))))

    def _decide(self, held: Edges, found: Marks, *, final: bool) -> bool:
        """Find what steps are counted by. Whether the edges can be settled now."""
        if self.source is StepSource.MANUAL:
            return True
        waits = not final and len(held.times) <= MOST_HELD
        if found.mark.any():
            self.source = StepSource.MANUAL
        elif self.source is not StepSource.UPDATE and found.update.any():
            if waits and _too_early(held, found.update, UPDATES_TO_BE_SURE):
                return False
            self.source = StepSource.UPDATE
        return self.source is not StepSource.UNDECIDED or self._without_update(held, found, waits=waits)

    def _without_update(self, held: Edges, found: Marks, *, waits: bool) -> bool:
        """No update so far: after a pass, or enough backwards, none is to be expected."""
        backwards = found.backward & found.begin
        both = FLAG_GRAD | FLAG_TRAINING
        trains = found.forward & found.begin & ((held.flags & both) == both)
        pass_over = bool(found.stop.any()) or not waits
        if backwards.any() and (pass_over or np.count_nonzero(backwards) >= BACKWARDS_WITHOUT_UPDATE):
            if waits and _too_early(held, backwards, BACKWARDS_WITHOUT_UPDATE):
                return False
            self.source = StepSource.BACKWARD
        elif pass_over and trains.any():
            if waits and _too_early(held, trains, MOST_HELD):
                return False
            self.source = StepSource.BATCH
        return pass_over or self.source is not StepSource.UNDECIDED

    def _settle(self, edges: Edges, found: Marks, columns: SourceColumns, *, final: bool) -> Settled | None:
        pieces = cut(edges, found, self.source, self._context, final=final)
        self._breathe()
        labels = label(edges, found, pieces, self._context, columns=columns)
        if labels.waits and not final and len(edges.times) <= MOST_HELD:
            return None
        self._breathe()
        closes = self._closing.closes(edges, pieces, labels, self.source, final=final)
        self._breathe()
        sums = sums_of(edges, found, pieces)
        self._breathe()
        steps = settle_steps(sums, pieces, labels, closes=closes, held=self._open)
        numbered = _numbered(edges, pieces, closes, steps.rows)
        idle = final and self._idle(found, pieces, labels, steps)
        self._open = _with_work(found, pieces, labels, closes, left=steps.open)
        rows = self._with_partial(steps.rows) if final else steps.rows
        self._breathe()
        settled = self._settled(
            edges, found, (pieces, labels), steps._replace(rows=rows), columns=columns, idle=idle
        )
        self._breathe()
        advance(self._context, edges, found, pieces, labels=labels)
        last = int(pieces.first[-1])
        self._held = edges.part(last).copy()
        self.settled_ns = int(edges.times[last])
        return settled._replace(numbered=numbered)

    def _settled(
        self, edges: Edges, found: Marks, units: tuple[Pieces, Labels], steps: StepColumns,
        *, columns: SourceColumns, idle: bool,
    ) -> Settled:  # fmt: skip
        pieces, labels = units
        last = int(pieces.first[-1])
        calls, at = occurrences(edges, found, pieces, labels, row=steps.row)
        self._add_pieces(edges, found, last, (at, calls.inclusive_ns))
        self._breathe()
        selves = tiles(edges, pieces, labels, steps.row, kinds=columns.kinds, idle=idle)
        self._breathe()
        updates = np.flatnonzero(found.update[: last + 1])
        settled = Settled(
            steps.rows,
            calls,
            selves,
            batches(edges, found, pieces, labels),
            *self._passes.settle(edges, found, pieces, labels),
            edges.sources[: last + 1][found.failed_ask[: last + 1]],
            len(updates),
            skipped(edges, found, last, self._updated_ns),
            None,
            epoch_marks(edges, found, last),
            report_marks(edges, found, last),
        )
        if len(updates):
            self._updated_ns = int(edges.times[updates[-1]])
        return settled

    def _idle(self, found: Marks, pieces: Pieces, labels: Labels, steps: StepColumns) -> bool:
        """Whether the last unit is work after the last update, of which nothing came before the close."""
        if len(pieces.first) < 2 or not (self._context.trained or labels.trained.any()):  # noqa: PLR2004 - one is open
            return False
        begin, end = int(pieces.first[-2]), int(pieces.first[-1])
        if labels.phase[-2] == EVAL:  # sampling: a forward of no loader
            return bool(labels.asked[-2] < 0 and not pieces.solo[-2])
        if labels.phase[-2] != TRAIN or steps.row[-1] != len(steps.rows.phase):
            return False
        return not (self._open.backwards or (found.backward & found.begin)[begin:end].any())

    def _with_partial(self, rows: StepRows) -> StepRows:
        """At the close: what is left is timed, not counted. Time in which nothing was fetched is no step."""
        left = self._open
        self._open = OpenStep()
        if not (left.fetched or left.backwards):
            return rows
        row = (
            TRAIN, left.loader, left.started_ns, left.ended_ns, left.duration_ns, 0, left.failed, left.samples
        )  # fmt: skip
        return StepRows(*[np.append(column, value) for column, value in zip(rows, row, strict=True)])

    def _add_pieces(
        self, edges: Edges, found: Marks, last: int, calls: tuple[np.ndarray, np.ndarray]
    ) -> None:
        """Occurrences that ran in pieces last as long as their pieces together."""
        at, inclusive = calls
        stage = (edges.kinds == KIND_STAGE) & found.close & edges.counted & (edges.ops != OP_STOP)
        if not stage.any():
            return
        for entry in np.flatnonzero((stage & (edges.payloads > 0))[: last + 1]).tolist():
            token = int(edges.payloads[entry])
            if edges.ops[entry] == OP_SUSPEND:
                piece = int(edges.times[entry] - edges.begun_ns[entry])
                self._pieces[token] = self._pieces.pop(token, 0) + piece
                if len(self._pieces) > _MOST_PIECES:
                    del self._pieces[next(iter(self._pieces))]
            else:
                inclusive[np.searchsorted(at, entry)] += self._pieces.pop(token, 0)


def _too_early(held: Edges, signs: np.ndarray, enough: int) -> bool:
    """Whether what the first signs suggest may still be overturned: by a mark, by an update."""
    at = np.flatnonzero(signs)
    return bool(len(at) < enough and held.times[-1] - held.times[at[0]] < SURE_AFTER_NS)


def _with_work(
    found: Marks, pieces: Pieces, labels: Labels, closes: np.ndarray, *, left: OpenStep
) -> OpenStep:
    """Note whether a backward ran in the open step, and whether it has a batch."""
    closing = np.flatnonzero(closes)
    mine = (labels.phase == TRAIN) & ~pieces.solo
    mine[-1] = False
    mine[: int(closing[-1]) if len(closing) else 0] = False
    ran = bool(mine[pieces.of_edge[found.backward & found.begin]].any())
    fetched = bool(mine[pieces.of_event[found.got]].any())
    return left._replace(backwards=left.backwards or ran, fetched=left.fetched or fetched)


def _numbered(edges: Edges, pieces: Pieces, closes: np.ndarray, rows: StepRows) -> tuple[int, int] | None:
    """The last number set by hand, and the row of the first step that it holds for."""
    last = int(pieces.first[-1])
    named = np.flatnonzero((edges.ops[: last + 1] == OP_MARK) & (edges.payloads[: last + 1] > 0))
    named = named[named > 0]
    if not len(named) or len(closes) < 2:  # noqa: PLR2004 - one unit is open
        return None
    steps = np.cumsum(closes)[:-1]
    step = int(steps[min(int(pieces.of_edge[named[-1]]), len(steps) - 1)])
    trained = np.flatnonzero(rows.phase == TRAIN)
    row = int(trained[step]) if step < len(trained) else len(rows.phase)
    return row, int(edges.payloads[named[-1]]) - 1
