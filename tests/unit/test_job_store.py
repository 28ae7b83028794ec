"""A connection of our own to torch's own store."""

from __future__ import annotations

import socket
import threading
import time
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from otel_train.distributed.store import JobStore, connect, start_of_job
from otel_train.resource import find_job
from tests.support.ranks import free_port

SHORT = timedelta(seconds=20)


@pytest.fixture
def of_job() -> Any:
    """The store of a job, as the process that hosts it has it."""
    return dist.TCPStore("127.0.0.1", free_port(), None, True, SHORT, wait_for_workers=False)


def modules(store: Any, *, ranks: tuple[int, int] = (0, 2), initialized: bool = True) -> dict[str, Any]:
    """What ``sys.modules`` holds in a process that has made a process group."""
    return {
        "torch.distributed": SimpleNamespace(
            is_available=lambda: True,
            is_initialized=lambda: initialized,
            get_rank=lambda: ranks[0],
            get_world_size=lambda: ranks[1],
        ),
        "torch.distributed.distributed_c10d": SimpleNamespace(_get_default_store=lambda: store),
    }


def test_a_record_is_read_back_and_a_missing_one_is_not_waited_for(of_job: Any) -> None:
    """``get`` waits half an hour for a key of a rank that never comes."""
    ours = JobStore(of_job)
    ours.put("ours/0", '[1,"x"]')
    started = time.monotonic()

    assert ours.read(["ours/0", "ours/1"]) == {"ours/0": '[1,"x"]'}
    assert time.monotonic() - started < 10
    assert not of_job.check(["ours/1"])


def test_whoever_asks_first_says_what_all_agree_on(of_job: Any) -> None:
    """No rank waits for another."""
    ours, theirs = JobStore(of_job), JobStore(of_job)

    assert [ours.agree("start", "mine"), theirs.agree("start", "yours"), ours.agree("start", "late")] == [
        "mine"
    ] * 3


def test_ranks_find_the_start_of_their_job_in_the_store_of_torchrun_before_they_make_a_group(
    of_job: Any,
) -> None:
    """Once in a process: a group that is ended and made again is the same job."""
    environ = {
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(of_job.port),
        "TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_USE_AGENT_STORE": "True",
    }  # fmt: skip
    alone = {"torch.distributed": dist}
    start = start_of_job(environ, alone)

    assert start == of_job.get("otel_train/start").decode()
    of_job.set("otel_train/start", "changed")
    assert start_of_job(environ, alone) == start


def test_a_store_that_does_not_answer_leaves_a_rank_without_a_start_and_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Training goes on; whoever finds a run of one rank knows why."""
    environ = {
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()),
        "TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_USE_AGENT_STORE": "True",
    }  # fmt: skip

    assert start_of_job(environ, {"torch.distributed": dist}) == ""
    assert "Set run_id" in caplog.text


def test_the_jobs_own_connection_is_neither_used_nor_changed(of_job: Any) -> None:
    """The user's thread may sit in ``wait`` for half an hour, and its timeout is its own."""
    waiting = threading.Thread(target=lambda: of_job.wait(["come"], SHORT))
    waiting.start()
    time.sleep(0.1)
    ours = JobStore(of_job)
    ours.put("ours/0", "x")
    ours.put("come", "now")
    waiting.join(20)

    assert not waiting.is_alive()
    assert of_job.timeout == SHORT


def test_our_connection_does_not_keep_the_store_alive() -> None:
    """The next attempt listens on the same port."""
    port = free_port()
    store = dist.TCPStore("127.0.0.1", port, None, True, SHORT, wait_for_workers=False)
    ours = JobStore(store)
    assert ours.reachable()
    del store

    assert not ours.reachable()
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.1", port), 5)


def test_a_store_that_is_gone_is_not_waited_for() -> None:
    """Torch tries for as long as the group's timeout, half an hour: the exit of a rank that outlives rank 0 waited for it."""
    port = free_port()
    server = dist.TCPStore("127.0.0.1", port, None, True, SHORT, wait_for_workers=False)
    of_rank = dist.TCPStore("127.0.0.1", port, None, False, SHORT, wait_for_workers=False)
    del server
    started = time.monotonic()

    with pytest.raises(OSError, match="refused"):
        JobStore(of_rank)
    assert time.monotonic() - started < 10


def test_an_old_torch_gets_a_connection_as_well(of_job: Any) -> None:
    """``clone`` came with torch 2.6."""

    class Old(type(of_job)):  # type: ignore[misc]  # torch's class is not known to mypy
        clone = property()

    old = Old(of_job.host, of_job.port, None, False, SHORT, wait_for_workers=False)
    assert not hasattr(old, "clone")
    JobStore(old).put("ours/0", "x")

    assert JobStore(of_job).read(["ours/0"]) == {"ours/0": "x"}


def test_the_store_is_found_behind_its_prefixes(of_job: Any) -> None:
    """Torch puts a prefix before everything; ours is beside it."""
    behind = dist.PrefixStore("pg", dist.PrefixStore("default", of_job))
    found = connect(modules(behind))
    assert found is not None
    found.put("ours/0", "x")

    assert of_job.check(["ours/0"])


@pytest.mark.parametrize(
    "found",
    [
        {},
        modules(None),
        modules(dist.HashStore()),
        modules(dist.HashStore(), initialized=False),
        {**modules(dist.HashStore()), "torch.distributed.distributed_c10d": SimpleNamespace()},
    ],
)
def test_where_there_is_no_tcp_store_there_is_no_connection(found: dict[str, Any]) -> None:
    """A FileStore grows with every value; MPI has none; a later torch may hide it."""
    assert connect(found) is None


def test_a_job_is_there_once_the_user_has_made_it_and_it_has_several_ranks() -> None:
    """We initialise nothing, and a single rank has no others to exchange records with."""
    assert find_job({}) is None
    assert find_job(modules(None, initialized=False)) is None
    assert find_job(modules(None, ranks=(0, 1))) is None
    assert find_job(modules(None, ranks=(1, 4))) == (1, 4)


def test_a_removed_record_is_gone(of_job: Any) -> None:
    """No key of otel_train stays in the job's store."""
    before = of_job.num_keys()
    ours = JobStore(of_job)
    ours.put("ours/0", "x")
    ours.remove("ours/0")

    assert ours.read(["ours/0"]) == {}
    assert of_job.num_keys() == before
