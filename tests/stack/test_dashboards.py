"""Every panel gets data from a real Prometheus that a real run feeds."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("grafana_foundation_sdk", reason="dashboards are built with the dev extra")

from collections.abc import Iterator

from grafana.build import BOARDS, JSON
from tests.support.dashboard_queries import Span, ask, filled_in, panels
from tests.support.prometheus_server import REAL_RUN, Store, Ways, filled, until
from tests.support.stack import program
from tests.support.synthetic_metrics import RUN as SYNTHETIC_RUN

pytestmark = [pytest.mark.stack, pytest.mark.timeout(900)]

LONG_ENOUGH_S = 100
"""Rules are evaluated every 30 s, and some ask others."""

NEEDS = {
    (board.file, panel.title): panel.needs for board in BOARDS for row in board.rows for panel in row.panels
}
PANELS = [(board.file, panel) for board in BOARDS for panel in panels(JSON / f"{board.file}.json")]
FROM_SYNTHETIC = {name for name, needs in NEEDS.items() if needs}
"""Panels on what a laptop does not have: fed by synthetic metrics under real names. All others by the run."""


@pytest.fixture(scope="module", params=["scraped", "pushed"])
def store(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    ways = Ways(Path(program("prometheus")), push=request.param == "pushed")
    with filled(tmp_path_factory.mktemp(request.param), ways, LONG_ENOUGH_S) as running:
        yield running


def span() -> Span:
    now = time.time()
    return Span(now - LONG_ENOUGH_S, now, 5)


def named(value: Any) -> str:
    return value if isinstance(value, str) else str(value["title"]).replace(" ", "-")


@pytest.mark.parametrize(("board", "panel"), PANELS, ids=named)
def test_a_panel_has_data(store: Store, board: str, panel: dict[str, Any]) -> None:
    """An empty panel looks like good news."""
    run = SYNTHETIC_RUN if (board, panel["title"]) in FROM_SYNTHETIC else REAL_RUN

    def found() -> bool:
        return any(ask(store, target, span(), run) for target in panel["targets"])

    until(found, 120)


@pytest.mark.parametrize(("board", "panel"), PANELS, ids=named)
def test_every_query_of_a_panel_is_understood(store: Store, board: str, panel: dict[str, Any]) -> None:
    """One that fails empties its panel, also where it is the second of two, and on the run without data."""
    for target in panel["targets"]:
        for run in (REAL_RUN, SYNTHETIC_RUN):
            ask(store, target, span(), run)


def test_the_slow_steps_lead_to_traces(store: Store) -> None:
    """Exemplars are the way from a graph to a trace."""
    expr = next(
        target["expr"]
        for board, panel in PANELS
        if board == "overview"
        for target in panel["targets"]
        if target.get("exemplar")
    )
    now = time.time()
    asked = store.ask(
        "query_exemplars", query=filled_in(expr, REAL_RUN), start=f"{now - 600:.0f}", end=f"{now + 60:.0f}"
    )

    assert any("trace_id" in entry["labels"] for series in asked for entry in series["exemplars"])


def test_no_rule_failed(store: Store) -> None:
    """Both forms of the histogram rules are loaded, and the one without data must be silent."""
    groups = store.ask("rules")["groups"]
    rules = [rule for group in groups for rule in group["rules"]]

    assert len(rules) > 100
    assert [(rule["name"], rule.get("lastError")) for rule in rules if rule["health"] == "err"] == []
