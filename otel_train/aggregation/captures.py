"""What is known of a capture that is over: the rank makes it, the agent counts it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from otel_train.datamodel import NS_PER_S

if TYPE_CHECKING:
    from collections.abc import Mapping

TRIGGERS = ("schedule", "on_demand", "slow_step", "alert", "signal")
CAPTURES_FOLDER = "captures"
"""Of a run directory."""


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
