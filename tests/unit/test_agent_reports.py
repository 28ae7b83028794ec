"""Reports that the agent does not take."""

from __future__ import annotations

from array import array
from types import SimpleNamespace
from typing import Any

import pytest

from otel_train.agent.reports import MOST_UNSENT, ReportBuilder
from otel_train.instrumentation.logged_values import CacheSizes


def test_what_is_thrown_away_while_the_agent_takes_nothing_is_counted() -> None:
    """Logged values and operations; they are a drop of the telemetry, which an alert watches."""
    recording: Any = SimpleNamespace(values=SimpleNamespace(dropped=0), timers=SimpleNamespace(dropped=0))
    builder: Any = ReportBuilder(recording, SimpleNamespace(), CacheSizes())  # type: ignore[arg-type]
    made = iter([None, array("q", range(9)), *[array("q", range(3))] * MOST_UNSENT])
    builder.make = lambda **_: SimpleNamespace(logged_values=["loss", "lr"], operations=next(made))

    def refuse(_: Any) -> None:
        raise BlockingIOError

    for _ in range(MOST_UNSENT + 2):
        with pytest.raises(BlockingIOError):
            builder.send(refuse)

    assert recording.values.dropped == 4
    assert recording.timers.dropped == 3
