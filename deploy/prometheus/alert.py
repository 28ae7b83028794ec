"""What an alert consists of."""

from __future__ import annotations

from typing import Final, NamedTuple

CRITICAL: Final = "critical"
"""Somebody is called: work is being lost now."""

WARNING: Final = "warning"
"""Somebody looks in working hours."""

NONE: Final = "none"
"""Nobody looks; for machines."""


class Alert(NamedTuple):
    """One alert.

    Attributes:
        name: also the name of its runbook.
        expr: PromQL; true while something is wrong.
        hold: how long it must be wrong first.
        severity: who hears of it.
        summary: one sentence with the figures; Prometheus' template language.
        description: what that means, and what it does not.
        labels: more labels, for routing.
    """

    name: str
    expr: str
    hold: str
    severity: str
    summary: str
    description: str
    labels: tuple[tuple[str, str], ...] = ()


class AlertGroup(NamedTuple):
    """Alerts about one subject.

    Attributes:
        name: unique among all files.
        alerts: in the order of the reference page.
    """

    name: str
    alerts: tuple[Alert, ...]
