"""Faults stay inside, forks find free locks."""

from __future__ import annotations

import errno
import gc
import logging
import signal
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest

from otel_train.safety import DaemonThread, Guard, collection_deferred, sigchld_deferred
from tests.support.waiting import in_threads
from tests.support.watchdog import watchdog


def fail_in(guard: Guard, fault: BaseException) -> None:
    with guard:
        raise fault


def test_an_internal_fault_is_not_raised_into_the_loop() -> None:
    """Telemetry that fails must not end a training run."""
    guard = Guard("export")

    fail_in(guard, OSError("disk full"))

    assert guard.faults == 1
    assert not guard.closed


def test_the_first_fault_is_logged_with_its_traceback_and_later_ones_are_not(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """One traceback tells what is wrong; a thousand hide it."""
    guard = Guard("export", limit=5)

    with caplog.at_level(logging.WARNING, logger="otel_train"):
        for number in range(4):
            fail_in(guard, OSError(f"fault {number}"))

    [record] = caplog.records
    assert record.exc_info is not None
    assert str(record.exc_info[1]) == "fault 0"
    assert guard.faults == 4


def test_what_the_system_refuses_is_said_without_a_traceback(caplog: pytest.LogCaptureFixture) -> None:
    """A full disk is no error of the code: the text says what there is to do about it."""
    with caplog.at_level(logging.WARNING, logger="otel_train"):
        fail_in(Guard("flight file"), OSError(errno.ENOSPC, "No space left on device"))

    [record] = caplog.records
    assert record.exc_info is None
    assert record.getMessage() == (
        "flight file failed: [Errno 28] No space left on device; training goes on without it"
    )


def test_the_third_fault_switches_the_part_off_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    """A part that keeps failing costs time without a result."""
    guard = Guard("prometheus export")

    with caplog.at_level(logging.WARNING, logger="otel_train"):
        for _ in range(3):
            fail_in(guard, OSError())

    assert guard.closed
    assert caplog.messages[-1] == "prometheus export failed 3 times and is now off"


@pytest.mark.parametrize("fault", [KeyboardInterrupt(), SystemExit(3)])
def test_what_belongs_to_the_user_passes_through(fault: BaseException) -> None:
    """Ctrl-C must end the run, also when it arrives in our code."""
    guard = Guard("export")

    with pytest.raises(type(fault)):
        fail_in(guard, fault)

    assert guard.faults == 0


def test_what_a_watchdog_of_the_program_raises_passes_a_guard() -> None:
    """The program catches it to end a step that hangs."""
    guard = Guard("export")

    with watchdog() as expire, pytest.raises(TimeoutError, match="watchdog"), guard:
        expire()

    assert guard.faults == 0


class DiedError(RuntimeError):
    """What torch raises."""


def complain(number: int, frame: Any) -> None:
    raise DiedError


@pytest.fixture
def complaining() -> Iterator[None]:
    """A handler that raises wherever the main thread is, as torch's does."""
    before = signal.signal(signal.SIGCHLD, complain)
    yield
    signal.signal(signal.SIGCHLD, before)


@pytest.mark.usefixtures("complaining")
def test_a_death_is_reported_when_the_work_is_done() -> None:
    """The summary is written first, and the program learns of it all the same."""
    done = []

    def work() -> None:
        with sigchld_deferred():
            signal.raise_signal(signal.SIGCHLD)
            done.append("work")

    with pytest.raises(DiedError):
        work()

    assert done == ["work"]
    assert signal.getsignal(signal.SIGCHLD) is complain


@pytest.mark.usefixtures("complaining")
def test_without_a_death_nothing_is_reported() -> None:
    """The handler is put back, not called."""
    with sigchld_deferred():
        pass

    assert signal.getsignal(signal.SIGCHLD) is complain


@pytest.mark.parametrize("handler", [signal.SIG_DFL, signal.SIG_IGN])
def test_without_a_handler_nothing_changes(handler: Any) -> None:
    """Most programs."""
    before = signal.signal(signal.SIGCHLD, handler)
    try:
        with sigchld_deferred():
            assert signal.getsignal(signal.SIGCHLD) is handler
    finally:
        signal.signal(signal.SIGCHLD, before)


@pytest.mark.usefixtures("complaining")
def test_another_thread_leaves_handlers_alone() -> None:
    """Only the main thread may set them, and only there do they run."""
    seen: list[Any] = []

    def work() -> None:
        with sigchld_deferred():
            seen.append(signal.getsignal(signal.SIGCHLD))

    in_threads(work)

    assert seen == [complain]


@pytest.mark.usefixtures("complaining")
def test_a_handler_that_was_set_inside_stays() -> None:
    """What is put over ours is theirs."""
    calls: list[int] = []

    def own(number: int, frame: Any) -> None:
        calls.append(number)

    with sigchld_deferred():
        signal.signal(signal.SIGCHLD, own)

    assert signal.getsignal(signal.SIGCHLD) is own


@pytest.mark.parametrize("enabled", [True, False])
def test_the_garbage_collector_is_found_as_it_was(enabled: bool) -> None:
    """A program that has switched it off has reasons; one that fails in the block must not go on without it."""
    before = gc.isenabled()
    (gc.enable if enabled else gc.disable)()
    try:
        with suppress(ValueError), collection_deferred():
            assert not gc.isenabled()
            raise ValueError
        assert gc.isenabled() is enabled
    finally:
        (gc.enable if before else gc.disable)()


def test_what_imports_have_made_is_not_gone_through_and_what_the_program_has_frozen_stays_frozen() -> None:
    """A collection of young objects right after imports would look at all of them, and free none."""
    with collection_deferred():
        made: list[object] = [[]]
    assert any(each is made for each in gc.get_objects(generation=2))

    gc.freeze()
    try:
        with collection_deferred():
            pass
        assert gc.get_freeze_count()
    finally:
        gc.unfreeze()


def test_a_thread_that_dies_before_it_begins_is_not_waited_for() -> None:
    """It finds no memory for its first call, and then nothing says that it has begun; training would wait for ever."""

    class Dies(DaemonThread):
        def __init__(self) -> None:
            super().__init__(target=print)
            self._started.LONGEST_S = 0.05

        def _bootstrap(self) -> None:
            """Ends at once."""

    with pytest.raises(RuntimeError, match="no memory is left for it"):
        Dies().start()
