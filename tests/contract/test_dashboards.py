"""Dashboards ask for what is published, say what they show, and are fresh."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("grafana_foundation_sdk", reason="dashboards are built with the dev extra")

from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.dashboard import Dashboard

from deploy.prometheus import build as rules
from deploy.prometheus.recording import NATIVE, histogram_groups, plain_groups
from grafana.build import BOARDS, JSON
from grafana.dashboards.board import ANNOTATIONS, Board
from grafana.preview.ask import filled_in
from tests.support.promql import asked, impossible, published

ROOT = Path(__file__).parents[2]
RECORDED = {rule.name for group in (*histogram_groups(NATIVE), *plain_groups()) for rule in group.rules}
PANELS = {
    f"{board.file}: {panel.title}": panel for board in BOARDS for row in board.rows for panel in row.panels
}
EXPRESSIONS = {
    f"{name} #{number}": query.expr
    for name, panel in PANELS.items()
    for number, query in enumerate(panel.queries)
}
EXPRESSIONS |= {f"annotation {name}": expr for name, _, _, expr in ANNOTATIONS}


def document(board: Board) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((JSON / f"{board.file}.json").read_text(encoding="utf-8"))
    return loaded


@pytest.mark.parametrize("name", EXPRESSIONS)
def test_a_panel_asks_for_what_is_published(name: str) -> None:
    """A misspelt name is an empty panel, and an empty panel looks like good news."""
    for selector in asked(filled_in(EXPRESSIONS[name], "r")):
        if selector.metric not in RECORDED and selector.metric:
            labels = published(selector.metric)
            assert labels is not None, f"{selector.metric} is in no catalogue"
            assert set(selector.labels) <= labels
            assert impossible(selector) == {}


@pytest.mark.parametrize("name", PANELS)
def test_a_panel_says_what_it_shows_and_when_to_worry(name: str) -> None:
    """Who reads it at night did not build it."""
    panel = PANELS[name]

    assert panel.unit
    assert panel.says.endswith((".", ")"))
    assert panel.bad
    assert not panel.bad.endswith(".")
    assert "Bad when" in panel.description
    assert panel.runbook in {"", *(alert.name for alert in rules.ALERTS)}


@pytest.mark.parametrize("board", BOARDS, ids=lambda board: board.file)
def test_a_dashboard_is_what_grafana_reads(board: Board) -> None:
    """The types are Grafana's own: a field it does not know would get lost on the way through them."""
    made = document(board)
    again = json.loads(json.dumps(Dashboard.from_json(made), cls=JSONEncoder))

    assert again == made
    assert made["uid"] == board.uid
    assert {"run", "datasource", "loader", "rank"} <= {v["name"] for v in made["templating"]["list"]}
    names = {annotation["name"] for annotation in made["annotations"]["list"]}
    assert names >= {"Alerts", "Captures", "Checkpoints", "Restarts"}


@pytest.mark.parametrize("board", BOARDS, ids=lambda board: board.file)
def test_a_dashboard_is_laid_out_without_overlap(board: Board) -> None:
    """Grafana moves what overlaps, and the rest with it."""
    taken: dict[tuple[int, int], str] = {}
    panels = document(board)["panels"]
    for panel in panels:
        at = panel["gridPos"]
        assert at["x"] + at["w"] <= 24
        for x in range(at["x"], at["x"] + at["w"]):
            for y in range(at["y"], at["y"] + at["h"]):
                assert (x, y) not in taken, f"{panel['title']} lies on {taken[x, y]}"
                taken[x, y] = panel["title"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    assert sum(panel["type"] != "row" for panel in panels) <= 24


def test_an_exemplar_leads_to_its_trace() -> None:
    """A slow point that leads nowhere is a picture, not a tool."""
    provisioned = (ROOT / "grafana" / "provisioning" / "datasources" / "datasources.yaml").read_text()
    exemplars = [query for panel in PANELS.values() for query in panel.queries if query.exemplar]

    assert exemplars
    assert all(re.search(r"_bucket\{", query.expr) for query in exemplars)
    assert "exemplarTraceIdDestinations" in provisioned
    assert "trace_id" in provisioned


def test_the_written_dashboards_are_fresh() -> None:
    """What is provisioned must be what was reviewed."""
    checked = subprocess.run(
        [sys.executable, "-m", "grafana.build", "--check"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )

    assert checked.returncode == 0, checked.stderr
