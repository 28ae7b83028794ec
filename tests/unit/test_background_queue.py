"""Queues with a thread each: work that is slow or hangs."""

from __future__ import annotations

import threading
import time
from functools import partial

import pytest

from otel_train.exporters import background_queue
from otel_train.exporters.background_queue import PATIENCE_S, BackgroundQueue, DiskQueue
from otel_train.safety import Guard


def test_a_slow_writer_is_closed_after_its_last_item_though_the_queue_was_full_at_the_end() -> None:
    """Else its last flush is lost, and the end of the program waits for the whole timeout."""
    began, goes_on, closed, written = threading.Event(), threading.Event(), threading.Event(), list[int]()

    def write(item: int) -> None:
        began.set()
        goes_on.wait(10)
        written.append(item)

    slow = BackgroundQueue("slow", write, closed.set, most=2)
    slow.hand(0)
    assert began.wait(10)
    for item in range(1, 6):
        slow.hand(item)
    slow.end()
    goes_on.set()
    slow.close(1)

    assert closed.is_set()
    assert written == [0, 1, 2]
    assert slow.dropped == 3


def test_what_is_not_written_when_the_wait_ends_counts_as_dropped() -> None:
    """The item that is being written included: it may never be delivered."""
    began, freed = threading.Event(), threading.Event()

    def write(_: int) -> None:
        began.set()
        freed.wait(10)

    hung = BackgroundQueue("hung", write, lambda: None, most=2)
    hung.hand(0)
    assert began.wait(10)
    for item in range(5):
        hung.hand(item)
    hung.close(0.01)
    freed.set()

    assert hung.dropped == 1 + 5


def test_the_writes_of_the_end_are_kept_though_the_queue_of_a_disk_that_hangs_is_full() -> None:
    """The last summary says how the run ended. A file server may answer again before the agent gives up."""
    disk, answers, done = DiskQueue(), threading.Event(), list[int]()
    disk.limit_waits(0.0)
    disk.do(Guard("disk"), lambda: answers.wait(10))
    for number in range(background_queue._MOST + 5):
        disk.do(Guard("disk"), partial(done.append, number))
    assert disk.dropped
    disk.keep_all()
    disk.do(Guard("disk"), lambda: done.append(-1))
    dropped = disk.dropped
    disk.do(Guard("disk"), lambda: done.append(-2))
    answers.set()

    assert disk.written(10)
    assert done[-2:] == [-1, -2]
    assert disk.dropped == dropped


def test_all_writes_of_the_end_together_are_waited_for_until_one_limit() -> None:
    """Without it the first write on a disk that hangs takes a quarter of a second. Every write is done once the disk answers."""
    disk, answers, done = DiskQueue(), threading.Event(), list[int]()

    def write(number: int) -> None:
        answers.wait(10)
        done.append(number)

    began_s = time.monotonic()
    disk.limit_waits(0.02)
    for number in range(3):
        disk.do(Guard("write"), lambda number=number: write(number))  # type: ignore[misc]
    took_s = time.monotonic() - began_s
    answers.set()

    assert took_s < PATIENCE_S
    assert disk.written(10)
    assert done == [0, 1, 2]
    disk.close(10)


def test_on_a_disk_that_answers_a_write_is_done_when_it_returns() -> None:
    """Also while the limit of the end runs."""
    disk, done = DiskQueue(), list[int]()
    disk.limit_waits(10.0)
    disk.do(Guard("write"), lambda: done.append(1))

    assert done == [1]
    assert not disk.hangs
    disk.close(10)


def test_a_queue_without_an_item_closes_its_writer() -> None:
    """What was registered before the first item is removed."""
    closed = threading.Event()
    unused = BackgroundQueue("unused", print, closed.set, most=2)
    unused.close(10)

    assert closed.is_set()


def test_where_no_thread_can_be_started_items_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other queues are closed after this one."""

    class Refused(threading.Thread):
        def start(self) -> None:
            raise RuntimeError("can't start new thread")

    monkeypatch.setattr(background_queue, "daemon_thread", lambda target, name: Refused(target=target))
    full = BackgroundQueue("full", print, print, most=2)
    for item in range(4):
        full.hand(item)
    full.close(10)

    assert (full.guard.faults, full.guard.closed, full.dropped) == (3, True, 3)
    assert full.emptied(0)


def test_an_unused_queue_ends_without_a_fault_where_no_thread_can_be_started(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Python 3.12 refuses threads at the end of the interpreter, where sessions are closed."""

    class Refused(threading.Thread):
        def start(self) -> None:
            raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(background_queue, "daemon_thread", lambda target, name: Refused(target=target))
    unused = BackgroundQueue("unused", print, print, most=2)
    unused.close(10)

    assert (unused.guard.faults, unused.dropped) == (0, 0)


def test_items_of_several_threads_are_written_by_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two threads that write would use one file descriptor at once, and change the order of the items."""

    class Slow(threading.Thread):
        def start(self) -> None:
            time.sleep(0.05)
            super().start()

    monkeypatch.setattr(
        background_queue, "daemon_thread", lambda target, name: Slow(target=target, name=name)
    )
    writers = set()
    shared: BackgroundQueue[int] = BackgroundQueue(
        "shared", lambda _: writers.add(threading.get_ident()), lambda: None, most=8
    )
    program = [threading.Thread(target=shared.hand, args=(number,)) for number in range(4)]
    for thread in program:
        thread.start()
    for thread in program:
        thread.join()
    shared.close(10)

    assert len(writers) == 1
    assert [each for each in threading.enumerate() if each.name == "otel-train-shared"] == []
