"""The queue of writes, on a disk that hangs."""

from __future__ import annotations

import threading
import time

from otel_train.exporters.background_queue import PATIENCE_S, DiskQueue
from otel_train.safety import Guard


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
