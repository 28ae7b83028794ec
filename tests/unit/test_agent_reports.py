"""Reports that the agent does not take."""

from __future__ import annotations

import itertools
import logging
import socket
import subprocess
import sys
import time
from array import array
from contextlib import suppress
from types import FrameType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from otel_train.agent.lazy_components import LazyComponents
from otel_train.agent.messages import MessageChannel, Response
from otel_train.agent.process import _run_without_sigchld
from otel_train.agent.reports import MOST_UNSENT, ReportBuilder
from otel_train.config.settings import Config
from otel_train.datamodel import Anchor
from otel_train.instrumentation.logged_values import CacheSizes


def test_what_is_thrown_away_while_the_agent_takes_nothing_is_counted() -> None:
    """Whatever a report has of its own; it is a drop of the telemetry, which an alert watches."""
    recording: Any = SimpleNamespace(values=SimpleNamespace(dropped=0), timers=SimpleNamespace(dropped=0))
    builder: Any = ReportBuilder(recording, SimpleNamespace(), CacheSizes())  # type: ignore[arg-type]
    made = iter([None, array("q", range(9)), *[array("q", range(3))] * MOST_UNSENT])
    builder.make = lambda **_: SimpleNamespace(
        logged_values=["loss", "lr"], operations=next(made), compiles=[1], builds=[2], exits=[3], outcomes=4
    )

    def refuse(_: Any) -> None:
        raise BlockingIOError

    for _ in range(MOST_UNSENT + 2):
        with pytest.raises(BlockingIOError):
            builder.send(refuse)

    assert recording.values.dropped == 4
    assert recording.timers.dropped == 3
    assert builder._dropped == 8


def test_a_tracker_package_that_fails_is_logged_once_counted_and_no_longer_tried(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The service thread would try it, and log a traceback, at every report."""
    client: Any = SimpleNamespace(recording=SimpleNamespace(recorder=None))
    components = LazyComponents(client, Config(mlflow="on", profiler="off"), Anchor(0, 0))
    tries = 0

    def fail() -> None:
        nonlocal tries
        tries += 1
        raise RuntimeError("a broken package")

    monkeypatch.setattr(components, "make_trackers", fail)
    with caplog.at_level(logging.WARNING, "otel_train"):
        for _ in range(10):
            components.poll()
    recording: Any = SimpleNamespace(hooks=None, timers=SimpleNamespace(faults=0))

    assert tries == 3
    assert [record.exc_info is not None for record in caplog.records] == [True, False]
    assert ReportBuilder(recording, components, CacheSizes())._faults()["trackers"] == 3


def test_a_memory_snapshot_that_fails_is_a_counted_fault_of_the_captures() -> None:
    """It was only logged, where a dashboard does not show it."""
    client: Any = SimpleNamespace(recording=SimpleNamespace(recorder=None))
    components = LazyComponents(client, Config(), Anchor(0, 0))
    recording: Any = SimpleNamespace(hooks=None, timers=SimpleNamespace(faults=0))
    components.captures.capturing = MagicMock(**{"snapshots.guard.faults": 1})

    assert ReportBuilder(recording, components, CacheSizes())._faults()["captures"] == 1


def test_an_answer_that_the_other_end_does_not_take_is_dropped() -> None:
    """An agent whose socket is full for a moment would be replaced."""
    ends = socket.socketpair()
    channel = MessageChannel(ends[0])
    channel.limit_sends(0.01)
    channel.respond(Response(0, "nothing is expected"))
    channel.respond(Response(1, b"x" * 10_000_000))
    channel.respond(Response(2, None))

    for end in ends:
        end.close()


@pytest.mark.parametrize("call", range(1, 7))
def test_a_message_whose_sender_is_interrupted_is_not_sent_twice(call: int) -> None:
    """Ctrl-C may arrive right after the call that has sent it: the agent would count a report twice."""
    ends = socket.socketpair()
    channel, agent = map(MessageChannel, ends)
    calls = itertools.count(1)

    def interrupt(frame: FrameType, event: str, _: object) -> None:
        is_sending = frame.f_code.co_name.startswith("_write") and event == "c_return"
        if is_sending and next(calls) == call:
            raise KeyboardInterrupt

    sys.setprofile(interrupt)
    try:
        with suppress(KeyboardInterrupt):
            channel.send("first")
    finally:
        sys.setprofile(None)
    channel.send("second")
    channel.close()
    received: list[str] = []
    with suppress(EOFError):
        while True:
            received.append(agent.receive())

    assert received in (["first", "second"], ["second"])
    agent.close()


def test_a_command_is_not_waited_for_longer_than_it_runs() -> None:
    """A process that another thread forks meanwhile inherits the pipe, and keeps its end open."""
    began_s = time.monotonic()
    output = _run_without_sigchld(["/bin/sh", "-c", "sleep 20 & echo 7"], stdout=subprocess.PIPE)

    assert output == b"7\n"
    assert time.monotonic() - began_s < 10
