"""Caches of the program's own: asked now and then, and never trusted."""

from __future__ import annotations

import logging

import numpy as np
import pytest

import otel_train
from otel_train.cache_sizes import CacheSizes


def test_caches_say_how_large_they_are() -> None:
    """A cache that grows is memory that the loader does not show."""
    held = [b"abc"]
    caches = CacheSizes()
    caches.add("images", lambda: sum(map(len, held)))
    caches.add("tokens", lambda: np.int64(7))
    held.append(b"de")

    assert caches.read() == {"images": 5, "tokens": 7}


def test_one_that_fails_is_said_once_and_off_after_three(caplog: pytest.LogCaptureFixture) -> None:
    """And takes no other with it."""
    calls = []

    def fails() -> int:
        calls.append(1)
        raise OSError("gone")

    caches = CacheSizes()
    caches.add("broken", fails)
    caches.add("whole", lambda: 1)
    with caplog.at_level(logging.WARNING, "otel_train"):
        read = [caches.read() for _ in range(5)]

    assert read == [{"whole": 1}] * 5
    assert (len(calls), caches.faults) == (3, 3)
    assert [record.levelname for record in caplog.records] == ["WARNING", "ERROR"]
    assert "size of cache 'broken'" in caplog.text


@pytest.mark.parametrize("said", [-1, 2.5, None, "7"])
def test_what_is_no_number_of_bytes_is_absent(said: object) -> None:
    """A ratio drawn as megabytes would mislead for weeks."""
    caches = CacheSizes()
    caches.add("odd", lambda: said)  # type: ignore[arg-type, return-value]  # on purpose

    assert (caches.read(), caches.faults) == ({}, 1)


def test_a_cache_can_be_taken_back_and_replaced() -> None:
    """The handle of the one before does not remove the one that took its name."""
    caches = CacheSizes()
    first = caches.add("images", lambda: 1)
    second = caches.add("images", lambda: 2)
    first.remove()
    assert caches.read() == {"images": 2}

    with second:
        pass
    second.remove()

    assert caches.read() == {}


def test_bad_input_is_refused_where_it_is_given() -> None:
    """The loop is never told."""
    with pytest.raises(otel_train.ConfigError, match="returns bytes"):
        CacheSizes().add("images", 5)  # type: ignore[arg-type]  # on purpose
    with pytest.raises(otel_train.ConfigError, match="called"):
        CacheSizes().add("", lambda: 1)
