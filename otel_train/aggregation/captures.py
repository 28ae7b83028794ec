"""Captures that are over, counted."""

from __future__ import annotations

from collections import Counter, deque
from typing import TYPE_CHECKING, Any, NamedTuple

from otel_train.aggregation.histogram import Histograms
from otel_train.clock import NS_PER_S

if TYPE_CHECKING:
    from collections.abc import Mapping

TRIGGERS = ("schedule", "on_demand", "slow_step", "alert", "signal")
CAPTURES_FOLDER = "captures"
"""Of a run directory."""

RECENT = 8
"""Captures that a summary names."""


class Capture(NamedTuple):
    """One capture that is over.

    Attributes:
        trigger: what armed it.
        within_ns: first and last instant, on the monotonic clock.
        steps: number of the first step in it and of the last; -1 where there is none.
        file: path of the trace; "" where there is none.
        bytes: its size.
        error: ``refused``, ``short``, ``profiler``, ``disk`` or ``size``; "" when all is well.
        problem: the same in words.
        seconds: from its first step to the file.
        finding: the claim of its leading finding; "" for none.
        record: what lies beside the trace.
    """

    trigger: str
    within_ns: tuple[int, int]
    steps: tuple[int, int]
    file: str
    bytes: int
    error: str
    problem: str
    seconds: float
    finding: str
    record: Mapping[str, Any] = {}

    @property
    def rule(self) -> str:
        """Name of the rule behind the finding; "" for none."""
        finding = self.record.get("finding")
        return str(finding.get("name", "")) if isinstance(finding, dict) else ""

    @property
    def alert(self) -> str:
        """Name of the alert that armed it; "" where none did."""
        return str(self.record.get("alert") or "")

    @property
    def ended_s(self) -> float:
        """Unix time when it ended."""
        return float(self.record.get("ended_unix_ns") or 0) / NS_PER_S


class Captures:
    """What the metrics say of captures."""

    def __init__(self) -> None:
        self.active = False
        self.counts: Counter[tuple[str, str]] = Counter()
        self.durations = Histograms(size=len(TRIGGERS))
        self.bytes = 0
        self.recent: deque[Capture] = deque(maxlen=RECENT)
        self.newest: Capture | None = None
        """The last one that has a file."""

    def add(self, capture: Capture) -> None:
        """One is over."""
        self.recent.append(capture)
        self.counts[capture.trigger, capture.error] += 1
        if capture.file:
            self.bytes, self.newest = capture.bytes, capture
            self.durations.add([TRIGGERS.index(capture.trigger)], [int(capture.seconds * NS_PER_S)])

    def documents(self) -> list[dict[str, Any]]:
        """The last ones, the oldest first, as a summary names them."""
        return [
            {
                "file": capture.file or None, "trigger": capture.trigger, "steps": list(capture.steps),
                "problem": capture.problem, "finding": capture.finding,
            }
            for capture in self.recent
        ]  # fmt: skip

    def of_trigger(self) -> Mapping[tuple[str, str], int]:
        """Captures by (trigger, error); each trigger is there, with 0 where there was none."""
        return {**dict.fromkeys(((trigger, "") for trigger in TRIGGERS), 0), **self.counts}
