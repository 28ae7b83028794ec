"""Faults of captures and trackers on the service thread of a rank."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from otel_train.agent.captures import RankCaptures
from otel_train.agent.client import AgentClient, State
from otel_train.agent.lazy_components import LazyComponents
from otel_train.agent.messages import CAPTURES_OFF, MessageChannel
from otel_train.config import Config
from otel_train.datamodel import Anchor

POLLS = 10


@pytest.fixture
def client() -> Any:
    """A connection to an agent that has opened a run directory."""
    made = MagicMock()
    made.components = LazyComponents(made, Config(), Anchor.now())
    return made


@pytest.mark.parametrize("part", ["capturing", "flops"])
def test_captures_that_fail_at_every_poll_are_switched_off(
    client: Any, part: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Not a traceback every two seconds, for as long as the run lasts."""
    captures = RankCaptures(client, Config(), Anchor.now())
    failing = MagicMock(**{"poll.side_effect": ValueError("a fault")})
    setattr(captures, part, failing)
    for _ in range(POLLS):
        captures.poll(asked=False)

    assert failing.poll.call_count == len(caplog.records) + 1 == 3
    assert "is now off" in caplog.text


def test_captures_that_are_switched_off_refuse_requests(client: Any) -> None:
    """Otherwise they are accepted, and nothing comes of them."""
    captures = RankCaptures(client, Config(), Anchor.now())
    captures.capturing = MagicMock(**{"poll.side_effect": ValueError("a fault")})
    for _ in range(POLLS):
        captures.poll(asked=False)

    assert captures.capture({"steps": 1}) == CAPTURES_OFF


def test_trackers_that_cannot_be_made_are_switched_off(
    client: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As every other component."""
    components = LazyComponents(client, Config(tensorboard="on", profiler="off"), Anchor.now())
    making = MagicMock(side_effect=ValueError("a fault"))
    monkeypatch.setattr(components, "make_trackers", making)
    for _ in range(POLLS):
        components.poll()

    assert making.call_count == len(caplog.records) + 1 == 3


def test_the_end_does_not_wait_without_limit_for_a_service_thread_that_hangs(
    client: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """On a disk that does not answer."""
    service: Any = object.__new__(AgentClient)
    service._thread, service._reporting = None, threading.Lock()
    client.turn = service.turn
    captures = RankCaptures(client, Config(), Anchor.now())
    captures.capturing = MagicMock(**{"controller.recording": False})
    with service.turn():
        captures.end(0.02)
    assert not captures.capturing.end.called
    captures.end(0.02)

    assert captures.capturing.end.called
    assert [record.getMessage().partition(":")[0] for record in caplog.records] == ["captures"]


@pytest.fixture
def service() -> Iterator[Any]:
    """The service thread of a rank whose agent ends the connection, and still takes messages."""
    ends = socket.socketpair()
    ends[1].shutdown(socket.SHUT_WR)
    made: Any = object.__new__(AgentClient)
    made._thread, made._reporting, made._state = threading.current_thread(), threading.Lock(), State.RUNNING
    made.info = SimpleNamespace(pid=os.getpid())
    made.connection = SimpleNamespace(
        channel=MessageChannel(ends[0]), wait_while_working=lambda wait, seconds: wait(seconds)
    )
    yield made
    for end in ends:
        end.close()


def test_the_end_of_an_agent_is_no_fault_of_a_capture_that_awaits_its_answer(
    client: Any, service: Any
) -> None:
    """Captures of a run whose agent was replaced three times were off."""
    client.turn = service.turn
    captures = RankCaptures(client, Config(), Anchor.now())
    answers = []
    captures.capturing = MagicMock(**{"poll.side_effect": lambda: answers.append(service.ask("number", 1))})
    captures.poll(asked=False)

    assert answers == [None]
    assert client.components.guards["captures"].faults == 0


def test_the_end_of_an_agent_releases_the_thread_that_holds_the_turn(service: Any) -> None:
    """It waits for an answer that only the service thread receives, and that thread waits for its turn."""
    has_turn = threading.Event()

    def hold() -> None:
        with service.turn():
            has_turn.set()
            service.ask("account", timeout_s=60.0)

    holder = threading.Thread(target=hold)
    holder.start()
    has_turn.wait()
    with service.turn(30.0) as is_free:
        holder.join()

    assert is_free
