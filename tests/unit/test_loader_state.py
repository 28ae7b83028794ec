"""Workers and queue of a loader, seen from outside."""

from __future__ import annotations

import os
import signal
import time
from types import SimpleNamespace
from typing import Any

import pytest

from otel_train.record.loader_state import LoaderState, look


def child(do: str) -> int:
    """A process that sleeps, exits well, exits badly or is killed."""
    pid = os.fork()
    if pid == 0:
        if do in {"sleep", "kill"}:
            time.sleep(60)
        os._exit(3 if do == "fail" else 0)
    if do == "kill":
        os.kill(pid, signal.SIGKILL)
    return pid


def iterator(pids: list[int], **more: Any) -> SimpleNamespace:
    workers = [SimpleNamespace(pid=pid) for pid in pids]
    queue = SimpleNamespace(qsize=lambda: 3)
    return SimpleNamespace(**{"_workers": workers, "_prefetch_factor": 4, "_data_queue": queue, **more})


def seen(*iterators: SimpleNamespace) -> LoaderState | None:
    return look(SimpleNamespace(iterators=list(iterators)))  # type: ignore[arg-type]  # stands for a probe


def test_workers_that_ended_are_told_by_how_they_ended() -> None:
    """The OOM killer's SIGKILL is the one to know of; it is seen before torch notices."""
    pids = [child(do) for do in ("sleep", "well", "fail", "kill")]
    try:
        for pid in pids[1:]:
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        state = seen(iterator(pids))
    finally:
        os.kill(pids[0], signal.SIGKILL)
        statuses = [os.waitpid(pid, 0)[0] for pid in pids]

    assert state == LoaderState(4, 1, tuple(pids), {pids[2]: "exit_3", pids[3]: "SIGKILL"}, 3, 16)
    assert statuses == pids  # looking has taken nobody's child away


def test_a_process_that_is_not_ours_is_left_alone() -> None:
    """What somebody else has reaped may be another process by now."""
    state = seen(iterator([1]))

    assert state is not None
    assert (state.alive, state.exits) == (0, {})


def test_a_loader_without_workers_has_no_state() -> None:
    """Absent, not zero."""
    assert seen() is None
    assert seen(SimpleNamespace()) is None
    assert seen(iterator([], _workers=[])) is None
    assert seen(iterator([1], _shutdown=True)) is None


@pytest.mark.parametrize("error", [NotImplementedError, OSError, AttributeError])
def test_a_queue_that_cannot_be_counted_is_unknown(error: type[Exception]) -> None:
    """MacOS has no qsize."""

    def fail() -> int:
        raise error

    state = seen(iterator([1], _data_queue=SimpleNamespace(qsize=fail)), iterator([1]))

    assert state is not None
    assert (state.queued, state.limit) == (None, 8)
