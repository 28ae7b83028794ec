"""Streams of edges as a training thread would write them, and the account that comes of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from otel_train.accounting.account import ThreadAccount
from otel_train.accounting.types import Activity, ClosedSteps, SourceTable
from otel_train.catalog import PHASES
from otel_train.recording.events import Ending, Flag, Instrumented, Op, SourceKind, code

TRAINING = Flag.GRAD | Flag.TRAINING


class Tape:
    """Edges on a clock that only ``spend`` and the stages move, one nanosecond being the unit of head sums."""

    def __init__(self, *, started_ns: int = 0) -> None:
        self.started_ns = started_ns
        self.now_ns = started_ns
        self.sources: list[Instrumented] = []
        self.times: list[int] = []
        self.codes: list[int] = []
        self._tokens = 0

    def source(self, kind: SourceKind, name: str, phase: str = "") -> int:
        """Number of a source, new or not."""
        source = Instrumented(kind, name, phase)
        if source not in self.sources:
            self.sources.append(source)
        return self.sources.index(source)

    def edge(self, op: Op, source: int, flags: int = 0, payload: int = 0) -> None:
        """Write one edge now."""
        self.times.append(self.now_ns)
        self.codes.append(code(op, source, flags, payload))

    def spend(self, ns: int) -> Tape:
        """Let time pass."""
        self.now_ns += ns
        return self

    def ask(
        self, loader: str = "code", ns: int = 5, *, samples: int = -1, phase: str = "", op: Op = Op.END,
        iterator: int = 0,
    ) -> Tape:  # fmt: skip
        """One ask for a batch, of an iterator with a number."""
        source = self.source(SourceKind.DATA, loader, phase)
        self.edge(Op.BEGIN, source, payload=iterator)
        self.spend(ns)
        failed = Ending.ERROR if op is Op.FAIL else Ending.UNKNOWN
        self.edge(op, source, payload=samples + 1 if op is Op.END else failed)
        return self

    def stop(
        self, loader: str = "code", ns: int = 5, *, phase: str = "", why: Ending = Ending.EPOCH_END,
        iterator: int = 0,
    ) -> Tape:  # fmt: skip
        """An ask that finds the loader at its end."""
        source = self.source(SourceKind.DATA, loader, phase)
        self.edge(Op.BEGIN, source, payload=iterator)
        self.spend(ns)
        self.edge(Op.STOP, source, payload=why)
        return self

    def dispose(self, loader: str, iterator: int = 0, *, phase: str = "") -> Tape:
        """An iterator is gone."""
        self.edge(Op.PASS_END, self.source(SourceKind.DATA, loader, phase), payload=iterator)
        return self

    def start(self, loader: str = "code", ns: int = 3, *, iterator: int = 0) -> Tape:
        """The making of an iterator."""
        source = self.source(SourceKind.DATA, loader)
        self.edge(Op.BEGIN, source, Flag.START, iterator)
        self.spend(ns)
        self.edge(Op.END, source, Flag.START)
        return self

    def run(self, kind: SourceKind, name: str, ns: int, *, flags: int = 0, end: Op = Op.END) -> Tape:
        """A stage with nothing inside."""
        return self.inside(kind, name, self_ns=ns, flags=flags, end=end)

    def forward(self, ns: int = 20, model: str = "model", *, flags: int = TRAINING, part: int = 0) -> Tape:
        """One forward, of a model or of a part of it."""
        source = self.source(SourceKind.FORWARD, model)
        self.edge(Op.BEGIN, source, flags, part)
        self.spend(ns)
        self.edge(Op.END, source)
        return self

    def backward(self, ns: int = 30) -> Tape:
        """One backward."""
        return self.run(SourceKind.BACKWARD, "backward", ns)

    def update(self, ns: int = 7, optimizer: str = "SGD") -> Tape:
        """One step of an optimizer."""
        return self.run(SourceKind.OPTIMIZER, optimizer, ns)

    def begin(self, kind: SourceKind, name: str, *, flags: int = 0) -> Tape:
        """Open a stage."""
        self.edge(Op.BEGIN, self.source(kind, name), flags)
        return self

    def end(self, kind: SourceKind, name: str, *, op: Op = Op.END) -> Tape:
        """Close a stage."""
        self.edge(op, self.source(kind, name))
        return self

    def inside(self, kind: SourceKind, name: str, *, self_ns: int, flags: int = 0, end: Op = Op.END) -> Tape:
        """A stage that takes ``self_ns``."""
        return self.begin(kind, name, flags=flags).spend(self_ns).end(kind, name, op=end)

    def micro(self, loader: str = "code") -> Tape:
        """Ask, forward, backward: 5 + 20 + 30."""
        return self.ask(loader).forward().backward()

    def step(self, loader: str = "code") -> Tape:
        """Ask, forward, backward, update: 5 + 20 + 30 + 7 = 62."""
        return self.micro(loader).update()

    def validate(self, batches: int = 2, loader: str = "val") -> Tape:
        """Some batches without grad, 5 + 11 each, and the end of the loader, 5."""
        for _ in range(batches):
            self.ask(loader).forward(11, flags=0)
        return self.stop(loader)

    def repeat(self, count: int, part: Callable[[Tape], object]) -> Tape:
        """The same edges several times."""
        for _ in range(count):
            part(self)
        return self

    def mark(self, start: int = -1) -> Tape:
        """A manual step boundary."""
        self.edge(Op.MARK, self.source(SourceKind.MARK, "step"), payload=start + 1)
        return self

    def epoch(self, number: int) -> Tape:
        """A manual epoch begins."""
        self.edge(Op.EPOCH, self.source(SourceKind.MARK, "epoch"), payload=number)
        return self

    def epoch_over(self, *, broken: bool = False) -> Tape:
        """It is over."""
        self.edge(Op.EPOCH_END, self.source(SourceKind.MARK, "epoch"), payload=int(broken))
        return self

    def report(self, number: int) -> Tape:
        """A report is asked for."""
        self.edge(Op.REPORT, self.source(SourceKind.MARK, "report"), payload=number)
        return self

    def at(self, name: str, op: Op, token: int) -> Tape:
        """One edge of a stage that can be suspended."""
        self.edge(op, self.source(SourceKind.STAGE, name), payload=token)
        return self

    def piece(self, name: str, ns: int, op: Op, token: int) -> Tape:
        """One piece of a stage that is suspended."""
        return self.at(name, Op.RESUME, token).spend(ns).at(name, op, token)


class StepSeen(NamedTuple):
    """One closed step."""

    phase: str
    loader: str
    duration_ns: int
    counted: int
    failed: int
    samples: int
    started_ns: int
    ended_ns: int


class Call(NamedTuple):
    """One occurrence."""

    source: str
    loader: str
    phase: str
    started_ns: int
    inclusive_ns: int
    failed: int
    step: int
    """Row over the whole run, the open step counting as the next row; -1 for none."""


class Book:
    """Everything that an account closed, over all slices."""

    def __init__(self, sources: Sequence[Instrumented], closed: Sequence[ClosedSteps]) -> None:
        self._sources = sources
        self.closed = list(closed)
        self.updates = sum(part.updates for part in closed)
        self.skipped_updates = sum(part.skipped_updates for part in closed)
        self.said = [tuple(mark) for part in closed for mark in part.said.tolist()]
        self.numbers = [number for part in closed for number in part.steps.number.tolist()]

    def name(self, source: int) -> str:
        """Name of a source; "" for none."""
        return self._sources[source].name if source >= 0 else ""

    def kind(self, source: int) -> SourceKind | None:
        """Kind of a source; None for none."""
        return self._sources[source].kind if source >= 0 else None

    def steps(self, phase: str = "") -> list[StepSeen]:
        """Closed steps, of one phase if given."""
        found = [
            StepSeen(PHASES[p], self.name(loader), duration, counted, failed, samples, started, ended)
            for part in self.closed
            for p, loader, started, ended, duration, counted, failed, samples, *_ in _rows(part.steps)
        ]
        return [step for step in found if phase in ("", step.phase)]

    def durations(self, phase: str = "train") -> list[int]:
        """How long each counted step took."""
        return [step.duration_ns for step in self.steps(phase) if step.counted]

    def partial(self) -> list[int]:
        """How long each partial step took."""
        return [step.duration_ns for step in self.steps() if not step.counted]

    def calls(self, source: str = "") -> list[Call]:
        """Occurrences, of one source if given."""
        return [
            Call(self.name(s), self.name(loader), phase_name(p), started, inclusive, failed, of_run(row))
            for part, of_run in zip(self.closed, self._numbering(), strict=True)
            for s, started, inclusive, failed, loader, p, row in _rows(part.occurrences)
            if source in ("", self.name(s))
        ]

    def count(self) -> dict[str, int]:
        """Occurrences by source."""
        return dict(Counter(call.source for call in self.calls()))

    def self_ns(self, by: str) -> dict[str, int]:
        """Self time by ``owner``, ``loader``, ``phase`` or ``activity``."""
        total: Counter[str] = Counter()
        if by == "activity":
            for part in self.closed:
                total.update({a.name.lower(): int(part.activity_ns[a]) for a in Activity})
        for row in self.times() if by != "activity" else ():
            names = {
                "owner": self.name(row.source),
                "loader": self.name(row.loader),
                "phase": phase_name(row.phase),
            }
            total[names[by]] += row.self_ns
        return {name: ns for name, ns in total.items() if ns}

    def times(self) -> Iterator[TimeRow]:
        """Rows of time by stage."""
        for part in self.closed:
            for row in _rows(part.times):
                yield TimeRow(*row)

    def inclusive_ns(self) -> Counter[str]:
        """Inclusive time by source."""
        total: Counter[str] = Counter()
        for row in self.times():
            total[self.name(row.source)] += row.inclusive_ns
        return total

    def batches(self) -> dict[str, list[tuple[str, int]]]:
        """(phase, samples) of every batch, by loader."""
        found: dict[str, list[tuple[str, int]]] = {}
        for part in self.closed:
            for loader, phase, samples, *_ in part.batches.tolist():
                found.setdefault(self.name(loader), []).append((phase_name(phase), samples))
        return found

    def other_after(self) -> dict[str, int]:
        """Training in no stage, by the source before it."""
        found: dict[str, int] = {}
        for part in self.closed:
            for source, ns in part.other_after.tolist():
                found[self.name(source)] = found.get(self.name(source), 0) + ns
        return found

    def _numbering(self) -> list[_OfRun]:
        """The open step keeps its number until it closes, and evaluation steps that close meanwhile get others."""
        numbering, rows = [], 0
        for part in self.closed:
            numbering.append(_OfRun(part, rows))
            rows += len(part.steps.phase)
        later = -1
        for of_run in reversed(numbering):  # a slice's open step is the first train step that closes later
            of_run.open_row = later
            later = of_run.first_train_row(later)
        return numbering


class _OfRun:
    def __init__(self, part: ClosedSteps, before: int) -> None:
        self._phases = part.steps.phase.tolist()
        self._before = before
        self.open_row = -1

    def first_train_row(self, later: int) -> int:
        return self._before + self._phases.index(0) if 0 in self._phases else later

    def __call__(self, row: int) -> int:
        if row < 0:
            return -1
        return self._before + row if row < len(self._phases) else self.open_row


class TimeRow(NamedTuple):
    """Time of one source in one phase."""

    source: int
    loader: int
    phase: int
    self_ns: int
    inclusive_ns: int
    step: int


def phase_name(phase: int) -> str:
    """Name of a phase; "" for time outside every batch."""
    return (*PHASES, "")[phase]


def _rows(columns: Sequence[np.ndarray]) -> Iterator[tuple[int, ...]]:
    return zip(*(column.tolist() for column in columns), strict=True)


def account_for(tape: Tape, cuts: Sequence[int] = (), *, ended_ns: int | None = None) -> Book:
    """Account for a tape: take closed steps at every cut."""
    account = ThreadAccount(tape.started_ns, SourceTable().extend(tape.sources))
    closed = []
    bounds = [0, *cuts, len(tape.times)]
    for start, stop in pairwise(bounds):
        account.feed(tape.times[start:stop], tape.codes[start:stop])
        closed.append(account.take())
    closed.append(account.close(tape.now_ns if ended_ns is None else ended_ns))
    return Book(tape.sources, closed)
