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
        keep: how long it goes on firing after it was last wrong; "" where it ends at once.
    """

    name: str
    expr: str
    hold: str
    severity: str
    summary: str
    description: str
    labels: tuple[tuple[str, str], ...] = ()
    keep: str = ""


class AlertGroup(NamedTuple):
    """Alerts about one subject.

    Attributes:
        name: unique among all files.
        alerts: in the order of the reference page.
    """

    name: str
    alerts: tuple[Alert, ...]


CAPTURED: Final = (("capture", "true"),)
"""The label with which a run that knows its Alertmanager captures: for what a trace of a few steps explains."""

RATIO_KEEP: Final = "10m"
"""Ratios and rates cross their limit again and again: one that comes back within this time is the same alert."""


def grown(metric: str, by: str, window: str, matchers: str = "") -> str:
    """What a counter of events has grown by, also where it was born above zero.

    ``increase`` sees nothing of a series that begins at 1. What was not there in the hour before the window is new
    as a whole; an hour, so that data that was missing for a while is not taken for a birth.
    """
    selector = f"{metric}{{{matchers}}}" if matchers else metric
    return (
        f"sum by ({by}) (\n"
        f"  ({selector} unless last_over_time({selector}[1h] offset {window}))\n"
        f"  or increase({selector}[{window}])\n"
        ") > 0"
    )


def by_carrier(expr: str, carrier: str) -> str:
    """The expression, its runs with the Collector that they came by, where one is known: when that is down it is muted."""
    return (
        f"(\n{expr.strip()}\n)\n* on (train_run_id) group_left (train_collector) {carrier}\n"
        f"or on (train_run_id)\n(\n{expr.strip()}\n)\n"
    )
