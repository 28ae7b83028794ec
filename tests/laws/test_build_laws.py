"""Reading what workers measure, while they write, never yields half a value; what was missed is counted."""

from __future__ import annotations

import itertools
import multiprocessing
import os
from types import SimpleNamespace
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from otel_train.instrumentation.dataloader_workers import BuildTimeReader
from otel_train.instrumentation.worker_timer import (
    LONGEST_NS,
    ROW_WORDS,
    SEQUENCE,
    SLOTS,
    TIME_BITS,
    SharedRows,
    time_fetches,
)

BUILDS = 200_000


def fetchers(clock: list[int]) -> Any:
    """What time_fetches wraps: each fetch takes as long as its index says."""

    class Fetcher:
        def fetch(self, index: int) -> int:
            clock[0] += index
            return index

    return SimpleNamespace(_MapDatasetFetcher=Fetcher)


def worker_of(row: memoryview) -> Any:
    """A worker's fetch; it takes as many nanoseconds as its argument says."""
    now = [0]
    module = fetchers(now)
    time_fetches(row, module, clock=lambda: now[0])
    return module._MapDatasetFetcher().fetch


@settings(deadline=None, max_examples=50)
@given(
    st.lists(
        st.one_of(
            st.tuples(st.integers(0, 1), st.integers(0, 2 * SLOTS)),
            st.just("read"),
        )
    )
)
def test_every_build_is_read_once_or_missed_once(turns: list[Any]) -> None:
    """A percentile of what happened to be there is a guess."""
    rows = SharedRows(2)
    times = BuildTimeReader(rows)
    workers = [worker_of(rows.row(worker)) for worker in range(2)]
    expected: list[list[int]] = [[], []]
    number = seen = missed = 0
    for turn in [*turns, "read"]:
        if turn != "read":
            worker, count = turn
            for _ in range(count):
                number += 1
                workers[worker](number)
                expected[worker].append(number)
            continue
        builds = times.read()
        kept = [part[-SLOTS:] for part in expected]
        in_turns = [ns for turn in itertools.zip_longest(*kept) for ns in turn if ns is not None]
        assert builds.build_ns.tolist() == in_turns
        assert builds.missed == sum(max(0, len(part) - SLOTS) for part in expected)
        seen, missed = seen + len(builds.build_ns), missed + builds.missed
        expected = [[], []]
    assert seen + missed == number


@given(st.integers(0, 2 * SEQUENCE), st.integers(0, 2 * LONGEST_NS))
def test_a_build_of_any_number_and_length_reads_back(before: int, lasted: int) -> None:
    """Numbers begin again after half a million batches; five hours for one batch are as many as a word holds."""
    rows = SharedRows(1)
    times = BuildTimeReader(rows)
    times._taken[0] = before
    built = before + 1
    row = rows.row(0)
    row[1 + before % SLOTS] = (built & SEQUENCE) << TIME_BITS | min(lasted, LONGEST_NS)
    row[0] = built

    assert times.read().build_ns.tolist() == [min(lasted, LONGEST_NS)]


def test_a_count_that_shows_before_its_slot_waits_for_the_slot() -> None:
    """Another processor may see the two stores in the other order."""
    rows = SharedRows(1)
    times = BuildTimeReader(rows)
    row = rows.row(0)
    row[0] = 2
    row[1] = 1 << TIME_BITS | 5

    assert times.read().build_ns.tolist() == [5]
    row[2] = 2 << TIME_BITS | 6
    assert times.read().build_ns.tolist() == [6]


def test_a_slot_that_was_overwritten_while_it_was_read_is_missed() -> None:
    """The value of a later batch must not count twice."""
    rows = SharedRows(1)
    times = BuildTimeReader(rows)
    row = rows.row(0)
    row[1] = SLOTS + 1 << TIME_BITS | 7
    row[2] = 2 << TIME_BITS | 6
    row[0] = 2

    builds = times.read()

    assert (builds.build_ns.tolist(), builds.missed) == ([6], 1)


def build_in_a_process(rows: SharedRows) -> None:
    """Ends without running what its parent would run at exit."""
    fetch = worker_of(rows.row(0))
    for number in range(1, BUILDS + 1):
        fetch(number)
    os._exit(0)


def test_a_reader_in_another_process_sees_whole_builds_only() -> None:
    """The law again, with a worker that does not wait."""
    rows = SharedRows(1)
    times = BuildTimeReader(rows)
    worker = multiprocessing.get_context("fork").Process(target=build_in_a_process, args=(rows,))
    worker.start()
    seen: list[np.ndarray] = []
    missed = 0
    while worker.is_alive():
        builds = times.read()
        seen.append(builds.build_ns)
        missed += builds.missed
    worker.join()
    last = times.read()
    numbers = np.concatenate((*seen, last.build_ns))

    assert worker.exitcode == 0
    assert (np.diff(numbers) > 0).all()
    assert numbers[-1] == BUILDS
    assert len(numbers) + missed + last.missed == BUILDS
    assert rows.row(0)[0] == BUILDS
    assert len(rows.row(0)) == ROW_WORDS
