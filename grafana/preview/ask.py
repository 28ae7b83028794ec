"""What a dashboard's panels answer: the variables filled in, Prometheus asked."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from grafana.preview.madeup import RUN as MADE_UP
from grafana.preview.prometheus import REAL_RUN

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from grafana.preview.prometheus import Store

RATE_INTERVAL: Final = "1m"
RUNS: Final = (REAL_RUN, MADE_UP)
"""The real run; where it has nothing, the made-up one."""


class Span(NamedTuple):
    """The time that is shown.

    Attributes:
        start_s: Unix time.
        end_s: Unix time.
        step_s: between two points.
    """

    start_s: float
    end_s: float
    step_s: float


class Answer(NamedTuple):
    """What one query of a panel gave.

    Attributes:
        target: the query, from the JSON.
        series: as Prometheus returned them.
        run: which run gave it.
    """

    target: Mapping[str, Any]
    series: list[dict[str, Any]]
    run: str


def filled_in(expr: str, run: str, **chosen: str) -> str:
    """The expression as Grafana would send it; what was not chosen is All."""
    values = {"run": run, "phase": "train", "loader": ".*", "rank": ".*", "team": ".*", **chosen}
    values |= {"__rate_interval": RATE_INTERVAL, "__range": "1h"}
    return re.sub(r"\$\{?(\w+)\}?", lambda found: values.get(found[1], found[0]), expr)


def panels(path: Path) -> Iterator[dict[str, Any]]:
    """The panels of a dashboard file that ask something."""
    for panel in json.loads(path.read_text(encoding="utf-8"))["panels"]:
        if panel.get("targets"):
            yield panel


def answers(
    store: Store, panel: Mapping[str, Any], span: Span, runs: Sequence[str] = RUNS, **chosen: str
) -> list[Answer]:
    """Of the first run that has any."""
    found: list[Answer] = []
    for run in runs:
        found = [ask(store, target, span, run, **chosen) for target in panel["targets"]]
        if any(answer.series for answer in found):
            return found
        chosen.pop("loader", None)
    return found


def ask(store: Store, target: Mapping[str, Any], span: Span, run: str, **chosen: str) -> Answer:
    """One query.

    Raises:
        ValueError: Prometheus does not understand it.
    """
    expr = filled_in(target["expr"], run, **chosen)
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
    return Answer(target, data["result"], run)


def name_of(answer: Answer, series: Mapping[str, Any]) -> str:
    """What the legend says."""
    legend = answer.target.get("legendFormat") or "__auto"
    labels = series["metric"]
    if legend == "__auto":
        return ", ".join(f"{key}={value}" for key, value in labels.items() if key != "__name__") or "value"
    return re.sub(r"{{\s*(\w+)\s*}}", lambda found: labels.get(found[1], ""), legend).strip()
