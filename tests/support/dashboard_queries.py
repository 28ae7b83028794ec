"""Sends the queries of a dashboard's panels to Prometheus, with the variables filled in."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from tests.support.prometheus_server import Store

RATE_INTERVAL: Final = "1m"


class Span(NamedTuple):
    """The time range of a query.

    Attributes:
        start_s: Unix time.
        end_s: Unix time.
        step_s: between two points.
    """

    start_s: float
    end_s: float
    step_s: float


def filled_in(expr: str, run: str, **chosen: str) -> str:
    """The expression as Grafana would send it; what was not chosen is All."""
    values = {"run": run, "phase": "train", "loader": ".*", "rank": ".*", "team": ".*", **chosen}
    values |= {"__rate_interval": RATE_INTERVAL, "__range": "1h"}
    return re.sub(r"\$\{?(\w+)\}?", lambda found: values.get(found[1], found[0]), expr)


def panels(path: Path) -> Iterator[dict[str, Any]]:
    """The panels of a dashboard file that have queries."""
    for panel in json.loads(path.read_text(encoding="utf-8"))["panels"]:
        if panel.get("targets"):
            yield panel


def ask(store: Store, target: Mapping[str, Any], span: Span, run: str) -> list[dict[str, Any]]:
    """The series that one query of a panel returns.

    Raises:
        ValueError: Prometheus rejects the query.
    """
    expr = filled_in(target["expr"], run)
    if target.get("instant"):
        data = store.ask("query", query=expr, time=f"{span.end_s:.3f}")
    else:
        data = store.ask(
            "query_range",
            query=expr,
            start=f"{span.start_s:.3f}",
            end=f"{span.end_s:.3f}",
            step=f"{span.step_s:g}",
        )
    series: list[dict[str, Any]] = data["result"]
    return series
