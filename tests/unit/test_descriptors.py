"""File descriptors that otel_train moves out of the program's range."""

from __future__ import annotations

import fcntl
import os
import resource
from collections.abc import Iterator

import pytest

from otel_train.recording.descriptors import set_aside

_SOFT = 256


@pytest.fixture
def hard() -> Iterator[int]:
    """Sets a low soft limit of open files; the hard limit."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (_SOFT, before[1]))
    yield before[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def _move() -> int:
    opened = os.memfd_create("test")
    copy = set_aside(opened)
    os.close(opened)
    os.close(copy)
    return copy


def test_a_descriptor_is_moved_above_the_limit_which_stays(hard: int) -> None:
    """The program can open as many files as before."""
    assert _move() >= _SOFT
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == (_SOFT, hard)


def test_a_limit_that_the_program_sets_meanwhile_stays(hard: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread moves the descriptor while the program raises its limit, as torch advises for many workers."""
    duplicate = fcntl.fcntl

    def raise_limit(descriptor: int, command: int, lowest: int) -> int:
        resource.setrlimit(resource.RLIMIT_NOFILE, (2 * _SOFT, hard))
        return duplicate(descriptor, command, lowest)

    monkeypatch.setattr(fcntl, "fcntl", raise_limit)
    assert _move() >= _SOFT
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == (2 * _SOFT, hard)
