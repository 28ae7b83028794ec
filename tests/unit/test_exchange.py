"""The thread between this rank and the store: it may be late, it may fail, it never blocks another thread."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial

import pytest

from otel_train.distributed.store import MOST_HELD, Exchange, ExchangeRequest
from tests.support.store import FakeStore
from tests.support.waiting import until

Make = Callable[..., Exchange]


@pytest.fixture
def store() -> FakeStore:
    return FakeStore()


@pytest.fixture
def made(store: FakeStore) -> Iterator[Make]:
    exchanges: list[Exchange] = []

    def make(rank: int = 0, world_size: int = 2) -> Exchange:
        exchanges.append(Exchange(store.connect, prefix="ours", rank=rank, world_size=world_size))
        return exchanges[-1]

    yield make
    store.released.set()
    for exchange in exchanges:
        exchange.close(5)


def test_records_reach_the_other_ranks(store: FakeStore, made: Make) -> None:
    """What one leaves the other finds; who has left nothing is not there."""
    first, second = made(0, 3), made(1, 3)
    second.send(ExchangeRequest("two", range(0)))
    until(lambda: "ours/1" in store.held)
    first.send(ExchangeRequest("one", range(3)))
    found: list[dict[int, str]] = []

    def fetched() -> bool:
        found.extend(records for records in [first.take()] if records)
        return bool(found)

    until(fetched)

    assert found == [{0: "one", 1: "two"}]
    assert first.take() is None


def test_a_record_is_overwritten_and_removed_at_the_end(store: FakeStore, made: Make) -> None:
    """The store is the job's: what we leave there must neither grow nor stay."""
    store.held["theirs"] = "kept"
    exchange = made()
    for number in range(5):
        exchange.send(ExchangeRequest(str(number), range(0)))
        until(partial(lambda number: store.held.get("ours/0") == str(number), number))
    assert set(store.held) == {"theirs", "ours/0"}

    exchange.close(5)
    assert store.held == {"theirs": "kept"}


def test_a_store_that_blocks_holds_up_only_its_own_thread(store: FakeStore, made: Make) -> None:
    """The host of the store hangs: the heartbeat of this rank must go on to say so."""
    store.released.clear()
    exchange = made()
    started = time.monotonic()
    for number in range(1000):
        exchange.send(ExchangeRequest(str(number), range(2)))
        exchange.take()
    exchange.close(0.1)

    assert time.monotonic() - started < 10
    assert store.held == {}


def test_only_the_newest_record_is_sent_after_a_delay(store: FakeStore, made: Make) -> None:
    """What has waited is old news, and a queue would grow."""
    store.released.clear()
    exchange = made()
    exchange.send(ExchangeRequest("first", range(0)))
    until(lambda: exchange._request is None)
    for number in range(100):
        exchange.send(ExchangeRequest(str(number), range(0)))
    store.released.set()
    until(lambda: store.held.get("ours/0") == "99")


def test_a_store_that_is_gone_is_no_fault_and_is_used_again_when_it_is_back(
    store: FakeStore, made: Make
) -> None:
    """Rank 0 ends first and takes the store along: nothing to warn about. In a run of weeks the network fails more than once."""
    exchange = made()
    for number in range(5):
        store.there = True
        exchange.send(ExchangeRequest(str(number), range(0)))
        until(partial(lambda number: store.held.get("ours/0") == str(number), number))
        store.there = False
        for _ in range(2):
            exchange.send(ExchangeRequest("lost", range(0)))
            until(lambda: exchange._request is None)

    assert not exchange.off
    assert exchange.guard.faults == 0


def test_in_a_large_world_no_connection_is_kept(store: FakeStore, made: Make) -> None:
    """Ten thousand sockets more would be too many for the host of the store."""
    exchange = made(0, MOST_HELD + 1)
    for opened in (1, 2):
        exchange.send(ExchangeRequest(str(opened), range(0)))
        until(partial(lambda opened: store.held.get("ours/0") == str(opened), opened))
    exchange.close(5)

    assert store.opened == 3
    assert store.held == {}
