"""Entries that wait for a report: what the agent finds of them when their process is gone."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from otel_train.instrumentation.logged_values import UserEvent, Value, ValueQueue, unreported_values
from otel_train.instrumentation.timers import unreported_operations
from otel_train.recording.shared_memory import (
    ENTRIES,
    PENDING_BYTES,
    TEXT_BYTES,
    PendingEntries,
    PendingEntry,
    unreported,
)
from tests.support.waiting import in_threads


def memory() -> memoryview:
    """Memory as it comes from the system."""
    return memoryview(bytearray(PENDING_BYTES))


@given(
    st.integers(0, 2 * ENTRIES),
    st.lists(st.sampled_from(["keep", "number", "too long", "report"]), max_size=60),
)
def test_every_entry_since_the_last_report_is_found_once_in_order(first: int, actions: list[str]) -> None:
    """The law: what was kept and not reported is found; nothing else is."""
    shared = memory()
    entries = PendingEntries(shared)
    for _ in range(first):
        entries.add(0, 0)
    entries.report(first)
    waiting: list[PendingEntry] = []
    following = first
    for action in actions:
        if action == "report":
            entries.report(following)
            waiting = []
            continue
        text = "x" * (TEXT_BYTES + (action == "too long"))
        kind = 0 if action == "number" else 7
        number = entries.add(kind, following, 2, -3, value=0.5, text=text)
        if action == "keep":
            waiting.append(PendingEntry(7, (following, 2, -3), 0.5, text))
        following = number + 1

    assert unreported(shared) == (waiting, 0)


@given(st.integers(0, 2 * ENTRIES), st.integers(0, 3 * ENTRIES))
@settings(max_examples=20, deadline=None)
def test_the_last_entries_are_found_and_the_others_counted(reported: int, following: int) -> None:
    """A process that is never asked for its report keeps the last ones. A loss is never silent."""
    shared = memory()
    entries = PendingEntries(shared)
    for number in range(reported + following):
        entries.add(1, number)
    entries.report(reported)

    found, replaced = unreported(shared)
    last = range(reported + max(0, following - ENTRIES), reported + following)
    assert [entry.numbers[0] for entry in found] == [*last]
    assert replaced == following - len(found)


def test_an_entry_of_a_report_that_was_sent_is_not_found_again() -> None:
    """A process can be killed between the two: its agent has the report, and the memory still has the entries."""
    shared = memory()
    queue = ValueQueue(lambda: 5, PendingEntries(shared))
    queue.log({"loss": 1.0})
    list(queue.drain())
    queue.log({"loss": 2.0})

    assert unreported_values(shared, queue.drained) == ([Value(5, "loss", 2.0)], 0)
    queue.reported()
    assert unreported_values(shared) == ([Value(5, "loss", 2.0)], 0)


@given(st.binary(min_size=64, max_size=512), st.integers(0, PENDING_BYTES - 512))
def test_memory_that_was_written_over_is_read_without_an_error(garbage: bytes, at: int) -> None:
    """A process that crashes may have written anywhere before."""
    shared = memory()
    queue = ValueQueue(lambda: 5, PendingEntries(shared))
    queue.log({"loss": 1.0})
    queue.event("mine", {"why": "x"})
    shared[at : at + len(garbage)] = garbage

    for _, lost in (unreported_values(shared), unreported_operations(shared)):
        assert lost < 1 << 24


def test_numbers_and_plain_events_are_kept_until_they_have_been_reported() -> None:
    """What needs to be read on a device, or turned into text, is not: the training thread must not wait for it."""
    shared = memory()
    queue = ValueQueue(lambda: 5, PendingEntries(shared))
    queue.log({"loss": 1, "accuracy": np.float64(0.5), "other": object(), "large": 10**400})
    queue.event("mine", {"why": "x"})
    queue.event("odd", {"what": object()})

    found, lost = unreported_values(shared)
    assert found == [
        Value(5, "loss", 1.0),
        Value(5, "accuracy", 0.5),
        UserEvent(5, "mine", {"why": "x"}),
    ]
    assert lost == 0
    list(queue.drain())
    queue.log({"later": 2.0})
    queue.reported()
    assert unreported_values(shared) == ([Value(5, "later", 2.0)], 0)


def test_threads_that_log_at_once_use_slots_of_their_own() -> None:
    """Evaluation in a second thread logs beside training."""
    shared = memory()
    queue = ValueQueue(lambda: 5, PendingEntries(shared))

    def log() -> None:
        for _ in range(500):
            queue.log({"loss": 1.0})

    in_threads(*[log] * 4)

    assert len(unreported_values(shared)[0]) == 2000
