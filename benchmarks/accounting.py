"""Processor time of the accounting per edge."""

from __future__ import annotations

import random
import time
from typing import TYPE_CHECKING

from benchmarks.child import STEPS_PER_S
from benchmarks.edges import EDGES_PER_STEP, STAGES_PER_STEP
from benchmarks.processes import RANKS
from benchmarks.row import Row
from otel_train.accounting.account import ThreadAccount
from otel_train.accounting.types import SourceTable
from otel_train.aggregation.run_state import SLICE_EDGES
from otel_train.recording.events import Ending, Flag, Instrumented, Op, SourceKind, code

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.plan import Plan

WHAT = (
    f"One thread's account is fed 10,000 synthetic steps of {STAGES_PER_STEP} stages, and returns closed steps after every"
    f" {SLICE_EDGES} edges; once ordinary training, once training that fetches ahead, zips two loaders and evaluates every"
    " ten steps. Every ask carries the number of its iterator. Processor time of the thread, by the edges."
)
STEPS = 10_000

_TRAINING = int(Flag.GRAD | Flag.TRAINING)
_EVALUATE_EVERY = 10
_EVALUATION_BATCHES = 3
_SYNTHETIC_US = {SourceKind.FORWARD: 100, SourceKind.BACKWARD: 200}


class Edges:
    """Edges of one thread on a synthetic clock; every pass over a loader has its own iterator number."""

    def __init__(self) -> None:
        self.sources: list[Instrumented] = []
        self.times: list[int] = []
        self.codes: list[int] = []
        self._now_ns = 1
        self._random = random.Random(0)
        self._passes = 0

    def source(self, kind: SourceKind, name: str) -> int:
        """Returns the number of a source."""
        source = Instrumented(kind, name)
        if source not in self.sources:
            self.sources.append(source)
        return self.sources.index(source)

    def edge(self, op: Op, source: int, flags: int = 0, *, payload: int = 0, after_us: int = 5) -> None:
        """Writes one edge, then advances the clock by ``after_us`` plus up to 1 µs."""
        self.times.append(self._now_ns)
        self.codes.append(code(op, source, flags, payload))
        self._now_ns += after_us * 1000 + self._random.randrange(1000)

    def run(self, kind: SourceKind, name: str, flags: int = 0) -> None:
        """Writes the start and the end of a stage."""
        source = self.source(kind, name)
        self.edge(Op.BEGIN, source, flags, after_us=_SYNTHETIC_US.get(kind, 50))
        self.edge(Op.END, source)

    def begin_pass(self, loader: str) -> int:
        """Writes the creation of an iterator; returns its number."""
        self._passes += 1
        source = self.source(SourceKind.DATA, loader)
        self.edge(Op.BEGIN, source, int(Flag.START), payload=self._passes)
        self.edge(Op.END, source, int(Flag.START))
        return self._passes

    def ask(self, loader: str, number: int) -> None:
        """Writes the fetch of a batch of 16 samples; an end stores the number of samples plus 1."""
        source = self.source(SourceKind.DATA, loader)
        self.edge(Op.BEGIN, source, payload=number, after_us=50)
        self.edge(Op.END, source, payload=17)

    def end_pass(self, loader: str, number: int) -> None:
        """Writes the end of the loader and of its iterator."""
        source = self.source(SourceKind.DATA, loader)
        self.edge(Op.BEGIN, source, payload=number)
        self.edge(Op.STOP, source, payload=Ending.EPOCH_END)
        self.edge(Op.PASS_END, source, payload=number)

    def train(self) -> None:
        """Writes the four stages of a step that follow the fetch."""
        self.run(SourceKind.FORWARD, "model", _TRAINING)
        self.run(SourceKind.BACKWARD, "backward")
        self.run(SourceKind.STAGE, "clip")
        self.run(SourceKind.OPTIMIZER, "SGD")

    def evaluate(self) -> None:
        """Writes one short evaluation."""
        number = self.begin_pass("val")
        for _ in range(_EVALUATION_BATCHES):
            self.ask("val", number)
            self.run(SourceKind.FORWARD, "model")
        self.end_pass("val", number)


def ordinary(steps: int) -> Edges:
    """Writes one pass over one loader."""
    edges = Edges()
    number = edges.begin_pass("train")
    for _ in range(steps):
        edges.ask("train", number)
        edges.train()
    edges.end_pass("train", number)
    return edges


def mixed(steps: int) -> Edges:
    """Writes steps of which a third fetches a batch ahead and a third zips two loaders, with evaluations in between."""
    edges = Edges()
    number, ahead, other = (edges.begin_pass(name) for name in ("train", "train", "labels"))
    for step in range(steps):
        kind = step % (3 * _EVALUATE_EVERY) // _EVALUATE_EVERY
        edges.ask("train", ahead if kind == 1 else number)
        if kind == 1 and not step % _EVALUATE_EVERY:
            edges.ask("train", ahead)
        elif kind == 2:
            edges.ask("labels", other)
        edges.train()
        if not (step + 1) % _EVALUATE_EVERY:
            edges.evaluate()
    return edges


def run(plan: Plan) -> list[Row]:
    """Measures ordinary and mixed training, and computes the load of a node from the former."""
    times = plan.times(15, 3)
    plain, mix = (
        tuple(_us_per_edge(edges) for _ in range(times)) for edges in (ordinary(STEPS), mixed(STEPS))
    )
    per_s = EDGES_PER_STEP * RANKS * STEPS_PER_S
    return [
        Row(
            name="accounting.edge",
            what="accounting: one edge, steps of five stages (a draft of the rules took 1.3 µs)",
            unit="µs",
            values=plain,
        ),
        Row(
            name="accounting.edge.mixed",
            what="accounting: one edge, with evaluation between, batches fetched ahead, zipped loaders",
            unit="µs",
            values=mix,
        ),
        Row(
            name="accounting.core",
            what=f"accounting: {RANKS} ranks x {STEPS_PER_S} steps/s, a part of the processor time of their agent",
            unit="% of a core",
            values=tuple(us * per_s / 1e6 * 100 for us in plain),
        ),
    ]


def _us_per_edge(edges: Edges) -> float:
    account = ThreadAccount(0, SourceTable().extend(edges.sources))
    slices = _slices(edges.times, edges.codes)
    begun = time.thread_time_ns()
    for times, codes in slices:
        account.feed(times, codes)
        account.take()
    account.close(edges.times[-1])
    return (time.thread_time_ns() - begun) / len(edges.times) / 1e3


def _slices(times: Sequence[int], codes: Sequence[int]) -> list[tuple[Sequence[int], Sequence[int]]]:
    starts = range(0, len(times), SLICE_EDGES)
    return [(times[n : n + SLICE_EDGES], codes[n : n + SLICE_EDGES]) for n in starts]
