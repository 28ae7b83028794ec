"""The death of a child does not interrupt what must be finished."""

from __future__ import annotations

import signal
import threading
from typing import TYPE_CHECKING, Any

import pytest

from otel_train.children import deaths_held_back

if TYPE_CHECKING:
    from collections.abc import Iterator


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
def test_a_death_is_told_when_the_work_is_done() -> None:
    """The summary is written first, and the program learns of it all the same."""
    done = []

    def work() -> None:
        with deaths_held_back():
            signal.raise_signal(signal.SIGCHLD)
            done.append("work")

    with pytest.raises(DiedError):
        work()

    assert done == ["work"]
    assert signal.getsignal(signal.SIGCHLD) is complain


@pytest.mark.usefixtures("complaining")
def test_without_a_death_nothing_is_told() -> None:
    """The handler is put back, not called."""
    with deaths_held_back():
        pass

    assert signal.getsignal(signal.SIGCHLD) is complain


@pytest.mark.parametrize("handler", [signal.SIG_DFL, signal.SIG_IGN])
def test_where_nobody_listens_nothing_changes(handler: Any) -> None:
    """Most programs."""
    before = signal.signal(signal.SIGCHLD, handler)
    try:
        with deaths_held_back():
            assert signal.getsignal(signal.SIGCHLD) is handler
    finally:
        signal.signal(signal.SIGCHLD, before)


@pytest.mark.usefixtures("complaining")
def test_another_thread_leaves_handlers_alone() -> None:
    """Only the main thread may set them, and only there do they run."""
    seen: list[Any] = []

    def work() -> None:
        with deaths_held_back():
            seen.append(signal.getsignal(signal.SIGCHLD))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()

    assert seen == [complain]


@pytest.mark.usefixtures("complaining")
def test_a_handler_that_somebody_set_inside_stays() -> None:
    """What is put over ours is theirs."""
    calls: list[int] = []

    def own(number: int, frame: Any) -> None:
        calls.append(number)

    with deaths_held_back():
        signal.signal(signal.SIGCHLD, own)

    assert signal.getsignal(signal.SIGCHLD) is own
