"""What holds for the summary of any stream of edges: the laws that ``otel-train validate`` demands of every run."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st

from otel_train.agent.summary import summary_values
from otel_train.bottleneck.dataloader import LoaderFacts
from otel_train.datamodel import Anchor
from otel_train.recording.events import SourceKind
from tests.laws.test_account_laws import actions, cuts_of, fractions, garbage, program, raw
from tests.support.edges import Tape
from tests.support.runs import run_state
from tests.support.summary_laws import laws_of

TICK_NS = 1_000_003
"""What the nanosecond of a tape lasts here: times that no rounding hides. Every edge takes one more."""

NS_PER_S = 10**9


def summary_of(tape: Tape, cuts: Sequence[int] = (), *, tail_ns: int = 0, others: Sequence[Tape] = ()) -> Any:
    """What a session would say at its end; each tape is of a thread of its own, all with the same sources."""
    started_ns = tape.started_ns * TICK_NS
    run = run_state(Anchor(10**18, started_ns), stall_after_s=1e9)
    run.learn(tape.sources)
    for thread, each in enumerate((tape, *others)):
        times = np.array(each.times, dtype=np.int64) * TICK_NS + np.arange(1, len(each.times) + 1)
        codes = np.array(each.codes, dtype=np.int64)
        places = [0, *(cuts if each is tape else ()), len(times)]
        for first, last in pairwise(places):
            part = slice(first, last)
            run.feed(thread, times[part], codes[part], name=f"thread {thread}", main=thread == 0)
    ended_ns = max(each.now_ns * TICK_NS + len(each.times) for each in (tape, *others)) + tail_ns
    run.close(ended_ns)
    loaders = {
        source.name: LoaderFacts(workers=0) for source in tape.sources if source.kind is SourceKind.DATA
    }
    wall_s = (ended_ns - started_ns) / NS_PER_S
    edges = summary_values(run.totals, wall_s=wall_s, source=run.step_source, loaders=loaders)
    return {"state": "finished", "training_threads": run.training_threads, "ranks": None, **edges}


@settings(deadline=None, max_examples=300)
@given(actions, fractions, st.integers(0, 5))
@example(["ask of a pass", "ask other", "epoch", "gap", "stop"], [], 0)
def test_the_summary_of_any_loop_is_lawful(names: list[str], at: list[float], tail: int) -> None:
    """Whatever a loop does and however it is sliced, what is shown of it agrees with itself."""
    tape = program(names)

    assert laws_of(summary_of(tape, cuts_of(tape, at), tail_ns=tail * TICK_NS)) == []


@settings(deadline=None, max_examples=300)
@given(garbage, fractions, st.integers(0, 5))
@example([(0, 17), (0, 17), (0, 81), *[(0, 1)] * 8, (0, 33), (1, 83)], [], 0)
def test_the_summary_of_torn_edges_is_lawful(
    pairs: list[tuple[int, int]], at: list[float], tail: int
) -> None:
    """Hooks get lost, raise and nest in unforeseen ways; values may then be of less, and still agree."""
    tape = raw(pairs)

    assert laws_of(summary_of(tape, cuts_of(tape, at), tail_ns=tail * TICK_NS)) == []


@settings(deadline=None, max_examples=100)
@given(garbage, garbage)
def test_the_summary_of_several_threads_is_lawful(
    one: list[tuple[int, int]], other: list[tuple[int, int]]
) -> None:
    """Rows of threads overlap; that is no fault, and what holds for each row holds for theirs."""
    assert laws_of(summary_of(raw(one), others=[raw(other)])) == []
