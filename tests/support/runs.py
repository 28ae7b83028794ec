"""The state of a run as tests begin it, and one that follows tapes."""

from __future__ import annotations

from typing import Any

import numpy as np

from otel_train.aggregation.run_state import RunState
from otel_train.aggregation.spans import Ids, SamplingRules
from otel_train.datamodel import Anchor, Span
from tests.support.edges import Tape

ANCHOR = Anchor(unix_ns=10**18, clock_ns=0)
KEEP_ALL = SamplingRules(warmup_steps=1 << 20, every_steps=1, slow_factor=2.0, per_s=1e12, burst=1 << 20)
KEEP_NONE = KEEP_ALL._replace(warmup_steps=0, every_steps=1 << 40)


def run_state(
    anchor: Anchor = ANCHOR, *, rank: int = 0, rules: SamplingRules = KEEP_NONE, stall_after_s: float = 300.0
) -> RunState:
    """A run that begins at the anchor's instant."""
    return RunState(
        anchor.clock_ns, anchor=anchor, ids=Ids("run-1", 0, rank), rules=rules, stall_after_s=stall_after_s
    )


class Run:
    """An account that follows the tapes of several threads."""

    def __init__(self, rules: SamplingRules = KEEP_ALL, *, stall_after_s: float = 300.0) -> None:
        self.account = run_state(rules=rules, stall_after_s=stall_after_s)
        self._sources: list[Any] = []
        self._read: dict[int, int] = {}
        self.spans: list[Span] = []
        self.events: list[Any] = []

    def feed(self, tape: Tape, *, main: bool = True, name: str = "MainThread", slice_: int = 10**6) -> Run:
        """Read what is new on a tape, in slices of so many edges."""
        first = self._read.get(id(tape), 0)
        shift = self._shift(tape)
        self.account.learn(self._sources)
        for at in range(first, len(tape.times), slice_):
            stop = min(at + slice_, len(tape.times))
            codes = [self._moved(word, shift) for word in tape.codes[at:stop]]
            times = np.array(tape.times[at:stop], dtype=np.int64)
            self.account.feed(id(tape), times, np.array(codes, dtype=np.int64), name=name, main=main)
        self._read[id(tape)] = len(tape.times)
        self._drain()
        return self

    def close(self, at_ns: int) -> Run:
        """The end."""
        self.account.close(at_ns)
        self._drain()
        return self

    def named(self, name: str) -> list[Span]:
        return [span for span in self.spans if span.name == name]

    def _drain(self) -> None:
        spans, events = self.account.spans.drain()
        self.spans += spans
        self.events += events

    def _shift(self, tape: Tape) -> list[int]:
        for source in tape.sources:
            if source not in self._sources:
                self._sources.append(source)
        return [self._sources.index(source) for source in tape.sources]

    @staticmethod
    def _moved(word: int, places: list[int]) -> int:
        return word & ~(0xFFF << 4) | places[word >> 4 & 0xFFF] << 4
