"""The result of a profiler capture, made by the rank and counted by the agent."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from otel_train.datamodel import NS_PER_S

if TYPE_CHECKING:
    from collections.abc import Mapping

TRIGGERS = ("schedule", "on_demand", "slow_step", "alert", "signal")
CAPTURES_FOLDER = "captures"
"""Below the run directory."""


class Capture(NamedTuple):
    """One finished capture.

    Attributes:
        trigger: what armed it.
        within_ns: first and last instant, on the monotonic clock.
        steps: numbers of its first and last step; -1 without steps.
        file: path of the trace; "" without a trace.
        bytes: size of the trace.
        error: ``refused``, ``short``, ``profiler``, ``disk`` or ``size``; "" if it succeeded.
        problem: the error as a sentence.
        seconds: from its first step until the file was written.
        finding: summary of its leading finding; "" without one.
        metadata: its metadata document.
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
    metadata: Mapping[str, Any] = {}

    @property
    def rule(self) -> str:
        """Name of the rule behind the finding; "" without a finding."""
        finding = self.metadata.get("finding")
        return str(finding.get("name", "")) if isinstance(finding, dict) else ""

    @property
    def alert(self) -> str:
        """Name of the alert that armed it; "" if none did."""
        return str(self.metadata.get("alert") or "")

    @property
    def ended_s(self) -> float:
        """Unix time of its end."""
        return float(self.metadata.get("ended_unix_ns") or 0) / NS_PER_S
