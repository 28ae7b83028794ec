"""Workers and queue of a loader, seen from outside."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from types import SimpleNamespace
from typing import Any

import pytest

from otel_train.instrumentation.dataloader_workers import (
    UNKNOWN,
    LoaderState,
    WorkerExit,
    WorkerPool,
    exit_cause,
    loader_state,
)

TASKS = {4: (0,), 5: (1, "a batch that came before its turn")}


class Iterator(SimpleNamespace):
    """Stands for torch's."""


def behave(do: str) -> None:
    """Sleeps, exits well, or exits badly."""
    if do == "sleep":
        time.sleep(60)
    os._exit(3 if do == "fail" else 0)


def child(do: str, method: str = "fork") -> Any:
    context: Any = multiprocessing.get_context(method)
    process = context.Process(target=behave, args=("sleep" if do == "kill" else do,), daemon=True)
    process.start()
    if do == "kill":
        os.kill(process.pid, signal.SIGKILL)
    return process


def iterator(processes: list[Any], **more: Any) -> Iterator:
    queue = SimpleNamespace(qsize=lambda: 3)
    facts = {"_workers": processes, "_prefetch_factor": 4, "_data_queue": queue, "_task_info": TASKS}
    return Iterator(**{**facts, **more})


def idle(pid: int = 1) -> SimpleNamespace:
    """A process that has ended well."""
    return SimpleNamespace(pid=pid, _popen=SimpleNamespace(returncode=0))


def seen(*iterators: Iterator) -> LoaderState | None:
    return loader_state([WorkerPool(one) for one in iterators])


def test_a_death_is_known_after_torch_has_reaped_it_and_dropped_the_iterator() -> None:
    """An exception leaves the loop, the iterator goes, and with it the only trace of the OOM killer."""
    process = child("kill")
    mine = iterator([process])
    pool = WorkerPool(mine)
    process.join()
    del mine

    assert pool.over
    assert pool.exits() == [WorkerExit(0, process.pid, "SIGKILL")]
    assert pool.done


def test_a_worker_of_a_fork_server_is_seen_to_run_and_to_end() -> None:
    """It is not a child of this process: only the fork server learns how it ended."""
    process = child("sleep", "forkserver")
    mine = iterator([process])
    pool = WorkerPool(mine)
    running = exit_cause(process, process.pid)
    state = seen(mine)
    os.kill(process.pid, signal.SIGKILL)
    multiprocessing.connection.wait([process.sentinel], 30)
    ended, early = exit_cause(process, process.pid), pool.exits()
    process.join()

    assert running is None
    assert state is not None
    assert (state.alive, state.dead) == (1, 0)
    assert (ended, early) == (UNKNOWN, [])
    assert pool.exits() == [WorkerExit(0, process.pid, "SIGKILL")]


def test_a_worker_terminated_because_its_iterator_is_done_with_is_no_death() -> None:
    """Torch sends SIGTERM to a worker that does not stop in time."""
    process = SimpleNamespace(pid=7, _popen=SimpleNamespace(returncode=-signal.SIGTERM))
    done_with, at_work = iterator([process], _shutdown=True), iterator([process])

    assert WorkerPool(done_with).exits() == []
    assert WorkerPool(at_work).exits() == [WorkerExit(0, 7, "SIGTERM")]


def test_a_signal_without_a_name_is_reported_by_its_number() -> None:
    """Real-time signals."""
    process = SimpleNamespace(pid=7, _popen=SimpleNamespace(returncode=-40))

    assert exit_cause(process, 7) == "signal_40"


def test_a_pool_is_done_when_it_is_over_and_every_worker_has_ended() -> None:
    """It is remembered until then, and no longer."""
    mine = iterator([idle()])
    pool = WorkerPool(mine)
    pool.exits()

    assert not pool.done
    mine._shutdown = True
    assert pool.done


def test_a_process_of_another_kind_is_left_alone() -> None:
    """Another library's process type."""
    state = seen(iterator([SimpleNamespace(pid=1)]))

    assert state is not None
    assert (state.alive, state.dead) == (0, 0)


def test_a_loader_without_workers_has_no_state() -> None:
    """Absent, not zero."""
    assert seen() is None
    assert seen(iterator([])) is None
    assert seen(iterator([idle()], _shutdown=True)) is None


def test_pinned_batches_are_distinguished() -> None:
    """Pinned memory cannot be swapped out, and has a limit of its own."""
    pinned = iterator([idle()], _pin_memory=True, _worker_result_queue=SimpleNamespace(qsize=lambda: 2))
    state = seen(pinned)

    assert state is not None
    assert (state.queued, state.pinned) == (6, 4)


@pytest.mark.parametrize("error", [NotImplementedError, OSError, AttributeError])
def test_a_queue_that_cannot_be_counted_is_unknown(error: type[Exception]) -> None:
    """MacOS has no qsize."""

    def fail() -> int:
        raise error

    mine = [iterator([idle()], _data_queue=SimpleNamespace(qsize=fail)), iterator([idle()])]
    state = seen(*mine)

    assert state is not None
    assert (state.queued, state.limit) == (None, 8)
